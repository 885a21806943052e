"""Figures of many small pictures: filters, position similarity, heads, an image cut into patches."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.image import AxesImage
from PIL import Image

from vitlens.images import load_image
from vitlens.plot.heatmaps import (
    GRAY,
    bare,
    check_size,
    covered,
    draw_input,
    grid_of,
    heading,
    mark,
    name_above,
    write_note,
)
from vitlens.plot.style import INK, MISSING, WIDTH, array, canvas, color_bar, colors, one_of, page, styled
from vitlens.recorder.grid import TokenGrid


def filters(components, explained_variance=None, *, cols: int = 7, ax: plt.Axes | None = None) -> plt.Figure | plt.Axes:
    """Principal components of the patch-embedding filters as small pictures (paper, Fig. 7 left).

    components: (k, p, q, C), C = 3 (colors) or 1 (grays), as `vitlens.filters.components` returns them.
    explained_variance: (k,) shares of the variance, written under the tiles. cols: tiles in a line.
    Every tile is scaled on its own, symmetrically about zero: v → ½ + ½·v / max|v|. So zero is middle gray in all of
    them, and brightness cannot be compared between tiles.
    """
    tiles = array(components, 4, "Filters of shape (k, p, q, C)")
    count, p, q, channels = tiles.shape
    cols = min(cols, count)
    across = min(WIDTH, max(420, 110 * cols))
    gap = (0.12 if explained_variance is None else 0.12 + 18 * cols / across) * p, 0.12 * q
    lines = -(-count // cols)
    tall = 70 + (across - 20) / cols * lines * (p + gap[0]) / (q + gap[1])
    with canvas(ax, across, tall) as (ax, result):
        images = mosaic(ax, about_gray(tiles), cols, gap)
        ax.set_title(
            f"{'RGB embedding' if channels == 3 else 'Embedding'} filters (first {count} principal components)"
        )
        if explained_variance is not None:
            shares = array(explained_variance, 1, "Shares of the variance of shape (k,)")
            for image, share in zip(images, shares, strict=True):
                text = f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"
                _below(image, text, size=7.5)
            words = f"Below each: its share of the filters’ variance, {shares.sum():.1%} together."
            ax.set_xlabel(words, size=8.5, labelpad=18)
    return result


def position_similarity(similarity, *, every: int | None = None, ax: plt.Axes | None = None) -> plt.Figure | plt.Axes:
    """Cosine similarity of position embeddings, one tile per patch position (paper, Fig. 7 center and Fig. 10).

    similarity: (rows, cols, rows, cols), as `vitlens.positions.similarity` returns it. Positions count from 1, as in
    the paper. every: show only every so-many-th row and column of tiles, and write so at the axes; by default as many
    as stay readable, at most 14 each way. The tiles themselves are always complete.
    """
    values = array(similarity, 4, "Similarity of shape (rows, cols, rows, cols)")
    rows, cols = values.shape[:2]
    largest = np.nanmax(np.abs(values), initial=0)
    if values.shape[2:] != (rows, cols) or largest > 1.001:
        raise ValueError(
            f"Cosines of shape (rows, cols, rows, cols) expected, got {values.shape} with values up to {largest:.3g}."
        )
    down, across = shown_positions(rows, cols, every)
    every = across.step
    tiles = values[down][:, across].reshape(-1, rows, cols)
    cells = max(len(down) * rows, len(across) * cols)
    side = 620 if cells > 20 else 260
    height, width = (side * len(line) * n / cells for line, n in ((down, rows), (across, cols)))
    with canvas(ax, max(width, 240) + 160, max(height, 120) + 100) as (ax, result):
        look = {"cmap": mpl.colormaps["RdBu_r"].with_extremes(bad=MISSING), "vmin": -1, "vmax": 1}
        images = mosaic(ax, tiles, len(across), (0.08 * rows, 0.08 * cols), **look)
        some = "" if every == 1 else f" (every {({2: '2nd', 3: '3rd'}).get(every, f'{every}th')})"
        ax.set(xlabel=f"Input patch column{some}", ylabel=f"Input patch row{some}")
        ax.set_xticks([_middle(image)[0] for image in images[: len(across)]], [col + 1 for col in across])
        ax.set_yticks([_middle(image)[1] for image in images[:: len(across)]], [row + 1 for row in down])
        ax.set_title("Position embedding similarity")
        bar = color_bar(images[0], ax=ax, label="Cosine similarity", fraction=0.046, pad=0.03)
        bar.set_ticks([-1, -0.5, 0, 0.5, 1], labels=["−1", "−0.5", "0", "0.5", "1"])
    return result


def shown_positions(rows: int, cols: int, every: int | None = None) -> tuple[range, range]:
    """Rows and columns of tiles to draw: every so-many-th, by default at most 14 each way and 352 cells a line."""
    most = max(rows, cols)
    every = every or next((n for n in range(1, most) if -(-most // n) <= min(14, 352 // most)), most)
    return tuple(range((n - 1) % every // 2, n, every) for n in (rows, cols))


def heads(
    weights,
    *,
    image=None,
    query: tuple[int, int] | None = None,
    grid: TokenGrid | None = None,
    scale: str = "shared",
    cols: int | None = None,
    title: str | None = None,
    cmap: str | None = None,
) -> plt.Figure:
    """The attention of all heads of a layer from one query, beside the picture if it is given.

    weights: (H, rows, cols). query: (row, column) of the patch that asks, counted from 0 and marked by a white frame;
    None for a class token. scale: "shared", one color scale from 0 to the largest weight of all heads; or "each",
    every head up to its own largest weight, written above it. The figure names it. cols: thumbnails in a line.
    """
    values = array(weights, 3, "Attention of shape (heads, rows, cols)")
    one_of("scale", scale, ("shared", "each"))
    picture = None if image is None else load_image(image)
    grid = grid_of(values.shape[1:], picture, grid)
    if query is not None:
        grid.index(*query)
    count = len(values)
    lines = -(-count // cols) if cols else 1 if count <= 4 else 2 if count <= 16 else -(-count // 8)
    cols, beside = -(-count // lines), lines * (picture is not None)  # the picture takes as many columns as lines
    high, wide = covered(grid)
    width = min(200, 790 / (cols + beside), 640 / lines * wide / high)
    signed = bool((values < 0).any())
    with styled():
        size = (
            max(460, 110 + width * (cols + beside)),
            80 + lines * (width * high / wide + (24 if scale == "shared" else 40)),
        )
        figure = page(*size, "compressed")
        frame = figure.add_gridspec(lines, cols + beside)
        source = "" if query is None else f" from patch (row {query[0]}, column {query[1]})"
        heading(figure, title or f"Attention of each head{source}")
        axes = []
        if picture is not None:
            axes.append(figure.add_subplot(frame[:, :beside]))
            draw_input(axes[0], picture, grid)
        for head, each in enumerate(values):
            axes.append(ax := figure.add_subplot(frame[head // cols, beside + head % cols]))
            limits = colors(values if scale == "shared" else each, cmap, signed)
            shown = ax.imshow(each, extent=(0, wide, high, 0), interpolation="nearest", **limits)
            bare(ax)
            name_above(ax, f"Head {head}" + (f"\nmax {limits['vmax']:#.2g}" if scale == "each" else ""))
        for ax in axes:
            mark(ax, query, grid.patch)
        key = color_bar(shown, ax=axes, fraction=0.05, pad=0.015)
        words = "Colors: attention weight, one scale for all heads."
        if scale == "each":
            words = "Colors: attention weight, a scale for each head up to its own largest."
            key.set_ticks([shown.norm.vmin, shown.norm.vmax], labels=["−max" if signed else "0", "max"])
        write_note(figure, words)
    return figure


def all_heads(
    weights, *, query: tuple[int, int] | None = None, scale: str = "each", ax: plt.Axes | None = None
) -> plt.Figure | plt.Axes:
    """The attention of every head of every layer from one query: a column for each layer, a row for each head.

    weights: (L, H, rows, cols). query: (row, column) of the patch that asks, counted from 0 and marked by two ticks
    beside each map, since a frame would cover so small a cell; None for another token. scale: "each", every head up to
    its own largest weight, which is written below it; or "shared", one scale for all. The figure names it.
    """
    values = array(weights, 4, "Attention of shape (layers, heads, rows, cols)")
    one_of("scale", scale, ("each", "shared"))
    layers, heads, rows, cols = values.shape
    if query is not None:
        TokenGrid(rows, cols, (1, 1)).index(*query)
    width = max(8, min(92, 800 / layers - 8, (1100 / heads - 20) * cols / rows))  # pixels of a map
    cell = width / cols
    gap = 20 / cell, 8 / cell
    tiles = values.swapaxes(0, 1).reshape(-1, rows, cols)  # in reading order: head by head
    tall = heads * (rows * cell + 20) + 130
    with canvas(ax, max(680, layers * (width + 8) + 90), tall) as (ax, result):
        images = mosaic(ax, tiles, layers, gap)
        for image, weight in zip(images, tiles, strict=True):
            scaled = colors(weight if scale == "each" else values)
            image.set(cmap=scaled["cmap"], clim=(scaled["vmin"], scaled["vmax"]))
            _below(image, f"{100 * weight.max():.3g}", size=7)
        if query is not None:
            left, right, bottom, top = np.transpose([image.get_extent() for image in images])
            look = {"color": INK, "linewidth": 1.2, "clip_on": False}
            ax.vlines(left + query[1] + 0.5, top - 5 / cell, top - 1 / cell, **look)
            ax.hlines(top + query[0] + 0.5, left - 5 / cell, left - 1 / cell, **look)
        ax.set_ylim(heads * (rows + gap[0]), -5 / cell)
        ax.set_xticks([_middle(image)[0] for image in images[:layers]], range(layers))
        ax.set_yticks([_middle(image)[1] for image in images[::layers]], [f"head {k}" for k in range(heads)])
        ax.tick_params(labeltop=True, labelbottom=False)
        source = "" if query is None else f" from patch (row {query[0]}, column {query[1]})"
        ax.set_title(f"Attention of each head (rows) of each layer (columns){source}")
        how = "each from 0 to its own largest" if scale == "each" else f"one scale, 0 to {100 * values.max():.3g} %"
        words = f"Colors: attention weight, {how}. Below each: its largest weight in percent."
        words += "" if query is None else "\nTicks beside each: the row and the column of the patch that asks."
        ax.set_xlabel(words, size=8.5, color=GRAY)
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
    (p, q), (tall, wide) = grid.patch, covered(grid)
    whole = Image.new("RGB", (wide, tall), (205, 205, 205))
    whole.paste(picture, (0, 0))
    words = np.asarray(whole).reshape(grid.rows, p, grid.cols, q, 3).swapaxes(1, 2).reshape(-1, p, q, 3)
    slots = 18
    numbers = list(range(min(grid.tokens, slots)))
    if grid.tokens > slots:
        numbers[-3:] = [None, grid.tokens - 2, grid.tokens - 1]
    blank = {None: np.full((p, q, 3), 255, np.uint8)} | dict.fromkeys(
        range(grid.prefix), np.full((p, q, 3), 205, np.uint8)
    )
    sequence = np.stack([blank[n] if n in blank else words[n - grid.prefix] for n in numbers])
    height = min(330, 400 * tall / wide)
    strip = min(60, 860 / len(numbers)) * p / q
    with styled():
        figure = page(WIDTH, height + strip + 100, "constrained")
        axes = figure.subplot_mosaic([["input", "patches"], ["tokens", "tokens"]], height_ratios=[height, strip])
        left, right, below = axes.values()
        left.imshow(picture)
        right.imshow(whole, extent=(0, wide, tall, 0))
        line = {"color": "white", "linewidth": 3 if max(grid.rows, grid.cols) <= 16 else 1.5}
        right.hlines([p * k for k in range(1, grid.rows)], 0, wide, **line)
        right.vlines([q * k for k in range(1, grid.cols)], 0, tall, **line)
        images = mosaic(below, sequence, len(numbers), (0, 0.1 * q))
        for ax in (left, right):
            bare(ax)
        rows = range(0, grid.rows, -(-grid.rows * 14 // int(height)))
        right.set_yticks([(row + 0.5) * p for row in rows], [grid.index(row, 0) for row in rows])
        below.set_xticks([_middle(image)[0] for image in images], ["…" if n is None else n for n in numbers])
        prefix = f"{grid.prefix} of them before the first patch" if grid.prefix else "all of them patches"
        titles = {
            left: f"Input: {grid.image[0]} × {grid.image[1]} pixels",
            right: f"Patches: {grid.rows} × {grid.cols} of {p} × {q} pixels",
            below: f"Sequence: {grid.tokens} tokens, {prefix}",
        }
        for ax, title in titles.items():
            ax.set_title(title, loc="left", size=10.5, pad=6)
            ax.tick_params(length=0, labelsize=8, labelcolor=GRAY)
    return figure


def mosaic(ax: plt.Axes, tiles: np.ndarray, cols: int, gap: tuple[float, float], **scale) -> list[AxesImage]:
    """Draw tiles (n, h, w) or (n, h, w, 3), `cols` in a line, and return their images.

    The coordinates of the axes are cells. gap: (below, beside) a tile, in cells.
    """
    height, width = tiles.shape[1:3]
    down, across = height + gap[0], width + gap[1]
    ax.set_autoscale_on(False)  # else every picture works the limits out again
    images = []
    for k, tile in enumerate(tiles):
        x, y = k % cols * across, k // cols * down
        images.append(ax.imshow(tile, extent=(x, x + width, y + height, y), interpolation="nearest", **scale))
    lines = -(-len(tiles) // cols)
    ax.set(xlim=(0, cols * across - gap[1]), ylim=(lines * down - gap[0], 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return images


def about_gray(tiles: np.ndarray) -> np.ndarray:
    """Tiles (n, p, q, C) as colors (n, p, q, 3), each scaled on its own: v → ½ + ½·v / max|v|."""
    largest = np.abs(tiles).max((1, 2, 3), keepdims=True)
    return (0.5 + 0.5 * tiles / np.where(largest > 0, largest, 1)).repeat(3 // tiles.shape[-1], -1)


def _below(image: AxesImage, text: str, size: float) -> None:
    """A number below one picture of a mosaic."""
    place = _middle(image)[0], image.get_extent()[2]
    how = {"ha": "center", "va": "top", "size": size, "color": GRAY, "annotation_clip": False}
    image.axes.annotate(text, place, (0, -2), textcoords="offset points", **how)


def _middle(image: AxesImage) -> tuple[float, float]:
    left, right, bottom, top = image.get_extent()
    return (left + right) / 2, (bottom + top) / 2
