"""What was measured, as records that say how: a JSON file of them, and a table to read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """One number, with its 95 % confidence interval, in per cent."""

    model: str
    data: str
    protocol: str
    """top1, fewshot, knn, probe, finetune or vtab."""
    metric: str
    """top1, top5, real, or mean: of the top-1 of several tasks."""
    value: float
    low: float
    high: float
    images: int
    """Images that were scored."""
    damaged: int
    """Images that could not be decoded and were left out."""
    when: str
    """Date and time, UTC."""
    versions: dict[str, str]
    command: str
    weights: str = ""
    """What the model's weights are told from others by: the first digits of their SHA-256."""
    shots: int | None = None
    seeds: int | None = None
    """How many, where the number is a mean over seeds; they are 0, 1, 2 …"""
    neighbours: int | None = None
    """Of each image, for knn."""
    recipe: str | None = None
    """Of fine-tuning: the recipe and what was changed in it, where it is not simply the data's own."""

    @property
    def key(self) -> tuple:
        """What makes two records measurements of the same thing."""
        what = self.model, self.weights, self.data, self.protocol, self.metric
        return *what, self.shots, self.neighbours, self.recipe


def write(path: Path, records: Iterable[Record]) -> None:
    """Put records into a JSON file, a list of objects; those in it that measure the same are replaced.

    Raises ValueError if the file holds anything else.
    """
    records = list(records)
    new = {record.key for record in records}
    kept = [record for record in read_results(path) if record.key not in new] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([_plain(record) for record in (*kept, *records)], indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_results(path: Path) -> list[Record]:
    """The records in a file of `write`. Raises ValueError if the file holds anything else."""
    try:
        return [Record(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as problem:
        raise ValueError(f"{path} is not a file of results ({problem}). Name another file, or remove it.") from problem


def _plain(record: Record) -> dict:
    return {name: value for name, value in asdict(record).items() if value is not None}


def table(records: Sequence[Record]) -> str:
    """The records as lines of text: data, protocol, metric, value with its interval, images."""
    rows = [("data", "protocol", "metric", "value [95 %]", "images")]
    for r in records:
        protocol = r.protocol + (f", {r.shots} shot{'s' * (r.shots > 1)}" if r.shots else "")
        protocol += f", {r.neighbours} neighbour{'s' * (r.neighbours > 1)}" if r.neighbours else ""
        protocol += f", {r.recipe}" if r.recipe else ""
        count = f"{r.images:,}" + (f", {r.damaged:,} damaged" if r.damaged else "")
        rows.append((r.data, protocol, r.metric, f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]", count))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
