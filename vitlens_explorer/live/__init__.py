"""The model itself in a page: its weights as the page's scripts read them, and the scripts that run it.

The scripts run plain pre-norm Vision Transformers of timm with a class token or a mean as read-out, of the sizes Ti and
S. `vit.js` is the forward, `gradients.js` the backward, `kernels.wat` their inner loops (assembled in `kernels.wasm`),
`files.js` and `pixels.js` the preprocessing, `worker.js` the thread in which they run, and `page.js` its use by the
page's source. `safetensors.js` and `architectures.js` open a model from its own files, `config.json` and
`model.safetensors`, in the layouts of timm and transformers. `json.js` checks JSON, `positions.js` resizes positions,
and `known.json` holds what such files leave out. `adapt.js` makes the controls of an opened model, `beside.js`
shows a second one beside it, `kept.js` writes the page with a model that was opened in it, and `blank.js` is the screen
of a page without a model.

Shapes: L layers, R prefix tokens, T tokens, D width.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor, nn

from vitlens import faithfulness, files
from vitlens.attribution import METHODS
from vitlens.attribution.target import Target
from vitlens.images import load_image
from vitlens.models import built_size, data_config, output_kind
from vitlens.models.classes import imagenet_names
from vitlens.recorder.supported import (
    UnsupportedModelError,
    family,
    model_name,
    qualified_name,
    unwrap,
)
from vitlens_explorer import front, lanes
from vitlens_explorer.photographs import Forward
from vitlens_explorer.photos import FOLDER as PHOTOS
from vitlens_explorer.views import BASELINE, CLEAR, ORDERS, POINTS, supported_views
from vitlens_explorer.words import say

if TYPE_CHECKING:
    from vitlens_explorer.explorer import Explorer

LIVE = Path(__file__).parent
KNOWN = LIVE / "known.json"
"""What the files of a model leave out, written by `vitlens_explorer.live.known`."""
WORKER_SCRIPTS = (
    "json",
    "safetensors",
    "vit",
    "gradients",
    "files",
    "pixels",
    "positions",
    "architectures",
    "worker",
)
"""Names of the worker's scripts in the order in which they are joined. They share one scope."""
PAGE_POLICY = " 'wasm-unsafe-eval' blob:"
"""Further sources of scripts in the policy of a page that runs a model."""
REFERENCE = "test_vit"
"""timm's model with random weights from which the controls of a blank page are made. It has classes and a read-out."""
PARTS = {
    "VisionTransformer",
    "Sequential",
    "Block",
    "Attention",
    "Mlp",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "PatchEmbed",
    "Conv2d",
    "GELU",
    "Dropout",
    "DropPath",
    "PatchDropout",
    "Identity",
}
"""Classes of the parts that the scripts run."""
LIVE_METHODS = {
    "relevance",
    "gradient_rollout",
    "attention_gradient",
    "grad_cam",
    "legrad",
    "balanced_gradients",
}
"""Attribution methods of `gradients.js`."""
MOST_PARAMETERS = 32_000_000
"""Largest number of parameters. ViT-S/16 has 22 million with 1,000 classes and 30 million with 21,843."""


def worker_script() -> str:
    """The worker's scripts as one classic script, because module workers do not start in a page opened from disk."""
    scripts = front.join_scripts(LIVE, ["../front/values", "../in_page/numbers", *WORKER_SCRIPTS])
    known = json.dumps(json.loads(KNOWN.read_text(encoding="utf-8")), separators=(",", ":"))
    return f"const KNOWN = {known};\n{scripts}"


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
    from vitlens_explorer.drawing import png
    from vitlens_explorer.heads_off import mean_head_outputs
    from vitlens_explorer.lanes import never_cancel

    model = unwrap(model)
    _config(model)  # raises before the work
    page = in_page.explorer_of(model, images, live=True)
    photographs = page.photographs
    still = in_page.still_of(page)
    progress("mean outputs of heads")
    network, weights = serialize(model, mean_head_outputs(model, page.forward.batch, never_cancel))
    photos = []
    for name in photographs:
        page.state = page.state | {"photograph": name}
        seen = png(Image.fromarray(np.asarray(page.forward.pixels)))
        photos.append({"name": name, "file": seen, "about": page.note, "ready": True})
    forward = page.forward
    base = {
        "grid": in_page.grid_of(forward),
        "heads": forward.heads,
        "gated": forward.gated,
        "outputs": forward.outputs,
    }
    content = _describe(page, [*photographs]) | {
        "about": say("live"),
        "base": base,
        "network": network,
        "weights": weights,
        "photos": photos,
        "labels": forward.labels,
        "names": forward.names,
    }
    text = in_page.document(content, [*photographs], page_script(), PAGE_POLICY, still)
    path = Path(path)
    files.write(path, text)
    return path


def save_blank_page(path: str | os.PathLike) -> Path:
    """Write the explorer without a model as one HTML file of less than 0.8 MB, and return its path.

    A person drops `config.json` and `model.safetensors` of timm or transformers on the page. It runs the model in the
    browser, without Python and network, and has five sample photographs of `vitlens_explorer.photos`. Raises OSError
    for a path that cannot be written.

    >>> from vitlens_explorer.live import save_blank_page
    >>> save_blank_page("page.html").stat().st_size < 0.8e6
    True
    """
    import timm

    from vitlens_explorer import in_page

    path = Path(path)
    files.check_writable(path.parent, "The folder of the page")
    samples = {file.stem: file for file in sorted(PHOTOS.glob("*.jpg"))}
    first, *_ = samples
    page = in_page.explorer_of(timm.create_model(REFERENCE), {first: samples[first]}, live=True)
    content = _describe(page, [*samples]) | {
        "model": "",
        "hash": "",
        "photos": [{"name": name, "file": file.read_bytes()} for name, file in samples.items()],
    }
    files.write(path, in_page.document(content, [*samples], page_script(), PAGE_POLICY))
    return path


def page_script() -> str:
    """The scripts of a page that runs a model, besides those of the front end and of the worker."""
    from vitlens_explorer import in_page

    *parts, opening = in_page.PAGE_SCRIPTS
    scripts = [
        front.join_scripts(in_page.IN_PAGE, parts),
        front.join_scripts(LIVE, ["adapt", "page", "beside", "scores", "kept", "blank"]),
        front.join_scripts(in_page.IN_PAGE, [opening]),
    ]
    return "\n".join(scripts)


def _describe(page: Explorer, names: list[str]) -> dict:
    """The part of a page's content that any model may have: controls, views, the worker and what it needs."""
    from vitlens_explorer import in_page
    from vitlens_explorer.heads_off import WAYS, replacement_words

    views = {
        name: view
        for name, view in supported_views(page.forward).items()
        if name in (LIVE_METHODS if view.attributes else in_page.SCRIPTED_VIEWS)
    }
    readable = [name for name in LIVE_METHODS if "query" in METHODS[name].options]
    return in_page.describe_explorer(page, names, views, absent={"whole"}) | {
        "readable": sorted(readable),
        "ways": {way: replacement_words(way) for way in WAYS},
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


def serialize(
    model: nn.Module, means: Mapping[tuple[int, int], Tensor] | None = None
) -> tuple[dict, bytes]:
    """The model for the page: a description for JSON, and the weights in the order of its `tensors`.

    Weights are stored in half precision if that is exact, else in float32. means: output (T, K) by (layer, head) that
    replaces a head that is switched off. Raises UnsupportedModelError for models that the scripts cannot run exactly.
    """
    model = unwrap(model)
    config = _config(model)
    grid, attention = family(model).grid(config["input_size"][1:]), model.blocks[0].attn
    state = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    tensors = dict(_tensors(model, state))
    if state:
        raise _refusal(model, f"its {', '.join(sorted(state)[:3])} would be ignored")
    if means:
        layers = [
            torch.cat([means[layer, head] for head in range(attention.num_heads)], -1)
            for layer in range(len(model.blocks))
        ]
        tensors["means"] = torch.stack(layers)
    about = {
        "layers": len(model.blocks),
        "heads": attention.num_heads,
        "scale": attention.scale,
        "width": model.embed_dim,
        "hidden": model.blocks[0].mlp.fc1.out_features,
        "classes": model.num_classes,
        "outputs": output_kind(model),
        "tokens": grid.tokens,
        "prefix": grid.prefix,
        "patch": grid.patch,
        "image": grid.image,
        "eps": model.blocks[0].norm1.eps,
        "readout": grid.readout.tolist(),
        "interpolation": config["interpolation"],
        "mean": config["mean"],
        "std": config["std"],
        "resized": int(grid.image[0] / config["crop_pct"]),
        "tensors": [],
    }
    parts = []
    for name, tensor in tensors.items():
        half = tensor.half()
        exact = torch.equal(half.float(), tensor)
        parts.append((half if exact else tensor).contiguous().numpy().tobytes())
        about["tensors"].append({"name": name, "shape": [*tensor.shape], "half": exact})
    return about, b"".join(parts)


def _refusal(model: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{model_name(model)} cannot run in a page: {reason}. `vitlens page MODEL IMAGE` makes a page of your images "
        "for every supported model."
    )


def _config(model: nn.Module) -> dict:
    """The preprocessing of a model. Raises UnsupportedModelError for models that the scripts cannot run."""
    if qualified_name(model) != "timm.models.vision_transformer.VisionTransformer":
        raise _refusal(model, "it is not timm's plain VisionTransformer")
    config = data_config(model, built_size(model))
    kinds = {type(part) for part in model.modules()}
    other = {
        kind.__qualname__
        for kind in kinds
        if kind.__module__.split(".")[0] not in ("timm", "torch") or kind.__qualname__ not in PARTS
    }
    norms = {
        (part.eps, part.normalized_shape)
        for part in model.modules()
        if isinstance(part, nn.LayerNorm)
    }
    block, (channels, height, width) = model.blocks[0], config["input_size"]
    sizes = model.embed_dim, block.attn.head_dim, block.mlp.fc1.out_features
    count = sum(parameter.numel() for parameter in model.parameters())
    taken = channels, height, config["crop_mode"], config["interpolation"]
    problems = (
        (other, f"it has parts that the page does not know ({', '.join(sorted(other))})"),
        (len(norms) != 1, "its layer norms differ from each other"),
        (
            any(getattr(part, "approximate", "none") != "none" for part in model.modules()),
            "its GELU is approximate",
        ),
        (
            model.global_pool not in ("token", "avg"),
            "its read-out is neither a class token nor a mean",
        ),
        (not model.num_classes, "it has no classifier head"),
        (
            count > MOST_PARAMETERS,
            f"it has {count:,} parameters, over the limit of {MOST_PARAMETERS:,}",
        ),
        (
            any(size % 8 for size in sizes)
            or block.attn.num_heads * block.attn.head_dim != model.embed_dim,
            "the widths of its tokens, heads and MLPs must be multiples of 8",
        ),
        (
            taken not in [(3, width, "center", name) for name in ("bilinear", "bicubic")],
            "it does not take the square middle of a photo, resized bilinearly or bicubically",
        ),
    )
    for wrong, reason in problems:
        if wrong:
            raise _refusal(model, reason)
    return config


def _tensors(model: nn.Module, state: dict[str, Tensor]):
    """Yield the (name, tensor) that the scripts read, and take those of the model that they come from out of `state`.

    Prefix tokens include their positions, and LayerScale its place in the weights of the projection before it.
    """

    def linear(source: str, name: str, scale: str = ""):
        weight = state.pop(f"{source}.weight").flatten(1)
        bias = state.pop(f"{source}.bias", torch.zeros(len(weight)))
        factor = state.pop(scale, torch.ones(())).double().reshape(-1, 1)
        yield f"{name}.weight", (weight * factor).float()
        yield f"{name}.bias", (bias * factor[:, 0]).float()

    def norm(source: str, name: str):
        if f"{source}.weight" in state:
            weight = state.pop(f"{source}.weight")
            yield f"{name}.weight", weight
            yield f"{name}.bias", state.pop(f"{source}.bias", torch.zeros_like(weight))

    special = [state.pop(name)[0] for name in ("cls_token", "reg_token") if name in state]
    patches = model.patch_embed.num_patches
    positions = state.pop("pos_embed", torch.zeros(1, patches, model.embed_dim))[0]
    placed = len(positions) - patches  # 0 if prefix tokens have no positions
    tokens = torch.cat(special) if special else torch.zeros(0, model.embed_dim)
    yield "prefix", tokens + positions[:placed] if placed else tokens
    yield "positions", positions[placed:]
    yield from linear("patch_embed.proj", "embed")
    yield from norm("norm_pre", "norm_pre")
    for layer in range(len(model.blocks)):
        yield from norm(f"blocks.{layer}.norm1", f"{layer}.norm1")
        yield from linear(f"blocks.{layer}.attn.qkv", f"{layer}.qkv")
        yield from linear(f"blocks.{layer}.attn.proj", f"{layer}.proj", f"blocks.{layer}.ls1.gamma")
        yield from norm(f"blocks.{layer}.norm2", f"{layer}.norm2")
        yield from linear(f"blocks.{layer}.mlp.fc1", f"{layer}.fc1")
        yield from linear(f"blocks.{layer}.mlp.fc2", f"{layer}.fc2", f"blocks.{layer}.ls2.gamma")
    yield from norm("norm", "norm")
    yield from norm("fc_norm", "fc_norm")
    yield from linear("head", "head")
