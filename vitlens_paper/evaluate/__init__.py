"""Evaluation by the protocols of the paper: accuracy, few-shot, nearest neighbors, probe, fine-tuning, VTAB-1k.

`evaluate` measures a model by a protocol of `PROTOCOLS` and yields `Record`s, as `vitlens evaluate` does. Its parts are
public too: `features` of images and classifiers on features (`few_shot`, `nearest`, `linear_probe`). `vitlens.scores`
has the confidence intervals.

Names are imported on first use, so that `vitlens evaluate --help` does not load PyTorch.
"""

from vitlens.names import attach_lazily

__getattr__, __dir__, __all__ = attach_lazily(__name__, __file__)
