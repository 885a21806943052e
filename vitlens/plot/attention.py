"""Attention of all heads: their maps, and their mean distances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import Colormap
from matplotlib.patches import Rectangle
from PIL import Image

from vitlens.images import load_image
from vitlens.plot.mosaic import map_colors, mosaic, write_above_tile, write_below_tile
from vitlens.plot.on_images import mark
from vitlens.plot.painting import covered_size, paint, resolve_grid
from vitlens.plot.scales import ATTENTION, as_drawn, colors, translucent, uniform_value
from vitlens.plot.style import (
    DIM,
    DPI,
    SERIES,
    array,
    bare,
    beside,
    canvas,
    charts,
    color_bar,
    face,
    new_axes,
    reference,
    rule,
    series_name,
    shade,
    use_style,
    wrap,
)
from vitlens.recorder.grid import TokenGrid

ONE_LAYER = "attn.grid.image_map(attn[5].weights(query=(3, 4))[0])"
ALL_LAYERS = "torch.stack([attn.grid.image_map(layer.weights(query=(3, 4))[0]) for layer in attn])"
"""Calls that compute the arrays of `heads` and `all_heads`, for messages."""
GRAYS = -40, 330
"""Levels of a gray image below a map that are black and white, so that the image has less contrast than the map."""
OPAQUE, FAINT = 0.92, 0.6
"""Opacity of the largest weight over a gray image, and the power of a weight's share of it. It shows faint weights."""
GAP = 10
"""Gap between two maps of `heads`, in pixels of the page."""
NAME, LARGEST = 24, 18
"""Heights of the name above a map, and of the largest weight below it, in pixels of the page."""
TEXTS = 82
"""Height of the title and of the foot of `heads`, in pixels of the page."""
CELL_GAP, CELL_LINE = 8, 20
"""Gap between two maps of `all_heads`, and height of the percent below each, in pixels of the page."""


def heads(
    weights,
    *,
    image=None,
    query: tuple[int, int] | None = None,
    grid: TokenGrid | None = None,
    title: str = "",
    names: Sequence[str] = (),
    shared: bool = True,
    cmap: str | Colormap | None = None,
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """The attention of all heads of a layer from one query, over the image in gray if it is given.

    weights: (H, rows, cols). image: the model's input, as for `overlay`, drawn in color at the left. query: (row,
    column) of a patch from 0, drawn with a white frame, or None for a class token. names: titles of the maps, by
    default the numbers of the heads. shared: True for one color scale from 0 to the largest weight of all heads, False
    for a scale per head, with its largest weight below. cmap: colors, a name or a Colormap, by default viridis, and
    inferno over an image.

    A map that departs from uniform by no more than those of small models with random weights
    (`vitlens.plot.scales.ATTENTION`) is drawn as uniform.

    >>> weights = attn.grid.image_map(attn[5].weights(query=(3, 4))[0])
    >>> figure = vitlens.plot.heads(weights, query=(3, 4), shared=False)
    """
    values = array(weights, 3, "Attention of shape (heads, rows, cols)", ONE_LAYER)
    if image is not None:
        grid = resolve_grid(values.shape[1:], image, grid)
        image = load_image(image)
    grid = grid or TokenGrid(*values.shape[1:], (1, 1))
    resolve_grid(values.shape[1:], None, grid)
    if query is not None:
        grid.index(*query)
    lines = _line_count(len(values))
    cols = -(-len(values) // lines)
    image_cols = 0 if image is None else lines  # the image takes as many columns as lines
    high, wide = covered_size(grid)
    page_width, bar_width, widest, below = (790, 100, 200, 0) if shared else (860, 20, 240, LARGEST)
    room = page_width / (cols + image_cols) - GAP
    width = min(widest, room, 640 / lines * wide / high)
    pixel = wide / width  # of the page, in pixels of the input
    gap = GAP * pixel
    across = wide + gap
    down = high + (NAME + below) * pixel
    bottom = lines * down - (NAME + below) * pixel  # of the last line of maps
    page_width = max(460, bar_width + (width + GAP) * (cols + image_cols))
    with canvas(ax, page_width, TEXTS + lines * down / pixel) as (ax, result):
        start = 0
        if image is not None:
            gray = _gray(image, grid)
            _draw_query_image(ax, image, grid, query, bottom / high)
            start = bottom * wide / high + gap
        for head, weights_of_head in enumerate(values):
            row, col = divmod(head, cols)
            x, y = start + col * across, row * down
            extent = x, x + wide, y + high, y
            scale = colors(values if shared else weights_of_head, cmap)
            if image is not None:
                black, white = GRAYS
                ax.imshow(gray, extent=extent, cmap="gray", vmin=black, vmax=white)
                scale["cmap"] = translucent(
                    cmap or "inferno", scale["vmin"], scale["vmax"], OPAQUE, "value", FAINT
                )
            values_drawn = as_drawn(weights_of_head, ATTENTION)
            shown = ax.imshow(values_drawn, extent=extent, interpolation="nearest", **scale)
            mark(ax, query, grid.patch, (x, y))
            write_above_tile(ax, x, y, names[head] if names else f"Head {head}")
            if not shared:
                words = f"largest {100 * weights_of_head.max():.3g} %"
                if uniform_value(weights_of_head, ATTENTION) is not None:
                    words += ", uniform"
                write_below_tile(ax, x, y + high, words, size=8.5, ha="left")
        right = start + cols * across - gap
        lowest = bottom if shared else bottom + 16 * pixel
        ax.set(xlim=(0, right), ylim=(lowest, -20 * pixel), aspect="equal")
        bare(ax)
        ax.set_title(title or f"Attention of each head{_source(query)}", loc="left")
        words = "one scale for all heads" if shared else "from 0 to the largest of each map"
        words = f"Colors: attention weight, {words}."
        if any(uniform_value(weights_of_head, ATTENTION) is not None for weights_of_head in values):
            words += f" Uniform: all weights within {ATTENTION:.0%} of their mean."
        ax.set_xlabel(words, loc="left", size=8.5, color=shade(ax, DIM))
        if shared:
            color_bar(shown, cax=beside(ax, right / pixel))
    return result


def _line_count(count: int) -> int:
    """Number of lines for the maps of `count` heads."""
    if count <= 4:
        return 1
    if count <= 16:
        return 2
    return -(-count // 8)


def _draw_query_image(ax: plt.Axes, image, grid: TokenGrid, query, scale: float) -> None:
    """Draw the model's input with the query patch, enlarged by `scale`."""
    height, width = grid.image
    ax.imshow(image, extent=(0, width * scale, height * scale, 0))
    mark(ax, query, (grid.patch[0] * scale, grid.patch[1] * scale))
    write_above_tile(ax, 0, 0, "Input")


def all_heads(
    weights,
    *,
    image=None,
    query: tuple[int, int] | None = None,
    grid: TokenGrid | None = None,
    framed: Sequence[tuple[int, int]] = (),
    cmap: str | Colormap | None = None,
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """The attention of every head of every layer from one query: a column for each layer, a row for each head.

    weights: (L, H, rows, cols). Every head has a color scale from 0 to its largest weight, which is written below it.
    Maps that depart from uniform as little as those of small models with random weights are drawn as uniform, as in
    `heads`.
    image: the model's input, as for `overlay`, drawn in gray below the maps. query: (row, column) of the query patch
    from 0, marked by two ticks beside each map, or None for another token. framed: (layer, head) of maps to frame.
    cmap: as in `heads`.

    >>> maps = [attn.grid.image_map(layer.weights(query=(3, 4))[0]) for layer in attn]
    >>> figure = vitlens.plot.all_heads(torch.stack(maps), query=(3, 4), framed=[(2, 0)])
    """
    values = array(weights, 4, "Attention of shape (layers, heads, rows, cols)", ALL_LAYERS)
    layers, heads, rows, cols = values.shape
    if query is not None:
        TokenGrid(rows, cols, (1, 1)).index(*query)
    room = min(800 / layers - CELL_GAP, (1100 / heads - CELL_LINE) * cols / rows)
    width = max(8, min(92, room))  # pixels of a map
    tiles = values.swapaxes(0, 1).reshape(-1, rows, cols)  # in reading order: head by head
    fine = 1  # pixels of the mosaic for each cell of a map
    if image is None:
        painted = [map_colors(as_drawn(tile, ATTENTION), **colors(tile, cmap))[0] for tile in tiles]
    else:
        grid = resolve_grid((rows, cols), image, grid)
        fine = max(1, round(2 * width / cols))
        gray = _gray(load_image(image), grid).resize((fine * cols, fine * rows))
        black, white = GRAYS
        levels = (np.asarray(gray, float) - black) / (white - black)
        painted = [_paint_weights(levels, tile, fine, cmap) for tile in tiles]
    cell = width / cols / fine  # pixels of the page for each pixel of the mosaic
    high, wide = rows * fine, cols * fine
    page_width = max(680, layers * (width + CELL_GAP) + 90)
    page_height = heads * (high * cell + CELL_LINE) + 130
    with canvas(ax, page_width, page_height) as (ax, result):
        xs, ys = mosaic(ax, painted, layers, (CELL_LINE / cell, CELL_GAP / cell))
        has_uniform = False
        for k, tile in enumerate(tiles):
            head, layer = divmod(k, layers)
            percent = float(f"{100 * tile.max():.2g}")
            is_uniform = uniform_value(tile, ATTENTION) is not None
            words = f"{percent:g} u" if is_uniform else f"{percent:g}"
            has_uniform = has_uniform or is_uniform
            write_below_tile(ax, xs[layer], ys[head] + high / 2, words, size=8)
        words = "Colors: attention weight, each from 0 to its own largest. Below each: its largest weight in percent."
        if has_uniform:
            words += f"\nu: drawn as uniform, all weights within {ATTENTION:.0%} of their mean."
        if query is not None:
            x, y = np.meshgrid(xs - wide / 2, ys - high / 2)  # corners of the maps
            x, y = x.ravel(), y.ravel()
            row, col = ((place + 0.5) * fine for place in query)
            far, near = 6 / cell, 1 / cell
            ax.vlines(
                x + col, y - far, y - near, color=shade(ax, 0.15), linewidth=1.4, clip_on=False
            )
            ax.hlines(
                y + row, x - far, x - near, color=shade(ax, 0.15), linewidth=1.4, clip_on=False
            )
            words += "\nTicks beside each: the row and the column of the patch that asks."
        for layer, head in framed:
            corner = xs[layer] - wide / 2, ys[head] - high / 2
            frame = Rectangle(
                corner, wide, high, fill=False, edgecolor=SERIES[3], linewidth=2, clip_on=False
            )
            ax.add_patch(frame)
        ax.set_xticks(xs, range(layers))
        ax.set_yticks(ys, [f"head {k}" for k in range(heads)])
        ax.tick_params(labeltop=True, labelbottom=False, pad=6)
        title = f"Attention of each head (rows) of each layer (columns){_source(query)}"
        ax.set_title(title, loc="left")
        ax.set_xlabel(words, size=8.5, color=shade(ax, DIM), loc="left")
    return result


def _paint_weights(levels: np.ndarray, weights: np.ndarray, fine: int, cmap) -> np.ndarray:
    """(H, W, 3): a map of `fine` pixels a cell over gray levels, both from 0 to 1."""
    scale = colors(weights, cmap or "inferno")
    weights = as_drawn(weights, ATTENTION)
    rgba, _ = map_colors(weights, **scale)
    share = weights / scale["vmax"]
    opacity = OPAQUE * share.clip(0, 1) ** FAINT
    fine_colors = rgba[..., :3].repeat(fine, 0).repeat(fine, 1)
    fine_opacity = opacity[..., None].repeat(fine, 0).repeat(fine, 1)
    return paint(levels, fine_colors, fine_opacity)


def _source(query: tuple[int, int] | None) -> str:
    if query is None:
        return ""
    row, col = query
    return f" from patch (row {row}, column {col})"


def _gray(image: Image.Image, grid: TokenGrid) -> Image.Image:
    """The part of an image that the patches cover, in gray."""
    height, width = covered_size(grid)
    return image.convert("L").crop((0, 0, width, height))


LOCAL = 1 / 3
"""Heads below this share of the distance of uniform attention are called local, by convention."""
LEFT = -0.6
"""Left end of an axis of layers."""
WORDS = 62
"""Width of the words at the right of the dots, in pixels of the page."""


def attention_distance(
    mean_distance,
    *,
    uniform=None,
    control=None,
    image_size=None,
    ax: plt.Axes | None = None,
    title=None,
) -> plt.Axes:
    """Mean attention distance, one dot per layer and head (paper, Fig. 7 right and Fig. 11).

    The heads of a layer lie side by side, head 0 on the left. mean_distance: (L, H) in pixels, (B, L, H), of which the
    mean over B is drawn, or several of these by the name of their model, each in a color. uniform: the distance of
    uniform attention (`TokenGrid.uniform_distance`, renormalized if the dots are), a dashed line. Heads below a third
    of it are local, by convention, and their range is gray. control: the distances of a model with random weights, gray
    crosses. Dots follow `lines.markersize` and the width of the axes, and grays the color of the axes. A small figure
    needs `layout="constrained"`, or its labels may be cut.
    image_size: (height, width) of the input, or one number for both, for the label of the axis.

    Layers and heads count from 0.

    >>> distance = vitlens.attention.mean_distance(attn)
    >>> ax = vitlens.plot.attention_distance(distance, uniform=attn.grid.uniform_distance())
    """
    several = mean_distance if isinstance(mean_distance, Mapping) else {"": mean_distance}
    several = {name: _by_head(distances) for name, distances in several.items()}
    untrained = None if control is None else _by_head(control)
    drawn = list(several.values())
    if untrained is not None:
        drawn.append(untrained)
    top = max(np.nanmax(distances, initial=0) for distances in drawn)
    top = max(top, uniform or 0) or 1.0
    unit = "pixels"
    if image_size is not None:
        height, width = np.broadcast_to(image_size, 2)
        unit = f"pixels of {height} × {width}"
    with use_style(ax):
        if ax is None:
            ax = new_axes(6.4, 4.2)
        layers = max(len(distances) for distances in several.values())
        size = _dot_size(ax, layers)
        for k, (name, distances) in enumerate(several.items()):
            draw_distances(ax, distances, size, SERIES[k], (k, len(several)), name)
        if len(several) > 1:
            ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(several), frameon=False)
        right = layers - 0.4
        width = ax.bbox.width * DPI / ax.figure.dpi  # in pixels of the page
        if uniform is not None or untrained is not None:
            # room for words at the right of the dots, inside the axes
            right = LEFT + (right - LEFT) / (1 - min(0.4, WORDS / width))
        number_layers(ax, layers, right)
        if untrained is not None:
            layer = np.repeat(np.arange(len(untrained)) + 0.2, untrained.shape[1])
            ax.plot(layer, untrained.ravel(), "x", color=shade(ax, 0.6), markersize=0.7 * size)
            level = untrained.mean()
            below = 0
            if uniform is not None:
                level = uniform
                below = -23
            _write_at(ax, "× untrained", (right, level), (-3, below), va="center")
        if uniform is not None:
            ax.axhspan(0, LOCAL * uniform, color=shade(ax, 0.94), linewidth=0, zorder=0)
            ax.axhline(uniform, **reference(ax))
            words = _write_at(ax, "uniform\nattention", (right, uniform), (-2, 0), va="center")
            words.set_bbox({"facecolor": face(ax), "edgecolor": "none", "pad": 1})
            words.set_zorder(2.2)  # below the frame of the axes, which the box would interrupt
            width = ax.bbox.width * DPI / ax.figure.dpi
            words = wrap("gray: local, below a third of uniform", width, 5.5)
            _write_at(ax, words, (right, 0), (-4, 4))
        ax.set(xlabel="Network depth (layer)", ylabel=f"Mean attention distance ({unit})")
        ax.set(title=title, ylim=(0, 1.08 * top))
        rule(ax)
    return ax


def _dot_size(ax: plt.Axes, layers: int) -> float:
    """Diameter of a dot in points: `lines.markersize`, or 0.3 of the room of a layer if that is smaller."""
    room = 72 * ax.bbox.width / ax.figure.dpi / (layers + 1)
    return max(1.5, min(plt.rcParams["lines.markersize"], 0.3 * room))


def _write_at(ax: plt.Axes, words: str, point, offset, **alignment):
    """Write words that end at a point, moved by an offset in points."""
    return ax.annotate(
        words,
        point,
        offset,
        textcoords="offset points",
        size=min(8, 8 / 9 * plt.rcParams["font.size"]),
        color=shade(ax, DIM),
        ha="right",
        **alignment,
    )


def attention_distances(
    panels: Mapping[str, object],
    *,
    uniform: float | Mapping[str, float] | None = None,
    controls: Mapping[str, object] | None = None,
) -> plt.Figure:
    """Panels of `attention_distance` side by side on one scale, for several models or measurements.

    panels: (L, H) by title. uniform: one distance for all, or one by title. controls: (L, H) of models with random
    weights, by title.

    >>> distance, uniform = vitlens.attention.mean_distance(attn), attn.grid.uniform_distance()
    >>> figure = vitlens.plot.attention_distances({"cat": distance[0], "rocket": distance[1]}, uniform=uniform)
    """
    if uniform is None:
        raise TypeError(
            "attention_distances needs uniform=, the distance of uniform attention: `attn.grid.uniform_distance()` of "
            "a capture, or one by title."
        )
    if not isinstance(uniform, Mapping):
        uniform = dict.fromkeys(panels, uniform)
    missing = [title for title in panels if title not in uniform]
    if missing:
        raise ValueError(f"uniform must have a distance for each panel, but lacks {missing[0]!r}.")
    controls = controls or {}
    tops = []
    with use_style():
        figure, axes = charts(panels, 900, 350, sharey=True)
        for ax, (title, distances) in zip(axes, panels.items(), strict=True):
            control = controls.get(title)
            attention_distance(
                distances, uniform=uniform[title], control=control, ax=ax, title=title
            )
            ax.label_outer()
            tops.append(ax.get_ylim()[1])
        axes[0].set_ylim(0, max(tops))
    return figure


def draw_distances(
    ax: plt.Axes,
    values: np.ndarray,
    size: float,
    color: str = SERIES[0],
    place: tuple[int, int] = (0, 1),
    name="",
) -> None:
    """Draw distances (L, H) as dots: a column for each layer, its heads side by side from left to right.

    place: number of the model among those that share a column, and their number.
    """
    layers, heads = values.shape
    number, count = place
    shift = (number - (count - 1) / 2) * 0.8 / count  # of the model
    centers = np.arange(layers)[:, None] + shift
    from_middle = np.arange(heads) - (heads - 1) / 2
    x = centers + from_middle * 0.5 / count / max(heads - 1, 1)
    ax.plot(
        x.ravel(),
        values.ravel(),
        "o",
        color=color,
        markersize=size,
        markeredgecolor=face(ax),
        markeredgewidth=0.5,
        label=series_name(name),
    )


def number_layers(ax: plt.Axes, layers: int, high: float | None = None) -> None:
    """Set the x-limits, up to `high` or the last layer, and ticks at as many layers as have room for their numbers."""
    high = layers - 0.4 if high is None else high
    room = 20 * ax.figure.dpi / DPI  # of a number
    step = int(np.ceil(room * (high - LEFT) / ax.bbox.width))
    ax.set(xlim=(LEFT, high), xticks=range(0, layers, step))


def _by_head(mean_distance) -> np.ndarray:
    """(L, H) distances, averaged over images, also from the table of `Summary.to_pandas`."""
    if hasattr(mean_distance, "columns"):
        mean_distance = mean_distance.pivot(index="layer", columns="head", values="mean_distance")
    expected = "Mean distances of shape (layers, heads) or (images, layers, heads)"
    values = array(mean_distance, (2, 3), expected, "vitlens.attention.mean_distance(attn)")
    return values.mean(0) if values.ndim == 3 else values
