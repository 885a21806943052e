"""Where a training image is cut from: shifts, flips, resized crops, rotation; a whole batch at once.

Shapes: B batch, C = 3 channels, H × W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlens.data.augment.draws import Draws


def shift_and_flip(images: Tensor, size: Sequence[int], pad: int, flip: float, rng: Draws) -> Tensor:
    """Windows of ``size`` (rows, columns) cut at random, each at its own place, and mirrored with chance ``flip``.

    They reach up to ``pad`` reflected pixels beyond the image. Raises ``ValueError`` for windows larger than the image.
    """
    b, _, h, w = images.shape
    if not pad and not flip and (h, w) == tuple(size):
        return images
    if size[0] > h or size[1] > w:
        raise ValueError(f"A window of {size[0]}×{size[1]} pixels cannot be cut from an image of {h}×{w}.")
    check_pad(pad, h, w)
    dy, dx, mirror = rng.uniform(3, b)[:, :, None]
    if not pad and (h, w) == tuple(size):
        return torch.where(mirror[..., None, None] < flip, images.flip(3), images)
    rows = torch.arange(size[0], device=images.device) - pad + (dy * (h - size[0] + 2 * pad + 1)).long()
    columns = torch.arange(size[1], device=images.device) - pad + (dx * (w - size[1] + 2 * pad + 1)).long()
    rows, columns = _reflect(rows, h), _reflect(columns, w)
    columns = torch.where(mirror < flip, columns.flip(1), columns)
    sample = torch.arange(b, device=images.device)[:, None, None]
    # The channel slice between advanced indices moves C last: (B, H, W, C).
    return images[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def check_pad(pad: int, h: int, w: int) -> None:
    """Raise ``ValueError`` for a border that is wider than reflection makes it."""
    if pad >= min(h, w):
        raise ValueError(f"Reflection reaches {min(h, w) - 1} pixels into an image of {h}×{w}; augment.pad is {pad}.")


def _reflect(index: Tensor, n: int) -> Tensor:
    index = index.abs()
    return torch.where(index >= n, 2 * (n - 1) - index, index)


def resized_crop(
    x: Tensor,
    size: Sequence[int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rotate: float,
    rng: Draws,
) -> Tensor:
    """Random resized crop and rotation in one bilinear resampling to ``size`` (rows, columns).

    In the coordinates of ``affine_grid`` an image spans [−1, 1]: a crop of width w and height h (shares of the image)
    at center (cx, cy) reads position (cx + w·u, cy + h·v) for the output position (u, v).
    """
    b = len(x)
    area, log_ratio, angle, cx, cy = rng.uniform(5, b)
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
    # What F.affine_grid makes of it, by rows and columns: a matrix product for each pixel takes longer than sampling.
    v, u = (torch.arange(1 - n, n, 2, device=x.device)[:, None] / n for n in size)
    across, down, center = theta[:, None].unbind(-1)
    grid = (down * v)[:, :, None] + (across * u + center)[:, None]  # (B, rows, columns, 2)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
