"""Pictures with a planted truth: one colored patch decides the class, so it is known where a map has to point."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlens.data.imageset import ImageSet

COLORS = {"red": (200, 60, 60), "green": (60, 170, 60), "blue": (70, 90, 210), "yellow": (190, 170, 40)}
SIDE, PATCH = 32, 4  # pixels
NOISE = 8  # levels of 255


class Planted(NamedTuple):
    """Pictures and the truth about them.

    data: the pictures, labeled with the class of their first mark. classes, patches: (N, marks) each mark's class and
    the patch that it fills, counted row by row.
    """

    data: ImageSet
    classes: Tensor
    patches: Tensor

    def hits(self, maps: Tensor, mark: int = 0) -> Tensor:
        """(N,) whether the highest patch of each of the (N, rows, cols) maps is the mark."""
        return maps.flatten(1).argmax(1).cpu() == self.patches[:, mark]


def planted(count: int, seed: int, *, marks: int = 1) -> Planted:
    """`count` pictures of 32 × 32 pixels: smooth gray with noise, on which patches of 4 × 4 are colored.

    marks: colored patches in each picture, 1 to 4, in different places and of different classes. The marks alone tell
    the class. The pictures depend on nothing but the seed.
    """
    if not 1 <= marks <= len(COLORS):
        raise ValueError(f"Expected 1 to {len(COLORS)} marks, each of another color, got marks={marks}.")
    random, side = torch.Generator().manual_seed(seed), SIDE // PATCH
    coarse = 128 + 30 * torch.randn(count, 1, side + 1, side + 1, generator=random)
    gray = F.interpolate(coarse, (SIDE, SIDE), mode="bilinear").expand(-1, 3, -1, -1)
    order = lambda n: torch.rand(count, n, generator=random).argsort(1)[:, :marks]  # noqa: E731
    patches, classes = order(side**2), order(len(COLORS))
    images, colors = gray.clone(), torch.tensor(list(COLORS.values()), dtype=torch.float32)
    for mark in range(marks):
        here = F.one_hot(patches[:, mark], side**2).view(count, 1, side, side).repeat_interleave(PATCH, 2)
        here = here.repeat_interleave(PATCH, 3).bool()
        images = torch.where(here, colors[classes[:, mark], :, None, None], images)
    images = images + NOISE * torch.randn(count, 3, SIDE, SIDE, generator=random)
    images = images.clamp(0, 255).round().to(torch.uint8)
    return Planted(ImageSet(images, classes[:, 0].contiguous(), tuple(COLORS)), classes, patches)
