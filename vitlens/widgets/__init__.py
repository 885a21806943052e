"""Figures with controls, for notebooks and as a page of their own.

explore(model)                 one picture: every view, layer and head, from any patch
heads(model)                   all heads of all layers as thumbnails
positions(model)               the similarity map of any position
compare(model_a, model_b)      two models, the same query
training(snapshots)            a slider over the snapshots of a run
"""

from vitlens.widgets.compare import compare
from vitlens.widgets.explore import explore
from vitlens.widgets.heads import heads
from vitlens.widgets.positions import positions
from vitlens.widgets.training import training

__all__ = ["compare", "explore", "heads", "positions", "training"]
