"""Ways to compute the statistics of attention on a GPU: rows, rows in fewer passes, and kernels of five tilings.

ViT-B/16, whose queries and keys are multiplied by 3, because maps of random weights are uniform. Times are medians in
milliseconds, of the statistics alone and together with the captured forward. Errors are shares of the largest value,
against float64 of the same queries and keys, for the first image. `problem` is the error of a way that failed.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import timm
import torch
from torch import Tensor, nn

from experiments.attention import compiled_summary
from vitlens import TokenGrid, attention, capture
from vitlens.recorder import Layer, fused
from vitlens.recorder.precision import full_precision

TILINGS = ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 128, 4))
"""Queries and keys in a tile, and warps."""

REPEATS = 7


@dataclass(frozen=True)
class Case:
    pixels: int
    batch: int
    dtype: torch.dtype = torch.bfloat16
    model: str = "vit_base_patch16_224"
    depth: int = 12


CASES = (
    Case(224, 64),
    Case(224, 256),
    Case(1024, 2),
    Case(1024, 8),
    Case(2048, 1),
    Case(1024, 2, torch.float32),
)
TINY = (Case(48, 1, torch.float32, "vit_tiny_patch16_224", depth=2),)


def product(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(B, H, Q, T) logits in float32. On CUDA the factors have 16 bits, and float32 becomes a product three times as
    long: the sum of three products of bfloat16 numbers."""
    if q.dtype == torch.float32:
        q_high, q_low = halves(q)
        k_high, k_low = halves(k)
        q = torch.cat([q_high, q_high, q_low], -1)
        k = torch.cat([k_high, k_low, k_high], -1)
    if not q.is_cuda:  # PyTorch has this product on CUDA only
        return (q.float() @ k.float().mT) * scale
    logits = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out_dtype=torch.float32)
    return logits.mul_(scale).unflatten(0, q.shape[:2])


def halves(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The upper 8 bits of a float32 tensor's significands, and the next 8, in bfloat16."""
    high = tensor.bfloat16()
    return high, (tensor - high.float()).bfloat16()


def fewer_passes(q, k, scale: float, row, distances, prefix: int) -> tuple[Tensor, ...]:
    """Sums over one block of query rows, with the maximum and sum of one explicit softmax."""
    logits = product(q, k, scale)
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp_()
    total = weights.sum(-1, keepdim=True)
    weights.div_(total)
    lse = (largest + total.log()).squeeze(-1)
    entropy = lse - torch.einsum("bhqk,bhqk->bhq", weights, logits)
    distance = torch.einsum("bhqk,qk->bhq", weights[..., prefix:], distances)
    both = torch.stack([torch.ones_like(row), row], 1)  # the column sums, and the rollout
    received, pulled = (both[:, None] @ weights).unbind(-2)
    return distance, entropy, received, pulled.mean(1)


def in_fewer_passes(attn) -> dict[str, Tensor]:
    """The statistics by blocks of equal size."""
    batch, heads, tokens, _ = attn[0].q.shape
    block = attention.BLOCK.get(attn[0].q.device.type, attention.BLOCK["cpu"])
    count = -(-batch * heads * tokens**2 // block)
    rows = -(-tokens // min(count, tokens))
    with full_precision(attn[0].q.device):
        values = compiled_summary(attn, fewer_passes, rows)
    return dict(zip(attention.STATISTICS, values, strict=True))


def by_kernels(attn, tiling: tuple[int, int, int]) -> dict[str, Tensor]:
    row = attention.read_row(attn)
    return fused.fused_statistics(attn, attn.grid, row, tiling=tiling)


def ways() -> dict[str, Callable]:
    """By name: functions of a capture that return the statistics by name."""
    found = {
        "rows": lambda attn: attention._by_rows(attn, *attention.STATISTICS.values()),
        "fewer passes": in_fewer_passes,
    }
    for tiling in TILINGS:
        name = "kernels {} x {}, {} warps".format(*tiling)
        found[name] = partial(by_kernels, tiling=tiling)
    return found


class Sample(list[Layer]):
    """Layers without a model, with what the statistics read of a capture."""

    model_name = "a sample"

    def __init__(self, layers: list[Layer], grid: TokenGrid):
        super().__init__(layers)
        self.grid = grid


def in_float64(attn) -> dict[str, Tensor]:
    """The statistics of the first image in float64."""
    layers = []
    for layer in attn:
        first = layer.images(slice(0, 1))
        layers.append(replace(first, q=first.q.double(), k=first.k.double()))
    return attention._by_rows(Sample(layers, attn.grid), *attention.STATISTICS.values())


def opened(case: Case, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(case.model, img_size=case.pixels, depth=case.depth)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(3)
    return model.eval().to(device)


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


@torch.inference_mode()
def measured(case: Case, device: torch.device, repeats: int = REPEATS) -> list[dict]:
    """One row for each way."""
    model = opened(case, device)
    images = torch.randn(case.batch, 3, case.pixels, case.pixels, device=device)
    autocast = torch.autocast(device.type, case.dtype, enabled=case.dtype != torch.float32)

    def forward():
        with autocast:
            return model(images)

    def captured(way):
        with capture(model) as attn:
            forward()
        return way(attn)

    with capture(model) as attn:
        forward()
    plain = milliseconds(forward, device, repeats)
    exact = in_float64(attn)
    table = []
    for name, way in ways().items():
        row = {
            "model": case.model,
            "image_px": case.pixels,
            "tokens": attn.grid.tokens,
            "batch": case.batch,
            "dtype": str(attn[0].q.dtype).removeprefix("torch."),
            "way": name,
            "forward_ms": plain,
        }
        table.append(row)
        try:
            values = way(attn)
            for statistic, expected in exact.items():
                row[f"{statistic}_error"] = fused.difference(values[statistic][:1], expected)
            del values
            row["statistics_ms"] = milliseconds(partial(way, attn), device, repeats)
            row["together_ms"] = milliseconds(partial(captured, way), device, repeats)
        except Exception as error:  # a tiling may need more memory than a device has
            row["problem"] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        row["statistics/forward"] = row["statistics_ms"] / plain
        row["together/forward"] = row["together_ms"] / plain
    return table
