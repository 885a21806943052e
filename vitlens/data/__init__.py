"""Labeled images for training: held in memory, or streamed from where they lie by worker processes.

``load`` opens one split of a source and returns an ``ImageSet`` or an ``ImageStream``. Both answer to the same words:
``len``, ``labels``, ``class_names``, ``damaged``, ``note``, ``size``, ``to``, ``subset``, ``chosen``, ``batches``,
``remaining``, ``stand_ins``.
"""

from vitlens.data.imageset import ImageSet
from vitlens.data.loading import load
from vitlens.data.stream import ImageStream
from vitlens.data.validation import UNLABELED

__all__ = ["UNLABELED", "ImageSet", "ImageStream", "load"]
