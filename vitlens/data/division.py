"""Which images are for training and which for validation, where the source does not say."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

VALID_SHARE = 0.1


def divided(by_class: dict[str, list[str]], split: str, where: Path) -> tuple[list[str], list[int], str]:
    """One side of a division of each class by the names of its files: a tenth, about, is for validation and for test.

    The split ``"whole"`` is all of it, undivided. A file's side is a function of its own name, so it keeps it when
    other files come or go. Only where a class has no name that falls to a side does the nearest one stand in.
    """
    if split == "whole":
        found = [(name, label) for label, files in enumerate(by_class.values()) for name in files]
        note = f"{where} is not divided, so all of its images count, also those that a model may have learned from."
        return [name for name, _ in found], [label for _, label in found], note
    names, labels = [], []
    for label, (class_name, files) in enumerate(by_class.items()):
        if len(files) < 2:
            raise ValueError(
                f"The class {class_name!r} of {where} has a single image, and it takes one for training and another "
                "for validation. Add an image, or remove the class."
            )
        places = {name: place(name) for name in files}
        lowest, highest = min(places.values()), max(places.values())
        edge = min(max(VALID_SHARE, math.nextafter(lowest, 1)), highest)
        side = [name for name in files if (places[name] < edge) == (split != "train")]
        names += side
        labels += [label] * len(side)
    note = (
        f"{where} is not divided into training and validation images: about a tenth of each class is kept for "
        "validation, chosen by the names of the files."
    )
    return names, labels, note


def place(name: str) -> float:
    """A number in [0, 1) for a name, the same everywhere and always."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=6).digest(), "big") / 2**48


def refuse_unknown(unknown: set[str], where: object, train: object) -> None:
    """Raise ``ValueError`` if there are classes in a split that the training images lack."""
    if unknown:
        raise ValueError(f"{where} holds a class {min(unknown)!r} that {train} lacks.")
