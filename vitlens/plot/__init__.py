"""Figures: functions from arrays or tensors to Axes or a Figure.

Every plot that fits into one Axes takes `ax=`, draws there and returns it. Without `ax`, all functions return a Figure
that pyplot does not keep. A notebook shows it as the last value of a cell (elsewhere use `display`), a script calls
`savefig`, and no figure has to be closed. Only `overlay` and `attention_distance` open a figure in pyplot and return
its Axes. Values are not rescaled or clipped unless a docstring states it, NaN is gray, and the colors are safe for the
color-blind.

Without `ax`, figures are drawn in `STYLE` and leave your settings unchanged. An `ax` keeps its own style. Create it in
`with plt.style.context(STYLE)` for the same style.
"""

import importlib

from vitlens import lazily

PLACES = {
    "charts": (
        "attention_distance", "attention_distances", "contributions", "insertion_deletion", "intervals", "lines",
        "randomized", "training",
    ),
    "film": ("film_strip", "snapshot"),
    "heatmaps": ("attributions", "gallery", "mask", "overlay", "overlays", "tiles", "upsample"),
    "mosaics": ("all_heads", "filters", "heads", "position_similarity"),
    "side_by_side": ("correspondences", "inspected", "rollouts"),
    "style": ("STYLE",),
}  # fmt: skip
NAMES = {name: module for module, names in PLACES.items() for name in names}

__all__ = [*NAMES]
_find, __dir__ = lazily(__name__, NAMES)


def __getattr__(name: str):
    return importlib.import_module(f"{__name__}.{name}") if name in PLACES else _find(name)
