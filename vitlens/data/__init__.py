"""Labeled images for training: held in memory, or streamed from where they lie by worker processes.

`load` opens one split of a source and returns an `ImageSet` or an `ImageStream`. Both have `len`, `labels`,
`class_names`, `damaged`, `note`, `size`, `to`, `subset`, `chosen`, `batches`, `remaining` and `stand_ins`.
`register(DataSource(…))` gives a data set of your own a name; it lists its samples as a `Listing`.

Names are imported when they are first used, so that help texts can be made of `SOURCES` without PyTorch.
"""

import importlib

NAMES = {
    "SOURCES": "sources", "DataSource": "sources", "Request": "sources", "register": "sources",
    "ImageSet": "imageset", "ImageStream": "stream", "Listing": "samples", "Numbered": "samples",
    "UNLABELED": "folders", "load": "loading",
}  # fmt: skip

__all__ = list(NAMES)


def __getattr__(name: str):
    if name not in NAMES:
        raise AttributeError(f"module 'vitlens.data' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f"vitlens.data.{NAMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
