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
    """Positions of the queries that `wanted`, (T,) and boolean, names: at most a block of rows at a time."""
    batch, heads, tokens, _ = layer.k.shape
    size = max(8, BLOCK.get(wanted.device.type, BLOCK["cpu"]) // (batch * heads * tokens))
    yield from wanted.nonzero().flatten().split(size)


def attention_times_gradient(layer: Layer, row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (queries (Q,), A ⊙ ∂score/∂A (B, H, Q, T)) of all queries to which row, (B, T), gives a weight."""
    for queries in blocks(layer, row.ne(0).any(0)):
        yield queries, layer.logits(queries).softmax(-1).mul_(layer.weights_gradient(queries))


def readout(attn: Attention, query: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """The row in which a map begins, (B, T), in two parts: what is read of the tokens, and what a pool gives them.

    What is read is a patch (row, column) or the grid's read-out. An attention pool is one more layer, whose only
    queries are its latents: its part is (A ⊙ ∂score/∂A)⁺, mean over heads, so that it is of the class too. Raises
    ValueError for a model that reads no weighted sum of its tokens.
    """
    grid, like = attn.grid, attn[0].q
    read, pooled = torch.zeros(2, len(like), grid.tokens, device=like.device, dtype=attn[0].wide)
    if query is not None:
        if whole(query) is not None:
            raise ValueError(f"A query is a patch, (row, column), but {query!r} came.")
        read[:, grid.position(query)] = 1.0
    elif grid.readout is None:
        raise ValueError(
            f"{attn.model_name} reads no weighted sum of its tokens (its pooling takes a maximum, returns all "
            "tokens, or is done by what wraps it), so this map has no row to start from. Give one "
            "(`query=(row, column)`), or use another method, such as legrad or grad_cam."
        )
    elif attn.pool is None:
        read += grid.readout.to(read)
    else:  # of several latents, those that are not read have no gradient
        product = attn.pool.weights() * attn.pool.weights_gradient()
        pooled[:, grid.tokens - product.shape[-1] :] = product.clamp_(min=0).mean(1).sum(1)
    return read, pooled


def layer_number(count: int, layer: int) -> int:
    """A layer's number from 0, where −1 is the last of `count`; raises IndexError outside, ValueError for what is no
    whole number."""
    if whole(layer) is None:
        raise ValueError(f"A layer is a whole number, −1 the last, but {layer!r} came.")
    if not -count <= layer < count:
        raise IndexError(f"The model has {count} layers, numbered from 0 to {count - 1}, but layer {layer} was wanted.")
    return layer % count
