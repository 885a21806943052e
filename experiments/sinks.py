"""Outliers, which are patches with large norms, and sinks, which receive much attention, by layer.

    python -m experiments.sinks --data tiny-imagenet --out data/results/sinks.csv

Large models store information on the whole image in a few patches of the background with large norms, which receive a
large share of attention (Darcet et al. 2024, "Vision Transformers Need Registers").

A row for each model and layer: means over --images validation images, each with the half width of its 95 % interval
(Student's t over images). Norm of the median patch and of the class token; the largest ratio of a patch's norm to that
median; the share of patches above twice and above three times it, in per cent; the share of those above twice that lie
at the border, beside the share of border patches of any grid. Then the share of the layer's attention that goes to the
class token, to all registers, to the patch that receives most, to the patches that were above twice the median before
the layer, and that of uniform attention for as many. Then the share of the patches that are sinks of the layer
(`vitlens.attention.sinks`), the attention that they receive, and the share of them that were above twice the median
before the layer. Controls: the model trained from scratch, and the first one with random weights, on --control images.

Shapes: B batch, L layers, H heads, T tokens = R prefix + P patches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from experiments.results import write_by_model
from vitlens import TokenGrid, attention, capture, tokens
from vitlens.scores import student

TIMES = 3.0
"""Norm of an outlier, as a multiple of the median norm of its image's patches."""


@dataclass(frozen=True)
class Sinks:
    """Norms of the tokens after every layer, the attention that they receive in it, and its sinks.

    norms: (B, L, T). received: (B, L, P) share of a layer's attention that goes to each patch, the mean over heads and
    all queries. prefix: (B, L, R) share that goes to each prefix token; all shares sum to 1. sinks: (B, L, P) bool,
    `attention.sinks`. grid: of the patches.
    """

    norms: Tensor
    received: Tensor
    prefix: Tensor
    sinks: Tensor
    grid: TokenGrid

    @property
    def ratios(self) -> Tensor:
        """(B, L, P) norm of each patch over the median of the patches of its image and layer."""
        return ratios(self.norms[..., self.grid.prefix :])

    def outliers(self, times: float = TIMES) -> Tensor:
        """(B, L, P) bool, `outliers` after every layer."""
        return self.ratios > times


@torch.no_grad()
def sinks(model: nn.Module, images: Tensor) -> Sinks:
    """The `Sinks` of images (B, C, height, width) from one forward. Raises the errors of `capture`."""
    with capture(model) as attn:
        layers, _ = tokens.features(model, images)
    prefix, patches = (
        attention.received(attn, prefix=True)
        .mean(2)
        .split([attn.grid.prefix, attn.grid.patches], -1)
    )
    norms = torch.stack([tokens.norms(layer) for layer in layers], 1)
    return Sinks(norms, patches, prefix, attention.sinks(attn), attn.grid)


def ratios(norms: Tensor) -> Tensor:
    """(…, P) norms of patches over the median of each image."""
    return norms / norms.quantile(0.5, -1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)


def outliers(norms: Tensor, times: float = TIMES) -> Tensor:
    """(…, P) bool: patches whose norm is more than `times` the median of the norms (…, P) of their image.

    Independent of the model's scale; Darcet et al. take a norm of 150 in DINOv2-g, where the others are around 50.
    """
    return ratios(norms) > times


def looked_at(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """(N, L) of each quantity."""
    parts = []
    for images, _ in tqdm(batches, unit="batch", disable=None):
        seen = sinks(model, images)
        patches, twice, border = (
            seen.norms[..., seen.grid.prefix :],
            seen.outliers(2.0),
            seen.grid.border(),
        )
        count, entering = twice.sum(-1), torch.zeros_like(twice)
        entering[:, 1:] = twice[:, :-1]
        long_sinks = (seen.sinks & entering).sum(-1)
        parts.append(
            {
                "median_norm": patches.quantile(0.5, -1),
                "class_norm": seen.norms[..., 0],
                "largest_ratio": seen.ratios.amax(-1),
                "above_twice": 100 * twice.double().mean(-1),
                "above_three_times": 100 * seen.outliers().double().mean(-1),
                "at_border": 100
                * (twice & border).sum(-1)
                / count,  # NaN for an image without an outlier
                "to_class": 100 * seen.prefix[..., 0],
                "to_registers": 100 * seen.prefix[..., 1:].sum(-1),
                "to_largest": 100 * seen.received.amax(-1),
                "to_above_twice": 100 * (seen.received * entering).sum(-1),
                "even_share": 100 * entering.sum(-1) / seen.grid.tokens,
                "sinks": 100 * seen.sinks.double().mean(-1),
                "to_sinks": 100 * (seen.received * seen.sinks).sum(-1),
                "sinks_above_twice": 100 * long_sinks / seen.sinks.sum(-1),  # NaN without a sink
            }
        )
    return {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}


def rows(title: str, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[dict]:
    """A row for each layer of a model."""
    quantities, result = looked_at(model, batches), []
    height, width = model.patch_embed.grid_size
    for layer in range(len(model.blocks)):
        row = {"model": title, "layer": layer, "images": len(quantities["median_norm"])}
        for name, values in quantities.items():
            known = values[:, layer][values[:, layer].isfinite()]
            row[name] = known.mean().item() if len(known) else ""
            row[f"{name}_95"] = student(known.numpy()) if len(known) > 1 else ""
        result.append(
            row | {"border_patches": 100 * (1 - (height - 2) * (width - 2) / (height * width))}
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    write_by_model("experiments.sinks", __doc__, rows, arguments, images=2000, control=500)


if __name__ == "__main__":
    main()
