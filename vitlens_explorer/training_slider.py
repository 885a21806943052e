"""Slider over the snapshots of a training run."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping

import ipywidgets
from PIL import Image

from vitlens import plot
from vitlens.plot.alt_text import bundle, describe
from vitlens.plot.style import WIDTH, png
from vitlens_explorer.outputs import display_widget


def training(snapshots: Mapping | str | os.PathLike) -> Slider:
    """Slider over the snapshots of a run, with its four inspection figures and a button to play them.

    snapshots: directory of a run, its `snapshots.npz`, or the result of `train.snapshots.load`.

    All figures are drawn in advance, 0.2 seconds each, so that the slider is immediate. It starts at the last one.
    Without a kernel its output is an animation of every second snapshot. Works with ipywidgets 7.7 and 8.

    >>> snapshot = vitlens.train.snapshots.record(model, images)
    >>> slider = vitlens_explorer.training({"steps": [0], **{name: a[None] for name, a in snapshot.items()}})
    """
    if not isinstance(snapshots, Mapping):
        from vitlens.train.snapshots import load

        snapshots = load(snapshots)
    frames = []
    for index in range(len(snapshots["steps"])):
        figure = plot.snapshot(snapshots, index)
        frames.append(bundle(png(figure), describe(figure), WIDTH))
    return Slider(frames)


class Slider(ipywidgets.VBox):
    """A slider over figures, each given as the `bundle` of its image and alt text."""

    def __init__(self, frames: list[dict[str, str]]):
        last = len(frames) - 1
        figure = ipywidgets.HTML(frames[last]["text/html"])
        play = ipywidgets.Play(last, max=last, interval=500)
        slider = ipywidgets.IntSlider(
            last, max=last, description="snapshot", readout=False, layout={"width": "560px"}
        )
        ipywidgets.jslink((play, "value"), (slider, "value"))

        def show(change: dict) -> None:
            figure.value = frames[change["new"]]["text/html"]

        slider.observe(show, "value")
        super().__init__([ipywidgets.HBox([play, slider]), figure])
        self._slider = slider
        self._frames = frames

    def _ipython_display_(self, **_) -> None:
        """Display the slider, and for readers without a kernel an animation of every second snapshot."""
        current = self._frames[self._slider.value]
        every_second = self._frames[(len(self._frames) - 1) % 2 :: 2]  # with the last one
        pngs = [base64.b64decode(frame["image/png"]) for frame in (current, *every_second)]
        display_widget(self, bundle(pngs[0], current["text/plain"], WIDTH, _animation(pngs)))


def _animation(pngs: list[bytes]) -> bytes:
    """A WebP that shows images in a loop, the first of them longest."""
    first, *others = (Image.open(io.BytesIO(data)).convert("RGB") for data in pngs)
    file = io.BytesIO()
    first.save(
        file,
        "WEBP",
        save_all=True,
        append_images=others,
        duration=[1500] + [600] * len(others),
        loop=0,
        quality=30,
        minimize_size=True,
    )
    return file.getvalue()
