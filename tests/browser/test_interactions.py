"""Clicks, keys and files that all front ends take, each against Python's numbers: in the app, in JupyterLab and (slow)
Notebook 7, in a saved page and in a live page.

The pixels are compared with images made from timm's unfused attention, Pillow and Matplotlib's colors.
"""

import base64
import functools
import io
import json
import re
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from browser.fronts import (
    MARKS,
    PYTHON,
    assert_covered,
    digits,
    expected,
    faults,
    opened_model,
    painted,
    press_share,
    see,
    tile,
    weights_of,
)
from vitlens import attention, capture, intervene, load_image, stream
from vitlens.attribution import relevance
from vitlens.faithfulness import curves
from vitlens.images import samples
from vitlens.models import preprocess, restore

pytestmark = MARKS

PICTURE = samples()["chelsea"]
ALL = (*PYTHON, "saved", "live")
RUNNING = (*PYTHON, "live")
"""Front ends that run the model: on other photos, for other classes and without some heads."""
NAMED = "each => Boolean(each.labels?.length || each.ariaLabel || each.textContent)"
NO_FORMAT = dict.fromkeys(PYTHON, "no format") | {"live": "Export it as JPEG or PNG"}
ENDED = {"app": "has ended", "lab": "Run the cell again", "notebook": "Run the cell again"}


def across(names):
    """Run a test in these front ends, in Notebook 7 only as a slow test."""
    slow = pytest.param("notebook", marks=pytest.mark.slow)
    rows = [slow if name == "notebook" else name for name in names]
    return pytest.mark.parametrize("explorer", rows, indirect=True)


@pytest.fixture
def explorer(request, fronts):
    return fronts[request.param]


@pytest.fixture
def shown(model):
    """The overlay of the sample photo by layer, head and query."""
    return functools.partial(expected, model, PICTURE)


def assert_number(explorer, text, value):
    """Three digits of a number of the model, the last one of them rounded where a page computes in half precision."""
    if explorer.name == "saved":
        assert float(text) == pytest.approx(value, rel=6e-3)
    else:
        assert text == digits(value)


@across(ALL)
def test_first_map(explorer, shown):
    pixels, caption = explorer.first
    wanted = shown(2, "mean", (2, 2))
    assert pixels.shape == wanted.shape and np.abs(pixels - wanted).max() <= explorer.levels
    assert "row 2, column 2" in caption and "layer 2" in caption


@across(ALL)
def test_click_on_a_patch(explorer, shown):
    explorer.look(3)
    explorer.click(2, 5)
    explorer.shows(shown(3, "mean", (2, 5)))
    assert "row 2, column 5" in explorer.text("figcaption .exact")
    assert explorer.text(".under").startswith("row 2, column 5: 0.")


@across(ALL)
def test_click_and_keys_in_the_mosaic(explorer, shown):
    explorer.look(3, query=(2, 5))
    explorer.act(lambda: tile(explorer.root, 1, 1))
    explorer.shows(shown(1, 1, (2, 5)))
    explorer.root.locator(".mosaic").get_by_role("button", name="Distance").click()
    explorer.root.locator(".stage text").nth(11).wait_for()
    assert "Layer 1, head 1: largest weight 0." in explorer.text(".mosaic .note")
    explorer.root.locator(".stage").focus()
    explorer.press("ArrowRight", "ArrowUp")
    explorer.shows(shown(2, 0, (2, 5)))
    explorer.root.locator(".mosaic").get_by_role("button", name="Attention").click()


@across(ALL)
@pytest.mark.parametrize("order", ["attention distance", "entropy"])
def test_heads_are_sorted_by_a_statistic(explorer, shown, model, order):
    """Clicks and keys choose the head of a tile, whose number is under the mosaic and in its accessible name."""
    vit = opened_model(model)
    with capture(vit) as captured:
        vit(preprocess(vit, PICTURE))
    name, unit = {
        "attention distance": ("mean_distance", "pixels"),
        "entropy": ("entropy", "nats"),
    }[order]
    values = getattr(attention.summary(captured, name), name)[0].numpy()
    ranked = [
        divmod(at, values.shape[1]) for at in values.flatten().argsort(kind="stable").tolist()
    ]
    explorer.look(3, query=(2, 5))
    menu = explorer.root.get_by_label("Order of the heads")
    explorer.page.wait_for_function(
        "node => !node.disabled", arg=menu.element_handle()
    )  # the numbers of all layers are there
    menu.select_option(label=f"by {order}")
    explorer.root.locator(".mosaic h3", has_text=f"by {order}, ").wait_for()
    names = explorer.root.locator(".stage text").all_text_contents()
    assert names == [f"{layer}.{head}" for layer, head in ranked]
    stage = explorer.root.locator(".stage")
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    second_line = {"x": 1.5 / 8 * box["width"], "y": 0.75 * box["height"]}
    explorer.act(lambda: stage.click(position=second_line))
    layer, head = ranked[9]
    explorer.shows(shown(layer, head, (2, 5)))
    stage.focus()
    explorer.press("ArrowRight", "ArrowUp", "ArrowLeft")
    layer, head = ranked[1]
    explorer.shows(shown(layer, head, (2, 5)))
    explorer.page.mouse.move(1, 1)
    words = explorer.text(".mosaic .note")
    assert words.startswith(f"Layer {layer}, head {head}: ")
    number = re.search(rf"{order.split()[-1]} ([\d.]+) {unit}", words)[1]
    assert_number(explorer, number, values[layer, head])
    assert words.removesuffix(" Tiles are named layer.head.") in stage.get_attribute("aria-label")
    explorer.act(lambda: see(explorer.root, "rollout"))  # which takes a layer, and no head
    stage.focus()
    explorer.press("ArrowRight", "ArrowRight")
    explorer.until(f"through layers 0 to {ranked[3][0]}, mean")
    assert explorer.root.locator(".stage rect.frame").count() == 3
    menu.select_option(label="by layer")
    assert explorer.root.locator(".across span").count() == 4


def in_tour(explorer, part):
    """A part of the tour."""
    return explorer.root.locator(f"dialog.tour {part}")


def click_in_tour(explorer, row, col):
    """Click a patch of the photo of a step."""
    canvas = in_tour(explorer, ".scene .picture canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    place = {"x": (col + 0.5) / 8 * box["width"], "y": (row + 0.5) / 8 * box["height"]}
    in_tour(explorer, ".scene .picture").first.click(position=place)


def wait_for_frame(explorer, row, col):
    """Wait until the tour frames a patch."""
    frame = in_tour(explorer, f".scene rect.frame[x='{col / 8}'][y='{row / 8}']")
    frame.wait_for(state="attached")


def number_after(explorer, words):
    """The number after some words in the sentence of the tour, once they are there."""
    sentence = in_tour(explorer, ".sentence")
    sentence.filter(has_text=words).wait_for()
    return re.search(
        re.escape(words) + r" ?([−\d.e]*\d)", sentence.locator(".exact").text_content()
    )[1].replace("−", "-")


def reaches(explorer, part, read, values):
    """Wait until the numbers that a function reads from a part of the tour have these values, to 1 %."""
    explorer.page.wait_for_function(
        f"""([root, part, values]) => {{
            const read = ({read})(root.querySelector(`dialog ${{part}}`));
            return values.every((value, k) => Math.abs(read[k] / value - 1) < 0.01);
        }}""",
        arg=[explorer.root.element_handle(), part, values],
    )


@across(ALL)
def test_each_step_of_the_tour_follows_a_click(explorer, shown, model, maps):
    """Patch, key, head and layer that are chosen in the tour. The explorer then shows them."""
    vit = opened_model(model)
    batch = preprocess(vit, PICTURE)
    with torch.no_grad():
        best = str(vit(batch)[0].argmax().item())
        tokens = vit.patch_embed(batch)[0] + vit.pos_embed[0, 1:]
    explorer.look(3, query=(2, 5))
    explorer.root.get_by_role("button", name="Tour", exact=True).click()
    step = in_tour(explorer, "header")
    step.filter(has_text="Step 1 of 8").wait_for()

    levels = restore(vit, batch)[0]

    def middle_of(row, col):
        """The levels in the middle of a patch, as the tour writes them."""
        pixel = levels[16 * row + 8, 16 * col + 8]
        return ", ".join(str(level) for level in pixel)

    click_in_tour(explorer, 4, 1)
    pixel = middle_of(4, 1)
    in_tour(explorer, ".sentence").filter(has_text=f"each: {pixel} in the middle").wait_for()
    row, col = divmod(maps[3, :, 1 + 4 * 8 + 1, 1:].mean(0).argmax(), 8)
    payoff = in_tour(explorer, ".payoff").inner_text()
    assert f"answers “{best}” (" in payoff and f"most at row {row}, column {col}." in payoff

    explorer.page.keyboard.press("ArrowRight")  # the focus is on the photo
    pixel = middle_of(4, 2)
    in_tour(explorer, ".sentence").filter(has_text=f"each: {pixel} in the middle").wait_for()
    assert "Step 1 of 8" in step.inner_text()

    in_tour(explorer, "nav").get_by_role("button", name="Next").click()
    click_in_tour(explorer, 6, 3)
    wait_for_frame(explorer, 6, 3)
    explorer.root.get_by_role("button", name="Step 3").click()
    click_in_tour(explorer, 5, 3)
    query = 5 * 8 + 3
    reaches(
        explorer,
        "canvas[aria-label^='token']",
        "node => node.ariaLabel.split(' from ')[1].replaceAll('−', '-').split(' to ').map(Number)",
        [tokens[query].min().item(), tokens[query].max().item()],
    )

    explorer.root.get_by_role("button", name="Step 4").click()
    click_in_tour(explorer, 0, 6)
    logit = number_after(
        explorer, "row 0, column 6 a key: the 32 products of their numbers, summed and scaled, give"
    )
    head = int(number_after(explorer, "In layer 3, head"))
    with torch.no_grad(), capture(vit) as attn:
        vit(batch)
    exact = attn[3].logits([1 + query])[0, head, 0]
    assert float(logit) == pytest.approx(exact[1 + 6].item(), rel=2e-2, abs=1e-3)

    explorer.root.get_by_role("button", name="Step 5").click()
    click_in_tour(explorer, 7, 7)
    reaches(
        explorer,
        ".sentence",
        "node => [parseFloat(node.textContent.split('becomes ')[1])]",
        [maps[3, head, 1 + query, 1 + 63].item()],
    )

    explorer.root.get_by_role("button", name="Step 6").click()
    other = (head + 1) % 3
    explorer.act(lambda: in_tour(explorer, ".scene button").nth(other).click())
    in_tour(explorer, f".scene button:nth-child({other + 1})[aria-pressed=true]").wait_for()
    explorer.shows(shown(3, other, (5, 3)))
    explorer.root.get_by_role("button", name="Step 4").click()
    number_after(explorer, f"In layer 3, head {other}, the patch has a query and row")

    explorer.root.get_by_role("button", name="Step 7").click()
    explorer.act(lambda: in_tour(explorer, "").get_by_role("button", name="Layer 1").click())
    length = number_after(explorer, "In layer 1, attention adds a vector of length")
    assert float(length) > 0

    explorer.root.get_by_role("button", name="Step 8").click()
    layers = in_tour(explorer, ".depth .bars button")
    layers.nth(2).click()
    in_tour(explorer, "canvas[aria-label='Layer 2, mean of the heads']").wait_for()
    runs = explorer.name in RUNNING
    assert in_tour(explorer, ".next input[type=file]").count() == int(runs)
    assert in_tour(explorer, ".next").get_by_role("button", name="Turn off").count() == int(runs)
    explorer.act(lambda: in_tour(explorer, ".next").get_by_role("button", name="Compare").click())
    assert explorer.root.locator("dialog[open]").count() == 0
    explorer.page.wait_for_function("document.activeElement.matches('.stage')")
    explorer.shows(shown(1, other, (5, 3)))


@across(RUNNING)
def test_tour_ends_with_a_head_turned_off_and_an_own_photo(explorer, tmp_path):
    explorer.look(2, 1, query=(2, 5))
    explorer.root.get_by_role("button", name="Tour", exact=True).click()
    explorer.root.get_by_role("button", name="Step 8").click()
    explorer.act(
        lambda: in_tour(explorer, "").get_by_role("button", name="Turn off head 1").click()
    )
    assert "head 1 of layer 2" in explorer.text("figcaption .exact")
    assert explorer.root.locator("dialog[open]").count() == 0
    explorer.root.get_by_role("button", name="Tour", exact=True).click()
    explorer.root.get_by_role("button", name="Step 8").click()
    assert in_tour(explorer, "").get_by_role("button", name="Turn off").count() == 0
    image = np.random.default_rng(0).integers(0, 255, (150, 200, 3), np.uint8)
    Image.fromarray(image).save(tmp_path / "own.png")
    field = in_tour(explorer, ".next input")
    explorer.act(lambda: field.set_input_files(tmp_path / "own.png"))
    assert explorer.root.locator("dialog[open]").count() == 0
    explorer.until("own.png", ".heading")
    explorer.choose("photograph", "chelsea")
    explorer.act(explorer.root.get_by_role("button", name="Turn all on").click)


@across(ALL)
def test_sliders(explorer, shown):
    explorer.look(3, query=(2, 5))
    explorer.slide("layer", 1)
    explorer.slide("head", 2 + 1)  # after the mean and the largest
    explorer.shows(shown(1, 1, (2, 5)))
    for group in ("Appearance", "More"):
        explorer.unfold(group)
    explorer.slide("row", 6)
    explorer.shows(shown(1, 1, (6, 5)))
    explorer.root.get_by_label("Layer", exact=True).focus()
    explorer.press("ArrowRight")
    assert "layer 2" in explorer.text("figcaption .exact")


@across(ALL)
def test_appearance(explorer, shown):
    explorer.look(1, 1, (6, 4))
    explorer.unfold("Appearance")
    smooth = explorer.root.get_by_label("Interpolate", exact=True)
    explorer.act(smooth.click)
    explorer.slide("strength", 0.3)
    explorer.shows(shown(1, 1, (6, 4), strength=0.3, smooth=False))
    explorer.choose("opacity", "uniform")
    explorer.shows(shown(1, 1, (6, 4), strength=0.3, smooth=False, even=True))
    explorer.act(smooth.click)
    explorer.slide("strength", 0.75)
    explorer.choose("opacity", "by value")
    explorer.shows(shown(1, 1, (6, 4)))


@across(ALL)
def test_keys_on_the_picture(explorer, shown):
    """Arrow keys move the query. Shortcuts of a notebook (insert, cut, delete) do not reach it."""
    explorer.look(1, 1, (2, 5))
    explorer.root.locator("[data-panel=picture] .picture").focus()
    explorer.press("ArrowDown", "ArrowLeft")
    widgets = explorer.page.locator(".vitlens").count()
    for key in ("b", "a", "x", "d", "d"):
        explorer.page.keyboard.press(key)
    assert explorer.page.locator(".vitlens").count() == widgets
    explorer.shows(shown(1, 1, (3, 4)))


@across(ALL)
def test_map_follows_the_pointer(explorer, shown, maps):
    page = explorer.page
    explorer.look(2, query=(3, 4))
    page.mouse.move(5, 5)
    if explorer.name not in ("lab", "notebook"):
        page.wait_for_function("() => location.hash.endsWith('layer=2&head=mean&patch=3,4')")
    words, address = explorer.text("figcaption .exact"), page.url
    explorer.shows(shown(2, "mean", (3, 4)))
    explorer.point(1, 6)
    explorer.until("From row 1, column 6", ".under")
    explorer.shows(shown(2, "mean", (1, 6)))
    legend = explorer.root.locator(".legend span").nth(1).inner_text()
    assert_number(explorer, legend, maps[2].mean(0)[1 + 8 + 6, 1:].max())
    assert "the patch in row 1, column 6" in explorer.text("figcaption .exact")
    assert explorer.root.locator(".how").is_hidden() and page.url == address
    page.mouse.move(5, 5)
    explorer.root.locator(".under", has_text="From row 1, column 6").wait_for(state="hidden")
    explorer.shows(shown(2, "mean", (3, 4)))
    assert explorer.text("figcaption .exact") == words
    page.emulate_media(reduced_motion="reduce")
    explorer.point(6, 6)
    page.wait_for_timeout(400)
    explorer.shows(shown(2, "mean", (3, 4)))
    page.emulate_media(reduced_motion="no-preference")
    page.mouse.move(5, 5)


@across(ALL)
def test_value_opens_from_the_picture(explorer, maps):
    """Shift and a click open the weight of a patch, with the numbers of the model."""
    page, root = explorer.page, explorer.root
    explorer.look(2, query=(3, 4))
    page.keyboard.down("Shift")
    explorer.point(6, 1)
    page.mouse.down()
    page.mouse.up()
    page.keyboard.up("Shift")
    weights = maps[2, :, 1 + 3 * 8 + 4, 1 + 6 * 8 + 1]
    head = weights.argmax()
    explorer.until("row 6, column 1", ".detail h3")
    assert_number(explorer, explorer.text(".detail h3").split(":")[0], weights[head])
    assert "row 3, column 4" in explorer.text("figcaption .exact"), "the query stays"
    assert_number(explorer, explorer.text(".how").split()[0], weights.mean())
    assert f"head {head} has the largest weight" in explorer.text(".detail .note")
    strips = root.locator(".detail .strip")
    assert strips.evaluate_all("all => all.map(each => each.width)") == [32, 32, 32, 65]
    root.locator(".detail .picture").focus()
    page.keyboard.press("ArrowUp")
    explorer.until("row 5, column 1", ".detail h3")
    page.keyboard.press("Escape")
    assert root.locator(".detail").is_hidden()
    assert page.evaluate("document.activeElement.className") == "button small how"
    root.locator(".how").click()
    explorer.until("Softmax", ".detail")
    assert root.locator(".detail").bounding_box()["height"] > 200
    # Pages scroll by whole pixels.
    inside = "node => Math.floor(node.getBoundingClientRect().bottom) <= innerHeight"
    assert root.locator(".detail").evaluate(inside)
    root.locator(".detail header button").click()


@across(ALL)
def test_pointer_names_contributions(explorer, model):
    vit = opened_model(model)
    x = preprocess(vit, PICTURE)
    explorer.act(lambda: see(explorer.root, "contributions"))
    explorer.act(explorer.root.locator(".bars button").nth(0).click)
    written = stream.direct_by_head(vit, x, int(vit(x).argmax()))[0]

    def written_by(layer, head):
        explorer.point(0, 7)
        found = re.fullmatch(r"row 0, column 7: (.*) logits", explorer.text(".under"))
        shown, right = float(found[1].replace("−", "-")), written[layer, head, 0, 7].item()
        assert shown == pytest.approx(right, rel=0.052)  # two digits at least

    explorer.act(explorer.root.locator(".parts .goes").nth(3 * 2 + 1).click)
    written_by(2, 1)
    explorer.root.locator(".parts .plot").focus()
    explorer.press("ArrowRight")
    written_by(3, 1)


@across(ALL)
def test_click_on_a_class(explorer, model):
    vit = opened_model(model)
    x = preprocess(vit, PICTURE)
    order = vit(x)[0].argsort(descending=True).tolist()
    explorer.look(2)
    explorer.act(explorer.root.locator(".bars button").nth(1).click)
    explorer.shows(painted(vit, x, relevance(vit, x, order[1])[0].numpy()))
    assert f"for “{order[1]}”" in explorer.text("figcaption .exact")
    assert explorer.text(".bars [aria-pressed=true] .name") == str(order[1])
    assert explorer.root.get_by_label("Layer", exact=True).is_hidden()


@pytest.mark.slow
@across(RUNNING)
def test_contrast_with_another_class(explorer, model):
    """In front ends with Python also the score of the map, with the photos that `curves` covers."""
    vit = opened_model(model)
    x = preprocess(vit, PICTURE)
    order = vit(x)[0].argsort(descending=True).tolist()
    explorer.look(2)
    explorer.act(explorer.root.locator(".bars button").nth(1).click)
    rather = explorer.root.locator("[data-control=against] option").nth(2).inner_text()
    assert rather.startswith(f"{order[2]} (")
    explorer.choose("against", rather)
    maps = relevance(vit, x, order[1], against=order[2])
    explorer.shows(painted(vit, x, maps[0].numpy()))
    assert f"rather than “{order[2]}”" in explorer.text("figcaption .exact")
    if explorer.name in PYTHON:
        assert_scored(explorer, vit, x, maps, order)
    explorer.choose("against", "nothing")


def assert_scored(explorer, vit, x, maps, order):
    explorer.root.locator(".score svg").wait_for()
    assert "random orderings" in explorer.text(".score .note")
    values = curves(vit, x, maps, order[1], against=order[2], step=5).insertion[0]
    line = explorer.root.locator(".curve.insertion:not(.random)").get_attribute("points")
    heights = np.array([float(point.split(",")[1]) for point in line.split()])
    places = (heights - heights[0]) / (heights[-1] - heights[0])
    np.testing.assert_allclose(places, (values - values[0]) / (values[-1] - values[0]), atol=1e-3)
    assert_covered(explorer.page, explorer.root, vit, x, maps, order[1], order[2])
    assert f": {order[1]} rather than {order[2]} " in explorer.text(".covered p")


@across(RUNNING)
def test_heads_off(explorer, model):
    vit = opened_model(model)
    explorer.look(2)
    first = explorer.text(".bars .share")
    explorer.act(lambda: tile(explorer.root, 2, 0, "right"))
    explorer.act(lambda: tile(explorer.root, 2, 1))
    explorer.press("x")
    reference = torch.cat([preprocess(vit, each) for each in samples().values()])
    heads = {(2, 0): "mean", (2, 1): "mean"}
    with intervene(vit, heads=heads, reference=reference), torch.no_grad():
        shares = vit(preprocess(vit, PICTURE))[0].softmax(-1)
    name, share, before = (explorer.text(f".bars .{part}") for part in ("name", "share", "before"))
    assert (name, share) == (str(shares.argmax().item()), f"{100 * shares.max():.1f}%")
    assert before.startswith("was ")
    assert explorer.root.locator(".stage .cross").count() == 2
    words = "head 1 of layer 2, each replaced with its mean over 6 sample photos"
    assert words in explorer.text("figcaption .exact")
    listed = explorer.root.get_by_role("group", name="Heads that are off").get_by_role("button")
    assert listed.all_inner_texts() == ["Layer 2, head 0 ×", "Layer 2, head 1 ×"]
    explorer.act(listed.first.click)
    assert listed.all_inner_texts() == ["Layer 2, head 1 ×"]
    assert "Turned off: head 1 of layer 2, replaced" in explorer.text("figcaption .exact")
    assert explorer.root.locator(".stage .cross").count() == 1
    explorer.act(explorer.root.get_by_role("button", name="Turn all on").click)
    assert not listed.count()
    assert explorer.text(".bars .share") == first
    assert explorer.root.locator(".bars .before").count() == 0


@across(RUNNING)
def test_upload(explorer, model, tmp_path):
    """An uploaded photo is shown. A file of another kind is refused, and the photo stays."""
    pixels = np.random.default_rng(0).integers(0, 255, (150, 200, 3), np.uint8)
    Image.fromarray(pixels).save(noise := tmp_path / "noise.png")
    explorer.look(2)
    explorer.unfold("More")
    explorer.choose("query", "class token (read-out)")
    explorer.act(lambda: explorer.upload(noise))
    explorer.shows(expected(model, load_image(noise), 2, "mean", None))
    (text := tmp_path / "text.png").write_bytes(b"a text")
    before, words = explorer.pixels(), explorer.text("figcaption .exact")
    explorer.upload(text)
    explorer.until("text.png", ".alert")
    explorer.settle()
    assert NO_FORMAT[explorer.name] in explorer.text(".alert")
    assert np.array_equal(explorer.pixels(), before) and explorer.text("figcaption .exact") == words
    explorer.root.get_by_role("button", name="Close").click()
    assert explorer.root.locator(".alert").is_hidden()
    explorer.choose("photograph", "chelsea")
    explorer.look(2)
    explorer.shows(expected(model, PICTURE, 2, "mean", (2, 2)))


@across(ALL)
def test_save(explorer, model):
    """One zip file with the figure, the numbers of the map and the settings."""
    explorer.look(2, 1, (3, 4))
    with explorer.page.expect_download() as saved:
        press_share(explorer.root, "Save")
    stem = "vitlens-chelsea-attention-layer2"
    assert saved.value.suggested_filename == f"{stem}.zip"
    with zipfile.ZipFile(saved.value.path()) as archive:
        assert archive.testzip() is None
        files = {name.removeprefix(stem): archive.read(name) for name in archive.namelist()}
    about = json.loads(files[".json"])
    assert about["words"] == explorer.text("figcaption .exact")
    assert (about["view"], about["layer"]) == ("attention", 2)
    wanted = weights_of(model, PICTURE, 2, 1, (3, 4))
    assert {*files} == {".png", ".csv", "-heads.csv", ".json", "-input.png"}
    vit = opened_model(model)
    with torch.no_grad(), capture(vit) as attn:
        vit(preprocess(vit, PICTURE))
    heads = pd.read_csv(io.BytesIO(files["-heads.csv"]))
    limit = 3e-3 if explorer.name == "saved" else 1e-4
    pd.testing.assert_frame_equal(heads, attention.summary(attn).to_pandas(), rtol=limit)
    values = np.loadtxt(io.StringIO(files[".csv"].decode()), delimiter=",")
    if explorer.name in PYTHON:
        Image.open(io.BytesIO(files[".png"])).verify()
    else:
        assert_same_picture(explorer, files, (3, 4))
    assert np.abs(values - wanted).max() <= limit * wanted.max()


def assert_same_picture(explorer, files, query):
    """The saved picture is that of the canvas, with a frame around the query. The input has the same size."""
    canvas = explorer.root.locator("[data-panel=picture] .picture canvas")
    data = canvas.evaluate("node => node.toDataURL('image/png').split(',')[1]")
    pictures = base64.b64decode(data), files[".png"], files["-input.png"]
    drawn, saved, seen = (
        np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in pictures
    )
    rows, cols = (slice(48 * at - 3, 48 * at + 51) for at in query)
    framed = np.zeros(drawn.shape[:2], bool)
    framed[rows, cols] = True
    differ = (drawn != saved).any(-1)
    assert differ.any() and not differ[~framed].any() and seen.shape == drawn.shape


@across(ALL)
def test_controls_have_names_and_are_accessible(explorer):
    for kinds, holds in (
        ("input, select, button", NAMED),
        (".picture, .plot", "each => each.tabIndex === 0"),
    ):
        found = explorer.root.evaluate(
            f"node => [...node.querySelectorAll('{kinds}')].map({holds})"
        )
        assert found and all(found), kinds
    assert faults(explorer.page, ".vitlens" if explorer.name in ("lab", "notebook") else None) == []


@across(PYTHON)
def test_an_alert_names_an_ended_process(explorer, fronts):
    broken = "[data-mime-type='application/vnd.jupyter.stderr'], [data-mime-type='application/vnd.jupyter.error']"
    assert explorer.page.locator(broken).count() == 0
    fronts.end_python(explorer.name)
    explorer.until(ENDED[explorer.name], ".alert")
    assert explorer.root.locator(".body").evaluate("node => node.inert")
    fronts.close(explorer.name)
