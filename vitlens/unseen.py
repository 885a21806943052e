"""Images that a model was not trained on, among those to be scored.

The record of the training images comes with the model (`vitlens.digests`), so paths and names of files do not matter.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitlens.data import ImageSet, ImageStream
from vitlens.data.imageset import same_images
from vitlens.data.sources import open_samples
from vitlens.digests import DECODED, TrainedOn
from vitlens.recorder.supported import unwrap
from vitlens.recorder.supported.card import card_of
from vitlens.train.run_folder import label_checksum

UNKNOWN = (
    "No record of the images that this model was trained on was found, so any of them that are among the scored images "
    "count."
)
LOSSY = "Copies of training images that were resized or compressed with loss are not recognized."
WITHOUT_DIGESTS = (
    "Images that are passed as an ImageSet without digests cannot be compared with the training images, so any of "
    "these count. vitlens.data.load returns digests."
)
EARLIER = (
    "The record of this model's training is of an earlier version, which cannot tell whether training images are among "
    "the scored images."
)


def unseen(model: nn.Module, images: ImageSet | ImageStream) -> tuple[ImageSet | ImageStream, str]:
    """The images that a model was not trained on, and a note on those left out and on what could not be decided.

    Images are compared by the digests of their stored bytes. If the record has digests of pixels, at most `DECODED`
    images are decoded and compared by these, too. Raises ValueError if no image is left.

    >>> digits = vitlens.data.load("digits", "valid", size=32, stream=True, workers=0)
    >>> len(unseen(model, digits)[0])
    360
    """
    card = card_of(unwrap(model))
    record = card.trained_on if card is not None else None
    if record is None:
        published = card is not None and card.published
        return images, "" if published else UNKNOWN
    if images.digests is None:
        return images, WITHOUT_DIGESTS
    if record.digests is None:
        return _unseen_of_earlier(record, images)
    stored, pixels = images.digests.stored, images.digests.pixels
    seen = record.contains(stored, pixels)
    notes = [LOSSY]
    rest = np.flatnonzero(~seen & (pixels == 0))
    if len(rest) and not record.digests.pixels.any():
        notes.append("Copies of training images that were saved again are not recognized.")
    elif len(rest) > DECODED:
        notes.append(
            f"{len(rest):,} images are too many to decode, so copies of training images that were saved again are not "
            "recognized."
        )
    elif len(rest):
        if isinstance(images, ImageStream):  # an `ImageSet` holds resized images
            pixels = pixels.copy()
            pixels[rest] = images.samples.pixel_digests(rest.tolist())
        seen = record.contains(stored, pixels)
    if not record.complete:
        notes.append(
            f"The record holds {len(record.digests):,} of the {record.images:,} training images, so others may be "
            "among the scored images."
        )
    return _keep(images, ~seen, notes)


def _keep(
    images: ImageSet | ImageStream, kept: np.ndarray, notes: list[str]
) -> tuple[ImageSet | ImageStream, str]:
    count = len(kept)
    left_out = count - int(kept.sum())
    if left_out == count:
        raise ValueError(
            f"The model was trained on all {count:,} images of {_source(images)}, so none is left to score. Give "
            "images that it was not trained on."
        )
    if not left_out:
        return images, " ".join(notes)
    left = f"{left_out:,} of {count:,} images are left out, because the model was trained on them."
    rows = torch.from_numpy(np.flatnonzero(kept))
    return images.select_rows(rows), " ".join([left, *notes])


def _source(images: ImageSet | ImageStream) -> str:
    return images.source if isinstance(images, ImageStream) else "the set"


def _unseen_of_earlier(
    record: TrainedOn, images: ImageSet | ImageStream
) -> tuple[ImageSet | ImageStream, str]:
    """The images that the run of an earlier version held out, if its checksums are those of an undivided folder."""
    source = images.source if isinstance(images, ImageStream) else ""
    if not source or not Path(source).is_dir() or images.whole.root is None:
        return images, EARLIER
    try:
        train = open_samples(source, "train")
    except ValueError:
        return images, EARLIER
    with_labels = _Labeled(train.class_names, torch.as_tensor(train.labels, dtype=torch.int64))
    same = label_checksum(with_labels) == record.labels
    same = same and same_images(record.pictures, train.fingerprint())
    if not same and not _same_folder(record.data, source):
        return images, EARLIER
    trained = {os.fsdecode(name) for name in train.names}
    kept = np.array([os.fsdecode(name) not in trained for name in images.samples.names])
    return _keep(images, kept, [])


def _same_folder(one: str, other: str) -> bool:
    return os.path.isdir(one) and os.path.isdir(other) and os.path.samefile(one, other)


class _Labeled:
    """Labels and class names, for `label_checksum`."""

    def __init__(self, class_names: tuple[str, ...], labels: torch.Tensor):
        self.class_names = class_names
        self.labels = labels
