"""The results of a study: a CSV file, curves and differences with intervals over its seeds, and how many it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from vitlens.data.files import write
from vitlens.evaluate import of_seeds, student


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


def rates(records: Iterable[dict], metric: str = "top1") -> dict[str, list[tuple[float, float, float, float]]]:
    """By model, which is called "NAME, RATE", rows of (learning rate, mean over the seeds, low, high)."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for (model, rate), cells in pd.DataFrame(records).groupby(["model", "lr"], sort=False):
        found.setdefault(model.rpartition(", ")[0], []).append((float(rate), *of_seeds(cells[metric])))
    return {model: sorted(rows) for model, rows in found.items()}


def scales(
    records: Iterable[dict], baseline: str, metric: str = "top1"
) -> dict[str, list[tuple[float, float, float, float]]]:
    """A curve for each scaled dimension, from the models called "DIMENSION, STEP" and the baseline.

    Rows are (FLOPs of one image divided by the baseline's, mean over the seeds, low, high); the last two are the 95 %
    interval over the seeds. Raises ValueError if the baseline has no finished training.
    """
    cells = dict(list(pd.DataFrame(records).groupby("model", sort=False)))
    if baseline not in cells:
        raise ValueError(f"Models are compared with {baseline!r}, which has no finished training yet. Train it first.")
    whole = float(cells[baseline]["flops"].iloc[0])
    points = {model: (float(each["flops"].iloc[0]) / whole, *of_seeds(each[metric])) for model, each in cells.items()}
    start, found = points.pop(baseline), {}
    for model, point in points.items():
        found.setdefault(model.rpartition(", ")[0], [start]).append(point)
    return {name: sorted(rows) for name, rows in found.items()}


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


def against(records: Iterable[dict], baseline: str, metric: str = "top1") -> list[tuple[str, float, float, float, int]]:
    """How far each other model of a table of one size is ahead of `baseline`: rows of (model, mean, low, high, seeds).

    Means and intervals are those of `lead`; seeds: how many `seeds_needed` asks for. In the order of the table.
    """
    records = list(records)
    found = pd.DataFrame(records, columns=["model", "images", "seed", metric])
    if len(sizes := found["images"].unique()) != 1:
        raise ValueError(f"Models are compared at one number of images, and the table has {len(sizes)}. Choose one.")
    paired = found.pivot_table(metric, "seed", "model", aggfunc="last")
    rows = []
    for model in found["model"].unique():
        if model != baseline:
            ((_, mean, low, high),) = lead(records, model, baseline, metric)
            rows.append((model, mean, low, high, seeds_needed((paired[model] - paired[baseline]).dropna())))
    return rows


def seeds_needed(differences: Sequence[float], power: float = 0.8, most: int = 10_000) -> int:
    """How many seeds a paired t-test at 5 % would take to find a mean difference like this one, with that chance.

    As if the mean and the standard deviation (n - 1) of `differences` were the true ones, which few seeds hardly tell:
    an order of magnitude. `most` stands for more. Raises ValueError for fewer than two differences.
    """
    from scipy.stats import f, ncf  # t² is F; the two tails of a noncentral t are not always numbers in SciPy

    if len(differences) < 2:
        raise ValueError(f"How many seeds it takes is told from two differences or more, got {len(differences)}.")
    mean, std = np.mean(differences), np.std(differences, ddof=1)
    if not mean:
        return most
    effect = np.inf if std == 0 else (mean / std) ** 2
    for n in range(2, most):
        if effect == np.inf or ncf.sf(f.ppf(0.95, 1, n - 1), 1, n - 1, effect * n) >= power:
            return n
    return most
