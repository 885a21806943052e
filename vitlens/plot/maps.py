"""A map over its picture: from patches to pixels."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image

from vitlens.images import load_image
from vitlens.plot.style import INK, array, color_bar, colors, one_of, styled, translucent
from vitlens.recorder.grid import TokenGrid


def upsample(map, size: tuple[int, int], *, method: str = "lanczos") -> np.ndarray:
    """(H, W) float32: a (rows, cols) map enlarged to `size` = (H, W), neither rescaled nor clipped.

    method: "nearest" (patches stay what they are), "bilinear" (stays within the range of the map), "bicubic" or
    "lanczos" (may overshoot). All keep a constant map constant.
    """
    values = array(map, 2, "A map of shape (rows, cols)", "Give one map at a time")
    one_of("method", method, ("nearest", "bilinear", "bicubic", "lanczos"))
    enlarged = Image.fromarray(values.astype(np.float32)).resize(size[::-1], Image.Resampling[method.upper()])
    return np.array(enlarged)


def mask(map, grid: TokenGrid, *, smooth: bool = True) -> np.ndarray:
    """(H, W) in 0…1 over the model's input: how much of the picture the paper's rendering lets through (Fig. 6, D.8).

    The map is enlarged to the pixels that its patches cover (Lanczos), blurred with a Gaussian whose standard deviation
    is one patch, and stretched so that the least is 0 and the largest 1. `smooth=False` stretches the patches as they
    are. All is done in floating point, where the authors go through 8 bits. A constant map has nothing to
    stretch: it becomes 1 everywhere if it is positive, and 0 otherwise. Pixels that were cut off before the model
    looked are 0; padding beyond the picture is left out.
    """
    values = array(map, 2, "A map of shape (rows, cols)", "Give one map at a time")
    check_grid(values.shape, grid)
    if not np.isfinite(values).all():
        raise ValueError(
            "Some values of the map are not finite, so it makes no mask. "
            'Draw it with `overlay(…, mode="heat", smooth=False)`.'
        )
    height, width = grid.image
    seen = np.zeros((height, width))
    if np.ptp(values) <= 1e-6 * np.abs(values).max():
        seen[: covered(grid)[0], : covered(grid)[1]] = values.max() > 0
        return seen
    large = upsample(values / np.abs(values).max(), covered(grid), method="lanczos" if smooth else "nearest")
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
    grid: TokenGrid | None = None,
    ax: plt.Axes | None = None,
    mode: str = "paper",
    smooth: bool = True,
    alpha: float = 0.75,
    opacity: str = "value",
    cmap: str | None = None,
    limits: tuple[float, float] | None = None,
    colorbar: bool = True,
) -> plt.Axes:
    """A map over its picture (paper, Fig. 6).

    image: what `load_image` takes, as the model saw it. map: (rows, cols). grid: where the patches lie; without it they
    are taken to cover the picture exactly. mode "paper": the picture times `mask`, on black; the map is stretched to
    0…1. mode "heat": the map's own values in colors over the picture in gray, from 0 to its largest (from −max to max
    if some are negative) or between `limits`, in red and blue if 0 is their middle, with a color bar. opacity "value":
    it grows in proportion to the value, from none at 0, where the picture stands, to `alpha` at the end farthest from 0
    (limits that leave 0 out begin with none at the end nearest to it; with both signs, it is at least a third of
    `alpha`, since a dark picture would leave dark rings around values near 0); "even": it is `alpha`
    everywhere. NaN is a flat gray. A map of shape (rows, cols, 3) holds the colors themselves, red, green and blue from
    0 to 1, of even opacity. smooth: False shows exact patches.
    """
    one_of("mode", mode, ("paper", "heat"))
    one_of("opacity", opacity, ("value", "even"))
    ndim = 2 if mode == "paper" else (2, 3)
    values = array(map, ndim, f"A map of shape (rows, cols){' or (rows, cols, 3)' * (mode == 'heat')}", "Give one map")
    painted = values.ndim == 3
    if painted and (values.shape[2] != 3 or not 0 <= values.min() <= values.max() <= 1):
        raise ValueError(
            f"Colors of shape (rows, cols, 3) from 0 to 1 expected, got {values.shape} from {values.min():.3g} to "
            f"{values.max():.3g}. `vitlens.tokens.colors` makes them from components."
        )
    picture = load_image(image)
    grid = grid_of(values.shape[:2], picture, grid)
    if mode == "heat" and smooth and not np.isfinite(values).all():
        raise ValueError("Some values of the map are not finite. Draw it with smooth=False.")
    height, width = grid.image
    scale = colors(values, cmap, signed=True if limits and limits[0] == -limits[1] else None)
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
                upsample(each, covered(grid), method="bilinear" if smooth else "nearest")[:height, :width]
                for each in np.atleast_3d(values).transpose(2, 0, 1)
            ]
            large = np.stack(channels, -1).clip(0, 1) if painted else channels[0]  # rounding may leave 0…1
            box = (0, large.shape[1], large.shape[0], 0)
            scale |= dict(zip(("vmin", "vmax"), limits, strict=True)) if limits else {}
            scale["cmap"] = translucent(scale["cmap"].name, scale["vmin"], scale["vmax"], alpha, opacity)
            look = {"alpha": alpha} if painted else scale
            heat = ax.imshow(large, extent=box, interpolation="nearest", **look)
            if colorbar and not painted:
                color_bar(heat, ax=ax, fraction=0.046, pad=0.03)
        ax.set(xlim=(0, width), ylim=(height, 0))
        ax.axis("off")
    return ax


def mark(
    ax: plt.Axes, query: tuple[int, int] | None, patch: tuple[float, float], origin: tuple[float, float] = (0, 0)
) -> None:
    """A white frame with a dark rim, which shows on any color, around the patch that asks. origin: of the map."""
    if query is not None:
        corner = (origin[0] + query[1] * patch[1], origin[1] + query[0] * patch[0])
        frame = Rectangle(corner, patch[1], patch[0], fill=False, edgecolor="white", linewidth=1.2)
        frame.set_path_effects([withStroke(linewidth=2.8, foreground=INK)])
        ax.add_patch(frame)


def covered(grid: TokenGrid) -> tuple[int, int]:
    """(height, width) in pixels of all patches together."""
    return round(grid.rows * grid.patch[0]), round(grid.cols * grid.patch[1])


def check_grid(shape: tuple[int, int], grid: TokenGrid) -> None:
    if shape != (grid.rows, grid.cols):
        raise ValueError(
            f"The grid has {grid.rows} × {grid.cols} patches, the map {shape[0]} × {shape[1]}. Give the grid of the "
            "capture that the map comes from."
        )


def grid_of(shape: tuple[int, int], picture: Image.Image | None, grid: TokenGrid | None) -> TokenGrid:
    """The grid given, checked; or one whose patches cover the picture exactly, if need be with fractions of pixels."""
    if grid is None:
        height, width = shape if picture is None else (picture.height, picture.width)
        return TokenGrid(*shape, (height / shape[0], width / shape[1]), image=(height, width))
    check_grid(shape, grid)
    if picture is not None:
        check_size(picture, grid)
    return grid


def check_size(picture: Image.Image, grid: TokenGrid) -> None:
    """Raise ValueError for a picture that is not as large as the one that the model saw."""
    if (picture.height, picture.width) != tuple(grid.image):
        raise ValueError(
            f"The model saw {grid.image[0]} × {grid.image[1]} pixels, the picture has {picture.height} × "
            f"{picture.width}. `vitlens.models.restore` makes the picture from the model's input."
        )
