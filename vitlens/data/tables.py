"""Parquet files and data sets of the Hugging Face hub, read by the package `datasets`."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitlens import texts, waiting
from vitlens.data.imageset import Samples
from vitlens.data.sources import Columns, find_split
from vitlens.files import read_names
from vitlens.walk import archives, note_on_overlap, unique_files

UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors of a cache that is full or read-only."""
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
        row = self.table.data.column(self.name)[i]
        return row["bytes"].as_py() or b""

    def encoded(self, i: int) -> memoryview:
        """The encoded image `i` without a copy."""
        buffer = self.table.data.column(self.name)[i]["bytes"].as_buffer()
        return memoryview(buffer or b"")


# Parquet and the hub


def parquet(
    folder: Path, split: str, root: str | os.PathLike | None = None, columns: Columns | None = None
) -> Samples:
    """Samples of the files `train-*.parquet`, `valid-`, `validation-`, `val-` or `test-*.parquet` of `folder`."""
    by_split: dict[str, list[Path]] = {}
    found, left_out = archives(folder, ".parquet")
    for file in found:
        word = re.split(r"[-.]", file.name)[0]
        by_split.setdefault(word, []).append(file)
    name = find_split(split, by_split, str(folder))
    files, repeated = unique_files(by_split[name])
    train = find_split("train", by_split)
    expected = _number_of_shards(files)
    if len(files) < expected:
        raise ValueError(
            f"{folder} holds {len(files)} of the {expected} {split} shards. Download the others."
        )
    data_files = {name: [glob.escape(str(file)) for file in files]}
    try:
        tables = _load("parquet", root, data_files=data_files)
    except Exception as problem:
        require_cache(problem, root)
        raise ValueError(
            f"The Parquet files of {folder} cannot be read ({reason(problem)}). Fetch them again."
        ) from problem
    names = read_class_names(folder)
    samples = _samples(tables[name], str(folder), name, names, columns)
    samples = samples.add_note(f"{left_out.sentences()} {repeated.sentences()}".strip())
    if train not in (None, name):
        samples = samples.add_note(note_on_overlap(files, by_split[train], "train"))
    if train in (None, name):
        return with_class_names(samples, None)
    return with_class_names(samples, lambda: parquet(folder, "train", root, columns))


def _load(name: str, root: str | os.PathLike | None, **options: Any) -> Any:
    """A data set of `datasets`, from its cache or built in it. Only one process builds it."""
    cache = os.fspath(root) if root else None
    with waiting.fetching(
        f"the package datasets, which reads {name} into its cache",
        "The next time it is read from there. Ctrl-C ends it.",
    ):
        return library().load_dataset(name, cache_dir=cache, **options)


def require_cache(problem: BaseException, root: str | os.PathLike | None) -> None:
    """Raise the true error of a cache that is locked or cannot be written. Other problems are the data's."""
    cache = str(root or library().config.HF_DATASETS_CACHE)
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, TimeoutError) and not cause.errno:  # of another process's lock
            raise cause
        number = getattr(cause, "errno", None)
        in_cache = str(getattr(cause, "filename", None) or cache).startswith(cache)
        if number in UNWRITABLE and in_cache:
            raise ValueError(
                f"The cache {cache} cannot be written ({os.strerror(number)}). Make space there, or give another "
                "place with --root or the environment variable HF_DATASETS_CACHE. The data themselves are intact."
            ) from problem
        cause = cause.__cause__ or cause.__context__


def _number_of_shards(files: Sequence[Path]) -> int:
    """Number of shards by the names of some: train-00002-of-00005.parquet is one of five. 0 for other names."""
    totals = [0]
    for file in files:
        totals += [int(total) for total in re.findall(r"-of-(\d+)\.parquet$", file.name)]
    return max(totals)


def hub(name: str, split: str, root: Path | None, _, columns: Columns | None = None) -> Samples:
    """`hfds/OWNER/SET`: a data set of the Hugging Face hub, or a folder of that name."""
    datasets = library()
    folder = Path(name)
    if folder.is_dir():
        inner = folder / "data"
        return parquet(inner if inner.is_dir() else folder, split, root, columns)
    try:
        tables = _load(name, root)
    except Exception as problem:
        require_cache(problem, root)
        raise ValueError(
            f"hfds/{name} is not in {root or datasets.config.HF_DATASETS_CACHE} and cannot be downloaded "
            f"({reason(problem)}). Check the name, or run datasets.load_dataset({name!r}) on a machine with network "
            "access and copy its cache."
        ) from problem
    title = f"hfds/{name}"
    split_name = find_split(split, tables, title)
    train = find_split("train", tables)
    table = tables[split_name]
    if table.info.builder_name == "imagefolder":  # it may read a class as a split
        raise ValueError(
            f"{title} is a folder of images, not a table. Download it and pass the folder."
        )
    samples = _samples(table, title, split_name, columns=columns)
    if train in (None, split_name):
        return with_class_names(samples, None)
    return with_class_names(samples, lambda: _samples(tables[train], title, train, columns=columns))


def reason(problem: BaseException) -> str:
    """Another library's error in one line."""
    text = " ".join(str(problem.__cause__ or problem).split())
    return f"{type(problem).__name__}: {text[:200].rstrip('.')}"


def _samples(
    table: Any,
    title: str,
    split: str,
    names: Sequence[str] | None = None,
    columns: Columns | None = None,
) -> Samples:
    """Samples of a table of `datasets`. names: class names, by default those of the label column."""
    features = table.features
    columns = columns or Columns()
    encoded = [name for name, kind in features.items() if _holds_images(kind)]
    integers = [name for name, kind in features.items() if _holds_integers(kind)]
    image = _column(columns.image, IMAGES, encoded, title, features)
    label = _column(columns.label, LABELS, integers, title, features)
    labels = [-1 if value is None else value for value in table.data.column(label).to_pylist()]
    _require_bytes(table.data.column(image), f"The column {image} of {title}")
    names = names or getattr(features[label], "names", ())
    note = ""
    if (image, label) != ("image", "label") or len(encoded) > 1:
        note = f"The column {image} of {title} is read as the images and {label} as the labels."
    rows = Column(table.select_columns([image]), image)
    return Samples(rows, labels, tuple(names), range(len(rows)), note, f"{title} {split} row ")


def _holds_images(kind: Any) -> bool:
    """True for the type of a column of encoded images."""
    if isinstance(kind, library().Image):
        return True
    return isinstance(kind, Mapping) and "bytes" in kind


def _holds_integers(kind: Any) -> bool:
    """True for the type of a column of class labels or other integers."""
    datasets = library()
    if isinstance(kind, datasets.ClassLabel):
        return True
    return isinstance(kind, datasets.Value) and "int" in kind.dtype


def _require_bytes(images: Any, title: str) -> None:
    """Raise ValueError if the first image of a column is a path without bytes."""
    if len(images) == 0 or images[0]["bytes"].is_valid:
        return
    path = (images[0].as_py() or {}).get("path")
    if path:
        raise ValueError(f"{title} holds paths, such as {path!r}. It must hold the files' bytes.")


def _column(
    chosen: str, names: Sequence[str], fitting: Sequence[str], title: str, features: Mapping
) -> str:
    """The chosen column, else the only one of `names`, else the only column of a fitting type."""
    content, key, option = "encoded images", "image_key", "--image-key"
    if names == LABELS:
        content, key, option = "whole numbers as labels", "label_key", "--label-key"
    if chosen and chosen in fitting:
        return chosen
    if chosen:
        raise ValueError(
            f"{key} must name a column of {content} of {title}, which are {', '.join(fitting) or 'none'}, got "
            f"{chosen!r}."
        )
    candidates = fitting
    if any(name in features for name in names):
        candidates = [name for name in names if name in fitting]
    if len(candidates) != 1:
        advice = "Columns of paths are not read."
        if candidates:
            advice += f" Choose one with {key} ({option})."
        raise ValueError(
            f"{title} needs a column of {content} called {names[0]}, got {', '.join(features)}, of which "
            f"{', '.join(candidates) or 'none'} could be it. {advice}"
        )
    return candidates[0]


# Class names


def with_class_names(samples: Samples, training: Callable[[], Samples] | None) -> Samples:
    """Samples with class names, by default the numbers up to the highest label, also of the training split."""
    if samples.class_names:
        return samples
    labels = [*samples.labels]
    if training is not None:
        labels += training().labels
    return replace(samples, class_names=default_class_names(labels))


def default_class_names(labels: Sequence[int]) -> tuple[str, ...]:
    """Default class names: the numbers from 0 to the highest label."""
    highest = max(map(int, labels), default=-1)
    if highest > max(100_000, len(labels)):
        raise ValueError(
            f"Labels must number the classes from 0, got a label of {highest:,} among {len(labels):,} images, which "
            "looks like an id."
        )
    return tuple(str(i) for i in range(highest + 1))


def read_class_names(folder: Path) -> tuple[str, ...] | None:
    """Class names from `classes.json` or `classnames.txt`, one per line, or None.

    `classes.json` holds a list, or a dict with `names`: a list, or a dict by the WordNet ids in `wnids`.
    """
    listed = folder / "classnames.txt"
    file = folder / "classes.json"
    if file.is_file():
        text = read_names(file)
        try:
            return _names_in_json(text)
        except (LookupError, TypeError, ValueError) as problem:
            raise ValueError(
                f"{file} must hold a list of class names ({problem}). Repair or remove it."
            ) from problem
    if listed.is_file():
        return tuple(texts.lines(read_names(listed)))
    return None


def _names_in_json(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if isinstance(names, dict):
        wnids = names.get("wnids")
        names = names.get("names", wnids)
        if isinstance(names, dict):
            names = [names[wnid] for wnid in wnids or names]
    if not isinstance(names, list):
        raise TypeError(f"got {names!r:.60}")
    others = [name for name in names if not isinstance(name, str)]
    if others:
        raise TypeError(f"got {others[0]!r:.60}, which is no text")
    return tuple(map(str.strip, names))
