from .checkpoints import weights_digest
from .classes import OUTPUTS, class_count, label_names, output_kind, scores, top_classes
from .opening import load_model, run, title
from .preprocessing import (
    built_size,
    crop_box,
    data_config,
    pixels,
    preprocess,
    preprocessing_warning,
    restore,
)

__all__ = [
    "OUTPUTS",
    "built_size",
    "class_count",
    "crop_box",
    "data_config",
    "label_names",
    "load_model",
    "output_kind",
    "pixels",
    "preprocess",
    "preprocessing_warning",
    "restore",
    "run",
    "scores",
    "title",
    "top_classes",
    "weights_digest",
]
