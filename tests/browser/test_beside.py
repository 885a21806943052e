"""A second model beside that of a page: the same view of the same photo, equal to Python's page of that model."""

import numpy as np
import pytest
import torch
from PIL import Image
from support import CHECKPOINTS

from browser.fronts import MARKS
from browser.test_live import near
from browser.test_open_model import (
    READY,
    Opened,
    ask_python,
    blank,  # noqa: F401
    python_page,
    small_page,  # noqa: F401
    write_model,
)
from browser.test_page import control, floats
from vitlens_explorer import front, live
from vitlens_explorer.photos import FOLDER as PHOTOS
from vitlens_explorer.words import say

pytestmark = MARKS
SMALL = CHECKPOINTS / "vit_tiny_patch8_64"
NAME = "vit_tiny_patch16_224, patch 8, 64 px"


def compare(opened: Opened, folder, name: str) -> dict:
    """Open the files of a folder beside the page's model."""
    with opened.page.expect_file_chooser() as chooser:
        opened.page.get_by_role("button", name="Compare", exact=True).click()
    chooser.value.set_files([folder / name for name in ("config.json", "model.safetensors")])
    opened.page.locator("[data-panel=beside] h3", has_text=name).wait_for()
    return opened.frame()


def close(opened: Opened, name: str) -> None:
    """Close the model beside the page's."""
    opened.page.get_by_role("button", name=f"Close {name}").click()
    opened.page.locator("[data-panel=beside]").wait_for(state="detached")


def assert_equal_panel(panel: dict, page, values: dict, title: str) -> None:
    """Assert that a panel is that of Python's page of the model alone."""
    (expected,) = ask_python(page, values)["panels"]
    exact = torch.from_numpy(np.frombuffer(expected["values"], "<f4").copy())
    near(floats(panel["values"]), exact, values)
    assert panel["words"].endswith(expected["words"])
    assert panel["title"] == f"{title}: {expected['title']}"
    assert panel["selected"] == (expected["selected"] and [*expected["selected"]])


@pytest.fixture
def two(browser, blank):  # noqa: F811
    """A page with the bundled DeiT-Tiny, and a model of 8 × 8 patches and 64 × 64 pixels beside it."""
    opened = Opened(browser, blank, ".blank")
    opened.drop(CHECKPOINTS / "deit_tiny")
    opened.wait_for_model("DeiT-Tiny, ImageNet-1k")
    compare(opened, SMALL, NAME)
    yield opened
    opened.close()


def test_panels_are_those_of_each_model_alone(two):
    """In views of attention, of tokens and of a class, with layers and heads of the second model of its own."""
    first, second = python_page(CHECKPOINTS / "deit_tiny"), python_page(SMALL)
    cases = [
        {"view": "attention", "layer": 4, "head": 1, "row": 13, "column": 0, "layer_beside": 2, "head_beside": 3},
        {"view": "attention", "layer": 4, "head": "max", "query": "readout", "layer_beside": 0, "head_beside": "mean"},
        {"view": "rollout", "head": "mean", "row": 6, "column": 7, "head_beside": "max"},
        {"view": "similarity", "layer": 5, "row": 0, "column": 13, "layer_beside": 1},
        {"view": "norms", "layer": 8, "layer_beside": 5},
        {"view": "relevance", "target": "predicted"},
        {"view": "legrad", "target": "predicted"},
    ]  # fmt: skip
    for values in cases:
        frame = two.frame(**values)
        assert frame["message"] == ""
        left, right = frame["panels"]
        shared = {name: value for name, value in values.items() if "beside" not in name}
        own = {name.split("_")[0]: value for name, value in values.items() if "beside" in name}
        places = {name: values[name] for name in ("row", "column") if name in values}
        own |= {name: int((at + 0.5) * 8 / 14) for name, at in places.items()}  # of the same crop
        assert_equal_panel(left, first, shared, "DeiT-Tiny, ImageNet-1k")
        assert_equal_panel(right, second, shared | own, NAME)
        assert right["words"].startswith(say("beside sees", classes="")[:-1])


def test_second_model_is_opened_in_a_view_of_a_class(browser, small_page):  # noqa: F811
    opened = Opened(browser, small_page, READY)
    opened.frame(view="relevance")
    frame = compare(opened, SMALL, NAME)
    titles = [panel["title"].split(": ", 1)[1] for panel in frame["panels"]]
    assert titles[0] == titles[1] and titles[0].startswith("Why this class: relevance")
    opened.close()


def test_two_states_of_one_model(browser, small_page, tmp_path):  # noqa: F811
    """Another layer and head, and all heads on beside heads that are off. Another model ends it."""
    opened = Opened(browser, small_page, READY)
    opened.page.get_by_role("button", name="Two states").click()
    opened.page.locator("[data-panel=beside]").wait_for()
    left, right = opened.frame()["panels"]
    assert left["values"] == right["values"] and left["words"] in right["words"]
    alone = Opened(browser, small_page, READY)
    whole = {"layer": 3, "head": 1, "row": 4, "column": 9}
    expected = [
        alone.frame(**state)["panels"][0]
        for state in (whole, whole | {"layer": 1, "off": [[1, 0]]})
    ]
    beside = {"layer_beside": 3, "head_beside": 1}
    frame = opened.frame(**whole | {"layer": 1, "off": [[1, 0]]} | beside)
    left, right = frame["panels"]
    assert right["values"] == expected[0]["values"] and left["values"] == expected[1]["values"]
    assert left["words"] == expected[1]["words"] and right["words"].endswith(expected[0]["words"])
    assert left["title"].startswith(say("first state")) and right["title"].startswith(say("all on"))
    assert frame["opened"] == "" and frame["beside"] == say("second state")
    for name in ("arch", "dog"):
        left, right = opened.frame(photograph=name, view="relevance", off=[], target="predicted")[
            "panels"
        ]
        assert left["values"] == right["values"]
    opened.drop(write_model("ViTForImageClassification", tmp_path / "mine"))
    opened.wait_for_model("mine")
    assert len(opened.frame()["panels"]) == 1
    opened.page.get_by_role("button", name="Two states").click()
    opened.page.locator("[data-panel=beside]").wait_for()
    left, right = opened.frame()["panels"]
    assert left["values"] == right["values"]
    close(opened, say("second state"))
    for each in (opened, alone):
        each.close()


def test_click_in_the_second_panel_moves_both(two):
    """The first model, of more patches, shows the one at the middle. Back in its own panel, the click there counts."""
    two.page.evaluate(
        "document.querySelector('#page').source.send({pick: 'beside', row: 5, col: 2, number: 10**15})"
    )
    frame = two.frame()
    assert [panel["selected"] for panel in frame["panels"]] == [[9, 4], [5, 2]]
    two.page.evaluate(
        "document.querySelector('#page').source.send({pick: 'picture', row: 9, col: 5, number: 10**15})"
    )
    assert [panel["selected"] for panel in two.frame()["panels"]] == [[9, 5], [5, 3]]
    assert control(two.frame(), "layer_beside")["place"] == "beside"
    assert "beside" not in two.page.evaluate("location.hash")


def test_upload_heads_off_and_closing(two, tmp_path):
    """An upload goes to both models, heads that are off to the first, and after closing the page is as before."""
    name = "wide.png"
    Image.effect_noise((90, 40), 60).convert("RGB").save(tmp_path / name)
    two.drop(tmp_path / name)
    two.page.locator(".heading", has_text=name).wait_for()
    assert control(two.frame(), "photograph")["value"] == name
    before = two.frame()["panels"]
    left, right = two.frame(off=[[0, 1], [3, 2]], layer=11, layer_beside=5)["panels"]
    assert "Turned off" in left["words"] and "Turned off" not in right["words"]
    assert two.frame(off=[])["panels"][1]["values"] == right["values"] != before[1]["values"]
    close(two, NAME)
    frame = two.frame()
    assert len(frame["panels"]) == 1 and frame["beside"] == "" and NAME not in frame["opened"]
    assert frame["panels"][0]["title"] == before[0]["title"].split(": ", 1)[1]
    assert frame["model"] == "DeiT-Tiny, ImageNet-1k"


def test_what_the_second_model_lacks_is_said(browser, small_page, tmp_path):  # noqa: F811
    """Views of classes, a class and a token. Its panel then has the photo alone, and the first panel its map."""
    opened = Opened(browser, small_page, READY)
    compare(
        opened,
        write_model("Dinov2WithRegistersModel", tmp_path / "dino"),
        "Dinov2WithRegistersModel",
    )
    name = opened.frame()["beside"]
    for values in ({"view": "relevance"}, {"view": "contributions"}):
        left, right = opened.frame(**values)["panels"]
        assert right["words"] == say("beside no view", name=name) and right["values"] == ""
        assert left["values"] and right["title"] == name
    opened.drop(PHOTOS / "dog.jpg")
    opened.page.locator(".heading", has_text="dog.jpg").wait_for()
    opened.frame(row=3)
    opened.drop(
        PHOTOS / "dog.jpg"
    )  # the model beside has not read this one, as it has no such view
    frame = opened.frame(row=4)
    assert frame["message"] == "" and frame["panels"][1]["words"] == say(
        "beside no view", name=name
    )
    left, right = opened.frame(view="attention", query="readout")["panels"]
    assert left["selected"] is None and floats(right["values"]).any()
    close(opened, name)
    compare(opened, write_model("ViTForImageClassification", tmp_path / "vit"), "ViTFor")
    name = opened.frame()["beside"]
    k = control(opened.frame(view="relevance"), "target")["options"][1][1]
    words = opened.frame(target=k)["panels"][1]["words"]
    assert words == say("beside no class", name=name, label=str(k))
    assert floats(opened.frame(target="predicted")["panels"][1]["values"]).any()
    opened.close()


def test_refused_model_leaves_the_page(two, tmp_path):
    """A file that is no model."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04")
    close(two, NAME)
    before = two.frame()
    with two.page.expect_file_chooser() as chooser:
        two.page.get_by_role("button", name="Compare", exact=True).click()
    chooser.value.set_files([tmp_path / "config.json", tmp_path / "model.safetensors"])
    two.wait_for_alert("is a pickle")
    after = two.frame()
    for name in ("panels", "beside", "model", "controls"):
        assert after[name] == before[name]


def test_same_patch_is_at_the_same_place_of_the_photo(browser):
    """Of models that crop differently, and of one that squeezes the photo: against its pixels."""
    page = browser.new_page()
    page.add_script_tag(content=front.join_modules(live.LIVE / "beside.js"))
    sizes = {"width": 400, "height": 300}
    crops = {"network": {"image": [224, 224], "resized": 256, "squeezed": False}}
    narrow = {"network": {"image": [64, 64], "resized": 128, "squeezed": False}}
    squeezed = {"network": {"image": [96, 96], "resized": 96, "squeezed": True}}
    parts = {
        name: page.evaluate("([stored, photo]) => seenPart(stored, photo)", [stored, sizes])
        for name, stored in (("crops", crops), ("narrow", narrow), ("squeezed", squeezed))
    }
    assert parts["crops"] == {"left": 68.75, "top": 18.75, "width": 262.5, "height": 262.5}
    assert parts["narrow"] == {"left": 125, "top": 75, "width": 150, "height": 150}
    assert parts["squeezed"] == {"left": 0, "top": 0, "width": 400, "height": 300}
    ready = page.evaluate(
        "([stored, photo]) => seenPart(stored, photo)", [crops, {**sizes, "ready": True}]
    )
    assert ready == parts["squeezed"]

    def side(name, patch, image):
        grid = {
            "rows": image // patch,
            "cols": image // patch,
            "patch": [patch, patch],
            "image": [image, image],
        }
        return {"grid": grid, "part": parts[name]}

    def match(place, start, end):
        return page.evaluate(
            "([place, from, to]) => samePatch(place, from, to)", [place, start, end]
        )

    first, second = side("crops", 16, 224), side("narrow", 8, 64)
    # The middle of patch (3, 7) is at pixel (18.75 + 3.5 · 18.75, 68.75 + 7.5 · 18.75) = (84.4, 209.4) of the photo,
    # and there the second model, whose patches cover 18.75 pixels from (75, 125) on, has its patch (0, 4).
    assert match([3, 7], first, second) == {"place": [0, 4], "outside": False}
    assert match([0, 7], first, second) == {"place": [0, 4], "outside": True}
    assert match([7, 0], second, first) == {"place": [10, 3], "outside": False}
    third = side("squeezed", 16, 96)
    assert match([3, 7], first, third) == {"place": [1, 3], "outside": False}
    assert match([5, 5], third, second) == {"place": [7, 7], "outside": True}
    page.close()
