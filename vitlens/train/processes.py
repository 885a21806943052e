"""Processes of one run, started by `torchrun` or `accelerate launch`, and the machine that they run on.

Every process holds the whole model and trains on its share of each batch. Gradients are summed before each step. Only
the first process writes.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import timm
import torch
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Process `rank` of `size`, and its device. In a world of one, the default, sums are identities.

    >>> vitlens.train.World().total(3.0)
    3.0
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def sum(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in place.

        Raises ConnectionError if a process has ended. NCCL waits instead, until the launcher ends all processes.
        """
        if self.size == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        try:
            torch.distributed.all_reduce(flat)
        except RuntimeError as error:
            raise ConnectionError(
                f"One of the {self.size} processes of this run has ended or cannot be reached. The last checkpoint is "
                "intact. Start all of them again with --resume, or with the same command if it has no such option."
            ) from error
        for t, whole in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(whole.view_as(t))

    def total(self, value: float) -> float:
        """Sum of `value` over all processes. A single process does not wait for its device."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        self.sum([shared])
        return shared.item()

    def first(self, value: float) -> float:
        """The first process's `value`, returned in every process."""
        return self.total(value if self.rank == 0 else 0.0)


def join(device: torch.device | str | None = None) -> World:
    """The world of all processes that the launcher started, or of this one alone.

    device: default CUDA if available. Raises ModuleNotFoundError if several were started and `accelerate` is missing.

    >>> vitlens.train.join("cpu").size
    1
    """
    alone = World() if device is None else World(device=torch.device(device))
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return alone
    from accelerate import PartialState

    # Fetching and decoding images in the first process can exceed PyTorch's timeout of ten minutes.
    state = PartialState(cpu=alone.device.type == "cpu", timeout=timedelta(hours=6))
    if state.num_processes != int(os.environ["WORLD_SIZE"]):  # else each would act as the only one, and write
        raise ValueError(
            f"{os.environ['WORLD_SIZE']} processes were started, but accelerate connected {state.num_processes} on "
            f"{alone.device}. Train with --device cpu, or on devices that accelerate can connect."
        )
    return World(state.process_index, state.num_processes, state.device)


def hardware(device: torch.device | str, processes: int = 1) -> str:
    """Devices of all processes together: "1 × NVIDIA H200" or "2 CPU threads, AMD EPYC".

    >>> "CPU threads" in vitlens.train.hardware("cpu")
    True
    """
    if torch.device(device).type == "cuda":
        return f"{processes} × {torch.cuda.get_device_name(device)}"
    processor = platform.processor()
    with suppress(OSError, StopIteration):  # Python's `platform` does not read it on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        processor = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return ", ".join(filter(None, (f"{processes * torch.get_num_threads()} CPU threads", processor)))


def versions() -> dict[str, str]:
    """Versions of Python, PyTorch and timm, by name.

    >>> list(vitlens.train.versions())
    ['python', 'torch', 'timm']
    """
    return {"python": sys.version.split()[0], "torch": str(torch.__version__), "timm": timm.__version__}
