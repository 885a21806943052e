"""Widgets without a browser: what a control does to what is shown."""

import io

import ipywidgets
import numpy as np
from PIL import Image
from test_plot import snapshots

from vitlens import plot
from vitlens.widgets import training


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def drawn(figure):
    figure.savefig(file := io.BytesIO(), format="png")
    return pixels(file.getvalue())


def test_the_slider_shows_the_snapshot_it_stands_at():
    run = snapshots(3)
    controls, picture = training(run).children
    _, slider = controls.children
    assert (slider.min, slider.max, slider.value) == (0, 2, 0)
    for index in (2, 0, 1):
        slider.value = index
        assert np.array_equal(pixels(picture.value), drawn(plot.snapshot(run, index)))


def test_the_button_moves_the_slider_in_the_browser():
    made = []
    ipywidgets.Widget.on_widget_constructed(made.append)
    try:
        play, slider = training(snapshots(2)).children[0].children
    finally:
        ipywidgets.Widget.on_widget_constructed(None)
    (link,) = [widget for widget in made if hasattr(widget, "source")]
    assert (link.source, link.target) == ((play, "value"), (slider, "value"))
    assert isinstance(play, ipywidgets.Play) and (play.min, play.max) == (slider.min, slider.max) == (0, 1)
