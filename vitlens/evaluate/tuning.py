"""Accuracy after fine-tuning: the paper's transfer (Table 4) and its mean over the 19 tasks of VTAB-1k."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import NamedTuple

from vitlens.data.tasks import TASKS, VTAB, Task
from vitlens.evaluate.classes import class_numbers
from vitlens.evaluate.question import Question
from vitlens.evaluate.reading import named_classes, opened, read
from vitlens.evaluate.scores import Score, mean_of, over_seeds, top_k
from vitlens.models import load_model
from vitlens.train import runs


class Tuned(NamedTuple):
    """Top-1 of fine-tuned models on the test images of a data set."""

    score: Score
    images: int
    damaged: tuple[str, ...]
    """Test images that could not be decoded; each run's `training.json` counts those of training and validation."""
    lost: str = ""
    """The sentence about classes of which every test image is damaged, or ""."""


def recipe_of(data: str) -> tuple[str, list[str]]:
    """The recipe for a data set, and the changes that its task needs; for a folder the recipe for small data.

    Images are not flipped, or not cropped, where that would change their label.
    """
    task = TASKS.get(data.replace("vtab800/", "vtab/"))
    if task is None:
        return "finetune-small", []
    return task.recipe, [key for key, may in (("augment.flip=0", task.flip), ("resize=0", task.crop)) if not may]


def fine_tuned(q: Question, data: str) -> Tuned:
    """Fine-tune the model on the training images of `data` once for each seed, and measure on its test images.

    The runs are those of `vitlens train`: each lies in a folder of its own in `q.folder(data)`, and one that was
    stopped goes on. Of a finished one only the model is kept; it is not run again unless images have come or gone.
    With one seed the interval is that of the test images; with several, that of both (`over_seeds`).

    Raises KeyboardInterrupt if a run was asked to stop, and what `runs.run`, `load_model` and `read` raise.
    """
    named, forbidden = recipe_of(data)
    values = []
    for seed in range(q.seeds or 1):
        folder = q.folder(data) / f"seed-{seed}"
        account = runs.run(
            q.recipe or named, data, folder, model=q.model, resume=folder.is_dir(), seed=seed, watch=0,
            overrides=[*forbidden, *q.overrides], device=str(q.world.device), root=q.root, workers=q.workers,
            on_damaged="skip", goes_on="the same command goes on",
        )  # fmt: skip
        if not account["finished"]:
            raise KeyboardInterrupt
        q.world.total(0)  # the first process writes the model, the others wait
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        tuned = load_model(folder / "model").to(q.world.device)
        images = opened(tuned, data, "test", root=q.root, workers=q.workers, world=q.world)
        said = read(tuned, images, named_classes(tuned, 1), world=q.world, progress=f"{data}, tuned")
        values.append(top_k(said.values, class_numbers(tuned, images.class_names)[said.labels], 1).value)
    q.left_out(said.damaged)
    q.note(images.note)
    lost = q.whole(images, said)
    return Tuned(over_seeds(values, len(said.labels)), len(said.labels), said.damaged, lost)


def vtab_tasks(names: Sequence[str]) -> list[Task]:
    """The tasks of VTAB-1k with these names, with or without "vtab/"; all 19 by default. Raises ValueError."""
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
            scores, images, damaged, lost = zip(*parts, strict=True)
            means[name] = Tuned(mean_of(scores), sum(images), sum(damaged, ()), " ".join(filter(None, lost)))
    return means
