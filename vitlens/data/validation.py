"""ImageNet's validation images as published: all in one folder, with the labels in a separate file."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from vitlens.data.samples import VALIDATION, parsed

FILE = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)
COUNT = 50_000
UNLABELED = ("without a label",)
"""The one class of images without labels. ReaL can still score them, because its labels go by file name."""

KIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
LISTS = ("imagenet_2012_validation_synset_labels.txt", "synset_labels.txt", "LOC_val_solution.csv", "val.txt")
WANTED = (
    f"{KIT}.tar.gz, val.txt (a file and the number of its class from 0 on each line) or {LISTS[0]} (a WordNet id on "
    "each line)"
)


def validation_files(folder: Path) -> tuple[Path, list[str]] | None:
    """The folder that holds ImageNet's validation files (``folder`` or its ``val``), and their names."""
    for each in (folder, *(folder / name for name in VALIDATION)):
        if each.is_dir() and (names := sorted(path.name for path in each.iterdir() if FILE.fullmatch(path.name))):
            return each, names
    return None


def validation_labels(folder: Path, names: list[str]) -> tuple[list[int], tuple[str, ...], Path] | None:
    """The label of each file, ImageNet's WordNet ids in class order, and the file that the labels came from; None if
    there is no such file in the folder or its parent.

    Raises ``ValueError`` for a file that holds something else, or has no label for one of the images.
    """
    from timm.data import ImageNetInfo

    wnids = tuple(ImageNetInfo().label_names())
    for place, read in _readers(folder):
        if (of_file := read(place)) is None:
            continue
        labels = [of_file.get(int(FILE.fullmatch(name)[1])) for name in names]
        if None in labels:
            raise ValueError(f"{place} has no label for {names[labels.index(None)]}. Fetch it again, all of it.")
        places = {wnid: number for number, wnid in enumerate(wnids)}
        wrong = [label for label in labels if label not in places and label not in range(len(wnids))]
        if wrong:
            raise ValueError(
                f"{place} has the label {wrong[0]!r}, but ImageNet's classes have WordNet ids or the numbers from 0 to "
                f"{len(wnids) - 1}. Put another file of labels in its place, such as {KIT}.tar.gz."
            )
        return [places.get(label, label) for label in labels], wnids, place
    return None


def _readers(folder: Path) -> Iterator[tuple[Path, Callable[[Path], dict[int, str | int] | None]]]:
    for around in (folder, folder.parent):
        for data in (around, around / "data", around / KIT / "data"):
            yield data / TRUTH, _kit_folder
        yield around / f"{KIT}.tar.gz", _kit_archive
        for name in LISTS:
            yield around / name, lambda place: parsed(place, _list, f"ImageNet's {COUNT:,} validation labels")


def _kit_folder(truth: Path) -> dict[int, str] | None:
    meta = truth.with_name("meta.mat")
    if truth.is_file() and not meta.is_file():
        raise ValueError(f"{truth} numbers the classes in an order that meta.mat tells; put that beside it.")
    return _kit(truth, truth.read_text(), meta.read_bytes()) if truth.is_file() else None


def _kit_archive(archive: Path) -> dict[int, str] | None:
    if not archive.is_file():
        return None
    try:
        with tarfile.open(archive, "r:gz") as tar:
            truth, meta = (tar.extractfile(f"{KIT}/data/{name}").read() for name in (TRUTH, "meta.mat"))
    except (OSError, KeyError, AttributeError, EOFError, tarfile.TarError) as problem:
        raise ValueError(f"{archive} is not ImageNet's development kit ({problem}). Fetch it again.") from problem
    return _kit(archive, truth.decode(), meta)


def _kit(place: Path, truth: str, meta: bytes) -> dict[int, str]:
    """The WordNet id of each file. The kit numbers classes by ILSVRC2012_ID, which ``meta.mat`` explains."""
    import scipy.io

    try:
        synsets = scipy.io.loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
        return {number: wnids[int(line)] for number, line in enumerate(truth.split(), 1)}
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError) as problem:
        raise ValueError(f"{place} is not ImageNet's development kit ({problem}). Fetch it again.") from problem


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
