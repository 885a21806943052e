"""One image of many tiles, with words beside them."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from vitlens.plot.style import DIM, bare, face, shade


def mosaic(
    ax: plt.Axes, tiles, cols: int, gap: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw colored tiles (n, h, w, 3 or 4) as one image, `cols` in a line.

    The coordinates of the axes are cells. gap: (below, beside) a tile, in cells. Tiles of NaN are left out.
    Returns the centers of the columns
    and of the lines.
    """
    tiles = np.asarray(tiles)[..., :3]
    count, h, w = tiles.shape[:3]
    fine = -(-32 // max(h, w))  # pixels of a cell, so that a gap is close to whole pixels
    below, beside = (round(fine * length) for length in gap)
    lines = -(-count // cols)
    height, width = fine * h + below, fine * w + beside
    gaps = face(ax)
    if tiles.dtype == np.uint8:
        gaps = (255 * gaps).round()
    whole = np.full((lines * height, cols * width, 3), gaps, tiles.dtype)
    for k, tile in enumerate(tiles):
        line, col = divmod(k, cols)
        top, left = line * height, col * width
        if np.isnan(tile).all():
            continue  # without a tile
        enlarged = tile.repeat(fine, 0).repeat(fine, 1)
        whole[top : top + fine * h, left : left + fine * w] = enlarged
    whole = whole[:, : cols * width - beside]
    extent = 0, whole.shape[1] / fine, whole.shape[0] / fine, 0
    ax.imshow(whole, extent=extent, interpolation="nearest")
    ax.set_autoscale_on(False)
    bare(ax)
    ax.tick_params(length=0)
    xs = w / 2 + np.arange(cols) * width / fine
    ys = h / 2 + np.arange(lines) * height / fine
    return xs, ys


def map_colors(
    values: np.ndarray, cmap, vmin: float, vmax: float
) -> tuple[np.ndarray, ScalarMappable]:
    """(…, 4) colors of values, and their scale."""
    scale = ScalarMappable(Normalize(vmin, vmax), cmap)
    return scale.cmap(scale.norm(values)), scale


def write_above_tile(ax: plt.Axes, x: float, y: float, text: str) -> None:
    """Write the name of a map above its upper left corner."""
    ax.annotate(text, (x, y), (0, 3), textcoords="offset points", size=9.5).set_in_layout(False)


def write_below_tile(
    ax: plt.Axes, x: float, y: float, text: str, size: float, ha: str = "center"
) -> None:
    """Write words below a tile, inside the mosaic."""
    words = ax.annotate(
        text,
        (x, y),
        (0, -2),
        textcoords="offset points",
        ha=ha,
        va="top",
        size=size,
        color=shade(ax, DIM),
        annotation_clip=False,
    )
    words.set_in_layout(False)
