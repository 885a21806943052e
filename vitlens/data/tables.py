"""Parquet files, WebDataset shards and data sets of the Hugging Face hub, read by the package `datasets`."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitlens.data.files import announce, quiet, reach
from vitlens.data.imageset import Samples
from vitlens.data.sources import EVERY_SPLIT, SPLITS, data_root, first_of

LABELS = ("label", "fine_label", "labels")  # CIFAR-100's is fine_label


def library():
    """The package `datasets`."""
    try:
        import datasets
    except ImportError as problem:
        raise ValueError(
            "Parquet files, WebDataset shards and data sets of the hub need the package datasets. Install it: "
            "pip install datasets"
        ) from problem
    return datasets


@dataclass(frozen=True)
class Column:
    """The encoded images of a table of `datasets`, mapped into memory: each a row `{"bytes", "path"}`.

    Arrow's column is read itself: rows of `datasets` take a third as long as decoding 64 × 64 pixels.
    """

    table: Any
    name: str

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> dict:
        return self.table.data.column(self.name)[i].as_py()


# Parquet and the hub


def parquet(folder: Path, split: str, root: str | Path | None = None) -> Samples:
    """The files `train-*.parquet`, or `valid…-`, `validation-`, `val-` or `test-*.parquet` of `folder`."""
    by_split: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.parquet")):
        by_split.setdefault(re.split(r"[-.]", file.name)[0], []).append(file)
    chosen = first_of(split, by_split)
    if chosen is None:
        raise ValueError(
            f"{folder} holds Parquet files, but none of its {split} split, whose names begin with "
            f"{' or '.join(name + '-' for name in SPLITS[split])}."
        )
    files = by_split[chosen]
    # train-00002-of-00005.parquet announces five.
    announced = {file.stem.rpartition("-of-")[2] for file in files if "-of-" in file.stem}
    expected = max((int(n) for n in announced if n.isdigit()), default=len(files))
    if len(files) < expected:
        raise ValueError(
            f"{folder} holds {len(files)} of the {expected} {split} shards that their names announce. Add the missing "
            "ones."
        )
    found = _table(_load(folder, root, "parquet", {chosen: files})[chosen], chosen, str(folder), names_beside(folder))
    if found.class_names or split == "train":
        return _named(found)
    return _named(found, parquet(folder, "train", root).labels if first_of("train", by_split) else ())


def hub(name: str, split: str, root: Path | None, _) -> Samples:
    """`hfds/OWNER/SET`: a data set of the Hugging Face hub; a folder of that name stands in for it."""
    if Path(name).is_dir():
        data = Path(name) / "data"
        return parquet(data if data.is_dir() else Path(name), split, root)
    tables = _load(name, root, name, None)
    chosen = first_of(split, tables)
    if chosen is None:
        raise ValueError(
            f"hfds/{name} has the splits {', '.join(tables)}, but the {split} split must be named "
            f"{' or '.join(SPLITS[split])}."
        )
    if tables[chosen].info.builder_name == "imagefolder":  # which may take a class for a split
        raise ValueError(f"hfds/{name} is a folder of images, not a table. Download it and give the folder.")
    found, train = _table(tables[chosen], chosen, f"hfds/{name}"), first_of("train", tables)
    if found.class_names or train in (None, chosen):
        return _named(found)
    return _named(found, _table(tables[train], train, f"hfds/{name}").labels)


def _load(where: str | Path, root: str | Path | None, builder: str, splits: dict[str, list[Path]] | None):
    """The splits as tables of `datasets`, kept in its cache: the folder `root`, else its own."""
    datasets = library()
    files = splits and {name: [glob.escape(str(file)) for file in paths] for name, paths in splits.items()}
    cache = Path(root or datasets.config.HF_DATASETS_CACHE)
    before = {*cache.glob("*/*/*/*")}
    try:
        with quiet(), _reaching(datasets.config, needed=splits is None):
            tables = datasets.load_dataset(builder, data_files=files, cache_dir=str(cache))
    except Exception as problem:  # the network, the hub, a damaged file
        reason = f"{type(problem).__name__}: {' '.join(str(problem.__cause__ or problem).split())}"
        if splits:
            raise ValueError(f"The Parquet files of {where} cannot be read ({reason}). Fetch them again.") from problem
        raise ValueError(
            f"hfds/{where} is not in {cache} and cannot be fetched from here ({reason}). Check the name, or run "
            f"datasets.load_dataset({where!r}) where there is a network and copy its cache."
        ) from problem
    if {*cache.glob("*/*/*/*")} - before:
        announce(f"Put {where}, as the package datasets reads it,", cache)
    return tables


def _named(found: Samples, training: Sequence[int] = ()) -> Samples:
    """Samples with the numbers of the classes as their names if there are none."""
    return found if found.class_names else replace(found, class_names=numbered(found.labels, training))


def _table(table: Any, split: str, title: str, names: Sequence[str] | None = None) -> Samples:
    image, label = _columns(table.features, title)
    labels = table.data.column(label).to_pylist()
    if None in labels:
        raise ValueError(f"{labels.count(None)} images of {title} have no {label}. Give each image a label.")
    names = names or getattr(table.features[label], "names", ())
    rows = Column(table.select_columns([image]), image)
    first = rows[0] if len(rows) else None
    if first and first["path"] and not first["bytes"]:
        raise ValueError(
            f"The column {image} of {title} holds paths, such as {first['path']!r}, and not the images. Write "
            "it with the bytes of the files."
        )
    note = f"Of the columns of {title}, {image} is taken for the images and {label} for the labels."
    note = "" if (image, label) == ("image", "label") else note
    return Samples(rows, labels, tuple(names), range(len(rows)), note, f"{title} {split} row ")


def _columns(features: Mapping[str, Any], title: str) -> tuple[str, str]:
    """The columns of images and of labels: by name, else the only ones of a fitting type."""
    datasets = library()
    images = [
        name for name, kind in features.items()
        if isinstance(kind, datasets.Image) or isinstance(kind, dict) and "bytes" in kind
    ]  # fmt: skip
    labels = [
        name for name, kind in features.items()
        if isinstance(kind, datasets.ClassLabel) or isinstance(kind, datasets.Value) and "int" in kind.dtype
    ]  # fmt: skip
    pair = []
    for known, fitting, what in ((("image",), images, "of images"), (LABELS, labels, "of whole numbers as labels")):
        named = [name for name in known if name in features]  # a name counts more than a fitting type
        names = [name for name in named if name in fitting] if named else fitting
        if not names or len(names) > 1 and names is fitting:
            which = f"several could be it ({', '.join(fitting)})" if fitting else "none of them is one"
            raise ValueError(
                f"{title} has the columns {', '.join(features)}, but needs one {what}, and {which}. Give it the name "
                f"{known[0]}; columns of paths are not read."
            )
        pair.append(names[0])
    return pair[0], pair[1]


@contextmanager
def _reaching(config, needed: bool) -> Iterator[None]:
    """If the hub cannot be reached, make `datasets` use only its cache in this block, instead of retrying for half a
    minute."""
    before = config.HF_HUB_OFFLINE
    if needed:
        try:
            reach()
        except OSError:
            config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


# WebDataset


class MissingShards(ValueError):
    """The shards of a split are missing, some or all of them."""


@dataclass(frozen=True)
class Streamed:
    """Encoded images of WebDataset shards by their keys; `in_memory` reads them."""

    shards: tuple[Path, ...]
    keys: Sequence[tuple[str, str]]

    def chosen(self, rows: Sequence[int]) -> Streamed:
        return replace(self, keys=[self.keys[i] for i in rows])

    def in_memory(self, most: int) -> list[bytes]:
        """The encoded images in the order of `keys`. Raises ValueError for more than `most` bytes."""
        numbers = {key: i for i, key in enumerate(self.keys)}
        images, size = [b""] * len(self.keys), 0
        for key, row in _examples(self.shards):
            if key in numbers:
                images[numbers[key]] = image = _image(row) or b""
                if (size := size + len(image)) > most:
                    raise ValueError(
                        f"The images in {self.shards[0].parent} take more than half of the free memory ({most:,} "
                        "bytes). Unpack them into class folders, or convert them to Parquet files."
                    )
        return images


def webdataset(name: str, split: str, root: Path | None, _) -> Samples:
    """`wds/NAME`: shards in ROOT/NAME or in ROOT itself; `wds/OWNER/SET` is fetched from the hub if missing."""
    library()  # before anything is fetched
    folder = data_root(root) / name
    try:
        return shards(folder if folder.is_dir() or "/" in name else data_root(root), split)
    except MissingShards:
        if name.count("/") != 1:  # no data set of the hub
            raise
    _fetch(name, folder, split)
    return shards(folder, split)


def shards(folder: Path, split: str) -> Samples:
    """WebDataset shards: tar files of `KEY.jpg` (or another image) beside `KEY.cls` or `KEY.json` with its `label`.

    The split is in their names, or they lie in a folder of its name, where `nshards.txt` may hold their number. Samples
    with a label below 0 are left out. Class names: `classes.json` or, one a line, `classnames.txt`, else numbers.
    """
    files = _files(folder, split)
    keys, labels = [], []
    for key, row in _examples(files):
        if _image(row) is None:
            if any(row.get(name) is not None for name in ("cls", "json", "jsn")):
                raise ValueError(f"{': '.join(key)} has a label and no image. A shard must hold one kind of image.")
        elif (label := _label(row, key)) >= 0:
            keys.append(key)
            labels.append(label)
    names = names_beside(folder)
    if not names:
        try:
            names = numbered(labels, shards(folder, "train").labels if split != "train" else ())
        except MissingShards:
            names = numbered(labels)
    places = [f"{shard}: {key}" for shard, key in keys]
    return Samples(Streamed(tuple(files), keys), labels, names, places)


def _examples(files: Sequence[Path]) -> Iterator[tuple[tuple[str, str], dict]]:
    """((shard, key), example) of each sample of WebDataset shards, read in order and never copied."""
    datasets = library()
    for file in files:
        try:
            paths = {"train": [glob.escape(str(file))]}
            rows = datasets.load_dataset("webdataset", data_files=paths, split="train", streaming=True)
            for name, kind in (rows.features or {}).items():
                if isinstance(kind, datasets.Image):
                    rows = rows.cast_column(name, datasets.Image(decode=False))
            for row in rows:
                yield (file.name, row["__key__"]), row
        except Exception as problem:
            raise ValueError(
                f"{file} is not a whole WebDataset shard ({type(problem).__name__}: {problem}). Fetch it again; tar "
                "files of class folders are to be unpacked."
            ) from problem


def _image(row: dict) -> bytes | None:
    return next((value["bytes"] for value in row.values() if isinstance(value, dict) and "bytes" in value), None)


def _label(row: dict, key: tuple[str, str]) -> int:
    value = row.get("cls")
    for name in ("json", "jsn"):
        value = row[name].get("label") if value is None and row.get(name) else value
    if type(value) is not int:
        raise ValueError(
            f"{': '.join(key)} has no label: expected a number in a .cls file, or under 'label' in a .json file."
        )
    return value


def _files(folder: Path, split: str) -> list[Path]:
    """The shards of a split, by the words in their names and by the folders that they lie in."""
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
    for file in (folder / "_info.json", folder / "info.json"):
        listed = json.loads(file.read_text(encoding="utf-8")).get("splits", {}) if file.is_file() else {}
        names = listed.get(first_of(split, listed) or "", {}).get("filenames", ())
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise MissingShards(f"{folder} lacks {missing[0]}, which {file.name} lists.")
    if chosen is None:
        raise MissingShards(
            f"{folder} lacks shards of its {split} split, some or all of them: tar files with "
            f"{' or '.join(SPLITS[split])} in their names, or in a folder so named."
        )
    return by_split[chosen]


def _fetch(name: str, folder: Path, split: str) -> None:
    from huggingface_hub import snapshot_download

    patterns = ["*.txt", "*.json"] + [pattern for word in SPLITS[split] for pattern in (f"{word}/*", f"*{word}*.tar")]
    try:
        with quiet():
            snapshot_download(name, repo_type="dataset", local_dir=folder, allow_patterns=patterns)
        _files(folder, split)  # where there is no network, half a download is returned as if it were whole
    except Exception as problem:  # the network, the hub, the disk
        reason = " ".join(str(problem).split())[:160].rstrip(".")
        raise ValueError(
            f"wds/{name} is not in {folder} and cannot be fetched from here ({type(problem).__name__}: {reason}). Run "
            f"`hf download {name} --repo-type dataset --local-dir {folder}` where there is a network, and copy the "
            "result there."
        ) from problem
    announce(f"Fetched wds/{name}", folder)


# Class names


def numbered(*splits: Sequence[int]) -> tuple[str, ...]:
    """Class names for data that has none: the numbers from 0 to the highest label of the given splits."""
    highest, count = max((int(label) for labels in splits for label in labels), default=-1), sum(map(len, splits))
    if highest > max(100_000, count):
        raise ValueError(
            f"A label of {highest:,} among {count:,} images is no number of a class; it looks like an id. Number the "
            "classes from 0 up."
        )
    return tuple(str(i) for i in range(highest + 1))


def names_beside(folder: Path) -> tuple[str, ...] | None:
    """Class names from `classnames.txt`, one a line, or `classes.json`: a list, or a dict with `names` (a list, or a
    dict by the WordNet ids in `wnids`)."""
    lines, file = folder / "classnames.txt", folder / "classes.json"
    if not file.is_file():
        return tuple(lines.read_text(encoding="utf-8").splitlines()) if lines.is_file() else None
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(names, dict):
            wnids, names = names.get("wnids"), names.get("names", names.get("wnids"))
            names = [names[wnid] for wnid in wnids or names] if isinstance(names, dict) else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"not class names: {names!r:.60}")
    except (LookupError, TypeError, ValueError) as problem:
        raise ValueError(f"{file} should hold a list of class names ({problem}). Repair or remove it.") from problem
    return tuple(names)
