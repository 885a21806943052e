"""The training criterion: softmax cross-entropy or one sigmoid for each class, both for soft labels; or an objective
without labels, whose module the model has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitlens.data.augment import Targets
from vitlens.train.precision import trains_in_bf16
from vitlens.train.settings import Recipe


def soft_cross_entropy(logits: Tensor, y: Targets, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of `logits` (B, classes) with λ·a + (1 − λ)·b, smoothed toward uniform by `smoothing`."""
    log_p = F.log_softmax(logits, dim=-1)
    a, b = log_p.gather(1, y.a[:, None])[:, 0], log_p.gather(1, y.b[:, None])[:, 0]
    return -((1 - smoothing) * (y.lam * a + (1 - y.lam) * b) + smoothing * log_p.mean(dim=-1)).mean()


def sigmoid_cross_entropy(logits: Tensor, y: Targets, smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy of every class, summed over classes and averaged over the batch; the same soft labels."""
    rows = torch.zeros_like(logits).scatter_add_(1, y.a[:, None], y.lam[:, None])
    rows = rows.scatter_add_(1, y.b[:, None], 1 - y.lam[:, None])
    rows = (1 - smoothing) * rows + smoothing / logits.shape[1]
    return F.binary_cross_entropy_with_logits(logits, rows, reduction="none").sum(dim=1).mean()


LOSSES = {"softmax": soft_cross_entropy, "sigmoid": sigmoid_cross_entropy}


COMPILED = ("cuda", "xpu")
"""Devices for which `torch.compile` is worth its time; a CPU only when it is asked for."""

UNFUSED = 256
"""Patches up to which attention, kept for the backward pass, takes less memory than what the MLP keeps."""


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Attention as two matrix products and a softmax, in the precision of its inputs.

    On a CPU, the backward pass of PyTorch's fused attention takes four times as long in bfloat16 as in float32, at the
    lengths that ViTs are trained with there; these products take less than either (`experiments/training.py`).
    """
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # in spite of its name, the CPU's too
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def compiled(model: nn.Module, recipe: Recipe, device: torch.device | str) -> Callable[[Tensor, Targets], Tensor]:
    """Forward pass and loss as one function of a batch, compiled if the recipe says so. The model stays as it is.

    Where compiling fails (no compiler, no Triton, an old GPU), a RuntimeWarning says why, and it runs uncompiled.
    """
    device = torch.device(device)
    bf16, loss, smoothing = trains_in_bf16(recipe, device), LOSSES[recipe.loss], recipe.label_smoothing
    few = (recipe.image_size // recipe.patch_size) ** 2 <= UNFUSED
    attention = unfused_attention if bf16 and few and device.type == "cpu" else nullcontext

    def criterion(x: Tensor, y: Targets) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            if hasattr(model, "objective"):
                return model.objective(model, x)
            logits = model(x)
        return loss(logits.float(), y, smoothing)

    run = criterion
    if recipe.compile != "off" and (recipe.compile_cpu if device.type == "cpu" else device.type in COMPILED):
        # Shapes are few and known (one, or two with patch_drop): specialise instead of guessing which are dynamic.
        run = _or(torch.compile(criterion, mode=recipe.compile, dynamic=False), criterion)

    def within(x: Tensor, y: Targets) -> Tensor:
        with attention():
            return run(x, y)

    return within


def _or(fast: Callable, plain: Callable) -> Callable:
    """A function that calls `fast`, which compiles itself at the first call, and `plain` once that has failed."""

    def run(x: Tensor, y: Targets) -> Tensor:
        nonlocal fast
        try:
            return fast(x, y)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).strip().split("\n\n")[0].split())[:300]  # without advice on verbosity
            message = f"Training goes on uncompiled, which is slower, because compiling failed on {x.device}: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            fast = plain
            return plain(x, y)

    return run
