"""Errors for models and image sizes that are refused."""

from __future__ import annotations

from torch import nn

from vitlens.recorder.supported.names import model_name

WINDOWS = "its attention stays inside windows of the image in some or all layers, which have no map of the whole image"
POOLED = (
    "its attention reads pooled or strided tokens, so the keys are not the patches of the image"
)
CONVOLUTIONS = "it is not a Vision Transformer: its features come from convolutions, without attention between patches"
MASK_UNITS = (
    "its attention runs inside mask units and pools the queries, so no map covers the whole image"
)
SHRINKS = "its attention shrinks the grid between stages"
"""Reasons for refusing models of several libraries."""


class UnsupportedModelError(ValueError):
    """Error for a model or a forward whose attention cannot be shown exactly. The message gives the reason.

    >>> isinstance(vitlens.UnsupportedModelError("…"), ValueError)
    True
    """


def refuse(model: nn.Module, reason: str) -> UnsupportedModelError:
    """Error to raise for a model whose attention cannot be shown, with the reason."""
    return UnsupportedModelError(
        f"vitlens cannot show the attention of {model_name(model)}: {reason}."
    )


def require_size(
    model: nn.Module,
    image: tuple[int, int],
    *,
    only: tuple[int, int] | None = None,
    patch: tuple[int, int] = (1, 1),
) -> None:
    """Raise ValueError unless patches divide an image's (height, width).

    only: the one (height, width) that the model takes, or None if it takes others.
    """
    refusal = f"{model_name(model)} does not take this size"
    got = _product(image)
    if only is not None and tuple(image) != tuple(only):
        raise ValueError(f"{refusal}: it was built for {_product(only)}, got {got}.")
    if image[0] % patch[0] or image[1] % patch[1]:
        sides = _product(patch)
        raise ValueError(f"{refusal}: patches of {sides} pixels do not divide images of {got}.")


def _product(size: tuple[int, int]) -> str:
    """A size as in "224 × 224"."""
    height, width = size
    return f"{height} × {width}"
