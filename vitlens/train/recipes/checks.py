"""What a recipe refuses: numbers that are no sense, and settings that contradict each other."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vitlens.data.augment import check_finite, check_pad

if TYPE_CHECKING:
    from vitlens.train.recipes.recipe import Recipe

CHOICES = {
    "optimizer": ("adamw", "muon", "sgd"),
    "schedule": ("cosine", "linear"),
    "loss": ("softmax", "sigmoid"),
    "head": ("linear", "mlp"),
    "precision": ("auto", "bf16", "fp32"),
    "compile": ("off", "default", "max-autotune-no-cudagraphs"),
}
AT_LEAST_ONE = "image_size patch_size width depth heads batch_size accumulate num_classes evaluate_every log_every"
FROM_ZERO = "seed train_images valid_images epochs steps warmup_steps resize clip weight_decay save_every"
POSITIVE = "lr muon_lr mlp_ratio layer_decay std"
SHARES = "warmup dropout drop_path label_smoothing mix_until patch_drop patch_drop_until average layer_decay"
BELOW_ONE = "average patch_drop drop_path dropout momentum betas"


def check(r: Recipe) -> None:
    """Raise ``ValueError`` for the first thing that is wrong with ``r``."""
    check_ranges(r)
    if r.warmup == 1:
        raise ValueError("warmup is a share of the run below 1, or the learning rate would never decay.")
    if r.seed >= 2**63:
        raise ValueError(f"seed is a number below 2⁶³; {r.seed} came.")
    if r.image_size < r.patch_size or r.image_size % r.patch_size and not (r.init or r.continues):
        raise ValueError(
            f"{r.image_size} pixels do not divide into patches of {r.patch_size}; the rest would never be seen. Choose "
            "an image_size that is a multiple of patch_size."
        )
    if r.width % r.heads:
        raise ValueError(f"A width of {r.width} does not divide among {r.heads} heads.")
    if bool(r.patch_drop) != bool(r.patch_drop_until):
        raise ValueError(
            f"patch_drop {r.patch_drop} and patch_drop_until {r.patch_drop_until} only work together; set both, or "
            "neither."
        )
    if bool(r.epochs) == bool(r.steps):
        raise ValueError(
            f"A run is as long as its epochs or its steps say; epochs {r.epochs} and steps {r.steps} came. Set one of "
            "them, and the other to 0."
        )
    if r.warmup and r.warmup_steps:
        raise ValueError(
            f"The warm-up is a share of the run or a number of steps: warmup {r.warmup} and warmup_steps "
            f"{r.warmup_steps} came. Set one of them to 0."
        )
    if not 0 <= r.end_lr <= r.lr:
        raise ValueError(f"end_lr lies between 0 and lr {r.lr}; {r.end_lr} came.")
    if r.layer_decay < 1 and r.optimizer == "muon":
        raise ValueError(f"layer_decay {r.layer_decay} goes with adamw and sgd: Muon's steps have one size.")
    if r.batch_size % r.accumulate:
        raise ValueError(f"A batch of {r.batch_size} does not divide into {r.accumulate} equal parts.")
    if r.resize and r.resize < r.image_size:
        raise ValueError(f"{r.image_size} pixels cannot be cut from images held at {r.resize}: raise resize.")
    check_pad(r.augment.pad, r.resize or r.image_size, r.resize or r.image_size)
    if r.init and (r.head != "linear" or r.patch_drop):
        raise ValueError("A run that starts from a model (init) has a linear head and drops no patches.")


def check_ranges(r: Recipe) -> None:
    """Raise ``ValueError`` for a number outside of its range, or a word that is none of the choices."""
    for field in dataclasses.fields(r):
        check_finite(field.name, _numbers(r, field.name), getattr(r, field.name))
    for names, fits, wanted in (
        (AT_LEAST_ONE, lambda n: n >= 1, "is at least 1"),
        (FROM_ZERO, lambda n: n >= 0, "is a number from 0 up"),
        (POSITIVE, lambda n: n > 0, "is above 0"),
        (SHARES, lambda n: 0 <= n <= 1, "lies between 0 and 1"),
        (BELOW_ONE, lambda n: 0 <= n < 1, "stays below 1, from 0 up, or nothing would be learned"),
    ):
        for name in names.split():
            if not all(map(fits, _numbers(r, name))):
                raise ValueError(f"{name} {wanted}; {getattr(r, name)} came.")
    for name, allowed in CHOICES.items():
        if getattr(r, name) not in allowed:
            raise ValueError(f"{name} is one of {', '.join(allowed)}; {getattr(r, name)!r} came.")


def _numbers(r: Recipe, name: str) -> list[float]:
    value = getattr(r, name)
    return [n for n in (value if isinstance(value, tuple) else (value,)) if isinstance(n, (int, float))]
