"""How far to trust a map: insertion and deletion beside chance, and what becomes of maps as weights turn random."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from vitlens.plot.naming import at_the_right
from vitlens.plot.scaling import SERIES
from vitlens.plot.style import array, page, panel, styled, write

TITLES = ("Deletion: low is good", "Insertion: high is good")


def insertion_deletion(curves: Mapping[str, tuple], control: tuple, *, shares, score: str = "") -> plt.Figure:
    """The score of a class while patches are covered (deletion) and shown (insertion) in the order of each map.

    curves: by name of the map, (deletion (S,), insertion (S,)); at most eight. control: (orders, S) of both, for random
    orders: a band from the lowest to the highest, and their mean dashed. shares: (S,) of the patches, 0 to 1. score:
    what it is, for the axis. Raises ValueError for other shapes.
    """
    if not 0 < len(curves) <= len(SERIES):
        raise ValueError(f"One to {len(SERIES)} maps fit into the figure, but {len(curves)} came.")
    shares = array(shares, 1, "Shares of shape (S,)", "give those at which the curves were read")
    fits = "give as many values as shares"
    lines = {
        name: [_as_long(array(part, 1, f"The curve of {name}, shape (S,)", fits), shares) for part in both]
        for name, both in curves.items()
    }
    chance = [_as_long(array(part, 2, "Random orders of shape (orders, S)", fits), shares) for part in control]
    with styled():
        figure = _page(900, 310)
        axes = [panel(figure, 56 + 350 * k, 38, 300, 214, title) for k, title in enumerate(TITLES)]
        every = np.concatenate([part.ravel() for both in (*lines.values(), chance) for part in both])
        lowest, highest = min(0.0, 1.05 * every.min()), max(0.0, 1.05 * every.max())  # logits may lie below 0
        for k, ax in enumerate(axes):
            ax.fill_between(shares, chance[k].min(0), chance[k].max(0), color="0.9", lw=0)
            ax.plot(shares, chance[k].mean(0), color="0.5", lw=1.2, ls=(0, (4, 3)), label="random orders")
            for color, (name, both) in zip(SERIES, lines.items(), strict=False):
                ax.plot(shares, both[k], color=color, lw=1.7, label=name)
            ax.set(xlim=(0, 1), ylim=(lowest, highest), xlabel=("Patches covered", "Patches shown")[k])
            ax.xaxis.set_major_formatter(PercentFormatter(1))
        axes[0].set_ylabel(score)
        axes[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    return figure


def randomized(found: Mapping[str, object], *, threshold: float | None = None) -> plt.Figure:
    """How like its own each map still is while the model's weights are replaced by random ones, from the head down.

    found: by name of the method, a `vitlens.faithfulness.Randomization`, of one model; at most eight. The mean over
    images of |rank correlation| with the map of the model as it is, after each part. threshold: a dashed line; by
    default that of the first. Raises ValueError for other numbers of methods, or several models.
    """
    if not 0 < len(found) <= len(SERIES):
        raise ValueError(f"One to {len(SERIES)} methods fit into the figure, but {len(found)} came.")
    parts = [tuple(each.parts) for each in found.values()]
    if any(each != parts[0] for each in parts):
        raise ValueError("All methods must have been tried on one model, but its parts differ.")
    names, steps = ["none", *parts[0]], np.arange(len(parts[0]) + 1)
    with styled():
        figure = _page(900, 350)
        ax = panel(figure, 60, 38, 660, 210, "|Rank correlation| with the map of the trained model, mean over images")
        level = next(iter(found.values())).threshold if threshold is None else threshold
        ax.axhline(level, color="0.5", lw=1.0, ls=(0, (4, 3)))
        ends = []
        for color, (name, each) in zip(SERIES, found.items(), strict=False):
            values = np.array([1.0, *each.rank_correlation.abs().mean(1).tolist()])
            ax.plot(steps, values, "o-", color=color, ms=4, lw=1.6)
            ends.append((values[-1], name, color))
        ax.set(xlim=(-0.2, len(steps) - 0.8), ylim=(0, 1.03))
        ax.set_xticks(steps, names, rotation=40, ha="right", rotation_mode="anchor")
        at_the_right(ax, ends)
        write(figure, 60, 338, "Random from the head down to and with …", size=9)
    return figure


def _page(width: float, height: float) -> plt.Figure:
    """A page of which notebooks, which cut off what is empty, show all."""
    figure = page(width, height)
    figure.add_artist(Rectangle((0, 0), 1, 1, transform=figure.transFigure, fc="white", ec="none", zorder=-10))
    return figure


def _as_long(values: np.ndarray, shares: np.ndarray) -> np.ndarray:
    if values.shape[-1] != len(shares):
        raise ValueError(f"Curves of {len(shares)} values were wanted, as many as shares, but {values.shape[-1]} came.")
    return values
