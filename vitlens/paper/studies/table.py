"""What a study found, as a table in a CSV file, and as curves with intervals over its seeds."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from vitlens.evaluate import of_seeds, student
from vitlens.files import write


def write_table(path: Path | str, records: Sequence[dict]) -> None:
    """One line for each training. Raises ValueError if there is none, or the file cannot be written."""
    if not records:
        raise ValueError("A table needs at least one training that came to its end, but there is none yet.")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        columns = dict.fromkeys(name for record in records for name in record)  # older ones have fewer
        table = csv.DictWriter(file := io.StringIO(newline=""), list(columns), lineterminator="\n")
        table.writeheader()
        table.writerows(records)
        write(Path(path), file.getvalue().encode())
    except OSError as problem:
        raise ValueError(f"The table cannot be written to {path} ({problem.strerror}); give another file.") from problem


def read_table(path: Path | str) -> list[dict]:
    """The lines of a table, numbers as numbers."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def curves(
    records: Iterable[dict], metric: str = "top1", over: str = "seeds"
) -> dict[str, list[tuple[int, float, float, float]]]:
    """By model, rows of (training images, mean over the seeds, low, high), for `plot.few_shot`.

    over: what the 95 % interval is about. "seeds": what other seeds would give, Student's interval of the mean;
    "images": what other validation images would give, Wilson's, a mean over the seeds; of `top1` alone.
    """
    if over not in ("seeds", "images") or (over == "images" and metric != "top1"):
        raise ValueError(f"Intervals are over 'seeds', or of top1 over 'images'; {over!r} of {metric} came.")
    found: dict[str, dict[int, list[dict]]] = {}
    for record in records:
        found.setdefault(record["model"], {}).setdefault(record["images"], []).append(record)

    def row(cells: list[dict]) -> Iterable[float]:
        if over == "seeds":
            return of_seeds([cell[metric] for cell in cells])
        return (float(np.mean([cell[name] for cell in cells])) for name in ("top1", "low", "high"))

    return {model: [(n, *row(cells)) for n, cells in sorted(sizes.items())] for model, sizes in found.items()}


def lead(
    records: Iterable[dict], first: str, second: str, metric: str = "top1"
) -> list[tuple[int, float, float, float]]:
    """By how much one model is ahead of another: rows of (training images, mean difference, low, high), in points.

    Trainings with the same seed saw the same images, so that differences are taken within seeds; the interval of their
    mean is Student's, 95 %, and without end for a single seed.
    """
    by = {(r["model"], r["images"], r["seed"]): r[metric] for r in records}
    rows = []
    for images in sorted({n for model, n, _ in by if model == first}):
        seeds = [s for model, n, s in by if (model, n) == (first, images) and (second, images, s) in by]
        found = [by[first, images, s] - by[second, images, s] for s in seeds]
        if found:
            mean = float(np.mean(found))
            half = student(found)
            rows.append((images, mean, mean - half, mean + half))
    if not rows:
        raise ValueError(f"No training of {first} has its pair among those of {second}; name two models of the table.")
    return rows


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
