"""What the features of a model are worth where it was not trained: the model stays as it is, a classifier reads them.

Shapes: N images, D width of the model.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor


def linear_probe(train: tuple[Tensor, Tensor], valid: tuple[Tensor, Tensor]) -> float:
    """Top-1 (%) on `valid` of a multinomial logistic regression that learned on `train`.

    train, valid: (N, D) features and (N,) labels, as `features` returns them. Each feature is standardized by its mean
    and deviation on `train`. The strength of the L2 penalty, 1/C for C = 10⁻⁴, 10⁻³ … 10, is the one that does best in
    a cross-validation on `train` alone: five stratified folds, or as many as the rarest class has images. Raises
    ValueError unless `train` holds two classes of two images, and `valid` features of the same width.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    (x, y), (x_valid, y_valid) = ([part.numpy() for part in pair] for pair in (train, valid))
    counts = np.unique(y, return_counts=True)[1]
    if len(counts) < 2 or counts.min() < 2:
        raise ValueError(
            f"A probe learns from two classes or more, of two images or more each; {len(counts)} came, the smallest of "
            f"{counts.min(initial=len(y))}; leave out classes that are too small, or divide the images otherwise."
        )
    if x.shape[1:] != x_valid.shape[1:]:
        raise ValueError(
            f"Features of one width were wanted, but {x.shape[1]} came to learn from and {x_valid.shape[1]} to measure "
            "on; take both from one model."
        )
    steps = StandardScaler(), LogisticRegression(max_iter=5000)
    penalties = {"logisticregression__C": np.logspace(-4, 1, 6)}
    probe = GridSearchCV(make_pipeline(*steps), penalties, cv=min(5, counts.min()))
    return 100 * float(probe.fit(x, y).score(x_valid, y_valid))
