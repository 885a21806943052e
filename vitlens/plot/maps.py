"""Maps over pictures: from patches to pixels, the paper's Fig. 6 and 14, and all heads of a layer."""

from __future__ import annotations

import textwrap

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.textpath import TextPath
from PIL import Image

from vitlens.images import load_image
from vitlens.plot.style import DPI, INK, WIDTH, array, colors, page, place, show, styled, write
from vitlens.recorder.grid import TokenGrid


def upsample(map, size: tuple[int, int], *, method: str = "lanczos") -> np.ndarray:
    """(H, W) float32: a (rows, cols) map enlarged to `size` = (H, W), neither rescaled nor clipped.

    method: "nearest" (patches stay what they are), "bilinear" (stays within the range of the map), "bicubic" or
    "lanczos" (may overshoot). All keep a constant map constant.
    """
    values = array(map, 2, "A map of shape (rows, cols)", "give one map at a time")
    methods = ("nearest", "bilinear", "bicubic", "lanczos")
    if method not in methods:
        raise ValueError(f"A method among {', '.join(methods)} was wanted, but {method!r} came; choose one of them.")
    enlarged = Image.fromarray(values.astype(np.float32)).resize(size[::-1], Image.Resampling[method.upper()])
    return np.array(enlarged)


def mask(map, grid: TokenGrid, *, smooth: bool = True) -> np.ndarray:
    """(H, W) in 0…1 over the model's input: how much of the picture the paper's rendering lets through (Fig. 6, D.8).

    The map is enlarged to the pixels that its patches cover (Lanczos), blurred with a Gaussian whose standard deviation
    is one patch, and stretched so that the least is 0 and the largest 1. `smooth=False` stretches the patches as they
    are. All is done in floating point, where the authors go through 8 bits. A constant map, which has nothing to
    stretch, is 1 where it is positive, and else, as a map of zeros, 0: it names nothing. Pixels that were cut off
    before the model looked are 0; padding beyond the picture is left out.
    """
    values = array(map, 2, "A map of shape (rows, cols)", "give one map at a time")
    _check_grid(values.shape, grid)
    if not np.isfinite(values).all():
        raise ValueError('A map of finite numbers was wanted, but some are not; use mode="heat" and smooth=False.')
    height, width = grid.image
    seen = np.zeros((height, width))
    if np.ptp(values) <= 1e-6 * np.abs(values).max():
        seen[: _covered(grid)[0], : _covered(grid)[1]] = values.max() > 0
        return seen
    large = upsample(values / np.abs(values).max(), _covered(grid), method="lanczos" if smooth else "nearest")
    if smooth:
        from skimage.filters import gaussian

        large = gaussian(large, sigma=grid.patch, mode="nearest", preserve_range=True)
    large = large[:height, :width].astype(float)
    seen[: large.shape[0], : large.shape[1]] = (large - large.min()) / np.ptp(large)
    return seen


def overlay(
    image,
    map,
    *,
    grid: TokenGrid | None = None,
    ax: plt.Axes | None = None,
    mode: str = "paper",
    smooth: bool = True,
    alpha: float = 0.65,
    cmap: str | None = None,
    limits: tuple[float, float] | None = None,
    colorbar: bool = True,
) -> plt.Axes:
    """A map over its picture (paper, Fig. 6).

    image: what `load_image` takes, as the model saw it. map: (rows, cols). grid: where the patches lie; without it they
    are taken to cover the picture exactly. mode "paper": the picture times `mask`, on black; the map is stretched to
    0…1. mode "heat": the map's own values in colors of opacity `alpha` over the picture in gray, from 0 to its largest
    (from −max to max if some are negative) or between `limits`, in red and blue if 0 is their middle, with a color
    bar, NaN gray; a map of shape (rows, cols, 3) holds the colors themselves, red, green and blue from 0 to 1. smooth:
    False shows exact patches.
    """
    if mode not in ("paper", "heat"):
        raise ValueError(f'A mode "paper" or "heat" was wanted, but {mode!r} came; choose one of them.')
    ndim = 2 if mode == "paper" else (2, 3)
    values = array(map, ndim, f"A map of shape (rows, cols){' or (rows, cols, 3)' * (mode == 'heat')}", "give one map")
    painted = values.ndim == 3
    if painted and (values.shape[2] != 3 or not 0 <= values.min() <= values.max() <= 1):
        raise ValueError(
            f"Three colors from 0 to 1 for every patch were wanted, but an array of shape {values.shape} from "
            f"{values.min():.3g} to {values.max():.3g} came; vitlens.tokens.colors makes them of components."
        )
    picture = load_image(image)
    grid = _grid(values.shape[:2], picture, grid)
    if mode == "heat" and smooth and not np.isfinite(values).all():
        raise ValueError("A map of finite numbers was wanted, but some are not; draw it with smooth=False.")
    height, width = grid.image
    with styled(ax):
        if ax is None:
            bar = 1.15 if mode == "heat" and colorbar else 1.0
            across = 4.5 * min(1.5, width / height)
            ax = plt.subplots(figsize=(across * bar, across * height / width), layout="constrained")[1]
        if mode == "paper":
            lit = np.asarray(picture) * mask(values, grid, smooth=smooth)[..., None]
            ax.imshow(lit.round().astype(np.uint8), extent=(0, width, height, 0))
        else:
            ax.imshow(picture.convert("L"), cmap="gray", vmin=0, vmax=255, extent=(0, width, height, 0))
            channels = [
                upsample(each, _covered(grid), method="bilinear" if smooth else "nearest")[:height, :width]
                for each in np.atleast_3d(values).transpose(2, 0, 1)
            ]
            large = np.stack(channels, -1).clip(0, 1) if painted else channels[0]  # rounding may leave 0…1
            box = (0, large.shape[1], large.shape[0], 0)
            scale = colors(values, cmap, signed=True if limits and limits[0] == -limits[1] else None)
            scale |= dict(zip(("vmin", "vmax"), limits, strict=True)) if limits else {}
            heat = ax.imshow(large, extent=box, alpha=alpha, interpolation="nearest", **({} if painted else scale))
            if colorbar and not painted:
                ax.figure.colorbar(heat, ax=ax, fraction=0.046, pad=0.03).outline.set_visible(False)
        ax.set(xlim=(0, width), ylim=(height, 0))
        ax.axis("off")
    return ax


def rollouts(images, maps, *, grid=None, titles=None, captions=None, smooth: bool = True) -> plt.Figure:
    """Pictures beside what attention lets through of them, "Input" and "Attention" (paper, Fig. 6 and 14).

    images and maps: as many of each as `overlay` takes one of, of any shapes. grid: one for all, or one for each.
    titles, captions: a text above, or below, each pair. All pictures are drawn in one height, several pairs to a line.
    """
    pictures = [load_image(image) for image in images]
    grids = list(grid) if isinstance(grid, list | tuple) else [grid] * len(pictures)
    texts = {"titles": titles or [""] * len(pictures), "captions": captions or [""] * len(pictures)}
    for name, given in {"maps": maps, "grids": grids, **texts}.items():
        if len(given) != len(pictures) or not pictures:
            raise ValueError(
                f"As many {name} as images, at least one, were wanted, but {len(given)} and {len(pictures)} came; give "
                "one for each."
            )
    if grid is None:
        for picture in pictures:
            picture.thumbnail((600, 600))  # twice what is shown at most; load_image made it ours

    edge, between, apart, heading, leading = 14, 6, 30, 20, 16
    shapes = [float(np.clip(picture.width / picture.height, 0.6, 3)) for picture in pictures]  # of their places
    lines = _lines(shapes)
    room = [WIDTH - 2 * edge - len(line) * between - (len(line) - 1) * apart for line in lines]
    height = int(min(280, *(r / sum(2 * shapes[i] for i in line) for r, line in zip(room, lines, strict=True))))
    widths = [round(height * shape) for shape in shapes]
    pairs = [2 * width + between for width in widths]
    above, below = ([_wrap(t, w) for t, w in zip(given, pairs, strict=True)] for given in texts.values())
    tops = [8 + leading * max(len(above[i]) for i in line) + heading * (line is lines[0]) for line in lines]
    bottoms = [10 + leading * max(len(below[i]) for i in line) for line in lines]
    across = max(sum(pairs[i] + apart for i in line) for line in lines) - apart + 2 * edge
    with styled():
        figure = page(across, 6 + sum(tops) + len(lines) * height + sum(bottoms))
        y = 4
        for line, top, bottom in zip(lines, tops, bottoms, strict=True):
            x, y = edge, y + top
            for i in line:
                left, right = (place(figure, x + k * (widths[i] + between), y, widths[i], height) for k in (0, 1))
                left.imshow(pictures[i])
                overlay(pictures[i], maps[i], grid=grids[i], ax=right, smooth=smooth)
                if line is lines[0]:
                    left.set_title("Input", size=9.5, pad=5)
                    right.set_title("Attention", size=9.5, pad=5)
                middle, foot = x + pairs[i] / 2, y - 6 - heading * (line is lines[0])
                for k, text in enumerate(reversed(above[i])):
                    write(figure, middle, foot - k * leading, text, ha="center", size=9.5)
                for k, text in enumerate(below[i]):
                    write(figure, middle, y + height + (k + 1) * leading, text, ha="center", color="0.35")
                x += pairs[i] + apart
            y += height + bottom
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
    """The attention of all heads of a layer from one query, with the picture beside them if it is given.

    weights: (H, rows, cols). query: (row, column) of the patch that asks, counted from 0 and marked by a white frame;
    None for a class token. scale: "shared", one color scale from 0 to the largest weight of all heads; or "each",
    every head up to its own largest weight, written above it. The figure says which. cols: thumbnails in a line.
    """
    values = array(weights, 3, "Attention of shape (heads, rows, cols)", "give one layer’s and one query’s weights")
    picture = None if image is None else load_image(image)
    grid = _grid(values.shape[1:], picture, grid)
    if scale not in ("shared", "each"):
        raise ValueError(f'A scale "shared" or "each" was wanted, but {scale!r} came; choose one of them.')
    if query is not None:
        grid.index(*query)
    count = len(values)
    lines = -(-count // cols) if cols else 1 if count <= 4 else 2 if count <= 16 else -(-count // 8)
    cols = -(-count // lines)
    covered = _covered(grid)
    edge, gap, heading, bar = 14, 10, 20 if scale == "shared" else 34, 70

    def sizes(width: int) -> tuple[int, int, int, int]:
        """Of thumbnails so wide: their height, that of all lines, the width of the picture and that of the page."""
        height = round(width * covered[0] / covered[1])
        block = lines * (height + heading + gap) - heading - gap
        beside = 0 if picture is None else round(block * picture.width / picture.height) + 2 * gap
        return height, block, beside, 2 * edge + beside + cols * (width + gap) + bar

    width = next((w for w in range(200, 20, -1) if sizes(w)[3] <= WIDTH and sizes(w)[1] <= 640), 20)
    height, block, beside, across = sizes(width)
    across = max(across, 460)
    with styled():
        figure = page(across, 38 + heading + block + 36)
        top = 38 + heading
        source = "" if query is None else f" from patch (row {query[0]}, column {query[1]})"
        write(figure, edge, 14, title or f"Attention of each head{source}", va="top", size=11)
        if picture is not None:
            ax = place(figure, edge, top, beside - 2 * gap, block)
            ax.imshow(picture, extent=(0, grid.image[1], grid.image[0], 0), aspect="auto")
            ax.set_title("Input", size=9, pad=5)
            mark(ax, query, grid.patch)
        for head, weight in enumerate(values):
            x = edge + beside + head % cols * (width + gap)
            ax = place(figure, x, top + head // cols * (height + gap + heading), width, height)
            limits = colors(values if scale == "shared" else weight, cmap, signed=(values < 0).any())
            shown = show(ax, weight, 0, 0, *covered[::-1], **limits)
            peak = "" if scale == "shared" else f"\nmax {limits['vmax']:#.2g}"
            ax.set_title(f"Head {head}{peak}", size=9, pad=5, linespacing=1.1)
            mark(ax, query, grid.patch)
        x = edge + beside + cols * (width + gap) + 6
        key = figure.colorbar(shown, cax=place(figure, x, top, 12, block))
        key.outline.set_visible(False)
        note = "Colors: attention weight, one scale for all heads."
        if scale == "each":
            note = "Colors: attention weight, a scale for each head up to its own largest."
            key.set_ticks([shown.norm.vmin, shown.norm.vmax], labels=["0" if shown.norm.vmin == 0 else "−max", "max"])
        write(figure, edge, top + block + 10, note, va="top", size=8.5, color="0.35")
    return figure


def mark(
    ax: plt.Axes, query: tuple[int, int] | None, patch: tuple[float, float], origin: tuple[float, float] = (0, 0)
) -> None:
    """A white frame with a dark rim, which shows on any color, around the patch that asks. origin: of the map."""
    if query is not None:
        corner = (origin[0] + query[1] * patch[1], origin[1] + query[0] * patch[0])
        frame = Rectangle(corner, patch[1], patch[0], fill=False, edgecolor="white", linewidth=1.2)
        frame.set_path_effects([withStroke(linewidth=2.8, foreground=INK)])
        ax.add_patch(frame)


def _wrap(text: str, room: float) -> list[str]:
    """The lines of a text of 9.5 points that has `room` pixels."""
    if not text:
        return []
    length = TextPath((0, 0), text.replace("$", "S"), size=9.5).get_extents().width * DPI / 72
    return textwrap.wrap(text, max(6, int(len(text) * room / length)))


def _lines(shapes: list[float]) -> list[list[int]]:
    """Pairs of pictures of so many widths per height, in even lines of about three squares, in the order given."""
    wanted = -(-2 * sum(shapes) // 6.1)
    capacity = max(sum(shapes) / wanted, *shapes)
    while True:
        lines, filled = [[]], 0.0
        for i, shape in enumerate(shapes):
            if lines[-1] and filled + shape > capacity * 1.0001:
                lines.append([])
                filled = 0.0
            lines[-1].append(i)
            filled += shape
        if len(lines) <= wanted:
            return lines
        capacity *= 1.02


def _covered(grid: TokenGrid) -> tuple[int, int]:
    """(height, width) in pixels of all patches together."""
    return round(grid.rows * grid.patch[0]), round(grid.cols * grid.patch[1])


def _check_grid(shape: tuple[int, int], grid: TokenGrid) -> None:
    if shape != (grid.rows, grid.cols):
        raise ValueError(
            f"A map of {grid.rows} × {grid.cols} patches was wanted for this grid, but one of {shape[0]} × {shape[1]} "
            "came; give the grid of the capture that the map comes from."
        )


def _grid(shape: tuple[int, int], picture: Image.Image | None, grid: TokenGrid | None) -> TokenGrid:
    """The grid given, checked; or one whose patches cover the picture exactly, if need be with fractions of pixels."""
    if grid is None:
        height, width = shape if picture is None else (picture.height, picture.width)
        return TokenGrid(*shape, (height / shape[0], width / shape[1]), image=(height, width))
    _check_grid(shape, grid)
    if picture is not None:
        check_size(picture, grid)
    return grid


def check_size(picture: Image.Image, grid: TokenGrid) -> None:
    """Raise ValueError for a picture that is not as large as the one that the model saw."""
    if (picture.height, picture.width) != tuple(grid.image):
        raise ValueError(
            f"The picture as the model saw it, {grid.image[0]} × {grid.image[1]} pixels, was wanted, but one of "
            f"{picture.height} × {picture.width} came; vitlens.models.restore gives it back from the input."
        )
