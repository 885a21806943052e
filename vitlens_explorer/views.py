"""Views of an image: a registry of functions that compute a map over the patches and its caption.

Shapes: L layers, H heads, T tokens = R prefix + P patches.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitlens import attention, attribution, faithfulness, stream, tokens
from vitlens.attribution import METHODS, Method
from vitlens.attribution.target import Target
from vitlens.models import preprocess, restore, scores
from vitlens.recorder.forward import eval_mode, run
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.layer import Layer
from vitlens.recorder.supported import family
from vitlens_explorer.page import Check, Control, Panel, scale_of
from vitlens_explorer.photographs import READOUT, Forward
from vitlens_explorer.words import number, percent, say

MEAN, MAX, SUM, EVERY = "mean", "max", "sum", "every"
HEADS = {
    "each": {MEAN: "mean over heads", MAX: "max over heads"},
    "mixed": {MEAN: "mean over heads", MAX: "max over heads"},
    "added": {EVERY: "all heads, all layers", SUM: "all heads in this layer"},
}
"""Head-aggregation choices. Single heads are listed after them, except for "mixed"."""
LOOKS, HOLDS, WRITES, WHY = "look", "hold", "decide", "why"
"""Groups of views: questions of `WORDS`, each with a line."""
POINTS, ORDERS, BASELINE = 14, 8, "mean"
SINK, EVEN = 20.0, 5.0
"""Times the median of received attention, and times an even share of it, beyond which a patch is a sink."""
CLEAR = 2.0
"""Standard deviations of random orders beyond which a score counts as better or worse than chance."""
CELLS = 16
"""Largest number of rows and of columns of a map in the mosaic of all heads."""
LONGEST, LONGEST_MAP = 120.0, 1200.0
"""Longest time in seconds of a score and of a map. Longer ones are only estimated."""


@dataclass(frozen=True)
class Likeness:
    """Similarity to a text or to another image as a target. number: number of the photograph."""

    name: str
    number: int | None = None
    image: Image.Image | None = field(default=None, compare=False, repr=False)

    def question(self, forward: Forward) -> object:
        """The target for `vitlens.attribution`."""
        if self.image is None:
            return attribution.text(self.name)
        batch = preprocess(forward.model, self.image, size=tuple(forward.batch.shape[-2:]))
        return attribution.like(batch.to(forward.batch), name=f"“{self.name}”")


@dataclass(frozen=True)
class Choice:
    """Settings of a view.

    layer: from 0. head: a number, or a combination of `HEADS`. query: READOUT, the position of a prefix token, or
    (row, column) of a patch. target: the class to explain, or a `Likeness`. against: the class to contrast it with.
    """

    layer: int = 0
    head: int | str = MEAN
    query: str | int | tuple[int, int] = READOUT
    target: int | Likeness | None = None
    against: int | None = None

    def question(self, forward: Forward) -> object:
        """The target for `vitlens.attribution`."""
        return self.target.question(forward) if isinstance(self.target, Likeness) else self.target


@dataclass(frozen=True)
class Map:
    """A drawn view. values: (rows, cols), or (rows, cols, 3) for three color channels. words: caption without its final
    period. limit: end of a fixed color scale. unit: unit of the values. title: replaces the view's. beside: charts next
    to the image for the front end. prefix: weights of the prefix tokens. sinks: patches to mark. arrays: further
    arrays to save."""

    values: np.ndarray
    words: str
    limit: float | None = None
    unit: str = ""
    title: str = ""
    beside: dict = field(default_factory=dict)
    prefix: tuple[float, ...] = ()
    sinks: tuple[tuple[int, int], ...] = ()
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """A view.

    title: title above the image. make: (forward, choice, check) → Map. Calls `check` during long work. group: group in
    the menu. entry: name in the menu if it differs from the title. query: True if the map depends on the query. head: a
    key of `HEADS`, or "" without heads. layered: True for maps of a layer. explains: True for maps of a class.
    contrasts: True if a contrast class is possible. slow: True for the long lane. forwards: number of forwards of a
    map, 0 if unknown.
    """

    title: str
    make: Callable[[Forward, Choice, Check], Map]
    group: str = LOOKS
    entry: str = ""
    query: bool = False
    head: str = ""
    layered: bool = True
    explains: bool = False
    contrasts: bool = False
    slow: bool = False
    forwards: Callable[[Forward], int] = lambda forward: 0

    @property
    def attributes(self) -> bool:
        """True for attribution methods, which also take a `Likeness` and have a score."""
        return self.explains and not self.layered

    def heads(self, count: int) -> dict[str | int, str]:
        """Names of the head choices for `count` heads."""
        single = {} if self.head == "mixed" else {head: str(head) for head in range(count)}
        return HEADS[self.head or "each"] | single

    def fitted(self, head: str | int, count: int) -> str | int:
        """The head if this view has it, else the first choice."""
        choices = self.heads(count)
        return head if head in choices else next(iter(choices))


class Layers(Sequence):
    """Layers of a capture that call `check` on access."""

    def __init__(self, forward: Forward, layers: slice, check: Check):
        self.layers, self.grid, self.model_name, self.check = (
            forward.attn[layers],
            forward.grid,
            forward.name,
            check,
        )

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> Layer:
        self.check()
        return self.layers[index]


def until(model: nn.Module, check: Check) -> contextlib.AbstractContextManager[None]:
    """Context that calls check(images) before each forward of the model in this thread. The hook is on the patch
    embedding, because `forward_features` skips the head."""
    return thread_hooks(
        [(family(model).embedding.register_forward_pre_hook, lambda _, args: check(len(args[0])))]
    )


def query_row(forward: Forward, query: str | int | tuple[int, int]) -> Tensor:
    """Weights (T,) of the tokens of a query, one-hot for a token. Raises ValueError for a read-out that is not a
    weighted sum of tokens."""
    if query == READOUT:
        if forward.grid.readout is None:
            raise ValueError(
                f"{forward.name} has no read-out as a query, because its head's input is not a weighted sum of tokens. "
                "Choose a patch or another token."
            )
        return forward.grid.readout.float().reshape(-1, forward.grid.tokens)[0].cpu()
    row = torch.zeros(forward.grid.tokens)
    row[forward.grid.position(query)] = 1.0
    return row


def query_words(forward: Forward, query: str | int | tuple[int, int]) -> str:
    """Name of a query for captions."""
    if query == READOUT:
        return say("readout", readout=forward.readout)
    if isinstance(query, tuple):
        return say("patch", row=query[0], column=query[1])
    return say("token", token=forward.prefix[query])


def _fused(values: Tensor, head: int | str) -> Tensor:
    """Values of one head of (H, …), or the mean or maximum over heads."""
    return values.mean(0) if head == MEAN else values.amax(0) if head == MAX else values[head]


def _head_words(head: int | str) -> str:
    return say(head) if head in (MEAN, MAX) else say("head", head=head)


def _prefix_words(forward: Forward) -> str:
    prefix = forward.prefix
    return say("token", token=prefix[0]) if len(prefix) == 1 else say("prefix", count=len(prefix))


def _gate_words(forward: Forward) -> str:
    """Note about gated attention, whose gate is not part of the map."""
    return say("gated") if forward.gated else ""


def _attention(forward: Forward, choice: Choice, check: Check) -> Map:
    row = query_row(forward, choice.query)
    weights = _fused(forward.attn[choice.layer].read(row)[0], choice.head).cpu()
    source = query_words(forward, choice.query)
    if row.count_nonzero() > 1:
        source = say("averaged", source=source)
    words = say("attention", source=source, layer=choice.layer, heads=_head_words(choice.head))
    if forward.grid.prefix and choice.head != MAX:
        rest = weights[: forward.grid.prefix].sum()
        words += say(
            "attention prefix",
            share=percent(rest),
            rest=percent(1 - rest),
            prefix=_prefix_words(forward),
        )
    elif forward.grid.prefix:
        words += say("not rescaled")
    prefix = tuple(weights[: forward.grid.prefix].tolist())
    unit = say("attention unit")
    return Map(
        forward.grid.image_map(weights).numpy(),
        words + _gate_words(forward),
        unit=unit,
        prefix=prefix,
    )


def _received(forward: Forward, choice: Choice, check: Check) -> Map:
    layer = Layers(forward, slice(choice.layer, choice.layer + 1), check)
    values = _fused(attention.received(layer, prefix=True)[0, 0].float().cpu(), choice.head)
    words = say("received", layer=choice.layer, heads=_head_words(choice.head))
    words += say("not rescaled") * bool(forward.grid.prefix) + _gate_words(forward)
    return Map(forward.grid.image_map(values).numpy(), words, unit=say("attention unit"))


def _rollout(forward: Forward, choice: Choice, check: Check) -> Map:
    row = query_row(forward, choice.query)  # raises for a missing read-out
    query = None if choice.query == READOUT else int(row.argmax())
    layers = Layers(forward, slice(choice.layer + 1), check)
    values = attention.rollout(layers, query=query, head_fusion=choice.head)[0].float().cpu()
    source = query_words(forward, choice.query)
    words = say("rollout", source=source, layer=choice.layer, heads=_head_words(choice.head))
    if forward.grid.prefix:
        words += say(
            "rollout prefix",
            share=percent(1 - values.sum()),
            rest=percent(values.sum()),
            prefix=_prefix_words(forward),
        )
    prefix = (1 - values.sum().item(),) if forward.grid.prefix == 1 else ()
    return Map(
        values.numpy(), words + _gate_words(forward), unit=say("rollout unit"), prefix=prefix
    )


def _similarity(forward: Forward, choice: Choice, check: Check) -> Map:
    cosines = tokens.similarity(
        forward.tokens[choice.layer][0].float().cpu(), query_row(forward, choice.query)
    )
    words = say("similarity", layer=choice.layer, source=query_words(forward, choice.query))
    values = forward.grid.image_map(cosines).numpy()
    return Map(values, words, limit=farthest(values, choice.query), unit=say("similarity unit"))


def farthest(values: np.ndarray, query: str | int | tuple[int, int]) -> float:
    """Largest absolute value of a map besides that of the query patch, which is 1 for cosines."""
    others = np.abs(values)
    if isinstance(query, tuple) and values.size > 1:
        others[query] = 0
    return float(others.max())


@torch.inference_mode()
def sinks(forward: Forward, layer: int, check: Check) -> list[tuple[int, int]]:
    """Patches (row, column) that receive more than `SINK` times the median attention of the patches in a layer and more
    than `EVEN` times an even share, as the mean over heads and queries."""
    one = Layers(forward, slice(layer, layer + 1), check)
    received = forward.grid.image_map(
        attention.received(one, prefix=True)[0, 0].float().mean(0).cpu()
    )
    least = max(SINK * received.median(), EVEN / forward.grid.tokens)
    return list(map(tuple, (received > least).nonzero().tolist()))


def _components(forward: Forward, choice: Choice, check: Check) -> Map:
    patches = forward.tokens[choice.layer][0, forward.grid.prefix :]
    scores, variance = tokens.components(patches.float().cpu())
    words = say("components", layer=choice.layer, shares=", ".join(map(percent, variance)))
    return Map(
        tokens.colors(scores).unflatten(0, (forward.grid.rows, forward.grid.cols)).numpy(), words
    )


def _norms(forward: Forward, choice: Choice, check: Check) -> Map:
    lengths = tokens.norms(forward.tokens[choice.layer][0].float().cpu())
    median = lengths[forward.grid.prefix :].quantile(0.5)
    words = say("norms", layer=choice.layer, median=number(median))
    if forward.prefix:
        words += say("norms prefix", token=forward.prefix[0], length=number(lengths[0]))
    return Map(forward.grid.image_map(lengths).numpy(), words, unit=say("norms unit"))


def by_layer(
    forward: Forward, query: str | int | tuple[int, int], check: Check
) -> list[tuple[float, int]]:
    """(probability, class number) of the most probable class after each layer, by the raw lens at the query."""
    best = []
    for layer_tokens in forward.tokens:
        check()
        if query == READOUT:
            logits = family(forward.model).head(layer_tokens)
        else:
            logits = stream.read_each(
                forward.model, layer_tokens[:, [forward.grid.position(query)]]
            )[:, 0]
        share, target = scores(forward.model, logits[0]).float().max(0)
        best.append((share.item(), target.item()))
    return best


@torch.inference_mode()
def _lens(forward: Forward, choice: Choice, check: Check) -> Map:
    if any(layer == "pool" for layer, _ in forward.off):
        raise ValueError("The logit lens needs all heads of the attention pool. Turn them on.")
    target, layer, query = choice.target, choice.layer, choice.query
    with eval_mode(forward.model):
        shares = scores(forward.model, stream.read_each(forward.model, forward.tokens[layer])[0])[
            :, target
        ].float()
        top, classes = zip(*by_layer(forward, query, check), strict=True)
    quantity = say("value" if forward.outputs == "value" else "probability")
    who = (
        say("lens readout", readout=forward.readout)
        if query == READOUT
        else query_words(forward, query)
    )
    who = who[0].upper() + who[1:]
    words = say(
        "lens",
        layer=layer,
        quantity=quantity,
        name=forward.label(target),
        who=who,
        best=forward.label(classes[layer]),
        score=forward.score_words(top[layer]),
    )
    lens = {
        "title": say("lens title", who=who),
        "layer": layer,
        "rows": [
            {
                "layer": k,
                "name": forward.label(c),
                "share": top[k],
                "plain": forward.outputs == "value",
            }
            for k, c in enumerate(classes)
        ],
        "note": say("lens note"),
    }
    arrays = {"classes": np.array(classes), "shares": np.array(top)}
    return Map(
        forward.grid.image_map(shares.cpu()).numpy(),
        words,
        unit=quantity,
        beside={"lens": lens},
        arrays=arrays,
    )


def _contributions(forward: Forward, choice: Choice, check: Check) -> Map:
    target, against = choice.target, choice.against
    if any(not isinstance(value, str) for value in forward.off.values()):
        raise ValueError(say("not additive"))
    if (target, against) not in forward.written:
        with until(forward.model, check), forward.switched():
            forward.written[target, against] = stream.contributions_by_token(
                forward.model, forward.batch, target, against
            )
    parts, written = forward.written[target, against]
    logit, written, layer, head = (
        parts.logits[0].item(),
        written[0].float().cpu(),
        choice.layer,
        choice.head,
    )
    chosen = written if head == EVERY else written[layer] if head == SUM else written[layer, head]
    sums = chosen.reshape(-1, forward.grid.tokens).sum(0)
    whose = {EVERY: say("all layers"), SUM: say("all heads", layer=layer)}
    minus = "" if against is None else say("minus", name=forward.label(against))
    prefix = forward.grid.prefix
    signed = [
        ("+" if value >= 0 else "") + number(value)
        for value in (sums[prefix:].sum(), sums[:prefix].sum())
    ]
    words = say(
        "contributions",
        whose=whose.get(head) or say("one head", head=head, layer=layer),
        name=forward.label(target),
        minus=minus,
        patches=signed[0],
    )
    if prefix:
        words += say("contributions prefix", share=signed[1], prefix=_prefix_words(forward))
    words += say("contributions logit", logit=number(logit))
    numbers = {
        name: getattr(parts, name)[0].float().cpu()
        for name in ("heads", "mlps", "embedding", "pool", "biases")
    }
    others = [key for key in ("embedding", "pool", "biases") if key != "pool" or numbers["pool"]]
    chart = {
        "title": say("parts" if against is None else "parts difference"),
        "heads": numbers["heads"].tolist(),
        "mlps": numbers["mlps"].tolist(),
        "others": [[say(key), numbers[key].item()] for key in others],
        "layer": None if head == EVERY else layer,
        "head": head if isinstance(head, int) else None,
        "note": say("parts note", logit=number(logit)),
    }
    arrays = {name: part.numpy() for name, part in numbers.items()} | {"logits": np.array(logit)}
    unit = say("contributions unit")
    return Map(
        forward.grid.image_map(sums).numpy(),
        words,
        unit=unit,
        beside={"parts": chart},
        arrays=arrays,
    )


def _called(forward: Forward, target: int | Likeness) -> str:
    """Name of a target for captions, a class with its probability."""
    if isinstance(target, Likeness):
        return say("likeness", name=target.name)
    return say(
        "class", name=forward.label(target), score=forward.score_words(forward.share(target))
    )


@functools.cache
def explaining(method: Method) -> View:
    """View of an attribution method."""
    begin = method.title[0].upper() + method.title[1:]
    slow = method.needs in ("pixels", "patches")
    times = next(
        (o.default for name, o in method.options.items() if slow and name == "n_steps"), None
    )

    def forwards(forward: Forward) -> int:
        return method.forwards_per_patch * forward.grid.patches or times or 0

    def make(forward: Forward, choice: Choice, check: Check) -> Map:
        count = method.forwards_per_patch and forwards(forward)
        if count and (duration := count * seconds(forward)) > LONGEST_MAP:
            raise ValueError(
                f"{begin} takes {count:,} forwards, here about {duration / 60:,.0f} minutes. Choose a "
                f"smaller size, or run `vitlens explain --methods {method.name}`."
            )
        with until(forward.model, check), forward.switched():
            values = method(
                forward.model, forward.batch, choice.question(forward), against=choice.against
            )[0]
        values = values.detach().float().cpu().numpy()
        if not method.depends_on_target:
            return Map(values, begin)
        words = say("for", method=begin, target=_called(forward, choice.target))
        if choice.against is not None:
            words += say("rather than", target=_called(forward, choice.against))
        similar = isinstance(choice.target, Likeness)
        return Map(values, words, title=say("why similar", method=method.title) if similar else "")

    return View(
        say("why", method=method.title) if method.depends_on_target else begin,
        make,
        group=WHY,
        entry=begin,
        layered=False,
        explains=True,
        contrasts=True,
        slow=slow,
        forwards=forwards,
    )


VIEWS = {
    "attention": View(
        "Attention from the query", _attention, entry="Attention", query=True, head="each"
    ),
    "received": View("Attention received", _received, entry="Received", head="each"),
    "rollout": View("Rollout from the query", _rollout, entry="Rollout", query=True, head="mixed"),
    "similarity": View(
        "Token similarity to the query", _similarity, HOLDS, "Similarity", query=True
    ),
    "components": View("Principal components of tokens", _components, HOLDS, "Components"),
    "norms": View("Token norms", _norms, HOLDS, "Norms"),
}
"""Views of a layer without a class."""
INSIDE = {
    "lens": View(
        "Logit lens: which patches already predict the class",
        _lens,
        WHY,
        "Prediction by layer (logit lens)",
        query=True,
        explains=True,
    ),
    "contributions": View(
        "What heads contribute to the class",
        _contributions,
        WRITES,
        "Contributions",
        head="added",
        explains=True,
        contrasts=True,
    ),
}
"""Views of a layer for a class."""


def views() -> dict[str, View]:
    """All views by name: those of a layer, and one for each registered attribution method."""
    methods = {name: explaining(method) for name, method in METHODS.items() if name not in VIEWS}
    return VIEWS | methods | INSIDE


def possible(forward: Forward) -> dict[str, View]:
    """Views that a model supports, with respect to its classes and read-out."""
    readable, embedded = forward.grid.readout is not None, forward.logits.dim() == 1
    return {
        name: view
        for name, view in views().items()
        if not view.explains
        or (forward.likeliest or (view.attributes and embedded))
        and (view.layered or readable or "query" not in METHODS[name].options)
    }


def view_control(view: str, rows: dict[str, View]) -> Control:
    """Views by the question that they answer."""
    groups = [
        group
        for group in (LOOKS, HOLDS, WRITES, WHY)
        if any(row.group == group for row in rows.values())
    ]
    entries = [
        (row.entry or row.title, name)
        for group in groups
        for name, row in rows.items()
        if row.group == group
    ]
    count = lambda group: sum(row.group == group for row in rows.values())  # noqa: E731
    questions = tuple(
        (say(f"question {group}"), count(group), say(f"line {group}")) for group in groups
    )
    return Control("view", "View", "questions", view, tuple(entries), questions, place="top")


def head_control(
    forward: Forward, view: View, head: str | int, name: str = "head", label: str = "Head", **more
) -> Control:
    choices = tuple((text, value) for value, text in view.heads(forward.heads).items())
    return Control(
        name,
        label,
        "range",
        view.fitted(head, forward.heads),
        choices,
        hidden=not view.head,
        **more,
    )


def map_panel(
    forward: Forward,
    view: View,
    choice: Choice,
    shown: Map,
    state: dict,
    *,
    name: str = "picture",
    title: str = "",
) -> Panel:
    """Panel of a map over its image, with its caption."""
    grid, values, scale, words = forward.grid, shown.values, None, shown.words + "."
    if values.ndim == 2:
        scale = scale_of(values, cmap=state["colors"], stretch=state["stretch"], limit=shown.limit)
        words += say("range", low=number(values.min()), high=number(values.max()))
    words += say("input", height=grid.image[0], width=grid.image[1])
    for cut, padded, side in zip(grid.cut, grid.padded, ("bottom", "right"), strict=True):
        words += say("cut", pixels=cut, where=say(side)) if cut else ""
        words += say("padded", pixels=padded, where=say(side)) if padded else ""
    found = shown.sinks if scale else ()
    unit = (
        say("similarity scale", unit=shown.unit)
        if shown.limit and not state["stretch"]
        else shown.unit
    )
    if found:
        words += say("sinks", count=len(found), times=number(SINK), even=number(EVEN))
    if hidden := bool(found) and state.get("sinks", False) and not state["stretch"]:
        others = values.copy()
        others[tuple(zip(*found, strict=True))] = 0
        scale, unit = scale_of(others, cmap=state["colors"]), say("hidden", unit=unit)
    return Panel(
        sinks=tuple(found),
        hides=hidden,
        name=name,
        title=title or shown.title or view.title,
        picture=name,
        rows=grid.rows,
        cols=grid.cols,
        cell=(grid.patch[0] / grid.image[0], grid.patch[1] / grid.image[1]),
        words=words,
        selected=choice.query if view.query and isinstance(choice.query, tuple) else None,
        picks=say("look from") if view.query else "",
        values=values,
        scale=scale,
        unit=shown.unit,
        legend=unit,
        strength=state["strength"],
        opacity=state["opacity"],
        smooth=state["smooth"],
        lines=state["lines"],
        ends=scale and (number(scale.low), number(scale.high)),
    )


@torch.inference_mode()
def head_maps(
    forward: Forward, query: str | int | tuple[int, int], check: Check
) -> tuple[np.ndarray, np.ndarray]:
    """Attention from a query as (L, 2 + H, r, c) uint8, and the largest weight (L, 2 + H) on a patch, which is 255.

    The mean and the maximum over heads come before the heads. Grids beyond `CELLS` rows or columns show the largest
    weight of each block.
    """
    row, maps = query_row(forward, query), []
    for layer in Layers(forward, slice(None), check):
        heads = forward.grid.image_map(layer.read(row)[0].float().cpu())
        maps.append(torch.cat([heads.mean(0, keepdim=True), heads.amax(0, keepdim=True), heads]))
    maps = torch.stack(maps)
    tops = maps.amax((-2, -1))
    size = [min(side, CELLS) for side in maps.shape[-2:]]
    tiles = torch.nn.functional.adaptive_max_pool2d(maps, size) / tops[..., None, None].clamp(
        min=1e-30
    )
    return (tiles * 255).round().byte().numpy(), tops.numpy()


@torch.inference_mode()
def mean_distance(forward: Forward, check: Check) -> np.ndarray:
    """Mean attention distance (L, H) in input pixels."""
    return attention.mean_distance(Layers(forward, slice(None), check))[0].float().cpu().numpy()


def seconds(forward: Forward) -> float:
    """Seconds of the faster of two forwards, after a warm-up by the capture."""
    times = [time.perf_counter()]
    for _ in range(2):
        with eval_mode(forward.model), torch.inference_mode():
            run(forward.model, forward.batch).cpu()
        times.append(time.perf_counter())
    return min(np.diff(times))


def curve_forwards(forward: Forward, maps: int) -> int:
    """Number of forwards of the `curves` of some maps."""
    between = (
        len(range(0, patches := forward.grid.patches, faithfulness.usual_step(patches, POINTS))) - 1
    )
    return 2 + 2 * maps * between


def curves(
    forward: Forward, choice: Choice, maps: Tensor | None, check: Check, longest: float = LONGEST
) -> np.ndarray | str:
    """Deletion and insertion curves (2, maps, S) of maps (maps, rows, cols), default of random orders of the patches.
    Random orders that would take more than `longest` seconds return a message instead."""
    grid, step = forward.grid, faithfulness.usual_step(forward.grid.patches, POINTS)
    if maps is None:
        maps = faithfulness.random_maps(grid, ORDERS)
        if (duration := 2 * POINTS * (1 + ORDERS) * seconds(forward)) > longest:
            return say("too long", minutes=f"{duration / 60:.0f}")
    with until(forward.model, check), forward.switched():
        both = faithfulness.curves(
            forward.model,
            forward.batch,
            maps[:, None].to(forward.batch.device),
            choice.question(forward),
            against=choice.against,
            baseline=BASELINE,
            step=step,
            grid=grid,
        )
    return torch.stack([both.deletion[:, 0], both.insertion[:, 0]]).float().cpu().numpy()


def covering(forward: Forward, choice: Choice, values: np.ndarray) -> dict:
    """Patches in the order in which `curves` of a map cover them, levels of a covered patch, and name of the score."""
    name = say("likeness", name=choice.target.name) if isinstance(choice.target, Likeness) else ""
    name = name or forward.label(choice.target)
    if choice.against is not None:
        name += say("rather than", target=forward.label(choice.against))
    blank = faithfulness.blank(forward.batch, BASELINE, forward.grid)[..., :1, :1]
    order = faithfulness.order(torch.from_numpy(values)).tolist()
    return {"name": name, "order": order, "fill": restore(forward.model, blank)[0, 0, 0].tolist()}


def score(forward: Forward, choice: Choice, own: np.ndarray, random: np.ndarray) -> dict:
    """Score of a map for the front end. own, random: `curves` of the map and of random orders."""
    patches = forward.grid.patches
    counts = torch.tensor([*range(0, patches, faithfulness.usual_step(patches, POINTS)), patches])
    mine, others = (
        faithfulness.Curves(counts, *map(torch.from_numpy, pair)) for pair in (own[:, 0], random)
    )
    gain, gains = (
        mine.insertion_area - mine.deletion_area,
        others.insertion_area - others.deletion_area,
    )
    sigmas = ((gain - gains.mean()) / gains.std()).item()
    chance = "better" if sigmas >= CLEAR else "worse" if sigmas <= -CLEAR else "no better"
    verdict = say("above" if sigmas >= 0 else "below", sigmas=number(abs(sigmas)), orders=ORDERS)
    measures = Target(against=choice.against, outputs=forward.outputs).measures
    alike = isinstance(choice.target, Likeness)
    return {
        "verdict": say(chance),
        "short": say("sigmas", sigmas=number(sigmas)),
        "scale": "cosine" if alike else next(iter(measures.values())).removeprefix("the "),
        "shares": (counts / patches).tolist(),
        "curves": {
            "deletion": own[0, 0].tolist(),
            "insertion": own[1, 0].tolist(),
            "random deletion": random[0].mean(0).tolist(),
            "random insertion": random[1].mean(0).tolist(),
        },
        "words": say(
            "score",
            baseline=faithfulness.BASELINES[BASELINE],
            deletion=number(mine.deletion_area.item()),
            insertion=number(mine.insertion_area.item()),
            verdict=verdict if np.isfinite(sigmas) else say("equal"),
        ),
    }
