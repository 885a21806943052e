"""Drawn on an image: a map, marked patches, pairs of patches."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image

from vitlens.images import ModelInput, load_image
from vitlens.names import require_known
from vitlens.plot.alt_text import map_words
from vitlens.plot.style import (
    GRAY,
    INK,
    WIDTH,
    array,
    bare,
    canvas,
    color_bar,
    colors,
    styled,
    translucent,
)
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import family, transformer, unwrap

DIMMED = 0.35
"""Brightness of the part of an image outside of the model's crop."""


def upsample(map, size: tuple[int, int], *, method: str = "lanczos") -> np.ndarray:
    """(H, W) float32: a (rows, cols) map enlarged to `size` = (H, W), neither rescaled nor clipped.

    method: "nearest" (uniform patches), "bilinear" (within the range of the map), "bicubic" or "lanczos" (may
    overshoot). All keep a constant map constant.

    >>> vitlens.plot.upsample(np.eye(2), (224, 224)).shape
    (224, 224)
    """
    values = array(map, 2, "A map of shape (rows, cols)")
    enlarged = Image.fromarray(values.astype(np.float32)).resize(
        size[::-1], Image.Resampling[method.upper()]
    )
    return np.array(enlarged)


def mask(map, grid: TokenGrid, *, smooth: bool = True) -> np.ndarray:
    """(H, W) brightness of the model's input in the paper's rendering of a map, from 0 to 1 (Fig. 6, D.8).

    The map is enlarged to the pixels of its patches (Lanczos), blurred with a Gaussian with a standard deviation of one
    patch, and stretched to 0…1. `smooth=False` stretches uniform patches. Unlike in the authors' code nothing is
    rounded to 8 bits. A constant map becomes 1 everywhere if it is positive, and 0 otherwise. Pixels outside of patches
    are 0, and padding is left out.

    >>> vitlens.plot.mask(vitlens.attention.rollout(attn)[0], attn.grid).shape
    (224, 224)
    """
    values = array(map, 2, "A map of shape (rows, cols)")
    checked_grid(values.shape, None, grid)
    _check_finite(values)
    height, width = grid.image
    seen, largest = np.zeros((height, width)), np.abs(values).max()
    if np.ptp(values) <= 1e-6 * largest:
        seen[: covered(grid)[0], : covered(grid)[1]] = values.max() > 0
        return seen
    large = upsample(values / largest, covered(grid), method="lanczos" if smooth else "nearest")
    if smooth:
        from scipy.ndimage import gaussian_filter

        large = gaussian_filter(large, sigma=grid.patch, mode="nearest")
    large = large[:height, :width].astype(float)
    seen[: large.shape[0], : large.shape[1]] = (large - large.min()) / np.ptp(large)
    return seen


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
    cmap: str | None = None,
    limits: tuple[float, float] | None = None,
    colorbar: bool = True,
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
    value, from −max to max if some are negative, or between `limits`, in red and blue if these are ±max. style "mask":
    the image times `mask`, on black, as in the paper.
    opacity "value": proportional to the value, from 0 at 0 to `alpha` at the end farthest from 0. Limits on one side of
    0 start with 0 at the end nearest to 0, and with both signs it is at least a third of `alpha`. opacity "even":
    `alpha` everywhere. NaN is gray. smooth: False draws exact patches.

    Raises ValueError for an image that may not be the model's input, and for a map that does not fit the grid.

    >>> rollout = vitlens.attention.rollout(attn)
    >>> ax = vitlens.overlay(cat, rollout[0], model=model)
    """
    require_known(style, ("heat", "mask"), "style")
    require_known(opacity, ("value", "even"), "opacity")
    values = array(
        map,
        2 if style == "mask" else (2, 3),
        "A map of shape (rows, cols), in heat also (rows, cols, 3),",
    )
    painted = values.ndim == 3
    if painted and (values.shape[2] != 3 or not 0 <= values.min() <= values.max() <= 1):
        raise ValueError(
            f"A map of one image (rows, cols) expected, or its colors (rows, cols, 3) from 0 to 1, got {values.shape} "
            f"from {values.min():.3g} to {values.max():.3g}."
        )
    picture = load_image(image)
    crop, grid = _placed(image, picture, values.shape[:2], model, crop, grid)
    left, top, right, bottom = crop or (0, 0, grid.image[1], grid.image[0])
    across, down = (
        (right - left) / grid.image[1],
        (bottom - top) / grid.image[0],
    )  # pixels of the image per input pixel
    with styled(ax):
        if ax is None:
            aspect = picture.height / picture.width
            wide = 4.5 * min(1.5, 1 / aspect)
            bar = 1.15 if style == "heat" and colorbar and not painted else 1.0
            ax = plt.subplots(figsize=(wide * bar, wide * aspect), layout="constrained")[1]
        if style == "mask":
            light = mask(values, grid, smooth=smooth)
            if crop:
                part = Image.fromarray(light.astype(np.float32))
                light = _pasted(
                    part.resize((round(right - left), round(bottom - top))), picture, crop, 0
                )
            lit = np.asarray(picture) * np.asarray(light)[..., None]
            ax.imshow(lit.round().astype(np.uint8), extent=(0, picture.width, picture.height, 0))
        else:
            if smooth:
                _check_finite(values)
            levels = np.asarray(picture.convert("L"))
            if crop:
                seen = Image.new("F", (round(right - left), round(bottom - top)), 1)
                levels = (levels * np.asarray(_pasted(seen, picture, crop, DIMMED))).astype(
                    np.uint8
                )
            ax.imshow(
                levels, cmap="gray", vmin=0, vmax=255, extent=(0, picture.width, picture.height, 0)
            )
            channels, (height, width) = np.atleast_3d(values).transpose(2, 0, 1), grid.image
            how = "bilinear" if smooth else "nearest"
            large = np.stack([upsample(each, covered(grid), method=how) for each in channels], -1)[
                :height, :width
            ]
            if painted:
                look = {"alpha": alpha}
                large = large.clip(0, 1)  # rounding may leave 0…1
            else:
                limits = limits and tuple(float(limit) for limit in limits)
                look = colors(
                    values, cmap, signed=True if limits and limits[0] == -limits[1] else None
                )
                look |= dict(zip(("vmin", "vmax"), limits, strict=True)) if limits else {}
                look["cmap"] = translucent(
                    look["cmap"].name, look["vmin"], look["vmax"], alpha, opacity
                )
                large = large[..., 0]
            extent = (left, left + across * large.shape[1], top + down * large.shape[0], top)
            heat = ax.imshow(large, extent=extent, interpolation="nearest", **look)
            if colorbar and not painted:
                color_bar(heat, ax=ax, fraction=0.046, pad=0.03)
        if crop:
            edge = Rectangle(
                (left, top),
                right - left,
                bottom - top,
                fill=False,
                edgecolor="white",
                linewidth=0.8,
            )
            ax.add_patch(edge)
        ax.set(xlim=(0, picture.width), ylim=(picture.height, 0))
        ax.axis("off")
        words = "colors of {} × {} patches".format(*values.shape) if painted else map_words(values)
        ax.images[-1].set_label(f"{words}, over an image")
    return ax


def _placed(
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
        return None, checked_grid(shape, image, grid)
    left, top, right, bottom = crop = tuple(map(float, crop))
    if (
        min(right, picture.width) - max(left, 0) < 1
        or min(bottom, picture.height) - max(top, 0) < 1
    ):
        raise ValueError(
            f"crop must be (left, top, right, bottom) with a part of the image of {picture.width} × {picture.height} "
            f"pixels, got {crop}."
        )
    return crop, checked_grid(shape, None, grid or TokenGrid(*shape, (16, 16)))


def _pasted(
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
    if query is not None:
        corner = at[0] + query[1] * patch[1], at[1] + query[0] * patch[0]
        frame = Rectangle(
            corner,
            patch[1],
            patch[0],
            fill=False,
            edgecolor="white",
            linewidth=1.2,
            linestyle=linestyle,
        )
        frame.set_path_effects([withStroke(linewidth=2.8, foreground=INK)])
        ax.add_patch(frame)


def covered(grid: TokenGrid) -> tuple[int, int]:
    """(height, width) in pixels of all patches together."""
    return round(grid.rows * grid.patch[0]), round(grid.cols * grid.patch[1])


def _check_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise ValueError(
            'Some values of the map are not finite. Draw it with `style="heat", smooth=False`.'
        )


def is_input(image) -> bool:
    """True for an image (H, W, 3) from `restore` that was not cropped, flipped or transposed afterwards."""
    return isinstance(image, ModelInput) and (image.shape, image.strides) == image.layout


def checked_grid(shape: tuple[int, int], image, grid: TokenGrid | None) -> TokenGrid:
    """The grid, checked, or by default one with patches that cover the image exactly, also with fractions of pixels.

    image: None, or the model's input: a result of `restore`, or with `grid` an image of its size.
    """
    if grid is not None and shape != (grid.rows, grid.cols):
        raise ValueError(
            f"The grid has {grid.rows} × {grid.cols} patches, the map {shape[0]} × {shape[1]}. Give the grid of the "
            "capture that the map comes from. `grid.image_map(weights)` makes maps of rows of attention."
        )
    if image is None:
        return grid
    width, height = load_image(image).size
    if (height, width) != tuple(grid.image) if grid else not is_input(image):
        seen = f"{grid.image[0]} × {grid.image[1]} pixels" if grid else "a part"
        raise ValueError(
            f"The model saw {seen} of this image of {height} × {width} pixels. Give `model=` to `overlay`, or the "
            "image that `vitlens.restore(model, images)` returns."
        )
    return grid or TokenGrid(*shape, (height / shape[0], width / shape[1]), image=(height, width))


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
