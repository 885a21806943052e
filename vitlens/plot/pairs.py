"""Pairs: a picture and what attention lets through of it (paper, Fig. 6 and 14), two pictures and what they share.

Widths differ from pair to pair, and all pictures share one height: no grid of Matplotlib's does that.
"""

from __future__ import annotations

import textwrap

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import ConnectionPatch
from matplotlib.patheffects import withStroke
from matplotlib.textpath import TextPath

from vitlens.images import load_image
from vitlens.plot.maps import check_size, overlay
from vitlens.plot.style import DPI, WIDTH, array, page, place, styled, write


def rollouts(images, maps, *, grid=None, titles=None, captions=None, smooth: bool = True) -> plt.Figure:
    """Pictures beside what attention lets through of them, "Input" and "Attention" (paper, Fig. 6 and 14).

    images and maps: as many of each as `overlay` takes one of, of any shapes. grid: one for all, or one for each.
    titles, captions: a text above, or below, each pair. All pictures are drawn in one height, several pairs to a line.
    """
    pictures = [load_image(image) for image in images]
    grids = list(grid) if isinstance(grid, list | tuple) else [grid] * len(pictures)
    texts = {"titles": titles or [""] * len(pictures), "captions": captions or [""] * len(pictures)}
    for name, given in {"maps": maps, "grids": grids, **texts}.items():
        if len(given) != len(pictures) or not pictures:
            raise ValueError(f"{len(pictures)} images, but {len(given)} {name}. Give one for each, and at least one.")
    if grid is None:
        for picture in pictures:
            picture.thumbnail((600, 600))  # twice what is shown at most; load_image made it ours

    edge, between, apart, heading, leading = 14, 6, 30, 20, 16
    shapes = [float(np.clip(picture.width / picture.height, 0.6, 3)) for picture in pictures]  # of their places
    lines = _lines(shapes)
    room = [WIDTH - 2 * edge - len(line) * between - (len(line) - 1) * apart for line in lines]
    height = int(min(280, *(r / sum(2 * shapes[i] for i in line) for r, line in zip(room, lines, strict=True))))
    widths = [round(height * shape) for shape in shapes]
    pairs = [2 * width + between for width in widths]
    above, below = ([wrapped(t, w) for t, w in zip(given, pairs, strict=True)] for given in texts.values())
    tops = [8 + leading * max(len(above[i]) for i in line) + heading * (line is lines[0]) for line in lines]
    bottoms = [10 + leading * max(len(below[i]) for i in line) for line in lines]
    across = max(sum(pairs[i] + apart for i in line) for line in lines) - apart + 2 * edge
    with styled():
        figure = page(across, 6 + sum(tops) + len(lines) * height + sum(bottoms))
        y = 4
        for line, top, bottom in zip(lines, tops, bottoms, strict=True):
            x, y = edge, y + top
            for i in line:
                left, right = (place(figure, x + k * (widths[i] + between), y, widths[i], height) for k in (0, 1))
                left.imshow(pictures[i])
                overlay(pictures[i], maps[i], grid=grids[i], ax=right, smooth=smooth)
                if line is lines[0]:
                    left.set_title("Input", size=9.5, pad=5)
                    right.set_title("Attention", size=9.5, pad=5)
                middle, foot = x + pairs[i] / 2, y - 6 - heading * (line is lines[0])
                write(figure, middle, foot, "\n".join(above[i]), ha="center", va="bottom", size=9.5)
                write(figure, middle, y + height + 6, "\n".join(below[i]), ha="center", va="top", color="0.35")
                x += pairs[i] + apart
            y += height + bottom
    return figure


def correspondences(images, pairs, *, grids, titles=("A", "B"), note: str = "") -> plt.Figure:
    """Patches of two pictures that belong together, each pair joined by a line of one color.

    images: the two pictures, as the model saw them. pairs: (n, 2) numbers of patches, of the left and of the right
    picture, counted from 0 without prefix tokens; at most 24 of them, since no more can be told apart. grids: of both.
    titles: above each picture; note: at the foot. Raises ValueError for patches that the grids do not have.
    """
    pairs = array(pairs, 2, "Pairs of patches of shape (n, 2)", "Give at least one").astype(int)
    most = [grid.rows * grid.cols for grid in grids]
    if pairs.shape[1] != 2 or len(pairs) > 24 or pairs.min() < 0 or (pairs.max(0) >= most).any():
        raise ValueError(
            f"At most 24 pairs (n, 2) expected, of patches below {most[0]} and {most[1]}, got {pairs.shape} up to "
            f"{pairs.max()}. Choose the most similar ones."
        )
    edge, apart, heading, foot = 14, 60, 28, 30 if note else 8
    shapes = [grid.image[1] / grid.image[0] for grid in grids]
    height = min(340, (WIDTH - 2 * edge - apart) / sum(shapes))
    widths = [round(height * shape) for shape in shapes]
    with styled():
        figure = page(sum(widths) + apart + 2 * edge, heading + height + foot)
        axes = [
            place(figure, edge + k * (widths[0] + apart), heading, width, height) for k, width in enumerate(widths)
        ]
        for ax, image, grid, title in zip(axes, images, grids, titles, strict=True):
            picture = load_image(image)
            check_size(picture, grid)
            ax.imshow(picture, extent=(0, grid.image[1], grid.image[0], 0), aspect="auto")
            ax.set_title(title, loc="left", size=9.5, pad=5, parse_math=False)
        colors = plt.get_cmap("hsv")(np.linspace(0, 1, len(pairs), endpoint=False))
        rim = [withStroke(linewidth=3, foreground="0.1")]
        for color, pair in zip(colors, pairs, strict=True):
            ends = [
                ((number % grid.cols + 0.5) * grid.patch[1], (number // grid.cols + 0.5) * grid.patch[0])
                for number, grid in zip(pair, grids, strict=True)
            ]
            joined = dict(zip(("axesA", "axesB"), axes, strict=True))
            figure.add_artist(ConnectionPatch(*ends, "data", "data", **joined, color=color, linewidth=1.2, alpha=0.9))
            for ax, end in zip(axes, ends, strict=True):
                ax.plot(*end, "o", color=color, markersize=5, path_effects=rim)
        if note:
            write(figure, edge, heading + height + 8, note, ha="left", va="top", size=8.5, color="0.35")
    return figure


def wrapped(text: str, room: float) -> list[str]:
    """The lines of a text of 9.5 points that has `room` pixels."""
    if not text:
        return []
    length = TextPath((0, 0), text.replace("$", "S"), size=9.5).get_extents().width * DPI / 72
    return textwrap.wrap(text, max(6, int(len(text) * room / length)))


def _lines(shapes: list[float]) -> list[list[int]]:
    """Pairs of pictures of so many widths per height, in even lines of about three squares, in the order given."""
    wanted = -(-2 * sum(shapes) // 6.1)
    capacity = max(sum(shapes) / wanted, *shapes)
    while True:
        lines, filled = [[]], 0.0
        for i, shape in enumerate(shapes):
            if lines[-1] and filled + shape > capacity * 1.0001:
                lines.append([])
                filled = 0.0
            lines[-1].append(i)
            filled += shape
        if len(lines) <= wanted:
            return lines
        capacity *= 1.02
