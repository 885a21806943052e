"""A training run in figures, with a slider over its snapshots."""

from __future__ import annotations

import io
from collections.abc import Mapping

import ipywidgets
import matplotlib.pyplot as plt

from vitlens import plot


def training(snapshots: Mapping) -> ipywidgets.VBox:
    """A slider over the snapshots of a run, which moves its four inspection figures at once, and a button to play them.

    snapshots: what `train.snapshots.load` returns. All figures are drawn in advance, a fifth of a second each, so that
    the slider never waits. Works with ipywidgets 7.7 and 8.
    """
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
