"""Models that differ in one choice, a row each: filters, position similarity, distance by head, rollout."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np

from vitlens.plot.distance import attention_distance
from vitlens.plot.maps import overlay
from vitlens.plot.mosaics import filters, position_similarity
from vitlens.plot.pairs import wrapped
from vitlens.plot.style import page, styled

COLUMNS = ("Embedding filters", "Position similarity", "Attention distance by head (px)", "Rollout")
ROW, NAMES = 168, 104  # pixels: the height of a row, the room of names on the left


def variants(
    found: Mapping[str, Mapping[str, np.ndarray]], *, picture, image: int = 0, uniform: float | None = None
) -> plt.Figure:
    """Rows of models by columns of what is inside them (paper, Fig. 6 and 7): to see what a choice changes.

    found: by the name of each model the arrays of `vitlens.train.snapshots.record`, `filters` (k, p, q, C), `positions`
    (h, w, h, w), `distances` (L, H) and `rollout` (B, h, w); what a model lacks is left out, and its panel says "none".
    picture: what `load_image` takes, the one of rollout number `image`. uniform: the distance of uniform attention, a
    dashed line. Distances share one scale, similarities have cosines from −1 (blue) to 1 (red), every filter and
    every rollout, in colors from 0 to its largest value, is scaled on its own. Raises ValueError without models.
    """
    if not found:
        raise ValueError("No models to draw. Give at least one by its name.")
    measured = [np.nanmax(each["distances"]) for each in found.values() if "distances" in each]
    top = 1.08 * max((*measured, uniform or 0), default=1.0)
    with styled():
        figure = page(900, ROW * len(found) + 34, "constrained")
        widths = [NAMES, 300, 150, 230, 120]
        grid = figure.subplots(len(found), 5, width_ratios=widths, squeeze=False)
        for (label, *axes), (name, arrays) in zip(grid, found.items(), strict=True):
            label.axis("off")
            label.text(0, 0.5, "\n".join(wrapped(name, NAMES)), va="center", size=10, parse_math=False)
            for ax, draw, key in zip(
                axes, (_filters, _positions, _distances, _rollout), ("filters", "positions", "distances", "rollout"),
                strict=True,
            ):  # fmt: skip
                if key in arrays:
                    draw(ax, np.asarray(arrays[key], np.float32), (top, uniform, picture, image))
                else:
                    ax.axis("off")
                    ax.text(0.5, 0.5, "none", ha="center", va="center", color="0.45")
                ax.set_title("")
        for ax, title in zip(grid[0][1:], COLUMNS, strict=True):
            ax.set_title(title, size=9.5, loc="center")
        for ax in grid[:-1, 3]:
            ax.set_xlabel("")
    return figure


def _filters(ax: plt.Axes, values: np.ndarray, _) -> None:
    kept = values[np.abs(values).reshape(len(values), -1).max(1) > 0]  # a snapshot fills up with zeros
    filters(kept[:21], cols=7, ax=ax)
    ax.set_xlabel("")


def _positions(ax: plt.Axes, values: np.ndarray, _) -> None:
    position_similarity(values.clip(-1, 1), ax=ax)
    ax.images[0].colorbar.remove()
    ax.set(xlabel="", ylabel="", xticks=[], yticks=[])


def _distances(ax: plt.Axes, values: np.ndarray, about) -> None:
    attention_distance(values, ax=ax)
    ax.set(ylim=(0, about[0]), ylabel="", xlabel="Layer")
    if about[1]:
        ax.axhline(about[1], color="0.5", linestyle="--", linewidth=0.9)


def _rollout(ax: plt.Axes, values: np.ndarray, about) -> None:
    overlay(about[2], values[about[3]], ax=ax, mode="heat", colorbar=False)
