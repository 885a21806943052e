from .charts import (
    attention_distance,
    attention_distances,
    contributions,
    insertion_deletion,
    intervals,
    lines,
    randomized,
    training,
)
from .film import film_strip, snapshot
from .heatmaps import attributions, gallery, mask, overlay, overlays, tiles, upsample
from .mosaics import all_heads, filters, heads, position_similarity
from .side_by_side import correspondences, inspected, rollouts
from .style import STYLE

__all__ = [
    "STYLE",
    "all_heads",
    "attention_distance",
    "attention_distances",
    "attributions",
    "contributions",
    "correspondences",
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
    "position_similarity",
    "randomized",
    "rollouts",
    "snapshot",
    "tiles",
    "training",
    "upsample",
]
