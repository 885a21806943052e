"""Slider over the snapshots of a training run."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import ipywidgets
import matplotlib.pyplot as plt

from vitlens import plot


def training(snapshots: Mapping | Path | str) -> ipywidgets.VBox:
    """Slider over the snapshots of a run, with its four inspection figures and a button to play them.

    snapshots: directory of a run, its `snapshots.npz`, or the result of `train.snapshots.load`. All figures are drawn
    in advance, 0.2 seconds each, so that the slider is immediate. Works with ipywidgets 7.7 and 8.

    >>> snapshot = vitlens.train.snapshots.record(model, images)
    >>> slider = vitlens.widgets.training({"steps": [0], **{name: a[None] for name, a in snapshot.items()}})
    """
    if not isinstance(snapshots, Mapping):
        from vitlens.train.snapshots import load

        snapshots = load(snapshots)
    frames = [_png(plot.snapshot(snapshots, index)) for index in range(len(snapshots["steps"]))]
    last = len(frames) - 1
    picture = ipywidgets.Image(value=frames[0], format="png")
    play = ipywidgets.Play(max=last, interval=500)
    slider = ipywidgets.IntSlider(max=last, description="snapshot", readout=False, layout={"width": "560px"})
    ipywidgets.jslink((play, "value"), (slider, "value"))
    slider.observe(lambda change: picture.set_trait("value", frames[change["new"]]), "value")
    return ipywidgets.VBox([ipywidgets.HBox([play, slider]), picture])


def _png(figure: plt.Figure) -> bytes:
    figure.savefig(file := io.BytesIO(), format="png")
    return file.getvalue()
