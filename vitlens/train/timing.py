"""How long a run will take, by a short trial: epochs that fit into a time, and the cost of determinism."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice

from torch import nn

from vitlens.data import ImageSet
from vitlens.train.loop import fit
from vitlens.train.processes import World
from vitlens.train.settings import Recipe
from vitlens.train.validation import validate

MARGIN = 0.97  # share of the minutes that is planned for; the rest is for saving, snapshots and noise


def fitted(
    model: nn.Module,
    data: tuple[ImageSet, ImageSet],
    plan: Recipe,
    seconds: float,
    world: World,
    criterion: Callable,
    start: float | None = None,
) -> Recipe:
    """The plan with as many epochs as fit into `seconds`, by a short trial.

    The trial compiles what there is to compile, trains some steps with patches dropped and some without, validates, and
    puts the weights back. start: `time.monotonic()` from which the seconds run; they then include the trial.
    """
    trial = _endless(plan)
    whole = dropped = 1.0
    with _weights_kept(model):
        if plan.patch_drop:
            dropped = _speed(model, data, replace(trial, patch_drop_until=1.0), world, criterion)
        whole = _speed(model, data, replace(trial, patch_drop=0.0, patch_drop_until=0.0), world, criterion)
        validate(model, {}, data[1], plan, world)  # the first pass sets things up
        tick = time.perf_counter()
        validate(model, {}, data[1], plan, world)
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
    with closing(fit(model, data, trial, world=world, criterion=criterion)) as training:
        speeds = [step.images_per_second for step in islice(training, 8 * trial.log_every)]
    return statistics.median([speed for speed in speeds if speed is not None][4:])
