"""Naming an image as its nearest neighbors are named."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

AT_ONCE = 1_000  # images whose similarities are held


def nearest(train: tuple[Tensor, Tensor], x: Tensor, k: int = 20, temperature: float = 0.07) -> Tensor:
    """(M,) int64: the class that the `k` training images nearest to each of the features x (M, D) vote for.

    Near is a large cosine of the features. A neighbor's vote weighs exp(cosine / `temperature`) (Wu et al. 2018), so
    that of 20 neighbors a few may decide; of equal sums the lowest class wins. Where there are fewer than `k` training
    images all of them vote. Raises ValueError unless `k` and `temperature` are above 0.
    """
    if k < 1 or temperature <= 0:
        raise ValueError(f"Neighbors and temperature must be above 0, but k = {k} and {temperature:g} came.")
    known, labels = F.normalize(train[0].float()), train[1]
    classes, found = int(labels.max()) + 1, []
    for part in F.normalize(x.float()).split(AT_ONCE):
        near, rows = (part @ known.T).topk(min(k, len(known)))
        # Only ratios of weights matter; divided by the largest they cannot overflow.
        weight = ((near - near[:, :1]) / temperature).exp()
        found.append(weight.new_zeros(len(part), classes).scatter_add_(1, labels[rows], weight).argmax(1))
    return torch.cat(found)
