"""Class folders of images, read by torchvision's `ImageFolder`. Notes count and name the files that are not read."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

from torchvision.datasets import ImageFolder

from vitlens.data import tables
from vitlens.data.imageset import Samples, samples_of_files
from vitlens.data.sources import EVERY_SPLIT, FORMATS, find_split, import_function
from vitlens.images import hidden, is_image

VALID_SHARE = 0.1


class ClassFolders(ImageFolder):
    """torchvision's `ImageFolder` without hidden files and folders.

    classes: names of the folders in label order, of which some may be empty. By default all, each with an image.
    """

    def __init__(self, root: Path, classes: Sequence[str] | None = None):
        self._names = classes
        try:
            super().__init__(root, is_valid_file=self._is_valid, allow_empty=classes is not None)
        except FileNotFoundError as problem:
            raise ValueError(
                f"A class of {root} has no image: {problem}. Add images that Pillow opens, or remove the folder."
            ) from problem
        with_images = {self.classes[label] for label in self.targets}
        without_images = set(self.classes) - with_images
        for name in without_images:
            other_files = Path(root, name).rglob("*.*")
            if any(other_files):
                raise ValueError(
                    f"The class {name!r} of {root} has no image, but other files. Repair or remove it."
                )

    def _is_valid(self, path: str) -> bool:
        relative = os.path.relpath(path, self.root)
        return not hidden(relative) and is_image(path)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = list(self._names or subfolders(directory))
        numbers = {name: i for i, name in enumerate(names)}
        return names, numbers


def open_folder(path: Path, split: str, root: str | Path | None = None) -> Samples:
    """Samples of a folder of Parquet files, WebDataset shards or class folders."""
    part = "test" if split == "whole" else split
    if any(path.glob("*.parquet")):
        return tables.parquet(path, part, root)
    inside = subfolders(path)
    split_names = [name for name in inside if name.lower() in EVERY_SPLIT]
    has_others = len(split_names) < len(inside)
    present = [name for name in split_names if _is_split(path / name, has_others)]
    if present:
        return _open_split(path, part, present)
    if has_others:
        return _divide_classes(path, split, split_names)
    for suffix, reader in FORMATS.items():
        for name in (".", *split_names):
            archives = (path / name).glob(f"*{suffix}")
            if any(archives):
                read = import_function(reader)
                return read(path, part)
    of_split = f" of {split_names[0]}" if split_names else ""
    raise ValueError(
        f"{path} holds no Parquet files, no WebDataset shards and no folders of images, one for each class{of_split}."
    )


def _is_split(path: Path, has_others: bool) -> bool:
    """True if a folder named like a split is one. With loose images, and class folders next to it, it is a class."""
    if not subfolders(path):
        return False
    if not has_others:
        return True
    return not any(is_image(file) for file in _files(path))


def _open_split(path: Path, split: str, present: list[str]) -> Samples:
    name = find_split(split, present, str(path))
    # Labels number the training classes. The validation images may lack some of them.
    train = find_split("train", present) or name
    folder = path / name
    class_names = subfolders(path / train)
    unknown = set(subfolders(folder)) - set(class_names)
    if unknown:
        first = min(unknown)
        raise ValueError(f"{folder} holds a class {first!r} that {path / train} lacks.")
    required = class_names if name != train else None
    images = ClassFolders(folder, required)
    files = [os.path.relpath(file, path) for file, _ in images.samples]
    note = note_on_unread(folder, images)
    return samples_of_files(path, files, images.targets, class_names, note)


def _divide_classes(path: Path, split: str, split_names: Sequence[str]) -> Samples:
    """All images for the split "whole", else about a tenth of each class for validation and the rest for training.

    A file's split depends on its name alone, so it stays when files are added or removed. If a class would have no file
    in a split, the file closest to the boundary is put there.
    """
    images = ClassFolders(path)
    by_class: list[list[str]] = [[] for _ in images.classes]
    for file, label in images.samples:
        relative = Path(os.path.relpath(file, path))
        by_class[label].append(relative.as_posix())
    notes = []
    if split_names:
        notes.append(f"The folder {split_names[0]} of {path} is read as a class, not as a split.")
    unread = note_on_unread(path, images)
    if unread:
        notes.append(unread)
    if split == "whole":
        notes.append(
            f"{path} is not divided into training and validation images, so all its images are opened."
        )
    else:
        for label, class_name in enumerate(images.classes):
            by_class[label] = _divide_class(class_name, by_class[label], split, path)
        notes.append(
            f"{path} is not divided into training and validation images: about a tenth of each class is kept for "
            "validation, chosen by the names of the files."
        )
    names = []
    labels = []
    for label, files in enumerate(by_class):
        names += files
        labels += [label] * len(files)
    return samples_of_files(path, names, labels, images.classes, " ".join(notes))


def _divide_class(class_name: str, files: list[str], split: str, root: Path) -> list[str]:
    """The files of a class for training, or those for validation."""
    if len(files) < 2:
        raise ValueError(
            f"The class {class_name!r} of {root} has a single image, but training and validation need one each. Add "
            "an image, or remove the class."
        )
    numbers = {name: number_of(name) for name in files}
    lowest = min(numbers.values())
    highest = max(numbers.values())
    above_lowest = math.nextafter(lowest, 1)
    boundary = max(VALID_SHARE, above_lowest)
    boundary = min(boundary, highest)
    if split == "train":
        return [name for name in files if numbers[name] >= boundary]
    return [name for name in files if numbers[name] < boundary]


def number_of(name: str) -> float:
    """A number in [0, 1) that depends on a name alone."""
    data = os.fsencode(name)
    digest = hashlib.blake2b(data, digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def note_on_unread(path: Path, images: ImageFolder) -> str:
    """Note with the number and names of the files below a folder that are not read, or ""."""
    read = {file for file, _ in images.samples}
    unread = []
    for folder, _, names in os.walk(path, followlinks=True):
        for name in names:
            file = os.path.join(folder, name)
            if file not in read:
                unread.append(os.path.relpath(file, path))
    if not unread:
        return ""
    unread.sort()
    first = ", ".join(unread[:5])
    rest = len(unread) - 5
    more = f" and {rest:,} more" if rest > 0 else ""
    return f"{len(unread):,} files of {path} are not read: {first}{more}."


def _files(path: Path) -> list[Path]:
    files = []
    for file in path.iterdir():
        if file.is_file() and not hidden(file.name):
            files.append(file)
    return files


def subfolders(path: str | Path) -> list[str]:
    """Names of the folders in a folder, sorted by code points, without hidden ones."""
    names = []
    for entry in os.scandir(path):
        if entry.is_dir() and not hidden(entry.name):
            names.append(entry.name)
    names.sort()
    return names
