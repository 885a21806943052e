"""Heads that are switched off: which, and what they give instead.

A head that is off gives zero, or the mean of what it gives for the sample photographs, each token position for itself,
as `vitlens.intervene` has it with these photographs for reference.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from vitlens import intervene
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.recorder.intervention import head_places, outputs
from vitlens.recorder.record import POOL
from vitlens.recorder.running import float64
from vitlens.recorder.supported import attention_modules
from vitlens.widgets.stage import Control
from vitlens.widgets.worker import Superseded

ZERO, AVERAGE = "zero", "mean"
WAYS = {AVERAGE: "their mean over {} sample photographs", ZERO: "zero"}
KEPT = 4  # sizes of pictures whose means are kept

Head = tuple[int | str, int]


class Off(NamedTuple):
    """heads: (layer, head) of each one that is off, the attention pool being the layer "pool". way: ZERO or AVERAGE."""

    heads: tuple[Head, ...] = ()
    way: str = AVERAGE

    @property
    def words(self) -> str:
        """A sentence about them with a space before it, or ""."""
        if not self.heads:
            return ""
        names = [f"head {head} of {_layer(layer)}" for layer, head in self.heads]
        which = ", ".join(names) if len(names) <= 4 else f"{len(names)} heads"
        what = f"{'each gives ' if len(names) > 1 else 'it gives '}{instead(self.way)}"
        return f" Switched off: {which}; {what.replace('their', 'its')}."


ALL_ON = Off()


@functools.cache  # samples() opens files
def instead(way: str) -> str:
    """What a head that is off gives, for people."""
    return WAYS[way].format(len(samples()))


def _layer(layer: int | str) -> str:
    return "the pool" if layer == "pool" else f"layer {layer}"


def heads(model: nn.Module) -> list[Head]:
    """The heads of a model, layer by layer, the attention pool's last."""
    places = head_places(model, attention_modules(model))
    return [("pool" if place.layer == POOL else place.layer, place.part) for place in places]


def listed(model: nn.Module, named: object) -> tuple[Head, ...]:
    """Heads named in any order, in the order of `heads`. Raises ValueError for what is no head of the model."""
    try:
        pairs = {(layer, head) for layer, head in named}
    except (TypeError, ValueError) as error:
        raise ValueError(f"Expected pairs of a layer and a head, such as [(0, 2)], got {named!r}.") from error
    every = heads(model)
    if unknown := pairs.difference(every):
        raise ValueError(f"There is no (layer, head) {unknown.pop()!r}; they go from {every[0]} to {every[-1]}.")
    return tuple(head for head in every if head in pairs)


def switches(model: nn.Module, off: tuple[Head, ...], way: str) -> list[Control]:
    """The controls of heads."""
    every = tuple((f"{_layer(layer)}, head {head}", (layer, head)) for layer, head in heads(model))
    ways = tuple((instead(way), way) for way in WAYS)
    return [
        Control("off", "Switch heads off", "switches", off, every),
        Control("way", "They give", "select", way, ways, hidden=not off),
    ]


def switched(model: nn.Module, off: Off, batch: Tensor, mark: tuple) -> contextlib.AbstractContextManager[None]:
    """A block in which the model runs with these heads off.

    batch: an input of the size that will run. mark: identifies the weights; when it changes, means are taken anew.
    """
    if not off.heads:
        return contextlib.nullcontext()
    known = means(model, batch, mark) if off.way == AVERAGE else {}
    return intervene(model, heads={head: known.get(head, ZERO) for head in off.heads})


def known(model: nn.Module, batch: Tensor, mark: tuple) -> bool:
    """Whether the means that heads are switched to are known already."""
    return (mark, tuple(batch.shape)) in _means.get(model, {})


def means(
    model: nn.Module, batch: Tensor, mark: tuple, wanted: Callable[[], bool] = lambda: True
) -> dict[Head, Tensor]:
    """(T, K) what each head gives on average over the sample photographs, at the size of a batch. Made now or kept from
    before; `wanted()` is called before each photograph."""
    kept, key = _means.setdefault(model, {}), (mark, tuple(batch.shape))
    if key not in kept:
        modules = attention_modules(model)
        places, photographs = head_places(model, modules), samples().values()
        sums: dict[Head, Tensor] = {}
        for each in photographs:
            if not wanted():
                raise Superseded
            shown = preprocess(model, each, size=tuple(batch.shape[-2:])).to(batch)
            for place, output in outputs(model, modules, places, shown).items():
                head = "pool" if place.layer == POOL else place.layer, place.part
                sums[head] = sums.get(head, 0) + float64(output[0])
        while len(kept) >= KEPT:
            kept.pop(next(iter(kept)))
        kept[key] = {head: (total / len(photographs)).to(batch.dtype) for head, total in sums.items()}
    return kept[key]


_means: weakref.WeakKeyDictionary[nn.Module, dict[tuple, dict[Head, Tensor]]] = weakref.WeakKeyDictionary()
