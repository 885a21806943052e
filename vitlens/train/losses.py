"""The training criterion: softmax cross-entropy or one sigmoid for each class, both for soft labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.augment import Targets
from vitlens.recipes import Recipe


def soft_cross_entropy(logits: Tensor, y: Targets, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of ``logits`` (B, classes) with λ·a + (1 − λ)·b, smoothed towards uniform by ``smoothing``."""
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


def compiled(model: nn.Module, recipe: Recipe, device: torch.device | str) -> Callable[[Tensor, Targets], Tensor]:
    """Forward pass and loss as one function of a batch, compiled where the recipe says so. ``model`` stays as it is."""
    device = torch.device(device)
    bf16, loss, smoothing = recipe.precision == "bf16", LOSSES[recipe.loss], recipe.label_smoothing

    def criterion(x: Tensor, y: Targets) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = model(x)
        return loss(logits.float(), y, smoothing)

    if recipe.compile == "off" or (device.type == "cpu" and not recipe.compile_cpu):
        return criterion
    # Shapes are few and known (one, or two with patch_drop): specialise instead of guessing which are dynamic.
    return torch.compile(criterion, mode=recipe.compile, dynamic=False)
