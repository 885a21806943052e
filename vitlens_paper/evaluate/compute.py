"""Cost of a model: parameters, FLOPs of one image, and exaFLOPs of pre-training as in the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pandas as pd
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import vitlens_paper as paper
from vitlens.models import built_size, load_model
from vitlens.recorder.forward import eval_mode
from vitlens.recorder.supported import model_name, unwrap
from vitlens_paper import Cost, exaflops

__all__ = [
    "FIGURE_12",
    "Cost",
    "cost",
    "exaflops",
    "flops",
    "build_untrained",
    "parameters",
    "table",
]

FIGURE_12 = ("R50x1", "R50x2", "ViT-B/32", "ViT-L/32", "ViT-B/16", "ViT-L/16", "ViT-H/14", "R152x4")
"""The models of the paper's Fig. 12."""


def parameters(model: nn.Module) -> int:
    """Number of learned parameters with the head. Shared parameters count once.

    >>> vitlens_paper.evaluate.compute.parameters(model)
    5717416
    """
    return sum(p.numel() for p in model.parameters())


def flops(
    model: nn.Module, image_size: int | tuple[int, int] | None = None, *, patch_drop: float = 0.0
) -> int:
    """FLOPs of a forward pass of one image. A multiply-add is two.

    image_size: pixels, one number or (height, width), default the model's own. patch_drop: share of the patches that
    training drops after their embedding. Counts convolutions and matrix products, also in fused attention, without
    biases, norms, activations and the softmax. Runs on the meta device, without computing. Raises ValueError for a size
    or a `patch_drop` that the model does not support.

    >>> vitlens_paper.evaluate.compute.flops(model)
    2507366400
    """
    model = unwrap(model)
    config = getattr(model, "pretrained_cfg", None) or {}
    configured = config.get("input_size") or ()
    size = image_size or built_size(model) or configured[-2:]
    if not size:
        raise ValueError(f"The image size of {model_name(model)} is unknown. Give image_size.")
    height, width = (size, size) if isinstance(size, int) else size
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    kind = next((t.dtype for t in state.values() if t.is_floating_point()), torch.float32)
    channels = getattr(model, "in_chans", None) or 3
    image = torch.empty(1, channels, height, width, dtype=kind, device="meta")
    counter = FlopCounterMode(display=False)
    try:
        with eval_mode(model), _dropping(model, patch_drop), torch.no_grad(), counter:
            functional_call(model, state, image)
    except Exception as error:  # models raise errors of any kind at a wrong size
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"The FLOPs of {model_name(model)} could not be counted at {height} × {width} pixels "
            f"({reason}). Give a supported size, or build the model for this one (or "
            "with patch_drop_rate)."
        ) from error
    return counter.get_total_flops()


def cost(model: str | paper.Model) -> Cost:
    """Cost of a model of the paper at its pre-training size, counted on the meta device.

    Raises ValueError for an unknown name.

    >>> vitlens_paper.evaluate.compute.cost("ViT-B/16").parameters
    86567656
    """
    if isinstance(model, str):
        model = paper.find(model)
    with torch.device("meta"):
        built = paper.build(model)
    return Cost(
        parameters=parameters(built),
        flops=flops(built, model.image_size),
        image_size=model.image_size,
        features=built.num_features,
    )


def build_untrained(name: str, size: int) -> nn.Module:
    """A model with random weights, by its name in the paper or in `load_model`.

    Transformers of timm are built for images of `size` pixels. ConvNets take any size, and models of other libraries
    keep their own.

    >>> vitlens_paper.evaluate.compute.build_untrained("ViT-B/16", 384).patch_embed.grid_size
    (24, 24)
    """
    if name in paper.MODELS:
        if paper.MODELS[name].kind == "ResNet":
            return paper.build(name)
        return paper.build(name, img_size=size)
    try:
        return load_model(name, pretrained=False, img_size=size)
    except ValueError:
        return load_model(name, pretrained=False)


def table(models: Sequence[str] | None, sizes: Sequence[int]) -> pd.DataFrame:
    """Parameters and FLOPs of models, default those of Fig. 12, at several image sizes.

    models: names as in `build_untrained`. Returns columns model, image_size, parameters and flops. Runs on the meta
    device. Raises ValueError for an unknown name, and for a size that a model does not support.

    >>> vitlens_paper.evaluate.compute.table(["ViT-B/32"], [224]).shape
    (1, 4)
    """
    rows = []
    for name in models or FIGURE_12:
        for size in sizes:
            with torch.device("meta"):
                model = build_untrained(name, size)
            rows.append((name, size, parameters(model), flops(model, size)))
    return pd.DataFrame(rows, columns=["model", "image_size", "parameters", "flops"])


@contextmanager
def _dropping(model: nn.Module, share: float) -> Iterator[None]:
    """Enable timm's patch dropout within this context, in a model in eval mode."""
    layer = getattr(model, "patch_drop", None)
    if not share:
        yield
        return
    before = layer.prob, layer.training
    layer.prob, layer.training = share, True
    try:
        yield
    finally:
        layer.prob, layer.training = before
