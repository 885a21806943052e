"""Statistics of attention in two Triton kernels that store no map.

One kernel sums over the keys of each query, the other over the queries of each key. Both compute the logits of a tile
on the chip, and nothing is added atomically, so results are the same bits in every run. Batch, tokens and prefix are
arguments at run time: Triton compiles once for each head width and dtype. TRITON_INTERPRET=1, set before Triton is
imported, runs both on a CPU.

Shapes: B batch, H heads, T tokens, W head width.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGE = (128, 64, 4)
SMALL = (64, 64, 4)
"""Queries and keys in a tile, and warps: the fastest of five on an H200 for rows of q of less than 256 bytes, and one
that fits into the memory of smaller devices for longer rows (data/results/kernels-h200.csv)."""


@triton.jit
def tile_of(x, head, rows, T, W: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr):
    """(rows, PADDED) rows of one head of x (B·H, T, W), 0 beyond T and W. WIDE: cast to float32."""
    columns = tl.arange(0, PADDED)
    inside = (rows[:, None] < T) & (columns[None, :] < W)
    tile = tl.load(x + (head * T + rows[:, None]) * W + columns[None, :], mask=inside, other=0.0)
    if WIDE:
        tile = tile.to(tl.float32)
    return tile


@triton.jit(do_not_specialize=["T", "prefix"])
def rows_kernel(
    Q,
    K,
    CENTERS,
    LSE,
    ENTROPY,
    DISTANCE,
    factor,
    T,
    prefix,
    W: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums over the keys of each query: log2-sum-exp2, entropy in nats, mean distance in pixels.

    CENTERS: (2, T) y and x of the tokens in pixels. Keys before `prefix` have distance 0. factor: the scale of the
    logits times log2 e, so that 2 is the base of all exponentials.
    """
    tiles = tl.cdiv(T, QUERIES)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.program_id(0) % tiles * QUERIES + tl.arange(0, QUERIES)
    q = tile_of(Q, head, i, T, W, PADDED, WIDE)
    y = tl.load(CENTERS + i, mask=i < T, other=0.0)
    x = tl.load(CENTERS + T + i, mask=i < T, other=0.0)
    largest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    energy = tl.zeros([QUERIES], tl.float32)
    pixels = tl.zeros([QUERIES], tl.float32)
    for start in range(0, T, KEYS):
        j = start + tl.arange(0, KEYS)
        k = tile_of(K, head, j, T, W, PADDED, WIDE)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
        logits = tl.where(j[None, :] < T, logits, -1e30)
        dy = y[:, None] - tl.load(CENTERS + j, mask=j < T, other=0.0)[None, :]
        dx = x[:, None] - tl.load(CENTERS + T + j, mask=j < T, other=0.0)[None, :]
        distance = tl.where(j[None, :] >= prefix, tl.sqrt(dy * dy + dx * dx), 0.0)
        larger = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp2(largest - larger)
        weights = tl.exp2(logits - larger[:, None])
        total = total * shrink + tl.sum(weights, 1)
        energy = energy * shrink + tl.sum(weights * logits, 1)
        pixels = pixels * shrink + tl.sum(weights * distance, 1)
        largest = larger
    lse = largest + tl.log2(total)
    ln2 = 0.6931471805599453
    place = head * T + i
    tl.store(LSE + place, lse, mask=i < T)
    tl.store(ENTROPY + place, (lse - energy / total) * ln2, mask=i < T)
    tl.store(DISTANCE + place, pixels / total, mask=i < T)


@triton.jit(do_not_specialize=["T", "heads"])
def columns_kernel(
    Q,
    K,
    LSE,
    ROW,
    RECEIVED,
    PULLED,
    factor,
    T,
    heads,
    W: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums over the queries of each key: of the attention, and of the attention weighted by ROW (B, T)."""
    tiles = tl.cdiv(T, KEYS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    j = tl.program_id(0) % tiles * KEYS + tl.arange(0, KEYS)
    k = tile_of(K, head, j, T, W, PADDED, WIDE)
    received = tl.zeros([KEYS], tl.float32)
    pulled = tl.zeros([KEYS], tl.float32)
    for start in range(0, T, QUERIES):
        i = start + tl.arange(0, QUERIES)
        q = tile_of(Q, head, i, T, W, PADDED, WIDE)
        lse = tl.load(LSE + head * T + i, mask=i < T, other=1e30)  # weight 0 beyond the last query
        row = tl.load(ROW + head // heads * T + i, mask=i < T, other=0.0)
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor
        weights = tl.exp2(logits - lse[None, :])
        received += tl.sum(weights, 1)
        pulled += tl.sum(weights * row[None, :], 1)
    tl.store(RECEIVED + head * T + j, received, mask=j < T)
    tl.store(PULLED + head * T + j, pulled, mask=j < T)


def tiling_of(dtype: torch.dtype, width: int) -> tuple[int, int, int]:
    return LARGE if dtype.itemsize * triton.next_power_of_2(width) < 256 else SMALL


def constants(dtype: torch.dtype, width: int, tiling: tuple[int, int, int] | None = None) -> dict:
    """Arguments of both kernels that are known when they are compiled, besides WIDE."""
    queries, keys, _ = tiling or tiling_of(dtype, width)
    return {
        "W": width,
        "PADDED": max(16, triton.next_power_of_2(width)),
        "QUERIES": queries,
        "KEYS": keys,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",  # ignored for 16 bits
    }


def layer_sums(
    q: Tensor,
    k: Tensor,
    scale: float,
    row: Tensor,
    centers: Tensor,
    prefix: int,
    tiling: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distance and entropy of each query, attention that each key receives, and the rollout's step, by head.

    All are (B, H, T) in float32. q, k: (B, H, T, W) in float32, float16 or bfloat16. row: (B, T) of the rollout, in
    float32. centers: (2, T) y and x of the tokens in pixels.
    """
    tiling = tiling or tiling_of(q.dtype, q.shape[-1])
    batch, heads, tokens, width = q.shape
    q, k, row = q.contiguous(), k.contiguous(), row.contiguous()
    # separate tensors, because Triton compiles again for addresses that are no multiple of 16
    lse, entropy, distance, received, pulled = [
        torch.empty(batch, heads, tokens, device=q.device, dtype=torch.float32) for _ in range(5)
    ]
    options = constants(q.dtype, width, tiling)
    options["WIDE"] = not q.is_cuda  # Triton's interpreter multiplies the bits of bfloat16
    options["num_warps"] = tiling[2]
    factor = scale * math.log2(math.e)
    tiles = triton.cdiv(tokens, tiling[0]), triton.cdiv(tokens, tiling[1])
    with torch.cuda.device_of(q):
        rows_kernel[(tiles[0] * batch * heads,)](
            q, k, centers, lse, entropy, distance, factor, tokens, prefix, **options
        )
        columns_kernel[(tiles[1] * batch * heads,)](
            q, k, lse, row, received, pulled, factor, tokens, heads, **options
        )
    return distance, entropy, received, pulled
