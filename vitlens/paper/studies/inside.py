"""What is seen inside the models of a study: filters, position similarity, distances, a rollout, in one small file.

The arrays are those of `vitlens.train.snapshots.record`, in half precision, with the seeds in front.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vitlens.data.files import write
from vitlens.paper.studies.grid import Study
from vitlens.train import snapshots

KEPT = ("filters", "filters_variance", "positions", "distances", "rollout")
PICTURE = "picture"

Insides = Mapping[str, Mapping[str, np.ndarray]]


def insides(study: Study, folder: Path | str) -> tuple[dict[str, dict[str, np.ndarray]], np.ndarray]:
    """By model, the arrays of all its trainings in the folder of a study, and the picture of the first rollout.

    Each array has the seeds in front (S, …); only seeds that all models have are read, and what a model lacks is left
    out. A study in which models learn without labels first has each model twice, the second time as "NAME, before
    tuning". The picture is uint8 (h, w, 3). Raises ValueError if no seed is complete.
    """
    files = {(c.network.name, c.seed): Path(folder) / "cells" / f"{c.name}.npz" for c in study.cells()
             if c.images == max(study.sizes) and c.network.kind != "ResNet"}  # fmt: skip
    models = dict.fromkeys(model for model, _ in files)
    whole = [seed for seed in study.seeds if files and all(files[model, seed].exists() for model in models)]
    if not whole:
        raise ValueError(f"No seed of {study.name} is complete in {folder}. Go on with the same command.")
    found: dict[str, dict[str, np.ndarray]] = {}
    for model in models:
        each = [snapshots.load(files[model, seed]) for seed in whole]
        stages = {model: -1, f"{model}, before tuning": 0} if study.pretrains else {model: -1}
        for title, k in stages.items():
            found[title] = {name: np.stack([a[name][k] for a in each]) for name in KEPT if name in each[0]}
            if "rollout" in found[title]:
                found[title]["rollout"] = found[title]["rollout"][:, :1]  # that of the picture
    return found, each[0][PICTURE][0]


def write_insides(path: Path | str, found: Insides, picture: np.ndarray) -> None:
    """Write what `insides` returned as a compressed `.npz`. Raises ValueError if it cannot be written."""
    buffer = io.BytesIO()
    arrays = {f"{model}/{name}": array for model, arrays in found.items() for name, array in arrays.items()}
    np.savez_compressed(buffer, **{PICTURE: picture}, **arrays)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write(Path(path), buffer.getvalue())
    except OSError as problem:
        raise ValueError(
            f"The arrays cannot be written to {path} ({problem.strerror}); give another file."
        ) from problem


def read_insides(path: Path | str) -> tuple[dict[str, dict[str, np.ndarray]], np.ndarray]:
    """What `write_insides` wrote: arrays by model, and the picture."""
    found: dict[str, dict[str, np.ndarray]] = {}
    arrays = snapshots.load(path)
    for key, array in arrays.items():
        if key != PICTURE:
            model, _, name = key.rpartition("/")
            found.setdefault(model, {})[name] = array
    return found, arrays[PICTURE]
