"""Processes of one run, started by `torchrun` or `accelerate launch`, and the machine that they run on.

Every process holds the whole model and trains on its share of each batch. `DistributedDataParallel` averages the
gradients in the backward pass. Only the first process writes.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitlens import waiting
from vitlens.data.augment import Targets
from vitlens.data.sources import process_count

JOINING = 300.0
"""Seconds in which all processes must have been started."""
RENDEZVOUS = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which processes find one another."""


@dataclass(frozen=True)
class World:
    """Process `rank` of `size`, and its device. In a world of one, the default, sums are identities.

    >>> vitlens.train.World().total(3.0)
    3.0
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(
        default_factory=lambda: torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )

    def sum(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in place. Small tensors travel together.

        Raises ConnectionError if a process has ended. NCCL waits instead, until the launcher ends all processes.
        """
        if self.size == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        try:
            torch.distributed.all_reduce(flat)
        except RuntimeError as error:
            raise lost_process(self.size) from error
        for t, whole in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(whole.view_as(t))

    def average(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its mean over all processes, in place."""
        if self.size == 1:
            return
        for t in tensors:
            t /= self.size
        self.sum(tensors)

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

    def wait_for_first(self, value: float, work: str) -> float:
        """As `first`, when the first process may take hours. The others print that it does `work`, and obey Ctrl-C.

        >>> vitlens.train.World().wait_for_first(1.0, "opens the images")
        1.0
        """
        if self.size == 1:
            return value
        return waiting.call(
            partial(self.first, value),
            f"the first of {self.size} processes, which {work}"
            if self.rank
            else "the other processes",
            "Ctrl-C ends this process.",
            limit=float("inf"),
        )


def join(device: torch.device | str | None = None) -> World:
    """The world of all processes that the launcher started, or of this one alone.

    device: default CUDA if available. Raises ModuleNotFoundError if several were started and `accelerate` is missing,
    TimeoutError if one is missing for five minutes, and ValueError if they cannot be connected.

    >>> vitlens.train.join("cpu").size
    1
    """
    alone = World() if device is None else World(device=torch.device(device))
    processes = process_count("WORLD_SIZE")
    if processes == 1:
        return alone
    is_cpu = alone.device.type == "cpu"

    def connect() -> tuple[object, int]:
        from accelerate import PartialState  # takes seconds

        # Fetching and decoding images in the first process can exceed PyTorch's timeout of ten minutes.
        state = PartialState(cpu=is_cpu, timeout=timedelta(hours=6))
        return state, torch.get_num_threads()

    variables = ", ".join(f"{name}={os.environ[name]}" for name in RENDEZVOUS if name in os.environ)
    alternative = "Unset WORLD_SIZE to run alone."
    rank = os.environ.get("RANK", "0")
    if not rank.isdecimal() or int(rank) >= processes:
        raise ValueError(
            f"RANK must be a number from 0 to {processes - 1} for {processes} processes (WORLD_SIZE), got {rank!r}. "
            f"{alternative}"
        )
    try:
        # In a thread, because PyTorch ignores Ctrl-C while it waits.
        state, threads = waiting.call(
            connect,
            f"{processes - 1} of {processes} processes ({variables})",
            f"Start them too. {alternative}",
            after=None if "TORCHELASTIC_RUN_ID" in os.environ else 1.0,  # torchrun starts all
            limit=JOINING,
        )
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        if isinstance(error, TimeoutError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"The {processes} processes of {variables} could not be connected ({reason}). Start them by torchrun or "
            f"accelerate launch. {alternative}"
        ) from error
    torch.set_num_threads(threads)  # PyTorch keeps both for each thread
    if state.device.type == "cuda":
        torch.cuda.set_device(state.device)
    # Else each would act as the only one, and write.
    if state.num_processes != processes:
        raise ValueError(
            f"{processes} processes were started, but accelerate connected {state.num_processes} on "
            f"{alone.device}. Train with --device cpu, or on devices that accelerate can connect."
        )
    return World(state.process_index, state.num_processes, state.device)


def lost_process(processes: int) -> ConnectionError:
    """The error of a process that can no longer reach another one."""
    return ConnectionError(
        f"One of the {processes} processes of this run has ended or cannot be reached. The last checkpoint is "
        "intact. Start all of them again with --resume, or with the same command if it has no such option."
    )


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


@contextmanager
def report_lost_process(processes: int) -> Iterator[None]:
    """Raise ConnectionError in place of the error of a lost connection. Other errors pass."""
    try:
        yield
    except RuntimeError as error:
        # Gloo's errors have no class of their own, but begin with the path of its source file.
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        raise lost_process(processes) from error


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
