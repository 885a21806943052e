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


def over_seeds(values: Sequence[float]) -> Score:
    """The mean of numbers in per cent, with Student's interval of their mean: what other seeds would give.

    It is cut off at 0 and 100. One seed alone tells nothing of others: the interval is then 0 to 100.
    """
    from scipy.stats import sem, t

    mean = float(np.mean(values))
    if len(values) < 2:
        return Score(mean, 0.0, 100.0)
    half = float(sem(values) * t.ppf((1 + LEVEL) / 2, len(values) - 1))
    return Score(mean, max(0.0, mean - half), min(100.0, mean + half))


def mean_of(scores: Sequence[tuple[float, int]]) -> Score:
    """The mean of accuracies (per cent, on so many images each), with the interval that their test images leave.

    Their errors are independent, so the variances p (1 − p) / n add up; by a normal distribution, cut off at 0 and 100.
    """
    from scipy.stats import norm

    p, n = np.array([s for s, _ in scores]) / 100, np.array([n for _, n in scores])
    half = float(norm.ppf((1 + LEVEL) / 2) * np.sqrt((p * (1 - p) / n).sum()) / len(p))
    return Score(*(100 * float(x) for x in (p.mean(), max(0.0, p.mean() - half), min(1.0, p.mean() + half))))
