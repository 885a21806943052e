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
        return standardize(x, self.mean, self.deviation) @ self.weights


def standardize(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Standardized features and the constant feature, (N, D + 1) in float64."""
    return F.pad((x.double() - mean) / deviation, (0, 1), value=CONSTANT)


def least_squares(x: Tensor, y: Tensor, classes: int, penalty: float = PENALTY) -> LeastSquares:
    """The weights W that minimize |X W − Y|² + `penalty` |W|², for features x (N, D) and labels y (N,).

    The paper's few-shot classifier (section 4.1) as in its authors' code: X is standardized by the mean and deviation
    of these images, Y is +1 for the class and −1 for all others.

    >>> x, y = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1])
    >>> least_squares(x, y, classes=2).values(x).argmax(1)
    tensor([0, 1])
    """
    from sklearn.linear_model import Ridge

    mean = x.double().mean(0)
    deviation = x.double().std(0, correction=0) + 1e-5
    targets = 2 * F.one_hot(y, classes).double() - 1
    ridge = Ridge(penalty, fit_intercept=False, solver="cholesky")  # solves the dual where N < D
    learned = ridge.fit(standardize(x, mean, deviation).numpy(), targets.numpy())
    return LeastSquares(mean, deviation, torch.from_numpy(learned.coef_.T))


def support(labels: Tensor, shots: int, seed: int, names: tuple[str, ...] | None = None) -> Tensor:
    """Indices of `shots` images of each class, int64 (K · shots,), as a function of `seed`.

    More shots contain the images of fewer shots. Raises ValueError with the name in `names` for a class of fewer
    images.

    >>> vitlens_paper.evaluate.support(torch.tensor([0, 0, 1, 1]), shots=2, seed=0).sort().values
    tensor([0, 1, 2, 3])
    """
    counts = torch.bincount(labels, minlength=len(names or ()))
    fewest = int(counts.min())
    if shots < 1 or fewest < shots:
        number = int(counts.argmin())
        raise ValueError(
            f"Few-shot learning with {shots} shots needs as many images of each class, 1 or more, but class "
            f"{names[number] if names else number} has {fewest}. Change the number of shots."
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    first_of_class = counts.cumsum(0) - counts
    rank = torch.arange(len(labels)) - first_of_class[labels[order]]
    return order[rank < shots]


def supports(
    labels: Tensor, shots: Iterable[int], seeds: Iterable[int], names: tuple[str, ...] | None = None
) -> dict[int, list[Tensor]]:
    """The `support` of each seed, by number of shots.

    >>> list(vitlens_paper.evaluate.supports(torch.tensor([0, 0, 1, 1]), shots=(1, 2), seeds=range(3)))
    [1, 2]
    """
    seeds = tuple(seeds)
    return {n: [support(labels, n, seed, names) for seed in seeds] for n in shots}


def few_shot(
    train: Labeled, test: Labeled, drawn: Mapping[int, Iterable[Tensor]], classes: int
) -> dict[int, list[float]]:
    """Top-1 (%) on `test` of least squares on each support of `train` in `drawn`, the result of `supports`.

    >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1])
    >>> vitlens_paper.evaluate.few_shot((x, y), (x, y), vitlens_paper.evaluate.supports(y, [1], [0]), classes=2)
    {1: [100.0]}
    """

    def accuracy(rows: Tensor) -> float:
        learned = least_squares(train[0][rows], train[1][rows], classes)
        right = 0
        for x, y in zip(test[0].split(AT_ONCE), test[1].split(AT_ONCE), strict=True):
            right += int((learned.values(x).argmax(1) == y).sum())
        return 100 * right / len(test[1])

    return {shots: [accuracy(rows) for rows in several] for shots, several in drawn.items()}


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
        return np.exp((smallest - distances) / temperature)

    features, labels = train
    neighbors = KNeighborsClassifier(
        n_neighbors=min(k, len(labels)),
        weights=votes,
        algorithm="brute",
        metric="cosine",
    )
    neighbors.fit(features.float().numpy(), labels.numpy())
    return torch.from_numpy(neighbors.predict(x.float().numpy()))


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
    if len(counts) < 2 or counts.min() < 2:
        raise ValueError(
            f"A linear probe needs at least two classes of at least two images, got {len(counts)}, the smallest with "
            f"{counts.min(initial=len(y))}. Leave out small classes, or split the images differently."
        )
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000))
    penalties = {"logisticregression__C": np.logspace(-4, 1, 6)}
    probe = GridSearchCV(pipeline, penalties, cv=min(5, counts.min()))
    probe.fit(x, y)
    return 100 * float(probe.score(x_test, y_test))
