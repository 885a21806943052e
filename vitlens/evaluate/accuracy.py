"""How many images a model names right: by their label, or by the labels that people gave anew (ReaL)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from vitlens.evaluate.intervals import Score, proportion

NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
FILES = 50_000
REMATCHED = 4096
"""Most classes for which another order is searched; the cost grows with their cube."""


def top_k(classes: Tensor, labels: Tensor, k: int) -> Score:
    """Share of the images whose label, (N,), is among the first `k` of their `classes`, (N, 5) the likeliest first."""
    return proportion(int((classes[:, :k] == labels[:, None]).any(1).sum()), len(labels))


def rematched(named: Tensor, labels: Tensor, count: int) -> Score:
    """Top-1 under the best one-to-one matching of the data's classes with the model's `count` classes.

    named, labels: (N,) predicted and true classes. The matching (`scipy.optimize.linear_sum_assignment` on the
    confusion matrix) is found on half of each class and measured on the other half, and vice versa, so that random
    predictions gain nothing.
    """
    from scipy.optimize import linear_sum_assignment

    present, rows = labels.unique(return_inverse=True)
    order = rows.argsort(stable=True)
    odd = torch.empty_like(rows)
    odd[order] = torch.arange(len(rows)) % 2  # within each class in turn, however the images are sorted
    right = 0
    for part in (0, 1):
        learn, measure = odd != part, odd == part
        confusion = torch.bincount(rows[learn] * count + named[learn], minlength=len(present) * count)
        _, taken = linear_sum_assignment(confusion.view(len(present), count).numpy(), maximize=True)
        right += int((named[measure] == torch.from_numpy(taken)[rows[measure]]).sum())
    return proportion(right, len(labels))


def another_order(named: Tensor, labels: Tensor, count: int) -> str:
    """A warning if the data's classes seem to be in another order than the model's, or "".

    They do if far more images are right once the classes are `rematched`. Not tried for more than `REMATCHED` classes.
    """
    right = proportion(int((named == labels).sum()), len(labels))
    other = rematched(named, labels, count) if count <= REMATCHED else right
    if other.low <= 2 * right.high:
        return ""
    return (
        f"With the classes matched as fits best, {other.value:.2f} % [{other.low:.2f}, {other.high:.2f}] are right "
        f"rather than {right.value:.2f} %: those of the data are likely in another order than the model's, so this is "
        "not its accuracy. Give the model the names of its classes (label_names in config.json)."
    )


def real_labels() -> list[list[int]]:
    """The labels of *Are we done with ImageNet?* (Beyer et al. 2020) of the 50,000 validation images, from timm.

    Number i belongs to the file ILSVRC2012_val_(i + 1). 3,163 lists are empty: people saw none of the 1,000 classes.
    """
    from timm.data import RealLabelsImagenet

    return list(RealLabelsImagenet(range(FILES)).real_labels.values())


def validation_numbers(names: Sequence[str]) -> Tensor:
    """(N,) int64: which of ImageNet's validation files each name names, from 0; −1 where it names none."""
    found = [NUMBER.search(name) for name in names]
    return torch.tensor([int(match[1]) - 1 if match else -1 for match in found], dtype=torch.int64)


def real(classes: Tensor, numbers: Tensor) -> tuple[Score, int]:
    """ReaL accuracy, and how many images it is of: those for which there is a label.

    classes: (N, k) of ImageNet's 1,000, the likeliest first, which alone counts: it is right if it is among the labels.
    numbers: (N,), as `validation_numbers` returns them. Raises ValueError if one is none of the 50,000, or if no image
    has a label.
    """
    if int(numbers.min()) < 0 or int(numbers.max()) >= FILES:
        raise ValueError(
            "ReaL labels belong to ImageNet's validation images by the names of their files, ILSVRC2012_val_00000001 "
            f"to ILSVRC2012_val_{FILES:08d}, and some of these images are named otherwise; keep the files' own names."
        )
    labels = real_labels()
    right = [int(c) in labels[n] for c, n in zip(classes[:, 0].tolist(), numbers.tolist(), strict=True) if labels[n]]
    if not right:
        raise ValueError("None of these images has a ReaL label; take more of ImageNet's validation images.")
    return proportion(sum(right), len(right)), len(right)
