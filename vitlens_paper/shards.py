"""WebDataset shards, the format of VTAB-1k's copies, read by the package `datasets`."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitlens.data.imageset import Samples
from vitlens.data.sources import EVERY_SPLIT, SPLITS, Columns, data_root, find_split
from vitlens.data.tables import (
    UNWRITABLE,
    library,
    read_class_names,
    reason,
    require_cache,
    with_class_names,
)
from vitlens.files import announce, read_text
from vitlens.walk import archives, note_on_overlap, unique_files


@dataclass(frozen=True)
class Streamed:
    """Encoded images of WebDataset shards, by key. `in_memory` reads them."""

    shards: Sequence[Path]
    keys: Sequence[tuple[str, str]]
    columns: Columns = Columns()

    def select_rows(self, rows: Sequence[int]) -> Streamed:
        return replace(self, keys=[self.keys[i] for i in rows])

    def in_memory(self, most: int) -> list[bytes]:
        """The encoded images in the order of `keys`. Raises ValueError for more than `most` bytes."""
        numbers = {key: i for i, key in enumerate(self.keys)}
        images = [b""] * len(self.keys)
        size = 0
        for key, image, _ in _examples(self.shards, self.columns):
            if key not in numbers:
                continue
            images[numbers[key]] = image
            size += len(image)
            if size > most:
                raise ValueError(
                    f"The images in {self.shards[0].parent} take more than half of the free memory ({most:,} "
                    "bytes). Unpack them into class folders, or convert them to Parquet files."
                )
        return images


def webdataset(
    name: str, split: str, root: Path | None, _, columns: Columns | None = None
) -> Samples:
    """`wds/NAME`: shards in ROOT/NAME or ROOT. `wds/OWNER/SET` is downloaded from the hub if missing."""
    library()  # raises before any download
    parent = data_root(root)
    folder = parent / name
    if name.count("/") == 1 and not _files(folder, split):
        _fetch(name, folder, split)
    if folder.is_dir() or "/" in name:
        return shards(folder, split, columns)
    return shards(parent, split, columns)


def shards(folder: Path, split: str, columns: Columns | None = None) -> Samples:
    """Samples of WebDataset shards: tar files of `KEY.jpg` (or another image) and `KEY.cls` or `KEY.json` with `label`.

    The split is in their names or the name of their folder, where `nshards.txt` may hold their number. Samples with a
    label below 0 are left out. Class names are in `classes.json` or, one per line, in `classnames.txt`, else numbers.
    """
    columns = columns or Columns()
    files = _files(folder, split)
    if not files:
        raise ValueError(
            f"{folder} lacks some or all shards of its {split} split: tar files with {' or '.join(SPLITS[split])} in "
            "their names, or in a folder of that name."
        )
    keys = []
    labels = []
    names = []
    for key, image, label in _examples(files, columns):
        name = ": ".join(key)
        if type(label) is not int or image is None:
            missing = "image in the format of the first" if image is None else "label"
            raise ValueError(
                f"{name} has no {missing}. Images must have one format, each with a number in a .cls file "
                "or under 'label' in a .json file."
            )
        if label >= 0:
            keys.append(key)
            labels.append(label)
            names.append(name)
    class_names = read_class_names(folder) or ()
    note = _note_on_left_out(folder, split)
    samples = Samples(Streamed(files, keys, columns), labels, class_names, names, note)
    if split == "train" or not _files(folder, "train"):
        return with_class_names(samples, None)
    return with_class_names(samples, lambda: shards(folder, "train", columns))


def _examples(
    files: Sequence[Path], columns: Columns
) -> Iterator[tuple[tuple[str, str], bytes | None, object]]:
    """((shard, key), encoded image, label) of each sample of WebDataset shards, read in order without a copy."""
    datasets = library()
    for file in files:
        try:
            paths = {"train": [glob.escape(str(file))]}
            rows = datasets.load_dataset(
                "webdataset", data_files=paths, split="train", streaming=True
            )
            for name, kind in (rows.features or {}).items():
                if isinstance(kind, datasets.Image):
                    rows = rows.cast_column(name, datasets.Image(decode=False))
            for row in rows:
                image = _image_in(row, columns.image)
                label = _label_in(row, columns.label)
                if image is not None or label is not None:
                    key = (file.name, row["__key__"])
                    yield key, image, label
        except _SeveralFieldsError as problem:
            raise ValueError(f"{file}: {problem}") from None
        except Exception as problem:
            _require_shared_memory(problem)
            require_cache(problem, None)
            raise ValueError(
                f"{file} is not a complete WebDataset shard ({reason(problem)}). Download it again, or unpack it if it "
                "holds class folders."
            ) from problem


def _require_shared_memory(problem: BaseException) -> None:
    """Raise the true error of a machine without shared memory, whose semaphores the package datasets needs."""
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, OSError) and not cause.filename and cause.errno in UNWRITABLE:
            raise ValueError(
                f"The package datasets needs shared memory, which this machine does not give ({cause.strerror}: "
                "/dev/shm). Make /dev/shm writable. The data themselves are intact."
            ) from problem
        cause = cause.__cause__ or cause.__context__


class _SeveralFieldsError(ValueError):
    """Several fields of a sample could be its image or its label, or the chosen one is missing."""


def _image_in(row: Mapping[str, Any], key: str) -> bytes | None:
    """The encoded image of a sample: the field `key`, by default the only one with an image."""
    images = {}
    for name, value in row.items():
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            images[name] = value["bytes"]
    if key:
        fields = [
            name for name, value in row.items() if isinstance(value, dict) and "bytes" in value
        ]
        if key not in fields:
            raise _SeveralFieldsError(
                f"image_key must be one of the sample's images {', '.join(fields)}, got {key!r}."
            )
        return images.get(key)
    if len(images) > 1:
        raise _SeveralFieldsError(
            f"the sample {row['__key__']} has several images: {', '.join(images)}. Choose one with image_key "
            "(--image-key)."
        )
    return next(iter(images.values()), None)


def _label_in(row: Mapping[str, Any], key: str) -> object:
    """The label of a sample: the field `key`, by default its .cls file or "label" in its .json file, or None."""
    field, _, inner = key.partition(".")
    if key:
        value = row.get(field)
        return value.get(inner or "label") if isinstance(value, dict) else value
    sidecar = row.get("json") or row.get("jsn") or {}
    labels = {"cls": row.get("cls"), "json.label": sidecar.get("label")}
    labels = {name: label for name, label in labels.items() if label is not None}
    if len(set(labels.values())) > 1:
        said = " and ".join(f"{name} {label}" for name, label in labels.items())
        raise _SeveralFieldsError(
            f"the sample {row['__key__']} has two labels, {said}. Choose one with label_key (--label-key)."
        )
    return next(iter(labels.values()), None)


def _files(folder: Path, split: str) -> list[Path]:
    """Shards of a split, each real file once, as in `_named_files`."""
    files, _ = unique_files(_named_files(folder, split))
    return files


def _named_files(folder: Path, split: str) -> list[Path]:
    """Shards of a split, by the words in their names and by the names of their folders, or [] if one is missing."""
    by_split: dict[str, list[Path]] = {}
    here, _ = archives(folder, ".tar")
    for file in here:
        words = set(re.split(r"[-_.]", file.stem)) & EVERY_SPLIT
        if len(words) > 1:
            raise ValueError(
                f"{file} has the names of several splits in its name: {', '.join(sorted(words))}. Rename it."
            )
        for word in words:
            by_split.setdefault(word, []).append(file)
    for word in EVERY_SPLIT:
        inside, _ = archives(folder / word, ".tar")
        inside.sort(key=lambda file: len(file.name))
        number = folder / word / "nshards.txt"
        complete = True
        if number.is_file():
            distinct, _ = unique_files(inside)
            complete = read_text(number).strip() == str(len(distinct))
        if inside and complete:
            by_split.setdefault(word, []).extend(inside)
    chosen = find_split(split, by_split)
    if not chosen:
        return []
    listed: dict[str, Any] = {}
    for file in (folder / "info.json", folder / "_info.json"):
        if file.is_file():
            listed = json.loads(read_text(file)).get("splits", {})
    listed_split = find_split(split, listed) or ""
    described = listed.get(listed_split, {})
    for name in described.get("filenames", ()):
        if not (folder / name).is_file():
            return []
    return by_split[chosen]


def _note_on_left_out(folder: Path, split: str) -> str:
    """Sentences about tar files that are not read, such as links to others, and those that are also training data."""
    named = _named_files(folder, split)
    files, repeated = unique_files(named)
    sentences = [repeated.sentences()]
    for place in sorted({folder, *(file.parent for file in named)}):
        _, left_out = archives(place, ".tar")
        sentences.append(left_out.sentences())
    if split != "train":
        sentences.append(note_on_overlap(files, _files(folder, "train"), "train"))
    return " ".join(filter(None, sentences))


def _fetch(name: str, folder: Path, split: str) -> None:
    from huggingface_hub import snapshot_download

    patterns = ["*.txt", "*.json"]
    for word in SPLITS[split]:
        patterns += [f"{word}/*", f"*{word}*.tar"]
    failure = None
    try:
        snapshot_download(name, repo_type="dataset", local_dir=folder, allow_patterns=patterns)
    except Exception as problem:  # the network, the hub, the disk
        failure = problem
    # Without a network, the hub returns half a download without an error.
    if not _files(folder, split):
        problem = reason(failure) if failure else "shards are missing"
        raise ValueError(
            f"wds/{name} is not in {folder} and cannot be downloaded ({problem}). Run `hf download {name} "
            f"--repo-type dataset --local-dir {folder}` on a machine with network access, and copy the result."
        ) from failure
    announce(f"Downloaded wds/{name}", folder)
