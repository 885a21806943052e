"""The order in which a map ranks the patches, and random orders."""

from __future__ import annotations

import torch
from torch import Tensor

from vitlens.recorder.grid import TokenGrid


def ranks(maps: Tensor, seed: int) -> Tensor:
    """(…, P) rank of each patch, 0 for the highest value, of (…, rows, cols) maps.

    Ties are broken at random by the seed, alike for all maps and images: so a constant map is a random order, equal
    maps score alike, and an image gives in a batch what it gives alone.
    """
    shuffled = _permutations(maps.shape[-2:].numel(), 1, seed)[0]
    order = maps.detach().cpu().flatten(-2)[..., shuffled].argsort(dim=-1, descending=True, stable=True)
    return shuffled[order].argsort(-1)


def random_maps(grid: TokenGrid, count: int, seed: int = 0) -> Tensor:
    """(count, rows, cols) maps that rank the patches at random, without ties: the control of every score.

    They are drawn one after the other, so a larger count with the same seed begins with the same maps. The order that
    breaks the ties of `ranks` is not among them.
    """
    return _permutations(grid.patches, count + 1, seed)[1:].float().unflatten(-1, (grid.rows, grid.cols))


def _permutations(patches: int, count: int, seed: int) -> Tensor:
    """(count, P), on the CPU, where the same seed means the same numbers everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(patches, generator=generator) for _ in range(count)])
