"""VTAB-1k: of each task 1,000 training images, 800 to learn from and 200 to choose a setting on.

Which 1,000: drawn once and for all as a function of their number, with a seed of its own, so that a copy that lies
sorted by class gives them of all classes. VTAB's own script takes the first of its own order, which the copies do not
tell; the images are therefore others than there, of the same split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from vitlens.data.imageset import drawn
from vitlens.data.samples import Chosen, Listing
from vitlens.data.tasks import TASKS, VTAB

TRAIN, VALID = 800, 200


def thousand(source: str, split: str, listed: Callable[[str, str], Listing]) -> Listing:
    """One split of ``vtab/NAME`` (trains on all 1,000) or ``vtab800/NAME`` (trains on 800), of what ``listed`` lists.

    Raises ``ValueError`` for a name that is none of the 19, and a copy with fewer images or with other classes.
    """
    prefix, _, name = source.partition("/")
    task = TASKS.get(f"vtab/{name}")
    if task is None:
        names = ", ".join(task.name for task in VTAB)
        raise ValueError(f"{source} is no task of VTAB-1k, which are {names}.")
    whole = listed(task.source, "test" if split == "test" else "train")
    labels = torch.as_tensor(whole.labels, dtype=torch.int64)
    raw = task.raw_classes or task.classes
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < raw:
        raise ValueError(
            f"{task.name} has labels from 0 to {raw - 1}, but those of {task.source} run from {int(labels.min())} to "
            f"{int(labels.max())}. Check that the copy is the right one."
        )
    labels = labels * task.classes // raw
    same = len(whole.class_names) == task.classes
    names = whole.class_names if same else tuple(str(i) for i in range(task.classes))
    if split == "test":
        return replace(whole, labels=labels, class_names=names)
    if len(labels) < TRAIN + VALID:
        raise ValueError(
            f"{task.name} takes {TRAIN + VALID:,} training images, but {task.source} has {len(labels):,}. Fetch it "
            "again, all of it."
        )
    rows = drawn(len(labels), TRAIN + VALID, seed=0)
    rows = rows[TRAIN:] if split == "valid" else rows[:TRAIN] if prefix == "vtab800" else rows
    return Listing(Chosen(whole.samples, np.asarray(rows)), labels[rows], names, whole.note)
