"""What a source lists before any image is read: samples by number, their labels, the class names.

Samples go to worker processes, so they can be pickled and hold no open file: each reading opens its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch import Tensor

VALIDATION = ("valid", "validation", "val")
SPLITS = {
    "train": ("train", "training"),
    "valid": (*VALIDATION, "test", "testing"),
    "test": ("test", "testing", *VALIDATION),
}
EVERY_SPLIT = {name for names in SPLITS.values() for name in names}
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
VALID_SHARE = 0.1
NO_CLASS = (
    "{} holds a folder named {}, which stands for a split, but in it no folder of a class. Put the images of each "
    "class into a folder of their own there; if it is a class itself, give it another name."
)


class Samples(Protocol):
    """Pictures by number."""

    def __len__(self) -> int: ...

    def name(self, i: int) -> str:
        """What to call sample `i` in a message."""

    def content(self, i: int) -> bytes | Image.Image | Tensor:
        """Sample `i`: encoded, as a Pillow picture, or as pixels uint8 (3, H, W)."""


@dataclass(frozen=True)
class Listing:
    """One split of a source before any image is read."""

    samples: Samples
    labels: Tensor | Sequence[int]
    class_names: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Numbered:
    """Samples in a sequence, called by their numbers: `images` is uint8 (N, 3, H, W), or a list of bytes or images."""

    title: str
    images: Any

    def __len__(self) -> int:
        return len(self.images)

    def name(self, i: int) -> str:
        return f"{self.title} image {i}"

    def content(self, i: int) -> bytes | Image.Image | Tensor:
        return self.images[i]


@dataclass(frozen=True)
class Named:
    """Samples with a name each; `names` is what `packed` makes of them."""

    names: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def name(self, i: int) -> str:
        return os.fsdecode(self.names[i])


@dataclass(frozen=True)
class Chosen:
    """The samples of another source at the indices `rows`."""

    source: Samples
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, i: int) -> str:
        return self.source.name(int(self.rows[i]))

    def content(self, i: int) -> bytes | Image.Image | Tensor:
        return self.source.content(int(self.rows[i]))


def packed(names: Iterable[str]) -> np.ndarray:
    """Names in one array: a million Python strings would be copied into each worker by their reference counts."""
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


def is_image(path: str) -> bool:
    """Whether a path, relative to the folder of the data and with slashes, names an image that counts. Hidden files do
    not count, nor does what lies in hidden folders, such as the copies that a Mac or Jupyter makes."""
    _, suffix = os.path.splitext(path)
    return suffix.lower() in SUFFIXES and not any(map(hidden, path.split("/")))


def hidden(name: str) -> bool:
    """Whether a file or folder with this name is hidden, or one that a Mac adds to archives."""
    return name == "__MACOSX" or name.startswith(".") and name not in (".", "..")


def fingerprint(samples: Samples) -> str:
    """A checksum of sixteen of the samples, to notice when pictures were replaced under the same names and labels.

    It reads the files, not the pixels, because decoders may differ by a level of gray. Of pictures that a library gives
    decoded, only the sizes count. What cannot be read is left out.
    """
    digest = hashlib.sha256()
    for i in np.unique(np.linspace(0, len(samples) - 1, 16).astype(int)).tolist():
        with suppress(Exception):  # it is told when all are decoded
            content = samples.content(i)
            if isinstance(content, Image.Image):
                content = f"{content.mode} {content.size}".encode()
            digest.update(content if isinstance(content, bytes) else content.numpy().tobytes())
    return digest.hexdigest()[:12]


# Splits


def first_of(split: str, present: Iterable[str]) -> str | None:
    """The first name for `split`, such as "valid" or "Val", that is among those `present`; None if none is."""
    by_name = {name.lower(): name for name in present if name}
    return next((by_name[name] for name in SPLITS[split] if name in by_name), None)


def beside(where: object, splits: Iterable[str], others: Sequence[str]) -> str:
    """A note that folders beside those of the splits are not read; "" if there are none. others: their names."""
    named = " and ".join(sorted(splits))
    return f"{where} is read by its folders {named}; {others[0]!r} and other folders do not count." if others else ""


def is_split(name: str) -> bool:
    """Whether a folder of this name stands for a split, in small or capital letters."""
    return name.lower() in EVERY_SPLIT


def divided(by_class: dict[str, list[str]], split: str, where: Path) -> tuple[list[str], list[int], str]:
    """Names, labels and a note for one split of images that come undivided: a tenth of each class is for validation.

    A file's split depends on its own name alone, so it stays when other files come or go. Only where that would leave
    a split of a class empty does the file with the nearest number stand in. The split `"whole"` is everything.
    """
    kept = by_class
    note = f"{where} is not divided, so all of its images count, also those that a model may have learned from."
    if split != "whole":
        kept = {name: _side(name, files, split, where) for name, files in by_class.items()}
        note = (
            f"{where} is not divided into training and validation images: about a tenth of each class is kept for "
            "validation, chosen by the names of the files."
        )
    return *labeled(kept.values()), note


def labeled(by_class: Iterable[Sequence[str]]) -> tuple[list[str], list[int]]:
    """All names, one class after the other, and the class number of each."""
    pairs = [(name, label) for label, names in enumerate(by_class) for name in names]
    return [name for name, _ in pairs], [label for _, label in pairs]


def _side(class_name: str, files: list[str], split: str, where: Path) -> list[str]:
    if len(files) < 2:
        raise ValueError(
            f"The class {class_name!r} of {where} has a single image, but training and validation need one each. Add "
            "an image, or remove the class."
        )
    places = {name: place(name) for name in files}
    lowest, highest = min(places.values()), max(places.values())
    edge = min(max(VALID_SHARE, math.nextafter(lowest, 1)), highest)
    return [name for name in files if (places[name] < edge) == (split != "train")]


def place(name: str) -> float:
    """A number in [0, 1) for a name, the same everywhere and always."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=6).digest(), "big") / 2**48


# Class names


def check_known(classes: Iterable[str], where: object, training: Iterable[str], train: object) -> None:
    """Raise `ValueError` if a split has classes that the training images lack."""
    if unknown := set(classes) - set(training):
        raise ValueError(f"{where} holds a class {min(unknown)!r} that {train} lacks.")


def numbers_as_names(*splits: Sequence[int]) -> tuple[str, ...]:
    """Class names for data that has none: the numbers from 0 to the highest label of the given splits. Raises
    ValueError for a label that looks like an id."""
    highest, count = max((int(label) for labels in splits for label in labels), default=-1), sum(map(len, splits))
    if highest > max(100_000, count):
        raise ValueError(
            f"A label of {highest:,} among {count:,} images is no number of a class; it looks like an id. Number the "
            "classes from 0 up."
        )
    return tuple(str(i) for i in range(highest + 1))


def names_beside(folder: Path) -> tuple[str, ...] | None:
    """Class names from `classes.json` in `folder`: a list of names, or a dict with `names`.

    `wnids` (WordNet numbers) stand in where there are no names.
    """
    return parsed(folder / "classes.json", _class_names, "a list of class names, or a dict with one under 'names'")


def _class_names(text: str) -> tuple[str, ...]:
    content, kinds = json.loads(text), (str, int)
    names = content if isinstance(content, list) else content.get("names") or content["wnids"]
    if isinstance(names, dict):  # by WordNet number; numbers by name are no names
        names, kinds = [names[key] for key in content.get("wnids", names)], (str,)
    if not isinstance(names, list) or not all(isinstance(name, kinds) for name in names):
        raise TypeError(f"not class names: {names!r:.60}")
    return tuple(map(str, names))


def parsed(path: Path, parse: Callable[[str], Any], expected: str) -> Any:
    """The content of a small text file, read by `parse`; None if there is no such file.

    Raises ValueError, which names the file, if it does not hold what is `expected`.
    """
    try:
        return parse(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (AttributeError, LookupError, TypeError, ValueError) as problem:
        reason = f"{type(problem).__name__}: {problem}"
        raise ValueError(f"{path} should hold {expected}, in UTF-8 ({reason}). Repair or remove it.") from problem
