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
from vitlens.plot.scales import ATTENTION, UNIFORM, as_drawn
from vitlens.recorder.forward import eval_mode, run
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.layer import Layer
from vitlens.recorder.supported import family
from vitlens_explorer.controls import Control
from vitlens_explorer.lanes import Check
from vitlens_explorer.photographs import READOUT, Forward, shown_by_the_page
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
        size = tuple(forward.batch.shape[-2:])
        batch = preprocess(forward.model, self.image, size=size, on_note=shown_by_the_page)
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
        if isinstance(self.target, Likeness):
            return self.target.question(forward)
        return self.target


@dataclass(frozen=True)
class Map:
    """A drawn view. values: (rows, cols), or (rows, cols, 3) for three color channels. words: caption without its final
    period. limit: end of a fixed color scale. unit: unit of the values. title: replaces the view's. beside: charts next
    to the image for the front end. prefix: weights of the prefix tokens. sinks: patches to mark. tables: further
    numbers to save, as columns by name, by the name of their file. bound: largest departure of a map that is drawn as
    uniform (`vitlens.plot.scales`), 0 for quantities whose maps of random weights were not measured."""

    values: np.ndarray
    words: str
    limit: float | None = None
    unit: str = ""
    title: str = ""
    beside: dict = field(default_factory=dict)
    prefix: tuple[float, ...] = ()
    sinks: tuple[tuple[int, int], ...] = ()
    tables: dict[str, dict[str, Sequence]] = field(default_factory=dict)
    bound: float = UNIFORM


@dataclass(frozen=True)
class View:
    """A view.

    title: title above the image. make: (forward, choice, check) → Map. Calls `check` during long work. group: group in
    the menu. entry: name in the menu if it differs from the title. query: True if the map depends on the query. head: a
    key of `HEADS`, or "" without heads. layered: True for maps of a layer. explains: True for maps of a class.
    contrasts: True if a contrast class is possible. slow: True for the long lane. forwards: number of forwards of a
    map, 0 if unknown. similar: title of the map of a `Likeness`. plain: key of its sentence in plain words, or "".
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
    similar: str = ""
    plain: str = ""

    @property
    def attributes(self) -> bool:
        """True for attribution methods, which also take a `Likeness` and have a score."""
        return self.explains and not self.layered

    def heads(self, count: int) -> dict[str | int, str]:
        """Names of the head choices for `count` heads."""
        single = {} if self.head == "mixed" else {head: str(head) for head in range(count)}
        return HEADS[self.head or "each"] | single

    def head_or_first(self, head: str | int, count: int) -> str | int:
        """The head if this view has it, else the first choice."""
        choices = self.heads(count)
        if head in choices:
            return head
        return next(iter(choices))


class Layers(Sequence):
    """Layers of a capture that call `check` on access."""

    def __init__(self, forward: Forward, layers: slice, check: Check):
        self.layers = forward.attn[layers]
        self.grid = forward.grid
        self.model_name = forward.name
        self.check = check

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> Layer:
        self.check()
        return self.layers[index]


def checked_forwards(model: nn.Module, check: Check) -> contextlib.AbstractContextManager[None]:
    """Context that calls check(images) before each forward of the model in this thread. The hook is on the patch
    embedding, because `forward_features` skips the head."""

    def before_embedding(_, args: tuple) -> None:
        check(len(args[0]))

    return thread_hooks([(family(model).embedding.register_forward_pre_hook, before_embedding)])


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


def _fuse_heads(values: Tensor, head: int | str) -> Tensor:
    """Values of one head of (H, …), or the mean or maximum over heads."""
    if head == MEAN:
        return values.mean(0)
    if head == MAX:
        return values.amax(0)
    return values[head]


def _head_words(head: int | str) -> str:
    if head in (MEAN, MAX):
        return say(head)
    return say("head", head=head)


def _prefix_words(forward: Forward) -> str:
    prefix = forward.prefix
    if len(prefix) == 1:
        return say("token", token=prefix[0])
    return say("prefix", count=len(prefix))


def _gate_words(forward: Forward) -> str:
    """Note about gated attention, whose gate is not part of the map."""
    return say("gated") if forward.gated else ""


def _attention(forward: Forward, choice: Choice, check: Check) -> Map:
    row = query_row(forward, choice.query)
    weights = _fuse_heads(forward.attn[choice.layer].read(row)[0], choice.head).cpu()
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
    return Map(
        forward.grid.image_map(weights).numpy(),
        words + _gate_words(forward),
        bound=ATTENTION,
        unit=say("attention unit"),
        prefix=tuple(weights[: forward.grid.prefix].tolist()),
    )


def _received(forward: Forward, choice: Choice, check: Check) -> Map:
    layer = Layers(forward, slice(choice.layer, choice.layer + 1), check)
    received = attention.received(layer, prefix=True)[0, 0].float().cpu()
    values = _fuse_heads(received, choice.head)
    words = say("received", layer=choice.layer, heads=_head_words(choice.head))
    if forward.grid.prefix:
        words += say("not rescaled")
    words += _gate_words(forward)
    shown = forward.grid.image_map(values).numpy()
    return Map(shown, words, bound=ATTENTION, unit=say("attention unit"))


def _rollout(forward: Forward, choice: Choice, check: Check) -> Map:
    row = query_row(forward, choice.query)  # raises for a missing read-out
    query = None if choice.query == READOUT else int(row.argmax())
    layers = Layers(forward, slice(choice.layer + 1), check)
    values = attention.rollout(layers, query=query, head_fusion=choice.head)[0].float().cpu()
    source = query_words(forward, choice.query)
    words = say("rollout", source=source, layer=choice.layer, heads=_head_words(choice.head))
    if forward.grid.prefix:
        rest = values.sum()
        words += say(
            "rollout prefix",
            share=percent(1 - rest),
            rest=percent(rest),
            prefix=_prefix_words(forward),
        )
    words += _gate_words(forward)
    prefix = (1 - values.sum().item(),) if forward.grid.prefix == 1 else ()
    return Map(values.numpy(), words, unit=say("rollout unit"), prefix=prefix)


def _similarity(forward: Forward, choice: Choice, check: Check) -> Map:
    layer_tokens = forward.tokens[choice.layer][0].float().cpu()
    cosines = tokens.similarity(layer_tokens, query_row(forward, choice.query))
    words = say("similarity", layer=choice.layer, source=query_words(forward, choice.query))
    values = forward.grid.image_map(cosines).numpy()
    limit = farthest(values, choice.query)
    return Map(values, words, limit=limit, unit=say("similarity unit"), bound=0)


def farthest(values: np.ndarray, query: str | int | tuple[int, int]) -> float:
    """Largest absolute value of a map besides that of the query patch, which is 1 for cosines."""
    others = np.abs(values)
    if isinstance(query, tuple) and values.size > 1:
        others[query] = 0
    return float(others.max())


@torch.inference_mode()
def sinks(forward: Forward, layer: int, check: Check) -> list[tuple[int, int]]:
    """Patches (row, column) that are `attention.sinks` in a layer."""
    one = Layers(forward, slice(layer, layer + 1), check)
    shape = forward.grid.rows, forward.grid.cols
    places = attention.sinks(one)[0, 0].unflatten(0, shape).nonzero()
    return [(row, col) for row, col in places.tolist()]


def _components(forward: Forward, choice: Choice, check: Check) -> Map:
    patches = forward.tokens[choice.layer][0, forward.grid.prefix :]
    scores, variance = tokens.components(patches.float().cpu())
    words = say("components", layer=choice.layer, shares=", ".join(map(percent, variance)))
    colors = tokens.colors(scores).unflatten(0, (forward.grid.rows, forward.grid.cols))
    return Map(colors.numpy(), words)


def _norms(forward: Forward, choice: Choice, check: Check) -> Map:
    lengths = tokens.norms(forward.tokens[choice.layer][0].float().cpu())
    median = lengths[forward.grid.prefix :].quantile(0.5)
    words = say("norms", layer=choice.layer, median=number(median))
    if forward.prefix:
        words += say("norms prefix", token=forward.prefix[0], length=number(lengths[0]))
    return Map(forward.grid.image_map(lengths).numpy(), words, unit=say("norms unit"), bound=0)


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
            position = forward.grid.position(query)
            logits = stream.read_each(forward.model, layer_tokens[:, [position]])[:, 0]
        share, target = scores(forward.model, logits[0]).float().max(0)
        best.append((share.item(), target.item()))
    return best


@torch.inference_mode()
def _lens(forward: Forward, choice: Choice, check: Check) -> Map:
    if any(layer == "pool" for layer, _ in forward.off):
        raise ValueError("The logit lens needs all heads of the attention pool. Turn them on.")
    target, layer, query = choice.target, choice.layer, choice.query
    with eval_mode(forward.model):
        logits = stream.read_each(forward.model, forward.tokens[layer])[0]
        shares = scores(forward.model, logits)[:, target].float()
        top, classes = zip(*by_layer(forward, query, check), strict=True)
    plain = forward.outputs == "value"
    quantity = say("value" if plain else "probability")
    who = query_words(forward, query)
    if query == READOUT:
        who = say("lens readout", readout=forward.readout)
    who = who[0].upper() + who[1:]
    labels = [forward.label(number) for number in classes]
    words = say(
        "lens",
        layer=layer,
        quantity=quantity,
        name=forward.label(target),
        who=who,
        best=labels[layer],
        score=forward.score_words(top[layer]),
    )
    lens = {
        "title": say("lens title", who=who),
        "layer": layer,
        "rows": [
            {"layer": k, "name": label, "share": share, "plain": plain}
            for k, (label, share) in enumerate(zip(labels, top, strict=True))
        ],
        "note": say("lens note"),
    }
    columns = {"layer": range(len(top)), "class": classes, "name": labels, quantity: top}
    return Map(
        forward.grid.image_map(shares.cpu()).numpy(),
        words,
        unit=quantity,
        beside={"lens": lens},
        tables={"layers": columns},
    )


def _contributions(forward: Forward, choice: Choice, check: Check) -> Map:
    target, against = choice.target, choice.against
    if any(not isinstance(value, str) for value in forward.off.values()):
        raise ValueError(say("not additive"))
    parts, written = contributions_of(forward, target, against, check)
    logit = number(parts.logits[0].item())
    layer, head = choice.layer, choice.head
    if head == EVERY:
        chosen = written
    elif head == SUM:
        chosen = written[layer]
    else:
        chosen = written[layer, head]
    sums = chosen.reshape(-1, forward.grid.tokens).sum(0)
    words = say(
        "contributions",
        whose=whose_words(choice),
        name=forward.label(target),
        minus="" if against is None else say("minus", name=forward.label(against)),
        patches=_signed(sums[forward.grid.prefix :].sum()),
    )
    if forward.grid.prefix:
        share = _signed(sums[: forward.grid.prefix].sum())
        words += say("contributions prefix", share=share, prefix=_prefix_words(forward))
    words += say("contributions logit", logit=logit)
    sizes = {
        name: getattr(parts, name)[0].float().cpu()
        for name in ("heads", "mlps", "embedding", "pool", "biases")
    }
    others = {say(name): sizes[name].item() for name in ("embedding", "pool", "biases")}
    if not sizes["pool"]:
        del others[say("pool")]
    chart = {
        "title": say("parts" if against is None else "parts difference"),
        "heads": sizes["heads"].tolist(),
        "mlps": sizes["mlps"].tolist(),
        "others": [[name, value] for name, value in others.items()],
        "layer": None if head == EVERY else layer,
        "head": head if isinstance(head, int) else None,
        "note": say("parts note", logit=logit),
    }
    return Map(
        forward.grid.image_map(sums).numpy(),
        words,
        unit=say("contributions unit"),
        beside={"parts": chart},
        tables={"parts": _part_columns(chart)},
    )


def whose_words(choice: Choice) -> str:
    """Name of the heads whose contributions are added up."""
    if choice.head == EVERY:
        return say("all layers")
    if choice.head == SUM:
        return say("all heads", layer=choice.layer)
    return say("one head", head=choice.head, layer=choice.layer)


def contributions_of(
    forward: Forward, target: int, against: int | None, check: Check
) -> tuple[stream.Contributions, Tensor]:
    """The parts of a logit, and what each head writes from each token (L, H, T). Cached."""
    key = (target, against)
    if key not in forward.contributions:
        with checked_forwards(forward.model, check), forward.switched():
            parts = stream.contributions_by_token(forward.model, forward.batch, target, against)
        forward.contributions[key] = parts
    parts, written = forward.contributions[key]
    return parts, written[0].float().cpu()


def _signed(value: Tensor) -> str:
    """A number with its sign."""
    return ("+" if value >= 0 else "") + number(value)


def _part_columns(chart: dict) -> dict[str, Sequence]:
    """The numbers of the chart of contributions as columns."""
    columns: dict[str, list] = {"part": [], "layer": [], "head": [], "contribution": []}

    def add(part: str, layer: int | str, head: int | str, contribution: float) -> None:
        for column, value in zip(columns.values(), (part, layer, head, contribution), strict=True):
            column.append(value)

    for layer, heads in enumerate(chart["heads"]):
        for head, contribution in enumerate(heads):
            add("head", layer, head, contribution)
    for layer, contribution in enumerate(chart["mlps"]):
        add("MLP", layer, "", contribution)
    for part, contribution in chart["others"]:
        add(part, "", "", contribution)
    return columns


def target_words(forward: Forward, target: int | Likeness) -> str:
    """Name of a target for captions, a class with its probability."""
    if isinstance(target, Likeness):
        return say("likeness", name=target.name)
    return forward.class_words(target)


@functools.cache
def view_of_method(method: Method) -> View:
    """View of an attribution method."""
    begin = method.title[0].upper() + method.title[1:]
    slow = method.needs in ("pixels", "patches")
    steps = 0
    if slow and "n_steps" in method.options:
        steps = method.options["n_steps"].default

    def forwards(forward: Forward) -> int:
        return method.forwards_per_patch * forward.grid.patches or steps

    similar = say("why similar", method=method.title)

    def require_time(forward: Forward) -> None:
        count = forwards(forward)
        minutes = count * seconds(forward) / 60
        if minutes > LONGEST_MAP / 60:
            raise ValueError(
                f"{begin} takes {count:,} forwards, here about {minutes:,.0f} minutes. Choose a "
                f"smaller size, or run `vitlens explain --methods {method.name}`."
            )

    def make(forward: Forward, choice: Choice, check: Check) -> Map:
        if method.forwards_per_patch:
            require_time(forward)
        with checked_forwards(forward.model, check), forward.switched():
            values = method(
                forward.model, forward.batch, choice.question(forward), against=choice.against
            )[0]
        values = values.detach().float().cpu().numpy()
        if not method.depends_on_target:
            return Map(values, begin)
        words = say("for", method=begin, target=target_words(forward, choice.target))
        if choice.against is not None:
            words += say("rather than", target=target_words(forward, choice.against))
        title = similar if isinstance(choice.target, Likeness) else ""
        return Map(values, words, title=title)

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
        similar=similar,
        plain="class" if method.depends_on_target else "method",
    )


VIEWS = {
    "attention": View(
        "Attention from the query",
        _attention,
        entry="Attention",
        query=True,
        head="each",
        plain="attention",
    ),
    "received": View(
        "Attention received", _received, entry="Received", head="each", plain="received"
    ),
    "rollout": View(
        "Rollout from the query",
        _rollout,
        entry="Rollout",
        query=True,
        head="mixed",
        plain="rollout",
    ),
    "similarity": View(
        "Token similarity to the query",
        _similarity,
        HOLDS,
        "Similarity",
        query=True,
        plain="similarity",
    ),
    "components": View(
        "Principal components of tokens", _components, HOLDS, "Components", plain="components"
    ),
    "norms": View("Token norms", _norms, HOLDS, "Norms", plain="norms"),
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
        plain="lens",
    ),
    "contributions": View(
        "What heads contribute to the class",
        _contributions,
        WRITES,
        "Contributions",
        head="added",
        explains=True,
        contrasts=True,
        plain="contributions",
    ),
}
"""Views of a layer for a class."""


def views() -> dict[str, View]:
    """All views by name: those of a layer, and one for each registered attribution method."""
    methods = {
        name: view_of_method(method) for name, method in METHODS.items() if name not in VIEWS
    }
    return VIEWS | methods | INSIDE


def supported_views(forward: Forward) -> dict[str, View]:
    """Views that a model supports, with respect to its classes and read-out."""
    return {name: view for name, view in views().items() if _supports(forward, name, view)}


def _supports(forward: Forward, name: str, view: View) -> bool:
    if not view.explains:
        return True
    embeds = forward.logits.dim() == 1  # an image has one output, which can be similar to another
    if not (forward.likeliest or (view.attributes and embeds)):
        return False
    readable = forward.grid.readout is not None
    return view.layered or readable or "query" not in METHODS[name].options


def view_control(view: str, rows: dict[str, View], switches: bool = True) -> Control:
    """Views by the question that they answer. switches: False if heads cannot be switched off."""
    entries, questions = [], []
    for group in (LOOKS, HOLDS, WRITES, WHY):
        names = [name for name, row in rows.items() if row.group == group]
        if names:
            entries += [(rows[name].entry or rows[name].title, name) for name in names]
            line = f"line {group}"
            if group == WRITES and not switches:
                line = "line decide saved"
            questions.append((say(f"question {group}"), len(names), say(line)))
    return Control("view", "View", "questions", view, tuple(entries), tuple(questions), place="top")


def head_control(
    forward: Forward, view: View, head: str | int, name: str = "head", label: str = "Head", **more
) -> Control:
    choices = tuple((text, value) for value, text in view.heads(forward.heads).items())
    return Control(
        name,
        label,
        "range",
        view.head_or_first(head, forward.heads),
        choices,
        hidden=not view.head,
        **more,
    )


@torch.inference_mode()
def head_maps(
    forward: Forward, query: str | int | tuple[int, int], check: Check
) -> tuple[np.ndarray, np.ndarray]:
    """Attention from a query as (L, 2 + H, r, c) uint8, and the largest weight (L, 2 + H) on a patch, which is 255.

    The mean and the maximum over heads come before the heads. Uniform maps (`vitlens.plot.scales.ATTENTION`) have one
    level. Grids beyond `CELLS` rows or columns show the largest
    weight of each block.
    """
    row = query_row(forward, query)
    layers = []
    for layer in Layers(forward, slice(None), check):
        heads = forward.grid.image_map(layer.read(row)[0].float().cpu())
        mean, largest = heads.mean(0, keepdim=True), heads.amax(0, keepdim=True)
        layers.append(torch.cat([mean, largest, heads]))
    maps = torch.stack(layers)
    tops = maps.amax((-2, -1))
    flat = maps.flatten(0, 1)
    shown = [torch.from_numpy(as_drawn(tile.numpy(), ATTENTION)).to(maps) for tile in flat]
    maps = torch.stack(shown).view_as(maps)
    size = [min(side, CELLS) for side in maps.shape[-2:]]
    tiles = torch.nn.functional.adaptive_max_pool2d(maps, size)
    tiles = tiles / tops[..., None, None].clamp(min=1e-30)
    return (tiles * 255).round().byte().numpy(), tops.numpy()


@torch.inference_mode()
def heads_table(forward: Forward, check: Check) -> dict[str, list]:
    """Columns of `Summary.to_pandas` with a row for each head: mean distance in pixels, entropy in nats."""
    layers = Layers(forward, slice(None), check)
    summary = attention.summary(layers, "mean_distance", "entropy")
    count, heads = summary.entropy.shape[1:]
    return {
        "layer": [layer for layer in range(count) for _ in range(heads)],
        "head": list(range(heads)) * count,
        "mean_distance": summary.mean_distance.flatten().tolist(),
        "entropy": summary.entropy.flatten().tolist(),
    }


@torch.inference_mode()
def head_statistics(forward: Forward, check: Check) -> np.ndarray:
    """Mean attention distance in input pixels and entropy in nats of all heads, (2, L, H)."""
    layers = Layers(forward, slice(None), check)
    summary = attention.summary(layers, "mean_distance", "entropy")
    both = torch.stack([summary.mean_distance[0], summary.entropy[0]])
    return both.float().cpu().numpy()


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
    patches = forward.grid.patches
    points = len(range(0, patches, faithfulness.usual_step(patches, POINTS)))
    return 2 + 2 * maps * (points - 1)


def curves(
    forward: Forward, choice: Choice, maps: Tensor | None, check: Check, longest: float = LONGEST
) -> np.ndarray | str:
    """Deletion and insertion curves (2, maps, S) of maps (maps, rows, cols), default of random orders of the patches.
    Random orders that would take more than `longest` seconds return a message instead."""
    grid = forward.grid
    if maps is None:
        maps = faithfulness.random_maps(grid, ORDERS)
        duration = 2 * POINTS * (1 + ORDERS) * seconds(forward)
        if duration > longest:
            return say("too long", minutes=f"{duration / 60:.0f}")
    with checked_forwards(forward.model, check), forward.switched():
        both = faithfulness.curves(
            forward.model,
            forward.batch,
            maps[:, None].to(forward.batch.device),
            choice.question(forward),
            against=choice.against,
            baseline=BASELINE,
            step=faithfulness.usual_step(grid.patches, POINTS),
            grid=grid,
        )
    return torch.stack([both.deletion[:, 0], both.insertion[:, 0]]).float().cpu().numpy()


def order_of_covering(forward: Forward, choice: Choice, values: np.ndarray) -> dict:
    """Patches in the order in which `curves` of a map cover them, levels of a covered patch, and name of the score."""
    if isinstance(choice.target, Likeness):
        name = say("likeness", name=choice.target.name)
    else:
        name = forward.label(choice.target)
    if choice.against is not None:
        name += say("rather than", target=forward.label(choice.against))
    blank = faithfulness.blank(forward.batch, BASELINE, forward.grid)[..., :1, :1]
    order = faithfulness.order(torch.from_numpy(values)).tolist()
    return {"name": name, "order": order, "fill": restore(forward.model, blank)[0, 0, 0].tolist()}


def score(forward: Forward, choice: Choice, own: np.ndarray, random: np.ndarray) -> dict:
    """Score of a map for the front end. own, random: `curves` of the map and of random orders."""
    patches = forward.grid.patches
    counts = torch.tensor([*range(0, patches, faithfulness.usual_step(patches, POINTS)), patches])
    gain = _gains(counts, own[:, 0])
    gains = _gains(counts, random)
    sigmas = ((gain - gains.mean()) / gains.std()).item()
    if sigmas >= CLEAR:
        chance = "better"
    elif sigmas <= -CLEAR:
        chance = "worse"
    else:
        chance = "no better"
    verdict = say("equal")
    if np.isfinite(sigmas):
        side = "above" if sigmas >= 0 else "below"
        verdict = say(side, sigmas=number(abs(sigmas)), orders=ORDERS)
    if isinstance(choice.target, Likeness):
        scale = "cosine"
    else:
        measures = Target(against=choice.against, outputs=forward.outputs).measures
        scale = next(iter(measures.values())).removeprefix("the ")
    mine = faithfulness.Curves(counts, *map(torch.from_numpy, own[:, 0]))
    return {
        "verdict": say(chance),
        "short": say("sigmas", sigmas=number(sigmas)),
        "scale": scale,
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
            verdict=verdict,
        ),
    }


def _gains(counts: Tensor, curves: np.ndarray) -> Tensor:
    """Area under insertion minus area under deletion of curves (2, …, S)."""
    both = faithfulness.Curves(counts, *map(torch.from_numpy, curves))
    return both.insertion_area - both.deletion_area
