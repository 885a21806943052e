"""What patches have in common, within a picture and between pictures: principal components, nearest patches.

Shapes: B pictures, P patches, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.running import float64


def components(tokens: Tensor, k: int = 3) -> tuple[Tensor, Tensor]:
    """The first k principal components of patch features: ((P, k) scores, (k,) explained variance ratio).

    tokens: (P, D) of one picture, or of several laid one after the other for common colors. The mean is subtracted;
    components are ordered by variance and signed so that the largest score is positive (a sign means nothing).
    Raises ValueError for fewer tokens or dimensions than components, and for features that are no numbers.
    """
    if tokens.dim() != 2 or not 1 <= k <= min(tokens.shape):
        raise ValueError(
            f"Expected patch features of shape (P, D) with P and D of at least {k}, got {tuple(tokens.shape)}. "
            "Give the patches of one picture, or ask for fewer components."
        )
    _require_numbers(tokens)
    centered = float64(tokens) - float64(tokens).mean(0)
    variances, axes = torch.linalg.eigh(centered.mT @ centered)
    scores = centered @ axes.flip(-1)[:, :k]
    largest = scores.gather(0, scores.abs().argmax(0, keepdim=True))
    total = variances.sum().clamp_min(torch.finfo(torch.float64).tiny)
    return (scores * torch.where(largest < 0, -1.0, 1.0)).float(), (variances.flip(0)[:k] / total).float()


def colors(scores: Tensor) -> Tensor:
    """(P, k) scores of components, each stretched to 0 … 1: red, green and blue for k = 3 (Oquab et al. 2024, DINOv2).

    The stretch hides which component is large."""
    low, high = scores.amin(0), scores.amax(0)
    return (scores - low) / (high - low).clamp_min(1e-12)


class Colored(NamedTuple):
    """Several pictures in one basis. colors: (B, P, 3) from 0 to 1, NaN in the background. foreground: (B, P) bool.
    variance: (3,) the share that each component has of the variance of the patches that are colored."""

    colors: Tensor
    foreground: Tensor
    variance: Tensor


def colored(tokens: Tensor, grid: TokenGrid | None = None) -> Colored:
    """The patches of several pictures as colors: three principal components of all of them, one basis and one sign, so
    that the same color means the same in each picture (Oquab et al. 2024, DINOv2).

    tokens: (B, P, D), without prefix tokens. With the `grid` of the patches only the foreground has colors: the first
    component of all patches, cut at its mean, divides them in two, and the part that lies at the border of the pictures
    less often is called foreground. That is a guess: a component knows no objects. Raises ValueError as `components`
    does, and for patches that do not fit the grid.
    """
    if tokens.dim() != 3 or grid is not None and tokens.shape[1] != grid.patches:
        count = "P" if grid is None else grid.patches
        raise ValueError(
            f"Expected the patches of several pictures, (B, {count}, D), without prefix tokens, got "
            f"{tuple(tokens.shape)}. `vitlens.tokens.features` returns prefix tokens first."
        )
    foreground = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if grid is not None:
        first = components(tokens.flatten(0, 1), 1)[0].unflatten(0, tokens.shape[:2]).squeeze(-1)
        foreground = first > 0
        border = grid.border().to(tokens.device)
        if foreground[:, border].float().mean() > foreground[:, ~border].float().mean():
            foreground = ~foreground
    scores, variance = components(tokens[foreground])
    found = scores.new_full((*tokens.shape[:2], 3), torch.nan)
    found[foreground] = colors(scores)
    return Colored(found, foreground, variance)


class Pairs(NamedTuple):
    """The nearest patches of two pictures. nearest: (P,) for each patch of A, which of B is most similar. similarity:
    (P,) the cosine of the two. mutual: (P,) whether the patch of A is the nearest one of its nearest, too."""

    nearest: Tensor
    similarity: Tensor
    mutual: Tensor


def correspondences(a: Tensor, b: Tensor) -> Pairs:
    """For each patch of picture A its nearest patch in picture B, by the cosine of their features; and which pairs
    are mutual (best buddies, as in Amir et al. 2022, "Deep ViT Features as Dense Visual Descriptors").

    a, b: (P, D) and (Q, D) patches of the same layer, without prefix tokens. Every patch has a nearest one, even where
    the pictures have nothing in common: look at the similarity, and at whether the pair is mutual. Raises ValueError
    for features of other shapes or widths, or that are no numbers.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or not len(a) or not len(b):
        raise ValueError(
            f"Expected patches (P, D) and (Q, D) of two pictures, of one width, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}. Take both from the same layer of the same model."
        )
    _require_numbers(a, b)
    cosines = F.normalize(float64(a), dim=1) @ F.normalize(float64(b), dim=1).mT
    similarity, nearest = cosines.max(1)
    mutual = cosines.argmax(0)[nearest] == torch.arange(len(a), device=a.device)
    return Pairs(nearest, similarity.float(), mutual)


def _require_numbers(*tokens: Tensor) -> None:
    if not all(each.isfinite().all() for each in tokens):
        raise ValueError("Patch features are finite numbers, but some of these are not; the weights are damaged.")
