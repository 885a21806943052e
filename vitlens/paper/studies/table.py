"""The results of a study: a CSV file, and curves with intervals over its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from vitlens.evaluate import of_seeds, student
from vitlens.files import write


def write_table(path: Path | str, records: Sequence[dict]) -> None:
    """Write a CSV file with one line for each training. Raises ValueError without any, or if it cannot be written."""
    if not records:
        raise ValueError("A table needs at least one finished training, but there is none yet.")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        table = pd.DataFrame(records, dtype=object)  # older records have fewer columns; whole numbers stay whole
        write(Path(path), table.to_csv(index=False, lineterminator="\n").encode())
    except OSError as problem:
        raise ValueError(f"The table cannot be written to {path} ({problem.strerror}); give another file.") from problem


def read_table(path: Path | str) -> list[dict]:
    """The lines of a table, numbers as numbers."""
    rows = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
    return [{name: _number(text) for name, text in row.items()} for row in rows]


def _number(text: str) -> int | float | str:
    """An int or a float if the text is one, exactly as it was written; else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def curves(
    records: Iterable[dict], metric: str = "top1", over: str = "seeds"
) -> dict[str, list[tuple[int, float, float, float]]]:
    """By model, rows of (training images, mean over the seeds, low, high), for `plot.few_shot`.

    over: what the 95 % interval is about. "seeds": what other seeds would give, Student's interval of the mean;
    "images": what other validation images would give, Wilson's, a mean over the seeds; of `top1` alone.
    """
    if over not in ("seeds", "images") or (over == "images" and metric != "top1"):
        raise ValueError(f"Intervals are over 'seeds', or of top1 over 'images'; got {over!r} of {metric}.")
    found: dict[str, list[tuple[int, float, float, float]]] = {}
    for (model, images), cells in pd.DataFrame(records).groupby(["model", "images"], sort=False):
        shares = of_seeds(cells[metric]) if over == "seeds" else cells[["top1", "low", "high"]].mean().tolist()
        found.setdefault(model, []).append((int(images), *shares))
    return {model: sorted(rows) for model, rows in found.items()}


def lead(
    records: Iterable[dict], first: str, second: str, metric: str = "top1"
) -> list[tuple[int, float, float, float]]:
    """By how much one model is ahead of another: rows of (training images, mean difference, low, high), in points.

    Trainings with the same seed saw the same images, so differences are taken within seeds; the 95 % interval of their
    mean is Student's, infinite for a single seed. Raises ValueError where no training of one has its pair of the other.
    """
    found = pd.DataFrame(records, columns=["model", "images", "seed", metric])
    paired = found.pivot_table(metric, ["images", "seed"], "model", aggfunc="last")
    paired = paired.reindex(columns=paired.columns.union(sorted({first, second})))
    rows = []
    for images, ahead in (paired[first] - paired[second]).dropna().groupby(level="images"):
        mean, half = float(ahead.mean()), student(ahead)
        rows.append((int(images), mean, mean - half, mean + half))
    if not rows:
        raise ValueError(f"No training of {first} has its pair among those of {second}; name two models of the table.")
    return rows
