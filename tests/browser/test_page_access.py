"""Accessibility of a live page, of a page without a model, and of a page after a model was opened."""

import pytest

from browser.conftest import write_model as write_timm
from browser.fronts import MARKS, faults
from browser.test_open_model import READY, Opened, write_model
from vitlens import load_model, samples
from vitlens_explorer.live import save_blank_page, save_live_page

pytestmark = [MARKS, pytest.mark.slow]
WIDTHS = (1440, 390, 360)
SCHEMES = ("light", "dark")
PHONE = 660
"""Largest width of a phone in CSS pixels."""
TOUCH = 44
"""Smallest height of a target in CSS pixels."""
TARGETS = """() => {
    const kinds = "button, select, summary, label.button, input:not([type=file])";
    const shown = [...document.querySelectorAll(kinds)].filter((node) => node.checkVisibility());
    // A label belongs to the target of its checkbox.
    const areaOf = (node) => (node.type === "checkbox" ? node.closest(".control") : node);
    const sizeOf = (node) => [node.outerHTML.slice(0, 90), areaOf(node).getBoundingClientRect().height];
    return shown.map(sizeOf);
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Files of a live page and of a blank page, and the folder of a model."""
    folder = tmp_path_factory.mktemp("access")
    model = load_model(write_timm(folder / "vit", 128))
    live = save_live_page(model, {"chelsea": samples()["chelsea"]}, folder / "live.html")
    blank = save_blank_page(folder / "blank.html")
    return live, blank, write_model("ViTForImageClassification", folder / "mine")


def unfold(page):
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")


def assert_accessible(page):
    """Assert that axe finds no fault, and that targets on a phone are high enough."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 844})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            assert faults(page) == [], (width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width < PHONE:
            low = [(node, high) for node, high in page.evaluate(TARGETS) if high < TOUCH]
            assert low == [], width


@pytest.mark.parametrize("view", ["attention", "relevance", "lens", "contributions", "rollout"])
def test_live_page_has_no_accessibility_fault(browser, pages, view):
    opened = Opened(browser, pages[0], READY)
    opened.frame(view=view, off=[] if view == "contributions" else [[0, 1]])
    unfold(opened.page)
    assert_accessible(opened.page)
    opened.close()


def test_dialogs_of_a_live_page_have_no_accessibility_fault(browser, pages):
    """The tour, the opened value and the alert."""
    opened = Opened(browser, pages[0], READY)
    opened.frame(layer=99)
    opened.page.locator(".how").click()
    opened.page.locator(".detail header").wait_for()
    unfold(opened.page)
    assert_accessible(opened.page)
    opened.page.get_by_role("button", name="Tour", exact=True).click()
    opened.page.locator("dialog.tour[open]").wait_for()
    for step in range(8):
        opened.page.locator(f".tour header:has-text('Step {step + 1} of 8')").wait_for()
        assert faults(opened.page, "dialog") == [], step
        opened.page.keyboard.press("ArrowRight")
    assert_accessible(opened.page)
    opened.close()


def test_blank_page_has_no_accessibility_fault(browser, pages, tmp_path):
    """Before, and after a refused file."""
    opened = Opened(browser, pages[1], ".blank")
    assert_accessible(opened.page)
    (tmp_path / "weights.bin").write_bytes(b"PK\x03\x04")
    opened.drop(tmp_path / "weights.bin")
    opened.wait_for_alert("is a pickle")
    assert_accessible(opened.page)
    opened.close()


def test_opened_model_has_no_accessibility_fault(browser, pages):
    opened = Opened(browser, pages[1], ".blank")
    opened.drop(pages[2])
    opened.wait_for_model("mine")
    unfold(opened.page)
    assert_accessible(opened.page)
    opened.close()
