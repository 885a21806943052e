"""Augmentation of a whole batch at once, on the device that holds it: uint8 in, normalized floats and targets out.

Every random choice comes from `draws(device, seed, epoch, step)`: the same arguments give the same batch on the same
device, augmented at once or in parts. No global state is read or written. Hence not timm's transforms and mixup: they
draw from global generators, image by image on the CPU; here 1,024 images take an accelerator about a millisecond.

Shapes: B batch, C = 3 channels, H × W pixels. Floats lie in [0, 1] until they are normalized.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlens.data.transforms import (
    Draws,
    Targets,
    check_pad,
    color_jitter,
    draws,
    erased,
    generator,
    gray_solarize_posterize,
    mixed,
    randaugment,
    resized_crop,
    seed_of,
    shift_and_flip,
)

__all__ = [
    "Augment", "Draws", "Targets", "augmented", "check_finite", "check_pad", "draws", "generator", "normalized",
    "seed_of",
]  # fmt: skip


@dataclass(frozen=True)
class Augment:
    """What is done to a training batch; the defaults do nothing."""

    flip: float = 0.0
    """Probability of a horizontal flip. 0 where left and right carry meaning (digits)."""
    pad: int = 0
    """Pixels of reflected border from which the window is cut at random."""
    scale: tuple[float, float] = (1.0, 1.0)
    """Range of the share of the image's area that a random resized crop shows (Szegedy et al. 2015)."""
    ratio: tuple[float, float] = (1.0, 1.0)
    """Range of that crop's aspect ratio, width by height, drawn on a logarithmic scale."""
    rotate: float = 0.0
    """Largest rotation in degrees, either way."""
    jitter: float = 0.0
    """Brightness, contrast and saturation are each multiplied by a factor from 1 ± jitter."""
    policy: float = 0.0
    """Probability of one of grayscale, solarize, posterize: DeiT III's 3-Augment, with posterize in place of blur
    because at 64 px little is left to blur."""
    operations: int = 0
    """RandAugment's N: operations in a row; 0 for none (Cubuk et al. 2019)."""
    magnitude: float = 9.0
    """RandAugment's M, 0 to 10."""
    erase: float = 0.0
    """Probability of filling a rectangle with the mean color (Zhong et al. 2017). It has 2 to 33 % of the area, less
    where it reaches beyond the image."""
    cutmix: float = 0.0
    """Probability, per sample, of pasting in a rectangle of another (Yun et al. 2019)."""
    mixup: float = 0.0
    """Probability, per sample, of blending with another (Zhang et al. 2017). λ is uniform: Beta(1, 1), as in CutMix."""

    def __post_init__(self):
        object.__setattr__(self, "scale", tuple(self.scale))  # JSON has no tuples
        object.__setattr__(self, "ratio", tuple(self.ratio))
        check_finite("augment", (*self.scale, *self.ratio, self.rotate, self.magnitude), self)
        for name in ("flip", "policy", "erase", "cutmix", "mixup", "jitter"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"augment.{name} must be between 0 and 1, got {getattr(self, name)}.")
        for name in ("pad", "rotate", "operations"):
            if getattr(self, name) < 0:
                raise ValueError(f"augment.{name} must be 0 or more, got {getattr(self, name)}.")
        for name in ("scale", "ratio"):
            bounds = getattr(self, name)
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
                raise ValueError(f"augment.{name} must be (smallest, largest), both above 0, got {bounds}.")
        if not 0 <= self.magnitude <= 10:
            raise ValueError(f"augment.magnitude must be between 0 and 10, got {self.magnitude}.")
        if self.cutmix + self.mixup > 1:
            raise ValueError(
                f"augment.cutmix {self.cutmix} and augment.mixup {self.mixup} are probabilities of one choice and add "
                "up to more than 1. Lower one of them."
            )


def check_finite(name: str, numbers: Iterable[float], value: object) -> None:
    """Raise `ValueError` if the setting `name` holds numbers that float32 arithmetic may overflow on."""
    if not all(abs(n) < 1e30 for n in numbers):
        raise ValueError(f"{name} must be made of finite numbers below 1e30, got {value}.")


def augmented(
    images: Tensor,
    labels: Tensor,
    augment: Augment,
    rng: Draws,
    *,
    size: int | None = None,
    mean: Sequence[float],
    std: Sequence[float],
    mix: bool = True,
) -> tuple[Tensor, Targets]:
    """A training batch from uint8 `images` (B, 3, H, W) and `labels` (B,): floats (B, 3, size, size) and `Targets`.

    Larger images are cut at random; without `size` the output is as large as the input. `mix=False` switches off mixup
    and cutmix and changes no other random choice.
    """
    shape = (size, size) if size else images.shape[2:]
    resampled = augment.scale != (1.0, 1.0) or augment.ratio != (1.0, 1.0) or augment.rotate
    window = images.shape[2:] if resampled else shape
    x = shift_and_flip(images, window, augment.pad, augment.flip, rng).float().div_(255)
    if resampled:
        x = resized_crop(x, shape, augment.scale, augment.ratio, augment.rotate, rng)
    if augment.operations:
        x = randaugment(x, augment.operations, augment.magnitude, rng)
    if augment.jitter:
        x = color_jitter(x, augment.jitter, rng)
    if augment.policy:
        x = gray_solarize_posterize(x, augment.policy, rng)
    x = normalized(x, mean, std)
    if augment.erase:
        x = erased(x, augment.erase, rng)
    if mix and (augment.cutmix or augment.mixup):
        return mixed(x, labels, augment.cutmix, augment.mixup, rng)
    # A copy: the same tensor twice would be another case to a compiler, and a second compilation.
    return x, Targets(labels, labels.clone(), torch.ones(len(x), device=x.device))


def normalized(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x − mean) / std by channel; uint8 is first scaled to [0, 1]."""
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    # Channel by channel from Python numbers: a tensor made of them here would wait for the device at every batch.
    return torch.stack([(x[:, c] - m).div_(s) for c, (m, s) in enumerate(zip(mean, std, strict=True))], dim=1)
