"""The explorer as one HTML file: photos, attention and tokens of a model, and the front end. No Python, no network.

The file has everything in it that its page shows, as one gzipped message (`front.packed`) in base64. The scripts of
this folder compute from it what Python computes in a notebook. Shapes: H heads, T tokens, K head width, D width.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import html
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor, nn

from vitlens.data.files import check_writable
from vitlens.models import scores, weights_digest
from vitlens.plot.style import SIGNED
from vitlens.recorder.forward import eval_mode
from vitlens.recorder.layer import Layer
from vitlens.recorder.supported import UnsupportedModelError, family
from vitlens.stream import read_each
from vitlens_explorer import front
from vitlens_explorer.controls import READOUT, Control
from vitlens_explorer.explorer import BARS, LOOKING, Explorer
from vitlens_explorer.lanes import Check, never_cancel
from vitlens_explorer.panels import MAPS
from vitlens_explorer.photographs import Forward, Photograph
from vitlens_explorer.targets import PREDICTED
from vitlens_explorer.views import (
    EVEN,
    EVERY,
    INSIDE,
    LONGEST,
    SINK,
    Choice,
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
"""Controls that need a forward."""
HERE = Path(__file__).parent
SCRIPTS = ("numbers", "attention", "tokens", "maps", "details", "source", "saved")
"""Names of the scripts in the order in which they are joined, in one scope within that of the front end."""
POLICY = (
    "default-src 'none'; script-src 'sha256-{digest}'{more}; style-src 'unsafe-inline'; img-src blob: data:; "
    "base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy: the page runs its own script and loads nothing."""
PAGE = (
    '<!DOCTYPE html><html lang="en" class="vitlens-page"><meta charset="utf-8">'
    '<meta http-equiv="Content-Security-Policy" content="{policy}">'
    '<meta name="viewport" content="width=device-width"><meta name="generator" content="vitlens {version}">'
    "<title>{title}</title><style>{style}</style>"
    '<main id="page"><div class="opening"><p role="status">Opening …</p></div></main><footer>{footer}</footer>'
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
    likeliest classes of each image. Others, uploads and switched-off heads need `explore`.

    >>> small = vitlens.load_model("test_vit", pretrained=False)
    >>> vitlens_explorer.save_page(small, {"cat": cat}, "page.html").stat().st_size < 1e6
    True

    images: an argument of `load_image`, several by name, or None for a sample photograph. size: (height, width) of the
    input in pixels, for models that take several. scores: score the maps of all these classes by insertion and
    deletion, in about 2,000 forwards for an image. By default, those of the likeliest class, in about 400. progress:
    called with the name of each step. Raises UnsupportedModelError for models that `capture` refuses and for attention
    with a bias for each pair of tokens, ValueError if the file would exceed 30 MB, and ImageError for unreadable
    images.
    """
    if images is not None and not isinstance(images, Mapping):
        images = {Path(getattr(images, "filename", "") or "photo").name: images}
    page = explorer_of(model, images, size=size)
    return write_page(page, [*page.photographs], path, scores, progress)


def explorer_of(
    model: nn.Module,
    images: Mapping[str, object] | None,
    *,
    size: tuple[int, int] | None = None,
    samples: int = 1,
) -> Explorer:
    """An explorer of these images only, or of the first sample photographs."""
    first, *others = images or [None]
    page = Explorer(model, images[first] if images else None, size=size)
    photographs = dict([*page.photographs.items()][:samples])
    if images:  # the first one is read, and the model has run on it
        photographs = {first: page.photograph} | {
            name: Photograph.read(images[name]) for name in others
        }
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
    check_writable((path := Path(path)).parent, "The folder of the page")
    before = page.state
    try:
        content = _content(page, names, scores, progress, check)
    finally:
        page.state = before
    path.write_text(
        document(content, names, front.joined(HERE, SCRIPTS)), encoding="utf-8", newline="\n"
    )
    return path


def contains(names: Sequence[str]) -> str:
    """Sentence about the photos in a file."""
    return f"This file contains {'the photo' if len(names) == 1 else f'{len(names)} photos'}: {', '.join(names)}."


def document(content: dict, names: Sequence[str], script: str, more: str = "") -> str:
    """A page as HTML: its content, and the script that opens it, in a scope within that of the front end. names: of its
    photos. more: further sources of scripts in its policy, such as " 'wasm-unsafe-eval'"."""
    from vitlens import __version__

    title = f"{', '.join(names)} · {content['model']}"
    footer = f"{content['model']}, weights {content['hash']}. Written by {content['versions']}. {contains(names)}"
    script = f"{front.joined()}\n{{\n{script}\n}}\n"
    if "</script" in script.lower() or "<!--" in script:
        raise ValueError(
            "A script of the page contains </script or <!--, which would end it. Write it otherwise."
        )
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = gzip.compress(front.packed("page", content), 6, mtime=0)
    return PAGE.format(
        policy=POLICY.format(digest=own, more=more),
        version=__version__,
        title=html.escape(title),
        style=front.style(),
        footer=html.escape(footer),
        data=base64.b64encode(data).decode(),
        script=script,
    )


def _content(
    page: Explorer,
    names: Sequence[str],
    scores: bool,
    progress: Callable[[str], None],
    check: Check,
) -> dict:
    """Everything in a page: the records of its photographs, and the words, views and controls of the explorer."""
    records = []
    for name in names:
        page.state = page.state | {"photograph": name}
        records.append(_record(name, page.forward, page.photograph.note, scores, progress, check))
        records[-1]["tour"] = page.look_up({"ask": "tour"}, never_cancel)[0]
    left, first = _fit(records), records[0]
    views = {
        name: view
        for name, view in supported_views(page.forward).items()
        if not (
            view.attributes
            and name not in first["maps"]
            or name in INSIDE
            and not first[name]
            or name == "rollout"
            and left
        )
    }
    numbers = {k for record in records for k in record["likeliest"]}
    numbers |= {k for record in records for lens in record["lens"] if lens for k in lens["classes"]}
    about = say("page") + (say("left out", layers=", ".join(map(str, left))) if left else "")
    return described(page, names, views, left) | {
        "records": records,
        "about": about,
        "labels": {k: page.forward.label(k) for k in sorted(numbers)},
        "names": {k: page.forward.full(k) for k in sorted(numbers)},
    }


def described(
    page: Explorer,
    names: Sequence[str],
    views: Mapping[str, View],
    left: Sequence[int] = (),
    absent: Set[str] = ABSENT,
) -> dict:
    """The words, views and controls of an explorer for the scripts of a page. left, absent: layers and controls that
    the page does not have."""
    page.state = page.state | {
        "photograph": names[0],
        "off": (),
        "target": PREDICTED,
        "whole": False,
    }
    state, first, controls = page.state, page.forward, {}
    for name in views:
        page.state = state | {"view": name}
        controls[name] = [
            vars(_fitted(c, names, views, left))
            for c in page.make_controls()
            if c.name not in absent
        ]
    start = {c["name"]: state[c["name"]] for listed in controls.values() for c in listed}
    start["view"] = start["view"] if start["view"] in views else next(iter(views))
    start["layer"] = min(
        {*range(len(first.attn))} - {*left}, key=lambda layer: abs(layer - start["layer"])
    )
    fields = ("title", "group", "entry", "query", "head", "layered", "explains", "contrasts")
    return {
        "words": WORDS,
        "controls": controls,
        "state": start,
        "tables": tables(),
        "views": {
            name: {field: getattr(view, field) for field in fields} for name, view in views.items()
        },
        "model": first.name,
        "hash": weights_digest(page.model),
        "versions": versions(),
    }


def grid_of(forward: Forward) -> dict:
    """The token grid of a forward for the scripts of a page."""
    grid = forward.grid
    return {
        "rows": grid.rows,
        "cols": grid.cols,
        "prefix": list(forward.prefix),
        "patch": grid.patch,
        "image": grid.image,
        "reads": forward.readout,
        "uniform": grid.uniform_distance(),
        "readout": None if grid.readout is None else array(query_row(forward, READOUT), exact=True),
    }


def _fit(records: list[dict]) -> list[int]:
    """Leave out layers of the records until they fit into a file, and return the numbers of these layers. Raises
    ValueError if one layer is too large."""
    parts = ("layers", "tokens", "lens")
    sizes = np.sum(
        [
            [
                _size([record[part][k : k + 1] for part in parts])
                for k in range(len(record["layers"]))
            ]
            for record in records
        ],
        0,
    )
    room = (
        (LIMIT - 10**6) * 3 / 4 - _size(records) + sizes.sum()
    )  # base64 writes 3 bytes as 4; 1 MB for the scripts
    for step in range(1, len(sizes) + 1):
        kept = range(len(sizes) - 1, -1, -step)
        if sizes[[*kept]].sum() <= room:
            left = [layer for layer in range(len(sizes)) if layer not in kept]
            for record in records:
                for part in parts:
                    record[part] = [
                        None if k in left else each for k, each in enumerate(record[part])
                    ]
            return left
    raise ValueError(
        f"The page would have {(_size(records) * 4 / 3) / 1e6:,.0f} MB, over the limit of {LIMIT / 1e6:.0f} MB, and "
        f"{(sizes.max() * 4 / 3) / 1e6:,.0f} MB with one layer. Give fewer images or a smaller size."
    )


def _size(value: object) -> int:
    """Number of bytes of all arrays in lists and dictionaries."""
    if isinstance(value, dict):
        value = [*value.values()]
    return (
        sum(map(_size, value))
        if isinstance(value, list)
        else len(value)
        if isinstance(value, bytes)
        else 0
    )


def _fitted(
    control: Control, names: Sequence[str], views: Mapping[str, View], left: Sequence[int]
) -> Control:
    """A control with the choices that the file has."""
    if control.name == "photograph":
        return replace(control, options=tuple((name, name) for name in names))
    if control.name == "view":
        return view_control(control.value, views)
    if control.name == "layer" and left:
        kept = [layer for layer in range(int(control.high) + 1) if layer not in left]
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
    views, targets = supported_views(forward), forward.likeliest[:BARS]
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
    }
    if "lens" in views:
        record["lens"] = [_lens(forward, tokens, targets) for tokens in forward.tokens]
    for target in targets if "contributions" in views else ():
        progress(f"{name}: contributions to “{forward.label(target)}”")
        try:
            made = views["contributions"].make(forward, Choice(target=target, head=EVERY), check)
        except (UnsupportedModelError, ValueError):  # the view is left out
            break
        parts, written = contributions_of(forward, target, None, check)
        record["contributions"][target] = made.beside["parts"] | {
            "written": array(written, exact=True),
            "logit": parts.logits[0].item(),
        }
    explaining = {name: view for name, view in views.items() if view.attributes and not view.slow}
    for target in targets:
        longest = math.inf if scores else LONGEST if target == targets[0] else 0
        _explain(
            forward,
            target,
            explaining,
            record["maps"],
            longest,
            lambda step: progress(f"{name}: {step}"),
            check,
        )
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
    error, prefix = 0.0, forward.grid.prefix
    for (_, weights), (_, stored) in zip(layer.rows(256), half.rows(256), strict=True):
        off = (weights - stored)[..., prefix:].abs().amax(-1) / weights[..., prefix:].amax(-1)
        error = max(error, off.nan_to_num(torch.inf).max().item())
    exact = error > ERROR
    return {
        "q": array(q[0], exact),
        "k": array((k - mean)[0], exact),
        "mean": mean[0].flatten().tolist(),
        "heads": q.shape[1],
        "scale": layer.scale,
    }


def array(values: Tensor, exact: bool = False) -> dict:
    """Numbers for `floats` in numbers.js, in half precision, or in single if `exact` or out of its range."""
    values = values.detach().float().cpu()
    exact = exact or not values.half().isfinite().all()
    return {
        "type": "f4" if exact else "f2",
        "data": values.numpy().astype("<f4" if exact else "<f2").tobytes(),
    }


@torch.inference_mode()
def _lens(forward: Forward, tokens: Tensor, targets: Sequence[int]) -> dict:
    """The raw lens after a layer: class and share of the read-out and each token, and by target the share of each
    patch."""
    model, prefix = forward.model, forward.grid.prefix
    with eval_mode(model):
        each = scores(model, read_each(model, tokens)[0]).float().cpu()
        whole = scores(model, family(model).head(tokens)).float().cpu()
    shares, classes = torch.cat([whole, each]).max(-1)
    of = {target: array(each[prefix:, target], exact=True) for target in targets}
    return {"classes": classes.tolist(), "shares": array(shares, exact=True), "of": of}


def _explain(
    forward: Forward,
    target: int,
    views: Mapping[str, View],
    maps: dict,
    longest: float,
    progress: Callable[[str], None],
    check: Check,
) -> None:
    """Add the maps of a class to `maps[view][class]`, with scores that take at most `longest` seconds. Views that fail
    are left out."""
    choice, made, own, random = Choice(target=target), {}, None, say("unscored")
    for name, view in views.items():
        progress(f"{view.entry} for “{forward.label(target)}”")
        with contextlib.suppress(UnsupportedModelError, ValueError):
            made[name] = view.make(forward, choice, check)
    if longest:
        progress(f"scores for “{forward.label(target)}”")
        random = curves(forward, choice, None, check, longest)
        if isinstance(random, str):
            random = say("page too long")
        else:
            stacked = torch.from_numpy(np.stack([each.values for each in made.values()]))
            own = curves(forward, choice, stacked, check)
    for k, (name, each) in enumerate(made.items()):
        scored = {"words": random}
        if own is not None:
            scored = order_of_covering(forward, choice, each.values) | score(
                forward, choice, own[:, k : k + 1], random
            )
        maps.setdefault(name, {})[target] = {
            "values": array(torch.from_numpy(each.values), exact=True),
            "words": each.words,
            "title": each.title,
            "unit": each.unit,
            "score": {"title": say("trust"), **scored},
        }


def tables() -> dict:
    """Color tables (256, 3), and the rules of `scale_of`, `translucent` and `sinks`."""
    colors = {name: mpl.colormaps[name](np.arange(256))[:, :3] * 255 for name in MAPS}
    maps = {name: table.round().astype(np.uint8).tobytes() for name, table in colors.items()}
    rules = {"least": SIGNED, "sink": SINK, "even": EVEN, "looking": LOOKING}
    return {"maps": maps, "plain": "viridis", "signed": "RdBu_r", **rules}


def versions() -> str:
    """Versions of the libraries that made a page."""
    import timm

    from vitlens import __version__

    return f"vitlens {__version__}, torch {torch.__version__}, timm {timm.__version__}"
