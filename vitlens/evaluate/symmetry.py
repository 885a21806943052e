"""What mirroring or turning the pictures does to a model's answers and maps, before and after averaging over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitlens.recorder.running import evaluating, require_images, run, taking
from vitlens.train.turns import GROUPS, averages, one_copy, turned


@dataclass(frozen=True)
class Change:
    """How much a model's output changes when pictures are flipped or rotated; all zeros for an equivariant model.

    logits: ‖turned − straight‖ / ‖straight‖, where logits are centered over the classes. classes: share of the
    pictures whose top class is another. maps: share of a rollout that lies elsewhere once it is turned back, which is
    half the sum of absolute differences; None for models without one. All are means over pictures and turns.
    """

    logits: float
    classes: float
    maps: float | None


def change_under(group: str, model: nn.Module, images: Tensor) -> dict[str, Change]:
    """The `Change` of a model under "flips" or "rotations": "before", one copy of a picture at a time; and "after", its
    logits and rollouts averaged over the group.

    images: (B, C, H, W), normalized; square for rotations. A model that averages itself (`equivariance`) is asked for
    its own logits "after". Raises ValueError for other groups, and for images that the model does not take.
    """
    if group not in GROUPS:
        raise ValueError(f"group must be one of {', '.join(GROUPS)}, got {group!r}.")
    require_images(images, model)
    if group == "rotations" and images.shape[-2] != images.shape[-1]:
        raise ValueError(f"Rotations need square images, got {images.shape[-2]} × {images.shape[-1]} pixels.")
    copies = [turned(images, group, number) for number in range(GROUPS[group])]
    with evaluating(model), torch.no_grad(), taking(model):
        with one_copy(model):
            before = [_seen(model, copy) for copy in copies]
            after = [_averaged(model, copy, group) for copy in copies]
        if averages(model) == group:
            after = [(model(copy), maps) for copy, (_, maps) in zip(copies, after, strict=True)]
    return {"before": _change(before, group), "after": _change(after, group)}


def _seen(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """(B, classes) logits and (B, rows, cols) rollouts of images, or None where there are none."""
    from vitlens import attention, capture

    try:
        with capture(model) as attn:
            logits = run(model, images)
        maps = attention.rollout(attn)
    except ValueError:
        return run(model, images), None
    return logits, maps / maps.sum((1, 2), keepdim=True)


def _averaged(model: nn.Module, images: Tensor, group: str) -> tuple[Tensor, Tensor | None]:
    """What `_seen` returns, averaged over all flipped or rotated copies, with their maps turned back."""
    found = [_seen(model, turned(images, group, number)) for number in range(GROUPS[group])]
    logits = torch.stack([each for each, _ in found]).mean(0)
    if found[0][1] is None:
        return logits, None
    return logits, torch.stack([turned(maps, group, -number) for number, (_, maps) in enumerate(found)]).mean(0)


def _change(found: list[tuple[Tensor, Tensor | None]], group: str) -> Change:
    """The `Change` from the output for copy 0, the pictures themselves, to those for copies 1, 2 …"""
    logits = torch.stack([each - each.mean(1, keepdim=True) for each, _ in found])
    moved = ((logits[1:] - logits[0]).norm(dim=-1) / logits[0].norm(dim=-1)).mean()
    other = (logits[1:].argmax(-1) != logits[0].argmax(-1)).float().mean()
    straight = found[0][1]
    if straight is None:
        return Change(moved.item(), other.item(), None)
    back = torch.stack([turned(maps, group, -number) for number, (_, maps) in enumerate(found)])
    return Change(moved.item(), other.item(), (back[1:] - straight).abs().sum((-2, -1)).mean().item() / 2)
