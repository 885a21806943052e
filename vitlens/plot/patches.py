"""An image as words: a picture, its patches, and the sequence that they make (paper, Fig. 1 and section 3.1)."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from vitlens.images import load_image
from vitlens.plot.maps import check_size
from vitlens.plot.style import WIDTH, page, place, show, styled, write
from vitlens.recorder.grid import TokenGrid


def patches(image, *, grid: TokenGrid) -> plt.Figure:
    """A picture, the same cut into patches, and below them the beginning and the end of the sequence of tokens.

    image: what `load_image` takes, as the model saw it. grid: where its patches lie (`TokenGrid`, or `attn.grid`).
    Numbers are positions in the sequence, from 0; prefix tokens, which are no part of the picture, are gray. Pixels
    that no patch sees are on the left only, and padding beyond the picture is gray.
    """
    picture = load_image(image)
    check_size(picture, grid)
    edge, heading, margin, box, line = 14, 34, 58, 44, 50
    gap = 4 if max(grid.rows, grid.cols) <= 16 else 2
    covered = grid.rows * grid.patch[0], grid.cols * grid.patch[1]
    scale = min(330 / covered[0], (WIDTH - 2 * edge - margin) / 2.3 / covered[1])
    cell = [max(2, round(side * scale) - gap) for side in grid.patch]
    tiles = _tiles(picture, grid, cell)
    apart = np.pad(tiles, ((0, 0), (0, gap), (0, 0), (0, gap), (0, 0)), constant_values=255)
    apart = apart.reshape(grid.rows * (cell[0] + gap), grid.cols * (cell[1] + gap), 3)[:-gap, :-gap]
    tall, wide = apart.shape[:2]
    whole = [round(extent * side / over) for extent, side, over in zip((tall, wide), grid.image, covered, strict=True)]
    across = max(2 * edge + whole[1] + margin + wide, 560)
    below = heading + max(whole[0], tall) + heading + 8

    with styled():
        figure = page(across, below + box + 30)
        _title(figure, edge, heading, f"Input: {grid.image[0]} × {grid.image[1]} pixels")
        show(place(figure, edge, heading, whole[1], whole[0]), picture, 0, 0, *whole[::-1])
        left = edge + whole[1] + margin
        _title(figure, left, heading, f"Patches: {grid.rows} × {grid.cols} of {grid.patch[0]} × {grid.patch[1]} pixels")
        show(place(figure, left, heading, wide, tall), apart, 0, 0, wide, tall)
        for row in range(0, grid.rows, -(-13 // (cell[0] + gap))):
            middle = heading + row * (cell[0] + gap) + cell[0] / 2
            _note(figure, left - 6, middle, grid.index(row, 0), ha="right", va="center")

        prefix = f"{grid.prefix} of them before the first patch" if grid.prefix else "all of them patches"
        _title(figure, edge, below, f"Sequence: {grid.tokens} tokens, {prefix}")
        for slot, token in enumerate(_shown(grid.tokens, (across - 2 * edge) // line)):
            x = edge + slot * line
            if token is None:
                write(figure, x + box / 2, below + box / 2, "…", ha="center", va="center", size=14)
                continue
            row, col = divmod(token - grid.prefix, grid.cols)
            word = np.full((1, 1, 3), 205, np.uint8) if token < grid.prefix else tiles[row, :, col]
            show(place(figure, x, below, box, box), word, 0, 0, box, box)
            _note(figure, x + box / 2, below + box + 5, token, ha="center", va="top")
    return figure


def _tiles(picture: Image.Image, grid: TokenGrid, cell: list[int]) -> np.ndarray:
    """(rows, h, cols, w, 3) the patches, each h × w = `cell` pixels; no pixel of one gets into another."""
    covered = grid.cols * grid.patch[1], grid.rows * grid.patch[0]
    canvas = Image.new("RGB", covered, (205, 205, 205))
    canvas.paste(picture, (0, 0))
    canvas = canvas.resize((grid.cols * cell[1], grid.rows * cell[0]), Image.Resampling.BOX)
    return np.array(canvas).reshape(grid.rows, cell[0], grid.cols, cell[1], 3)


def _shown(tokens: int, slots: int) -> list[int | None]:
    """The positions that fit into so many slots: all, or the first ones, None for those left out, and the last two."""
    return list(range(tokens)) if tokens <= slots else [*range(slots - 3), None, tokens - 2, tokens - 1]


def _title(figure: plt.Figure, x: float, y: float, text: str) -> None:
    write(figure, x, y - 8, text, va="bottom", size=10.5)


def _note(figure: plt.Figure, x: float, y: float, number: int, **kwargs) -> None:
    write(figure, x, y, str(number), size=8, color="0.35", **kwargs)
