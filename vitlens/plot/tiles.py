"""Maps side by side: in a line, over one picture, or of all heads of all layers."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np

from vitlens.images import load_image
from vitlens.plot.maps import mark, overlay
from vitlens.plot.style import WIDTH, array, bar, colors, page, place, show, styled, write
from vitlens.recorder.grid import TokenGrid

EDGE, GAP, TOP = 14, 16, 34


def tiles(maps: Mapping[str, object], *, signed: bool = False) -> plt.Figure:
    """Maps in a line, their names above, and below each its own color bar with the values of its ends.

    maps: (rows, cols) by name, at most six, of any shapes. Colors reach from 0 to the largest value, or from −max to
    max where a map holds negative ones; with `signed` they do so in all of them. NaN is gray. Raises ValueError for
    more maps or other axes.
    """
    _check_count(maps)
    values = {n: array(m, 2, "A map of shape (rows, cols)", "give one map for each name") for n, m in maps.items()}
    side = min(240, (WIDTH - 2 * EDGE + GAP) // len(values) - GAP)
    tall = max(round(side * v.shape[0] / v.shape[1]) for v in values.values())
    with styled():
        figure = page(max(2 * EDGE + len(values) * (side + GAP) - GAP, 240), TOP + tall + 54)
        for k, (name, each) in enumerate(values.items()):
            x, height = EDGE + k * (side + GAP), round(side * each.shape[0] / each.shape[1])
            ax = place(figure, x, TOP, side, height)
            shown = show(ax, each, 0, 0, *each.shape[::-1], **colors(each, signed=signed or None))
            write(figure, x + side / 2, TOP - 8, name, ha="center", size=9.5)
            bar(figure, shown, x + side // 6, TOP + tall + 12, side - 2 * (side // 6), 9)
    return figure


def overlays(
    image,
    maps: Mapping[str, object],
    *,
    grid: TokenGrid,
    query: tuple[int, int] | None = None,
    limits: Mapping[str, tuple[float, float]] | None = None,
    smooth: bool = True,
) -> plt.Figure:
    """A picture, and beside it the same picture under each map, as `overlay` draws it in mode "heat".

    image: what `load_image` takes, as the model saw it. maps: (rows, cols), or (rows, cols, 3) for colors, by name, at
    most five. Below each is its own color bar: from 0 to its largest value, from −max to max if some are negative, or
    between its `limits`, given by the same name. query: the (row, column) of a patch, marked in all of them. Raises
    ValueError for more maps or other shapes, IndexError for a patch outside the grid.
    """
    _check_count(maps, 5)
    picture, (height, width) = load_image(image), grid.image
    if query is not None:
        grid.index(*query)
    side = min(200, (WIDTH - 2 * EDGE + GAP) // (len(maps) + 1) - GAP)
    tall = round(side * height / width)
    below = 46 if any(np.ndim(each) == 2 for each in maps.values()) else EDGE
    with styled():
        figure = page(2 * EDGE + (len(maps) + 1) * (side + GAP) - GAP, TOP + tall + below)
        for k, (name, each) in enumerate({"Input": None, **maps}.items()):
            x = EDGE + k * (side + GAP)
            ax = place(figure, x, TOP, side, tall)
            write(figure, x + side / 2, TOP - 8, name, ha="center", size=9.5)
            if each is None:
                ax.imshow(picture, extent=(0, width, height, 0))
            else:
                of = (limits or {}).get(name)
                overlay(picture, each, grid=grid, ax=ax, mode="heat", smooth=smooth, limits=of, colorbar=False)
                if ax.images[-1].get_array().ndim == 2:
                    bar(figure, ax.images[-1], x + side // 6, TOP + tall + 12, side - 2 * (side // 6), 9)
            ax.set_aspect("auto")
            mark(ax, query, grid.patch)
    return figure


def all_heads(weights, *, query: tuple[int, int] | None = None, scale: str = "each") -> plt.Figure:
    """The attention of every head of every layer from one query: a column for each layer, a row for each head.

    weights: (L, H, rows, cols). query: (row, column) of the patch that asks, counted from 0 and marked by a white
    frame; None for another token. scale: "each", every head up to its own largest weight, which is written below it;
    or "shared", one scale for all. The figure says which.
    """
    values = array(weights, 4, "Attention of shape (layers, heads, rows, cols)", "give one query’s weights")
    if scale not in ("each", "shared"):
        raise ValueError(f'A scale "each" or "shared" was wanted, but {scale!r} came; choose one of them.')
    layers, heads, rows, cols = values.shape
    if query is not None:
        TokenGrid(rows, cols, (1, 1)).index(*query)
    left, top, apart, below = 56, 66, 8, 18
    width = max(8, min(92, (WIDTH - left - EDGE) // layers - apart, (1100 // heads - below) * cols // rows))
    height = round(width * rows / cols)
    across, down = width + apart, height + below
    wide, tall = layers * across - apart, heads * down
    with styled():
        figure = page(max(left + wide + EDGE, 630), top + tall + 30)
        source = "" if query is None else f" from patch (row {query[0]}, column {query[1]})"
        write(figure, EDGE, 14, f"Attention of each head of each layer{source}", va="top", size=11)
        ax = place(figure, left, top, wide, tall)
        for layer, head in np.ndindex(layers, heads):
            x, y, weight = layer * across, head * down, values[layer, head]
            show(ax, weight, x, y, width, height, **colors(weight if scale == "each" else values))
            most = f"{100 * weight.max():.3g}"
            ax.text(x + width / 2, y + height + 3, most, ha="center", va="top", size=7, color="0.35")
            mark(ax, query, (height / rows, width / cols), (x, y))
        ax.set(xlim=(0, wide), ylim=(tall, 0))
        ax.set_xticks([layer * across + width / 2 for layer in range(layers)], [f"{k}" for k in range(layers)])
        ax.set_yticks([head * down + height / 2 for head in range(heads)], [f"head {k}" for k in range(heads)])
        ax.tick_params(length=0, labeltop=True, labelbottom=False)
        write(figure, left - 8, top - 6, "layer", ha="right", size=8.5)
        how = "each from 0 to its own largest" if scale == "each" else f"one scale, 0 to {100 * values.max():.3g} %"
        note = f"Colors: attention weight, {how}. Below each: its largest weight in per cent."
        write(figure, EDGE, top + tall + 6, note, va="top", size=8.5, color="0.35")
    return figure


def _check_count(maps: Mapping[str, object], most: int = 6) -> None:
    if not 1 <= len(maps) <= most:
        raise ValueError(f"Between 1 and {most} maps fit in a line, but {len(maps)} came; draw several figures.")
