"""Gradients of the processes of one run, and the machine that they run on.

Every process of `vitlens.processes` trains on its share of each batch. `DistributedDataParallel` averages the gradients
in the backward pass.
"""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitlens.data.augment import Targets
from vitlens.processes import World, report_lost_process


class Loss(nn.Module):
    """A model and its criterion as one module, whose forward returns the loss of a batch.

    `DistributedDataParallel` averages the gradients of the parameters in the module that it wraps.
    """

    def __init__(self, model: nn.Module, criterion: Callable[[Tensor, Targets], Tensor]):
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, x: Tensor, y: Targets) -> Tensor:
        return self.criterion(x, y)


def distribute(
    criterion: Callable[[Tensor, Targets], Tensor], model: nn.Module, world: World
) -> Callable[[Tensor, Targets], Tensor]:
    """The criterion, whose backward pass then averages gradients over all processes. Itself in a world of one.

    All processes start with the weights of the first one.
    """
    if world.size == 1:
        return criterion
    with report_lost_process(world.size), warnings.catch_warnings():
        # Its successor `forward_sync_buffers` is missing in PyTorch 2.6.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(
            Loss(model, criterion),
            find_unused_parameters=True,  # such as a head that the objective does not use
            broadcast_buffers=False,  # the loop averages batch normalization's statistics
            gradient_as_bucket_view=True,  # no second copy of the gradients
        )


@contextmanager
def exchange(criterion: Callable, now: bool) -> Iterator[None]:
    """Context for the forward and backward pass of a part of a batch: exchange gradients if `now`, else add them up.

    Raises ConnectionError if another process has ended. Without effect on a criterion that is not distributed.
    """
    if not isinstance(criterion, DistributedDataParallel):
        yield
        return
    exchanging = nullcontext() if now else criterion.no_sync()
    with report_lost_process(torch.distributed.get_world_size()), exchanging:
        yield


def hardware(device: torch.device | str, processes: int = 1) -> str:
    """Devices of all processes together: "1 × NVIDIA H200" or "2 CPU threads, AMD EPYC".

    >>> "CPU threads" in vitlens.train.hardware("cpu")
    True
    """
    if torch.device(device).type == "cuda":
        return f"{processes} × {torch.cuda.get_device_name(device)}"
    threads = f"{processes * torch.get_num_threads()} CPU threads"
    processor = processor_name()
    return f"{threads}, {processor}" if processor else threads


def processor_name() -> str:
    """Name of the processor, or "" if it is unknown."""
    with suppress(OSError):  # Python's `platform` does not read this file on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def versions() -> dict[str, str]:
    """Versions of Python, PyTorch and timm, by name.

    >>> list(vitlens.train.versions())
    ['python', 'torch', 'timm']
    """
    return {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "timm": timm.__version__,
    }
