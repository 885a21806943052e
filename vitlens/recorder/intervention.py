"""Switch off or replace parts of a model while it runs.

An `Interception` changes heads and attention where fused attention is called. Forward hooks, active in one thread,
change MLPs and the residual stream. No module is patched, and the model is unchanged afterwards.

Shapes: B batch, H heads, T tokens = R prefix + P patches, D width, K head width.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitlens.names import require_known
from vitlens.recorder.forward import (
    eager_mode,
    eval_mode,
    require_images,
    run,
    without_checkpointing,
)
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.interception import POOL, THREAD, Interception, deactivate_others, hides_all
from vitlens.recorder.layer import layer_number
from vitlens.recorder.precision import to_float64
from vitlens.recorder.supported import (
    UnsupportedModelError,
    attention_modules,
    family,
    head_count,
    model_name,
    refuse,
    require_capturable,
    transformer,
    unwrap,
)

WORDS = ("zero", "mean")
REFERENCE_BATCH = 64


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
    """Switch off or replace parts of a Vision Transformer in this block.

    >>> with torch.no_grad(), vitlens.intervene(model, heads={(11, 0): "zero"}, mlps={3: "mean"}, reference=images):
    ...     changed = model(images)

    model: a supported model, or a module that contains exactly one and runs it.
    heads: by (layer, head), the replacement for the head's output A·V, (B, T, K), before the output projection and
    before any norm or gate in between. The layer of an attention pool is "pool". Heads of a parallel block are numbered
    as in `capture`.
    mlps: by layer or (layer, tokens), the replacement for the output of the MLP, (B, T, D), before LayerScale or a norm
    that follows. In a parallel block, it replaces the output of each MLP.
    residual: by layer or (layer, tokens), the replacement for the tokens after the layer, (B, T, D).

    A replacement is "zero", "mean" (over the reference images, at each token position), or a tensor that expands to the
    shape above, with as many tokens as are named.

    block: by layer or a tuple of layers, (queries, keys): the logits of these queries and keys become −∞, so their
    attention is 0.
    tokens, queries, keys: a position, a patch (row, column), a list of these, or "all", "prefix" or "patches".
    reference: images (N, C, height, width), or batches of them, with as many tokens as the images that run. They run
    once before the block, in eval mode and without any intervention. A module that runs its Vision Transformer several
    times, or with other images, has no mean.

    Interventions nest, and the inner one takes precedence. A capture, inside or outside, records the attention with
    its blocked keys, and the head's own output rather than its replacement. Only forwards of this thread are changed.
    In this block compiled models run eagerly, in all threads.

    Raises UnsupportedModelError for a model or call that `capture` refuses, IndexError for parts that do not exist, and
    RuntimeError for a part that did not run.
    """
    whole, model = unwrap(model), transformer(model)
    modules = attention_modules(model)
    require_capturable(model)
    replacements = _replacements(model, modules, heads or {}, mlps or {}, residual or {})
    blocks = defaultdict(list)
    for layers, pair in (block or {}).items():
        for layer in layers if isinstance(layers, tuple | range) else [layers]:
            blocks[layer_number(len(modules), layer)].append(pair)
    with eager_mode(), without_checkpointing(model):  # the backward pass may come after the block
        values = _values(model, modules, replacements, reference, whole)
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
    """A part of a model whose output can be replaced.

    kind: "head", "MLP", "residual stream" or "attention". part: number of the head, or tokens. call: index of the MLP
    in a parallel block.
    """

    kind: str
    layer: int
    part: Any = "all"
    call: int = 0

    def __str__(self) -> str:
        where = "the attention pool" if self.layer == POOL else f"layer {self.layer}"
        return (
            f"{self.kind} {self.part} of {where}"
            if self.kind == "head"
            else f"the {self.kind} of {where}"
        )


class Intervention(Interception):
    """Calls `act` with the output at each place, and replaces the output by the result, unless that is None.

    blocks: by layer, pairs of queries and keys.
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
        self.reached = set()
        self.first = {
            (i, j): sum(head_count(module) for _, module in layer[:j])
            for i, layer in enumerate(modules)
            for j in range(len(layer))
        }

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Call `act` in this block, by hooks for MLPs and the residual stream."""
        hooks = []
        for kind, layer, call in dict.fromkeys(
            (p.kind, p.layer, p.call) for p in self.places if p.kind != "head"
        ):
            block = self.family.blocks[layer]
            module = _mlps(block)[call] if kind == "MLP" else block
            hooks.append((module.register_forward_hook, self._hook(kind, layer, call)))
        with thread_hooks(hooks), self:
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
            if THREAD.alone in (None, self):
                for place in self.places:
                    if (place.kind, place.layer, place.call) == (kind, layer, call):
                        output = self._changed(
                            place, output, (slice(None), positions(place.part, self.grid))
                        )
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
            seen = torch.ones(
                self.grid.tokens, self.grid.tokens, dtype=torch.bool, device=query.device
            )
            rows = torch.tensor(
                positions(queries, self.grid), dtype=torch.long, device=query.device
            )
            seen[rows[:, None], positions(keys, self.grid)] = False
            if mask is None or mask.dtype == torch.bool:
                mask = seen if mask is None else mask & seen
            else:
                mask = mask.masked_fill(~seen, -torch.inf)
            if not mask.is_meta and hides_all(mask):
                raise ValueError(
                    f"The block leaves a query of layer {layer} without a visible key, such as itself."
                )
        return mask


def outputs(
    model: nn.Module,
    modules: list,
    places: Iterable[Place],
    images: Tensor,
    whole: nn.Module | None = None,
) -> dict[Place, Tensor]:
    """Outputs of the model at these places, each (B, T, K) or (B, tokens, D), in eval mode and without gradients.

    whole: the module to run, which contains the model. Captures and interventions of this thread ignore this forward.
    Raises UnsupportedModelError unless it runs the model once, with all images.
    """
    kept: dict[Place, Tensor] = {}
    whole = model if whole is None else whole

    def keep(place: Place, part: Tensor) -> None:
        if place in kept or len(part) != len(images):
            times = "again" if place in kept else f"with {len(part)} of {len(images)} images"
            raise UnsupportedModelError(
                f"A mean needs one run of the Vision Transformer with all images, but {model_name(whole)} ran it "
                f"{times}. Give the Vision Transformer itself."
            )
        kept[place] = part

    reader = Intervention(model, modules, places, keep)
    with torch.no_grad(), eval_mode(whole), deactivate_others(reader), reader.working():
        run(whole, images)
    return kept


def mean_outputs(
    model: nn.Module,
    modules: list,
    places: Iterable[Place],
    batches: Iterable[Tensor],
    whole: nn.Module | None = None,
) -> dict[Place, Tensor]:
    """Mean over all images of the `outputs` at these places. Raises ValueError without images."""
    sums, count = dict.fromkeys(places, 0), 0
    for images in batches:
        require_images(images, model if whole is None else whole)
        for place, part in outputs(model, modules, sums, images, whole).items():
            sums[place] = sums[place] + to_float64(part).sum(0)
        count += len(images)
    if not count:
        raise ValueError(
            'The replacement "mean" is a mean over reference images. Give reference=images.'
        )
    return {place: total / count for place, total in sums.items()}


def positions(tokens: Any, grid: TokenGrid) -> list[int]:
    """Positions in the sequence of tokens as `intervene` takes them. Raises IndexError outside the grid."""
    if isinstance(tokens, str):
        ends = {
            "all": (0, grid.tokens),
            "prefix": (0, grid.prefix),
            "patches": (grid.prefix, grid.tokens),
        }
        return list(range(*ends[tokens]))
    if isinstance(tokens, tuple) or not isinstance(tokens, Iterable):
        return [grid.position(tokens)]
    return [grid.position(token) for token in tokens]


def head_places(model: nn.Module, modules: list) -> list[Place]:
    """All heads of a model, those of the attention pool last."""
    pool = family(model).pool
    counts = {i: sum(head_count(module) for _, module in layer) for i, layer in enumerate(modules)}
    if pool is not None:
        counts[POOL] = head_count(pool.module)
    return [Place("head", layer, head) for layer, count in counts.items() for head in range(count)]


def _replacements(
    model: nn.Module, modules: list, heads: Mapping, mlps: Mapping, residual: Mapping
) -> dict[Place, Any]:
    """Replacement for each place."""
    replacements, existing = [], head_places(model, modules)
    if not isinstance(heads, Mapping) or not all(
        isinstance(key, tuple) and len(key) == 2 for key in heads
    ):
        raise ValueError('heads must be a mapping by (layer, head), such as {(5, 2): "zero"}.')
    for (layer, head), replacement in heads.items():
        place = Place("head", POOL if layer == "pool" else layer_number(len(modules), layer), head)
        if place not in existing:
            raise IndexError(
                f"There is no {place}: it has {sum(p.layer == place.layer for p in existing)} heads."
            )
        replacements.append((place, replacement))
    for kind, given in (("MLP", mlps), ("residual stream", residual)):
        for key, replacement in given.items():
            layer, tokens = key if isinstance(key, tuple) else (key, "all")
            layer = layer_number(len(modules), layer)
            block = family(model).blocks[layer]
            calls = len(_mlps(block)) if kind == "MLP" else 1
            if not calls:
                raise refuse(model, f"the MLP of layer {layer} is not a separate module")
            replacements += [
                (Place(kind, layer, tokens, call), replacement) for call in range(calls)
            ]
    places = [place for place, _ in replacements]
    if len({*places}) < len(places):
        raise ValueError(
            f"Each part takes one replacement, got two for {max(places, key=places.count)}."
        )
    return dict(replacements)


def _mlps(block: nn.Module) -> list[nn.Module]:
    """Modules that return the outputs of a block's MLPs: one, several parallel ones, or none."""
    if hasattr(block, "ffns"):
        return [branch.mlp for branch in block.ffns]
    return [
        m for m in (getattr(block, name, None) for name in ("mlp", "mlp_out_proj")) if m is not None
    ]


def _values(
    model: nn.Module, modules: list, replacements: Mapping[Place, Any], reference, whole: nn.Module
) -> dict[Place, Tensor]:
    """The tensor that replaces the output at each place."""
    words = {place: value for place, value in replacements.items() if isinstance(value, str)}
    for word in words.values():
        require_known(word, WORDS, "A replacement that is not a tensor")
    values = {**replacements} | {place: 0.0 for place, word in words.items() if word == "zero"}
    if means := [place for place, word in words.items() if word == "mean"]:
        batches = (
            reference.split(REFERENCE_BATCH) if isinstance(reference, Tensor) else reference or ()
        )
        values |= mean_outputs(model, modules, means, batches, whole)
    return {place: torch.as_tensor(value) for place, value in values.items()}
