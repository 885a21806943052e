"""Images for the browser as PNG files, figures with a caption to save, and still images of frames."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

from vitlens.plot.alt_text import bundle
from vitlens.plot.style import WIDTH, wrapped
from vitlens_explorer.panels import Scale

SIDE = 448
"""Largest side in pixels of images that are enlarged by an integer factor."""
_RANDOM = {"linestyle": "--", "linewidth": 1, "color": "gray"}
SCORES = {"color": "#d55e00"}, {"color": "#0b62a4"}, _RANDOM, _RANDOM
"""Lines of deletion, insertion, and both in random orders."""
SHARP = 1.5
"""Pixels of a still image per pixel of its display."""


def enlarged(pixels: np.ndarray) -> bytes:
    """PNG file of an image (H, W, 3) uint8, enlarged (bicubic) by an integer factor up to `SIDE`."""
    height, width = pixels.shape[:2]
    factor = max(1, SIDE // max(height, width))
    return png(
        Image.fromarray(pixels).resize((width * factor, height * factor), Image.Resampling.BICUBIC)
    )


def mosaic(tiles: np.ndarray, scales: list[Scale], side: int) -> bytes:
    """PNG file of maps (rows, cols, r, c) in rows and columns, one square per patch, with a border of one pixel.

    scales: one per map, in reading order. side: largest side of a map in pixels, at least one per patch.
    """
    rows, cols, r, c = tiles.shape
    factor = max(1, (side - 2) // max(r, c))
    height, width = r * factor + 2, c * factor + 2
    page = np.full((rows * height, cols * width, 3), 127, np.uint8)
    for k, scale in enumerate(scales):
        row, col = divmod(k, cols)
        place = (tiles[row, col] - scale.low) / ((scale.high - scale.low) or 1.0) * 256
        tile = (
            scale.table()[place.clip(0, 255).astype(np.uint8), :3]
            .repeat(factor, 0)
            .repeat(factor, 1)
        )
        page[row * height + 1 : (row + 1) * height - 1, col * width + 1 : (col + 1) * width - 1] = (
            tile
        )
    return png(Image.fromarray(page))


def png(image: Image.Image) -> bytes:
    """PNG file of a PIL image."""
    image.save(file := io.BytesIO(), format="png", compress_level=1)
    return file.getvalue()


def captioned(forward, panel, score: dict | None = None) -> bytes:
    """PNG file of the `Panel` of a `Forward`, with title, color bar, caption and the chart of its score. Avoids pyplot
    for thread safety."""
    from matplotlib.figure import Figure

    from vitlens.plot.on_images import mark, overlay

    height, width = forward.grid.image
    tall = 6.5 * min(1, height / width)
    figure = Figure(figsize=(7, tall + 3.6 * bool(score)), dpi=150)
    ax, *charts = figure.subplots(
        1 + bool(score), squeeze=False, height_ratios=[tall, *[3] * bool(score)]
    )[:, 0]
    scale = (
        {"cmap": panel.scale.cmap, "limits": (panel.scale.low, panel.scale.high)}
        if panel.scale
        else {}
    )
    values = without(panel.sinks, panel.values, panel.scale.low) if panel.hides else panel.values
    overlay(
        forward.pixels,
        values,
        grid=forward.grid,
        ax=ax,
        style="heat",
        smooth=panel.smooth,
        alpha=panel.strength,
        opacity=panel.opacity,
        **scale,
    )
    for place in panel.sinks:
        mark(ax, place, forward.grid.patch, linestyle="--")
    mark(ax, panel.selected, forward.grid.patch)
    below = 0.03  # of the caption, as a share of the axes' height
    ax.set_title(panel.title, fontsize=11)
    for chart in charts:
        for (name, values), style in zip(score["curves"].items(), SCORES, strict=True):
            chart.plot(100 * np.array(score["shares"]), values, label=name, **style)
        chart.set_title(score["title"], fontsize=11)
        chart.set(xlabel="patches covered or shown (%)", ylabel=score["scale"])
        chart.legend(fontsize=8)
        ax, below = chart, 0.25
    caption = textwrap.fill(f"{forward.name}. {panel.words}", 88)
    ax.text(0, -below, caption, fontsize=9, va="top", transform=ax.transAxes, parse_math=False)
    figure.savefig(file := io.BytesIO(), format="png", bbox_inches="tight")
    return file.getvalue()


def without(sinks: Sequence[tuple[int, int]], values: np.ndarray, low: float) -> np.ndarray:
    """A map (rows, cols, …) whose sinks have the lowest color of a scale that begins at `low`."""
    values = values.copy()
    values[tuple(zip(*sinks, strict=True))] = max(low, 0)
    return values


def painted(panel: dict, image: Image.Image) -> np.ndarray:
    """(H, W, 3) levels 0…255: an image under the map of a panel of a frame, as the front end paints it."""
    below = np.asarray(image.convert("RGB"), float)
    (height, width), (down, across) = below.shape[:2], panel["cell"]
    if not panel["strength"]:
        return below
    values = np.frombuffer(panel["values"], "<f4").reshape(panel["rows"], panel["cols"], -1)
    if panel.get("hides"):
        values = without(panel["sinks"], values, panel["scale"]["low"])
    size = round(panel["cols"] * across * width), round(panel["rows"] * down * height)
    how = Image.Resampling.BILINEAR if panel["smooth"] else Image.Resampling.NEAREST
    large = np.stack(
        [np.asarray(Image.fromarray(each).resize(size, how)) for each in values.transpose(2, 0, 1)],
        -1,
    )
    large, opacity = large[:height, :width], panel["strength"]
    if scale := panel["scale"]:
        place = (large[..., 0] - scale["low"]) / (scale["high"] - scale["low"] or 1) * 255
        table = np.frombuffer(scale["colors"], np.uint8).reshape(256, 4)
        large = table[place.clip(0, 255).round().astype(int)] / 255
        large, opacity = large[..., :3], large[..., 3:]
    below[:] = np.asarray(image.convert("L"))[..., None]
    part = below[: large.shape[0], : large.shape[1]]
    part += opacity * (255 * large - part)
    return below


def still(frame: dict, pictures: dict[str, bytes]) -> dict[str, str]:
    """A frame as an output for readers without a kernel. Its alt text is the titles and captions of the panels.

    Panels are side by side where they fit. Drawn without Matplotlib's figures, whose import takes half a second.
    """
    texts, parts, x, top, bottom, across = [], [], 0, 0, 0, 0
    for panel in frame["panels"]:
        base = Image.open(io.BytesIO(pictures[panel["picture"]]))
        width = WIDTH if base.width > 1.8 * base.height else WIDTH // 2
        size = width - 20, round((width - 20) * base.height / base.width)
        x, top = (0, bottom) if x + width > WIDTH else (x, top)
        parts.append((_framed(panel, base, size), (x + 10, top + 34)))
        texts.append((x + 10, top + 10, panel["title"], 15, "la"))
        below = top + 42 + size[1]
        if panel["ends"]:
            parts.append((_strip(panel["scale"]["colors"], size[0]), (x + 10, below)))
            for at, end, anchor in zip(
                (x + 10, x + 10 + size[0]), panel["ends"], ("la", "ra"), strict=True
            ):
                texts.append((at, below + 15, end, 12, anchor))
            below += 36
        words = wrapped(panel["words"], width - 20, 6.4)
        texts.append((x + 10, below, words, 12, "la"))
        x, bottom = x + width, max(bottom, below + 17 * len(words.splitlines()) + 12)
        across = max(across, x)
    texts.append((10, bottom, "A still image. Run the cell for the interactive one.", 11, "la"))
    size = across, bottom + 24
    canvas = Image.new("RGB", [round(SHARP * each) for each in size], "white")
    for part, place in parts:
        canvas.paste(part, tuple(round(SHARP * each) for each in place))
    drawing = ImageDraw.Draw(canvas)
    for left, above, text, letters, anchor in texts:
        font = ImageFont.truetype(
            f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", round(SHARP * letters)
        )
        drawing.text(
            (SHARP * left, SHARP * above), text, "#262626", font, anchor, spacing=SHARP * 4
        )
    canvas.save(sharp := io.BytesIO(), "JPEG", quality=75, optimize=True)
    alt = " ".join(f"{panel['title']}. {panel['words']}" for panel in frame["panels"])
    return bundle(png(canvas.resize(size)), alt, across, sharp.getvalue())


def _framed(panel: dict, base: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The painted image of a panel, enlarged, with a frame around its selected cell and dashed ones around sinks."""
    width, height = (round(SHARP * each) for each in size)
    image = Image.fromarray(painted(panel, base).round().astype(np.uint8)).resize((width, height))
    drawing, (tall, wide) = ImageDraw.Draw(image), panel["cell"]

    def cell(row: int, col: int) -> list[int]:
        """Left, top, right and bottom."""
        return [
            round(each)
            for each in (
                col * wide * width,
                row * tall * height,
                (col + 1) * wide * width,
                (row + 1) * tall * height,
            )
        ]

    for left, top, right, bottom in (cell(*place) for place in panel.get("sinks", ())):
        for start in range(0, max(right - left, bottom - top), 10):
            x, y = (
                [min(low + start + step, high) for step in (0, 5)]
                for low, high in ((left, right), (top, bottom))
            )
            for dash in (
                (x[0], top, x[1], top),
                (x[0], bottom, x[1], bottom),
                (left, y[0], left, y[1]),
                (right, y[0], right, y[1]),
            ):
                drawing.line(dash, "white", 2)
    if panel["selected"]:
        frame = cell(*panel["selected"])
        drawing.rectangle(frame, outline="black", width=6)
        drawing.rectangle(
            [*(k + 2 for k in frame[:2]), *(k - 2 for k in frame[2:])], None, "white", 2
        )
    return image


def _strip(colors: bytes, width: int) -> Image.Image:
    """The colors of a scale over squares in two grays."""
    table = Image.frombytes("RGBA", (256, 1), colors).resize(
        (round(SHARP * width), round(SHARP * 12))
    )
    rows, cols = np.indices(table.size[::-1]) // round(SHARP * 6)
    squares = Image.fromarray(np.where((rows + cols) % 2, 156, 227).astype(np.uint8)).convert(
        "RGBA"
    )
    return Image.alpha_composite(squares, table).convert("RGB")
