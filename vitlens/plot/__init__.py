"""Figures: arrays or tensors in, Axes or a Figure out.

Every plot that fits into one Axes takes `ax=`, draws there and returns it. Without `ax`, all functions return a Figure
that pyplot does not hold: a notebook shows it once, where it is the last value of a cell (elsewhere use `display`), a
script calls `savefig`, and nothing has to be closed. Only `overlay` and `attention_distance` then open a figure as
pyplot does, and return its Axes. Nothing is rescaled or clipped unless the docstring says so, NaN is gray, and the
colors are safe for the color-blind.

Without `ax`, figures are drawn in `STYLE` and leave your settings untouched; an `ax` that is given keeps the style it
was made with (`with plt.style.context(STYLE)` makes it match).
"""

from vitlens.plot.charts import (
    attention_distance,
    attention_distances,
    contributions,
    insertion_deletion,
    intervals,
    lines,
    randomized,
    training,
)
from vitlens.plot.film import filled_in, film_strip, snapshot
from vitlens.plot.heatmaps import attributions, gallery, mask, overlay, overlays, tiles, upsample
from vitlens.plot.mosaics import all_heads, filters, heads, patches, position_similarity
from vitlens.plot.scaling import few_shot, pretraining_size, transfer, vtab
from vitlens.plot.side_by_side import correspondences, inspected, rollouts
from vitlens.plot.style import STYLE

__all__ = [
    "STYLE",
    "all_heads",
    "attention_distance",
    "attention_distances",
    "attributions",
    "contributions",
    "correspondences",
    "few_shot",
    "filled_in",
    "film_strip",
    "filters",
    "gallery",
    "heads",
    "insertion_deletion",
    "inspected",
    "intervals",
    "lines",
    "mask",
    "overlay",
    "overlays",
    "patches",
    "position_similarity",
    "pretraining_size",
    "randomized",
    "rollouts",
    "snapshot",
    "tiles",
    "training",
    "transfer",
    "upsample",
    "vtab",
]
