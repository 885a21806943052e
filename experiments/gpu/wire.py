"""Statistics of attention by the kernels where they apply, and by rows elsewhere.

`run` takes the place of the function of this purpose in `vitlens.attention` once a device has shown that the kernels
are faster. `summary` is the package's own function on top of it.
"""

import functools
import importlib.util
import sys
import warnings

import torch
from torch import Tensor

from vitlens import TokenGrid, attention
from vitlens.attention import Statistic, read_row
from vitlens.recorder.layer import Layer
from vitlens.recorder.record import Attention

rows = attention._run
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = 1e-4
"""Largest difference between kernels and rows in the check, as a share of the largest value."""


def run(attn: Attention, *statistics: Statistic) -> dict[str, Tensor]:
    """Statistics by name: those with default options by the kernels if a capture allows it, all others by rows."""
    chosen = [statistic for statistic in statistics if has_defaults(statistic)]
    if not chosen or not applies(attn) or not self_check(*kind(attn[0].q)):
        return rows(attn, *statistics)
    names = [statistic.name for statistic in chosen]
    values = by_kernels(attn, rollout="rollout" in names)
    others = [statistic for statistic in statistics if statistic not in chosen]
    return {name: values[name] for name in names} | rows(attn, *others)


def by_kernels(attn: Attention, rollout: bool = True, **options) -> dict[str, Tensor]:
    """The statistics with default options, last layer first. Without `rollout`, no read-out is needed."""
    from experiments.gpu.kernels import layer_sums

    grid, q = attn.grid, attn[0].q
    row = read_row(attn) if rollout else torch.zeros(len(q), grid.tokens, device=q.device)
    centers = torch.zeros(2, grid.tokens, device=q.device)
    centers[:, grid.prefix :] = grid.centers(device=q.device).T
    layers = []
    for index in reversed(range(len(attn))):
        layer = attn[index]
        distance, entropy, received, pulled = layer_sums(
            layer.q, layer.k, layer.scale, row, centers, grid.prefix, **options
        )
        row = (row + pulled.mean(1)) / 2
        to_patches = received[..., grid.prefix :] / grid.tokens
        layers.append((distance[..., grid.prefix :].mean(-1), entropy.mean(-1), to_patches))
    distance, entropy, received = [
        torch.stack(values, 1) for values in zip(*layers[::-1], strict=True)
    ]
    values = {"mean_distance": distance, "entropy": entropy, "received": received}
    if rollout:
        values["rollout"] = grid.image_map(row)
    return values


def has_defaults(statistic: Statistic) -> bool:
    """True for a statistic of the package with default options."""
    if type(statistic) is attention._MeanDistance:
        return not statistic.renormalize
    if type(statistic) is attention._Received:
        return not statistic.prefix
    if type(statistic) is attention._Rollout:
        with_options = statistic.query is not None or statistic.discard
        return not with_options and statistic.fuse is Tensor.mean
    return type(statistic) is attention._Entropy


def applies(attn: Attention) -> bool:
    """True if the kernels can read every layer of a capture, and its device can run them."""
    q = attn[0].q
    if q.dtype not in DTYPES or not has_kernels(q.device):
        return False
    return all(is_plain(attn[index], q) for index in range(len(attn)))


def is_plain(layer: Layer, first: Tensor) -> bool:
    """True for a layer without mask and gradients, with as many keys as queries, in the dtype of the first layer."""
    if layer.mask is not None or layer.q.requires_grad or layer.k.requires_grad:
        return False
    return kind(layer.q) == kind(layer.k) == kind(first) and layer.q.shape == layer.k.shape


def has_kernels(device: torch.device) -> bool:
    """True for NVIDIA's devices of compute capability 8 or later under Linux, with Triton installed."""
    if device.type != "cuda" or torch.version.cuda is None or sys.platform != "linux":
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def kind(q: Tensor) -> tuple[torch.device, torch.dtype, int]:
    """Device, dtype and head width, for which Triton compiles anew."""
    return q.device, q.dtype, q.shape[-1]


@functools.cache
def self_check(device: torch.device, dtype: torch.dtype = torch.float32, width: int = 64) -> bool:
    """True if the kernels compile and agree with the rows on a small input. Warns once if not."""
    attn = sample(device, dtype, width)
    try:
        values = by_kernels(attn)
    except Exception as error:  # the compiler, its tools and the driver raise errors of many kinds
        problem = f"do not run: {type(error).__name__}: {str(error)[:200]}"
    else:
        expected = rows(attn, *attention.STATISTICS.values())
        differences = {name: difference(values[name], expected[name]) for name in expected}
        wrong = [name for name, value in differences.items() if not value <= TOLERANCE]  # or NaN
        if not wrong:
            return True
        problem = f"differ from the rows in {', '.join(wrong)}"
    warnings.warn(
        f"The attention kernels {problem}. Statistics of {dtype} with head width {width} on {device} are computed by "
        "rows, which takes longer.",
        stacklevel=2,
    )
    return False


def difference(values: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected value."""
    return ((values.double() - expected.double()).abs().max() / expected.abs().max()).item()


class Sample(list[Layer]):
    """Layers without a model, with what the statistics read of a capture."""

    model_name = "a sample"

    def __init__(self, layers: list[Layer], grid: TokenGrid):
        super().__init__(layers)
        self.grid = grid


def sample(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    width: int = 64,
    prefix: int = 1,
    scale: float | None = None,
) -> Sample:
    """Two layers of random queries and keys of two images: two heads, and a grid of 5 × 8 patches."""
    random = torch.Generator().manual_seed(0)
    readout = torch.rand(prefix + 40, generator=random)
    readout /= readout.sum()
    grid = TokenGrid(rows=5, cols=8, patch=(16, 14), prefix=prefix, readout=readout)
    layers = []
    for index in range(2):
        q, k = 1.5 * torch.randn(2, 2, 2, grid.tokens, width, generator=random).to(device)
        layers.append(Layer(f"layer {index}", q.to(dtype), k.to(dtype), scale or width**-0.5))
    return Sample(layers, grid)
