"""Results of evaluations with how they were measured, kept in JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from vitlens.data import files


@dataclass(frozen=True)
class Record:
    """One number, with its 95 % confidence interval, in per cent.

    model: a timm name, a name of the paper, or the name of a folder. protocol: top1, fewshot, knn, probe, finetune or
    vtab. metric: top1, top5, real (top-1 by ReaL labels) or mean (of the top-1 of several tasks). images: images that
    were scored. when: date and time, UTC. damaged: images left out because they could not be decoded; for fine-tuning
    only those of the test split. weights: first digits of the SHA-256 of the model's weights. place: for data in a
    folder, those of its path, because it may share its name with others. seeds: number of seeds (0, 1, 2 …) that the
    value is a mean over. recipe: of fine-tuning, with the changes to it, unless it is the data's own, unchanged. note:
    how classes were matched, which classes are missing, what the interval covers.
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
    damaged: int = 0
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
        """Fields that are equal in two measurements of the same thing."""
        return (self.model, self.weights, self.data, self.place, self.protocol, self.metric, self.shots, self.seeds,
                self.neighbors, self.recipe)  # fmt: skip

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


def read(path: str | Path) -> list[Record]:
    """The results in a JSON file: an object with the fields of `Record`, or a list of such; more fields are ignored."""
    return [record for record, _ in _entries(path)]


def write(path: Path, records: Iterable[Record]) -> None:
    """Add records to a JSON file, a list of objects; those in it that measure the same are replaced."""
    records = list(records)
    new = {record.key for record in records}
    kept = [entry for record, entry in _entries(path) if record.key not in new] if path.exists() else []
    written = [{name: value for name, value in asdict(record).items() if value is not None} for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, (json.dumps([*kept, *written], indent=1, ensure_ascii=False) + "\n").encode())


def table(records: Sequence[Record]) -> str:
    """The records as a text table (data, protocol, metric, value with interval, images), followed by their notes."""
    from pandas import DataFrame

    rows = [
        (r.data, r.manner, r.metric, r.cell, f"{r.images:,}" + (f", {r.damaged:,} damaged" if r.damaged else ""))
        for r in records
    ]
    frame = DataFrame(rows, columns=["data", "protocol", "metric", "value [95 %]", "images"])
    notes = dict.fromkeys(r.note for r in records if r.note)
    return "\n".join([frame.to_string(index=False), *notes])


def _entries(path: str | Path) -> list[tuple[Record, dict]]:
    """The records of a file, each with the object that it was read from. Raises ValueError for any other file."""
    required = [field.name for field in fields(Record) if field.default is MISSING]
    known = [field.name for field in fields(Record)]
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        entries = entries if isinstance(entries, list) else [entries]
        records = [Record(**{name: entry[name] for name in known if name in entry or name in required})
                   for entry in entries]  # fmt: skip
        for record in records:
            if not 0 <= record.low <= record.value <= record.high <= 100 or record.images < 1:  # NaN fails too
                raise ValueError(f"{record} is not a percentage within its interval")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a file of results as `vitlens evaluate --out` writes it, a list of objects with "
            f"{', '.join(required)} ({type(error).__name__}: {error})."
        ) from error
    return list(zip(records, entries, strict=True))
