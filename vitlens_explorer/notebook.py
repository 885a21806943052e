"""Pages as notebook widgets."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anywidget
import traitlets
from torch import nn

from vitlens.names import listed_names
from vitlens_explorer import front
from vitlens_explorer.comparison import Comparison
from vitlens_explorer.drawing import still
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.lanes import QUICK, Connection, is_message
from vitlens_explorer.outputs import display_widget
from vitlens_explorer.position_maps import PositionMaps


class Widget(anywidget.AnyWidget):
    """A `Page` in a notebook. make: returns the page, in the quick lane.

    Its methods run in the thread that created it, the kernel's main thread. Other threads post to it.
    """

    _esm = front.script()
    _css = front.style()
    pictures = traitlets.Dict().tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)

    def __init__(self, make):
        super().__init__()
        self._thread = threading.get_ident()
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:  # a script
            self._loop = None
        self.page = QUICK.run(lambda check: make())
        self.connection = Connection(self.page, self._show, self.send, self._post)
        self.connection.start(QUICK.run(self.page.first))
        self.on_msg(self._receive)

    def set(self, **values) -> None:
        """Set controls, as in `set(layer=3, head="mean")`, and wait for the drawing. Raises ValueError with the page's
        message."""
        received = threading.Event()

        def receive() -> None:
            self.connection.receive({"set": values})
            received.set()

        self._call_here(receive)
        received.wait()
        self.wait()
        if self.connection.error:
            raise ValueError(self.connection.error)

    def wait(self, timeout: float = float("inf"), *, settled: bool = False) -> bool:
        """Wait until all messages are processed, and if `settled` also slow parts. False after `timeout` seconds."""
        last = time.monotonic() + timeout

        def working() -> bool:
            return not self.connection.idle if settled else self.connection.busy

        while working():
            if time.monotonic() > last:
                return False
            if self._thread == threading.get_ident():
                self._call_posted(0.05)
            else:
                time.sleep(0.01)
        return True

    def __dir__(self) -> list[str]:
        return listed_names(self, ("close", "layout", "save_page", "set", "wait"))

    def _ipython_display_(self, **_) -> None:
        """Display the widget, and a still image of its current frame for readers without a kernel."""
        steps = QUICK.run(lambda check: self.page.tour_steps())
        display_widget(self, still(self.frame, self.pictures, steps))

    def save_page(self, path: str | os.PathLike) -> Path:
        """Write the current photo of an explorer as one HTML file, as `save_page`, and return its path.
        Raises TypeError for other widgets."""
        if not isinstance(self.page, Explorer):
            raise TypeError(
                f"Only an explorer can be saved as a page, got {type(self.page).__name__}."
            )
        from vitlens_explorer.in_page import write_page

        return QUICK.run(lambda check: write_page(self.page, [self.page.state["photograph"]], path))

    def close(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()
        super().close()

    def _receive(self, _, content: dict, buffers: list) -> None:
        if is_message(content, buffers):
            self._call_here(partial(self.connection.receive, content, buffers))

    def _show(self, frame: dict, pictures: dict) -> None:
        self.pictures = pictures  # sent only if they changed
        self.frame = frame

    def _call_here(self, function: Callable[[], None]) -> None:
        """Call a function in the thread of this widget."""
        if self._thread == threading.get_ident():
            function()
        else:
            self._post(function)

    def _post(self, function: Callable[[], None]) -> None:
        self._posted.put(function)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call_posted)

    def _call_posted(self, timeout: float | None = None) -> None:
        """Call the next posted function, unless `wait` already called it."""
        try:
            function = self._posted.get(timeout is not None, timeout)
        except queue.Empty:
            return
        function()


def explore(model: nn.Module, image=None, *, size: tuple[int, int] | None = None) -> Widget:
    """Interactive widget for one image, with views by layer and head. Clicks choose a query patch or a class.

    model: any Vision Transformer that `capture` supports. image: argument of `load_image`, default one of six sample
    photographs. Others can be uploaded. size: (height, width) of the input in pixels, for models that take several.

    The widget's `set(view="rollout", layer=3, row=2, column=5)` or `set(view="relevance", target=281)` sets its
    controls. A class is a number or a name. `target=("picture", "coffee")` is the similarity to a photograph of the
    menu, and `target=("text", "a cup of coffee")` that to a text. `set(off=[(0, 2), (3, 1)], way="zero")` switches
    heads off, by (layer, head). Raises UnsupportedModelError for other models and ImageError for unreadable images.

    >>> explorer = vitlens_explorer.explore(model, cat)
    >>> explorer.set(view="rollout", layer=3)
    """
    return Widget(lambda: Explorer(model, image, size=size))


def tour(model: nn.Module, image=None) -> Widget:
    """Widget with a tour of a model on one image, in eight steps with its numbers, from pixels to the class.

    The tour follows one patch. A click on another patch, head or layer changes its numbers. The buttons or the arrow
    keys go from step to step. `explore` opens the same tour by its button "Tour". model, image: as in `explore`.

    >>> widget = vitlens_explorer.tour(model, cat)
    """
    return Widget(lambda: Explorer(model, image, guided=True))


def compare(model_a: nn.Module, model_b: nn.Module | None = None, image=None, other=None) -> Widget:
    """Widget with two models side by side, for one image and one query.

    The query patch has the same relative position in both models' inputs. Layers and heads are set for each model. With
    one model and two images, the view "correspondences" shows the most similar patch of the other image:
    `compare(model, image="cat.jpg", other="dog.jpg")`.

    model_b: default `model_a`. image: the left image, default a sample photograph. other: the right image, default the
    left one.

    >>> widget = vitlens_explorer.compare(model, image=cat, other=cat)
    """
    if model_b is None:
        model_b = model_a
    return Widget(lambda: Comparison(model_a, model_b, image, other))


def positions(model: nn.Module) -> Widget:
    """Widget with maps of the cosine similarity of a clicked position embedding to all others (paper, Fig. 7 center).

    Raises ValueError for models without a position embedding table, such as rotary ones.

    >>> widget = vitlens_explorer.positions(model)
    """
    return Widget(lambda: PositionMaps(model))
