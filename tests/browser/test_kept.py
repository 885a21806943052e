"""A page saved with the model that was opened in it: the same model, photos and state, in one file."""

import re

import numpy as np
import pytest
from PIL import Image
from support import CHECKPOINTS

from browser.fronts import MARKS, press_share
from browser.test_open_model import (
    READY,
    Opened,
    assert_bars,
    blank,  # noqa: F401
    python_page,
    small_page,  # noqa: F401
    write_model,
)
from browser.test_page import control
from vitlens.train import export
from vitlens.train.recipes import recipe
from vitlens_explorer.words import say

pytestmark = MARKS
FOLDER = CHECKPOINTS / "vit_tiny_patch8_64"
NAME = "vit_tiny_patch16_224, patch 8, 64 px"


def keep(opened: Opened, folder, button: str = "Save page"):
    """The file that a button writes."""
    with opened.page.expect_download() as download:
        press_share(opened.page, button)
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


@pytest.mark.parametrize("kind", ["blank", "small_page"])
def test_kept_page_has_model_photos_and_state(browser, tmp_path, request, kind):
    """Of a blank page and of one with a model of its own, which the copy leaves out. The copy can be kept again."""
    opened = Opened(browser, request.getfixturevalue(kind), "#page .headline")
    opened.page.locator(".sharing").evaluate_all(
        "folds => folds.forEach((fold) => (fold.open = true))"
    )
    assert opened.page.get_by_role("button", name="Save page").is_visible() == (kind != "blank")
    opened.drop(FOLDER)
    opened.wait_for_model(NAME)
    levels = np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)
    Image.fromarray(levels).save(tmp_path / "<noise>.png")
    opened.drop(tmp_path / "<noise>.png")
    opened.page.locator(".heading", has_text="<noise>.png").wait_for()
    opened.frame(view="relevance", target=7, off=[[1, 2]], layer=3)
    opened.page.wait_for_function("() => location.hash.includes('relevance')")
    before = opened.frame()
    path = keep(opened, tmp_path)
    assert path.name == "vitlens-vit_tiny_patch16_224-patch-8-64-px.html"
    opened.close()
    for _ in range(2):
        copy = Opened(browser, path, READY)
        copy.page.wait_for_function("() => location.hash.includes('relevance')")
        frame = copy.frame()
        assert frame["opened"] == "" and frame["message"] == ""
        for name in ("panels", "bars", "model", "about"):
            assert frame[name] == before[name], name
        for name in ("layer", "view", "off", "target", "photograph"):
            assert control(frame, name)["value"] == control(before, name)["value"]
        assert {*control(frame, "photograph")["options"][0]} == {"<noise>.png"}
        assert len(control(frame, "photograph")["options"]) == len(
            control(before, "photograph")["options"]
        )
        footer = copy.page.locator("footer").inner_text()
        assert footer.startswith(f"This file contains {NAME} and these photos: <noise>.png, ")
        assert copy.page.title() == f"<noise>.png · {NAME} · vitlens"
        again = keep(copy, tmp_path)
        copy.close()
        assert re.search("<title>.*</title>", again.read_text(encoding="utf-8"))[0].startswith(
            "<title>&lt;noise&gt;.png, "
        )
        path = again


def test_kept_page_computes_as_python(browser, blank, tmp_path):  # noqa: F811
    """From the photo's file, and with another photo of the page."""
    opened = Opened(browser, blank, ".blank")
    opened.drop(FOLDER)
    opened.wait_for_model(NAME)
    copy = Opened(browser, keep(opened, tmp_path), READY)
    assert_bars(copy.frame(), python_page(FOLDER))
    assert_bars(copy.frame(photograph="dog"), python_page(FOLDER, "dog"))
    opened.close()
    copy.drop(write_model("ViTForImageClassification", tmp_path / "mine"))
    copy.wait_for_model("mine")
    assert copy.page.locator("footer").inner_text().startswith(say("runs opened", name="mine"))
    copy.close()


def test_page_of_python_is_kept_with_an_upload(browser, small_page, tmp_path):  # noqa: F811
    """The copy replaces heads by the same means over sample photos, and knows the same digest of the weights."""
    opened = Opened(browser, small_page, READY)
    Image.effect_noise((70, 90), 60).save(tmp_path / "noise.png")
    opened.drop(tmp_path / "noise.png")
    opened.page.locator(".heading", has_text="noise.png").wait_for()
    opened.frame(off=[[1, 2], [2, 0]], way="mean")
    opened.page.wait_for_function("() => location.hash.includes('off')")
    before = opened.frame()
    assert "sample photos" in before["panels"][0]["words"]
    digest = "document.querySelector('#page').source.page.hash"
    hashed = opened.page.evaluate(digest)
    assert re.fullmatch("[0-9a-f]{12}", hashed)
    copy = Opened(browser, keep(opened, tmp_path), READY)
    copy.page.wait_for_function("() => location.hash.includes('off')")
    frame = copy.frame()
    for name in ("panels", "bars", "model", "about"):
        assert frame[name] == before[name], name
    assert copy.page.evaluate(digest) == hashed
    opened.drop(FOLDER)
    opened.wait_for_model(NAME)
    assert opened.page.evaluate(digest) is None
    other = Opened(browser, keep(opened, tmp_path), READY)
    assert other.page.evaluate(digest) is None
    for each in (opened, copy, other):
        each.close()


def test_files_that_are_gone_are_refused(browser, small_page, tmp_path):  # noqa: F811
    """The page goes on."""
    opened = Opened(browser, small_page, READY)
    folder = write_model("ViTForImageClassification", tmp_path / "vit")
    opened.drop(folder)
    opened.wait_for_model("vit")
    (folder / "model.safetensors").unlink()
    press_share(opened.page, "Save page")
    opened.wait_for_alert(say("file is gone", name="model.safetensors"))
    assert opened.frame(layer=0)["message"] == ""
    opened.close()


@pytest.mark.slow
def test_model_that_is_too_large_is_refused(browser, small_page, tmp_path):  # noqa: F811
    """The page goes on with it."""
    sizes = ("image_size=64", "patch_size=16", "width=768", "depth=8", "heads=12", "num_classes=10")
    plan = recipe("digits").override(*sizes)
    export(plan.build(), tmp_path / "large", plan, [str(k) for k in range(10)])
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    opened = Opened(browser, small_page, READY)
    opened.drop(tmp_path / "large")
    opened.wait_for_model("64 px")
    press_share(opened.page, "Save page")
    name = opened.frame()["model"]
    opened.wait_for_alert(say("too large to keep", name=name, size=round(size / 1e6), most=100))
    assert opened.frame(layer=4)["message"] == ""
    opened.close()
