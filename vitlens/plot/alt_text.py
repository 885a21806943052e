"""Alt text of figures, and outputs of notebooks with it."""

from __future__ import annotations

import base64
import html
import sys
import textwrap
from collections.abc import Iterable, Iterator

import numpy as np

from vitlens.formatting import number

LONGEST = 700
"""Largest number of letters of a description."""


def describe(figure) -> str:
    """Alt text of a figure: the label that `figure.set_label` gave, or its headings, axes, curves and values.

    The label of an image in an Axes, as `overlay` sets it, describes the image.

    >>> vitlens.plot.alt_text.describe(vitlens.plot.tiles({"ramp": np.arange(6).reshape(2, 3)}))
    'Ramp. map of 2 × 3 values from 0 to 5, the largest in row 1, column 2.'
    """
    from matplotlib.figure import FigureBase

    label = figure.get_label()
    if label:
        return label
    texts = []
    for part in figure.findobj(FigureBase):
        texts += _words(part.texts)
    for ax in figure.axes:
        if ax.get_visible() and ax.get_label() != "<colorbar>":
            texts.append(_describe_panel(ax))
    texts = dict.fromkeys(text for text in texts if text)  # each one once
    sentences = " ".join(_sentence(text) for text in texts)
    return textwrap.shorten(sentences, LONGEST, placeholder=" …") or "An empty figure."


def _sentence(text: str) -> str:
    """Text with a capital letter and a full stop."""
    first, rest = text[0], text[1:]
    return first.upper() + rest.rstrip(".") + "."


def map_words(values: np.ndarray) -> str:
    """Words for a map (rows, cols): its shape, its range, and the position of its largest value."""
    rows, cols = values.shape
    if not np.isfinite(values).any():
        return f"map of {rows} × {cols} missing values"
    row, col = np.unravel_index(np.nanargmax(values), values.shape)
    return f"map of {rows} × {cols} values {_span(values)}, the largest in row {row}, column {col}"


def _describe_panel(ax) -> str:
    """Words for one Axes."""
    texts = [ax.title, ax._left_title, ax._right_title, *ax.texts]
    titles = ", ".join(dict.fromkeys(_words(texts)))
    labels = [str(image.get_label()) for image in ax.images]
    content = [label for label in labels if not label.startswith("_")]
    if not content:
        content = [*_describe_maps(ax), *_describe_curves(ax)]
    if not content and not titles and ax.images:
        content = ["image"]
    axes = " against ".join(_words([ax.yaxis.label, ax.xaxis.label]))
    body = _join_texts(": ", axes, ", ".join(content))
    return _join_texts(". ", titles, body)


def _join_texts(separator: str, *texts: str) -> str:
    """The texts that are not empty, joined."""
    return separator.join(text for text in texts if text)


def _describe_maps(ax) -> list[str]:
    """Words for each map of an Axes, or for all of them if they are more than two."""
    maps = []
    for image in ax.images:
        values = image.get_array()
        if values.ndim == 2:
            maps.append(np.ma.filled(values.astype(float), np.nan))
    if len(maps) <= 2:
        return [map_words(values) for values in maps]
    together = np.concatenate([values.ravel() for values in maps])
    return [f"{len(maps)} maps {_span(together)}"]


def _describe_curves(ax) -> Iterator[str]:
    """Words for each curve of an Axes with its first and its last value, for named rows, bars and other points."""
    names = [label.get_text() for label in ax.get_yticklabels()]
    has_named_rows = any(name[:1].isalpha() for name in names)
    for line in ax.lines:
        x, y = line.get_data(orig=True)
        x = np.asarray(x, float).ravel()
        y = np.asarray(y, float).ravel()
        if has_named_rows and len(x) == len(names):
            pairs = zip(names, x, strict=True)
            yield ", ".join(f"{name} {number(value)}" for name, value in pairs)
            return  # the other lines are ends of intervals
        label = str(line.get_label())
        if not label[:1].isalnum():
            label = ""
        if len(y) <= 2 and not (label and len(y)):
            continue
        if line.get_linestyle() == "None":
            yield _describe_points(label, y)
        else:
            yield f"{label or 'curve'} from {number(y[0])} to {number(y[-1])}"
    for points in ax.collections:
        if hasattr(points, "get_sizes"):
            y = np.asarray(points.get_offsets(), float)[:, 1]
            if len(y) > 2:
                yield _describe_points("", y)
    for bars in ax.containers:
        if hasattr(bars, "datavalues"):
            heights = np.asarray(bars.datavalues, float)
            yield f"{len(heights)} bars {_span(heights)}"


def _describe_points(label: str, y: np.ndarray) -> str:
    return f"{label} {len(y)} points {_span(y)}".strip()


def _words(texts: Iterable) -> Iterator[str]:
    """Texts with letters, in one line each."""
    lines = (" ".join(text.get_text().split()) for text in texts if text.get_visible())
    return (line for line in lines if any(letter.isalpha() for letter in line))


def _span(values: np.ndarray) -> str:
    return f"from {number(np.nanmin(values))} to {number(np.nanmax(values))}"


def image(file: bytes, alt: str, width: int) -> str:
    """HTML of a PNG, JPEG or WebP file, `width` pixels wide, with its alt text.

    nbconvert, repository pages and JupyterLab prefer HTML to an image of the same output, and only HTML has alt text in
    all of them.
    """
    kind = {b"\x89PNG": "png", b"RIFF": "webp"}.get(file[:4], "jpeg")
    text = base64.b64encode(file).decode()
    source = f"data:image/{kind};base64,{text}"
    return f'<img alt="{html.escape(alt)}" width="{width}" src="{source}">'


def bundle(png: bytes, alt: str, width: int, sharp: bytes = b"") -> dict[str, str]:
    """Output of a notebook with the PNG, HTML and, for text alone, the alt text. sharp: another file for the HTML.

    The PNG is for exports to LaTeX and PDF, which leave HTML out.
    """
    return {
        "text/plain": alt,
        "text/html": image(sharp or png, alt, width),
        "image/png": base64.b64encode(png).decode(),
    }


class Output:
    """Formatter of figures in IPython: the PNG of the inline backend's formatter, and HTML with the alt text."""

    draw = None

    def __call__(self, figure):
        from IPython import get_ipython
        from matplotlib.figure import Figure

        formatters = get_ipython().display_formatter.formatters
        # without `pop` the figure would be drawn twice
        self.draw = formatters["image/png"].pop(Figure, self.draw)
        if self.draw is None:
            return None
        if any(Figure in formatter.type_printers for formatter in formatters.values()):
            return None  # another format was chosen, such as SVG
        png = self.draw(figure)
        if png is None:
            return None
        size = {}
        if isinstance(png, tuple):
            png, size = png
        if isinstance(png, str):
            png = base64.b64decode(png)
        width_in_file = int.from_bytes(png[16:20], "big")
        width = size.get("width") or width_in_file
        return bundle(png, describe(figure), width), {"image/png": size}


if "IPython" in sys.modules:
    shell = sys.modules["IPython"].get_ipython()
    if shell:
        bundles = shell.display_formatter.mimebundle_formatter
        bundles.for_type_by_name("matplotlib.figure", "Figure", Output())
