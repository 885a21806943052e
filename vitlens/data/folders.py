"""Folders of images, one for each class, read by torchvision's `ImageFolder`, or ImageNet's validation images as
published, in one folder with their labels in a file. What is not read is counted and named."""

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
"""The one class of images without labels. ReaL can still score them, because its labels go by file name."""
FILE = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)
COUNT = 50_000
KIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
LISTS = ("imagenet_2012_validation_synset_labels.txt", "synset_labels.txt", "LOC_val_solution.csv", "val.txt")


class Classes(ImageFolder):
    """torchvision's `ImageFolder`, in which hidden files and folders do not count.

    classes: the folders in label order, of which some may be empty; by default all, each with an image.
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
    """A folder of Parquet files, WebDataset shards, class folders (divided or not) or ImageNet's validation files."""
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
    # A split has no images beside its class folders; one that has, beside other class folders, is a class itself.
    if divided and (not others or any(not _loose(path / name) for name in divided)):
        return _of_split(path, part, divided)
    return _undivided(path, split, named)


def _of_split(path: Path, split: str, present: list[str]) -> Samples:
    chosen = first_of(split, present, str(path))
    train = first_of("train", present) or chosen  # labels number the training classes, so validation may lack one
    class_names = subfolders(path / train)
    if unknown := sorted({*subfolders(path / chosen)} - {*class_names}):
        raise ValueError(
            f"{path / chosen} holds a class {unknown[0]!r} that {path / train} lacks{alike(unknown[0], class_names)}."
        )
    found = Classes(path / chosen, class_names if chosen != train else None)
    names = [os.path.relpath(file, path) for file, _ in found.samples]
    note = unread(path, names, [name for name in present if name != chosen])
    return of_files(path, names, found.targets, class_names, note)


def _undivided(path: Path, split: str, named: Sequence[str]) -> Samples:
    """All images of the split "whole", else about a tenth of each class for validation and the others for training.

    A file's split depends on its own name alone, so it stays when other files come or go. Only where that would leave
    a split of a class empty does the file with the nearest number stand in.
    """
    found = Classes(path)
    by_class: list[list[str]] = [[] for _ in found.classes]
    for file, label in found.samples:
        by_class[label].append(Path(os.path.relpath(file, path)).as_posix())
    notes = [f"The folder {named[0]} of {path} is taken for a class, not for a split."] if named else []
    notes.append(unread(path, [name for names in by_class for name in names]))
    if split == "whole":
        notes.append(f"{path} is not divided, so all its images count, also those that a model may have learned from.")
    else:
        by_class = [_side(name, files, split, path) for name, files in zip(found.classes, by_class, strict=True)]
        notes.append(
            f"{path} is not divided into training and validation images: about a tenth of each class is kept for "
            "validation, chosen by the names of the files."
        )
    names = [name for files in by_class for name in files]
    labels = [label for label, files in enumerate(by_class) for _ in files]
    return of_files(path, names, labels, found.classes, " ".join(filter(None, notes)))


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


def unread(path: Path, read: Iterable[str], elsewhere: Sequence[str] = ()) -> str:
    """A note that counts and names the files below a folder that are not read, or "". elsewhere: folders apart."""
    left = sorted({*_below(path, elsewhere)} - {os.path.normpath(name) for name in read})
    if not left:
        return ""
    more = f" and {len(left) - 5:,} more" if len(left) > 5 else ""
    return f"{len(left):,} files of {path} are not read: {', '.join(left[:5])}{more}."


def _below(path: Path, without: Sequence[str] = ()) -> Iterator[str]:
    """The files below a folder, relative to it, also those behind links."""
    for here, folders, files in os.walk(path, followlinks=True):
        relative = os.path.relpath(here, path)
        folders[:] = [name for name in folders if relative != "." or name not in without]
        yield from (os.path.normpath(os.path.join(relative, name)) for name in files)


def subfolders(path: str | Path) -> list[str]:
    """The names of the folders in a folder, in the order of code points, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not hidden(entry.name))


def _any_image(path: Path) -> bool:
    return any(not hidden(name) and is_image(path / name) for name in _below(path))


def _loose(path: Path) -> bool:
    """True if images lie in a folder itself."""
    return any(entry.is_file() and not hidden(entry.name) and is_image(entry.path) for entry in os.scandir(path))


def alike(name: str, others: Iterable[str]) -> str:
    """A hint at a name that looks the same but has other code points, as é in NFC and NFD, or ""."""
    same = [other for other in others if unicodedata.normalize("NFC", other) == unicodedata.normalize("NFC", name)]
    return f" ({ascii(same[0])} looks the same, but its Unicode form is another: NFC or NFD)" if same else ""


def imagenet_files(folder: Path, inside: Sequence[str]) -> tuple[Path, list[str]] | None:
    """The folder that holds ImageNet's validation files (`folder` or one `inside` it), and their names."""
    for path in (folder, *(folder / name for name in inside)):
        if path.is_dir() and (names := sorted(file.name for file in path.iterdir() if FILE.fullmatch(file.name))):
            return path, names
    return None


def imagenet_validation(folder: Path, names: list[str], split: str) -> Samples:
    """ImageNet's validation files with their labels. Only the split "whole" may do without labels."""
    from timm.data import ImageNetInfo

    wnids = tuple(ImageNetInfo().label_names())
    numbers = {wnid: number for number, wnid in enumerate(wnids)} | {str(i): i for i in range(len(wnids))}
    file = next((path for path in _places(folder) if path.is_file()), None)
    if file is None:
        missing = (
            f"{folder} holds ImageNet's validation images, but neither it nor the folder around it has their labels: "
            f"put {KIT}.tar.gz, val.txt (a file and the number of its class from 0 on each line) or {LISTS[0]} (a "
            "WordNet id on each line) there"
        )
        if split != "whole":
            raise ValueError(f"{missing}.")
        note = f"{missing} for top-1; without, they are scored by ReaL's labels alone."
        return of_files(folder, names, [0] * len(names), UNLABELED, note)
    try:
        by_number = _list(file.read_text(encoding="utf-8")) if file.name in LISTS else _kit(file)
        labels = [by_number.get(int(FILE.fullmatch(name)[1])) for name in names]
        for name, label in zip(names, labels, strict=True):
            if label not in numbers:
                raise ValueError(f"{name} has {f'the label {label}' if label else 'no label'}")
    except Exception as problem:  # a file from outside: an archive, MATLAB's or text
        raise ValueError(
            f"{file} should hold ImageNet's {COUNT:,} validation labels, WordNet ids or numbers from 0 to 999, but "
            f"does not ({type(problem).__name__}: {problem}). Fetch it again, or put another list in its place."
        ) from problem
    note = f"The labels of {folder} are those in {file}."
    return of_files(folder, names, [numbers[label] for label in labels], wnids, note)


def _places(folder: Path) -> Iterator[Path]:
    for around in (folder, folder.parent):
        yield from (data / TRUTH for data in (around, around / "data", around / KIT / "data"))
        yield from (around / name for name in (f"{KIT}.tar.gz", *LISTS))


def _kit(file: Path) -> dict[int, str]:
    """WordNet ids by the number of the image, from ImageNet's development kit: its archive, or its list of labels.

    The list has numbers that `meta.mat` explains. torchvision's `parse_devkit_archive` would write beside the data.
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
    """Labels from lines of a file name and a label (separated by space or comma), or from one WordNet id per line."""
    rows = [re.split(r"[\s,]+", line.strip()) for line in text.splitlines() if line.strip()]
    if named := [(match[1], row[1]) for row in rows if (match := re.search(r"ILSVRC2012_val_(\d{8})", row[0]))]:
        return {int(number): label for number, label in named}
    if len(rows) != COUNT or any(row[0].isdecimal() for row in rows):
        raise ValueError(f"{len(rows)} lines that are neither files with labels nor {COUNT} WordNet ids")
    return {number: row[0] for number, row in enumerate(rows, 1)}
