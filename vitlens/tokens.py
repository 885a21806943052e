"""Features of every layer: the tokens, their similarity, principal components and norms.

Shapes: B batch, L layers, T tokens = R prefix + P patches, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitlens.recorder.families import UnsupportedModelError, attention_modules, unwrap
from vitlens.recorder.grid import token_grid
from vitlens.recorder.running import float64, require_images, taking


def features(model: nn.Module, images: Tensor) -> tuple[list[Tensor], Tensor]:
    """The tokens after every layer, one (B, T, D) each, and the logits (B, classes), from one forward.

    They are the residual stream as timm's `forward_intermediates` gives it, before any final norm, prefix tokens first.
    Works inside `capture(model)` too. Raises UnsupportedModelError for models that a capture refuses, and ValueError
    for images that the model does not take.
    """
    model = unwrap(model)
    attention_modules(model)
    require_images(images, model)
    prefix = model.num_prefix_tokens > 0
    expected = token_grid(model, tuple(images.shape[-2:])).tokens
    with taking(model):
        last, layers = model.forward_intermediates(images, return_prefix_tokens=prefix, output_fmt="NLC")
    if prefix:
        layers = [torch.cat((prefix, patches), 1) for patches, prefix in layers]
    if layers[0].shape[1] != expected:
        raise UnsupportedModelError(
            f"Expected {expected} tokens after each layer of {type(model).__name__}, got {layers[0].shape[1]}: "
            "it leaves patches out or merges them."
        )
    return layers, model.forward_head(last)


def similarity(tokens: Tensor, query: Tensor) -> Tensor:
    """(…, T) cosine similarity of every token with what a query reads: 1 the same direction, 0 unrelated.

    tokens: (…, T, D). query: (T,) or (…, T), a probability row: one-hot for one token, `grid.readout` for the read-out.
    """
    read = (query.to(tokens)[..., None, :] @ tokens).squeeze(-2)
    return torch.cosine_similarity(tokens, read[..., None, :], dim=-1)


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
    if not tokens.isfinite().all():
        raise ValueError("Patch features are finite numbers, but some of these are not; the weights are damaged.")
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


def norms(tokens: Tensor) -> Tensor:
    """(…, T) Euclidean norms of tokens (…, T, D).

    Some large models store global information in a few background patches, whose norms are several times as large
    (Darcet et al. 2024, "Vision Transformers Need Registers")."""
    return tokens.norm(dim=-1)
