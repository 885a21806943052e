"""The training loop.

`fit` returns an iterator that yields a `Step` after each optimizer step. Its consumer prints, plots and stops. The
order of the samples is a function of (seed, epoch), and augmentation, dropout and stochastic depth are functions of
(seed, epoch, step). No random state is carried over, so a resumed run repeats the steps of an uninterrupted one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor, nn

from vitlens.data import ImageSet
from vitlens.data.augment import Targets, draw_numbers, draws, generator, seed_of
from vitlens.data.imageset import lost_workers, lost_workers_error
from vitlens.processes import World
from vitlens.recorder.memory import is_out_of_memory
from vitlens.recorder.precision import deterministic_algorithms, float32_precision
from vitlens.train.criteria import (
    build_augmentation,
    build_criterion,
    choose_compile,
    choose_precision,
    validate,
)
from vitlens.train.memory import MemoryTrial
from vitlens.train.optim import optimizers, set_rates, update_average
from vitlens.train.overflow import Overflow
from vitlens.train.processes import distribute, exchange
from vitlens.train.run_folder import STATISTICS, RunFolder, lock_log, run_facts
from vitlens.train.settings import Recipe

FIRST = (1, 2, 5, 10, 20)
"""First steps whose loss is also read, besides every `log_every`-th."""


@dataclass(frozen=True)
class Step:
    """State of a run after an optimizer step.

    step: number of steps taken, from 1 to `steps`. epoch: the current epoch, from 0. lr: learning rate of AdamW or SGD
    (Muon's is `muon_lr` / `lr` times as large). rate: learning rate as a share of its peak. loss: loss of this batch.
    images_per_second: training speed since the last reading, without validation and saving. Both are None between
    readings, because each reading makes the host wait for the device. In fp16 the loss is also None if it overflows.
    metrics: `top1` and `top1_average` (%) on the validation images, or `valid_loss` and `valid_loss_average` without
    labels. Empty between validations.

    >>> vitlens.train.Step(step=1, steps=10, epoch=0, lr=1e-3, rate=1.0).metrics
    {}
    """

    step: int
    steps: int
    epoch: int
    lr: float
    rate: float
    loss: float | None = None
    images_per_second: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def fit(
    model: nn.Module,
    data: tuple[ImageSet, ImageSet],
    recipe: Recipe,
    *,
    out: str | os.PathLike | None = None,
    resume: bool = False,
    device: torch.device | str | None = None,
    average: dict[str, Tensor] | None = None,
    objective: Callable[[nn.Module, Tensor], Tensor] | None = None,
    criterion: Callable[[Tensor, Targets], Tensor] | None = None,
    world: World | None = None,
) -> Iterator[Step]:
    """Train the model in place on `data` = (training set, validation set), yielding a `Step` after each step.

    out: directory for `log.jsonl` and `checkpoints/`; None writes no files. resume: continue from the newest intact
    checkpoint in `out`, bit for bit on a CPU. average: a dict that receives the moving average of the parameters and of
    batch normalization's statistics. objective: (model, normalized images) → loss, in place of the labels. It becomes
    `model.objective`, and the parameters of a module are trained and saved with the model's. criterion: the function
    from `build_criterion`, to compile once for several calls. device: default CUDA if available. world: the result of
    `join` if several processes share the run.

    Closing the iterator saves a checkpoint, so a loop may `break`. Within `contextlib.closing` a failed save raises.
    Between steps, PyTorch's global random state, precision and determinism are the program's. Neither its random
    numbers nor its settings change the run, and the run changes none of them.

    Raises ValueError immediately if model, data and recipe do not match. During training it raises FloatingPointError
    if the loss is not finite, MemoryError if memory runs out and ConnectionError if another process of the run ended.
    After the MemoryError of a single process, its message names a batch or `accumulate` that has been tried and fits.
    In fp16, steps that overflow are skipped, and the error comes after ten in a row or at more than 5 % of the steps.

    >>> digits = vitlens.train.recipe("digits").tiny()
    >>> images = [vitlens.data.load("digits", split, size=8) for split in ("train", "valid")]
    >>> next(vitlens.train.fit(digits.build(), images, digits, device="cpu")).step
    1
    """
    if resume and out is None:
        raise ValueError("resume=True needs the directory of the run, got out=None. Pass out=….")
    if world is None:
        world = World() if device is None else World(device=torch.device(device))
    recipe = choose_precision(recipe, world)
    if objective is not None:
        model.objective = objective
    check_run(model, data, recipe, world)
    train, valid = data
    recipe = choose_compile(recipe, world.device, len(train))
    train = train.to(world.device)
    valid = valid.to(world.device)
    model = model.to(world.device)
    if criterion is None:
        criterion = build_criterion(model, recipe, world.device)
    if average is None:
        average = {}
    training = _steps(model, (train, valid), recipe, out, resume, average, criterion, world)
    return _with_numerics(training, recipe, world)


def check_run(
    model: nn.Module, data: tuple[ImageSet, ImageSet], recipe: Recipe, world: World
) -> None:
    """Raise ValueError if the recipe does not match the data or the model."""
    train, valid = data
    check_images(train, valid, recipe)
    check_classes(train, valid, recipe, has_objective=hasattr(model, "objective"))
    check_length(len(train), recipe, world)
    has_patch_dropout = hasattr(getattr(model, "patch_drop", None), "prob")
    if recipe.patch_drop and not has_patch_dropout:
        raise ValueError(
            "The recipe sets patch_drop, but the model has no patch dropout layer. Build it with patch_drop_rate."
        )
    train.remaining(recipe.augment)  # a stream raises for augmentations that it does not support


def check_images(train: ImageSet, valid: ImageSet, recipe: Recipe) -> None:
    """Raise ValueError for images of another size than the recipe's."""
    side = recipe.image_size
    stored = recipe.resize or side
    if tuple(train.size) != (stored, stored) or tuple(valid.size) != (side, side):
        raise ValueError(
            f"The recipe takes training images of {stored} pixels and validation images of {side}, "
            f"got {train.size} and {valid.size}. Load them at these sizes."
        )


def check_classes(train: ImageSet, valid: ImageSet, recipe: Recipe, has_objective: bool) -> None:
    """Raise ValueError unless both splits have the recipe's classes, and at least two to learn from labels."""
    classes = len(train.class_names)
    if classes != recipe.num_classes or train.class_names != valid.class_names:
        raise ValueError(
            f"The recipe has {recipe.num_classes} classes, training has {classes}, validation "
            f"{len(valid.class_names)}. They must be the same: set num_classes={classes}, "
            "or check that both splits come from one source."
        )
    if classes < 2 and not has_objective:
        raise ValueError(
            f"Training needs at least two classes, got only {train.class_names[0]!r}. Add images of another class."
        )


def check_length(images: int, recipe: Recipe, world: World) -> None:
    """Raise ValueError for too few images, batches that cannot be divided, and runs within their warm-up."""
    if images < recipe.batch_size:
        raise ValueError(
            f"A batch of {recipe.batch_size} exceeds the {images} training images. Lower batch_size."
        )
    parts = world.size * recipe.accumulate
    if parts > 1 and recipe.batch_size % (2 * parts):
        raise ValueError(
            f"A batch of {recipe.batch_size} does not divide into equal parts of an even number of images, for "
            f"{world.size} processes × accumulate {recipe.accumulate}. Change batch_size or accumulate."
        )
    steps = recipe.length(images)
    if recipe.warmup_steps >= steps:
        raise ValueError(
            f"A run of {steps} steps on {images} images would end within its {recipe.warmup_steps} steps of "
            "warm-up. Train longer, or lower warmup_steps."
        )


def _with_numerics(training: Generator[Step], recipe: Recipe, world: World) -> Iterator[Step]:
    """The steps of a run, with its settings while a step is computed and the program's between steps."""
    end = object()
    try:
        while True:
            with numerics(recipe, world):
                step = next(training, end)
            if step is end:
                return
            yield step
    finally:
        with numerics(recipe, world):
            training.close()  # saves a checkpoint


def _steps(model, data, recipe, out, resume, average, criterion, world) -> Generator[Step]:
    """The training loop, for checked arguments on the device."""
    train, valid = data
    per_epoch = len(train) // recipe.batch_size
    steps = recipe.length(len(train))

    with lock_log(out, world):
        model.train()
        criterion = distribute(criterion, model, world)
        parameters = [p for p in model.parameters() if p.requires_grad]
        weights = {}
        if recipe.average:
            # With batch normalization's statistics, which belong to the weights. Both dicts' tensors change in place.
            weights = {n: t for n, t in model.state_dict().items() if t.is_floating_point()}
            average.update({name: t.clone() for name, t in weights.items()})
        # Averaged over processes after each step, because each process has the statistics of its own images.
        statistics = [b for name, b in model.named_buffers() if name.endswith(STATISTICS)]
        optimizer = optimizers(model, recipe)
        facts = run_facts(model, train, recipe, world)
        folder = RunFolder(out, recipe, (model, average, optimizer), facts, world)
        done = folder.begin(resume)
        if world.total(done) != world.size * done:
            raise ValueError(
                "The processes of this run found different checkpoints. Give all of them one folder."
            )
        counted = done
        began = time.perf_counter()
        overflow = Overflow(recipe, optimizer, statistics, done)

        def try_step(smaller: Recipe, step: int) -> None:
            length = smaller.length(len(train))
            with closing(batches(model, train, smaller, world, step, length)) as steps_left:
                _, parts = next(steps_left)
                backward_parts(parts, criterion, smaller, overflow)

        trial = MemoryTrial(
            model, average, valid, recipe, optimizer, world, try_step, images=len(train)
        )
        for step, parts in batches(model, train, recipe, world, done, steps):
            rate = recipe.rate(step, steps)  # a share of the peak
            set_rates(optimizer, rate)
            overflow.remember()
            with folder.rescue(step), trial.on_failure():
                loss = backward_parts(parts, criterion, recipe, overflow)
                world.average([loss, *statistics])
            with trial.on_failure():
                overflow.unscale(parameters)
                norm = nn.utils.clip_grad_norm_(parameters, recipe.clip or math.inf)
                overflow.decide(norm)
                for o in optimizer:
                    o.step()
                    o.zero_grad()
            if recipe.average:
                averages = [average[name] for name in weights]
                update_average(
                    averages, list(weights.values()), recipe.average, step, overflow.taken
                )

            done = step + 1
            epoch = step // per_epoch
            last = done == steps
            ends_epoch = done % per_epoch == 0
            validates = last or (ends_epoch and (epoch + 1) % recipe.evaluate_every == 0)
            saves = last or folder.is_due()
            reads = validates or done % recipe.log_every == 0 or done in FIRST
            record = Step(done, steps, epoch, rate * recipe.lr, rate)
            if reads:
                value = overflow.read(loss, norm, step)
                seconds = max(time.perf_counter() - began, 1e-9)
                speed = (done - counted) * recipe.batch_size / seconds
                record = replace(record, loss=value, images_per_second=speed)
                if validates:
                    with folder.rescue(done, asdict(record)), trial.on_failure():
                        metrics = validate(model, average, valid, recipe, world)
                    record = replace(record, metrics=metrics)
                folder.log(asdict(record))
            try:
                yield record  # before saving, so that a consumer's snapshot is never older than the checkpoint
            except GeneratorExit:
                overflow.read(loss, norm, step)
                folder.save(done)
                raise
            if saves:
                overflow.read(loss, norm, step)
                folder.save(done)
            if reads or saves:
                counted = done
                began = time.perf_counter()


def backward_parts(
    parts: Iterator[tuple[Tensor, Targets]],
    criterion: Callable[[Tensor, Targets], Tensor],
    recipe: Recipe,
    overflow: Overflow,
) -> Tensor:
    """Loss of a batch, whose gradients are added up part by part. A function, so that no tensor outlives a failure."""
    losses = []
    for number, (x, y) in enumerate(parts, start=1):
        with exchange(criterion, now=number == recipe.accumulate):
            part = criterion(x, y) / recipe.accumulate
            overflow.scale(part).backward()
        losses.append(part.detach())
    return sum(losses[1:], losses[0])


@contextmanager
def numerics(recipe: Recipe, world: World):
    """Set precision and determinism for a step, and restore them and the global random state after it.

    Out-of-memory errors that `MemoryTrial` leaves become MemoryError, and ended worker processes ChildProcessError.
    """
    device = world.device
    parts = world.size * recipe.accumulate
    determinism = nullcontext()
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        determinism = deterministic_algorithms()
    seeded_devices = [device] if device.type == "cuda" else []
    random_state = torch.random.fork_rng(devices=seeded_devices)
    try:
        with determinism, float32_precision(recipe.tf32), random_state:
            yield
    except RuntimeError as error:
        # PyTorch may raise the error of its workers at any moment, not only while loading images.
        if lost_workers(error):
            raise lost_workers_error(error) from error
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"The memory of {device} does not hold {recipe.batch_size // parts} images of {recipe.image_size} pixels. "
            f"The last checkpoint is intact. Resume with accumulate={2 * recipe.accumulate}, or start a new run with "
            "a lower batch_size. Neither has been tried."
        ) from error


def batches(
    model: nn.Module, train: ImageSet, recipe: Recipe, world: World, done: int, steps: int
) -> Iterator[tuple[int, Iterator[tuple[Tensor, Targets]]]]:
    """(step, this process's augmented parts of the batch) from step `done` to `steps`.

    Order and augmentation are independent of the number of parts. Dropout, stochastic depth and patch dropout depend on
    it: they draw from the global generator, which is seeded before each part.
    """
    per_epoch = len(train) // recipe.batch_size
    parts = world.size * recipe.accumulate
    first_part = world.rank * recipe.accumulate
    own_parts = range(first_part, first_part + recipe.accumulate)
    remaining = train.remaining(recipe.augment)
    transform = build_augmentation(replace(recipe, augment=remaining), world.device)
    patch_dropout = getattr(model, "patch_drop", None)  # timm's layer

    def augmented_parts(
        step: int, loaded: Iterator[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[Tensor, Targets]]:
        epoch, number = divmod(step, per_epoch)
        progress = step / steps
        for k in own_parts:
            images, labels = next(loaded)
            torch.manual_seed(seed_of(recipe.seed, epoch, number, 1 + k))
            if hasattr(patch_dropout, "prob"):
                drops = progress < recipe.patch_drop_until
                patch_dropout.prob = recipe.patch_drop if drops else 0.0
            rng = draws(images.device, recipe.seed, epoch, number, part=k, parts=parts)
            mixes = progress < recipe.mix_until
            numbers = draw_numbers(images.shape, remaining, rng, size=recipe.image_size, mix=mixes)
            yield transform(images, labels, numbers)

    for epoch in range(done // per_epoch, math.ceil(steps / per_epoch)):
        order = torch.randperm(len(train), generator=generator("cpu", recipe.seed, epoch))
        # On the device of the labels: an index on another device would make the host wait at every batch.
        order = order.to(train.labels.device).split(recipe.batch_size // parts)
        start = epoch * per_epoch
        epoch_steps = range(max(done, start), min(steps, start + per_epoch))
        rows = (order[(step - start) * parts + k] for step in epoch_steps for k in own_parts)
        loaded = train.batches(rows, recipe.augment, (recipe.seed, epoch))
        for step in epoch_steps:
            yield step, augmented_parts(step, loaded)
