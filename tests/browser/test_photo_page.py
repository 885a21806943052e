"""A page of one photo that a live page writes, without its model: the same maps, without a worker."""

import numpy as np
import pytest
from PIL import Image

from browser.fronts import MARKS
from browser.test_kept import keep
from browser.test_open_model import (
    OTHER,
    READY,
    Opened,
    blank,  # noqa: F401
    write_model,
)
from browser.test_page import control, floats
from browser.test_whole_photo import write_model as write_timm_model
from vitlens_explorer.words import say

pytestmark = MARKS
FORWARDS = {"another", "against", "off", "way", "whole"}
"""Controls that need forwards."""


def assert_no_line_on_heads_off(frame: dict) -> None:
    """Assert that no line of the menu of views offers to turn heads off."""
    lines = [line for _, _, *lines in control(frame, "view")["groups"] for line in lines]
    assert lines and say("line decide") not in lines
    assert not [line for line in lines if "heads off" in line]


def assert_equal_views(opened: Opened, copy: Opened, layers: int) -> list:
    """Assert that the views of the copy have the maps of the page. Returns their names."""
    assert_no_line_on_heads_off(copy.frame())
    views = [value for _, value in control(copy.frame(), "view")["options"]]
    for number, view in enumerate(views):
        values = {"view": view, "layer": number % layers, "row": 3, "column": number % 4}
        before, after = opened.frame(**values), copy.frame(**values)
        assert after["message"] == "" == before["message"], view
        (wanted,), (got,) = before["panels"], after["panels"]
        for name in ("words", "title", "rows", "cols", "selected", "picture", "unit"):
            assert got[name] == wanted[name], (view, name)
        exact = np.asarray(floats(wanted["values"]))
        assert np.allclose(floats(got["values"]), exact, atol=1e-6 * np.abs(exact).max()), view
        assert not FORWARDS & {each["name"] for each in after["controls"]}, view
        assert [bar["share"] for bar in after["bars"]] == pytest.approx(
            [bar["share"] for bar in before["bars"]], abs=1e-6
        )
    return views


@pytest.mark.parametrize(
    "title, photo",
    [("ViTForImageClassification", "arch"), ("Dinov2WithRegistersModel", OTHER)],
)
def test_photo_page_has_the_maps_of_the_page(browser, blank, tmp_path, title, photo):  # noqa: F811
    """Of a model with classes, and of one without. The file has one photo, and the tour of any patch."""
    folder = write_model(title, tmp_path / "model of mine")
    opened = Opened(browser, blank, ".blank")
    opened.drop(folder)
    opened.wait_for_model("model of mine")
    opened.frame(photograph=photo, layer=1, row=2, column=3)
    path = keep(opened, tmp_path, "Save photo page")
    assert path.name == f"vitlens-{photo}.html"
    copy = Opened(browser, path, READY)
    frame = copy.frame()
    assert control(frame, "photograph")["options"] == [[photo, photo]]
    for name in ("layer", "row", "column"):
        assert control(frame, name)["value"] == control(opened.frame(), name)["value"]
    assert say("photo page") in frame["about"]
    assert not frame["uploads"] and not frame["opens"] and not frame["pages"]
    views = assert_equal_views(opened, copy, layers=3)
    has_classes = title == "ViTForImageClassification"
    assert {"relevance", "lens", "contributions"} <= {*views} or not has_classes
    assert "relevance" not in views or has_classes
    copy.frame(view="attention", row=0, column=1, layer=2)
    opened.frame(view="attention", row=0, column=1, layer=2)
    sentences = [read_tour(each) for each in (copy, opened)]
    assert sentences[0] == sentences[1] and len(sentences[0]) == 8
    footer = copy.page.locator("footer").inner_text()
    assert footer.startswith(f"This file contains {photo} and what model of mine computed from it")
    copy.close()
    opened.close()


def read_tour(opened: Opened) -> list[str]:
    """The sentences of the tour."""
    ask = """() => new Promise((done) => {
        const { source } = document.querySelector("#page");
        source.on("msg:custom", ({ ask, answer }) => ask === "tour" && done(answer.sentences));
        source.send({ ask: "tour", number: 10 ** 15 });
    })"""
    return opened.page.evaluate(ask)


def test_photo_page_of_a_changed_state(browser, tmp_path, blank):  # noqa: F811
    """All heads are on in the file. An uploaded photo is whole as in the page. Explained classes are the likeliest."""
    folder = write_timm_model(tmp_path / "model", "vit_tiny_patch16_224")
    opened = Opened(browser, blank, ".blank")
    opened.drop(folder)
    opened.page.wait_for_selector(READY)
    levels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    Image.fromarray(levels).save(tmp_path / "<b>ä.png")
    opened.drop(tmp_path / "<b>ä.png")
    opened.page.locator(".heading", has_text="<b>ä.png").wait_for()
    opened.frame(whole=True, way="zero", off=[[0, 0], [2, 1]], view="relevance", target=7)
    path = keep(opened, tmp_path, "Save photo page")
    assert path.stat().st_size < 3e6
    whole = opened.frame(off=[])
    copy = Opened(browser, path, READY)
    frame = copy.frame()
    assert control(frame, "photograph")["value"] == "<b>ä.png"
    assert frame["panels"][0]["cols"] == whole["panels"][0]["cols"] > whole["panels"][0]["rows"]
    numbers = [bar["number"] for bar in frame["bars"]]
    assert numbers == [bar["number"] for bar in whole["bars"]]
    assert control(frame, "target")["value"] in (7, "predicted")
    assert copy.page.locator(".heading").inner_text().startswith("<b>ä.png · ")
    copy.close()
    opened.close()
