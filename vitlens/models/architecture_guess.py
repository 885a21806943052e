"""Architectures of timm that the tensors of a file fit."""

from __future__ import annotations

import re

import timm
import torch
from torch import Tensor

_SIZES = {
    192: "tiny",
    384: "small",
    512: "medium",
    768: "base",
    1024: "large",
    1280: "huge",
    1408: "giant",
    1536: "giant",
    1664: "gigantic",
}
"""Word in timm's names for the width of a model."""

_FAMILIES = ("vit_", "deit_", "deit3_", "beit_", "beitv2_", "eva02_")


def fitting_architectures(tensors: dict[str, Tensor], count: int = 2) -> list[str]:
    """Names of timm's models with all of these tensors and no others, but for the classifier. At most `count` names."""
    shapes = _backbone({name: tuple(value.shape) for name, value in tensors.items()})
    filters = shapes.get("patch_embed.proj.weight", ())
    if len(filters) != 4:
        return []
    word = _SIZES.get(filters[0])
    if word is None:
        return []
    found = []
    for name in timm.list_models():
        likely = name.startswith(_FAMILIES) and f"_{word}_patch{filters[-1]}_" in name.replace(
            "_distilled", ""
        )
        if likely and _shapes_of(name) == shapes:
            found.append(name)
    found.sort(key=len)
    return found[:count]


def _shapes_of(name: str) -> dict[str, tuple]:
    """Shapes of the weights of a timm model without its classifier."""
    with torch.device("meta"):
        model = timm.create_model(name)
    return _backbone({key: tuple(value.shape) for key, value in model.state_dict().items()})


def _backbone(shapes: dict[str, tuple]) -> dict[str, tuple]:
    return {
        name: shape
        for name, shape in shapes.items()
        if not re.match(r"(head|head_dist|fc|classifier|linear)\.", name)
    }


def describe(tensors: dict[str, Tensor]) -> str:
    """Width, depth and patch size of the Vision Transformer with these weights in timm's names, or "".

    >>> describe(model.state_dict())
    'width 192, 12 layers and patches of 16 × 16'
    """
    filters = tensors.get("patch_embed.proj.weight")
    layers = {name.split(".")[1] for name in tensors if re.match(r"blocks\.\d+\.", name)}
    if filters is None or filters.ndim != 4 or not layers:
        return ""
    height, width = filters.shape[2:]
    return f"width {filters.shape[0]}, {len(layers)} layers and patches of {height} × {width}"
