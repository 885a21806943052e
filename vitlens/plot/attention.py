"""Attention of all heads: their maps, and their mean distances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from PIL import Image

from vitlens.images import load_image
from vitlens.plot import style
from vitlens.plot.mosaic import map_colors, mosaic, write_above_tile, write_below_tile
from vitlens.plot.on_images import mark
from vitlens.plot.painting import covered_size, resolve_grid
from vitlens.plot.style import (
    DPI,
    GRAY,
    INK,
    REFERENCE,
    SERIES,
    array,
    bare,
    beside,
    canvas,
    charts,
    color_bar,
    colors,
    rule,
    use_style,
)
from vitlens.recorder.grid import TokenGrid

GRAYS = -40, 330
"""Levels of a gray image below a map that are black and white, so that the image has less contrast than the map."""
OPAQUE, FAINT = 0.92, 0.6
"""Opacity of the largest weight over a gray image, and the power of a weight's share of it. It shows faint weights."""


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
        grid = resolve_grid(values.shape[1:], image, grid)
        image = load_image(image)
        gray = _gray(image, grid)
    grid = grid or TokenGrid(*values.shape[1:], (1, 1))
    resolve_grid(values.shape[1:], None, grid)
    if query is not None:
        grid.index(*query)
    count = len(values)
    lines = 1 if count <= 4 else 2 if count <= 16 else -(-count // 8)
    cols, left = (
        -(-count // lines),
        lines * (image is not None),
    )  # the image takes as many columns as lines
    high, wide = covered_size(grid)
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
            write_above_tile(ax, 0, 0, "Input")
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
            write_above_tile(ax, x, y, names[head] if names else f"Head {head}")
            if not shared:
                write_below_tile(
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
    painted, fine = [map_colors(tile, **colors(tile, cmap))[0] for tile in tiles], 1
    if image is not None:
        grid, fine = resolve_grid((rows, cols), image, grid), max(1, round(2 * width / cols))
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
            write_below_tile(ax, *place, f"{float(f'{100 * tile.max():.2g}'):g}", size=8)
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


def _gray(image: Image.Image, grid: TokenGrid) -> Image.Image:
    """The part of an image that the patches cover, in gray."""
    return image.convert("L").crop((0, 0, *covered_size(grid)[::-1]))


LOCAL = 1 / 3
"""Heads below this share of the distance of uniform attention are called local, by convention."""


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
    crosses. image_size: (height, width) of the input, or one number for both, for the label of the axis. Layers and
    heads count from 0.

    >>> distance = vitlens.attention.mean_distance(attn)
    >>> ax = vitlens.plot.attention_distance(distance, uniform=attn.grid.uniform_distance())
    """
    several = mean_distance if isinstance(mean_distance, Mapping) else {"": mean_distance}
    several, chance = (
        {n: _by_head(each) for n, each in several.items()},
        None if control is None else _by_head(control),
    )
    top = max(
        np.nanmax(each, initial=0)
        for each in (*several.values(), *([] if chance is None else [chance]))
    )
    top = max(top, uniform or 0) or 1.0
    of = "" if image_size is None else " of {} × {}".format(*np.broadcast_to(image_size, 2))
    with use_style(ax):
        if ax is None:
            ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")[1]
        for k, (name, values) in enumerate(several.items()):
            strip(ax, values, 6, SERIES[k], (k, len(several)), name)
        layers = max(len(values) for values in several.values())
        if len(several) > 1:
            ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(several), frameon=False)
        low, high = -0.6, layers - 0.4
        if (
            uniform is not None or chance is not None
        ):  # room for words at the right of the dots, inside the axes
            high = low + (high - low) / (1 - min(0.4, 62 * ax.figure.dpi / DPI / ax.bbox.width))
        number_layers(ax, layers, high)
        where = {"textcoords": "offset points", "size": 8, "color": "0.35", "ha": "right"}
        if chance is not None:
            layer = np.repeat(np.arange(len(chance)) + 0.2, chance.shape[1])
            ax.plot(layer, chance.ravel(), "x", color="0.6", markersize=4)
            level, below = (chance.mean(), 0) if uniform is None else (uniform, -23)
            ax.annotate("× untrained", (high, level), (-3, below), va="center", **where)
        if uniform is not None:
            ax.axhspan(0, LOCAL * uniform, color="0.94", linewidth=0, zorder=0)
            ax.axhline(uniform, **REFERENCE)
            words = ax.annotate("uniform\nattention", (high, uniform), (0, 0), va="center", **where)
            words.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
            room = ax.bbox.width * DPI / ax.figure.dpi
            ax.annotate(
                style.wrap("gray: local, below a third of uniform", room, 5.5),
                (high, 0),
                (-4, 4),
                **where,
            )
        ax.set(
            xlabel="Network depth (layer)",
            ylabel=f"Mean attention distance (pixels{of})",
            title=title,
        )
        ax.set(ylim=(0, 1.08 * top))
        rule(ax)
    return ax


def attention_distances(
    panels: Mapping[str, object],
    *,
    uniform: float | Mapping[str, float],
    controls: Mapping[str, object] | None = None,
) -> plt.Figure:
    """Panels of `attention_distance` side by side on one scale, for several models or measurements.

    panels: (L, H) by title. uniform: one distance for all, or one by title. controls: (L, H) of models with random
    weights, by title.

    >>> distance, uniform = vitlens.attention.mean_distance(attn), attn.grid.uniform_distance()
    >>> figure = vitlens.plot.attention_distances({"cat": distance[0], "rocket": distance[1]}, uniform=uniform)
    """
    uniform = uniform if isinstance(uniform, Mapping) else dict.fromkeys(panels, uniform)
    with use_style():
        (figure, axes), tops = charts(panels, 900, 350, sharey=True), []
        for ax, (title, values) in zip(axes, panels.items(), strict=True):
            control = (controls or {}).get(title)
            attention_distance(values, uniform=uniform[title], control=control, ax=ax, title=title)
            ax.label_outer()
            tops.append(ax.get_ylim()[1])
        axes[0].set_ylim(0, max(tops))
    return figure


def strip(
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
    center = np.arange(layers)[:, None] + (number - (count - 1) / 2) * 0.8 / count
    at = center + (np.arange(heads) - (heads - 1) / 2) * 0.5 / count / max(heads - 1, 1)
    look = {
        "color": color,
        "markersize": size,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
        "label": name,
    }
    ax.plot(at.ravel(), values.ravel(), "o", **look)


def number_layers(ax: plt.Axes, layers: int, high: float | None = None) -> None:
    """Set the x-limits, up to `high` or the last layer, and ticks at as many layers as have room for their numbers."""
    low, high = -0.6, layers - 0.4 if high is None else high
    step = int(np.ceil(20 * ax.figure.dpi / DPI * (high - low) / ax.bbox.width))
    ax.set(xlim=(low, high), xticks=range(0, layers, step))


def _by_head(mean_distance) -> np.ndarray:
    """(L, H) distances, averaged over images, also from the table of `Summary.to_pandas`."""
    if hasattr(mean_distance, "columns"):
        mean_distance = mean_distance.pivot(index="layer", columns="head", values="mean_distance")
    values = array(
        mean_distance, (2, 3), "Mean distances of shape (layers, heads) or (images, layers, heads)"
    )
    return values.mean(0) if values.ndim == 3 else values
