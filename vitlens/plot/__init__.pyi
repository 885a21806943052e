from .attention import all_heads, attention_distance, attention_distances, heads
from .explanation import (
    attributions,
    contributions,
    gallery,
    insertion_deletion,
    overlays,
    randomized,
    tiles,
)
from .inspection import filters, inspected, position_similarity, rollouts
from .measurements import intervals, lines
from .on_images import correspondences, overlay
from .painting import mask, upsample
from .style import STYLE
from .training_runs import film_strip, snapshot, training

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
