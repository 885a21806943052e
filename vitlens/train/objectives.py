"""Objectives without labels that a recipe can name.

Another package adds a row to `OBJECTIVES` in a function that its entry point `vitlens.recipes` names. For one run, pass
a callable to `vitlens.train.fit(…, objective=…)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

LABELS = "labels"


@dataclass(frozen=True)
class Objective:
    """A loss without labels.

    meaning: words after its name in `vitlens train --list`. build: (model, recipe) → module of (model, images) → loss,
    with random weights of PyTorch's global generator. check: function of a recipe that raises ValueError for settings
    that the objective does not support.
    """

    meaning: str
    build: Callable[..., nn.Module]
    check: Callable[..., None]


OBJECTIVES: dict[str, Objective | None] = {LABELS: None}
"""The objectives by name, as a recipe's `objective`. With labels, the recipe's `loss` is the objective."""
RENAMED: dict[str, str] = {}
"""New full name of an objective by its name in checkpoints of earlier versions."""


def meanings() -> str:
    """The names of all objectives with their meanings, in words."""
    others = [f'"{name}" {row.meaning}' for name, row in OBJECTIVES.items() if row is not None]
    if not others:
        return f'"{LABELS}".'
    return f'"{LABELS}", or without labels: {", ".join(others)}.'
