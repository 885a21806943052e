"""Class folders of images, read by torchvision's `ImageFolder`, and ImageNet's validation images as published, in one
folder with a file of labels. Notes count and name the files that are not read."""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import tarfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torchvision.datasets import ImageFolder

from vitlens.data import tables
from vitlens.data.imageset import Samples, of_files
from vitlens.data.sources import EVERY_SPLIT, VALIDATION, first_of
from vitlens.images import hidden, is_image

VALID_SHARE = 0.1
UNLABELED = ("without a label",)
"""Class names of images without labels. ReaL can still score them, because it has labels by file name."""
FILE = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)
COUNT = 50_000
KIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
LISTS = ("imagenet_2012_validation_synset_labels.txt", "synset_labels.txt", "LOC_val_solution.csv", "val.txt")


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
        for label in {*range(len(self.classes))} - {*self.targets}:
            name = self.classes[label]
            if lost := next(_below(root / name), None):
                raise ValueError(f"The class {name!r} of {root} has no image. Its files are not read, such as {lost}.")

    def _counts(self, path: str) -> bool:
        return not hidden(os.path.relpath(path, self.root)) and is_image(path)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = list(self._given or subfolders(directory))
        return names, {name: i for i, name in enumerate(names)}


def folder(path: Path, split: str, root: str | Path | None = None) -> Samples:
    """Samples of a folder of Parquet files, WebDataset shards, class folders or ImageNet's validation files."""
    part = "test" if split == "whole" else split
    if any(path.glob("*.parquet")):
        return tables.parquet(path, part, root)
    flat = imagenet_files(path, VALIDATION) if split != "train" else None
    if flat and not any(_any_image(flat[0] / name) for name in subfolders(flat[0])):
        return imagenet_validation(*flat, split)
    named = [name for name in subfolders(path) if name.lower() in EVERY_SPLIT]
    divided = [name for name in named if any(_any_image(path / name / below) for below in subfolders(path / name))]
    others = [name for name in subfolders(path) if name not in named and _any_image(path / name)]
    if not divided and not others:
        if any(shard for name in (".", *named) for shard in (path / name).glob("*.tar")):
            return tables.shards(path, part)
        raise ValueError(
            f"{path} holds no Parquet files, no WebDataset shards and no folders of images, one for each class"
            f"{f' of {named[0]}' if named else ''}."
        )
    # A folder named like a split that has loose images and class folders next to it is a class.
    if divided and (not others or any(not _loose(path / name) for name in divided)):
        return _of_split(path, part, divided)
    return _undivided(path, split, named)


def _of_split(path: Path, split: str, present: list[str]) -> Samples:
    chosen = first_of(split, present, str(path))
    train = first_of("train", present) or chosen  # labels number the training classes, and validation may lack some
    class_names = subfolders(path / train)
    if unknown := sorted({*subfolders(path / chosen)} - {*class_names}):
        raise ValueError(
            f"{path / chosen} holds a class {unknown[0]!r} that {path / train} lacks{alike(unknown[0], class_names)}."
        )
    images = Classes(path / chosen, class_names if chosen != train else None)
    names = [os.path.relpath(file, path) for file, _ in images.samples]
    note = unread(path, names, [name for name in present if name != chosen])
    return of_files(path, names, images.targets, class_names, note)


def _undivided(path: Path, split: str, named: Sequence[str]) -> Samples:
    """All images for the split "whole", else about a tenth of each class for validation and the rest for training.

    A file's split depends on its name alone, so it stays when files are added or removed. A split of a class that would
    be empty gets the file with the nearest number.
    """
    images = Classes(path)
    by_class: list[list[str]] = [[] for _ in images.classes]
    for file, label in images.samples:
        by_class[label].append(Path(os.path.relpath(file, path)).as_posix())
    notes = [f"The folder {named[0]} of {path} is read as a class, not as a split."] if named else []
    notes.append(unread(path, [name for names in by_class for name in names]))
    if split == "whole":
        notes.append(f"{path} is not divided, so all its images are used, including any training images.")
    else:
        by_class = [_side(name, files, split, path) for name, files in zip(images.classes, by_class, strict=True)]
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


def unread(path: Path, read: Iterable[str], elsewhere: Sequence[str] = ()) -> str:
    """Note with the number and names of the files below a folder that are not read, or "".

    elsewhere: folders that do not count.
    """
    left = sorted({*_below(path, elsewhere)} - {os.path.normpath(name) for name in read})
    if not left:
        return ""
    more = f" and {len(left) - 5:,} more" if len(left) > 5 else ""
    return f"{len(left):,} files of {path} are not read: {', '.join(left[:5])}{more}."


def _below(path: Path, without: Sequence[str] = ()) -> Iterator[str]:
    """Files below a folder, relative to it, following links."""
    for here, folders, files in os.walk(path, followlinks=True):
        relative = os.path.relpath(here, path)
        folders[:] = [name for name in folders if relative != "." or name not in without]
        yield from (os.path.normpath(os.path.join(relative, name)) for name in files)


def subfolders(path: str | Path) -> list[str]:
    """Names of the folders in a folder, sorted by code points, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not hidden(entry.name))


def _any_image(path: Path) -> bool:
    return any(not hidden(name) and is_image(path / name) for name in _below(path))


def _loose(path: Path) -> bool:
    """True if a folder has images outside its subfolders."""
    return any(entry.is_file() and not hidden(entry.name) and is_image(entry.path) for entry in os.scandir(path))


def alike(name: str, others: Iterable[str]) -> str:
    """Hint at a name that looks the same with other code points, as é in NFC and NFD, or ""."""
    same = [other for other in others if unicodedata.normalize("NFC", other) == unicodedata.normalize("NFC", name)]
    return f" ({ascii(same[0])} looks the same, but its Unicode form is another: NFC or NFD)" if same else ""


def imagenet_files(folder: Path, inside: Sequence[str]) -> tuple[Path, list[str]] | None:
    """Folder with ImageNet's validation files (`folder` or one `inside` it) and their names, or None."""
    for path in (folder, *(folder / name for name in inside)):
        if path.is_dir() and (names := sorted(file.name for file in path.iterdir() if FILE.fullmatch(file.name))):
            return path, names
    return None


def imagenet_validation(folder: Path, names: list[str], split: str) -> Samples:
    """Samples of ImageNet's validation files. Only the split "whole" works without labels."""
    from timm.data import ImageNetInfo

    wnids = tuple(ImageNetInfo().label_names())
    numbers = {wnid: number for number, wnid in enumerate(wnids)} | {str(i): i for i in range(len(wnids))}
    file = next((path for path in _places(folder) if path.is_file()), None)
    if file is None:
        missing = (
            f"{folder} holds ImageNet's validation images, but neither it nor its parent has their labels: "
            f"put {KIT}.tar.gz, val.txt (a file and the number of its class from 0 on each line) or {LISTS[0]} (a "
            "WordNet id on each line) there"
        )
        if split != "whole":
            raise ValueError(f"{missing}.")
        note = f"{missing} for top-1. Without them, only ReaL's labels score the images."
        return of_files(folder, names, [0] * len(names), UNLABELED, note)
    try:
        by_number = _list(file.read_text(encoding="utf-8")) if file.name in LISTS else _kit(file)
        labels = [by_number.get(int(FILE.fullmatch(name)[1])) for name in names]
        for name, label in zip(names, labels, strict=True):
            if label not in numbers:
                raise ValueError(f"{name} has {f'the label {label}' if label else 'no label'}")
    except Exception as problem:  # an archive, a MATLAB file or text of any content
        raise ValueError(
            f"{file} must hold ImageNet's {COUNT:,} validation labels, as WordNet ids or numbers from 0 to 999 "
            f"({type(problem).__name__}: {problem}). Download it again, or replace it."
        ) from problem
    note = f"The labels of {folder} are those in {file}."
    return of_files(folder, names, [numbers[label] for label in labels], wnids, note)


def _places(folder: Path) -> Iterator[Path]:
    for parent in (folder, folder.parent):
        yield from (data / TRUTH for data in (parent, parent / "data", parent / KIT / "data"))
        yield from (parent / name for name in (f"{KIT}.tar.gz", *LISTS))


def _kit(file: Path) -> dict[int, str]:
    """WordNet ids by image number, from the archive of ImageNet's development kit or its list of labels.

    `meta.mat` maps the numbers of the list to WordNet ids. torchvision's `parse_devkit_archive` would write files.
    """
    import scipy.io

    if file.name == TRUTH:
        truth, classes = file.read_bytes(), file.with_name("meta.mat").read_bytes()
    else:
        with tarfile.open(file, "r:gz") as tar:
            truth, classes = (tar.extractfile(f"{KIT}/data/{name}").read() for name in (TRUTH, "meta.mat"))
    synsets = scipy.io.loadmat(io.BytesIO(classes), squeeze_me=True)["synsets"]
    wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    return {number: wnids[int(line)] for number, line in enumerate(truth.decode().split(), 1)}


def _list(text: str) -> dict[int, str]:
    """Labels by image number, from lines of a file name and a label, or of one WordNet id each."""
    rows = [re.split(r"[\s,]+", line.strip()) for line in text.splitlines() if line.strip()]
    if named := [(match[1], row[1]) for row in rows if (match := re.search(r"ILSVRC2012_val_(\d{8})", row[0]))]:
        return {int(number): label for number, label in named}
    if len(rows) != COUNT or any(row[0].isdecimal() for row in rows):
        raise ValueError(f"{len(rows)} lines that are neither files with labels nor {COUNT} WordNet ids")
    return {number: row[0] for number, row in enumerate(rows, 1)}
