"""Sinks: patches with norms far above the others', and where attention goes, layer by layer.

    python -m experiments.sinks --data tiny-imagenet --out data/results/sinks.csv

A row for each model and layer, means over --images validation images, each with the half width of its 95 % interval
(Student's t over images): norm of the median patch and of the class token; the largest ratio of a patch's norm to that
median; the share of patches above twice and above three times it (`vitlens.tokens.sinks`), in per cent; how many of
those above twice lie at the border, beside the share of border patches that any grid has. Then the share of the layer's
attention that goes to the class token, to all registers, to the patch that gets most, to the patches that were above
twice the median before the layer, and what an even share would be for as many of them. Controls: the model from
scratch, and the first one with random weights, which sees fewer images.
"""

import torch
from tqdm import tqdm

from experiments.results import rounded, write
from experiments.specimens import arguments, note, specimens
from vitlens import tokens
from vitlens.evaluate import student
from vitlens.tokens.sinks import median

LOW = 2.0


def looked_at(model, batches) -> dict[str, torch.Tensor]:
    """(N, L) of each quantity."""
    found = []
    for images, _ in tqdm(batches, unit="batch", disable=None):
        seen = tokens.sinks(model, images)
        patches, twice, border = seen.norms[..., seen.grid.prefix :], seen.outliers(LOW), seen.grid.border()
        count, entering = twice.sum(-1), torch.zeros_like(twice)
        entering[:, 1:] = twice[:, :-1]
        found.append({
            "median_norm": median(patches),
            "class_norm": seen.norms[..., 0],
            "largest_ratio": seen.ratios.amax(-1),
            "above_twice": 100 * twice.double().mean(-1),
            "above_three_times": 100 * seen.outliers().double().mean(-1),
            "at_border": 100 * (twice & border).sum(-1) / count,
            "to_class": 100 * seen.prefix[..., 0],
            "to_registers": 100 * seen.prefix[..., 1:].sum(-1),
            "to_largest": 100 * seen.received.amax(-1),
            "to_above_twice": 100 * (seen.received * entering).sum(-1),
            "even_share": 100 * entering.sum(-1) / seen.grid.tokens,
        })  # fmt: skip
    return {name: torch.cat([each[name] for each in found]).double() for name in found[0]}


def rows(title: str, model, batches) -> list[dict]:
    found, result = looked_at(model, batches), []
    border = 100 * model_border(model)
    for layer in range(len(model.blocks)):
        row = {"model": title, "layer": layer, "images": len(found["median_norm"])}
        for name, values in found.items():
            known = values[:, layer][values[:, layer].isfinite()]  # an image without an outlier has none at the border
            row |= {
                name: known.mean().item() if len(known) else "",
                f"{name}_95": student(known.numpy()) if len(known) > 1 else "",
            }
        result.append(row | {"border_patches": border})
    return result


def model_border(model) -> float:
    """The share of patches that lie at the border."""
    rows, cols = model.patch_embed.grid_size
    return 1 - (rows - 2) * (cols - 2) / (rows * cols)


def main() -> None:
    options, table = arguments(__doc__).parse_args(), []
    for title, model, batches, _ in specimens(options):
        table += rows(title, model, batches)
    write(options.out, [rounded(row, lambda value: f"{value:.4g}") for row in table], note("sinks.py", options))
    for row in table:
        print(*row.values())


if __name__ == "__main__":
    main()
