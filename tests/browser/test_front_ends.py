"""The widgets in a real browser, in JupyterLab and Notebook 7: what no other front end has."""

import io
import zipfile

import nbformat
import numpy as np
import pytest
from PIL import Image
from support import WIDE, unfused_maps

from browser.fronts import MARKS, START, Widget, expected, opened_model, press_share
from vitlens import load_image
from vitlens.models import preprocess, restore
from vitlens.plot import alt_text
from vitlens_explorer.outputs import hidden_by

FRONTS = ("lab", "notebook")

pytestmark = [MARKS, pytest.mark.slow]


@pytest.fixture(params=FRONTS)
def explorer(request, fronts):
    """The explorer in the notebook with all widgets, in one page and kernel."""
    return fronts[request.param]


@pytest.fixture
def page(explorer):
    return explorer.page


@pytest.fixture
def front(explorer, fronts):
    return fronts.jupyter[explorer.name]


def test_explorer_uploads_and_downloads(explorer, page, model, tmp_path):
    """A photo of a telephone in several messages, and a file over the limit."""
    vit = opened_model(model)
    pixels, exif = np.random.default_rng(0).integers(0, 255, (700, 900, 3), np.uint8), Image.Exif()
    exif[274] = 6  # lies on its side, as telephones write them
    Image.fromarray(pixels).save(large := tmp_path / "phone.png", exif=exif, icc_profile=WIDE)
    assert large.stat().st_size > 3 * 2**19
    loaded = load_image(large)
    explorer.look(2)
    explorer.unfold("More")
    explorer.choose("query", "class token (read-out)")
    explorer.act(lambda: explorer.upload(large))
    explorer.shows(expected(model, loaded, 2, "mean", None))
    assert "“Wide” to sRGB; was turned upright" in explorer.text(".about")
    with page.expect_download() as saved:
        press_share(explorer.root, "Save")
    with zipfile.ZipFile(saved.value.path()) as archive:
        saved_input = archive.read("vitlens-phone-attention-layer2-input.png")
        numbers = archive.read("vitlens-phone-attention-layer2.csv").decode()
    pixels = np.asarray(Image.open(io.BytesIO(saved_input)))
    assert np.array_equal(pixels, restore(vit, preprocess(vit, loaded))[0]), "to the bit"
    saved_map = np.loadtxt(io.StringIO(numbers), delimiter=",")
    maps = unfused_maps(vit, preprocess(vit, loaded))[2][0].numpy()
    np.testing.assert_allclose(saved_map.ravel(), maps.mean(0)[0, 1:], rtol=1e-5)
    before, words = explorer.pixels(), explorer.text("figcaption .exact")
    (huge := tmp_path / "huge.jpg").write_bytes(bytes(65 * 2**20))
    explorer.upload(huge)
    explorer.until("huge.jpg", ".alert")
    explorer.settle()
    assert "(65.0 MB)" in explorer.text(".alert")
    assert np.array_equal(explorer.pixels(), before) and explorer.text("figcaption .exact") == words
    explorer.root.get_by_role("button", name="Close").click()
    explorer.choose("photograph", "chelsea")


def test_explorer_takes_pastes_and_drops_inside_only(explorer, page):
    """An address, a heading of the page and drops beside the widget are the notebook's."""
    drop = """(node) => {
        const dataTransfer = new DataTransfer();
        dataTransfer.setData("text/plain", "x");
        return !node.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
    }"""
    paste = """(node) => {
        const clipboardData = new DataTransfer();
        return !node.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
    }"""
    assert not page.locator(".vitlens").first.locator("h1").count() and "#view" not in page.url
    for act, words in (
        (drop, "A link or a text was dropped"),
        (paste, "The clipboard has no photo"),
    ):
        page.locator("body").evaluate(act)
        assert words not in explorer.text(".alert")
        assert explorer.root.locator(".picture").first.evaluate(act)
        assert words in explorer.text(".alert")
    explorer.root.get_by_role("button", name="Close").click()


def test_compare(page):
    pair = Widget(page, 1)
    pair.click(2, 5, panel="right")
    assert pair.root.locator("[data-panel=left] .frame").count() == 1
    assert "row 2, column 5" in pair.text("[data-panel=left] .exact")


def test_positions(page):
    positions = Widget(page, 2)
    positions.click(7, 1, panel="all")
    assert positions.text("[data-panel=one] h3") == "Position in row 7, column 1"


def test_training(page):
    before = page.locator(".jupyter-widgets img").first.get_attribute("src")
    page.locator(".noUi-base").first.click()  # arrow keys do not reach core sliders in Notebook 7
    page.wait_for_function(
        "src => document.querySelector('.jupyter-widgets img').src !== src", arg=before
    )


def opened_without_kernel(front, browser, name):
    """A page with a notebook whose cells have not run."""
    page = browser.new_page(viewport={"width": 1400, "height": 1100})
    place = "lab/tree" if front.kind == "lab" else "notebooks"
    page.goto(f"{front.address}/{place}/{name}?token={front.token}&reset")
    return page


def test_saved_notebooks_show_still_images(front, browser):
    """A notebook that is not trusted shows each still once, in its size."""
    Image.new("RGB", (90, 60), "red").save(file := io.BytesIO(), "PNG")
    view = {"version_major": 2, "version_minor": 0, "model_id": "gone"}
    still = hidden_by("gone", alt_text.bundle(file.getvalue(), 'The "red" still.', 45))
    outputs = [
        nbformat.v4.new_output("display_data", data)
        for data in (still, {"application/vnd.jupyter.widget-view+json": view})
    ]
    cell = nbformat.v4.new_code_cell("page", outputs=outputs)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), front.folder / "saved.ipynb")
    page = opened_without_kernel(front, browser, "saved.ipynb")
    still = page.locator(".jp-OutputArea-output img")
    still.wait_for(timeout=START)
    assert still.get_attribute("alt") == 'The "red" still.' and still.count() == 1
    assert still.evaluate("node => [node.naturalWidth, node.width]") == [90, 45]
    assert "Error displaying widget" not in page.inner_text("body")
    page.close()


def test_notebook_reopened_by_its_author_shows_still_images(explorer, front, browser):
    """Stills are hidden beside live widgets. Without their kernel they are shown, and no error below them."""
    stills = ".jp-OutputArea-output [class$=-still] img"
    assert explorer.page.locator(stills).count() == 4
    hidden = "all => all.every((each) => each.getClientRects().length === 0)"
    assert explorer.page.locator(stills).evaluate_all(hidden)
    saved = front.folder / f"{front.kind}.ipynb"
    explorer.page.evaluate("void window.jupyterapp.commands.execute('docmanager:save')")
    while "vitlens-still" not in saved.read_text():
        explorer.page.wait_for_timeout(100)
    explorer.page.wait_for_timeout(500)  # the server signs what it has written
    (front.folder / "reopened.ipynb").write_bytes(saved.read_bytes())  # trusted by its content
    page = opened_without_kernel(front, browser, "reopened.ipynb")
    missing = page.get_by_text("Error displaying widget", exact=False)
    missing.nth(3).wait_for(state="attached", timeout=START)
    assert missing.evaluate_all(hidden)
    for number in range(4):
        still = page.locator(stills).nth(number)
        still.scroll_into_view_if_needed()
        assert still.is_visible() and still.bounding_box()["height"] > 200
        assert still.get_attribute("alt")
    page.close()
