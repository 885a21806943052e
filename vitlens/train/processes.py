"""Several processes, one run: those that `torchrun` or `accelerate launch` started, each with a share of the batch.

Every process holds the whole model and the same weights; gradients are summed before each step. Only the first writes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Process `rank` of `size`, and its device. A world of one, the default, does nothing."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def sum(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in place.

        Raises ConnectionError if one of them is gone; NCCL waits for it, until the launcher ends the others.
        """
        if self.size == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        try:
            torch.distributed.all_reduce(flat)
        except RuntimeError as error:
            raise ConnectionError(
                f"One of the {self.size} processes of this run has ended or cannot be reached, and the others cannot "
                "go on without it. The last checkpoint is intact; start all of them again with --resume, or by the "
                "same command where it has no such option."
            ) from error
        for t, whole in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(whole.view_as(t))

    def agree(self, done: int) -> None:
        """Raise ValueError unless all processes found the same number of steps done."""
        if self.total(done) != self.size * done:
            raise ValueError("The processes of this run found different checkpoints. Give all of them one folder.")

    def total(self, value: float) -> float:
        """The sum of `value` over all processes; a single process does not wait for its device."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        self.sum([shared])
        return shared.item()

    def joined(self, values: Sequence) -> list:
        """The values of all processes in the order of their ranks, known to each of them."""
        if self.size == 1:
            return list(values)
        parts: list = [None] * self.size
        torch.distributed.all_gather_object(parts, list(values))
        return [value for part in parts for value in part]

    def first(self, value: float) -> float:
        """The first process's `value`, known to all of them."""
        return self.total(value if self.rank == 0 else 0.0)


def join(device: torch.device | str | None = None) -> World:
    """The processes that a launcher started together with this one, or this one alone.

    device: by default CUDA if there is one. Raises ValueError if several were started and `accelerate` is missing.
    """
    alone = World() if device is None else World(device=torch.device(device))
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return alone
    try:
        from accelerate import PartialState
    except ImportError:
        raise ValueError("Training with several processes needs accelerate: pip install accelerate.") from None
    # While the first process fetches or decodes images, the others wait for it: longer than PyTorch's ten minutes.
    state = PartialState(cpu=alone.device.type == "cpu", timeout=timedelta(hours=6))
    if state.num_processes != int(os.environ["WORLD_SIZE"]):  # each would take itself for the only one, and write
        raise ValueError(
            f"{os.environ['WORLD_SIZE']} processes were started, but this one sees {state.num_processes} on "
            f"{alone.device}. Train with --device cpu, or on devices that accelerate can connect."
        )
    return World(state.process_index, state.num_processes, state.device)
