"""Learned position embeddings: table, similarity, resizing (paper, sections 3.2 and 4.5, Fig. 7 and 10)."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.recorder.families import unwrap
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.running import float64


def table(model: nn.Module) -> Tensor:
    """(rows, cols, D) learned position embeddings of the patches, without those of prefix tokens.

    Raises ValueError for models without a learned table of positions (rotary, relative or no embeddings).
    """
    model = unwrap(model)
    embed = getattr(model, "embeds", None) or getattr(model, "patch_embed", None)
    positions = getattr(embed if hasattr(model, "embeds") else model, "pos_embed", None)
    width, grid = getattr(model, "embed_dim", None), getattr(embed, "grid_size", None)
    shape = tuple(positions.shape) if isinstance(positions, Tensor) else ()
    if len(shape) == 4 and shape[0] == 1 and shape[-1] == width and hasattr(model, "embeds"):  # NaFlex
        return positions.detach()[0]
    if len(shape) == 3 and shape[0] == 1 and shape[-1] == width and grid and shape[1] >= grid[0] * grid[1]:
        return positions.detach()[0, shape[1] - grid[0] * grid[1] :].unflatten(0, tuple(grid))
    kind = "rotary embeddings" if getattr(model, "rope", None) is not None else "no learned table"
    raise ValueError(
        f"{type(model).__name__} has no table of learned position embeddings ({kind}). Use a model that adds one "
        "vector per patch position, such as ViT, DeiT or BEiT-3."
    )


def similarity(model_or_table: nn.Module | Tensor) -> Tensor:
    """(rows, cols, rows, cols) cosine similarity of every patch position with every other (paper, Fig. 7 center).

    [r, c] is the tile of position (r, c), whose own entry is 1. Takes a model or a (rows, cols, D) table. Nothing is
    centered.
    """
    positions = table(model_or_table) if isinstance(model_or_table, nn.Module) else model_or_table
    if positions.dim() != 3:
        raise ValueError(f"Expected positions of shape (rows, cols, D), got {tuple(positions.shape)}.")
    unit = F.normalize(float64(positions), dim=-1)
    return torch.einsum("rcd,ijd->rcij", unit, unit).clamp(-1, 1).float()


def resize(
    pos_embed: Tensor, size: tuple[int, int], *, prefix: int, grid: tuple[int, int], method: str = "paper"
) -> Tensor:
    """(1, prefix + rows·cols, D) position embeddings for another grid; prefix rows stay as they are.

    pos_embed: (1, prefix + grid rows·cols, D) as timm stores them; grid: its (rows, cols); size: the new ones.
    method: "paper" (section 3.2: bilinear with aligned end points, as scipy.ndimage.zoom of order 1 does it) or "timm"
    (bicubic, antialiased, pixel centers aligned). Raises ValueError if shapes and method do not fit.
    """
    rows, cols = grid
    if pos_embed.dim() != 3 or pos_embed.shape[0] != 1 or pos_embed.shape[1] != prefix + rows * cols:
        raise ValueError(
            f"A table for {prefix} prefix tokens and a grid of {rows} × {cols} has the shape "
            f"(1, {prefix + rows * cols}, D), got {tuple(pos_embed.shape)}."
        )
    if min(size) < 1:
        raise ValueError(f"The new grid needs at least one row and one column, but got {tuple(size)}.")
    if method == "timm":
        from timm.layers import resample_abs_pos_embed

        return resample_abs_pos_embed(pos_embed, list(size), list(grid), num_prefix_tokens=prefix)
    if method != "paper":
        raise ValueError(f'method is "paper" or "timm", but got {method!r}.')
    image = pos_embed[:, prefix:].unflatten(1, (rows, cols)).permute(0, 3, 1, 2)
    image = F.interpolate(float64(image), size=tuple(size), mode="bilinear", align_corners=True).to(pos_embed)
    return torch.cat([pos_embed[:, :prefix], image.flatten(2).mT], 1)


def rank_correlation(similarities: Tensor) -> float:
    """Spearman's correlation of similarity with distance on the grid, over all pairs of different positions.

    similarities: (rows, cols, rows, cols). −1: nearer is always more similar; about 0: no structure, as in an
    untrained table; nan for fewer than three positions. Raises ValueError for similarities that are not finite.
    """
    from scipy.stats import spearmanr

    rows, cols = similarities.shape[:2]
    distance = TokenGrid(rows, cols, (1, 1)).distances(dtype=torch.float64, device="cpu").numpy()
    different = ~np.eye(rows * cols, dtype=bool)
    values = similarities.detach().cpu().reshape(rows * cols, rows * cols).numpy()[different]
    if not np.isfinite(values).all():
        raise ValueError("Similarities are finite numbers, but some are not; the position embeddings are damaged.")
    if rows * cols < 3:
        return math.nan
    return float(spearmanr(values, distance[different]).statistic) if values.std() > 0 else 0.0
