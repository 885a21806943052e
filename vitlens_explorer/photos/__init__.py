"""Sample photographs of live pages, chosen so that a model of ImageNet's classes names them right.

`photos.csv` has the classes that are right for each, its author and its license. `experiments/photographs.py` made the
files. Two photographs come from scikit-image.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from vitlens.images import samples
from vitlens.models import built_size, preprocess, top_classes
from vitlens.recorder.forward import eval_mode, run

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Sample:
    """A photograph. classes: the names that are right. listed: its name in data/photographs.csv, or ""."""

    name: str
    classes: tuple[str, ...]
    listed: str
    author: str
    license: str
    source: str

    @property
    def image(self) -> Image.Image | None:
        """The photograph as RGB, or None if its package does not have it."""
        if not self.listed:
            return samples().get(self.name)
        return Image.open(FOLDER / f"{self.name}.jpg").convert("RGB")


def _read_table() -> tuple[Sample, ...]:
    with (FOLDER / "photos.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(Sample(**row | {"classes": tuple(row["classes"].split("|"))}) for row in rows)


SAMPLES = _read_table()
"""The photographs in the order of the menu."""


@functools.cache
def images_by_name() -> dict[str, Image.Image]:
    """The photographs that can be read, by name, opened once."""
    found = {sample.name: sample.image for sample in SAMPLES}
    return {name: image for name, image in found.items() if image is not None}


def named_right(model: nn.Module) -> dict[str, Image.Image]:
    """The photographs by name of which a model's likeliest class is right, or the first three if those are fewer."""
    images = images_by_name()
    size = built_size(model)
    batch = preprocess(model, list(images.values()), size=size, on_note=lambda note: None)
    with eval_mode(model), torch.inference_mode():
        logits = run(model, batch.to(next(model.parameters())))
    likeliest = [top[0][0] for top in top_classes(model, logits, 1)]
    right = {
        sample.name: images[sample.name]
        for sample, words in zip(_present(images), likeliest, strict=True)
        if _first_name(words) in sample.classes
    }
    return right if len(right) >= 3 else dict(list(images.items())[:3])


def _present(images: dict[str, Image.Image]) -> list[Sample]:
    return [sample for sample in SAMPLES if sample.name in images]


def _first_name(words: object) -> str:
    """The first of the names of a class, such as "tabby" of "tabby, tabby cat"."""
    return str(words).split(",")[0]
