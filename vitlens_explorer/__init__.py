"""Figures with controls, for notebooks and as a web page.

explore(model)                 one image: every view, layer and head, from any patch
tour(model)                    one image in eight steps, from pixels to the class
positions(model)               the similarity map of any position
compare(model_a, model_b)      two models, the same query
training(snapshots)            a slider over the snapshots of a run
save_page(model, images, path) the explorer as one HTML file
save_audit_page(model, images, found, path) an audit as one HTML file

Names are imported on first use, so that the server of `vitlens app` starts without PyTorch.
"""

from vitlens.names import attach_lazily

__getattr__, __dir__, __all__ = attach_lazily(__name__, __file__)
