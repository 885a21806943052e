"""VTAB-1k: 19 tasks with 1,000 training images each, opened by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from vitlens.data.imageset import Samples, draw_rows
from vitlens.data.sources import open_samples
from vitlens.names import require_known
from vitlens_paper.tasks import TASKS, VTAB


def vtab(name: str, split: str, root: Path | None, _=0, train: int = 1000) -> Samples:
    """`vtab/NAME`: a task of VTAB-1k with all 1,000 training images, the last 200 of which are for validation.

    The 1,000 images are a fixed random draw, so a copy sorted by class gives all classes. VTAB's own script takes the
    first images in an order that the copies lack, so its images are others of the same split.
    """
    known = [task.name for task in VTAB]
    require_known(f"vtab/{name}", known, "A task of VTAB-1k")
    task = TASKS[f"vtab/{name}"]
    testing = split in ("test", "whole")
    stored_split = "test" if testing else "train"
    whole = open_samples(task.source, stored_split, root)
    raw_labels = torch.as_tensor(whole.labels, dtype=torch.int64)
    raw_classes = task.raw_classes or task.classes
    labels = raw_labels * task.classes // raw_classes
    names = whole.class_names
    if len(names) != task.classes:
        numbers = range(task.classes)
        names = tuple(map(str, numbers))
    whole = replace(whole, labels=labels, class_names=names)
    if testing:
        return whole
    count = len(labels)
    if count < 1000:
        raise ValueError(
            f"{task.name} needs 1,000 training images, but {task.source} has {count:,}. Download it again."
        )
    rows = draw_rows(count, 1000, seed=0)
    if split == "valid":
        return whole.select_rows(rows[800:])
    return whole.select_rows(rows[:train])


def vtab800(name: str, split: str, root: Path | None, _=0) -> Samples:
    """`vtab800/NAME`: a task of VTAB-1k with 800 training images, for choosing settings."""
    return vtab(name, split, root, train=800)
