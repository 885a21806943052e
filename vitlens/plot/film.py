"""Snapshots of a training run: its four inspection figures over the steps.

They take the result of `vitlens.train.snapshots.load`, S snapshots of one run: `filters` (S, k, p, p, C), `positions`
(S, rows, cols, rows, cols), `distances` (S, L, H), `rollout` (S, N, rows, cols), `steps` (S,) and `prefix` (S,), the
number of prefix tokens, by default 1. All snapshots share one scale: distances over their range, rollouts from 0 to
their maximum, cosines from −1 to 1. Only filters are scaled tile by tile, as in `filters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np

from vitlens.plot.charts import number_layers, strip
from vitlens.plot.mosaics import about_gray, colored, mosaic, shown_positions
from vitlens.plot.style import REFERENCE, WIDTH, array, beside, colors, page, scale_bar, styled
from vitlens.recorder.grid import TokenGrid

GAP = 0.08
"""Gap between two tiles, as a share of their size."""
AXES = {"filters": 5, "positions": 5, "distances": 3, "rollout": 4}
"""Number of axes of each array of snapshots."""
NAMES = (
    "Embedding filters",
    "Position embedding similarity",
    "Mean attention distance (pixels)",
    "Attention rollout",
)
SHORT = (
    "Embedding\nfilters",
    "Position\nsimilarity",
    "Attention\ndistance (px)",
    "Attention\nrollout",
)


def snapshot(snapshots: Mapping, index: int = -1) -> plt.Figure:
    """The four figures at snapshot number `index`.

    They show 28 filters, all heads, the rollouts of eight images, and as many positions as stay readable. snapshots: as
    in `help(vitlens.plot.film)`.

    >>> shapes = dict(filters=(2, 3, 4, 4, 3), positions=(2, 2, 2, 2, 2), distances=(2, 1, 1), rollout=(2, 1, 2, 2))
    >>> run = {name: np.random.rand(*shape) for name, shape in shapes.items()} | {"steps": [0, 9]}
    >>> figure = vitlens.plot.snapshot(run)
    """
    run = _checked(snapshots)
    with styled():
        figure = page(WIDTH, 698)
        figure.suptitle(f"Step {run.steps[index]:,}", x=0.01, ha="left", size=12, weight="bold")
        axes = figure.subplots(2, 2, width_ratios=[1.2, 1], height_ratios=[1.6, 1]).ravel()
        for ax, name in zip(axes, NAMES, strict=True):
            ax.set_title(name, size=10.5)
        scales = _draw(run, index, axes, filters=(7, 28), rollouts=(4, 8), size=5)
        axes[2].set_xlabel("Network depth (layer); dashed: uniform attention")
        for ax, scale in zip(axes[1::2], scales, strict=True):
            scale_bar(scale, size=8, cax=beside(ax, 320))
    return figure


def film_strip(
    snapshots: Mapping, indices: Sequence[int] | None = None, *, labels: Sequence[str] | None = None
) -> plt.Figure:
    """The four figures in a column for each of several snapshots.

    They show the first nine filters, as many positions as stay readable, all heads, and the rollouts of the first four
    images. snapshots: as in `help(vitlens.plot.film)`. indices: numbers of the snapshots, by default all, or seven
    evenly spread ones. labels: a heading for each column, by default its step.

    >>> shapes = dict(filters=(2, 3, 4, 4, 3), positions=(2, 2, 2, 2, 2), distances=(2, 1, 1), rollout=(2, 1, 2, 2))
    >>> run = {name: np.random.rand(*shape) for name, shape in shapes.items()} | {"steps": [0, 9]}
    >>> figure = vitlens.plot.film_strip(run)
    """
    run = _checked(snapshots)
    if indices is None:
        indices = np.linspace(0, len(run.steps) - 1, min(7, len(run.steps))).round().astype(int)
    labels = [f"step {run.steps[index]:,}" for index in indices] if labels is None else labels
    side = min(174, (WIDTH - 110) / len(indices))
    with styled():
        figure = page(side * len(indices) + 110, 4 * (side + 6) + 60, "compressed", margin=0.03)
        grid = figure.subplots(4, len(indices), squeeze=False)
        for axes, index, label in zip(grid.T, indices, labels, strict=True):
            axes[0].set_title(label, size=10, loc="left")
            scales = _draw(run, index, axes, filters=(3, 9), rollouts=(2, 4), size=3.5)
            axes[2].set_box_aspect(1)
            axes[2].tick_params(labelleft=axes[2] is grid[2, 0], labelsize=7.5)
        for ax, name in zip(grid[:, 0], SHORT, strict=True):
            ax.set_ylabel(name, size=8.5, color="0.35")
        for ax, scale in zip(grid[1::2, -1], scales, strict=True):
            scale_bar(scale, size=8, cax=beside(ax, side))
        figure.supxlabel(
            "Dots: heads, by layer. Dashed: uniform attention.", size=8.5, color="0.35"
        )
    return figure


def _checked(snapshots: Mapping) -> SimpleNamespace:
    """The arrays of a run, its steps, and the distance of uniform attention."""
    run = {
        name: array(snapshots[name], axes, f"An array {name} of {axes} axes")
        for name, axes in AXES.items()
    }
    prefix = int(snapshots["prefix"][0]) if "prefix" in snapshots else 1
    grid = TokenGrid(*run["positions"].shape[1:3], run["filters"].shape[2:4], prefix)
    return SimpleNamespace(
        **run, steps=np.asarray(snapshots["steps"]), uniform=grid.uniform_distance()
    )


def _draw(
    run: SimpleNamespace,
    index: int,
    axes,
    filters: tuple[int, int],
    rollouts: tuple[int, int],
    size: float,
):
    """Draw the four figures of a snapshot, and return the color scales of the positions and of the rollouts.

    filters, rollouts: number in a line, and in total. size: of a dot, in points.
    """
    first, second, third, fourth = axes
    real = (
        np.abs(run.filters).max((0, 2, 3, 4)) > 0
    )  # a small patch has fewer components, padded with zeros
    _tiles(first, about_gray(run.filters[index, real][: filters[1]]), filters[0])
    _, across, tiles, cosines = shown_positions(run.positions[index])
    _tiles(second, tiles, len(across))
    strip(third, run.distances[index], size)
    number_layers(third, run.distances.shape[1])
    third.axhline(run.uniform, **REFERENCE)
    third.set_ylim(
        0.95 * min(run.distances.min(), 0.8 * run.uniform),
        1.05 * max(run.distances.max(), run.uniform),
    )
    third.locator_params(axis="y", nbins=4)
    tiles, shares = colored(
        run.rollout[index, : rollouts[1]], **colors(run.rollout[:, : rollouts[1]])
    )
    _tiles(fourth, tiles, rollouts[0])
    return cosines, shares


def _tiles(ax: plt.Axes, tiles: np.ndarray, cols: int) -> None:
    """Draw a mosaic in the upper left of its axes."""
    ax.set_anchor("NW")
    mosaic(ax, tiles, min(cols, len(tiles)), (GAP * tiles.shape[1], GAP * tiles.shape[2]))
