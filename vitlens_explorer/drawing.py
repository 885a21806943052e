"""Images for the browser as PNG files, figures with a caption to save, and still images of frames."""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import get_data_path, style
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

from vitlens.plot.alt_text import bundle
from vitlens.plot.painting import enlarge, paint
from vitlens.plot.style import WIDTH, wrap
from vitlens.texts import visible
from vitlens_explorer.panels import Scale

SIDE = 448
"""Largest side in pixels of images that are enlarged by an integer factor."""
_RANDOM = {"linestyle": "--", "linewidth": 1, "color": "gray"}
SCORES = {"color": "#d55e00"}, {"color": "#0b62a4"}, _RANDOM, _RANDOM
"""Lines of deletion, insertion, and both in random orders."""
SHARP = 1.5
"""Pixels of a still image per pixel of its display."""
MARGIN = 10
"""Pixels of the display to the left and to the right of each panel of a still image."""
TITLE, BAR, NOTE = 34, 36, 24
"""Heights in pixels of the display of a panel's title, of its color bar with labels, and of the last line."""
LINE = 17
"""Height of a line of text below a panel, in pixels of the display."""
DASH = 5
"""Length of a dash, and of the gap after it, in pixels of a still image."""


def enlarged_png(pixels: np.ndarray) -> bytes:
    """PNG file of an image (H, W, 3) uint8, enlarged (bicubic) by an integer factor up to `SIDE`."""
    height, width = pixels.shape[:2]
    factor = max(1, SIDE // max(height, width))
    size = width * factor, height * factor
    return png(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def tiles_png(tiles: np.ndarray, scales: list[Scale], side: int) -> bytes:
    """PNG file of maps (rows, cols, r, c) in rows and columns, one square per patch, with a border of one pixel.

    scales: one per map, in reading order. side: largest side of a map in pixels, at least one per patch.
    """
    rows, cols, r, c = tiles.shape
    factor = max(1, (side - 2) // max(r, c))
    height, width = r * factor + 2, c * factor + 2
    page = np.full((rows * height, cols * width, 3), 127, np.uint8)
    for k, scale in enumerate(scales):
        row, col = divmod(k, cols)
        range_ = (scale.high - scale.low) or 1.0
        place = (tiles[row, col] - scale.low) / range_ * 256
        tile = scale.table()[place.clip(0, 255).astype(np.uint8), :3]
        top, left = row * height + 1, col * width + 1
        squares = tile.repeat(factor, 0).repeat(factor, 1)
        page[top : top + height - 2, left : left + width - 2] = squares
    return png(Image.fromarray(page))


def png(image: Image.Image, level: int = 1) -> bytes:
    """PNG file of a PIL image. level: of compression, from 1 (fast) to 9 (small)."""
    file = io.BytesIO()
    image.save(file, format="png", compress_level=level)
    return file.getvalue()


def figure_png(forward, panel, score: dict | None = None) -> bytes:
    """PNG file of the `Panel` of a `Forward`, with title, color bar, caption and the chart of its score. Avoids pyplot
    for thread safety."""
    with style.context(["default", {"text.parse_math": False}]):
        return _figure_png(forward, panel, score)


def _figure_png(forward, panel, score: dict | None) -> bytes:
    from vitlens.plot.glyphs import Page
    from vitlens.plot.on_images import mark, overlay

    height, width = forward.grid.image
    tall = 6.5 * min(1, height / width)  # inches of the image
    if score:
        figure = Page(figsize=(7, tall + 3.6), dpi=150)
        ax, chart = figure.subplots(2, height_ratios=[tall, 3])
    else:
        figure = Page(figsize=(7, tall), dpi=150)
        ax = figure.subplots()
    values, cmap, limits = panel.values, None, None
    if panel.scale:
        cmap, limits = panel.scale.cmap, (panel.scale.low, panel.scale.high)
    if panel.hides:
        values = hide_sinks(panel.sinks, values, panel.scale.low)
    if panel.scale:
        values = panel.scale.drawn(values)
    overlay(
        forward.pixels,
        values,
        grid=forward.grid,
        ax=ax,
        style="heat",
        smooth=panel.smooth,
        alpha=panel.strength,
        opacity=panel.opacity,
        cmap=cmap,
        limits=limits,
    )
    for sink in panel.sinks:
        mark(ax, sink, forward.grid.patch, linestyle="--")
    mark(ax, panel.selected, forward.grid.patch)
    ax.set_title(panel.title, fontsize=11)
    lowest, below = ax, 0.03  # of the caption, as a share of the height of the axes
    if score:
        _draw_score(chart, score)
        lowest, below = chart, 0.25
    caption = textwrap.fill(f"{forward.name}. {panel.words}", 88)
    lowest.text(
        0, -below, caption, fontsize=9, va="top", transform=lowest.transAxes, parse_math=False
    )
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    return file.getvalue()


def _draw_score(chart, score: dict) -> None:
    """Draw the curves of deletion and insertion, of the map and in random orders."""
    percent = 100 * np.array(score["shares"])
    for (name, curve), line in zip(score["curves"].items(), SCORES, strict=True):
        chart.plot(percent, curve, label=name, **line)
    chart.set_title(score["title"], fontsize=11)
    chart.set(xlabel="patches covered or shown (%)", ylabel=score["scale"])
    chart.legend(fontsize=8)


def hide_sinks(sinks: Sequence[tuple[int, int]], values: np.ndarray, low: float) -> np.ndarray:
    """A map (rows, cols, …) whose sinks have the lowest color of a scale that begins at `low`."""
    values = values.copy()
    for row, col in sinks:
        values[row, col] = max(low, 0)
    return values


def paint_panel(panel: dict, image: Image.Image) -> np.ndarray:
    """(H, W, 3) levels 0…255: an image under the map of a panel of a frame, as the front end paints it."""
    if not panel["strength"]:
        return np.asarray(image.convert("RGB"), float)
    values = np.frombuffer(panel["values"], "<f4").reshape(panel["rows"], panel["cols"], -1)
    scale = panel["scale"]
    if panel.get("hides"):
        values = hide_sinks(panel["sinks"], values, scale["low"])
    if scale and scale["uniform"] is not None:
        values = np.full_like(values, scale["uniform"])
    down, across = panel["cell"]
    height = round(panel["rows"] * down * image.height)
    width = round(panel["cols"] * across * image.width)
    colors = enlarge(values, (height, width), panel["smooth"])[: image.height, : image.width]
    opacity = panel["strength"]
    if scale:
        range_ = scale["high"] - scale["low"] or 1
        place = (colors[..., 0] - scale["low"]) / range_ * 255
        table = np.frombuffer(scale["colors"], np.uint8).reshape(256, 4) / 255
        rgba = table[place.clip(0, 255).round().astype(int)]
        colors, opacity = rgba[..., :3], rgba[..., 3:]
    return paint(np.asarray(image.convert("L")), 255 * colors, opacity)


@dataclass(frozen=True)
class _Text:
    """Words at (left, top) in pixels of the display. anchor: Pillow's, such as "la" for left."""

    left: float
    top: float
    words: str
    size: int = 12
    anchor: str = "la"


def still(
    frame: dict,
    pictures: dict[str, bytes],
    steps: Sequence[str] = (),
    note: str = "A still image. Run the cell for the interactive one.",
) -> dict[str, str]:
    """A frame as an output for readers without a kernel. Its alt text is the titles and captions of the panels.

    Panels are side by side where they fit. steps: sentences of the tour, which are in the place of the next panel.
    note: sentence below them.
    Drawn without Matplotlib's figures, whose import takes half a second.
    """
    texts, images = [], []
    left = top = bottom = across = 0
    for panel in frame["panels"]:
        picture = Image.open(io.BytesIO(pictures[panel["picture"]]))
        width = WIDTH if picture.width > 1.8 * picture.height else WIDTH // 2
        if left + width > WIDTH:
            left, top = 0, bottom
        below = _lay_out(panel, picture, (left, top, width), texts, images)
        left += width
        bottom = max(bottom, below)
        across = max(across, left)
    if steps:
        numbered = [f"{number}. {step}" for number, step in enumerate(steps, 1)]
        bottom = max(bottom, _lay_out_steps(numbered, (left, top), texts))
        across = WIDTH
    texts.append(_Text(MARGIN, bottom, note, 11))
    size = across, bottom + NOTE
    page = _draw_page(size, images, texts)
    sharp = io.BytesIO()
    page.save(sharp, "JPEG", quality=75, optimize=True)
    alt = " ".join([f"{panel['title']}. {panel['words']}" for panel in frame["panels"]])
    if steps:
        alt = " ".join(["The tour in its steps:", *numbered])
    return bundle(png(page.resize(size)), alt, across, sharp.getvalue())


def _lay_out(panel: dict, picture: Image.Image, place, texts: list, images: list) -> int:
    """Add the texts and images of a panel at (left, top, width), and return where it ends below."""
    left, top, width = place
    left, width = left + MARGIN, width - 2 * MARGIN
    size = width, round(width * picture.height / picture.width)
    texts.append(_Text(left, top + 10, panel["title"], 15))
    images.append((_paint_marked(panel, picture, size), (left, top + TITLE)))
    below = top + TITLE + 8 + size[1]
    if panel["ends"]:
        low, high = panel["ends"]
        images.append((_color_bar(panel["scale"]["colors"], width), (left, below)))
        texts.append(_Text(left, below + 15, low))
        texts.append(_Text(left + width, below + 15, high, anchor="ra"))
        below += BAR
    words = wrap(panel["words"], width, 6.4)
    texts.append(_Text(left, below, words))
    return below + LINE * len(words.splitlines()) + 12


def _lay_out_steps(steps: Sequence[str], place: tuple[int, int], texts: list) -> int:
    """Add sentences below each other from (left, top) to the right edge, and return where they end."""
    left, top = place
    left += MARGIN
    texts.append(_Text(left, top + 10, "The tour", 15))
    below = top + TITLE
    for step in steps:
        words = wrap(step, WIDTH - left - MARGIN, 6.4)
        texts.append(_Text(left, below, words))
        below += LINE * len(words.splitlines()) + 12
    return below


def _sharp(*lengths: float) -> tuple[int, ...]:
    """Pixels of a still image for lengths in pixels of its display."""
    return tuple(round(SHARP * length) for length in lengths)


def _draw_page(size: tuple[int, int], images: list, texts: list[_Text]) -> Image.Image:
    page = Image.new("RGB", _sharp(*size), "white")
    for image, place in images:
        page.paste(image, _sharp(*place))
    drawing = ImageDraw.Draw(page)
    for text in texts:
        (letters,) = _sharp(text.size)
        path, words = _drawable(text.words)
        font = ImageFont.truetype(path, letters)
        place = SHARP * text.left, SHARP * text.top
        drawing.text(place, words, "#262626", font, text.anchor, spacing=SHARP * 4)
    return page


def _drawable(words: str) -> tuple[str, str]:
    """Path of a font for words, and the words in letters that it has."""
    path = f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf"
    words = visible(words)
    if _letters(path).issuperset(map(ord, words.replace("\n", ""))):
        return path, words
    from vitlens.plot.glyphs import font_file

    return font_file(words)


@functools.cache
def _letters(path: str) -> frozenset[int]:
    """The characters of a font."""
    return frozenset(FT2Font(path).get_charmap())


def _paint_marked(panel: dict, picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The painted image of a panel, enlarged, with a frame around its selected cell and dashed ones around sinks."""
    width, height = _sharp(*size)
    pixels = paint_panel(panel, picture).round().astype(np.uint8)
    image = Image.fromarray(pixels).resize((width, height))
    drawing = ImageDraw.Draw(image)
    down, across = panel["cell"][0] * height, panel["cell"][1] * width

    def box(row: int, col: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of a cell."""
        return (
            round(col * across),
            round(row * down),
            round((col + 1) * across),
            round((row + 1) * down),
        )

    for sink in panel.get("sinks", ()):
        _draw_dashed(drawing, box(*sink))
    if panel["selected"]:
        left, top, right, bottom = box(*panel["selected"])
        drawing.rectangle((left, top, right, bottom), outline="black", width=6)
        inner = left + 2, top + 2, right - 2, bottom - 2
        drawing.rectangle(inner, outline="white", width=2)
    return image


def _draw_dashed(drawing: ImageDraw.ImageDraw, box: tuple[int, int, int, int]) -> None:
    """Draw a dashed white frame."""
    left, top, right, bottom = box
    for start in range(0, max(right - left, bottom - top), 2 * DASH):
        x1, x2 = min(left + start, right), min(left + start + DASH, right)
        y1, y2 = min(top + start, bottom), min(top + start + DASH, bottom)
        drawing.line((x1, top, x2, top), "white", 2)
        drawing.line((x1, bottom, x2, bottom), "white", 2)
        drawing.line((left, y1, left, y2), "white", 2)
        drawing.line((right, y1, right, y2), "white", 2)


def _color_bar(colors: bytes, width: int) -> Image.Image:
    """The colors of a scale over squares in two grays."""
    bar = Image.frombytes("RGBA", (256, 1), colors).resize(_sharp(width, 12))
    (side,) = _sharp(6)
    rows, cols = np.indices((bar.height, bar.width)) // side
    levels = np.where((rows + cols) % 2, 156, 227).astype(np.uint8)
    squares = Image.fromarray(levels).convert("RGBA")
    return Image.alpha_composite(squares, bar).convert("RGB")
