"""Explanations beside each other: a picture under the maps of several methods, each with what is known of it."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt

from vitlens.grid import TokenGrid
from vitlens.images import load_image
from vitlens.plot.maps import overlay
from vitlens.plot.style import WIDTH, page, place, styled, write

EDGE, GAP, TOP, LEADING = 14, 12, 60, 15
ACROSS = 4


def explained(
    image, maps: Mapping[str, object], *, grid: TokenGrid, title: str, captions: Mapping[str, str] | None = None,
    note: str = "", smooth: bool = True,
) -> plt.Figure:  # fmt: skip
    """A picture, and the same picture under each map, four to a line; each map in colours from 0 to its own largest
    value, or from −max to max if some are negative.

    image: what `load_image` takes, as the model saw it. maps: (rows, cols) by the name of their method. title: what is
    explained, above. captions: by the same names, a line or two below each map. note: what all captions mean, at the
    foot. Raises ValueError for no maps, or maps that do not fit the grid.
    """
    if not maps:
        raise ValueError("At least one map was wanted, by the name of its method, but none came.")
    picture, (height, width) = load_image(image), grid.image
    side = (WIDTH - 2 * EDGE + GAP) // ACROSS - GAP
    tall = round(side * height / width)
    below = LEADING * max([0, *(text.count("\n") + 1 for text in (captions or {}).values() if text)])
    pitch, lines = tall + below + 40, -(-(len(maps) + 1) // ACROSS)
    foot = 12 + LEADING * len(note.splitlines())
    with styled():
        figure = page(WIDTH, TOP + lines * pitch - 18 + foot)
        write(figure, EDGE, 14, title, va="top", size=11)
        for k, (name, values) in enumerate({"Input": None, **maps}.items()):
            x, y = EDGE + k % ACROSS * (side + GAP), TOP + k // ACROSS * pitch
            ax = place(figure, x, y, side, tall)
            if values is None:
                ax.imshow(picture, extent=(0, width, height, 0))
            else:
                overlay(picture, values, grid=grid, ax=ax, mode="heat", smooth=smooth, colorbar=False)
            ax.set_aspect("auto")
            write(figure, x, y - 6, name, size=10)
            for row, text in enumerate((captions or {}).get(name, "").splitlines()):
                write(figure, x, y + tall + LEADING * (row + 1), text, size=8.5, color="0.35")
        write(figure, EDGE, TOP + lines * pitch - 18, note, va="top", size=8.5, color="0.35")
    return figure
