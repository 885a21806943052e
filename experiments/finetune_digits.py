"""Fine-tuning on 200 digits, plain and with layer decay, stopped after 10 and after 20 epochs.

    python -m experiments.finetune_digits --out data/results/finetune-digits.csv

The model was trained on photographs, and the test images are 500 other digits. Each row is one run, and is written when
the run ends. The same command after a stop keeps the rows that --out has, and trains the others. A linear probe on the
features of the model before fine-tuning is the first row.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.datasets import load_digits

from experiments.results import about, command, parser, write
from vitlens import data as datasets
from vitlens import load_model
from vitlens.data import ImageSet
from vitlens.data.augment import Augment
from vitlens.train import accuracy, fit, recipe, starting_from
from vitlens.train.recipes import Recipe
from vitlens_paper.evaluate import features, linear_probe

MODEL = "data/checkpoints/vit_tiny_patch8_64"
SIZE = 64
LEARNED, TESTED = 20, 50
"""Digits of each class to learn from, and to test on."""
EPOCHS = 20, 10
KEYS = ["method", "epochs", "lr", "seed"]


class Way(NamedTuple):
    """A way to fine-tune: its learning rate, and the factor of layer decay (1 for none)."""

    method: str
    lr: float
    layer_decay: float


WAYS = (
    Way("plain", 0.03, 1.0),
    Way("layer decay 0.75", 0.03, 0.75),
    Way("layer decay 0.75", 0.06, 0.75),
)


def write_digits(folder: Path, learned: int, tested: int) -> None:
    """Write handwritten digits as images in `folder`/train/CLASS and `folder`/test/CLASS, black on white."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    for label in range(10):
        rows = order[digits.target[order] == label][: learned + tested]
        for place, row in enumerate(rows):
            split = "train" if place < learned else "test"
            file = folder / split / str(label) / f"{row}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = (255 - digits.images[row] * 255 / 16).astype(np.uint8)
            image = Image.fromarray(pixels)
            image.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(file)


def load_splits(options: Namespace) -> tuple[ImageSet, ImageSet]:
    """Digits to learn from, and to test on."""
    counts = (2, 2) if options.tiny else (LEARNED, TESTED)
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder), *counts)
        return tuple(datasets.load(folder, split, size=SIZE) for split in ("train", "valid"))


def plan_of(way: Way, epochs: int, seed: int) -> Recipe:
    """The recipe of one run: the paper's fine-tuning for few images, with crops and without flips."""
    plan = replace(
        recipe("finetune-small"),
        image_size=SIZE,
        resize=0,
        num_classes=10,
        augment=Augment(scale=(0.7, 1)),
        batch_size=8,
        evaluate_every=epochs,
        epochs=epochs,
        lr=way.lr,
        layer_decay=way.layer_decay,
        seed=seed,
    )
    return starting_from(plan, MODEL)


def tuned(way: Way, epochs: int, seed: int, splits: tuple[ImageSet, ImageSet]) -> dict:
    """One run: its accuracy (%) on the test images and on those that it has learned from, and its seconds."""
    plan = plan_of(way, epochs, seed)
    model = plan.build()
    start = time.perf_counter()
    for _ in fit(model, splits, plan, device="cpu"):
        pass
    seconds = time.perf_counter() - start
    learned, test = splits
    return {
        "method": way.method,
        "epochs": epochs,
        "lr": way.lr,
        "seed": seed,
        "top1": round(accuracy(model, test, plan), 2),
        "train_top1": round(accuracy(model, learned, plan), 2),
        "seconds": round(seconds, 1),
    }


def probed(splits: tuple[ImageSet, ImageSet]) -> dict:
    """The row of the linear probe."""
    start = time.perf_counter()
    model = load_model(MODEL)
    learned, test = (features(model, split) for split in splits)
    score = linear_probe(learned, test)
    seconds = time.perf_counter() - start
    return {
        "method": "linear probe",
        "epochs": "",
        "lr": "",
        "seed": "",
        "top1": round(score, 2),
        "train_top1": "",
        "seconds": round(seconds, 1),
    }


def finished_rows(path: Path) -> list[dict]:
    """Rows of an earlier call, as text."""
    if not path.exists():
        return []
    return pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=1)
    options = options.parse_args(arguments)
    lengths = (1,) if options.tiny else EPOCHS
    splits = load_splits(options)
    how = {
        "images": len(splits[0]),
        "valid_images": len(splits[1]),
        **about(command("experiments.finetune_digits", arguments)),
    }
    rows = finished_rows(options.out)
    there = {tuple(row[key] for key in KEYS) for row in rows}
    if not rows:
        rows.append(probed(splits) | how)
    for seed, epochs, way in product(range(options.seeds), lengths, WAYS):
        if (way.method, str(epochs), str(way.lr), str(seed)) in there:
            continue
        rows.append(tuned(way, epochs, seed, splits) | how)
        write(options.out, rows)


if __name__ == "__main__":
    main()
