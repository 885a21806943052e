"""Sinks: patches whose norms lie far above the others', and tokens that receive much attention.

Large models keep information on the whole picture in a few patches of the background, whose norms are several times as
large as the rest (Darcet et al. 2024, "Vision Transformers Need Registers"), and to which much attention goes.

Shapes: B batch, L layers, H heads, T tokens = R prefix + P patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitlens import attention
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.recording import capture
from vitlens.recorder.running import evaluating
from vitlens.recorder.supported import unwrap
from vitlens.tokens.residual import features, norms

TIMES = 3.0
"""How many times the median norm of a picture's patches makes an outlier."""


@dataclass(frozen=True)
class Sinks:
    """Norms of the tokens after every layer and the attention that they receive in it.

    norms: (B, L, T). received: (B, L, P) the share of a layer's attention that goes to each patch, the mean over heads
    and all queries. prefix: (B, L, R) the share that goes to each prefix token, the class token and registers alike;
    all shares sum to 1. grid: of the patches.
    """

    norms: Tensor
    received: Tensor
    prefix: Tensor
    grid: TokenGrid

    @property
    def ratios(self) -> Tensor:
        """(B, L, P) norm of each patch over the median of the patches of its picture and layer."""
        return ratios(self.norms[..., self.grid.prefix :])

    def outliers(self, times: float = TIMES) -> Tensor:
        """(B, L, P) bool, `vitlens.tokens.outliers` after every layer."""
        return self.ratios > times


def sinks(model: nn.Module, images: Tensor) -> Sinks:
    """The `Sinks` of images (B, C, height, width) from one forward in eval mode. Raises what `capture` raises."""
    model = unwrap(model)
    with torch.no_grad(), evaluating(model), capture(model) as attn:
        layers, _ = features(model, images)
    received = attention.received(attn, prefix=True).mean(2)
    prefix, patches = received.split([attn.grid.prefix, attn.grid.patches], -1)
    return Sinks(torch.stack([norms(layer) for layer in layers], 1), patches, prefix, attn.grid)


def ratios(lengths: Tensor) -> Tensor:
    """(…, P) norms (…, P) of patches, over the median of each picture."""
    return lengths / median(lengths)[..., None].clamp_min(torch.finfo(lengths.dtype).tiny)


def median(values: Tensor) -> Tensor:
    """(…) medians of values (…, P); for an even P the mean of the two in the middle, where PyTorch takes the lower."""
    return (values.median(-1).values - (-values).median(-1).values) / 2


def outliers(lengths: Tensor, times: float = TIMES) -> Tensor:
    """(…, P) bool: patches whose norm is more than `times` the median of the norms (…, P) of their picture.

    A rule that needs no number of the model; Darcet et al. draw the line at a norm of 150 in DINOv2-g, where the others
    lie around 50.
    """
    return ratios(lengths) > times


def roughness(maps: Tensor) -> Tensor:
    """(…) how little neighboring patches of maps (…, rows, cols) have in common: Geary's C (1954), the mean squared
    difference of patches that share a side, over that of any two patches.

    Near 0 for a smooth map, 1 on average where neighbors are as unlike as any two, almost 2 for a checkerboard;
    NaN for a constant map. Single outliers on even ground count as rough, too; by a mean *absolute* difference over the
    standard deviation they would be the smoothest of all. Raises ValueError for maps of fewer than two patches.
    """
    if maps.dim() < 2 or maps.shape[-2] * maps.shape[-1] < 2:
        raise ValueError(
            f"Expected maps (…, rows, cols) of two patches at least, got {tuple(maps.shape)}. `grid.image_map` makes "
            "maps of the patches of a sequence."
        )
    steps = torch.cat([maps.diff(dim=-1).flatten(-2), maps.diff(dim=-2).flatten(-2)], -1)
    return steps.square().mean(-1) / (2 * maps.flatten(-2).var(-1))
