"""Figures: arrays or tensors in, Axes or a Figure out.

Functions that draw one panel take `ax=` and return the Axes; with `ax=None` they open a figure as pyplot does. Those
that lay out a page return a Figure that pyplot does not hold: a notebook shows it once, where it is the last value of a
cell (elsewhere use `display`), a script calls `savefig`, and nothing has to be closed. Nothing is rescaled or clipped
unless the docstring says so, cells that are not a number are gray, and the colors are safe for the color-blind.

Pages, and panels without `ax=`, are drawn in `STYLE` and leave the user's settings untouched; an `ax` that is given
keeps the style it was made with (`with plt.style.context(STYLE)` makes it match).
"""

from vitlens.plot.curves import training
from vitlens.plot.explained import explained
from vitlens.plot.film import film_strip, snapshot
from vitlens.plot.maps import heads, mask, overlay, rollouts, upsample
from vitlens.plot.patches import patches
from vitlens.plot.scaling import few_shot, pretraining_size, transfer, vtab
from vitlens.plot.style import STYLE
from vitlens.plot.tiles import all_heads, overlays, tiles
from vitlens.plot.trust import insertion_deletion, randomized
from vitlens.plot.weights import attention_distance, filters, position_similarity

__all__ = [
    "STYLE",
    "all_heads",
    "attention_distance",
    "explained",
    "few_shot",
    "film_strip",
    "filters",
    "heads",
    "insertion_deletion",
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
