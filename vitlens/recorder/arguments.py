"""Checks of arguments: whole numbers, numbers of layers, and baselines."""

from __future__ import annotations

import operator

import numpy as np
import torch


def whole(value: object) -> int | None:
    """A whole number (Python's, NumPy's or a tensor's) as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def require_count(**each: object) -> None:
    """Raise ValueError unless every keyword is a whole number from 1 up."""
    for name, value in each.items():
        if (number := whole(value)) is None or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")


def layer_number(count: int, layer: int) -> int:
    """The number, from 0, of a layer among `count`; negative ones count from the end. Raises IndexError for a layer
    that does not exist, and ValueError for what is no whole number."""
    if whole(layer) is None:
        raise ValueError(f"A layer is a whole number, −1 the last, got {layer!r}.")
    if not -count <= layer < count:
        raise IndexError(f"The model has {count} layers, numbered from 0 to {count - 1}, but layer {layer} was wanted.")
    return layer % count


def fitted(baseline: float | torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) a baseline for all images, or one for each, on their device and in their dtype.

    Raises ValueError unless it is a finite number, or a finite tensor that fits the images.
    """
    kinds = int | float | np.number | np.ndarray | torch.Tensor
    blank = torch.as_tensor(baseline).detach() if isinstance(baseline, kinds) else None
    if blank is None or not blank.isfinite().all():
        came = repr(baseline) if blank is None else "one that is not finite"
        raise ValueError(f"Expected a finite number or tensor in normalized units as the baseline, got {came}.")
    try:
        return blank.to(images).expand_as(images)
    except RuntimeError:
        raise ValueError(
            f"Expected a baseline that fits images of shape {tuple(images.shape)}, got a tensor of shape "
            f"{tuple(blank.shape)}."
        ) from None
