"""Fused GPU kernels for the sums over attention maps: on CUDA, no row of a map ever reaches the device's memory.

`sums` does for one layer what going through `Layer.blocks` does, in two Triton kernels. The first walks along the keys,
a tile of queries at a time, as fused attention does (running maximum, sums rescaled when it grows): the log-sum-exp
and the sums over each row. The second walks along the queries, a tile of keys at a time: with the log-sum-exp every
weight is known at once, and columns can be summed. Each number is written once, by one program, in a fixed order:
nothing is atomic and two runs agree bit for bit. 16-bit q and k are multiplied on tensor cores, 32-bit ones in full
float32; all sums are float32.

Triton is imported when the first kernel is needed. Before the first use on a device, in a precision, the kernels are
compared with rows on a small random layer. Where Triton is missing, or a kernel fails or disagrees, `sums` warns once
and returns None, as it does for layers it does not know (a mask, float64, a CPU, an attention pool): the caller goes
through the rows.

Shapes: B batch, H heads, T tokens = R prefix + P patches, K head width.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.layer import Layer

enabled = True  # set to False to do without the kernels; a kernel that fails or disagrees does so itself
TOLERANCE = 1e-3  # of the comparison with rows, relative to the norm: far above rounding, far below any mistake
tl = None  # Triton's language, once it is imported


@dataclass(frozen=True)
class Sums:
    """Sums over one layer's attention A, in float32.

    entropy: (B, H, T) −Σ_j A_ij·ln A_ij of all queries i, in nats. distance: (B, H, P) Σ_j A_ij·d_ij over the patches
    j for query patches i, in input pixels. mass: (B, H, P) Σ_j A_ij over the patches j for the same queries.
    received: (B, H, T) Σ_i A_ij. pulled: (B, T) Σ_i row_i · (mean over heads of A_ij). Those that were not asked for
    are None.
    """

    entropy: Tensor | None = None
    distance: Tensor | None = None
    mass: Tensor | None = None
    received: Tensor | None = None
    pulled: Tensor | None = None


def supported(layer: Layer, grid: TokenGrid) -> bool:
    """Whether there are kernels for a layer: T queries and T keys, no mask, 16 or 32 bits, on a GPU since Ampere."""
    q, k = layer.q, layer.k
    return (
        enabled
        and q.is_cuda
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and layer.mask is None
        and layer.scale > 0
        and q.dtype == k.dtype
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and q.shape == k.shape
        and q.shape[-2] == grid.tokens
        and q.shape[-1] <= 128
    )


def sums(layer: Layer, grid: TokenGrid, *, received: bool = False, row: Tensor | None = None) -> Sums | None:
    """Sums over the attention of one layer, or None if its rows are needed.

    received: sum the columns too, at half the cost again. row: (B, T) weights of the queries, to be pulled back through
    the layer. Warns once, and is off from then on (`enabled`), if Triton is missing or a kernel fails or is wrong.
    """
    global enabled
    if not supported(layer, grid):
        return None
    try:
        _compare(layer.q.device, layer.q.dtype, layer.q.shape[-1])
        return _launch(layer, grid, received, row)
    except torch.OutOfMemoryError:  # of these images; fewer of them may fit
        raise
    except Exception as error:  # no compiler, an old GPU, too little shared memory …
        enabled = False
        warnings.warn(
            f"Attention statistics run without fused kernels, slower but equally exact, because the kernels failed on "
            f"{layer.q.device}: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@functools.cache
def _compare(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Run the kernels once on a small random layer. Raises ArithmeticError if they disagree with its rows."""
    grid = TokenGrid(12, 13, (16, 14), prefix=2)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        q, k = (2 * torch.randn(2, 1, 2, grid.tokens, width, generator=numbers)).to(device, dtype)
        row = torch.rand(1, grid.tokens, generator=numbers).to(device)
        layer = Layer("random", q, k, width**-0.5)
        found, expected = _launch(layer, grid, True, row), from_rows(layer, grid, row)
    for field in fields(Sums):
        kernel, rows = getattr(found, field.name), getattr(expected, field.name)
        if not (kernel - rows).norm() <= TOLERANCE * rows.norm():  # false for NaN as well
            raise ArithmeticError(f"{field.name} of a random layer in {dtype} is not that of its rows")


def from_rows(layer: Layer, grid: TokenGrid, row: Tensor) -> Sums:
    """All sums over the attention of a small layer, from its whole map."""
    weights = layer.weights()
    patches = weights[..., grid.prefix :, grid.prefix :]
    distances = grid.distances(dtype=weights.dtype, device=weights.device)
    return Sums(
        entropy=torch.special.entr(weights).sum(-1),
        distance=(patches * distances).sum(-1),
        mass=patches.sum(-1),
        received=weights.sum(-2),
        pulled=torch.einsum("bq,bhqk->bk", row.to(weights), weights) / weights.shape[1],
    )


def _launch(layer: Layer, grid: TokenGrid, received: bool, row: Tensor | None) -> Sums:
    by_query, by_key = _compiled()
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (layer.q, layer.k))
    batch, heads, tokens, width = q.shape
    exponent = layer.scale * math.log2(math.e)  # weights are powers of two inside: the one a GPU computes itself
    shape = {"T": tokens, "H": heads, "WIDTH": width, "PADDED": max(16, 1 << (width - 1).bit_length())}
    tile = _tile(q.dtype, shape["PADDED"])
    programs = (batch * heads * -(-tokens // tile["TILE"]),)
    strides = (*q.stride()[:3], *k.stride()[:3])
    sums_like = {"device": q.device, "dtype": torch.float32}
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        rows = torch.empty(4, batch, heads, tokens, **sums_like)
        lse, entropy, distance, mass = rows
        places = _places(grid, q.device)
        by_query[programs](q, k, places, lse, entropy, distance, mass, exponent, *strides, **shape, **tile)
        columns, pulled = None, None
        if received or row is not None:
            row = torch.zeros(batch, tokens, **sums_like) if row is None else row.float().contiguous()
            columns, pulled = torch.empty(2, batch, heads, tokens, **sums_like)
            by_key[programs](q, k, lse, row, columns, pulled, exponent, *strides, **shape, **tile)
            pulled = pulled.mean(1)
    return Sums(entropy, distance[..., grid.prefix :], mass[..., grid.prefix :], columns, pulled)


def _tile(dtype: torch.dtype, padded: int) -> dict:
    """TILE tokens of one program and STEP tokens it takes at a time: the largest whose sums stay in registers."""
    if dtype == torch.float32:  # without tensor cores the operands of a product are held in registers too
        return {"TILE": 64, "STEP": 32, "num_warps": 8, "num_stages": 2}
    return {"TILE": 128, "STEP": 64, "num_warps": 8, "num_stages": 3 if padded <= 64 else 2}


@functools.lru_cache(maxsize=8)
def _places(grid: TokenGrid, device: torch.device) -> Tensor:
    """(3, T) for every token: 1 if it is a patch, and its center (y, x) in input pixels; 0 for the prefix."""
    places = torch.zeros(3, grid.tokens, device=device, dtype=torch.float32)
    places[0, grid.prefix :] = 1
    places[1:, grid.prefix :] = grid.centers(device=device).mT
    return places


@functools.cache
def _compiled():
    """Both kernels. Triton compiles them on their first call, once for each precision and head width."""
    global tl
    import triton
    import triton.language

    tl = triton.language
    return triton.jit(_sum_rows), triton.jit(_sum_columns)


def _sum_rows(
    q, k, places, lse, entropy, distance, mass, exponent,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    T, H, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program: TILE queries of one head of one image, walking over all keys.

    x are logits in units of ln 2, top the largest so far; total = Σ 2^(x−top), excess = Σ 2^(x−top)·(x−top).
    """
    tiles = tl.cdiv(T, TILE)
    head = (tl.program_id(0) // tiles).to(tl.int64)  # counted over the batch; offsets may exceed 32 bits
    i = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, PADDED)
    q += head // H * q_batch + head % H * q_head
    k += head // H * k_batch + head % H * k_head
    queries = tl.load(q + i[:, None] * q_token + c[None, :], mask=(i[:, None] < T) & (c[None, :] < WIDTH), other=0.0)
    y = tl.load(places + T + i, mask=i < T, other=0.0)
    x = tl.load(places + 2 * T + i, mask=i < T, other=0.0)

    top = tl.full([TILE], -1e30, tl.float32)  # finite, since −∞ · 0 is not a number
    total = tl.zeros([TILE], tl.float32)
    excess = tl.zeros([TILE], tl.float32)
    extent = tl.zeros([TILE], tl.float32)
    inside = tl.zeros([TILE], tl.float32)
    for start in range(0, T, STEP):
        j = start + tl.arange(0, STEP)
        valid = (j[:, None] < T) & (c[None, :] < WIDTH)
        keys = tl.load(k + j[:, None] * k_token + c[None, :], mask=valid, other=0.0)
        patch = tl.load(places + j, mask=j < T, other=0.0)
        dy = y[:, None] - tl.load(places + T + j, mask=j < T, other=0.0)[None, :]
        dx = x[:, None] - tl.load(places + 2 * T + j, mask=j < T, other=0.0)[None, :]

        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        logits = tl.where(j[None, :] < T, logits, -1e30)
        highest = tl.maximum(top, tl.max(logits, 1) * exponent)
        shifted = logits * exponent - highest[:, None]
        weights = tl.exp2(shifted)
        drop = top - highest
        shrink = tl.exp2(drop)
        excess = shrink * (excess + drop * total) + tl.sum(weights * shifted, 1)
        total = shrink * total + tl.sum(weights, 1)
        weights *= patch[None, :]
        inside = shrink * inside + tl.sum(weights, 1)
        extent = shrink * extent + tl.sum(weights * tl.sqrt(dy * dy + dx * dx), 1)
        top = highest

    at = head * T + i
    tl.store(lse + at, top + tl.log2(total), mask=i < T)
    tl.store(entropy + at, 0.6931471805599453 * (tl.log2(total) - excess / total), mask=i < T)
    tl.store(distance + at, extent / total, mask=i < T)
    tl.store(mass + at, inside / total, mask=i < T)


def _sum_columns(
    q, k, lse, row, received, pulled, exponent,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    T, H, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program: TILE keys of one head of one image, walking over all queries. lse in units of ln 2."""
    tiles = tl.cdiv(T, TILE)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    j = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, PADDED)
    q += head // H * q_batch + head % H * q_head
    k += head // H * k_batch + head % H * k_head
    keys = tl.load(k + j[:, None] * k_token + c[None, :], mask=(j[:, None] < T) & (c[None, :] < WIDTH), other=0.0)

    plain = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE], tl.float32)
    for start in range(0, T, STEP):
        i = start + tl.arange(0, STEP)
        valid = (i[:, None] < T) & (c[None, :] < WIDTH)
        queries = tl.load(q + i[:, None] * q_token + c[None, :], mask=valid, other=0.0)
        norm = tl.load(lse + head * T + i, mask=i < T, other=1e30)  # beyond the last query every weight is 0
        share = tl.load(row + head // H * T + i, mask=i < T, other=0.0)
        logits = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        weights = tl.exp2(logits * exponent - norm[None, :])
        plain += tl.sum(weights, 1)
        weighted += tl.sum(weights * share[None, :], 1)

    at = head * T + j
    tl.store(received + at, plain, mask=j < T)
    tl.store(pulled + at, weighted, mask=j < T)
