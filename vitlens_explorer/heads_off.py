"""Heads that are switched off: their control, their outputs and the sentence about them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from vitlens.models import preprocess
from vitlens.recorder.interception import POOL
from vitlens.recorder.intervention import head_places, mean_outputs
from vitlens.recorder.supported import attention_modules
from vitlens_explorer.controls import Control
from vitlens_explorer.lanes import Check
from vitlens_explorer.photographs import sample_photographs, shown_by_the_page
from vitlens_explorer.words import say

ZERO, AVERAGE = "zero", "mean"
WAYS = AVERAGE, ZERO
Head = tuple[int | str, int]
"""(layer, head); the attention pool is the layer "pool"."""


def places_of_heads(model: nn.Module) -> dict[Head, object]:
    """Places of all heads by layer, with the attention pool last."""
    places = head_places(model, attention_modules(model))
    return {("pool" if place.layer == POOL else place.layer, place.part): place for place in places}


def pool_heads(model: nn.Module) -> int:
    """Number of heads of the attention pool."""
    return sum(layer == "pool" for layer, _ in places_of_heads(model))


def sort_heads(model: nn.Module, heads: object) -> tuple[Head, ...]:
    """Heads in the order of layers. Raises ValueError for unknown heads, and for values that are not pairs."""
    try:
        pairs = {(layer, head) for layer, head in heads}
    except (TypeError, ValueError) as error:
        raise ValueError(say("no such head", value=place_words(heads))) from error
    every = [*places_of_heads(model)]
    unknown = pairs.difference(every)
    if unknown:
        raise ValueError(
            f"(layer, head) must be from {every[0]} to {every[-1]}, got {unknown.pop()!r}."
        )
    return tuple(head for head in every if head in pairs)


def place_words(heads: object) -> str:
    """Heads as an address has them, such as "0.2,4.1", or another value in its own words."""
    if not isinstance(heads, list | tuple):
        return str(heads)
    parts = [each if isinstance(each, list | tuple) else [each] for each in heads]
    return ",".join(".".join(map(str, part)) for part in parts)


def mean_head_outputs(model: nn.Module, batch: Tensor, check: Check) -> dict[Head, Tensor]:
    """Mean output (T, K) of each head over the sample photographs, at the image size of `batch`."""
    places = places_of_heads(model)
    size = tuple(batch.shape[-2:])

    def batches() -> Iterator[Tensor]:
        for photograph in sample_photographs().values():
            check()
            inputs = preprocess(model, photograph.image, size=size, on_note=shown_by_the_page)
            yield inputs.to(batch)

    means = mean_outputs(model, attention_modules(model), places.values(), batches())
    return {head: means[place].to(batch.dtype) for head, place in places.items()}


def head_switches(model: nn.Module, off: tuple[Head, ...], way: str) -> list[Control]:
    """Controls that switch heads off."""
    heads = tuple(
        (f"{_layer_words(layer)}, head {head}", (layer, head))
        for layer, head in places_of_heads(model)
    )
    ways = tuple((replacement_words(way), way) for way in WAYS)
    return [
        Control("off", "Heads that are off", "switches", off, heads),
        Control("way", "Replace with", "select", way, ways, hidden=not off, place="heads"),
    ]


def replacement_words(way: str) -> str:
    """Label of the output of a switched-off head."""
    return say(f"by {way}", count=len(sample_photographs()))


def off_words(heads: tuple[Head, ...], way: str) -> str:
    """Sentence about switched-off heads with a leading space, or ""."""
    if not heads:
        return ""
    replacement = replacement_words(way).replace("their", "its")
    which = heads_words(heads)
    return say("off" if len(heads) == 1 else "all off", heads=which, way=replacement)


def heads_words(heads: tuple[Head, ...]) -> str:
    """Names of up to four heads, or the number of more."""
    if len(heads) > 4:
        return say("count of heads", count=len(heads))
    return ", ".join(say("head of", head=head, layer=_layer_words(layer)) for layer, head in heads)


def _layer_words(layer: int | str) -> str:
    return say("the pool") if layer == "pool" else say("layer", layer=layer)
