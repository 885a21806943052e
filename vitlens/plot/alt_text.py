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

    heads = [text for part in figure.findobj(FigureBase) for text in _words(part.texts)]
    panels = [
        _panel(ax) for ax in figure.axes if ax.get_visible() and ax.get_label() != "<colorbar>"
    ]
    sentences = (
        each[0].upper() + each[1:].rstrip(".") + "."
        for each in dict.fromkeys([*heads, *panels])
        if each
    )
    return (
        figure.get_label()
        or textwrap.shorten(" ".join(sentences), LONGEST, placeholder=" …")
        or "An empty figure."
    )


def map_words(values: np.ndarray) -> str:
    """Words for a map (rows, cols): its shape, its range, and the position of its largest value."""
    rows, cols = values.shape
    if not np.isfinite(values).any():
        return f"map of {rows} × {cols} missing values"
    place = "row {}, column {}".format(*np.unravel_index(np.nanargmax(values), values.shape))
    return f"map of {rows} × {cols} values {_span(values)}, the largest in {place}"


def _panel(ax) -> str:
    """Words for one Axes."""
    titles = ", ".join(
        dict.fromkeys(_words([ax.title, ax._left_title, ax._right_title, *ax.texts]))
    )
    content = [label for each in ax.images if not (label := str(each.get_label())).startswith("_")]
    if not content:
        arrays = (each.get_array() for each in ax.images)
        maps = [np.ma.filled(each.astype(float), np.nan) for each in arrays if each.ndim == 2]
        content = [*map(map_words, maps)]
        if len(maps) > 2:
            content = [f"{len(maps)} maps {_span(np.concatenate([each.ravel() for each in maps]))}"]
        content += [*_curves(ax)]
    content = content or ["image"] * bool(ax.images and not titles)
    axes = " against ".join(_words([ax.yaxis.label, ax.xaxis.label]))
    return ". ".join(filter(None, [titles, ": ".join(filter(None, [axes, ", ".join(content)]))]))


def _curves(ax) -> Iterator[str]:
    """Words for each curve of an Axes with its first and its last value, for named rows, bars and other points."""
    names = [label.get_text() for label in ax.get_yticklabels()]
    for line in ax.lines:
        x, y = (np.asarray(values, float).ravel() for values in line.get_data(orig=True))
        label = str(line.get_label())
        label = label if label[:1].isalnum() else ""
        if len(x) == len(names) and any(each[:1].isalpha() for each in names):
            yield ", ".join(f"{name} {number(value)}" for name, value in zip(names, x, strict=True))
            return  # the other lines are ends of intervals
        if len(y) > 2 or (label and len(y)):
            dots = line.get_linestyle() == "None"
            yield (
                f"{label or 'curve'} from {number(y[0])} to {number(y[-1])}"
                if not dots
                else _points(label, y)
            )
    for points in ax.collections:
        if (
            hasattr(points, "get_sizes")
            and len(y := np.asarray(points.get_offsets(), float)[:, 1]) > 2
        ):
            yield _points("", y)
    for bars in ax.containers:
        if hasattr(bars, "datavalues"):
            yield f"{len(bars.datavalues)} bars {_span(np.asarray(bars.datavalues, float))}"


def _points(label: str, y: np.ndarray) -> str:
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
    source = f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
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
        self.draw = formatters["image/png"].pop(
            Figure, self.draw
        )  # otherwise the figure would be drawn twice
        others = any(Figure in each.type_printers for each in formatters.values())  # such as SVG
        result = None if others or self.draw is None else self.draw(figure)
        if result is None:
            return None
        png, size = result if isinstance(result, tuple) else (result, {})
        png = base64.b64decode(png) if isinstance(png, str) else png
        width = size.get("width") or int.from_bytes(png[16:20], "big")
        return bundle(png, describe(figure), width), {"image/png": size}


if shell := "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
    shell.display_formatter.mimebundle_formatter.for_type_by_name(
        "matplotlib.figure", "Figure", Output()
    )
