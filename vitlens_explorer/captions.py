"""The panel of a map, with its captions: one in plain words, and the exact one.

Pages without Python have captions.js.
"""

from __future__ import annotations

import numpy as np

from vitlens.attention import SINK_TIMES_MEDIAN, SINK_TIMES_UNIFORM
from vitlens.plot.scales import peak
from vitlens_explorer.panels import Panel, Scale, scale_of
from vitlens_explorer.photographs import READOUT, Forward
from vitlens_explorer.views import (
    MAX,
    MEAN,
    Choice,
    Likeness,
    Map,
    View,
    target_words,
    whose_words,
)
from vitlens_explorer.words import WORDS, fine_percent, number, percent, say

SUMMARY = "class token"
"""Name of the token that sums up the image."""


def scale_words(values: np.ndarray, scale: Scale, bound: float) -> str:
    """Sentences about the colors of a map (rows, cols): its largest value, and whether it is uniform or stretched."""
    words = ""
    times = peak(values)
    if times is not None:
        words += say("peak", times=number(times))
    if scale.uniform is not None:
        words += say("uniform", bound=percent(bound))
    elif scale.stretching > 1.001:
        words += say("stretched", times=number(scale.stretching))
    return words


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
    """Panel of a map over its image, with its captions."""
    grid, values = forward.grid, shown.values
    words = shown.words + "."
    legend = shown.unit
    scale = None
    marked = ()
    hidden = False
    if values.ndim == 2:
        scale = scale_of(
            values,
            cmap=state["colors"],
            stretch=state["stretch"],
            limit=shown.limit,
            bound=shown.bound,
        )
        words += say("range", low=number(values.min()), high=number(values.max()))
        words += scale_words(values, scale, shown.bound)
        marked = tuple(shown.sinks)
    plain = plain_words(forward, view, choice, shown, scale, state)
    if view.explains and isinstance(choice.target, int):
        beside = forward.prediction_beside(choice.target)
        words += f" {beside}" if beside else ""
        plain += f" {beside}" if beside and plain else ""
    words += say("input", height=grid.image[0], width=grid.image[1])
    for cut, padded, side in zip(grid.cut, grid.padded, ("bottom", "right"), strict=True):
        if cut:
            words += say("cut", pixels=cut, where=say(side))
        if padded:
            words += say("padded", pixels=padded, where=say(side))
    if shown.limit and not state["stretch"]:
        legend = say("similarity scale", unit=shown.unit)
    if marked:
        words += say(
            "sinks",
            count=len(marked),
            times=number(SINK_TIMES_MEDIAN),
            uniform=number(SINK_TIMES_UNIFORM),
        )
        plain += say("plain sinks", count=len(marked))
        hidden = state.get("sinks", False) and not state["stretch"]
    if hidden:
        rows, cols = zip(*marked, strict=True)
        others = values.copy()
        others[rows, cols] = 0
        scale = scale_of(others, cmap=state["colors"])
        legend = say("hidden", unit=legend)
    return Panel(
        sinks=marked,
        hides=hidden,
        name=name,
        title=title or shown.title or view.title,
        picture=name,
        rows=grid.rows,
        cols=grid.cols,
        cell=(grid.patch[0] / grid.image[0], grid.patch[1] / grid.image[1]),
        words=words,
        plain=plain,
        selected=choice.query if view.query and isinstance(choice.query, tuple) else None,
        picks=say("look from") if view.query else "",
        values=values,
        scale=scale,
        unit=shown.unit,
        even=1 / grid.tokens if shown.unit == say("attention unit") else None,
        legend=legend,
        strength=state["strength"],
        opacity=state["opacity"],
        smooth=state["smooth"],
        lines=state["lines"],
        ends=scale and (number(scale.low), number(scale.high)),
    )


def plain_words(
    forward: Forward, view: View, choice: Choice, shown: Map, scale: Scale | None, state: dict
) -> str:
    """Sentence about the strongest patch of a map for readers who do not know the field's words, "" for some views.

    scale: None for a map of colors. state: values of the controls, because only the usual colors are named.
    """
    if not view.plain:
        return ""
    if scale is None:
        return say("plain components", layer=choice.layer)
    if scale.uniform is not None:
        return say("plain uniform", bound=percent(shown.bound))
    place, supports = _strongest(view, choice, shown.values)
    name = f"plain {view.plain}" if supports else "plain class against"
    words = say(name, **_plain_fields(forward, view, choice, shown, place))
    usual = not state["colors"] and not state["stretch"]
    if usual and scale.low < 0:
        words += WORDS.get(f"plain {view.plain} colors", "")
    return words


def _strongest(view: View, choice: Choice, values: np.ndarray) -> tuple[tuple[int, int], bool]:
    """The patch (row, column) that a sentence names, and False if all patches count against a class."""
    supports = True
    compared = values
    if view.plain == "contributions":
        compared = np.abs(values)
    elif view.plain == "similarity" and isinstance(choice.query, tuple) and values.size > 1:
        compared = values.copy()
        compared[choice.query] = -np.inf  # the similarity of a patch to itself
    elif view.plain == "class" and values.max() <= 0:
        compared = -values
        supports = False
    row, column = np.unravel_index(compared.argmax(), values.shape)
    return (int(row), int(column)), supports


def _plain_fields(
    forward: Forward, view: View, choice: Choice, shown: Map, place: tuple[int, int]
) -> dict[str, object]:
    """Fields of the sentences in plain words. place: (row, column) of the patch that they name."""
    value = float(shown.values[place])
    is_query = view.query and not view.explains and place == choice.query
    fields: dict[str, object] = {
        "who": _who(forward, choice.query),
        "where": _where(choice),
        "place": say("plain itself" if is_query else "plain place", row=place[0], column=place[1]),
        "layer": choice.layer,
        "share": fine_percent(value),
        "even": fine_percent(1 / forward.grid.tokens),
        "value": number(value),
    }
    if view.plain == "norms":
        fields["times"] = number(peak(shown.values))
    if view.plain == "lens" and forward.outputs != "value":
        fields["value"] = fine_percent(value)
    if view.explains and view.plain != "method":
        fields |= _class_fields(forward, choice)
    return fields


def _class_fields(forward: Forward, choice: Choice) -> dict[str, str]:
    """Fields about the class of a map, or about the similarity that it explains."""
    if isinstance(choice.target, Likeness):
        return {"target": say("plain likeness", target=target_words(forward, choice.target))}
    name = forward.label(choice.target)
    fields = {"name": name, "target": f"“{name}”", "minus": "", "whose": whose_words(choice)}
    if choice.against is not None:
        other = forward.label(choice.against)
        fields["target"] += say("rather than", target=f"“{other}”")
        fields["minus"] = say("minus", name=other)
    return fields


def _who(forward: Forward, query: str | int | tuple[int, int]) -> str:
    """Name of a query in plain words."""
    if isinstance(query, tuple):
        return say("plain patch")
    name = forward.readout if query == READOUT else forward.prefix[query]
    if name == SUMMARY:
        return say("plain summary")
    return name if name.startswith("the ") else say("plain token", token=name)


def _where(choice: Choice) -> str:
    """Name of a layer's heads in plain words."""
    if choice.head in (MEAN, MAX):
        return say(f"plain {choice.head}", layer=choice.layer)
    return say("plain head", head=choice.head, layer=choice.layer)
