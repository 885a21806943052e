"""WebDataset shards, the format of VTAB-1k's copies, read by the package `datasets`."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitlens.data.files import announce
from vitlens.data.imageset import Samples
from vitlens.data.sources import EVERY_SPLIT, SPLITS, data_root, find_split
from vitlens.data.tables import library, read_class_names, reason, with_class_names


@dataclass(frozen=True)
class Streamed:
    """Encoded images of WebDataset shards, by key. `in_memory` reads them."""

    shards: Sequence[Path]
    keys: Sequence[tuple[str, str]]

    def select_rows(self, rows: Sequence[int]) -> Streamed:
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
    samples = Samples(
        Streamed(files, keys),
        labels,
        read_class_names(folder) or (),
        [": ".join(key) for key in keys],
    )
    alone = split == "train" or not _files(folder, "train")
    return with_class_names(samples, None if alone else lambda: shards(folder, "train"))


def _examples(files: Sequence[Path]) -> Iterator[tuple[tuple[str, str], bytes | None, object]]:
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
                image = next(
                    (v["bytes"] for v in row.values() if isinstance(v, dict) and "bytes" in v), None
                )
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
    chosen = find_split(split, by_split)
    listed: dict[str, Any] = {}
    for file in (folder / "info.json", folder / "_info.json"):
        listed = (
            json.loads(file.read_text(encoding="utf-8")).get("splits", {})
            if file.is_file()
            else listed
        )
    names = listed.get(find_split(split, listed) or "", {}).get("filenames", ())
    return by_split[chosen] if chosen and all((folder / name).is_file() for name in names) else []


def _fetch(name: str, folder: Path, split: str) -> None:
    from huggingface_hub import snapshot_download

    patterns = ["*.txt", "*.json"] + [
        pattern for word in SPLITS[split] for pattern in (f"{word}/*", f"*{word}*.tar")
    ]
    failure = None
    try:
        snapshot_download(name, repo_type="dataset", local_dir=folder, allow_patterns=patterns)
    except Exception as problem:  # the network, the hub, the disk
        failure = problem
    if not _files(
        folder, split
    ):  # without a network, the hub returns half a download without an error
        raise ValueError(
            f"wds/{name} is not in {folder} and cannot be downloaded "
            f"({reason(failure) if failure else 'shards are missing'}). Run `hf download {name} --repo-type dataset "
            f"--local-dir {folder}` on a machine with network access, and copy the result."
        ) from failure
    announce(f"Downloaded wds/{name}", folder)
