"""Images in folders, one for each class."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitlens.data.division import divided, refuse_unknown
from vitlens.data.samples import EVERY_SPLIT, SPLITS, Listing, is_image, packed, part
from vitlens.data.tars import in_tars
from vitlens.data.validation import UNLABELED, WANTED, validation_files, validation_labels


@dataclass(frozen=True)
class Files:
    """Files below ``root``; ``names`` is what ``packed`` makes of their paths from there."""

    root: Path
    names: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def name(self, i: int) -> str:
        return os.fsdecode(self.names[i])

    def content(self, i: int) -> bytes:
        return (self.root / self.name(i)).read_bytes()


def in_folder(folder: Path, split: str) -> Listing:
    """Folders of classes in ``train/`` and ``val/``, tar files, folders of classes that are divided here, or ImageNet's
    validation files."""
    flat = validation_files(folder) if split != "train" else None
    if flat and not any(_images(flat[0] / name, folder) for name in _folders(flat[0])):
        return _side_by_side(*flat, split)
    named = [folder / name for name in sorted(EVERY_SPLIT) if (folder / name).is_dir()]
    if not any(_folders(d) for d in named):
        tars = sorted([*folder.glob("*.tar"), *(tar for d in named for tar in d.glob("*.tar"))])
        if tars:
            return in_tars(tars, folder, split)
        if named:
            raise ValueError(
                f"{folder} holds a folder named {named[0].name}, which stands for a split, but in it no folder of a "
                "class. Put the images of each class into a folder of their own there; if it is a class itself, give "
                "it another name."
            )
    return _in_split_folders(folder, part(split)) if named else _in_class_folders(folder, split)


def has_imagenet(folder: Path, split: str) -> bool:
    """Whether ``folder`` holds a split of ImageNet: folders of classes, or the validation files in one folder."""
    classes = any(_folders(folder / name) for name in SPLITS[split] if (folder / name).is_dir())
    return classes or folder.is_dir() and split != "train" and validation_files(folder) is not None


def _side_by_side(folder: Path, names: list[str], split: str) -> Listing:
    """ImageNet's validation files with their labels. Only the split "whole" may do without labels."""
    found = validation_labels(folder, names)
    if found:
        labels, wnids, place = found
        return Listing(Files(folder, packed(names)), labels, wnids, f"The labels of {folder} are those in {place}.")
    missing = (
        f"{folder} holds ImageNet's validation images, but no file of their labels lies there or in the folder around "
        f"it: put one of {WANTED} there"
    )
    if split != "whole":
        raise ValueError(f"{missing}.")
    note = f"{missing} for top-1; without, they are scored by ReaL's labels alone."
    return Listing(Files(folder, packed(names)), [0] * len(names), UNLABELED, note)


def _in_split_folders(folder: Path, split: str) -> Listing:
    root = next((folder / name for name in SPLITS[split] if (folder / name).is_dir()), None)
    if root is None:
        raise ValueError(
            f"{folder} holds neither Parquet shards nor a folder named {' or '.join(SPLITS[split])}, which the {split} "
            "split is read from."
        )
    # Labels number the training classes, so that a validation folder may lack one.
    train = next((folder / name for name in SPLITS["train"] if (folder / name).is_dir()), root)
    class_names = _folders(train)
    refuse_unknown(set(_folders(root)) - set(class_names), root, train)
    names, labels = [], []
    for label, name in enumerate(class_names):
        found = _images(root / name, folder) if (root / name).is_dir() else []
        names += found
        labels += [label] * len(found)
    return Listing(Files(folder, packed(names)), labels, tuple(class_names))


def _in_class_folders(folder: Path, split: str) -> Listing:
    by_class = {name: found for name in _folders(folder) if (found := _images(folder / name, folder))}
    if not by_class:
        raise ValueError(
            f"{folder} holds neither Parquet shards nor a folder named {' or '.join(SPLITS[part(split)])}, which the "
            f"{part(split)} split is read from, nor folders of images, one for each class."
        )
    names, labels, note = divided(by_class, split, folder)
    return Listing(Files(folder, packed(names)), labels, tuple(by_class), note)


def _folders(folder: Path) -> list[str]:
    return sorted(d.name for d in folder.iterdir() if d.is_dir() and not d.name.startswith("."))


def _images(folder: Path, root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in sorted(folder.rglob("*")) if is_image(path.name)]
