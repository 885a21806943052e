"""Relevance, Chefer's rule for self-attention, and the attention × gradient of one layer, which it is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from vitlens.attribution.rows import attention_times_gradient, readout
from vitlens.recorder.arguments import layer_number
from vitlens.recorder.layer import Layer
from vitlens.recorder.recording import Attention
from vitlens.recorder.running import full_precision


def relevance(attn: Attention, *, query: tuple[int, int] | None = None) -> Tensor:
    """(B, rows, cols) relevance of each patch to what the head reads, after Chefer, Gur and Wolf (ICCV 2021, eq. 5, 6).

    R starts as the identity and every layer adds R ← R + Ā·R, with Ā = mean over heads of (A ⊙ ∇A)⁺ and ∇A the gradient
    of the target's logit. The map is the read-out's row of R − I, R = (I + Ā_L) ⋯ (I + Ā_1), without its prefix tokens
    and not rescaled. It is pulled back from the top, r ← r + r·Ā, so R is never formed. I is left out because a mean
    over patches reads the patches themselves; for a class token this changes nothing. An attention pool is one more
    layer: its map takes part like any other's.

    attn: a capture in which every layer knows the gradient of the target's logit. query: (row, column) of a patch, to
    start from instead of the read-out.
    """
    read, moved = readout(attn, query)
    for layer in reversed(attn):
        moved = moved + _pulled(layer, read + moved)
    return attn.grid.image_map(moved)


def attention_gradient(attn: Attention, *, layer: int | None = None, query: tuple[int, int] | None = None) -> Tensor:
    """(B, rows, cols) attention × gradient of one layer: the read-out row of the mean over heads of (A ⊙ ∇A)⁺.

    The product of Barkan et al.'s Grad-SAM (2021), read as the head reads; ∇A is the gradient of the target's logit.

    attn, query: as in `relevance`. layer: its number, −1 for the last block; by default the last attention before the
    head, which is the pool's in a model with an attention pool. Raises ValueError for a query that no gradient reaches
    there: in a model that reads its class token, every patch in the last layer.
    """
    read, pooled = readout(attn, query)
    if layer is None and query is None and attn.pool is not None:
        return attn.grid.image_map(pooled)
    number = layer_number(len(attn), -1 if layer is None else layer)
    chosen = attn[number]
    if query is not None and not chosen.gradient[:, :, attn.grid.position(query)].any():
        raise ValueError(
            f"No gradient reaches patch {query} in layer {number} of {attn.model_name}, because what it reads there is "
            "not used by anything. Give an earlier layer, or no query, which starts from what the head reads."
        )
    return attn.grid.image_map(_pulled(chosen, read + pooled))


def _pulled(layer: Layer, row: Tensor) -> Tensor:
    """(B, T) row · mean over heads of (A ⊙ ∇A)⁺."""
    pulled = torch.zeros_like(row)
    for queries, product in attention_times_gradient(layer, row):
        with full_precision(row.device):
            pulled += torch.einsum("bq,bqk->bk", row[:, queries], product.clamp_(min=0).mean(1))
    return pulled
