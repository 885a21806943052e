"""ImageNet's validation images as published: in one folder, with their labels in a file."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitlens.data.imageset import Samples, of_files

UNLABELED = ("without a label",)
"""The one class of images without labels. ReaL can still score them, because its labels go by file name."""

FILE = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)
COUNT = 50_000
KIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
LISTS = ("imagenet_2012_validation_synset_labels.txt", "synset_labels.txt", "LOC_val_solution.csv", "val.txt")


def validation_files(folder: Path, inside: Sequence[str]) -> tuple[Path, list[str]] | None:
    """The folder that holds ImageNet's validation files (`folder` or one `inside` it), and their names."""
    for path in (folder, *(folder / name for name in inside)):
        if path.is_dir() and (names := sorted(file.name for file in path.iterdir() if FILE.fullmatch(file.name))):
            return path, names
    return None


def validation(folder: Path, names: list[str], split: str) -> Samples:
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
