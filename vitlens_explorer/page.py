"""Pages of controls, clickable images and text, described in Python and drawn by the front end.

A `Page` runs in the quick lane, without traits and sockets. The browser sends {"set": {name: value}},
{"pick": panel, "row": r, "col": c}, {"why": class number}, {"upload": name} with a file, or {"press": name}. A question
{"ask": kind} gets an answer without a drawing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vitlens.names import require_known
from vitlens.plot.style import colors, translucent
from vitlens_explorer.lanes import Answer, Cancelled, Job

Check = Callable[..., None]
"""Callback before forwards, with their number. It raises Cancelled after the request was cancelled."""
CANCELED = "Canceled. It is computed again after another choice."
"""Result of an optional job that the user canceled, until the next change of the state."""
RESULTS = 100
"""Number of results, such as maps and scores, that a page keeps."""


def unchecked(*_) -> None:
    """The check of work that is not cancelled."""


@dataclass(frozen=True)
class Control:
    """A control. kind: "select", "range" (over its options, or from 0 to high), "check", "text", "questions" (a
    menu in two rows) or "switches", whose value is the tuple of switched-off options. groups: (name, length) of
    groups of options, for "questions" with a line. place: name of the closed group of controls or of a panel above it,
    "top" for above the panels, "heads" for under the mosaic, or "" for the form."""

    name: str
    label: str
    kind: str
    value: object = None
    options: tuple[tuple[str, object], ...] = ()
    groups: tuple[tuple, ...] = ()
    high: float = 0
    step: float = 1
    disabled: bool = False
    hidden: bool = False
    hint: str = ""
    place: str = ""

    def check(self, value: object) -> None:
        """Raise ValueError for an invalid value."""
        choices = [choice for _, choice in self.options]
        if self.kind == "switches":
            return
        if choices:
            fits = any(value == choice and type(value) is type(choice) for choice in choices)
            expected = f"one of {', '.join(map(repr, choices))}"
        elif self.kind in ("check", "text"):
            fits = isinstance(value, bool if self.kind == "check" else str)
            expected = "True or False" if self.kind == "check" else "a text"
        else:
            whole = self.step == 1
            number = isinstance(value, int if whole else int | float) and not isinstance(
                value, bool
            )
            fits = number and 0 <= value <= self.high
            expected = f"a {'whole ' * whole}number from 0 to {self.high:g}"
        if not fits:
            raise ValueError(f"{self.label!r} must be {expected}, got {value!r}.")


MAPS = ("viridis", "magma", "cividis", "gray", "RdBu_r")


@dataclass(frozen=True)
class Scale:
    """A Matplotlib color map from low to high."""

    cmap: str
    low: float
    high: float

    def table(self, alpha: float = 1.0, opacity: str = "even") -> np.ndarray:
        """RGBA colors (256, 4) uint8 from low to high, with the opacity of `plot.overlay`."""
        shown = translucent(self.cmap, self.low, self.high, alpha, opacity)
        return (shown(np.arange(256)) * 255).round().astype(np.uint8)


def scale_of(
    values: np.ndarray, *, cmap: str = "", stretch: bool = False, limit: float | None = None
) -> Scale:
    """Color scale of a map from 0 to its largest value, or ±largest in red and blue if some values are negative.

    limit: end of a signed scale, such as 1 for cosines. stretch: from the smallest to the largest value instead. cmap:
    another color map.
    """
    if stretch:
        return Scale(cmap or "viridis", float(values.min()), float(values.max()))
    chosen = colors(values, cmap or None, signed=None if limit is None else True)
    high = float(limit or chosen["vmax"])
    return Scale(chosen["cmap"].name, -high if chosen["vmin"] < 0 else 0.0, high)


@dataclass(frozen=True)
class Panel:
    """An image divided into cells, with a map over it.

    picture: name of the image in `pictures`. cell: (height, width) as shares of the image. selected: (row, col)
    or None. picks: noun for the target of a click, or "". values: (rows, cols) or (rows, cols, 3). scale: color scale,
    or None for RGB values and panels without a map. strength: largest opacity of the map. opacity: "value", growing
    with the value, or "even". ends: labels of the color scale. tokens: tiles that choose a token outside the image as
    the query. legend: unit and rule of the color scale. sinks: cells to mark. hides: True to leave the map out there.
    """

    name: str
    title: str
    picture: str
    rows: int
    cols: int
    cell: tuple[float, float]
    words: str = ""
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
    tokens: tuple[dict, ...] = ()
    legend: str = ""
    sinks: tuple[tuple[int, int], ...] = ()
    hides: bool = False

    def message(self) -> dict:
        """The panel in the format of the front end, with arrays as bytes."""
        values = b"" if self.values is None else np.ascontiguousarray(self.values, "<f4").tobytes()
        scale = self.scale and {
            "low": self.scale.low,
            "high": self.scale.high,
            "colors": self.scale.table(self.strength, self.opacity).tobytes(),
        }
        return vars(self) | {"values": values, "scale": scale}


class Page:
    """A state and the frame drawn from it.

    Subclasses define `draw(check)`, which returns a dictionary of panels, pictures and other parts of the frame, or the
    job that it needs first. They define `controls()`, a list, and `job` for slow parts. The state is replaced, never
    changed in place, so that the last valid state can be restored after an error.
    """

    plain: frozenset[str] = frozenset()
    """Parts of the state without effect on other controls."""

    def __init__(self, **state):
        self.state, self.frame, self.pictures = state, {}, {}
        self.results: dict[
            tuple, object
        ] = {}  # of jobs and of `once`, or the message of a failed job
        self.shown: dict[str, Control] = {}  # the controls of the last drawing
        self.files: list[
            tuple[int, dict[str, bytes]]
        ] = []  # downloads: (number of the message, files)
        self._menus, self._good, self._seen, self._message = None, state, 0, ""
        self._awaited: tuple | None = None  # key of the job that the drawing needs

    def job(self) -> Job | None:
        """The next slow part of the page, for the long lane after the drawing."""
        return None

    def menus(self) -> object:
        """Key of the controls, equal if they differ only in values of `plain`."""
        return [(name, value) for name, value in self.state.items() if name not in self.plain]

    def take(self, content: dict, buffers: list) -> None:
        """Change the state by a message of the browser."""
        self.change(**content.get("set", {}))

    def change(self, **values) -> None:
        """Set parts of the state in order. Raises ValueError for an invalid value, with the state unchanged."""
        before = self.state
        try:
            for name, value in values.items():
                self._renew_controls()  # a new view may have other heads
                require_known(name, self.shown, "A control of this page")
                self.shown[name].check(value)
                self.state = self.state | {name: value}
        except ValueError:
            self.state = before
            raise

    def first(self, check: Check) -> Answer:
        """The first drawing, with errors raised."""
        self._draw(check)
        return Answer(self.frame, self.pictures, self.job())

    def answer(self, messages: list[tuple[dict, list]], check: Check) -> Answer:
        """Process all messages, then draw once. After an error, the answer is the last valid page with a message."""
        before, errors, self.files = self.state, [], []
        for content, buffers in messages:
            self._seen = max(self._seen, content.get("number", 0))
            try:
                if "job" in content:
                    self._finish(tuple(content["job"]), buffers[0])
                elif "cancel" in content:
                    self.state = self._good
                    if content["cancel"] not in (None, self._awaited):
                        self.results[content["cancel"]] = CANCELED
                else:
                    self.take(content, buffers)
            except Exception as error:  # shown on the page
                errors.append(sentence(error))
        if errors or not all("job" in content for content, _ in messages):
            self._message = " ".join(dict.fromkeys(errors))
        job = None
        try:
            if awaited := self._draw(check):
                return Answer(None, None, awaited, self.files, errors)
            job = self.job()
        except Cancelled:
            self.state = before
            raise
        except Exception as error:
            errors.append(sentence(error))
            self.state, self._message = self._good, errors[-1]
            self.frame = self.frame | {"answers": self._seen, "message": self._message}
            with contextlib.suppress(Exception):  # the same error again
                job = self.job()
        return Answer(self.frame, self.pictures, job, self.files, errors)

    def reply(self, content: dict, check: Check) -> tuple[dict, list[bytes]]:
        """Answer to a question {"ask": kind, …} and its buffers, or {"problem": message}. The page stays as it is."""
        try:
            return self.look_up(content, check)
        except Cancelled:
            raise
        except Exception as error:
            return {"problem": sentence(error)}, []

    def look_up(self, content: dict, check: Check) -> tuple[dict, list[bytes]]:
        """As `reply`, with errors raised. Subclasses override it."""
        raise ValueError(f"This page does not answer {content['ask']!r}.")

    def once(self, key: tuple, make: Callable[[], object]) -> object:
        """A cached result, computed if missing. The oldest beyond `RESULTS` are dropped."""
        if key not in self.results:
            self.results[key] = make()
            while len(self.results) > RESULTS:
                del self.results[next(iter(self.results))]
        return self.results[key]

    def _finish(self, key: tuple, value: object) -> None:
        """Store the result of a job, or the message of its failure if the page does not need it."""
        if not isinstance(value, Exception):
            self.once(key, lambda: value)
            return
        if isinstance(key[0], str):  # an optional part of the page
            self.once(key, lambda: sentence(value))
        elif key == self._awaited:
            self.state = self._good
        raise value

    def _renew_controls(self) -> None:
        """Recreate the controls if `menus` changed."""
        if (menus := self.menus()) != self._menus:
            self.shown, self._menus = {control.name: control for control in self.controls()}, menus
            self.results = {
                key: value for key, value in self.results.items() if value is not CANCELED
            }

    def _draw(self, check: Check) -> Job | None:
        """Draw the frame, or return the job that it needs."""
        drawn = self.draw(check)
        if isinstance(drawn, Job):
            self._awaited = drawn.key
            return drawn
        self._renew_controls()
        for name in self.shown.keys() & self.plain:
            if self.shown[name].value != self.state[name]:
                self.shown[name] = replace(self.shown[name], value=self.state[name])
        self.pictures, self._good = drawn.pop("pictures"), self.state
        panels = [panel.message() for panel in drawn.pop("panels")]
        controls = [vars(control) for control in self.shown.values()]
        self.frame = drawn | {
            "panels": panels,
            "controls": controls,
            "answers": self._seen,
            "message": self._message,
        }
        return None


def sentence(error: Exception) -> str:
    """Message of an error for the page."""
    from vitlens.recorder.memory import is_out_of_memory

    if isinstance(error, ValueError | IndexError | OSError | ImportError):
        return str(error)
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return "There is not enough memory. Use a smaller image, size or model. The last image is kept."
    return f"Drawing failed ({type(error).__name__}: {error}). The last image is kept."
