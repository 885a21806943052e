"""What pages with maps share: the panel of a map, and the menu of views."""

from __future__ import annotations

from collections import Counter

from vitlens.widgets.paint import scale_of
from vitlens.widgets.stage import Control, Panel
from vitlens.widgets.subjects import Subject
from vitlens.widgets.views import Choice, Map, View, number


def view_control(view: str, rows: dict[str, View]) -> Control:
    """The menu of views, in groups."""
    sizes = Counter(each.group for each in rows.values())
    entries = [
        (each.entry or each.title, name) for group in sizes for name, each in rows.items() if each.group == group
    ]
    return Control("view", "View", "select", view, tuple(entries), tuple(sizes.items()))


def panel(
    subject: Subject, view: View, choice: Choice, shown: Map, state: dict, *, name: str = "picture", title: str = ""
) -> Panel:
    """The panel of a map over its picture, with its words."""
    grid, values, scale, words = subject.grid, shown.values, None, shown.words + "."
    if values.ndim == 2:
        scale = scale_of(values, cmap=state["colors"], stretch=state["stretch"], limit=shown.limit)
        words += f" Patches have {number(values.min())} to {number(values.max())}."
    words += f" The model saw {grid.image[0]} × {grid.image[1]} pixels."
    for count, where in zip(grid.cut, ("at the bottom", "at the right"), strict=True):
        words += f" No patch covers the last {count} pixels {where}." if count else ""
    for count, where in zip(grid.padded, ("at the bottom", "at the right"), strict=True):
        words += f" The last patches {where} reach {count} pixels beyond the picture." if count else ""
    return Panel(
        name=name, title=title or shown.title or view.title, picture=name, rows=grid.rows, cols=grid.cols,
        cell=(grid.patch[0] / grid.image[0], grid.patch[1] / grid.image[1]), words=words,
        selected=choice.query if view.query and isinstance(choice.query, tuple) else None,
        picks="the patch to look from" if view.query else "", values=values, scale=scale, unit=shown.unit,
        strength=state["strength"], opacity=state["opacity"], smooth=state["smooth"], lines=state["lines"],
        ends=scale and (number(scale.low), number(scale.high)),
    )  # fmt: skip
