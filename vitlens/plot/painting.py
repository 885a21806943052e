"""Maps as pixels of their image: enlarged, as a mask, and painted over it."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vitlens.images import ModelInput, load_image
from vitlens.plot.scales import uniform_value
from vitlens.plot.style import array
from vitlens.recorder.grid import TokenGrid


def upsample(map, size: tuple[int, int], *, method: str = "lanczos") -> np.ndarray:
    """(H, W) float32: a (rows, cols) map enlarged to `size` = (H, W), neither rescaled nor clipped.

    method: "nearest" (uniform patches), "bilinear" (within the range of the map), "bicubic" or "lanczos" (may
    overshoot). All keep a constant map constant.

    >>> vitlens.plot.upsample(np.eye(2), (224, 224)).shape
    (224, 224)
    """
    values = array(map, 2, "A map of shape (rows, cols)")
    height, width = size
    small = Image.fromarray(values.astype(np.float32))
    enlarged = small.resize((width, height), Image.Resampling[method.upper()])
    return np.array(enlarged)


def enlarge(values: np.ndarray, size: tuple[int, int], smooth: bool) -> np.ndarray:
    """(H, W, C) float32: a map (rows, cols) or (rows, cols, C), bilinear or in uniform patches."""
    method = "bilinear" if smooth else "nearest"
    channels = np.atleast_3d(values).transpose(2, 0, 1)
    enlarged = [upsample(channel, size, method=method) for channel in channels]
    return np.stack(enlarged, -1)


def paint(gray: np.ndarray, colors: np.ndarray, opacity: float | np.ndarray) -> np.ndarray:
    """(H, W, 3) levels: a gray image (H, W) under the colors (h, w, 3) of a map, which begin in its upper left corner.

    opacity: one for the whole map, or (h, w, 1). Image and colors have one unit, such as levels from 0 to 255.
    """
    painted = np.repeat(gray[..., None].astype(float), 3, axis=2)
    height, width = colors.shape[:2]
    part = painted[:height, :width]
    part += opacity * (colors - part)
    return painted


def mask(map, grid: TokenGrid, *, smooth: bool = True) -> np.ndarray:
    """(H, W) brightness of the model's input in the paper's rendering of a map, from 0 to 1 (Fig. 6, D.8).

    The map is enlarged to the pixels of its patches (Lanczos), blurred with a Gaussian with a standard deviation of one
    patch, and stretched to 0…1. `smooth=False` stretches uniform patches. Unlike in the authors' code nothing is
    rounded to 8 bits. A map that departs from uniform by no more than rollouts of random weights
    (`vitlens.plot.scales.UNIFORM`) becomes 1 everywhere if it is positive, and 0 otherwise. Pixels outside of patches
    are 0, and padding is left out.

    >>> vitlens.plot.mask(vitlens.attention.rollout(attn)[0], attn.grid).shape
    (224, 224)
    """
    values = array(map, 2, "A map of shape (rows, cols)")
    resolve_grid(values.shape, None, grid)
    require_finite(values)
    return brightness(values, grid, smooth)[0]


def brightness(
    values: np.ndarray, grid: TokenGrid, smooth: bool
) -> tuple[np.ndarray, float, float]:
    """The result of `mask`, and the values of the enlarged map that are 0 and 1 in it."""
    light = np.zeros(grid.image)
    height, width = covered_size(grid)
    largest = np.abs(values).max()
    mean = uniform_value(values)
    if mean is not None:
        light[:height, :width] = mean > 0
        return light, 0.0, max(mean, 0.0) or 1.0
    method = "lanczos" if smooth else "nearest"
    enlarged = upsample(values / largest, (height, width), method=method)
    if smooth:
        from scipy.ndimage import gaussian_filter

        enlarged = gaussian_filter(enlarged, sigma=grid.patch, mode="nearest")
    height, width = grid.image
    enlarged = enlarged[:height, :width].astype(float)
    low, high = enlarged.min(), enlarged.max()
    height, width = enlarged.shape
    light[:height, :width] = (enlarged - low) / (high - low)
    return light, low * largest, high * largest


def covered_size(grid: TokenGrid) -> tuple[int, int]:
    """(height, width) in pixels of all patches together."""
    return round(grid.rows * grid.patch[0]), round(grid.cols * grid.patch[1])


def require_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise ValueError(
            'Some values of the map are not finite. Draw it with `style="heat", smooth=False`.'
        )


def is_input(image) -> bool:
    """True for an image (H, W, 3) from `restore` that was not cropped, flipped or transposed afterwards."""
    return isinstance(image, ModelInput) and image.unmoved


def resolve_grid(shape: tuple[int, int], image, grid: TokenGrid | None) -> TokenGrid:
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
    if grid is None:
        fits = is_input(image)
        seen = "a part"
    else:
        fits = (height, width) == tuple(grid.image)
        seen = f"{grid.image[0]} × {grid.image[1]} pixels"
    if not fits:
        raise ValueError(
            f"The model saw {seen} of this image of {height} × {width} pixels. Give `model=` to `overlay`, or the "
            "image that `vitlens.restore(model, images)` returns."
        )
    if grid is not None:
        return grid
    rows, cols = shape
    return TokenGrid(rows, cols, (height / rows, width / cols), image=(height, width))
