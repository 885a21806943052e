"""The explorer as one HTML file: photos, attention and tokens of a model, and the front end. No Python, no network.

The file has everything in it that its page shows, as one gzipped message (`front.pack`) in base64. The scripts of
this folder compute from it what Python computes in a notebook. Shapes: H heads, T tokens, K head width, D width.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import gzip
import hashlib
import html
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitlens import files, texts
from vitlens.attention import SINK_TIMES_MEDIAN, SINK_TIMES_UNIFORM
from vitlens.images import ImageError, Readable, named_sources
from vitlens.models import scores, weights_digest
from vitlens.plot.scales import SIGNED
from vitlens.recorder.forward import eval_mode
from vitlens.recorder.layer import Layer
from vitlens.recorder.supported import UnsupportedModelError, family
from vitlens.stream import read_each
from vitlens_explorer import details, front
from vitlens_explorer.controls import Control
from vitlens_explorer.drawing import SIDE, png, still
from vitlens_explorer.explorer import BARS, LOOKING, Explorer
from vitlens_explorer.lanes import Check, never_cancel
from vitlens_explorer.panels import MAPS
from vitlens_explorer.photographs import READOUT, Forward, Photograph
from vitlens_explorer.photos import named_right
from vitlens_explorer.targets import PREDICTED
from vitlens_explorer.views import (
    EVERY,
    INSIDE,
    LONGEST,
    Choice,
    Map,
    View,
    contributions_of,
    curves,
    order_of_covering,
    query_row,
    score,
    supported_views,
    view_control,
)
from vitlens_explorer.words import WORDS, say

LIMIT = 30 * 10**6
"""Largest number of bytes of a file."""
ERROR = 2e-3
"""Largest error of a stored attention weight, as a share of the largest weight of its query on a patch."""
ABSENT = {"whole", "another", "against", "off", "way"}
"""Controls that a page does not have, because they need a forward."""
SCRIPTED_VIEWS = {
    "attention",
    "received",
    "rollout",
    "similarity",
    "components",
    "norms",
    "lens",
    "contributions",
}
"""Views that `maps.js` draws, the keys of its `MAPS`. Pages leave other views out."""
IN_PAGE = Path(__file__).parent
PAGE_POLICY = (
    "default-src 'none'; script-src 'sha256-{digest}'{more}; style-src 'unsafe-inline'; img-src blob: data:; "
    "base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy: the page runs its own script and loads nothing."""
PAGE_HTML = (
    '<!DOCTYPE html><html lang="en" class="vitlens-page"><meta charset="utf-8">'
    '<meta http-equiv="Content-Security-Policy" content="{policy}">'
    '<meta name="viewport" content="width=device-width"><meta name="generator" content="vitlens {version}">'
    '<meta name="description" content="{description}"><meta property="og:title" content="{title}">'
    '<meta property="og:description" content="{description}"><meta property="og:type" content="website">'
    "<title>{title}</title><style>{style}</style>"
    '<main id="page"><div class="opening"><p role="status">Opening …</p>{still}'
    "<noscript><p>{lead} The page needs scripts, which are off here.</p></noscript>"
    "</div></main><footer>{footer}{home}</footer>"
    '<script type="application/octet-stream" id="data">{data}</script><script type="module">{script}</script></html>\n'
)


def save_page(
    model: nn.Module,
    images: object,
    path: str | os.PathLike,
    *,
    size: tuple[int, int] | None = None,
    scores: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Path:
    """Write the explorer of some images as one HTML file that opens without Python and network, and return its path.

    The file contains the images as the model gets them, without their metadata. It has the quick views, for the five
    likeliest classes of each image. Other views and classes, uploads and switched-off heads need `explore`.

    >>> small = vitlens.load_model("test_vit", pretrained=False)
    >>> vitlens_explorer.save_page(small, {"cat": cat}, "page.html").stat().st_size < 1e6
    True

    images: an image, a folder, several images (by name or as paths), or None for a sample photograph. size: (height,
    width) of the input in pixels, for models that take several. scores: True to score the maps of all five classes by
    insertion and deletion, in about 2,000 forwards for an image. By default, only the maps of the likeliest class are
    scored, in about 400. progress: called with a text for each step, as in "3 of 42: cat.jpg: attention".

    Raises UnsupportedModelError for models that `capture` refuses and for attention with a bias for each pair of
    tokens, ValueError if the file would exceed 30 MB, and ImageError for unreadable images.
    """
    page = explorer_of(model, images, size=size)
    return write_page(page, [*page.photographs], path, scores, progress)


def _photographs(images: object) -> dict[str, Photograph]:
    """Photographs by name, from an argument of `named_sources`. A single image from memory is called photo."""
    if images is None:
        return {}
    photographs = {}
    readable = Readable()
    for name, source in named_sources(images):
        try:
            photographs[name] = Photograph.read(source)
        except ImageError as error:
            readable.leave_out(source, error)
    readable.total(len(photographs))
    if not photographs:
        raise ImageError("Expected an image or several, got none.")
    if [*photographs] == ["image 1"]:
        return {"photo": photographs["image 1"]}
    return photographs


def explorer_of(
    model: nn.Module,
    images: object,
    *,
    size: tuple[int, int] | None = None,
    live: bool = False,
) -> Explorer:
    """An explorer of these images only, or of the first sample photograph.

    live: True for the sample photographs that the model names right, in place of the first one.
    """
    photographs = _photographs(images)
    if photographs:
        first = next(iter(photographs))
        page = Explorer(model, photographs[first].image, size=size)
        notes = photographs[first].note
        photographs[first] = replace(page.photograph, note=notes)  # the model has run on it
    else:
        page = Explorer(model, None, size=size)
        first = page.state["photograph"]
        photographs = {first: page.photographs[first]}
        if live:
            others = {name: Photograph(image) for name, image in named_right(model).items()}
            photographs = others | photographs if first in others else photographs | others
    page.state = page.state | {"photographs": photographs, "photograph": next(iter(photographs))}
    return page


def write_page(
    page: Explorer,
    names: Sequence[str],
    path: str | os.PathLike,
    scores: bool = False,
    progress: Callable[[str], None] = lambda step: None,
    check: Check = never_cancel,
) -> Path:
    """Write some photographs of an explorer's page in its current state, as `save_page` does. check: called before
    forwards."""
    path = Path(path)
    files.check_writable(path.parent, "The folder of the page")
    before = page.state
    try:
        content = _content(page, names, scores, progress, check)
    finally:
        page.state = before
    script = front.join_modules(IN_PAGE / "saved.js")
    text = document(content, names, script, still=still_of(page))
    files.write(path, text)
    return path


def photos_sentence(names: Sequence[str]) -> str:
    """Sentence about the photos in a file."""
    photos = "the photo" if len(names) == 1 else f"{len(names)} photos"
    return f"This file contains {photos}: {', '.join(map(texts.shown, names))}."


def still_of(page: Explorer) -> str:
    """HTML of a still image of an explorer, for previews of files and browsers without scripts."""
    first = copy.copy(page).first(never_cancel)  # the page itself goes on as it is
    note = "A still image, until the page has opened."
    return still(first.frame, first.pictures, note=note)["text/html"]


def home_link() -> str:
    """HTML of a link to the project, or "" if this installation names no address."""
    try:
        addresses = metadata("vitlens").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    for line in addresses:
        _, _, address = line.partition(", ")
        if address.startswith("https://"):
            return f' <a href="{html.escape(address)}">{html.escape(address)}</a>'
    return ""


def document(
    content: dict, names: Sequence[str], script: str, more: str = "", still: str = ""
) -> str:
    """A page as HTML, with its content and the script that opens it.

    names: names of the photos. more: further sources of scripts in the page's policy, such as " 'wasm-unsafe-eval'".
    still: HTML that is shown until the scripts run. The `model` of a page without a model is "".
    """
    name = content["model"]
    title = f"{', '.join(map(texts.shown, names))} · {name}"
    footer = f"This file contains {name}, weights {content['hash']}. "
    if not name:
        title = say("blank")
        footer = "This file contains no model. "
    footer += f"Written by {content['versions']}. {photos_sentence(names)}"
    about = {
        "title": title,
        "description": f"{say('headline')}: {title}. {say('lead')}",
        "lead": say("lead") + (" This is a still image of it." if still else ""),
        "footer": footer,
    }
    return as_html(content, script, about, more=more, still=still)


def as_html(
    content: dict,
    script: str,
    about: Mapping[str, str],
    *,
    style: str = "",
    more: str = "",
    still: str = "",
) -> str:
    """One HTML file of a content, as `front.pack` takes it, and the script that opens it.

    about: texts of the page by name: title, description, lead (shown where scripts are off) and footer. style: rules
    after those of the front end. more, still: as for `document`. Raises ValueError for a script that ends its element.
    """
    from vitlens import __version__

    if "</script" in script.lower() or "<!--" in script:
        raise ValueError(
            "A script of the page contains </script or <!--, which would end it. Write it otherwise."
        )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = gzip.compress(front.pack("page", content), 6, mtime=0)
    escaped = {name: html.escape(text) for name, text in about.items()}
    return PAGE_HTML.format(
        policy=PAGE_POLICY.format(digest=digest, more=more),
        version=__version__,
        still=still,
        home=home_link(),
        style=front.style() + style,
        data=base64.b64encode(data).decode(),
        script=script,
        **escaped,
    )


@dataclass
class Steps:
    """Counter of the steps of a page. `report` is called with the number, the total and the name of each.

    >>> Steps(print, total=2)("attention")
    1 of 2: attention
    """

    report: Callable[[str], None]
    total: int
    done: int = 0

    def __call__(self, name: str) -> None:
        self.done += 1
        self.report(f"{self.done} of {self.total}: {name}")


def _step_count(forward: Forward, scores: bool) -> int:
    """Number of steps of a photograph, if no view fails."""
    views = supported_views(forward)
    targets = len(forward.likeliest[:BARS])
    methods = len(_methods(views))
    scored = targets if scores else 1
    contributions = targets if "contributions" in views else 0
    return 1 + contributions + targets * methods + scored


def _methods(views: Mapping[str, View]) -> dict[str, View]:
    """The views that explain a class in one backward."""
    return {name: view for name, view in views.items() if view.attributes and not view.slow}


def _content(
    page: Explorer,
    names: Sequence[str],
    scores: bool,
    progress: Callable[[str], None],
    check: Check,
) -> dict:
    """Everything in a page: the records of its photographs, and the words, views and controls of the explorer."""
    records = []
    steps = Steps(progress, len(names) * _step_count(page.forward, scores))
    for name in names:
        page.state = page.state | {"photograph": name}
        record = _record(name, page.forward, page.note, scores, steps, check)
        record["tour"], _ = page.look_up({"ask": "tour"}, never_cancel)
        records.append(record)
    left_out = _leave_out_layers(records)
    views = {
        name: view
        for name, view in supported_views(page.forward).items()
        if _has_view(records[0], name, view, left_out)
    }
    numbers = sorted(_class_numbers(records))
    about = say("page")
    if left_out:
        about += say("left out", layers=", ".join(map(str, left_out)))
    return describe_explorer(page, names, views, left_out) | {
        "records": records,
        "about": about,
        "labels": {number: page.forward.label(number) for number in numbers},
        "names": {number: page.forward.full(number) for number in numbers},
    }


def _has_view(record: dict, name: str, view: View, left_out: Sequence[int]) -> bool:
    """True if a page can draw a view from a record. left_out: numbers of its missing layers."""
    if view.attributes:
        return name in record["maps"]
    if name not in SCRIPTED_VIEWS:
        return False
    if name in INSIDE:
        return bool(record[name])
    if name == "rollout":  # needs all layers
        return not left_out
    return True


def _class_numbers(records: list[dict]) -> set[int]:
    """All classes that a page names."""
    numbers = set()
    for record in records:
        numbers.update(record["likeliest"])
        for lens in filter(None, record["lens"]):
            numbers.update(lens["classes"])
    return numbers


def describe_explorer(
    page: Explorer,
    names: Sequence[str],
    views: Mapping[str, View],
    left_out: Sequence[int] = (),
    absent: Set[str] = ABSENT,
) -> dict:
    """The words, views and controls of an explorer for the scripts of a page. The state of `page` changes.

    left_out, absent: layers and controls that the page does not have.
    """
    page.state = page.state | {
        "photograph": names[0],
        "off": (),
        "target": PREDICTED,
        "whole": False,
    }
    state = page.state
    forward = page.forward
    controls: dict[str, list[dict]] = {}
    start = {}
    for name in views:
        page.state = state | {"view": name}
        controls[name] = []
        for control in page.make_controls():
            if control.name not in absent:
                limited = _limit_choices(control, names, views, left_out, "off" not in absent)
                controls[name].append(vars(limited))
                start[control.name] = state[control.name]
    if start["view"] not in views:
        start["view"] = next(iter(views))
    layers = set(range(len(forward.attn))) - set(left_out)
    start["layer"] = min(layers, key=lambda layer: abs(layer - start["layer"]))
    fields = (
        "title",
        "group",
        "entry",
        "query",
        "head",
        "layered",
        "explains",
        "contrasts",
        "similar",
        "plain",
    )
    described = {}
    for name, view in views.items():
        described[name] = {field: getattr(view, field) for field in fields}
    return {
        "words": WORDS,
        "controls": controls,
        "state": start,
        "tables": tables(),
        "views": described,
        "model": forward.name,
        "hash": weights_digest(page.model),
        "versions": versions(),
    }


def grid_of(forward: Forward) -> dict:
    """The token grid of a forward for the scripts of a page."""
    grid = forward.grid
    readout = None
    if grid.readout is not None:
        readout = array(query_row(forward, READOUT), exact=True)
    return {
        "rows": grid.rows,
        "cols": grid.cols,
        "prefix": list(forward.prefix),
        "patch": grid.patch,
        "image": grid.image,
        "reads": forward.readout,
        "uniform": grid.uniform_distance(),
        "readout": readout,
    }


def _leave_out_layers(records: list[dict]) -> list[int]:
    """Leave out layers of the records until they fit into a file, and return the numbers of these layers. Raises
    ValueError if one layer is too large."""
    parts = []  # lists with an item for each layer
    for record in records:
        parts += [record["layers"], record["tokens"]]
        if record["lens"]:
            parts.append(record["lens"])
    layers = range(len(records[0]["layers"]))
    sizes = np.array([_size([part[layer] for part in parts]) for layer in layers])
    total = _size(records)
    content = (LIMIT - 10**6) * 3 / 4  # base64 writes 3 bytes as 4; 1 MB for the scripts
    room = content - (total - sizes.sum())
    for step in range(1, len(layers) + 1):
        kept = layers[::-step]  # the last layer, and every `step`-th before it
        if sizes[list(kept)].sum() <= room:
            left_out = [layer for layer in layers if layer not in kept]
            for part in parts:
                for layer in left_out:
                    part[layer] = None
            return left_out
    megabytes = total * 4 / 3 / 1e6
    with_one_layer = sizes.max() * 4 / 3 / 1e6
    raise ValueError(
        f"The page would have {megabytes:,.0f} MB, over the limit of {LIMIT / 1e6:.0f} MB, and "
        f"{with_one_layer:,.0f} MB with one layer. Give fewer images or a smaller size."
    )


def _size(value: object) -> int:
    """Number of bytes of all arrays in lists and dictionaries."""
    if isinstance(value, dict):
        return sum(_size(item) for item in value.values())
    if isinstance(value, list):
        return sum(_size(item) for item in value)
    if isinstance(value, bytes):
        return len(value)
    return 0


def _limit_choices(
    control: Control,
    names: Sequence[str],
    views: Mapping[str, View],
    left_out: Sequence[int],
    switches: bool,
) -> Control:
    """A control with the choices that the file has. switches: True if heads can be switched off."""
    if control.name == "photograph":
        return replace(control, options=tuple((name, name) for name in names))
    if control.name == "view":
        return view_control(control.value, views, switches)
    if control.name == "layer" and left_out:
        kept = [layer for layer in range(int(control.high) + 1) if layer not in left_out]
        return replace(control, options=tuple((str(layer), layer) for layer in kept))
    return control


def _record(
    name: str,
    forward: Forward,
    note: str,
    scores: bool,
    progress: Callable[[str], None],
    check: Check,
) -> dict:
    """The forward of a photograph for the scripts."""
    views = supported_views(forward)
    targets = forward.likeliest[:BARS]
    progress(f"{name}: attention")
    record = {
        "name": name,
        "picture": forward.png,
        "about": note,
        "gated": forward.gated,
        "outputs": forward.outputs,
        "heads": forward.heads,
        "likeliest": targets,
        "maps": {},
        "contributions": {},
        "lens": [],
        "layers": [_layer(forward, layer) for layer in forward.attn],
        "tokens": [array(tokens[0]) for tokens in forward.tokens],
        "logits": array(forward.logits, exact=True),
        "grid": grid_of(forward),
        "streams": _streams(forward),
    }
    if "lens" in views:
        record["lens"] = [_lens(forward, tokens, targets) for tokens in forward.tokens]
    if "contributions" in views:
        for target in targets:
            progress(f"{name}: contributions to “{forward.label(target)}”")
            choice = Choice(target=target, head=EVERY)
            try:
                made = views["contributions"].make(forward, choice, check)
            except (UnsupportedModelError, ValueError):  # the view is left out
                break
            parts, written = contributions_of(forward, target, None, check)
            record["contributions"][target] = made.beside["parts"] | {
                "written": array(written, exact=True),
                "logit": parts.logits[0].item(),
            }
    methods = _methods(views)

    def report(step: str) -> None:
        progress(f"{name}: {step}")

    for target in targets:
        longest = 0.0  # not scored
        if scores:
            longest = math.inf
        elif target == targets[0]:
            longest = LONGEST
        maps = _explain(forward, target, methods, longest, report, check)
        for method, stored in maps.items():
            record["maps"].setdefault(method, {})[target] = stored
    return record


@torch.inference_mode()
def _layer(forward: Forward, layer: Layer) -> dict:
    """Queries and keys of a layer, in half precision if no attention weight changes by more than `ERROR`. The mean key
    is subtracted, which changes no softmax. Raises UnsupportedModelError for attention with a mask."""
    if layer.mask is not None:
        raise UnsupportedModelError(
            f"{forward.name} adds a bias to each pair of tokens in {layer.name}, which a page without Python does not "
            "hold. Use `vitlens app`."
        )
    q, k = layer.q.float() * layer.scale, layer.k.float()
    mean = k.mean(2, keepdim=True)
    half = replace(layer, q=q.half().float(), k=(k - mean).half().float(), scale=1.0)
    prefix = forward.grid.prefix
    error = 0.0
    for (_, weights), (_, stored) in zip(layer.rows(256), half.rows(256), strict=True):
        on_patches = weights[..., prefix:]
        difference = (on_patches - stored[..., prefix:]).abs()
        relative = difference.amax(-1) / on_patches.amax(-1)
        error = max(error, relative.nan_to_num(torch.inf).max().item())
    exact = error > ERROR
    return {
        "q": array(q[0], exact),
        "k": array((k - mean)[0], exact),
        "mean": mean[0].flatten().tolist(),
        "heads": q.shape[1],
        "scale": layer.scale,
    }


def _streams(forward: Forward) -> dict:
    """The model's input and `details.streams`, from which the scripts make the tour of any patch. `seen` is None if the
    picture of the record is the input, and not enlarged."""
    numbers = details.streams(forward)
    places = numbers["positions"]
    enlarged = 2 * max(forward.pixels.shape[:2]) <= SIDE
    return {
        "seen": png(Image.fromarray(forward.pixels), level=9) if enlarged else None,
        "tokens": array(numbers["tokens"]),
        "positions": None if places is None else array(places),
        "lengths": array(numbers["lengths"]),
        "added": array(numbers["added"]),
        "parts": numbers["added"].shape[-1],
        "channels": numbers["channels"],
        "table": numbers["table"],
    }


def array(values: Tensor, exact: bool = False) -> dict:
    """Numbers for `decodeFloats` in numbers.js, in half precision, or in single if `exact` or out of its range."""
    values = values.detach().float().cpu()
    single = exact or not values.half().isfinite().all()
    kind = "f4" if single else "f2"
    return {"type": kind, "data": values.numpy().astype(f"<{kind}").tobytes()}


@torch.inference_mode()
def _lens(forward: Forward, tokens: Tensor, targets: Sequence[int]) -> dict:
    """The raw lens after a layer, with shares of the classes.

    classes, shares: the likeliest class and its share, of the read-out and then of each token. of: shares of each
    target on the patches.
    """
    model = forward.model
    with eval_mode(model):
        of_tokens = scores(model, read_each(model, tokens)[0]).float().cpu()
        of_readout = scores(model, family(model).head(tokens)).float().cpu()
    shares, classes = torch.cat([of_readout, of_tokens]).max(-1)
    of_patches = of_tokens[forward.grid.prefix :]
    of = {target: array(of_patches[:, target], exact=True) for target in targets}
    return {"classes": classes.tolist(), "shares": array(shares, exact=True), "of": of}


def _explain(
    forward: Forward,
    target: int,
    views: Mapping[str, View],
    longest: float,
    progress: Callable[[str], None],
    check: Check,
) -> dict[str, dict]:
    """The maps of a class by view, with scores that take at most `longest` seconds. Views that fail are left out."""
    choice = Choice(target=target)
    made: dict[str, Map] = {}
    for name, view in views.items():
        progress(f"{view.entry} for “{forward.label(target)}”")
        with contextlib.suppress(UnsupportedModelError, ValueError):
            made[name] = view.make(forward, choice, check)
    scored = dict.fromkeys(made, {"words": say("unscored")})
    if longest and made:
        progress(f"scores for “{forward.label(target)}”")
        scored = _score_maps(forward, choice, made, longest, check)
    maps = {}
    for name, shown in made.items():
        maps[name] = {
            "values": array(torch.from_numpy(shown.values), exact=True),
            "words": shown.words,
            "title": shown.title,
            "unit": shown.unit,
            "score": {"title": say("trust")} | scored[name],
        }
    return maps


def _score_maps(
    forward: Forward, choice: Choice, maps: Mapping[str, Map], longest: float, check: Check
) -> dict[str, dict]:
    """Score of each map, or a message if scores would take more than `longest` seconds."""
    random = curves(forward, choice, None, check, longest)
    if isinstance(random, str):
        return dict.fromkeys(maps, {"words": say("page too long")})
    stacked = torch.from_numpy(np.stack([shown.values for shown in maps.values()]))
    own = curves(forward, choice, stacked, check)
    scored = {}
    for k, (name, shown) in enumerate(maps.items()):
        covering = order_of_covering(forward, choice, shown.values)
        scored[name] = covering | score(forward, choice, own[:, k : k + 1], random)
    return scored


def tables() -> dict:
    """Color tables (256, 3), and the rules of `scale_of`, `translucent` and `sinks`."""
    maps = {}
    for name in MAPS:
        colors = mpl.colormaps[name](np.arange(256))[:, :3] * 255
        maps[name] = colors.round().astype(np.uint8).tobytes()
    return {
        "maps": maps,
        "plain": "viridis",
        "signed": "RdBu_r",
        "least": SIGNED,
        "sink_times_median": SINK_TIMES_MEDIAN,
        "sink_times_uniform": SINK_TIMES_UNIFORM,
        "looking": LOOKING,
    }


def versions() -> str:
    """Versions of the libraries that made a page."""
    import timm

    from vitlens import __version__

    return f"vitlens {__version__}, torch {torch.__version__}, timm {timm.__version__}"
