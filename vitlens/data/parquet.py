"""Parquet shards in the Hugging Face layout: columns `image: {bytes, path}` and `label`.

Read by pyarrow, a core dependency. `datasets` would copy every shard first, also of sets that are held in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vitlens.data.files import announce
from vitlens.data.samples import SPLITS, Listing, first_of, names_beside, numbers_as_names

OPEN = 2  # shards held while they are read in order: the current one, and the one before for threads behind
IMAGES, LABELS = "encoded images, {bytes, path}", "a whole number for the class of each image"


class Rows:
    """The encoded images in a column of `shards`, which hold `counts` rows each.

    `unpacked` are copies of the shards as Arrow files, if there are any.
    """

    def __init__(
        self, shards: Sequence[Path], counts: Sequence[int], column: str = "image", unpacked: Sequence[Path] = ()
    ):
        self.shards, self.counts, self.column, self._unpacked = list(shards), list(counts), column, list(unpacked)
        self._ends = np.cumsum([0, *counts])[1:]
        self._open: OrderedDict[int, pa.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(self.counts)

    def __reduce__(self):
        return Rows, (self.shards, self.counts, self.column, self._unpacked)

    def name(self, i: int) -> str:
        shard, row = self._place(i)
        return f"{self.shards[shard].name} row {row}"

    def content(self, i: int) -> bytes:
        shard, row = self._place(i)
        with self._lock:
            if shard not in self._open:
                self._open[shard] = self._column(shard)
                while len(self._open) > OPEN and not self._unpacked:
                    self._open.popitem(last=False)
            column = self._open[shard]
        return column[row].as_py() or b""

    def _place(self, i: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, i, side="right"))
        return shard, i - int(self._ends[shard]) + self.counts[shard]

    def _column(self, shard: int) -> pa.ChunkedArray:
        if self._unpacked:
            return pa.ipc.open_file(pa.memory_map(str(self._unpacked[shard]))).read_all().column(0)
        return pc.struct_field(pq.read_table(self.shards[shard], columns=[self.column]).column(0), "bytes")

    def unpacked(self, folder: Path) -> Rows:
        """The same rows in files that can be read in any order: Parquet gives a row only with the thousand around it.

        Each shard is copied once, as an Arrow file in `folder` that is mapped into memory and takes as much of the
        disk as the shard. A shard that was changed is copied anew.
        """
        folder.mkdir(parents=True, exist_ok=True)
        targets = [_target(shard, folder) for shard in self.shards]
        size = 0
        for shard, target in zip(self.shards, targets, strict=True):
            if not target.is_file():
                size += shard.stat().st_size
                _unpack(shard, target, self.column)
        if size:
            announce(f"Unpacked Parquet shards of {size / 1e6:,.0f} MB, to be read in any order,", folder)
        return Rows(self.shards, self.counts, self.column, targets)


def _target(shard: Path, folder: Path) -> Path:
    """The file that a shard is unpacked to, named by the shard's path, size and date."""
    state = shard.stat()
    mark = hashlib.blake2b(f"{shard.resolve()} {state.st_size} {state.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    return folder / f"{shard.stem}-{mark}.arrow"


def _unpack(shard: Path, target: Path, column: str) -> None:
    partial = target.with_suffix(f".{os.getpid()}")
    schema = pa.schema([("bytes", pa.binary())])
    try:
        with _opened(shard) as file, pa.ipc.new_file(str(partial), schema) as writer:
            for batch in file.iter_batches(256, columns=[column]):
                encoded = pc.struct_field(batch.column(0), "bytes").cast(pa.binary())
                writer.write_batch(pa.record_batch([encoded], schema=schema))
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _opened(shard: Path) -> Iterator[pq.ParquetFile]:
    """A shard, open; what goes wrong while it is read is a `ValueError` with its name."""
    try:
        with pq.ParquetFile(shard) as file:
            yield file
    except (OSError, pa.ArrowException) as problem:
        raise ValueError(f"{shard} is not a Parquet shard, or a damaged one ({problem}). Fetch it again.") from problem


def in_parquet(folder: Path, split: str, allow_partial: bool) -> Listing:
    """The shards `train-*.parquet`, or `valid`, `validation-`, `val-` or `test-*.parquet` of `folder`."""
    by_split: dict[str, list[Path]] = {}
    for shard in sorted(folder.glob("*.parquet")):
        by_split.setdefault(shard.name.split("-")[0].split(".")[0], []).append(shard)
    shards = by_split.get(first_of(split, by_split))
    if not shards:
        raise ValueError(
            f"{folder} holds Parquet files, but none of its {split} split, whose names begin with "
            f"{' or '.join(name + '-' for name in SPLITS[split])}."
        )
    # train-00002-of-00005.parquet announces five.
    announced = {p.stem.rpartition("-of-")[2] for p in shards if "-of-" in p.stem}
    expected = max((int(n) for n in announced if n.isdigit()), default=len(shards))
    if len(shards) < expected and not allow_partial:
        raise ValueError(
            f"{folder} holds {len(shards)} of the {expected} {split} shards that their names announce. Add the missing "
            "ones; `vitlens.data.load` with allow_partial=True uses what is there."
        )
    image, label = _columns(shards[0])
    labels, counts, class_names = _labels(shards, image, label)
    class_names = names_beside(folder) or class_names
    if not class_names:
        training = []
        if split != "train":
            with suppress(ValueError):  # damaged, they are not what was asked for
                training = _labels(by_split.get(first_of("train", by_split), []), image, label)[0]
        class_names = numbers_as_names(labels, training)
    note = f"Of the columns of {folder}, {image} is taken for the images and {label} for the labels."
    note = "" if (image, label) == ("image", "label") else note
    return Listing(Rows(shards, counts, image), labels, class_names, note)


def _columns(shard: Path) -> tuple[str, str]:
    """The columns of images and of labels (CIFAR-100's is `fine_label`): by name, else the only ones of a fitting type.

    Raises `ValueError` with the columns if there is no such one.
    """
    with _opened(shard) as file:
        schema = file.schema_arrow
    images = [field.name for field in schema if _holds_images(field)]
    labels = [field.name for field in schema if pa.types.is_integer(field.type)]
    found = []
    for known, fitting, what in ((["image"], images, IMAGES), (["label", "fine_label"], labels, LABELS)):
        named = [name for name in known if name in schema.names] or (fitting if len(fitting) == 1 else [])
        if not named:
            which = f"several of them could be it ({', '.join(fitting)})" if fitting else "none of them is one"
            raise ValueError(
                f"{shard} is not a Parquet shard with columns image and label: it has {', '.join(schema.names)}, and "
                f"{which}. Give the column with {what} the name {known[0]}."
            )
        found.append(named[0])
    return found[0], found[1]


def _holds_images(field: pa.Field) -> bool:
    return pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0


def _labels(shards: Sequence[Path], image: str, label: str) -> tuple[list[int], list[int], tuple[str, ...] | None]:
    """The labels in `shards`, how many each holds, and the names of the classes if the metadata has them."""
    labels, counts, class_names = [], [], None
    for shard in shards:
        with _opened(shard) as file:
            schema = file.schema_arrow
            if not {image, label} <= {*schema.names} or not _holds_images(schema.field(image)):
                raise ValueError(f"{shard} is not a Parquet shard with columns {image}: {{bytes, path}} and {label}.")
            column = file.read(columns=[label])[label]
            class_names = class_names or _names_in_metadata(schema.metadata, label)
        if column.null_count or not pa.types.is_integer(column.type):
            what = f"{column.null_count} labels missing" if column.null_count else f"labels of type {column.type}"
            raise ValueError(f"{shard} has {what}, and the column {label} should hold a whole number for each image.")
        labels += column.to_pylist()
        counts.append(len(column))
    return labels, counts, class_names


def _names_in_metadata(metadata: dict | None, label: str) -> tuple[str, ...] | None:
    try:
        return tuple(json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"])
    except (TypeError, KeyError, ValueError):
        return None
