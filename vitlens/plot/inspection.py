"""The paper's inspection of a model: filters, position embeddings, rollouts, and all on one page."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap
from matplotlib.figure import SubFigure
from matplotlib.patches import Rectangle

from vitlens.formatting import number
from vitlens.images import load_image
from vitlens.plot.attention import attention_distance
from vitlens.plot.mosaic import map_colors, mosaic, write_below_tile
from vitlens.plot.on_images import overlay
from vitlens.plot.painting import brightness, resolve_grid
from vitlens.plot.scales import bar_words, colors, range_words
from vitlens.plot.style import (
    DIM,
    DPI,
    GRAY,
    WIDTH,
    array,
    bare,
    beside,
    canvas,
    page,
    scale_bar,
    shade,
    use_style,
    wrap,
)
from vitlens.recorder.grid import TokenGrid

TITLES = {
    "filters": "Embedding filters (paper, Fig. 7 left)",
    "positions": "Position similarity, cosine (Fig. 7 center)",
    "distance": "Mean attention distance (Fig. 7 right)",
    "rollout": "Images and their attention rollouts (Fig. 6)",
}


TILE_GAP = 0.12
"""Gap between two filters, in widths of a tile."""
SHARE_LINE = 18
"""Height of the share below a filter, in pixels of the page."""
FILTER_TEXTS = 70
"""Height of the texts around all filters, in pixels of the page."""
CAPTION_LINE = 14
"""Height of a line of the caption of an image, in pixels of the page."""


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
    tiles = array(
        components, 4, "Filters of shape (k, p, q, C)", "vitlens.filters.principal(model)[0]"
    )
    count, p, q, channels = tiles.shape
    cols = min(cols, count)
    painted = about_gray(tiles)
    if untrained is not None:
        blank = np.full((-count % cols, p, q, 3), np.nan)
        random = array(untrained, 4, "Filters of shape (k, p, q, C)")
        pale = 0.45 + 0.55 * about_gray(random[:cols])
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
        title = f"{kind} filters (first {count} principal components)"
        if result is ax:  # axes of the caller may be narrow
            size = plt.rcParams["font.size"]
            title = wrap(title, ax.bbox.width * DPI / ax.figure.dpi, size)
        ax.set_title(title, loc="left")
        if explained_variance is not None:
            shares = array(explained_variance, 1, "Shares of the variance of shape (k,)")
            for k, share in enumerate(shares):
                text = f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"
                if names and k in names:
                    text = f"{names[k]}, {text}"
                line, col = divmod(k, cols)
                bottom = ys[line] + p / 2
                write_below_tile(ax, xs[col], bottom, text, size=8)
            words = f"Below each: its share of the filters’ variance, {shares.sum():.1%} together."
            ax.set_xlabel(words, size=8.5, loc="left")
        if untrained is not None:
            words = "The first components of random weights"
            left = xs[0] - q / 2
            bottom = ys[-1] + p / 2
            write_below_tile(ax, left, bottom, words, size=8.5, ha="left")
    return result


def about_gray(tiles: np.ndarray) -> np.ndarray:
    """Tiles (n, p, q, C) as colors (n, p, q, 3), each scaled separately: v → ½ + ½·v / max|v|."""
    largest = np.abs(tiles).max((1, 2, 3), keepdims=True)
    scale = np.where(largest > 0, largest, 1)
    levels = 0.5 + 0.5 * tiles / scale
    channels = tiles.shape[-1]
    return levels.repeat(3 // channels, -1)


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
    values = array(
        similarity,
        4,
        "Similarity of shape (rows, cols, rows, cols)",
        "vitlens.positions.similarity(model)",
    )
    rows, cols = values.shape[:2]
    largest = np.nanmax(np.abs(values), initial=0)
    if values.shape[2:] != (rows, cols) or largest > 1.001:
        raise ValueError(
            f"Cosines of shape (rows, cols, rows, cols) expected, got {values.shape} with values up to {largest:.3g}."
        )
    down, across, tiles, scale = shown_positions(values)
    cells_down = len(down) * rows
    cells_across = len(across) * cols
    shape = cells_down / cells_across
    side = 620 if max(cells_down, cells_across) > 20 else 260
    width = side * min(1, 1 / shape)
    height = side * min(1, shape)
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
        row = _nearest(down, enlarged[0])
        col = _nearest(across, enlarged[1])
        corner = xs[col] - cols / 2, ys[row] - rows / 2
        tile = scale.cmap(scale.norm(values[down[row], across[col]]))
        _draw_enlarged(ax, tile, corner, f"Row {down[row]}, column {across[col]}")
        words = "Cosine similarity: 1 dark red, 0 white, −1 dark blue."
        ax.set_xlabel(words, size=8.5, color=shade(ax, DIM), loc="left")
    return result


def _nearest(values: range, value: int) -> int:
    """Index of the number that is nearest to the value."""
    distances = np.abs(np.subtract(values, value))
    return int(distances.argmin())


def _draw_enlarged(ax: plt.Axes, tile: np.ndarray, corner: tuple[float, float], name: str) -> None:
    """Frame the tile (rows, cols, 4) at the corner (x, y) of a mosaic, and draw it large at the right."""
    rows, cols = tile.shape[:2]
    right = ax.get_xlim()[1]
    bottom, top = ax.get_ylim()
    x = 1.05 * right
    width = 0.5 * right
    height = width * rows / cols
    y = (bottom + top - height) / 2
    ax.imshow(tile, extent=(x, x + width, y + height, y), interpolation="nearest")
    ax.set(xlim=(0, x + width), ylim=(bottom, top))
    ax.annotate(name, (x, y), (0, 5), textcoords="offset points", size=9.5)
    for place, size in ((corner, (cols, rows)), ((x, y), (width, height))):
        frame = Rectangle(
            place, *size, fill=False, edgecolor=shade(ax, 0.15), linewidth=1.6, clip_on=False
        )
        ax.add_patch(frame)


def shown_positions(similarity: np.ndarray) -> tuple[range, range, np.ndarray, ScalarMappable]:
    """Rows and columns of the tiles to draw, their (n, rows, cols, 4) colors, and the scale from −1 to 1.

    Every n-th tile is drawn, at most 14 each way and 352 cells in a line.
    """
    rows, cols = similarity.shape[:2]
    most = max(rows, cols)
    room = min(14, 352 // most)  # tiles in a line
    every = 1
    while every < most and -(-most // every) > room:
        every += 1
    down = range((rows - 1) % every // 2, rows, every)
    across = range((cols - 1) % every // 2, cols, every)
    tiles = similarity[down][:, across].reshape(-1, rows, cols)
    cmap = colors(tiles, signed=True)["cmap"]
    painted, scale = map_colors(tiles, cmap, -1, 1)
    return down, across, painted, scale


def rollouts(
    images,
    maps,
    *,
    grid=None,
    captions=None,
    style: str = "heat",
    cmap: str | Colormap | None = None,
) -> plt.Figure:
    """Images beside their attention rollouts, "Input" and "Attention" (paper, Fig. 6 and 14).

    images, maps: sequences of one length of arguments of `overlay`. grid: one for all, or one for each. captions: a
    text below each pair. style: "heat", in colors from 0 (clear) to the largest value of each map (yellow, or the
    last color of `cmap`, a name or a Colormap), or "mask",
    the paper's image on black, stretched from the smallest value to the largest.

    The ends are below each pair, and uniform maps are drawn as in `overlay`. Up to three pairs are in a line, all of
    one height.

    >>> pictures, rollouts = vitlens.restore(model, images), vitlens.attention.rollout(attn)
    >>> figure = vitlens.plot.rollouts(pictures, rollouts, captions=["cat", "rocket"])
    """
    pictures = [load_image(image) for image in images]
    count = len(pictures)
    grids = grid if isinstance(grid, list | tuple) else [grid] * count
    arguments = list(zip(images, maps, grids, strict=True))
    cols = 2 if count == 4 else min(count, 3)
    room = WIDTH / max(cols, 2)
    shapes = [picture.width / picture.height for picture in pictures]
    lines = [range(first, min(first + cols, count)) for first in range(0, count, cols)]
    heights = []
    texts = []
    ratios = []
    for line in lines:
        # the last line keeps the room of the first
        missing = lines[0][len(line) :]
        line_shapes = [shapes[k] for k in (*line, *missing)]
        height = min(280, cols * room / 2 / sum(line_shapes))
        for k in line:
            pair_width = 2 * height * shapes[k]
            caption = f"{captions[k]}\n" if captions else ""
            texts.append(wrap(caption + _scale_words(*arguments[k], style), pair_width))
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
                _rollout(*arguments[k], right, style, cmap)
                for ax, name in ((left, "Input"), (right, "Attention")):
                    bare(ax)
                    ax.set_title(name, size=9, pad=4, color=GRAY)
                left.set_xlabel(texts[k], size=9, color=GRAY, x=1, parse_math=False)
    return figure


def _rollout(image, map, grid, ax: plt.Axes, style: str = "heat", cmap=None) -> None:
    overlay(image, map, grid=grid, ax=ax, style=style, cmap=cmap, colorbar=None)


def _scale_words(image, map, grid, style: str) -> str:
    """Words below a rollout: the ends of its colors."""
    values = array(map, 2, "A map of shape (rows, cols)")
    if style == "heat":
        return f"Attention: {range_words(values)}"
    _, low, high = brightness(values, resolve_grid(values.shape, image, grid), smooth=True)
    words = f"Attention: black {number(low)} to white {number(high)}"
    more = bar_words(values, low, high)
    return f"{words}, {more}" if more else words


def inspected(inspections: object | Mapping[str, object]) -> plt.Figure:
    """The four figures of a model's inspection on one page, or those of several models, a column for each.

    inspections: a `vitlens.report.Inspection`, or several by the heading of their model.

    Above each figure is its number, or the reason why the model lacks it. Rollouts are those of the first six images,
    or of the first four for several models. Numbers are those of all images. Several models share one panel of
    distances, as shares of the distance of uniform attention, with the mean change of a head if all have the same
    layers, heads and patches.

    >>> inspection = vitlens.report.inspect(model, [("cat", cat)])
    >>> figure = vitlens.plot.inspected({"the bundled model": inspection})
    """
    if not isinstance(inspections, Mapping):
        inspections = {inspections.model: inspections}
    models = list(inspections.values())
    is_single = len(models) == 1
    room = WIDTH / len(models)  # width of a model's column
    columns = 6 if is_single else 4  # of images
    image_width = room / columns
    image_height, caption_lines = _image_room(models, columns, image_width)
    lines = 2  # each image above its rollout
    if is_single and len(models[0].pictures) <= 3:
        lines = 1  # each image beside its rollout
    middle_heights = [350] if is_single else [285, 395, 340]
    images_height = lines * image_height + 90 + CAPTION_LINE * caption_lines
    heights = [64, *middle_heights, images_height]
    with use_style():
        figure = page(WIDTH, sum(heights))
        head, *middle, foot = figure.subfigures(len(heights), 1, height_ratios=heights)
        titles = np.ravel(head.subfigures(1, len(models)))
        rollout_parts = np.ravel(foot.subfigures(1, len(models)))
        if is_single:
            parts = middle[0].subfigures(1, 3, width_ratios=[0.8, 1.1, 1.1])
            filter_parts, position_parts, distance_part = parts[:1], parts[1:2], parts[2]
            panel_room = room / 3
        else:
            filter_parts = np.ravel(middle[0].subfigures(1, len(models)))
            position_parts = np.ravel(middle[1].subfigures(1, len(models)))
            distance_part = middle[2]
            panel_room = room
        for k, (name, inspection) in enumerate(inspections.items()):
            _write_heading(titles[k], name, inspection, room)
            _draw_filters(filter_parts[k], inspection, panel_room, cols=4 if is_single else 7)
            _draw_positions(position_parts[k], inspection, panel_room)
            axes = _add_panel(rollout_parts[k], "rollout", inspection, room, lines, columns)
            if axes is not None:
                pairs = axes.reshape(-1, 2) if lines == 1 else axes.T
                if lines == 1:
                    for ax in axes.ravel():
                        ax.set_anchor("N")  # the spare room is below, for the captions
                _draw_pictures(pairs, inspection, image_width, caption_lines)
        if is_single:
            ax = _add_panel(distance_part, "distance", models[0], WIDTH)
            uniform = models[0].grid.uniform_distance()
            attention_distance(models[0].mean_distance, uniform=uniform, ax=ax)
        else:
            _draw_shared_distances(distance_part, inspections)
    return figure


def _image_room(models, columns: int, width: float) -> tuple[float, int]:
    """Largest height of an image of a page, and largest number of lines of a caption."""
    height = 0
    caption_lines = 0
    for inspection in models:
        rows, cols = inspection.grid.image
        height = max(height, (width - 14) * (rows / cols))
        for picture in inspection.pictures[:columns]:
            caption = _wrap_caption(picture, width)
            caption_lines = max(caption_lines, len(caption.splitlines()))
    return height, caption_lines


def _wrap_caption(picture, width: float) -> str:
    caption = wrap(picture.caption, width / 1.2)
    if picture.rollout is None:
        return caption
    ends = range_words(array(picture.rollout, 2, "A rollout of shape (rows, cols)"))
    return f"{caption}\n{wrap(ends, width / 1.2)}"


def _write_heading(part: SubFigure, name: str, inspection, room: float) -> None:
    """Write the heading of a model and its sizes."""
    left = 8 / room
    grid = inspection.grid
    layers, heads = inspection.mean_distance.shape
    part.suptitle(name, x=left, y=0.8, ha="left", size=13, weight="bold", parse_math=False)
    words = f"{grid.rows} × {grid.cols} patches, {layers} layers of {heads} heads"
    part.text(left, 0.05, words, color=GRAY)


def _draw_filters(part: SubFigure, inspection, room: float, cols: int) -> None:
    """Draw the filters of a model, or write why it has none."""
    ax = _add_panel(part, "filters", inspection, room)
    if ax is None:
        return
    filters(inspection.filters, cols=cols, ax=ax)
    ax.set(anchor="NW")
    ax.set_title("", loc="left")


def _draw_positions(part: SubFigure, inspection, room: float) -> None:
    """Draw the position similarity of a model, or write why it has none."""
    ax = _add_panel(part, "positions", inspection, room)
    if ax is None:
        return
    position_similarity(inspection.similarity, ax=ax)
    ax.set(anchor="N")
    ax.set_title("", loc="left")
    ax.tick_params(labelsize=7)
    ax.child_axes[0].set_ylabel("")


def _draw_pictures(pairs, inspection, width: float, caption_lines: int) -> None:
    """Draw images and their rollouts in pairs of axes, with captions of the same number of lines."""
    for (above, below), picture in zip(pairs, inspection.pictures, strict=False):
        above.imshow(picture.pixels)
        _rollout(picture.pixels, picture.rollout, inspection.grid, below)
        caption = _wrap_caption(picture, width)
        missing_lines = caption_lines - len(caption.splitlines())
        caption += "\n" * missing_lines  # equal room, so that images have one size
        below.set_title(caption, y=0, pad=-5, va="top", size=8.5, parse_math=False)
    for ax in np.ravel(pairs):
        ax.axis("off")


def _draw_shared_distances(part: SubFigure, inspections: Mapping[str, object]) -> None:
    """Draw the distances of several models in one panel, as shares of the distance of uniform attention."""
    shares = {}
    words = []
    for name, inspection in inspections.items():
        uniform = inspection.grid.uniform_distance() or 1
        shares[name] = inspection.mean_distance / uniform
        words.append(f"{name}: {inspection.sentences['distance']}")
    if len(inspections) == 2:
        words += _change(*inspections.values())
    _write_title(part, "distance", "\n".join(words), WIDTH)
    ax = part.subplots()
    attention_distance(shares, uniform=1, ax=ax)
    ax.set_ylabel("Mean attention distance\n(share of uniform attention)")


def _change(first, second) -> list[str]:
    """A sentence with the mean change of a head's distance between two models, if their heads can be paired."""
    before = first.mean_distance
    after = second.mean_distance
    if second.grid != first.grid or after.shape != before.shape:
        return []
    change = (after - before).abs()
    layer, head = divmod(change.argmax().item(), change.shape[1])
    largest = f"{change.max():.1f}, layer {layer}, head {head}"
    return [f"mean change of a head: {change.mean():.2f} pixels (largest: {largest})"]


def _add_panel(part: SubFigure, name: str, inspection, room: float, *shape: int):
    """Axes below a title and the number of a figure, or None and the reason if the model lacks it."""
    if name in inspection.lacks:
        _write_title(part, name, inspection.lacks[name], room)
        return None
    words = inspection.sentences[name]
    if name == "rollout":
        words += "\ncolors from 0 to the max of each map"
    _write_title(part, name, words, room)
    return part.subplots(*shape)


def _write_title(part: SubFigure, name: str, words: str, room: float) -> None:
    """Write the title of a figure, and words below it."""
    text = f"{TITLES[name]}\n{wrap(words, room)}"
    part.suptitle(text, x=8 / part.bbox.width, ha="left", size=9.5, parse_math=False)
