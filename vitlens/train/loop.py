"""The training loop.

`fit` returns an iterator that yields a `Step` after each optimizer step and leaves printing, plotting and stopping to
whoever consumes it. The order of the samples is a function of (seed, epoch); augmentation, dropout and stochastic depth
of (seed, epoch, step). Nothing random is carried over, so a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlens.data import ImageSet
from vitlens.data.augment import Targets, augmented, draws, generator, seed_of
from vitlens.data.imageset import ended, workers_ended
from vitlens.recorder.forward import out_of_memory
from vitlens.train.criteria import compiled, settled, validate
from vitlens.train.optim import optimizers, set_rates, update_average
from vitlens.train.processes import World
from vitlens.train.run_folder import DIVERGED, STATISTICS, RunFolder, facts_of
from vitlens.train.settings import Recipe

FIRST = (1, 2, 5, 10, 20)
"""Steps whose loss is read besides every `log_every`-th."""


@dataclass(frozen=True)
class Step:
    """State of a run after an optimizer step.

    step, epoch: the number of steps taken, from 1, of `steps`; and the epoch of this one, from 0. lr: learning rate of
    AdamW or SGD (Muon's is the recipe's `muon_lr` / `lr` times as large). rate: the same as a share of its peak.
    loss: of this step's batch. images_per_second: training speed since the last reading, without validation and saving.
    Both are None between readings, each of which makes the host wait for the device. metrics: after steps that were
    validated, `top1` and `top1_average` (%) on the validation images, or without labels `valid_loss` and
    `valid_loss_average`.
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
    model: nn.Module, data: tuple[ImageSet, ImageSet], recipe: Recipe, *, out: Path | str | None = None,
    resume: bool = False, device: torch.device | str | None = None, average: dict[str, Tensor] | None = None,
    objective: Callable[[nn.Module, Tensor], Tensor] | None = None,
    criterion: Callable[[Tensor, Targets], Tensor] | None = None, world: World | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Train the model in place on `data` = (training set, validation set), yielding a `Step` after each step.

    out: folder for `log.jsonl` and `checkpoints/`; without it nothing is written. resume: continue from the newest good
    checkpoint there, bit for bit on a CPU. average: a dict that receives the moving average of the parameters and of
    batch normalization's statistics. objective: (model, normalized images) → loss, learned in place of the labels; the
    model keeps it as `model.objective`, and the parameters of a module are trained and saved with the model's.
    criterion: what `compiled` returned, to compile once for several calls. device: by default CUDA where there is one.
    world: what `join` returned, where several processes share the run.

    Closing the iterator saves once more, so a loop may `break`; within `contextlib.closing` a failed save raises.

    Raises ValueError at once for arguments that do not fit together; while training FloatingPointError when the loss is
    not finite, MemoryError when memory runs out and ConnectionError when another process of the run is gone.
    """
    if resume and out is None:
        raise ValueError("Resuming needs the folder of the run: pass out=….")
    world = world or (World() if device is None else World(device=torch.device(device)))
    recipe = settled(recipe, world)
    if objective is not None:
        model.objective = objective
    check(model, data, recipe, world)
    train, valid = (split.to(world.device) for split in data)
    model = model.to(world.device)
    criterion = criterion or compiled(model, recipe, world.device)
    return _steps(model, (train, valid), recipe, out, resume, {} if average is None else average, criterion, world)


def check(model: nn.Module, data: tuple[ImageSet, ImageSet], recipe: Recipe, world: World) -> None:
    """Raise ValueError for data and recipes that do not fit together."""
    train, valid = data
    images, classes, steps = len(train), len(train.class_names), recipe.length(len(train))
    parts, side = world.size * recipe.accumulate, recipe.image_size
    for wrong, sentence in (
        (tuple(train.size) != (recipe.resize or side,) * 2 or tuple(valid.size) != (side, side),
         f"The recipe takes training images of {recipe.resize or side} pixels and validation images of {side}, got "
         f"{train.size} and {valid.size}. Load them at these sizes."),
        (classes != recipe.num_classes or train.class_names != valid.class_names,
         f"The recipe has {recipe.num_classes} classes, training has {classes}, validation {len(valid.class_names)}. "
         f"They must be the same: set num_classes={classes}, or check that both splits come from one source."),
        (images < recipe.batch_size,
         f"A batch of {recipe.batch_size} exceeds the {images} training images. Lower batch_size."),
        (parts > 1 and recipe.batch_size % (2 * parts),
         f"A batch of {recipe.batch_size} does not divide into equal parts of an even number of images, for "
         f"{world.size} processes × accumulate {recipe.accumulate}. Change batch_size or accumulate."),
        (recipe.warmup_steps >= steps,
         f"A run of {steps} steps on {images} images would end within its {recipe.warmup_steps} steps of warm-up. "
         "Train longer, or lower warmup_steps."),
        (recipe.patch_drop and not hasattr(getattr(model, "patch_drop", None), "prob"),
         "The recipe drops patches, and the model has no layer for it. Build it with patch_drop_rate."),
        (classes < 2 and not hasattr(model, "objective"),
         f"Training needs at least two classes, and the images have only {train.class_names[0]!r}."),
    ):  # fmt: skip
        if wrong:
            raise ValueError(sentence)
    train.remaining(recipe.augment)  # a stream refuses what it cannot do


def _steps(model, data, recipe, out, resume, average, criterion, world) -> Iterator[Step]:
    """The loop itself, of arguments that fit together and are on the device."""
    train, valid = data
    per_epoch, steps = len(train) // recipe.batch_size, recipe.length(len(train))

    with numerics(recipe, world):
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        averaged = []  # with batch normalization's statistics, which belong to the weights
        if recipe.average:
            state = {name: t for name, t in model.state_dict().items() if t.is_floating_point()}
            average.update({name: t.clone() for name, t in state.items()})
            averaged = [(average[name], t) for name, t in state.items()]  # both change in place
        # Each process has statistics of its own images, so their mean is taken.
        statistics = [b for name, b in model.named_buffers() if name.endswith(STATISTICS) and world.size > 1]
        optimizer = optimizers(model, recipe)
        folder = RunFolder(out, recipe, (model, average, optimizer), facts_of(model, train, recipe, world), world)
        done = folder.begin(resume)
        if world.total(done) != world.size * done:
            raise ValueError("The processes of this run found different checkpoints. Give all of them one folder.")
        counted, began = done, time.perf_counter()

        for step, parts in batches(model, train, recipe, world, done, steps):
            rate = recipe.rate(step, steps)
            set_rates(optimizer, rate)
            loss = torch.zeros((), device=world.device)
            with folder.kept(step):
                for x, y in parts:
                    part = criterion(x, y) / (recipe.accumulate * world.size)
                    part.backward()
                    loss += part.detach()
                for b in statistics:
                    b /= world.size
                world.sum([loss, *(p.grad for p in parameters if p.grad is not None), *statistics])
            norm = nn.utils.clip_grad_norm_(parameters, recipe.clip or math.inf)
            for o in optimizer:
                o.step()
                o.zero_grad()
            if averaged:
                update_average(*zip(*averaged, strict=True), recipe.average, step)

            epoch, last = step // per_epoch, step + 1 == steps
            validating = last or ((step + 1) % per_epoch == 0 and (epoch + 1) % recipe.evaluate_every == 0)
            due, read = last or folder.due(), validating or (step + 1) % recipe.log_every == 0 or step + 1 in FIRST
            record = Step(step + 1, steps, epoch, rate * recipe.lr, rate)
            if read:
                value = finite(loss, norm, step)
                speed = (step + 1 - counted) * recipe.batch_size / max(time.perf_counter() - began, 1e-9)
                record = replace(record, loss=value, images_per_second=speed)
                if validating:
                    with folder.kept(step + 1, asdict(record)):
                        record = replace(record, metrics=validate(model, average, valid, recipe, world))
                folder.log(asdict(record))
            try:
                yield record  # before it is saved: what its reader makes of this step is not lost if both are killed
            except GeneratorExit:
                finite(loss, norm, step)
                folder.save(step + 1)
                raise
            if due:
                finite(loss, norm, step)
                folder.save(step + 1)
            if read or due:
                counted, began = step + 1, time.perf_counter()


@contextmanager
def numerics(recipe: Recipe, world: World):
    """Set precision and determinism for a run, and restore them and the global random state after it.

    Errors of memory and of reading images become MemoryError and ChildProcessError with a sentence.
    """
    device, parts = world.device, world.size * recipe.accumulate
    matmul, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    convolutions = torch.backends.cudnn.allow_tf32  # true by default, also where products are exact
    torch.set_float32_matmul_precision("high" if recipe.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = recipe.tf32
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    except RuntimeError as error:
        if workers_ended(error):  # PyTorch raises it at any moment, not only where images are waited for
            raise ended(error) from error
        if not out_of_memory(error):
            raise
        raise MemoryError(
            f"The memory of {device} does not hold {recipe.batch_size // parts} images of {recipe.image_size} pixels. "
            "The last checkpoint is intact; resume with each batch in more parts "
            f"(accumulate={2 * recipe.accumulate}), or train anew with a lower batch_size."
        ) from error
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.use_deterministic_algorithms(deterministic)


def finite(loss: Tensor, norm: Tensor, step: int) -> float:
    """The loss as a number. Raises FloatingPointError if it, or the norm of its gradient, is not finite."""
    if math.isfinite(loss.item()) and math.isfinite(norm.item()):
        return loss.item()
    raise FloatingPointError(
        f"The loss is {loss.item()} at step {step + 1}, its gradient has norm {norm.item()}. {DIVERGED}"
    )


def batches(
    model: nn.Module, train: ImageSet, recipe: Recipe, world: World, done: int, steps: int
) -> Iterator[tuple[int, Iterator[tuple[Tensor, Targets]]]]:
    """(step, this process's parts of its batch, augmented) from step `done` to `steps`.

    Order and augmentation do not depend on the number of parts. Dropout, stochastic depth and patch dropout do: they
    draw from the global generator, which is seeded anew before each part.
    """
    per_epoch, parts = len(train) // recipe.batch_size, world.size * recipe.accumulate
    mine = range(world.rank * recipe.accumulate, (world.rank + 1) * recipe.accumulate)
    size, remaining = recipe.batch_size // parts, train.remaining(recipe.augment)
    drops = getattr(model, "patch_drop", None)  # timm's layer
    for epoch in range(done // per_epoch, -(-steps // per_epoch)):
        # Beside the labels: an index on another device than the images would make the host wait at every batch.
        order = torch.randperm(len(train), generator=generator("cpu", recipe.seed, epoch))
        order = order.to(train.labels.device).split(size)
        within = range(max(done - epoch * per_epoch, 0), min(steps - epoch * per_epoch, per_epoch))
        rows = (order[i * parts + k] for i in within for k in mine)
        loaded = train.batches(rows, recipe.augment, (recipe.seed, epoch))

        def part(k: int, i: int, epoch: int = epoch, loaded=loaded) -> tuple[Tensor, Targets]:
            progress = (epoch * per_epoch + i) / steps
            images, labels = next(loaded)
            torch.manual_seed(seed_of(recipe.seed, epoch, i, 1 + k))
            if hasattr(drops, "prob"):
                drops.prob = recipe.patch_drop if progress < recipe.patch_drop_until else 0.0
            return augmented(
                images, labels, remaining, draws(images.device, recipe.seed, epoch, i, part=k, parts=parts),
                size=recipe.image_size, mean=recipe.mean, std=recipe.std, mix=progress < recipe.mix_until,
            )  # fmt: skip

        for i in within:
            yield epoch * per_epoch + i, (part(k, i) for k in mine)
