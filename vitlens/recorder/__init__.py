"""What a model's attention is: record it, its layers and its grid of patches, or intervene."""

from vitlens.recorder.families import UnsupportedModelError
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.intervention import intervene
from vitlens.recorder.layer import Layer
from vitlens.recorder.recording import capture

__all__ = ["Layer", "TokenGrid", "UnsupportedModelError", "capture", "intervene"]
