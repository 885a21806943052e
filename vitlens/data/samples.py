"""What a source lists: samples by number, their labels, the names of the classes.

Samples go to worker processes, so they can be pickled and hold no open file: each reading opens its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch import Tensor

VALIDATION = ("valid", "validation", "val")
SPLITS = {"train": ("train",), "valid": (*VALIDATION, "test"), "test": ("test", *VALIDATION)}
EVERY_SPLIT = {name for names in SPLITS.values() for name in names}
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}


class Samples(Protocol):
    """Pictures by number."""

    def __len__(self) -> int: ...

    def name(self, i: int) -> str:
        """What to call sample ``i`` in a message."""

    def content(self, i: int) -> bytes | Image.Image | Tensor:
        """Sample ``i``: encoded, as a Pillow picture, or as pixels uint8 (3, H, W)."""


@dataclass(frozen=True)
class Listing:
    """One split of a source before any image is read."""

    samples: Samples
    labels: Tensor | Sequence[int]
    class_names: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Chosen:
    """Some of the samples of another source: those with the numbers ``rows``."""

    source: Samples
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, i: int) -> str:
        return self.source.name(int(self.rows[i]))

    def content(self, i: int) -> bytes | Image.Image | Tensor:
        return self.source.content(int(self.rows[i]))


def first_of(split: str, present: Iterable[str]) -> str | None:
    """The first of the names of ``split`` that is ``present``."""
    present = set(present)
    return next((name for name in SPLITS[split] if name in present), None)


def part(split: str) -> str:
    """The split to read where a source is divided: ``"whole"`` asks for all of one that is not."""
    return "test" if split == "whole" else split


def is_image(name: str) -> bool:
    """Whether a file of that name is one: not if it begins with a dot, as what a Mac puts beside each file does."""
    stem, suffix = os.path.splitext(os.path.basename(name))
    return suffix.lower() in SUFFIXES and not stem.startswith(".")


def packed(names: Iterable[str]) -> np.ndarray:
    """Names in one array: a million Python strings would be copied into each worker by their reference counts."""
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


def numbered(*splits: Sequence[int]) -> tuple[str, ...]:
    """Names for classes that have none: their numbers, those of the training images too, which all splits share."""
    return tuple(str(i) for i in range(max((int(label) for labels in splits for label in labels), default=-1) + 1))


def names_beside(folder: Path) -> tuple[str, ...] | None:
    """Class names from ``classes.json`` in ``folder``: a list of names, or a dict with ``names``.

    ``wnids`` (WordNet numbers) stand in where there are no names.
    """
    return parsed(folder / "classes.json", _class_names, "a list of class names, or a dict with one under 'names'")


def _class_names(text: str) -> tuple[str, ...]:
    content, kinds = json.loads(text), (str, int)
    names = content if isinstance(content, list) else content.get("names") or content["wnids"]
    if isinstance(names, dict):  # by WordNet number; numbers by name are no names
        names, kinds = [names[key] for key in content.get("wnids", names)], (str,)
    if not isinstance(names, list) or not all(isinstance(name, kinds) for name in names):
        raise TypeError(f"these are none: {names!r:.60}")
    return tuple(map(str, names))


def parsed(path: Path, parse: Callable[[str], Any], wanted: str) -> Any:
    """What ``parse`` makes of a small text beside the images; None if it is not there.

    Raises ``ValueError`` with the name of the file for a text of another kind.
    """
    try:
        return parse(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (AttributeError, LookupError, TypeError, ValueError) as problem:
        reason = f"{type(problem).__name__}: {problem}"
        raise ValueError(f"{path} should hold {wanted}, in UTF-8 ({reason}). Repair or remove it.") from problem
