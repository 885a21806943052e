"""One thread that works for all widgets: models are never run by two callbacks at once, PyTorch keeps one pool of
threads, and what was asked for comes before what can wait."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable


class Turn:
    """A lock that one thread may take several times; others who wait for it are known. number: of the turn that is on,
    however often it was taken within."""

    def __init__(self):
        self.lock, self.waiting = threading.RLock(), deque()
        self.number = self._depth = 0

    def __enter__(self) -> None:
        self.waiting.append(None)  # in one go, unlike a number's increment
        try:
            self.lock.acquire()
        finally:  # a cell that waits may be interrupted
            self.waiting.pop()
        self._depth += 1
        self.number += self._depth == 1

    def __exit__(self, *_) -> None:
        self._depth -= 1
        self.lock.release()


RUNNING = Turn()
"""Held while a widget works."""

_asked: deque[Callable] = deque()
_later: deque[Callable] = deque()
_something = threading.Condition()
_over = threading.Event()
_thread: threading.Thread | None = None


class Superseded(Exception):
    """What was being computed is no longer wanted."""


def ask(method: Callable[[], None], *, later: bool = False) -> None:
    """Have a bound method called. later: when nothing else is asked for. Its object may be forgotten meanwhile."""
    global _thread
    with _something:
        (_later if later else _asked).append(weakref.WeakMethod(method))
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_work, name="vitlens widgets", daemon=True)
            _thread.start()
        _something.notify()


def idle() -> bool:
    """Whether nothing is asked for, but what can wait, and no cell of a notebook waits for its turn."""
    return not _asked and not RUNNING.waiting and not _over.is_set()


def working() -> bool:
    """Whether this is the thread that works."""
    return threading.current_thread() is _thread


def _work() -> None:
    while True:
        with _something:
            _something.wait_for(lambda: _asked or _later or _over.is_set())
            if _over.is_set():
                return
            reference = (_asked or _later).popleft()
        if (method := reference()) is not None:
            try:
                with RUNNING:
                    method()
            except Exception:  # of a callback of the user's: the other widgets go on
                logging.getLogger(__name__).exception("A callback of a widget failed.")
        method = None  # nothing is kept alive by waiting


@atexit.register
def _end() -> None:
    """Let the work at hand end before the interpreter does: a thread killed inside PyTorch aborts the process."""
    with _something:
        _over.set()
        _something.notify()
    if _thread is not None:
        _thread.join(10)  # seconds
