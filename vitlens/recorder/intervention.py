"""Switch parts of a model off, or put something else in their place, while it runs.

Heads and attention are changed where fused attention is called, which an `Interception` sees. MLPs and the residual
stream are changed by hooks that only this thread obeys. No module is patched, and afterwards everything is as it was.

Shapes: B batch, H heads, T tokens = R prefix + P patches, D width, K head width.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitlens.recorder.forward import evaluating, float64, require_images, run, uncompiled, without_checkpointing
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.record import POOL, THREAD, Interception, alone, hides_all
from vitlens.recorder.supported import (
    attention_modules,
    family,
    head_count,
    model_name,
    refuse,
    require_capturable,
    unwrap,
)

WORDS = ("zero", "mean")
AT_ONCE = 64  # reference images in one forward


@contextlib.contextmanager
def intervene(
    model: nn.Module,
    *,
    heads: Mapping | None = None,
    mlps: Mapping | None = None,
    residual: Mapping | None = None,
    block: Mapping | None = None,
    reference: Tensor | Iterable[Tensor] | None = None,
) -> Iterator[None]:
    """Run a Vision Transformer in this block with some of its parts switched off or replaced.

        with vitlens.intervene(model, heads={(0, 3): "mean"}, reference=others):
            logits = model(images)

    heads: by (layer, head), the replacement for the output of fused attention for this head, A·V, (B, T, K): before the
    output projection, and before a norm or a gate that some models have in between. An attention pool is the layer
    "pool". Heads of a parallel block are counted as `capture` counts them.
    mlps: by layer or (layer, tokens), the replacement for the output of the MLP, (B, T, D), before LayerScale or a norm
    that follows; in a parallel block, for the output of each of its MLPs.
    residual: by layer or (layer, tokens), the replacement for the tokens after the layer, (B, T, D).

    A replacement is "zero"; "mean", the mean over the reference images at each token position; or a tensor that
    `expand`s to the shape above, with as many tokens as are named.

    block: by layer or a tuple of layers, (queries, keys): these queries do not attend to these keys, whose logits
    become −∞.
    tokens, queries, keys: a position, a patch (row, column), a list of such, or "all", "prefix" or "patches".
    reference: images (N, C, height, width), or batches of them, of as many tokens as those that run. The model without
    any intervention runs them once, before the block, in eval mode.

    Interventions may be nested, and the inner one has the last word. A capture, inside or outside, records the
    attention with its blocked keys, and a head's own output rather than its replacement. Only forwards of this thread
    are changed. Compiled models run uncompiled meanwhile, in all threads.

    Raises UnsupportedModelError for a model or call that `capture` refuses, IndexError for parts that do not exist, and
    RuntimeError for a part that did not run.
    """
    model = unwrap(model)
    modules = attention_modules(model)
    require_capturable(model)
    wishes = _wishes(model, modules, heads or {}, mlps or {}, residual or {})
    blocks = defaultdict(list)
    for layers, pair in (block or {}).items():
        for layer in layers if isinstance(layers, tuple | range) else [layers]:
            blocks[_layer(model, layer)].append(pair)
    with uncompiled(), without_checkpointing(model):  # the backward pass may come after the block
        values = _values(model, modules, wishes, reference)
        mode = Intervention(model, modules, values, lambda place, _: values[place], blocks)
        with mode.working():
            THREAD.interventions.append(mode)
            try:
                yield
            finally:
                THREAD.interventions.remove(mode)
    places = {*values, *(Place("attention", layer) for layer in blocks)}
    if missed := [place for place in places if place not in mode.reached]:
        raise RuntimeError(
            f"Nothing was changed in {missed[0]}, because {model_name(model)} did not run it in this thread inside "
            "the `with` block with its own parameters."
        )


class Place(NamedTuple):
    """A part of a model, whose output can be replaced.

    kind: "head", "MLP", "residual stream" or "attention". part: the number of a head, or else tokens. call: index of
    the MLP in a parallel block.
    """

    kind: str
    layer: int
    part: Any = "all"
    call: int = 0

    def __str__(self) -> str:
        where = "the attention pool" if self.layer == POOL else f"layer {self.layer}"
        return f"{self.kind} {self.part} of {where}" if self.kind == "head" else f"the {self.kind} of {where}"


class Intervention(Interception):
    """Passes the outputs at some places to `act`, and replaces them by its results, unless these are None.

    blocks: for each layer, pairs of queries and keys.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: list,
        places: Iterable[Place],
        act: Callable[[Place, Tensor], Tensor | None],
        blocks: Mapping[int, list[tuple[Any, Any]]] | None = None,
    ):
        super().__init__(model, modules)
        self.places, self.act, self.blocks = list(places), act, blocks or {}
        self.thread, self.reached = threading.get_ident(), set()
        self.first = {
            (i, j): sum(head_count(module) for _, module in layer[:j])
            for i, layer in enumerate(modules)
            for j in range(len(layer))
        }

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """In this block the places are seen, those of MLPs and of the residual stream by hooks."""
        with contextlib.ExitStack() as stack:
            for kind, layer, call in dict.fromkeys((p.kind, p.layer, p.call) for p in self.places if p.kind != "head"):
                block = self.family.blocks[layer]
                module = _mlps(block)[call] if kind == "MLP" else block
                stack.enter_context(module.register_forward_hook(self._hook(kind, layer, call)))
            stack.enter_context(self)
            yield

    def attend(self, where, func, query, key, value, mask, **kwargs) -> Tensor:
        index, call, _ = where
        output = func(query, key, value, self._masked(index, query, mask), **kwargs)
        first = self.first.get((index, call), 0)
        for place in self.places:
            if place[:2] == ("head", index) and 0 <= place.part - first < output.shape[1]:
                output = self._changed(place, output, (slice(None), place.part - first))
        return output

    def _hook(self, kind: str, layer: int, call: int) -> Callable:
        def change(_, args: tuple, output: Tensor) -> Tensor:
            if threading.get_ident() == self.thread and THREAD.alone in (None, self):
                for place in self.places:
                    if (place.kind, place.layer, place.call) == (kind, layer, call):
                        output = self._changed(place, output, (slice(None), positions(place.part, self.grid)))
            return output

        return change

    def _changed(self, place: Place, output: Tensor, index: tuple) -> Tensor:
        self.reached.add(place)
        part = output[index]
        value = self.act(place, part)
        if value is None:
            return output
        output = output.clone()
        output[index] = value.to(part).expand(part.shape)
        return output

    def _masked(self, layer: int, query: Tensor, mask: Tensor | None) -> Tensor | None:
        for queries, keys in self.blocks.get(layer, ()):
            self.reached.add(Place("attention", layer))
            seen = torch.ones(self.grid.tokens, self.grid.tokens, dtype=torch.bool, device=query.device)
            rows = torch.tensor(positions(queries, self.grid), dtype=torch.long, device=query.device)
            seen[rows[:, None], positions(keys, self.grid)] = False
            if mask is None or mask.dtype == torch.bool:
                mask = seen if mask is None else mask & seen
            else:
                mask = mask.masked_fill(~seen, -torch.inf)
            if not mask.is_meta and hides_all(mask):
                raise ValueError(f"The block leaves a query of layer {layer} without a visible key, such as itself.")
        return mask


def outputs(model: nn.Module, modules: list, places: Iterable[Place], images: Tensor) -> dict[Place, Tensor]:
    """The model's outputs at these places, each (B, T, K) or (B, tokens, D), in eval mode and without gradients.

    No capture and no intervention of this thread sees, or changes, this forward.
    """
    kept: dict[Place, Tensor] = {}
    reader = Intervention(model, modules, places, kept.__setitem__)
    with torch.no_grad(), evaluating(model), alone(reader), reader.working():
        run(model, images)
    return kept


def positions(tokens: Any, grid: TokenGrid) -> list[int]:
    """Positions in the sequence of the tokens that `intervene` takes. Raises IndexError outside of the grid."""
    if isinstance(tokens, str):
        ends = {"all": (0, grid.tokens), "prefix": (0, grid.prefix), "patches": (grid.prefix, grid.tokens)}
        return list(range(*ends[tokens]))
    if isinstance(tokens, tuple) or not isinstance(tokens, Iterable):
        return [grid.position(tokens)]
    return [grid.position(token) for token in tokens]


def head_places(model: nn.Module, modules: list) -> list[Place]:
    """All heads of a model, the attention pool's last."""
    about = family(model)
    counts = {i: sum(head_count(module) for _, module in layer) for i, layer in enumerate(modules)}
    if about.pool is not None:
        counts[POOL] = head_count(about.pool.module)
    return [Place("head", layer, head) for layer, count in counts.items() for head in range(count)]


def _wishes(model: nn.Module, modules: list, heads: Mapping, mlps: Mapping, residual: Mapping) -> dict[Place, Any]:
    """Replacement for each place."""
    wishes, there = {}, head_places(model, modules)
    for (layer, head), wish in heads.items():
        place = Place("head", POOL if layer == "pool" else _layer(model, layer), head)
        if place not in there:
            raise IndexError(f"There is no {place}: it has {sum(p.layer == place.layer for p in there)} heads.")
        wishes[place] = wish
    for kind, given in (("MLP", mlps), ("residual stream", residual)):
        for key, wish in given.items():
            layer, tokens = key if isinstance(key, tuple) else (key, "all")
            block = family(model).blocks[_layer(model, layer)]
            calls = len(_mlps(block)) if kind == "MLP" else 1
            if not calls:
                raise refuse(model, f"the MLP of layer {layer} is no module of its own")
            wishes |= {Place(kind, layer, tokens, call): wish for call in range(calls)}
    return wishes


def _layer(model: nn.Module, layer: int) -> int:
    if layer not in range(count := len(family(model).blocks)):
        raise IndexError(f"There is no layer {layer!r}: {model_name(model)} has {count} of them, counted from 0.")
    return layer


def _mlps(block: nn.Module) -> list[nn.Module]:
    """The last modules of a block's MLPs: several in one of parallel things, its projection in a parallel block."""
    if hasattr(block, "ffns"):
        return [each.mlp for each in block.ffns]
    return [m for m in (getattr(block, name, None) for name in ("mlp", "mlp_out_proj")) if m is not None]


def _values(model: nn.Module, modules: list, wishes: Mapping[Place, Any], reference) -> dict[Place, Tensor]:
    """The tensor that replaces each place."""
    words = {place: wish for place, wish in wishes.items() if isinstance(wish, str)}
    means, count = {place: 0 for place, word in words.items() if word == "mean"}, 0
    batches = reference.split(AT_ONCE) if isinstance(reference, Tensor) else reference or ()
    for images in batches if means else ():
        require_images(images, model)
        count += len(images)
        for place, part in outputs(model, modules, means, images).items():
            means[place] = means[place] + float64(part).sum(0)
    zero = {place: 0.0 for place, word in words.items() if word == "zero"}
    means = {place: total / count for place, total in means.items()}
    return {place: torch.as_tensor(value) for place, value in {**wishes, **zero, **means}.items()}
