"""The widgets in a real browser, in JupyterLab and (slow) Notebook 7: actions of a reader, and the resulting pixels.

The pixels are compared with an image made here, from timm's unfused attention, Pillow and Matplotlib's colors.
"""

import base64
import functools
import io
import re
import zipfile

import matplotlib as mpl
import nbformat
import numpy as np
import pytest
import torch
from PIL import Image
from support import WIDE, unfused_maps

from browser.fronts import MARKS, START, Front, assert_covered, faults, move, see, tile
from vitlens import intervene, load_image, load_model, stream
from vitlens.attribution import relevance
from vitlens.faithfulness import curves
from vitlens.images import samples
from vitlens.models import preprocess, restore
from vitlens.plot import alt_text

FRONTS = ("lab", pytest.param("notebook", marks=pytest.mark.slow))
opened_model = functools.cache(load_model)

pytestmark = MARKS


@pytest.fixture(scope="module", params=FRONTS)
def front(request, model):
    started = Front(request.param, model.parent)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def page(front, browser):
    """The notebook with all widgets, in one page and kernel."""
    page = browser.new_page(viewport={"width": 1400, "height": 1100})
    front.open(page, "widgets.ipynb", ".jupyter-widgets img")
    page.wait_for_function("() => document.querySelectorAll('.vitlens[data-answers]').length === 3")
    errors = []  # from now on: an application may have errors while it starts
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    assert not errors
    page.close()


class Widget:
    """The widget of the page with this number, with the actions and texts of a user."""

    levels = 1  # largest difference of a color

    def __init__(self, page, number):
        self.page, self.root = page, page.locator(".vitlens").nth(number)

    def settle(self):
        """Wait until everything that was requested is shown."""
        node = self.root.element_handle()
        self.page.wait_for_function("node => node.dataset.answers === node.dataset.sent", arg=node)

    def act(self, action):
        """Do something that runs the model, and wait for the answer."""
        before, node = self.root.get_attribute("data-answers"), self.root.element_handle()
        action()
        self.page.wait_for_function(
            "([node, before]) => node.dataset.answers !== before", arg=[node, before]
        )
        self.settle()

    def press(self, *keys):
        for key in keys:
            self.act(lambda key=key: self.page.keyboard.press(key))

    def click(self, row, col, rows=8, cols=8, panel="picture"):
        canvas = self.root.locator(f"[data-panel={panel}] .picture")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        place = {"x": (col + 0.5) / cols * box["width"], "y": (row + 0.5) / rows * box["height"]}
        self.act(lambda: canvas.click(position=place))

    def choose(self, control, label):
        self.act(
            lambda: self.root.locator(f"[data-control={control}] select").select_option(label=label)
        )

    def slide(self, control, value):
        self.act(lambda: move(self.root, control, value))

    def pixels(self, panel="picture"):
        """(H, W, 3) of the canvas itself."""
        canvas = self.root.locator(f"[data-panel={panel}] .picture canvas")
        data = canvas.evaluate("node => node.toDataURL('image/png').split(',')[1]")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)

    def text(self, part):
        return self.root.locator(part).first.inner_text()

    def upload(self, path):
        self.root.locator("input[type=file]").set_input_files(path)

    def shows(self, wanted):
        """Equal to one level, every pixel."""
        found = self.pixels()
        assert found.shape == wanted.shape and np.abs(found - wanted).max() <= self.levels


def expected(folder, picture, layer, head, query, strength=0.75, smooth=True, even=False):
    """The overlay as it has to be: attention by timm's unfused path over the gray picture, in viridis from 0."""
    model = opened_model(folder)
    x = preprocess(model, picture)
    maps = unfused_maps(model, x)[layer][0].numpy()
    row = 0 if query is None else 1 + query[0] * 8 + query[1]
    weights = (
        (maps.mean(0) if head == "mean" else maps[head])[row, 1:].reshape(8, 8).astype(np.float32)
    )
    return painted(model, x, weights, strength, smooth, even)


def painted(model, x, weights, strength=0.75, smooth=True, even=False):
    """The overlay of a map from 0 to its largest value: picture · (1 − a) + color · a."""
    config = model.pretrained_cfg
    seen = x[0].permute(1, 2, 0).numpy() * config["std"] + config["mean"]
    side = 128 * 3
    gray = Image.fromarray(np.rint(seen * 255).clip(0, 255).astype(np.uint8)).resize(
        (side, side), Image.Resampling.BICUBIC
    )
    gray = np.asarray(gray.convert("L")).astype(float)[..., None]
    if smooth:  # linear between the middles of patches, in float64
        places = (np.arange(side) + 0.5) * 8 / side - 0.5
        large = np.array(
            [np.interp(places, np.arange(8), line) for line in weights.astype(np.float64)]
        )
        large = np.array([np.interp(places, np.arange(8), line) for line in large.T]).T
    else:
        large = np.kron(weights.astype(np.float64), np.ones((side // 8, side // 8)))
    table = (
        mpl.colormaps["viridis"](np.arange(256))[:, :3] * 255
    )  # between its colors, in proportion
    share = large / weights.max()
    color = np.stack([np.interp(share * 255, np.arange(256), channel) for channel in table.T], -1)
    a = strength * (1 if even else share[..., None])
    return np.rint(gray * (1 - a) + color * a).astype(int)


PICTURE = samples()["chelsea"]


def test_explorer_click_keys_and_sliders(page, model):
    explorer, shown = Widget(page, 0), functools.partial(expected, model, PICTURE)
    explorer.root.locator(".stage").wait_for()
    explorer.shows(shown(2, "mean", (2, 2)))
    explorer.slide("layer", 3)
    explorer.click(2, 5)
    explorer.shows(shown(3, "mean", (2, 5)))
    assert "row 2, column 5" in explorer.text("figcaption")
    assert explorer.text(".under").startswith("row 2, column 5: 0.")
    explorer.act(lambda: tile(explorer.root, 1, 1))
    explorer.shows(shown(1, 1, (2, 5)))
    explorer.root.locator(".mosaic").get_by_role("button", name="Distance").click()
    explorer.root.locator(".stage text").nth(11).wait_for()
    assert "Layer 1, head 1: largest weight 0." in explorer.text(".mosaic .note")
    explorer.root.locator(".stage").focus()
    explorer.press("ArrowRight", "ArrowUp")
    explorer.shows(shown(2, 0, (2, 5)))
    explorer.root.locator(".mosaic").get_by_role("button", name="Attention").click()
    explorer.slide("layer", 1)
    explorer.slide("head", 2 + 1)  # after the mean and the largest
    explorer.shows(shown(1, 1, (2, 5)))
    explorer.root.locator("[data-panel=picture] .picture").focus()
    explorer.press("ArrowDown", "ArrowLeft")
    widgets = page.locator(".vitlens").count()
    for key in ("b", "a", "x", "d", "d"):  # shortcuts of a notebook: insert, cut, delete
        page.keyboard.press(key)
    assert page.locator(".vitlens").count() == widgets
    explorer.shows(shown(1, 1, (3, 4)))
    smooth = explorer.root.get_by_label("Interpolate", exact=True)
    for group in ("Appearance", "More"):
        explorer.root.locator(f"[data-fold={group}] > summary").click()
    explorer.slide("row", 6)
    explorer.act(smooth.click)
    explorer.slide("strength", 0.3)
    explorer.shows(shown(1, 1, (6, 4), strength=0.3, smooth=False))
    explorer.choose("opacity", "uniform")
    explorer.shows(shown(1, 1, (6, 4), strength=0.3, smooth=False, even=True))
    explorer.root.get_by_label("Layer", exact=True).focus()
    explorer.press("ArrowRight")
    assert "layer 2" in explorer.text("figcaption")
    explorer.act(smooth.click)
    explorer.slide("strength", 0.75)
    explorer.choose("opacity", "by value")
    named = "each => Boolean(each.labels?.length || each.ariaLabel || each.textContent)"
    for kinds, holds in (
        ("input, select, button", named),
        (".picture, .plot", "each => each.tabIndex === 0"),
    ):
        found = explorer.root.evaluate(
            f"node => [...node.querySelectorAll('{kinds}')].map({holds})"
        )
        assert found and all(found), kinds


def test_explorer_explains_a_class(page, model):
    explorer, vit = Widget(page, 0), opened_model(model)
    x = preprocess(vit, PICTURE)
    order = vit(x)[0].argsort(descending=True).tolist()
    explorer.act(explorer.root.locator(".bars button").nth(1).click)
    explorer.shows(painted(vit, x, relevance(vit, x, order[1])[0].numpy()))
    assert f"for “{order[1]}”" in explorer.text("figcaption")
    assert explorer.text(".bars [aria-pressed=true] .name") == str(order[1])
    assert explorer.root.get_by_label("Layer", exact=True).is_hidden()
    rather = explorer.root.locator("[data-control=against] option").nth(2).inner_text()
    assert rather.startswith(f"{order[2]} (")
    explorer.choose("against", rather)
    maps = relevance(vit, x, order[1], against=order[2])
    explorer.shows(painted(vit, x, maps[0].numpy()))
    explorer.root.locator(".score svg").wait_for()
    assert "random orderings" in explorer.text(".score .note")
    values = curves(vit, x, maps, order[1], against=order[2], step=5).insertion[0]
    line = explorer.root.locator(".curve.insertion:not(.random)").get_attribute("points")
    heights = np.array([float(point.split(",")[1]) for point in line.split()])
    places = (heights - heights[0]) / (heights[-1] - heights[0])
    np.testing.assert_allclose(places, (values - values[0]) / (values[-1] - values[0]), atol=1e-3)
    assert_covered(page, explorer.root, vit, x, maps, order[1], order[2])
    assert f": {order[1]} rather than {order[2]} " in explorer.text(".covered p")
    explorer.choose("against", "nothing")


def test_explorer_bars_and_switches(page, model):
    explorer, vit = Widget(page, 0), opened_model(model)
    x = preprocess(vit, PICTURE)
    first, target = explorer.text(".bars .share"), int(vit(x).argmax())
    explorer.act(lambda: see(explorer.root, "contributions"))
    explorer.act(explorer.root.locator(".bars button").nth(0).click)
    written = stream.direct_by_head(vit, x, target)[0]

    def written_by(layer, head):
        canvas = explorer.root.locator("[data-panel=picture] .picture canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        page.mouse.move(box["x"] + 0.99 * box["width"], box["y"] + 0.01 * box["height"])
        found = re.fullmatch(r"row 0, column 7: (.*) logits", explorer.text(".under"))
        shown, right = float(found[1].replace("−", "-")), written[layer, head, 0, 7].item()
        assert shown == pytest.approx(right, rel=0.052)  # two digits at least

    explorer.act(explorer.root.locator(".parts .goes").nth(3 * 2 + 1).click)
    written_by(2, 1)
    explorer.root.locator(".parts .plot").focus()
    explorer.press("ArrowRight")
    written_by(3, 1)
    explorer.root.get_by_role("button", name="Where does it look?").click()
    explorer.settle()
    explorer.act(lambda: tile(explorer.root, 2, 0, "right"))
    explorer.act(lambda: tile(explorer.root, 2, 1))
    explorer.press("x")
    reference = torch.cat([preprocess(vit, each) for each in samples().values()])
    with (
        intervene(vit, heads={(2, 0): "mean", (2, 1): "mean"}, reference=reference),
        torch.no_grad(),
    ):
        shares = vit(x)[0].softmax(-1)
    name, share, before = (explorer.text(f".bars .{part}") for part in ("name", "share", "before"))
    assert (name, share) == (
        str(shares.argmax().item()),
        f"{100 * shares.max():.1f}%",
    ) and before.startswith("was ")
    assert explorer.root.locator(".stage .cross").count() == 2
    assert "head 1 of layer 2, each replaced with its mean over 6 sample photos" in explorer.text(
        "figcaption"
    )
    explorer.act(explorer.root.get_by_role("button", name="Turn all on").click)
    assert (
        explorer.text(".bars .share") == first
        and explorer.root.locator(".bars .before").count() == 0
    )


def test_explorer_uploads_and_downloads(page, model, tmp_path):
    """An image in several parts, and files of other kinds."""
    explorer, vit = Widget(page, 0), opened_model(model)
    pixels, exif = np.random.default_rng(0).integers(0, 255, (700, 900, 3), np.uint8), Image.Exif()
    exif[274] = 6  # lies on its side, as telephones write them
    Image.fromarray(pixels).save(large := tmp_path / "phone.png", exif=exif, icc_profile=WIDE)
    assert large.stat().st_size > 3 * 2**19
    loaded = load_image(large)
    explorer.choose("query", "class token (read-out)")
    explorer.slide("layer", 2)
    explorer.slide("head", 0)
    explorer.act(lambda: explorer.upload(large))
    explorer.shows(expected(model, loaded, 2, "mean", None))
    assert "“Wide” to sRGB; was turned upright" in explorer.text(".about")
    with page.expect_download() as saved:
        explorer.root.get_by_role("button", name="Save", exact=True).click()
    with zipfile.ZipFile(saved.value.path()) as archive:
        saved_input = archive.read("vitlens-phone-attention-layer2-input.png")
        numbers = archive.read("vitlens-phone-attention-layer2.csv").decode()
    pixels = np.asarray(Image.open(io.BytesIO(saved_input)))
    assert np.array_equal(pixels, restore(vit, preprocess(vit, loaded))[0]), "to the bit"
    saved_map = np.loadtxt(io.StringIO(numbers), delimiter=",")
    maps = unfused_maps(vit, preprocess(vit, loaded))[2][0].numpy()
    np.testing.assert_allclose(saved_map.ravel(), maps.mean(0)[0, 1:], rtol=1e-5)
    before, words = explorer.pixels(), explorer.text("figcaption")
    for name, data, problem in (
        ("text.png", b"a text", "no format"),
        ("huge.jpg", bytes(65 * 2**20), "(65.0 MB)"),
    ):
        (file := tmp_path / name).write_bytes(data)
        explorer.upload(file)
        explorer.root.locator(".alert", has_text=name).wait_for()
        explorer.settle()
        assert problem in explorer.text(".alert")
        assert np.array_equal(explorer.pixels(), before) and explorer.text("figcaption") == words


def test_explorer_takes_pastes_and_drops_inside_only(page):
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
    explorer = Widget(page, 0)
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


def test_widgets_have_no_accessibility_fault(page):
    assert faults(page, ".vitlens") == []


def test_compare(page):
    pair = Widget(page, 1)
    pair.click(2, 5, panel="right")
    assert pair.root.locator("[data-panel=left] .frame").count() == 1
    assert "row 2, column 5" in pair.text("[data-panel=left] figcaption")


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


def test_saved_notebooks_show_still_images(front, browser):
    Image.new("RGB", (90, 60), "red").save(file := io.BytesIO(), "PNG")
    live = {
        "application/vnd.jupyter.widget-view+json": {
            "version_major": 2,
            "version_minor": 0,
            "model_id": "gone",
        }
    }
    data = live | alt_text.bundle(file.getvalue(), 'The "red" still.', 45)
    cell = nbformat.v4.new_code_cell("page", outputs=[nbformat.v4.new_output("display_data", data)])
    nbformat.write(
        nbformat.v4.new_notebook(cells=[cell]), front.folder / "saved.ipynb"
    )  # not trusted
    page = browser.new_page()
    page.goto(
        f"{front.address}/{'lab/tree' if front.kind == 'lab' else 'notebooks'}/saved.ipynb?token={front.token}"
    )
    still = page.locator(".jp-OutputArea-output img")
    still.wait_for(timeout=START)
    assert still.get_attribute("alt") == 'The "red" still.' and still.count() == 1
    assert still.evaluate("node => [node.naturalWidth, node.width]") == [90, 45]
    assert "Error displaying widget" not in page.inner_text("body")
    page.close()


def test_an_alert_names_an_ended_kernel(page, front):
    broken = "[data-mime-type='application/vnd.jupyter.stderr'], [data-mime-type='application/vnd.jupyter.error']"
    assert page.locator(broken).count() == 0
    for kernel in front.kernels():
        kernel.kill()
    page.locator(".alert", has_text="Run the cell again").first.wait_for()
    assert page.locator(".vitlens .body").first.evaluate("node => node.inert")
