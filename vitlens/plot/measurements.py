"""Measurements: a curve for each column of a table, or a dot with an interval for each name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullLocator, StrMethodFormatter

from vitlens.plot import style
from vitlens.plot.glyphs import escape_texts
from vitlens.plot.style import SERIES, canvas, reference, rule, series_name, shade

LABEL = 13
"""Height of the label of a curve, in points."""


def lines(
    table,
    *,
    dotted=None,
    bands=None,
    level: float | None = None,
    log: str = "",
    palette=SERIES,
    marker: str = "o",
    xlabel: str = "",
    ylabel: str = "",
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """A curve for each column of a table against its index, with its name at its right end.

    table: a pandas DataFrame of numbers with a numeric index. dotted: another one, for dotted lines in the colors of
    the columns with the same names, or else the same positions. bands: two more, the lower and the upper ends of a
    band around each curve, in the same columns. level: value of a dashed horizontal line. log: "x" or "xy" for
    logarithmic axes. With "xy" the ticks are those of the index. palette: colors, or the name of a seaborn palette.
    Evenly spaced hues replace a palette of fewer colors than columns.

    >>> import pandas as pd
    >>> figure = vitlens.plot.lines(pd.DataFrame({"accuracy": [50.0, 80.0]}, index=[1, 2]), xlabel="Epoch")
    """
    import seaborn as sns

    tables = {"-": table} if dotted is None else {"-": table, ":": dotted}
    count = max(len(each.columns) for each in tables.values())
    if isinstance(palette, str):
        palette = sns.color_palette(palette, count)
    palette = style.palette(count) if len(palette) < count else palette
    named = dict(zip(table, palette, strict=False))
    with canvas(ax, 720, 360) as (ax, result):
        for line, each in tables.items():
            for color, name in zip(palette, each, strict=False):
                label = name if line == "-" or name not in table else None
                ax.plot(
                    each.index,
                    each[name],
                    line,
                    color=named.get(name, color),
                    label=None if label is None else series_name(label),
                    marker=marker,
                    markersize=4,
                )
        if bands is not None:
            lower, upper = bands
            for name, color in named.items():
                ax.fill_between(
                    table.index, lower[name], upper[name], color=color, alpha=0.25, linewidth=0
                )
        if level is not None:
            ax.axhline(level, **reference(ax))
        if log:
            ax.set(xscale="log", yscale="log" if log == "xy" else "linear")
            ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if log == "xy":
            ax.set_xticks(table.index, table.index)
            ax.xaxis.set_minor_locator(NullLocator())
        ax.set(xlabel=xlabel, ylabel=ylabel)
        rule(ax)
        _name_curves(ax)
    return result


def _name_curves(ax: plt.Axes) -> None:
    """Write the label of each curve to the right of the axes, at the height of its last point, in its color."""
    escape_texts(ax)
    ax.figure.draw_without_rendering()  # sets the limits and the size of the axes
    to_axes = ax.transData + ax.transAxes.inverted()
    ends = {}
    for curve in ax.lines:
        is_known = np.isfinite(curve.get_ydata())
        if is_known.any() and not curve.get_label().startswith("_"):
            last = curve.get_xydata()[is_known][-1]
            ends[curve] = to_axes.transform(last)[1]
    curves = sorted(ends, key=ends.get)
    heights = [ends[curve] for curve in curves]
    room = LABEL / 72 * ax.figure.dpi / ax.bbox.height
    # from the top: no label less than `room` below the next one
    for k in range(len(curves) - 2, -1, -1):
        heights[k] = min(heights[k], heights[k + 1] - room)
    # from the bottom: none below the axes
    lowest = 0
    for k, curve in enumerate(curves):
        heights[k] = max(heights[k], lowest)
        lowest = heights[k] + room
        ax.annotate(
            curve.get_label(),
            (1, heights[k]),
            (5, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            color=curve.get_color(),
            size=9,
            va="center",
            annotation_clip=False,
        )


def intervals(
    values: Mapping[str, float],
    errors: Mapping[str, float],
    *,
    points: Mapping[str, Iterable[float]] | None = None,
    level: float | None = None,
    xlabel: str = "",
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """A dot with an error bar for each name, the first one on top.

    values: by name, as a dictionary or a pandas Series. errors: by the same names, half the length of each interval, or
    its lengths below and above the value.
    points: single measurements of each value, drawn as small gray dots. level: value of a dashed vertical line.

    >>> figure = vitlens.plot.intervals({"ViT": 80.1, "ResNet": 78.5}, {"ViT": 1.0, "ResNet": 1.2})
    """
    import seaborn as sns

    names = list(values.keys())
    with canvas(ax, 800, 90 + 26 * len(names)) as (ax, result):
        single = [
            (value, str(place))  # names may hold bytes that pandas refuses
            for place, name in enumerate(names)
            for value in ({} if points is None else points).get(name, ())
        ]
        if single:
            x, y = zip(*single, strict=True)
            order = [str(place) for place in range(len(names))]
            sns.stripplot(
                x=x, y=y, order=order, orient="h", color=shade(ax, 0.7), jitter=False, size=4, ax=ax
            )
        sides = np.transpose([errors[name] for name in names])
        centers = [values[name] for name in names]
        ax.errorbar(centers, range(len(names)), xerr=sides, fmt="o", color=SERIES[0], capsize=3)
        if level is not None:
            ax.axvline(level, **reference(ax))
        ax.set_yticks(range(len(names)), names)
        ax.set(xlabel=xlabel, ylabel="", ylim=(len(names) - 0.5, -0.5))
        ax.tick_params(axis="y", length=0)
        rule(ax, "x")
    return result
