"""Heads that are switched off: their controls, and what they give instead.

A head that is off gives zero, or the mean of its outputs for the sample photographs, each token position for itself, as
`vitlens.intervene` has it with these photographs for reference.
"""

from __future__ import annotations

from torch import Tensor, nn

from vitlens.models import preprocess
from vitlens.recorder.forward import float64
from vitlens.recorder.intervention import head_places, outputs
from vitlens.recorder.record import POOL
from vitlens.recorder.supported import attention_modules
from vitlens.widgets.page import Check, Control
from vitlens.widgets.photographs import sample_photographs

ZERO, AVERAGE = "zero", "mean"
WAYS = {AVERAGE: "their mean over {} sample photographs", ZERO: "zero"}

Head = tuple[int | str, int]
"""(layer, head); the attention pool is the layer "pool"."""


def instead(way: str) -> str:
    """The output of a head that is off, for people."""
    return WAYS[way].format(len(sample_photographs()))


def off_words(heads: tuple[Head, ...], way: str) -> str:
    """A sentence about heads that are off with a space before it, or ""."""
    if not heads:
        return ""
    names = [f"head {head} of {_layer(layer)}" for layer, head in heads]
    which = ", ".join(names) if len(names) <= 4 else f"{len(names)} heads"
    what = f"{'each gives ' if len(names) > 1 else 'it gives '}{instead(way)}"
    return f" Switched off: {which}; {what.replace('their', 'its')}."


def _layer(layer: int | str) -> str:
    return "the pool" if layer == "pool" else f"layer {layer}"


def _places(model: nn.Module) -> dict[Head, object]:
    """The place of every head, layer by layer, the attention pool's last."""
    places = head_places(model, attention_modules(model))
    return {("pool" if place.layer == POOL else place.layer, place.part): place for place in places}


def listed(model: nn.Module, heads: object) -> tuple[Head, ...]:
    """Heads in the order of the layers. Raises ValueError for heads that do not exist."""
    pairs, every = {(layer, head) for layer, head in heads}, [*_places(model)]
    if unknown := pairs.difference(every):
        raise ValueError(f"There is no (layer, head) {unknown.pop()!r}; they go from {every[0]} to {every[-1]}.")
    return tuple(head for head in every if head in pairs)


def switches(model: nn.Module, off: tuple[Head, ...], way: str) -> list[Control]:
    """The controls of heads."""
    every = tuple((f"{_layer(layer)}, head {head}", (layer, head)) for layer, head in _places(model))
    ways = tuple((instead(way), way) for way in WAYS)
    return [
        Control("off", "Switch heads off", "switches", off, every),
        Control("way", "They give", "select", way, ways, hidden=not off),
    ]


def means(model: nn.Module, batch: Tensor, check: Check) -> dict[Head, Tensor]:
    """(T, K) mean output of each head over the sample photographs, at the size of a batch."""
    places, photographs = _places(model), sample_photographs().values()
    sums: dict[Head, Tensor] = {}
    for photograph in photographs:
        check()
        images = preprocess(model, photograph.image, size=tuple(batch.shape[-2:])).to(batch)
        found = outputs(model, attention_modules(model), places.values(), images)
        for head, place in places.items():
            sums[head] = sums.get(head, 0) + float64(found[place][0])
    return {head: (total / len(photographs)).to(batch.dtype) for head, total in sums.items()}
