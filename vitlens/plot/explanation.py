"""Explanation maps of an image beside each other, and the tests of the maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Circle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter

from vitlens.formatting import number, with_minus
from vitlens.images import load_image
from vitlens.plot import style
from vitlens.plot.on_images import mark, overlay
from vitlens.plot.style import (
    INK,
    SERIES,
    WIDTH,
    array,
    bare,
    charts,
    colors,
    frames,
    heading,
    name_above,
    rule,
    scale_bar,
    use_style,
    wrap,
    write_below,
    write_note,
)
from vitlens.recorder.grid import TokenGrid

BELOW = {"location": "bottom", "shrink": 0.67, "aspect": 15, "pad": 0.03}
"""Position of the color bar of an image in a line."""


def tiles(
    maps: Mapping[str, object], *, signed: bool = False, labels: Sequence[str] = ()
) -> plt.Figure:
    """Maps in a line, each with its name above and its own color bar below.

    maps: (rows, cols) by name, at most six, of any shapes. Colors reach from 0 to the largest value, or from −max to
    max if a map has negative values. signed: True for ±max in all maps. labels: names of the rows and columns of small
    square matrices, whose values are then written into the cells, in place of the bars. NaN is gray.

    >>> figure = vitlens.plot.tiles({"rollout": vitlens.attention.rollout(attn)[0]})
    """
    values = {n: array(m, 2, "A map of shape (rows, cols)") for n, m in maps.items()}
    with use_style():
        figure, axes = _line(
            len(values),
            240,
            max(each.shape[0] / each.shape[1] for each in values.values()),
            below=50,
        )
        for ax, (name, each) in zip(axes, values.items(), strict=True):
            shown = ax.imshow(each, **colors(each, signed=signed or None), interpolation="nearest")
            name_above(ax, name)
            for (row, col), value in np.ndenumerate(each) if labels else ():
                ink = INK if np.mean(shown.to_rgba(value)[:3]) > 0.45 else "white"
                ax.text(col, row, with_minus(f"{value:.2g}"), ha="center", va="center", color=ink)
            if labels:
                ax.set_xticks(range(len(labels)), labels)
                ax.set_yticks(range(len(labels)), labels if ax is axes[0] else [""] * len(labels))
                ax.tick_params(length=0)
            else:
                scale_bar(shown, ax=ax, **BELOW)
    return figure


def overlays(
    image,
    maps: Mapping[str, object],
    *,
    grid: TokenGrid,
    query: tuple[int, int] | Mapping[str, tuple[int, int]] | None = None,
    limits: Mapping[str, tuple[float, float]] | None = None,
    smooth: bool = True,
    note: str = "",
) -> plt.Figure:
    """An image, and beside it the image under each map, as `overlay` draws it in the style "heat".

    image: the model's input, as for `overlay`. maps: (rows, cols), or (rows, cols, 3) colors, by name, at most five.
    Below each is its color bar: from 0 to its largest value, from −max to max if some are negative, or between its
    `limits`, by name. query: (row, column) of a patch to mark in all maps and in the image, or one per map by name.
    note: the meaning of the colors, at the foot.
    Raises ValueError for a map of another shape than the grid, and IndexError for a patch outside of it.

    >>> maps = {"rollout": vitlens.attention.rollout(attn)[0]}
    >>> figure = vitlens.plot.overlays(vitlens.restore(model, images)[0], maps, grid=attn.grid)
    """
    picture = load_image(image)
    patches = query if isinstance(query, Mapping) else dict.fromkeys((None, *maps), query)
    for patch in patches.values():
        if patch is not None:
            grid.index(*patch)
    bars = any(np.ndim(each) == 2 for each in maps.values())
    with use_style():
        figure, axes = _line(
            len(maps) + 1, 200, grid.image[0] / grid.image[1], below=46 * bars + 8 + 20 * bool(note)
        )
        draw_input(axes[0], picture, grid)
        for ax, (name, each) in zip(axes[1:], maps.items(), strict=True):
            ends = (limits or {}).get(name)
            overlay(
                picture,
                each,
                grid=grid,
                ax=ax,
                style="heat",
                colorbar=False,
                smooth=smooth,
                limits=ends,
            )
            name_above(ax, name)
        for name, ax in zip((None, *maps), axes, strict=True):
            mark(ax, patches.get(name), grid.patch)
            if ax.images[-1].get_array().ndim == 2:
                scale_bar(ax.images[-1], ax=ax, **BELOW)
            elif bars:
                figure.colorbar(plt.cm.ScalarMappable(), ax=ax, **BELOW).ax.set_visible(
                    False
                )  # keeps the room
        write_note(figure, note)
    return figure


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
) -> plt.Figure:
    """An image, and the same image under the map of each method, `cols` to a line.

    Each map has a color scale from 0 to its largest value, or from −max to max if some are negative. The maximum is
    below the map. image: the model's input, as for `overlay`. maps: (rows, cols) by the name of their method. title:
    the explained class or score. captions: a line or two below each map, by name. note: meaning of the captions, at the
    foot. compared: (name, image) of the images to which this one is compared. The first four are small below the input.

    >>> maps = {"rollout": vitlens.attention.rollout(attn)[0]}
    >>> pixels = vitlens.restore(model, images)[0]
    >>> figure = vitlens.plot.attributions(pixels, maps, grid=attn.grid, title="Why tabby?")
    """
    picture, below, signed = load_image(image), {}, False
    maps = {name: array(values, 2, "A map of shape (rows, cols)") for name, values in maps.items()}
    for name, values in maps.items():
        scale = colors(values)
        signed |= scale["vmin"] < 0
        largest = np.abs(values[np.isfinite(values)]).max(initial=0)
        end = f"{'±' if scale['vmin'] < 0 else 'max '}{number(largest)}"
        below[name] = f"{end}\n{(captions or {}).get(name, '')}".strip()
    signed = ", or from −max (blue) to max (red) where some values are negative" if signed else ""
    note = f"{note}\nColors: each map has its own scale, from 0 (clear) to its max (yellow){signed}.".strip()
    note, title = wrap(note, WIDTH, 6.2), wrap(title, WIDTH, 9)
    lines, text = (
        -(-(len(maps) + 1) // cols),
        max(len(each.splitlines()) for each in below.values()),
    )
    height = lines * (
        (WIDTH / cols - 8) * grid.image[0] / grid.image[1] + 15 * text + 24
    ) + 15 * len(note.splitlines())
    height += 20 + 20 * len(title.splitlines()) + (max(0, 112 - 15 * text) if compared else 0)
    with use_style():
        figure, axes = frames(lines, cols, WIDTH, height)
        heading(figure, title)
        draw_input(axes.flat[0], picture, grid)
        for k, (name, image) in enumerate(compared[:4]):
            room = max(0.25, 1 / len(compared))  # of the width of the input
            thumbnail = axes.flat[0].inset_axes(
                (room * k, -0.34, min(0.31, room - 0.02), 0.31), anchor="SW"
            )
            thumbnail.imshow(load_image(image))
            bare(thumbnail)
            write_below(thumbnail, wrap(name, room * 200, 6))
        for ax, (name, values) in zip(axes.flat[1:], maps.items(), strict=False):
            overlay(picture, values, grid=grid, ax=ax, style="heat", colorbar=False)
            name_above(ax, name)
            write_below(ax, below[name])
        for ax in axes.flat[len(maps) + 1 :]:
            ax.remove()
        write_note(figure, note)
    return figure


def gallery(
    rows: Mapping[str, Sequence],
    *,
    titles: Sequence[str] = (),
    captions: Mapping[str, Sequence[str]] | None = None,
    circles: Mapping[str, Sequence] | None = None,
    shared: bool = True,
    over: Sequence | None = None,
    grid: TokenGrid | None = None,
    size: float = 8.5,
    width: int = WIDTH,
) -> plt.Figure:
    """Images or maps in a grid, a row for each name.

    rows: sequences of the same length of maps (h, w) or images (h, w, 3), by name. titles: above the columns. captions:
    a short line below each item of a row, by name. circles: (rows, cols) True for patches to circle in each item of a
    row, by name. shared: True for one color scale with a bar for all rows of maps, from 0 to the largest value, and
    another for rows with negative values, ±max. False for a scale per map, without bars. over: an image for each
    column, the model's input, drawn in gray under the maps of its column, as in `overlay`, each map on its own scale.
    grid: that of the maps. size: of the captions, in points. width: largest width of the page in pixels.

    >>> rollouts = vitlens.attention.rollout(attn).numpy()
    >>> figure = vitlens.plot.gallery({"rollout": list(rollouts)}, titles=["cat", "rocket"])
    """
    images = {name: [np.asarray(each) for each in row] for name, row in rows.items()}
    columns, captions = len(next(iter(images.values()))), captions or {}
    alike = {True: [], False: []}  # the rows of maps with negative values, and without
    for name, row in images.items():
        if shared and over is None and row[0].ndim == 2:
            alike[any((each < 0).any() for each in row)].append(name)
    bars = 90 if any(alike.values()) else 0
    across = min(200, (width - bars) / columns)
    tall = sum(
        across * max(each.shape[0] / each.shape[1] for each in row) for row in images.values()
    )
    with use_style():
        text = max((len(title.splitlines()) for title in titles), default=0)
        height = tall + 16 * text + 14 * bool(text) + 2.1 * size * len(captions)
        figure, axes = frames(len(images), columns, across * columns + bars, height)
        lines = dict(zip(images, axes, strict=True))
        for name, row in images.items():
            lines[name][0].set_ylabel(name)
            under, written = (
                over if over is not None else [None] * columns,
                captions.get(name, [""] * columns),
            )
            for ax, each, image, caption in zip(lines[name], row, under, written, strict=True):
                if image is not None and each.ndim == 2:
                    overlay(image, each, grid=grid, ax=ax, colorbar=False)
                    ax.set_axis_on()  # for the name of the row
                    bare(ax)
                else:
                    ax.imshow(
                        each, interpolation="nearest", **colors(each) if each.ndim == 2 else {}
                    )
                write_below(ax, caption, size)
            for ax, each, patches in zip(
                lines[name], row, (circles or {}).get(name, ()), strict=False
            ):
                patch = np.divide(each.shape[:2], np.shape(patches))
                for center in (np.argwhere(np.asarray(patches)) + 0.5) * patch - 0.5:
                    ring = Circle(
                        center[::-1],
                        0.75 * max(patch),
                        fill=False,
                        edgecolor="white",
                        linewidth=1.3,
                    )
                    ring.set_path_effects([withStroke(linewidth=3, foreground=INK)])
                    ax.add_patch(ring)
        for ax, title in zip(axes[0], titles, strict=bool(titles)):
            name_above(ax, title)
        for names in filter(None, alike.values()):
            scale = colors(
                np.concatenate([each.ravel() for name in names for each in images[name]])
            )
            beside = np.concatenate([lines[name] for name in names])
            for ax in beside:
                ax.images[0].set(cmap=scale["cmap"], clim=(scale["vmin"], scale["vmax"]))
            scale_bar(beside[0].images[0], ax=beside, fraction=0.05, pad=0.01)
    return figure


def contributions(
    parts: Mapping[str, object], *, ax: plt.Axes | None = None
) -> plt.Figure | plt.Axes:
    """Contribution of each head and MLP to a logit: a row for each layer, a column for each head, the MLP in the last.

    parts: (L, H + 1) of one model by the title of the image, the MLP last. Red adds to the logit and blue subtracts
    from it, in units of the logit, on one scale for all images. ax: for a single image.

    >>> added = vitlens.stream.contributions(model, images[:1])
    >>> figure = vitlens.plot.contributions({"cat": torch.cat([added.heads[0], added.mlps[0, :, None]], 1)})
    """
    values = {
        name: array(each, 2, "Contributions of shape (layers, heads + 1)")
        for name, each in parts.items()
    }
    layers, columns = next(iter(values.values())).shape
    side = min(800, max(250, 70 + 26 * columns))
    rows = -(-len(values) // min(3, max(1, 860 // side)))
    cols = -(-len(values) // rows)
    titles = [style.wrap(name, side - 40, 6.2) for name in values]
    text = 16 * max(len(title.splitlines()) for title in titles)
    look = colors(np.concatenate([*values.values()]), signed=True)
    with use_style(ax):
        size = max(420, 90 + cols * side), 30 + rows * (60 + text + 20 * layers)
        axes = np.ravel(style.page(*size).subplots(rows, cols) if ax is None else [ax])
        for panel, title, each in zip(axes, titles, values.values(), strict=False):
            shown = panel.imshow(each, **look, interpolation="nearest", aspect="auto")
            panel.set_title(title, size=9, pad=5, loc="left", parse_math=False)
            step = 1 if columns < 14 else 4
            heads = range(0, columns - 1 - step // 2, step)
            panel.set_xticks([*heads, columns - 1], [*heads, "MLP"])
            panel.set_yticks(range(0, layers, -(-layers // 12)))
            panel.tick_params(length=0, labelsize=8)
            panel.set(xlabel="Head", ylabel="Layer")
        for panel in axes[len(values) :]:
            panel.axis("off")
        scale_bar(
            shown,
            ax=list(axes),
            shrink=min(1, 300 / (20 * layers * rows)),
            label="In units of the logit",
        )
    return axes[0].figure if ax is None else ax


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
    chance = np.stack([np.asarray(orders, dtype=float) for orders in control])
    every = np.concatenate(
        [np.ravel(values) for both in (*curves.values(), chance) for values in both]
    )
    limits = min(0.0, 1.05 * every.min()), max(0.0, 1.05 * every.max())  # logits may lie below 0
    with use_style():
        figure, axes = charts(("Deletion: low is good", "Insertion: high is good"), 900, 310)
        for k, (ax, xlabel) in enumerate(
            zip(axes, ("Patches covered", "Patches shown"), strict=True)
        ):
            ax.fill_between(shares, chance[k].min(0), chance[k].max(0), color="0.9", lw=0)
            ax.plot(shares, chance[k].mean(0), label="random orders", **CHANCE)
            for color, (name, both) in zip(style.palette(len(curves)), curves.items(), strict=True):
                ax.plot(shares, both[k], color=color, lw=1.7, label=name)
            ax.set(xlim=(0, 1), ylim=limits, xlabel=xlabel)
            ax.xaxis.set_major_formatter(PercentFormatter(1))
        axes[0].set_ylabel(score)
        axes[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    return figure


def randomized(results: Mapping[str, Sequence], *, titles: Sequence[str] = ()) -> plt.Figure:
    """Similarity of maps to those of the trained model after parts of its weights became random: a panel for each part.

    results: `vitlens.faithfulness.Randomization`s of the same parts by the name of their method, one for each draw of
    the weights. A dot is the mean over images of |rank correlation| of one draw, a bar the mean over the draws. titles:
    of the panels, by default the names of the parts. The dashed line is the threshold.

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
    side = min(most, (WIDTH - 12) / count - 16)
    figure, axes = frames(1, count, max(12 + count * (side + 16), 240), 34 + side * aspect + below)
    for ax in axes[0]:
        ax.set_anchor("N")
    return figure, axes[0]


def draw_input(ax: plt.Axes, picture, grid: TokenGrid) -> None:
    """Draw the model's input."""
    ax.imshow(picture, extent=(0, grid.image[1], grid.image[0], 0))
    name_above(ax, "Input")
