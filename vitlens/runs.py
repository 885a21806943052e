"""One training run from beginning to end: what ``vitlens train`` does.

Reads the images, fits the number of epochs to the time at hand if asked, trains with a progress bar, records snapshots
and exports the better of the raw and the averaged weights.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import timm
import torch
from torch import nn
from tqdm import tqdm

from vitlens import datasets, snapshots
from vitlens.datasets import ImageSet
from vitlens.recipes import Recipe, recipe
from vitlens.train import accuracy, checkpoint, compiled, export, fit

MARGIN = 0.97  # share of the minutes that is planned for; the rest is for saving, snapshots and noise


def run(
    recipe_name: str,
    data: str | os.PathLike,
    out: str | os.PathLike,
    *,
    resume: bool = False,
    max_minutes: float | None = None,
    fit_minutes: float | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    seed: int | None = None,
    tiny: bool = False,
    watch: int = 24,
    on_damaged: str = "raise",
    allow_partial: bool = False,
    command: str | None = None,
    quiet: bool = False,
) -> dict:
    """Train by a recipe and return what ``training.json`` says about it.

    ``out`` receives ``recipe.json``, ``log.jsonl``, ``checkpoints/``, ``snapshots.npz`` and, at the end, ``model/`` in
    timm's hub layout. ``resume`` continues the run in ``out``. ``max_minutes`` stops and saves after that time.
    ``fit_minutes`` measures the speed and sets the number of epochs so that the run, counted from here once the images
    are read, takes that long; the number is kept in ``recipe.json``. ``overrides`` are ``"key=value"``. ``tiny`` takes
    the same path in seconds. ``watch``: number of snapshots, 0 for none.

    Raises ``ValueError`` for options that are wrong or do not fit together.
    """
    out, device = Path(out), torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _refuse(out, device, resume, max_minutes, fit_minutes, tiny)
    plan = _plan(recipe_name, out, resume, overrides, seed, tiny)
    say = (lambda *_: None) if quiet else (lambda text: tqdm.write(text, file=sys.stderr))

    start = time.monotonic()
    train, valid = (
        datasets.load(data, split, size=plan.image_size, on_damaged=on_damaged, allow_partial=allow_partial)
        for split in ("train", "valid")
    )
    for split in (train, valid):
        for name in split.damaged:
            say(f"Left out: {name}.")
    train, valid = (
        split.subset(min(n, len(split)), plan.seed) if n else split
        for split, n in ((train, plan.train_images), (valid, plan.valid_images))
    )
    plan = replace(plan, num_classes=len(train.class_names))
    say(f"Read {len(train)} + {len(valid)} images in {time.monotonic() - start:.0f} s.")

    start = time.monotonic()
    train, valid, model = train.to(device), valid.to(device), plan.build().to(device)
    out.mkdir(parents=True, exist_ok=True)
    probe = snapshots.probe(valid, plan) if watch else None
    if watch and not resume:  # before the costly part: what cannot be recorded is known at once
        (out / "snapshots.npz").unlink(missing_ok=True)
        snapshots.save(out / "snapshots.npz", 0, snapshots.record(model, probe))
    criterion = compiled(model, plan, device)
    if fit_minutes is not None and not (resume and (out / "recipe.json").exists()):
        plan = fitted(model, (train, valid), plan, fit_minutes * 60, device, criterion, start)
        say(f"{plan.epochs} epochs fit into {fit_minutes:g} minutes.")
    checkpoint.write(out / "recipe.json", plan.to_json().encode())

    steps = len(train) // plan.batch_size * plan.epochs
    watched = set(snapshots.schedule(steps, watch)) if watch else set()
    average: dict = {}
    last, shown = None, {}
    with tqdm(total=steps, unit="step", disable=quiet, mininterval=0.5 if sys.stderr.isatty() else 10) as bar:
        for last in fit(
            model, (train, valid), plan, out=out, resume=resume, device=device, average=average, criterion=criterion
        ):
            bar.update(last.step - bar.n)
            if last.loss is not None:
                best = {"top1": f"{max(last.metrics.values()):.2f}"} if last.metrics else {}
                shown |= {"loss": f"{last.loss:.3f}", "images/s": f"{last.images_per_second:.0f}", **best}
                bar.set_postfix(shown, refresh=False)
            if last.step in watched:
                try:
                    snapshots.save(out / "snapshots.npz", last.step, snapshots.record(model, probe))
                except (RuntimeError, ValueError, OSError) as problem:  # a picture is no reason to lose a run
                    say(f"There are no snapshots from step {last.step} on: {problem}")
                    watched.clear()
            if max_minutes is not None and time.monotonic() - start > max_minutes * 60 and last.step < steps:
                say(f"Stopped after {max_minutes:g} minutes, at step {last.step} of {steps}; --resume goes on.")
                break
    seconds = time.monotonic() - start + (_seconds_before(out) if resume else 0.0)
    return _finish(
        out, plan, model, average, (train, valid), device, seconds, command or _command(plan, data), last, steps
    )


def fitted(
    model: nn.Module,
    data: tuple[ImageSet, ImageSet],
    plan: Recipe,
    seconds: float,
    device: torch.device,
    criterion: Callable,
    start: float | None = None,
) -> Recipe:
    """``plan`` with as many epochs as fit into ``seconds``, by a short trial; with ``start`` (``time.monotonic()``) the
    seconds run from there and include the trial.

    The trial compiles what there is to compile, trains some steps with patches dropped and some without, validates, and
    puts the weights back.
    """
    before = {name: t.clone() for name, t in model.state_dict().items()}
    trial = replace(plan, epochs=1_000_000, log_every=4, evaluate_every=1_000_000)
    dropped = _speed(model, data, replace(trial, patch_drop_until=1.0), device, criterion) if plan.patch_drop else 1.0
    whole = _speed(model, data, replace(trial, patch_drop=0.0, patch_drop_until=0.0), device, criterion)
    accuracy(model, data[1], plan)  # the first pass sets things up
    tick = time.perf_counter()
    accuracy(model, data[1], plan)
    validating = (2 if plan.average else 1) * (time.perf_counter() - tick)
    model.load_state_dict(before)
    model.zero_grad()
    images = len(data[0]) // plan.batch_size * plan.batch_size
    epoch = images * (plan.patch_drop_until / dropped + (1 - plan.patch_drop_until) / whole)
    spent = 0.0 if start is None else time.monotonic() - start
    left = seconds * MARGIN - spent - validating
    epochs = int(left / (epoch + validating / plan.evaluate_every))
    if epochs < 1:
        raise ValueError(
            f"Not one epoch of about {epoch:.0f} s fits into {seconds:.0f} s, of which {spent:.0f} s went "
            "into compiling and measuring. Allow more minutes, or train on fewer images."
        )
    return replace(plan, epochs=epochs)


def _speed(model, data, trial: Recipe, device, criterion, readings: int = 8) -> float:
    """Images a second, the median of the later half of ``readings``."""
    training = fit(model, data, trial, device=device, criterion=criterion)
    speeds = [step.images_per_second for step in islice(training, readings * trial.log_every)]
    training.close()
    return statistics.median([speed for speed in speeds if speed is not None][readings // 2 :])


def _refuse(out: Path, device: torch.device, resume: bool, max_minutes, fit_minutes, tiny: bool) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("The device is cuda, and this machine has none that PyTorch can use. Train on the cpu.")
    for name, minutes in {"max-minutes": max_minutes, "fit-minutes": fit_minutes}.items():
        if minutes is not None and not minutes > 0:
            raise ValueError(f"--{name} is a positive number of minutes; {minutes} came.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"A run is written to a folder, and {out} is a file. Name another with --out.")
    if resume and not out.is_dir():
        raise ValueError(f"There is no run to resume in {out}: the folder does not exist.")


def _plan(name: str, out: Path, resume: bool, overrides: Sequence[str], seed: int | None, tiny: bool) -> Recipe:
    """The recipe of the run: the one in its folder when it is resumed, else the named one, with what was overridden."""
    plan = recipe(name)
    if resume and (out / "recipe.json").exists():
        try:
            plan = Recipe.from_json((out / "recipe.json").read_text())
        except (ValueError, TypeError) as problem:
            raise ValueError(f"{out / 'recipe.json'} cannot be read ({problem}). Train elsewhere.") from problem
        if plan.name != name:
            raise ValueError(f"The run in {out} follows the recipe {plan.name}, not {name}. Resume it by that name.")
    elif tiny:
        plan = plan.tiny()
    plan = plan.override(*overrides)
    return plan if seed is None else replace(plan, seed=seed)


def _finish(out, plan, model, average, data, device, seconds, command, last, steps) -> dict:
    """Write the export of a finished run, and return the account of it."""
    metrics = dict(last.metrics) if last is not None else {}
    finished = last is None or last.step == steps  # a finished run, resumed, yields nothing
    if finished and not metrics:
        metrics = {"top1": accuracy(model, data[1], plan)}
        if average:
            metrics["top1_average"] = accuracy(model, data[1], plan, average)
    averaged = metrics.get("top1_average", -1.0) > metrics.get("top1", 0.0)
    account = {
        "command": command,
        "finished": finished,
        "validation": {
            "top1": metrics.get("top1"),
            "top1_average": metrics.get("top1_average"),
            "images": len(data[1]),
            "exported": ("moving average of the weights" if averaged else "raw weights") if finished else None,
        },
        "training_images": len(data[0]),
        "epochs": plan.epochs,
        "steps": steps,
        "seconds": round(seconds, 1),
        "hardware": hardware(device),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "recipe": plan.to_dict(),
    }
    if finished:
        export(model, out / "model", plan, data[0].class_names, weights=average if averaged else None, training=account)
    checkpoint.write(out / "training.json", json.dumps(account, indent=2, ensure_ascii=False).encode())
    return account


def _seconds_before(out: Path) -> float:
    """Seconds that the run took before it was stopped; a killed process leaves no account of its own."""
    try:
        return json.loads((out / "training.json").read_text())["seconds"]
    except (OSError, ValueError, KeyError):
        return 0.0


def hardware(device: torch.device) -> str:
    """The class of the machine: "1 × NVIDIA H200", or the number of CPU threads."""
    if device.type == "cuda":
        return f"1 × {torch.cuda.get_device_name(device)}"
    return f"{torch.get_num_threads()} CPU threads"


def versions() -> dict[str, str]:
    return {"python": sys.version.split()[0], "torch": str(torch.__version__), "timm": timm.__version__}


def _command(plan: Recipe, source) -> str:
    """A command that repeats the run: what differs from the named recipe is spelled out, epochs included."""
    base, words = recipe(plan.name).to_dict(), ["vitlens", "train", "--recipe", plan.name, "--data", Path(source).name]
    for key, value in plan.to_dict().items():
        if isinstance(value, dict):
            changed = {f"{key}.{k}": v for k, v in value.items() if v != base[key][k]}
        else:
            changed = {key: value} if value != base[key] else {}
        for name, v in changed.items():
            words += ["--set", f"{name}={','.join(map(str, v)) if isinstance(v, tuple) else v}"]
    return shlex.join([*words, "--out", "DIR"])
