"""The model itself in a page: the files of its library, and the scripts that read and run them.

The scripts run plain pre-norm Vision Transformers of timm and transformers. `model_files.py` writes the files of a
model that Python has, and says which models the scripts run. `vit.js` is the forward, `gradients.js` the backward,
`kernels.wat` their inner loops (assembled in `kernels.wasm`), `files.js` and `pixels.js` the preprocessing, `worker.js`
the thread in which they run, and `page.js` its use by the page's source. `safetensors.js` and `architectures.js` open a
model from its own files, `config.json` and `model.safetensors`, in the layouts of timm and transformers. `json.js`
checks JSON, `positions.js` resizes positions, and `known.json` holds what such files leave out. `adapt.js` makes the
controls of an opened model, `beside.js` shows a second one beside it, `kept.js` writes a page with the model that was
opened in it, `opening.js` opens a page with a model, and `blank.js` is the screen of one without. `refuse.js` gives the
reasons why a file is not read.

Shapes: L layers, R prefix tokens, T tokens, D width.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torch import nn

from vitlens import faithfulness, files
from vitlens.attribution import METHODS
from vitlens.attribution.target import Target
from vitlens.images import load_image
from vitlens.models import weights_digest
from vitlens.models.classes import imagenet_names
from vitlens_explorer import front, lanes
from vitlens_explorer.drawing import png
from vitlens_explorer.live.model_files import check_runs, model_files
from vitlens_explorer.photographs import Forward
from vitlens_explorer.photos import FOLDER as PHOTOS
from vitlens_explorer.views import BASELINE, CLEAR, ORDERS, POINTS, supported_views

if TYPE_CHECKING:
    from vitlens_explorer.explorer import Explorer

LIVE = Path(__file__).parent
PAGE_POLICY = " 'wasm-unsafe-eval' blob:"
"""Further sources of scripts in the policy of a page that runs a model."""
REFERENCE = "test_vit"
"""timm's model with random weights from which the controls of a blank page are made. It has classes and a read-out."""
LIVE_METHODS = {
    "relevance",
    "gradient_rollout",
    "attention_gradient",
    "grad_cam",
    "legrad",
    "balanced_gradients",
}
"""Attribution methods of `gradients.js`."""


def worker_script() -> str:
    """The worker's scripts as one classic script, because module workers do not start in a page opened from disk."""
    return front.join_modules(LIVE / "worker.js")


def save_live_page(
    model: nn.Module,
    images: object,
    path: str | os.PathLike,
    progress: Callable[[str], None] = lambda step: None,
) -> Path:
    """Write the explorer with the model itself as one HTML file, which takes photos without Python and network.

    images: as for `save_page`, which the file contains as the model gets them, by default the sample photographs of
    `vitlens_explorer.photos` that the model names right. progress: called with the name of each step. Raises
    UnsupportedModelError for models that the scripts cannot run, and ImageError for images that cannot be read.
    """
    from vitlens_explorer import in_page

    check_runs(model)  # raises before the work
    page = in_page.explorer_of(model, images, live=True)
    names = [*page.photographs]
    still = in_page.still_of(page)
    progress("mean outputs of heads")
    facts = _facts(page)
    contained = [{"name": name, "bytes": file} for name, file in model_files(model).items()]
    content = _describe(names)
    place = {name: page.state[name] for name in ("layer", "row", "column", "query")}
    content |= {
        "model": page.forward.name,
        "facts": facts,
        "scoring": scoring(page.forward),
        "state": content["state"] | place,
        "files": contained,
        "folder": page.forward.name,
        "photos": [_photo(page, name) for name in names],
        "address": "",
    }
    text = in_page.document(content, names, page_script(), PAGE_POLICY, still)
    path = Path(path)
    files.write(path, text)
    return path


def _facts(page: Explorer) -> dict:
    """A digest of the weights, and the mean outputs (L, T, D) that replace heads in the explorer, with their name."""
    from vitlens_explorer import in_page
    from vitlens_explorer.heads_off import AVERAGE, mean_head_outputs, replacement_words
    from vitlens_explorer.lanes import never_cancel

    forward = page.forward
    means = mean_head_outputs(page.model, forward.batch, never_cancel)
    layers = [
        torch.cat([means[layer, head] for head in range(forward.heads)], -1)
        for layer in range(len(forward.attn))
    ]
    return {
        "hash": weights_digest(page.model),
        "means": in_page.array(torch.stack(layers), exact=True),
        "way": replacement_words(AVERAGE),
    }


def _photo(page: Explorer, name: str) -> dict:
    """A photograph of an explorer as its model gets it. The state of `page` changes."""
    page.state = page.state | {"photograph": name}
    seen = png(Image.fromarray(np.asarray(page.forward.pixels)))
    return {"name": name, "file": seen, "about": page.note, "ready": True}


def save_blank_page(path: str | os.PathLike) -> Path:
    """Write the explorer without a model as one HTML file of less than 0.8 MB, and return its path.

    A person drops `config.json` and `model.safetensors` of timm or transformers on the page. It runs the model in the
    browser, without Python and network, and has five sample photographs of `vitlens_explorer.photos`. Raises OSError
    for a path that cannot be written.

    >>> from vitlens_explorer.live import save_blank_page
    >>> save_blank_page("page.html").stat().st_size < 0.8e6
    True
    """
    from vitlens_explorer import in_page

    path = Path(path)
    files.check_writable(path.parent, "The folder of the page")
    samples = {file.stem: file for file in sorted(PHOTOS.glob("*.jpg"))}
    content = _describe([*samples]) | {
        "model": "",
        "hash": "",
        "photos": [{"name": name, "file": file.read_bytes()} for name, file in samples.items()],
    }
    files.write(path, in_page.document(content, [*samples], page_script(), PAGE_POLICY))
    return path


def page_script() -> str:
    """The scripts of a page that runs a model, without those of the worker."""
    return front.join_modules(LIVE / "opening.js")


def _describe(names: list[str]) -> dict:
    """The content of a page for any model: controls and views of a model with everything, the worker and what it needs.

    names: of the photographs.
    """
    import timm

    from vitlens_explorer import in_page

    reference = timm.create_model(REFERENCE, dynamic_img_size=True)
    blank = Image.new("RGB", (64, 64))
    page = in_page.explorer_of(reference, dict.fromkeys(names, blank), live=True)
    views = {
        name: view
        for name, view in supported_views(page.forward).items()
        if name in (LIVE_METHODS if view.attributes else in_page.SCRIPTED_VIEWS)
    }
    readable = [name for name in LIVE_METHODS if "query" in METHODS[name].options]
    return in_page.describe_explorer(page, names, views, absent=set()) | {
        "readable": sorted(readable),
        "imagenet": "\n".join(imagenet_names()),
        "scoring": scoring(page.forward),
        "uploads": lanes.LARGEST_UPLOAD,
        "worker": worker_script(),
        "wasm": (LIVE / "kernels.wasm").read_bytes(),
        "probes": probes(),
    }


def scoring(forward: Forward) -> dict:
    """What `scores.js` needs for the same scores as `vitlens_explorer.views.score`."""
    grid = forward.grid
    constant = torch.zeros(grid.rows, grid.cols)
    random = faithfulness.random_maps(grid, ORDERS)
    scales = {}
    for outputs in ("classes", "independent", "value"):
        alone, against = (
            next(iter(Target(against=other, outputs=outputs).measures.values()))
            for other in (None, torch.zeros(1, dtype=torch.int64))
        )
        scales[outputs] = {
            "alone": alone.removeprefix("the "),
            "against": against.removeprefix("the "),
        }
    return {
        "points": POINTS,
        "clear": CLEAR,
        "baseline": faithfulness.BASELINES[BASELINE],
        "scales": scales,
        "ties": faithfulness.order(constant).tolist(),
        "random": faithfulness.order(random).tolist(),
    }


def probes() -> list[dict]:
    """Small files of the kinds that the page promises to decode as Python does, each with its RGB levels by Pillow.

    A browser that gives other levels, as some do for transparent pixels, says so beside each photo of the kind.
    """
    levels = np.random.default_rng(0).integers(0, 256, (24, 40, 4), np.uint8)
    opaque, clear = Image.fromarray(levels[..., :3]), Image.fromarray(levels)
    gamma = PngImagePlugin.PngInfo()
    gamma.add(b"gAMA", (100_000).to_bytes(4, "big"))  # 1, which Pillow ignores
    files = {
        "png": _encoded(opaque, "PNG"),
        "alpha": _encoded(clear, "PNG"),
        "gamma": _encoded(opaque, "PNG", pnginfo=gamma),
        "jpeg": _encoded(opaque, "JPEG", quality=90),
    }
    return [
        {"kind": kind, "file": file, "levels": np.asarray(load_image(file)).tobytes()}
        for kind, file in files.items()
    ]


def _encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
