"""Training in fp16: a constant loss scale, and steps that are skipped if their gradient overflows."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from vitlens.train.run_folder import DIVERGED
from vitlens.train.settings import Recipe

SCALE = 1024.0
"""Factor of the loss in fp16, in which gradients below 6e-8 become 0. A power of two changes no digit.

`torch.amp.GradScaler` adapts its factor: a state of the run, for which the host waits at every step.
"""
SKIPPED_SHARE = 0.05
"""Largest share of skipped steps, over at least `COUNTED` steps."""
COUNTED = 20
IN_A_ROW = 10
"""Number of skipped steps in a row that ends a run."""


class Overflow:
    """Protection of a run in fp16 against gradients that are not finite. Without effect in other precisions.

    A skipped step leaves weights, moments, step counts, the moving average and batch normalization's statistics
    unchanged. It is decided and counted on the device, and the host reads the counts with the loss. Fused AdamW and SGD
    and `Muon` skip a step if their attribute `found_inf` is 1, as set by PyTorch's `GradScaler`.
    """

    def __init__(
        self, recipe: Recipe, optimizers: list[Optimizer], statistics: list[Tensor], done: int
    ):
        self.enabled = recipe.precision == "fp16"
        self.optimizers = optimizers
        self.statistics = statistics
        self.before: list[Tensor] = []
        self.first = done
        self.taken: Tensor | None = None  # 1, or 0 after a skipped step
        self.counts: Tensor | None = None  # skipped steps: in all, in a row now, in a row at most

    def scale(self, loss: Tensor) -> Tensor:
        """The loss for the backward pass."""
        return loss * SCALE if self.enabled else loss

    def remember(self) -> None:
        """Copy the statistics that the forward pass will change."""
        if self.enabled:
            self.before = [t.clone() for t in self.statistics]

    def unscale(self, parameters: list[Tensor]) -> None:
        """Divide the gradients by the scale, in place."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.enabled and gradients:
            torch._foreach_mul_(gradients, 1 / SCALE)

    def decide(self, norm: Tensor) -> None:
        """Skip the optimizers' next step if the norm of the gradient is not finite."""
        if not self.enabled:
            return
        taken = norm.isfinite()
        skipped = (~taken).float()
        for optimizer in self.optimizers:
            optimizer.found_inf = skipped
        for now, before in zip(self.statistics, self.before, strict=True):
            now.copy_(torch.where(taken, now, before))
        self.taken = taken.float()
        if self.counts is None:
            self.counts = norm.new_zeros(3)
        total, in_a_row, longest = self.counts
        in_a_row = (in_a_row + 1) * skipped
        self.counts = torch.stack([total + skipped, in_a_row, longest.maximum(in_a_row)])

    def read(self, loss: Tensor, norm: Tensor, step: int) -> float | None:
        """The loss as a float, None if the step was skipped because the loss itself is not finite.

        Raises FloatingPointError for a loss or a gradient that is not finite. In fp16 only if more than 5 % of the
        steps were skipped, or ten in a row.
        """
        if not self.enabled:
            return require_finite(loss, norm, step)
        self._check_counts(step)
        if not math.isfinite(norm.item()):
            value = loss.item()
            return value if math.isfinite(value) else None
        return require_finite(loss, norm, step)

    def _check_counts(self, step: int) -> None:
        """Raise FloatingPointError if too many steps were skipped. Start to count again after `COUNTED` steps."""
        steps = step + 1 - self.first
        skips, in_a_row, longest = self.counts.tolist()
        counted = steps >= COUNTED
        if longest >= IN_A_ROW or (counted and skips > SKIPPED_SHARE * steps):
            raise FloatingPointError(
                f"{skips:.0f} of the {steps} steps up to step {step + 1} were skipped, {longest:.0f} of them in a row, "
                f"because their gradients overflow in fp16. {DIVERGED}"
            )
        if counted:
            self.first = step + 1
            self.counts = self.counts.new_tensor([0.0, in_a_row, in_a_row])


def require_finite(loss: Tensor, norm: Tensor, step: int) -> float:
    """The loss as a float. Raises FloatingPointError if the loss or the norm of its gradient is not finite."""
    if math.isfinite(loss.item()) and math.isfinite(norm.item()):
        return loss.item()
    raise FloatingPointError(
        f"The loss is {loss.item()} at step {step + 1}, its gradient has norm {norm.item()}. {DIVERGED}"
    )
