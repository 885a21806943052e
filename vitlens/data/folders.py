"""Class folders of images, in the order of torchvision's `ImageFolder`. Notes count and name what is not read."""

from __future__ import annotations

import hashlib
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitlens.data import tables
from vitlens.data.imageset import Samples, samples_of_files
from vitlens.data.sources import (
    EVERY_SPLIT,
    FORMATS,
    Columns,
    find_split,
    import_function,
    without_columns,
)
from vitlens.images import is_image
from vitlens.texts import shown
from vitlens.walk import (
    HIDDEN,
    LOOP,
    Walk,
    archives,
    entries,
    has_link,
    hidden,
    identity,
    in_several,
    list_names,
    surroundings,
    walk,
)

VALID_SHARE = 0.1


class ClassFolders:
    """The image files in class folders, each real file once in a class.

    The order is that of torchvision's `ImageFolder`, whose own walk follows links in circles.

    classes: names of the classes in label order, of which some may be empty. By default all folders, each with an
    image. files: names below `root`. targets: the label of each. identities: device and inode of each. walked: what was
    left out. has_links: True if a file may be in several classes or splits.
    """

    def __init__(self, root: Path, classes: Sequence[str] | None = None):
        self.root = root
        inside = list_folders(root)
        self.walked = inside.walked
        for folder in inside.hidden:
            self.walked.add(walk(root / folder, _never, most=math.inf), folder)
        self.classes = list(classes or inside.folders)
        self.files: list[str] = []
        self.targets: list[int] = []
        self.identities: list[np.ndarray] = []
        self.has_links = False
        folders = Counter()
        for label, class_name in enumerate(self.classes):
            folder = inside.folders.get(class_name)
            if folder is None:  # validation images may lack a class
                self.identities.append(np.empty((0, 2), np.uint64))
                continue
            walked = walk(root / folder, is_image)
            self._require_images(class_name, walked, may_be_empty=classes is not None)
            self.files += [f"{folder}{os.sep}{name}" for name in walked.names]
            self.targets += [label] * len(walked.names)
            self.identities.append(walked.identities)
            self.walked.add(walked, folder)
            self.has_links |= walked.has_links
            folders.update(walked.folders - inside.walked.folders)
        self.folders = set(folders)
        self.has_links |= any(number > 1 for number in folders.values())

    def _require_images(self, class_name: str, walked: Walk, may_be_empty: bool) -> None:
        """Raise ValueError for a class with other files only, or without any file unless it may be empty."""
        if walked.names:
            return
        is_empty = not (walked.others or walked.left_out)
        if is_empty and may_be_empty:
            return
        if is_empty or not may_be_empty:
            others = sorted(walked.others)
            reasons = f" Its files, such as {list_names(others)}, are not images." if others else ""
            reasons += f" {walked.sentences()}" if walked.left_out else ""
            raise ValueError(
                f"A class of {shown(self.root)} has no image: {shown(class_name)}.{reasons} Add images that Pillow "
                "opens, or remove the folder."
            )
        raise ValueError(
            f"The class {shown(class_name)!r} of {shown(self.root)} has no image, but other files. Repair or remove it."
        )

    def notes(self) -> str:
        """Sentences about the files that are not read and about images in several classes, or ""."""
        unread = sorted(self.walked.others + self.walked.left_out.get(HIDDEN, []))
        sentences = []
        if unread:
            sentences.append(
                f"{len(unread):,} files of {shown(self.root)} are not read: {list_names(unread)}."
            )
        sentences.append(self.walked.sentences(without=(HIDDEN,)))
        sentences.append(self._note_on_conflicts())
        return " ".join(filter(None, sentences))

    def _note_on_conflicts(self) -> str:
        """Sentence about the images that are in several classes, or ""."""
        if not self.has_links:
            return ""
        shared = in_several(self.identities)
        if not shared:
            return ""
        starts = np.cumsum([0, *map(len, self.identities)])
        names = [self.files[starts[label] + position] for label, position in shared]
        pairs = {(label, position) for label, position in shared}
        number = len(
            {tuple(self.identities[label][position].tolist()) for label, position in pairs}
        )
        count = "1 image is" if number == 1 else f"{number:,} images are"
        return (
            f"{count} in several classes under different names, so labels contradict each other: "
            f"{list_names(names)}."
        )


def _never(path: str) -> bool:
    return False


@dataclass(frozen=True)
class Folders:
    """The folders in a folder. folders: their names, sorted, by the name of the class. walked: the other entries."""

    folders: dict[str, str]
    walked: Walk
    hidden: list[str]


def list_folders(path: str | os.PathLike) -> Folders:
    """The folders in a folder without hidden ones and those that contain it, by their names in Unicode's NFC form.

    Raises ValueError for two names of the same letters.
    """
    walked = Walk(folders=surroundings(path))
    folders: dict[str, str] = {}
    hidden_folders = []
    for entry in entries(path):
        name = entry.name
        if entry.reason:
            walked.leave_out(entry.reason, name)
        elif not entry.is_folder:
            walked.others.append(name)
        elif hidden(name):
            hidden_folders.append(name)
        elif identity(entry.about) in walked.folders:
            walked.leave_out(LOOP, name)
        else:
            class_name = unicodedata.normalize("NFC", name)
            if class_name in folders:
                raise ValueError(
                    f"{shown(path)} holds two folders whose names look the same, {ascii(folders[class_name])} and "
                    f"{ascii(name)}. Put their files into one."
                )
            folders[class_name] = name
    return Folders(dict(sorted(folders.items())), walked, hidden_folders)


def open_folder(
    path: Path, split: str, root: str | os.PathLike | None = None, columns: Columns | None = None
) -> Samples:
    """Samples of a folder of Parquet files, WebDataset shards or class folders."""
    part = "test" if split == "whole" else split
    tables_here, _ = archives(path, ".parquet")
    if tables_here:
        return tables.parquet(path, part, root, columns)
    inside = subfolders(path)
    split_names = [name for name in inside if name.lower() in EVERY_SPLIT]
    has_others = len(split_names) < len(inside)
    present = [name for name in split_names if _is_split(path / name, has_others)]
    if columns and any(columns) and (present or has_others):
        raise without_columns(path)
    if present:
        return _open_split(path, part, present)
    if has_others:
        return _divide_classes(path, split, split_names)
    for suffix, reader in FORMATS.items():
        for name in (".", *split_names):
            files, _ = archives(path / name, suffix)
            if files:
                read = import_function(reader)
                options = {"columns": columns} if columns and any(columns) else {}
                return read(path, part, **options)
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
    files = [os.path.join(name, file) for file in images.files]
    notes = [images.notes()]
    for other in present:
        if other != name and train in (name, other):
            notes.append(_note_on_leak(images, path / other))
    note = " ".join(filter(None, notes))
    return samples_of_files(path, files, images.targets, class_names, note)


def _note_on_leak(images: ClassFolders, other: Path) -> str:
    """Sentence about the images of a split that are also in another one, or "".

    The other folder is walked only if links make this possible, because it may hold millions of files.
    """
    folders = set()
    for name in list_folders(other).folders.values():
        folders.add(identity(os.stat(other / name)))
    if not (images.has_links or folders & images.folders or has_link(other)):
        return ""
    there = walk(other, is_image)
    own = np.concatenate([np.empty((0, 2), np.uint64), *images.identities])
    shared = in_several([own, there.identities])
    names = [images.files[position] for group, position in shared if group == 0]
    if not names:
        return ""
    count = "1 image" if len(names) == 1 else f"{len(names):,} images"
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{count} of {shown(images.root)} {verb} also in {shown(other)}, under the same or another name, so training "
        f"and validation overlap: {list_names(names)}."
    )


def _divide_classes(path: Path, split: str, split_names: Sequence[str]) -> Samples:
    """All images for the split "whole", else about a tenth of each class for validation and the rest for training.

    A file's split depends on its name alone, so it stays when files are added or removed. If a class would have no file
    in a split, the file closest to the boundary is put there.
    """
    images = ClassFolders(path)
    by_class: list[list[str]] = [[] for _ in images.classes]
    for file, label in zip(images.files, images.targets, strict=True):
        by_class[label].append(Path(file).as_posix())
    notes = []
    if split_names:
        notes.append(f"The folder {split_names[0]} of {path} is read as a class, not as a split.")
    unread = images.notes()
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


def _files(path: Path) -> list[Path]:
    files = []
    for entry in entries(path):
        if entry.about and not entry.is_folder and not hidden(entry.name):
            files.append(path / entry.name)
    return files


def subfolders(path: str | os.PathLike) -> list[str]:
    """Names of the classes in a folder, sorted by code points, without hidden ones."""
    return list(list_folders(path).folders)
