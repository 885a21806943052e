"""Findings in the prose of the chapters, recomputed from the committed models and tables."""

import json
import re
from pathlib import Path

import nbformat
import numpy as np

from vitlens.train import snapshots

FOLDER = Path(__file__).parent.parent / "notebooks"
DATA = FOLDER.parent / "data"


def told(chapter: str) -> tuple[str, str]:
    """The prose of a chapter in one line, and its printed lines and tables."""
    (path,) = FOLDER.glob(f"{chapter}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    shown = [each.get("text", "") or each.get("data", {}).get("text/plain", "")
             for cell in cells for each in cell.get("outputs", [])]  # fmt: skip
    prose = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return " ".join(prose.split()), "\n".join(shown)


def test_chapter_11_accuracy_is_half_way_between_filters_and_distance():
    prose, shown = told("11")
    folder = DATA / "checkpoints" / "vit_tiny_patch8_64"
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    scored = {0: 0.5} | {record["step"]: record["metrics"]["top1"] for record in records if record["metrics"]}
    steps, half = list(scored), (0.5 + scored[11700]) / 2
    after = next(step for step in steps if scored[step] >= half)
    before = steps[steps.index(after) - 1]
    middle = np.interp(half, list(scored.values()), steps)
    measured = f"half-way between steps {before:,} and {after:,}, two measurements with {scored[before]:.1f} % and"
    assert f"{measured} {scored[after]:.1f} %. On a straight line that is step {middle:,.0f}." in prose
    run = snapshots.load(folder / "snapshots.npz")
    moments = {}
    for name, values in {"distance": run["distances"].mean((1, 2), dtype=float),
                         "rollout": (run["rollout"].max((2, 3)) / run["rollout"].mean((2, 3), dtype=float)).mean(1),
                         "confidence": run["top1_confidence"].mean(1, dtype=float)}.items():  # fmt: skip
        reached = ((values - values[0]) / (values[-1] - values[0]) >= 0.5).argmax()
        moments[name] = run["steps"][reached - 1], run["steps"][reached]
    assert "The **rollout** goes half of its way between steps {:,} and {:,}".format(*moments["rollout"]) in prose
    assert "It gets there between steps {:,} and {:,}".format(*moments["distance"]) in prose
    assert f"Confidence is half-way only by step {moments['confidence'][1]:,}" in prose
    filters = re.search(r"^filters +\d+ +(\d+) +(\d+) +(\d+) ", shown, re.M)
    assert int(filters[1]) < int(filters[2]) < int(filters[3]) == 1392 < middle < moments["distance"][0]
    low, high = run["top1_confidence"].mean(1, dtype=float)[-2:]
    rise = scored[11700] - np.interp(run["steps"][-2], steps, list(scored.values()))
    assert f"jumps from {low:.3f} to {high:.3f} between the last two moments" in prose
    assert f"while accuracy rises by {rise:.1f} points" in prose
