"""Runs the trainings of a study one after the other and keeps their records and weights.

A study that was stopped at any moment goes on when it is run again: finished trainings are kept as `cells/NAME.json`
and `cells/NAME.safetensors`, the one under way as a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from vitlens.data import ImageSet, load
from vitlens.data.files import locked, writable, write
from vitlens.paper.studies.grid import Cell, Study
from vitlens.paper.studies.spreading import at_a_time, estimate
from vitlens.paper.studies.trial import SHOTS, Trial
from vitlens.train import World, join
from vitlens.train.precision import said_of, settled
from vitlens.train.watching import Stop


def run_study(
    study: Study,
    data: str,
    out: Path | str,
    *,
    root: Path | str | None = None,
    device: str | None = None,
    max_minutes: float | None = None,
    processes: int = 1,
    on_damaged: str = "raise",
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
    progress: bool = False,
) -> list[dict]:
    """The records of all trainings of `study` on `data`, in the order of `study.cells()`.

    data: what `data.load` reads; `root` and `on_damaged` are passed on to it. out: a folder; one that holds part of the
    same study is continued. max_minutes: stop after this time with a checkpoint, as on Ctrl-C and SIGTERM, and return
    the records so far. processes: how many trainings run at a time, each with its share of the threads. say: called
    with a sentence before the first training, on what is left to do and how long it takes, and with one for each
    training. progress: show a bar.

    A record has the model's name, kind, parameters and FLOPs of one image; images, seed, steps, epochs and precision;
    accuracies in per cent: `top1` after the last step with the 95 % interval `low` to `high` of the validation images,
    `best`, the best top-1 on the way, which early stopping would give, and `five_shot` (see there); exaFLOPs of
    training without dropped patches, and its seconds, both without validation; `device` with the number of threads,
    `date`, versions and `command`. In a study where models learn without labels first, exaFLOPs and seconds are of both
    trainings, and a record also has `pretraining`, `pretraining_steps` and `unlabeled` images, and `probe`: top-1 of a
    linear probe, fitted between the two on the labeled images.

    Precision (where the recipe leaves it open) and CPU threads stay those that the study was begun with, on other
    machines too: both move a result as much as a seed.

    Raises ValueError for data that lacks what the study needs, a folder of another study or in use by another process,
    an `out` that cannot be written to, and what `fit` raises.
    """
    start, world, out = time.monotonic(), join(device), Path(out)
    if world.size > 1:
        raise ValueError(f"A study runs in one process, but {world.size} were started. Start it without torchrun.")
    writable(out, "--out")
    out.mkdir(parents=True, exist_ok=True)
    found = [load(data, split, size=study.recipe.image_size, root=root, stream=False, on_damaged=on_damaged)
             for split in ("train", "valid")]  # fmt: skip
    for name in dict.fromkeys(name for split in found for name in split.damaged):
        say(f"Left out: {name}.")
    splits = [_chosen(split, study, data) for split in found]
    if study.recipe.valid_images:
        splits[1] = splits[1].subset(min(study.recipe.valid_images, len(splits[1])))
    _check(study, splits, data)
    resumed = (out / "study.json").exists()
    study, threads = _same(out / "study.json", study, splits, world, processes)
    if told := said_of(study.recipe, world.device, resumed):
        say(told)
    cells = [(cell, out / "cells" / f"{cell.name}.json") for cell in study.cells()]
    left = [cell for cell, kept in cells if not kept.exists()]
    done, number = dict.fromkeys(left, 0), {cell: n for n, (cell, _) in enumerate(cells, 1)}
    whole, missing = (sum(map(study.all_steps, some)) for some in (number, left))
    with locked(out), Stop() as stop, _threads(threads), tqdm(
        total=whole, initial=whole - missing, unit="step", disable=not progress,
        mininterval=0.5 if sys.stderr.isatty() else 10,
    ) as bar:  # fmt: skip
        trial = Trial(study, splits, world, out, command)
        if left:
            say(estimate(study, left, len(splits[1]), world.device, processes))
        work = in_turn(trial, left) if processes == 1 else at_a_time(processes, trial, left, threads)
        with closing(work) as reports:
            for cell, step, finished in reports:
                if done[cell] == 0:
                    bar.set_description(f"{number[cell]} of {len(cells)}: {cell}")
                bar.update(step - done[cell])
                done[cell] = step
                if finished:
                    say(finished)
                elif stop.signal or (max_minutes and time.monotonic() - start > 60 * max_minutes):
                    say(f"Stopped in {cell.name} with a checkpoint; the same command goes on.")
                    break
    for cell, kept in cells:
        if kept.exists():
            shutil.rmtree(trial.folder(cell), ignore_errors=True)
    return [_read(kept) for _, kept in cells if kept.exists()]


def in_turn(trial: Trial, cells: Sequence[Cell]) -> Iterator[tuple[Cell, int, str]]:
    """What `Trial.training` says of each cell, one after the other."""
    for cell in cells:
        yield from trial.training(cell)


def _chosen(images: ImageSet, study: Study, data: str) -> ImageSet:
    """The images of as many classes as the study takes, numbered from 0; the choice depends on nothing else."""
    have = len(images.class_names)
    if have < study.classes:
        raise ValueError(
            f"The study {study.name} takes {study.classes} classes, but {data} has {have}. Use other data, or --tiny."
        )
    kept = torch.randperm(have, generator=torch.Generator().manual_seed(0))[: study.classes].sort().values
    rows = torch.isin(images.labels, kept).nonzero()[:, 0]
    return replace(
        images, images=images.images[rows], labels=torch.searchsorted(kept, images.labels[rows]),
        class_names=tuple(images.class_names[k] for k in kept.tolist()),
    )  # fmt: skip


def _check(study: Study, splits: list[ImageSet], data: str) -> None:
    """Raise ValueError unless each class has as many images of each split as the study takes."""
    needs = {"training": max(study.sizes) // study.classes, "validation": SHOTS + 1}
    for (split, wanted), images in zip(needs.items(), splits, strict=True):
        fewest = int(torch.bincount(images.labels, minlength=study.classes).min())
        if fewest < wanted:
            raise ValueError(
                f"The study {study.name} takes {wanted} {split} images of each class, but {data} has a class of "
                f"{fewest}. Use other data, or --tiny."
            )


def _same(path: Path, study: Study, splits: list[ImageSet], world: World, processes: int) -> tuple[Study, int]:
    """The study with the precision, and the number of threads, that it was begun with.

    Writes study and data to `path`, and raises ValueError if another study stands there. Sizes and seeds may differ:
    each training stands for itself.
    """
    before = _read(path) if path.exists() else {}
    if study.recipe.precision == "auto" and "precision" in before.get("recipe", ()):
        study = replace(study, recipe=replace(study.recipe, precision=before["recipe"]["precision"]))
    study = replace(study, recipe=settled(study.recipe, world))
    threads = before.get("threads", max(1, torch.get_num_threads() // processes))
    digest = hashlib.sha256("\0".join(splits[0].class_names).encode())
    for split in splits:
        digest.update(split.labels.numpy().tobytes())
        digest.update(split.images[:: max(1, len(split) // 100)].contiguous().numpy().tobytes())
    now = json.loads(json.dumps({**study.to_dict(), "data": digest.hexdigest()[:16], "threads": threads}))
    if before:
        compared = [key for key in now if key in before and key not in ("sizes", "seeds", "threads")]
        other = [key for key in compared if before[key] != now[key]]
        if other:
            raise ValueError(
                f"{path.parent} holds the study {before.get('name')} with other {' and '.join(other)}. Give another "
                "--out, or go on with the same command."
            )
    write(path, json.dumps(now, indent=1, ensure_ascii=False).encode())
    return study, threads


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Use `count` PyTorch threads in this block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError if the file is damaged."""
    with suppress(ValueError):
        if isinstance(content := json.loads(path.read_text(encoding="utf-8")), dict):
            return content
    raise ValueError(f"{path} is damaged. Delete it and go on with the same command.")
