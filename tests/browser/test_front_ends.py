"""The explorer in a real browser, in JupyterLab, Notebook 7 and Voila: what a person does, and the pixels they see.

The pixels are compared with a picture made here, from timm's unfused attention, Pillow and Matplotlib's colors. What
was broken on purpose to see these tests fail is kept in MUTATIONS.md.
"""

import base64
import contextlib
import functools
import io
import json
import re
import shutil
import time

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from test_capture import unfused_maps
from test_images import WIDE

from browser.fronts import MARKS, Front, assert_gone_and_back, chromium, move
from vitlens import intervene, load_image, load_model, stream
from vitlens.attribution import like, relevance
from vitlens.faithfulness import curves
from vitlens.images import samples
from vitlens.models import preprocess, restore

FRONTS = ("lab", "notebook", "voila")
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

    def __init__(self, front, browser, name="explorer"):
        self.page = browser.new_page(viewport={"width": 1400, "height": 1100})
        front.open(self.page, f"{name}.ipynb")
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


def test_keys_faster_than_the_answers_are_all_counted(page):
    def held(key, *pauses):
        for pause in pauses:
            page.page.keyboard.press(key)
            time.sleep(pause)

    page.slide("layer", 3)
    page.click(3, 0)
    page.page.locator("[data-panel=picture] .picture").focus()
    page.act(lambda: held("ArrowRight", 0, 0.03, 0.06, 0.09, 0.12, 0.03))
    assert "row 3, column 6" in page.text("figcaption")
    page.page.locator(".vitlens .plot").focus()
    page.act(lambda: held("ArrowLeft", 0.03, 0.03))
    assert "layer 1" in page.text("figcaption")


def test_views_dots_and_hover(page):
    for label, says in {
        "Attention received": "mean over all queries",
        "Rollout from the query": "Rollout from the read-out (class token) through all layers",
        "Similarity of tokens to the query": "Cosine similarity",
        "Principal components of tokens": "red, green and blue",
        "Length of tokens": "the median is",
    }.items():
        page.choose("view", label)
        assert says in page.text("figcaption")
    assert page.page.get_by_label("Query", exact=True).is_disabled()
    page.choose("view", "Attention from the query")
    page.act(lambda: page.page.locator(".vitlens .dot").nth(4).click(force=True))
    assert "layer 1, head 1" in page.text("figcaption")
    page.page.locator(".vitlens .plot").focus()
    page.act(lambda: page.page.keyboard.press("ArrowRight"))
    assert "layer 2, head 1" in page.text("figcaption")
    box = page.page.locator("[data-panel=picture] .picture canvas").bounding_box()
    page.page.mouse.move(box["x"] + 0.99 * box["width"], box["y"] + 0.01 * box["height"])
    assert page.text(".under").startswith("row 0, column 7: ")


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
    page.page.locator(".vitlens .bars button").nth(0).focus()
    page.act(lambda: page.page.keyboard.press("Enter"))
    assert f"for “{order[0]}”" in page.text("figcaption")
    typed = page.page.get_by_label("Any class", exact=True)
    for asked, answer in (("eleven", "no class called"), ("10", "classes 0 to 9"), (str(order[-1]), "")):
        typed.fill(asked)
        page.act(lambda: page.page.keyboard.press("Enter"))
        assert answer in page.text(".alert") and typed.input_value() == asked
        if asked == "10":  # what was not understood goes when something else is asked
            page.act(lambda: page.page.locator(".vitlens .bars button").nth(0).click())
            assert typed.input_value() == ""
    assert_shows(page, painted(vit, x, relevance(vit, x, order[-1], against=order[2])[0].numpy()))


def test_why_alike(page, model):
    vit = opened_model(model)
    x, coffee, rocket = (preprocess(vit, samples()[name]) for name in ("astronaut", "coffee", "rocket"))
    page.choose("view", "Relevance (Chefer et al. 2021)")
    page.choose("target", "like coffee")
    assert_shows(page, painted(vit, x, relevance(vit, x, like(coffee))[0].numpy()))
    page.choose("against", "like rocket")
    maps = relevance(vit, x, like(coffee), against=like(rocket))
    assert_shows(page, painted(vit, x, maps[0].numpy()))
    with torch.no_grad():
        seen = [vit.forward_head(vit.forward_features(each), pre_logits=True) for each in (x, coffee, rocket)]
    to = [f"{torch.cosine_similarity(seen[0], each).item():.3g}" for each in seen[1:]]
    assert f"likeness to “coffee” (cosine {to[0]}) rather than to “rocket” (cosine {to[1]})" in page.text("figcaption")
    assert page.text("[data-panel=picture] h3").startswith("Why alike")
    page.page.wait_for_selector(".vitlens .score svg")
    values = curves(vit, x, maps, like(coffee), against=like(rocket), step=5).insertion[0]
    line = page.page.locator(".vitlens .curve.insertion:not(.random)").get_attribute("points")
    heights = np.array([float(point.split(",")[1]) for point in line.split()])
    places = (heights - heights[0]) / (heights[-1] - heights[0])
    np.testing.assert_allclose(places, (values - values[0]) / (values[-1] - values[0]), atol=1e-3)
    assert "difference of the two cosines" in page.root.locator(".score svg").text_content()
    page.choose("photograph", "coffee")  # the two change places
    assert page.text("[data-control=target] option:checked") == "like astronaut"
    page.choose("target", "the predicted class")


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
    page.act(lambda: page.page.locator(".vitlens .heads summary").click())
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


def test_classes_by_layer(page, model):
    vit = opened_model(model)
    page.choose("view", "Classes by layer (raw lens)")
    page.click(2, 5)
    for layer in (3, 1):
        _, each = stream.lens(vit, preprocess(vit, PICTURE), layer)
        share, number = each[0, 1 + 2 * 8 + 5].softmax(-1).max(0)
        line = page.page.locator(".vitlens .layers button").nth(layer)
        assert line.locator(".name").inner_text() == str(number.item())
        assert line.locator(".share").inner_text() == f"{100 * share:.1f} %"
    page.act(lambda: page.page.locator(".vitlens .layers button").nth(1).click())
    assert "Raw lens after layer 1" in page.text("figcaption")


def phone(path, width, height, **options):
    """A photograph that lies on its side, as telephones write them."""
    noise = np.random.default_rng(0).integers(0, 255, (height // 50, width // 50, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[274] = 6
    resized = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
    resized.save(path, "JPEG", quality=95, exif=exif, **options)
    return path


@pytest.fixture(scope="module")
def phones(tmp_path_factory):
    """A small photograph and a large one with a color profile, which is sent in parts; and the large one as loaded."""
    folder = tmp_path_factory.mktemp("phones")
    small, large = phone(folder / "small.jpg", 1600, 1200), phone(folder / "phone.jpg", 4400, 3300, icc_profile=WIDE)
    assert small.stat().st_size < 2**20 < 2 * 2**20 < large.stat().st_size
    loaded = load_image(large)
    assert not np.array_equal(loaded, ImageOps.exif_transpose(Image.open(large)))
    return small, large, loaded


def test_uploads(page, model, tmp_path, phones):
    other = samples()["coffee"].resize((300, 200))
    for kind in ("png", "jpeg", "webp"):
        other.save(path := tmp_path / f"cup.{kind}")
        page.act(page.upload(path))
        assert_shows(page, expected(model, path, 3, "mean", None))
        assert page.text(".alert") == ""
    small, large, loaded = phones
    page.act(page.upload(small))
    assert_shows(page, expected(model, ImageOps.exif_transpose(Image.open(small)), 3, "mean", None))
    page.page.evaluate(
        """() => { const busy = document.querySelector('.vitlens .busy'); window.said = [];
           new MutationObserver(() => said.push(busy.textContent)).observe(busy, { childList: true }); }"""
    )
    page.act(page.upload(large))
    size = f"{large.stat().st_size / 2**20:.1f} MB …"
    assert any(re.fullmatch(rf"receiving [\d.]+ of {size}", said) for said in page.page.evaluate("() => said"))
    assert_shows(page, expected(model, loaded, 3, "mean", None))
    about = page.text(".about")
    assert "was converted from the color profile “Wide” to sRGB; was turned upright" in about and "phone.jpg" in about
    with page.page.expect_download(lambda download: download.suggested_filename.endswith("npz")) as saved:
        page.root.get_by_role("button", name="Save").click()
    saved.value.save_as(kept := tmp_path / "kept.npz")
    vit = opened_model(model)
    assert np.array_equal(np.load(kept)["pixels"], restore(vit, preprocess(vit, loaded))[0]), "to the bit"


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """Files that are no image, with what is said of each."""
    folder, rng = tmp_path_factory.mktemp("bad"), np.random.default_rng(0)

    def png(image):
        image.save(file := io.BytesIO(), "PNG")
        return file.getvalue()

    files = {
        "text.png": (b"this is a text", "no format"),
        "cut.png": (png(samples()["china"])[:50000], "incomplete or damaged"),
        "cut-large.png": (png(Image.fromarray(rng.integers(0, 255, (900, 900, 3), dtype=np.uint8)))[:2_000_000],
                          "incomplete or damaged"),
        "empty.jpg": (b"", "no format"),
        "bomb.png": (png(Image.new("1", (30000, 30000))), "exceeds limit"),
        "drawing.svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "no format"),
        "huge.jpg": (bytes(100 * 2**20), "(100.0 MB)"),
    }  # fmt: skip
    for name, (data, _) in files.items():
        (folder / name).write_bytes(data)
    return {folder / name: says for name, (_, says) in files.items()}


def test_bad_uploads(page, bad, tmp_path):
    before, words = page.pixels(), page.text("figcaption")
    for path, says in bad.items():
        page.upload(path)()
        page.page.wait_for_function(
            "name => document.querySelector('.vitlens .alert').textContent.includes(name)", arg=path.name
        )
        page.settle()
        assert says in page.text(".alert")
        assert np.array_equal(page.pixels(), before) and page.text("figcaption") == words
    frames = [samples()["coffee"].resize((90, 60)), samples()["china"].resize((90, 60))]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    page.act(page.upload(tmp_path / "moving.gif"))
    assert "holds 2 pictures; the first is shown" in page.text(".alert")
    page.click(1, 1)
    assert page.text(".alert") == "" and "row 1, column 1" in page.text("figcaption")


def test_drop_and_save(page, model, tmp_path):
    samples()["rocket"].resize((200, 160)).save(path := tmp_path / "rocket.png")
    transfer = page.page.evaluate_handle(
        """bytes => { const moved = new DataTransfer();
           moved.items.add(new File([new Uint8Array(bytes)], 'rocket.png', { type: 'image/png' })); return moved; }""",
        list(path.read_bytes()),
    )
    page.act(lambda: page.page.dispatch_event(".vitlens", "drop", {"dataTransfer": transfer}))
    assert_shows(page, expected(model, path, 3, "mean", None))
    saved = []
    page.page.on("download", lambda download: saved.append(download))
    page.act(lambda: page.root.get_by_role("button", name="Save").click())
    while len(saved) < 2:
        page.page.wait_for_timeout(100)
    names = sorted(download.suggested_filename for download in saved)
    assert names == ["vitlens-attention-layer3.npz", "vitlens-attention-layer3.png"]
    for download in saved:
        download.save_as(tmp_path / download.suggested_filename)
    kept = np.load(tmp_path / names[0])
    maps = unfused_maps(opened_model(model), preprocess(opened_model(model), path))
    np.testing.assert_allclose(kept["values"], maps[3][0].mean(0)[0, 1:].reshape(8, 8), atol=1e-6)
    assert json.loads(str(kept["about"]))["query"] == "readout"
    assert min(Image.open(tmp_path / names[1]).size) > 500


def test_narrow_and_dark(page, front):
    """Nothing is cut off at 400 pixels; text keeps a contrast of 4.5 on a dark page."""
    command = "name => void window.jupyterapp.commands.execute(...name)"
    theme = lambda name: page.page.evaluate(command, ["apputils:change-theme", {"theme": name}])  # noqa: E731
    page.page.set_viewport_size({"width": 400, "height": 900})
    if front.kind == "lab":
        page.page.evaluate(command, ["application:toggle-left-area"])
    page.page.wait_for_timeout(300)
    for name in (".picture", ".controls", ".bars", ".tools"):
        box, outer = page.root.locator(name).first.bounding_box(), page.root.bounding_box()
        assert box["x"] >= outer["x"] - 1 and box["x"] + box["width"] <= outer["x"] + outer["width"] + 1
    over = f"e => e.getBoundingClientRect().right > {outer['x'] + outer['width'] + 1}"
    assert page.root.evaluate(f"node => [...node.querySelectorAll('*')].filter({over}).map(e => e.outerHTML)") == []
    page.page.set_viewport_size({"width": 1400, "height": 1100})
    if front.kind == "lab":
        theme("JupyterLab Dark")
        page.page.wait_for_selector("body[data-jp-theme-light=false]", state="attached")
        page.page.wait_for_timeout(500)
        light = luminance(page.root.evaluate("node => getComputedStyle(node).color"))
        behind = page.page.locator(".jp-Notebook").first
        dark = luminance(behind.evaluate("node => getComputedStyle(node).backgroundColor"))
        assert (light + 0.05) / (dark + 0.05) > 4.5
        theme("JupyterLab Light")
        page.page.wait_for_selector("body[data-jp-theme-light=true]", state="attached")


def luminance(css):
    """Of a CSS color (WCAG 2.1)."""
    levels = np.array([float(n) for n in css[css.index("(") + 1 : -1].split(",")[:3]]) / 255
    linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_every_control_has_a_name(page):
    named = "each => Boolean(each.labels?.length || each.ariaLabel || each.textContent)"
    for kinds, holds in (("input, select, button", named), (".picture, .plot", "each => each.tabIndex === 0")):
        found = page.root.evaluate(f"node => [...node.querySelectorAll('{kinds}')].map({holds})")
        assert found and all(found), kinds


def test_many_interactions(page, front):
    """No error output and an answer to the end. Of 200, memory grows by 5 % at most after the first 50.

    Freed blocks stay with the process for a while, so single readings go up and down by 5 %: medians are compared.
    """
    rng, memory = np.random.default_rng(0), []
    views = page.page.locator("[data-control=view] option").all_inner_texts()
    assert len(views) == 21
    views = views[:15]  # those of captum take seconds
    measured = front.kind == "voila"
    for _ in range(200 if measured else 40):
        kind = rng.integers(4)
        if kind == 0 and page.page.locator(".picture.picks").count():
            page.click(*rng.integers(8, size=2))
        elif kind == 1:
            page.slide("layer", int(rng.integers(4)))
        elif kind == 2:
            page.choose("view", str(rng.choice(views)))
        else:
            page.choose("photograph", str(rng.choice(["astronaut", "coffee", "rocket"])))
        if measured:
            memory.append(front.memory())
    assert page.text(".alert") == "" and page.text("figcaption")
    assert not measured or np.median(memory[150:]) <= 1.05 * np.median(memory[50:100])


@pytest.mark.parametrize("front", ["lab"], indirect=True)
def test_nothing_is_said_of_a_kernel_that_runs_a_cell_for_long(page, front):
    page.page.evaluate("""() => {
        window.alerts = [];
        const node = document.querySelector(".vitlens .alert");
        new MutationObserver(() => alerts.push(node.textContent)).observe(node, { childList: true });
        void window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({
            code: "import time; time.sleep(4)"
        });
    }""")
    page.page.wait_for_timeout(500)
    for _ in range(3):
        move(page.page, "layer", 1)
        page.page.wait_for_timeout(900)
    page.page.wait_for_function("() => document.querySelector('figcaption').textContent.includes('layer 1')")
    assert not any(page.page.evaluate("alerts"))


@pytest.mark.parametrize("front", ["lab", "notebook"], indirect=True)
def test_it_is_said_when_the_kernel_is_gone(page, front):
    """They start another kernel, which knows nothing of the model, until the cells are run again."""

    def again():
        page.page.get_by_role("button", name="Ok", exact=True).click()
        page.page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")

    (kernel,) = front.kernels()
    assert_gone_and_back(page.page, kernel, "Run the cell again", again)
    page.errors.clear()  # of the application, which lost its kernel


@pytest.mark.parametrize("front", ["lab"], indirect=True)
def test_heads(front, browser, model):
    heads = Page(front, browser, "heads")
    with contextlib.closing(heads.page):
        heads.click(1, 2, rows=3, cols=4, panel="heads")
        assert_shows(heads, expected(model, PICTURE, 2, 1, None))
        heads.click(7, 0)
        assert_shows(heads, expected(model, PICTURE, 2, 1, (7, 0)))


def test_a_browser_is_found_in_the_order_that_the_readme_says(monkeypatch, tmp_path):
    class Recorder:
        def __init__(self):
            self.chromium = self

        def launch(self, executable_path, args):
            return executable_path

    monkeypatch.setenv("CHROMIUM", "/somewhere/chromium")
    assert chromium(Recorder()) == "/somewhere/chromium"
    monkeypatch.delenv("CHROMIUM")
    assert chromium(Recorder()) == shutil.which("chromium")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert chromium(Recorder()) is None  # Playwright's own
