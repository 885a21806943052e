"""What all figures share: the look, pages measured in pixels, color scales, and the check of what comes in."""

from __future__ import annotations

import contextlib

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

DPI = 100
WIDTH = 900
"""Pixels across a notebook: no page is wider."""

INK = "0.15"
STYLE = {
    "figure.dpi": DPI,
    "font.size": 9,
    "axes.titlesize": 11,
    "axes.titlepad": 9,
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
}


def styled(ax: plt.Axes | None = None):
    """Context in which a figure is drawn in `STYLE` on Matplotlib's defaults; an `ax` that exists keeps its own."""
    if ax is not None:
        return contextlib.nullcontext()
    plt.draw_if_interactive()  # loads a notebook's backend, whose settings the end of the context would undo
    return plt.style.context(["default", STYLE])


def page(width: float, height: float) -> plt.Figure:
    """An empty figure of so many pixels. Made by pyplot, so that notebooks can show it, and at once let go by it."""
    figure = plt.figure(figsize=(width / DPI, height / DPI))
    plt.close(figure)
    return figure


def place(figure: plt.Figure, x: float, y: float, width: float, height: float) -> plt.Axes:
    """Bare axes at so many pixels from the left and the top of a page."""
    across, down = figure.get_size_inches() * DPI
    ax = figure.add_axes((x / across, 1 - (y + height) / down, width / across, height / down), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return ax


def panel(figure: plt.Figure, x: float, y: float, width: float, height: float, title: str) -> plt.Axes:
    """Axes for a chart, so many pixels from the left and the top of a page, with a title and faint lines across."""
    across, down = figure.get_size_inches() * DPI
    ax = figure.add_axes((x / across, 1 - (y + height) / down, width / across, height / down))
    ax.set_title(title, size=10)
    ax.grid(axis="y", color="0.92", linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def write(figure: plt.Figure, x: float, y: float, text: str, **kwargs) -> plt.Text:
    """Text at so many pixels from the left and the top of a page."""
    across, down = figure.get_size_inches() * DPI
    return figure.text(x / across, 1 - y / down, text, parse_math=False, **kwargs)


def show(ax: plt.Axes, picture, x: float, y: float, width: float, height: float, **kwargs):
    """A picture, or the values of a map, that fills a box of the axes; cells stay cells."""
    box = (x, x + width, y + height, y)
    return ax.imshow(picture, extent=box, aspect="auto", interpolation="nearest", **kwargs)


def bar(figure: plt.Figure, shown, x: float, y: float, width: float, height: float, size: float = 8.5) -> None:
    """The colors of a picture in a box of a page, with their ends, and zero where it lies between them, beside it."""
    low, high = shown.get_clim()
    ends = [low, 0, high] if low < 0 < high else [low, high]
    cax, lying = place(figure, x, y, width, height), width > height
    key = figure.colorbar(shown, cax=cax, orientation="horizontal" if lying else "vertical")
    key.set_ticks(ends, labels=[f"{end:.2g}".replace("-", "−") for end in ends])
    key.ax.tick_params(labelsize=size)
    key.outline.set_visible(False)


def color_map(name: str) -> mpl.colors.Colormap:
    """Matplotlib's color map of that name, with gray for what is not a number."""
    return mpl.colormaps[name].with_extremes(bad="0.65")


def colors(values: np.ndarray, cmap: str | None = None, signed: bool | None = None) -> dict:
    """Color map and limits that the data ask for: 0…max in viridis, ±max in red and blue where some are negative."""
    finite = values[np.isfinite(values)]
    high = np.abs(finite).max(initial=0) or 1.0
    signed = finite.min(initial=0) < 0 if signed is None else signed
    return {
        "cmap": color_map(cmap or ("RdBu_r" if signed else "viridis")),
        "vmin": -high if signed else 0.0,
        "vmax": high,
    }


def array(values, ndim: int | tuple[int, ...], wanted: str, remedy: str) -> np.ndarray:
    """`values`, an array or a tensor on any device, as floats; ValueError unless it has `ndim` axes, none empty."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    result = np.asarray(values, dtype=float)
    if result.ndim not in np.atleast_1d(ndim) or result.size == 0:
        raise ValueError(f"{wanted} was wanted, but an array of shape {result.shape} came; {remedy}.")
    return result
