"""Classifiers on features: least squares on a few images of each class, nearest neighbors, and a linear probe.

Shapes: N training images, M test images, D features, K classes. `train` and `test` are features (N, D), (M, D) with
labels (N,), (M,), as `features` returns them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CONSTANT = 100.0
"""Value of the constant feature, large so that the penalty barely affects the bias, as in the official code."""
PENALTY = 2.0**10
"""L2 penalty of the official code."""
AT_ONCE = 10_000
"""Number of images whose float64 values are in memory at once."""

Labeled = tuple[Tensor, Tensor]


class LeastSquares(NamedTuple):
    """A linear classifier on standardized features, in float64."""

    mean: Tensor
    """(D,)"""
    deviation: Tensor
    """(D,)"""
    weights: Tensor
    """(D + 1, K), with the constant feature in the last row."""

    def values(self, x: Tensor) -> Tensor:
        """Class values (M, K) of features (M, D)."""
        features = standardize(x, self.mean, self.deviation)
        return features @ self.weights


def standardize(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Standardized features and the constant feature, (N, D + 1) in float64."""
    centered = x.double() - mean
    return F.pad(centered / deviation, (0, 1), value=CONSTANT)


def least_squares(x: Tensor, y: Tensor, classes: int, penalty: float = PENALTY) -> LeastSquares:
    """The weights W that minimize |X W − Y|² + `penalty` |W|², for features x (N, D) and labels y (N,).

    The paper's few-shot classifier (section 4.1) as in its authors' code: X is standardized by the mean and deviation
    of these images, Y is +1 for the class and −1 for all others.

    >>> x, y = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1])
    >>> least_squares(x, y, classes=2).values(x).argmax(1)
    tensor([0, 1])
    """
    from sklearn.linear_model import Ridge

    x = x.double()
    mean = x.mean(0)
    deviation = x.std(0, correction=0) + 1e-5
    features = standardize(x, mean, deviation)
    one_hot = F.one_hot(y, classes).double()
    targets = 2 * one_hot - 1
    ridge = Ridge(penalty, fit_intercept=False, solver="cholesky")  # solves the dual where N < D
    ridge.fit(features.numpy(), targets.numpy())
    weights = torch.from_numpy(ridge.coef_.T)
    return LeastSquares(mean, deviation, weights)


def support(labels: Tensor, shots: int, seed: int, names: tuple[str, ...] | None = None) -> Tensor:
    """Indices of `shots` images of each class, int64 (K · shots,), as a function of `seed`.

    With one seed, a smaller number of shots selects a subset of a larger number's images. Raises ValueError if a class
    has fewer images. names: class names for its message.

    >>> vitlens_paper.evaluate.support(torch.tensor([0, 0, 1, 1]), shots=2, seed=0).sort().values
    tensor([0, 1, 2, 3])
    """
    counts = torch.bincount(labels, minlength=len(names or ()))
    fewest = int(counts.min())
    if shots < 1 or fewest < shots:
        rarest = int(counts.argmin())
        name = names[rarest] if names else rarest
        raise ValueError(
            f"Few-shot learning with {shots} shots needs as many images of each class, 1 or more, but class "
            f"{name} has {fewest}. Change the number of shots."
        )
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    order = labels[shuffled].argsort(stable=True)
    by_class = shuffled[order]  # all of class 0, then of class 1 …
    start_of_class = counts.cumsum(0) - counts
    starts = start_of_class[labels[by_class]]
    place_in_class = torch.arange(len(labels)) - starts
    return by_class[place_in_class < shots]


def supports(
    labels: Tensor, shots: Iterable[int], seeds: Iterable[int], names: tuple[str, ...] | None = None
) -> dict[int, list[Tensor]]:
    """The `support` of each seed, by number of shots.

    >>> list(vitlens_paper.evaluate.supports(torch.tensor([0, 0, 1, 1]), shots=(1, 2), seeds=range(3)))
    [1, 2]
    """
    seeds = tuple(seeds)
    drawn = {}
    for n in shots:
        drawn[n] = [support(labels, n, seed, names) for seed in seeds]
    return drawn


def few_shot(
    train: Labeled, test: Labeled, drawn: Mapping[int, Iterable[Tensor]], classes: int
) -> dict[int, list[float]]:
    """Top-1 (%) on `test` of least squares on each support of `train` in `drawn`, the result of `supports`.

    >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1])
    >>> vitlens_paper.evaluate.few_shot((x, y), (x, y), vitlens_paper.evaluate.supports(y, [1], [0]), classes=2)
    {1: [100.0]}
    """

    x_train, y_train = train
    x_test, y_test = test

    def accuracy(rows: Tensor) -> float:
        learned = least_squares(x_train[rows], y_train[rows], classes)
        right = 0
        for x, y in zip(x_test.split(AT_ONCE), y_test.split(AT_ONCE), strict=True):
            predicted = learned.values(x).argmax(1)
            matches = predicted == y
            right += int(matches.sum())
        return 100 * right / len(y_test)

    accuracies = {}
    for shots, supports_of_seeds in drawn.items():
        accuracies[shots] = [accuracy(rows) for rows in supports_of_seeds]
    return accuracies


def nearest(train: Labeled, x: Tensor, k: int = 20, temperature: float = 0.07) -> Tensor:
    """Classes (M,) int64 of features x (M, D) by weighted k-nearest-neighbor classification.

    Neighbors are the `k` training images with the largest cosine, or all if fewer. Each votes with the weight
    exp(cosine / `temperature`) (Wu et al. 2018). Raises ValueError unless the temperature is above 0.

    >>> train = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1])
    >>> vitlens_paper.evaluate.nearest(train, torch.tensor([[0.2, 0.9]]), k=1)
    tensor([0])
    """
    from sklearn.neighbors import KNeighborsClassifier

    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature:g}.")

    def votes(distances: np.ndarray) -> np.ndarray:
        """Weights divided by the largest, so that they cannot overflow."""
        smallest = distances.min(1, keepdims=True)
        exponents = (smallest - distances) / temperature
        return np.exp(exponents)

    features, labels = train
    neighbors = KNeighborsClassifier(
        n_neighbors=min(k, len(labels)),
        weights=votes,
        algorithm="brute",
        metric="cosine",
    )
    neighbors.fit(features.float().numpy(), labels.numpy())
    classes = neighbors.predict(x.float().numpy())
    return torch.from_numpy(classes)


def linear_probe(train: Labeled, test: Labeled) -> float:
    """Top-1 (%) on `test` of a multinomial logistic regression on `train`.

    Each feature is standardized by its mean and deviation on `train`. Cross-validation on `train` selects the L2
    penalty 1/C from C = 10⁻⁴, 10⁻³ … 10, with five stratified folds, or as many as the rarest class has images. Raises
    ValueError unless `train` holds two classes of two images.

    >>> x, y = torch.tensor([[0.0], [0.1], [1.0], [1.1]]), torch.tensor([0, 0, 1, 1])
    >>> vitlens_paper.evaluate.linear_probe((x, y), (x, y))
    100.0
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = (part.numpy() for part in train)
    x_test, y_test = (part.numpy() for part in test)
    _, counts = np.unique(y, return_counts=True)
    fewest = min(counts, default=0)
    if len(counts) < 2 or fewest < 2:
        raise ValueError(
            f"A linear probe needs at least two classes of at least two images, got {len(counts)}, the smallest with "
            f"{fewest}. Leave out small classes, or split the images differently."
        )
    regression = LogisticRegression(max_iter=5000)
    pipeline = make_pipeline(StandardScaler(), regression)
    penalties = {"logisticregression__C": np.logspace(-4, 1, 6)}
    probe = GridSearchCV(pipeline, penalties, cv=min(5, fewest))
    probe.fit(x, y)
    share = probe.score(x_test, y_test)
    return 100 * float(share)
