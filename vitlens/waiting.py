"""Waiting for other processes, locks, workers, downloads and pipes.

Every wait of the package passes here. After `ANNOUNCE_AFTER` seconds it prints what it waits for and how to go on
without. Ctrl-C ends it. It ends by itself after `LIMIT` seconds in which nothing moved.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
Text = str | Callable[[], str]

ANNOUNCE_AFTER = 4.0
"""Seconds until a wait is announced."""
LIMIT = 300.0
"""Seconds without movement after which a wait ends."""
PAUSE = 0.02
"""Seconds between two looks at what is awaited."""
SILENCE = 60.0
"""Seconds without a byte after which a download ends that has no limit of its own."""
clock = time.monotonic
sleep = time.sleep


def say(text: str) -> None:
    """Print a sentence to stderr, above any progress bar."""
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr)
    sys.stderr.flush()


class Wait:
    """One wait, whose owner calls `check` again and again.

    what: what it waits for, as in "Waiting for …", or a function that returns it. instead: sentence about how to go on
    without. after, limit: seconds, by default `ANNOUNCE_AFTER` and `LIMIT`. An infinite limit never ends the wait.
    """

    def __init__(
        self, what: Text, instead: str, *, after: float | None = None, limit: float | None = None
    ):
        self.what = what
        self.instead = instead
        self.after = ANNOUNCE_AFTER if after is None else after
        self.limit = LIMIT if limit is None else limit
        self.announced = False
        self.began = self.moved_at = clock()
        self.state: object = None

    def check(self, state: object = None) -> None:
        """Announce the wait if it is long. Raises TimeoutError if `state` has been the same for `limit` seconds."""
        now = clock()
        if state != self.state:
            self.state = state
            self.moved_at = now
        if not self.announced and now - self.began >= self.after:
            self.announced = True
            say(f"Waiting for {self._name()}. {self.instead}")
        if now - self.moved_at >= self.limit:
            minutes = f"{self.limit / 60:g} minutes" if self.limit >= 60 else f"{self.limit:g} s"
            raise TimeoutError(f"Waited {minutes} for {self._name()}. {self.instead}")

    def _name(self) -> str:
        return self.what() if callable(self.what) else self.what


def until(
    ready: Callable[[], Result],
    what: Text,
    instead: str,
    *,
    after: float | None = None,
    limit: float | None = None,
    state: Callable[[], object] | None = None,
) -> Result:
    """Call `ready` until it returns a true value, and return that.

    what, instead, after, limit: as for `Wait`. state: a function whose changing values mean that something moves.
    """
    wait = Wait(what, instead, after=after, limit=limit)
    while True:
        result = ready()
        if result:
            return result
        wait.check(state() if state else None)
        sleep(PAUSE)


def call(
    function: Callable[[], Result],
    what: Text,
    instead: str,
    *,
    after: float | None = None,
    limit: float | None = None,
    state: Callable[[], object] | None = None,
) -> Result:
    """Result of a blocking function, which runs in another thread, so that Ctrl-C and the limit end the wait.

    The thread is a daemon. It does not keep the process alive.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    finished = threading.Event()

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)
        finally:
            finished.set()

    threading.Thread(target=work, daemon=True).start()
    wait = Wait(what, instead, after=after, limit=limit)
    while not finished.wait(PAUSE):
        wait.check(state() if state else None)
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def announced(what: Text, instead: str, *, after: float | None = None) -> Iterator[None]:
    """Announce a block that takes long. Nothing ends it but Ctrl-C.

    what, instead, after: as for `Wait`.
    """
    wait = Wait(what, instead, after=after, limit=float("inf"))
    timer = threading.Timer(wait.after, wait.check)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Locks of other libraries, and downloads


@contextmanager
def fetching(what: str, instead: str) -> Iterator[None]:
    """Announce a block that may download or wait for the cache of another library.

    what, instead: as for `Wait`. A download ends after `SILENCE` without a byte, however long it takes. Raises
    TimeoutError if another process holds a lock of the cache and does nothing for `LIMIT` seconds.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(before or SILENCE)  # urllib has no limit of its own
    try:
        with _watched_locks(), announced(what, instead):
            yield
    finally:
        socket.setdefaulttimeout(before)


@contextmanager
def _watched_locks() -> Iterator[None]:
    """Announce and limit the waits of the package `filelock`, which reports each look at a lock to its logger."""
    logger = logging.getLogger("filelock")
    before = logger.level, logger.propagate
    handler = _LockWatch()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _LockWatch(logging.Handler):
    """Handler of filelock's messages about locks that are taken. Its errors end the wait."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.waits: dict[str, Wait] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting" not in record.msg or len(record.args or ()) < 2:
            return
        file = str(record.args[1])
        if file not in self.waits:
            self.waits[file] = Wait(
                lambda: f"{lock_owner(file) or 'another process'}, which holds the lock {file}",
                "To go on without it, end it, or remove the lock if no process uses it.",
            )
        self.waits[file].check(movement(Path(file)))


def lock_owner(file: str | os.PathLike) -> str:
    """Process on this machine that has locked a file, such as "process 123 (python train.py)", or ""."""
    process = _owner_number(file)
    if process is None:
        return ""
    with suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        command = b" ".join(words).decode(errors="replace").strip()[:200]
        return f"process {process} ({command})"
    return f"process {process}"


def _owner_number(file: str | os.PathLike) -> int | None:
    """Number of the process on this machine that has locked a file, from /proc/locks."""
    with suppress(OSError, ValueError, IndexError):
        inode = str(os.stat(file).st_ino)
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            words = line.split()
            if "->" not in words and words[5].split(":")[2] == inode and int(words[4]) > 0:
                return int(words[4])
    return None


def work_of_owner(file: Path) -> object:
    """Time and bytes of the process on this machine that has locked a file, or None."""
    process = _owner_number(file)
    if process is None:
        return None
    with suppress(OSError):
        times = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[11:15]
        with suppress(OSError):  # of another user
            return process, times, Path(f"/proc/{process}/io").read_bytes()
        return process, times
    return None


def movement(file: Path) -> object:
    """Signs of work by the owner of a lock: its time and bytes, or the files beside the lock."""
    work = work_of_owner(file)
    if work is not None:
        return work
    states = []
    with suppress(OSError):
        for path in sorted(file.parent.iterdir()):
            with suppress(OSError):
                state = path.stat()
                states.append((path.name, state.st_size, state.st_mtime_ns))
    return states
