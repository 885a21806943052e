"""A microscope for Vision Transformers: exact attention capture, the inspection figures of the ViT paper, training.

Shapes everywhere: B batch, L layers, H heads, T tokens = R prefix + P patches (P = rows·cols), D width, K head width,
C channels. Distances in input pixels. Layers and heads count from 0.

Names are imported when they are first used: PyTorch and timm take seconds, which `vitlens --help` need not wait for.
"""

import importlib
import sys

__version__ = "0.1.0"

MODULES = {
    name: name
    for name in (
        "attention", "attribution", "data", "evaluate", "faithfulness", "filters", "images", "models", "paper", "plot",
        "positions", "recorder", "report", "stream", "tokens", "train", "variants", "widgets",
    )
} | {"ablation": "evaluate.ablation"}  # fmt: skip
NAMES = {
    "ImageError": "images", "TokenGrid": "recorder.grid", "UnsupportedModelError": "recorder.supported",
    "capture": "recorder.record", "intervene": "recorder.intervention", "load_image": "images",
    "load_model": "models", "overlay": "plot", "preprocess": "models", "register_model": "recorder.supported",
    "restore": "models", "samples": "images", "top_classes": "models",
}  # fmt: skip

__all__ = [*NAMES, *MODULES]


def lazily(package: str, places: dict[str, str]):
    """The `__getattr__` and `__dir__` of a package whose names are imported when they are first used.

    places: for each name the module of the package that has it, or "module:name" with the full name of any module.
    """

    def find(name: str):
        if name not in places:
            import difflib

            close = difflib.get_close_matches(name, sys.modules[package].__all__)
            hint = f" Did you mean {', '.join(close)}?" if close else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")
        module, _, other = places[name].partition(":")
        return getattr(importlib.import_module(module if other else f"{package}.{module}"), other or name)

    return find, lambda: sys.modules[package].__all__


_find, _ = lazily(__name__, NAMES)


def __getattr__(name: str):
    return importlib.import_module(f"vitlens.{MODULES[name]}") if name in MODULES else _find(name)


def __dir__() -> list[str]:  # public names alone, as in all modules that list them in `__all__`
    return sorted({*__all__, "__version__"})
