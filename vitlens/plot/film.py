"""The four inspection figures of one moment of training, and of several moments side by side (paper, Fig. 6 and 7).

Both functions take what `vitlens.train.snapshots.load` returns, S snapshots of one run: `filters` (S, k, p, p, C),
`positions` (S, rows, cols, rows, cols), `distances` (S, L, H), `rollout` (S, N, rows, cols) and `steps` (S,); `prefix`
(S,), how many tokens are no patches, is taken to be one where it is left out. One scale holds for all snapshots, so
that what seems to change does change: distances and rollouts from 0 to the largest of all, cosines from −1 to 1. Only
filters are scaled tile by tile, as in `filters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from vitlens.plot.charts import strip
from vitlens.plot.mosaics import about_gray, extent, mosaic
from vitlens.plot.style import REFERENCE, WIDTH, array, color_map, colors, page, place, scale_bar, styled, write
from vitlens.recorder.grid import TokenGrid

AXES = {"filters": 5, "positions": 5, "distances": 3, "rollout": 4}
GAP = 3  # pixels between tiles
NAMES = "Embedding filters", "Position embedding similarity", "Mean attention distance (pixels)", "Attention rollout"


def snapshot(snapshots: Mapping, index: int = -1) -> plt.Figure:
    """The four figures at snapshot number `index`: 28 filters, all heads, the rollouts of eight images, and as many of
    the positions as stay readable. snapshots: see the module."""
    run = _Run(snapshots)
    index = run.number(index)
    with styled():
        figure = page(WIDTH, 698)
        write(figure, 14, 12, f"Step {run.steps[index]:,}", va="top", size=12, weight="bold")
        write(figure, 14, 68, NAMES[0], size=10.5)
        run.draw_filters(figure, index, (14, 78, 466, 341), cols=7, most=28)
        write(figure, 490, 68, NAMES[1], size=10.5)
        shown = run.draw_positions(figure, index, (490, 78, 341, 341))
        scale_bar(shown, size=8, cax=place(figure, 838, 78, 10, 341))
        write(figure, 14, 454, f"{NAMES[2]}; dashed: uniform attention", size=10.5)
        run.draw_distances(figure, index, (44, 468, 416, 178)).set(xlabel="Network depth (layer)")
        write(figure, 490, 454, NAMES[3], size=10.5)
        shown = run.draw_rollouts(figure, index, (490, 464, 341, 222), cols=4, most=8)
        scale_bar(shown, size=8, cax=place(figure, 838, 464, 10, 163))
    return figure


def film_strip(
    snapshots: Mapping, indices: Sequence[int] | None = None, *, labels: Sequence[str] | None = None
) -> plt.Figure:
    """The four figures, one below the other, at several snapshots, side by side.

    snapshots: see the module. indices: which of them, at most nine; by default all, or seven evenly spread ones if
    there are more. labels: a heading for each column, by default its step. Shown are the first nine filters, as many of
    the positions as stay readable, all heads, and the rollouts of the first four images.
    """
    run = _Run(snapshots)
    if indices is None:
        indices = np.linspace(0, len(run.steps) - 1, min(7, len(run.steps))).round().astype(int)
    indices = [run.number(index) for index in indices]
    labels = [f"step {run.steps[index]:,}" for index in indices] if labels is None else labels
    if len(labels) != len(indices) or not 1 <= len(indices) <= 9:
        raise ValueError(
            f"{len(indices)} snapshots and {len(labels)} labels. Choose one to nine, and a label for each."
        )
    left, gap, right, heading = 32, 9, 62, 30
    side = int(min(174, (WIDTH - left - right) / len(indices) - gap))
    rows = [58 + row * (side + heading) + (row == 3) * 18 for row in range(4)]  # room for the layers below the third
    end = left + len(indices) * (side + gap)
    with styled():
        figure = page(max(end + right, 480), rows[-1] + side + 10)  # at least as wide as the longest heading
        for y, name in zip(rows, NAMES, strict=True):
            name += " by layer; dashed: uniform attention" * (name == NAMES[2])
            write(figure, left, y - 9, name, size=9, color="0.35")
        for column, (index, label) in enumerate(zip(indices, labels, strict=True)):
            x = left + column * (side + gap)
            boxes = [(x, y, side, side) for y in rows]
            write(figure, x, 24, label, size=10.5)
            run.draw_filters(figure, index, boxes[0], cols=3, most=9)
            similarity = run.draw_positions(figure, index, boxes[1])
            run.draw_distances(figure, index, boxes[2], size=3.5).tick_params(labelleft=column == 0, labelsize=7.5)
            rollout = run.draw_rollouts(figure, index, boxes[3], cols=2, most=4)
        for shown, y in ((similarity, rows[1]), (rollout, rows[3])):
            scale_bar(shown, size=8, cax=place(figure, end + 2, y, 10, side))
    return figure


class _Run:
    """The arrays of a run, checked, and how each of the four figures of a snapshot is drawn into a box of a page.

    A box is (x, y, width, height) in pixels from the left and the top; what is drawn begins at its upper left corner.
    """

    def __init__(self, snapshots: Mapping):
        missing = [name for name in (*AXES, "steps") if name not in snapshots]
        if missing:
            raise ValueError(
                f"The snapshots lack {' and '.join(missing)}. Give what `vitlens.train.snapshots.load` returns."
            )
        self.steps = np.asarray(snapshots["steps"])
        for name, axes in AXES.items():
            values = array(snapshots[name], axes, f"An array {name} of {axes} axes", "Stack the snapshots of one run")
            if len(values) != len(self.steps):
                raise ValueError(
                    f"{len(values)} snapshots of {name}, but {len(self.steps)} steps. Give those of one run."
                )
            setattr(self, name, values)
        prefix = int(snapshots["prefix"][0]) if "prefix" in snapshots else 1
        self.uniform = TokenGrid(*self.positions.shape[1:3], self.filters.shape[2:4], prefix).uniform_distance()

    def number(self, index: int) -> int:
        """The number of a snapshot, also for an index that counts from the end."""
        count = len(self.steps)
        if not -count <= index < count:
            raise IndexError(f"There is no snapshot {index}: there are {count}, counted from 0.")
        return int(index) % count

    def draw_filters(self, figure: plt.Figure, index: int, box, cols: int, most: int) -> None:
        real = np.abs(self.filters).max((0, 2, 3, 4)) > 0  # a small patch has fewer components; zeros fill up
        _mosaic(figure, box, about_gray(self.filters[index, real][:most]), cols)

    def draw_positions(self, figure: plt.Figure, index: int, box):
        rows, cols = self.positions.shape[1:3]
        most = max(rows, cols)
        fits = [n for n in range(1, most) if _cell(box, (rows, cols), (-(-rows // n), -(-cols // n))) > 1]
        every = fits[0] if fits else most
        down, across = (range((n - 1) % every // 2, n, every) for n in (rows, cols))
        tiles = self.positions[index][down][:, across].reshape(-1, rows, cols)
        return _mosaic(figure, box, tiles, len(across), cmap=color_map("RdBu_r"), vmin=-1, vmax=1)

    def draw_rollouts(self, figure: plt.Figure, index: int, box, cols: int, most: int):
        return _mosaic(figure, box, self.rollout[index, :most], cols, **colors(self.rollout[:, :most]))

    def draw_distances(self, figure: plt.Figure, index: int, box, size: float = 5) -> plt.Axes:
        layers = self.distances.shape[1]
        ax = place(figure, *box)
        ax.spines[["left", "bottom"]].set_visible(True)
        strip(ax, self.distances[index], size)
        ax.axhline(self.uniform, **REFERENCE)
        ax.set_ylim(0, 1.08 * max(self.distances.max(), self.uniform))
        ax.set_xticks(range(0, layers, -(-layers // (int(box[2]) // 17))))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        return ax


def _mosaic(figure: plt.Figure, box, tiles: np.ndarray, cols: int, **scale):
    """One of the pictures of a mosaic in the upper left corner of a box, as large as whole pixels a cell allow."""
    cols = min(cols, len(tiles))
    h, w = tiles.shape[1:3]
    cell = max(1, _cell(box, (h, w), (-(-len(tiles) // cols), cols)))
    size, gap = (h * cell, w * cell), (GAP, GAP)
    tall, wide = extent(len(tiles), cols, size, gap)
    return mosaic(place(figure, *box[:2], wide, tall), tiles, cols, size, gap, **scale)[-1]


def _cell(box, tile: tuple[int, int], tiles: tuple[int, int]) -> int:
    """Pixels that a cell may have if so many tiles of (h, w) cells are to fit into the box."""
    return int(min(((room + GAP) // n - GAP) // cells for room, n, cells in zip(box[:1:-1], tiles, tile, strict=True)))
