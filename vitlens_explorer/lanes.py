"""Two worker threads for all pages, and the connection of a page with them.

Clicks go to the quick lane, slow maps and scores to the long lane, so that clicks never wait for slow work. Tasks take
and return plain values. Only the thread of the event loop (in a notebook, the kernel's main thread) uses traits and
sockets. Lanes pass results to it with `call_soon_threadsafe`.

Both lanes may run the same model at the same time. Captures, autograd modes and switched-off heads are local to their
thread, and `eval_mode` counts its contexts over all threads.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

LARGEST_UPLOAD = 64 * 2**20
"""Largest upload, in bytes."""
PATIENCE, PACE = 1.0, 0.5
"""Seconds until the first report of a job's progress, and between two reports."""


class Cancelled(Exception):
    """Raised in a cancelled task."""


Check = Callable[..., None]
"""Callback before forwards, with their number. It raises Cancelled after the request was cancelled."""


def never_cancel(*_) -> None:
    """The check of work that is not cancelled."""


class Task(Future):
    """A function for a lane, called with `check`, which raises Cancelled after the task was stopped."""

    def __init__(self, function: Callable[[Callable[[], None]], object], lane: Lane):
        super().__init__()
        self._function = function
        self._lane = lane
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self._function = None  # release captures of a waiting task

    def check(self, forwards: int = 0) -> None:
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
    """A thread that runs tasks in order and ends with the process."""

    def __init__(self, name: str):
        self.closed = False
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"vitlens {name} lane", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _work(self) -> None:
        while task := self._tasks.get():
            task.run()
            del task

    def submit(self, function: Callable, then: Callable[[Task], None] | None = None) -> Task:
        """Run function(check), then call then(task) in the thread of the lane."""
        task = Task(function, self)
        if then:
            task.add_done_callback(then)
        self._tasks.put(task)
        return task

    def run(self, function: Callable) -> object:
        """Wait for function(check) in the lane and return its result."""
        return self.submit(function).result()

    def close(self) -> None:
        """Stop all tasks and wait for the running one."""
        self.closed = True
        self._tasks.put(None)
        self._thread.join()


QUICK, LONG = Lane("quick"), Lane("long")


class Job(NamedTuple):
    """A function for the long lane, and the key of its result. what, forwards: name and number of forwards for the
    progress report, 0 if unknown."""

    key: Hashable
    function: Callable[[Callable[..., None]], object]
    what: str = ""
    forwards: int = 0

    def run(self, report: Callable[[dict], None], check: Check) -> object:
        """Result of the function. Counts the forwards given to its check, and calls report(progress) after
        `PATIENCE`."""
        start = time.monotonic()
        due = start + PATIENCE
        done = 0

        def count(forwards: int = 0) -> None:
            nonlocal done, due
            check()
            done += forwards
            now = time.monotonic()
            if now < due:
                return
            due = now + PACE
            progress = {
                "what": self.what,
                "done": min(done, self.forwards or done),
                "of": self.forwards,
            }
            if 0 < done < self.forwards:
                progress["left"] = (now - start) * (self.forwards - done) / done
            report(progress)

        return self.function(count)


@dataclass(frozen=True)
class Answer:
    """Result of messages. frame, pictures: None until the job of the map is done. files: downloads."""

    frame: dict | None
    pictures: dict[str, bytes] | None = None
    job: Job | None = None
    files: list[tuple[int, dict[str, bytes]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def is_message(content: object, buffers: Sequence = ()) -> bool:
    """True for a message of the browser whose parts have the types that `Connection` and `Page` rely on.

    For what a browser sends. Values of controls are checked by the page, which says what is wrong with them.
    """
    if not isinstance(content, dict) or "job" in content:
        return False
    numbers = [content.get("number", 0)]
    if "at" in content:
        numbers += [content.get(name) for name in ("file", "at", "of")]
    if any(type(number) is not int or number < 0 for number in numbers):
        return False
    if "at" in content or "upload" in content:
        return isinstance(content.get("upload"), str) and len(buffers) == 1
    return isinstance(content.get("set", {}), dict)


class Connection:
    """Queue of a page's messages for the lanes, in the thread of the event loop.

    A new message stops the current drawing, whose messages are then processed together with the new one.

    page: its `answer(messages, check)` runs in the quick lane. show(frame, pictures) and send(content, buffers) send to
    the browser. post(function): calls a function in the thread of the event loop, from any thread.
    """

    def __init__(
        self,
        page,
        show: Callable,
        send: Callable,
        post: Callable,
        lanes: tuple[Lane, Lane] = (QUICK, LONG),
    ):
        self.page = page
        self._show = show
        self._send = send
        self._post = post
        self._quick, self._long = lanes
        self.closed = False
        self.error = ""  # of the last message
        self._messages: list[tuple[dict, list]] = []
        self._drawing: Task | None = None
        self._job: tuple[Hashable, Task] | None = None
        self._asked: dict[str, Task] = {}  # the latest question of each kind
        self._waiting_for_job = False  # True while the map waits for the job
        self._reported = False  # True while the browser shows the job's progress
        self._file = 0  # number of the current upload
        self._data = bytearray()  # its bytes

    @property
    def busy(self) -> bool:
        """True until all messages are processed."""
        return not self.closed and bool(self._messages or self._drawing or self._waiting_for_job)

    @property
    def idle(self) -> bool:
        """True if both lanes are idle for this page."""
        return self.closed or not (self.busy or self._job)

    def receive(self, content: dict, buffers: list = ()) -> None:
        """Queue a message of the browser. Confirms each part {"upload": name, "file": number, "at": offset, "of": size}
        of an upload. {"cancel": True} drops the messages before it, and the job that the page waits for. Questions
        {"ask": kind} are answered without a drawing, of each kind only the latest."""
        if "ask" in content:
            self._ask(content)
            return
        if "at" in content:
            data = self._collect_upload(content, buffers[0])
            if data is None:
                return
            content = {"upload": content["upload"], "number": content.get("number", 0)}
            buffers = [data]
        elif "cancel" in content:
            key = None
            if self._job and (self._waiting_for_job or not self._drawing):
                key, _ = self._job
            content = content | {"cancel": key}
            self._messages.clear()
        self.error = ""
        self._messages.append((content, list(buffers)))
        if self._drawing:
            self._drawing.stop()
        self._begin()

    def _ask(self, content: dict) -> None:
        kind = str(content["ask"])
        if kind in self._asked:
            self._asked[kind].stop()
        self._asked[kind] = self._submit(
            self._quick,
            partial(self.page.reply, content),
            partial(self._send_reply, content),
        )

    def _submit(
        self, lane: Lane, function: Callable[[Check], object], then: Callable[[Task], None]
    ) -> Task:
        """Run function(check) in a lane, then call then(task) in the thread of the event loop."""

        def post(task: Task) -> None:
            self._post(partial(then, task))

        return lane.submit(function, post)

    def _send_reply(self, content: dict, task: Task) -> None:
        if not self.closed and not isinstance(task.exception(), Cancelled):
            answer, buffers = task.result()
            self._send(
                {"ask": content["ask"], "number": content.get("number", 0), "answer": answer},
                buffers,
            )

    def start(self, answer: Answer) -> None:
        """Show the first drawing."""
        self._show(answer.frame, answer.pictures)
        self._continue(answer.job)

    def close(self) -> None:
        """Stop all tasks of the page and the display."""
        self.closed = True
        for task in self._asked.values():
            task.stop()
        if self._drawing:
            self._drawing.stop()
        if self._job:
            self._job[1].stop()
        self.page = self._job = None
        self._messages.clear()
        self._data.clear()

    def _collect_upload(self, part: dict, data: bytes) -> bytes | None:
        """The file after its last part, else None. A new upload replaces an unfinished one."""
        number, size = part["file"], part["of"]
        if number < self._file:
            return None
        if number > self._file:
            self._file = number
            self._data = bytearray()
        self._data += data
        if max(size, len(self._data)) > LARGEST_UPLOAD:
            self._data.clear()
            problem = f"{part['upload']} is larger than {LARGEST_UPLOAD >> 20} MB, the upload limit. Make it smaller."
            self._send({"file": number, "problem": problem}, [])
            return None
        self._send({"file": number, "received": len(self._data)}, [])
        if len(self._data) < size:
            return None
        file = bytes(self._data)
        self._data.clear()
        return file

    def _begin(self) -> None:
        if self._messages and not self._drawing and not self.closed:
            messages = [*self._messages]
            self._drawing = self._submit(
                self._quick,
                partial(self.page.answer, messages),
                partial(self._take_answer, messages),
            )

    def _take_answer(self, messages: list[tuple[dict, list]], task: Task) -> None:
        self._drawing = None
        if self.closed:
            return
        error = task.exception()
        if not isinstance(error, Cancelled):
            answered = {id(message) for message in messages}
            self._messages = [message for message in self._messages if id(message) not in answered]
        if error is None:
            self._send_answer(task.result())
        elif not isinstance(error, Cancelled):
            logging.getLogger(__name__).error("A page could not be drawn.", exc_info=error)
        self._begin()

    def _send_answer(self, answer: Answer) -> None:
        self.error = " ".join(filter(None, [self.error, *answer.errors]))
        for number, files in answer.files:
            self._send({"download": list(files), "asked": number}, list(files.values()))
        self._waiting_for_job = answer.frame is None
        if answer.frame is not None and not self._messages:
            self._show(answer.frame, answer.pictures)
        self._continue(answer.job)

    def _continue(self, job: Job | None) -> None:
        """Keep the running job if `job` has its key, else stop it and start `job`."""
        if self._job and job and self._job[0] == job.key:
            return
        if self._job:
            self._job[1].stop()
        self._job = None
        self._report(None)
        if job:
            key = job.key  # the callbacks hold no reference to the function of the job

            def report(progress: dict) -> None:
                self._post(partial(self._report, progress, key))

            task = self._submit(
                self._long, partial(job.run, report), partial(self._finish_job, key)
            )
            self._job = (key, task)

    def _report(self, progress: dict | None, key: Hashable = None) -> None:
        """Send the progress of the job with this key to the browser, or None after its end."""
        current = self._job and self._job[0] == key
        if not self.closed and (current if progress else self._reported):
            self._reported = progress is not None
            self._send({"progress": progress}, [])

    def _finish_job(self, key: Hashable, task: Task) -> None:
        if self.closed or not self._job or self._job[1] is not task:
            return
        self._job = None
        self._report(None)
        error = task.exception()
        if not isinstance(error, Cancelled):
            self._messages.append(({"job": key}, [error or task.result()]))
            self._begin()
