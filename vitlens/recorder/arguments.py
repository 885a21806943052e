"""What is given is checked here: a sentence says what was wanted and what came."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from vitlens.recorder.families import MODELS, model_name, qualified_name


def require_images(images: object, model: nn.Module | None = None) -> None:
    """Raise ValueError unless images are what a model takes: a batch (B, C, height, width) of finite floats.

    C is looked at where the model is one of timm's that vitlens knows.
    """
    if not isinstance(images, torch.Tensor) or images.dim() != 4 or not images.is_floating_point() or len(images) == 0:
        came = (
            f"{images.dtype} of shape {tuple(images.shape)}"
            if isinstance(images, torch.Tensor)
            else type(images).__name__
        )
        raise ValueError(
            f"Images are a floating-point tensor (B, channels, height, width), normalized as the model wants them, but "
            f"{came} came. `vitlens.models.preprocess(model, pictures)` makes one."
        )
    if model is not None and qualified_name(model) in MODELS and images.shape[1] != (wanted := channels(model)):
        raise ValueError(
            f"{model_name(model)} takes images of {wanted} channels, but the shape {tuple(images.shape)} came."
        )
    embed = getattr(model, "embeds", None)
    whole_patches = getattr(embed, "is_linear", False) and not embed.dynamic_img_pad  # NaFlex's cuts no pixels off
    if whole_patches and any(n % p for n, p in zip(images.shape[-2:], embed.patch_size, strict=True)):
        size, patch = (" × ".join(map(str, sides)) for sides in (images.shape[-2:], embed.patch_size))
        raise ValueError(
            f"{model_name(model)} does not take this size: patches of {patch} pixels do not divide images of {size}."
        )
    if not images.isfinite().all():
        wrong = (~images.isfinite()).flatten(1).sum(1).tolist()
        raise ValueError(
            f"Images are finite numbers, but {sum(wrong)} values are not, the first of them in image "
            f"{[*map(bool, wrong)].index(True)}; look for what damaged them before they came here."
        )


def channels(model: nn.Module) -> int:
    """Of the images that it takes; the first convolution reads them. NaFlex has none and says it."""
    first = next((each for each in model.modules() if isinstance(each, nn.Conv2d)), None)
    return model.in_chans if first is None else first.in_channels


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


@contextlib.contextmanager
def taking(model: nn.Module) -> Iterator[None]:
    """In this block, what timm asserts of an image's size is a ValueError with a sentence."""
    try:
        yield
    except AssertionError as error:
        if "Input" not in str(error):  # timm's word for sizes
            raise
        raise ValueError(f"{model_name(model)} does not take this size: {str(error).rstrip('.')}.") from error


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
