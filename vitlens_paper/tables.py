"""The paper's tables, read from `table_1.csv` to `table_9.csv` in this folder."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

IMAGENET = "ImageNet"
REAL = "ImageNet ReaL"
CIFAR10 = "CIFAR-10"
CIFAR100 = "CIFAR-100"
PETS = "Oxford-IIIT Pets"
FLOWERS = "Oxford Flowers-102"
FIVE = (IMAGENET, CIFAR10, CIFAR100, PETS, FLOWERS)
"""Data sets of "Average-5" in Fig. 5 and of the averages in Table 7."""

IMAGES = {"JFT-300M": 303_000_000, "ImageNet-21k": 14_000_000, "ImageNet": 1_300_000}
"""Number of images of the data sets for pre-training, rounded as in the paper."""
CLASSES = {"JFT-300M": 18_291, "ImageNet-21k": 21_843, "ImageNet": 1_000}
"""Number of classes of these data sets, JFT's from BiT's paper and ImageNet-21k's from the official code."""


@dataclass(frozen=True)
class Variant:
    """One row of Table 1, and its timm model for images of 224 pixels.

    mlp: width of the hidden layer. parameters: in millions, as printed.
    """

    name: str
    layers: int
    width: int
    mlp: int
    heads: int
    parameters: int
    timm: str

    def tokens(self, patch: int, image: int = 224) -> int:
        """Number of tokens of a square image, class token included. Pixels beyond whole patches are cut off."""
        patches_a_side = image // patch
        return patches_a_side**2 + 1


@dataclass(frozen=True)
class Pretraining:
    """One row of Table 3. All rows: batch 4,096, Adam with β = (0.9, 0.999), 10,000 steps of warm-up, 224 pixels.

    epochs: one number, or two as in the row. lr: peak learning rate. schedule: decay after warm-up.

    >>> vitlens_paper.TABLE_3[0].models
    ('ViT-B/16', 'ViT-B/32')
    """

    models: tuple[str, ...]
    data: str
    epochs: tuple[int, ...]
    lr: float
    schedule: str
    weight_decay: float
    dropout: float


@dataclass(frozen=True)
class FineTuning:
    """One row of Table 4. All rows: SGD with momentum 0.9, batch 512, cosine decay, no weight decay, 384 pixels.

    lr: grid of peak learning rates. held_out: share or number of the training images that select the best.

    >>> vitlens_paper.TABLE_4[0].steps
    20000
    """

    data: tuple[str, ...]
    steps: int
    lr: tuple[float, ...]
    held_out: float


@dataclass(frozen=True)
class Published:
    """Published results of a model of `MODELS`.

    accuracy: top-1 in percent, by data set. spread: standard deviation over three runs of fine-tuning. data, epochs,
    exaflops, core_days (of TPUv3) and optimizer: of pre-training, if printed.
    """

    model: str
    data: str
    accuracy: Mapping[str, float]
    spread: Mapping[str, float] = field(default_factory=dict)
    epochs: int | None = None
    exaflops: int | None = None
    core_days: int | None = None
    optimizer: str | None = None

    @property
    def average(self) -> float:
        """Mean over the five data sets of `FIVE`. Raises KeyError if one of them was not printed."""
        total = sum(self.accuracy[name] for name in FIVE)
        return total / len(FIVE)


def cells(table: str) -> list[dict[str, str]]:
    """Rows of a table as texts by column, without comment lines that begin with #."""
    file = Path(__file__).parent / f"{table}.csv"
    lines = file.read_text(encoding="utf-8").splitlines()
    of_table = [line for line in lines if not line.startswith("#")]
    return list(csv.DictReader(of_table))


CONVERSIONS = {"str": str, "int": int, "float": float}
"""Types of the values in cells, by their names in annotations."""


def _values(kind: type, row: Mapping[str, str]) -> dict[str, object]:
    """Fields of a dataclass from the cells of a row, converted to their annotated types. Tuples are split at "; "."""
    values = {}
    for column in fields(kind):
        match = re.search("str|int|float", column.type)
        text = row.get(column.name)
        if not match or not text:
            continue
        convert = CONVERSIONS[match[0]]
        parts = [convert(part) for part in text.split("; ")]
        is_tuple = column.type.startswith("tuple")
        values[column.name] = tuple(parts) if is_tuple else parts[0]
    return values


def _rows(kind: type, table: str) -> tuple:
    """Rows of a table as instances of a dataclass."""
    rows = []
    for row in cells(table):
        values = _values(kind, row)
        rows.append(kind(**values))
    return tuple(rows)


def _results(table: str) -> tuple[Published, ...]:
    """Rows of results. Columns other than fields of `Published` are data sets: "accuracy" or "accuracy ± spread"."""
    about = {column.name for column in fields(Published)}
    published = []
    for row in cells(table):
        accuracy = {}
        spread = {}
        for data, text in row.items():
            if data in about or not text:
                continue
            value, _, deviation = text.partition(" ± ")
            accuracy[data] = float(value)
            if deviation:
                spread[data] = float(deviation)
        values = _values(Published, row)
        published.append(Published(**values, accuracy=accuracy, spread=spread))
    return tuple(published)


TABLE_1: tuple[Variant, ...] = _rows(Variant, "table_1")
"""Sizes of the models (Table 1)."""
TABLE_3: tuple[Pretraining, ...] = _rows(Pretraining, "table_3")
"""Settings of pre-training (Table 3)."""
TABLE_4: tuple[FineTuning, ...] = _rows(FineTuning, "table_4")
"""Settings of fine-tuning (Table 4)."""
TABLE_2 = _results("table_2")
"""Accuracy of the largest models against BiT-L and Noisy Student (Table 2)."""
TABLE_5 = _results("table_5")
"""Accuracy of each model by its data of pre-training (Table 5, the values of Fig. 3)."""
TABLE_6 = _results("table_6")
"""Accuracy and cost of models pre-trained on JFT-300M (Table 6, the values of Fig. 5)."""
TABLE_7 = _results("table_7")
"""Accuracy of ResNets pre-trained with Adam and with SGD (Table 7)."""
TABLE_9 = _results("table_9")
"""Accuracy of each task of VTAB-1k (Table 9)."""

TABLE_8: dict[str, dict[str, float]] = {}
"""5-shot accuracy in percent, by the recipe's `positions` and `positions_at`."""
for _row in cells("table_8"):
    _positions = _row.pop("positions")
    TABLE_8[_positions] = {place: float(value) for place, value in _row.items() if value}
FIRST_SUBMISSION = _results("table_2_first")
"""Rows of Table 2 in the first submission (October 2020) that differ from the final `TABLE_2`."""
BIT = _results("bit")
"""BiT-S and BiT-M, siblings of Table 2's BiT-L, in their own paper (Kolesnikov et al. 2020), by its fine-tuning."""
BIT_M_VTAB = {"VTAB": 73.51, "Natural": 80.77, "Specialized": 85.67, "Structured": 61.08}
"""Accuracy of the public BiT-M R152x4 by group of VTAB, from its authors' code."""

VTAB: dict[str, tuple[str, ...]] = {}
"""The 19 tasks of VTAB-1k by group, in the order of Table 9."""
VTAB_NAMES: dict[str, str] = {}
"""Names in `VTAB` of the tasks and groups of VTAB-1k, by their names in `vitlens evaluate`."""
for _row in cells("vtab"):
    _group = _row["group"]
    _task = _row["task"]
    _before = VTAB.get(_group, ())
    VTAB[_group] = (*_before, _task)
    VTAB_NAMES[f"vtab {_group.lower()}"] = _group
    VTAB_NAMES[f"vtab/{_row['vitlens']}"] = _task


def groups(accuracy: Mapping[str, float]) -> dict[str, float]:
    """Means over the tasks of VTAB's three groups and, as "VTAB", over all 19.

    accuracy: by task, named as in `VTAB`. Raises KeyError if one of the 19 is missing.

    >>> round(vitlens_paper.groups(vitlens_paper.TABLE_9[0].accuracy)["Natural"], 1)
    86.7
    """
    every_task = sum(VTAB.values(), ())
    members = {"VTAB": every_task, **VTAB}
    means = {}
    for name, tasks in members.items():
        total = sum(accuracy[task] for task in tasks)
        means[name] = total / len(tasks)
    return means
