"""The widgets in a real browser, in JupyterLab and (slow) Notebook 7: actions of a reader, and the resulting pixels.

The pixels are compared with an image made here, from timm's unfused attention, Pillow and Matplotlib's colors.
"""

import base64
import contextlib
import functools
import io
import re

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from test_capture import unfused_maps
from test_images import WIDE

from browser.fronts import MARKS, Front, move
from vitlens import intervene, load_image, load_model, stream
from vitlens.attribution import relevance
from vitlens.faithfulness import curves
from vitlens.images import samples
from vitlens.models import preprocess, restore

FRONTS = ("lab", pytest.param("notebook", marks=pytest.mark.slow))
opened_model = functools.cache(load_model)

pytestmark = MARKS


@pytest.fixture(scope="module", params=FRONTS)
def front(request, model):
    started = Front(request.param, model.parent)
    yield started
    started.stop()


START_VALUES = {
    "photograph": "astronaut", "view": "Attention from the query", "query": "read-out: class token", "layer": 3,
    "head": 0, "strength": 0.75, "opacity": "by value",
}  # fmt: skip


class Page:
    """What a person can do and see."""

    def __init__(self, front, browser, name="explorer", ready=".vitlens[data-answers]"):
        self.page = browser.new_page(viewport={"width": 1400, "height": 1100})
        front.open(self.page, f"{name}.ipynb", ready)
        self.errors = []  # from now on: an application may have some of its own while it starts
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.root = self.page.locator(".vitlens").first

    def settle(self):
        """Wait until everything that was asked for is shown."""
        self.page.wait_for_function(
            "() => { const { answers, sent } = document.querySelector('.vitlens').dataset; return answers === sent; }"
        )

    def act(self, what):
        """Do something that asks the model, and wait for the answer."""
        before = self.root.get_attribute("data-answers")
        what()
        self.page.wait_for_function(
            "before => document.querySelector('.vitlens').dataset.answers !== before", arg=before
        )
        self.settle()

    def click(self, row, col, rows=8, cols=8, panel="picture"):
        canvas = self.page.locator(f"[data-panel={panel}] .picture")
        box = canvas.bounding_box()
        place = {"x": (col + 0.5) / cols * box["width"], "y": (row + 0.5) / rows * box["height"]}
        self.act(lambda: canvas.click(position=place))

    def choose(self, control, label):
        self.act(lambda: self.page.locator(f"[data-control={control}] select").select_option(label=label))

    def slide(self, control, value):
        self.act(lambda: move(self.page, control, value))

    def reset(self):
        """Put every control that was moved back to where it stood when the page was opened."""
        self.root.evaluate(
            """(root, start) => {
                for (const [name, value] of Object.entries(start)) {
                    const input = root.querySelector(`[data-control=${name}] :is(select, input)`);
                    const options = [...(input.options ?? [])].map((option) => option.text);
                    if (value === (options[input.selectedIndex] ?? Number(input.value))) continue;
                    if (options.length) input.selectedIndex = options.indexOf(value);
                    else input.value = value;
                    input.dispatchEvent(new Event(options.length ? "change" : "input"));
                }
            }""",
            START_VALUES,
        )
        self.settle()

    def pixels(self, panel="picture"):
        """(H, W, 3) of the canvas itself."""
        data = self.page.locator(f"[data-panel={panel}] .picture canvas").evaluate(
            "node => node.toDataURL('image/png').split(',')[1]"
        )
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)

    def text(self, part):
        return self.root.locator(part).first.inner_text()

    def upload(self, path):
        def choose():
            with self.page.expect_file_chooser() as chooser:
                self.page.locator(".vitlens .button", has_text="Upload").first.click()
            chooser.value.set_files(path)

        return choose


@pytest.fixture(scope="module")
def opened(front, browser):
    page = Page(front, browser)
    yield page
    assert not page.errors
    broken = "[data-mime-type='application/vnd.jupyter.stderr'], [data-mime-type='application/vnd.jupyter.error']"
    assert page.page.locator(broken).count() == 0
    page.page.close()


@pytest.fixture
def page(opened):
    """The page as it was when it was opened."""
    opened.reset()
    return opened


def expected(folder, picture, layer, head, query, strength=0.75, smooth=True, even=False):
    """The overlay as it has to be: attention by timm's unfused path over the gray picture, in viridis from 0."""
    model = opened_model(folder)
    x = preprocess(model, picture)
    maps = unfused_maps(model, x)[layer][0].numpy()
    row = 0 if query is None else 1 + query[0] * 8 + query[1]
    weights = (maps.mean(0) if head == "mean" else maps[head])[row, 1:].reshape(8, 8).astype(np.float32)
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
        large = np.array([np.interp(places, np.arange(8), line) for line in weights.astype(np.float64)])
        large = np.array([np.interp(places, np.arange(8), line) for line in large.T]).T
    else:
        large = np.kron(weights.astype(np.float64), np.ones((side // 8, side // 8)))
    table = mpl.colormaps["viridis"](np.arange(256))[:, :3] * 255  # between its colors, in proportion
    share = large / weights.max()
    color = np.stack([np.interp(share * 255, np.arange(256), channel) for channel in table.T], -1)
    a = strength * (1 if even else share[..., None])
    return np.rint(gray * (1 - a) + color * a).astype(int)


def assert_shows(page, wanted):
    """Equal to one level, every pixel."""
    found = page.pixels()
    assert found.shape == wanted.shape and np.abs(found - wanted).max() <= 1


PICTURE = samples()["astronaut"]


def test_run_click_keys_and_sliders(page, model):
    page.page.wait_for_selector(".vitlens .dots svg")
    assert_shows(page, expected(model, PICTURE, 3, "mean", None))
    page.click(2, 5)
    assert_shows(page, expected(model, PICTURE, 3, "mean", (2, 5)))
    assert "row 2, column 5" in page.text("figcaption") and page.text(".under").startswith("row 2, column 5: 0.")
    page.slide("layer", 1)
    assert_shows(page, expected(model, PICTURE, 1, "mean", (2, 5)))
    page.slide("head", 2 + 1)  # after the mean and the largest
    assert_shows(page, expected(model, PICTURE, 1, 1, (2, 5)))
    page.page.locator("[data-panel=picture] .picture").focus()
    page.act(lambda: page.page.keyboard.press("ArrowDown"))
    page.act(lambda: page.page.keyboard.press("ArrowLeft"))
    assert_shows(page, expected(model, PICTURE, 1, 1, (3, 4)))
    page.act(lambda: page.page.get_by_label("Row", exact=True).fill("6") or page.page.keyboard.press("Enter"))
    assert_shows(page, expected(model, PICTURE, 1, 1, (6, 4)))
    page.act(lambda: page.page.get_by_label("Smooth", exact=True).click())
    assert_shows(page, expected(model, PICTURE, 1, 1, (6, 4), smooth=False))
    page.slide("strength", 0.3)
    assert_shows(page, expected(model, PICTURE, 1, 1, (6, 4), strength=0.3, smooth=False))
    page.choose("opacity", "even")
    assert_shows(page, expected(model, PICTURE, 1, 1, (6, 4), strength=0.3, smooth=False, even=True))
    page.act(lambda: page.page.get_by_label("Smooth", exact=True).click())


def test_keys_of_a_slider_reach_it_alone(page):
    page.slide("layer", 1)
    page.page.get_by_label("Layer", exact=True).focus()
    page.act(lambda: page.page.keyboard.press("ArrowRight"))
    assert "layer 2" in page.text("figcaption")
    page.page.locator("[data-panel=picture] .picture").focus()
    for key in ("b", "a", "x", "d", "d"):  # shortcuts of a notebook: insert, cut, delete
        page.page.keyboard.press(key)
    assert page.page.locator(".vitlens").count() == 1 and page.text("figcaption")


def test_why_a_class(page, model):
    vit = opened_model(model)
    x = preprocess(vit, PICTURE)
    order = vit(x)[0].argsort(descending=True).tolist()
    page.act(lambda: page.page.locator(".vitlens .bars button").nth(1).click())
    assert_shows(page, painted(vit, x, relevance(vit, x, order[1])[0].numpy()))
    assert f"for “{order[1]}”" in page.text("figcaption") and page.text(".bars [aria-pressed=true] .name") == str(
        order[1]
    )
    assert page.page.get_by_label("Layer", exact=True).is_hidden() and page.page.locator(".plot").count() == 0
    rather = page.page.locator("[data-control=against] option").nth(2).inner_text()
    assert rather.startswith(f"{order[2]} (")
    page.choose("against", rather)
    assert_shows(page, painted(vit, x, relevance(vit, x, order[1], against=order[2])[0].numpy()))
    page.page.wait_for_selector(".vitlens .score svg")
    assert (
        "random orders" in page.text(".score .note")
        and "among the two" in page.root.locator(".score svg").text_content()
    )
    maps = relevance(vit, x, order[1], against=order[2])
    values = curves(vit, x, maps, order[1], against=order[2], step=5).insertion[0]
    line = page.page.locator(".vitlens .curve.insertion:not(.random)").get_attribute("points")
    heights = np.array([float(point.split(",")[1]) for point in line.split()])
    places = (heights - heights[0]) / (heights[-1] - heights[0])
    np.testing.assert_allclose(places, (values - values[0]) / (values[-1] - values[0]), atol=1e-3)


def test_bars_and_switches(page, model):
    vit = opened_model(model)
    x = preprocess(vit, PICTURE)
    first = page.text(".bars .share")
    page.choose("view", "Contributions of heads")
    page.act(lambda: page.page.locator(".vitlens .bars button").nth(0).click())
    if page.page.locator("[data-control=against] select").input_value() != "0":  # of another test
        page.choose("against", "–")
    page.act(lambda: page.page.locator(".vitlens .parts .goes").nth(3 * 2 + 1).click())
    assert page.text("figcaption").startswith("Head 1 of layer 2:")
    target = int(vit(x).argmax())
    written = stream.direct(vit, x, target)[0]

    def told(layer, head):
        box = page.page.locator("[data-panel=picture] .picture canvas").bounding_box()
        page.page.mouse.move(box["x"] + 0.99 * box["width"], box["y"] + 0.01 * box["height"])
        found = re.fullmatch(r"row 0, column 7: (.*) logits", page.text(".under"))
        assert float(found[1]) == pytest.approx(written[layer, head, 0, 7].item(), rel=0.052)  # two digits at least

    told(2, 1)
    assert page.page.locator(".vitlens .part.head.now").count() == 1
    page.page.locator(".vitlens .parts .plot").focus()
    page.act(lambda: page.page.keyboard.press("ArrowRight"))
    told(3, 1)
    page.choose("view", "Attention from the query")
    page.page.locator(".vitlens .heads summary").click()
    page.act(lambda: page.page.locator(".vitlens .switch").nth(2).click())  # head 0 of layer 2
    page.act(lambda: page.page.keyboard.press("ArrowDown") or page.page.keyboard.press("Space"))
    reference = torch.cat([preprocess(vit, each) for each in samples().values()])
    with intervene(vit, heads={(2, 0): "mean", (2, 1): "mean"}, reference=reference), torch.no_grad():
        shares = vit(x)[0].softmax(-1)
    name, share, before = (page.text(f".bars .{part}") for part in ("name", "share", "before"))
    assert (name, share) == (str(shares.argmax().item()), f"{100 * shares.max():.1f} %") and before.startswith("was ")
    assert page.page.locator(".vitlens .switch[aria-checked=false]").count() == 2
    assert "head 1 of layer 2; each gives its mean over 6 sample photographs" in page.text("figcaption")
    page.choose("way", "zero")
    with intervene(vit, heads={(2, 0): "zero", (2, 1): "zero"}), torch.no_grad():
        assert page.text(".bars .share") == f"{100 * vit(x)[0].softmax(-1).max():.1f} %"
    page.act(lambda: page.page.get_by_role("button", name="All on").click())
    assert page.text(".bars .share") == first and page.page.locator(".vitlens .bars .before").count() == 0


def test_every_control_has_a_name(page):
    named = "each => Boolean(each.labels?.length || each.ariaLabel || each.textContent)"
    for kinds, holds in (("input, select, button", named), (".picture, .plot", "each => each.tabIndex === 0")):
        found = page.root.evaluate(f"node => [...node.querySelectorAll('{kinds}')].map({holds})")
        assert found and all(found), kinds


def test_uploads_and_downloads(page, model, tmp_path):
    """A file of several parts, and files that are no image."""
    pixels = np.random.default_rng(0).integers(0, 255, (700, 900, 3), np.uint8)
    exif = Image.Exif()
    exif[274] = 6  # lies on its side, as telephones write them
    Image.fromarray(pixels).save(large := tmp_path / "phone.png", exif=exif, icc_profile=WIDE)
    assert large.stat().st_size > 3 * 2**19
    loaded = load_image(large)
    page.act(page.upload(large))
    assert_shows(page, expected(model, loaded, 3, "mean", None))
    assert "“Wide” to sRGB; was turned upright" in page.text(".about")
    with page.page.expect_download(lambda download: download.suggested_filename.endswith("npz")) as saved:
        page.root.get_by_role("button", name="Save").click()
    saved.value.save_as(kept := tmp_path / "kept.npz")
    vit = opened_model(model)
    assert np.array_equal(np.load(kept)["pixels"], restore(vit, preprocess(vit, loaded))[0]), "to the bit"
    before, words = page.pixels(), page.text("figcaption")
    for name, data, problem in (("text.png", b"a text", "no format"), ("huge.jpg", bytes(65 * 2**20), "(65.0 MB)")):
        (file := tmp_path / name).write_bytes(data)
        page.upload(file)()
        page.page.wait_for_function("name => document.querySelector('.alert').textContent.includes(name)", arg=name)
        page.settle()
        assert problem in page.text(".alert")
        assert np.array_equal(page.pixels(), before) and page.text("figcaption") == words


def test_heads(front, browser, model):
    heads = Page(front, browser, "heads")
    with contextlib.closing(heads.page):
        heads.click(1, 2, rows=3, cols=4, panel="heads")
        assert_shows(heads, expected(model, PICTURE, 2, 1, None))
        heads.click(7, 0)
        assert_shows(heads, expected(model, PICTURE, 2, 1, (7, 0)))


def test_compare_positions_and_training(front, browser, model):
    page = Page(front, browser, "compare")
    with contextlib.closing(page.page):
        page.click(2, 5, panel="right")
        assert page.page.locator("[data-panel=left] .frame").count() == 1
        assert "row 2, column 5" in page.text("[data-panel=left] figcaption")
    page = Page(front, browser, "positions")
    with contextlib.closing(page.page):
        page.click(7, 1, panel="all")
        assert page.text("[data-panel=one] h3") == "Position in row 7, column 1"
    page = Page(front, browser, "training", ".widget-image, .jupyter-widgets img")
    with contextlib.closing(page.page):
        image = page.page.locator("img.widget-image, .jupyter-widgets img").first
        before = image.get_attribute("src")
        page.page.locator(".noUi-base").first.click()  # arrow keys do not reach core sliders in Notebook 7
        page.page.wait_for_function("([node, src]) => node.src !== src", arg=[image.element_handle(), before])


def test_an_alert_names_an_ended_kernel(front, browser):
    page = Page(front, browser, "explorer")
    with contextlib.closing(page.page):
        for kernel in front.kernels():
            kernel.kill()
        page.page.wait_for_function("() => document.querySelector('.alert').textContent.includes('Run the cell again')")
        assert page.page.locator(".vitlens .body").evaluate("node => node.inert")
