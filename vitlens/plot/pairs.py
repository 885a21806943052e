"""Pairs of a picture and what attention lets through of it (paper, Fig. 6 and 14).

Widths differ from pair to pair, and all pictures share one height: no grid of Matplotlib's does that.
"""

from __future__ import annotations

import textwrap

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.textpath import TextPath

from vitlens.images import load_image
from vitlens.plot.maps import overlay
from vitlens.plot.style import DPI, WIDTH, page, place, styled, write


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
    above, below = ([_wrap(t, w) for t, w in zip(given, pairs, strict=True)] for given in texts.values())
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


def _wrap(text: str, room: float) -> list[str]:
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
