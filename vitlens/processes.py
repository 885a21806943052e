"""Processes that one command shares its images among, started by `torchrun` or `accelerate launch`.

Every process holds the whole model and computes its share. Only the first process writes and prints.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from vitlens import waiting
from vitlens.launcher import process_count

Result = TypeVar("Result")

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
        with report_lost_process(self.size):
            torch.distributed.all_reduce(flat)
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

    def gather(self, value: Result) -> list[Result]:
        """`value` of every process, in the order of the processes, returned in every process.

        Values are pickled, so tensors must be on the CPU. Raises ConnectionError as `sum`.

        >>> vitlens.train.World().gather("cat")
        ['cat']
        """
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        with report_lost_process(self.size, "Start all of them again."):
            torch.distributed.all_gather_object(values, value)
        return values

    def share(self, work: Iterable[Result]) -> Iterator[Result]:
        """Own part of `work`: of the items, those with the numbers rank, rank + size, rank + 2·size …

        >>> [*vitlens.train.World(1, 3).share("abcdef")]
        ['b', 'e']
        """
        return islice(work, self.rank, None, self.size)

    def in_order(self, results: Iterable[Result]) -> Iterator[Result]:
        """Yield the results of all processes in the order of the items of `share`, in every process.

        results: those of this process, one for each item of its share. They travel one from each process at a time.

        >>> [*vitlens.train.World().in_order(["a", "b"])]
        ['a', 'b']
        """
        if self.size == 1:
            yield from results
            return
        results = iter(results)
        several: list[tuple[Result, ...]] = []
        while all(several):
            several = self.gather(tuple(islice(results, 1)))
            for one in several:
                yield from one

    def require_same(self, value: object, what: str) -> None:
        """Raise ValueError unless `value` is the same in all processes. what: its name, such as "images".

        >>> vitlens.train.World().require_same(["cat.jpg"], "images")
        """
        if self.size == 1:
            return
        digest = hashlib.sha256(repr(value).encode(errors="surrogatepass")).hexdigest()
        if len(set(self.gather(digest))) > 1:
            raise ValueError(
                f"The {self.size} processes have different {what}. Give all of them the same arguments, data and files."
            )

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

    device: default CUDA if available, of which each process on a machine takes another one. Raises ModuleNotFoundError
    if several were started and `accelerate` is missing, TimeoutError if one is missing for five minutes, and ValueError
    if they cannot be connected, or for the number of a device that is not this process's.

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

    present = [name for name in RENDEZVOUS if name in os.environ]
    variables = ", ".join(f"{name}={os.environ[name]}" for name in present)
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
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Several processes need {error.name}. Run `pip install {error.name}`. {alternative}"
        ) from error
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
    if alone.device.index not in (None, state.device.index):
        raise ValueError(
            f"Each of {processes} processes takes a device of its own, here {state.device}, got {alone.device}. Give "
            f"--device {alone.device.type} without a number."
        )
    return World(state.process_index, state.num_processes, state.device)


RESUME = (
    "The last checkpoint is intact. Start all of them again with --resume, or with the same command if it has no such "
    "option."
)
"""Advice after the loss of a process that trains."""


@contextmanager
def report_lost_process(processes: int, advice: str = RESUME) -> Iterator[None]:
    """Raise ConnectionError in place of the error of a lost connection. Other errors pass."""
    try:
        yield
    except RuntimeError as error:
        # Gloo's errors have no class of their own, but begin with the path of its source file.
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        raise ConnectionError(
            f"One of the {processes} processes of this run has ended or cannot be reached. {advice}"
        ) from error
