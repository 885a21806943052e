"""Labeled images for training and evaluation, held in memory or streamed by worker processes.

`load` opens one split of a source as an `ImageSet` or an `ImageStream`. Both have `len`, `labels`, `class_names`,
`note`, `size`, `to`, `subset`, `select_rows`, `batches` and `remaining`. An `ImageSet` has `select_classes`, too.
`register(name, opens)` adds a data set of your own, opened as `Samples`.

Names are imported when they are first used, so that help texts list `SOURCES` without PyTorch.
"""

from vitlens.names import attach_lazily

__getattr__, __dir__, __all__ = attach_lazily(__name__, __file__)
