"""Canvases of a saved page: maps of random weights over a gray photo have one color, and a peak keeps its scale."""

import numpy as np
import pytest
import timm
import torch

from browser.fronts import MARKS
from vitlens.plot import scales
from vitlens_explorer import front, save_page

pytestmark = MARKS
GRAY = np.full((64, 64, 3), 128, np.uint8)
SPREAD = """(selector) => [...document.querySelectorAll(selector)].map((canvas) => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    const colors = new Set(new Uint32Array(data.buffer));
    return colors.size;
})"""
SET = """async (values) => {
    const { source } = document.querySelector("#page");
    source.send({ set: values });
    await source.turn;
    await new Promise((done) => setTimeout(done, 200));
    return source.get("frame").panels[0].words;
}"""


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """A saved page of a model with random weights."""
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=64, patch_size=8, embed_dim=96, depth=3, num_heads=3, num_classes=5
    ).eval()
    model.pretrained_cfg = {"input_size": (3, 64, 64), "crop_pct": 1.0}
    path = save_page(model, {"gray": GRAY}, tmp_path_factory.mktemp("page") / "page.html")
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    page.goto(path.as_uri())
    page.wait_for_selector(".vitlens[data-answers]")
    yield page
    page.close()


@pytest.mark.parametrize("stretch", [False, True])
@pytest.mark.parametrize("view", ["attention", "received", "rollout"])
def test_saved_page_paints_random_weights_in_one_color(page, view, stretch):
    words = page.evaluate(SET, {"view": view, "stretch": stretch, "smooth": True})
    assert page.evaluate(SPREAD, ".panel .picture canvas") == [1]
    assert "Drawn as uniform: none is more than " in words and "times their mean" in words
    if view == "attention":
        (colors,) = page.evaluate(SPREAD, ".stage canvas")
        tiles = 3 * (3 + 2)
        assert colors <= tiles + 1, "one color for each tile, and the gaps"


def test_saved_page_paints_the_map_of_an_opened_weight_in_one_color(page):
    page.evaluate(SET, {"view": "attention", "stretch": False})
    page.locator("button", has_text="how?").click()
    page.wait_for_selector(".scene .picture canvas")
    assert page.evaluate(SPREAD, ".scene .picture canvas") == [1]
    assert "uniform within 30%" in page.locator(".note", has_text="Colors: 0 to").inner_text()


def test_saved_page_names_the_scale_of_small_maps_and_its_stretch(page):
    page.evaluate(SET, {"view": "relevance", "stretch": False})
    ends = page.locator(".six .ends").all_inner_texts()
    assert len(ends) >= 5 and all(" to " in each for each in ends)
    words = page.evaluate(SET, {"stretch": True})
    assert "Colors are stretched: differences look " in words


@pytest.mark.parametrize("seed", range(3))
def test_scripts_judge_maps_as_python(browser, seed):
    rng = np.random.default_rng(seed)
    maps = [1 + spread * rng.normal(size=(8, 8)) for spread in (0.01, 0.03, 0.1, 1.0)]
    peaked = np.full((64, 64), 0.01)
    peaked[3, 5] = 0.5
    maps += [np.zeros((4, 4)), np.full((4, 4), -2.0), peaked, np.array([[1e6, 0.0], [0.0, 0.0]])]
    page = browser.new_page()
    page.add_script_tag(content=front.join_modules(front.FRONT / "page.js"))
    code = "(maps) => maps.map((map) => [uniformOf(map, UNIFORM.map), peakOf(map)])"
    found = page.evaluate(code, [values.ravel().tolist() for values in maps])
    page.close()
    for (uniform, factor), values in zip(found, maps, strict=True):
        for shown, expected in (
            (uniform, scales.uniform_value(values)),
            (factor, scales.peak(values)),
        ):
            assert (shown is None) == (expected is None)
            assert expected is None or shown == pytest.approx(expected)
