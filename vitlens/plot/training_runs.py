"""Training runs: their curves, and their snapshots, four inspection figures over the steps.

`snapshot` and `film_strip` take the result of `vitlens.train.snapshots.load`, S snapshots of one run: `filters` (S, k,
p, p, C), `positions` (S, rows, cols, rows, cols), `distances` (S, L, H), `rollout` (S, N, rows, cols), `steps` (S,) and
`prefix` (S,), the number of prefix tokens, by default 1. All snapshots share one scale: distances over their range,
rollouts from 0 to their maximum (uniform ones as in `vitlens.plot.overlay`), cosines from −1 to 1. Only filters are
scaled tile by tile, as in `filters`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np

from vitlens.files import read_text
from vitlens.plot.attention import draw_distances, number_layers
from vitlens.plot.inspection import about_gray, shown_positions
from vitlens.plot.mosaic import map_colors, mosaic
from vitlens.plot.scales import as_drawn, colors
from vitlens.plot.style import (
    SERIES,
    WIDTH,
    array,
    beside,
    charts,
    page,
    reference,
    scale_bar,
    use_style,
)
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


def training(records, *, marks: Mapping[str, int] | None = None) -> plt.Figure:
    """Loss, validation accuracy (or loss, without labels) and learning rate of a run against its steps.

    records: the directory of a run, its `log.jsonl`, or the `Step`s of `vitlens.train.fit` in order. The x-axes end at
    the last step of the whole run, so a figure that is redrawn during training keeps its scale. Without records the
    axes are empty. The legend at the foot has the last accuracy. marks: steps by label, drawn as dashed lines in the
    first panel. Raises ValueError without a log.

    >>> figure = vitlens.plot.training([{"step": 1, "steps": 2, "loss": 2.3, "rate": 1.0}])
    """
    import pandas as pd

    if isinstance(records, str | os.PathLike):
        path = Path(records) / "log.jsonl" if Path(records).is_dir() else Path(records)
        if not path.exists():
            raise ValueError(
                f"Found no log at {path}. Give the directory of a run, or its log.jsonl."
            )
        records = [json.loads(line) for line in read_text(path, pipes=True).splitlines()]
    table = pd.json_normalize(
        [record if isinstance(record, Mapping) else vars(record) for record in records]
    )
    if "lr" in table:
        table["rate"] = table["rate"].fillna(table["lr"]) if "rate" in table else table["lr"]
    has_labels = "metrics.valid_loss" not in table
    if has_labels:
        metric, unit, measured = "top1", "{:.1f} %", "Accuracy on validation images (%)"
    else:
        metric, unit, measured = "valid_loss", "{:.3g}", "Loss on validation images"
    with use_style():
        titles = "Loss of the batch", measured, "Learning rate, share of its peak"
        figure, axes = charts(titles, 900, 300)
        loss, valid, rate = axes
        _draw_column(loss, table, "loss", color=SERIES[0])
        _draw_column(rate, table, "rate", color="0.35")
        for color, name, column in (
            (SERIES[0], "weights", f"metrics.{metric}"),
            (SERIES[1], "their moving average", f"metrics.{metric}_average"),
        ):
            line = _draw_column(
                valid, table, column, color=color, marker="o", markersize=3, clip_on=False
            )
            if line is not None:
                line.set_label(f"{name}: {unit.format(line.get_ydata()[-1])}")
        for name, step in (marks or {}).items():
            loss.axvline(step, **reference(loss))
            loss.annotate(
                f"{name} ",
                (step, 0.04),
                ha="right",
                size=8.5,
                xycoords=("data", "axes fraction"),
                annotation_clip=True,
            )
        last = table["steps"].iloc[-1] if len(table) else 1
        for ax in axes:
            ax.set(xlim=(0, last), xlabel="Step")
        if valid.lines:
            figure.legend(
                *valid.get_legend_handles_labels(),
                loc="outside lower center",
                ncols=2,
                frameon=False,
            )
        highest = table.filter(regex="^loss$|valid_loss").max().max() if len(table) else np.nan
        loss.set_ylim(0, 1.08 * highest if highest > 0 else 1.08)
        valid.set_ylim(*(0, 100) if has_labels else loss.get_ylim())
        rate.set_ylim(0, 1.05)
    return figure


def _draw_column(ax: plt.Axes, table, column: str, **options):
    """Draw a column of the table against the steps. Returns the line, or None if the column is missing or empty."""
    if column not in table:
        return None
    curve = table[["step", column]].dropna().astype(float)
    if curve.empty:
        return None
    (line,) = ax.plot(curve["step"], curve[column], **options)
    return line


def snapshot(snapshots: Mapping, index: int = -1) -> plt.Figure:
    """The four figures at snapshot number `index`.

    They show 28 filters, all heads, the rollouts of eight images, and as many positions as stay readable. snapshots: as
    in `help(vitlens.plot.training_runs)`.

    >>> shapes = dict(filters=(2, 3, 4, 4, 3), positions=(2, 2, 2, 2, 2), distances=(2, 1, 1), rollout=(2, 1, 2, 2))
    >>> run = {name: np.random.rand(*shape) for name, shape in shapes.items()} | {"steps": [0, 9]}
    >>> figure = vitlens.plot.snapshot(run)
    """
    run = _read_snapshots(snapshots)
    with use_style():
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
    images. snapshots: as in `help(vitlens.plot.training_runs)`. indices: numbers of the snapshots, by default all, or
    seven evenly spread ones. labels: a heading for each column, by default its step.

    >>> shapes = dict(filters=(2, 3, 4, 4, 3), positions=(2, 2, 2, 2, 2), distances=(2, 1, 1), rollout=(2, 1, 2, 2))
    >>> run = {name: np.random.rand(*shape) for name, shape in shapes.items()} | {"steps": [0, 9]}
    >>> figure = vitlens.plot.film_strip(run)
    """
    run = _read_snapshots(snapshots)
    if indices is None:
        last = len(run.steps) - 1
        count = min(7, len(run.steps))
        indices = np.linspace(0, last, count).round().astype(int)
    if labels is None:
        labels = [f"step {run.steps[index]:,}" for index in indices]
    cols = len(indices)
    side = min(174, (WIDTH - 110) / cols)  # of a panel
    width = side * cols + 110
    height = 4 * (side + 6) + 60
    with use_style():
        figure = page(width, height, "compressed", margin=0.03)
        grid = figure.subplots(4, cols, squeeze=False)
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


def _read_snapshots(snapshots: Mapping) -> SimpleNamespace:
    """The arrays of a run, its steps, and the distance of uniform attention."""
    if isinstance(snapshots, str | os.PathLike):
        raise TypeError(
            f"Expected the arrays of snapshots, got the path {snapshots}. Pass "
            "vitlens.train.snapshots.load(path)."
        )
    run = SimpleNamespace(steps=np.asarray(snapshots["steps"]))
    for name, axes in AXES.items():
        values = array(snapshots[name], axes, f"An array {name} of {axes} axes")
        setattr(run, name, values)
    prefix = int(snapshots["prefix"][0]) if "prefix" in snapshots else 1
    rows, cols = run.positions.shape[1:3]
    patch = run.filters.shape[2:4]
    run.uniform = TokenGrid(rows, cols, patch, prefix).uniform_distance()
    return run


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
    filters_ax, positions_ax, distances_ax, rollouts_ax = axes
    cols, count = filters
    # a small patch has fewer components, padded with zeros
    largest = np.abs(run.filters).max((0, 2, 3, 4))
    components = run.filters[index, largest > 0]
    _draw_tiles(filters_ax, about_gray(components[:count]), cols)

    _, across, tiles, cosines = shown_positions(run.positions[index])
    _draw_tiles(positions_ax, tiles, len(across))

    draw_distances(distances_ax, run.distances[index], size)
    number_layers(distances_ax, run.distances.shape[1])
    distances_ax.axhline(run.uniform, **reference(distances_ax))
    low = 0.95 * min(run.distances.min(), 0.8 * run.uniform)
    high = 1.05 * max(run.distances.max(), run.uniform)
    distances_ax.set_ylim(low, high)
    distances_ax.locator_params(axis="y", nbins=4)

    cols, count = rollouts
    maps = run.rollout[:, :count]
    shown = np.stack([as_drawn(values) for values in maps[index]])
    tiles, shares = map_colors(shown, **colors(maps))
    _draw_tiles(rollouts_ax, tiles, cols)
    return cosines, shares


def _draw_tiles(ax: plt.Axes, tiles: np.ndarray, cols: int) -> None:
    """Draw a mosaic in the upper left of its axes."""
    ax.set_anchor("NW")
    count, height, width = tiles.shape[:3]
    mosaic(ax, tiles, min(cols, count), (GAP * height, GAP * width))
