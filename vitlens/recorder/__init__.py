"""Record a model's attention, its layers and its grid of patches, or intervene."""

from vitlens.names import unknown_name
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.intervention import intervene
from vitlens.recorder.layer import Layer
from vitlens.recorder.record import Attention, capture
from vitlens.recorder.supported import UnsupportedModelError

__all__ = ["Attention", "Layer", "TokenGrid", "UnsupportedModelError", "capture", "intervene"]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)
