"""Snapshots of a training run: its four inspection figures over the steps, and what it predicts for hidden patches.

`snapshot` and `film_strip` take what `vitlens.train.snapshots.load` returns, S snapshots of one run: `filters`
(S, k, p, p, C), `positions` (S, rows, cols, rows, cols), `distances` (S, L, H), `rollout` (S, N, rows, cols), `steps`
(S,) and `prefix` (S,), the number of tokens that are no patches, one where it is left out. One scale holds for all
snapshots: distances and rollouts from 0 to the largest of all, cosines from −1 to 1. Only filters are scaled tile by
tile, as in `filters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from vitlens.plot.charts import strip
from vitlens.plot.heatmaps import bare
from vitlens.plot.mosaics import about_gray, mosaic, shown_positions
from vitlens.plot.style import REFERENCE, WIDTH, array, colors, page, scale_bar, styled
from vitlens.recorder.grid import TokenGrid

GAP = 0.08
"""Room between two pictures, as a share of their size."""
NAMES = "Embedding filters", "Position embedding similarity", "Mean attention distance (pixels)", "Attention rollout"
SHORT = "Embedding\nfilters", "Position\nsimilarity", "Attention\ndistance (px)", "Attention\nrollout"
HIDDEN = (0.5, 0.5, 0.5)
SHARP = 8
"""Pixels that a cell of a prediction is drawn with."""


def snapshot(snapshots: Mapping, index: int = -1) -> plt.Figure:
    """The four figures at snapshot number `index`: 28 filters, all heads, the rollouts of eight images, and as many of
    the positions as stay readable. snapshots: see the module."""
    run = _Run(snapshots)
    with styled():
        figure = page(WIDTH, 698, "constrained")
        figure.suptitle(f"Step {run.steps[index]:,}", x=0.01, ha="left", size=12, weight="bold")
        (first, second), (third, fourth) = figure.subplots(2, 2, width_ratios=[1.2, 1], height_ratios=[1.6, 1])
        run.draw_filters(first, index, cols=7, most=28)
        similarity = run.draw_positions(second, index)
        run.draw_distances(third, index)
        rollout = run.draw_rollouts(fourth, index, cols=4, most=8)
        for ax, name in zip((first, second, third, fourth), NAMES, strict=True):
            ax.set_title(name, loc="left", size=10.5)
        third.set_xlabel("Network depth (layer); dashed: uniform attention")
        scale_bar(similarity, size=8, ax=second, fraction=0.04, pad=0.02)
        scale_bar(rollout, size=8, ax=fourth, fraction=0.04, pad=0.02)
    return figure


def film_strip(
    snapshots: Mapping, indices: Sequence[int] | None = None, *, labels: Sequence[str] | None = None
) -> plt.Figure:
    """The four figures, one below the other, at several snapshots, side by side.

    snapshots: see the module. indices: which of them; by default all, or seven evenly spread ones if there are more.
    labels: a heading for each column, by default its step. Shown are the first nine filters, as many of the positions
    as stay readable, all heads, and the rollouts of the first four images.
    """
    run = _Run(snapshots)
    if indices is None:
        indices = np.linspace(0, len(run.steps) - 1, min(7, len(run.steps))).round().astype(int)
    labels = [f"step {run.steps[index]:,}" for index in indices] if labels is None else labels
    side = min(174, (WIDTH - 110) / len(indices))
    with styled():
        figure = page(side * len(indices) + 110, 4 * (side + 12) + 70, "constrained", margin=0.03)
        grid = figure.subplots(4, len(indices) + 1, width_ratios=[*[side] * len(indices), 10], squeeze=False)
        for axes, index, label in zip(grid.T, indices, labels, strict=False):
            first, second, third, fourth = axes
            first.set_title(label, size=10)
            run.draw_filters(first, index, cols=3, most=9)
            similarity = run.draw_positions(second, index)
            run.draw_distances(third, index, size=3.5)
            third.tick_params(labelleft=third is grid[2, 0], labelsize=7.5)
            rollout = run.draw_rollouts(fourth, index, cols=2, most=4)
        for ax, name in zip(grid[:, 0], SHORT, strict=True):
            ax.set_ylabel(name, size=8.5, color="0.35")
        for ax in grid[::2, -1]:
            ax.axis("off")
        scale_bar(similarity, size=8, cax=grid[1, -1])
        scale_bar(rollout, size=8, cax=grid[3, -1])
        figure.supxlabel("Dots: heads, by layer. Dashed: uniform attention.", size=8.5, color="0.35")
    return figure


class _Run:
    """The arrays of a run, and how each of the four figures of a snapshot is drawn into its axes."""

    def __init__(self, snapshots: Mapping):
        self.steps = np.asarray(snapshots["steps"])
        self.filters, self.positions, self.distances, self.rollout = (
            array(snapshots[name], ndim, f"An array {name} of {ndim} axes")
            for name, ndim in (("filters", 5), ("positions", 5), ("distances", 3), ("rollout", 4))
        )
        prefix = int(snapshots["prefix"][0]) if "prefix" in snapshots else 1
        self.uniform = TokenGrid(*self.positions.shape[1:3], self.filters.shape[2:4], prefix).uniform_distance()

    def draw_filters(self, ax: plt.Axes, index: int, cols: int, most: int) -> None:
        real = np.abs(self.filters).max((0, 2, 3, 4)) > 0  # a small patch has fewer components; zeros fill up
        _tiles(ax, about_gray(self.filters[index, real][:most]), cols)

    def draw_positions(self, ax: plt.Axes, index: int):
        rows, cols = self.positions.shape[1:3]
        down, across = shown_positions(rows, cols)
        tiles = self.positions[index][down][:, across].reshape(-1, rows, cols)
        return _tiles(ax, tiles, len(across), **colors(tiles, signed=True) | {"vmin": -1, "vmax": 1})

    def draw_rollouts(self, ax: plt.Axes, index: int, cols: int, most: int):
        return _tiles(ax, self.rollout[index, :most], cols, **colors(self.rollout[:, :most]))

    def draw_distances(self, ax: plt.Axes, index: int, size: float = 5) -> None:
        strip(ax, self.distances[index], size)
        ax.axhline(self.uniform, **REFERENCE)
        ax.set_ylim(0, 1.08 * max(self.distances.max(), self.uniform))
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(4))


def _tiles(ax: plt.Axes, tiles: np.ndarray, cols: int, **scale):
    """Draw a mosaic in the upper left of its axes and return one of its images."""
    ax.set_anchor("NW")
    return mosaic(ax, tiles, min(cols, len(tiles)), (GAP * tiles.shape[1], GAP * tiles.shape[2]), **scale)[-1]


def filled_in(pictures, snapshots: Mapping, indices: Sequence[int] | None = None) -> plt.Figure:
    """Pictures, what the model saw of them, and what it said at several snapshots of its training, side by side.

    pictures: (N, H, W, 3) in 0…1, the first probe images of the run. snapshots: what `vitlens.train.snapshots.load`
    returns of a run without labels: `steps` (S,), `corrupted` and `source` (S, N, rows, cols) and `predicted`
    (S, N, h, w, 3), of which h and w are multiples of rows and cols. indices: which snapshots; by default
    five spread evenly. Gray patches were hidden; a patch that stands at the place of another is shown there. Predicted
    patches are drawn in full, the others, which the model was not asked about, smaller and as the target has them. The
    last column is the target, the picture averaged to the resolution of the predictions.
    """
    pictures = np.clip(array(pictures, 4, "Pictures of shape (N, H, W, 3)"), 0, 1)
    steps = np.asarray(snapshots["steps"])
    if indices is None:
        indices = np.unique(np.linspace(0, len(steps) - 1, min(5, len(steps))).round().astype(int))
    predicted = np.asarray(snapshots["predicted"], dtype=float)
    corrupted, source = (np.asarray(snapshots[name])[0].astype(int) for name in ("corrupted", "source"))
    count = min(len(pictures), len(corrupted))
    size = predicted.shape[2:4]
    target = _averaged(pictures[:count], size)
    columns = [("picture", pictures[:count]), ("input", _seen(pictures[:count], source[:count]))]
    columns += [(f"step {steps[k]:,}", _predicted(predicted[k][:count], target, corrupted[:count])) for k in indices]
    columns += [("target", target)]
    side = min(150, WIDTH // len(columns))
    with styled():
        size = side * len(columns), 30 + count * side * pictures.shape[1] / pictures.shape[2]
        figure = page(*size, "compressed", margin=0.03)
        axes = figure.subplots(count, len(columns), squeeze=False)
        for (title, images), line in zip(columns, axes.T, strict=True):
            line[0].set_title(title, size=9, pad=4)
            for ax, image in zip(line, images, strict=True):
                ax.imshow(image, interpolation="nearest")
                bare(ax)
    return figure


def _averaged(pictures: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(N, h, w, 3) the means of the pixels of each cell."""
    n, height, width, _ = pictures.shape
    return pictures.reshape(n, size[0], height // size[0], size[1], width // size[1], 3).mean((2, 4))


def _predicted(predicted: np.ndarray, target: np.ndarray, corrupted: np.ndarray) -> np.ndarray:
    """(N, SHARP · h, SHARP · w, 3) predictions of corrupted patches; the others smaller, on white, as in the target."""
    cells = np.ones((1, SHARP, SHARP, 1))
    height, width = (n * SHARP // m for n, m in zip(target.shape[1:3], corrupted.shape[1:], strict=True))
    inside = np.zeros((height, width))
    inside[height // 4 : -(height // 4), width // 4 : -(width // 4)] = 1
    asked = np.kron(corrupted, np.ones((1, height, width)))[..., None] > 0
    small = np.tile(inside, corrupted.shape[1:])[..., None] > 0
    return np.where(asked, np.kron(predicted, cells), np.where(small, np.kron(target, cells), 1.0))


def _seen(pictures: np.ndarray, source: np.ndarray) -> np.ndarray:
    """(N, H, W, 3) pictures whose patches are those of `source` (N, rows, cols), gray where it is −1."""
    (n, height, width, _), (rows, cols) = pictures.shape, source.shape[1:]
    patches = pictures.reshape(n, rows, height // rows, cols, width // cols, 3).swapaxes(2, 3)
    patches = patches.reshape(n, rows * cols, *patches.shape[3:])
    found = patches[np.arange(n)[:, None], source.reshape(n, -1)]
    found[source.reshape(n, -1) < 0] = HIDDEN
    return found.reshape(n, rows, cols, *found.shape[2:]).swapaxes(2, 3).reshape(pictures.shape)
