"""A microscope for Vision Transformers: exact attention capture, the inspection figures of the ViT paper, training.

Shapes everywhere: B batch, L layers, H heads, T tokens = R prefix + P patches (P = rows·cols), D width, K head width,
C channels. Distances in input pixels. Layers and heads count from 0.

Names are imported when they are first used: PyTorch and timm take seconds, which `vitlens --help` need not wait for.
"""

from vitlens.names import attach_lazily

__version__ = "0.1.0"

MOVED = {
    "widgets": "vitlens_explorer",
    "evaluate": "vitlens_paper.evaluate",
    "paper": "vitlens_paper",
    "variants": "vitlens_paper.variants",
    "ablation": "vitlens_paper.evaluate.ablation",
}
"""New homes of modules that were part of this package."""

_find, __dir__, __all__ = attach_lazily(__name__, __file__)


def __getattr__(name: str) -> object:
    if name in MOVED:
        raise AttributeError(f"vitlens.{name} has moved. Use `import {MOVED[name]}`.")
    return _find(name)
