"""The threads that work for all widgets, one at a time, so that two callbacks never run models at once.

Long work comes in slices. Between two of them, mostly between two forwards of a model, it calls `pause`. Then whoever
waits has a turn (a cell of the notebook, other paused work), and another thread takes up what was asked of other
widgets. This is safe because paused work keeps its thread: captures, autograd modes and replaced functions count in
their own thread only, and hooks on modules, which all threads share, check the thread. Nothing pauses inside a forward,
but where it embeds its images, or in the middle of drawing random numbers. After a pause nothing may be assumed about
what others can change, such as the weights of a model. No two threads work on the same widget.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator


class Turn:
    """A reentrant lock that goes to threads in the order in which they asked. waiting: their places in the queue.
    number: of the present turn."""

    def __init__(self):
        self._changed, self.waiting = threading.Condition(), deque()
        self.number = self._depth = 0
        self._holder: int | None = None

    def __enter__(self) -> None:
        if self.mine:
            self._depth += 1
        else:
            self._take(self.line_up())

    def __exit__(self, *_) -> None:
        if self.mine:  # false if this thread was interrupted while it waited
            self._depth -= 1
            if not self._depth:
                self._let_go()

    @property
    def mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._holder == threading.get_ident()

    def line_up(self) -> object:
        """Join the queue, and return the place in it."""
        self.waiting.append(place := object())
        return place

    @contextlib.contextmanager
    def at(self, place: object) -> Iterator[None]:
        """Wait for the turn of this place, and hold the lock in this block."""
        self._take(place)
        try:
            yield
        finally:
            self.__exit__()

    def _take(self, place: object, depth: int = 1) -> None:
        with self._changed:
            try:
                self._changed.wait_for(lambda: self._holder is None and self.waiting[0] is place)
            finally:  # a cell that waits may be interrupted
                self.waiting.remove(place)
                self._changed.notify_all()
            self.number, self._depth, self._holder = self.number + 1, depth, threading.get_ident()

    def give_way(self) -> None:
        """If this thread holds the lock, let all that wait have it first."""
        if self.waiting and self.mine:
            place, depth = self.line_up(), self._depth
            self._let_go()
            self._take(place, depth)

    def _let_go(self) -> None:
        with self._changed:
            self._holder = None
            self._changed.notify_all()


RUNNING = Turn()
"""Held while a widget works."""

_asked: deque[weakref.WeakMethod] = deque()
_later: deque[weakref.WeakMethod] = deque()
_something = threading.Condition()
_over = threading.Event()
_threads: set[threading.Thread] = set()
_free = 0  # threads without work
_busy: dict[int, int] = {}  # id of an object → the thread that works on it


class Superseded(Exception):
    """Raised in a computation whose result is no longer needed."""


def ask(method: Callable[[], None], *, later: bool = False) -> None:
    """Have a worker call a bound method. later: once nothing else is asked for. Its object is not kept alive."""
    with _something:
        (_later if later else _asked).append(weakref.WeakMethod(method))
        if not any(thread.is_alive() for thread in _threads):
            _start()
        _something.notify_all()


def idle() -> bool:
    """Whether nothing is asked for but work for later, and no notebook cell waits for its turn."""
    return not _asked and not RUNNING.waiting and not _over.is_set()


def pause() -> bool:
    """Let others have their turn between two slices of long work. False if the interpreter is about to exit."""
    if RUNNING.mine:
        with _something:
            if not _free and _next(take=False):
                _start()
            _something.wait_for(lambda: _over.is_set() or not (_free and _next(take=False)))  # until it has a place
        RUNNING.give_way()
    return not _over.is_set()


def working() -> bool:
    """Whether this is a worker thread."""
    return threading.current_thread() in _threads


def now(method: Callable[[], None]) -> None:
    """Call a bound method from within other work. If another thread works on its object, let that one continue."""
    thing, me = id(method.__self__), threading.get_ident()
    with _something:
        before = _busy.get(thing)
        _busy.setdefault(thing, me)
    if before not in (None, me):
        pause()
        return
    try:
        method()
    finally:
        if before is None:
            _done(thing)


def _next(take: bool = True) -> Callable[[], None] | None:
    """The next method whose object no thread is working on. The caller holds `_something`."""
    for queue in (_asked, _later):
        for reference in [*queue]:
            if (method := reference()) is None:
                queue.remove(reference)
            elif id(method.__self__) not in _busy:
                if take:
                    queue.remove(reference)
                    _busy[id(method.__self__)] = threading.get_ident()
                return method
    return None


def _done(thing: int) -> None:
    with _something:
        del _busy[thing]
        _something.notify_all()


def _start() -> None:
    """Start one more thread. The caller holds `_something`."""
    global _free
    thread = threading.Thread(target=_work, name="vitlens widgets", daemon=True)
    _threads.add(thread)
    _free += 1
    thread.start()


def _awaited() -> bool:
    """Whether a free thread should wake up, to work or to exit."""
    return _over.is_set() or _free > 1 or _next(take=False) is not None


def _work() -> None:
    global _free
    while True:
        with _something:
            _something.wait_for(_awaited)
            method = None if _over.is_set() else _next()
            _free -= 1
            if method is None:  # another thread is free, too; each has a thread pool of PyTorch's
                _threads.discard(threading.current_thread())
                return
            thing, place = id(method.__self__), RUNNING.line_up()
            _something.notify_all()
        try:
            with RUNNING.at(place):
                method()
        except Exception:  # in a callback of the user: the other widgets go on
            logging.getLogger(__name__).exception("A callback of a widget failed.")
        _done(thing)
        method = None  # waiting keeps nothing alive
        with _something:
            _free += 1


@atexit.register
def _end() -> None:
    """Let running work end before the interpreter does: a thread killed inside PyTorch aborts the process."""
    with _something:
        _over.set()
        _something.notify_all()
        threads = [*_threads]
    last = time.monotonic() + 10  # seconds
    for thread in threads:
        thread.join(max(0, last - time.monotonic()))
