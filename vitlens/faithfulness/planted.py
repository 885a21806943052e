"""A planted truth: one colored patch decides the class of a picture, so it is known where a map has to point."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlens.data import ImageSet
from vitlens.train.recipes import recipe

COLORS = {"red": (200, 60, 60), "green": (60, 170, 60), "blue": (70, 90, 210), "yellow": (190, 170, 40)}
SIDE, PATCH = 32, 4  # pixels
NOISE = 8  # levels of 255

RECIPE = recipe("digits").override(
    f"image_size={SIDE}", f"patch_size={PATCH}", "width=48", "depth=3", f"num_classes={len(COLORS)}", "epochs=5",
    "augment.rotate=0", "augment.scale=[1,1]",
)  # fmt: skip
"""A ViT of 8 × 8 patches that learns them within a minute, from 4,000 pictures: 0.1 M parameters."""


class Planted(NamedTuple):
    """data: pictures with the class of their first mark as their label. classes, patches: (N, marks) the class of each
    mark and the patch that it fills, counted row by row."""

    data: ImageSet
    classes: Tensor
    patches: Tensor

    def hits(self, maps: Tensor, mark: int = 0) -> Tensor:
        """(N,) whether the highest of the patches of each map, (N, rows, cols), is the mark."""
        return maps.flatten(1).argmax(1).cpu() == self.patches[:, mark]


def planted(count: int, seed: int, *, marks: int = 1) -> Planted:
    """`count` pictures of 32 × 32 pixels: smooth gray with noise, on which patches of 4 × 4 are colored.

    marks: colored patches in each picture, in different places and of different classes, 1 to 4. Whoever knows the
    marks knows the class, and nothing else tells it. A function of the seed alone.
    """
    if not 1 <= marks <= len(COLORS):
        raise ValueError(f"A picture has 1 to {len(COLORS)} marks, of different colors, but marks={marks} came.")
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
