"""What lens.py and sinks.py have in common: the models that they look at, on which images, and a control."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.results import labeled, sentence
from vitlens import load_model

MODELS = "data/checkpoints/vit_tiny_patch16_224", "data/checkpoints/vit_tiny_patch8_64"
BATCH, CONTROL = 10, 500


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser of the options that both have."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--data", required=True, help="a data set with validation images")
    parser.add_argument("--models", nargs="+", default=MODELS, help="folders in timm's hub layout")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--control", type=int, default=CONTROL, help="images for the untrained model")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    return parser


def specimens(
    options: argparse.Namespace, others: int = 0
) -> Iterator[tuple[str, nn.Module, list[tuple[Tensor, Tensor]], list[Tensor]]]:
    """Each model's title, the model, (images, labels) batches of --images, and image batches of `others` other ones.

    After the first model the same one with random weights, which sees --control images and no others.
    """
    for name in options.models:
        model, path = load_model(name), Path(name)
        title = path.parent.name if path.name == "model" else path.name  # `vitlens train --out NAME` writes NAME/model
        batches = list(labeled(model, options.data, others, others + options.images))
        yield title, model, batches, [images for images, _ in labeled(model, options.data, 0, others)]
        if name == options.models[0]:
            torch.manual_seed(0)
            yield f"{title}, untrained", load_model(name, pretrained=False), batches[: options.control // BATCH], []


def note(script: str, options: argparse.Namespace, more: str = "") -> str:
    """The sentence above a table: the command, when, on what and with what."""
    models = f" --models {' '.join(options.models)}" if tuple(options.models) != MODELS else ""
    control = f" --control {options.control}" if options.control != CONTROL else ""
    data = Path(options.data).name
    command = f"python experiments/{script} --data {data} --images {options.images}{control}{models}"
    return sentence(f"{command} --out {options.out}{more}")
