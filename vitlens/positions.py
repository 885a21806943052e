"""Learned position embeddings: table, similarity, resizing (paper, sections 3.2 and 4.5, Fig. 7 and 10)."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.names import require_known, unknown_name
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.precision import to_float64
from vitlens.recorder.supported import Registered, family, inner_transformer

__all__ = ["rank_correlation", "resize", "similarity", "table"]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)


def table(model: nn.Module) -> Tensor:
    """(rows, cols, D) position embeddings of the patches at the stem, without those of prefix tokens.

    >>> vitlens.positions.table(model).shape
    torch.Size([14, 14, 192])

    Raises ValueError for models without a learned table of positions (rotary, relative or no embeddings).
    """
    model = inner_transformer(model)
    adapter = family(model)
    positions = adapter.positions()
    if positions is not None:
        return positions
    kind = type(model).__name__
    if isinstance(adapter, Registered):
        raise ValueError(
            f"The position embeddings of {kind} are unknown. Give `register_model` their path as positions=, such as "
            '"pos_embed".'
        )
    reason = "no learned table"
    for module in model.modules():
        if getattr(module, "rope", None) is not None:
            reason = "rotary embeddings"
    raise ValueError(f"{kind} has no table of learned position embeddings ({reason}).")


def similarity(model_or_table: nn.Module | Tensor) -> Tensor:
    """(rows, cols, rows, cols) cosine similarity of every patch position with every other (paper, Fig. 7 center).

    >>> vitlens.positions.similarity(model).shape
    torch.Size([14, 14, 14, 14])

    [r, c] is the tile of position (r, c), with 1 at (r, c). Takes a model or a (rows, cols, D) table, which is not
    centered.
    """
    positions = model_or_table if isinstance(model_or_table, Tensor) else table(model_or_table)
    unit = F.normalize(to_float64(positions), dim=-1)
    cosines = torch.einsum("rcd,ijd->rcij", unit, unit)
    return cosines.clamp(-1, 1).float()


def resize(
    pos_embed: Tensor,
    size: tuple[int, int],
    *,
    prefix: int,
    grid: tuple[int, int],
    method: str = "paper",
) -> Tensor:
    """(1, prefix + rows·cols, D) position embeddings for another grid, with the same prefix rows.

    >>> vitlens.positions.resize(model.pos_embed, (24, 24), prefix=1, grid=(14, 14)).shape
    torch.Size([1, 577, 192])

    pos_embed: (1, prefix + grid rows·cols, D) as in timm. grid: its (rows, cols). size: the new (rows, cols). method:
    "paper" (section 3.2: bilinear with aligned end points, like scipy.ndimage.zoom of order 1) or "timm" (bicubic,
    antialiased, pixel centers aligned).
    """
    rows, cols = grid
    require_known(method, ("paper", "timm"), "method")
    if method == "timm":
        from timm.layers import resample_abs_pos_embed

        return resample_abs_pos_embed(pos_embed, size, [rows, cols], num_prefix_tokens=prefix)
    of_prefix = pos_embed[:, :prefix]
    of_patches = pos_embed[:, prefix:]
    on_grid = of_patches.unflatten(1, (rows, cols))
    image = on_grid.permute(0, 3, 1, 2)
    resized = F.interpolate(to_float64(image), size=size, mode="bilinear", align_corners=True)
    patches = resized.to(pos_embed).flatten(2).mT
    return torch.cat([of_prefix, patches], 1)


def rank_correlation(similarities: Tensor) -> float:
    """Spearman's correlation of similarity with distance on the grid, over all pairs of different positions.

    similarities: (rows, cols, rows, cols).

    The result is −1 if nearer positions are always more similar, about 0 for an untrained table, and nan for fewer than
    three positions or similarities that are not finite.

    >>> vitlens.positions.rank_correlation(vitlens.positions.similarity(model)) < -0.2
    True
    """
    rows, cols = similarities.shape[:2]
    count = rows * cols
    different = ~np.eye(count, dtype=bool)
    of_pairs = similarities.detach().cpu().reshape(count, count)
    values = of_pairs.numpy()[different]
    if count < 3 or not np.isfinite(values).all():
        return math.nan
    if values.std() == 0:
        return 0.0
    grid = TokenGrid(rows, cols, (1, 1))
    distances = grid.distances(dtype=torch.float64, device="cpu")
    distances = distances.numpy()[different]
    correlations = np.corrcoef(_ranks(values), _ranks(distances))
    return float(correlations[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, with mean ranks for equal values. By hand, because importing scipy.stats takes a second."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks = count.cumsum() - (count + 1) / 2
    return ranks[place]
