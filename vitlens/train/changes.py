"""How far training moved the weights of a model, part by part."""

from __future__ import annotations

from torch import Tensor, nn


def relative_change(before: nn.Module, after: nn.Module) -> dict[str, float]:
    """‖after − before‖ / ‖before‖ of each part of a model, all weights of a part taken as one vector.

    The parts, in the model's order, are what it is made of by name ("patch_embed", "pos_embed", "norm", "head") and,
    for each layer, what its block is made of ("blocks.0.attn", "blocks.0.mlp"). A part that began at zero, as a fresh
    head does, gives inf, or nan if it stayed there. Raises ValueError unless both models have the same weights by name
    and shape.
    """
    old, new = (dict(model.named_parameters()) for model in (before, after))
    other = [n for n in old | new if n not in old or n not in new or old[n].shape != new[n].shape]
    if other:
        raise ValueError(
            f"The two models differ in {other[0]}; compare two states of one model, with the same head and resolution."
        )
    squares: dict[str, Tensor] = {}
    for name, weight in old.items():
        part = ".".join(name.split(".")[: 3 if name.startswith("blocks.") else 1])
        then, now = (w.detach().double().cpu() for w in (weight, new[name]))
        squares[part] = squares.get(part, 0) + then.new_tensor([(now - then).square().sum(), then.square().sum()])
    return {part: (moved / length).sqrt().item() for part, (moved, length) in squares.items()}
