"""Figures of many small pictures: filters, position similarity, all heads of all layers, an image cut into patches.

They are laid out in whole pixels: cells of one size would otherwise be drawn in two.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.image import AxesImage
from PIL import Image

from vitlens.images import load_image
from vitlens.plot.maps import check_size
from vitlens.plot.style import INK, WIDTH, array, color_map, colors, one_of, page, place, show, styled
from vitlens.recorder.grid import TokenGrid

EDGE = 14
NOTE = {"size": 8.5, "color": "0.35"}


def filters(components, explained_variance=None, *, cols: int = 7, ax: plt.Axes | None = None) -> plt.Figure | plt.Axes:
    """Principal components of the patch-embedding filters as small pictures (paper, Fig. 7 left).

    components: (k, p, q, C), C = 3 (colors) or 1 (grays), as `vitlens.filters.components` returns them.
    explained_variance: (k,) shares of the variance, written under the tiles. cols: tiles in a line.
    Every tile is scaled on its own, symmetrically about zero: v → ½ + ½·v / max|v|. So zero is middle gray in all of
    them, and brightness cannot be compared between tiles.
    """
    tiles = array(components, 4, "Filters of shape (k, p, q, C)", "Give what `vitlens.filters.components` returns")
    count, p, q, channels = tiles.shape
    if channels not in (1, 3):
        raise ValueError(f"Filters of 1 or 3 channels expected, got {channels} channels. Choose some of them.")
    if not np.isfinite(tiles).all():
        raise ValueError("Some values of the filters are not finite. Look for NaN in the weights.")
    shares = explained_variance
    if shares is not None:
        shares = array(shares, 1, "One share of the variance per component", "Give both from one call")
        if len(shares) != count or not 0 <= shares.min() <= shares.max() <= 1:
            raise ValueError(
                f"{count} shares of the variance between 0 and 1 expected, got {len(shares)} from {shares.min():.3g} "
                f"to {shares.max():.3g}. Give both from one call of `vitlens.filters.components`."
            )
    cols = min(cols, count)
    cell = max(1, int(min(100, (WIDTH - 2 * EDGE) / cols - 10) / q))
    size, gap = (p * cell, q * cell), (10 if shares is None else 26, 10)
    tall, wide = extent(count, cols, size, gap)
    foot = 14 if shares is None else 56
    with styled(ax):
        target, result = _axes(ax, max(wide, 400) + 2 * EDGE, 40 + tall + foot, (tall, wide), top=40)
        found = mosaic(target, about_gray(tiles), cols, size, gap)
        for image, share in zip(found, () if shares is None else shares, strict=False):
            left, right, bottom, _ = image.get_extent()
            text = f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"
            target.text((left + right) / 2, bottom + 4, text, ha="center", va="top", size=7.5, color="0.35")
        kind = "RGB embedding filters" if channels == 3 else "Embedding filters"
        target.set_title(f"{kind} (first {count} principal components)")
        if shares is not None:
            note = f"Below each: its share of the filters’ variance, {shares.sum():.1%} together."
            target.set_xlabel(note, size=8.5, labelpad=22)
    return result


def position_similarity(similarity, *, every: int | None = None, ax: plt.Axes | None = None) -> plt.Figure | plt.Axes:
    """Cosine similarity of position embeddings, one tile per patch position (paper, Fig. 7 center and Fig. 10).

    similarity: (rows, cols, rows, cols), as `vitlens.positions.similarity` returns it. Positions count from 1, as in
    the paper. every: show only every so-many-th row and column of tiles, and say so at the axes; by default as many as
    stay readable, at most 14 each way. The tiles themselves are always complete.
    """
    remedy = "Give what `vitlens.positions.similarity` returns"
    wanted = "Similarity of shape (rows, cols, rows, cols)"
    values = array(similarity, 4, wanted, remedy)
    rows, cols = values.shape[:2]
    if values.shape[2:] != (rows, cols):
        raise ValueError(f"{wanted} expected, got shape {values.shape}. {remedy}.")
    if np.nanmax(np.abs(values), initial=0) > 1.001:
        raise ValueError(f"Cosines between −1 and 1 expected, got up to {np.nanmax(np.abs(values)):.3g}. {remedy}.")
    if every is None:  # at most 14 tiles in a line, and two pixels for every cell of them on a page
        most = max(rows, cols)
        every = next((n for n in range(1, most) if -(-most // n) <= min(14, 352 // most)), most)
    if every < 1:
        raise ValueError(f"every={every} shows nothing. Give 1 or more.")
    down, across = (range((n - 1) % every // 2, n, every) for n in (rows, cols))
    tiles = values[down][:, across].reshape(-1, rows, cols)
    cells = max(len(down) * rows, len(across) * cols)
    cell = max(1, min(2, 704 // cells), min(640, max(220, 20 * cells)) // cells)
    size, gap = (rows * cell, cols * cell), (min(max(cell, 2), 6),) * 2
    tall, wide = extent(len(tiles), len(across), size, gap)
    room = max(tall, 120), max(wide, 240)
    with styled(ax):
        left, top = 62 + (room[1] - wide) // 2, 40 + (room[0] - tall) // 2
        target, result = _axes(ax, room[1] + 170, room[0] + 106, (tall, wide), top, left)
        target.set_facecolor("0.82")
        found = mosaic(target, tiles, len(across), size, gap, cmap=color_map("RdBu_r"), vmin=-1.0, vmax=1.0)
        some = "" if every == 1 else f" (every {({2: '2nd', 3: '3rd'}).get(every, f'{every}th')})"
        target.set(xlabel=f"Input patch column{some}", ylabel=f"Input patch row{some}")
        target.set_xticks([_middle(image)[0] for image in found[: len(across)]], [col + 1 for col in across])
        target.set_yticks([_middle(image)[1] for image in found[:: len(across)]], [row + 1 for row in down])
        target.tick_params(length=0)
        target.set_title("Position embedding similarity")
        beside = ax.inset_axes((1.04, 0, 0.04, 1)) if ax else place(result, 62 + room[1] + 22, 40, 14, room[0])
        bar = target.figure.colorbar(found[0], label="Cosine similarity", cax=beside)
        bar.set_ticks([-1, -0.5, 0, 0.5, 1], labels=["−1", "−0.5", "0", "0.5", "1"])
        bar.outline.set_visible(False)
    return result


def all_heads(
    weights, *, query: tuple[int, int] | None = None, scale: str = "each", ax: plt.Axes | None = None
) -> plt.Figure | plt.Axes:
    """The attention of every head of every layer from one query: a column for each layer, a row for each head.

    weights: (L, H, rows, cols). query: (row, column) of the patch that asks, counted from 0 and marked by two ticks
    beside each map, since a frame would cover so small a cell; None for another token. scale: "each", every head up to
    its own largest weight, which is written below it; or "shared", one scale for all. The figure says which.
    """
    values = array(weights, 4, "Attention of shape (layers, heads, rows, cols)", "Give one query’s weights")
    one_of("scale", scale, ("each", "shared"))
    layers, heads, rows, cols = values.shape
    if query is not None:
        TokenGrid(rows, cols, (1, 1)).index(*query)
    left, top, gap = 60, 66, (18, 8)
    width = max(8, min(92, (WIDTH - left - EDGE) // layers - gap[1], (1100 // heads - gap[0]) * cols // rows))
    size = round(width * rows / cols), width
    tiles = values.swapaxes(0, 1).reshape(-1, rows, cols)  # in reading order: head by head
    tall, wide = extent(len(tiles), layers, size, gap)
    tall += gap[0]  # room for the numbers below the last row
    with styled(ax):
        foot = 30 if query is None else 46
        target, result = _axes(ax, max(left + wide + EDGE, 680), top + tall + foot, (tall, wide), top, left)
        found = mosaic(target, tiles, layers, size, gap)
        for image, weight in zip(found, tiles, strict=True):
            scaled = colors(weight if scale == "each" else values)
            image.set(cmap=scaled["cmap"], clim=(scaled["vmin"], scaled["vmax"]))
            x0, x1, bottom, _ = image.get_extent()
            most = f"{100 * weight.max():.3g}"
            target.text((x0 + x1) / 2, bottom + 3, most, ha="center", va="top", size=7, color="0.35")
        if query is not None:
            _ticks(target, found, query, (rows, cols))
        target.set_ylim(tall, 0)
        target.set_xticks([_middle(image)[0] for image in found[:layers]], range(layers))
        target.set_yticks([_middle(image)[1] for image in found[::layers]], [f"head {k}" for k in range(heads)])
        target.tick_params(length=0, labeltop=True, labelbottom=False, pad=6)
        source = "" if query is None else f" from patch (row {query[0]}, column {query[1]})"
        target.set_title(f"Attention of each head of each layer{source}", loc="left", pad=24)
        target.text(-8, -9, "layer", ha="right", size=8.5)
        how = "each from 0 to its own largest" if scale == "each" else f"one scale, 0 to {100 * values.max():.3g} %"
        note = f"Colors: attention weight, {how}. Below each: its largest weight in per cent."
        note += "" if query is None else "\nTicks beside each: the row and the column of the patch that asks."
        target.set_xlabel(note, loc="left", **NOTE)
    return result


def patches(image, *, grid: TokenGrid) -> plt.Figure:
    """A picture, the same cut into patches, and the sequence of tokens (paper, Fig. 1 and section 3.1).

    image: what `load_image` takes, as the model saw it. grid: where its patches lie (`TokenGrid`, or `attn.grid`). Of
    long sequences only the beginning and the end are shown. Numbers are positions in the sequence, from 0; prefix
    tokens, which are no part of the picture, are gray. Pixels that no patch sees are on the left only, and padding
    beyond the picture is gray.
    """
    picture = load_image(image)
    check_size(picture, grid)
    edge, heading, margin, box, line = 14, 34, 58, 44, 50
    gap = 4 if max(grid.rows, grid.cols) <= 16 else 2
    covered = grid.rows * grid.patch[0], grid.cols * grid.patch[1]
    scale = min(330 / covered[0], (WIDTH - 2 * edge - margin) / 2.3 / covered[1])
    cell = [max(2, round(side * scale) - gap) for side in grid.patch]
    tiles = _cut(picture, grid, cell)
    apart = np.pad(tiles, ((0, 0), (0, gap), (0, gap), (0, 0)), constant_values=255)
    apart = apart.reshape(grid.rows, grid.cols, *apart.shape[1:]).swapaxes(1, 2)
    apart = apart.reshape(grid.rows * (cell[0] + gap), grid.cols * (cell[1] + gap), 3)[:-gap, :-gap]
    tall, wide = apart.shape[:2]
    whole = [round(extent * side / over) for extent, side, over in zip((tall, wide), grid.image, covered, strict=True)]
    across = max(2 * edge + whole[1] + margin + wide, 560)
    below = heading + max(whole[0], tall) + heading + 8

    shown = _shown(grid.tokens, (across - 2 * edge) // line)
    gray, blank = np.full((1, 1, 3), 205, np.uint8), np.full((1, 1, 3), 255, np.uint8)
    words = [blank if token is None else gray if token < grid.prefix else tiles[token - grid.prefix] for token in shown]

    with styled():
        figure = page(across, below + box + 30)
        left = place(figure, edge, heading, whole[1], whole[0])
        show(left, picture, 0, 0, *whole[::-1])
        right = place(figure, edge + whole[1] + margin, heading, wide, tall)
        show(right, apart, 0, 0, wide, tall)
        rows = range(0, grid.rows, -(-13 // (cell[0] + gap)))
        right.set_yticks([row * (cell[0] + gap) + cell[0] / 2 for row in rows], [grid.index(row, 0) for row in rows])
        sequence = place(figure, edge, below, len(shown) * line - 6, box)
        found = mosaic(sequence, words, len(shown), (box, box), (0, line - box))
        middles = [_middle(image)[0] for image in found]
        sequence.set_xticks(middles, ["" if token is None else token for token in shown])
        for middle, token in zip(middles, shown, strict=True):
            if token is None:
                sequence.text(middle, box / 2, "…", ha="center", va="center", size=14)
        prefix = f"{grid.prefix} of them before the first patch" if grid.prefix else "all of them patches"
        titles = {
            left: f"Input: {grid.image[0]} × {grid.image[1]} pixels",
            right: f"Patches: {grid.rows} × {grid.cols} of {grid.patch[0]} × {grid.patch[1]} pixels",
            sequence: f"Sequence: {grid.tokens} tokens, {prefix}",
        }
        for ax, title in titles.items():
            ax.set_title(title, loc="left", size=10.5, pad=6)
            ax.tick_params(length=0, labelsize=8, labelcolor="0.35")
    return figure


def _cut(picture: Image.Image, grid: TokenGrid, cell: list[int]) -> np.ndarray:
    """(P, h, w, 3) the patches, each h × w = `cell` pixels; no pixel of one gets into another."""
    covered = grid.cols * grid.patch[1], grid.rows * grid.patch[0]
    canvas = Image.new("RGB", covered, (205, 205, 205))
    canvas.paste(picture, (0, 0))
    canvas = canvas.resize((grid.cols * cell[1], grid.rows * cell[0]), Image.Resampling.BOX)
    return np.array(canvas).reshape(grid.rows, cell[0], grid.cols, cell[1], 3).swapaxes(1, 2).reshape(-1, *cell, 3)


def _shown(tokens: int, slots: int) -> list[int | None]:
    """The positions to show in so many slots: all if they fit, else the first ones, None for a gap, the last two."""
    return list(range(tokens)) if tokens <= slots else [*range(slots - 3), None, tokens - 2, tokens - 1]


def mosaic(
    ax: plt.Axes, tiles: np.ndarray, cols: int, size: tuple[int, int], gap: tuple[int, int], **scale
) -> list[AxesImage]:
    """The pictures of tiles (n, h, w) or (n, h, w, 3), `cols` in a line, each of `size` = (height, width) units."""
    (height, width), (below, beside) = size, gap
    ax.set_autoscale_on(False)  # else every picture works the limits out again
    found = [
        show(ax, tile, k % cols * (width + beside), k // cols * (height + below), width, height, **scale)
        for k, tile in enumerate(tiles)
    ]
    tall, wide = extent(len(tiles), cols, size, gap)
    ax.set(xlim=(0, wide), ylim=(tall, 0))
    return found


def extent(count: int, cols: int, size: tuple[int, int], gap: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of a mosaic."""
    lines = -(-count // cols)
    return lines * (size[0] + gap[0]) - gap[0], cols * (size[1] + gap[1]) - gap[1]


def about_gray(tiles: np.ndarray) -> np.ndarray:
    """Tiles (n, p, q, C) as colors (n, p, q, 3), each scaled on its own: v → ½ + ½·v / max|v|."""
    largest = np.abs(tiles).max((1, 2, 3), keepdims=True)
    return (0.5 + 0.5 * tiles / np.where(largest > 0, largest, 1)).repeat(3 // tiles.shape[-1], -1)


def _axes(ax, width: float, height: float, room: tuple[int, int], top: float, left: float | None = None):
    """Axes for a mosaic, and what the plot function returns: `ax`, made bare, or a page with axes of (height, width)
    `room` pixels, in the middle or `left` pixels from its edge."""
    if ax is None:
        figure = page(width, height)
        return place(figure, (width - room[1]) // 2 if left is None else left, top, room[1], room[0]), figure
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return ax, ax


def _middle(image: AxesImage) -> tuple[float, float]:
    left, right, bottom, top = image.get_extent()
    return (left + right) / 2, (bottom + top) / 2


def _ticks(ax: plt.Axes, pictures: list[AxesImage], query: tuple[int, int], shape: tuple[int, int]) -> None:
    """Mark the query beside each map: a tick above its column and one left of its row. shape: (rows, columns)."""
    left, right, bottom, top = np.transpose([image.get_extent() for image in pictures])
    look = {"color": INK, "linewidth": 1.2, "clip_on": False}
    ax.vlines(left + (query[1] + 0.5) * (right - left) / shape[1], top - 5, top - 1, **look)
    ax.hlines(top + (query[0] + 0.5) * (bottom - top) / shape[0], left - 5, left - 1, **look)
