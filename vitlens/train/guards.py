"""What stands around the loop: arguments that fit together, settings put back, trouble told in a sentence."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from vitlens.data import ImageSet
from vitlens.data.stream import WORKERS_ENDED, workers_ended
from vitlens.recorder.running import out_of_memory
from vitlens.train.processes import World
from vitlens.train.recipes.recipe import Recipe


def check(data: tuple[ImageSet, ImageSet], recipe: Recipe, out: Path | str | None, resume: bool, world: World) -> None:
    """Refuse data and recipes that do not fit together."""
    train, valid = data
    for split, side in ((train, recipe.resize or recipe.image_size), (valid, recipe.image_size)):
        h, w = split.size
        if (h, w) != (side, side):
            raise ValueError(
                f"The recipe trains at {side}×{side} pixels and the images are {h}×{w}. Load them with size={side}."
            )
    if len(train.class_names) != recipe.num_classes or train.class_names != valid.class_names:
        raise ValueError(
            f"The recipe has {recipe.num_classes} classes, training has {len(train.class_names)}, validation "
            f"{len(valid.class_names)}, and they must be the same. Set num_classes={len(train.class_names)}, or "
            "check that both splits come from one source."
        )
    if len(train) < recipe.batch_size:
        raise ValueError(f"A batch of {recipe.batch_size} exceeds the {len(train)} training images. Lower batch_size.")
    if recipe.batch_size % (2 * world.size * recipe.accumulate) and world.size * recipe.accumulate > 1:
        raise ValueError(
            f"A batch of {recipe.batch_size} does not divide into equal parts of an even number of images, for "
            f"{world.size} processes × accumulate {recipe.accumulate}. Change batch_size or accumulate."
        )
    if recipe.warmup_steps >= recipe.length(len(train)):
        raise ValueError(
            f"A run of {recipe.length(len(train))} steps on {len(train)} images would end within its "
            f"{recipe.warmup_steps} steps of warm-up. Train longer, or lower warmup_steps."
        )
    if len(train.class_names) < 2:
        raise ValueError(f"To tell classes apart takes at least two, and there is only {train.class_names[0]!r}.")
    if not len(valid):
        raise ValueError("The validation set is empty, so accuracy cannot be measured.")
    train.remaining(recipe.augment)  # a stream refuses what it cannot do
    if resume and out is None:
        raise ValueError("Resuming needs the folder of the run: pass out=….")


@contextmanager
def settings(recipe: Recipe, world: World):
    """Precision of products and convolutions, determinism and the state of the global generators, put back when the
    run ends."""
    device, parts = world.device, world.size * recipe.accumulate
    matmul, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    convolutions = torch.backends.cudnn.allow_tf32  # true unless told otherwise, also where products are exact
    torch.set_float32_matmul_precision("high" if recipe.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = recipe.tf32
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    except RuntimeError as error:
        if workers_ended(error):  # PyTorch says so at any moment, not only where images are waited for
            raise ChildProcessError(WORKERS_ENDED.format(error)) from error
        if not out_of_memory(error):
            raise
        raise MemoryError(
            f"The memory of {device} does not hold {recipe.batch_size // parts} images of "
            f"{recipe.image_size}×{recipe.image_size} pixels at a time. Cut a batch of {recipe.batch_size} into more "
            f"parts (accumulate={2 * recipe.accumulate}), with which the run can be resumed too, or train anew with a "
            "lower batch_size. The last checkpoint is intact."
        ) from error
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.use_deterministic_algorithms(deterministic)


def finite(loss: Tensor, norm: Tensor, step: int) -> float:
    """The loss as a number. Raises ``FloatingPointError`` if it, or the norm of its gradient, is none."""
    value = loss.item()
    if not (math.isfinite(value) and math.isfinite(norm.item())):
        raise FloatingPointError(
            f"The loss is {value} at step {step + 1}, its gradient has norm {norm.item()}, and training cannot go on. "
            "The last checkpoint is intact; train anew, into another folder, with a lower learning rate, a longer "
            "warm-up or in fp32."
        )
    return value
