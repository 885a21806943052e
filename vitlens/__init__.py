"""A microscope for Vision Transformers: exact attention capture, the inspection figures of the ViT paper, training.

Shapes everywhere: B batch, L layers, H heads, T tokens = R prefix + P patches (P = rows·cols), D width, K head width,
C channels. Distances in input pixels. Layers and heads count from 0.

Names are imported when they are first used: PyTorch and timm take seconds, which `vitlens --help` need not wait for.
"""

import importlib
import sys
from collections.abc import Iterable

__version__ = "0.1.0"

MODULES = {
    name: name
    for name in (
        "attention", "attribution", "classes", "data", "faithfulness", "filters", "images", "models", "plot", "plugins",
        "positions", "recorder", "report", "scores", "stream", "tokens", "train",
    )
}  # fmt: skip
NAMES = {
    "ImageError": "images", "TokenGrid": "recorder.grid", "UnsupportedModelError": "recorder.supported",
    "capture": "recorder.record", "intervene": "recorder.intervention", "load_image": "images",
    "load_model": "models", "overlay": "plot", "preprocess": "models", "register_model": "recorder.supported",
    "restore": "models", "samples": "images", "top_classes": "models",
}  # fmt: skip

__all__ = [*NAMES, *MODULES]


def suggestion(word: str, names: Iterable[str], texts: Iterable[str] | None = None) -> str:
    """The sentence " Did you mean …?" with at most five names similar to a word, or "".

    Names that contain the whole word come first, then names with a word that begins with it. Without either, names that
    contain it, or else close matches. texts: the text to search for each name, by default the name.

    >>> vitlens.suggestion("cat", ["bobcat", "catamount", "tabby cat"])
    ' Did you mean tabby cat, catamount?'
    """
    import difflib
    import re

    def plain(text: str) -> str:
        return " ".join(re.findall(r"[^\W_]+", text.lower()))

    if not (key := plain(word)):
        return ""
    names = [*names]
    pairs = [(name, f" {plain(text)} ") for name, text in zip(names, texts or names, strict=True)]
    similar = [name for end in (" ", "") for name, text in pairs if f" {key}{end}" in text]
    similar = similar or [name for name, text in pairs if key.replace(" ", "") in text.replace(" ", "")]
    by_text = {plain(name): name for name in names}
    similar = similar or [by_text[text] for text in difflib.get_close_matches(key, by_text, n=5)]
    return f" Did you mean {', '.join([*dict.fromkeys(similar)][:5])}?" if similar else ""


def require_known(name: object, names: Iterable[str], what: str, texts: Iterable[str] | None = None) -> None:
    """Raise ValueError with all names, and with similar ones, unless a name is among them.

    what: the meaning of the name, first in the message. texts: as in `suggestion`.

    >>> vitlens.require_known("mean", ("mean", "zero"), "way")
    """
    names = [*names]
    if name not in names:
        hint = suggestion(str(name), names, texts)
        raise ValueError(f"{what} must be one of {', '.join(names)}, got {name!r}.{hint}")


def reject(rows: Iterable[tuple[object, str]]) -> None:
    """Raise ValueError with the sentence of the first row (wrong, sentence) that is wrong.

    >>> vitlens.reject([(False, "Expected 1 image, got 2.")])
    """
    for wrong, sentence in rows:
        if wrong:
            raise ValueError(sentence)


def lazily(package: str, places: dict[str, str]):
    """The `__getattr__` and `__dir__` of a package whose names are imported when they are first used.

    places: for each name the module of the package that has it, or "module:name" with the full name of any module.
    """

    def find(name: str):
        if name not in places:
            hint = suggestion(name, sys.modules[package].__all__)
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")
        module, _, other = places[name].partition(":")
        return getattr(importlib.import_module(module if other else f"{package}.{module}"), other or name)

    return find, lambda: sys.modules[package].__all__


MOVED = {
    "widgets": "vitlens_explorer", "evaluate": "vitlens_paper.evaluate", "paper": "vitlens_paper",
    "ablation": "vitlens_paper.evaluate.ablation", "variants": "vitlens_paper.variants",
}  # fmt: skip
"""New homes of modules that were part of this package."""

_find, _ = lazily(__name__, NAMES)


def __getattr__(name: str):
    if name in MOVED:
        raise AttributeError(f"vitlens.{name} has moved. Use `import {MOVED[name]}`.")
    return importlib.import_module(f"vitlens.{MODULES[name]}") if name in MODULES else _find(name)


def __dir__() -> list[str]:  # public names alone, as in all modules that list them in `__all__`
    return sorted({*__all__, "__version__"})
