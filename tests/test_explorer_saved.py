"""Files, pages and names that the explorer saves."""

import csv
import io
import json
import re
import zipfile

import numpy as np
import pandas as pd
import torch
from PIL import Image
from support import PICTURE, caption, send, values

import vitlens
import vitlens_explorer as widgets
from vitlens.images import samples
from vitlens_explorer import in_page, photographs, views
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.lanes import never_cancel
from vitlens_explorer.results import Key
from vitlens_explorer.words import say


def test_pages_leave_out_views_that_their_scripts_cannot_draw(vit, monkeypatch):
    """A new view of Python needs no script: notebook and app show it, and pages do not list it."""
    script = (in_page.IN_PAGE / "maps.js").read_text("utf-8")
    table = script[script.index("const MAPS = {") :]
    table = table[: table.index("\n};")]
    assert set(re.findall(r"^  (\w+)\(record", table, re.M)) == in_page.SCRIPTED_VIEWS
    plain = views.View("Ones", lambda forward, choice, check: views.Map(np.ones((4, 4)), "Ones"))
    monkeypatch.setitem(views.VIEWS, "ones", plain)
    explorer = widgets.explore(vit(), PICTURE)
    explorer.set(view="ones")
    assert (values(explorer) == 1).all() and caption(explorer).startswith("Ones")
    page = explorer.page
    content = in_page._content(
        page, list(page.photographs)[:1], False, lambda step: None, never_cancel
    )
    assert "attention" in content["views"] and "ones" not in content["views"]


PAINTED = {
    "model",
    "weights",
    "vitlens",
    "words",
    "photograph",
    "view",
    "strength",
    "smooth",
    "lines",
}


COLORED = PAINTED | {"opacity", "colors", "stretch"}


SAVED = {
    "attention": COLORED | {"layer", "head", "query", "row", "column", "sinks"},
    "norms": COLORED | {"layer"},
    "components": PAINTED | {"layer"},  # RGB values
    "lens": COLORED | {"layer", "query", "row", "column", "target"},
    "contributions": COLORED | {"layer", "head", "target", "against"},
    "relevance": COLORED | {"target", "against"},
}


TABLES = {"lens": "-layers.csv", "contributions": "-parts.csv", "relevance": "-score.csv"}
"""Files with further numbers of a view."""


def table_equals_chart(frame, file):
    """A saved table has the numbers of the chart of its view."""
    lines = list(csv.DictReader(io.StringIO(file.decode())))
    if frame["lens"]:
        chart = [(str(row["layer"]), row["name"], row["share"]) for row in frame["lens"]["rows"]]
        return chart == [(row["layer"], row["name"], float(row["probability"])) for row in lines]
    column = [float(row["contribution"]) for row in lines if "contribution" in row]
    if frame["parts"]:
        parts = frame["parts"]
        others = [value for _, value in parts["others"]]
        return column == [*sum(parts["heads"], []), *parts["mlps"], *others]
    curves = frame["score"]["curves"] | {"share": frame["score"]["shares"]}
    return all(values == [float(row[name]) for row in lines] for name, values in curves.items())


def test_explorer_saved_files_equal_page(explorer, monkeypatch):
    sent = []
    monkeypatch.setattr(
        explorer.connection, "_send", lambda content, buffers: sent.append((content, *buffers))
    )
    forward = explorer.page.forward
    with torch.no_grad(), vitlens.capture(forward.model) as attn:
        forward.model(forward.batch)
    for view, names in SAVED.items():
        target = {"target": 4} if "target" in names else {}
        explorer.set(head=1, view=view, **target)
        assert explorer.wait(60, settled=True)
        assert send(explorer, {"press": "save", "number": 5}) == ""
        content, saved = sent.pop()
        name = f"vitlens-the-image-given-{view}" + "-layer2" * ("layer" in names)
        assert content == {"download": [f"{name}.zip"], "asked": 5}
        with zipfile.ZipFile(io.BytesIO(saved)) as archive:
            files = {path.removeprefix(name): archive.read(path) for path in archive.namelist()}
        table = TABLES.get(view)
        assert {*files} - {table} == {".png", "-input.png", ".csv", "-heads.csv", ".json"}
        heads = vitlens.attention.summary(attn).to_pandas()
        pd.testing.assert_frame_equal(
            pd.read_csv(io.BytesIO(files["-heads.csv"])), heads, rtol=1e-6
        )
        assert table is None or table_equals_chart(explorer.frame, files[table])
        about = json.loads(files[".json"])
        width, height = Image.open(io.BytesIO(files[".png"])).size
        assert width > 500 and (height > 1.2 * width) == (view == "relevance"), (
            "the score's chart is below the map"
        )
        numbers = np.loadtxt(io.BytesIO(files[".csv"]), delimiter=",", dtype="f4")
        np.testing.assert_array_equal(numbers, values(explorer).reshape(numbers.shape))
        pixels = np.asarray(Image.open(io.BytesIO(files["-input.png"])))
        np.testing.assert_array_equal(pixels, explorer.page.forward.pixels)
        assert set(about) == names and about["words"].startswith(caption(explorer))
        shown = {"view": view, "head": 1, "query": "readout", "layer": 2, "target": 4}
        assert about.items() >= {key: value for key, value in shown.items() if key in names}.items()


def test_explorer_page_is_a_job_and_keeps_the_state(vit, tmp_path):
    """The page has the state of the moment when its button was pressed. Canceling it cancels nothing else."""
    explorer = Explorer(vit(num_classes=3), samples()["coffee"])
    explorer.first(never_cancel)
    explorer.write_page = in_page.write_page
    answer = explorer.answer([({"press": "page", "number": 5}, [])], never_cancel)
    assert answer.job.key == Key("page", (5,)) and answer.frame["answers"] == 5 and not answer.files
    after = explorer.answer([({"set": {"layer": 0}, "number": 6}, [])], never_cancel)
    assert after.job.key == Key("page", (5,)) and after.frame["message"] == ""
    answer = explorer.answer(
        [({"job": Key("page", (5,))}, [answer.job.function(never_cancel)])], never_cancel
    )
    ((number, files),) = answer.files
    assert (
        number == 5
        and [*files] == ["vitlens-the-image-given.html"]
        and explorer.state["layer"] == 0
    )
    assert answer.job is None or answer.job.key.kind != "page"
    explorer.answer([({"press": "page", "number": 7}, [])], never_cancel)
    answer = explorer.answer([({"cancel": Key("page", (7,)), "number": 8}, [])], never_cancel)
    assert answer.job is None or answer.job.key.kind != "page"
    explorer.answer([({"set": {"view": "relevance"}, "number": 9}, [])], never_cancel)
    assert explorer.frame["score"]["words"] == say("scoring")


def test_short_names_are_first_synonyms_unless_shared():
    names = (
        "tabby, tabby cat",
        "maillot",
        "maillot, tank suit",
        "crane",
        "crane",
        "otter",
        "sea otter, otter",
    )
    wanted = ["tabby", "maillot", "maillot, tank suit", "crane", "crane", "otter", "sea otter"]
    assert photographs.short_names(names) == wanted
