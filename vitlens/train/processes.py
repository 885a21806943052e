"""Processes of one run, which `torchrun` or `accelerate launch` started, and the machine that they run on.

Every process holds the whole model and the same weights, and trains on its share of each batch; gradients are summed
before each step. Only the first process writes.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import timm
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
                f"One of the {self.size} processes of this run has ended or cannot be reached. The last checkpoint is "
                "intact; start all of them again with --resume, or by the same command where it has no such option."
            ) from error
        for t, whole in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(whole.view_as(t))

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
        from accelerate.utils import gather_object

        return gather_object(list(values))

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


def hardware(device: torch.device | str, processes: int = 1) -> str:
    """The devices of all processes together: "1 × NVIDIA H200" or "2 CPU threads, AMD EPYC"."""
    if torch.device(device).type == "cuda":
        return f"{processes} × {torch.cuda.get_device_name(device)}"
    processor = platform.processor()
    with suppress(OSError, StopIteration):  # Python's `platform` does not read it on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        processor = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return ", ".join(filter(None, (f"{processes * torch.get_num_threads()} CPU threads", processor)))


def versions() -> dict[str, str]:
    """Versions of Python, PyTorch and timm, by name."""
    return {"python": sys.version.split()[0], "torch": str(torch.__version__), "timm": timm.__version__}
