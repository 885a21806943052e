"""A microscope for Vision Transformers: exact attention capture, the inspection figures of the ViT paper, training.

Shapes everywhere: B batch, L layers, H heads, T tokens = R prefix + P patches (P = rows·cols), D width, K head width,
C channels. Distances in input pixels. Layers and heads count from 0.

Names are imported when they are first used: PyTorch and timm take seconds, which `vitlens --help` need not wait for.
"""

import sys

from vitlens.moved import MOVED, MovedFinder, new_place
from vitlens.names import PlaceFinder, attach_lazily

__version__ = "0.1.0"

_find, __dir__, __all__ = attach_lazily(__name__, __file__)
sys.meta_path += [MovedFinder, PlaceFinder(__name__)]


def __getattr__(name: str) -> object:
    if name in MOVED:
        raise AttributeError(new_place(name))
    return _find(name)
