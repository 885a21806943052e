"""Pages of controls, clickable images and text, described in Python and drawn by the front end.

A `Page` runs in the quick lane, without traits and sockets. The browser sends {"set": {name: value}},
{"pick": panel, "row": r, "col": c}, {"why": class number}, {"upload": name} with a file, or {"press": name}. A question
{"ask": kind} gets an answer without a drawing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from vitlens.names import require_known
from vitlens_explorer.controls import Control
from vitlens_explorer.lanes import Answer, Cancelled, Check, Job
from vitlens_explorer.results import CANCELED, Key, Results


@dataclass(frozen=True)
class Change:
    """Changes by a message. values: of controls, set in order. others: parts of the state without a control, which
    are set first."""

    values: dict[str, object] = field(default_factory=dict)
    others: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Download:
    """Files for the browser, as an answer to the message with this number."""

    number: int
    files: dict[str, bytes]


class Page:
    """A state and the frame drawn from it.

    A concrete page defines `draw`, `make_controls` and `requested`, and if it needs them the other functions of the
    first part, which this class only calls. The state is replaced, never changed in place, so that the last valid
    state can be restored after an error.
    """

    plain: frozenset[str] = frozenset()
    """Parts of the state without effect on other controls."""

    def __init__(self, **state):
        self.state = state
        self.frame: dict = {}
        self.pictures: dict[str, bytes] = {}
        self.controls: dict[str, Control] = {}  # those of the last drawing
        self.results = Results()
        self.downloads: list[Download] = []  # of the current answer
        self._controls_key: tuple | None = None
        self._last_drawn = state
        self._number = 0  # of the last message
        self._message = ""
        self._awaited: Key | None = None  # key of the job that the drawing needs

    # ---------------------------------------------------------------- defined by concrete pages

    def draw(self, check: Check) -> dict | Job:
        """The panels, pictures and other parts of the frame, or the job that the drawing needs first."""
        raise NotImplementedError

    def make_controls(self) -> list[Control]:
        """The controls for the current state."""
        raise NotImplementedError

    def requested(self, content: dict, buffers: list) -> Change:
        """The change that a message of the browser asks for."""
        raise NotImplementedError

    def tour_steps(self) -> list[str]:
        """Sentences that a still image has beside its first panel."""
        return []

    def begin(self) -> None:
        """Prepare for an answer, before its messages are processed."""

    def controls_depend_on(self) -> Hashable:
        """Everything besides the state on which the controls depend."""

    def job(self) -> Job | None:
        """The next slow part of the page, for the long lane after the drawing."""

    def look_up(self, content: dict, check: Check) -> tuple[dict, list[bytes]]:
        """Answer to a question and its buffers."""
        raise ValueError(f"This page does not answer {content['ask']!r}.")

    # ---------------------------------------------------------------- called by a connection

    def first(self, check: Check) -> Answer:
        """The first drawing, with errors raised."""
        self._draw(check)
        return Answer(self.frame, self.pictures, self.job())

    def answer(self, messages: list[tuple[dict, list]], check: Check) -> Answer:
        """Process all messages, then draw once. After an error, the answer is the last valid page with a message."""
        before = self.state
        errors: list[str] = []
        self.downloads = []
        self.begin()
        for content, buffers in messages:
            self._number = max(self._number, content.get("number", 0))
            try:
                self._process(content, buffers)
            except Exception as error:  # shown on the page
                errors.append(sentence(error))
        if errors or not all("job" in content for content, _ in messages):
            self._message = " ".join(dict.fromkeys(errors))
        job = None
        try:
            awaited = self._draw(check)
            if awaited:
                return Answer(None, None, awaited, self._files(), errors)
            job = self.job()
        except Cancelled:
            self.state = before
            raise
        except Exception as error:
            errors.append(sentence(error))
            self.state = self._last_drawn
            self._message = errors[-1]
            self.frame = self.frame | {"answers": self._number, "message": self._message}
            with contextlib.suppress(Exception):  # the same error again
                job = self.job()
        return Answer(self.frame, self.pictures, job, self._files(), errors)

    def reply(self, content: dict, check: Check) -> tuple[dict, list[bytes]]:
        """Answer to a question {"ask": kind, …} and its buffers, or {"problem": message}. The page stays as it is."""
        try:
            return self.look_up(content, check)
        except Cancelled:
            raise
        except Exception as error:
            return {"problem": sentence(error)}, []

    # ---------------------------------------------------------------- messages

    def _process(self, content: dict, buffers: list) -> None:
        if "job" in content:
            self._finish(content["job"], buffers[0])
        elif "cancel" in content:
            self.state = self._last_drawn
            if content["cancel"] not in (None, self._awaited):
                self.results[content["cancel"]] = CANCELED
        else:
            self._change(self.requested(content, buffers))

    def _change(self, change: Change) -> None:
        """Set parts of the state in order. After an error the state is unchanged."""
        before = self.state
        self.state = before | change.others
        try:
            for name, value in change.values.items():
                self._renew_controls()  # a new view may have other heads
                require_known(name, self.controls, "A control of this page")
                self.controls[name].check(value)
                self.state = self.state | {name: value}
        except Exception:
            self.state = before
            raise

    def _finish(self, key: Key, value: object) -> None:
        """Store the result of a job, or the message of its failure if the page does not need it."""
        if isinstance(value, Download):
            self.downloads.append(value)
            self.results.add(key, None)
        elif not isinstance(value, Exception):
            self.results.add(key, value)
        else:
            if not key.needed:
                self.results.add(key, sentence(value))
            elif key == self._awaited:
                self.state = self._last_drawn
            raise value

    # ---------------------------------------------------------------- drawing

    def _draw(self, check: Check) -> Job | None:
        """Draw the frame, or return the job that it needs."""
        drawn = self.draw(check)
        if isinstance(drawn, Job):
            self._awaited = drawn.key
            return drawn
        self._renew_controls()
        for name in self.controls.keys() & self.plain:
            control, value = self.controls[name], self.state[name]
            if control.value != value:
                self.controls[name] = replace(control, value=value)
        self._last_drawn = self.state
        self.pictures = drawn.pop("pictures")
        panels = [panel.message() for panel in drawn.pop("panels")]
        self.frame = drawn | {
            "panels": panels,
            "controls": [vars(control) for control in self.controls.values()],
            "answers": self._number,
            "message": self._message,
        }
        return None

    def _renew_controls(self) -> None:
        """Make the controls anew if they depend on something that changed."""
        state = [(name, value) for name, value in self.state.items() if name not in self.plain]
        key = (state, self.controls_depend_on())
        if key != self._controls_key:
            self.controls = {control.name: control for control in self.make_controls()}
            self._controls_key = key
            self.results.forget_canceled()

    def _files(self) -> list[tuple[int, dict[str, bytes]]]:
        return [(download.number, download.files) for download in self.downloads]


def sentence(error: Exception) -> str:
    """Message of an error for the page."""
    from vitlens.recorder.memory import is_out_of_memory

    if isinstance(error, ValueError | IndexError | OSError | ImportError):
        return str(error)
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return "There is not enough memory. Use a smaller image, size or model. The last image is kept."
    return f"Drawing failed ({type(error).__name__}: {error}). The last image is kept."
