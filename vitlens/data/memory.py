"""How much memory there is to hold images in."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free(device: torch.device) -> int:
    """Bytes free on ``device`` and, for this process, on the machine that reads for it, whichever is less."""
    machine = _of_machine() // processes()
    return min(machine, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else machine


def processes() -> int:
    """Processes that train together on this machine, as torchrun and accelerate say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: all that there is
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * 2**30
    try:  # a container may have less than its machine
        return min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such limit, or "max"
        return available
