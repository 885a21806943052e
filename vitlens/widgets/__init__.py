"""Figures with controls, for notebooks and as a page of their own.

explore(model)                 one picture: every view, layer and head, from any patch
heads(model)                   all heads of all layers as thumbnails
positions(model)               the similarity map of any position
compare(model_a, model_b)      two models, the same query
training(snapshots)            a slider over the snapshots of a run

Each is imported when it is first used: the server of `vitlens app` needs none of them, and no PyTorch.
"""

from vitlens import lazily

MODULES = {
    "compare": "comparison", "explore": "explorer", "heads": "thumbnails", "positions": "similarity",
    "training": "snapshots",
}  # fmt: skip

__all__ = [*MODULES]
__getattr__, __dir__ = lazily(__name__, MODULES)
