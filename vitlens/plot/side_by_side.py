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
from vitlens.plot.heatmaps import GRAY, bare, check_size, overlay
from vitlens.plot.mosaics import filters, position_similarity
from vitlens.plot.style import WIDTH, array, page, styled

TITLES = {
    "filters": "Embedding filters", "positions": "Position similarity (cosine)",
    "distance": "Mean attention distance", "rollout": "Pictures, and what attention lets through",
}  # fmt: skip
LETTER = 7.5
"""Pixels of a letter, on average."""


def rollouts(images, maps, *, grid=None, titles=None, captions=None, smooth: bool = True) -> plt.Figure:
    """Pictures beside what attention lets through of them, "Input" and "Attention" (paper, Fig. 6 and 14).

    images and maps: as many of each as `overlay` takes one of. grid: one for all, or one for each. titles, captions: a
    text above, or below, each pair. Up to three pairs are in a line.
    """
    pictures = [load_image(image) for image in images]
    count = len(pictures)
    grids = list(grid) if isinstance(grid, list | tuple) else [grid] * count
    cols = min(count, 2 if count == 4 else 3)
    lines, room = -(-count // cols), WIDTH / max(cols, 2)
    above, below = (
        [textwrap.fill(str(text), int(room / LETTER)) for text in texts or [""] * count] for texts in (titles, captions)
    )
    text = max(len(f"{a}\n{b}".splitlines()) for a, b in zip(above, below, strict=True))
    height = min(280, max(room / 2 * picture.height / picture.width for picture in pictures))
    with styled():
        figure = page(cols * room, lines * (height + 28 + 18 * text), "constrained")
        parts = figure.subfigures(lines, cols, squeeze=False).ravel()
        for part, picture, each, patches, title, caption in zip(
            parts[:count], pictures, maps, grids, above, below, strict=True
        ):
            left, right = part.subplots(1, 2)
            left.imshow(picture)
            bare(left)
            overlay(picture, each, grid=patches, ax=right, smooth=smooth)
            for ax, name in ((left, "Input"), (right, "Attention")):
                ax.set_title(name, size=9, pad=4, color=GRAY)
            if title:
                part.suptitle(title, size=9.5, parse_math=False)
            if caption:
                part.supxlabel(caption, size=9, color=GRAY, parse_math=False)
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
            check_size(picture, grid)
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
        if note:
            figure.supxlabel(note, x=0.01, ha="left", size=8.5, color=GRAY, parse_math=False)
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
    heights = [60, *([350] if alone else [285, 395, 300]), 2 * room / columns * shape + 100]
    with styled():
        figure = page(WIDTH, sum(heights), "constrained")
        rows = figure.subfigures(len(heights), len(found), height_ratios=heights, squeeze=False)
        for (head, *middle, last), (name, each) in zip(rows.T, found.items(), strict=True):
            layers, heads = each.mean_distance.shape
            head.suptitle(name, x=0.01, ha="left", size=13, weight="bold", parse_math=False)
            words = f"{each.grid.rows} × {each.grid.cols} patches, {layers} layers of {heads} heads"
            head.text(0.01, 0.1, words, color=GRAY)
            parts = middle[0].subfigures(1, 3, width_ratios=[0.8, 1.1, 1.1]) if alone else middle
            if ax := _panel(parts[0], "filters", each, room / (3 if alone else 1)):
                filters(each.filters, cols=4 if alone else 7, ax=ax).set_title("")
            if ax := _panel(parts[1], "positions", each, room / (3 if alone else 1)):
                position_similarity(each.similarity, ax=ax).set_title("")
                ax.tick_params(labelsize=7)
                ax.images[0].colorbar.set_label("")
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
    part.suptitle(f"{TITLES[name]}\n{words}", x=0.01, ha="left", size=9.5, parse_math=False)
    return None if missing else part.subplots(*shape)
