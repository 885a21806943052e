"""Short `repr` of objects that hold tensors."""

from __future__ import annotations

import torch


def repr_with_shapes(thing) -> str:
    """`repr` of a dataclass or named tuple with the shapes of its tensors in place of their numbers."""

    def short(value: object) -> str:
        if isinstance(value, torch.Tensor):
            return f"({', '.join(map(str, value.shape))})" if value.dim() else f"{value.item():.4g}"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{name}: {short(part)}' for name, part in value.items())}}}"
        return repr(value) if len(repr(value)) < 200 else f"{type(value).__name__} of {len(value)}"

    fields = thing._asdict() if isinstance(thing, tuple) else vars(thing)
    parts = [f"{name}={short(value)}" for name, value in fields.items() if value is not None]
    return f"{type(thing).__name__}({', '.join(parts)})"
