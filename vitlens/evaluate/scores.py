"""Accuracies with their 95 % confidence intervals: by labels, and by the labels that people gave anew (ReaL)."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LEVEL = 0.95
NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


class Score(NamedTuple):
    """A number and its 95 % confidence interval, all in per cent."""

    value: float
    low: float
    high: float


def around(mean: float, below: float, above: float) -> Score:
    """A score from the half widths of its interval, cut off at 0 and 100."""
    return Score(float(mean), max(0.0, float(mean - below)), min(100.0, float(mean + above)))


def proportion(right: int, images: int) -> Score:
    """The share of `images` that are `right`, with Wilson's interval (1927), which is about other images."""
    from scipy.stats import binomtest

    interval = binomtest(int(right), int(images)).proportion_ci(LEVEL, method="wilson")
    return Score(*(100 * float(x) for x in (right / images, *interval)))


def student(values: Sequence[float]) -> float:
    """Half the width of Student's 95 % interval of a mean, in the unit of the values; infinite for a single value."""
    from scipy.stats import sem, t

    return float(sem(values) * t.ppf((1 + LEVEL) / 2, len(values) - 1)) if len(values) > 1 else float("inf")


def paired(lost: int, gained: int, images: int) -> Score:
    """The change of an accuracy, in points, if of the same `images` so many are lost and gained.

    The interval is Agresti and Min's (2005): Wald's, with half an image added to each of the four counts."""
    from scipy.stats import norm

    n = images + 2
    middle = (gained - lost) / n
    half = norm.ppf((1 + LEVEL) / 2) * np.sqrt(((gained + lost + 1) / n - middle**2) / n)
    found = ((gained - lost) / images, max(-1.0, middle - half), min(1.0, middle + half))
    return Score(*(100 * float(x) for x in found))


def of_seeds(values: Sequence[float]) -> Score:
    """The mean of accuracies with Student's interval, for other seeds on the same images; 0 to 100 for one seed."""
    half = student(values)
    return around(np.mean(values), half, half)


def over_seeds(values: Sequence[float], images: int) -> Score:
    """The mean of accuracies of several seeds on the same `images`, with an interval for other seeds and other images.

    The two are independent, so the half widths of `of_seeds` and `proportion` add up as squares. With one seed the
    interval is that of the images alone.
    """
    mean = np.mean(values)
    half = student(values) if len(values) > 1 else 0.0
    _, low, high = proportion(round(mean / 100 * images), images)
    return around(mean, *(np.hypot(half, max(side, 0.0)) for side in (mean - low, high - mean)))


def mean_of(scores: Sequence[Score]) -> Score:
    """The mean of scores on different images: the squares of their half widths add up."""
    value, low, high = np.array(scores).T
    return around(value.mean(), *(np.linalg.norm(side) / len(value) for side in (value - low, high - value)))


def top_k(classes: Tensor, labels: Tensor, k: int) -> Score:
    """The share of images whose label, (N,), is among the first `k` of their `classes`, (N, 5), likeliest first."""
    return proportion(int((classes[:, :k] == labels[:, None]).any(1).sum()), len(labels))


def rematched(named: Tensor, labels: Tensor, count: int) -> Score:
    """Top-1 under the best one-to-one matching of the data's classes with the model's `count` classes.

    named, labels: (N,) predicted and true classes. The matching (`scipy.optimize.linear_sum_assignment` on the
    confusion matrix) is found on half of each class and measured on the other half, and vice versa, so that random
    predictions gain nothing.
    """
    from scipy.optimize import linear_sum_assignment

    present, rows = labels.unique(return_inverse=True)
    odd = torch.empty_like(rows)
    odd[rows.argsort(stable=True)] = torch.arange(len(rows)) % 2  # in turn within each class, in whatever order
    right = 0
    for part in (0, 1):
        learn, measure = odd != part, odd == part
        confusion = torch.bincount(rows[learn] * count + named[learn], minlength=len(present) * count)
        _, taken = linear_sum_assignment(confusion.view(len(present), count).numpy(), maximize=True)
        right += int((named[measure] == torch.from_numpy(taken)[rows[measure]]).sum())
    return proportion(right, len(labels))


def another_order(named: Tensor, labels: Tensor, count: int) -> str:
    """A warning if the data's classes seem to be in another order than the model's, or "".

    They do if more than twice as many images are right once the classes are `rematched`, intervals apart. The search
    takes time with the cube of the classes: it is not tried for more than 4,096.
    """
    right = proportion(int((named == labels).sum()), len(labels))
    other = rematched(named, labels, count) if count <= 4096 else right
    if other.low <= 2 * right.high:
        return ""
    return (
        f"The data's classes are likely in another order than the model's: matched as fits best, {other.value:.2f} % "
        f"[{other.low:.2f}, {other.high:.2f}] are right rather than {right.value:.2f} %. "
        "Give the model the names of its classes (label_names in config.json)."
    )


@functools.cache
def real_labels() -> list[list[int]]:
    """The labels of *Are we done with ImageNet?* (Beyer et al. 2020) of the 50,000 validation images, from timm.

    Number i belongs to the file ILSVRC2012_val_(i + 1). 3,163 lists are empty: people saw none of the 1,000 classes.
    """
    from timm.data import RealLabelsImagenet

    return list(RealLabelsImagenet(range(50_000)).real_labels.values())


def validation_numbers(names: Sequence[str]) -> Tensor:
    """(N,) int64: the number from 0 of the ImageNet validation file that each name contains, or −1."""
    found = [NUMBER.search(name) for name in names]
    return torch.tensor([int(match[1]) - 1 if match else -1 for match in found], dtype=torch.int64)


def real(classes: Tensor, numbers: Tensor) -> tuple[Score, int]:
    """ReaL accuracy, and the number of images it is of: those that have a label.

    classes: (N, k) of ImageNet's 1,000, the likeliest first, which is right if it is among the labels. numbers: (N,),
    as `validation_numbers` returns them. Raises ValueError for a number outside of the 50,000, or without any label.
    """
    labels = real_labels()
    if int(numbers.min()) < 0 or int(numbers.max()) >= len(labels):
        raise ValueError(
            "ReaL labels need ImageNet's validation files with their own names, ILSVRC2012_val_00000001 to "
            f"ILSVRC2012_val_{len(labels):08d}, but some of these images are named otherwise. Keep the original names."
        )
    right = [int(c) in labels[n] for c, n in zip(classes[:, 0].tolist(), numbers.tolist(), strict=True) if labels[n]]
    if not right:
        raise ValueError("None of these images has a ReaL label. Use more of ImageNet's validation images.")
    return proportion(sum(right), len(right)), len(right)
