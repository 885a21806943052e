"""The paper's inspection of a model: filters, position embeddings, rollouts, and all on one page."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.figure import SubFigure
from matplotlib.patches import Rectangle

from vitlens.images import load_image
from vitlens.plot.attention import attention_distance
from vitlens.plot.mosaic import map_colors, mosaic, write_below_tile
from vitlens.plot.on_images import overlay
from vitlens.plot.style import (
    GRAY,
    INK,
    WIDTH,
    array,
    bare,
    beside,
    canvas,
    colors,
    page,
    scale_bar,
    use_style,
    wrap,
)
from vitlens.recorder.grid import TokenGrid

TITLES = {
    "filters": "Embedding filters",
    "positions": "Position similarity (cosine)",
    "distance": "Mean attention distance",
    "rollout": "Images and their attention rollouts",
}


TILE_GAP = 0.12
"""Gap between two filters, in widths of a tile."""
SHARE_LINE, FILTER_TEXTS = 18, 70
"""Heights of the share below a filter, and of the texts around all filters, in pixels of the page."""


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
    width = min(WIDTH, max(420, 110 * cols))
    lines = -(-len(painted) // cols)
    below = TILE_GAP  # room below a tile, in its widths
    if explained_variance is not None:
        below += SHARE_LINE * cols / width
    tile_width = (width - 20) / cols / (1 + TILE_GAP)
    height = FILTER_TEXTS + lines * tile_width * (p / q + below)
    with canvas(ax, width, height) as (ax, result):
        xs, ys = mosaic(ax, painted, cols, (below * q, TILE_GAP * q))
        kind = "RGB embedding" if channels == 3 else "Embedding"
        ax.set_title(f"{kind} filters (first {count} principal components)", loc="left")
        if explained_variance is not None:
            shares = array(explained_variance, 1, "Shares of the variance of shape (k,)")
            for k, share in enumerate(shares):
                text = f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"
                text = f"{names[k]}, {text}" if names and k in names else text
                write_below_tile(ax, xs[k % cols], ys[k // cols] + p / 2, text, size=8)
            words = f"Below each: its share of the filters’ variance, {shares.sum():.1%} together."
            ax.set_xlabel(words, size=8.5, loc="left")
        if untrained is not None:
            words = "The first components of random weights"
            write_below_tile(ax, xs[0] - q / 2, ys[-1] + p / 2, words, size=8.5, ha="left")
    return result


def about_gray(tiles: np.ndarray) -> np.ndarray:
    """Tiles (n, p, q, C) as colors (n, p, q, 3), each scaled separately: v → ½ + ½·v / max|v|."""
    largest = np.abs(tiles).max((1, 2, 3), keepdims=True)
    return (0.5 + 0.5 * tiles / np.where(largest > 0, largest, 1)).repeat(3 // tiles.shape[-1], -1)


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
    beyond, texts = 140, 90  # room at the right of the tiles, and above and below them
    if enlarged is not None:
        width, height = 0.9 * width, 0.9 * height
        beyond, texts = 0.55 * width, 65
    with canvas(ax, max(width, 240) + beyond, max(height, 120) + texts) as (ax, result):
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
        row = int(np.abs(np.subtract(down, enlarged[0])).argmin())
        col = int(np.abs(np.subtract(across, enlarged[1])).argmin())
        corner = xs[col] - cols / 2, ys[row] - rows / 2
        tile = scale.cmap(scale.norm(values[down[row], across[col]]))
        _draw_enlarged(ax, tile, corner, f"Row {down[row]}, column {across[col]}")
        words = "Cosine similarity: 1 dark red, 0 white, −1 dark blue."
        ax.set_xlabel(words, size=8.5, color=GRAY, loc="left")
    return result


def _draw_enlarged(ax: plt.Axes, tile: np.ndarray, corner: tuple[float, float], name: str) -> None:
    """Frame the tile (rows, cols, 4) at the corner (x, y) of a mosaic, and draw it large at the right."""
    rows, cols = tile.shape[:2]
    right = ax.get_xlim()[1]
    bottom, top = ax.get_ylim()
    x, width = 1.05 * right, 0.5 * right
    height = width * rows / cols
    y = (bottom + top - height) / 2
    ax.imshow(tile, extent=(x, x + width, y + height, y), interpolation="nearest")
    ax.set(xlim=(0, x + width), ylim=(bottom, top))
    ax.annotate(name, (x, y), (0, 5), textcoords="offset points", size=9.5)
    for place, size in ((corner, (cols, rows)), ((x, y), (width, height))):
        frame = Rectangle(place, *size, fill=False, edgecolor=INK, linewidth=1.6, clip_on=False)
        ax.add_patch(frame)


def shown_positions(similarity: np.ndarray) -> tuple[range, range, np.ndarray, ScalarMappable]:
    """Rows and columns of the tiles to draw, their (n, rows, cols, 4) colors, and the scale from −1 to 1.

    Every n-th tile is drawn, at most 14 each way and 352 cells in a line.
    """
    rows, cols = similarity.shape[:2]
    most = max(rows, cols)
    every = next((n for n in range(1, most) if -(-most // n) <= min(14, 352 // most)), most)
    down, across = (range((n - 1) % every // 2, n, every) for n in (rows, cols))
    tiles = similarity[down][:, across].reshape(-1, rows, cols)
    return down, across, *map_colors(tiles, **colors(tiles, signed=True) | {"vmin": -1, "vmax": 1})


def rollouts(images, maps, *, grid=None, captions=None, style: str = "heat") -> plt.Figure:
    """Images beside their attention rollouts, "Input" and "Attention" (paper, Fig. 6 and 14).

    images, maps: sequences of one length of arguments of `overlay`. grid: one for all, or one for each. captions: a
    text below each pair. style: "heat", in colors from the smallest value of each map (clear) to its largest (yellow),
    or "mask", the paper's image on black. Up to three pairs are in a line, all of one height.

    >>> pictures, rollouts = vitlens.restore(model, images), vitlens.attention.rollout(attn)
    >>> figure = vitlens.plot.rollouts(pictures, rollouts, captions=["cat", "rocket"])
    """
    pictures = [load_image(image) for image in images]
    count = len(pictures)
    grids = grid if isinstance(grid, list | tuple) else [grid] * count
    placed = list(zip(images, maps, grids, strict=True))
    cols = min(count, 2 if count == 4 else 3)
    room = WIDTH / max(cols, 2)
    shapes = [picture.width / picture.height for picture in pictures]
    lines = [range(first, min(first + cols, count)) for first in range(0, count, cols)]
    heights, texts, ratios = [], [], []
    for line in lines:
        # the last line keeps the room of the first
        line_shapes = [shapes[k] for k in (*line, *lines[0][len(line) :])]
        height = min(280, cols * room / 2 / sum(line_shapes))
        for k in line:
            texts.append(wrap(str(captions[k]), 2 * height * shapes[k]) if captions else "")
        text_lines = max(len(texts[k].splitlines()) for k in line)
        heights.append(height + 34 + 15 * text_lines)
        ratios.append(np.repeat(line_shapes, 2))
    with use_style():
        figure = page(cols * room, sum(heights))
        parts = np.ravel(figure.subfigures(len(lines), height_ratios=heights))
        for part, line, widths in zip(parts, lines, ratios, strict=True):
            axes = part.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
            for ax in axes[2 * len(line) :]:
                ax.axis("off")
            for k, left, right in zip(line, axes[::2], axes[1::2], strict=False):
                left.imshow(pictures[k])
                _rollout(*placed[k], right, style)
                for ax, name in ((left, "Input"), (right, "Attention")):
                    bare(ax)
                    ax.set_title(name, size=9, pad=4, color=GRAY)
                left.set_xlabel(texts[k], size=9, color=GRAY, x=1, parse_math=False)
    return figure


def _rollout(image, map, grid, ax: plt.Axes, style: str = "heat") -> None:
    values = array(map, 2, "A map of shape (rows, cols)")
    limits = (values.min(), values.max()) if np.ptp(values) > 1e-6 * values.max() else None
    overlay(image, values, grid=grid, ax=ax, style=style, colorbar=False, limits=limits)


def inspected(inspections: object | Mapping[str, object]) -> plt.Figure:
    """The four figures of a model's inspection on one page, or those of several models, a column for each.

    inspections: a `vitlens.report.Inspection`, or several by the heading of their model. Above each figure is its
    number, or the reason why the model lacks it. Rollouts are those of the first six images, or of the first four for
    several models. Numbers are those of all images. Several models share one panel of distances, as shares of the
    distance of uniform attention, with the mean change of a head if all have the same layers, heads and patches.

    >>> inspection = vitlens.report.inspect(model, [("cat", cat)])
    >>> figure = vitlens.plot.inspected({"the bundled model": inspection})
    """
    inspections = (
        inspections if isinstance(inspections, Mapping) else {inspections.model: inspections}
    )
    alone, first = len(inspections) == 1, next(iter(inspections.values()))
    columns, room = 6 if alone else 4, WIDTH / len(inspections)
    shape = max(each.grid.image[0] / each.grid.image[1] for each in inspections.values())
    captions = {
        name: [wrap(p.caption, room / columns / 1.2) for p in each.pictures]
        for name, each in inspections.items()
    }
    text = max(
        (len(caption.splitlines()) for each in captions.values() for caption in each[:columns]),
        default=0,
    )
    few = alone and len(first.pictures) <= 3  # then each image is beside its rollout, not above it
    lines = 1 if few else 2
    heights = [
        64,
        *([350] if alone else [285, 395, 340]),
        lines * (room / columns - 14) * shape + 66 + 14 * text,
    ]
    with use_style():
        figure = page(WIDTH, sum(heights))
        head, *middle, last = figure.subfigures(len(heights), 1, height_ratios=heights)
        rows = [head, last] if alone else [head, *middle[:2], last]
        rows = [np.ravel(row.subfigures(1, len(inspections))) for row in rows]
        for (title, *parts, below), (name, each) in zip(
            zip(*rows, strict=True), inspections.items(), strict=True
        ):
            layers, heads = each.mean_distance.shape
            title.suptitle(
                name, x=8 / room, y=0.8, ha="left", size=13, weight="bold", parse_math=False
            )
            words = f"{each.grid.rows} × {each.grid.cols} patches, {layers} layers of {heads} heads"
            title.text(8 / room, 0.05, words, color=GRAY)
            if alone:
                *parts, distance = middle[0].subfigures(1, 3, width_ratios=[0.8, 1.1, 1.1])
            if ax := _panel(parts[0], "filters", each, room / (3 if alone else 1)):
                filters(each.filters, cols=4 if alone else 7, ax=ax).set(anchor="NW")
                ax.set_title("", loc="left")
            if ax := _panel(parts[1], "positions", each, room / (3 if alone else 1)):
                position_similarity(each.similarity, ax=ax).set(anchor="N")
                ax.set_title("", loc="left")
                ax.tick_params(labelsize=7)
                ax.child_axes[0].set_ylabel("")
            axes = _panel(below, "rollout", each, room, lines, columns)
            pairs = () if axes is None else axes.reshape(-1, 2) if few else axes.T
            shown = zip(pairs, each.pictures, captions[name], strict=False)
            for (above, under), picture, caption in shown:
                above.imshow(picture.pixels)
                _rollout(picture.pixels, picture.rollout, each.grid, under)
                caption += "\n" * (
                    text - len(caption.splitlines())
                )  # equal room, so that images have one size
                under.set_title(caption, y=0, pad=-5, va="top", size=8.5, parse_math=False)
            for ax in axes.flat if axes is not None else ():
                ax.axis("off")
        if alone:
            values, uniform = first.mean_distance, first.grid.uniform_distance()
            ax = _panel(distance, "distance", first, WIDTH)
        else:
            values = {
                n: each.mean_distance / (each.grid.uniform_distance() or 1)
                for n, each in inspections.items()
            }
            uniform, words = (
                1,
                [f"{n}: {each.sentences['distance']}" for n, each in inspections.items()],
            )
            ax = _titled(
                middle[2], "distance", "\n".join([*words, *_change(*inspections.values())]), WIDTH
            ).subplots()
        attention_distance(values, uniform=uniform, ax=ax)
        if not alone:
            ax.set_ylabel("Mean attention distance\n(share of uniform attention)")
    return figure


def _change(first, *others) -> list[str]:
    """A sentence with the mean change of a head's distance between two models, if their heads can be paired."""
    if (
        len(others) != 1
        or others[0].grid != first.grid
        or others[0].mean_distance.shape != first.mean_distance.shape
    ):
        return []
    change = (others[0].mean_distance - first.mean_distance).abs()
    layer, head = divmod(change.argmax().item(), change.shape[1])
    largest = f"{change.max():.1f}, layer {layer}, head {head}"
    return [f"mean change of a head: {change.mean():.2f} pixels (largest: {largest})"]


def _panel(part: SubFigure, name: str, inspection, room: float, *shape: int):
    """Axes below a title and the number of a figure, or None and the reason if the model lacks it."""
    missing = name in inspection.lacks
    _titled(part, name, inspection.lacks[name] if missing else inspection.sentences[name], room)
    return None if missing else part.subplots(*shape)


def _titled(part: SubFigure, name: str, words: str, room: float) -> SubFigure:
    """A part of the page with the title of a figure and words below it."""
    text = f"{TITLES[name]}\n{wrap(words, room)}"
    part.suptitle(text, x=8 / part.bbox.width, ha="left", size=9.5, parse_math=False)
    return part
