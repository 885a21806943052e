"""Augmentation of a whole batch at once, on the device that holds it: uint8 in, normalised floats and targets out.

Every random choice is drawn from one ``torch.Generator``, made by ``generator(device, seed, epoch, step)``: the same
arguments give the same batch on the same device, and no global state is read or written. timm's transforms work
image by image in loader workers; here a batch of 1,024 costs about a millisecond of an accelerator.

Shapes: B batch, C = 3 channels, H × W pixels. Floats lie in [0, 1] until they are normalised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in Pillow and torchvision


@dataclass(frozen=True)
class Augment:
    """What is done to a training batch; the defaults do nothing."""

    flip: float = 0.0
    """Probability of a horizontal flip. 0 where left and right carry meaning (digits)."""
    pad: int = 0
    """Pixels of reflected border from which a window of the original size is cut at random."""
    scale: tuple[float, float] = (1.0, 1.0)
    """Range of the share of the image's area that a random resized crop shows (Szegedy et al. 2015)."""
    ratio: tuple[float, float] = (1.0, 1.0)
    """Range of that crop's aspect ratio, width by height, drawn on a logarithmic scale."""
    rotate: float = 0.0
    """Largest rotation in degrees, either way."""
    jitter: float = 0.0
    """Brightness, contrast and saturation are each multiplied by a factor from 1 ± jitter."""
    policy: float = 0.0
    """Probability of one of greyscale, solarise, posterise: DeiT III's 3-Augment, with posterise in place of blur
    because at 64 px little is left to blur."""
    erase: float = 0.0
    """Probability of erasing a rectangle of 2 to 33 % of the area with the mean colour (Zhong et al. 2017)."""
    cutmix: float = 0.0
    """Probability, per sample, of pasting in a rectangle of another (Yun et al. 2019)."""
    mixup: float = 0.0
    """Probability, per sample, of blending with another (Zhang et al. 2017). λ is uniform: Beta(1, 1), as in CutMix."""

    def __post_init__(self):
        object.__setattr__(self, "scale", tuple(self.scale))  # JSON has no tuples
        object.__setattr__(self, "ratio", tuple(self.ratio))
        for name in ("flip", "policy", "erase", "cutmix", "mixup", "jitter"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"augment.{name} lies between 0 and 1; {getattr(self, name)} came.")
        if self.cutmix + self.mixup > 1:
            raise ValueError(
                f"A sample is mixed in one way: augment.cutmix {self.cutmix} and augment.mixup {self.mixup} are "
                "probabilities that add up to more than 1. Lower one of them."
            )
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"augment.scale is (smallest, largest) share of the area, above 0; {self.scale} came.")
        if len(self.ratio) != 2 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"augment.ratio is (smallest, largest) width by height, above 0; {self.ratio} came.")
        if self.pad < 0 or self.rotate < 0:
            raise ValueError(f"augment.pad {self.pad} (pixels) and augment.rotate {self.rotate} (degrees) are ≥ 0.")


class Targets(NamedTuple):
    """Soft labels without one-hot rows: class ``a`` with weight ``lam`` and class ``b`` with 1 − ``lam``; each (B,)."""

    a: Tensor
    b: Tensor
    lam: Tensor


def seed_of(*key: int) -> int:
    """One well-mixed seed from several non-negative numbers, usually (seed, epoch, step)."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1  # torch's seeds are signed


def generator(device: torch.device | str, *key: int) -> torch.Generator:
    """A generator on ``device`` whose seed is a function of ``key``."""
    return torch.Generator(device).manual_seed(seed_of(*key))


def augmented(
    images: Tensor,
    labels: Tensor,
    augment: Augment,
    rng: torch.Generator,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    mix: bool = True,
) -> tuple[Tensor, Targets]:
    """A training batch from uint8 ``images`` (B, 3, H, W) and ``labels`` (B,): float (B, 3, H, W) and ``Targets``.

    ``mix=False`` switches off mixup, cutmix and nothing else: the other choices stay what they were.
    """
    x = shift_and_flip(images, augment.pad, augment.flip, rng).float() / 255
    if augment.scale != (1.0, 1.0) or augment.ratio != (1.0, 1.0) or augment.rotate:
        x = resized_crop(x, augment.scale, augment.ratio, augment.rotate, rng)
    if augment.jitter:
        x = colour_jitter(x, augment.jitter, rng)
    if augment.policy:
        x = grey_solarise_posterise(x, augment.policy, rng)
    x = normalised(x, mean, std)
    if augment.erase:
        x = erased(x, augment.erase, rng)
    if mix and (augment.cutmix or augment.mixup):
        return mixed(x, labels, augment.cutmix, augment.mixup, rng)
    # A copy: the same tensor twice would be another case to a compiler, and a second compilation.
    return x, Targets(labels, labels.clone(), torch.ones(len(x), device=x.device))


def normalised(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x − mean) / std by channel; uint8 is first scaled to [0, 1]."""
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    # Channel by channel from Python numbers: a tensor made of them here would wait for the device at every batch.
    return torch.stack([(x[:, c] - m) / s for c, (m, s) in enumerate(zip(mean, std, strict=True))], dim=1)


def shift_and_flip(images: Tensor, pad: int, flip: float, rng: torch.Generator) -> Tensor:
    """Cut each image at its own place from a border of ``pad`` reflected pixels and mirror it with chance ``flip``."""
    if not pad and not flip:
        return images
    b, _, h, w = images.shape
    if pad >= min(h, w):
        raise ValueError(f"Reflection reaches {min(h, w) - 1} pixels into a {h}×{w} image; augment.pad is {pad}.")
    dy, dx = torch.randint(-pad, pad + 1, (2, b, 1), generator=rng, device=images.device)
    rows = _reflect(torch.arange(h, device=images.device) + dy, h)
    columns = _reflect(torch.arange(w, device=images.device) + dx, w)
    mirror = _chance((b, 1), flip, images, rng)
    columns = torch.where(mirror, columns.flip(1), columns)
    sample = torch.arange(b, device=images.device)[:, None, None]
    # The channel slice between advanced indices moves C last: (B, H, W, C).
    return images[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _reflect(index: Tensor, n: int) -> Tensor:
    index = index.abs()
    return torch.where(index >= n, 2 * (n - 1) - index, index)


def resized_crop(
    x: Tensor, scale: tuple[float, float], ratio: tuple[float, float], rotate: float, rng: torch.Generator
) -> Tensor:
    """Random resized crop and rotation in one bilinear resampling to the original size.

    In the coordinates of ``affine_grid`` an image spans [−1, 1]: a crop of width w and height h (shares of the image)
    at centre (cx, cy) reads position (cx + w·u, cy + h·v) for the output position (u, v).
    """
    b = len(x)
    area, log_ratio, angle, cx, cy = torch.rand(5, b, generator=rng, device=x.device)
    area = scale[0] + (scale[1] - scale[0]) * area
    log_ratio = math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * log_ratio
    # A crop wider than the image is cut to it, so a scale of 1 shows the whole image.
    limit = max(1.0, math.sqrt(scale[1]))
    w = (area.sqrt() * (log_ratio / 2).exp()).clamp(max=limit)
    h = (area.sqrt() * (-log_ratio / 2).exp()).clamp(max=limit)
    cx, cy = (2 * cx - 1) * (1 - w).abs(), (2 * cy - 1) * (1 - h).abs()
    angle = (2 * angle - 1) * math.radians(rotate)
    theta = torch.stack([w * angle.cos(), -h * angle.sin(), cx, w * angle.sin(), h * angle.cos(), cy], dim=1).view(
        b, 2, 3
    )
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def colour_jitter(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Brightness, contrast, saturation, in this order, each clipped to [0, 1] as torchvision does."""
    factors = 1 + strength * (2 * torch.rand(3, len(x), 1, 1, 1, generator=rng, device=x.device) - 1)
    x = (x * factors[0]).clamp(0, 1)
    mean = grey(x).mean(dim=(1, 2, 3), keepdim=True)
    x = torch.lerp(mean.expand_as(x), x, factors[1].expand_as(x)).clamp(0, 1)
    return torch.lerp(grey(x).expand_as(x), x, factors[2].expand_as(x)).clamp(0, 1)


def grey(x: Tensor) -> Tensor:
    """Luma (B, 1, H, W)."""
    return LUMA[0] * x[:, 0:1] + LUMA[1] * x[:, 1:2] + LUMA[2] * x[:, 2:3]


def grey_solarise_posterise(x: Tensor, probability: float, rng: torch.Generator) -> Tensor:
    """With ``probability`` one of three: greyscale, inversion of what is brighter than ½, 3 bits a channel."""
    drawn = torch.rand(len(x), 1, 1, 1, generator=rng, device=x.device)
    x = torch.where(drawn < probability, torch.where(drawn < probability * 2 / 3, x, posterise(x)), x)
    x = torch.where((drawn >= probability / 3) & (drawn < probability * 2 / 3), torch.where(x < 0.5, x, 1 - x), x)
    return torch.where(drawn < probability / 3, grey(x), x)


def posterise(x: Tensor, bits: int = 3) -> Tensor:
    """Keep the ``bits`` highest of 8 bits."""
    step = 2 ** (8 - bits)
    return (x * 255 / step).floor() * (step / 255)


def erased(x: Tensor, probability: float, rng: torch.Generator) -> Tensor:
    """Zero (the mean colour, once normalised) a rectangle: area 2 to 33 %, ratio 0.3 to 3.3, as in the paper."""
    b, _, h, w = x.shape
    drawn, area, log_ratio, cy, cx = torch.rand(5, b, generator=rng, device=x.device)
    area, root = 0.02 + 0.31 * area, ((2 * log_ratio - 1) * math.log(3.3) / 2).exp()
    inside = rectangle(cy, cx, area.sqrt() / root, area.sqrt() * root, h, w)
    return x * ~(inside & (drawn < probability)[:, None, None, None])


def rectangle(cy: Tensor, cx: Tensor, height: Tensor, width: Tensor, h: int, w: int) -> Tensor:
    """Boolean (B, 1, h, w): rectangles with centre and sides as shares of the image (B,), cut at its border."""
    top, bottom = ((cy - height / 2) * h).round(), ((cy + height / 2) * h).round()
    left, right = ((cx - width / 2) * w).round(), ((cx + width / 2) * w).round()
    y, x = torch.arange(h, device=cy.device), torch.arange(w, device=cy.device)
    rows = (y >= top[:, None]) & (y < bottom[:, None])
    columns = (x >= left[:, None]) & (x < right[:, None])
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def mixed(x: Tensor, labels: Tensor, cutmix: float, mixup: float, rng: torch.Generator) -> tuple[Tensor, Targets]:
    """Mix each sample with the one opposite in the batch: by cutmix, by mixup or not at all, with these chances.

    λ is drawn per sample; after cutmix it is the share of pixels that really stayed (the box is cut at the border).
    """
    b, _, h, w = x.shape
    kind, lam, cy, cx = torch.rand(4, b, generator=rng, device=x.device)
    side = (1 - lam).sqrt()
    box = rectangle(cy, cx, side, side, h, w)
    weight = torch.where(
        (kind < cutmix)[:, None, None, None],
        (~box).float(),
        torch.where(kind < cutmix + mixup, lam, torch.ones_like(lam))[:, None, None, None],
    )
    # x·1 + other·0 is x to the bit, which lerp does not promise.
    return x * weight + x.flip(0) * (1 - weight), Targets(labels, labels.flip(0), weight.mean(dim=(1, 2, 3)))


def _chance(shape: tuple[int, ...], probability: float, like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, device=like.device) < probability
