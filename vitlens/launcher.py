"""Variables that `torchrun` and `accelerate launch` set for each of several processes, read without PyTorch."""

from __future__ import annotations

import os
from contextlib import suppress

SECONDS = 10
"""Time to reach the launcher."""


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
    with suppress(ValueError):
        return process_count() == 1 or os.environ.get("RANK", "0") == "0"
    return True


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
        if process_count() > 1:
            return _count_error() == 1
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
