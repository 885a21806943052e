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

    Interventions nest, and the inner one takes precedence. A capture records the attention with its blocked keys, and
    the head's own output rather than its replacement, no matter which of both blocks is the inner one. Only forwards of
    this thread are changed. In this block compiled models run eagerly, in all threads.

    Raises UnsupportedModelError for a model or call that `capture` refuses, IndexError for parts that do not exist, and
    RuntimeError for a part that did not run.
    """
    whole = unwrap(model)
    model = transformer(model)
    modules = attention_modules(model)
    require_capturable(model)
    replacements = _replacements(model, modules, heads or {}, mlps or {}, residual or {})
    blocks = _blocks_by_layer(block or {}, len(modules))
    with eager_mode(), without_checkpointing(model):  # the backward pass may come after the block
        values = _values(model, modules, replacements, reference, whole)

        def replacement(place: Place, output: Tensor) -> Tensor:
            return values[place]

        mode = Intervention(model, modules, values, replacement, blocks)
        with mode.witness.watching(), mode.active():
            THREAD.interventions.append(mode)
            try:
                yield
            finally:
                THREAD.interventions.remove(mode)
    places = {*values, *(Place("attention", layer) for layer in blocks)}
    missed = places - mode.reached
    if missed:
        place = missed.pop()
        reason = "it did not run in this thread inside the `with` block"
        if place.kind in ("head", "attention") and place.layer != POOL:
            calls = range(len(modules[place.layer]))
            reason = mode.witness.reason([(place.layer, call) for call in calls])
        raise RuntimeError(f"Nothing was changed in {place} of {model_name(model)}: {reason}.")


def _blocks_by_layer(block: Mapping, count: int) -> dict[int, list[tuple[Any, Any]]]:
    """Pairs of queries and keys of each layer, from those of single or several layers."""
    blocks = defaultdict(list)
    for layers, pair in block.items():
        if not isinstance(layers, tuple | range):
            layers = [layers]
        for layer in layers:
            blocks[layer_number(count, layer)].append(pair)
    return blocks


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
        if self.kind == "head":
            return f"head {self.part} of {where}"
        return f"the {self.kind} of {where}"


class Intervention(Interception):
    """Calls `act` with the output at each place, and replaces the output by the result, unless that is None.

    blocks: by layer, pairs of queries and keys. reached: the places that ran so far. first_heads: number of the first
    head of each attention call, by (layer, call).
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
        self.places = list(places)
        self.act = act
        self.blocks = blocks or {}
        self.reached: set[Place] = set()
        self.first_heads: dict[tuple[int, int], int] = {}
        for index, layer in enumerate(modules):
            first = 0
            for call, (_, module) in enumerate(layer):
                self.first_heads[index, call] = first
                first += head_count(module)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Call `act` in this block, by hooks for MLPs and the residual stream."""
        outputs: dict[tuple[str, int, int], list[Place]] = defaultdict(list)
        for place in self.places:
            if place.kind != "head":
                outputs[place.kind, place.layer, place.call].append(place)
        hooks = []
        for (kind, layer, call), places in outputs.items():
            block = self.family.blocks[layer]
            module = _mlps(block)[call] if kind == "MLP" else block
            hooks.append((module.register_forward_hook, self._hook(places)))
        with thread_hooks(hooks), self:
            yield

    def attend(self, where, func, query, key, value, mask, **kwargs) -> Tensor:
        index, call, _ = where
        mask = self._add_blocks(index, mask, query.device)
        output = func(query, key, value, mask, **kwargs)
        first = self.first_heads.get((index, call), 0)
        for place in self.places:
            if place.kind != "head" or place.layer != index:
                continue
            head = place.part - first
            if 0 <= head < output.shape[1]:
                output = self._change(place, output, head)
        return output

    def _hook(self, places: list[Place]) -> Callable:
        """Hook of a module that changes its output at these places, which are tokens."""

        def change(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            if THREAD.alone in (None, self):
                for place in places:
                    output = self._change(place, output, positions(place.part, self.grid))
            return output

        return change

    def _change(self, place: Place, output: Tensor, index: int | list[int]) -> Tensor:
        """The output, with the replacement at these indices of its second axis."""
        self.reached.add(place)
        part = output[:, index]
        value = self.act(place, part)
        if value is None:
            return output
        output = output.clone()
        output[:, index] = value.to(part).expand(part.shape)
        return output

    def _add_blocks(self, layer: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """The mask of a layer, without the blocked pairs of queries and keys."""
        tokens = self.grid.tokens
        for queries, keys in self.blocks.get(layer, ()):
            self.reached.add(Place("attention", layer))
            allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
            rows = torch.tensor(positions(queries, self.grid), dtype=torch.long, device=device)
            allowed[rows[:, None], positions(keys, self.grid)] = False
            if mask is None:
                mask = allowed
            elif mask.dtype == torch.bool:
                mask = mask & allowed
            else:
                mask = mask.masked_fill(~allowed, -torch.inf)
            if not mask.is_meta and hides_all(mask):
                raise ValueError(
                    f"The block leaves a query of layer {layer} without a visible key, such as itself."
                )
        return mask


def replaced_places() -> str:
    """Names of up to three parts whose outputs an active `intervene` of this thread replaces, or ""."""
    names = [str(place) for mode in THREAD.interventions for place in mode.places]
    if len(names) > 3:
        names[3:] = [f"{len(names) - 3} more"]
    return ", ".join(names)


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
    with torch.no_grad(), eval_mode(whole), deactivate_others(reader), reader.active():
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
    sums = dict.fromkeys(places, 0)
    count = 0
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
        ranges = {
            "all": range(grid.tokens),
            "prefix": range(grid.prefix),
            "patches": range(grid.prefix, grid.tokens),
        }
        return list(ranges[tokens])
    if isinstance(tokens, tuple) or not isinstance(tokens, Iterable):
        return [grid.position(tokens)]
    return [grid.position(token) for token in tokens]


def head_places(model: nn.Module, modules: list) -> list[Place]:
    """All heads of a model, those of the attention pool last."""
    pool = family(model).pool
    counts = {}
    for index, layer in enumerate(modules):
        counts[index] = sum(head_count(module) for _, module in layer)
    if pool is not None:
        counts[POOL] = head_count(pool.module)
    return [Place("head", layer, head) for layer, count in counts.items() for head in range(count)]


def _replacements(
    model: nn.Module, modules: list, heads: Mapping, mlps: Mapping, residual: Mapping
) -> dict[Place, Any]:
    """Replacement for each place."""
    pairs = _head_replacements(model, modules, heads)
    for key, replacement in mlps.items():
        layer, tokens = _layer_and_tokens(key, len(modules))
        calls = len(_mlps(family(model).blocks[layer]))
        if calls == 0:
            raise refuse(model, f"the MLP of layer {layer} is not a separate module")
        for call in range(calls):
            pairs.append((Place("MLP", layer, tokens, call), replacement))
    for key, replacement in residual.items():
        layer, tokens = _layer_and_tokens(key, len(modules))
        pairs.append((Place("residual stream", layer, tokens), replacement))
    places = [place for place, _ in pairs]
    if len(set(places)) < len(places):
        twice = max(places, key=places.count)
        raise ValueError(f"Each part takes one replacement, got two for {twice}.")
    return dict(pairs)


def _head_replacements(model: nn.Module, modules: list, heads: Mapping) -> list[tuple[Place, Any]]:
    """(head, replacement) for each head. Raises IndexError for heads that do not exist."""
    by_layer_and_head = isinstance(heads, Mapping) and all(
        isinstance(key, tuple) and len(key) == 2 for key in heads
    )
    if not by_layer_and_head:
        raise ValueError('heads must be a mapping by (layer, head), such as {(5, 2): "zero"}.')
    existing = head_places(model, modules)
    pairs = []
    for (layer, head), replacement in heads.items():
        layer = POOL if layer == "pool" else layer_number(len(modules), layer)
        place = Place("head", layer, head)
        if place not in existing:
            count = sum(other.layer == layer for other in existing)
            raise IndexError(f"There is no {place}: it has {count} heads.")
        pairs.append((place, replacement))
    return pairs


def _layer_and_tokens(key: Any, count: int) -> tuple[int, Any]:
    """Number of a layer, and tokens, from a key of `mlps` or `residual`."""
    layer, tokens = key if isinstance(key, tuple) else (key, "all")
    return layer_number(count, layer), tokens


def _mlps(block: nn.Module) -> list[nn.Module]:
    """Modules that return the outputs of a block's MLPs: one, several parallel ones, or none."""
    if hasattr(block, "ffns"):
        return [branch.mlp for branch in block.ffns]
    modules = [getattr(block, name, None) for name in ("mlp", "mlp_out_proj")]
    return [module for module in modules if module is not None]


def _values(
    model: nn.Module, modules: list, replacements: Mapping[Place, Any], reference, whole: nn.Module
) -> dict[Place, Tensor]:
    """The tensor that replaces the output at each place."""
    words = {place: value for place, value in replacements.items() if isinstance(value, str)}
    for word in words.values():
        require_known(word, WORDS, "A replacement that is not a tensor")
    values = dict(replacements)
    for place, word in words.items():
        if word == "zero":
            values[place] = 0.0
    means = [place for place, word in words.items() if word == "mean"]
    if means:
        if isinstance(reference, Tensor):
            reference = reference.split(REFERENCE_BATCH)
        values |= mean_outputs(model, modules, means, reference or (), whole)
    return {place: torch.as_tensor(value) for place, value in values.items()}
