"""Class folders of images, read by torchvision's `ImageFolder`. Notes count and name the files that are not read."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

from torchvision.datasets import ImageFolder

from vitlens.data import tables
from vitlens.data.imageset import Samples, of_files
from vitlens.data.sources import EVERY_SPLIT, FORMATS, first_of, resolved
from vitlens.images import hidden, is_image

VALID_SHARE = 0.1


class Classes(ImageFolder):
    """torchvision's `ImageFolder` without hidden files and folders.

    classes: names of the folders in label order, of which some may be empty. By default all, each with an image.
    """

    def __init__(self, root: Path, classes: Sequence[str] | None = None):
        self._given = classes
        try:
            super().__init__(root, is_valid_file=self._counts, allow_empty=classes is not None)
        except FileNotFoundError as problem:
            raise ValueError(
                f"A class of {root} has no image: {problem}. Add images that Pillow opens, or remove the folder."
            ) from problem
        for name in {*self.classes} - {self.classes[label] for label in self.targets}:
            if any((Path(root) / name).rglob("*.*")):
                raise ValueError(
                    f"The class {name!r} of {root} has no image, but other files. Repair or remove it."
                )

    def _counts(self, path: str) -> bool:
        return not hidden(os.path.relpath(path, self.root)) and is_image(path)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = list(self._given or subfolders(directory))
        return names, {name: i for i, name in enumerate(names)}


def folder(path: Path, split: str, root: str | Path | None = None) -> Samples:
    """Samples of a folder of Parquet files, WebDataset shards or class folders."""
    part = "test" if split == "whole" else split
    if any(path.glob("*.parquet")):
        return tables.parquet(path, part, root)
    named = [name for name in subfolders(path) if name.lower() in EVERY_SPLIT]
    others = {*subfolders(path)} - {*named}
    # A folder named like a split that has loose images and class folders next to it is a class.
    if divided := [
        n
        for n in named
        if subfolders(path / n) and not (others and any(map(is_image, _files(path / n))))
    ]:
        return _of_split(path, part, divided)
    if not others:
        for suffix, read in FORMATS.items():
            if any(file for name in (".", *named) for file in (path / name).glob(f"*{suffix}")):
                return resolved(read)(path, part)
        raise ValueError(
            f"{path} holds no Parquet files, no WebDataset shards and no folders of images, one for each class"
            f"{f' of {named[0]}' if named else ''}."
        )
    return _undivided(path, split, named)


def _of_split(path: Path, split: str, present: list[str]) -> Samples:
    chosen = first_of(split, present, str(path))
    train = (
        first_of("train", present) or chosen
    )  # labels number the training classes, and validation may lack some
    class_names = subfolders(path / train)
    if unknown := sorted({*subfolders(path / chosen)} - {*class_names}):
        raise ValueError(f"{path / chosen} holds a class {unknown[0]!r} that {path / train} lacks.")
    images = Classes(path / chosen, class_names if chosen != train else None)
    names = [os.path.relpath(file, path) for file, _ in images.samples]
    return of_files(path, names, images.targets, class_names, unread(path / chosen, images))


def _undivided(path: Path, split: str, named: Sequence[str]) -> Samples:
    """All images for the split "whole", else about a tenth of each class for validation and the rest for training.

    A file's split depends on its name alone, so it stays when files are added or removed. A split of a class that would
    be empty gets the file with the nearest number.
    """
    images = Classes(path)
    by_class: list[list[str]] = [[] for _ in images.classes]
    for file, label in images.samples:
        by_class[label].append(Path(os.path.relpath(file, path)).as_posix())
    notes = (
        [f"The folder {named[0]} of {path} is read as a class, not as a split."] if named else []
    )
    notes.append(unread(path, images))
    if split == "whole":
        notes.append(
            f"{path} is not divided, so all its images are used, including any training images."
        )
    else:
        by_class = [
            _side(name, files, split, path)
            for name, files in zip(images.classes, by_class, strict=True)
        ]
        notes.append(
            f"{path} is not divided into training and validation images: about a tenth of each class is kept for "
            "validation, chosen by the names of the files."
        )
    names = [name for files in by_class for name in files]
    labels = [label for label, files in enumerate(by_class) for _ in files]
    return of_files(path, names, labels, images.classes, " ".join(filter(None, notes)))


def _side(class_name: str, files: list[str], split: str, root: Path) -> list[str]:
    if len(files) < 2:
        raise ValueError(
            f"The class {class_name!r} of {root} has a single image, but training and validation need one each. Add "
            "an image, or remove the class."
        )
    numbers = {name: number_of(name) for name in files}
    lowest, highest = min(numbers.values()), max(numbers.values())
    edge = min(max(VALID_SHARE, math.nextafter(lowest, 1)), highest)
    return [name for name in files if (numbers[name] < edge) == (split != "train")]


def number_of(name: str) -> float:
    """A number in [0, 1) that depends on a name alone."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=6).digest(), "big") / 2**48


def unread(path: Path, images: ImageFolder) -> str:
    """Note with the number and names of the files below a folder that are not read, or ""."""
    every = {
        os.path.join(here, name)
        for here, _, files in os.walk(path, followlinks=True)
        for name in files
    }
    left = sorted(
        os.path.relpath(file, path) for file in every - {file for file, _ in images.samples}
    )
    if not left:
        return ""
    more = f" and {len(left) - 5:,} more" if len(left) > 5 else ""
    return f"{len(left):,} files of {path} are not read: {', '.join(left[:5])}{more}."


def _files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.is_file() and not hidden(file.name)]


def subfolders(path: str | Path) -> list[str]:
    """Names of the folders in a folder, sorted by code points, without hidden ones."""
    return sorted(
        entry.name for entry in os.scandir(path) if entry.is_dir() and not hidden(entry.name)
    )
