"""Files of figures under settings of Matplotlib that a person has made for another purpose."""

import io
import os
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
from forms import form
from PIL import Image

from vitlens import plot, report
from vitlens.images import samples
from vitlens_explorer import drawing

HOSTILE = {
    "savefig.format": "svg",
    "savefig.bbox": "tight",
    "savefig.pad_inches": 2,
    "savefig.dpi": 30,
    "savefig.transparent": True,
    "savefig.facecolor": "black",
    "text.usetex": True,
    "figure.dpi": 300,
    "figure.facecolor": "black",
    "figure.autolayout": True,
    "font.size": 30,
    "image.origin": "lower",
    "axes.grid": True,
    "axes.prop_cycle": mpl.cycler(color=["white"]),
}


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def of_inspection(model, folder) -> list[bytes]:
    inspection = report.inspect(model, [("cat", samples()["chelsea"])])
    paths = report.write_inspection(inspection, folder)
    return [path.read_bytes() for path in paths if path.suffix == ".png"]


def of_explanation(model, folder) -> list[bytes]:
    explanations = report.explain(model, [("cat", samples()["chelsea"])], names=["rollout"])
    paths = report.write_explanations(explanations, folder)
    return [path.read_bytes() for path in paths if path.suffix == ".png"]


def of_style(model, folder) -> list[bytes]:
    figure = plot.tiles({"ramp": np.arange(6.0).reshape(2, 3)})
    return [plot.style.png(figure)]


@pytest.mark.slow
@form(7, door="Python: report.write_*", case="matplotlibrc for a paper", right="the same pixels")
@pytest.mark.parametrize("make", [of_inspection, of_explanation, of_style])
def test_figures_do_not_depend_on_the_settings_of_matplotlib(make, vit, tmp_path):
    model = vit()
    expected = make(model, tmp_path / "usual")
    with mpl.rc_context(HOSTILE):
        found = make(model, tmp_path / "hostile")
    assert expected
    for ours, reference in zip(found, expected, strict=True):
        np.testing.assert_array_equal(pixels(ours), pixels(reference))


@form(8, door="command: any", case="MPLBACKEND of a notebook, missing here", right="a figure")
@pytest.mark.parametrize("backend", ["ipympl", "module://no_such_backend", "TkAgg"])
def test_commands_ignore_the_backend_of_a_notebook(backend, tmp_path):
    code = (
        "import vitlens.cli, sys; vitlens.cli.run = lambda: __import__('matplotlib.pyplot');"
        "vitlens.cli.main(); print(sys.modules['matplotlib'].get_backend())"
    )
    environment = os.environ | {"MPLBACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip().lower() == "agg", done.stderr


@form(7, door="notebook: Save", case="matplotlibrc for a paper", right="the same pixels")
def test_saved_figure_does_not_depend_on_the_settings_of_matplotlib(explorer):
    page = explorer.page
    panel = page._panel(page.view())
    expected = drawing.figure_png(page.forward, panel)
    with mpl.rc_context(HOSTILE):
        found = drawing.figure_png(page.forward, panel)
    np.testing.assert_array_equal(pixels(found), pixels(expected))
