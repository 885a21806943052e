"""Variables that `torchrun` and `accelerate launch` set for each of several processes, read without PyTorch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SECONDS = 10
"""Time to reach the launcher."""
TERMINATED = "ended by SIGTERM, which torchrun sends to all processes after one has ended, and a scheduler at the end."


def process_count(variable: str = "WORLD_SIZE") -> int:
    """Number of processes in a variable of a launcher, or 1 without it.

    >>> vitlens.launcher.process_count()
    1
    """
    text = os.environ.get(variable)
    if text is None:
        return 1
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(
            f"The environment variable {variable} must be a number of processes, got {text!r}. Unset it to run alone."
        )
    return int(text)


def is_first() -> bool:
    """True for the process that writes and prints: the first of several, or the only one.

    >>> vitlens.launcher.is_first()
    True
    """
    return not _is_one_of_several() or os.environ.get("RANK", "0") == "0"


@contextmanager
def terminable() -> Iterator[list[int]]:
    """Context in which SIGTERM ends one of several processes as Ctrl-C does. Yields a list that receives the signal.

    A single process ends at once, as without this context.

    >>> with vitlens.launcher.terminable() as signals:
    ...     signals
    []
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread() or not _is_one_of_several():
        yield signals
        return

    def interrupt(number: int, _frame: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_one_of_several() -> bool:
    with suppress(ValueError):  # reported later
        return process_count() > 1
    return False


def reports_error() -> bool:
    """True if this process prints its error, False if another process of the same start has printed one.

    torchrun keeps a counter for all processes, also on other machines and before they are connected. Without it, every
    process prints its error.

    >>> vitlens.launcher.reports_error()
    True
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    with suppress(KeyError, ValueError, RuntimeError, OSError):
        return not _is_one_of_several() or _count_error() == 1
    return True


def _count_error() -> int:
    """Number of errors so far in all processes of this start, with this one."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=SECONDS),
    )
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store.add(f"vitlens errors of start {start}", 1)
