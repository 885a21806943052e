"""The operations of `augment`, each on a whole batch, and the random numbers they use.

Shapes: B batch, C = 3 channels, H × W pixels. Floats are (B, 3, H, W) in [0, 1] unless a function says otherwise.
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
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv


def seed_of(*key: int) -> int:
    """One well-mixed seed from several non-negative numbers, usually (seed, epoch, step)."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1  # torch's seeds are signed


def generator(device: torch.device | str, *key: int) -> torch.Generator:
    """A generator on `device` whose seed depends on `key` alone."""
    return torch.Generator(device).manual_seed(seed_of(*key))


@dataclass(frozen=True)
class Draws:
    """Uniform random numbers for part `part` of `parts` equal parts of a batch.

    They are drawn for the whole batch and then cut, so a batch augmented in parts, one after the other or by several
    processes, equals the batch augmented at once.
    """

    generator: torch.Generator
    part: int = 0
    parts: int = 1

    def uniform(self, n: int, samples: int) -> Tensor:
        """(n, samples) numbers in [0, 1): n for each sample of this part."""
        whole = torch.rand(n, samples * self.parts, generator=self.generator, device=self.generator.device)
        return whole[:, self.part * samples : (self.part + 1) * samples]


def draws(device: torch.device | str, *key: int, part: int = 0, parts: int = 1) -> Draws:
    """`Draws` on `device` whose seed depends on `key` alone."""
    return Draws(generator(device, *key), part, parts)


# Geometry


def shift_and_flip(images: Tensor, size: Sequence[int], pad: int, flip: float, rng: Draws) -> Tensor:
    """Windows of `size` (rows, columns), each cut at its own random place and mirrored with probability `flip`.

    They reach up to `pad` reflected pixels beyond the image. Raises `ValueError` for windows larger than the image.
    """
    b, _, h, w = images.shape
    unchanged = not pad and (h, w) == tuple(size)
    if unchanged and not flip:
        return images
    if size[0] > h or size[1] > w:
        raise ValueError(f"A window of {size[0]}×{size[1]} pixels cannot be cut from an image of {h}×{w}.")
    check_pad(pad, h, w)
    dy, dx, mirror = rng.uniform(3, b)[:, :, None]
    if unchanged:
        return torch.where(mirror[..., None, None] < flip, images.flip(3), images)
    rows = torch.arange(size[0], device=images.device) - pad + (dy * (h - size[0] + 2 * pad + 1)).long()
    columns = torch.arange(size[1], device=images.device) - pad + (dx * (w - size[1] + 2 * pad + 1)).long()
    rows, columns = _reflect(rows, h), _reflect(columns, w)
    columns = torch.where(mirror < flip, columns.flip(1), columns)
    sample = torch.arange(b, device=images.device)[:, None, None]
    # The channel slice between advanced indices moves C last: (B, H, W, C).
    return images[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def check_pad(pad: int, h: int, w: int) -> None:
    """Raise `ValueError` if an image of h×w pixels is too small for a reflected border of `pad` pixels."""
    if pad >= min(h, w):
        reach = min(h, w) - 1
        raise ValueError(f"augment.pad is {pad}, but reflection reaches {reach} pixels into an image of {h}×{w}.")


def _reflect(index: Tensor, n: int) -> Tensor:
    index = index.abs()
    return torch.where(index >= n, 2 * (n - 1) - index, index)


def resized_crop(
    x: Tensor, size: Sequence[int], scale: tuple[float, float], ratio: tuple[float, float], rotate: float, rng: Draws
) -> Tensor:
    """Random resized crop and rotation in one bilinear resampling to `size` (rows, columns).

    In the coordinates of `affine_grid` an image spans [−1, 1]: a crop of width w and height h (shares of the image)
    at center (cx, cy) reads position (cx + w·u, cy + h·v) for the output position (u, v).
    """
    area, log_ratio, angle, cx, cy = rng.uniform(5, len(x))
    area = scale[0] + (scale[1] - scale[0]) * area
    log_ratio = math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * log_ratio
    # A crop wider than the image is cut to it, so a scale of 1 shows the whole image.
    limit = max(1.0, math.sqrt(scale[1]))
    w = (area.sqrt() * (log_ratio / 2).exp()).clamp(max=limit)
    h = (area.sqrt() * (-log_ratio / 2).exp()).clamp(max=limit)
    cx, cy = (2 * cx - 1) * (1 - w).abs(), (2 * cy - 1) * (1 - h).abs()
    angle = (2 * angle - 1) * math.radians(rotate)
    theta = torch.stack([w * angle.cos(), -h * angle.sin(), cx, w * angle.sin(), h * angle.cos(), cy], dim=1)
    # What F.affine_grid makes of it, by rows and columns: a matrix product for each pixel takes longer than sampling.
    v, u = (torch.arange(1 - n, n, 2, device=x.device)[:, None] / n for n in size)
    across, down, center = theta.view(-1, 1, 2, 3).unbind(-1)
    grid = (down * v)[:, :, None] + (across * u + center)[:, None]  # (B, rows, columns, 2)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


# Color

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in Pillow and torchvision


def color_jitter(x: Tensor, strength: float, rng: Draws) -> Tensor:
    """Brightness, contrast and saturation changed in this order, each result clipped to [0, 1] as torchvision does."""
    factors = 1 + strength * (2 * rng.uniform(3, len(x))[..., None, None, None] - 1)
    x = (x * factors[0]).clamp_(0, 1)
    mean = gray(x).mean(dim=(1, 2, 3), keepdim=True)
    x = x.mul_(factors[1]).add_(mean * (1 - factors[1])).clamp_(0, 1)
    colorless = gray(x)
    return x.mul_(factors[2]).add_(colorless * (1 - factors[2])).clamp_(0, 1)


def gray(x: Tensor) -> Tensor:
    """Luma (B, 1, H, W)."""
    return LUMA[0] * x[:, 0:1] + LUMA[1] * x[:, 1:2] + LUMA[2] * x[:, 2:3]


def gray_solarize_posterize(x: Tensor, probability: float, rng: Draws) -> Tensor:
    """With `probability` one of three: grayscale, inversion of what is brighter than ½, 3 bits a channel."""
    drawn = rng.uniform(1, len(x))[0, :, None, None, None]
    third = probability / 3
    x = torch.where((drawn >= probability * 2 / 3) & (drawn < probability), posterize(x), x)
    x = torch.where((drawn >= third) & (drawn < probability * 2 / 3), torch.where(x < 0.5, x, 1 - x), x)
    return torch.where(drawn < third, gray(x), x)


def posterize(x: Tensor) -> Tensor:
    """Keep the 3 highest of 8 bits."""
    step = 2**5
    return (x * 255 / step).floor() * (step / 255)


# RandAugment

BILINEAR = InterpolationMode.BILINEAR


def _affine(x: Tensor, *, dx: float = 0.0, dy: float = 0.0, shear=(0.0, 0.0)) -> Tensor:
    # A shear is a slope about the top left corner, as in Cubuk et al. 2018.
    shear = [float(torch.rad2deg(torch.atan(torch.tensor(s)))) for s in shear]
    center = [0, 0] if any(shear) else None
    return tv.affine(x, 0.0, [round(dx), round(dy)], 1.0, shear, center=center, interpolation=BILINEAR)


# Each takes uint8 images (n, 3, H, W) and a strength s in [−1, 1]; ranges as in torchvision's RandAugment.
OPERATIONS = (
    ("identity", lambda x, s: x),
    ("shear x", lambda x, s: _affine(x, shear=(0.3 * s, 0.0))),
    ("shear y", lambda x, s: _affine(x, shear=(0.0, 0.3 * s))),
    ("translate x", lambda x, s: _affine(x, dx=150 / 331 * x.shape[-1] * s)),
    ("translate y", lambda x, s: _affine(x, dy=150 / 331 * x.shape[-2] * s)),
    ("rotate", lambda x, s: tv.rotate(x, 30 * s, interpolation=BILINEAR)),
    ("brightness", lambda x, s: tv.adjust_brightness(x, 1 + 0.9 * s)),
    ("color", lambda x, s: tv.adjust_saturation(x, 1 + 0.9 * s)),
    ("contrast", lambda x, s: tv.adjust_contrast(x, 1 + 0.9 * s)),
    ("sharpness", lambda x, s: tv.adjust_sharpness(x, 1 + 0.9 * s)),
    ("posterize", lambda x, s: tv.posterize(x, 8 - round(4 * abs(s)))),
    ("solarize", lambda x, s: tv.solarize(x, 255 * (1 - abs(s)))),
    ("autocontrast", lambda x, s: tv.autocontrast(x)),
    ("equalize", lambda x, s: tv.equalize(x)),
)


def randaugment(x: Tensor, operations: int, magnitude: float, rng: Draws) -> Tensor:
    """RandAugment (Cubuk et al. 2019): `operations` random operations in a row on each sample, at one strength.

    `magnitude` is the paper's M, 0…10; signed operations go either way. Samples that drew the same operation go
    through it together. The values pass through 8 bits, and grouping makes the host wait for the device: some ten
    milliseconds a batch, which only matters for small models.
    """
    x = (x * 255).round().to(torch.uint8)
    for _ in range(operations):
        which, sign = rng.uniform(2, len(x))
        which = (which * len(OPERATIONS)).long() * 2 + (sign < 0.5)
        for group in which.unique().tolist():
            chosen = (which == group).nonzero()[:, 0]
            strength = magnitude / 10 * (-1 if group % 2 else 1)
            x[chosen] = OPERATIONS[group // 2][1](x[chosen], strength)
    return x.float() / 255


# Erasing and mixing


class Targets(NamedTuple):
    """Soft labels without one-hot rows: class `a` with weight `lam` and class `b` with 1 − `lam`; each (B,)."""

    a: Tensor
    b: Tensor
    lam: Tensor


def erased(x: Tensor, probability: float, rng: Draws) -> Tensor:
    """Normalized `x` with a rectangle set to 0, the mean color.

    It has 2 to 33 % of the area and an aspect ratio from 0.3 to 3.3, as in the paper, and is cut off at the border.
    """
    b, _, h, w = x.shape
    drawn, area, log_ratio, cy, cx = rng.uniform(5, b)
    area, root = 0.02 + 0.31 * area, ((2 * log_ratio - 1) * math.log(3.3) / 2).exp()
    inside = rectangle(cy, cx, area.sqrt() / root, area.sqrt() * root, h, w)
    return x * ~(inside & (drawn < probability)[:, None, None, None])


def rectangle(cy: Tensor, cx: Tensor, height: Tensor, width: Tensor, h: int, w: int) -> Tensor:
    """Boolean (B, 1, h, w): rectangles with center and sides as shares of the image (B,), cut at its border."""
    top, bottom = ((cy - height / 2) * h).round(), ((cy + height / 2) * h).round()
    left, right = ((cx - width / 2) * w).round(), ((cx + width / 2) * w).round()
    y, x = torch.arange(h, device=cy.device), torch.arange(w, device=cy.device)
    rows = (y >= top[:, None]) & (y < bottom[:, None])
    columns = (x >= left[:, None]) & (x < right[:, None])
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def mixed(x: Tensor, labels: Tensor, cutmix: float, mixup: float, rng: Draws) -> tuple[Tensor, Targets]:
    """Each sample mixed with its neighbor in the batch, by cutmix, mixup or not at all, with these probabilities.

    Neighbors stay together when a batch is cut into parts of an even number of samples; the last of an odd number is
    left as it is. λ is drawn per sample; after cutmix it is the share of pixels that stayed (the box is cut at the
    border).
    """
    b, _, h, w = x.shape
    kind, lam, cy, cx = rng.uniform(4, b)
    side = (1 - lam).sqrt()
    box = rectangle(cy, cx, side, side, h, w)
    weight = torch.where(
        (kind < cutmix)[:, None, None, None],
        (~box).float(),
        torch.where(kind < cutmix + mixup, lam, torch.ones_like(lam))[:, None, None, None],
    )
    other = (torch.arange(b, device=x.device) ^ 1).clamp(max=b - 1)
    # x·1 + other·0 is x to the bit, which lerp does not promise.
    return (x * weight).addcmul_(x[other], 1 - weight), Targets(labels, labels[other], weight.mean(dim=(1, 2, 3)))
