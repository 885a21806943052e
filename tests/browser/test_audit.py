"""The page of an audit in a real browser."""

import io

import pytest
from audited import save_model, write_images
from PIL import Image
from support import vitlens

from browser.fronts import MARKS, faults

pytestmark = MARKS


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    root = tmp_path_factory.mktemp("audited")
    model, data = save_model(root / "colors"), write_images(root / "data")
    vitlens("audit", model, "--data", data, "--out", root / "audit", "--device", "cpu")
    return root / "audit" / "audit.html"


@pytest.fixture
def opened(browser, audited):
    """The page, with lists of its requests and errors."""
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(audited.as_uri())
    page.wait_for_selector(".vitlens.audit")
    yield page, requests
    page.close()
    assert errors == []


def color_at_mark(page, view):
    """Color of the middle of the planted patch as the browser draws it."""
    shot = Image.open(io.BytesIO(view.screenshot()))
    side = 1.5 / 8
    place = shot.width * side, shot.height * side
    red, green, blue = shot.convert("RGB").getpixel(place)
    return "red" if red > 200 and green < 60 and blue < 60 else "not red"


def test_audit_page_clicks_from_group_to_image(opened, audited):
    page, requests = opened
    assert page.locator("h1").inner_text() == "Which patches does colors go by?"
    cards = page.locator(".card")
    assert cards.count() == 3 and cards.nth(0).locator("h3").inner_text().startswith(
        "class 0: group"
    )
    assert "100 % of its images have it at the same patch." in cards.nth(0).inner_text()
    cards.nth(0).get_by_role("button", name="Go to").click()
    focused = page.evaluate("document.activeElement.id")
    group = page.locator(f"#{focused}")
    assert group.locator(".verdict").inner_text() == "used"
    bars = group.get_by_role("img").nth(0).get_attribute("aria-label")
    assert bars.count("95 % interval") == 3 and bars.count("random patches") == 3
    assert "row 2 of 8, column 2 of 8, in 100 %" in group.locator(".place").get_attribute(
        "aria-label"
    )
    button = group.get_by_role("button", name="Show its")
    button.click()
    tiles = group.locator(".gallery .tile")
    assert tiles.count() == 25 and group.get_by_role("button", name="Hide its").count() == 1
    tiles.nth(0).click()
    dialog = page.get_by_role("dialog")
    assert dialog.locator(".command").inner_text().startswith("vitlens app ")
    views = dialog.get_by_role("img")
    assert views.count() == 2 + 3  # plain, map, and three ways to cover
    assert views.nth(0).locator(".frame").count() == 1  # the planted patch
    assert views.nth(1).locator(".cell").count() >= 1
    assert "raise class 0, the predicted class" in views.nth(1).get_attribute("aria-label")
    covered = [views.nth(number).get_attribute("aria-label") for number in (2, 3, 4)]
    assert all("The probability of class 0 falls from 9" in words for words in covered)
    assert all("With random patches covered instead: 9" in words for words in covered)
    assert color_at_mark(page, views.nth(0)) == "red"
    for number in (2, 3, 4):
        assert color_at_mark(page, views.nth(number)) == "not red"
    before = dialog.locator("h2").inner_text()
    page.keyboard.press("ArrowRight")
    assert dialog.locator("h2").inner_text() != before and "2 of 25" in dialog.inner_text()
    page.keyboard.press("Escape")
    assert dialog.count() == 0
    assert tiles.nth(0).evaluate("node => node === document.activeElement")
    assert all(url == audited.as_uri() or url.startswith("blob:") for url in requests)


def test_audit_page_works_by_keyboard_and_opens_classes(opened):
    page, _ = opened
    classes = page.locator("details.class")
    assert classes.count() == 3 and not classes.nth(1).evaluate("node => node.open")
    classes.nth(1).locator("summary").focus()
    page.keyboard.press("Enter")
    tile = classes.nth(1).locator(".crops .tile").first
    tile.focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("dialog").count() == 1


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    root = tmp_path_factory.mktemp("compared")
    model, other = save_model(root / "colors"), save_model(root / "blind", blind=True)
    data = write_images(root / "data")
    options = ["--out", root / "audit", "--device", "cpu", "--beside", other]
    vitlens("audit", model, "--data", data, *options)
    return root / "audit" / "audit.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_audit_page_shows_changes_beside_a_second_model(browser, compared, scheme):
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(compared.as_uri())
    page.wait_for_selector(".vitlens.audit")
    section = page.get_by_role("region", name="Beside blind")
    charts = section.get_by_role("img")
    assert charts.count() == 3
    assert charts.nth(0).locator("rect.effect").count() == 3
    assert charts.nth(0).get_attribute("aria-label").count("95 % interval") == 3
    assert charts.nth(1).locator("text").nth(0).inner_html() == "L0 H0"
    items = section.locator("li")
    assert items.count() == 3 + 4
    assert items.nth(0).inner_text().startswith("class 0, group")
    items.nth(0).get_by_role("button").click()
    assert page.evaluate("document.activeElement.id").startswith("group-")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert faults(page) == []
    page.close()
    assert errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_audit_page_fits_a_phone_and_is_accessible(opened, scheme):
    page, _ = opened
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("details.class").nth(2).evaluate("node => { node.open = true; }")
    page.locator(".group .button").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert faults(page) == []
    page.locator(".gallery .tile").first.click()
    assert page.evaluate("document.querySelector('dialog').getBoundingClientRect().width") <= 390
    assert faults(page, "dialog") == []
