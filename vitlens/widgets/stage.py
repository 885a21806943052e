"""What all widgets share: a page of controls, clickable pictures and text, described in Python and drawn by stage.js.

The browser sends {"set": {name: value}}, {"pick": panel, "row": r, "col": c}, {"why": number} of a class, {"upload":
name} with a part of the file, or {"press": name}. A worker thread takes all messages that have come, in order, and then
draws once; a new message makes it give up a drawing that is under way. A widget is a `Stage` with a `state` and a
`draw`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import anywidget
import numpy as np
import traitlets

from vitlens.recorder.running import out_of_memory
from vitlens.widgets.paint import Scale
from vitlens.widgets.worker import RUNNING, Superseded, ask, now, pause, working

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Control:
    """A control. kind: "select", "range" (over its options, or from 0 to high), "check", "number", "text" or
    "switches", whose value is a tuple of the options that are off. groups: names of runs of options, and lengths."""

    name: str
    label: str
    kind: str
    value: object = None
    options: tuple[tuple[str, object], ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    high: float = 0
    step: float = 1
    disabled: bool = False
    hidden: bool = False
    hint: str = ""

    def check(self, value: object) -> None:
        """Raise ValueError unless the control can have this value."""
        choices = [choice for _, choice in self.options]
        if self.kind == "switches":
            fits = isinstance(value, tuple) and all(each in choices for each in value)
            expected = f"some of {', '.join(map(repr, choices[:2]))} … {choices[-1]!r}"
        elif choices:
            fits = any(value == choice and type(value) is type(choice) for choice in choices)
            expected = f"one of {', '.join(map(repr, choices))}"
        elif self.kind == "check":
            fits, expected = isinstance(value, bool), "True or False"
        elif self.kind == "text":
            fits, expected = isinstance(value, str), "a text"
        else:
            types = int if self.step == 1 else int | float
            fits = isinstance(value, types) and not isinstance(value, bool) and 0 <= value <= self.high
            expected = f"a {'whole ' * (self.step == 1)}number from 0 to {self.high:g}"
        if not fits:
            raise ValueError(f"{self.label!r} must be {expected}, got {value!r}.")


@dataclass(frozen=True)
class Panel:
    """A picture divided into cells, with a map over it.

    picture: its name among the pictures. cell: (height, width) as shares of the picture. axes: what rows and columns
    are called. selected: (row, col) or None. picks: what a click or an arrow key chooses; "" where it does nothing.
    values: (rows, cols) or (rows, cols, 3), told when hovering. scale: their colors; None for values that are colors
    themselves or are not painted. unit: of the values. strength: the largest opacity of the map, 0 for none. opacity:
    "value", growing with it, or "even". ends: labels of the ends of the scale. points: cells with a
    dot, as (row, column, color).
    """

    name: str
    title: str
    picture: str
    rows: int
    cols: int
    cell: tuple[float, float]
    words: str = ""
    axes: tuple[str, str] = ("row", "column")
    selected: tuple[int, int] | None = None
    picks: str = ""
    values: np.ndarray | None = None
    scale: Scale | None = None
    unit: str = ""
    strength: float = 0.0
    opacity: str = "even"
    smooth: bool = False
    lines: bool = False
    ends: tuple[str, str] | None = None
    points: list[tuple[int, int, str]] = field(default_factory=list)

    def message(self) -> dict:
        """The panel as stage.js takes it, with arrays as bytes."""
        values = b"" if self.values is None else np.ascontiguousarray(self.values, "<f4").tobytes()
        scale = self.scale and {
            "low": self.scale.low, "high": self.scale.high,
            "colors": self.scale.table(self.strength, self.opacity).tobytes(),
        }  # fmt: skip
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"values": values, "scale": scale}


class Ticket:
    """The outcome of one message: its error, or ""."""

    error = ""


class Stage(anywidget.AnyWidget):
    """A state and a page drawn from it. Subclasses define `draw`, `controls` and, for slow parts, `afterwards`."""

    _esm = HERE / "stage.js"
    _css = HERE / "stage.css"
    keeps = ("state",)
    """Attributes to restore after an error. They are replaced, never changed in place."""
    pictures = traitlets.Dict().tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)

    def __init__(self, **state):
        super().__init__()
        self.state = state
        self._inbox: deque[tuple[dict, list, Ticket]] = deque()
        self._open: list[Ticket] = []  # taken but not yet drawn
        self._notes: list[str] = []
        self._stale, self._seen, self._message = True, 0, ""
        self._asked = self._answered = 0
        self._turn = threading.Condition()
        with RUNNING:
            self._show(lambda: True)
        self.on_msg(self._receive)
        ask(self._finish, later=True)

    def draw(self, wanted: Callable[[], bool]) -> dict:
        """A dictionary of panels, pictures and whatever else the page has in the present state.

        Long work calls `wanted()` between its slices, which lets others in, and raises Superseded once it is False.
        """
        raise NotImplementedError

    def controls(self) -> list[Control]:
        """The controls in the present state."""
        raise NotImplementedError

    def afterwards(self, wanted: Callable[[], bool]) -> bool:
        """Make the next slow part of the page, once nothing else is asked for; True if there was one."""
        return False

    def take(self, content: dict, buffers: list) -> str:
        """Change the state as a message of the browser asks. Returns a note for the person, or "". Raises ValueError
        for what cannot be done."""
        if "set" in content:
            self.change(**content["set"])
        return ""

    def change(self, **values) -> None:
        """Set parts of the state, one after the other. Raises ValueError, and changes nothing, if one is impossible."""
        before = self.state
        try:
            for name, value in values.items():
                controls = {control.name: control for control in self.controls()}
                if name not in controls:
                    raise ValueError(f"There is no control {name!r} here; there are {', '.join(controls)}.")
                controls[name].check(value)
                self.state = self.state | {name: value}
        except ValueError:
            self.state = before
            raise

    def set(self, **values) -> None:
        """Move controls from code, as in `set(layer=3, head="mean")`, and wait for the drawing. Raises ValueError with
        the message that the page would show."""
        ticket = self._post({"set": values}, [])
        self.wait()
        if ticket.error:
            raise ValueError(ticket.error)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything asked for is drawn; False after `timeout` seconds."""
        asked, last = self._asked, math.inf if timeout is None else time.monotonic() + timeout
        while working() and self._answered < asked and time.monotonic() < last:  # in a callback
            now(self._answer)
        with self._turn:
            return self._turn.wait_for(lambda: self._answered >= asked, timeout and max(0, last - time.monotonic()))

    def _receive(self, _, content: dict, buffers: list) -> None:
        self._post(content, buffers)

    def _post(self, content: dict, buffers: list) -> Ticket:
        ticket = Ticket()
        with self._turn:
            self._asked += 1
            self._inbox.append((content, buffers, ticket))
        ask(self._answer)
        return ticket

    def _answer(self) -> None:
        """Take all messages that have come, then draw once."""
        while self._inbox:
            content, buffers, ticket = self._inbox.popleft()
            self._open.append(ticket)
            self._stale = True
            self._seen = max(self._seen, content.get("number", 0))
            try:
                self._notes.append(self.take(content, buffers))
            except Exception as error:  # shown to the person at the browser
                ticket.error = message_of(error)
                self._notes.append(ticket.error)
        if self._attempt(lambda: self._stale):
            ask(self._finish, later=True)
        else:
            ask(self._answer)

    def _finish(self) -> None:
        """Make the slow parts of the page, until somebody asks for something."""
        more = []

        def needed() -> bool:
            more.append(self.afterwards(self._wanted))
            return more[0]

        if not self._attempt(needed) or any(more):
            ask(self._finish, later=True)

    def _attempt(self, needed: Callable[[], bool]) -> bool:
        """Draw if needed; False if that was superseded. After an error, restore the last good page."""
        error = ""
        try:
            if needed():
                self._show(self._wanted)
        except Superseded:
            return False
        except Exception as problem:  # there is nobody else to tell
            error = message_of(problem)
        try:
            if error:
                self._stale, self._notes, self._message = False, [], error
                for name, value in self._good.items():
                    setattr(self, name, value)
                self.frame = {**self.frame, "answers": self._seen, "message": error}
        finally:
            with self._turn:
                for ticket in self._open:
                    ticket.error = ticket.error or error
                self._answered += len(self._open)
                self._open = []
                self._turn.notify_all()
        return True

    def _wanted(self) -> bool:
        """Let others have their turn, then tell whether the present work is still wanted."""
        return pause() and not self._inbox

    def _show(self, wanted: Callable[[], bool]) -> None:
        drawn = self.draw(wanted)
        if self._notes:
            self._message = " ".join(filter(None, dict.fromkeys(self._notes)))
        drawn["controls"] = [asdict(control) for control in self.controls()]
        drawn["panels"] = [panel.message() for panel in drawn["panels"]]
        self.pictures = drawn.pop("pictures")  # sent only if they changed
        self._stale, self._notes = False, []
        self._good = {name: getattr(self, name) for name in self.keeps}
        self.frame = {**drawn, "answers": self._seen, "message": self._message}


def message_of(error: Exception) -> str:
    """The message of an error for the page."""
    if isinstance(error, ValueError | IndexError | OSError | ImportError):
        return str(error)
    if isinstance(error, MemoryError) or out_of_memory(error):
        return "There is not enough memory for this; use a smaller picture, size or model. The last picture is kept."
    return f"This could not be drawn ({type(error).__name__}: {error}). The last picture is kept."
