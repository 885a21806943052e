"""Parquet shards in the Hugging Face layout: columns ``image: {bytes, path}`` and ``label``."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vitlens.datasets.samples import SPLITS, Listing, first_of, names_beside, numbered

OPEN = 2  # shards held while they are read in order: the current one, and the one before for threads behind


class Rows:
    """The encoded images of ``shards``, which hold ``counts`` rows each."""

    def __init__(self, shards: Sequence[Path], counts: Sequence[int], unpacked: Sequence[Path] = ()):
        self.shards, self.counts, self._unpacked = list(shards), list(counts), list(unpacked)
        self._ends = np.cumsum([0, *counts])[1:]
        self._open: OrderedDict[int, pa.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(self.counts)

    def __reduce__(self):
        return Rows, (self.shards, self.counts, self._unpacked)

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
        return pc.struct_field(pq.read_table(self.shards[shard], columns=["image"]).column(0), "bytes")

    def unpacked(self, folder: Path) -> Rows:
        """The same rows in files that allow any order: a row of Parquet is had only with the thousand around it.

        Each shard is copied once, as an Arrow file in ``folder`` that is mapped into memory and takes as much of the
        disk as the shard. A shard that was changed is copied anew.
        """
        folder.mkdir(parents=True, exist_ok=True)
        return Rows(self.shards, self.counts, [_unpack(shard, folder) for shard in self.shards])


def _unpack(shard: Path, folder: Path) -> Path:
    state = shard.stat()
    mark = hashlib.blake2b(f"{shard.resolve()} {state.st_size} {state.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    target = folder / f"{shard.stem}-{mark}.arrow"
    if not target.is_file():
        partial = target.with_suffix(f".{os.getpid()}")
        schema = pa.schema([("bytes", pa.binary())])
        try:
            with pa.ipc.new_file(str(partial), schema) as writer:
                for encoded in _read(shard):
                    writer.write_batch(pa.record_batch([encoded.cast(pa.binary())], schema=schema))
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return target


def _read(shard: Path) -> Iterator[pa.Array]:
    """The encoded images of a shard, some at a time."""
    try:
        with pq.ParquetFile(shard) as file:
            for batch in file.iter_batches(256, columns=["image"]):
                yield pc.struct_field(batch.column(0), "bytes")
    except (OSError, pa.ArrowException) as problem:
        raise ValueError(f"{shard} is damaged ({problem}). Fetch it again.") from problem


def in_parquet(folder: Path, split: str, allow_partial: bool) -> Listing:
    """The shards ``train-*.parquet``, or ``valid``, ``validation-``, ``val-`` or ``test-*.parquet`` of ``folder``."""
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
    wanted = max((int(n) for n in announced if n.isdigit()), default=len(shards))
    if len(shards) < wanted and not allow_partial:
        raise ValueError(
            f"{folder} holds {len(shards)} of the {wanted} {split} shards that their names announce. Add the missing "
            "ones; `vitlens.datasets.load` with allow_partial=True uses what is there."
        )
    labels, counts, class_names = _labels(shards)
    names = names_beside(folder) or class_names
    if not names:
        training = []
        if split != "train":
            with suppress(ValueError):  # damaged, they are not what was asked for
                training = _labels(by_split.get("train", []))[0]
        names = numbered(labels, training)
    return Listing(Rows(shards, counts), labels, names)


def _labels(shards: Sequence[Path]) -> tuple[list[int], list[int], tuple[str, ...] | None]:
    """The labels in ``shards``, how many each holds, and the names of the classes if the metadata has them."""
    labels, counts, class_names = [], [], None
    for shard in shards:
        try:
            with pq.ParquetFile(shard) as file:
                file.schema_arrow.field("image").type.field("bytes")
                column = file.read(columns=["label"])["label"]
                class_names = class_names or _names_in_metadata(file.schema_arrow.metadata)
        except (OSError, KeyError, ValueError, AttributeError) as problem:
            raise ValueError(
                f"{shard} is not a Parquet shard with columns image: {{bytes, path}} and label ({problem})."
            ) from problem
        if column.null_count or not pa.types.is_integer(column.type):
            what = f"{column.null_count} labels missing" if column.null_count else f"labels of type {column.type}"
            raise ValueError(f"{shard} has {what}, and the column label should hold a whole number for each image.")
        labels += column.to_pylist()
        counts.append(len(column))
    return labels, counts, class_names


def _names_in_metadata(metadata: dict | None) -> tuple[str, ...] | None:
    try:
        return tuple(json.loads(metadata[b"huggingface"])["info"]["features"]["label"]["names"])
    except (TypeError, KeyError, ValueError):
        return None
