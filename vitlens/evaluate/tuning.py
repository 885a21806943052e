"""Accuracy after fine-tuning: the paper's transfer (Table 4) and its mean over the 19 tasks of VTAB-1k."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitlens.data.tasks import TASKS, VTAB, Task
from vitlens.evaluate.accuracy import top_k
from vitlens.evaluate.classes import class_numbers
from vitlens.evaluate.intervals import Score, mean_of, over_seeds
from vitlens.evaluate.reading import lost_classes, named_classes, opened, read
from vitlens.models import load_model
from vitlens.train import World, runs


class Tuned(NamedTuple):
    """Top-1 of fine-tuned models on the test images of a data set."""

    score: Score
    images: int
    damaged: tuple[str, ...]
    """Of the test images alone; each run's `training.json` counts those that it trained on and validated with."""
    note: str = ""
    """What is to be said of the test images."""
    lost: str = ""
    """The sentence about classes of which every test image is damaged, or ""."""


def recipe_of(data: str) -> tuple[str, list[str]]:
    """The recipe for a data set, with what its task forbids: for a folder, the one for small data.

    Where a mirrored image would have another label nothing is flipped, and where a crop would nothing is cut off.
    """
    task = TASKS.get(data.replace("vtab800/", "vtab/"))
    if task is None:
        return "finetune-small", []
    return task.recipe, [key for key, may in (("augment.flip=0", task.flip), ("resize=0", task.crop)) if not may]


def fine_tuned(
    model: str,
    data: str,
    out: Path,
    *,
    recipe: str = "",
    overrides: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    world: World | None = None,
    root=None,
    workers: int | None = None,
) -> Tuned:
    """Fine-tune `model` on the training images of `data` once for each seed, and measure on its test images.

    The runs are those of `vitlens train`: each lies in a folder of its own in `out`, and one that was stopped goes on.
    Of one that is finished the checkpoints are deleted; it is not done again, unless images have come or gone.
    With one seed the interval is that of the test images; with several, that of both (`over_seeds`).

    Raises KeyboardInterrupt if a run was asked to stop, and what `runs.run`, `load_model` and `read` raise.
    """
    world = world or World()
    named, forbidden = recipe_of(data)
    found, damaged = [], ()
    for seed in seeds:
        folder = out / f"seed-{seed}"
        account = runs.run(
            recipe or named, data, folder, model=model, resume=folder.is_dir(), seed=seed, watch=0,
            overrides=[*forbidden, *overrides], device=str(world.device), root=root, workers=workers,
            on_damaged="skip", goes_on="the same command goes on",
        )  # fmt: skip
        if not account["finished"]:
            raise KeyboardInterrupt
        world.total(0)  # the first process writes the model, the others wait
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        tuned = load_model(folder / "model").to(world.device)
        images = opened(tuned, data, "test", root=root, workers=workers, world=world)
        said = read(tuned, images, named_classes(tuned, 1), world=world, progress=f"{data}, tuned")
        found.append(top_k(said.values, class_numbers(tuned, images.class_names)[said.labels], 1))
        damaged = said.damaged
    score = over_seeds([each.value for each in found], len(said.labels))
    return Tuned(score, len(said.labels), damaged, images.note, lost_classes(images, said))


def vtab_tasks(names: Sequence[str]) -> list[Task]:
    """The tasks of VTAB-1k called so, with or without "vtab/"; all 19 by default. Raises ValueError for others."""
    known = {task.name.removeprefix("vtab/"): task for task in VTAB}
    wanted = [name.removeprefix("vtab/") for name in names] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"VTAB-1k has no task {unknown[0]!r}. Its tasks are {', '.join(known)}.")
    return [known[name] for name in wanted]


def group_means(found: dict[str, Tuned]) -> dict[str, Tuned]:
    """Means over the groups of VTAB-1k, and over all 19 tasks, of those that are complete in `found` (by task name)."""
    means = {}
    for name in ("vtab natural", "vtab specialized", "vtab structured", "vtab"):
        parts = [found.get(task.name) for task in VTAB if f"vtab {task.group}".startswith(name)]
        if all(parts):
            score = mean_of([part.score for part in parts])
            lost = " ".join(part.lost for part in parts if part.lost)
            damaged = sum((part.damaged for part in parts), ())
            means[name] = Tuned(score, sum(part.images for part in parts), damaged, lost=lost)
    return means
