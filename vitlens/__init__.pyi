from . import (
    attention,
    attribution,
    classes,
    data,
    evidence,
    faithfulness,
    filters,
    images,
    models,
    plot,
    plugins,
    positions,
    recorder,
    report,
    scores,
    stream,
    tokens,
    train,
)
from .evidence import audit
from .images import ImageError, load_image, samples
from .models import load_model, preprocess, restore, run, top_classes
from .plot import overlay
from .recorder.grid import TokenGrid
from .recorder.intervention import intervene
from .recorder.record import capture
from .recorder.supported import UnsupportedModelError, register_model

__version__: str

__all__ = [
    "ImageError",
    "TokenGrid",
    "UnsupportedModelError",
    "attention",
    "attribution",
    "audit",
    "capture",
    "classes",
    "data",
    "evidence",
    "faithfulness",
    "filters",
    "images",
    "intervene",
    "load_image",
    "load_model",
    "models",
    "overlay",
    "plot",
    "plugins",
    "positions",
    "preprocess",
    "recorder",
    "register_model",
    "report",
    "restore",
    "run",
    "samples",
    "scores",
    "stream",
    "tokens",
    "top_classes",
    "train",
]
