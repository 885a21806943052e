"""Explanation maps of an image beside each other, and the tests of the maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import Colormap
from matplotlib.patches import Circle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter

from vitlens.formatting import with_minus
from vitlens.images import load_image
from vitlens.plot import style
from vitlens.plot.on_images import mark, overlay
from vitlens.plot.scales import (
    as_drawn,
    bar_words,
    colors,
    range_words,
    uniform_value,
    uniform_words,
    without_signs,
)
from vitlens.plot.style import (
    INK,
    SERIES,
    WIDTH,
    array,
    bare,
    charts,
    frames,
    heading,
    name_above,
    page,
    rule,
    scale_bar,
    series_name,
    use_style,
    wrap,
    write_below,
    write_note,
)
from vitlens.recorder.grid import TokenGrid

BELOW = {"location": "bottom", "shrink": 0.67, "aspect": 15, "pad": 0.03}
"""Position of the color bar of an image in a line."""
GAP = 8
"""Gap between the columns of `attributions`, in pixels of the page."""
NAME, CAPTION_LINE, TITLE_LINE, NOTE_LINE = 24, 15, 20, 15
"""Heights in pixels of the page: the name above a map, and a line of its caption, of the title and of the note."""
THUMBNAILS = 112
"""Height of the images below the input to which it is compared, in pixels of the page."""
CELL, AXES_TEXTS, TITLE_TEXT = 20, 60, 16
"""Heights in pixels of the page: a row of `contributions`, the texts around its axes, and a line of their title."""


def tiles(
    maps: Mapping[str, object],
    *,
    signed: bool = False,
    labels: Sequence[str] = (),
    cmap: str | Colormap | None = None,
) -> plt.Figure:
    """Maps in a line, each with its name above and its own color bar below.

    maps: (rows, cols) by name, at most six, of any shapes. Colors reach from 0 to the largest value, or from −max to
    max if a map has negative values. Uniform maps are drawn as in `overlay`. signed: True for ±max in all maps. labels:
    names of the rows and columns of small square matrices, whose values are then written into the cells, in place of
    the bars. NaN is gray. cmap: colors of maps without negative values, a name or a Colormap. Others stay red and blue.

    >>> figure = vitlens.plot.tiles({"rollout": vitlens.attention.rollout(attn)[0]})
    """
    values = {name: array(item, 2, "A map of shape (rows, cols)") for name, item in maps.items()}
    aspect = max(item.shape[0] / item.shape[1] for item in values.values())
    with use_style():
        figure, axes = _line(len(values), 240, aspect, below=50)
        for ax, (name, item) in zip(axes, values.items(), strict=True):
            chosen = None if signed else without_signs(item, cmap)
            scale = colors(item, chosen, signed=signed or None)
            name_above(ax, name)
            if labels:
                shown = ax.imshow(item, interpolation="nearest", **scale)
                _write_cells(ax, shown, item)
                ax.set_xticks(range(len(labels)), labels)
                ax.set_yticks(range(len(labels)), labels if ax is axes[0] else [""] * len(labels))
                ax.tick_params(length=0)
            else:
                shown = ax.imshow(as_drawn(item), interpolation="nearest", **scale)
                words = bar_words(item, scale["vmin"], scale["vmax"])
                scale_bar(shown, note=words, ax=ax, **BELOW)
    return figure


def _write_cells(ax: plt.Axes, shown, values: np.ndarray) -> None:
    """Write each value into its cell, dark on bright colors and white on dark ones."""
    for (row, col), value in np.ndenumerate(values):
        brightness = np.mean(shown.to_rgba(value)[:3])
        ink = INK if brightness > 0.45 else "white"
        ax.text(col, row, with_minus(f"{value:.2g}"), ha="center", va="center", color=ink)


def overlays(
    image,
    maps: Mapping[str, object],
    *,
    grid: TokenGrid,
    query: tuple[int, int] | Mapping[str, tuple[int, int]] | None = None,
    limits: Mapping[str, tuple[float, float]] | None = None,
    smooth: bool = True,
    note: str = "",
    cmap: str | Colormap | None = None,
) -> plt.Figure:
    """An image, and beside it the image under each map, as `overlay` draws it in the style "heat".

    image: the model's input, as for `overlay`. maps: (rows, cols), or (rows, cols, 3) colors, by name, at most five.
    Below each is its color bar: from 0 to its largest value, from −max to max if some are negative, or between its
    `limits`, by name. Stretched and uniform maps are labeled there. query: (row, column) of a patch to mark in all maps
    and in the image, or one per map by name. note: the meaning of the colors, at the foot. cmap: as in `tiles`. Raises
    ValueError for a map
    of another shape than the grid, and IndexError for a patch outside of it.

    >>> maps = {"rollout": vitlens.attention.rollout(attn)[0]}
    >>> figure = vitlens.plot.overlays(vitlens.restore(model, images)[0], maps, grid=attn.grid)
    """
    picture = load_image(image)
    patches = query if isinstance(query, Mapping) else dict.fromkeys((None, *maps), query)
    for patch in patches.values():
        if patch is not None:
            grid.index(*patch)
    limits = limits or {}
    has_bars = any(np.ndim(item) == 2 for item in maps.values())
    below = 8 + (46 if has_bars else 0) + (20 if note else 0)
    with use_style():
        figure, axes = _line(len(maps) + 1, 200, grid.image[0] / grid.image[1], below)
        draw_input(axes[0], picture, grid)
        for ax, (name, item) in zip(axes[1:], maps.items(), strict=True):
            values = array(item, (2, 3), "A map of shape (rows, cols)")
            overlay(
                picture,
                item,
                grid=grid,
                ax=ax,
                style="heat",
                colorbar=None,
                smooth=smooth,
                limits=limits.get(name),
                cmap=without_signs(values, cmap),
            )
            name_above(ax, name)
        for name, ax in zip((None, *maps), axes, strict=True):
            mark(ax, patches.get(name), grid.patch)
            if ax.images[-1].get_array().ndim == 2:
                words = _bar_words(maps[name], ax.images[-1])
                scale_bar(ax.images[-1], note=words, ax=ax, **BELOW)
            elif has_bars:
                hidden = figure.colorbar(plt.cm.ScalarMappable(), ax=ax, **BELOW)
                hidden.ax.set_visible(False)  # keeps the room
        write_note(figure, note)
    return figure


def _bar_words(map, shown) -> str:
    """Words at the color bar of a map, which is drawn as the image `shown`."""
    values = array(map, 2, "A map of shape (rows, cols)")
    return bar_words(values, *shown.get_clim())


def attributions(
    image,
    maps: Mapping[str, object],
    *,
    grid: TokenGrid,
    title: str,
    captions: Mapping[str, str] | None = None,
    note: str = "",
    cols: int = 4,
    compared: Sequence[tuple[str, object]] = (),
    cmap: str | Colormap | None = None,
) -> plt.Figure:
    """An image, and the same image under the map of each method, `cols` to a line.

    Each map has a color scale from 0 to its largest value, or from −max to max if some are negative. Its ends, and its
    largest value against its mean, are below the map. Uniform maps are drawn as in `overlay`. image: the model's input,
    as for `overlay`. maps: (rows, cols) by the name of their method. title: the explained class or score. captions: a
    line or two below each map, by name. note: meaning of the captions, at the foot. compared: (name, image) of the
    images to which this one is compared. The first four are small below the input. cmap: as in `tiles`.

    >>> maps = {"rollout": vitlens.attention.rollout(attn)[0]}
    >>> pixels = vitlens.restore(model, images)[0]
    >>> figure = vitlens.plot.attributions(pixels, maps, grid=attn.grid, title="Why tabby?")
    """
    picture = load_image(image)
    maps = {name: array(values, 2, "A map of shape (rows, cols)") for name, values in maps.items()}
    captions = captions or {}
    signed = {name for name, values in maps.items() if colors(values)["vmin"] < 0}
    below = {}
    for name, values in maps.items():
        caption = captions.get(name, "")
        below[name] = f"{range_words(values)}\n{caption}".strip()
    largest = " (yellow)" if cmap is None else ""
    rule_of_colors = f"Colors: each map has its own scale, from 0 (clear) to its max{largest}"
    if signed:
        rule_of_colors += ", or from −max (blue) to max (red) where some values are negative"
    note = wrap(f"{note}\n{rule_of_colors}.".strip(), WIDTH, 6.2)
    title = wrap(title, WIDTH, 9)
    lines = -(-(len(maps) + 1) // cols)
    caption_height = CAPTION_LINE * max(_line_count(text) for text in below.values())
    map_height = (WIDTH / cols - GAP) * grid.image[0] / grid.image[1]
    height = lines * (map_height + caption_height + NAME)
    height += TITLE_LINE * (1 + _line_count(title)) + NOTE_LINE * _line_count(note)
    if compared:
        height += max(0, THUMBNAILS - caption_height)
    with use_style():
        figure, axes = frames(lines, cols, WIDTH, height)
        heading(figure, title)
        first, *others = axes.flat
        draw_input(first, picture, grid)
        _draw_compared(first, compared)
        for ax, (name, values) in zip(others, maps.items(), strict=False):
            chosen = without_signs(values, cmap)
            overlay(picture, values, grid=grid, ax=ax, style="heat", cmap=chosen, colorbar=None)
            name_above(ax, name)
            write_below(ax, below[name])
        for ax in others[len(maps) :]:
            ax.remove()
        write_note(figure, note)
    return figure


def _draw_compared(ax: plt.Axes, compared: Sequence[tuple[str, object]]) -> None:
    """Draw the first four images small below the input."""
    for k, (name, image) in enumerate(compared[:4]):
        room = max(0.25, 1 / len(compared))  # of the width of the input
        width = min(0.31, room - 0.02)
        thumbnail = ax.inset_axes((room * k, -0.34, width, 0.31), anchor="SW")
        thumbnail.imshow(load_image(image))
        bare(thumbnail)
        write_below(thumbnail, wrap(name, room * 200, 6))


def _line_count(text: str) -> int:
    return len(text.splitlines())


def gallery(
    rows: Mapping[str, Sequence],
    *,
    titles: Sequence[str] = (),
    captions: Mapping[str, Sequence[str]] | None = None,
    circles: Mapping[str, Sequence] | None = None,
    dashed: Mapping[str, Sequence] | None = None,
    shared: bool = True,
    over: Sequence | None = None,
    grid: TokenGrid | None = None,
    size: float = 8.5,
    width: int = WIDTH,
    cmap: str | Colormap | None = None,
) -> plt.Figure:
    """Images or maps in a grid, a row for each name.

    rows: sequences of the same length of maps (h, w) or images (h, w, 3), by name. titles: above the columns. captions:
    a short line below each item of a row, by name. circles: (rows, cols) True for patches to circle in each item of a
    row, by name. dashed: the same for larger dashed yellow circles. shared: True for one color scale with a bar for all
    rows of maps, from 0 to the largest value, and another for rows with negative values, ±max. False for a scale per
    map, whose end is written below it in place of a bar. Uniform maps are drawn as in `overlay`. over: an image for
    each column, the model's input, drawn in gray under the maps of its column, as in `overlay`, each map on its own
    scale. grid: that of the maps. size: of the captions, in points. width: largest width of the page in pixels. cmap:
    as in `tiles`.

    >>> rollouts = vitlens.attention.rollout(attn).numpy()
    >>> figure = vitlens.plot.gallery({"rollout": list(rollouts)}, titles=["cat", "rocket"])
    """
    images = {name: [np.asarray(item) for item in row] for name, row in rows.items()}
    columns = len(next(iter(images.values())))
    captions, circles, dashed = captions or {}, circles or {}, dashed or {}
    below = [None] * columns if over is None else over  # images under the maps
    with_negative, without_negative = [], []  # names of the rows that share a scale
    if shared and over is None:
        for name, row in images.items():
            if row[0].ndim == 2:
                if any((item < 0).any() for item in row):
                    with_negative.append(name)
                else:
                    without_negative.append(name)
    bars = 90 if with_negative or without_negative else 0
    side = min(200, (width - bars) / columns)
    aspects = [max(item.shape[0] / item.shape[1] for item in row) for row in images.values()]
    texts = {name: list(captions.get(name, [""] * columns)) for name in images}
    for name, row in images.items():
        if row[0].ndim == 2 and name not in (*with_negative, *without_negative):
            ends = [wrap(range_words(item), side, 0.85 * size) for item in row]
            texts[name] = [
                f"{text}\n{end}".strip() for text, end in zip(texts[name], ends, strict=True)
            ]
    heights = [max(_line_count(text) for text in row) for row in texts.values()]
    height = sum(side * aspect for aspect in aspects) + 2.1 * size * sum(heights)
    title_lines = max((_line_count(title) for title in titles), default=0)
    if title_lines:
        height += 14 + 16 * title_lines
    with use_style():
        figure, axes = frames(len(images), columns, side * columns + bars, height)
        lines = dict(zip(images, axes, strict=True))
        for name, row in images.items():
            lines[name][0].set_ylabel(name)
            for ax, item, image, text in zip(lines[name], row, below, texts[name], strict=True):
                _draw_item(ax, item, image, grid, cmap)
                write_below(ax, text, size)
            for ax, item, patches in zip(lines[name], row, circles.get(name, ()), strict=False):
                _circle_patches(ax, item.shape[:2], np.asarray(patches))
            for ax, item, patches in zip(lines[name], row, dashed.get(name, ()), strict=False):
                _circle_patches(ax, item.shape[:2], np.asarray(patches), dashed=True)
        for ax, title in zip(axes[0], titles, strict=bool(titles)):
            name_above(ax, title)
        for names in (with_negative, without_negative):
            if not names:
                continue
            values = [item.ravel() for name in names for item in images[name]]
            values = np.concatenate(values)
            scale = colors(values, without_signs(values, cmap))
            panels = np.concatenate([lines[name] for name in names])
            for ax in panels:
                ax.images[0].set(cmap=scale["cmap"], clim=(scale["vmin"], scale["vmax"]))
            words = ""
            if all(uniform_value(item) is not None for name in names for item in images[name]):
                words = uniform_words()
            scale_bar(panels[0].images[0], note=words, ax=panels, fraction=0.05, pad=0.01)
    return figure


def _draw_item(ax: plt.Axes, item: np.ndarray, image, grid: TokenGrid | None, cmap) -> None:
    """Draw an image, or a map, over `image` unless it is None."""
    if item.ndim != 2:
        ax.imshow(item, interpolation="nearest")
    elif image is None:
        ax.imshow(
            as_drawn(item), interpolation="nearest", **colors(item, without_signs(item, cmap))
        )
    else:
        overlay(image, item, grid=grid, ax=ax, cmap=without_signs(item, cmap), colorbar=None)
        ax.set_axis_on()  # for the name of the row
        bare(ax)


def _circle_patches(
    ax: plt.Axes, shape: tuple[int, int], patches: np.ndarray, dashed: bool = False
) -> None:
    """Draw a white ring around each patch that is True in (rows, cols), on an item of a (height, width).

    dashed: True for a larger dashed yellow ring.
    """
    patch = np.divide(shape, patches.shape)
    size, color, line = (1.1, "#ffd54a", "--") if dashed else (0.75, "white", "-")
    for place in np.argwhere(patches):
        y, x = (place + 0.5) * patch - 0.5
        ring = Circle((x, y), size * max(patch), fill=False)
        ring.set(edgecolor=color, linestyle=line, linewidth=1.3)
        ring.set_path_effects([withStroke(linewidth=3, foreground=INK)])
        ax.add_patch(ring)


def contributions(
    parts: Mapping[str, object],
    *,
    cmap: str | Colormap | None = None,
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """Contribution of each head and MLP to a logit: a row for each layer, a column for each head, the MLP in the last.

    parts: (L, H + 1) of one model by the title of the image, the MLP last. Red adds to the logit and blue subtracts
    from it, in units of the logit, on one scale for all images. cmap: other diverging colors, a name or
    a Colormap. ax: for a single image.

    >>> added = vitlens.stream.contributions(model, images[:1])
    >>> figure = vitlens.plot.contributions({"cat": torch.cat([added.heads[0], added.mlps[0, :, None]], 1)})
    """
    expected = "Contributions of shape (layers, heads + 1)"
    source = "torch.cat([added.heads[0], added.mlps[0, :, None]], 1)"
    values = {name: array(each, 2, expected, source) for name, each in parts.items()}
    layers, columns = next(iter(values.values())).shape
    side = min(800, max(250, 70 + 26 * columns))  # width of a panel in pixels of the page
    lines = -(-len(values) // min(3, max(1, 860 // side)))
    cols = -(-len(values) // lines)
    titles = [wrap(name, side - 40, 6.2) for name in values]
    title_height = TITLE_TEXT * max(_line_count(title) for title in titles)
    scale = colors(np.concatenate(list(values.values())), cmap, signed=True)
    with use_style(ax):
        axes = [ax]
        if ax is None:
            height = 30 + lines * (AXES_TEXTS + title_height + CELL * layers)
            figure = page(max(420, 90 + cols * side), height)
            axes = figure.subplots(lines, cols, squeeze=False).ravel()
        for panel, title, added in zip(axes, titles, values.values(), strict=False):
            shown = panel.imshow(added, interpolation="nearest", aspect="auto", **scale)
            panel.set_title(title, size=9, pad=5, loc="left", parse_math=False)
            step = 1 if columns < 14 else 4
            heads = range(0, columns - 1 - step // 2, step)
            panel.set_xticks([*heads, columns - 1], [*heads, "MLP"])
            panel.set_yticks(range(0, layers, -(-layers // 12)))
            panel.tick_params(length=0, labelsize=8)
            panel.set(xlabel="Head", ylabel="Layer")
        for panel in axes[len(values) :]:
            panel.axis("off")
        shrink = min(1, 300 / (CELL * layers * lines))
        scale_bar(shown, ax=list(axes), shrink=shrink, label="In units of the logit")
    return figure if ax is None else ax


CHANCE = {"color": "0.5", "lw": 1.2, "ls": (0, (4, 3))}


def insertion_deletion(
    curves: Mapping[str, tuple], control: tuple, *, shares, score: str = ""
) -> plt.Figure:
    """The score of a class while patches are covered (deletion) or shown (insertion) in the order of each map.

    curves: (deletion (S,), insertion (S,)) by name of the map. control: (orders, S) of both for random orders, drawn
    as a band from the lowest to the highest and their mean, dashed. shares: (S,) of the patches, 0 to 1. score: its
    name, for the axis.

    >>> curve, orders = np.linspace(1, 0, 5), np.ones((3, 5))
    >>> figure = vitlens.plot.insertion_deletion({"map": (curve, curve)}, (orders, orders), shares=np.linspace(0, 1, 5))
    """
    random = np.stack([np.asarray(orders, dtype=float) for orders in control])
    every_curve = [curve for both in (*curves.values(), random) for curve in both]
    drawn = np.concatenate([np.ravel(curve) for curve in every_curve])
    low = min(0.0, 1.05 * drawn.min())  # logits may be negative
    high = max(0.0, 1.05 * drawn.max())
    palette = style.palette(len(curves))
    with use_style():
        figure, axes = charts(("Deletion: low is good", "Insertion: high is good"), 900, 310)
        for k, xlabel in enumerate(("Patches covered", "Patches shown")):
            ax = axes[k]
            ax.fill_between(shares, random[k].min(0), random[k].max(0), color="0.9", lw=0)
            ax.plot(shares, random[k].mean(0), label="random orders", **CHANCE)
            for color, (name, both) in zip(palette, curves.items(), strict=True):
                ax.plot(shares, both[k], color=color, lw=1.7, label=series_name(name))
            ax.set(xlim=(0, 1), ylim=(low, high), xlabel=xlabel)
            ax.xaxis.set_major_formatter(PercentFormatter(1))
        axes[0].set_ylabel(score)
        axes[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    return figure


def randomized(results: Mapping[str, Sequence], *, titles: Sequence[str] = ()) -> plt.Figure:
    """Similarity of maps to those of the trained model after parts of its weights became random: a panel for each part.

    results: `vitlens.faithfulness.Randomization`s of the same parts by the name of their method, one for each draw of
    the weights. A dot is the mean over images of |rank correlation| of one draw, a bar the mean over the draws. titles:
    of the panels, by default the names of the parts.

    The dashed line is the threshold.

    >>> rho = torch.tensor([[0.9], [0.4]])
    >>> result = vitlens.faithfulness.Randomization(("head", "norm"), rho, ssim=rho, threshold=0.5)
    >>> figure = vitlens.plot.randomized({"relevance": [result]})
    """
    first = next(iter(results.values()))[0]
    with use_style():
        figure, axes = charts(titles or first.parts, 900, 80 + 26 * len(results), sharey=True)
        for part, ax in enumerate(axes):
            for row, draws in enumerate(results.values()):
                values = [draw.rank_correlation[part].abs().mean().item() for draw in draws]
                ax.barh(row, np.mean(values), color=SERIES[0], alpha=0.3, height=0.7)
                ax.plot(
                    values, np.full(len(values), row), "o", color=SERIES[0], ms=3.5, clip_on=False
                )
            ax.axvline(first.threshold, **CHANCE)
            ax.set(xlim=(0, 1), ylim=(len(results) - 0.5, -0.5), xlabel="|rank correlation|")
            ax.tick_params(axis="y", length=0)
            rule(ax, "x")
        axes[0].set_yticks(range(len(results)), [*results])
    return figure


def _line(
    count: int, most: int, aspect: float, below: float
) -> tuple[plt.Figure, Sequence[plt.Axes]]:
    """A page with `count` images in a line, each at most `most` pixels wide and `aspect` times as high."""
    gap = 16  # between two images
    side = min(most, (WIDTH - 12) / count - gap)
    width = max(12 + count * (side + gap), 240)
    height = 34 + side * aspect + below
    figure, axes = frames(1, count, width, height)
    for ax in axes[0]:
        ax.set_anchor("N")
    return figure, axes[0]


def draw_input(ax: plt.Axes, picture, grid: TokenGrid) -> None:
    """Draw the model's input."""
    height, width = grid.image
    ax.imshow(picture, extent=(0, width, height, 0))
    name_above(ax, "Input")
