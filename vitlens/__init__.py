"""A microscope for Vision Transformers: exact attention capture, the inspection figures of the ViT paper, training.

Shapes everywhere: B batch, L layers, H heads, T tokens = R prefix + P patches (P = rows·cols), D width, K head width,
C channels. Distances in input pixels. Layers and heads count from 0.
"""

import importlib

from vitlens import attention, attribution, faithfulness, filters, positions
from vitlens.capture import capture
from vitlens.grid import TokenGrid
from vitlens.images import ImageError, load_image
from vitlens.models import load_model
from vitlens.support import UnsupportedModelError

__version__ = "0.1.0"

__all__ = [
    "ImageError", "TokenGrid", "UnsupportedModelError", "attention", "attribution", "capture", "faithfulness",
    "filters", "load_image", "load_model", "plot", "positions",
]  # fmt: skip


def __getattr__(name: str):
    if name == "plot":  # matplotlib is imported when the first picture is asked for
        return importlib.import_module("vitlens.plot")
    raise AttributeError(f"module 'vitlens' has no attribute {name!r}")
