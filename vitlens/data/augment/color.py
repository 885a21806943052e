"""Color of a whole batch of floats (B, 3, H, W) in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor

from vitlens.data.augment.draws import Draws

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in Pillow and torchvision


def color_jitter(x: Tensor, strength: float, rng: Draws) -> Tensor:
    """Brightness, contrast, saturation, in this order, each clipped to [0, 1] as torchvision does."""
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
    """With ``probability`` one of three: grayscale, inversion of what is brighter than ½, 3 bits a channel."""
    drawn = rng.uniform(1, len(x))[0, :, None, None, None]
    x = torch.where(drawn < probability, torch.where(drawn < probability * 2 / 3, x, posterize(x)), x)
    x = torch.where((drawn >= probability / 3) & (drawn < probability * 2 / 3), torch.where(x < 0.5, x, 1 - x), x)
    return torch.where(drawn < probability / 3, gray(x), x)


def posterize(x: Tensor) -> Tensor:
    """Keep the 3 highest of 8 bits."""
    step = 2**5
    return (x * 255 / step).floor() * (step / 255)
