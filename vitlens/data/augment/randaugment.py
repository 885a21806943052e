"""RandAugment (Cubuk et al. 2019) of a whole batch: samples that drew the same operation go through it together."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from vitlens.data.augment.draws import Draws

BILINEAR = {"interpolation": InterpolationMode.BILINEAR}


def _affine(x: Tensor, *, dx: float = 0.0, dy: float = 0.0, shear=(0.0, 0.0)) -> Tensor:
    # A shear is a slope about the top left corner, as in Cubuk et al. 2018.
    shear = [float(torch.rad2deg(torch.atan(torch.tensor(s)))) for s in shear]
    center = [0, 0] if any(shear) else None
    return tv.affine(x, 0.0, [round(dx), round(dy)], 1.0, shear, center=center, **BILINEAR)


# Each takes uint8 images (n, 3, H, W) and a strength s in [−1, 1]; ranges as in torchvision's RandAugment.
OPERATIONS = (
    ("identity", lambda x, s: x),
    ("shear x", lambda x, s: _affine(x, shear=(0.3 * s, 0.0))),
    ("shear y", lambda x, s: _affine(x, shear=(0.0, 0.3 * s))),
    ("translate x", lambda x, s: _affine(x, dx=150 / 331 * x.shape[-1] * s)),
    ("translate y", lambda x, s: _affine(x, dy=150 / 331 * x.shape[-2] * s)),
    ("rotate", lambda x, s: tv.rotate(x, 30 * s, **BILINEAR)),
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
    """``operations`` random operations in a row on each sample of floats (B, 3, H, W) in [0, 1], at one strength.

    magnitude: 0…10, the paper's M. Signed operations go either way. The values pass through 8 bits, and grouping the
    samples makes the host wait for the device: some ten milliseconds a batch, which only large models do not notice.
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
