"""ImageNet's validation images as published: in one folder, with their labels in a file."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitlens.data.imageset import Files, Samples

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
    numbers = {wnid: number for number, wnid in enumerate(wnids)} | {number: number for number in range(len(wnids))}
    file = next((path for path in _places(folder) if path.is_file()), None)
    if file is None:
        missing = (
            f"{folder} holds ImageNet's validation images, but no file of their labels lies there or in the folder "
            f"around it: put {KIT}.tar.gz, val.txt (a file and the number of its class from 0 on each line) or "
            f"{LISTS[0]} (a WordNet id on each line) there"
        )
        if split != "whole":
            raise ValueError(f"{missing}.")
        note = f"{missing} for top-1; without, they are scored by ReaL's labels alone."
        return Files.samples(folder, names, [0] * len(names), UNLABELED, note)
    try:
        by_number = _list(file.read_text(encoding="utf-8")) if file.name in LISTS else _kit(file)
        labels = [numbers[by_number[int(FILE.fullmatch(name)[1])]] for name in names]
    except (OSError, EOFError, tarfile.TarError, AttributeError, LookupError, TypeError, ValueError,
            NotImplementedError) as problem:  # fmt: skip
        raise ValueError(
            f"{file} does not hold ImageNet's {COUNT:,} validation labels, WordNet ids or numbers from 0 to 999 "
            f"({type(problem).__name__}: {problem}). Fetch it again, or put another list in its place."
        ) from problem
    return Files.samples(folder, names, labels, wnids, f"The labels of {folder} are those in {file}.")


def _places(folder: Path) -> Iterator[Path]:
    for around in (folder, folder.parent):
        yield from (data / TRUTH for data in (around, around / "data", around / KIT / "data"))
        yield around / f"{KIT}.tar.gz"
        yield from (around / name for name in LISTS)


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
