"""Rows of attention and of its gradient, a block at a time, and the row from which a map is read.

Shapes: B batch, H heads, T tokens, Q queries of one block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vitlens.attention import BLOCK
from vitlens.recorder.arguments import whole
from vitlens.recorder.layer import Layer
from vitlens.recorder.recording import Attention


def blocks(layer: Layer, wanted: Tensor) -> Iterator[Tensor]:
    """Yield the positions of the wanted queries, as many at a time as one block of rows holds. wanted: (T,) bool."""
    batch, heads, tokens, _ = layer.k.shape
    size = max(8, BLOCK.get(wanted.device.type, BLOCK["cpu"]) // (batch * heads * tokens))
    yield from wanted.nonzero().flatten().split(size)


def attention_times_gradient(layer: Layer, row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (queries (Q,), A ⊙ ∂score/∂A (B, H, Q, T)) for all queries with a weight in row, (B, T)."""
    for queries in blocks(layer, row.ne(0).any(0)):
        yield queries, layer.logits(queries).softmax(-1).mul_(layer.weights_gradient(queries))


def readout(attn: Attention, query: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """The row from which a map starts, as two (B, T) parts: what is read from the tokens, and what a pool gives them.

    What is read is the patch `query`, (row, column), or the grid's read-out. An attention pool is one more layer, whose
    only queries are its latents: its part is (A ⊙ ∂score/∂A)⁺, mean over heads, so it depends on the class too. Raises
    ValueError for a model that reads no weighted sum of its tokens.
    """
    grid, like = attn.grid, attn[0].q
    read, pooled = torch.zeros(2, len(like), grid.tokens, device=like.device, dtype=attn[0].wide)
    if query is not None:
        if whole(query) is not None:
            raise ValueError(f"A query is a patch, (row, column), got {query!r}.")
        read[:, grid.position(query)] = 1.0
    elif grid.readout is None:
        raise ValueError(
            f"{attn.model_name} reads no weighted sum of its tokens (its pooling takes a maximum, returns all tokens, "
            "or is done by a wrapper), so this map has no row to start from. Give a patch, `query=(row, column)`, or "
            "use another method, such as legrad or grad_cam."
        )
    elif attn.pool is None:
        read += grid.readout.to(read)
    else:  # of several latents, those that are not read have no gradient
        product = attn.pool.weights() * attn.pool.weights_gradient()
        pooled[:, grid.tokens - product.shape[-1] :] = product.clamp_(min=0).mean(1).sum(1)
    return read, pooled
