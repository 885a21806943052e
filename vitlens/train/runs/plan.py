"""What a run will do: the recipe of its folder or its name, with what the user changed, fitted to the time at hand."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from vitlens.data import ImageSet
from vitlens.files import writable
from vitlens.train import checkpoint
from vitlens.train.loop import fit
from vitlens.train.processes import World
from vitlens.train.recipes.models import FROM_MODEL, starting_from
from vitlens.train.recipes.named import recipe
from vitlens.train.recipes.recipe import Recipe
from vitlens.train.snapshots import schedule
from vitlens.train.validation import accuracy

MARGIN = 0.97  # share of the minutes that is planned for; the rest is for saving, snapshots and noise


def refuse(out: Path, device: torch.device, resume: bool, max_minutes, fit_minutes, watch: int) -> None:
    """Raise ``ValueError`` for options that cannot be meant, before anything is read or written."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("The device is cuda, and this machine has none that PyTorch can use. Train on the cpu.")
    for name, minutes in {"max-minutes": max_minutes, "fit-minutes": fit_minutes}.items():
        if minutes is not None and not 0 < minutes < math.inf:
            raise ValueError(f"--{name} is a positive number of minutes; {minutes} came.")
    if watch:
        schedule(1, watch)  # which refuses too few
    if not resume and checkpoint.newest_first(out / "checkpoints"):
        raise ValueError(f"{out} already holds checkpoints of a run. Resume it, or train into another folder.")
    if resume and not out.is_dir():
        raise ValueError(f"There is no run to resume in {out}: the folder does not exist.")
    writable(out, "--out")


def planned(
    name: str, model: str, out: Path, resume: bool, overrides: Sequence[str], seed: int | None, tiny: bool
) -> Recipe:
    """The recipe of the run: the one in its folder when it is resumed, else the named one, with what was overridden.

    ``name`` may be a JSON file; of one that a run was started with, only its name is compared when it is resumed.
    ``model`` is what to start from; a recipe that is made to continue a model needs one.
    """
    if resume and (out / "recipe.json").exists():
        plan = read_recipe(out / "recipe.json")
        named = read_recipe(name).name if name.endswith(".json") else name
        if plan.name != named:
            raise ValueError(f"The run in {out} follows the recipe {plan.name}, not {named}. Resume it by that name.")
        if tiny and not plan.train_images:
            raise ValueError(f"The run in {out} is not a tiny one. Resume it without --tiny.")
        if model and model != plan.init and not _same(model, plan.init):
            raise ValueError(f"The run in {out} started from {plan.init or 'random weights'}, not {model}.")
        plan = plan.override(*overrides)
        return plan if seed is None else replace(plan, seed=seed)
    plan = read_recipe(name)
    plan = (plan.tiny() if tiny else plan).override(*overrides)
    fixed = [key for key in FROM_MODEL if any(each.startswith(f"{key}=") for each in overrides)]
    if (model or plan.init) and fixed:
        raise ValueError(f"{fixed[0]} comes with the model that the run starts from, and cannot be set.")
    if model or plan.init:
        plan = starting_from(plan, model or plan.init)
    elif plan.continues:
        raise ValueError(f"The recipe {plan.name} continues a trained model: name one with --model.")
    return plan if seed is None else replace(plan, seed=seed)


def _same(one: str, other: str) -> bool:
    """Whether two spellings are of one folder."""
    return bool(other) and Path(one).exists() and Path(one).resolve() == Path(other).resolve()


def read_recipe(name: str | Path) -> Recipe:
    """The recipe of that name, or in that JSON file. Raises ``ValueError`` for what is none."""
    path = Path(name)
    if path.suffix != ".json":
        return recipe(str(name))
    try:
        return Recipe.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError, AttributeError, OSError) as problem:
        raise ValueError(f"{path} cannot be read as a recipe ({problem}).") from problem


def fitted(
    model: nn.Module,
    data: tuple[ImageSet, ImageSet],
    plan: Recipe,
    seconds: float,
    world: World,
    criterion: Callable,
    start: float | None = None,
) -> Recipe:
    """``plan`` with as many epochs as fit into ``seconds``, by a short trial; with ``start`` (``time.monotonic()``) the
    seconds run from there and include the trial.

    The trial compiles what there is to compile, trains some steps with patches dropped and some without, validates, and
    puts the weights back.
    """
    trial = _endless(plan)
    whole = dropped = 1.0
    with _weights_kept(model):
        if plan.patch_drop:
            dropped = _speed(model, data, replace(trial, patch_drop_until=1.0), world, criterion)
        whole = _speed(model, data, replace(trial, patch_drop=0.0, patch_drop_until=0.0), world, criterion)
        accuracy(model, data[1], plan, world=world)  # the first pass sets things up
        tick = time.perf_counter()
        accuracy(model, data[1], plan, world=world)
        validating = (2 if plan.average else 1) * (time.perf_counter() - tick)
    images = len(data[0]) // plan.batch_size * plan.batch_size
    epoch = images * (plan.patch_drop_until / dropped + (1 - plan.patch_drop_until) / whole)
    spent = 0.0 if start is None else time.monotonic() - start
    left = seconds * MARGIN - spent - validating
    epochs = int(world.first(left / (epoch + validating / plan.evaluate_every)))
    if epochs < 1:
        raise ValueError(
            f"Not one epoch of about {epoch:.0f} s fits into {seconds:.0f} s, of which {spent:.0f} s went "
            "into compiling and measuring. Allow more minutes, or train on fewer images."
        )
    return replace(plan, epochs=epochs, steps=0)


def cost_of_determinism(model: nn.Module, data: tuple[ImageSet, ImageSet], plan: Recipe, world: World) -> float:
    """Extra time of a step under deterministic algorithms, as a share; both uncompiled, by a short trial."""
    trial = replace(_endless(plan), compile="off")
    with _weights_kept(model):
        free, bound = (_speed(model, data, replace(trial, deterministic=d), world, None) for d in (False, True))
    return free / bound - 1


def _endless(plan: Recipe) -> Recipe:
    return replace(
        plan, epochs=1_000_000, steps=0, log_every=4, evaluate_every=1_000_000, warmup=plan.warmup or 0.1,
        warmup_steps=0,
    )  # fmt: skip


@contextmanager
def _weights_kept(model: nn.Module) -> Iterator[None]:
    before = {name: t.clone() for name, t in model.state_dict().items()}
    yield
    model.load_state_dict(before)
    model.zero_grad()


def _speed(model, data, trial: Recipe, world: World, criterion: Callable | None) -> float:
    """Images a second, the median of the later half of eight readings."""
    training = fit(model, data, trial, world=world, criterion=criterion)
    speeds = [step.images_per_second for step in islice(training, 8 * trial.log_every)]
    training.close()
    return statistics.median([speed for speed in speeds if speed is not None][4:])
