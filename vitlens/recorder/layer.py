"""One layer's attention, from its queries and keys: all of it, some rows, or a block of rows at a time.

Shapes: B batch, H heads, T tokens, Q queries, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.precision import full_precision
from vitlens.recorder.shapes import repr_with_shapes
from vitlens.recorder.supported import UnsupportedModelError


@dataclass(frozen=True)
class Layer:
    """One layer's attention as the model computed it: softmax(q·kᵀ·scale + mask) over the last axis.

    name: the module's name. q, k: (B, H, T, K) in the model's own precision. An attention pool has one query per latent
    instead of T. mask: floating point, added to the logits, or boolean, True where attention is allowed. v, output:
    (B, H, T, K), recorded by `capture(model, values=True)`. gradient: ∂score/∂output after `attn.differentiate(score)`.
    grid: geometry of the queries. None for an attention pool, whose queries are latents.

    >>> attn[5].weights(queries=0).shape  # of the class token, in all heads
    torch.Size([2, 3, 1, 197])
    """

    name: str
    q: Tensor
    k: Tensor
    scale: float
    mask: Tensor | None = None
    v: Tensor | None = None
    output: Tensor | None = None
    gradient: Tensor | None = None
    grid: TokenGrid | None = None

    __repr__ = repr_with_shapes

    @property
    def wide(self) -> torch.dtype:
        """dtype of statistics: the model's own, at least float32."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def logits(self, queries: slice | Tensor | Sequence[int] | int | None = None) -> Tensor:
        """(B, H, Q, T) logits before the softmax, of all or the given queries, in float32 or wider."""
        rows = self._rows(queries)
        with full_precision(self.q.device):
            logits = (self.q[:, :, rows].to(self.wide) * self.scale) @ self.k.to(self.wide).mT
        if self.mask is None:
            return logits
        mask = self.mask.expand(*self.mask.shape[:-2], self.q.shape[-2], -1)[..., rows, :]
        if mask.dtype == torch.bool:
            return logits.masked_fill_(~mask, -torch.inf)
        return logits.add_(mask)

    def weights(
        self,
        queries: slice | Tensor | Sequence[int] | int | None = None,
        *,
        head: int | None = None,
        query: tuple[int, int] | int | None = None,
        limit: float = 2.0,
    ) -> Tensor:
        """(B, H, Q, T) attention of all or the given queries, in float32 or wider. Rows sum to 1.

        >>> attn[5].weights(head=2, query=(3, 4)).shape
        torch.Size([2, 197])

        queries: positions in the sequence. head, query: a single one, whose axis is left out. A query is a patch (row,
        column) or a position. Raises MemoryError if the result would take more than `limit` GiB, IndexError for a head
        or query that does not exist, and ValueError for both queries and query.
        """
        if head is not None:
            return self._one_head(head).weights(queries, query=query, limit=limit).squeeze(1)
        if query is not None:
            if queries is not None:
                raise ValueError(f"Give queries or query, not both, got {queries!r} and {query!r}.")
            if self.grid is None:
                raise ValueError(
                    f"The queries of {self.name} are not tokens. Give their numbers as queries."
                )
            return self.weights(self.grid.position(query), limit=limit).squeeze(-2)
        rows = self._rows(queries)
        self._require_memory(rows, limit)
        return self.logits(rows).softmax(-1)

    def _one_head(self, head: int) -> Layer:
        """The layer with one of its heads. Raises IndexError for a head that does not exist."""
        heads = self.q.shape[1]
        if not -heads <= head < heads:
            raise IndexError(f"{self.name} has heads 0 to {heads - 1}, got {head}.")
        q = _of_head(self.q, head)
        k = _of_head(self.k, head)
        mask = None if self.mask is None else _of_head(self.mask, head)
        return replace(self, q=q, k=k, mask=mask)

    def _require_memory(self, rows: slice | Tensor, limit: float) -> None:
        """Raise MemoryError if the weights of these queries would take more than `limit` GiB."""
        batch, heads, queries, _ = self.q.shape
        count = len(range(queries)[rows]) if isinstance(rows, slice) else len(rows)
        size = batch * heads * count * self.k.shape[-2] * 4 / 2**30
        if size > limit:
            raise MemoryError(
                f"The attention of {self.name} for {count} queries would take {size:.1f} GiB, over the limit of "
                f"{limit:g}. Give fewer queries, use `rows()`, or give `limit={math.ceil(size)}`."
            )

    def read(self, row: Tensor, block: int = 256) -> Tensor:
        """(B, H, T) weighted sum of attention rows, Σ_q row_q·A_qk, computed a block of queries at a time.

        row: (T,), or (B, T) for a row per image, as `TokenGrid.readout`. One-hot gives the row of one token. Raises
        ValueError for a row of another shape.
        """
        batch, _, queries, _ = self.q.shape
        if row.shape not in ((queries,), (1, queries), (batch, queries)):
            raise ValueError(
                f"row must have a weight for each of the {queries} queries of {self.name}, prefix tokens included: "
                f"shape ({queries},) or ({batch}, {queries}), got {tuple(row.shape)}."
            )
        row = row.to(self.k.device).expand(batch, -1)
        chosen = row.any(0).nonzero().squeeze(-1)
        result = 0
        with full_precision(self.q.device):
            for some in chosen.split(block):
                weights = self.logits(some).softmax(-1)
                factors = row[:, some].to(weights)
                result = result + torch.einsum("bq,bhqk->bhk", factors, weights)
        return result

    def weights_gradient(
        self, queries: slice | Tensor | Sequence[int] | int | None = None
    ) -> Tensor:
        """(B, H, Q, T) ∂score/∂A of all or the given queries, in float32 or wider: ∂score/∂O·Vᵀ, because O = A·V."""
        gradient = self.gradient[:, :, self._rows(queries)]
        with full_precision(self.q.device):
            return gradient.to(self.wide) @ self.v.to(self.wide).mT

    def _rows(self, queries) -> slice | Tensor:
        """Queries as a slice or a 1-D tensor of positions. One number keeps the axis, and booleans are a mask."""
        if queries is None:
            return slice(None)
        if isinstance(queries, slice):
            return queries
        if isinstance(queries, tuple):
            raise TypeError(
                f"queries must be a list, got {queries}. Give a patch (row, column) as query=."
            )
        positions = torch.arange(self.q.shape[-2])
        chosen = positions[torch.as_tensor(queries, device="cpu")]
        return chosen.reshape(-1).to(self.q.device)

    def rows(
        self, block: int = 64, *, reuse: bool = False, only: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the attention a block of queries at a time: (queries, weights (B, H, ≤ block, T)).

        reuse: write every block into the same memory. This is faster, but a block is valid only until the next one.
        only: (T,) booleans. Blocks without a True query are skipped.
        """
        if only is not None:
            only = only.cpu()
        if not reuse or self.mask is not None or self.q.requires_grad:
            for queries in self._slices(block, only):
                yield queries, self.logits(queries).softmax(-1)
            return
        keys = self.k.to(self.wide).mT
        memory = None
        for queries in self._slices(block, only):
            scaled = self.q[:, :, queries].to(self.wide) * self.scale
            full = queries.stop - queries.start == block
            with full_precision(self.q.device):
                memory = torch.matmul(scaled, keys, out=memory if full else None)
            yield queries, torch.softmax(memory, -1, out=memory)

    def blocks(self, block: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (queries, logits, weights) a block of queries at a time."""
        for queries in self._slices(block):
            logits = self.logits(queries)
            yield queries, logits, logits.softmax(-1)

    def _slices(self, block: int, only: Tensor | None = None) -> Iterator[slice]:
        count = self.q.shape[-2]
        for start in range(0, count, block):
            queries = slice(start, min(start + block, count))
            if only is None or only[queries].any():
                yield queries

    def images(self, chosen: slice) -> Layer:
        """The same layer for some of the images in the batch."""
        fields = {"q": self.q[chosen], "k": self.k[chosen]}
        for name in ("mask", "v", "output", "gradient"):
            tensor = getattr(self, name)
            shared = tensor is None or tensor.dim() < 4 or tensor.shape[0] == 1
            fields[name] = tensor if shared else tensor[chosen]
        return replace(self, **fields)


def _of_head(tensor: Tensor, head: int) -> Tensor:
    """(…, 1, rows, cols) part of one head, or the tensor itself if all heads share it."""
    if tensor.dim() < 3 or tensor.shape[-3] == 1:
        return tensor
    return tensor[..., [head], :, :]


def all_heads(keys: Tensor, queries: Tensor) -> Tensor:
    """Keys repeated for every query head, as grouped-query attention (enable_gqa) shares them."""
    groups = queries.shape[1] // keys.shape[1]
    return keys if groups == 1 else keys.repeat_interleave(groups, dim=1)


def join_heads(calls: list[Layer]) -> Layer:
    """One layer with the heads of all parallel attentions of a block."""
    first = calls[0]
    if len(calls) == 1:
        return first
    if any(call.mask is not None or call.scale != first.scale for call in calls):
        raise UnsupportedModelError(
            f"The parallel attentions of {first.name} differ in mask or scale."
        )
    fields = {"name": " + ".join(call.name for call in calls)}
    for field in ("q", "k", "v", "output", "gradient"):
        tensors = [getattr(call, field) for call in calls]
        if tensors[0] is not None:
            fields[field] = torch.cat(tensors, 1)
    return replace(first, **fields)


def layer_number(count: int, layer: int) -> int:
    """Number, from 0, of a layer among `count`. Negative numbers count from the end."""
    if not hasattr(layer, "__index__"):
        raise TypeError(
            f"The layer must be a number, got {layer!r}. As in `attn[5].weights(head=2, query=(3, 4))`."
        )
    if not -count <= layer < count:
        raise IndexError(
            f"The layer must be from 0 to {count - 1} (the model has {count} layers), got {layer}."
        )
    return range(count)[layer]
