"""Style, page sizes, color bars and input checks of all figures."""

from __future__ import annotations

import contextlib
import functools
import io
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitlens import files
from vitlens.formatting import with_minus
from vitlens.plot import alt_text  # noqa: F401  (in IPython, figures get alt text)
from vitlens.plot.scales import stretched_words
from vitlens.texts import shown

if TYPE_CHECKING:
    import matplotlib.pyplot as plt

DPI = 100
WIDTH = 900
"""Width of a notebook in pixels, and largest width of a page."""

SERIES = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#56b4e9", "#949494")
"""Colors of curves, safe for the color-blind: seaborn's "colorblind" without the two lightest."""

MARGIN = 0.08
"""Inches around axes and at the edges of a page."""

INK = "0.15"
DIM = 0.35
"""Level (`shade`) of the gray of notes."""
GRAY = str(DIM)
STYLE = {
    "figure.dpi": DPI,
    "font.size": 9,
    "axes.titlesize": 11,
    "axes.titlepad": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.labelpad": 6,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": "0.5",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "text.parse_math": False,  # names with dollar signs are not formulas
}
"""Settings of Matplotlib for all figures, as `plt.style.context` takes them."""


SVG = {"svg.fonttype": "none", "svg.hashsalt": files.MARK}
"""Settings of SVG files: text as text, which programs can edit, and repeatable ids."""


def use_style(ax: plt.Axes | None = None):
    """Context that draws in `STYLE` on Matplotlib's defaults. An `ax` keeps its style, and gets names as they are."""
    if ax is not None:
        return _literal_names(ax)
    import matplotlib.pyplot as plt  # slow, and not needed for the colors of a widget

    plt.draw_if_interactive()  # loads a notebook's backend, whose settings the end of the context would undo
    return plt.style.context(["default", STYLE | _fonts()])


@contextlib.contextmanager
def _literal_names(ax: plt.Axes) -> Iterator[None]:
    """Context in which new texts of an `ax` are no formulas. At its end, invisible characters become escapes."""
    import matplotlib.pyplot as plt

    from vitlens.plot.glyphs import escape_texts

    with plt.rc_context({"text.parse_math": False}):
        yield
    escape_texts(ax)


@functools.cache
def _fonts() -> dict[str, list[str]]:
    """The setting of fonts for further scripts, if any are installed."""
    from vitlens.plot.glyphs import installed_fallbacks

    fallbacks = installed_fallbacks()
    return {"font.family": ["DejaVu Sans", *fallbacks]} if fallbacks else {}


def page(
    width: float, height: float, layout: str = "constrained", margin: float = MARGIN
) -> plt.Figure:
    """An empty figure of `width` × `height` pixels. Notebooks show it, and pyplot does not keep it."""
    import matplotlib.pyplot as plt

    from vitlens.plot.glyphs import Page

    size = width / DPI, height / DPI
    figure = plt.figure(figsize=size, layout=layout, FigureClass=Page)
    plt.close(figure)
    figure.get_layout_engine().set(w_pad=margin, h_pad=margin)
    return figure


def new_axes(width: float, height: float) -> plt.Axes:
    """Axes in a figure of pyplot of `width` × `height` inches, which pyplot keeps."""
    import matplotlib.pyplot as plt

    from vitlens.plot.glyphs import Page

    return plt.figure(figsize=(width, height), layout="constrained", FigureClass=Page).subplots()


def png(figure: plt.Figure, dpi: float = DPI) -> bytes:
    """PNG file of a figure, as `figure_file`."""
    return figure_file(figure, "png", dpi)


def figure_file(figure: plt.Figure, format: str, dpi: float = DPI) -> bytes:
    """File of a figure in one of `vitlens.files.FORMATS`, whatever Matplotlib's settings choose for files.

    Equal figures give equal files, without a date, with the mark by which `vitlens.files.is_figure` knows them. PDF
    files embed TrueType fonts. SVG files hold text as text, in DejaVu Sans. dpi: resolution of PNG files, and largest
    resolution of the images in the others. Images of fewer pixels keep their pixels. The layout of the figure is fixed
    by a PDF or SVG file.
    """
    import matplotlib.pyplot as plt

    file = io.BytesIO()
    with use_style():
        if format == "png":
            figure.savefig(file, format="png", dpi=dpi, metadata={"Software": files.MARK})
            return file.getvalue()
        date = "CreationDate" if format == "pdf" else "Date"
        metadata = {"Creator": files.UNSEALED, date: None}
        _fix_layout(figure)
        with plt.rc_context(SVG), _own_pixels(figure, dpi):
            figure.savefig(file, format=format, dpi=dpi, metadata=metadata)
    return files.seal(file.getvalue())


def _fix_layout(figure: plt.Figure) -> None:
    """Lay a figure out for good, without the rounding errors of layouts, which change from run to run."""
    from matplotlib.figure import FigureBase

    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for part in figure.findobj(FigureBase):
        for text in part.texts:
            text.set_position(np.round(text.get_position(), 6))
        if part is not figure:
            part.bbox_relative.set_points(part.bbox_relative.get_points().round(6))
    for ax in figure.axes:
        place = ax.get_position(original=True)
        place.set_points(place.get_points().round(6))
        ax.set_position(place)


@contextlib.contextmanager
def _own_pixels(figure: plt.Figure, dpi: float) -> Iterator[None]:
    """Context in which a file holds the pixels of images, unless they are more than are drawn at this resolution."""
    from matplotlib.image import AxesImage

    before = {}
    for image in figure.findobj(AxesImage):
        height, width = image.get_array().shape[:2]
        box = image.get_window_extent()
        scale = dpi / figure.dpi
        if width <= scale * box.width and height <= scale * box.height:
            before[image] = image.get_interpolation()
            image.set_interpolation("none")
    try:
        yield
    finally:
        for image, interpolation in before.items():
            image.set_interpolation(interpolation)


@contextlib.contextmanager
def canvas(
    ax: plt.Axes | None, width: float, height: float
) -> Iterator[tuple[plt.Axes, plt.Axes | plt.Figure]]:
    """The axes to draw on, and the result of the plot function: the argument `ax`, or a new page with axes."""
    with use_style(ax):
        if ax is not None:
            yield ax, ax
        else:
            figure = page(width, height)
            yield figure.subplots(), figure


def charts(
    titles: Sequence[str], width: float, height: float, **options
) -> tuple[plt.Figure, Sequence[plt.Axes]]:
    """A page with a line of charts, each under its title. options: those of `Figure.subplots`."""
    figure = page(width, height)
    axes = figure.subplots(1, len(titles), squeeze=False, **options)[0]
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, size=10)
        rule(ax)
    return figure, axes


def frames(lines: int, cols: int, width: float, height: float) -> tuple[plt.Figure, np.ndarray]:
    """A page of `width` × `height` pixels with lines of `cols` axes for images, without frames and ticks."""
    figure = page(width, height, "compressed", MARGIN / 2)
    axes = figure.subplots(lines, cols, squeeze=False)
    for ax in axes.flat:
        bare(ax)
    return figure, axes


def wrap(text: str, width: float, letter: float = 7.5) -> str:
    """Text in lines of at most `width` pixels, with `letter` pixels per letter on average. Its line breaks stay."""
    letters = int(width / letter)
    lines = [textwrap.fill(line, letters, break_on_hyphens=False) for line in text.splitlines()]
    return "\n".join(lines)


def face(ax: plt.Axes) -> np.ndarray:
    """The color (3,) behind axes: their own, over that of their figure and white if they are translucent."""
    from matplotlib.colors import to_rgba

    below = np.ones(3)
    for part in (ax.figure, ax):
        *color, opacity = to_rgba(part.get_facecolor())
        below = opacity * np.array(color) + (1 - opacity) * below
    return below


def shade(ax: plt.Axes, level: float) -> tuple[float, ...]:
    """A gray between ink (0), black on bright axes and white on dark ones, and the color behind the axes (1)."""
    behind = face(ax)
    ink = 0.0 if behind.mean() > 0.5 else 1.0
    return tuple(float(part) for part in ink + (behind - ink) * level)


def bare(ax: plt.Axes) -> None:
    """Remove the frame and the ticks."""
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def rule(ax: plt.Axes, axis: str = "y") -> None:
    """Draw faint grid lines behind everything else."""
    ax.grid(axis=axis, color=shade(ax, 0.92), linewidth=0.8)
    ax.set_axisbelow(True)


def reference(ax: plt.Axes) -> dict:
    """Look of a reference line: arguments of Matplotlib's lines."""
    return {"color": shade(ax, DIM), "linestyle": "--", "linewidth": 1, "zorder": 1}


def series_name(name: object) -> str:
    """A name for a legend. Matplotlib leaves out names that begin with an underscore."""
    text = shown(name)
    return f" {text}" if text.startswith("_") else text


def name_above(ax: plt.Axes, text: str) -> None:
    ax.set_title(text, loc="left", size=9.5, pad=5, linespacing=1.1, parse_math=False)


def write_below(ax: plt.Axes, text: str, size: float = 8.5) -> None:
    """Write lines of text below an image."""
    if text:
        ax.annotate(
            text,
            (0, 0),
            (0, -4),
            xycoords="axes fraction",
            textcoords="offset points",
            va="top",
            size=size,
            color=shade(ax, DIM),
            annotation_clip=False,
            parse_math=False,
        )


def heading(figure: plt.Figure, text: str) -> None:
    figure.suptitle(text, x=MARGIN / figure.get_figwidth(), ha="left", size=11, parse_math=False)


def write_note(figure: plt.Figure, text: str) -> None:
    """Write lines of text at the foot of a page."""
    figure.supxlabel(
        text, x=MARGIN / figure.get_figwidth(), ha="left", size=8.5, color=GRAY, parse_math=False
    )


def beside(ax: plt.Axes, width: float) -> plt.Axes:
    """Axes for a color bar of the same height, to the right of axes of about `width` pixels."""
    return ax.inset_axes((1 + 10 / width, 0, 12 / width, 1))


def color_bar(shown, note: str = "", **where):
    """The color bar of an image, on a checkerboard if colors are not opaque.

    Its label is `note`, or the factor by which the colors of the image are stretched. where: arguments of `colorbar`.
    """
    low, high = map(float, shown.get_clim())  # limits may be tensors
    note = note or stretched_words(low, high)
    if note:
        where = {"label": note} | where
    around = where.get("cax", where.get("ax"))
    figure = np.ravel(around)[0].figure
    key = figure.colorbar(shown, **where)
    key.outline.set_visible(False)
    if shown.cmap(range(shown.cmap.N))[:, 3].min() < 1:
        squares = np.indices((30, 2) if key.orientation == "vertical" else (2, 30)).sum(0) % 2
        y, x = (np.linspace(0, 1, count + 1) for count in squares.shape)
        key.ax.pcolormesh(
            x, y, squares, cmap="gray", vmin=-2.2, vmax=1.4, zorder=0, transform=key.ax.transAxes
        )
    return key


def scale_bar(shown, size: float = 8.5, **where):
    """The color bar of an image with its two ends, and zero if it is between them. where: those of `color_bar`."""
    low, high = map(float, shown.get_clim())  # limits may be tensors
    ends = [low, 0, high] if low < 0 < high else [low, high]
    key = color_bar(shown, **where)
    key.set_ticks(ends, labels=[with_minus(f"{float(f'{end:.2g}'):g}") for end in ends])
    key.ax.tick_params(labelsize=size)
    for label in (key.ax.xaxis.label, key.ax.yaxis.label):
        label.set_size(size)


def palette(count: int) -> Sequence:
    """Colors of `count` curves: `SERIES`, or evenly spaced hues for more curves."""
    import seaborn as sns

    return SERIES[:count] if count <= len(SERIES) else sns.color_palette("husl", count)


def array(
    values,
    ndim: int | tuple[int, ...],
    expected: str,
    source: str = "vitlens.attention.rollout(attn)[0]",
) -> np.ndarray:
    """`values`, an array or a tensor on any device, as floats. Raises ValueError for another number of axes.

    source: a call that gives such values, for messages about captures, models, summaries and other objects.
    """
    kind = type(values)
    is_number = hasattr(values, "__array__") or isinstance(values, int | float | list | tuple)
    if not is_number:
        raise ValueError(
            f"Expected {expected[0].lower()}{expected[1:]}, got {kind.__name__}. Give an array, such as {source}."
        )
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    try:
        result = np.asarray(values, dtype=float)
    except TypeError as error:
        raise ValueError(
            f"Expected {expected[0].lower()}{expected[1:]}, got {type(values).__name__}."
        ) from error
    if result.ndim not in np.atleast_1d(ndim) or result.size == 0:
        hint = ""
        if result.ndim == 1 and expected.startswith("A map"):
            hint = " `attn.grid.image_map(values)` makes a map from values of all tokens."
        raise ValueError(
            f"Expected {expected[0].lower()}{expected[1:]}, got shape {result.shape}.{hint}"
        )
    return result
