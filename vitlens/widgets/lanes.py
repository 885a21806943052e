"""Two threads that work for all pages, and the connection of a page with them.

A click goes to the quick lane, a map or score that takes long to the long lane, so that a click never waits for either.
Tasks get plain values and return plain values. Only the thread of the event loop (in a notebook, the kernel's main
thread) touches traits and sockets: a lane hands its results over with `call_soon_threadsafe`.

Both lanes may run the same model at the same time. Captures, autograd modes and switched-off heads belong to their own
thread, `evaluating` counts its blocks over all threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

LARGEST = 64 * 2**20
"""Largest upload, in bytes."""


class Cancelled(Exception):
    """Raised in a task whose result is no longer needed."""


class Task:
    """A function in a lane, called with `check`, which raises Cancelled once the task is cancelled."""

    def __init__(self, function: Callable[[Callable[[], None]], object]):
        self.function, self._cancelled = function, threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()
        self.function = None  # a cancelled task that still waits in its lane keeps no capture alive

    def check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled

    def __call__(self) -> object:
        function = self.function
        self.check()
        return function(self.check)


class Lane:
    """A thread that runs tasks one after the other."""

    def __init__(self, name: str):
        self._pool, self._tasks = ThreadPoolExecutor(1, thread_name_prefix=f"vitlens {name} lane"), set()
        # An atexit function would come too late: the interpreter joins the threads of executors before it calls those.
        getattr(threading, "_register_atexit", lambda close: None)(self.close)

    def submit(self, function: Callable, then: Callable[[Task, Future], None] = lambda *_: None) -> tuple[Task, Future]:
        """Run function(check), then call then(task, future) in the thread of the lane."""
        task = Task(function)
        self._tasks.add(task)
        future = self._pool.submit(task)

        def done(future: Future) -> None:
            self._tasks.discard(task)
            if not future.cancelled():
                then(task, future)

        future.add_done_callback(done)
        return task, future

    def run(self, function: Callable) -> object:
        """The result of function(check), for which the calling thread waits."""
        return self.submit(function)[1].result()

    def close(self) -> None:
        """Cancel all tasks, and wait for the one that is running."""
        for task in [*self._tasks]:
            task.cancel()
        self._pool.shutdown(cancel_futures=True)


QUICK, LONG = Lane("quick"), Lane("long")


@dataclass(frozen=True)
class Job:
    """A function for the long lane, and the key of its result."""

    key: tuple
    function: Callable[[Callable[[], None]], object]


@dataclass(frozen=True)
class Answer:
    """What a page makes of messages. frame and pictures: None while the map has to wait for the job. files: to save."""

    frame: dict | None
    pictures: dict[str, bytes] | None = None
    job: Job | None = None
    files: list[tuple[int, dict[str, bytes]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Connection:
    """Messages for a page, handed to the lanes in order; lives in the thread of the event loop.

    A new message cancels the drawing under way. That drawing is never shown, and its messages are taken again together
    with the new one.

    page: its `answer(messages, check)` runs in the quick lane. show(frame, pictures) and send(content, buffers) reach
    the browser. post(function): calls a function in the thread of the event loop, from any thread.
    """

    def __init__(self, page, show: Callable, send: Callable, post: Callable, lanes: tuple[Lane, Lane] = (QUICK, LONG)):
        self.page, self._show, self._send, self._post = page, show, send, post
        self._quick, self._long = lanes
        self.request, self.closed = 0, False
        self.error = ""  # what was wrong with the last message
        self._messages: list[tuple[dict, list]] = []
        self._drawing: Task | None = None
        self._job: tuple[tuple, Task] | None = None
        self._pending = False  # the map that was asked for waits for the job
        self._upload: dict = {"file": 0}

    @property
    def busy(self) -> bool:
        """True until all messages are answered."""
        return not self.closed and bool(self._messages or self._drawing or self._pending)

    @property
    def settled(self) -> bool:
        """True once nothing is computed for the page, in either lane."""
        return self.closed or not (self.busy or self._job)

    def receive(self, content: dict, buffers: list = ()) -> None:
        """Take a message of the browser. An upload comes in parts {"upload": name, "file": number, "at": offset, "of":
        size}, each of which is confirmed."""
        if "at" in content:
            if (data := self._part(content, bytes(buffers[0]))) is None:
                return
            content, buffers = {"upload": content["upload"], "number": content.get("number", 0)}, [data]
        self.request, self.error = self.request + 1, ""
        self._messages.append((content, list(buffers)))
        if self._drawing:
            self._drawing.cancel()
        self._begin()

    def start(self, answer: Answer) -> None:
        """Show the first drawing."""
        self._show(answer.frame, answer.pictures)
        self._continue(answer.job)

    def close(self) -> None:
        """Cancel whatever is computed for the page, and show nothing more."""
        self.closed = True
        for task in (self._drawing, self._job and self._job[1]):
            if task:
                task.cancel()
        self.page, self._job, self._upload = None, None, {"file": 0}
        self._messages.clear()

    def _part(self, content: dict, data: bytes) -> bytes | None:
        """The whole file, once its last part has come; a later upload replaces an unfinished one."""
        number, size = content["file"], content["of"]
        if number > self._upload["file"]:
            self._upload = {"file": number, "data": bytearray()}
        if number < self._upload["file"]:
            return None
        held = self._upload["data"]
        if max(size, len(held) + len(data)) > LARGEST:
            self._upload["data"] = bytearray()
            problem = f"{content['upload']} is larger than {LARGEST >> 20} MB, the most for an upload. Make it smaller."
            self._send({"file": number, "problem": problem}, [])
            return None
        held += data
        self._send({"file": number, "received": len(held)}, [])
        if len(held) < size:
            return None
        self._upload["data"] = bytearray()
        return bytes(held)

    def _begin(self) -> None:
        if self._drawing or not self._messages or self.closed:
            return
        messages, request = [*self._messages], self.request
        self._drawing, _ = self._quick.submit(
            partial(self.page.answer, messages),
            lambda task, future: self._post(partial(self._answered, len(messages), request, future)),
        )

    def _answered(self, count: int, request: int, future: Future) -> None:
        self._drawing = None
        if self.closed:
            return
        error = future.exception()
        if error is None:
            answer = future.result()
            del self._messages[:count]
            self.error = " ".join(filter(None, [self.error, *answer.errors]))
            for asked, files in answer.files:
                self._send({"download": list(files), "asked": asked}, list(files.values()))
            self._pending = answer.frame is None
            if answer.frame is not None and request == self.request:
                self._show(answer.frame, answer.pictures)
            self._continue(answer.job)
        elif not isinstance(error, Cancelled):
            del self._messages[:count]
            logging.getLogger(__name__).error("A page could not be drawn.", exc_info=error)
        self._begin()

    def _continue(self, job: Job | None) -> None:
        """Keep the job in the long lane if it is still wanted, or else cancel it and begin another."""
        if self._job and job and self._job[0] == job.key:
            return
        if self._job:
            self._job[1].cancel()
        key = job and job.key  # the callback holds the key alone, not the function
        self._job = job and (
            key,
            self._long.submit(job.function, lambda task, future: self._post(partial(self._done, task, key, future)))[0],
        )

    def _done(self, task: Task, key: tuple, future: Future) -> None:
        if self.closed or not self._job or self._job[1] is not task:
            return
        self._job = None
        error = future.exception()
        if not isinstance(error, Cancelled):
            value = None if error else future.result()
            self._messages.append(({"job": key, "failed": error is not None}, [error or value]))
            self._begin()
