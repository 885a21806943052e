"""Images for the browser as PNG files, color scales for values, and figures with a caption to save."""

from __future__ import annotations

import io
import textwrap

import numpy as np
from PIL import Image

from vitlens.widgets.page import Scale

SIDE = 448
"""Largest side in pixels of images that are enlarged by an integer factor."""


def enlarged(pixels: np.ndarray) -> bytes:
    """PNG file of an image (H, W, 3) uint8, enlarged (bicubic) by an integer factor up to `SIDE`."""
    height, width = pixels.shape[:2]
    factor = max(1, SIDE // max(height, width))
    return png(Image.fromarray(pixels).resize((width * factor, height * factor), Image.Resampling.BICUBIC))


def mosaic(tiles: np.ndarray, scales: list[Scale], side: int) -> bytes:
    """PNG file of maps (rows, cols, r, c) in rows and columns, one square per patch, with a border of one pixel.

    scales: one per map, in reading order. side: largest side of a map in pixels, at least one per patch.
    """
    rows, cols, r, c = tiles.shape
    factor = max(1, (side - 2) // max(r, c))
    height, width = r * factor + 2, c * factor + 2
    page = np.full((rows * height, cols * width, 3), 127, np.uint8)
    for k, scale in enumerate(scales):
        row, col = divmod(k, cols)
        place = (tiles[row, col] - scale.low) / ((scale.high - scale.low) or 1.0) * 256
        tile = scale.table()[place.clip(0, 255).astype(np.uint8), :3].repeat(factor, 0).repeat(factor, 1)
        page[row * height + 1 : (row + 1) * height - 1, col * width + 1 : (col + 1) * width - 1] = tile
    return png(Image.fromarray(page))


def png(image: Image.Image) -> bytes:
    """PNG file of a PIL image."""
    image.save(file := io.BytesIO(), format="png", compress_level=1)
    return file.getvalue()


def captioned(forward, panel) -> bytes:
    """PNG file of the `Panel` of a `Forward`, with title, color bar and caption. Avoids pyplot for thread safety."""
    from matplotlib.figure import Figure

    from vitlens.plot.heatmaps import mark, overlay

    height, width = forward.grid.image
    figure = Figure(figsize=(7, 6.5 * min(1, height / width)), dpi=150)
    ax = figure.subplots()
    scale = {"cmap": panel.scale.cmap, "limits": (panel.scale.low, panel.scale.high)} if panel.scale else {}
    overlay(
        forward.pixels, panel.values, grid=forward.grid, ax=ax, style="heat", smooth=panel.smooth, alpha=panel.strength,
        opacity=panel.opacity, **scale,
    )  # fmt: skip
    mark(ax, panel.selected, forward.grid.patch)
    ax.set_title(panel.title, fontsize=11)
    caption = textwrap.fill(f"{forward.name}. {panel.words}", 88)
    ax.text(0, -0.03, caption, fontsize=9, va="top", transform=ax.transAxes, parse_math=False)
    figure.savefig(file := io.BytesIO(), format="png", bbox_inches="tight")
    return file.getvalue()
