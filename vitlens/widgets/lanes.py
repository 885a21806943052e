"""Two threads that work for all pages, and the connection of a page with them.

A click goes to the quick lane, a map or score that takes long to the long lane, so that a click never waits for either.
Tasks take and return plain values. Only the thread of the event loop (in a notebook, the kernel's main thread) touches
traits and sockets: a lane hands its results over with `call_soon_threadsafe`.

Both lanes may run the same model at the same time. Captures, autograd modes and switched-off heads belong to their own
thread, `evaluating` counts its blocks over all threads.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

LARGEST = 64 * 2**20
"""Largest upload, in bytes."""


class Cancelled(Exception):
    """Raised in a task whose result is no longer needed."""


class Task(Future):
    """A function in a lane, called with `check`, which raises Cancelled once the task is stopped."""

    def __init__(self, function: Callable[[Callable[[], None]], object], lane: Lane):
        super().__init__()
        self._function, self._lane, self._stopped = function, lane, False

    def stop(self) -> None:
        self._stopped, self._function = True, None  # a task that still waits in its lane keeps no capture alive

    def check(self) -> None:
        if self._stopped or self._lane.closed:
            raise Cancelled

    def run(self) -> None:
        function = self._function
        try:
            self.check()
            self.set_result(function(self.check))
        except BaseException as error:
            self.set_exception(error)


class Lane:
    """A thread that runs tasks one after the other, and ends with the process."""

    def __init__(self, name: str):
        self.closed, self._tasks = False, queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"vitlens {name} lane", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _work(self) -> None:
        while task := self._tasks.get():
            task.run()
            del task

    def submit(self, function: Callable, then: Callable[[Task], None] = lambda task: None) -> Task:
        """Run function(check), then call then(task) in the thread of the lane."""
        task = Task(function, self)
        task.add_done_callback(then)
        self._tasks.put(task)
        return task

    def run(self, function: Callable) -> object:
        """The result of function(check), for which the calling thread waits."""
        return self.submit(function).result()

    def close(self) -> None:
        """Stop all tasks, and wait for the one that is running."""
        self.closed = True
        self._tasks.put(None)
        self._thread.join()


QUICK, LONG = Lane("quick"), Lane("long")


class Job(NamedTuple):
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

    A new message stops the drawing under way. That drawing is never shown, and its messages are taken again together
    with the new one.

    page: its `answer(messages, check)` runs in the quick lane. show(frame, pictures) and send(content, buffers) reach
    the browser. post(function): calls a function in the thread of the event loop, from any thread.
    """

    def __init__(self, page, show: Callable, send: Callable, post: Callable, lanes: tuple[Lane, Lane] = (QUICK, LONG)):
        self.page, self._show, self._send, self._post = page, show, send, post
        self._quick, self._long = lanes
        self.closed, self.error = False, ""  # error: what was wrong with the last message
        self._messages: list[tuple[dict, list]] = []
        self._drawing: Task | None = None
        self._job: tuple[tuple, Task] | None = None
        self._pending = False  # the map that was asked for waits for the job
        self._file, self._data = 0, bytearray()  # number and bytes of the upload under way

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
            if (data := self._whole(content, buffers[0])) is None:
                return
            content, buffers = {"upload": content["upload"], "number": content.get("number", 0)}, [data]
        self.error = ""
        self._messages.append((content, list(buffers)))
        if self._drawing:
            self._drawing.stop()
        self._begin()

    def start(self, answer: Answer) -> None:
        """Show the first drawing."""
        self._show(answer.frame, answer.pictures)
        self._continue(answer.job)

    def close(self) -> None:
        """Stop whatever is computed for the page, and show nothing more."""
        self.closed = True
        for task in (self._drawing, self._job and self._job[1]):
            if task:
                task.stop()
        self.page = self._job = None
        self._messages.clear()
        self._data.clear()

    def _whole(self, part: dict, data: bytes) -> bytes | None:
        """The whole file, once its last part has come; a later upload replaces an unfinished one."""
        number, size = part["file"], part["of"]
        if number < self._file:
            return None
        if number > self._file:
            self._file, self._data = number, bytearray()
        self._data += data
        if max(size, len(self._data)) > LARGEST:
            self._data.clear()
            problem = f"{part['upload']} is larger than {LARGEST >> 20} MB, the most for an upload. Make it smaller."
            self._send({"file": number, "problem": problem}, [])
            return None
        self._send({"file": number, "received": len(self._data)}, [])
        if len(self._data) < size:
            return None
        whole, self._data = bytes(self._data), bytearray()
        return whole

    def _begin(self) -> None:
        if self._messages and not self._drawing and not self.closed:
            messages = [*self._messages]
            then = lambda task: self._post(partial(self._answered, len(messages), task))  # noqa: E731
            self._drawing = self._quick.submit(partial(self.page.answer, messages), then)

    def _answered(self, count: int, task: Task) -> None:
        self._drawing = None
        if self.closed:
            return
        if (error := task.exception()) is None:
            answer = task.result()
            del self._messages[:count]
            self.error = " ".join(filter(None, [self.error, *answer.errors]))
            for asked, files in answer.files:
                self._send({"download": list(files), "asked": asked}, list(files.values()))
            self._pending = answer.frame is None
            if answer.frame is not None and not self._messages:
                self._show(answer.frame, answer.pictures)
            self._continue(answer.job)
        elif not isinstance(error, Cancelled):
            del self._messages[:count]
            logging.getLogger(__name__).error("A page could not be drawn.", exc_info=error)
        self._begin()

    def _continue(self, job: Job | None) -> None:
        """Keep the job in the long lane if it is still wanted, or else stop it and begin another."""
        if self._job and job and self._job[0] == job.key:
            return
        if self._job:
            self._job[1].stop()
        self._job = None
        if job:
            done = partial(self._done, job.key)  # holds the key alone, not the function
            self._job = job.key, self._long.submit(job.function, lambda task: self._post(partial(done, task)))

    def _done(self, key: tuple, task: Task) -> None:
        if self.closed or not self._job or self._job[1] is not task:
            return
        self._job = None
        error = task.exception()
        if not isinstance(error, Cancelled):
            self._messages.append(({"job": key}, [error or task.result()]))
            self._begin()
