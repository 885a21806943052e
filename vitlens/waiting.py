"""Waiting for other processes, locks, workers, downloads and pipes.

Every wait of the package passes here. After `ANNOUNCE_AFTER` seconds it prints what it waits for and how to go on
without. Ctrl-C ends it. It ends by itself after `LIMIT` seconds in which nothing moved.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")
Text = str | Callable[[], str]

ANNOUNCE_AFTER = 4.0
"""Seconds until a wait is announced."""
LIMIT = 300.0
"""Seconds without movement after which a wait ends."""
PAUSE = 0.02
"""Seconds between two looks at what is awaited."""
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
