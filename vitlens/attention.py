"""What attention does, as numbers: distance, entropy, attention received, rollout.

A map costs T² per head, but all that is asked of it are sums over its rows. So rows are made a block at a time
(`Layer.blocks`), every statistic here takes what it needs from each block, and no map is ever held. Several statistics
share one pass, from the last layer to the first (the order in which a rollout needs them). Fused attention makes
no rows at all: on a GPU kernels of our own add up most layers (`recorder.kernels`), on a CPU PyTorch's own gives sums
over queries, which a rollout and the attention received are made of (`recorder.fused`).

Shapes: B batch, L layers, H heads, T tokens = R prefix + P patches. Distances in input pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from vitlens.recorder import kernels
from vitlens.recorder.families import unwrap
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.layer import Layer
from vitlens.recorder.recording import Attention, capture
from vitlens.recorder.running import evaluating, float64, full_precision, require_images, taking

# Numbers in one block of rows: small enough for a processor's cache, large enough to keep a GPU busy.
BLOCK = {"cpu": 2**21, "cuda": 2**26}
SMALL = 256  # tokens up to which a CPU sums whole maps as quickly


@dataclass(frozen=True)
class Summary:
    """All statistics of one capture. rollout is None for models that read no weighted sum of tokens (max pooling).

    mean_distance, entropy: (B, L, H), in input pixels and nats. received: (B, L, H, P). rollout: (B, rows, cols).
    As returned by `mean_over`, they are means over `images` images and have no axis B.
    """

    mean_distance: Tensor
    entropy: Tensor
    received: Tensor
    rollout: Tensor | None
    images: int


def mean_distance(attn: Attention, renormalize: bool = False) -> Tensor:
    """(B, L, H) mean attention distance in input pixels (paper, section 4.5 and D.7).

    Patch to patch, the mean over query patches of Σ_j A_ij·d_ij. As in the authors' code the rows are not renormalized
    after the prefix tokens are dropped, so attention paid to them counts as distance 0; `renormalize=True` divides by
    the attention that stays on patches.
    """
    return _run(attn, _MeanDistance(renormalize))[0]


def entropy(attn: Attention) -> Tensor:
    """(B, L, H) mean over all T queries of the entropy −Σ_j A_ij·ln A_ij, in nats: 0 (one token) to ln T (uniform)."""
    return _run(attn, _Entropy())[0]


def received(attn: Attention) -> Tensor:
    """(B, L, H, P) attention each patch receives, the mean over all T queries. With that of the prefix it sums to 1."""
    return _run(attn, _Received())[0]


def rollout(
    attn: Attention, query: tuple[int, int] | int | None = None, head_fusion: str = "mean", discard: float = 0.0
) -> Tensor:
    """(B, rows, cols) attention rollout from the read-out to the input (Abnar and Zuidema 2020; paper, Fig. 6, D.8).

    The query's row of Â_L ⋯ Â_1 with Â = (A + I) / row sum, A fused over heads; its prefix tokens are dropped and
    nothing is rescaled, so the map sums to 1 minus what the prefix received. The row is pulled back through the layers
    from the top, so no T × T matrix is formed.

    query: (row, column) of a patch, or the position of any token in the sequence, instead of what the head reads.
    head_fusion: "mean" (the paper's), "max" or "min".
    discard: share of the smallest entries of every fused row to drop (the row is renormalized after).
    Raises ValueError if the model reads no weighted sum of its tokens and no query is given.
    """
    return _run(attn, _Rollout(query, head_fusion, discard))[0]


def summary(attn: Attention, *, renormalize: bool = False) -> Summary:
    """All statistics in one pass over the rows, at little more than the cost of one."""
    statistics = [_MeanDistance(renormalize), _Entropy(), _Received()]
    if attn.grid is not None and attn.grid.readout is not None:
        statistics.append(_Rollout())
    results = _run(attn, *statistics)
    return Summary(*results[:3], results[3] if len(results) > 3 else None, len(results[0]))


def mean_over(model: nn.Module, loader: Iterable, *, renormalize: bool = False) -> Summary:
    """Means of all statistics over a data loader, in constant memory.

    loader: yields image batches (B, C, height, width), or tuples that begin with one. All images must have one size.
    The model runs without gradients, in eval mode, on its own device, and is left in the mode it was in.
    """
    like, bare = next(model.parameters()), unwrap(model)
    total: dict[str, Tensor] = {}
    grid, count = None, 0
    with evaluating(model):
        for batch in loader:
            images = batch[0] if isinstance(batch, list | tuple) else batch
            if not isinstance(images, Tensor):
                raise TypeError(
                    "The loader must yield image batches (B, C, height, width), or tuples that begin with one, but it "
                    f"yields {type(images).__name__}."
                )
            require_images(images, bare)
            with torch.no_grad(), capture(model) as attn, taking(bare):
                model(images.to(like))
            grid = grid or attn.grid
            if attn.grid != grid:
                raise ValueError(
                    f"The images of a mean must have one size, but sizes {grid.image} and {attn.grid.image} came. "
                    "Resize them alike, or take one mean per size."
                )
            batch_summary = summary(attn, renormalize=renormalize)
            for name in ("mean_distance", "entropy", "received", "rollout"):
                if (values := getattr(batch_summary, name)) is not None:
                    total[name] = total.get(name, 0) + float64(values).sum(0)
            count += batch_summary.images
    if count == 0:
        raise ValueError("The loader gave no images, so there is nothing to take the mean of.")
    means = {f.name: total[f.name] / count if f.name in total else None for f in fields(Summary) if f.name != "images"}
    return Summary(**means, images=count)


def _run(attn: Attention, *statistics: _Statistic) -> list[Tensor]:
    """One pass over all rows of all layers, in the precision of float32 or wider."""
    with full_precision(attn[0].q.device):
        return _passed(attn, *statistics)


def _passed(attn: Attention, *statistics: _Statistic) -> list[Tensor]:
    """Last layer first; a few images at a time where maps are small."""
    batch, heads, tokens, _ = attn[0].q.shape
    block = BLOCK.get(attn[0].q.device.type, BLOCK["cpu"])
    makes_rows = not kernels.supported(attn[0], attn.grid)  # fused kernels take all images at once
    chunk = max(1, block // (heads * tokens * tokens)) if makes_rows else batch
    parts = []
    for start in range(0, batch, chunk):
        images = slice(start, min(start + chunk, batch))
        rows = max(8, block // ((images.stop - start) * heads * tokens))
        for statistic in statistics:
            statistic.begin(attn, images)
        for index in reversed(range(len(attn))):
            layer = attn[index].images(images)
            if (sums := _fused_sums(layer, attn.grid, statistics)) is not None:
                for statistic in statistics:
                    statistic.take(sums)
            else:
                for queries, logits, weights in _blocks(layer, rows, statistics):
                    for statistic in statistics:
                        statistic.add(queries, logits, weights)
            for statistic in statistics:
                statistic.end_layer()
        parts.append([statistic.result() for statistic in statistics])
    return [torch.cat(results) for results in zip(*parts, strict=True)]


def _blocks(
    layer: Layer, rows: int, statistics: tuple[_Statistic, ...]
) -> Iterator[tuple[slice, Tensor | None, Tensor]]:
    """(queries, logits, weights) a block at a time; without logits, where nobody asks for them, in larger blocks."""
    if not any(statistic.logits for statistic in statistics):
        pulled = [statistic.row for statistic in statistics]
        # a row that is pulled back begins with few queries, often one
        wanted = None if any(row is None for row in pulled) else torch.cat(pulled).any(0)
        for queries, weights in layer.rows(2 * rows, reuse=True, wanted=wanted):
            yield queries, None, weights
        return
    for queries, logits, weights in layer.blocks(rows):
        if layer.mask is not None:  # 0 · −∞ is not a number
            logits = logits.clamp_(min=torch.finfo(logits.dtype).min)
        yield queries, logits, weights


def _fused_sums(layer: Layer, grid: TokenGrid, statistics: tuple[_Statistic, ...]) -> kernels.Sums | None:
    """The sums that the statistics need, by fused attention that makes no rows at all; None where there is none."""
    if not all(statistic.fusable for statistic in statistics):
        return None
    row = next((statistic.row for statistic in statistics if statistic.row is not None), None)
    columns = any(statistic.columns for statistic in statistics)
    only_columns = all(statistic.columns or statistic.row is not None for statistic in statistics)
    if layer.lse is None or not only_columns or (columns and grid.tokens <= SMALL):
        return kernels.sums(layer, grid, received=columns, row=row)
    received = layer.read(torch.ones_like(layer.lse[:, 0])) if columns else None
    return kernels.Sums(received=received, pulled=None if row is None else layer.read(row).mean(1))


class _Statistic:
    """Takes blocks of rows, or a layer's sums; layers come last first. Subclasses add up, then append (B, H, …)."""

    fusable = True  # a kernel's sums are enough
    columns = False  # needs the sums over queries
    logits = False  # needs what the softmax is taken of
    row: Tensor | None = None  # (B, T) what is to be pulled back through the layer

    def take(self, sums: kernels.Sums) -> None:
        raise NotImplementedError

    def begin(self, attn: Attention, images: slice) -> None:
        self.grid, self.layers, self.sums = attn.grid, [], []

    def add(self, queries: slice, logits: Tensor | None, weights: Tensor) -> None:
        raise NotImplementedError

    def end_layer(self) -> None:
        self.layers.append(torch.cat(self.sums, -1).mean(-1))
        self.sums = []

    def result(self) -> Tensor:
        return torch.stack(self.layers[::-1], 1)


class _MeanDistance(_Statistic):
    def __init__(self, renormalize: bool):
        self.renormalize = self.logits = renormalize

    def add(self, queries, logits, weights):
        prefix = self.grid.prefix
        first, last = max(queries.start - prefix, 0), queries.stop - prefix
        if last <= first:
            return
        among = logits if self.renormalize else weights
        among = among[:, :, prefix + first - queries.start :, prefix:]
        if self.renormalize:  # not by division: all that stays on patches may be too little for a number
            among = among.softmax(-1)
        distances = self.grid.distances(first, last, dtype=among.dtype, device=among.device)
        self.sums.append(torch.einsum("bhqk,qk->bhq", among, distances))

    def take(self, sums):
        self.sums.append(sums.distance / sums.mass if self.renormalize else sums.distance)


class _Entropy(_Statistic):
    logits = True

    def add(self, queries, logits, weights):
        # ln A_ij = x_ij − lse_i, and the largest entry of a row tells its log-sum-exp without underflow
        lse = logits.amax(-1) - weights.amax(-1).log()
        self.sums.append(lse - torch.einsum("bhqk,bhqk->bhq", weights, logits))

    def take(self, sums):
        self.sums.append(sums.entropy)


class _Received(_Statistic):
    columns = True

    def add(self, queries, logits, weights):
        self.sums.append(weights.new_ones(weights.shape[-2]) @ weights)

    def take(self, sums):
        self.sums.append(sums.received)

    def end_layer(self):
        total = sum(self.sums[1:], self.sums[0])[..., self.grid.prefix :]
        self.layers.append(total / self.grid.tokens)
        self.sums = []


class _Rollout(_Statistic):
    def __init__(self, query=None, head_fusion: str = "mean", discard: float = 0.0):
        if head_fusion not in ("mean", "max", "min"):
            raise ValueError(f'head_fusion is "mean", "max" or "min", but got {head_fusion!r}.')
        if not 0 <= discard < 1:
            raise ValueError(f"discard is a share of each row, at least 0 and below 1, but got {discard!r}.")
        self.query, self.head_fusion, self.discard = query, head_fusion, discard
        self.fusable = head_fusion == "mean" and not discard

    def begin(self, attn, images):
        super().begin(attn, images)
        count = images.stop - images.start
        row = torch.zeros(count, self.grid.tokens, device=attn[0].q.device, dtype=attn[0].wide)
        if self.query is not None:
            row[:, self.grid.position(self.query)] = 1.0
        elif self.grid.readout is None:
            raise ValueError(
                f"{attn.model_name} read no weighted sum of its tokens (its pooling takes a maximum, returns all "
                "tokens, or was not run), so a rollout has no row to start from. Give one: `rollout(attn, "
                "query=(row, column))`."
            )
        else:
            readout = self.grid.readout.to(row)
            row += readout if readout.dim() == 1 else readout[images]
        self.row, self.pulled = row, torch.zeros_like(row)

    def add(self, queries, logits, weights):
        row = self.row[:, queries]
        if self.head_fusion == "mean" and not self.discard:  # rows of A sum to 1, so Â = ½A + ½I
            self.pulled += (row[:, None, None] @ weights).squeeze(-2).mean(1) / 2
            self.pulled[:, queries] += row / 2
            return
        fused = getattr(weights, {"mean": "mean", "max": "amax", "min": "amin"}[self.head_fusion])(1)
        if dropped := int(self.discard * fused.shape[-1]):
            fused = fused.scatter(-1, fused.topk(dropped, largest=False).indices, 0.0)
        row = row / (fused.sum(-1) + 1)
        self.pulled += torch.einsum("bq,bqk->bk", row, fused)
        self.pulled[:, queries] += row

    def take(self, sums):
        self.pulled = (self.row + sums.pulled) / 2

    def end_layer(self):
        self.row, self.pulled = self.pulled, torch.zeros_like(self.pulled)

    def result(self):
        return self.grid.image_map(self.row)
