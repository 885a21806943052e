"""Names beside points and curves, moved so that none covers another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
import numpy as np

from vitlens.plot.style import DPI

SIZE = 7.5
POINT = 6.0
"""Pixels from the middle of a point to its edge."""
WAYS = [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 0.8), (-1, 0.8), (1, -0.8), (-1, -0.8)]


def beside(ax: plt.Axes, points: Sequence[tuple[float, float, str, str]], first: int = 0) -> None:
    """Names beside points (x, y, name, color), where they cover nothing and lie nearest to their own point.

    Names that find no such room inside the axes are left out, but for those of the `first` points, which take the best
    place there is. Call it when the limits of the axes are set.
    """
    ax.figure.draw_without_rendering()  # settles where the axes are
    box = ax.get_window_extent()
    spots = ax.transData.transform([point[:2] for point in points])
    taken = [np.array([x - POINT, y - POINT, x + POINT, y + POINT]) for x, y in spots]
    for k, (x, y, name, color) in enumerate(points):
        label = ax.annotate(
            name, (x, y), (0, 0), textcoords="offset points", size=SIZE, color=color, parse_math=False,
            weight="bold" if k < first else "normal", ha="center", va="center",
        )  # fmt: skip
        extent = label.get_window_extent()
        wide, high = extent.width / 2, extent.height / 2
        best = None
        for away in (4, 10, 18) if k < first else (4, 10):
            for across, up in WAYS:
                dx, dy = across * (wide + POINT + away * (up == 0)), up * (high + POINT + away)
                middle = spots[k] + (dx, dy)
                place = np.array([*(middle - (wide + 1, high)), *(middle + (wide + 1, high))])
                covered = sum(_overlap(place, other) for other in taken)
                covered += wide * high * 4 - _overlap(place, np.array([*box.min, *box.max]))
                gaps = np.hypot(*np.maximum(np.maximum(place[:2] - spots, spots - place[2:]), 0).T)
                covered += 1000 * (gaps[k] > gaps.min() + 1)
                if best is None or covered < best[0] - 1:
                    best = covered, (dx, dy), place
        if best[0] > 2 and k >= first:
            label.remove()
            continue
        label.set_position([72 / DPI * value for value in best[1]])
        taken.append(best[2])


def at_the_right(ax: plt.Axes, ends: Iterable[tuple[float, str, str]]) -> None:
    """Names right of the axes at the heights of (y, name, color), moved where lines of text would overlap."""
    ends, apart = sorted(ends), 15  # pixels
    ax.figure.draw_without_rendering()  # settles where the axes are
    height = ax.get_window_extent().height
    low, high = ax.get_ylim()
    places = [(y - low) / (high - low) * height for y, _, _ in ends]
    for k in range(1, len(places)):
        places[k] = max(places[k], places[k - 1] + apart)
    for k in reversed(range(len(places))):
        places[k] = min(places[k], (places[k + 1] if k + 1 < len(places) else height + apart) - apart)
    for place, (_, name, color) in zip(places, ends, strict=True):
        ax.text(
            1.015, place / height, name, transform=ax.transAxes, color=color, size=8.5, va="center", parse_math=False
        )


def _overlap(one: np.ndarray, other: np.ndarray) -> float:
    """Pixels that two boxes (left, bottom, right, top) share."""
    return float(np.prod((np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])).clip(0)))
