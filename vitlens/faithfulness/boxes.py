"""Whether a map lies on the object, where a box around it is known.

Boxes: (B, 4), or (4,) for all images, as left, top, right, bottom in input pixels from the image's upper left corner.
Maps: (…, B, rows, cols) on the patches of `grid`, that of a capture or of `token_grid(model, image)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vitlens.faithfulness.covering import checked_maps
from vitlens.recorder.grid import TokenGrid


def pointing(maps: Tensor, boxes: Tensor | Sequence, grid: TokenGrid, *, tolerance: float = 0.0) -> Tensor:
    """(…, B) the pointing game (Zhang et al. 2016, arXiv 1608.00507): 1 where the map's maximum hits the box, else 0.

    The maximum is the center of the highest patch, or of the part of it that is in the image. It hits if its distance
    from the box is at most the tolerance, in pixels (Zhang et al. allow 15). Several highest patches share the score,
    so a constant map scores what a random point scores. The mean over images is the accuracy. Raises ValueError for
    boxes that are not in the image, and a tolerance below 0.
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance is a distance in pixels, a finite number from 0 up, not {tolerance!r}.")
    maps = checked_maps(maps, grid)
    left, top, right, bottom = _edges(boxes, maps, grid)
    y, x = torch.cartesian_prod(*((edges[1:] + edges[:-1]) / 2 for edges in _patch_edges(grid))).T
    beside = torch.maximum(left - x, x - right).clamp(min=0)
    above = torch.maximum(top - y, y - bottom).clamp(min=0)
    hit = (torch.hypot(above, beside) <= tolerance).to(maps.device)
    values = maps.flatten(-2)
    highest = values == values.amax(-1, keepdim=True)
    return (highest & hit).sum(-1) / highest.sum(-1)


def energy_in_box(maps: Tensor, boxes: Tensor | Sequence, grid: TokenGrid) -> Tensor:
    """(…, B) the energy-based pointing game (Wang et al. 2020, arXiv 1910.01279): the share of the map in the box.

    From 0 to 1. The positive part of the map is spread evenly over the pixels of each patch, of which a box may cover a
    part. nan where nothing is positive. A map that is the same everywhere scores the share of the patches' area that
    the box covers. Raises ValueError for boxes that are not in the image.
    """
    maps = checked_maps(maps, grid)
    left, top, right, bottom = _edges(boxes, maps, grid)
    y, x = _patch_edges(grid)
    inside = _overlap(y, top, bottom)[..., :, None] * _overlap(x, left, right)[..., None, :]
    areas = y.diff()[:, None] * x.diff()
    wide = torch.promote_types(maps.dtype, torch.float32)
    energy, areas, inside = (t.to(maps.device, wide) for t in (maps.clamp(min=0), areas, inside))
    return (energy * inside).sum((-2, -1)) / (energy * areas).sum((-2, -1))


def _patch_edges(grid: TokenGrid) -> tuple[Tensor, Tensor]:
    """Where rows and columns of patches begin and end, (rows + 1,) and (cols + 1,), no further than the image."""
    y, x = (
        torch.arange(count + 1, dtype=torch.float64).mul(side).clamp(max=pixels)
        for count, side, pixels in zip((grid.rows, grid.cols), grid.patch, grid.image, strict=True)
    )
    return y, x


def _overlap(edges: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """(…, N) pixels that each of the N intervals between the edges shares with start … stop, (…, 1)."""
    return (torch.minimum(edges[1:], stop) - torch.maximum(edges[:-1], start)).clamp(min=0)


def _edges(boxes: Tensor | Sequence, maps: Tensor, grid: TokenGrid) -> Sequence[Tensor]:
    """Left, top, right, bottom of each box, (B, 1) or (1,), float64 on the CPU."""
    boxes = torch.as_tensor(boxes).detach().cpu().double()
    if boxes.shape not in ((4,), (maps.shape[-3], 4)):
        raise ValueError(
            "Expected (left, top, right, bottom) for all images, shape (4,), or for each, shape "
            f"({maps.shape[-3]}, 4), got shape {tuple(boxes.shape)}."
        )
    left, top, right, bottom = boxes.split(1, -1)
    height, width = grid.image
    fits = (left >= 0) & (left < right) & (right <= width) & (top >= 0) & (top < bottom) & (bottom <= height)
    if not fits.all():
        wrong = boxes.reshape(-1, 4)[~fits.reshape(-1)][0].tolist()
        raise ValueError(
            f"A box lies inside the image, 0 ≤ left < right ≤ {width} and 0 ≤ top < bottom ≤ {height} in input pixels, "
            f"got (left, top, right, bottom) = {tuple(wrong)}. Resize and crop boxes together with the picture."
        )
    return left, top, right, bottom
