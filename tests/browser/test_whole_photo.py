"""Photos that a live page shows whole, without a crop: in the proportions of the photo, equal to Python's explorer."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

import vitlens
from browser.fronts import MARKS
from browser.test_live import near
from browser.test_open_model import (
    READY,
    Opened,
    ask_python,
    assert_bars,
    assert_words,
)
from browser.test_page import control, floats, plain
from vitlens_explorer import in_page, live
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.photos import FOLDER as PHOTOS
from vitlens_explorer.views import supported_views
from vitlens_explorer.words import WORDS, say

pytestmark = MARKS
SIZES = dict(embed_dim=48, depth=3, num_heads=3, num_classes=10, img_size=64, patch_size=8)
LABEL = "Whole photo, no cropping"


def write_model(folder, architecture, **more):
    """Write a model of timm that takes images of several sizes, with random weights."""
    arguments = SIZES | more | {"dynamic_img_size": True}
    generator = torch.Generator().manual_seed(0)
    model = timm.create_model(architecture, **arguments).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return folder


def open_model(browser, folder, page_path):
    opened = Opened(browser, live.save_blank_page(page_path), ".blank")
    opened.drop(folder)
    opened.page.wait_for_selector(READY)
    opened.frame()
    return opened


@pytest.mark.parametrize(
    "architecture, more",
    [("vit_tiny_patch16_224", {}), ("vit_base_patch14_reg4_dinov2", {"global_pool": "avg"})],
)
def test_whole_photo_equals_explorer(browser, tmp_path, architecture, more):
    """All views of a photo of 4:3, also with heads off, and the crop again after it."""
    folder = write_model(tmp_path / "model", architecture, **more)
    photo = tmp_path / "wide.png"
    Image.open(PHOTOS / "arch.jpg").crop((0, 0, 320, 240)).save(photo)
    opened = open_model(browser, folder, tmp_path / "blank.html")
    opened.drop(photo)
    opened.page.locator(".heading", has_text="wide.png").wait_for()
    page = Explorer(vitlens.load_model(folder), photo)
    before = opened.frame()
    assert not control(before, "whole")["hidden"]
    cropped = WORDS["cropped"].split("{")[0]
    assert cropped in before["about"]
    ask_python(page, {"way": "zero", "whole": True})
    frame = opened.frame(way="zero", whole=True)
    assert frame["message"] == ""
    rows, cols = page.forward.grid.rows, page.forward.grid.cols
    assert rows != cols
    (panel,) = frame["panels"]
    assert (panel["rows"], panel["cols"]) == (rows, cols)
    assert_bars(frame, page)
    supported = supported_views(page.forward)
    views = [name for name in supported if name in {*in_page.SCRIPTED_VIEWS, *live.LIVE_METHODS}]
    for number, view in enumerate(views):
        values = {"view": view, "layer": number % 3, "row": rows - 1, "column": number % cols}
        values["off"] = [[0, 1], [1, 0]][: number % 3]
        frame = opened.frame(**values)
        expected = ask_python(page, values)
        assert frame["message"] == "", view
        (got,), (wanted,) = frame["panels"], expected["panels"]
        exact = torch.from_numpy(np.frombuffer(wanted["values"], "<f4").copy())
        near(floats(got["values"]), exact, view)
        assert_words(got["words"], wanted["words"])
        for name in ("rows", "cols", "cell", "selected"):
            assert got[name] == plain(wanted[name]), name
    assert cropped not in frame["about"]
    frame = opened.frame(whole=False, off=[], view="attention")
    ask_python(page, {"whole": False, "off": []})
    assert_bars(frame, page)
    assert cropped in frame["about"]
    assert frame["panels"][0]["rows"] == frame["panels"][0]["cols"] == 8
    opened.close()


def test_whole_photo_refuses_what_belongs_to_the_crop(browser, tmp_path):
    """Mean outputs of heads, and the similarity to another photo. The state before stays."""
    folder = write_model(tmp_path / "model", "vit_tiny_patch16_224")
    opened = open_model(browser, folder, tmp_path / "blank.html")
    shown = opened.frame(whole=True)["panels"][0]
    frame = opened.frame(off=[[0, 0]], way="mean")
    assert frame["message"] == say("no means of whole")
    assert control(frame, "off")["value"] == []
    frame = opened.frame(view="relevance", target=["picture", "koala"])
    assert frame["message"] == say("no similarity of whole")
    assert opened.frame()["panels"][0]["rows"] == shown["rows"]
    opened.close()


def test_whole_photo_in_a_page_of_one_size(browser, tmp_path):
    """A strip has no more than 16 times as many columns as rows. The page's own photos are cropped already."""
    live.save_live_page(
        timm.create_model("vit_tiny_patch16_224", **SIZES), None, tmp_path / "page.html"
    )
    opened = Opened(browser, tmp_path / "page.html", READY)
    assert control(opened.frame(), "whole")["hidden"]
    assert not opened.page.get_by_label(LABEL).is_visible()
    strip = tmp_path / "strip.png"
    pixels = np.random.default_rng(0).integers(0, 256, (40, 1200, 3), np.uint8)
    Image.fromarray(pixels).save(strip)
    opened.drop(strip)
    opened.page.locator(".heading", has_text="strip.png").wait_for()
    assert "The model sees the middle 36 × 36" in opened.frame()["about"]
    opened.page.get_by_label(LABEL).check()
    opened.page.locator("figcaption", has_text=say("squeezed", times="1.9")).first.wait_for()
    panel = opened.frame()["panels"][0]
    assert (panel["rows"], panel["cols"]) == (2, 32)
    first = control(opened.frame(), "photograph")["options"][1][1]
    frame = opened.frame(photograph=first)
    assert frame["panels"][0]["rows"] == 8 and control(frame, "whole")["hidden"]
    assert opened.frame(photograph="strip.png")["panels"][0]["rows"] == 2
    opened.close()


def test_whole_photo_is_not_offered_by_models_of_one_size(browser, tmp_path):
    """A transformers model keeps its grid."""
    from browser.test_open_model import write_model as write_hub_model

    folder = tmp_path / "hub"
    folder.mkdir()
    opened = open_model(browser, write_hub_model("ViTModel", folder), tmp_path / "blank.html")
    names = {each["name"] for each in opened.frame()["controls"]}
    assert "whole" not in names and "layer" in names
    opened.close()


def test_whole_photo_beside_itself_and_in_the_tour(browser, tmp_path):
    """The second state sees the same part of the photo. The tour shows the pixels of a patch at the right edge."""
    folder = write_model(tmp_path / "model", "vit_tiny_patch16_224")
    photo = tmp_path / "wide.png"
    Image.open(PHOTOS / "arch.jpg").crop((0, 0, 320, 200)).save(photo)
    opened = open_model(browser, folder, tmp_path / "blank.html")
    opened.drop(photo)
    opened.page.locator(".heading", has_text="wide.png").wait_for()
    opened.page.get_by_label(LABEL).check()
    (panel,) = opened.frame()["panels"]
    assert panel["cols"] > panel["rows"]
    opened.page.get_by_role("button", name="Two states").click()
    opened.page.wait_for_function(
        "() => document.querySelector('#page').source.get('frame').panels.length > 1"
    )
    last = panel["rows"] - 1, panel["cols"] - 1
    first, second = opened.frame(row=last[0], column=last[1])["panels"]
    for name in ("rows", "cols", "cell", "selected"):
        assert first[name] == second[name]
    assert tuple(first["selected"]) == last
    assert np.array_equal(floats(first["values"]), floats(second["values"]))
    opened.page.get_by_role("button", name="Tour").click()
    pixels = opened.page.locator("dialog.tour canvas.pixels")
    size = pixels.evaluate("(canvas) => [canvas.width, canvas.height]")
    assert size == [8, 8]
    opened.close()
