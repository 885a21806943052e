"""Parquet files, WebDataset shards and data sets of the Hugging Face hub, read by the package `datasets`."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitlens.data.files import announce
from vitlens.data.imageset import Samples
from vitlens.data.sources import EVERY_SPLIT, SPLITS, data_root, first_of

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
    expected = max((int(n) for file in files for n in re.findall(r"-of-(\d+)\.parquet$", file)), default=0)
    if len(files) < expected:
        raise ValueError(f"{folder} holds {len(files)} of the {expected} {split} shards. Download the others.")
    datasets, paths = library(), [glob.escape(file) for file in files]
    try:
        table = datasets.load_dataset("parquet", data_files={chosen: paths}, cache_dir=root and str(root))[chosen]
    except Exception as problem:
        raise ValueError(f"The Parquet files of {folder} cannot be read ({reason(problem)}). Fetch them again.") from (
            problem
        )
    samples = _samples(table, str(folder), chosen, names_beside(folder))
    return _numbered(samples, None if train in (None, chosen) else lambda: parquet(folder, "train", root))


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
        raise ValueError(f"{title} is a folder of images, not a table. Download it and pass the folder.")
    samples = _samples(tables[chosen], title, chosen)
    return _numbered(samples, None if train in (None, chosen) else lambda: _samples(tables[train], title, train))


def reason(problem: BaseException) -> str:
    """Another library's error in one line."""
    text = " ".join(str(problem.__cause__ or problem).split())
    return f"{type(problem).__name__}: {text[:200].rstrip('.')}"


def _samples(table: Any, title: str, split: str, names: Sequence[str] | None = None) -> Samples:
    datasets, features = library(), table.features
    encoded = [
        name for name, kind in features.items()
        if isinstance(kind, datasets.Image) or isinstance(kind, Mapping) and "bytes" in kind
    ]  # fmt: skip
    integers = [
        name for name, kind in features.items()
        if isinstance(kind, datasets.ClassLabel) or isinstance(kind, datasets.Value) and "int" in kind.dtype
    ]  # fmt: skip
    image, label = _column(IMAGES, encoded, title, features), _column(LABELS, integers, title, features)
    labels = [-1 if value is None else value for value in table.data.column(label).to_pylist()]
    images = table.data.column(image)
    if len(images) and not images[0]["bytes"].is_valid and (path := (images[0].as_py() or {}).get("path")):
        raise ValueError(f"The column {image} of {title} holds paths, such as {path!r}. It must hold the files' bytes.")
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


# WebDataset


@dataclass(frozen=True)
class Streamed:
    """Encoded images of WebDataset shards, by key. `in_memory` reads them."""

    shards: Sequence[Path]
    keys: Sequence[tuple[str, str]]

    def chosen(self, rows: Sequence[int]) -> Streamed:
        return replace(self, keys=[self.keys[i] for i in rows])

    def in_memory(self, most: int) -> list[bytes]:
        """The encoded images in the order of `keys`. Raises ValueError for more than `most` bytes."""
        numbers = {key: i for i, key in enumerate(self.keys)}
        images, size = [b""] * len(self.keys), 0
        for key, image, _ in _examples(self.shards):
            if key in numbers:
                images[numbers[key]] = image
                if (size := size + len(image)) > most:
                    raise ValueError(
                        f"The images in {self.shards[0].parent} take more than half of the free memory ({most:,} "
                        "bytes). Unpack them into class folders, or convert them to Parquet files."
                    )
        return images


def webdataset(name: str, split: str, root: Path | None, _) -> Samples:
    """`wds/NAME`: shards in ROOT/NAME or ROOT. `wds/OWNER/SET` is downloaded from the hub if missing."""
    library()  # raises before any download
    folder = data_root(root) / name
    if name.count("/") == 1 and not _files(folder, split):
        _fetch(name, folder, split)
    return shards(folder if folder.is_dir() or "/" in name else data_root(root), split)


def shards(folder: Path, split: str) -> Samples:
    """Samples of WebDataset shards: tar files of `KEY.jpg` (or another image) and `KEY.cls` or `KEY.json` with `label`.

    The split is in their names or the name of their folder, where `nshards.txt` may hold their number. Samples with a
    label below 0 are left out. Class names are in `classes.json` or, one per line, in `classnames.txt`, else numbers.
    """
    files, keys, labels = _files(folder, split), [], []
    if not files:
        raise ValueError(
            f"{folder} lacks some or all shards of its {split} split: tar files with {' or '.join(SPLITS[split])} in "
            "their names, or in a folder of that name."
        )
    for key, image, label in _examples(files):
        if type(label) is not int or image is None:
            raise ValueError(
                f"{': '.join(key)} has no {'image in the format of the first' if image is None else 'label'}. Images "
                "must have one format, each with a number in a .cls file or under 'label' in a .json file."
            )
        if label >= 0:
            keys.append(key)
            labels.append(label)
    samples = Samples(Streamed(files, keys), labels, names_beside(folder) or (), [": ".join(key) for key in keys])
    alone = split == "train" or not _files(folder, "train")
    return _numbered(samples, None if alone else lambda: shards(folder, "train"))


def _examples(files: Sequence[Path]) -> Iterator[tuple[tuple[str, str], bytes | None, object]]:
    """((shard, key), encoded image, label) of each sample of WebDataset shards, read in order without a copy."""
    datasets = library()
    for file in files:
        try:
            paths = {"train": [glob.escape(str(file))]}
            rows = datasets.load_dataset("webdataset", data_files=paths, split="train", streaming=True)
            for name, kind in (rows.features or {}).items():
                if isinstance(kind, datasets.Image):
                    rows = rows.cast_column(name, datasets.Image(decode=False))
            for row in rows:
                image = next((v["bytes"] for v in row.values() if isinstance(v, dict) and "bytes" in v), None)
                sidecar = row.get("json") or row.get("jsn") or {}
                label = sidecar.get("label") if row.get("cls") is None else row["cls"]
                if image is not None or label is not None:
                    yield (file.name, row["__key__"]), image, label
        except Exception as problem:
            raise ValueError(
                f"{file} is not a complete WebDataset shard ({reason(problem)}). Download it again, or unpack it if it "
                "holds class folders."
            ) from problem


def _files(folder: Path, split: str) -> list[Path]:
    """Shards of a split, by the words in their names and by the names of their folders, or [] if one is missing."""
    by_split: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.tar")):
        for word in {*re.split(r"[-_.]", file.stem)} & EVERY_SPLIT:
            by_split.setdefault(word, []).append(file)
    for word in EVERY_SPLIT:
        inside = sorted((folder / word).glob("*.tar"), key=lambda file: (len(file.name), file))
        count = folder / word / "nshards.txt"
        if inside and not (count.is_file() and count.read_text().strip() != str(len(inside))):
            by_split.setdefault(word, []).extend(inside)
    chosen = first_of(split, by_split)
    listed: dict[str, Any] = {}
    for file in (folder / "info.json", folder / "_info.json"):
        listed = json.loads(file.read_text(encoding="utf-8")).get("splits", {}) if file.is_file() else listed
    names = listed.get(first_of(split, listed) or "", {}).get("filenames", ())
    return by_split[chosen] if chosen and all((folder / name).is_file() for name in names) else []


def _fetch(name: str, folder: Path, split: str) -> None:
    from huggingface_hub import snapshot_download

    patterns = ["*.txt", "*.json"] + [pattern for word in SPLITS[split] for pattern in (f"{word}/*", f"*{word}*.tar")]
    failure = None
    try:
        snapshot_download(name, repo_type="dataset", local_dir=folder, allow_patterns=patterns)
    except Exception as problem:  # the network, the hub, the disk
        failure = problem
    if not _files(folder, split):  # without a network, the hub returns half a download without an error
        raise ValueError(
            f"wds/{name} is not in {folder} and cannot be downloaded "
            f"({reason(failure) if failure else 'shards are missing'}). Run `hf download {name} --repo-type dataset "
            f"--local-dir {folder}` on a machine with network access, and copy the result."
        ) from failure
    announce(f"Downloaded wds/{name}", folder)


# Class names


def _numbered(samples: Samples, training: Callable[[], Samples] | None) -> Samples:
    """Samples with class names, by default the numbers up to the highest label, also of the training split."""
    if samples.class_names:
        return samples
    return replace(samples, class_names=numbered([*samples.labels, *(training().labels if training else ())]))


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
        raise ValueError(f"{file} must hold a list of class names ({problem}). Repair or remove it.") from problem
