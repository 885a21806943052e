"""One training run from images to export, as in `vitlens train`."""

from __future__ import annotations

import filecmp
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from vitlens.data import SOURCES, ImageSet, ImageStream, load
from vitlens.data.sources import require_source
from vitlens.files import check_writable, lock_folder, read_text, write
from vitlens.processes import World, join
from vitlens.train import snapshots
from vitlens.train.criteria import build_criterion, choose_compile, choose_precision, compiles
from vitlens.train.loop import FIRST, Step, fit
from vitlens.train.processes import hardware, versions
from vitlens.train.recipes import read_recipe, starting_from
from vitlens.train.run_folder import (
    BUILT_BY,
    callable_name,
    finish,
    newest_first,
    read_finished_run,
    require_own_folder,
    seconds_of_training,
    write_digests,
)
from vitlens.train.settings import FROM_MODEL, Recipe

__all__ = ["hardware", "read_recipe", "run", "versions"]
AGREE = 10
"""Steps between agreements of several processes whether to stop, for which the host waits."""


def run(
    recipe_name: str | os.PathLike,
    data: str | os.PathLike,
    out: str | os.PathLike,
    *,
    model: str | os.PathLike = "",
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
    image_key: str = "",
    label_key: str = "",
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
    stream, workers, image_key, label_key: as in `vitlens.data.load`. goes_on: hint how to continue a stopped run.

    Ctrl-C and SIGTERM end the run with a checkpoint after the current step, or within ten steps with several processes.
    Processes from `torchrun` or `accelerate launch` share each batch, and the first one writes.

    Raises ValueError for wrong options and for a directory that another process trains into, and the errors of `fit`.

    >>> account = vitlens.train.run("digits", "digits", "runs/tiny", tiny=True, quiet=True, device="cpu")
    >>> account["finished"]
    True
    """
    out = Path(out)
    recipe_name = os.fspath(recipe_name)
    model = os.fspath(model)
    world = join(device)
    built_by = callable_name(build) if build else BUILT_BY
    images_before = read_data_file(out) if resume else {}
    how_to_resume = goes_on or resume_hint(
        out, data if images_before else "", root if images_before else None
    )
    data = os.fspath(data) or images_before.get("data", "")
    root = root or images_before.get("root")
    keys = {
        "image_key": image_key or images_before.get("image_key", ""),
        "label_key": label_key or images_before.get("label_key", ""),
    }
    if images_before and os.path.isabs(data) and not os.path.exists(data):
        raise ValueError(
            f"{data}, the data of the run in {out}, does not exist. Give its place with --data."
        )
    check_options(out, world.device, resume, max_minutes, watch, recipe_name, data)
    fresh = not (resume and newest_first(out / "checkpoints"))
    plan = plan_recipe(recipe_name, model, out, resume, overrides, seed, tiny)
    plan = choose_precision(plan, world)
    if not resume:
        require_own_folder(out, plan)
    quiet = quiet or world.rank > 0

    def say(text: str) -> None:
        if not quiet:
            tqdm.write(text, file=sys.stderr)

    start = time.monotonic()
    streams = [stream, stream]
    if stream is None and images_before.get("stream"):
        streams = images_before["stream"]
    splits = open_images(data, plan, world, streams, root=root, workers=workers, **keys)
    said = {split.note for split in splits}
    for note in dict.fromkeys(split.note for split in splits):
        if note:
            say(note)
    train = limit(splits[0], plan.train_images, plan.seed)
    valid = limit(splits[1], plan.valid_images, plan.seed)
    classes = len(train.class_names)
    sets_classes = any(assignment.startswith("num_classes=") for assignment in overrides)
    if sets_classes and plan.num_classes != classes:
        raise ValueError(
            f"{data} has {classes} classes, got num_classes={plan.num_classes}. Leave it out."
        )
    plan = replace(plan, num_classes=classes)
    if resume and fresh:  # also without its checkpoints
        finished = read_finished_run(out, plan, train, built_by)
        if finished:
            say(f"The run in {out} is finished.")
            return {**finished, "stopped_by": 0}
    plan = choose_compile(plan, world.device, len(train))
    say(f"Found {len(train)} + {len(valid)} images in {time.monotonic() - start:.0f} s.")

    start = time.monotonic()
    if plan.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
    # A checkpoint replaces the initial weights, so the model that the run started from may be missing.
    network = build(plan) if build else plan.build(weights=fresh)
    network.built_by = built_by
    average: dict = {}
    training = fit(
        network,
        (train, valid),
        plan,
        out=out,
        resume=resume,
        average=average,
        criterion=build_criterion(network, plan, world.device),
        world=world,
    )
    if resume and fresh:
        say(f"{out} holds no checkpoint, so the run starts.")
    steps = plan.length(len(train))
    if steps_saved(out) < steps:
        say(
            f"Training {steps:,} steps of {plan.batch_size:,} images on {hardware(world.device, world.size)} "
            f"in {plan.precision}."
        )
        if compiles(plan, world.device):
            takes = "many minutes" if "max" in plan.compile else "about half a minute"
            say(f"Compiling, {takes} …")
    count = watch if world.rank == 0 else 0
    album = snapshots.Album(out, network, snapshots.probe(valid, plan), steps, count, say)
    lock = nullcontext()
    if world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(out)
    with lock:
        if not resume and world.rank == 0:
            require_new_run(out)  # another process may have trained into it meanwhile
        if fresh and world.rank == 0:
            write_data_file(
                out, data, root, splits, keys
            )  # first, because it marks the folder of a run
            write(out / "recipe.json", plan.to_json())
            write_digests(out, train, plan.init)
        if fresh:  # before training, to report unsupported arrays at once
            album.begin()
        seconds_before = 0.0 if fresh else seconds_of_training(out)
        with Stop() as stop:
            forecast = Forecast(plan.batch_size, say)
            last, reason = follow(
                training, steps, album, stop, start, max_minutes, world, forecast, quiet
            )
        if reason:
            say(f"Stopped {reason}, at step {last.step} of {steps}; {how_to_resume}.")
        account = finish(
            out,
            plan,
            network,
            average,
            (train, valid),
            last=last,
            steps=steps,
            seconds=seconds_before + time.monotonic() - start,
            command=command_of(plan, data, splits, keys),
            world=world,
            exports=export,
        )
        if account["finished"]:
            say(validation_sentence(account["validation"]))
            album.end()
    # Else a launcher, which ends all processes once one has failed, would end the first while it writes.
    world.wait_for_first(0, "writes the model")
    for split in (train, valid):  # a stream has counted its images by now
        if split.note not in said:
            say(split.note)
            said.add(split.note)
    return {**account, "stopped_by": 0 if account["finished"] else stop.signal}


# Before: recipe and images


def check_options(
    out: Path,
    device: torch.device,
    resume: bool,
    max_minutes: float | None,
    watch: int,
    recipe_name: str,
    data: str,
) -> None:
    """Raise ValueError for wrong options, before reading or writing files."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA device. Use --device cpu.")
    if resume:
        check_resumable(out, recipe_name, data)
    else:
        require_new_run(out)
    if watch == 1:
        raise ValueError("--watch must be 0, or at least 2 for the first and the last step, got 1.")
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise ValueError(f"--max-minutes must be a positive number of minutes, got {max_minutes}.")
    check_writable(out, "--out")
    if not resume:
        require_source(data)


def check_resumable(out: Path, recipe_name: str, data: str) -> None:
    """Raise ValueError unless a folder, or the options, name the recipe and the data of a run."""
    if not out.is_dir():
        raise ValueError(f"{out} holds no run to resume: the folder does not exist.")
    has_recipe = recipe_name or (out / "recipe.json").is_file()
    for option, known in (("recipe", has_recipe), ("data", data)):
        if not known:
            raise ValueError(f"The run in {out} does not name its {option}. Give --{option}.")


def require_new_run(out: Path) -> None:
    """Raise ValueError for a folder that holds a run."""
    if holds_run(out):
        raise ValueError(
            f"{out} already holds a run or its model. Resume the run, or train into another folder."
        )


def steps_saved(out: Path) -> int:
    """Number of steps up to the newest checkpoint in a folder, or 0."""
    markers = newest_first(out / "checkpoints")
    return int(markers[0].stem.removeprefix("step-")) if markers else 0


def holds_run(out: Path) -> bool:
    """True if a folder holds checkpoints, the account of a run, or its model."""
    if newest_first(out / "checkpoints"):
        return True
    return any((out / name).exists() for name in ("training.json", "model/model.safetensors"))


def plan_recipe(
    name: str,
    model: str,
    out: Path,
    resume: bool,
    overrides: Sequence[str],
    seed: int | None,
    tiny: bool,
) -> Recipe:
    """The recipe of the run with overrides: from its directory on resume, else the named one."""
    file = out / "recipe.json"
    resumed = resume and file.exists()
    if resumed:
        plan = read_recipe(file)
        check_same_run(plan, out, name, model, tiny)
        source = plan.init
    else:
        plan = read_recipe(name)
        source = model or plan.init
    if source:
        check_overrides(overrides)
    if tiny and not resumed:
        plan = plan.tiny()
    plan = plan.override(*overrides)
    if plan.continues and not source:
        raise ValueError(
            f"The recipe {plan.name} fine-tunes a trained model. Name one with --model."
        )
    if source and not resumed:
        plan = starting_from(plan, source)
    return plan if seed is None else replace(plan, seed=seed)


def check_same_run(plan: Recipe, out: Path, name: str, model: str, tiny: bool) -> None:
    """Raise ValueError if the options contradict the recipe of the run that is resumed."""
    named = name or plan.name
    if name.endswith(".json"):
        named = read_recipe(name).name
    if plan.name != named:
        raise ValueError(
            f"The run in {out} follows the recipe {plan.name}, not {named}. Resume it by that name."
        )
    if tiny and not plan.train_images:
        raise ValueError(f"The run in {out} was started without --tiny. Resume it without --tiny.")
    if not model or model == plan.init:
        return
    if not plan.init or not _same_weights(Path(model), Path(plan.init)):
        raise ValueError(
            f"The run in {out} started from {plan.init or 'random weights'}, not {model}."
        )


def _same_weights(one: Path, other: Path) -> bool:
    """True for two paths of one model folder, and for two folders with the same file of weights."""
    if one.resolve() == other.resolve():
        return True
    files = [folder / "model.safetensors" for folder in (one, other)]
    return all(file.is_file() for file in files) and filecmp.cmp(*files, shallow=False)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ValueError for a setting that comes with the model that a run starts from."""
    for assignment in overrides:
        key = assignment.partition("=")[0]
        if key in FROM_MODEL or key.startswith("model."):
            raise ValueError(
                f"{key} comes with the model that the run starts from, and cannot be set."
            )


def read_data_file(out: Path) -> dict:
    """The content of a run's `data.json`, or {}."""
    path = out / "data.json"
    return json.loads(read_text(path)) if path.exists() else {}


def write_data_file(
    out: Path, data: str, root: str | os.PathLike | None, splits: list, keys: dict[str, str]
) -> None:
    """Write `data.json`, with absolute paths."""
    is_path = not is_named(data) and Path(data).is_dir()
    content = {
        "stream": [isinstance(split, ImageStream) for split in splits],
        "data": os.path.abspath(data) if is_path else data,
        "root": root and os.path.abspath(root),
        **{name: key for name, key in keys.items() if key},
    }
    write(out / "data.json", json.dumps(content).encode())


def is_named(data: str) -> bool:
    """True for the name of a registered data set, such as torch/cifar10."""
    return data.partition("/")[0] in {source.partition("/")[0] for source in SOURCES}


def open_images(
    data: str, plan: Recipe, world: World, streams: list[bool | None], **options
) -> list[ImageSet | ImageStream]:
    """The training and the validation split. options: as for `vitlens.data.load`.

    Free memory decides whether a split is held or streamed, and a stream cuts other crops. So the first process decides
    (and downloads) while the others wait, and a resumed run reads the decision from `data.json`.
    """
    sizes = {"train": plan.resize or plan.image_size, "valid": plan.image_size}

    def load_splits(streams: list[bool | None]) -> list[ImageSet | ImageStream]:
        splits = []
        for (split, size), stream in zip(sizes.items(), streams, strict=True):
            images = load(
                data,
                split,
                size=size,
                squash=plan.squash,
                stream=stream,
                device=world.device,
                **options,
            )
            splits.append(images)
        return splits

    splits = load_splits(streams) if world.rank == 0 else []
    decided = [isinstance(split, ImageStream) for split in splits] or [False, False]
    decided = [bool(world.wait_for_first(streamed, "opens the images")) for streamed in decided]
    return splits or load_splits(decided)


def limit(split: ImageSet | ImageStream, n: int, seed: int) -> ImageSet | ImageStream:
    """A random subset of at most `n` images, or all for n = 0."""
    return split.subset(min(n, len(split)), seed) if n else split


# During the run


def follow(
    training: Iterator[Step],
    steps: int,
    album: snapshots.Album,
    stop: Stop,
    start: float,
    max_minutes: float | None,
    world: World,
    forecast: Forecast,
    quiet: bool,
) -> tuple[Step | None, str]:
    """Train with a progress bar and snapshots until the end, a signal or the time limit.

    Returns the last step, None if none was left, and the reason for stopping, or "".
    """
    last = None
    readings: dict[str, str] = {}
    interval = 0.5 if sys.stderr.isatty() else 60
    bar = tqdm(total=steps, unit="step", disable=quiet, mininterval=interval)
    with closing(training), bar:
        for last in training:
            readings |= progress(bar, last)
            forecast.update(last)
            bar.set_postfix(readings, refresh=last.step in FIRST and interval < 1)
            album.record_if_due(last.step)
            if world.size > 1 and last.step % AGREE:
                continue
            signaled = world.total(stop.signal)
            if signaled and not stop.signal:
                stop.signal = signal.SIGTERM
            seconds = world.first(time.monotonic() - start)
            late = max_minutes is not None and seconds > max_minutes * 60
            if (signaled or late) and last.step < steps:
                return last, f"after {max_minutes:g} minutes" if late else "by a signal"
    return last, ""


class Forecast:
    """Speed and expected time of a run, printed once, after the first 20 steps of this process."""

    def __init__(self, batch_size: int, say: Callable[[str], None]):
        self.batch_size = batch_size
        self.say = say
        self.first = 0
        self.readings = 0
        self.given = False

    def update(self, step: Step) -> None:
        """Print the sentence if it is time. The first reading contains the start, so it does not count."""
        self.first = self.first or step.step
        if step.images_per_second is None:
            return
        self.readings += 1
        early = self.readings == 1 or step.step - self.first < FIRST[-1] - 1
        if self.given or early or step.step == step.steps:
            return
        self.given = True
        speed = step.images_per_second
        images = (step.steps - step.step) * self.batch_size
        left = duration(images / speed)
        self.say(f"{speed:,.0f} images a second: about {left} left, without validation.")


def validation_sentence(validation: dict) -> str:
    """Sentence about the entry `validation` of `training.json`.

    >>> validation_sentence({"top1": 50.0, "top1_average": 52.5, "images": 40, "exported": "raw weights"})
    'Top-1 on 40 validation images: 50.0 %, of averaged weights 52.5 %. Exported: raw weights.'
    """
    name = next(iter(validation))
    title, unit, digits = ("Top-1", " %", 1) if name == "top1" else ("Loss", "", 4)
    values = f"{validation[name]:.{digits}f}{unit}"
    average = validation[f"{name}_average"]
    if average is not None:
        values += f", of averaged weights {average:.{digits}f}{unit}"
    images = f"{validation['images']:,} validation images"
    return f"{title} on {images}: {values}. Exported: {validation['exported']}."


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours: "80 seconds", "12 minutes", "3.5 hours"."""
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def resume_hint(out: Path, data: str | os.PathLike, root: str | os.PathLike | None) -> str:
    """Hint that ends the message of a stopped run: the command that continues it."""
    words = ["vitlens", "train", "--resume", "--out", str(out)]
    if data:
        words += ["--data", os.fspath(data)]
    if root:
        words += ["--root", os.fspath(root)]
    return f"`{shlex.join(words)}` continues it"


def command_of(plan: Recipe, data: str, splits: list, keys: dict[str, str]) -> str:
    """Command that repeats the run with the `recipe.json` next to its model."""
    words = ["vitlens", "train", "--recipe", "recipe.json"]
    words += ["--data", data if is_named(data) else Path(data).name]
    for name, key in keys.items():
        if key:
            words += [f"--{name.replace('_', '-')}", key]
    if isinstance(splits[0], ImageStream):
        words.append("--stream")
    if plan.init:
        words += ["--model", Path(plan.init).name]
    return shlex.join([*words, "--out", "DIR"])


def progress(bar: tqdm, step: Step) -> dict[str, str]:
    """Move the bar to a step. Returns the values to show next to it, or {} without a reading of the loss."""
    if bar.n == 0:  # start at the first step of a resumed run, so that the bar's speed is right
        bar.initial = bar.n = bar.last_print_n = step.step - 1
    bar.update(step.step - bar.n)
    if step.loss is None:
        return {}
    values = {"loss": f"{step.loss:.3f}", "images/s": f"{step.images_per_second:.0f}"}
    if "valid_loss" in step.metrics:
        values["valid_loss"] = f"{min(step.metrics.values()):.3f}"
    elif step.metrics:
        values["top1"] = f"{max(step.metrics.values()):.2f}"
    return values


STOPPING = [signal.SIGINT, signal.SIGTERM]
"""Signals that end a run with a checkpoint. SIGHUP comes when a terminal or a connection closes. Windows has none."""
if hasattr(signal, "SIGHUP"):
    STOPPING.append(signal.SIGHUP)


class Stop:
    """Handler that stores the signals `STOPPING`, so that the run ends after the current step.

    A second Ctrl-C ends it immediately. Only active in the main thread, which alone receives signals.
    """

    def __init__(self):
        self.signal = 0
        self.handlers: dict = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets for SIGHUP
                    self.handlers[number] = signal.signal(number, self._store)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _store(self, number: int, _frame) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
