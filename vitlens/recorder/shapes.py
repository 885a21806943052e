"""Short `repr` of objects that hold tensors."""

from __future__ import annotations

import torch


def repr_with_shapes(thing) -> str:
    """`repr` of a dataclass or named tuple with the shapes of its tensors in place of their numbers."""
    fields = thing._asdict() if isinstance(thing, tuple) else vars(thing)
    parts = []
    for name, value in fields.items():
        if value is not None:
            parts.append(f"{name}={_short_repr(value)}")
    return f"{type(thing).__name__}({', '.join(parts)})"


def _short_repr(value: object) -> str:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            return f"{value.item():.4g}"
        sides = ", ".join(str(side) for side in value.shape)
        return f"({sides})"
    if isinstance(value, dict):
        items = [f"{name}: {_short_repr(item)}" for name, item in value.items()]
        return "{" + ", ".join(items) + "}"
    text = repr(value)
    if len(text) < 200:
        return text
    return f"{type(value).__name__} of {len(value)}"
