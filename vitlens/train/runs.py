"""One training run from images to export, as in `vitlens train`."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from vitlens.data import SOURCES, ImageSet, ImageStream, load
from vitlens.data.files import check_writable, lock_folder, write
from vitlens.names import reject
from vitlens.train import snapshots
from vitlens.train.criteria import compiled, settled
from vitlens.train.loop import FIRST, Step, fit
from vitlens.train.processes import World, hardware, join, versions
from vitlens.train.recipes import read_recipe, starting_from
from vitlens.train.run_folder import (
    BUILT_BY,
    finish,
    finished_before,
    name_of,
    newest_first,
    seconds_before,
)
from vitlens.train.settings import FROM_MODEL, Recipe

__all__ = ["hardware", "read_recipe", "run", "versions"]
AGREE = (
    10  # steps between agreements of several processes whether to stop, for which the host waits
)


def run(
    recipe_name: str,
    data: str | os.PathLike,
    out: str | os.PathLike,
    *,
    model: str = "",
    build: Callable[[Recipe], nn.Module] | None = None,
    resume: bool = False,
    max_minutes: float | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    seed: int | None = None,
    tiny: bool = False,
    watch: int = 24,
    export: bool = False,
    root: str | os.PathLike | None = None,
    stream: bool | None = None,
    workers: int | None = None,
    quiet: bool = False,
    goes_on: str = "",
) -> dict:
    """Train by a recipe and return the content of `training.json`.

    recipe_name: a name, or a JSON file from `Recipe.to_json`. model: a timm name or a directory to start from. build:
    recipe → a model in training mode, in place of `Recipe.build`. Its `objective`, if any, replaces the labels as in
    `fit`. Only the same callable (same name and arguments of a partial) resumes such a run. out: directory for
    `recipe.json`, `log.jsonl`, `checkpoints/`, `snapshots.npz` and, at the end, `model/` in timm's hub layout. One
    process at a time trains into it. resume: continue the run in `out`, with its recipe and data if these are empty.
    max_minutes: stop and save after that time. overrides: settings as `"key=value"`. tiny: the same run on a tiny
    scale, in seconds. watch: number of snapshots, 0 for none. export: write `model/` also if the run is stopped. root,
    stream, workers: as in `vitlens.data.load`. goes_on: hint how to continue a stopped run.

    Ctrl-C and SIGTERM end the run with a checkpoint after the current step, or within ten steps with several processes.
    Processes from `torchrun` or `accelerate launch` share each batch, and the first one writes.

    Raises ValueError for wrong options and for a directory that another process trains into, and the errors of `fit`.

    >>> account = vitlens.train.run("digits", "digits", "runs/tiny", tiny=True, quiet=True, device="cpu")
    >>> account["finished"]
    True
    """
    out, world, built_by = Path(out), join(device), name_of(build) if build else BUILT_BY
    before = images_before(out) if resume else {}
    again = (
        {"out": out}
        | ({"data": data} if before and data else {})
        | ({"root": root} if before and root else {})
    )
    data, root = str(data) or before.get("data", ""), root or before.get("root")
    named = {"recipe": recipe_name or resume and (out / "recipe.json").is_file(), "data": data}
    if before and os.path.isabs(data) and not os.path.exists(data):
        raise ValueError(
            f"{data}, the data of the run in {out}, does not exist. Give its place with --data."
        )
    refuse(out, world.device, resume, max_minutes, watch, named)
    fresh = not (resume and newest_first(out / "checkpoints"))
    plan = settled(planned(recipe_name, model, out, resume, overrides, seed, tiny), world)
    quiet = quiet or world.rank > 0
    say = (lambda *_: None) if quiet else (lambda text: tqdm.write(text, file=sys.stderr))

    start = time.monotonic()
    streams = before.get("stream") if stream is None else None
    splits = open_images(data, plan, world, streams or [stream, stream], root=root, workers=workers)
    for text in filter(None, dict.fromkeys(split.note for split in splits)):
        say(text)
    train, valid = (
        split.subset(min(n, len(split)), plan.seed) if n else split
        for split, n in zip(splits, (plan.train_images, plan.valid_images), strict=True)
    )
    classes = len(train.class_names)
    if plan.num_classes != classes and any(o.startswith("num_classes=") for o in overrides):
        raise ValueError(
            f"{data} has {classes} classes, got num_classes={plan.num_classes}. Leave it out."
        )
    plan = replace(plan, num_classes=classes)
    if (
        resume and fresh and (done := finished_before(out, plan, train, built_by))
    ):  # also without its checkpoints
        say(f"The run in {out} is finished.")
        return done | {"stopped_by": 0}
    say(f"Found {len(train)} + {len(valid)} images in {time.monotonic() - start:.0f} s.")

    start = time.monotonic()
    if plan.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
    # A checkpoint replaces the initial weights, so the model that the run started from may be missing.
    network = build(plan) if build else plan.build(weights=fresh)
    network.built_by = built_by
    criterion = compiled(network, plan, world.device)
    average: dict = {}
    training = fit(
        network,
        (train, valid),
        plan,
        out=out,
        resume=resume,
        average=average,
        criterion=criterion,
        world=world,
    )
    if resume and fresh:
        say(f"{out} holds no checkpoint, so the run starts.")
    steps = plan.length(len(train))
    watch = watch if world.rank == 0 else 0
    album = snapshots.Album(out, network, snapshots.probe(valid, plan), steps, watch, say)
    if world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    with lock_folder(out) if world.rank == 0 else nullcontext():
        if fresh and world.rank == 0:
            write(out / "recipe.json", plan.to_json().encode())
            kinds = {source.partition("/")[0] for source in SOURCES}
            by_name = data.partition("/")[0] in kinds or not Path(data).is_dir()
            about = {
                "stream": [isinstance(s, ImageStream) for s in splits],
                "data": data if by_name else os.path.abspath(data),
                "root": root and os.path.abspath(root),
            }
            write(out / "data.json", json.dumps(about).encode())
        if fresh:  # before training, to report unsupported arrays at once
            album.begin()
        last, stopped, spent_before, shown = None, "", 0.0 if fresh else seconds_before(out), {}
        interval = 0.5 if sys.stderr.isatty() else 60
        with (
            Stop() as stop,
            closing(training),
            tqdm(total=steps, unit="step", disable=quiet, mininterval=interval) as bar,
        ):
            for last in training:
                shown |= progress(bar, last)
                bar.set_postfix(shown, refresh=last.step in FIRST and interval < 1)
                album.show(last.step)
                if world.size == 1 or last.step % AGREE == 0:
                    signaled, spent = (
                        world.total(stop.signal),
                        world.first(time.monotonic() - start),
                    )
                    late = max_minutes is not None and spent > max_minutes * 60
                    if (signaled or late) and last.step < steps:
                        stopped = f"after {max_minutes:g} minutes" if late else "by a signal"
                        break
        if stopped:
            words = [f"--{name} {shlex.quote(str(given))}" for name, given in again.items()]
            how = goes_on or f"`vitlens train --resume {' '.join(words)}` continues it"
            say(f"Stopped {stopped}, at step {last.step} of {steps}; {how}.")
        account = finish(
            out,
            plan,
            network,
            average,
            (train, valid),
            last=last,
            steps=steps,
            seconds=spent_before + time.monotonic() - start,
            command=command_of(plan, str(data), splits),
            world=world,
            exports=export,
        )
    return account | {"stopped_by": 0 if account["finished"] else stop.signal}


# Before: recipe and images


def refuse(
    out: Path,
    device: torch.device,
    resume: bool,
    max_minutes: float | None,
    watch: int,
    named: dict,
) -> None:
    """Raise ValueError for wrong options, before reading or writing files."""
    held = newest_first(out / "checkpoints") or (out / "training.json").exists()
    reject(
        (
            (
                device.type == "cuda" and not torch.cuda.is_available(),
                "PyTorch finds no CUDA device. Use --device cpu.",
            ),
            (
                not resume and (held or (out / "model" / "model.safetensors").exists()),
                f"{out} already holds a run or its model. Resume the run, or train into another folder.",
            ),
            (
                resume and not out.is_dir(),
                f"{out} holds no run to resume: the folder does not exist.",
            ),
            *(
                (resume and not given, f"The run in {out} does not name its {name}. Give --{name}.")
                for name, given in named.items()
            ),
            (
                watch == 1,
                "--watch must be 0, or at least 2 for the first and the last step, got 1.",
            ),
            (
                max_minutes is not None and not 0 < max_minutes < math.inf,
                f"--max-minutes must be a positive number of minutes, got {max_minutes}.",
            ),
        )
    )
    check_writable(out, "--out")


def planned(
    name: str,
    model: str,
    out: Path,
    resume: bool,
    overrides: Sequence[str],
    seed: int | None,
    tiny: bool,
) -> Recipe:
    """The recipe of the run with overrides: from its directory on resume, else the named one."""
    kept = out / "recipe.json"
    resumed = resume and kept.exists()
    plan = read_recipe(kept if resumed else name)
    if resumed:
        named = read_recipe(name).name if name.endswith(".json") else name or plan.name
        other = model not in ("", plan.init) and (
            not plan.init or Path(model).resolve() != Path(plan.init).resolve()
        )
        for wrong, sentence in (
            (
                plan.name != named,
                f"follows the recipe {plan.name}, not {named}. Resume it by that name.",
            ),
            (
                tiny and not plan.train_images,
                "was started without --tiny. Resume it without --tiny.",
            ),
            (other, f"started from {plan.init or 'random weights'}, not {model}."),
        ):
            if wrong:
                raise ValueError(f"The run in {out} {sentence}")
    source = plan.init if resumed else model or plan.init
    fixed = [
        key
        for key in (o.partition("=")[0] for o in overrides)
        if key in FROM_MODEL or key[:6] == "model."
    ]
    if source and fixed:
        raise ValueError(
            f"{fixed[0]} comes with the model that the run starts from, and cannot be set."
        )
    plan = (plan.tiny() if tiny and not resumed else plan).override(*overrides)
    if plan.continues and not source:
        raise ValueError(
            f"The recipe {plan.name} fine-tunes a trained model. Name one with --model."
        )
    if source and not resumed:
        plan = starting_from(plan, source)
    return plan if seed is None else replace(plan, seed=seed)


def images_before(out: Path) -> dict:
    """The content of a run's `data.json`, or {}."""
    path = out / "data.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def open_images(
    data: str, plan: Recipe, world: World, streams: list[bool | None], **options
) -> list[ImageSet | ImageStream]:
    """The training and the validation split. options: as for `vitlens.data.load`.

    Free memory decides whether a split is held or streamed, and a stream cuts other crops. So the first process decides
    (and downloads) while the others wait, and a resumed run reads the decision from `data.json`.
    """
    sizes = {"train": plan.resize or plan.image_size, "valid": plan.image_size}

    def opened() -> list[ImageSet | ImageStream]:
        return [
            load(
                data, split, size=size, squash=plan.squash, stream=s, device=world.device, **options
            )
            for (split, size), s in zip(sizes.items(), streams, strict=True)
        ]

    splits = opened() if world.rank == 0 else []
    streams = [
        bool(world.first(bool(splits) and isinstance(splits[i], ImageStream))) for i in range(2)
    ]
    return splits or opened()


def command_of(plan: Recipe, data: str, splits: list) -> str:
    """Command that repeats the run with the `recipe.json` next to its model."""
    named = data.partition("/")[0] in ("torch", "hfds", "wds", "vtab", "vtab800")
    words = [
        "vitlens",
        "train",
        "--recipe",
        "recipe.json",
        "--data",
        data if named else Path(data).name,
    ]
    words += ["--stream"] if isinstance(splits[0], ImageStream) else []
    words += ["--model", Path(plan.init).name] if plan.init else []
    return shlex.join([*words, "--out", "DIR"])


def progress(bar: tqdm, step: Step) -> dict[str, str]:
    """Move the bar to a step. Returns the values to show next to it, or {} without a reading of the loss."""
    if bar.n == 0:  # start at the first step of a resumed run, so that the bar's speed is right
        bar.initial = bar.n = bar.last_print_n = step.step - 1
    bar.update(step.step - bar.n)
    if step.loss is None:
        return {}
    best = {"top1": f"{max(step.metrics.values()):.2f}"} if step.metrics else {}
    if "valid_loss" in step.metrics:
        best = {"valid_loss": f"{min(step.metrics.values()):.3f}"}
    return {"loss": f"{step.loss:.3f}", "images/s": f"{step.images_per_second:.0f}", **best}


class Stop:
    """Handler that stores Ctrl-C and SIGTERM, so that the run ends after the current step.

    A second Ctrl-C ends it immediately. Only active in the main thread, which alone receives signals.
    """

    def __init__(self):
        self.signal, self.before = 0, {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
