"""Labeled images for training: held in memory, or streamed from where they lie by worker processes.

`load` opens one split of a source and returns an `ImageSet` or an `ImageStream`. Both have `len`, `labels`,
`class_names`, `damaged`, `note`, `size`, `to`, `subset`, `chosen`, `batches`, `remaining` and `stand_ins`.
`register(DataSource(…))` gives a data set of your own a name; it lists its samples as a `Listing`.

Names are imported when they are first used, so that help texts can be made of `SOURCES` without PyTorch.
"""

from vitlens import lazily

NAMES = {
    "SOURCES": "sources", "DataSource": "sources", "Request": "sources", "register": "sources",
    "ImageSet": "imageset", "ImageStream": "stream", "Listing": "samples", "Numbered": "samples",
    "UNLABELED": "folders", "load": "loading",
}  # fmt: skip

__all__ = list(NAMES)
__getattr__, __dir__ = lazily(__name__, NAMES)
