"""Digests of images, by which the training images of a model are recognized wherever they are.

An image has two digests of 64 bits, of which 0 stands for an unknown one. `stored` covers the encoded bytes, so copied,
renamed and packed files keep it. `pixels` covers the decoded RGB pixels, so files that were saved again without loss
keep it. JPEG, PNG, GIF and WebP files over 32 KB are read in part: size, first and last 4 KB. An edit changes their
size or their end. Other files are read whole.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vitlens import files
from vitlens.names import unknown_name

__all__ = ["Digests", "TrainedOn", "pixel_digest", "read_trained_on", "stored_digest"]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

FILE = "trained_on.npy"
"""File in a model folder with the digests of the training images."""
RUN_FILE = "images.npy"
"""File in a run folder with the digests of the training images."""
EMBEDDED = 20_000
"""Number of images whose digests are also in the header of the exported weights."""
DECODED = 10_000
"""Number of images that are decoded only for the digests of their pixels."""
WHOLE = 32 * 1024
PART = 4096
COMPRESSED = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"RIFF")
"""First bytes of formats in which an edit changes the size or the end of the file."""


def stored_digest(content: str | os.PathLike | bytes | memoryview) -> int:
    """Digest of an encoded image, a file or bytes.

    >>> vitlens.digests.stored_digest(b"image") == vitlens.digests.stored_digest(memoryview(b"image"))
    True
    """
    if isinstance(content, str | os.PathLike):
        files.require_file(content)
        with open(content, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return _digest(size, *_parts_of_file(file, size))
    view = memoryview(content)
    size = len(view)
    if size > WHOLE and bytes(view[:4]).startswith(COMPRESSED):
        return _digest(size, view[:PART], view[-PART:])
    return _digest(size, view)


def _parts_of_file(file: io.RawIOBase, size: int) -> list[bytes]:
    beginning = file.read(PART)
    if size > WHOLE and beginning.startswith(COMPRESSED):
        file.seek(size - PART)
        return [beginning, file.read(PART)]
    return [beginning, file.readall()]


def pixel_digest(image: Image.Image) -> int:
    """Digest of the size and the pixels of an RGB image.

    >>> vitlens.digests.pixel_digest(cat) == vitlens.digests.pixel_digest(cat.copy())
    True
    """
    width, height = image.size
    return _digest(width, height.to_bytes(8, "little"), image.tobytes())


def _digest(size: int, *parts: bytes | memoryview) -> int:
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") or 1


@dataclass(frozen=True)
class Digests:
    """Digests of N images, two uint64 arrays (N,), and the names of the images for messages."""

    stored: np.ndarray
    pixels: np.ndarray
    names: Sequence = ()

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def either(self) -> np.ndarray:
        """The digest of the stored bytes, or of the pixels for images without stored bytes."""
        return np.where(self.stored, self.stored, self.pixels)

    @property
    def checksum(self) -> str:
        """12 hexadecimal digits of the digests of all images in their order."""
        return hashlib.sha256(self.either.tobytes()).hexdigest()[:12]

    def select_rows(self, rows: np.ndarray) -> Digests:
        """The digests at the positions `rows`."""
        names = np.asarray(self.names)[rows] if len(self.names) else ()
        return Digests(self.stored[rows], self.pixels[rows], names)

    def join(self, other: Digests) -> Digests:
        """The digests of both, without names."""
        stored = np.concatenate([self.stored, other.stored])
        pixels = np.concatenate([self.pixels, other.pixels])
        return Digests(stored, pixels)

    def names_of_changed(self, before: Digests) -> list[str]:
        """Sorted names of the images that differ from those at the same positions before."""
        rows = np.flatnonzero(self.either != before.either)
        if not len(self.names):
            return [f"number {row}" for row in rows]
        names = [self.names[row] for row in rows]
        texts = [os.fsdecode(name) if isinstance(name, bytes) else str(name) for name in names]
        return sorted(texts)

    def to_bytes(self) -> bytes:
        """The digests as a file of a NumPy array (2, N)."""
        file = io.BytesIO()
        np.save(file, np.stack([self.stored, self.pixels]))
        return file.getvalue()

    @classmethod
    def read(cls, file: str | os.PathLike | io.BytesIO) -> Digests | None:
        """The digests of a file, or None if it is missing or damaged."""
        with suppress(Exception):  # NumPy raises many types
            stored, pixels = np.load(file, allow_pickle=False)
            if stored.dtype == np.uint64 and stored.ndim == 1:
                return cls(stored, pixels)
        return None

    def embed(self, weights: bytes) -> bytes:
        """A file of safetensors with the digests of at most `EMBEDDED` images, and their number, in its header."""
        rows = np.arange(len(self))
        if len(self) > EMBEDDED:
            rows = np.linspace(0, len(self) - 1, EMBEDDED).astype(int)
        length = int.from_bytes(weights[:8], "little")
        header = json.loads(weights[8 : 8 + length])
        content = base64.b64encode(self.select_rows(rows).to_bytes()).decode()
        header["__metadata__"]["trained_on"] = content
        header["__metadata__"]["training_images"] = str(len(self))
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors are aligned
        return len(text).to_bytes(8, "little") + text + weights[8 + length :]


@dataclass(frozen=True)
class TrainedOn:
    """Record of the images that a model was trained on.

    digests: of the images. images: their number, more than there are digests if only some have one. labels, pictures:
    checksums in the `training.json` of runs of earlier versions, without digests. data: folder in the `data.json` of
    the run.
    """

    digests: Digests | None = None
    images: int = 0
    labels: str = ""
    pictures: str = ""
    data: str = ""

    @property
    def complete(self) -> bool:
        """True if every image has a digest."""
        return self.digests is not None and len(self.digests) >= self.images

    def contains(self, stored: np.ndarray, pixels: np.ndarray) -> np.ndarray:
        """True for each image that is among the training images, by either digest."""
        if self.digests is None:
            return np.zeros(len(stored), dtype=bool)
        by_file = np.isin(stored, self.digests.stored) & (stored != 0)
        by_pixels = np.isin(pixels, self.digests.pixels) & (pixels != 0)
        return by_file | by_pixels


def read_trained_on(place: str | os.PathLike) -> TrainedOn | None:
    """The record of the training images of a model folder or a file of weights, or None.

    Of a folder, it is in `trained_on.npy`, or for earlier versions in `training.json`. Of a file, it is in the header,
    or in the folder of which the file is the model or a checkpoint.
    """
    place = Path(place)
    with suppress(OSError):
        place = place.resolve()
    if place.is_dir():
        return _record_of_folder(place)
    if not place.is_file():
        return None
    record = _record_in_header(place)
    if record is not None and record.complete:
        return record
    if place.parent.name == "checkpoints":
        digests = Digests.read(place.parent.parent / RUN_FILE)
        return record if digests is None else TrainedOn(digests, len(digests))
    if place.name == "model.safetensors":
        return _record_of_folder(place.parent) or record
    return record


def _record_of_folder(folder: Path) -> TrainedOn | None:
    digests = Digests.read(folder / FILE)
    if digests is not None:
        return TrainedOn(digests, len(digests))
    weights = folder / "model.safetensors"
    record = _record_in_header(weights) if weights.is_file() else None
    if record is not None:
        return record
    account = _read_json(folder / "training.json")
    data = _read_json(folder.parent / "data.json").get("data") if folder.name == "model" else None
    if "pictures" not in account and not data:
        return None
    images, labels, pictures = (account.get(k) for k in ("training_images", "labels", "pictures"))
    return TrainedOn(None, images or 0, str(labels), str(pictures), str(data or ""))


def _read_json(file: Path) -> dict:
    """The object in a JSON file, or {}."""
    with suppress(OSError, ValueError):
        content = json.loads(files.read_text(file))
        if isinstance(content, dict):
            return content
    return {}


def _record_in_header(file: Path) -> TrainedOn | None:
    """The record in the header of a file of safetensors."""
    from safetensors import safe_open

    with suppress(Exception):  # other formats, and damaged files
        with safe_open(file, "np") as content:
            header = content.metadata() or {}
        digests = Digests.read(io.BytesIO(base64.b64decode(header["trained_on"])))
        if digests is not None:
            return TrainedOn(digests, int(header["training_images"]))
    return None
