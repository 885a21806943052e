"""In which order a map names the patches, and orders that chance names."""

from __future__ import annotations

import torch
from torch import Tensor

from vitlens.recorder.grid import TokenGrid


def ranks(maps: Tensor, seed: int) -> Tensor:
    """(…, rows, cols) maps → (…, P) the place of each patch, 0 for the highest value.

    Patches of the same value come in an order drawn from the seed, the same for all maps and images, so that a constant
    map is a random order, equal maps score alike, and an image gives in a batch what it gives alone.
    """
    shuffled = _permutations(maps.shape[-2:].numel(), 1, seed)[0]
    order = maps.detach().cpu().flatten(-2)[..., shuffled].argsort(dim=-1, descending=True, stable=True)
    return shuffled[order].argsort(-1)


def random_maps(grid: TokenGrid, count: int, seed: int = 0) -> Tensor:
    """(count, rows, cols) maps that name the patches in random orders, without ties: the control of every score.

    They are drawn from the seed one after the other, so more of them begin with the same ones; the order in which the
    same seed breaks the ties of a map is not among them.
    """
    return _permutations(grid.patches, count + 1, seed)[1:].float().unflatten(-1, (grid.rows, grid.cols))


def _permutations(patches: int, count: int, seed: int) -> Tensor:
    """(count, P), on the CPU, where the same seed means the same numbers everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(patches, generator=generator) for _ in range(count)])
