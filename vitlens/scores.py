"""Accuracies with their 95 % confidence intervals, for the original labels and for ReaL labels."""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlens.names import unknown_name

__all__ = [
    "Score",
    "mean_of",
    "of_seeds",
    "over_seeds",
    "paired",
    "proportion",
    "real",
    "real_labels",
    "student",
    "top_k",
    "validation_numbers",
]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

LEVEL = 0.95
NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


class Score(NamedTuple):
    """A value and its 95 % confidence interval, in percent.

    >>> vitlens.scores.proportion(90, images=100).value
    90.0
    """

    value: float
    low: float
    high: float


def in_percent(value: float, low: float, high: float) -> Score:
    """Score from shares in 0…1."""
    return Score(
        value=100 * float(value),
        low=100 * float(low),
        high=100 * float(high),
    )


def around(mean: float, below: float, above: float) -> Score:
    """Score from the half widths of its interval, clipped to 0…100."""
    low = max(0.0, float(mean - below))
    high = min(100.0, float(mean + above))
    return Score(float(mean), low, high)


def proportion(right: int, images: int) -> Score:
    """Share of `right` among `images`, with Wilson's interval (1927) for other images.

    >>> vitlens.scores.proportion(50, images=100).low.__round__(1)
    40.4
    """
    from scipy.stats import binomtest

    test = binomtest(int(right), int(images))
    low, high = test.proportion_ci(LEVEL, method="wilson")
    return in_percent(right / images, low, high)


def student(values: Sequence[float]) -> float:
    """Half width of Student's 95 % interval of a mean, in the unit of the values. Infinite for a single value.

    >>> round(vitlens.scores.student([1.0, 2.0, 3.0]), 2)
    2.48
    """
    from scipy.stats import sem, t

    if len(values) == 1:
        return float("inf")
    degrees = len(values) - 1
    quantile = t.ppf((1 + LEVEL) / 2, degrees)
    half = sem(values) * quantile
    return float(half)


def paired(lost: int, gained: int, images: int) -> Score:
    """Change of an accuracy, in points, from the numbers of `images` that became wrong (lost) and right (gained).

    The interval is Agresti and Min's (2005): Wald's, with half an image added to each of the four counts.

    >>> vitlens.scores.paired(lost=10, gained=30, images=1000).value
    2.0
    """
    from scipy.stats import norm

    n = images + 2
    difference = gained - lost
    changed = (gained + lost + 1) / n
    middle = difference / n
    variance = (changed - middle**2) / n
    quantile = norm.ppf((1 + LEVEL) / 2)
    half = quantile * np.sqrt(variance)
    low = max(-1.0, middle - half)
    high = min(1.0, middle + half)
    return in_percent(difference / images, low, high)


def of_seeds(values: Sequence[float]) -> Score:
    """Mean of accuracies with Student's interval for other seeds on the same images. One seed gives 0 to 100.

    >>> vitlens.scores.of_seeds([90.0, 91.0, 92.0]).value
    91.0
    """
    half = student(values)
    return around(np.mean(values), half, half)


def over_seeds(values: Sequence[float], images: int) -> Score:
    """Mean of accuracies of several seeds on the same `images`, with an interval for other seeds and other images.

    Both are independent, so the squares of the half widths of `of_seeds` and `proportion` add up. One seed gives the
    interval for other images.

    >>> over_seeds([90.0, 91.0, 92.0], images=1000).value
    91.0
    """
    mean = np.mean(values)
    half = student(values) if len(values) > 1 else 0.0
    right = round(mean / 100 * images)
    _, low, high = proportion(right, images)
    below = max(mean - low, 0.0)
    above = max(high - mean, 0.0)
    return around(mean, np.hypot(half, below), np.hypot(half, above))


def mean_of(scores: Sequence[Score]) -> Score:
    """Mean of scores on different images. The squares of their half widths add up.

    >>> mean_of([proportion(80, 100), proportion(90, 100)]).value
    85.0
    """
    value, low, high = np.array(scores).T
    count = len(value)
    below = np.linalg.norm(value - low) / count
    above = np.linalg.norm(high - value) / count
    return around(value.mean(), below, above)


def top_k(classes: Tensor, labels: Tensor, k: int) -> Score:
    """Share of images whose label (N,) is among the first `k` of `classes` (N, 5), the most probable first.

    >>> top_k(torch.tensor([[281, 282], [3, 4]]), labels=torch.tensor([282, 5]), k=2).value
    50.0
    """
    matches = classes[:, :k] == labels[:, None]
    right = matches.any(1).sum()
    return proportion(int(right), len(labels))


@functools.cache
def real_labels() -> list[list[int]]:
    """Labels of *Are we done with ImageNet?* (Beyer et al. 2020) for the 50,000 validation images, from timm.

    Item i belongs to the file ILSVRC2012_val_(i + 1). 3,163 images have no label.

    >>> real_labels()[1]
    [970, 795]
    """
    from timm.data import RealLabelsImagenet

    labels = RealLabelsImagenet(range(50_000)).real_labels
    return list(labels.values())


def validation_numbers(names: Sequence[str]) -> Tensor:
    """Number from 0 of the ImageNet validation file in each name, or −1, as (N,) int64.

    >>> validation_numbers(["val/ILSVRC2012_val_00000002.JPEG"])
    tensor([1])
    """
    numbers = []
    for name in names:
        match = NUMBER.search(name)
        number = int(match[1]) if match else 0
        numbers.append(number - 1)
    return torch.tensor(numbers, dtype=torch.int64)


def real(classes: Tensor, numbers: Tensor) -> tuple[Score, int]:
    """ReaL accuracy and the number of images with a label.

    classes: (N, k) of ImageNet's 1,000, the most probable first. numbers: (N,), 0 to 49,999, as `validation_numbers`
    returns them. Raises ValueError if all images lack labels.

    >>> real(torch.tensor([[795]]), numbers=torch.tensor([1]))[0].value
    100.0
    """
    by_image = real_labels()
    first = classes[:, 0].tolist()
    right = []
    for predicted, number in zip(first, numbers.tolist(), strict=True):
        labels = by_image[number]
        if labels:
            right.append(int(predicted) in labels)
    if not right:
        raise ValueError(
            "ReaL labels are missing for all of these images. Use more of ImageNet's validation images."
        )
    images = len(right)
    return proportion(sum(right), images), images
