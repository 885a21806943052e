"""Pictures side by side: maps in a line, over one picture, of several methods, of all heads of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np

from vitlens.images import load_image
from vitlens.plot.maps import covered, grid_of, mark, overlay
from vitlens.plot.style import MARGIN, WIDTH, array, colors, one_of, page, scale_bar, styled
from vitlens.recorder.grid import TokenGrid

GRAY = "0.35"
BELOW = {"location": "bottom", "shrink": 0.67, "aspect": 15, "pad": 0.03}
"""Where the color bar of a picture in a line is."""


def tiles(maps: Mapping[str, object], *, signed: bool = False) -> plt.Figure:
    """Maps in a line, each with its name above and its own color bar below.

    maps: (rows, cols) by name, at most six, of any shapes. Colors reach from 0 to the largest value, or from −max to
    max where a map holds negative ones; with `signed` they do so in all of them. NaN is gray. Raises ValueError for
    more maps or other axes.
    """
    _check_count(maps, 6)
    values = {n: array(m, 2, "A map of shape (rows, cols)", "Give one map for each name") for n, m in maps.items()}
    aspect = max(each.shape[0] / each.shape[1] for each in values.values())
    with styled():
        figure, axes = _line(len(values), 240, aspect, below=50)
        for ax, (name, each) in zip(axes, values.items(), strict=True):
            shown = ax.imshow(each, **colors(each, signed=signed or None), interpolation="nearest")
            _title(ax, name)
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
    opacity: str = "value",
) -> plt.Figure:
    """A picture, and beside it the same picture under each map, as `overlay` draws it in mode "heat".

    image: what `load_image` takes, as the model saw it. maps: (rows, cols), or (rows, cols, 3) for colors, by name, at
    most five. Below each is its own color bar: from 0 to its largest value, from −max to max if some are negative, or
    between its `limits`, given by the same name. query: the (row, column) of a patch, marked in all of them and in the
    picture; or one for each map, by the same names. opacity: as for `overlay`. Raises ValueError for more maps or other
    shapes, IndexError for a patch outside the grid.
    """
    _check_count(maps, 5)
    picture, (height, width) = load_image(image), grid.image
    patches = query if isinstance(query, Mapping) else dict.fromkeys((None, *maps), query)
    for patch in patches.values():
        if patch is not None:
            grid.index(*patch)
    bars = any(np.ndim(each) == 2 for each in maps.values())
    with styled():
        figure, (first, *axes) = _line(len(maps) + 1, 200, height / width, below=46 if bars else 8)
        _input(first, picture, grid)
        for ax, (name, each) in zip(axes, maps.items(), strict=True):
            ends = (limits or {}).get(name)
            how = {"smooth": smooth, "limits": ends, "opacity": opacity}
            overlay(picture, each, grid=grid, ax=ax, mode="heat", colorbar=False, **how)
            _title(ax, name)
        for name, ax in zip((None, *maps), (first, *axes), strict=True):
            mark(ax, patches.get(name), grid.patch)
            if ax.images[-1].get_array().ndim == 2:
                scale_bar(ax.images[-1], ax=ax, **BELOW)
            elif bars:
                figure.colorbar(plt.cm.ScalarMappable(), ax=ax, **BELOW).ax.set_visible(False)  # keeps the room
    return figure


def attributions(
    image, maps: Mapping[str, object], *, grid: TokenGrid, title: str, captions: Mapping[str, str] | None = None,
    note: str = "", smooth: bool = True, opacity: str = "value", cols: int = 4,
) -> plt.Figure:  # fmt: skip
    """A picture, and the same picture under the map of each method, `cols` to a line.

    Each map has its own colors from 0 to its largest value, or from −max to max if some are negative. That value stands
    below the map, and what it means at the foot. image: what `load_image` takes, as the model saw it. maps: (rows,
    cols) by the name of their method. title: what is explained. captions: a line or two below each map, by the same
    names. note: what the captions mean, at the foot. opacity: as for `overlay`. Raises ValueError for no maps, or maps
    that do not fit the grid.
    """
    if not maps:
        raise ValueError("No maps to show. Give at least one, by the name of its method.")
    picture, captions = load_image(image), captions or {}
    maps = {name: array(values, 2, "A map of shape (rows, cols)", "Give one map") for name, values in maps.items()}
    below = {name: f"{_end(values)}\n{captions.get(name, '')}".strip() for name, values in maps.items()}
    note = "\n".join([*note.splitlines(), _scale(maps, opacity)])
    lines, text = -(-(len(maps) + 1) // cols), max(len(each.splitlines()) for each in below.values())
    height = lines * (WIDTH / cols * grid.image[0] / grid.image[1] + 15 * text + 30) + 15 * len(note.splitlines()) + 40
    with styled():
        figure = page(WIDTH, height, "constrained")
        figure.get_layout_engine().set(hspace=0.04)
        axes = figure.subplots(lines, cols, squeeze=False).ravel()
        _heading(figure, title)
        _input(axes[0], picture, grid, loc="left")
        for ax, (name, values) in zip(axes[1:], maps.items(), strict=False):
            overlay(picture, values, grid=grid, ax=ax, mode="heat", smooth=smooth, opacity=opacity, colorbar=False)
            _title(ax, name, loc="left")
            _caption(ax, below[name])
        for ax in axes[len(maps) + 1 :]:
            ax.remove()
        _note(figure, note)
    return figure


def gallery(
    rows: Mapping[str, Sequence], *, titles: Sequence[str] = (), captions: Mapping[str, Sequence[str]] | None = None,
    shared: bool = True,
) -> plt.Figure:  # fmt: skip
    """Pictures or maps in a grid, a row for each name.

    rows: by name, equally many (h, w), maps, or (h, w, 3), pictures. titles: above the columns. captions: a short line
    below each picture of the rows of these names. shared: one color scale with a bar for all rows of maps, from 0 to
    the largest value, and one for those that hold negative ones, ±max; False gives each map its own, without bars.
    """
    images = {name: [np.asarray(each) for each in row] for name, row in rows.items()}
    columns, captions = max(map(len, images.values()), default=0), captions or {}
    lengths = {len(row) for row in (*images.values(), *captions.values())}
    if not columns or lengths != {columns} or len(titles) not in (0, columns):
        raise ValueError(
            "Rows, titles or captions of different lengths. Give each row the same number of pictures, at least one."
        )
    maps = {name: row for name, row in images.items() if shared and row[0].ndim == 2}
    signed = {name: any((each < 0).any() for each in row) for name, row in maps.items()}
    together = {kind: [name for name in maps if signed[name] == kind] for kind in sorted(set(signed.values()))}
    scales = {
        name: colors(np.concatenate([each.ravel() for n in names for each in maps[n]]))
        for names in together.values()
        for name in names
    }
    across = min(200, (WIDTH - 90 * bool(scales)) / columns)
    tall = sum(across * max(each.shape[0] / each.shape[1] for each in row) for row in images.values())
    with styled():
        size = across * columns + 90 * bool(scales), tall + 30 * bool(titles) + 18 * len(captions)
        figure = page(*size, "compressed")
        axes = figure.subplots(len(images), columns, squeeze=False)
        figure.get_layout_engine().set(w_pad=MARGIN / 2, h_pad=MARGIN / 2)
        lines = dict(zip(images, axes, strict=True))
        for name, row in images.items():
            lines[name][0].set_ylabel(name)
            for ax, each in zip(lines[name], row, strict=True):
                own = scales.get(name) or (colors(each) if each.ndim == 2 else {})
                ax.imshow(each, interpolation="nearest", **own)
                _bare(ax)
            for ax, caption in zip(lines[name], captions.get(name, ()), strict=False):
                _caption(ax, caption)
        for ax, title in zip(axes[0], titles, strict=False):
            _title(ax, title)
        for names in together.values():
            beside = np.concatenate([lines[name] for name in names])
            scale_bar(beside[0].images[0], ax=beside, fraction=0.05, pad=0.01)
    return figure


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
    every head up to its own largest weight, written above it. The figure says which. cols: thumbnails in a line.
    """
    values = array(weights, 3, "Attention of shape (heads, rows, cols)", "Give one layer’s and one query’s weights")
    one_of("scale", scale, ("shared", "each"))
    picture = None if image is None else load_image(image)
    grid = grid_of(values.shape[1:], picture, grid)
    if query is not None:
        grid.index(*query)
    count = len(values)
    lines = -(-count // cols) if cols else 1 if count <= 4 else 2 if count <= 16 else -(-count // 8)
    cols = -(-count // lines)
    high, wide = covered(grid)
    heading = 24 if scale == "shared" else 38
    shape = 0 if picture is None else picture.width / picture.height
    room = WIDTH - 110 - 8 * cols - (lines - 1) * heading * shape
    width = min(room / (cols + lines * high / wide * shape), 200, 640 / lines * wide / high)
    beside = shape * (lines * width * high / wide + (lines - 1) * heading)
    across, down = 110 + cols * (width + 8) + beside, lines * (width * high / wide + heading) + 60
    signed = bool((values < 0).any())
    with styled():
        figure = page(max(across, 460), down, "compressed")
        figure.get_layout_engine().set(h_pad=MARGIN / 3)
        frame = figure.add_gridspec(lines, cols + 2, width_ratios=[beside or 1e-3, *[width] * cols, 14])
        source = "" if query is None else f" from patch (row {query[0]}, column {query[1]})"
        _heading(figure, title or f"Attention of each head{source}")
        if picture is not None:
            ax = figure.add_subplot(frame[:, 0])
            _input(ax, picture, grid)
            mark(ax, query, grid.patch)
        for head, each in enumerate(values):
            ax = figure.add_subplot(frame[head // cols, 1 + head % cols])
            limits = colors(values if scale == "shared" else each, cmap, signed)
            shown = ax.imshow(each, extent=(0, wide, high, 0), interpolation="nearest", **limits)
            _bare(ax)
            _title(ax, f"Head {head}" + (f"\nmax {limits['vmax']:#.2g}" if scale == "each" else ""))
            mark(ax, query, grid.patch)
        key = figure.colorbar(shown, cax=figure.add_subplot(frame[:, -1]))
        key.outline.set_visible(False)
        note = "Colors: attention weight, one scale for all heads."
        if scale == "each":
            note = "Colors: attention weight, a scale for each head up to its own largest."
            key.set_ticks([shown.norm.vmin, shown.norm.vmax], labels=["−max" if signed else "0", "max"])
        _note(figure, note)
    return figure


def _line(count: int, most: int, aspect: float, below: float) -> tuple[plt.Figure, Sequence[plt.Axes]]:
    """A page with so many pictures in a line, each at most `most` pixels wide and `aspect` times as high."""
    side = min(most, (WIDTH - 12) / count - 16)
    figure = page(max(12 + count * (side + 16), 240), 34 + side * aspect + below, "constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for ax in axes:
        _bare(ax)
        ax.set_anchor("N")
    return figure, axes


def _bare(ax: plt.Axes) -> None:
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def _title(ax: plt.Axes, text: str, loc: str = "center") -> None:
    ax.set_title(text, loc=loc, size=9.5, pad=5, linespacing=1.1, parse_math=False)


def _input(ax: plt.Axes, picture, grid: TokenGrid, loc: str = "center") -> None:
    """The picture as the model saw it."""
    ax.imshow(picture, extent=(0, grid.image[1], grid.image[0], 0))
    _bare(ax)
    _title(ax, "Input", loc)


def _caption(ax: plt.Axes, text: str) -> None:
    """Lines of text below a picture."""
    ax.annotate(
        text, (0, 0), (0, -4), xycoords="axes fraction", textcoords="offset points", va="top", size=8.5, color=GRAY,
        annotation_clip=False, parse_math=False,
    )  # fmt: skip


def _heading(figure: plt.Figure, text: str) -> None:
    figure.suptitle(text, x=MARGIN / figure.get_figwidth(), ha="left", size=11, parse_math=False)


def _note(figure: plt.Figure, text: str) -> None:
    """What the colors mean, at the foot of a page."""
    figure.supxlabel(text, x=MARGIN / figure.get_figwidth(), ha="left", size=8.5, color=GRAY, parse_math=False)


def _check_count(maps: Mapping[str, object], most: int) -> None:
    if not 1 <= len(maps) <= most:
        raise ValueError(f"Expected 1 to {most} maps for one row, got {len(maps)}. Draw several figures.")


def _end(values: np.ndarray) -> str:
    """Where the colors of a map end, with a sign if they begin below 0."""
    largest = np.abs(values[np.isfinite(values)]).max(initial=0)
    return f"{'±' if _signed(values) else 'max '}{largest:.3g}".replace("-", "−")


def _scale(maps: Mapping[str, np.ndarray], opacity: str) -> str:
    """What the colors mean."""
    zero = "clear" if opacity == "value" else "violet"
    signed = ", or from −max (blue) to max (red) where some values are negative" * any(map(_signed, maps.values()))
    return f"Colors: each map has its own scale, from 0 ({zero}) to its max (yellow){signed}."


def _signed(values: np.ndarray) -> bool:
    return colors(values)["vmin"] < 0
