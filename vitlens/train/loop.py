"""The training loop.

``fit`` is a generator: it yields a ``Step`` after each optimizer step and leaves printing, plotting and stopping to
whoever consumes it. The order of the samples is a function of (seed, epoch); augmentation, dropout and stochastic depth
of (seed, epoch, step). Nothing random is carried over, so a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlens.data import ImageSet
from vitlens.data.augment import Targets
from vitlens.train.export import STATISTICS
from vitlens.train.feed import batches
from vitlens.train.guards import check, finite, settings
from vitlens.train.journal import Journal, facts_of
from vitlens.train.losses import compiled
from vitlens.train.optim import optimizers, set_rates, update_average
from vitlens.train.precision import settled
from vitlens.train.processes import World
from vitlens.train.recipes.recipe import Recipe
from vitlens.train.validation import validation


@dataclass(frozen=True)
class Step:
    """What is known after an optimizer step."""

    step: int
    """Optimizer steps taken, from 1."""
    steps: int
    """Steps of the whole run."""
    epoch: int
    """Epoch that the step belongs to, from 0."""
    lr: float
    """Learning rate of AdamW or SGD; Muon's is the recipe's ``muon_lr`` / ``lr`` times as large."""
    rate: float
    """The same as a share of its peak."""
    loss: float | None = None
    """Loss of this step's batch; None between readings, each of which makes the host wait for the device."""
    images_per_second: float | None = None
    """Training speed since the last reading, without validation and saving; None between readings."""
    metrics: dict[str, float] = field(default_factory=dict)
    """``top1`` and ``top1_average`` (%) on the validation images, after steps that were validated; else empty."""


def fit(
    model: nn.Module,
    data: tuple[ImageSet, ImageSet],
    recipe: Recipe,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    device: torch.device | str | None = None,
    average: dict[str, Tensor] | None = None,
    criterion: Callable[[Tensor, Targets], Tensor] | None = None,
    world: World | None = None,
) -> Iterator[Step]:
    """Train ``model`` in place on ``data`` = (training set, validation set), yielding a ``Step`` after each step.

    ``out``: folder for ``log.jsonl`` and ``checkpoints/``; without it nothing is written. ``resume`` continues from the
    newest good checkpoint there, bit for bit on a CPU. Closing the generator saves once more, so a loop over it may
    ``break`` at any step; within ``contextlib.closing`` it also hears of a save that fails. ``average``: a dict that
    receives the moving average of the parameters and of batch normalization's statistics. ``criterion``: what
    ``compiled`` returned, to compile once for several calls. ``device``: by default CUDA where there is one. ``world``:
    what ``join`` returned, where several processes share the run.

    Raises ``ValueError`` for arguments that do not fit together, ``FloatingPointError`` when the loss is no number,
    ``MemoryError`` when memory runs out and ``ConnectionError`` when another process of the run is gone.
    """
    world = world or (World() if device is None else World(device=torch.device(device)))
    recipe = settled(recipe, world)
    check(data, recipe, out, resume, world)
    train, valid = (split.to(world.device) for split in data)
    per_epoch, steps = len(train) // recipe.batch_size, recipe.length(len(train))
    average = {} if average is None else average

    with settings(recipe, world):
        model = model.to(world.device).train()
        criterion = criterion or compiled(model, recipe, world.device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        if recipe.average:  # also of batch normalization's statistics, which belong to the weights
            real = {name: t for name, t in model.state_dict().items() if t.is_floating_point()}
            average.update({name: t.clone() for name, t in real.items()})
        # Each process has statistics of its own images, so their mean is taken.
        statistics = [b for name, b in model.named_buffers() if name.endswith(STATISTICS) and world.size > 1]
        optimizer = optimizers(model, recipe)
        journal = Journal(out, recipe, model, average, optimizer, facts_of(train, recipe, world), world)
        done = journal.resume() if resume else journal.begin()
        world.agree(done)
        clock = Clock(done)

        for step, parts in batches(model, train, recipe, world, done, steps):
            rate = recipe.rate(step, steps)
            set_rates(optimizer, rate)
            loss = torch.zeros((), device=world.device)
            for x, y in parts:
                part = criterion(x, y) / (recipe.accumulate * world.size)
                part.backward()
                loss += part.detach()
            for b in statistics:
                b /= world.size
            with journal.kept(step):
                world.sum([loss, *(p.grad for p in parameters if p.grad is not None), *statistics])
            norm = nn.utils.clip_grad_norm_(parameters, recipe.clip or math.inf)
            for o in optimizer:
                o.step()
                o.zero_grad()
            if average:
                update_average(average, model, recipe.average, step)

            epoch, last = step // per_epoch, step + 1 == steps
            validate = last or ((step + 1) % per_epoch == 0 and (epoch + 1) % recipe.evaluate_every == 0)
            due, read = last or journal.due(), validate or (step + 1) % recipe.log_every == 0
            record = Step(step + 1, steps, epoch, rate * recipe.lr, rate)
            if read:
                value, speed = finite(loss, norm, step), clock.speed(step + 1, recipe.batch_size)
                record = replace(record, loss=value, images_per_second=speed)
                if validate:
                    with journal.kept(step + 1, asdict(record)):
                        record = replace(record, metrics=validation(model, average, valid, recipe, world))
                journal.log(asdict(record))
            try:
                yield record  # before it is saved: what its reader makes of this step is not lost if both are killed
            except GeneratorExit:
                finite(loss, norm, step)
                journal.save(step + 1)
                raise
            if due:
                finite(loss, norm, step)
                journal.save(step + 1)
            if read or due:
                clock = Clock(step + 1)


class Clock:
    """Images a second since it was made."""

    def __init__(self, step: int):
        self.step, self.start = step, time.perf_counter()

    def speed(self, step: int, batch_size: int) -> float:
        return (step - self.step) * batch_size / max(time.perf_counter() - self.start, 1e-9)
