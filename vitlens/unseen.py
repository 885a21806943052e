"""Images that a model was not trained on, among those to be scored or audited.

`unseen` selects them from a data set, and `unseen_rows` returns their numbers for images of any kind. The record of the
training images comes with the model (`vitlens.digests`), so paths and names of files do not matter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitlens.data import ImageSet, ImageStream, Samples
from vitlens.data.imageset import same_images
from vitlens.data.sources import open_samples
from vitlens.digests import DECODED, TrainedOn
from vitlens.images import ImageError, load_image
from vitlens.recorder.supported import unwrap
from vitlens.recorder.supported.card import card_of
from vitlens.train.run_folder import label_checksum

UNKNOWN = (
    "No record of the images that this model was trained on was found, so any of them that are among these images "
    "count."
)
LOSSY = "Copies of training images that were resized or compressed with loss are not recognized."
SAVED_AGAIN = "Copies of training images that were saved again are not recognized."
WITHOUT_DIGESTS = (
    "A tensor, or an ImageSet without digests, cannot be compared with the training images, so any of these count. "
    "vitlens.data.load returns digests."
)
EARLIER = (
    "The record of this model's training is of an earlier version, which cannot tell whether training images are among "
    "these images."
)

Images = ImageSet | ImageStream | Samples | Tensor


def unseen(
    model: nn.Module, images: ImageSet | ImageStream, *others: nn.Module
) -> tuple[ImageSet | ImageStream, str]:
    """The images that a model, and others, were not trained on, and the note of `unseen_rows`.

    Raises ValueError if no image is left.

    >>> digits = vitlens.data.load("digits", "valid", size=32, stream=True, workers=0)
    >>> len(unseen(model, digits)[0])
    360
    """
    rows, note = unseen_rows(model, images, *others)
    if len(rows) == len(images):
        return images, note
    return images.select_rows(torch.from_numpy(rows)), note


def unseen_rows(model: nn.Module, images: Images, *others: nn.Module) -> tuple[np.ndarray, str]:
    """Numbers (n,) of the images that a model was not trained on, and a note on the other ones, "" for none.

    The note counts the images left out, and lists the copies of training images that are not recognized. Images are
    compared by the digests of their stored bytes. If the record has digests of pixels, at most `DECODED` images are
    decoded and compared by these, too. images: a tensor (N, …) has no digests, so all of it is kept. others: models
    whose training images are left out as well. Their notes begin with "Second model:". Raises ValueError if no image is
    left.

    >>> digits = vitlens.data.load("digits", "valid", size=32, stream=True, workers=0)
    >>> len(unseen_rows(model, digits.samples)[0])
    360
    """
    rows, note = _unseen_by(model, images)
    notes = [note]
    for other in others:
        own, note = _unseen_by(other, images)
        rows = np.intersect1d(rows, own)
        is_new = note not in notes or len(own) < len(images)
        if note and is_new:
            notes.append(f"Second model: {note}")
    if not len(rows):
        raise ValueError(
            "One of the two models was trained on each of these images. Give images that are new to both."
        )
    return rows, " ".join(filter(None, notes))


def _unseen_by(model: nn.Module, images: Images) -> tuple[np.ndarray, str]:
    """Rows and note of `unseen_rows` for one model."""
    everything = np.arange(len(images))
    card = card_of(unwrap(model))
    record = card.trained_on if card is not None else None
    if record is None:
        published = card is not None and card.published
        return everything, "" if published else UNKNOWN
    digests = getattr(images, "digests", None)
    if digests is None:
        return everything, WITHOUT_DIGESTS
    if record.digests is None:
        return _unseen_of_earlier(record, images)
    seen, notes = _seen(record, images)
    if not record.complete:
        notes.append(
            f"The record holds {len(record.digests):,} of the {record.images:,} training images, so others may be "
            "among these images."
        )
    return _keep(images, ~seen, notes)


def as_samples(names: Sequence[str], sources: Sequence) -> Samples:
    """Sources of `vitlens.load_image` as samples of one class, to compare them with the training images.

    A source may also be a function that returns one. Arrays and tensors that `load_image` refuses have no digest.

    >>> len(as_samples(["cat"], [cat]).digests)
    1
    """
    return Samples(_Opened(sources), np.zeros(len(sources), dtype=np.int64), ("",), names)


class _Opened(Sequence):
    """Sources of images: results of functions in place of the functions, and images in place of arrays and tensors."""

    def __init__(self, sources: Sequence):
        self.sources = sources

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, number: int) -> object:
        source = self.sources[number]
        if callable(source):
            source = source()
        if isinstance(source, np.ndarray | Tensor):
            with suppress(ImageError):
                return load_image(source, on_note=lambda note: None)
        return source


def _seen(record: TrainedOn, images: Images) -> tuple[np.ndarray, list[str]]:
    """(N,) bool, True for training images by their digests, and notes on the copies that are not recognized."""
    stored, pixels = images.digests.stored, images.digests.pixels
    seen = record.contains(stored, pixels)
    rest = np.flatnonzero(~seen & (pixels == 0))
    if not len(rest):
        return seen, [LOSSY]
    if not record.digests.pixels.any():
        return seen, [LOSSY, SAVED_AGAIN]
    if len(rest) > DECODED:
        too_many = (
            f"{len(rest):,} images are too many to decode, so copies of training images that were saved again are not "
            "recognized."
        )
        return seen, [LOSSY, too_many]
    samples = _samples(images)
    if samples is not None:
        pixels = pixels.copy()
        pixels[rest] = samples.pixel_digests(rest.tolist())
    return record.contains(stored, pixels), [LOSSY]


def _samples(images: Images) -> Samples | None:
    """The stored images, or None for an `ImageSet`, which holds resized images."""
    if isinstance(images, Samples):
        return images
    return images.samples if isinstance(images, ImageStream) else None


def _keep(images: Images, kept: np.ndarray, notes: list[str]) -> tuple[np.ndarray, str]:
    """Numbers of the images to keep, (N,) bool, and one note."""
    count = len(kept)
    rows = np.flatnonzero(kept)
    if not len(rows):
        source = images.source if isinstance(images, ImageStream) else ""
        of_source = f" of {source}" if source else ""
        raise ValueError(
            f"The model was trained on all {count:,} images{of_source}, so none is left. Give images that it was not "
            "trained on."
        )
    left_out = count - len(rows)
    if left_out:
        left = (
            f"{left_out:,} of {count:,} images are left out, because the model was trained on them."
        )
        notes = [left, *notes]
    return rows, " ".join(notes)


def _unseen_of_earlier(record: TrainedOn, images: Images) -> tuple[np.ndarray, str]:
    """The images that the run of an earlier version held out, if its checksums are those of an undivided folder."""
    everything = np.arange(len(images))
    source = images.source if isinstance(images, ImageStream) else ""
    if not source or not Path(source).is_dir() or images.whole.root is None:
        return everything, EARLIER
    try:
        train = open_samples(source, "train")
    except ValueError:
        return everything, EARLIER
    with_labels = _Labeled(train.class_names, torch.as_tensor(train.labels, dtype=torch.int64))
    same = label_checksum(with_labels) == record.labels
    same = same and same_images(record.pictures, train.fingerprint())
    if not same and not _same_folder(record.data, source):
        return everything, EARLIER
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
