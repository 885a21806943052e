"""A microscope for Vision Transformers: exact attention capture, the inspection figures of the ViT paper, training.

Shapes everywhere: B batch, L layers, H heads, T tokens = R prefix + P patches (P = rows·cols), D width, K head width,
C channels. Distances in input pixels. Layers and heads count from 0.

Names are imported when they are first used: PyTorch and timm take seconds, which `vitlens --help` need not wait for.
"""

import importlib

__version__ = "0.1.0"

MODULES = ("attention", "attribution", "faithfulness", "filters", "plot", "positions", "tokens")
NAMES = {
    "ImageError": "images", "TokenGrid": "recorder.grid", "UnsupportedModelError": "recorder.families",
    "capture": "recorder.recording", "load_image": "images", "load_model": "models",
}  # fmt: skip

__all__ = [*NAMES, *MODULES]


def __getattr__(name: str):
    if name in MODULES:
        return importlib.import_module(f"vitlens.{name}")
    if name not in NAMES:
        raise AttributeError(f"module 'vitlens' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f"vitlens.{NAMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
