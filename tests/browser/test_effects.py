"""Heads of a live page sorted by their effect: how the likeliest class changes without each of them."""

import numpy as np
import pytest

from browser.conftest import write_model
from browser.fronts import MARKS
from browser.test_open_model import CANCEL, READY, Opened, ask_python
from browser.test_page import control
from vitlens import load_model, samples
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.in_page import save_page
from vitlens_explorer.live import save_live_page
from vitlens_explorer.words import say

pytestmark = MARKS
LAYERS, HEADS = 4, 3
MENU = "Order of the heads"
MEASURED = "() => document.querySelector('#page').source.get('frame').mosaic.effects"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("effects") / "vit", 128))


@pytest.fixture
def opened(browser, model, tmp_path):
    photos = {name: samples()[name] for name in ("chelsea", "rocket")}
    page = Opened(browser, save_live_page(model, photos, tmp_path / "page.html"), READY)
    yield page
    page.close()


def expected_effects(page: Explorer, off: list, way: str) -> np.ndarray:
    """Changes (L, H) of the probability of the likeliest class by Python's explorer, with each head off, too."""
    ask_python(page, {"off": off, "way": way})
    target = page.forward.likeliest[0]
    before = page.forward.share(target)
    changes = np.zeros((LAYERS, HEADS))
    for layer in range(LAYERS):
        for head in range(HEADS):
            heads = off if [layer, head] in off else [*off, [layer, head]]
            ask_python(page, {"off": heads, "way": way})
            changes[layer, head] = page.forward.share(target) - before
    return changes


@pytest.mark.parametrize("off", [[], [[1, 2]]])
@pytest.mark.parametrize("way", ["zero", "mean"])
def test_effects_equal_explorer(opened, model, off, way):
    """Alone, and besides a head that is off. Other photos and ways have effects of their own."""
    page = Explorer(model, samples()["chelsea"])
    opened.frame(photograph="chelsea", off=off, way=way)
    opened.page.get_by_label(MENU).select_option("by effect")
    opened.page.wait_for_function(MEASURED)
    effects = np.asarray(opened.frame()["mosaic"]["effects"])
    assert effects == pytest.approx(expected_effects(page, off, way), abs=1e-4)
    assert np.abs(effects).max() > 1e-3
    title = opened.page.locator(".mosaic h3").inner_text()
    name = page.forward.label(page.forward.likeliest[0]) if not off else ""
    assert "by effect" in title and name in title
    layer, head = np.unravel_index(effects.argmin(), effects.shape)
    labels = opened.page.locator(".mosaic text.name").all_text_contents()
    assert labels[0] == f"{layer}.{head}"
    assert len(labels) == LAYERS * HEADS
    assert opened.frame(photograph="rocket")["mosaic"]["effects"] is None
    assert opened.page.get_by_role("button", name="Measure effects").is_visible()
    assert opened.frame(photograph="chelsea")["mosaic"]["effects"] is not None


def test_canceled_effects_leave_the_mosaic(opened):
    """The order stays chosen, and a button measures again."""
    opened.frame(way="zero")
    opened.page.evaluate(CANCEL.replace("progress?.share", "progress?.done"))
    opened.page.get_by_label(MENU).select_option("by effect")
    opened.page.wait_for_function("() => window.canceled")
    assert opened.frame()["mosaic"]["effects"] is None and opened.frame()["message"] == ""
    assert opened.page.locator(".mosaic text.name").count() == 0
    opened.page.get_by_role("button", name="Measure effects").click()
    opened.page.wait_for_function(MEASURED)
    assert opened.page.get_by_role("button", name="Measure effects").is_hidden()


def test_saved_page_has_no_effects(browser, model, tmp_path):
    """It runs no model, so the menu does not offer them."""
    page = Opened(browser, save_page(model, samples()["chelsea"], tmp_path / "page.html"), READY)
    assert "measures" not in page.frame()["mosaic"]
    option = page.page.get_by_label(MENU).locator("option", has_text="by effect")
    assert option.evaluate("(node) => node.hidden && node.disabled")
    assert control(page.frame(), "layer")["value"] >= 0
    page.close()


def test_view_of_parts_replaces_heads_by_zero(opened):
    """From the tour or the challenge, a head is off and replaced with its mean, with which parts do not add up."""
    frame = opened.frame(off=[[1, 0]], way="mean")
    assert frame["message"] == "" and control(frame, "way")["value"] == "mean"
    frame = opened.frame(view="contributions")
    assert frame["message"] == say("zero now")
    assert control(frame, "way")["value"] == "zero" and control(frame, "off")["value"] == [[1, 0]]
    assert sum(map(sum, frame["parts"]["heads"])) != 0
    frame = opened.frame(off=[[1, 0], [2, 1]])
    assert frame["message"] == "" and len(control(frame, "off")["value"]) == 2
    frame = opened.frame(view="attention", way="mean")
    assert opened.frame(view="balanced_gradients")["message"] == say("zero now")


def test_page_keeps_its_height_while_heads_are_turned_off(opened):
    """The list of classes and the mosaic stay while the model runs, so that nothing moves under a finger."""
    opened.page.set_viewport_size({"width": 390, "height": 844})
    turner = opened.page.get_by_role("button", name="Turn layer")
    turner.scroll_into_view_if_needed()
    opened.page.evaluate(
        """() => {
            window.heights = [];
            const page = document.querySelector(".vitlens");
            const read = () => window.heights.push(page.getBoundingClientRect().height);
            new ResizeObserver(read).observe(page);
        }"""
    )
    first = opened.page.evaluate(
        "document.querySelector('.vitlens').getBoundingClientRect().height"
    )
    turner.click()
    opened.frame()
    heights = opened.page.evaluate("window.heights")
    assert min(heights) > first - 60
