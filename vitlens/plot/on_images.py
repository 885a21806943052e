"""Drawn on an image: a map, marked patches, pairs of patches."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image

from vitlens.images import load_image
from vitlens.names import require_known
from vitlens.plot.alt_text import map_words
from vitlens.plot.painting import (
    brightness,
    covered_size,
    enlarge,
    is_input,
    require_finite,
    resolve_grid,
)
from vitlens.plot.scales import as_drawn, bar_words, colors, stretched_words, translucent
from vitlens.plot.style import (
    DIM,
    INK,
    WIDTH,
    array,
    bare,
    canvas,
    color_bar,
    new_axes,
    shade,
    use_style,
    write_below,
)
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import family, transformer, unwrap

DIMMED = 0.35
"""Brightness of the part of an image outside of the model's crop."""
HEIGHT, WIDEST = 4.5, 1.5
"""Height in inches of the figure of an overlay, and its largest width, in heights."""
BAR_ROOM = 1.15
"""Width of the figure of an overlay with a color bar, in widths without one."""


def overlay(
    image,
    map,
    *,
    model=None,
    crop: tuple[float, float, float, float] | None = None,
    grid: TokenGrid | None = None,
    ax: plt.Axes | None = None,
    style: str = "heat",
    smooth: bool = True,
    alpha: float = 0.75,
    opacity: str = "value",
    cmap: str | Colormap | None = None,
    limits: tuple[float, float] | None = None,
    colorbar: bool | None = True,
) -> plt.Axes:
    """The Axes of a map over its image (paper, Fig. 6).

    The map lies on the model's crop of the image, and the rest of the image is dimmed. The crop follows from:

    * model: the part that `preprocess(model, image)` takes, or `preprocess(…, size=grid.image)`. For a module that
      contains a Vision Transformer, it is the Vision Transformer's part, whatever the module does to its images.
    * crop: (left, top, right, bottom) in pixels of the image. After `preprocess(model, image, whole=True)` it is
      `models.crop_box(model, image, whole=True)`.
    * neither: the image is a result of `restore`, or, with `grid`, has exactly the size of the model's input.

    image: a source of `load_image`. map: (rows, cols), or (rows, cols, 3) colors from 0 to 1, drawn in one opacity.
    grid: that of the capture (`attn.grid`), by default that of `model`, or patches that cover the image exactly.
    style "heat": the values in colors over the image in gray, with a color bar. Colors reach from 0 to the largest
    value, from −max to max if some are negative, or between `limits`, in red and blue if these are ±max. A map that
    departs from uniform by no more than rollouts of random weights (`vitlens.plot.scales.UNIFORM`) is drawn as its
    mean, and the bar says so. cmap: other colors, by Matplotlib's name or a Colormap, also for negative values.
    style "mask": the image times `mask`, on black, as in the paper. Its bar has the values
    that are black and white, and the factor by which they are stretched.
    opacity "value": proportional to the value, from 0 at 0 to `alpha` at the end farthest from 0. Limits on one side of
    0 start with 0 at the end nearest to 0, and with both signs it is at least a third of `alpha`. opacity "even":
    `alpha` everywhere. NaN is gray. smooth: False draws exact patches. colorbar: False draws no bar, and writes below
    the image by how much a scale is stretched. None for a caller that shows the scale itself.

    Raises ValueError for an image that may not be the model's input, and for a map that does not fit the grid.

    >>> rollout = vitlens.attention.rollout(attn)
    >>> ax = vitlens.overlay(cat, rollout[0], model=model)
    """
    require_known(style, ("heat", "mask"), "style")
    require_known(opacity, ("value", "even"), "opacity")
    ndim = 2 if style == "mask" else (2, 3)
    values = array(map, ndim, "A map of shape (rows, cols), in heat also (rows, cols, 3),")
    is_colors = values.ndim == 3
    if is_colors and (values.shape[2] != 3 or not 0 <= values.min() <= values.max() <= 1):
        raise ValueError(
            f"A map of one image (rows, cols) expected, or its colors (rows, cols, 3) from 0 to 1, got {values.shape} "
            f"from {values.min():.3g} to {values.max():.3g}."
        )
    picture = load_image(image)
    crop, grid = _locate_map(image, picture, values.shape[:2], model, crop, grid)
    if style == "heat" and smooth:
        require_finite(values)
    has_bar = colorbar and not is_colors
    words = ""
    with use_style(ax):
        if ax is None:
            ax = _new_axes(picture, BAR_ROOM if has_bar else 1.0)
        if style == "mask":
            light, low, high = brightness(values, grid, smooth)
            words = stretched_words(low, high)
            _draw_masked(ax, picture, light, crop)
            if has_bar:
                shown = ScalarMappable(Normalize(low, high), "gray")
                color_bar(shown, bar_words(values, low, high), ax=ax, fraction=0.046, pad=0.03)
        else:
            _draw_gray(ax, picture, crop)
            height, width = grid.image
            enlarged = enlarge(
                values if is_colors else as_drawn(values), covered_size(grid), smooth
            )
            enlarged = enlarged[:height, :width]
            extent = _extent(enlarged.shape[:2], grid, crop)
            if is_colors:
                enlarged = enlarged.clip(0, 1)  # rounding may leave 0…1
                ax.imshow(enlarged, extent=extent, interpolation="nearest", alpha=alpha)
            else:
                scale = _overlay_scale(values, cmap, limits, alpha, opacity)
                words = stretched_words(scale["vmin"], scale["vmax"])
                heat = ax.imshow(enlarged[..., 0], extent=extent, interpolation="nearest", **scale)
                if has_bar:
                    label = bar_words(values, scale["vmin"], scale["vmax"])
                    color_bar(heat, label, ax=ax, fraction=0.046, pad=0.03)
        if crop:
            left, top, right, bottom = crop
            size = right - left, bottom - top
            ax.add_patch(
                Rectangle((left, top), *size, fill=False, edgecolor="white", linewidth=0.8)
            )
        ax.set(xlim=(0, picture.width), ylim=(picture.height, 0))
        ax.axis("off")
        if colorbar is False and words:
            write_below(ax, words)
        rows, cols = values.shape[:2]
        about = f"colors of {rows} × {cols} patches" if is_colors else map_words(values)
        ax.images[-1].set_label(f"{about}, over an image")
    return ax


def _new_axes(picture: Image.Image, bar: float) -> plt.Axes:
    """Axes for an image in a figure of pyplot. bar: width with a color bar, in widths without one."""
    aspect = picture.height / picture.width
    width = HEIGHT * min(WIDEST, 1 / aspect)
    return new_axes(width * bar, width * aspect)


def _draw_masked(ax: plt.Axes, picture: Image.Image, light: np.ndarray, crop) -> None:
    """Draw an image times the brightness of the model's input, black outside of the crop."""
    if crop:
        part = Image.fromarray(light.astype(np.float32)).resize(_rounded_size(crop))
        light = np.asarray(_paste(part, picture, crop, 0))
    lit = np.asarray(picture) * light[..., None]
    ax.imshow(lit.round().astype(np.uint8), extent=(0, picture.width, picture.height, 0))


def _draw_gray(ax: plt.Axes, picture: Image.Image, crop) -> None:
    """Draw an image in gray, dimmed outside of the crop."""
    levels = np.asarray(picture.convert("L"))
    if crop:
        inside = Image.new("F", _rounded_size(crop), 1)
        brightness = np.asarray(_paste(inside, picture, crop, DIMMED))
        levels = (levels * brightness).astype(np.uint8)
    extent = 0, picture.width, picture.height, 0
    ax.imshow(levels, cmap="gray", vmin=0, vmax=255, extent=extent)


def _overlay_scale(values: np.ndarray, cmap, limits, alpha: float, opacity: str) -> dict:
    """Arguments of `imshow` for the values of a map: translucent colors and their limits."""
    if limits is None:
        scale = colors(values, cmap)
    else:
        low, high = (float(limit) for limit in limits)
        scale = colors(values, cmap, signed=True if low == -high else None)
        scale |= {"vmin": low, "vmax": high}
    scale["cmap"] = translucent(scale["cmap"], scale["vmin"], scale["vmax"], alpha, opacity)
    return scale


def _extent(shape: tuple[int, int], grid: TokenGrid, crop) -> tuple[float, float, float, float]:
    """(left, right, bottom, top) in pixels of the image of a map of (height, width) pixels of the model's input."""
    height, width = grid.image
    left, top, right, bottom = crop or (0, 0, width, height)
    across = (right - left) / width  # pixels of the image per input pixel
    down = (bottom - top) / height
    return left, left + across * shape[1], top + down * shape[0], top


def _rounded_size(crop: Sequence[float]) -> tuple[int, int]:
    left, top, right, bottom = crop
    return round(right - left), round(bottom - top)


def _locate_map(
    image, picture: Image.Image, shape: tuple[int, int], model, crop, grid: TokenGrid | None
):
    """The part of the image (left, top, right, bottom) below the map, or None for the whole image, and the grid."""
    if model is not None:
        from vitlens.models import crop_box, data_config

        size = image.shape[:2] if is_input(image) else data_config(model)["input_size"][1:]
        grid = grid or family(transformer(unwrap(model))).grid(size)
        if crop is None and not is_input(image):
            crop = crop_box(model, picture, size=tuple(grid.image))
    if crop is None:
        return None, resolve_grid(shape, image, grid)
    crop = tuple(float(edge) for edge in crop)
    left, top, right, bottom = crop
    across = min(right, picture.width) - max(left, 0)
    down = min(bottom, picture.height) - max(top, 0)
    if across < 1 or down < 1:
        raise ValueError(
            f"crop must be (left, top, right, bottom) with a part of the image of {picture.width} × {picture.height} "
            f"pixels, got {crop}."
        )
    return crop, resolve_grid(shape, None, grid or TokenGrid(*shape, (16, 16)))


def _paste(
    part: Image.Image, picture: Image.Image, crop: Sequence[float], rest: float
) -> Image.Image:
    """A part at its position on an image of the size of `picture`, with the level `rest` elsewhere."""
    whole = Image.new("F", picture.size, rest)
    whole.paste(part, (round(crop[0]), round(crop[1])))
    return whole


def mark(
    ax: plt.Axes,
    query: tuple[int, int] | None,
    patch: tuple[float, float],
    at: tuple[float, float] = (0, 0),
    linestyle: str = "-",
) -> None:
    """Draw a white frame with a dark rim around the query patch of a map at the point (x, y)."""
    if query is None:
        return
    height, width = patch
    row, col = query
    x, y = at
    corner = x + col * width, y + row * height
    frame = Rectangle(
        corner, width, height, fill=False, edgecolor="white", linewidth=1.2, linestyle=linestyle
    )
    frame.set_path_effects([withStroke(linewidth=2.8, foreground=INK)])
    ax.add_patch(frame)


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
    widths = [grid.image[1] / grid.image[0] for grid in grids]  # in heights, the unit of the axes
    starts = 0, widths[0] + 0.04
    height = min(340, 840 / sum(widths))
    hues = np.linspace(0, 1, len(pairs), endpoint=False)
    rim = [withStroke(linewidth=3, foreground="0.1")]
    with canvas(ax, WIDTH, height + 40 + (24 if note else 0)) as (ax, result):
        for side in (0, 1):
            grid = grids[side]
            left = starts[side]
            right = left + widths[side]
            resolve_grid((grid.rows, grid.cols), images[side], grid)
            ax.imshow(load_image(images[side]), extent=(left, right, 1, 0))
            ax.annotate(
                titles[side],
                (left, 0),
                (0, 5),
                textcoords="offset points",
                size=9.5,
                parse_math=False,
            )
        palette = plt.get_cmap("hsv")(hues)
        for color, pair in zip(palette, pairs, strict=True):
            x = []
            y = []
            for start, number, grid in zip(starts, pair, grids, strict=True):
                row, col = divmod(number, grid.cols)
                patch_height, patch_width = grid.patch
                image_height = grid.image[0]
                x.append(start + (col + 0.5) * patch_width / image_height)
                y.append((row + 0.5) * patch_height / image_height)
            ax.plot(x, y, color=color, linewidth=1.2, alpha=0.9)
            ax.plot(x, y, "o", color=color, markersize=5, path_effects=rim)
        ax.set(xlim=(0, starts[1] + widths[1]), ylim=(1, 0), aspect="equal")
        bare(ax)
        ax.set_xlabel(note, loc="left", size=8.5, color=shade(ax, DIM), parse_math=False)
    return result
