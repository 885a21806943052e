"""Data sets of the paper's transfer experiments, by name, from `tasks.csv` in this folder.

CIFAR, Pets, Flowers and DTD are torchvision's. Fifteen tasks of VTAB-1k are read from the copies that CLIP benchmark
keeps on the Hugging Face hub, `clip-benchmark/wds_vtab-…`, made with VTAB's own code, so their splits have its sizes.
These copies keep the 32 positions and 40 orientations of dSprites, which VTAB puts into 16 bins each. They have only
the test images of Sun397, so Sun397 is `dpdl-benchmark/sun397`, with the splits of TensorFlow Datasets, as in VTAB.
ImageNet cannot be downloaded by a program. Its two archives and the archive of its development kit must be present, or
folders `train/` and `val/` of its classes.

ObjectNet is left out, because only its authors' archive maps its classes to ImageNet's, and labels are not guessed.
With that archive, folders renamed to WordNet ids are scored like any others, one class of ImageNet each.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """A data set of the evaluation, with the augmentation of its training images (for VTAB, as in BiT's paper)."""

    name: str
    group: str
    """"", or of VTAB-1k: "natural", "specialized" or "structured"."""
    classes: int
    source: str
    """The source for `load`."""
    recipe: str
    """The recipe of its fine-tuning, a row of the paper's Table 4."""
    flip: bool = True
    """True if a mirrored image keeps its label."""
    crop: bool = True
    """True if a random crop keeps the label of the image."""
    raw_classes: int = 0
    """Number of classes of the source, put into `classes` bins of equal width, or 0 if both are the same."""


def _task(row: dict[str, str]) -> Task:
    return Task(
        name=row["name"],
        group=row["group"],
        classes=int(row["classes"]),
        source=row["source"],
        recipe=row["recipe"],
        flip=row["flip"] != "no",
        crop=row["crop"] != "no",
        raw_classes=int(row["raw_classes"] or 0),
    )


_LINES = Path(__file__).with_suffix(".csv").read_text(encoding="utf-8").splitlines()
TASKS = {row["name"]: _task(row) for row in csv.DictReader(_LINES)}
VTAB = tuple(task for task in TASKS.values() if task.group)
