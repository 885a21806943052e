"""Files to save: a figure with its caption, and arrays."""

from __future__ import annotations

import io
import textwrap

import numpy as np
from matplotlib.figure import Figure

from vitlens import plot
from vitlens.plot.maps import mark
from vitlens.plot.style import DPI, color_bar
from vitlens.widgets.stage import Panel
from vitlens.widgets.subjects import Subject


def captioned(subject: Subject, panel: Panel) -> bytes:
    """A PNG file of a panel with its title, color bar and caption. It does not use pyplot, which is not thread-safe."""
    height, width = subject.grid.image
    across = 6.0 * min(1.5, max(0.7, width / height))
    lines = textwrap.wrap(f"{subject.name}. {panel.words}", int(across * 13.5))
    bar, foot, head = 0.8 if panel.scale else 0.1, 0.25 + 0.2 * len(lines), 0.35  # inches beside, below and above
    wide = across - bar - 0.1
    tall = wide * height / width
    down = tall + foot + head
    figure = Figure(figsize=(across, down), dpi=DPI)
    ax = figure.add_axes((0.1 / across, foot / down, wide / across, tall / down))
    scale = panel.scale and {"cmap": panel.scale.cmap, "limits": (panel.scale.low, panel.scale.high)}
    plot.overlay(
        subject.pixels, panel.values, grid=subject.grid, ax=ax, mode="heat", smooth=panel.smooth, colorbar=False,
        alpha=panel.strength, opacity=panel.opacity, **(scale or {}),
    )  # fmt: skip
    if scale:
        beside = (1 - (bar - 0.12) / across, foot / down, 0.14 / across, tall / down)
        color_bar(ax.images[-1], cax=figure.add_axes(beside))
    mark(ax, panel.selected, subject.grid.patch)
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.set_title(panel.title, fontsize=11)
    ax.axis("off")
    figure.text(0.1 / across, 0.1 / down, "\n".join(lines), fontsize=9, va="bottom", parse_math=False)
    figure.savefig(file := io.BytesIO(), format="png", dpi=150)
    return file.getvalue()


def numbers(**arrays) -> bytes:
    """An .npz file."""
    np.savez_compressed(file := io.BytesIO(), **arrays)
    return file.getvalue()
