"""Erasing, mixup and cutmix of a normalized batch, and the soft labels that come of it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitlens.data.augment.draws import Draws


class Targets(NamedTuple):
    """Soft labels without one-hot rows: class ``a`` with weight ``lam`` and class ``b`` with 1 − ``lam``; each (B,)."""

    a: Tensor
    b: Tensor
    lam: Tensor


def erased(x: Tensor, probability: float, rng: Draws) -> Tensor:
    """Zero (the mean color, once normalized) a rectangle: area 2 to 33 %, ratio 0.3 to 3.3, as in the paper."""
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
    """Mix each sample with its neighbor in the batch: by cutmix, by mixup or not at all, with these chances.

    Neighbors stay together when a batch is cut into parts of an even number of samples; the last of an odd number has
    none and stays as it is.

    λ is drawn per sample; after cutmix it is the share of pixels that really stayed (the box is cut at the border).
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
    other = torch.arange(b, device=x.device)
    other = (other ^ 1).clamp(max=b - 1)
    # x·1 + other·0 is x to the bit, which lerp does not promise.
    return (x * weight).addcmul_(x[other], 1 - weight), Targets(labels, labels[other], weight.mean(dim=(1, 2, 3)))
