"""Statistics of attention by the kernels, and where these apply: NVIDIA's GPUs from compute capability 8 under Linux.

An H200 has measured them (data/results/kernels-h200.csv): with ViT-B/16 in bf16 they take a twelfth of the time of rows
at 1,024 pixels, and a seventh at 224.
"""

import functools
import importlib.util
import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.layer import Layer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = 1e-4
"""Largest difference from float64 in the check, as a share of the largest value."""


def fused_statistics(
    layers: Sequence[Layer], grid: TokenGrid, row: Tensor | None, **options
) -> dict[str, Tensor]:
    """Distance, entropy and attention received by name, and the rollout if it has a row to start from.

    row: (B, T), as of `vitlens.attention.read_row`. Shapes are those of a `Summary`.
    """
    from vitlens.recorder.kernels import layer_sums

    q = layers[0].q
    pulled_back = torch.zeros(len(q), grid.tokens, device=q.device) if row is None else row
    centers = torch.zeros(2, grid.tokens, device=q.device)
    centers[:, grid.prefix :] = grid.centers(device=q.device).T
    by_layer = []
    for index in reversed(range(len(layers))):  # a capture gives one layer at a time
        layer = layers[index]
        distance, entropy, received, pulled = layer_sums(
            layer.q, layer.k, layer.scale, pulled_back, centers, grid.prefix, **options
        )
        pulled_back = (pulled_back + pulled.mean(1)) / 2  # rows of A sum to 1, so Â = ½A + ½I
        to_patches = received[..., grid.prefix :] / grid.tokens
        by_layer.append((distance[..., grid.prefix :].mean(-1), entropy.mean(-1), to_patches))
    values = stacked(by_layer)
    if row is not None:
        values["rollout"] = grid.image_map(pulled_back)
    return values


def stacked(by_layer: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """(B, L, …) statistics by name, from those of each layer, last layer first."""
    columns = zip(*by_layer[::-1], strict=True)
    distance, entropy, received = [torch.stack(column, 1) for column in columns]
    return {"mean_distance": distance, "entropy": entropy, "received": received}


def applies(layers: Sequence[Layer]) -> bool:
    """True if the kernels can read every layer, and their device runs them correctly."""
    q = layers[0].q
    if q.dtype not in DTYPES or not has_kernels(q.device):
        return False
    if not all(is_plain(layers[index], q) for index in range(len(layers))):
        return False
    return self_check(*kind(q))


def is_plain(layer: Layer, first: Tensor) -> bool:
    """True for a layer without mask and gradients, with as many keys as queries, in the dtype of the first layer."""
    if layer.mask is not None or layer.q.requires_grad or layer.k.requires_grad:
        return False
    return kind(layer.q) == kind(layer.k) == kind(first) and layer.q.shape == layer.k.shape


def has_kernels(device: torch.device) -> bool:
    """True for NVIDIA's devices of compute capability 8 or later under Linux, with Triton installed."""
    if device.type != "cuda" or torch.version.cuda is None or sys.platform != "linux":
        return False
    if torch.compiler.is_compiling() or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def kind(q: Tensor) -> tuple[torch.device, torch.dtype, int]:
    """Device, dtype and head width, for which Triton compiles anew."""
    return q.device, q.dtype, q.shape[-1]


@functools.cache
def self_check(device: torch.device, dtype: torch.dtype = torch.float32, width: int = 64) -> bool:
    """True if the kernels compile and agree with float64 on a small input. Warns once if not."""
    layers, grid = sample(device, dtype, width)
    row = torch.full((len(layers[0].q), grid.tokens), 1 / grid.tokens, device=device)
    try:
        values = fused_statistics(layers, grid, row)
    except Exception as error:  # the compiler, its tools and the driver raise errors of many kinds
        problem = f"do not run: {type(error).__name__}: {str(error)[:200]}"
    else:
        expected = in_float64(layers, grid, row)
        differences = {name: difference(values[name], expected[name]) for name in expected}
        wrong = [name for name, value in differences.items() if not value <= TOLERANCE]  # or NaN
        if not wrong:
            return True
        problem = f"differ from float64 in {', '.join(wrong)}"
    warnings.warn(
        f"The attention kernels {problem}. Statistics of {dtype} with head width {width} on {device} are computed by "
        "rows, which takes longer.",
        stacklevel=2,
    )
    return False


def in_float64(layers: Sequence[Layer], grid: TokenGrid, row: Tensor) -> dict[str, Tensor]:
    """The statistics from whole maps in float64, as their definitions have them."""
    row = row.double()
    patches = slice(grid.prefix, None)
    distances = grid.distances(dtype=torch.float64, device=row.device)
    by_layer = []
    for layer in reversed(layers):
        logits = layer.q.double() @ layer.k.double().mT * layer.scale
        weights = logits.softmax(-1)
        distance = (weights[..., patches, patches] * distances).sum(-1).mean(-1)
        entropy = -(weights * logits.log_softmax(-1)).sum(-1).mean(-1)
        by_layer.append((distance, entropy, weights[..., patches].mean(-2)))
        pulled = row[:, None, None] @ weights
        row = (row + pulled.squeeze(-2).mean(1)) / 2
    return stacked(by_layer) | {"rollout": grid.image_map(row)}


def difference(values: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected value."""
    return ((values.double() - expected.double()).abs().max() / expected.abs().max()).item()


def sample(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    width: int = 64,
    prefix: int = 1,
    scale: float | None = None,
) -> tuple[list[Layer], TokenGrid]:
    """Two layers of random queries and keys of two images: two heads, and a grid of 5 × 8 patches."""
    random = torch.Generator().manual_seed(0)
    readout = torch.rand(prefix + 40, generator=random)
    readout /= readout.sum()
    grid = TokenGrid(rows=5, cols=8, patch=(16, 14), prefix=prefix, readout=readout)
    layers = []
    for index in range(2):
        q, k = 1.5 * torch.randn(2, 2, 2, grid.tokens, width, generator=random).to(device)
        layers.append(Layer(f"layer {index}", q.to(dtype), k.to(dtype), scale or width**-0.5))
    return layers, grid
