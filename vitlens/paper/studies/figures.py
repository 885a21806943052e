"""The figure of a study, from the lines of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vitlens import plot
from vitlens.evaluate import student
from vitlens.paper.studies.grid import Study
from vitlens.paper.studies.table import curves, rates, scales


def sizes(records: list[dict], _: str):
    """Accuracy against training images, a curve for each model."""
    return plot.few_shot(curves(records), xlabel="Training images", ylabel="Top-1 (%)")


def models(records: list[dict], baseline: str):
    """Accuracy of each model with its interval over the seeds and every single seed; the baseline's is dashed."""
    points = {model: [r["top1"] for r in records if r["model"] == model] for model in {r["model"]: 0 for r in records}}
    values = {model: sum(found) / len(found) for model, found in points.items()}
    errors = {model: student(found) if len(found) > 1 else 0.0 for model, found in points.items()}
    label = "Top-1 (%): mean, 95 % interval, single seeds"
    dashed = f"; dashed: mean of “{baseline}”" if baseline else ""
    return plot.intervals(values, errors, points=points, level=values.get(baseline), xlabel=label + dashed)


def by_rate(records: list[dict], _: str):
    """Accuracy against the learning rate, a curve for each read-out."""
    return plot.few_shot(rates(records), xlabel="Learning rate", ylabel="Top-1 (%)")


def scaling(records: list[dict], baseline: str):
    """Accuracy against FLOPs, with one curve for each dimension that was scaled (paper, Fig. 8)."""
    label = f"FLOPs of an image, as a multiple of those of the {baseline} model"
    return plot.few_shot(scales(records, baseline), xlabel=label, ylabel="Top-1 (%)")


FIGURES: dict[str, Callable] = {"sizes": sizes, "models": models, "rates": by_rate, "scaling": scaling}
"""What `Study.figure` may say."""


def figure(study: Study, records: Iterable[dict]):
    """The Matplotlib figure of a study's records. Raises ValueError if there are none."""
    if not (records := list(records)):
        raise ValueError("A figure needs at least one finished training, but there is none yet.")
    return FIGURES[study.figure](records, study.baseline)
