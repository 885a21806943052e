"""Images that a model was not trained on, among those to be scored.

The record of the training images comes with the model (`vitlens.digests`), so paths and names of files do not matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitlens.data import ImageSet, ImageStream
from vitlens.data.imageset import same_images
from vitlens.data.sources import open_samples
from vitlens.digests import DECODED, Digests, TrainedOn
from vitlens.recorder.supported import unwrap
from vitlens.recorder.supported.card import card_of
from vitlens.train.run_folder import label_checksum

UNKNOWN = (
    "No record of the images that this model was trained on was found, so any of them that are among the scored images "
    "count."
)
LOSSY = "Copies of training images that were resized or compressed with loss are not recognized."
WITHOUT_DIGESTS = (
    "A batch, or an ImageSet without digests, cannot be compared with the training images, so any of these count. "
    "vitlens.data.load returns digests."
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
    record, note = record_of(model)
    if record is None:
        return images, note
    if images.digests is None:
        return images, WITHOUT_DIGESTS
    if record.digests is None:
        return _unseen_of_earlier(record, images)
    decoded = None
    if isinstance(images, ImageStream):  # an `ImageSet` holds resized images
        decoded = images.samples.pixel_digests
    seen, notes = trained_on(record, images.digests, decoded)
    return _keep(images, ~seen, notes)


def record_of(model: nn.Module) -> tuple[TrainedOn | None, str]:
    """The record of a model's training images, and a note if there is none and the model was not published.

    >>> record_of(model)[0] is None
    True
    """
    card = card_of(unwrap(model))
    if card is None:
        return None, UNKNOWN
    if card.trained_on is None:
        return None, "" if card.published else UNKNOWN
    return card.trained_on, ""


def trained_on(
    record: TrainedOn,
    digests: Digests,
    decoded: Callable[[list[int]], np.ndarray] | None = None,
) -> tuple[np.ndarray, list[str]]:
    """(N,) True for each image among the training images of a record with digests, and notes on what is not recognized.

    decoded: digests of the pixels of the images at some positions, which are decoded for it, or None if none can be.
    """
    stored, pixels = digests.stored, digests.pixels
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
        if decoded is not None:
            pixels = pixels.copy()
            pixels[rest] = decoded(rest.tolist())
        seen = record.contains(stored, pixels)
    if not record.complete:
        notes.append(
            f"The record holds {len(record.digests):,} of the {record.images:,} training images, so others may be "
            "among the scored images."
        )
    return seen, notes


def left_out(seen: np.ndarray, source: str) -> str:
    """The sentence on images that are left out, empty if there are none. Raises ValueError if no image is left.

    >>> left_out(np.array([True, False, False]), "the set")
    '1 of 3 images are left out, because the model was trained on them.'
    """
    count, number = len(seen), int(seen.sum())
    if number == count:
        raise ValueError(
            f"The model was trained on all {count:,} images of {source}, so none is left. Give images that it was not "
            "trained on."
        )
    if not number:
        return ""
    return f"{number:,} of {count:,} images are left out, because the model was trained on them."


def _keep(
    images: ImageSet | ImageStream, kept: np.ndarray, notes: list[str]
) -> tuple[ImageSet | ImageStream, str]:
    left = left_out(~kept, _source(images))
    if not left:
        return images, " ".join(notes)
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
