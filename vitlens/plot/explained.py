"""Explanations beside each other: a picture under the maps of several methods, each with what is known of it."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np

from vitlens.images import load_image
from vitlens.plot.maps import overlay
from vitlens.plot.style import WIDTH, array, colors, page, place, styled, write
from vitlens.recorder.grid import TokenGrid

EDGE, GAP, TOP, LEADING = 14, 12, 60, 15
ACROSS = 4


def explained(
    image, maps: Mapping[str, object], *, grid: TokenGrid, title: str, captions: Mapping[str, str] | None = None,
    note: str = "", smooth: bool = True,
) -> plt.Figure:  # fmt: skip
    """A picture, and the same picture under each map, four to a line; each map in colors from 0 to its own largest
    value, or from −max to max if some are negative. That value stands below the map, and what it means at the foot.

    image: what `load_image` takes, as the model saw it. maps: (rows, cols) by the name of their method. title: what is
    explained, above. captions: by the same names, a line or two below each map. note: what all captions mean, at the
    foot as well. Raises ValueError for no maps, or maps that do not fit the grid.
    """
    if not maps:
        raise ValueError("At least one map was wanted, by the name of its method, but none came.")
    picture, (height, width) = load_image(image), grid.image
    maps = {name: array(values, 2, "A map of shape (rows, cols)", "give one map") for name, values in maps.items()}
    below = {"Input": [], **{name: [_end(values)] for name, values in maps.items()}}
    below = {name: [*texts, *(captions or {}).get(name, "").splitlines()] for name, texts in below.items()}
    note = "\n".join([*note.splitlines(), _scale(maps)])
    side = (WIDTH - 2 * EDGE + GAP) // ACROSS - GAP
    tall = round(side * height / width)
    pitch, lines = tall + LEADING * max(map(len, below.values())) + 40, -(-(len(maps) + 1) // ACROSS)
    foot = 12 + LEADING * len(note.splitlines())
    with styled():
        figure = page(WIDTH, TOP + lines * pitch - 18 + foot)
        write(figure, EDGE, 14, title, va="top", size=11)
        for k, (name, texts) in enumerate(below.items()):
            x, y = EDGE + k % ACROSS * (side + GAP), TOP + k // ACROSS * pitch
            ax = place(figure, x, y, side, tall)
            if name in maps:
                overlay(picture, maps[name], grid=grid, ax=ax, mode="heat", smooth=smooth, colorbar=False)
            else:
                ax.imshow(picture, extent=(0, width, height, 0))
            ax.set_aspect("auto")
            write(figure, x, y - 6, name, size=10)
            for row, text in enumerate(texts):
                write(figure, x, y + tall + LEADING * (row + 1), text, size=8.5, color="0.35")
        write(figure, EDGE, TOP + lines * pitch - 18, note, va="top", size=8.5, color="0.35")
    return figure


def _end(values: np.ndarray) -> str:
    """Where the colors of a map end, with a sign if they begin below 0."""
    largest = np.abs(values[np.isfinite(values)]).max(initial=0)
    return f"{'±' if _signed(values) else 'max '}{largest:.3g}".replace("-", "−")


def _scale(maps: Mapping[str, np.ndarray]) -> str:
    """What the colors mean."""
    signed = ", or from −max (blue) to max (red) where some values are negative" * any(map(_signed, maps.values()))
    return f"Colors: each map has its own scale, from 0 (violet) to its max (yellow){signed}."


def _signed(values: np.ndarray) -> bool:
    return colors(values)["vmin"] < 0
