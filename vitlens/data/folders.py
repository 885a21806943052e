"""Images in folders, one for each class, and ImageNet's validation images in one folder with their labels in a file."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitlens.data.parquet import in_parquet
from vitlens.data.samples import (
    NO_CLASS,
    SPLITS,
    VALIDATION,
    Listing,
    Named,
    beside,
    check_known,
    divided,
    first_of,
    hidden,
    is_image,
    is_split,
    labeled,
    packed,
    parsed,
)
from vitlens.data.sources import Request, source_names
from vitlens.data.tars import in_tars

UNLABELED = ("without a label",)
"""The one class of images without labels. ReaL can still score them, because its labels go by file name."""

VALIDATION_FILE = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)
COUNT = 50_000
KIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
LISTS = ("imagenet_2012_validation_synset_labels.txt", "synset_labels.txt", "LOC_val_solution.csv", "val.txt")
EXPECTED = (
    f"{KIT}.tar.gz, val.txt (a file and the number of its class from 0 on each line) or {LISTS[0]} (a WordNet id on "
    "each line)"
)


@dataclass(frozen=True)
class Files(Named):
    """Files below `root`, named by their paths from there."""

    root: Path

    def content(self, i: int) -> bytes:
        return (self.root / self.name(i)).read_bytes()


def at_path(request: Request) -> Listing:
    """A .tar file, or a folder of Parquet shards, tar files or images."""
    path = Path(request.source)
    if path.suffix == ".tar" and path.is_file():
        return in_tars([path], path, request)
    if not path.is_dir():
        raise ValueError(
            f"{request.source!r} is not a folder, and no data set has that name. A source is {source_names()}, a task "
            "such as cifar10, a .tar file, or a folder of Parquet shards, of tar files or of images."
        )
    if any(path.glob("*.parquet")):
        return in_parquet(path, request.part, request.allow_partial)
    return in_folder(path, request)


def in_folder(folder: Path, request: Request) -> Listing:
    """Class folders in `train/` and `val/`, tar files, undivided class folders, or ImageNet's validation files."""
    flat = validation_files(folder) if request.split != "train" else None
    if flat and not any(_images(flat[0] / name, folder) for name in _folders(flat[0])):
        return _validation(*flat, request.split)
    named = [folder / name for name in _folders(folder) if is_split(name)]
    if not any(_folders(d) for d in named):
        tars = sorted([*folder.glob("*.tar"), *(tar for d in named for tar in d.glob("*.tar"))])
        if tars:
            return in_tars(tars, folder, request)
        if named:
            raise ValueError(NO_CLASS.format(folder, named[0].name))
    if named:
        found = _in_split_folders(folder, request.part, [d.name for d in named])
        others = [name for name in _folders(folder) if not is_split(name) and _any_image(folder / name)]
        note = beside(folder, [d.name for d in named], others)
        return replace(found, note=" ".join(filter(None, (found.note, note))))
    by_class = {name: found for name in _folders(folder) if (found := _images(folder / name, folder))}
    if not by_class:
        raise ValueError(f"{_lacking(folder, request.part)}, nor folders of images, one for each class.")
    names, labels, note = divided(by_class, request.split, folder)
    return Listing(Files(packed(names), folder), labels, tuple(by_class), note)


def has_imagenet(folder: Path, split: str) -> bool:
    """Whether `folder` holds a split of ImageNet: folders of classes, or the validation files in one folder."""
    classes = any(_folders(folder / name) for name in SPLITS[split] if (folder / name).is_dir())
    return classes or folder.is_dir() and split != "train" and validation_files(folder) is not None


def _in_split_folders(folder: Path, split: str, present: Sequence[str]) -> Listing:
    found = first_of(split, present)
    if found is None:
        raise ValueError(f"{_lacking(folder, split)}.")
    root = folder / found
    # Labels number the training classes, so that a validation folder may lack one.
    train = folder / (first_of("train", present) or found)
    class_names = _folders(train)
    check_known(_folders(root), root, class_names, train)
    by_class = {name: _images(root / name, folder) for name in class_names}
    names, labels = labeled(by_class.values())
    empty = [name for name, found in by_class.items() if not found]
    note = f"{root} holds no image of {len(empty)} of {len(by_class)} classes, such as {empty[0]!r}." if empty else ""
    return Listing(Files(packed(names), folder), labels, tuple(class_names), note)


def _lacking(folder: Path, split: str) -> str:
    folders = " or ".join(SPLITS[split])
    return f"{folder} holds neither Parquet shards nor a folder named {folders}, which the {split} split is read from"


def _folders(folder: Path) -> list[str]:
    return sorted(d.name for d in folder.iterdir() if d.is_dir() and not hidden(d.name))


def _images(folder: Path, root: Path) -> list[str]:
    below = (path.relative_to(root).as_posix() for path in sorted(folder.rglob("*")))
    return [path for path in below if is_image(path)]


def _any_image(folder: Path) -> bool:
    return any(is_image(path.name) for path in folder.rglob("*"))


# ImageNet's validation images as published


def validation_files(folder: Path) -> tuple[Path, list[str]] | None:
    """The folder that holds ImageNet's validation files (`folder` or its `val`), and their names."""
    for each in (folder, *(folder / name for name in VALIDATION)):
        if each.is_dir():
            names = sorted(path.name for path in each.iterdir() if VALIDATION_FILE.fullmatch(path.name))
            if names:
                return each, names
    return None


def _validation(folder: Path, names: list[str], split: str) -> Listing:
    """ImageNet's validation files with their labels. Only the split "whole" may do without labels."""
    found = _validation_labels(folder, names)
    if found:
        labels, wnids, file = found
        return Listing(Files(packed(names), folder), labels, wnids, f"The labels of {folder} are those in {file}.")
    missing = (
        f"{folder} holds ImageNet's validation images, but no file of their labels lies there or in the folder around "
        f"it: put one of {EXPECTED} there"
    )
    if split != "whole":
        raise ValueError(f"{missing}.")
    note = f"{missing} for top-1; without, they are scored by ReaL's labels alone."
    return Listing(Files(packed(names), folder), [0] * len(names), UNLABELED, note)


def _validation_labels(folder: Path, names: list[str]) -> tuple[list[int], tuple[str, ...], Path] | None:
    """The label of each file, ImageNet's WordNet ids in class order and the file of labels; None if there is none."""
    from timm.data import ImageNetInfo

    wnids = tuple(ImageNetInfo().label_names())
    numbers = {wnid: number for number, wnid in enumerate(wnids)}
    for file, read in _readers(folder):
        if (by_number := read(file)) is None:
            continue
        labels = [by_number.get(int(VALIDATION_FILE.fullmatch(name)[1])) for name in names]
        if None in labels:
            raise ValueError(f"{file} has no label for {names[labels.index(None)]}. Fetch it again, all of it.")
        wrong = [label for label in labels if label not in numbers and label not in range(len(wnids))]
        if wrong:
            raise ValueError(
                f"{file} has the label {wrong[0]!r}, but ImageNet's classes have WordNet ids or the numbers from 0 to "
                f"{len(wnids) - 1}. Put another file of labels in its place, such as {KIT}.tar.gz."
            )
        return [numbers.get(label, label) for label in labels], wnids, file
    return None


def _readers(folder: Path) -> Iterator[tuple[Path, Callable[[Path], dict[int, str | int] | None]]]:
    """Where labels may lie, and what reads each: labels by the number of the image, or None if there is no file."""
    for around in (folder, folder.parent):
        for data in (around, around / "data", around / KIT / "data"):
            yield data / TRUTH, _kit
        yield around / f"{KIT}.tar.gz", _kit
        for name in LISTS:
            yield around / name, lambda file: parsed(file, _list, f"ImageNet's {COUNT:,} validation labels")


def _kit(file: Path) -> dict[int, str] | None:
    """WordNet ids from ImageNet's development kit: `file` is its archive, or the list of labels beside `meta.mat`.

    The list has numbers that `meta.mat` explains. torchvision's `parse_devkit_archive` would write beside the data.
    """
    import scipy.io

    meta = file.with_name("meta.mat")
    if not file.is_file():
        return None
    if file.name == TRUTH and not meta.is_file():
        raise ValueError(f"{file} numbers the classes in an order that meta.mat tells; put that beside it.")
    try:
        if file.name == TRUTH:
            truth, classes = file.read_bytes(), meta.read_bytes()
        else:
            with tarfile.open(file, "r:gz") as tar:
                truth, classes = (tar.extractfile(f"{KIT}/data/{name}").read() for name in (TRUTH, "meta.mat"))
        synsets = scipy.io.loadmat(io.BytesIO(classes), squeeze_me=True)["synsets"]
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
        return {number: wnids[int(line)] for number, line in enumerate(truth.decode().split(), 1)}
    except (OSError, EOFError, tarfile.TarError, AttributeError, LookupError, TypeError, ValueError,
            NotImplementedError) as problem:  # fmt: skip
        raise ValueError(f"{file} is not ImageNet's development kit ({problem}). Fetch it again.") from problem


def _list(text: str) -> dict[int, str | int]:
    """Labels from lines of a file name and a label (separated by space or comma), or from one WordNet id per line."""
    rows = [re.split(r"[\s,]+", line.strip()) for line in text.splitlines() if line.strip()]
    rows = rows[1:] if rows and rows[0][0] == "ImageId" else rows  # the heading of Kaggle's
    named = [(re.search(r"ILSVRC2012_val_(\d{8})", row[0]), row) for row in rows]
    if rows and all(match for match, _ in named):
        return {int(match[1]): int(row[1]) if row[1].isdecimal() else row[1] for match, row in named}
    if len(rows) != COUNT or any(row[0].isdecimal() for row in rows):
        raise ValueError(f"{len(rows)} lines that are neither files with labels nor {COUNT} WordNet ids")
    return {number: row[0] for number, row in enumerate(rows, 1)}
