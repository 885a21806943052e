"""Results of evaluations with how they were measured, kept in JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import get_type_hints

from vitlens.data import files


@dataclass(frozen=True)
class Record:
    """One number, with its 95 % confidence interval, in per cent."""

    model: str
    """A timm name, a name of the paper, or the name of a folder."""
    data: str
    protocol: str
    """top1, fewshot, knn, probe, finetune or vtab."""
    metric: str
    """top1, top5, real (top-1 by ReaL labels) or mean (of the top-1 of several tasks)."""
    value: float
    low: float
    high: float
    images: int
    """Images that were scored."""
    when: str
    """Date and time, UTC."""
    versions: dict[str, str]
    """Of the packages."""
    damaged: int = 0
    """Images that were left out as they could not be decoded; for fine-tuning only those of the test split."""
    command: str = ""
    weights: str = ""
    """The first digits of the SHA-256 of the model's weights."""
    place: str = ""
    """For data in a folder, the first digits of the SHA-256 of its path: it may share its name with others."""
    shots: int | None = None
    seeds: int | None = None
    """Number of seeds (0, 1, 2 …) that the value is a mean over."""
    neighbors: int | None = None
    """For knn."""
    recipe: str | None = None
    """Of fine-tuning: the recipe and the changes to it, unless it is the data's own, unchanged."""
    note: str | None = None
    """Caveats of the number: how classes were matched, which classes are missing, what the interval covers."""

    @property
    def key(self) -> tuple:
        """What makes two records measurements of the same thing."""
        what = self.model, self.weights, self.data, self.place, self.protocol, self.metric
        return *what, self.shots, self.neighbors, self.recipe

    @property
    def manner(self) -> str:
        """The protocol and its settings, such as "fewshot, 5 shots"."""
        parts = [self.protocol]
        parts += [f"{self.shots} shot{'s' * (self.shots > 1)}"] if self.shots else []
        parts += [f"{self.neighbors} neighbor{'s' * (self.neighbors > 1)}"] if self.neighbors else []
        return ", ".join([*parts, *([self.recipe] if self.recipe else [])])

    @property
    def cell(self) -> str:
        """The value with its interval, as in a table."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


TYPES = get_type_hints(Record) | dict.fromkeys(("value", "low", "high"), int | float) | {"versions": dict}
"""What a file must have in each field: JSON writes 84.0 as 84."""


def read(path: str | Path) -> list[Record]:
    """The results in a JSON file: an object with the fields of `Record`, or a list of such; more fields are ignored.

    Raises ValueError for a file that is something else, or numbers that are no percentages, and OSError.
    """
    return [record for record, _ in _entries(path)]


def write(path: Path, records: Iterable[Record]) -> None:
    """Put records into a JSON file, a list of objects; those in it that measure the same are replaced.

    Raises ValueError if the file holds anything else.
    """
    records = list(records)
    new = {record.key for record in records}
    kept = [entry for record, entry in _entries(path) if record.key not in new] if path.exists() else []
    written = [{name: value for name, value in asdict(record).items() if value is not None} for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, (json.dumps([*kept, *written], indent=1, ensure_ascii=False) + "\n").encode())


def table(records: Sequence[Record]) -> str:
    """The records as a text table (data, protocol, metric, value with interval, images), followed by their notes."""
    rows = [("data", "protocol", "metric", "value [95 %]", "images")]
    for r in records:
        count = f"{r.images:,}" + (f", {r.damaged:,} damaged" if r.damaged else "")
        rows.append((r.data, r.manner, r.metric, r.cell, count))
    return "\n".join([*aligned(rows), *dict.fromkeys(r.note for r in records if r.note)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its longest cell; rows may be short."""
    width = max(map(len, rows))
    cells = [[*row, *[""] * (width - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(width)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def _entries(path: str | Path) -> list[tuple[Record, dict]]:
    """The records of a file, each with the object that it was read from."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a file of results: it cannot be read as JSON ({error}).") from error
    return [(_record(each, path), each) for each in (found if isinstance(found, list) else [found])]


def _record(entry: object, path: str | Path) -> Record:
    """The record in an object of a file. Raises ValueError where something is missing or of another type."""
    required = [each.name for each in fields(Record) if each.default is MISSING]
    missing = [name for name in required if not isinstance(entry, dict) or name not in entry]
    if missing:
        raise ValueError(
            f"{path} is not a file of results: a result has {', '.join(required)}, but {', '.join(missing)} is "
            "missing. `vitlens evaluate --out` writes such files; name another, or remove this one."
        )
    record = Record(**{each.name: entry[each.name] for each in fields(Record) if each.name in entry})
    for name, kind in TYPES.items():
        value = getattr(record, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            wanted = getattr(kind, "__name__", kind)
            raise ValueError(f"{path} has a result on {record.data} with {name} = {value!r}; expected {wanted}.")
    if record.images < 1:
        raise ValueError(f"{path} has a result on {record.data} with images = {record.images}; expected 1 or more.")
    if not 0 <= record.low <= record.value <= record.high <= 100:  # nor is NaN
        raise ValueError(
            f"A result has 0 ≤ low ≤ value ≤ high ≤ 100, in per cent, but {path} has {record.low}, {record.value} and "
            f"{record.high} for {record.model} on {record.data}."
        )
    return record
