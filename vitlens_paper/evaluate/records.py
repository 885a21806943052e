"""Records of evaluations, in JSON files and as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from vitlens import files
from vitlens.texts import valid


@dataclass(frozen=True)
class Record:
    """One measured value with its 95 % confidence interval, in percent.

    model: a timm name, a name of the paper, or the name of a directory. protocol: top1, fewshot, knn, probe, finetune
    or vtab. metric: top1, top5, real (top-1 by ReaL labels) or mean (of the top-1 of several tasks). images: number of
    scored images. when: date and time, UTC. weights: first digits of the SHA-256 of the model's weights. place: first
    digits of the SHA-256 of the images and labels of a folder. seeds: number of seeds (0, 1, 2 …) in the mean. recipe:
    fine-tuning recipe with its changes, or None for the data's unchanged recipe. note: match of the classes, images
    left out, meaning of the interval.

    >>> r = vitlens_paper.evaluate.Record("vit", "pets", "knn", "top1", 90.0, 88.2, 91.6, 1000, "2025", {}, neighbors=5)
    >>> r.cell
    '90.00 [88.20, 91.60]'
    """

    model: str
    data: str
    protocol: str
    metric: str
    value: float
    low: float
    high: float
    images: int
    when: str
    versions: dict[str, str]
    command: str = ""
    weights: str = ""
    place: str = ""
    shots: int | None = None
    seeds: int | None = None
    neighbors: int | None = None
    recipe: str | None = None
    note: str | None = None

    @property
    def key(self) -> tuple:
        """Fields that identify a measurement."""
        return (
            self.model,
            self.weights,
            self.data,
            self.place,
            self.protocol,
            self.metric,
            self.shots,
            self.seeds,
            self.neighbors,
            self.recipe,
        )

    @property
    def manner(self) -> str:
        """The protocol and its settings, such as "fewshot, 5 shots"."""
        parts = [self.protocol]
        if self.shots:
            parts.append("1 shot" if self.shots == 1 else f"{self.shots} shots")
        if self.neighbors:
            parts.append("1 neighbor" if self.neighbors == 1 else f"{self.neighbors} neighbors")
        if self.recipe:
            parts.append(self.recipe)
        return ", ".join(parts)

    @property
    def cell(self) -> str:
        """The value with its interval for a table."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def read_results(path: str | os.PathLike) -> list[Record]:
    """Records of a JSON file: an object with the fields of `Record`, or a list of objects. Other fields are ignored.

    >>> vitlens_paper.evaluate.write("results.json", [])
    >>> vitlens_paper.evaluate.read_results("results.json")
    []
    """
    return [record for record, _ in _entries(path)]


def write(path: str | os.PathLike, records: Iterable[Record]) -> None:
    """Add records to a JSON file, a list of objects, where they replace records with the same key.

    Several processes may add to one file: each waits until the others have written.

    >>> vitlens_paper.evaluate.write("results.json", [])
    """
    path = Path(path)
    records = list(records)
    replaced = {record.key for record in records}

    def add(content: bytes | None) -> str:
        entries = []
        if content is not None:
            entries = [entry for record, entry in _entries(path) if record.key not in replaced]
        for record in records:
            values = asdict(record).items()
            entries.append({name: value for name, value in values if value is not None})
        return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"

    path.parent.mkdir(parents=True, exist_ok=True)
    files.update(path, add, "--out")


def table(records: Sequence[Record]) -> str:
    """Text table of records (data, protocol, metric, value with interval, images), followed by their notes.

    >>> print(vitlens_paper.evaluate.table([]).splitlines()[1])
    Columns: [data, protocol, metric, value [95 %], images]
    """
    from pandas import DataFrame

    rows = []
    for record in records:
        images = f"{record.images:,}"
        rows.append((valid(record.data), record.manner, record.metric, record.cell, images))
    frame = DataFrame(rows, columns=["data", "protocol", "metric", "value [95 %]", "images"])
    notes = dict.fromkeys(r.note for r in records if r.note)
    return "\n".join([frame.to_string(index=False), *notes])


def _entries(path: str | os.PathLike) -> list[tuple[Record, dict]]:
    """Records of a file, each with its JSON object. Raises ValueError for other files."""
    required = [field.name for field in fields(Record) if field.default is MISSING]
    known = [field.name for field in fields(Record)]
    try:
        entries = json.loads(files.read(path))
        if not isinstance(entries, list):
            entries = [entries]
        records = []
        for entry in entries:
            names = [name for name in known if name in entry or name in required]
            values = {name: entry[name] for name in names}  # KeyError for a missing required field
            record = Record(**values)
            ordered = 0 <= record.low <= record.value <= record.high <= 100  # False with NaN
            if not ordered or record.images < 1:
                raise ValueError(f"{record} is not a percentage within its interval")
            records.append(record)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} must be a file of `vitlens evaluate --out`, a list of objects with {', '.join(required)} "
            f"({type(error).__name__}: {error}). Give another file."
        ) from error
    return list(zip(records, entries, strict=True))
