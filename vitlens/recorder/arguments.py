"""What is given is checked here: a sentence says what was wanted and what came."""

from __future__ import annotations

import operator

import numpy as np
import torch


def whole(value: object) -> int | None:
    """A whole number of any kind (Python's, NumPy's, a tensor's) as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def require_count(**each: object) -> None:
    """Raise ValueError unless each of these, by its name, is a whole number from 1 up."""
    for name, value in each.items():
        if (number := whole(value)) is None or number < 1:
            raise ValueError(f"{name} is a whole number from 1 up, but {value!r} came.")


def fitted(baseline: float | torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) a baseline, one for all images or one for each, where they are and in their dtype.

    Raises ValueError for a tensor that does not fit them, and for what is no finite number or tensor.
    """
    kinds = int | float | np.number | np.ndarray | torch.Tensor
    blank = torch.as_tensor(baseline).detach() if isinstance(baseline, kinds) else None
    if blank is None or not blank.isfinite().all():
        came = repr(baseline) if blank is None else "one that is not finite"
        raise ValueError(f"A baseline is a finite number or tensor in the images' normalized units, but {came} came.")
    try:
        return blank.to(images).expand_as(images)
    except RuntimeError:
        raise ValueError(
            f"A baseline that is a tensor fits images of shape {tuple(images.shape)}, but one of shape "
            f"{tuple(blank.shape)} came."
        ) from None
