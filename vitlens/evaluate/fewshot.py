"""The paper's few-shot protocol: least squares on a few images of each class, solved in closed form (section 4.1).

As in its authors' code: features are standardized by the mean and deviation of the few images, a constant feature of
100 makes the bias all but free, targets are +1 for the class and −1 for all others, and the class with the largest
value is named. Images are shown as the model was trained; there, they all are resized to 256 and cut to 224 pixels.

Shapes: N images to learn from, M to measure on, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

CONSTANT = 100.0
PENALTY = 2.0**10  # of the official code
AT_ONCE = 10_000  # images whose values are held


class LeastSquares(NamedTuple):
    """A linear classifier on standardized features, in float64."""

    mean: Tensor
    """(D,)"""
    deviation: Tensor
    """(D,)"""
    weights: Tensor
    """(D + 1, K); the last row is that of the constant feature."""

    def values(self, x: Tensor) -> Tensor:
        """(M, K) for features (M, D)."""
        return standardized(x, self.mean, self.deviation) @ self.weights


def standardized(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """(N, D + 1) in float64: each feature less its mean, by its deviation, and the constant feature behind them."""
    x = (x.double() - mean) / deviation
    return torch.cat([x, x.new_full((len(x), 1), CONSTANT)], dim=1)


def least_squares(x: Tensor, y: Tensor, classes: int, penalty: float = PENALTY) -> LeastSquares:
    """The weights W that minimize |X W − Y|² + `penalty` |W|², for features x (N, D) and labels y (N,).

    Of (XᵀX + λI) W = XᵀY with D + 1 unknowns for each class, and the dual W = Xᵀ (XXᵀ + λI)⁻¹ Y with N, the smaller is
    solved. Raises ValueError for labels outside of 0…`classes` − 1 and a penalty of 0 or less.
    """
    if penalty <= 0:
        raise ValueError(f"The penalty must be above 0 for one solution, but {penalty:g} came; the paper's is 1024.")
    if not len(y) or not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise ValueError(f"Labels from 0 to {classes - 1} were wanted, one for each of {len(x)} images.")
    wide = x.double()
    mean, deviation = wide.mean(0), wide.std(0, correction=0) + 1e-5
    z = standardized(x, mean, deviation)
    dual = len(z) < z.shape[1]
    gram = z @ z.T if dual else z.T @ z
    gram.diagonal().add_(penalty)
    if dual:
        target = torch.nn.functional.one_hot(y, classes).to(z) * 2 - 1
    else:  # XᵀY from sums over each class: Y itself may be larger than X
        target = (2 * z.new_zeros(classes, z.shape[1]).index_add_(0, y, z) - z.sum(0)).T
    solution = torch.cholesky_solve(target, torch.linalg.cholesky(gram))
    return LeastSquares(mean, deviation, z.T @ solution if dual else solution)


def support(labels: Tensor, shots: int, seed: int, names: tuple[str, ...] | None = None) -> Tensor:
    """Places of `shots` images of each class, int64 (K · shots,), drawn as a function of `seed` alone.

    More shots hold what fewer held. Raises ValueError for a class of fewer images, calling it by its name in `names`.
    """
    counts = torch.bincount(labels, minlength=len(names or ()))
    if shots < 1 or int(counts.min()) < shots:
        least = int(counts.argmin())
        which = names[least] if names else least
        raise ValueError(
            f"Few-shot learning takes 1 or more images of each class, and {shots} were asked for, but class {which} "
            f"has {int(counts.min())} to learn from. Ask for another number of shots."
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[labels[order].argsort(stable=True)]
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    return order[rank < shots]


def supports(
    labels: Tensor, shots: Iterable[int], seeds: Iterable[int], names: tuple[str, ...] | None = None
) -> dict[int, list[Tensor]]:
    """For each number of shots, for each seed what `support` draws."""
    seeds = tuple(seeds)
    return {n: [support(labels, n, seed, names) for seed in seeds] for n in shots}


def few_shot(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    drawn: Mapping[int, Iterable[Tensor]],
    classes: int,
) -> dict[int, list[float]]:
    """Top-1 (%) on `test` of what is learned from each support of `train` in `drawn`, which `supports` returns.

    train, test: features (N, D) and (M, D) with labels (N,) and (M,), as `features` returns them. Raises what
    `least_squares` raises.
    """
    return {n: [_accuracy(train[0][rows], train[1][rows], test, classes) for rows in each] for n, each in drawn.items()}


def _accuracy(x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], classes: int) -> float:
    learned = least_squares(x, y, classes)
    # In parts: values in float64 of all test images and all classes would be large.
    parts = zip(test[0].split(AT_ONCE), test[1].split(AT_ONCE), strict=True)
    return 100 * sum(int((learned.values(a).argmax(1) == b).sum()) for a, b in parts) / len(test[1])
