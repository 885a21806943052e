"""Maps and their images: from patches to pixels, over an image, in a line, in a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Circle, Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image

from vitlens.images import ModelInput, load_image
from vitlens.names import require_known
from vitlens.plot.alt_text import map_words
from vitlens.plot.style import (
    INK,
    MARGIN,
    WIDTH,
    array,
    bare,
    color_bar,
    colors,
    frames,
    scale_bar,
    styled,
    translucent,
    wrapped,
)
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import family, transformer, unwrap

GRAY = "0.35"
DIMMED = 0.35
"""Brightness of the part of an image outside of the model's crop."""
BELOW = {"location": "bottom", "shrink": 0.67, "aspect": 15, "pad": 0.03}
"""Position of the color bar of an image in a line."""


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
    with styled():
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
                ax.text(
                    col, row, f"{value:.2g}".replace("-", "−"), ha="center", va="center", color=ink
                )
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
    with styled():
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
        end = f"{'±' if scale['vmin'] < 0 else 'max '}{largest:.3g}".replace("-", "−")
        below[name] = f"{end}\n{(captions or {}).get(name, '')}".strip()
    signed = ", or from −max (blue) to max (red) where some values are negative" if signed else ""
    note = f"{note}\nColors: each map has its own scale, from 0 (clear) to its max (yellow){signed}.".strip()
    note, title = wrapped(note, WIDTH, 6.2), wrapped(title, WIDTH, 9)
    lines, text = (
        -(-(len(maps) + 1) // cols),
        max(len(each.splitlines()) for each in below.values()),
    )
    height = lines * (
        (WIDTH / cols - 8) * grid.image[0] / grid.image[1] + 15 * text + 24
    ) + 15 * len(note.splitlines())
    height += 20 + 20 * len(title.splitlines()) + (max(0, 112 - 15 * text) if compared else 0)
    with styled():
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
            write_below(thumbnail, wrapped(name, room * 200, 6))
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
    with styled():
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


def _line(
    count: int, most: int, aspect: float, below: float
) -> tuple[plt.Figure, Sequence[plt.Axes]]:
    """A page with `count` images in a line, each at most `most` pixels wide and `aspect` times as high."""
    side = min(most, (WIDTH - 12) / count - 16)
    figure, axes = frames(1, count, max(12 + count * (side + 16), 240), 34 + side * aspect + below)
    for ax in axes[0]:
        ax.set_anchor("N")
    return figure, axes[0]


def name_above(ax: plt.Axes, text: str) -> None:
    ax.set_title(text, loc="left", size=9.5, pad=5, linespacing=1.1, parse_math=False)


def draw_input(ax: plt.Axes, picture, grid: TokenGrid) -> None:
    """Draw the model's input."""
    ax.imshow(picture, extent=(0, grid.image[1], grid.image[0], 0))
    name_above(ax, "Input")


def write_below(ax: plt.Axes, text: str, size: float = 8.5) -> None:
    """Write lines of text below an image."""
    if text:
        look = {
            "xycoords": "axes fraction",
            "textcoords": "offset points",
            "va": "top",
            "size": size,
            "color": GRAY,
        }
        ax.annotate(text, (0, 0), (0, -4), **look, annotation_clip=False, parse_math=False)


def heading(figure: plt.Figure, text: str) -> None:
    figure.suptitle(text, x=MARGIN / figure.get_figwidth(), ha="left", size=11, parse_math=False)


def write_note(figure: plt.Figure, text: str) -> None:
    """Write lines of text at the foot of a page."""
    figure.supxlabel(
        text, x=MARGIN / figure.get_figwidth(), ha="left", size=8.5, color=GRAY, parse_math=False
    )
