"""Maps side by side, each with a scale of its own."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt

from vitlens.plot.style import WIDTH, array, colours, page, place, show, styled, write


def tiles(maps: Mapping[str, object], *, signed: bool = False) -> plt.Figure:
    """Maps in a line, their names above, and below each its own colour bar with the values of its ends.

    maps: (rows, cols) by name, at most six, of any shapes. Colours reach from 0 to the largest value, or from −max to
    max where a map holds negative ones; with `signed` they do so in all of them. NaN is grey. Raises ValueError for
    more maps or other axes.
    """
    if not 1 <= len(maps) <= 6:
        raise ValueError(f"Between 1 and 6 maps fit in a line, but {len(maps)} came; draw them in several figures.")
    values = {n: array(m, 2, "A map of shape (rows, cols)", "give one map for each name") for n, m in maps.items()}
    edge, gap, top = 14, 16, 34
    side = min(240, (WIDTH - 2 * edge + gap) // len(values) - gap)
    tall = max(round(side * v.shape[0] / v.shape[1]) for v in values.values())
    across = max(2 * edge + len(values) * (side + gap) - gap, 240)
    with styled():
        figure = page(across, top + tall + 54)
        for k, (name, each) in enumerate(values.items()):
            x, height = edge + k * (side + gap), round(side * each.shape[0] / each.shape[1])
            ax = place(figure, x, top, side, height)
            shown = show(ax, each, 0, 0, *each.shape[::-1], **colours(each, signed=signed or None))
            write(figure, x + side / 2, top - 8, name, ha="center", size=9.5)
            bar = place(figure, x + side // 6, top + tall + 12, side - 2 * (side // 6), 9)
            ends = [0, shown.norm.vmax] if shown.norm.vmin == 0 else [shown.norm.vmin, 0, shown.norm.vmax]
            key = figure.colorbar(shown, cax=bar, orientation="horizontal")
            key.set_ticks(ends, labels=[f"{end:.2g}".replace("-", "−") for end in ends])
            key.outline.set_visible(False)
    return figure
