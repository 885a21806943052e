"""Pictures beside what attention lets through of them, pictures beside each other, models beside each other."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import SubFigure
from matplotlib.patches import ConnectionPatch
from matplotlib.patheffects import withStroke

from vitlens.images import load_image
from vitlens.plot.charts import attention_distance
from vitlens.plot.heatmaps import GRAY, checked_grid, overlay, write_note
from vitlens.plot.mosaics import filters, position_similarity
from vitlens.plot.style import WIDTH, array, bare, page, styled

TITLES = {
    "filters": "Embedding filters", "positions": "Position similarity (cosine)",
    "distance": "Mean attention distance", "rollout": "Pictures, and what attention lets through",
}  # fmt: skip
LETTER = 7.5
"""Pixels of a letter, on average."""


def rollouts(images, maps, *, grid=None, captions=None) -> plt.Figure:
    """Pictures beside what attention lets through of them, "Input" and "Attention" (paper, Fig. 6 and 14).

    images and maps: as many of each as `overlay` takes one of. grid: one for all, or one for each. captions: a text
    below each pair. Up to three pairs are in a line, all of one height.
    """
    pictures = [load_image(image) for image in images]
    count = len(pictures)
    grids = grid if isinstance(grid, list | tuple) else [grid] * count
    if not count == len(maps) == len(grids):
        raise ValueError(f"Got {count} images, {len(maps)} maps and {len(grids)} grids. Give as many of each.")
    cols = min(count, 2 if count == 4 else 3)
    room = WIDTH / max(cols, 2)
    shapes = [picture.width / picture.height for picture in pictures]
    lines, heights, texts = [range(first, min(first + cols, count)) for first in range(0, count, cols)], [], []
    for line in lines:
        height = min(280, cols * room / 2 / sum(shapes[k] for k in line))
        for k in line:
            texts.append(textwrap.fill(str(captions[k]), int(2 * height * shapes[k] / LETTER)) if captions else "")
        heights.append(height + 34 + 15 * max(len(texts[k].splitlines()) for k in line))
    with styled():
        figure = page(cols * room, sum(heights))
        for part, line in zip(np.ravel(figure.subfigures(len(lines), height_ratios=heights)), lines, strict=True):
            ratios = [shapes[k] for k in line for _ in range(2)]
            axes = part.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0]
            for k, left, right in zip(line, axes[::2], axes[1::2], strict=True):
                left.imshow(pictures[k])
                overlay(pictures[k], maps[k], grid=grids[k], ax=right)
                for ax, name in ((left, "Input"), (right, "Attention")):
                    bare(ax)
                    ax.set_title(name, size=9, pad=4, color=GRAY)
                left.set_xlabel(texts[k], size=9, color=GRAY, x=1, parse_math=False)
    return figure


def correspondences(images, pairs, *, grids, titles=("A", "B"), note: str = "") -> plt.Figure:
    """Patches of two pictures that belong together, each pair joined by a line of one color.

    images: the two pictures, as the model saw them. pairs: (n, 2) numbers of patches, of the left and of the right
    picture, counted from 0 without prefix tokens. grids: of both. titles: above each picture; note: at the foot. Raises
    ValueError for patches that the grids do not have.
    """
    pairs = array(pairs, 2, "Pairs of patches of shape (n, 2)").astype(int)
    most = [grid.rows * grid.cols for grid in grids]
    if pairs.min() < 0 or (pairs.max(0) >= most).any():
        raise ValueError(f"Patches must be below {most[0]} and {most[1]}, got {pairs.min()} to {pairs.max()}.")
    shapes = [grid.image[1] / grid.image[0] for grid in grids]
    with styled():
        figure = page(WIDTH, min(340, 840 / sum(shapes)) + 40 + 24 * bool(note), "constrained")
        axes = figure.subplots(1, 2, width_ratios=shapes)
        for ax, image, grid, title in zip(axes, images, grids, titles, strict=True):
            picture = load_image(image)
            checked_grid((grid.rows, grid.cols), picture, grid)
            ax.imshow(picture, extent=(0, grid.image[1], grid.image[0], 0))
            ax.set_title(title, loc="left", size=9.5, pad=5, parse_math=False)
            bare(ax)
        rim = [withStroke(linewidth=3, foreground="0.1")]
        for color, pair in zip(plt.get_cmap("hsv")(np.linspace(0, 1, len(pairs), endpoint=False)), pairs, strict=True):
            ends = [
                ((number % grid.cols + 0.5) * grid.patch[1], (number // grid.cols + 0.5) * grid.patch[0])
                for number, grid in zip(pair, grids, strict=True)
            ]
            look = {"axesA": axes[0], "axesB": axes[1], "color": color, "linewidth": 1.2, "alpha": 0.9}
            figure.add_artist(ConnectionPatch(*ends, "data", "data", **look))
            for ax, end in zip(axes, ends, strict=True):
                ax.plot(*end, "o", color=color, markersize=5, path_effects=rim)
        write_note(figure, note)
    return figure


def inspected(found: Mapping[str, object]) -> plt.Figure:
    """The four figures of a model's inspection on one page, or those of several models, a column for each.

    found: `vitlens.report.Inspection` by the heading of their model. Above each figure is what it shows in
    numbers; where a model lacks one, why. Of one model the rollouts of the first six pictures are shown, of several
    those of four; numbers are those of all pictures. Several models share one scale of distances, as shares of what
    uniform attention gives.
    """
    alone = len(found) == 1
    columns, room = 6 if alone else 4, WIDTH / len(found)
    top = max(1.0, *(float(each.mean_distance.max() / (each.grid.uniform_distance() or 1)) for each in found.values()))
    shape = max(each.grid.image[0] / each.grid.image[1] for each in found.values())
    heights = [52, *([350] if alone else [285, 395, 300]), 2 * (room / columns - 14) * shape + 96]
    with styled():
        figure = page(WIDTH, sum(heights))
        rows = figure.subfigures(len(heights), len(found), height_ratios=heights, squeeze=False)
        for (head, *middle, last), (name, each) in zip(rows.T, found.items(), strict=True):
            layers, heads = each.mean_distance.shape
            head.suptitle(name, x=8 / room, ha="left", size=13, weight="bold", parse_math=False)
            words = f"{each.grid.rows} × {each.grid.cols} patches, {layers} layers of {heads} heads"
            head.text(8 / room, 0.05, words, color=GRAY)
            parts = middle[0].subfigures(1, 3, width_ratios=[0.8, 1.1, 1.1]) if alone else middle
            if ax := _panel(parts[0], "filters", each, room / (3 if alone else 1)):
                filters(each.filters, cols=4 if alone else 7, ax=ax).set(title="", anchor="NW")
            if ax := _panel(parts[1], "positions", each, room / (3 if alone else 1)):
                position_similarity(each.similarity, ax=ax).set(title="", anchor="N")
                ax.tick_params(labelsize=7)
                ax.child_axes[0].set_ylabel("")
            uniform = each.grid.uniform_distance()
            ax = attention_distance(each.mean_distance, uniform=uniform, ax=_panel(parts[2], "distance", each, room))
            ax.set(ylim=(0, 1.08 * top * (uniform or 1)), xticks=range(0, layers, -(-layers // 8)))
            axes = _panel(last, "rollout", each, room, 2, columns)
            for (above, below), picture in zip(axes.T if axes is not None else (), each.pictures, strict=False):
                above.imshow(picture.pixels)
                overlay(picture.pixels, picture.rollout, grid=each.grid, ax=below)
                caption = textwrap.fill(picture.caption, int(room / columns / 1.2 / LETTER))
                below.set_title(caption, y=0, pad=-5, va="top", size=8.5, parse_math=False)
            for ax in axes.flat if axes is not None else ():
                ax.axis("off")
    return figure


def _panel(part: SubFigure, name: str, found, room: float, *shape: int):
    """Axes below a title and what they show, or None where the model lacks it and the part of the page gives why."""
    missing = name in found.lacks
    words = textwrap.fill(found.lacks[name] if missing else found.sentences[name], int(room / LETTER))
    part.suptitle(f"{TITLES[name]}\n{words}", x=8 / part.bbox.width, ha="left", size=9.5, parse_math=False)
    return None if missing else part.subplots(*shape)
