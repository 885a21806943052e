"""One training run from beginning to end, as `vitlens train` does it: images, plan, training, snapshots, export."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import nn
from tqdm.auto import tqdm

from vitlens.data.files import locked, write
from vitlens.train import checkpoint, snapshots
from vitlens.train.account import command_of, finish, finished_before, hardware, seconds_before, versions
from vitlens.train.journal import BUILT_BY, name_of
from vitlens.train.loop import fit
from vitlens.train.losses import compiled
from vitlens.train.plan import planned, refuse, unlike
from vitlens.train.precision import said_of, settled
from vitlens.train.processes import join
from vitlens.train.recipes import Recipe, read_recipe
from vitlens.train.sources import Source, note
from vitlens.train.timing import cost_of_determinism, fitted
from vitlens.train.watching import Album, Board, Progress, Stop

__all__ = ["fitted", "hardware", "read_recipe", "run", "versions"]
AGREE = 10  # steps after which several processes ask each other whether to stop: each time the host waits


def run(
    recipe_name: str,
    data: str | os.PathLike,
    out: str | os.PathLike,
    *,
    model: str = "",
    build: Callable[[Recipe], nn.Module] | None = None,
    resume: bool = False,
    max_minutes: float | None = None,
    fit_minutes: float | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    seed: int | None = None,
    tiny: bool = False,
    watch: int = 24,
    export: bool = False,
    tensorboard: bool = False,
    root: str | os.PathLike | None = None,
    stream: bool | None = None,
    workers: int | None = None,
    on_damaged: str = "raise",
    quiet: bool = False,
    goes_on: str = "--resume goes on",
) -> dict:
    """Train by a recipe and return the content of `training.json`.

    recipe_name: a name, or a JSON file that `Recipe.to_json` wrote.
    model: a timm name or a folder to start from, instead of random weights.
    build: recipe → a model in training mode, in place of `Recipe.build`; if it has an `objective`, as in `fit`, it
    learns that. Only the same callable resumes such a run, by its name and the arguments of a partial.
    out: receives `recipe.json`, `log.jsonl`, `checkpoints/`, `snapshots.npz` and, at the end, `model/` in timm's hub
    layout. One process at a time trains into it.
    resume: continue the run in `out`.
    max_minutes: stop and save after that time.
    fit_minutes: measure the speed and set the number of epochs so that the run, counted from when the images are read,
    takes that long; the number is kept in `recipe.json`.
    overrides: settings of the recipe as `"key=value"`.
    tiny: take the same path in seconds.
    watch: number of snapshots, 0 for none.
    export: write `model/` also if the run is stopped.
    root, stream, workers, on_damaged: as in `vitlens.data.load`.
    goes_on: how to continue, for the message of a run that was stopped.

    Ctrl-C and SIGTERM end the run with a checkpoint after the step it is in, of several processes after ten steps at
    most. Started by `torchrun` or `accelerate launch` the processes share each batch, and the first one writes.

    Raises ValueError for options that are wrong or do not fit together, and for a folder that another process trains
    into; and what `fit` raises.
    """
    out, world, built_by = Path(out), join(device), name_of(build) if build else BUILT_BY
    refuse(out, world.device, resume, max_minutes, fit_minutes, watch)
    board = Board(out / "tensorboard" if tensorboard and world.rank == 0 else None)
    fresh = not (resume and checkpoint.newest_first(out / "checkpoints"))
    plan = settled(planned(recipe_name, model, out, resume, overrides, seed, tiny), world)
    quiet = quiet or world.rank > 0
    say = (lambda *_: None) if quiet else (lambda text: tqdm.write(text, file=sys.stderr))
    if resume and (out / "recipe.json").exists() and (others := unlike(plan, recipe_name)):
        say(others)

    start = time.monotonic()
    source = Source(str(data), root, stream, workers, on_damaged)
    splits = source.opened(plan, out, resume, world)
    for text in dict.fromkeys(split.note for split in splits if split.note):
        say(text)
    known = {name for split in splits for name in split.damaged}
    for name in sorted(known):
        say(f"Left out: {name}.")
    train, valid = (
        split.subset(min(n, len(split)), plan.seed) if n else split
        for split, n in zip(splits, (plan.train_images, plan.valid_images), strict=True)
    )
    wanted = [o for o in overrides if o.startswith("num_classes=") and plan.num_classes != len(train.class_names)]
    if wanted:
        raise ValueError(f"{data} has {len(train.class_names)} classes, but got --set {wanted[0]}. Leave it out.")
    plan = replace(plan, num_classes=len(train.class_names))
    if resume and fresh and (done := finished_before(out, plan, train, built_by)):  # its checkpoints are not needed
        say(f"The run in {out} is finished.")
        return done | {"stopped_by": 0}
    say(f"Found {len(train)} + {len(valid)} images in {time.monotonic() - start:.0f} s.")

    start = time.monotonic()
    if plan.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
    # What a checkpoint will overwrite need not be read: the model that a run started from may be gone by then.
    network = build(plan) if build else plan.build(weights=fresh)
    network.built_by = built_by
    criterion = compiled(network, plan, world.device)
    if fit_minutes is not None and not (resume and (out / "recipe.json").exists()):
        plan = fitted(network, (train, valid), plan, fit_minutes * 60, world, criterion, start)
        say(f"{plan.epochs} epochs fit into {fit_minutes:g} minutes.")
    if plan.deterministic and world.device.type == "cuda":
        cost = cost_of_determinism(network, (train, valid), plan, world)
        say(f"Deterministic algorithms make a step take {cost:.0%} longer.")
    average: dict = {}
    training = fit(
        network, (train, valid), plan, out=out, resume=resume, average=average, criterion=criterion, world=world
    )
    if told := said_of(plan, world.device, not fresh):
        say(told)
    if resume and fresh:
        say(f"There is no checkpoint in {out}, so the run begins.")
    steps = plan.length(len(train))
    album = Album(out, network, snapshots.probe(valid, plan), steps, watch if world.rank == 0 else 0, say)
    if world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    with locked(out) if world.rank == 0 else nullcontext():
        if fresh and world.rank == 0:
            write(out / "recipe.json", plan.to_json().encode())
            note(out, splits)
        if fresh:  # before the costly part: what cannot be recorded is known at once
            album.begin()
        last, stopped, before = None, "", 0.0 if fresh else seconds_before(out)
        with Stop() as stop, Progress(steps, quiet) as bar, board, closing(training):
            for last in training:
                bar.show(last)
                board.show(last)
                album.show(last.step)
                if world.size == 1 or last.step % AGREE == 0:
                    asked, spent = world.total(stop.signal), world.first(time.monotonic() - start)
                    late = max_minutes is not None and spent > max_minutes * 60
                    if (asked or late) and last.step < steps:
                        stopped = f"after {max_minutes:g} minutes" if late else "as it was asked to"
                        break
        damaged = set(world.joined([*train.damaged, *valid.damaged]))
        for name in sorted(damaged - known):  # a stream meets them on its way
            say(f"Replaced by the next one: {name}.")
        if stopped:
            say(f"Stopped {stopped}, at step {last.step} of {steps}; {goes_on}.")
        seconds = before + time.monotonic() - start
        account = finish(
            out, plan, network, average, (train, valid), last=last, steps=steps, damaged=len(damaged), seconds=seconds,
            command=command_of(plan, source, splits), world=world, exports=export,
        )  # fmt: skip
    return account | {"stopped_by": 0 if account["finished"] else stop.signal}
