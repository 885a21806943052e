"""Controls of a page, and those that pages with a photograph share: query, layer, colors and opacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitlens.names import suggestion
from vitlens_explorer.panels import MAPS
from vitlens_explorer.photographs import PATCH, READOUT, Forward
from vitlens_explorer.words import percent

OPACITIES = ("by value", "value"), ("uniform", "even")
PAINTING, MORE = "Appearance", "More"
"""Names of the closed groups of controls."""
PAINT = {
    "strength": 0.75,
    "opacity": "value",
    "colors": "",
    "stretch": False,
    "smooth": True,
    "lines": False,
}
"""State of the controls of colors and opacity."""
STRETCH = "Start the color scale at the minimum"
"""Label of a control."""
LISTED = 8
"""Largest number of choices in a message."""
PLAIN = frozenset(("query", "row", "column", *PAINT))
"""Parts of the state without effect on other controls."""


@dataclass(frozen=True)
class Control:
    """A control. kind: "select", "range" (over its options, or from 0 to high), "check", "text", "questions" (a
    menu in two rows) or "switches", whose value is the tuple of switched-off options. groups: (name, length) of
    groups of options, for "questions" with a line. place: name of the closed group of controls or of a panel above it,
    "top" for above the panels, "heads" for under the mosaic, or "" for the form."""

    name: str
    label: str
    kind: str
    value: object = None
    options: tuple[tuple[str, object], ...] = ()
    groups: tuple[tuple, ...] = ()
    high: float = 0
    step: float = 1
    disabled: bool = False
    hidden: bool = False
    hint: str = ""
    place: str = ""

    def check(self, value: object) -> None:
        """Raise ValueError for an invalid value."""
        if self.kind == "switches":
            return
        hint = ""
        if self.options:
            choices = [choice for _, choice in self.options]
            fits = any(value == choice and type(value) is type(choice) for choice in choices)
            expected = f"one of {', '.join(map(repr, choices))}"
            if len(choices) > LISTED:
                expected = "one of its menu"
                hint = suggestion(str(value), [str(choice) for choice in choices])
        elif self.kind == "check":
            fits = isinstance(value, bool)
            expected = "True or False"
        elif self.kind == "text":
            fits = isinstance(value, str)
            expected = "a text"
        else:
            whole = self.step == 1
            numeric = isinstance(value, int if whole else int | float)
            fits = numeric and not isinstance(value, bool) and 0 <= value <= self.high
            expected = f"a {'whole ' * whole}number from 0 to {self.high:g}"
        if not fits:
            raise ValueError(f"{self.label!r} must be {expected}, got {value!r}.{hint}")


def query_of(state: dict) -> str | int | tuple[int, int]:
    """READOUT, the position of a prefix token, or (row, column) of a patch."""
    if state["query"] == PATCH:
        return state["row"], state["column"]
    return state["query"]


def with_query(values: dict) -> dict:
    """Values of controls, in which a row or a column alone makes the patch the query."""
    if {"row", "column"} & values.keys() and "query" not in values:
        return values | {"query": PATCH}
    return values


def photograph_control(state: dict, label: str = "Photo", place: str = "") -> Control:
    names = tuple((name, name) for name in state["photographs"])
    return Control("photograph", label, "select", state["photograph"], names, place=place)


def query_controls(
    state: dict, forward: Forward, *, hidden: bool = False, readable: bool = True
) -> list[Control]:
    """Controls of the query. readable: False if the read-out cannot be a query."""
    grid = forward.grid
    readable = readable and grid.readout is not None
    queries = []
    if readable:
        queries.append((f"{forward.readout} (read-out)", READOUT))
    for position, name in enumerate(forward.prefix):
        if not (readable and name == forward.readout):
            queries.append((name, position))
    queries.append(("patch", PATCH))
    more = {"hidden": hidden, "place": MORE}
    return [
        Control("query", "Query", "select", state["query"], tuple(queries), **more),
        Control("row", "Row", "range", state["row"], high=grid.rows - 1, **more),
        Control("column", "Column", "range", state["column"], high=grid.cols - 1, **more),
    ]


def query_tiles(state: dict, forward: Forward, weights: Sequence[float] = ()) -> tuple[dict, ...]:
    """Tiles of the queries besides patches, for a panel. weights: of each prefix token."""
    readable = forward.grid.readout is not None
    tiles = []
    if readable and forward.readout not in forward.prefix:
        tiles.append({"query": READOUT, "name": forward.readout, "share": ""})
    for position, name in enumerate(forward.prefix):
        query = READOUT if readable and name == forward.readout else position
        share = percent(weights[position]) if weights else ""
        tiles.append({"query": query, "name": name, "share": share})
    return tuple(tile | {"now": tile["query"] == state["query"]} for tile in tiles)


def layer_control(
    state: dict,
    forward: Forward,
    name: str = "layer",
    label: str = "Layer",
    *,
    place: str = "",
    hidden: bool = False,
    disabled: bool = False,
) -> Control:
    return Control(
        name,
        label,
        "range",
        state[name],
        high=len(forward.attn) - 1,
        disabled=disabled,
        hidden=hidden,
        place=place,
    )


def paint_controls(state: dict, colored: bool = False) -> list[Control]:
    """Controls of colors and opacity. colored: True for RGB values."""
    maps = (("auto", ""), *((name, name) for name in MAPS))

    def control(
        name: str, label: str, kind: str, options: tuple = (), disabled: bool = False, **more
    ) -> Control:
        value = state[name]
        return Control(name, label, kind, value, options, disabled=disabled, place=PAINTING, **more)

    return [
        control("strength", "Overlay strength", "range", high=1, step=0.05),
        control("opacity", "Opacity", "select", OPACITIES, disabled=colored),
        control("colors", "Color map", "select", maps, disabled=colored),
        control("stretch", STRETCH, "check", disabled=colored),
        control("smooth", "Interpolate", "check"),
        control("lines", "Patch grid", "check"),
    ]
