"""The tour and playing through layers, in the app in a real browser."""

import pytest

from browser.fronts import MARKS, START, digits, move
from vitlens import load_model
from vitlens.images import samples
from vitlens.models import preprocess

pytestmark = MARKS

ROW, COL, LAYER = 3, 4, 2


@pytest.fixture(scope="module")
def page(fronts, browser):
    context, errors = browser.new_context(viewport={"width": 1440, "height": 1000}), []
    context.set_default_timeout(START)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(fronts.served.opening)
    page.wait_for_selector(".vitlens[data-answers]")
    click(page, ROW, COL)
    shows(page, f"row {ROW}, column {COL}")
    page.wait_for_function("hash => location.hash.includes(hash)", arg=f"patch={ROW},{COL}")
    yield page
    context.close()
    assert errors == []


def place(page, row, col):
    """Middle of a patch on the screen."""
    box = page.locator("[data-panel=picture] .picture canvas").bounding_box()
    return box["x"] + (col + 0.5) / 8 * box["width"], box["y"] + (row + 0.5) / 8 * box["height"]


def click(page, row, col):
    page.mouse.click(*place(page, row, col))


def shows(page, words, part="figcaption"):
    page.wait_for_function(
        "([part, words]) => document.querySelector(part)?.textContent.includes(words)",
        arg=[part, words],
    )


@pytest.mark.slow
def test_space_plays_through_the_layers(page):
    layer = "() => Number(document.querySelector('[data-control=layer] input').value)"

    def reaches(wanted):
        page.wait_for_function(layer.replace("()", "wanted", 1) + " === wanted", arg=wanted)

    assert page.evaluate(layer) == LAYER
    page.locator("[data-fold=More] > summary").click()
    page.locator("[data-control=layer] input").focus()
    page.keyboard.press("Space")
    page.wait_for_timeout(300)
    assert page.evaluate(layer) == LAYER, "not with the focus in a control"
    page.locator("[data-panel=picture] .picture").first.focus()
    page.keyboard.press("Space")
    reaches(3)
    page.get_by_role("button", name="▶ Play layers").wait_for()  # stops at the last layer
    page.keyboard.press("Space")
    reaches(1)
    page.keyboard.press("Space")
    held = page.evaluate(layer)
    page.wait_for_timeout(1500)
    assert page.evaluate(layer) == held < 3
    page.emulate_media(reduced_motion="reduce")
    for wanted in range(held + 1, 4):
        page.keyboard.press("Space")
        reaches(wanted)
    page.emulate_media(reduced_motion="no-preference")
    page.keyboard.press("Space")
    page.get_by_role("button", name="Pause").wait_for()
    page.locator(".mosaic h3").click()
    page.get_by_role("button", name="Play layers").wait_for()
    assert page.evaluate(layer) < 3, "a click outside the picture stops it"
    move(page, "layer", 3)
    reaches(3)


@pytest.mark.parametrize("width", [1440, 390])
def test_tour_has_eight_steps_with_the_numbers_of_the_model(page, model, maps, width):
    vit = load_model(model)
    page.set_viewport_size({"width": width, "height": 900})
    layer = int(page.locator("[data-control=layer] input").input_value())
    page.get_by_role("button", name="Tour", exact=True).click()
    page.locator("dialog.tour[open]").wait_for()
    rows = maps[layer, :, 1 + ROW * 8 + COL]
    others = rows.mean(0)[1:].copy()
    others[ROW * 8 + COL] = 0
    key = others.argmax()
    head = rows[:, 1 + key].argmax()
    best = vit(preprocess(vit, samples()["chelsea"]))[0].softmax(-1).max().item()
    reach = ", ".join(digits(each[1:].max()) for each in rows)
    wanted = [
        "128 × 128 pixels of 3 numbers each",
        "8 × 8 = 64 patches of 16 × 16 pixels, 768 numbers",
        "96 numbers and adds a vector for its place; there are 65 tokens with the class token",
        f"head {head}, the patch has a query and row {key // 8}, column {key % 8} a key",
        f"becomes {digits(rows[head, 1 + key])}",
        reach,
        f"In layer {layer}, attention adds",
        f"({100 * best:.1f}%), the",
    ]
    found = []
    for words in wanted:
        shows(page, words, ".tour .sentence")
        found.append(page.locator(".tour .exact").text_content())
        assert page.locator(".tour canvas, .tour svg").count()
        assert page.locator(".tour").evaluate("node => node.scrollWidth <= node.clientWidth")
        page.keyboard.press("ArrowRight")
    assert len(set(found)) == 8
    page.get_by_role("button", name="Step 2: Patches").click()
    shows(page, wanted[1], ".tour .sentence")
    for _ in range(12):  # the focus stays in the dialog, or leaves the page
        page.keyboard.press("Tab")
        assert not page.evaluate("document.activeElement.matches('.side *')")
    page.keyboard.press("Escape")
    assert page.locator("dialog.tour[open]").count() == 0
    assert page.evaluate("document.activeElement.textContent") == "Tour"
