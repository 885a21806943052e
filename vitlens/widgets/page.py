"""A page of controls, clickable images and text, described in Python and drawn by front.js.

A `Page` lives in the quick lane: nothing here touches a trait or a socket. The browser sends {"set": {name: value}},
{"pick": panel, "row": r, "col": c}, {"why": class number}, {"upload": name} with a file, or {"press": name}.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from vitlens.widgets.drawing import Scale
from vitlens.widgets.lanes import Answer, Cancelled, Job

Check = Callable[[], None]
"""Called between two forwards; raises Cancelled once the result is no longer needed."""
RESULTS = 100
"""Results that a page keeps, such as maps and scores."""


class Later(Exception):
    """Raised where a map takes long: the job that makes it."""

    def __init__(self, job: Job):
        super().__init__(job.key)
        self.job = job


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
            fits = isinstance(value, tuple) and all(head in choices for head in value)
            expected = f"some of {choices[0]!r} … {choices[-1]!r}"
        elif choices:
            fits = any(value == choice and type(value) is type(choice) for choice in choices)
            expected = f"one of {', '.join(map(repr, choices))}"
        elif self.kind in ("check", "text"):
            kind, expected = {"check": (bool, "True or False"), "text": (str, "a text")}[self.kind]
            fits = isinstance(value, kind)
        else:
            types = int if self.step == 1 else int | float
            fits = isinstance(value, types) and not isinstance(value, bool) and 0 <= value <= self.high
            expected = f"a {'whole ' * (self.step == 1)}number from 0 to {self.high:g}"
        if not fits:
            raise ValueError(f"{self.label!r} must be {expected}, got {value!r}.")


@dataclass(frozen=True)
class Panel:
    """An image divided into cells, with a map over it.

    picture: its name among the pictures. cell: (height, width) as shares of the image. axes: names of rows and columns.
    selected: (row, col) or None. picks: the name of what a click chooses, or "". values: (rows, cols) or
    (rows, cols, 3). scale: their colors; None for values that are colors themselves or are not painted. strength: the
    largest opacity of the map. opacity: "value", growing with the value, or "even". ends: labels of the color scale.
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

    def message(self) -> dict:
        """The panel as front.js takes it, with arrays as bytes."""
        values = b"" if self.values is None else np.ascontiguousarray(self.values, "<f4").tobytes()
        scale = self.scale and {
            "low": self.scale.low, "high": self.scale.high,
            "colors": self.scale.table(self.strength, self.opacity).tobytes(),
        }  # fmt: skip
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"values": values, "scale": scale}


class Page:
    """A state and the frame drawn from it. Subclasses define `draw`, `controls` and, for slow parts, `job`."""

    keeps: tuple[str, ...] = ("state",)
    """Attributes to restore after an error. They are replaced, never changed in place."""
    plain: frozenset[str] = frozenset()
    """Parts of the state on which no other control depends."""

    def __init__(self, **state):
        self.state, self.frame, self.pictures = state, {}, {}
        self.results: dict[tuple, object] = {}
        self.shown: dict[str, Control] = {}  # the controls of the last drawing
        self._menus: object = None
        self._good: dict = {}
        self._seen, self._files, self._message = 0, [], ""
        self._awaited: tuple | None = None  # key of the job without which nothing can be drawn

    def draw(self, check: Check) -> dict:
        """A dictionary of panels, pictures and whatever else the page has in the present state."""
        raise NotImplementedError

    def controls(self) -> list[Control]:
        """The controls in the present state."""
        raise NotImplementedError

    def job(self) -> Job | None:
        """The next slow part of the page, made in the long lane after the drawing."""
        return None

    def menus(self) -> object:
        """Equal as long as the controls differ in nothing but the values of `plain`."""
        return [(name, value) for name, value in self.state.items() if name not in self.plain]

    def take(self, content: dict, buffers: list) -> str:
        """Change the state as a message of the browser asks. Returns a note for the reader, or ""."""
        if "set" in content:
            self.change(**content["set"])
        return ""

    def change(self, **values) -> None:
        """Set parts of the state, one after the other. Raises ValueError, and changes nothing, if one is impossible."""
        before = self.state
        if self.menus() != self._menus:
            self._renew_controls()
        try:
            for name, value in values.items():
                if any(self.state[other] != before[other] for other in self.state.keys() - self.plain):
                    self._renew_controls()  # a view that was set here may have other heads
                if name not in self.shown:
                    raise ValueError(f"There is no control {name!r} here; there are {', '.join(self.shown)}.")
                self.shown[name].check(value)
                self.state = self.state | {name: value}
        except ValueError:
            self.state, self._menus = before, None
            raise

    def first(self, check: Check) -> Answer:
        """The first drawing. Raises whatever is wrong."""
        return Answer(self._drawn(check, ""), self.pictures, self.job())

    def answer(self, messages: list[tuple[dict, list]], check: Check) -> Answer:
        """Take all messages, then draw once. After an error, the last good page is shown with a sentence about it."""
        before = {name: getattr(self, name) for name in self.keeps}
        notes, errors, self._files = [], [], []
        for content, buffers in messages:
            self._seen = max(self._seen, content.get("number", 0))
            try:
                if "job" in content:
                    self._finish(tuple(content["job"]), content["failed"], *buffers)
                else:
                    notes.append(self.take(content, buffers))
            except Exception as error:  # shown to the reader
                errors.append(sentence(error))
        message = " ".join(filter(None, dict.fromkeys([*notes, *errors])))
        if message or not all("job" in content for content, _ in messages):
            self._message = message
        try:
            frame = self._drawn(check, self._message)
            job = self.job()
        except Cancelled:
            self._restore(before)
            raise
        except Later as later:
            self._awaited = later.job.key
            return Answer(None, None, later.job, self._files, errors)
        except Exception as error:
            errors.append(sentence(error))
            self._restore(self._good)
            self._message = errors[-1]
            frame, job = {**self.frame, "answers": self._seen, "message": self._message}, None
            self.frame = frame
            with contextlib.suppress(Exception):  # the error that the message reports, once more
                job = self.job()
        return Answer(frame, self.pictures, job, self._files, errors)

    def keep(self, key: tuple, value: object) -> object:
        """Keep a result, and drop the oldest beyond `RESULTS`."""
        self.results[key] = value
        while len(self.results) > RESULTS:
            self.results.pop(next(iter(self.results)))
        return value

    def once(self, key: tuple, make: Callable[[], object]) -> object:
        """A result, made now or kept from before."""
        return self.results[key] if key in self.results else self.keep(key, make())

    def _finish(self, key: tuple, failed: bool, value: object) -> None:
        if not failed:
            self.keep(key, value)
            return
        self.keep(("failed", *key), sentence(value))
        if key == self._awaited:
            self._restore(self._good)
        raise value

    def _restore(self, values: dict) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _renew_controls(self) -> None:
        self.shown, self._menus = {control.name: control for control in self.controls()}, self.menus()

    def _drawn(self, check: Check, message: str) -> dict:
        drawn = self.draw(check)
        if self.menus() != self._menus:
            self._renew_controls()
        else:
            for name in self.shown.keys() & self.plain:
                if self.shown[name].value != self.state[name]:
                    self.shown[name] = replace(self.shown[name], value=self.state[name])
        drawn["panels"] = [panel.message() for panel in drawn["panels"]]
        self.pictures = drawn.pop("pictures")
        self._good = {name: getattr(self, name) for name in self.keeps}
        controls = [asdict(control) for control in self.shown.values()]
        self.frame = {**drawn, "controls": controls, "answers": self._seen, "message": message}
        return self.frame


def sentence(error: Exception) -> str:
    """The message of an error for the page."""
    from vitlens.recorder.forward import out_of_memory

    if isinstance(error, ValueError | IndexError | OSError | ImportError):
        return str(error)
    if isinstance(error, MemoryError) or out_of_memory(error):
        return "There is not enough memory for this; use a smaller image, size or model. The last image is kept."
    return f"This could not be drawn ({type(error).__name__}: {error}). The last image is kept."
