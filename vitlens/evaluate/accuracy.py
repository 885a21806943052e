"""How many images a model names right: by their label, or by the labels that people gave anew (ReaL)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from vitlens.evaluate.intervals import Score, proportion

NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
FILES = 50_000


def top_k(classes: Tensor, labels: Tensor, k: int) -> Score:
    """Share of the images whose label, (N,), is among the first `k` of their `classes`, (N, 5) the likeliest first."""
    return proportion(int((classes[:, :k] == labels[:, None]).any(1).sum()), len(labels))


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
