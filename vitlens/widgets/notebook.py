"""The pages as widgets of a notebook."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from pathlib import Path

import anywidget
import traitlets
from torch import nn

from vitlens.widgets.all_heads import AllHeads
from vitlens.widgets.comparison import Comparison
from vitlens.widgets.explorer import Explorer
from vitlens.widgets.lanes import QUICK, Connection
from vitlens.widgets.position_maps import PositionMaps

HERE = Path(__file__).parent


class Widget(anywidget.AnyWidget):
    """A `Page` in a notebook. page: made by make(), in the quick lane.

    Its methods belong to the thread that made it, the kernel's main thread. Other threads hand over to it.
    """

    _esm = HERE / "front.js"
    _css = HERE / "front.css"
    pictures = traitlets.Dict().tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)

    def __init__(self, make):
        super().__init__()
        self._thread, self._results = threading.get_ident(), queue.SimpleQueue()
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:  # a script
            self._loop = None
        self.page = QUICK.run(lambda check: make())
        self.connection = Connection(self.page, self._show, self.send, self._post)
        self.connection.start(QUICK.run(self.page.first))
        self.on_msg(lambda _, content, buffers: self._here(lambda: self.connection.receive(content, buffers)))

    def set(self, **values) -> None:
        """Move controls from code, as in `set(layer=3, head="mean")`, and wait for the drawing. Raises ValueError with
        the message that the page would show."""
        received = threading.Event()
        self._here(lambda: (self.connection.receive({"set": values}), received.set()))
        received.wait()
        self.wait()
        if self.connection.error:
            raise ValueError(self.connection.error)

    def wait(self, timeout: float = float("inf"), *, settled: bool = False) -> bool:
        """Wait until all messages are answered. settled: and until slow parts are there. False after timeout
        seconds."""
        last = time.monotonic() + timeout
        while not self.connection.settled if settled else self.connection.busy:
            if time.monotonic() > last:
                return False
            if self._thread == threading.get_ident():
                self._take(0.05)
            else:
                time.sleep(0.01)
        return True

    def close(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()
        super().close()

    def _show(self, frame: dict, pictures: dict) -> None:
        self.pictures = pictures  # sent only if they changed
        self.frame = frame

    def _here(self, function) -> None:
        """Call a function in the thread of this widget."""
        if self._thread == threading.get_ident():
            function()
        else:
            self._post(function)

    def _post(self, function) -> None:
        self._results.put(function)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take)

    def _take(self, timeout: float | None = None) -> None:
        """Call the next function that was posted; `wait` may have called it already."""
        try:
            function = self._results.get(timeout is not None, timeout)
        except queue.Empty:
            return
        function()


def explore(model: nn.Module, image=None, *, size: tuple[int, int] | None = None) -> Widget:
    """An interactive page for one image: choose a view, a layer and a head, and click a patch to look from it, or a
    class to see which patches speak for it and how far to trust that map.

    model: any Vision Transformer that `capture` takes. image: what `load_image` takes; by default one of six
    sample photographs. Others can be uploaded. size: (height, width) in pixels to show it at, for models that take
    several sizes.

    The widget's `set(view="rollout", layer=3, row=2, column=5)` or `set(view="relevance", target=281)` moves its
    controls. A class is a number or a name; `target=("picture", "coffee")` is the likeness to a photograph of the menu,
    and `target=("text", "a cup of coffee")` that to a text. `set(off=[(0, 2), (3, 1)], way="zero")` switches heads off,
    by (layer, head). Raises UnsupportedModelError for other models and ImageError for unreadable images.
    """
    return Widget(lambda: Explorer(model, image, size=size))


def heads(model: nn.Module, image=None) -> Widget:
    """Thumbnails of every head of every layer: its attention from one query. Click one to enlarge it, and click the
    enlarged one to look from another patch. model, image: as in `explore`."""
    return Widget(lambda: AllHeads(model, image))


def compare(model_a: nn.Module, model_b: nn.Module | None = None, image=None, other=None) -> Widget:
    """Two models side by side with one image and one query. A patch is the same place in each model's input, whatever
    their grids are; layers and heads are chosen for each model.

    With one model and two images, the view "correspondences" finds for a patch of one its nearest in the other:
    `compare(model, image="cat.jpg", other="dog.jpg")`.

    model_b: by default `model_a`. image, other: for the left and the right side; by default a sample photograph, and
    the same on the right.
    """
    return Widget(lambda: Comparison(model_a, model_a if model_b is None else model_b, image, other))


def positions(model: nn.Module) -> Widget:
    """Maps of the cosine similarity of one position embedding to all others; click a position to see its own (paper,
    Fig. 7 center).

    Raises ValueError for models without a table of position embeddings (rotary ones).
    """
    return Widget(lambda: PositionMaps(model))
