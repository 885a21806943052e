"""Parquet files and data sets of the Hugging Face hub, read by the package `datasets`."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitlens.data.imageset import Samples
from vitlens.data.sources import first_of

IMAGES = ("image",)
LABELS = ("label", "fine_label", "labels")  # fine_label in CIFAR-100


def library():
    """The package `datasets`."""
    try:
        import datasets
    except ImportError as problem:
        raise ValueError(
            "Parquet files, WebDataset shards and data sets of the hub need the package datasets. Install it with "
            "pip install datasets"
        ) from problem
    return datasets


@dataclass(frozen=True)
class Column:
    """Encoded images of a table of `datasets`, mapped into memory.

    They are read from Arrow's column, because a row of `datasets` takes a third of the time of decoding 64 × 64 pixels.
    """

    table: Any
    name: str

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> bytes:
        return self.table.data.column(self.name)[i]["bytes"].as_py() or b""


# Parquet and the hub


def parquet(folder: Path, split: str, root: str | Path | None = None) -> Samples:
    """Samples of the files `train-*.parquet`, `valid-`, `validation-`, `val-` or `test-*.parquet` of `folder`."""
    by_split: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.parquet")):
        by_split.setdefault(re.split(r"[-.]", file.name)[0], []).append(str(file))
    chosen, train = first_of(split, by_split, str(folder)), first_of("train", by_split)
    files = by_split[chosen]
    # train-00002-of-00005.parquet is one of five.
    expected = max(
        (int(n) for file in files for n in re.findall(r"-of-(\d+)\.parquet$", file)), default=0
    )
    if len(files) < expected:
        raise ValueError(
            f"{folder} holds {len(files)} of the {expected} {split} shards. Download the others."
        )
    datasets, paths = library(), [glob.escape(file) for file in files]
    try:
        table = datasets.load_dataset(
            "parquet", data_files={chosen: paths}, cache_dir=root and str(root)
        )[chosen]
    except Exception as problem:
        raise ValueError(
            f"The Parquet files of {folder} cannot be read ({reason(problem)}). Fetch them again."
        ) from (problem)
    samples = _samples(table, str(folder), chosen, names_beside(folder))
    return with_class_names(
        samples, None if train in (None, chosen) else lambda: parquet(folder, "train", root)
    )


def hub(name: str, split: str, root: Path | None, _) -> Samples:
    """`hfds/OWNER/SET`: a data set of the Hugging Face hub, or a folder of that name."""
    datasets, folder = library(), Path(name)
    if folder.is_dir():
        return parquet(folder / "data" if (folder / "data").is_dir() else folder, split, root)
    try:
        tables = datasets.load_dataset(name, cache_dir=root and str(root))
    except Exception as problem:
        raise ValueError(
            f"hfds/{name} is not in {root or datasets.config.HF_DATASETS_CACHE} and cannot be downloaded "
            f"({reason(problem)}). Check the name, or run datasets.load_dataset({name!r}) on a machine with network "
            "access and copy its cache."
        ) from problem
    title = f"hfds/{name}"
    chosen, train = first_of(split, tables, title), first_of("train", tables)
    if tables[chosen].info.builder_name == "imagefolder":  # it may read a class as a split
        raise ValueError(
            f"{title} is a folder of images, not a table. Download it and pass the folder."
        )
    samples = _samples(tables[chosen], title, chosen)
    return with_class_names(
        samples, None if train in (None, chosen) else lambda: _samples(tables[train], title, train)
    )


def reason(problem: BaseException) -> str:
    """Another library's error in one line."""
    text = " ".join(str(problem.__cause__ or problem).split())
    return f"{type(problem).__name__}: {text[:200].rstrip('.')}"


def _samples(table: Any, title: str, split: str, names: Sequence[str] | None = None) -> Samples:
    datasets, features = library(), table.features
    encoded = [
        name
        for name, kind in features.items()
        if isinstance(kind, datasets.Image) or isinstance(kind, Mapping) and "bytes" in kind
    ]
    integers = [
        name
        for name, kind in features.items()
        if isinstance(kind, datasets.ClassLabel)
        or isinstance(kind, datasets.Value)
        and "int" in kind.dtype
    ]
    image, label = (
        _column(IMAGES, encoded, title, features),
        _column(LABELS, integers, title, features),
    )
    labels = [-1 if value is None else value for value in table.data.column(label).to_pylist()]
    images = table.data.column(image)
    if (
        len(images)
        and not images[0]["bytes"].is_valid
        and (path := (images[0].as_py() or {}).get("path"))
    ):
        raise ValueError(
            f"The column {image} of {title} holds paths, such as {path!r}. It must hold the files' bytes."
        )
    names = names or getattr(features[label], "names", ())
    note = f"The column {image} of {title} is read as the images and {label} as the labels."
    note = "" if (image, label) == ("image", "label") else note
    rows = Column(table.select_columns([image]), image)
    return Samples(rows, labels, tuple(names), range(len(rows)), note, f"{title} {split} row ")


def _column(names: Sequence[str], fitting: Sequence[str], title: str, features: Mapping) -> str:
    """The first of `names` if the table has one of them, else the only column of a fitting type."""
    named = [name for name in names if name in features]
    candidates = [name for name in named if name in fitting][:1] if named else fitting
    if len(candidates) != 1:
        content = "encoded images" if names == IMAGES else "whole numbers as labels"
        raise ValueError(
            f"{title} needs a column of {content} called {names[0]}, got {', '.join(features)}, of which "
            f"{', '.join(candidates) or 'none'} could be it. Columns of paths are not read."
        )
    return candidates[0]


# Class names


def with_class_names(samples: Samples, training: Callable[[], Samples] | None) -> Samples:
    """Samples with class names, by default the numbers up to the highest label, also of the training split."""
    if samples.class_names:
        return samples
    return replace(
        samples, class_names=numbered([*samples.labels, *(training().labels if training else ())])
    )


def numbered(labels: Sequence[int]) -> tuple[str, ...]:
    """Default class names: the numbers from 0 to the highest label."""
    highest = max(map(int, labels), default=-1)
    if highest > max(100_000, len(labels)):
        raise ValueError(
            f"Labels must number the classes from 0, got a label of {highest:,} among {len(labels):,} images, which "
            "looks like an id."
        )
    return tuple(str(i) for i in range(highest + 1))


def names_beside(folder: Path) -> tuple[str, ...] | None:
    """Class names from `classnames.txt`, one per line, or `classes.json`, or None.

    `classes.json` holds a list, or a dict with `names`: a list, or a dict by the WordNet ids in `wnids`.
    """
    lines, file = folder / "classnames.txt", folder / "classes.json"
    if not file.is_file():
        return tuple(lines.read_text(encoding="utf-8").splitlines()) if lines.is_file() else None
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(names, dict):
            wnids, names = names.get("wnids"), names.get("names", names.get("wnids"))
            names = [names[wnid] for wnid in wnids or names] if isinstance(names, dict) else names
        if not isinstance(names, list):
            raise TypeError(f"got {names!r:.60}")
        return tuple(map(str.strip, names))
    except (LookupError, TypeError, ValueError) as problem:
        raise ValueError(
            f"{file} must hold a list of class names ({problem}). Repair or remove it."
        ) from problem
