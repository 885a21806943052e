"""What was measured of a model, as records that say how: a JSON file of them, and a table to read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from vitlens import files


@dataclass(frozen=True)
class Record:
    """One number, with its 95 % confidence interval, in per cent."""

    model: str
    """A timm name, a folder's or the paper's."""
    data: str
    protocol: str
    """top1, fewshot, knn, probe, finetune or vtab."""
    metric: str
    """top1, top5, real (ReaL labels), or mean: of the top-1 of several tasks."""
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
    """Images that could not be decoded and were left out; of fine-tuning only those to measure on."""
    command: str = ""
    weights: str = ""
    """What the model's weights are told from others by: the first digits of their SHA-256."""
    place: str = ""
    """What tells a folder of data from others of its name: the first digits of the SHA-256 of where it lies."""
    shots: int | None = None
    seeds: int | None = None
    """How many, where the number is a mean over seeds; they are 0, 1, 2 …"""
    neighbors: int | None = None
    """Of each image, for knn."""
    recipe: str | None = None
    """Of fine-tuning: the recipe and what was changed in it, where it is not simply the data's own."""
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
        """As in a table."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


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
    """The records of a file, each with what the file says of it."""
    known = [each.name for each in fields(Record)]
    wanted = [each.name for each in fields(Record) if each.default is MISSING]
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a file of results: it cannot be read as JSON ({error}).") from error
    entries = []
    for each in found if isinstance(found, list) else [found]:
        if not isinstance(each, dict) or not set(wanted) <= set(each):
            missing = [name for name in wanted if name not in each] if isinstance(each, dict) else wanted
            raise ValueError(
                f"{path} is not a file of results: a result has {', '.join(wanted)}, but {', '.join(missing)} "
                "is missing. `vitlens evaluate --out` writes such files; name another, or remove this one."
            )
        record = Record(**{name: each[name] for name in known if name in each})
        _check(record, path)
        entries.append((record, each))
    return entries


def _check(record: Record, path: str | Path) -> None:
    numbers = (record.low, record.value, record.high)
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in numbers) or not (
        0 <= record.low <= record.value <= record.high <= 100
    ):
        raise ValueError(
            f"A result gives 0 ≤ low ≤ value ≤ high ≤ 100 in per cent, but {path} has {record.low}, {record.value} and "
            f"{record.high} for {record.model} on {record.data}."
        )
    texts = (record.model, record.data, record.protocol, record.metric, record.when)
    whole = isinstance(record.images, int) and record.images > 0
    counts = (record.damaged, *(n for n in (record.shots, record.seeds, record.neighbors) if n is not None))
    words = (record.weights, record.place, record.command, record.recipe or "", record.note or "")
    if not (all(isinstance(n, int) for n in counts) and all(isinstance(text, str) for text in words)):
        raise ValueError(
            f"A result gives damaged, shots, seeds and neighbors as whole numbers, and weights, place, command, "
            f"recipe and note as texts, but {path} has a result on {record.data} that does not. Leave out what is not "
            "known."
        )
    if not (all(isinstance(text, str) for text in texts) and whole and isinstance(record.versions, dict)):
        raise ValueError(
            f"A result names model, data, protocol, metric and when in words, images as a whole number and versions by "
            f"package, but {path} has a result on {record.data} that does not."
        )
