"""The training loop.

``fit`` is a generator: it yields a ``Step`` after each optimiser step and leaves printing, plotting and stopping to
whoever consumes it. The order of the samples is a function of (seed, epoch); augmentation, dropout and stochastic depth
of (seed, epoch, step). Nothing random is carried over, so a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.augment import Targets, augmented, generator, normalised, seed_of
from vitlens.datasets import ImageSet
from vitlens.recipes import Recipe
from vitlens.support import evaluating
from vitlens.train.journal import Journal
from vitlens.train.optim import optimizers, rate


@dataclass(frozen=True)
class Step:
    """What is known after an optimiser step."""

    step: int
    """Optimiser steps taken, from 1."""
    steps: int
    """Steps of the whole run."""
    epoch: int
    """Epoch that the step belongs to, from 0."""
    lr: float
    """Multiplier of the peak learning rates."""
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
) -> Iterator[Step]:
    """Train ``model`` in place on ``data`` = (training set, validation set), yielding a ``Step`` after each step.

    ``out``: folder for ``log.jsonl`` and ``checkpoints/``; without it nothing is written. ``resume`` continues from the
    newest good checkpoint there, bit for bit on a CPU. Closing the generator saves once more, so a loop over it may
    ``break`` at any step. ``average``: a dict that receives the moving average of the parameters. ``criterion``: what
    ``compiled`` returned, to compile once for several calls. ``device``: by default CUDA where there is one.

    Raises ``ValueError`` for arguments that do not fit together and ``FloatingPointError`` when the loss is no number.
    """
    check(data, recipe, out, resume)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    train, valid = (split.to(device) for split in data)
    per_epoch = len(train) // recipe.batch_size
    steps = per_epoch * recipe.epochs

    with settings(recipe, device):
        model = model.to(device).train()
        criterion = criterion or compiled(model, recipe, device)
        average = {} if average is None else average
        if recipe.average:
            average.update({name: p.detach().clone() for name, p in model.named_parameters()})
        optimizer = optimizers(model, recipe)
        journal = Journal(out, recipe, model, average, optimizer, len(train))
        done = journal.resume() if resume else journal.begin()
        clock = Clock(done)

        for step in range(done, steps):
            epoch, i = divmod(step, per_epoch)
            if i == 0 or step == done:
                order = torch.randperm(len(train), generator=generator("cpu", recipe.seed, epoch)).to(device)
            rows = order[i * recipe.batch_size : (i + 1) * recipe.batch_size]
            x, y = augmented(
                train.images[rows], train.labels[rows], recipe.augment, generator(device, recipe.seed, epoch, i),
                mean=recipe.mean, std=recipe.std, mix=step < recipe.mix_until * steps,
            )  # fmt: skip
            torch.manual_seed(seed_of(recipe.seed, epoch, i, 1))  # dropout and stochastic depth
            set_patch_drop(model, recipe.patch_drop if step < recipe.patch_drop_until * steps else 0.0)
            lr = rate((step + 1) / (steps + 1), recipe.warmup, recipe.schedule)
            for group in (group for o in optimizer for group in o.param_groups):
                group["lr"] = lr * group["peak_lr"]

            loss = criterion(x, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip or math.inf)
            for o in optimizer:
                o.step()
                o.zero_grad()
            if average:
                update_average(average, model, recipe.average, step)

            last = step + 1 == steps
            validate = last or (i + 1 == per_epoch and (epoch + 1) % recipe.evaluate_every == 0)
            due, read = last or journal.due(), validate or (step + 1) % recipe.log_every == 0
            record = Step(step + 1, steps, epoch, lr)
            if read:
                value, speed = finite(loss, norm, step), clock.speed(step + 1, recipe.batch_size)
                metrics = validation(model, average, valid, recipe) if validate else {}
                record = Step(step + 1, steps, epoch, lr, value, speed, metrics)
                journal.log(asdict(record))
            if due:
                finite(loss, norm, step)
                journal.save(step + 1)
            if read or due:
                clock = Clock(step + 1)
            try:
                yield record
            except GeneratorExit:
                finite(loss, norm, step)
                journal.save(step + 1)
                raise


def compiled(model: nn.Module, recipe: Recipe, device: torch.device | str) -> Callable[[Tensor, Targets], Tensor]:
    """Forward pass and loss as one function of a batch, compiled where the recipe says so. ``model`` stays as it is."""
    device = torch.device(device)
    bf16, smoothing = recipe.precision == "bf16", recipe.label_smoothing

    def criterion(x: Tensor, y: Targets) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = model(x)
        return soft_cross_entropy(logits.float(), y, smoothing)

    if recipe.compile == "off" or (device.type == "cpu" and not recipe.compile_cpu):
        return criterion
    # Shapes are few and known (one, or two with patch_drop): specialise instead of guessing which are dynamic.
    return torch.compile(criterion, mode=recipe.compile, dynamic=False)


def soft_cross_entropy(logits: Tensor, y: Targets, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of ``logits`` (B, classes) with λ·a + (1 − λ)·b, smoothed towards uniform by ``smoothing``."""
    log_p = F.log_softmax(logits, dim=-1)
    a, b = log_p.gather(1, y.a[:, None])[:, 0], log_p.gather(1, y.b[:, None])[:, 0]
    return -((1 - smoothing) * (y.lam * a + (1 - y.lam) * b) + smoothing * log_p.mean(dim=-1)).mean()


def set_patch_drop(model: nn.Module, share: float) -> None:
    """Set timm's patch dropout. Raises ``ValueError`` if patches are to be dropped by a model built without it."""
    layer = getattr(model, "patch_drop", None)
    if not hasattr(layer, "prob"):
        if share:
            raise ValueError(
                "The recipe drops patches and the model has no layer that does; build it with patch_drop_rate above 0."
            )
    elif layer.prob != share:
        layer.prob = share


@torch.no_grad()
def update_average(average: dict[str, Tensor], model: nn.Module, decay: float, step: int) -> None:
    """Exponential moving average; its memory grows with the run at first, so that the random start is forgotten."""
    decay = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.values()), list(model.parameters()), 1 - decay)


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageSet, recipe: Recipe, weights: dict[str, Tensor] | None = None) -> float:
    """Top-1 (%) of ``model``, or of the model with other ``weights``, on ``data``; no test-time augmentation.

    The model is evaluated as it is, uncompiled; the training flag of each module is left as found.
    """
    device = data.images.device
    with evaluating(model):
        right = torch.zeros((), dtype=torch.int64, device=device)
        for images, labels in zip(data.images.split(1000), data.labels.split(1000), strict=True):
            x = normalised(images, recipe.mean, recipe.std)
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
                logits = torch.func.functional_call(model, weights, (x,)) if weights else model(x)
            right += (logits.argmax(-1) == labels).sum()
        return 100 * right.item() / len(data)


def validation(model: nn.Module, average: dict[str, Tensor], valid: ImageSet, recipe: Recipe) -> dict[str, float]:
    metrics = {"top1": accuracy(model, valid, recipe)}
    return {**metrics, "top1_average": accuracy(model, valid, recipe, average)} if average else metrics


def finite(loss: Tensor, norm: Tensor, step: int) -> float:
    """The loss as a number. Raises ``FloatingPointError`` if it, or the norm of its gradient, is none."""
    value = loss.item()
    if not (math.isfinite(value) and math.isfinite(norm.item())):
        raise FloatingPointError(
            f"The loss is {value} at step {step + 1}, its gradient has norm {norm.item()}, and training cannot go on. "
            "The last checkpoint is intact; lower the learning rate, lengthen the warm-up or train in fp32."
        )
    return value


class Clock:
    """Images a second since it was made."""

    def __init__(self, step: int):
        self.step, self.start = step, time.perf_counter()

    def speed(self, step: int, batch_size: int) -> float:
        return (step - self.step) * batch_size / max(time.perf_counter() - self.start, 1e-9)


def check(data: tuple[ImageSet, ImageSet], recipe: Recipe, out: Path | str | None, resume: bool) -> None:
    """Refuse data and recipes that do not fit together."""
    train, valid = data
    for split in data:
        h, w = split.images.shape[2:]
        if (h, w) != (recipe.image_size, recipe.image_size):
            raise ValueError(
                f"The recipe trains at {recipe.image_size}×{recipe.image_size} pixels and the images are {h}×{w}. "
                f"Load them with size={recipe.image_size}."
            )
    if len(train.class_names) != recipe.num_classes or train.class_names != valid.class_names:
        raise ValueError(
            f"The recipe has {recipe.num_classes} classes, training has {len(train.class_names)}, validation "
            f"{len(valid.class_names)}, and they must be the same. Set num_classes={len(train.class_names)}, or "
            "check that both splits come from one source."
        )
    if len(train) < recipe.batch_size:
        raise ValueError(f"A batch of {recipe.batch_size} exceeds the {len(train)} training images. Lower batch_size.")
    if not len(valid):
        raise ValueError("The validation set is empty, so accuracy cannot be measured.")
    if resume and out is None:
        raise ValueError("Resuming needs the folder of the run: pass out=….")


@contextmanager
def settings(recipe: Recipe, device: torch.device):
    """Precision of matrix products, determinism and the state of the global generators, all put back afterwards."""
    matmul, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("high" if recipe.tf32 else "highest")
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(deterministic)
