"""Mirrored and turned copies of pictures, over which a model can average (`equivariance` of a recipe)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

GROUPS = {"flips": 2, "rotations": 4}
"""Copies of a picture: left to right and back, or all quarter turns."""


def turned(images: Tensor, group: str, number: int) -> Tensor:
    """(…, rows, cols) copy `number` of images; −number turns it back, 0 is the image itself."""
    if group == "rotations":
        return torch.rot90(images, number % 4, (-2, -1))
    return images.flip(-1) if number % 2 else images


def averages(model: nn.Module) -> str:
    """The group of copies that a model averages over; "" for one that sees each picture once."""
    return getattr(model, "equivariance", "none").replace("none", "")


@contextlib.contextmanager
def one_copy(model: nn.Module) -> Iterator[None]:
    """Let a model that averages over copies see each picture once, as it is, in this block."""
    group = averages(model)
    if not group:
        yield
        return
    model.equivariance = "none"
    try:
        yield
    finally:
        model.equivariance = group
