"""Statistics of attention: distance, entropy, attention received, sinks, rollout.

A map has T² numbers per head, and every statistic is a sum over its rows. So rows are computed a block at a time, and
no map is stored. Several statistics share one pass, from the last layer to the first, as a rollout needs. On NVIDIA's
GPUs from compute capability 8 under Linux, two kernels compute the statistics with default options instead.

Shapes: B batch, L layers, H heads, T tokens = R prefix + P patches, Q queries. Distances in input pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitlens.names import listed_names, require_known, unknown_name
from vitlens.recorder import fused
from vitlens.recorder.forward import eval_mode, require_images, run
from vitlens.recorder.layer import Layer
from vitlens.recorder.precision import full_precision, to_float64
from vitlens.recorder.record import Attention, capture
from vitlens.recorder.shapes import repr_with_shapes
from vitlens.recorder.supported import unwrap

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "STATISTICS",
    "Statistic",
    "Summary",
    "contrast",
    "entropy",
    "mean_distance",
    "mean_over",
    "received",
    "rollout",
    "sinks",
    "summary",
]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

# Numbers in one block of rows: small enough for a processor's cache, large enough to keep a GPU busy.
BLOCK = {"cpu": 2**21, "cuda": 2**26, "mps": 2**24}

# A sink receives more than 20 times the median attention of the patches, and more than 5 times uniform attention.
SINK_TIMES_MEDIAN, SINK_TIMES_UNIFORM = 20.0, 5.0


class Statistic:
    """A statistic of attention, added up over blocks of rows, last layer first.

    >>> class Peak(vitlens.attention.Statistic):  # largest weight of a query, from weights (B, H, Q, T)
    ...     name = "peak"
    ...     def add(self, queries, logits, weights): self.sums.append(weights.amax(-1))
    >>> vitlens.attention.summary(attn, Peak()).peak.shape  # the mean over all queries
    torch.Size([2, 12, 3])

    Every pass works on a copy. `grid` is the capture's, `sums` collects the values of one layer's blocks. With
    `logits = True`, `add` receives the logits too.
    """

    name: str
    title: str
    logits = False
    # True if the kernels of `vitlens.recorder.fused` compute the same
    in_kernels = False
    # (B, T) weights of the queries that a rollout needs next, or None for all queries
    row: Tensor | None = None

    def applies(self, attn: Attention) -> bool:
        """True if the statistic is defined for the model. Otherwise a summary holds None."""
        return True

    def begin(self, attn: Attention, images: slice) -> None:
        """Reset the sums for the next part of the batch."""
        self.grid = attn.grid
        self.layers = []
        self.sums = []

    def add(self, queries: slice, logits: Tensor | None, weights: Tensor) -> None:
        """Append the values of a block of queries to `sums`."""

    def end_layer(self) -> None:
        self.layers.append(torch.cat(self.sums, -1).mean(-1))
        self.sums = []

    def result(self) -> Tensor:
        """(B, L, …) values in the order of the model's layers."""
        return torch.stack(self.layers[::-1], 1)


@dataclass(frozen=True)
class Summary:
    """Statistics of a capture of B images, as attributes and in `values` by name.

    >>> vitlens.attention.summary(attn)
    Summary(values={mean_distance: (2, 12, 3), entropy: (2, 12, 3), received: (2, 12, 3, 196), rollout: (2, 14, 14)},
            images=2, by_head=('mean_distance', 'entropy'))

    mean_distance, entropy: (B, L, H), in input pixels and nats. received: (B, L, H, P). rollout: (B, rows, cols), or
    None for models that read no weighted sum of tokens (max pooling). Those of `mean_over` are means, without axis B.
    images: number of images. by_head: names of the statistics with one number for each head.
    """

    values: dict[str, Tensor | None]
    images: int
    by_head: tuple[str, ...] = ()

    __repr__ = repr_with_shapes

    def to_pandas(self, by: str = "head", images: Sequence[str] | None = None) -> DataFrame:
        """A DataFrame with a row for each layer and head, and a column for each statistic with one number per head.

        >>> vitlens.attention.summary(attn).to_pandas().columns.tolist()
        ['layer', 'head', 'mean_distance', 'entropy']
        >>> vitlens.attention.summary(attn).to_pandas(by="image", images=["cat", "rocket"]).image.unique().tolist()
        ['cat', 'rocket']

        by: "head" for L·H rows, the means over images, or "image" for B·L·H rows, with the column image in front.
        images: names for this column, by default the numbers in the batch. Raises ValueError without a statistic per
        head, and by image for means (`mean_over`).
        """
        import pandas as pd

        require_known(by, ("head", "image"), "by")
        if not self.by_head:
            raise ValueError(
                f"No statistic of {', '.join(self.values)} has one number per head. Add mean_distance."
            )
        values = {name: to_float64(self.values[name]).cpu() for name in self.by_head}
        is_mean = values[self.by_head[0]].dim() == 2  # (L, H) of `mean_over`
        if by == "image" and is_mean:
            raise ValueError(
                f"The summary holds means over {self.images} images. Summarize captures to have a row for each image."
            )
        if by == "head":
            values = {
                name: each.reshape(-1, *each.shape[-2:]).mean(0) for name, each in values.items()
            }
        *image, layer, head = torch.ones_like(values[self.by_head[0]]).nonzero().T.numpy()
        table = pd.DataFrame({"layer": layer, "head": head})
        for name, each in values.items():
            table[name] = each.flatten().numpy()
        if by == "image":
            names = list(range(self.images) if images is None else images)
            if len(names) != self.images:
                raise ValueError(f"Expected {self.images} names of images, got {len(names)}.")
            table.insert(0, "image", [names[number] for number in image[0]])
        return table

    def __dir__(self) -> list[str]:
        return listed_names(self, ("by_head", "images", "to_pandas", "values", *self.values))

    def __getattr__(self, name: str) -> Tensor | Any:  # Any stands for None
        values = self.__dict__.get("values", {})
        if name not in values:
            raise AttributeError(
                f"The summary has no statistic {name!r}, only {', '.join(values)}."
            )
        return values[name]


def _require_capture(attn: object, statistic: str) -> None:
    """Raise TypeError unless the first argument of a statistic is a capture."""
    if not (hasattr(attn, "grid") and hasattr(attn, "__getitem__")):
        raise TypeError(
            f"attention.{statistic} takes a capture, got {type(attn).__name__}. Run `with vitlens.capture(model) as "
            "attn: model(images)` and pass attn."
        )


def mean_distance(attn: Attention, renormalize: bool = False) -> Tensor:
    """(B, L, H) mean attention distance in input pixels (paper, section 4.5 and D.7).

    >>> vitlens.attention.mean_distance(attn).shape
    torch.Size([2, 12, 3])

    The mean over query patches of Σ_j A_ij·d_ij over patches. As in the authors' code the rows are not renormalized
    after the prefix tokens are dropped, so attention to them counts as distance 0. `renormalize=True` divides by the
    attention to patches.
    """
    return _run(attn, _MeanDistance(renormalize))["mean_distance"]


def entropy(attn: Attention) -> Tensor:
    """(B, L, H) mean over all T queries of the entropy −Σ_j A_ij·ln A_ij, in nats: 0 (one token) to ln T (uniform).

    >>> bool((vitlens.attention.entropy(attn) < np.log(197)).all())
    True
    """
    return _run(attn, _Entropy())["entropy"]


def received(attn: Attention, prefix: bool = False) -> Tensor:
    """(B, L, H, P) attention that each patch receives, the mean over all T queries. With `prefix`, (B, L, H, T).

    >>> vitlens.attention.received(attn, prefix=True).sum(-1).allclose(torch.ones(2, 12, 3))
    True
    """
    return _run(attn, _Received(prefix))["received"]


def sinks(attn: Attention) -> Tensor:
    """(B, L, P) bool mask of the sinks: patches that receive far more attention than the others of their image.

    A sink receives more than 20 times the median attention of the patches in the same layer, and more than 5 times
    uniform attention, which is 1/T. Attention received is the mean over heads and all T queries. The median of an even
    number of patches is the lower of the two in the middle. The norm of a patch plays no part. Raises TypeError for an
    argument that is not a capture.

    >>> vitlens.attention.sinks(attn).shape
    torch.Size([2, 12, 196])
    """
    _require_capture(attn, "sinks")
    share = received(attn).mean(2)
    median = share.median(-1, keepdim=True).values
    above_median = share > SINK_TIMES_MEDIAN * median
    above_uniform = share > SINK_TIMES_UNIFORM / attn.grid.tokens
    return above_median & above_uniform


def rollout(
    attn: Attention,
    query: tuple[int, int] | int | None = None,
    head_fusion: str = "mean",
    discard: float = 0.0,
) -> Tensor:
    """(B, rows, cols) attention rollout from the read-out to the input (Abnar and Zuidema 2020; paper, Fig. 6, D.8).

    The query's row of Â_L ⋯ Â_1 with Â = (A + I) / row sum, A fused over heads. Prefix tokens are dropped without
    rescaling, so the map sums to 1 minus the share of the prefix. The row is pulled back through the layers from the
    top, so no T × T matrix is formed.

    >>> vitlens.attention.rollout(attn).shape
    torch.Size([2, 14, 14])

    query: (row, column) of a patch, or the position of any token in the sequence, in place of the read-out.
    head_fusion: "mean" (the paper's), "max" or "min". discard: share of the smallest entries of every fused row to
    drop (the row is renormalized after). Raises ValueError without a query if the model reads no weighted sum.
    """
    return _run(attn, _Rollout(query, head_fusion, discard))["rollout"]


def summary(attn: Attention, *statistics: str | Statistic, renormalize: bool = False) -> Summary:
    """Several statistics in one pass over the rows.

    >>> vitlens.attention.summary(attn, "entropy").entropy.shape
    torch.Size([2, 12, 3])

    statistics: names in `STATISTICS`, or statistics, by default all in `STATISTICS`. renormalize: as in
    `mean_distance`. Raises ValueError for an unknown name.
    """
    _require_capture(attn, "summary")
    for statistic in statistics:
        if not isinstance(statistic, Statistic):
            require_known(statistic, STATISTICS, "A statistic")
    known = dict(STATISTICS)
    if renormalize:
        known["mean_distance"] = _MeanDistance(True)
    chosen = [known[key] if isinstance(key, str) else key for key in statistics or STATISTICS]
    results = _run(attn, *(statistic for statistic in chosen if statistic.applies(attn)))
    values = {statistic.name: results.get(statistic.name) for statistic in chosen}
    by_head = []
    for statistic in chosen:
        stacked = type(statistic).result is Statistic.result
        if stacked and values[statistic.name].dim() == 3:
            by_head.append(statistic.name)
    return Summary(values, attn[0].q.shape[0], tuple(by_head))


def mean_over(
    model: nn.Module, loader: Iterable, *statistics: str | Statistic, renormalize: bool = False
) -> Summary:
    """Means of statistics over a data loader, in constant memory.

    >>> vitlens.attention.mean_over(model, [images], "mean_distance").mean_distance.shape
    torch.Size([12, 3])

    model: as in `vitlens.capture`. loader: yields image batches (B, C, height, width), or tuples that begin with one.
    All images must have one size. statistics, renormalize: as in `summary`.

    The model runs without gradients, in eval mode, on its own device. Its mode is restored afterwards.
    """
    bare = unwrap(model)
    parameter = next(model.parameters())
    total: dict[str, Tensor | None] = {}
    grid = None
    count = 0
    with eval_mode(model), torch.no_grad():
        for batch in loader:
            images = batch[0] if isinstance(batch, list | tuple) else batch
            require_images(images, bare)
            with capture(model) as attn:
                run(model, images.to(parameter, non_blocking=True))
            grid = grid or attn.grid
            if attn.grid != grid:
                raise ValueError(
                    f"All images must have one size, got {grid.image} and {attn.grid.image}. Resize them."
                )
            part = summary(attn, *statistics, renormalize=renormalize)
            for name, values in part.values.items():
                if values is None:
                    total[name] = None
                else:
                    total[name] = total.get(name, 0) + to_float64(values).sum(0)
            count += part.images
    if not count:
        raise ValueError("The loader yields no batch of images.")
    means = {name: None if value is None else value / count for name, value in total.items()}
    return Summary(means, count, part.by_head)


def read_row(attn: Attention, query: tuple[int, int] | int | None = None) -> Tensor:
    """(B, T) row from which a rollout starts: one-hot for a patch (row, column), or the read-out.

    Raises ValueError for a model whose head reads no weighted sum of its tokens.
    """
    q = attn[0].q
    row = torch.zeros(len(q), attn.grid.tokens, device=q.device, dtype=attn[0].wide)
    if query is not None:
        row[:, attn.grid.position(query)] = 1.0
        return row
    if attn.grid.readout is None:
        raise ValueError(
            f"{attn.model_name} reads no weighted sum of its tokens (its pooling takes a maximum, returns all tokens, "
            "or is done by a wrapper), so this map has no row to start from. Pass a patch, `query=(row, column)`, or "
            "use another method, such as legrad or grad_cam."
        )
    return row + attn.grid.readout.to(row)


def contrast(maps: Tensor) -> Tensor:
    """(…,) contrast of maps (…, rows, cols) of values ≥ 0, such as rollouts: from 1 (uniform) to 10 (all in one tenth).

    The share of a map that falls on the brightest tenth of the image, over that tenth: with the P patches in falling
    order, r₁ ≥ r₂ ≥ …, and k = ⌊P/10⌋, C = 10 · (r₁ + … + r_k + (P/10 − k)·r_{k+1}) / (r₁ + … + r_P). It is a share of
    area, so grids of any size can be compared. It is 1 for a map of zeros. Raises ValueError for values below 0 or NaN.

    >>> vitlens.attention.contrast(torch.eye(10))
    tensor(10., dtype=torch.float64)
    """
    values = to_float64(maps).flatten(-2).sort(dim=-1, descending=True).values
    if not (values >= 0).all():
        raise ValueError(
            "The values of a map must be 0 or more for its contrast. Clamp them first."
        )
    patches = values.shape[-1]
    rank = torch.arange(patches, device=values.device)
    top = (patches / 10 - rank).clamp(0, 1).to(values)  # 1 in the brightest tenth, 0 below it
    total = values.sum(-1)
    return torch.where(total > 0, 10 * (values @ top) / total, 1.0)


def _run(attn: Attention, *statistics: Statistic) -> dict[str, Tensor]:
    """Statistics by name: by the kernels where a GPU has them and for default options, all others by rows."""
    if not statistics:
        return {}
    _require_capture(attn, statistics[0].name)
    ours = (_MeanDistance, _Entropy, _Received, _Rollout)  # a subclass may add up something else
    fits = [statistic.in_kernels and type(statistic) in ours for statistic in statistics]
    names = [each.name for each, fit in zip(statistics, fits, strict=True) if fit]
    if not names or not fused.applies(attn):
        return _by_rows(attn, *statistics)
    row = read_row(attn) if "rollout" in names else None
    values = fused.fused_statistics(attn, attn.grid, row)
    others = [each for each, fit in zip(statistics, fits, strict=True) if not fit]
    return {name: values[name] for name in names} | _by_rows(attn, *others)


def _by_rows(attn: Attention, *statistics: Statistic) -> dict[str, Tensor]:
    """Statistics by name, in one pass in float32 or wider: last layer first, a few images at a time."""
    if not statistics:
        return {}
    statistics = [copy(statistic) for statistic in statistics]
    q = attn[0].q
    batch, heads, tokens, _ = q.shape
    block = BLOCK.get(q.device.type, BLOCK["cpu"])
    chunk = max(1, block // (heads * tokens * tokens))
    parts = []
    with full_precision(q.device):
        for start in range(0, batch, chunk):
            images = slice(start, min(start + chunk, batch))
            rows = max(8, block // ((images.stop - start) * heads * tokens))
            _run_images(attn, images, rows, statistics)
            parts.append([statistic.result() for statistic in statistics])
    results = {}
    for statistic, *values in zip(statistics, *parts, strict=True):
        results[statistic.name] = torch.cat(values)
    return results


def _run_images(attn: Attention, images: slice, rows: int, statistics: Sequence[Statistic]) -> None:
    """Add all layers of some images to the statistics, last layer first, in blocks of rows."""
    for statistic in statistics:
        statistic.begin(attn, images)
    for index in reversed(range(len(attn))):
        layer = attn[index].images(images)
        for queries, logits, weights in _blocks(layer, rows, statistics):
            for statistic in statistics:
                statistic.add(queries, logits, weights)
        for statistic in statistics:
            statistic.end_layer()


def _blocks(
    layer: Layer, rows: int, statistics: Sequence[Statistic]
) -> Iterator[tuple[slice, Tensor | None, Tensor]]:
    """(queries, logits, weights) a block at a time. Without logits, in larger blocks."""
    if any(statistic.logits for statistic in statistics):
        for queries, logits, weights in layer.blocks(rows):
            if layer.mask is not None:  # 0 · −∞ is not a number
                logits = logits.clamp_(min=torch.finfo(logits.dtype).min)
            yield queries, logits, weights
        return
    needed = None
    if all(statistic.row is not None for statistic in statistics):
        # A rollout starts with few queries, often one.
        needed = torch.cat([statistic.row for statistic in statistics]).any(0)
    for queries, weights in layer.rows(2 * rows, reuse=True, only=needed):
        yield queries, None, weights


class _MeanDistance(Statistic):
    name = "mean_distance"
    title = "mean attention distance in input pixels"

    def __init__(self, renormalize: bool = False):
        self.renormalize = renormalize
        self.logits = renormalize
        self.in_kernels = not renormalize

    def add(self, queries, logits, weights):
        prefix = self.grid.prefix
        first = max(queries.start - prefix, 0)  # the first patch among the queries
        last = queries.stop - prefix
        if last <= first:
            return
        skipped = prefix + first - queries.start
        if self.renormalize:  # not by division, because attention to patches may underflow
            to_patches = logits[:, :, skipped:, prefix:].softmax(-1)
        else:
            to_patches = weights[:, :, skipped:, prefix:]
        distances = self.grid.distances(
            first, last, dtype=to_patches.dtype, device=to_patches.device
        )
        self.sums.append(torch.einsum("bhqk,qk->bhq", to_patches, distances))


class _Entropy(Statistic):
    name = "entropy"
    title = "entropy of a query's attention in nats"
    logits = True
    in_kernels = True

    def add(self, queries, logits, weights):
        # ln A_ij = x_ij − lse_i, and the largest entry of a row gives its log-sum-exp without underflow
        lse = logits.amax(-1) - weights.amax(-1).log()
        self.sums.append(lse - torch.einsum("bhqk,bhqk->bhq", weights, logits))


class _Received(Statistic):
    name = "received"
    title = "attention each patch receives"

    def __init__(self, prefix: bool = False):
        self.prefix = prefix
        self.in_kernels = not prefix

    def add(self, queries, logits, weights):
        self.sums.append(weights.new_ones(weights.shape[-2]) @ weights)

    def end_layer(self):
        total = sum(self.sums[1:], self.sums[0])
        if not self.prefix:
            total = total[..., self.grid.prefix :]
        self.layers.append(total / self.grid.tokens)
        self.sums = []


class _Rollout(Statistic):
    name = "rollout"
    title = "attention rollout from the read-out to the input"

    def __init__(self, query=None, head_fusion: str = "mean", discard: float = 0.0):
        self.query = query
        self.discard = discard
        fusions = {"mean": Tensor.mean, "max": Tensor.amax, "min": Tensor.amin}
        require_known(head_fusion, fusions, "head_fusion")
        self.fuse = fusions[head_fusion]
        self.in_kernels = query is None and not discard and head_fusion == "mean"

    def applies(self, attn):
        return self.query is not None or attn.grid is None or attn.grid.readout is not None

    def begin(self, attn, images):
        super().begin(attn, images)
        self.row = read_row(attn, self.query)[images]
        self.pulled = torch.zeros_like(self.row)

    def add(self, queries, logits, weights):
        row = self.row[:, queries]
        if self.fuse is Tensor.mean and not self.discard:  # rows of A sum to 1, so Â = ½A + ½I
            by_head = row[:, None, None] @ weights
            self.pulled += by_head.squeeze(-2).mean(1) / 2
            self.pulled[:, queries] += row / 2
            return
        fused = self.fuse(weights, 1)
        dropped = int(self.discard * fused.shape[-1])
        if dropped:
            fused = fused.scatter(-1, fused.topk(dropped, largest=False).indices, 0.0)
        row = row / (fused.sum(-1) + 1)
        self.pulled += torch.einsum("bq,bqk->bk", row, fused)
        self.pulled[:, queries] += row

    def end_layer(self):
        self.row = self.pulled
        self.pulled = torch.zeros_like(self.row)

    def result(self):
        return self.grid.image_map(self.row)


STATISTICS: dict[str, Statistic] = {
    "mean_distance": _MeanDistance(),
    "entropy": _Entropy(),
    "received": _Received(),
    "rollout": _Rollout(),
}
"""The statistics of a `summary` by name."""
