"""Sinks: patches with norms far above the others', and where attention goes, layer by layer.

    python benchmarks/sinks.py --data tiny-imagenet --out data/results/sinks.csv

A row for each model and layer, means over --images validation images, each with the half width of its 95 % interval
(Student's t over images): norm of the median patch and of the class token; the largest ratio of a patch's norm to that
median; the share of patches above twice and above three times it (`vitlens.tokens.sinks`), in per cent; how many of
those above twice lie at the border, beside the share of border patches that any grid has. Then the share of the layer's
attention that goes to the class token, to the patch that gets most, to the patches that were above twice the median
before the layer, and what an even share would be for as many of them. Controls: the model from scratch, and the first
one with random weights, which sees fewer images.
"""

import argparse
from pathlib import Path

import torch
from results import rounded, sentence, write
from tqdm import tqdm

from vitlens import load_model, tokens
from vitlens.evaluate import student
from vitlens.evaluate.passage import Pictures

MODELS = "data/checkpoints/vit_tiny_patch16_224", "data/checkpoints/vit_tiny_patch8_64"
BATCH = 10
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
            "median_norm": patches.median(-1).values,
            "class_norm": seen.norms[..., 0],
            "largest_ratio": seen.ratios.amax(-1),
            "above_twice": 100 * twice.double().mean(-1),
            "above_three_times": 100 * seen.outliers().double().mean(-1),
            "at_border": 100 * (twice & border).sum(-1) / count,
            "to_class": 100 * seen.prefix,
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="a data set with validation images")
    parser.add_argument("--models", nargs="+", default=MODELS, help="folders in timm's hub layout")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--control", type=int, default=500, help="images for the untrained model")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    options = parser.parse_args()
    table = []
    for name in options.models:
        model, title = load_model(name), Path(name).name
        pictures = Pictures(model, options.data, options.images, 0, BATCH, False, {"workers": 1})
        batches = [batch for _, batch in pictures.read(range(len(pictures.batches)))]
        table += rows(title, model, batches)
        if name == options.models[0]:
            torch.manual_seed(0)
            untrained = load_model(name, pretrained=False)
            table += rows(f"{title}, untrained", untrained, batches[: options.control // BATCH])
    table = [rounded(row, lambda value: f"{value:.4g}") for row in table]
    models = f" --models {' '.join(options.models)}" if tuple(options.models) != MODELS else ""
    command = f"python benchmarks/sinks.py --data tiny-imagenet --images {options.images}{models} --out {options.out}"
    write(options.out, table, sentence(command))
    for row in table:
        print(*row.values())


if __name__ == "__main__":
    main()
