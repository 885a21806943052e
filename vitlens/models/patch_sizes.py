"""Patch sizes of weights, which must be the model's."""

from __future__ import annotations

import re

from torch import nn

from vitlens.recorder.supported import family, input_channels

_FILTERS = (
    r"((patch_embed|embeds|patchifier|vision_embed)\.proj|visual\.conv1)\.weight$|embedding/kernel$"
)
"""Names of the weights that embed patches, as a regular expression."""


def require_patches(shapes: dict, model: nn.Module, source: object) -> None:
    """Raise ValueError if weights have another patch size than the model, because timm would resample the filters.

    shapes: of the weights by name. source: the file or name of the weights, for the message.
    """
    filters = {}
    for name, shape in shapes.items():
        embeds_patches = re.search(_FILTERS, str(name))
        if embeds_patches and len(shape) in (2, 4):
            filters[name] = tuple(shape)
    if not filters:
        return
    height, width = patch_size(model)
    channels = input_channels(model)
    for name, shape in filters.items():
        p, q = _patch_size(name, shape, channels)
        if (p, q) != (height, width):
            raise ValueError(
                f"{source} has patches of {p} × {q} and the model {height} × {width} pixels. Use the architecture of "
                "the weights, because resampled filters differ."
            )


def patch_size(model: nn.Module) -> tuple[int, int]:
    """(height, width) in pixels of the patches of a model.

    >>> patch_size(model)
    (16, 16)
    """
    embedding = family(model).embedding
    size = getattr(embedding, "patch_size", None)
    if size is None:
        layers = [layer for layer in embedding.modules() if isinstance(layer, nn.Conv2d)]
        size = layers[0].kernel_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _patch_size(name: str, shape: tuple[int, ...], channels: int) -> tuple[int, int]:
    """(height, width) in pixels of the patches that a filter with this name and shape embeds."""
    if len(shape) == 2:  # NaFlex: (D, p·q·C)
        pixels = shape[1] / channels
        side = round(pixels**0.5)
        return side, side
    if name.endswith("kernel"):  # (p, q, C, D)
        return shape[:2]
    return shape[2:]
