"""How far a measured number may lie from what it measures: 95 % confidence intervals, from scipy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95


class Score(NamedTuple):
    """A number and its 95 % confidence interval, all in per cent."""

    value: float
    low: float
    high: float


def proportion(right: int, images: int) -> Score:
    """Share of `images` that are `right`, with Wilson's interval (1927): what other images of the kind would give."""
    from scipy.stats import binomtest

    interval = binomtest(int(right), int(images)).proportion_ci(LEVEL, method="wilson")
    return Score(*(100 * float(x) for x in (right / images, *interval)))


def of_seeds(values: Sequence[float]) -> Score:
    """The mean of numbers in per cent, with Student's interval of their mean: what other seeds alone would give.

    It is cut off at 0 and 100. One seed alone tells nothing of others: the interval is then 0 to 100.
    """
    mean, half = float(np.mean(values)), student(values)
    return Score(mean, max(0.0, mean - half), min(100.0, mean + half))


def over_seeds(values: Sequence[float], images: int) -> Score:
    """The mean of accuracies in per cent, each with another seed on the same `images`, with an interval for both.

    What other seeds would give (`of_seeds`) and what other images would (`proportion`) are independent: their half
    widths add up as squares. It is cut off at 0 and 100. One seed tells nothing of others: the interval is then that of
    the images alone.
    """
    mean = float(np.mean(values))
    half = student(values) if len(values) > 1 else 0.0
    _, low, high = proportion(round(mean / 100 * images), images)
    below, above = (float(np.hypot(half, max(side, 0.0))) for side in (mean - low, high - mean))
    return Score(mean, max(0.0, mean - below), min(100.0, mean + above))


def student(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean (Student's), in the unit of the values; without end for one."""
    from scipy.stats import sem, t

    return float(sem(values) * t.ppf((1 + LEVEL) / 2, len(values) - 1)) if len(values) > 1 else float("inf")


def mean_of(scores: Sequence[Score]) -> Score:
    """The mean of scores that were measured on different images: their half widths add up as squares."""
    value, low, high = np.array(scores).T
    mean = value.mean()
    below, above = (float(np.sqrt((side**2).sum())) / len(value) for side in (value - low, high - value))
    return Score(float(mean), max(0.0, float(mean) - below), min(100.0, float(mean) + above))
