"""Figures side by side: images and rollouts, corresponding patches of two images, inspections of models."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import SubFigure
from matplotlib.patheffects import withStroke

from vitlens.images import load_image
from vitlens.plot.charts import attention_distance
from vitlens.plot.heatmaps import GRAY, checked_grid, overlay
from vitlens.plot.mosaics import filters, position_similarity
from vitlens.plot.style import WIDTH, array, bare, canvas, page, styled, wrapped

TITLES = {
    "filters": "Embedding filters",
    "positions": "Position similarity (cosine)",
    "distance": "Mean attention distance",
    "rollout": "Images and their attention rollouts",
}


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
    placed = [
        *zip(images, maps, grid if isinstance(grid, list | tuple) else [grid] * count, strict=True)
    ]
    cols = min(count, 2 if count == 4 else 3)
    room = WIDTH / max(cols, 2)
    shapes = [picture.width / picture.height for picture in pictures]
    lines, heights, texts = (
        [range(first, min(first + cols, count)) for first in range(0, count, cols)],
        [],
        [],
    )
    for line in lines:
        missing = lines[0][len(line) :]  # the last line keeps the room of the first
        height = min(280, cols * room / 2 / sum(shapes[k] for k in (*line, *missing)))
        for k in line:
            texts.append(wrapped(str(captions[k]), 2 * height * shapes[k]) if captions else "")
        heights.append(height + 34 + 15 * max(len(texts[k].splitlines()) for k in line))
    with styled():
        figure = page(cols * room, sum(heights))
        for part, line in zip(
            np.ravel(figure.subfigures(len(lines), height_ratios=heights)), lines, strict=True
        ):
            ratios = [shapes[k] for k in (*line, *lines[0][len(line) :]) for _ in range(2)]
            axes = part.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0]
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


def correspondences(
    images, pairs, *, grids, titles=("A", "B"), note: str = "", ax: plt.Axes | None = None
) -> plt.Figure | plt.Axes:
    """Two images, with a line of one color between each pair of patches.

    images: two, the model's input, as for `overlay`. pairs: (n, 2) numbers of patches of the left and of the right
    image, from 0 without prefix tokens, as in `vitlens.tokens.correspondences`. grids: of both. titles: above each
    image. note: at the foot. Raises ValueError for patches outside of the grids.

    >>> pair, grids = vitlens.restore(model, images), [attn.grid, attn.grid]
    >>> figure = vitlens.plot.correspondences(pair, [[0, 195], [90, 91]], grids=grids, titles=["cat", "rocket"])
    """
    pairs = array(pairs, 2, "Pairs of patches of shape (n, 2)").astype(int)
    most = [grid.rows * grid.cols for grid in grids]
    if pairs.min() < 0 or (pairs.max(0) >= most).any():
        raise ValueError(
            f"Patches must be below {most[0]} and {most[1]}, got {pairs.min()} to {pairs.max()}."
        )
    widths = [
        grid.image[1] / grid.image[0] for grid in grids
    ]  # in heights of an image, the unit of the axes
    starts = 0, widths[0] + 0.04
    with canvas(ax, WIDTH, min(340, 840 / sum(widths)) + 40 + 24 * bool(note)) as (ax, result):
        for start, width, image, grid, title in zip(
            starts, widths, images, grids, titles, strict=True
        ):
            checked_grid((grid.rows, grid.cols), image, grid)
            ax.imshow(load_image(image), extent=(start, start + width, 1, 0))
            ax.annotate(
                title, (start, 0), (0, 5), textcoords="offset points", size=9.5, parse_math=False
            )
        rim = [withStroke(linewidth=3, foreground="0.1")]
        for color, pair in zip(
            plt.get_cmap("hsv")(np.linspace(0, 1, len(pairs), endpoint=False)), pairs, strict=True
        ):
            ends = [
                (
                    start + (number % grid.cols + 0.5) * grid.patch[1] / grid.image[0],
                    (number // grid.cols + 0.5) * grid.patch[0] / grid.image[0],
                )
                for start, number, grid in zip(starts, pair, grids, strict=True)
            ]
            ax.plot(*zip(*ends, strict=True), color=color, linewidth=1.2, alpha=0.9)
            ax.plot(*zip(*ends, strict=True), "o", color=color, markersize=5, path_effects=rim)
        ax.set(xlim=(0, starts[1] + widths[1]), ylim=(1, 0), aspect="equal")
        bare(ax)
        ax.set_xlabel(note, loc="left", size=8.5, color=GRAY, parse_math=False)
    return result


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
        name: [wrapped(p.caption, room / columns / 1.2) for p in each.pictures]
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
    with styled():
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
    text = f"{TITLES[name]}\n{wrapped(words, room)}"
    part.suptitle(text, x=8 / part.bbox.width, ha="left", size=9.5, parse_math=False)
    return part
