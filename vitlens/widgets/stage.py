"""The page that all widgets share: controls, clickable pictures and sentences, described by Python and drawn by the
browser. What a person does comes back as a message; one worker answers them all, the newest first.

The browser sends {"set": {name: value}}, {"pick": panel, "row": r, "col": c}, {"upload": name} with the file, or
{"press": name}. A widget is a `Stage` with a `state` and a `draw`; everything else is here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import anywidget
import numpy as np
import traitlets

from vitlens.images import ImageError
from vitlens.support import out_of_memory
from vitlens.widgets.paint import Scale
from vitlens.widgets.subject import Superseded
from vitlens.widgets.worker import RUNNING, ask, idle

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Control:
    """One control. kind: "select", "range" (over its options, or from low to high), "check", "number" or "button"."""

    name: str
    label: str
    kind: str
    value: object = None
    options: tuple[tuple[str, object], ...] = ()
    low: float = 0
    high: float = 0
    step: float = 1
    disabled: bool = False

    def check(self, value: object) -> None:
        """Raise ValueError unless it can stand at a value."""
        choices = [choice for _, choice in self.options]
        if choices and value not in choices:
            raise ValueError(f"{self.label!r} is one of {', '.join(map(repr, choices))}, but {value!r} came.")
        if self.kind == "check" and not isinstance(value, bool):
            raise ValueError(f"{self.label!r} is True or False, but {value!r} came.")
        if self.kind in ("number", "range") and not choices:
            whole = self.step == 1
            numeric = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not numeric or not self.low <= value <= self.high:
                wanted = f"a {'whole ' * whole}number from {self.low:g} to {self.high:g}"
                raise ValueError(f"{self.label!r} is {wanted}, but {value!r} came.")


@dataclass(frozen=True)
class Panel:
    """A picture of cells, with a map over it.

    picture: which of the pictures sent. cell: (height, width) as shares of the picture. axes: what a row and a column
    are called. selected: (row, col) or None. picks: what a click or an arrow key asks for, nothing if empty. values:
    what hovering tells, (rows, cols) or (rows, cols, 3). scale: their colours, None for values that are colours
    themselves or are not painted. strength: opacity of the map, 0 for none. ends: the ends of the scale in words.
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
    strength: float = 0.0
    smooth: bool = False
    lines: bool = False
    ends: tuple[str, str] | None = None

    def message(self) -> dict:
        """Ready to be sent: arrays as bytes."""
        values = b"" if self.values is None else np.ascontiguousarray(self.values, "<f4").tobytes()
        scale = None if self.scale is None else self.scale.message()
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"values": values, "scale": scale}


class Stage(anywidget.AnyWidget):
    """A widget as a state and a page made of it. Subclasses give `state` and `draw`; `afterwards` adds slower parts."""

    _esm = HERE / "stage.js"
    _css = HERE / "stage.css"
    pictures = traitlets.Dict().tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)

    def __init__(self, **state):
        super().__init__()
        self.state = state
        self._inbox: deque[tuple[dict, list]] = deque()
        self._stale, self._seen, self._message = True, 0, ""
        self._drawn = threading.Event()
        with RUNNING:
            self._show(lambda: True)
        self._drawn.set()
        self.on_msg(self._receive)
        ask(self._finish, later=True)

    def draw(self, wanted: Callable[[], bool]) -> dict:
        """panels, pictures and whatever else the page has, of the present state. Long work asks `wanted()` now and then
        and raises Superseded."""
        raise NotImplementedError

    def controls(self) -> list[Control]:
        """The controls, as they stand in the present state."""
        raise NotImplementedError

    def afterwards(self, wanted: Callable[[], bool]) -> bool:
        """Slower parts of the page, made while nothing else is wanted; True if there is something new to draw."""
        return False

    def take(self, content: dict, buffers: list) -> str:
        """One message of the browser: changes the state, or raises ValueError with a sentence. Returns what there is to
        say about it."""
        if "set" in content:
            self.change(**content["set"])
        return ""

    def change(self, **values) -> None:
        """Set parts of the state, one after the other. Raises ValueError for what there is not, and changes nothing."""
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
        """Move controls from code, as in `set(layer=3, head="mean")`, and wait for the picture. Raises ValueError with
        the sentence that the page would show."""
        self._receive(self, {"set": values}, [])
        self.wait()
        if self._message:
            raise ValueError(self._message)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything asked for is drawn; False if that took longer than `timeout` seconds."""
        return self._drawn.wait(timeout)

    def _receive(self, _, content: dict, buffers: list) -> None:
        self._drawn.clear()
        self._inbox.append((content, buffers))
        ask(self._answer)

    def _answer(self) -> None:
        """Take what has come, draw once, and send."""
        before = self.state
        while self._inbox:
            content, buffers = self._inbox.popleft()
            self._stale, self._message = True, ""
            self._seen = max(self._seen, content.get("number", 0))
            try:
                self._message = self.take(content, buffers)
            except Exception as error:  # it is for the person at the browser
                self._message = sentence(error)
        if self._attempt(lambda: self._stale, before):
            self._drawn.set()
            if self._inbox:  # came just now, and will be answered
                self._drawn.clear()
            ask(self._finish, later=True)

    def _finish(self) -> None:
        """Make the slower parts of the page, unless somebody asks for something meanwhile."""
        if not self._attempt(lambda: self.afterwards(idle), self.state):
            ask(self._finish, later=True)

    def _attempt(self, needed: Callable[[], bool], before: dict) -> bool:
        """Draw if needed; False if that was superseded. After an error the last good state and picture stay."""
        try:
            if needed():
                self._show(lambda: not self._inbox)
        except Superseded:
            return False
        except Exception as error:  # a worker has nobody else to tell
            self.state, self._message, self._stale = before, sentence(error), False
            self.frame = {**self.frame, "answers": self._seen, "message": self._message}
        return True

    def _show(self, wanted: Callable[[], bool]) -> None:
        drawn = self.draw(wanted)
        drawn["controls"] = [asdict(control) for control in self.controls()]
        drawn["panels"] = [panel.message() for panel in drawn["panels"]]
        self.pictures = drawn.pop("pictures")  # sent only if they are others
        self.frame = {**drawn, "answers": self._seen, "message": self._message}
        self._stale = False


def sentence(error: Exception) -> str:
    """An error as a whole sentence for the page."""
    if isinstance(error, ImageError | ValueError | IndexError | ConnectionError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and out_of_memory(error)):
        return "There is not enough memory for this; use a smaller picture, size or model. The last picture is kept."
    return f"This could not be drawn ({type(error).__name__}: {error}). The last picture is kept."
