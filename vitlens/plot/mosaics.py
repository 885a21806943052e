"""Figures of many tiles: filters, position similarity, heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle
from PIL import Image

from vitlens.images import load_image
from vitlens.plot import style
from vitlens.plot.heatmaps import GRAY, checked_grid, covered, mark
from vitlens.plot.style import INK, WIDTH, array, bare, beside, canvas, color_bar, colors, scale_bar
from vitlens.recorder.grid import TokenGrid

GRAYS = -40, 330
"""Levels of a gray image below a map that are black and white, so that the image has less contrast than the map."""
OPAQUE, FAINT = 0.92, 0.6
"""Opacity of the largest weight over a gray image, and the power of a weight's share of it. It shows faint weights."""


def filters(
    components,
    explained_variance=None,
    *,
    cols: int = 7,
    untrained=None,
    names: Mapping[int, str] | None = None,
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """Principal components of the patch-embedding filters as tiles (paper, Fig. 7 left).

    components: (k, p, q, C), C = 3 (colors) or 1 (grays), or both results of `vitlens.filters.principal`.
    explained_variance: (k,) shares of the variance, written under the tiles. cols: tiles in a line. untrained:
    components of the same shape with random weights, of which a pale line is drawn at the foot. names: words by number
    of a tile, below it before its share.
    Every tile is scaled separately, symmetrically about zero: v → ½ + ½·v / max|v|. So zero is middle gray in all
    tiles, and brightness cannot be compared between tiles.

    >>> figure = vitlens.plot.filters(*vitlens.filters.principal(model))
    """
    if isinstance(components, tuple):
        components, explained_variance = components
    tiles = array(components, 4, "Filters of shape (k, p, q, C)")
    count, p, q, channels = tiles.shape
    cols = min(cols, count)
    painted = about_gray(tiles)
    if untrained is not None:
        blank = np.ones((-count % cols, p, q, 3))
        pale = 0.45 + 0.55 * about_gray(array(untrained, 4, "Filters of shape (k, p, q, C)")[:cols])
        painted = np.concatenate([painted, blank, pale])
    width, lines = min(WIDTH, max(420, 110 * cols)), -(-len(painted) // cols)
    below = (
        0.12 if explained_variance is None else 0.12 + 18 * cols / width
    )  # room below a tile, in its widths
    height = 70 + (width - 20) / cols * lines * (p / q + below) / 1.12
    with canvas(ax, width, height) as (ax, result):
        xs, ys = mosaic(ax, painted, cols, (below * q, 0.12 * q))
        kind = "RGB embedding" if channels == 3 else "Embedding"
        ax.set_title(f"{kind} filters (first {count} principal components)", loc="left")
        if explained_variance is not None:
            shares = array(explained_variance, 1, "Shares of the variance of shape (k,)")
            for k, share in enumerate(shares):
                text = f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"
                text = f"{names[k]}, {text}" if names and k in names else text
                _below(ax, xs[k % cols], ys[k // cols] + p / 2, text, size=8)
            words = f"Below each: its share of the filters’ variance, {shares.sum():.1%} together."
            ax.set_xlabel(words, size=8.5, loc="left")
        if untrained is not None:
            _below(
                ax,
                xs[0] - q / 2,
                ys[-1] + p / 2,
                "The first components of random weights",
                size=8.5,
                ha="left",
            )
    return result


def position_similarity(
    similarity, *, enlarged: tuple[int, int] | None = None, ax: plt.Axes | None = None
) -> plt.Figure | plt.Axes:
    """Cosine similarity of position embeddings, one tile per patch position (paper, Fig. 7 center and Fig. 10).

    similarity: (rows, cols, rows, cols), as from `vitlens.positions.similarity`. Positions count from 0. For large
    grids every n-th row and column of tiles is shown, at most 14 each way, with n in the labels of the axes. Each tile
    is complete. enlarged: (row, column) of a tile to frame and to draw large at the right, in place of the numbers of
    the axes and the color bar. Raises ValueError for other shapes and for values above 1.

    >>> figure = vitlens.plot.position_similarity(vitlens.positions.similarity(model), enlarged=(4, 9))
    """
    values = array(similarity, 4, "Similarity of shape (rows, cols, rows, cols)")
    rows, cols = values.shape[:2]
    largest = np.nanmax(np.abs(values), initial=0)
    if values.shape[2:] != (rows, cols) or largest > 1.001:
        raise ValueError(
            f"Cosines of shape (rows, cols, rows, cols) expected, got {values.shape} with values up to {largest:.3g}."
        )
    down, across, tiles, scale = shown_positions(values)
    shape = (len(down) * rows) / (len(across) * cols)
    side = 620 if max(len(down) * rows, len(across) * cols) > 20 else 260
    width, height = side * min(1, 1 / shape), side * min(1, shape)
    if enlarged is not None:
        width, height = 0.9 * width, 0.9 * height
    beyond = 140 if enlarged is None else 0.55 * width
    with canvas(
        ax, max(width, 240) + beyond, max(height, 120) + (90 if enlarged is None else 65)
    ) as (ax, result):
        xs, ys = mosaic(ax, tiles, len(across), (0.08 * rows, 0.08 * cols))
        ax.set_title("Position embedding similarity", loc="left")
        if enlarged is None:
            ordinal = {2: "2nd", 3: "3rd"}.get(across.step, f"{across.step}th")
            every = "" if across.step == 1 else f" (every {ordinal})"
            ax.set(xlabel=f"Input patch column{every}", ylabel=f"Input patch row{every}")
            ax.set_xticks(xs, across)
            ax.set_yticks(ys, down)
            scale_bar(scale, cax=beside(ax, min(width, 400)), label="Cosine similarity")
            return result
        TokenGrid(rows, cols, (1, 1)).index(*enlarged)
        row = min(range(len(down)), key=lambda k: abs(down[k] - enlarged[0]))
        col = min(range(len(across)), key=lambda k: abs(across[k] - enlarged[1]))
        right, (bottom, top) = ax.get_xlim()[1], ax.get_ylim()
        x, wide = 1.05 * right, 0.5 * right
        y = (bottom + top - wide * rows / cols) / 2
        image = scale.cmap(scale.norm(values[down[row], across[col]]))
        ax.imshow(image, extent=(x, x + wide, y + wide * rows / cols, y), interpolation="nearest")
        ax.set(xlim=(0, x + wide), ylim=(bottom, top))
        ax.set_xlabel(
            "Cosine similarity: 1 dark red, 0 white, −1 dark blue.",
            size=8.5,
            color=GRAY,
            loc="left",
        )
        ax.annotate(
            f"Row {down[row]}, column {across[col]}",
            (x, y),
            (0, 5),
            textcoords="offset points",
            size=9.5,
        )
        look = {"fill": False, "edgecolor": INK, "linewidth": 1.6, "clip_on": False}
        ax.add_patch(Rectangle((xs[col] - cols / 2, ys[row] - rows / 2), cols, rows, **look))
        ax.add_patch(Rectangle((x, y), wide, wide * rows / cols, **look))
    return result


def shown_positions(similarity: np.ndarray) -> tuple[range, range, np.ndarray, ScalarMappable]:
    """Rows and columns of the tiles to draw, their (n, rows, cols, 4) colors, and the scale from −1 to 1.

    Every n-th tile is drawn, at most 14 each way and 352 cells in a line.
    """
    rows, cols = similarity.shape[:2]
    most = max(rows, cols)
    every = next((n for n in range(1, most) if -(-most // n) <= min(14, 352 // most)), most)
    down, across = (range((n - 1) % every // 2, n, every) for n in (rows, cols))
    tiles = similarity[down][:, across].reshape(-1, rows, cols)
    return down, across, *colored(tiles, **colors(tiles, signed=True) | {"vmin": -1, "vmax": 1})


def heads(
    weights,
    *,
    image=None,
    query: tuple[int, int] | None = None,
    grid: TokenGrid | None = None,
    title: str = "",
    names: Sequence[str] = (),
    shared: bool = True,
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """The attention of all heads of a layer from one query, over the image in gray if it is given.

    weights: (H, rows, cols). image: the model's input, as for `overlay`, drawn in color at the left. query: (row,
    column) of a patch from 0, drawn with a white frame, or None for a class token. names: titles of the maps, by
    default the numbers of the heads. shared: True for one color scale from 0 to the largest weight of all heads, False
    for a scale per head, with its largest weight below.

    >>> weights = attn.grid.image_map(attn[5].weights(query=(3, 4))[0])
    >>> figure = vitlens.plot.heads(weights, query=(3, 4), shared=False)
    """
    values = array(weights, 3, "Attention of shape (heads, rows, cols)")
    if image is not None:
        grid = checked_grid(values.shape[1:], image, grid)
        image = load_image(image)
        gray = _gray(image, grid)
    grid = grid or TokenGrid(*values.shape[1:], (1, 1))
    checked_grid(values.shape[1:], None, grid)
    if query is not None:
        grid.index(*query)
    count = len(values)
    lines = 1 if count <= 4 else 2 if count <= 16 else -(-count // 8)
    cols, left = (
        -(-count // lines),
        lines * (image is not None),
    )  # the image takes as many columns as lines
    high, wide = covered(grid)
    room = (860 if not shared else 790) / (cols + left) - 10
    width = min(240 - 40 * shared, room, 640 / lines * wide / high)
    pixel = wide / width  # of the page, in pixels of the input
    across, down = wide + 10 * pixel, high + (24 if shared else 42) * pixel
    bottom = lines * down - (down - high)  # of the last line of maps
    size = (
        max(460, (100 if shared else 20) + (width + 10) * (cols + left)),
        82 + lines * down / pixel,
    )
    with canvas(ax, *size) as (ax, result):
        if left:
            scale = bottom / high  # as high as all lines together
            shown_grid = grid.image[1] * scale, grid.image[0] * scale
            ax.imshow(image, extent=(0, shown_grid[0], shown_grid[1], 0))
            mark(ax, query, (grid.patch[0] * scale, grid.patch[1] * scale))
            _above(ax, 0, 0, "Input")
        start = 0 if not left else bottom * wide / high + 10 * pixel
        for head, values_of_head in enumerate(values):
            x, y = start + head % cols * across, head // cols * down
            look = {"interpolation": "nearest", **colors(values if shared else values_of_head)}
            if left:
                ax.imshow(
                    gray,
                    extent=(x, x + wide, y + high, y),
                    cmap="gray",
                    vmin=GRAYS[0],
                    vmax=GRAYS[1],
                )
                look["cmap"] = style.translucent(
                    "inferno", look["vmin"], look["vmax"], OPAQUE, "value", FAINT
                )
            shown = ax.imshow(values_of_head, extent=(x, x + wide, y + high, y), **look)
            mark(ax, query, grid.patch, (x, y))
            _above(ax, x, y, names[head] if names else f"Head {head}")
            if not shared:
                _below(
                    ax,
                    x,
                    y + high,
                    f"largest {100 * values_of_head.max():.3g} %",
                    size=8.5,
                    ha="left",
                )
        right = start + cols * across - 10 * pixel
        ax.set(
            xlim=(0, right),
            ylim=(bottom + (0 if shared else 16 * pixel), -20 * pixel),
            aspect="equal",
        )
        bare(ax)
        ax.set_title(title or f"Attention of each head{_source(query)}", loc="left")
        words = "one scale for all heads" if shared else "from 0 to the largest of each map"
        ax.set_xlabel(f"Colors: attention weight, {words}.", loc="left", size=8.5, color=GRAY)
        if shared:
            color_bar(shown, cax=beside(ax, right / pixel))
    return result


def all_heads(
    weights,
    *,
    image=None,
    query: tuple[int, int] | None = None,
    grid: TokenGrid | None = None,
    framed: Sequence[tuple[int, int]] = (),
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """The attention of every head of every layer from one query: a column for each layer, a row for each head.

    weights: (L, H, rows, cols). Every head has a color scale up to its largest weight, which is written below it.
    image: the model's input, as for `overlay`, drawn in gray below the maps. query: (row, column) of the query patch
    from 0, marked by two ticks beside each map, or None for another token. framed: (layer, head) of maps to frame.

    >>> maps = [attn.grid.image_map(layer.weights(query=(3, 4))[0]) for layer in attn]
    >>> figure = vitlens.plot.all_heads(torch.stack(maps), query=(3, 4), framed=[(2, 0)])
    """
    values = array(weights, 4, "Attention of shape (layers, heads, rows, cols)")
    layers, heads, rows, cols = values.shape
    if query is not None:
        TokenGrid(rows, cols, (1, 1)).index(*query)
    width = max(8, min(92, 800 / layers - 8, (1100 / heads - 20) * cols / rows))  # pixels of a map
    tiles = values.swapaxes(0, 1).reshape(-1, rows, cols)  # in reading order: head by head
    cmap = None if image is None else "inferno"
    painted, fine = [colored(tile, **colors(tile, cmap))[0] for tile in tiles], 1
    if image is not None:
        grid, fine = checked_grid((rows, cols), image, grid), max(1, round(2 * width / cols))
        gray = _gray(load_image(image), grid).resize((fine * cols, fine * rows))
        gray = (np.asarray(gray, float)[..., None] - GRAYS[0]) / (GRAYS[1] - GRAYS[0])
        for k, tile in enumerate(tiles):
            alpha = OPAQUE * (tile / (tile.max() or 1)).clip(0, 1) ** FAINT
            alpha, over = (
                each.repeat(fine, 0).repeat(fine, 1)
                for each in (alpha[..., None], painted[k][..., :3])
            )
            painted[k] = (1 - alpha) * gray + alpha * over
    cell = width / cols / fine
    height = heads * (rows * fine * cell + 20) + 130
    with canvas(ax, max(680, layers * (width + 8) + 90), height) as (ax, result):
        xs, ys = mosaic(ax, painted, layers, (20 / cell, 8 / cell))
        for k, tile in enumerate(tiles):
            place = xs[k % layers], ys[k // layers] + rows * fine / 2
            _below(ax, *place, f"{float(f'{100 * tile.max():.2g}'):g}", size=8)
        words = "Colors: attention weight, each from 0 to its own largest. Below each: its largest weight in percent."
        if query is not None:
            x, y = np.meshgrid(xs - cols * fine / 2, ys - rows * fine / 2)
            look = {"color": INK, "linewidth": 1.4, "clip_on": False}
            ax.vlines(
                (x + (query[1] + 0.5) * fine).ravel(),
                y.ravel() - 6 / cell,
                y.ravel() - 1 / cell,
                **look,
            )
            ax.hlines(
                (y + (query[0] + 0.5) * fine).ravel(),
                x.ravel() - 6 / cell,
                x.ravel() - 1 / cell,
                **look,
            )
            words += "\nTicks beside each: the row and the column of the patch that asks."
        for layer, head in framed:
            corner = xs[layer] - cols * fine / 2, ys[head] - rows * fine / 2
            look = {"fill": False, "edgecolor": style.SERIES[3], "linewidth": 2, "clip_on": False}
            ax.add_patch(Rectangle(corner, cols * fine, rows * fine, **look))
        ax.set_xticks(xs, range(layers))
        ax.set_yticks(ys, [f"head {k}" for k in range(heads)])
        ax.tick_params(labeltop=True, labelbottom=False, pad=6)
        ax.set_title(
            f"Attention of each head (rows) of each layer (columns){_source(query)}", loc="left"
        )
        ax.set_xlabel(words, size=8.5, color=GRAY, loc="left")
    return result


def _source(query: tuple[int, int] | None) -> str:
    return "" if query is None else f" from patch (row {query[0]}, column {query[1]})"


def mosaic(
    ax: plt.Axes, tiles, cols: int, gap: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw colored tiles (n, h, w, 3 or 4) as one image, `cols` in a line.

    The coordinates of the axes are cells. gap: (below, beside) a tile, in cells. Returns the centers of the columns
    and of the lines.
    """
    tiles = np.asarray(tiles)[..., :3]
    count, h, w = tiles.shape[:3]
    fine = -(-32 // max(h, w))  # pixels of a cell, so that a gap is close to whole pixels
    down, across = (round(fine * each) for each in gap)
    lines, (high, wide) = -(-count // cols), (fine * h + down, fine * w + across)
    whole = np.full(
        (lines, high, cols, wide, 3), 255 if tiles.dtype == np.uint8 else 1, tiles.dtype
    )
    for k, tile in enumerate(tiles):
        whole[k // cols, : fine * h, k % cols, : fine * w] = tile.repeat(fine, 0).repeat(fine, 1)
    whole = whole.reshape(lines * high, cols * wide, 3)[:, : cols * wide - across]
    ax.imshow(
        whole, extent=(0, whole.shape[1] / fine, whole.shape[0] / fine, 0), interpolation="nearest"
    )
    ax.set_autoscale_on(False)
    bare(ax)
    ax.tick_params(length=0)
    return w / 2 + np.arange(cols) * wide / fine, h / 2 + np.arange(lines) * high / fine


def colored(
    values: np.ndarray, cmap, vmin: float, vmax: float
) -> tuple[np.ndarray, ScalarMappable]:
    """(…, 4) colors of values, and their scale."""
    scale = ScalarMappable(Normalize(vmin, vmax), cmap)
    return scale.cmap(scale.norm(values)), scale


def about_gray(tiles: np.ndarray) -> np.ndarray:
    """Tiles (n, p, q, C) as colors (n, p, q, 3), each scaled separately: v → ½ + ½·v / max|v|."""
    largest = np.abs(tiles).max((1, 2, 3), keepdims=True)
    return (0.5 + 0.5 * tiles / np.where(largest > 0, largest, 1)).repeat(3 // tiles.shape[-1], -1)


def _gray(image: Image.Image, grid: TokenGrid) -> Image.Image:
    """The part of an image that the patches cover, in gray."""
    return image.convert("L").crop((0, 0, *covered(grid)[::-1]))


def _above(ax: plt.Axes, x: float, y: float, text: str) -> None:
    """Write the name of a map above its upper left corner."""
    ax.annotate(text, (x, y), (0, 3), textcoords="offset points", size=9.5).set_in_layout(False)


def _below(ax: plt.Axes, x: float, y: float, text: str, size: float, ha: str = "center") -> None:
    """Write words below a tile, inside the mosaic."""
    look = {"ha": ha, "va": "top", "size": size, "color": GRAY, "annotation_clip": False}
    ax.annotate(text, (x, y), (0, -2), textcoords="offset points", **look).set_in_layout(False)
