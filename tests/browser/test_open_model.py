"""Models that a person drops on a page, in Chromium, against Python's explorer of the same folder."""

import json
import re
import shutil
from base64 import b64encode

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from support import CHECKPOINTS

import vitlens
from browser.fronts import MARKS
from browser.test_live import near
from browser.test_page import FRAME, NAME, control, floats, plain
from vitlens.models import preprocess
from vitlens.recorder.record import capture
from vitlens_explorer import in_page, live
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.photographs import Photograph
from vitlens_explorer.photos import FOLDER as PHOTOS
from vitlens_explorer.views import supported_views
from vitlens_explorer.words import say

pytestmark = MARKS
LARGEST_BLANK = 0.8e6
"""Largest number of bytes of a page without a model."""
SIZES = dict(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=3,
    image_size=64,
    patch_size=16,
    hidden_act="gelu",
)
LABELS = dict(enumerate(["ant, emmet", "bee", "cat, emmet", "dog"]))
MODELS = {
    "ViTForImageClassification": transformers.ViTConfig(
        **SIZES, intermediate_size=96, id2label=LABELS
    ),
    "Dinov2WithRegistersModel": transformers.Dinov2WithRegistersConfig(**SIZES),
    "Dinov2ForImageClassification": transformers.Dinov2Config(**SIZES, id2label=LABELS),
    "ViTModel": transformers.ViTConfig(**SIZES, intermediate_size=96),
    "CLIPVisionModelWithProjection": transformers.CLIPVisionConfig(
        **SIZES, intermediate_size=96, projection_dim=32
    ),
}
PROCESSOR = {"size": {"shortest_edge": 80}, "crop_size": {"height": 64, "width": 64}}
FIRST, OTHER = "arch", "koala"
"""First photo of a blank page, and another one."""
READY = ".vitlens[data-answers]"
CANCEL = """() => {
    const { source } = document.querySelector("#page");
    source.on("msg:custom", ({ progress }) => {
        if (progress?.share && !window.canceled) source.send({ cancel: true, number: 10 ** 15 });
        if (progress === null) window.canceled = true;
    });
}"""
"""Cancels the next opening at its first report."""


OPEN = """(files) => {
    const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const opened = files.map(([name, data]) => new File([bytes(data)], name));
    document.querySelector("#page").source.send({ open: "mine" }, undefined, opened);
}"""
"""Opens files with their content in base64."""


def write_model(title: str, folder):
    """Write a model of transformers with random weights, whose attention differs from patch to patch."""
    generator = torch.Generator().manual_seed(0)
    model = getattr(transformers, title)(MODELS[title]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    kind = {"image_processor_type": "BitImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(kind | PROCESSOR))
    return folder


class Opened:
    """A page from disk, with the lists of its requests and errors."""

    def __init__(self, browser, path, selector: str):
        self.page = browser.new_page(viewport={"width": 1300, "height": 1000})
        self.requests, self.errors = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(selector)

    def drop(self, *paths) -> None:
        """Drop files or a folder as a person does."""
        session = self.page.context.new_cdp_session(self.page)
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for step in ("dragEnter", "dragOver", "drop"):
            event = {"type": step, "x": 300, "y": 200, "data": data}
            session.send("Input.dispatchDragEvent", event)
        session.detach()

    def frame(self, **values) -> dict:
        """The frame after some values of controls."""
        messages = [{"set": values, "number": 10**15}] if values else []
        return self.page.evaluate(FRAME, messages)

    def drawn(self) -> dict:
        """The frame of this moment, without arrays."""
        return self.page.evaluate(
            "JSON.parse(JSON.stringify(document.querySelector('#page').source.get('frame')))"
        )

    def wait_for_model(self, name: str) -> dict:
        self.page.wait_for_selector(READY)
        self.page.locator(".heading", has_text=name).wait_for()
        return self.frame()  # after the forward, as the page names the model before it

    def wait_for_alert(self, words: str) -> None:
        self.page.locator(".alert", has_text=words).first.wait_for()

    def close(self) -> None:
        """Assert that nothing was requested and nothing failed."""
        assert self.errors == []
        others = [url for url in self.requests if not url.startswith(("file:", "blob:"))]
        assert others == []
        self.page.close()


@pytest.fixture(scope="module")
def small_page(tmp_path_factory):
    """A live page with a model of 4 layers, 3 heads, 16 × 16 patches and 10 classes, on two photos."""
    torch.manual_seed(0)
    arguments = {"embed_dim": 96, "depth": 4, "num_heads": 3, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", img_size=256, **arguments)
    photos = {name: PHOTOS / f"{name}.jpg" for name in ("arch", "dog")}
    return live.save_live_page(model, photos, tmp_path_factory.mktemp("small") / "page.html")


@pytest.fixture(scope="module")
def blank(tmp_path_factory):
    """A page without a model."""
    return live.save_blank_page(tmp_path_factory.mktemp("blank") / "blank.html")


def python_page(folder, photo: str = FIRST) -> Explorer:
    """Python's explorer of a model and a sample photo, with another one beside it."""
    page = Explorer(vitlens.load_model(folder), PHOTOS / f"{photo}.jpg")
    photographs = {name: Photograph.read(PHOTOS / f"{name}.jpg") for name in (photo, OTHER)}
    page.state |= {"photographs": photographs | page.photographs, "photograph": photo}
    return page


def assert_bars(frame: dict, page: Explorer) -> None:
    """Assert that names and scores of the bars equal those of Python."""
    forward = page.forward
    expected = forward.likeliest[:5]
    assert [bar["number"] for bar in frame["bars"]] == expected
    for bar, number in zip(frame["bars"], expected, strict=True):
        assert bar["name"] == forward.label(number) and bar["full"] == forward.full(number)
        assert bar["share"] == pytest.approx(forward.share(number), abs=1e-4)


def assert_views(opened: Opened, page: Explorer) -> None:
    """Assert that the views of the page are those of Python that its scripts draw, with equal maps and captions."""
    frame = opened.frame()
    views = [value for _, value in control(frame, "view")["options"]]
    scripted = {*in_page.SCRIPTED_VIEWS, *live.LIVE_METHODS}
    supported = supported_views(page.forward)
    expected = {*supported} & scripted
    if getattr(page.model, "pooler", None):  # behind whose tanh no parts add up
        refused = {"view": "balanced_gradients", "target": ["picture", OTHER]}
        assert "apart" in ask_python(page, refused)["message"]
        expected -= {"balanced_gradients"}
    assert {*views} == expected
    layers = len(page.forward.attn)
    states = [
        {"view": view, "layer": number % layers, "row": number % 4, "column": 1}
        for number, view in enumerate(views)
    ]
    explaining = [view for view in views if supported[view].attributes]
    states += [
        {"view": view, "target": ["picture", OTHER], "off": [[0, 1], [1, 0]][: number % 3]}
        for number, view in enumerate(explaining)
    ]
    opened.frame(way="zero")
    ask_python(page, {"way": "zero"})
    for values in states:
        view = values["view"]
        if supported[view].attributes and not page.forward.classes:
            values["target"] = ["picture", OTHER]
        frame = opened.frame(**values)
        expected = ask_python(page, values)
        assert frame["message"] == "", view
        assert expected["message"] == "" or "apart" in expected["message"]  # of the small map
        (got,), (wanted,) = frame["panels"], expected["panels"]
        exact = torch.from_numpy(np.frombuffer(wanted["values"], "<f4").copy())
        near(floats(got["values"]), exact, view)
        assert_words(got["words"], wanted["words"])
        assert_words(got["plain"], wanted["plain"])
        for name in ("title", "tokens", "unit", "rows", "cols", "cell", "selected"):
            assert got[name] == plain(wanted[name]), (view, name)
        for name in ("layer", "head", "query", "row", "column", "off"):
            ours, theirs = control(frame, name), control(plain(expected), name)
            assert ours == theirs, (view, name)


def result_of(job):
    """The result of a job, or its error, as the app gives it to the explorer."""
    try:
        return job.function(lambda *_: None)
    except vitlens.UnsupportedModelError as error:
        return error


def assert_words(got: str, wanted: str) -> None:
    """Assert that captions are equal, but for numbers at the border of a rounding to three digits."""
    number = re.compile(r"\d+(?:\.\d+)?(?:e[−-]\d+)?")
    assert number.sub("#", got) == number.sub("#", wanted)
    found, exact = (
        [float(each.replace("−", "-")) for each in number.findall(words)] for words in (got, wanted)
    )
    assert found == pytest.approx(exact, rel=6e-3)


def ask_python(page: Explorer, values: dict) -> dict:
    """Python's frame after some values of controls, with the maps that come in the background."""
    answer = page.answer([({"set": values, "number": 1}, [])], lambda *_: None)
    while answer.job and answer.job.key.kind != "random":
        done = result_of(answer.job)
        answer = page.answer([({"job": answer.job.key}, [done])], lambda *_: None)
    return page.frame


def test_blank_page_opens_a_dropped_folder(browser, blank):
    """The bundled DeiT-Tiny. A photo that is dropped then goes to the model."""
    assert blank.stat().st_size <= LARGEST_BLANK
    opened = Opened(browser, blank, ".blank")
    assert say("blank drop") in opened.page.locator("main").inner_text()
    opened.drop(PHOTOS / "dog.jpg")
    opened.wait_for_alert(say("blank photo"))
    opened.drop(CHECKPOINTS / "deit_tiny")
    frame = opened.wait_for_model("DeiT-Tiny, ImageNet-1k")
    assert_bars(frame, python_page(CHECKPOINTS / "deit_tiny"))
    names = [value for _, value in control(frame, "photograph")["options"]]
    assert names == sorted(file.stem for file in PHOTOS.glob("*.jpg")) and names[0] == FIRST
    opened.drop(PHOTOS / "dog.jpg")
    opened.page.locator(".heading", has_text="dog.jpg").wait_for()
    assert_bars(opened.frame(), python_page(CHECKPOINTS / "deit_tiny", "dog"))
    opened.close()


@pytest.mark.parametrize("title", MODELS)
def test_opened_model_equals_explorer(browser, blank, tmp_path, title):
    """With a class token, with registers and without classes, a head that reads two vectors, a pooler, a projection."""
    folder = write_model(title, tmp_path / "model of mine")
    opened = Opened(browser, blank, ".blank")
    opened.drop(folder)
    frame = opened.wait_for_model("model of mine")
    page = python_page(folder)
    assert page.note and frame["about"].startswith(page.note)
    assert ("mask_token" in frame["about"]) == title.startswith("Dinov2")
    if page.forward.classes:
        assert_bars(frame, page)
    else:
        assert frame["bars"] == [] and not opened.page.locator(".bars").first.is_visible()
    assert_views(opened, page)
    opened.page.evaluate("location.hash = '#view=relevance&layer=99'")
    opened.page.get_by_role("alert").filter(has_text="has no value").wait_for()
    opened.page.get_by_role("button", name="Tour").click()
    opened.page.locator("dialog.tour[open]").wait_for()
    opened.close()


@pytest.mark.parametrize(
    "title",
    [
        "ViTForImageClassification",
        *(pytest.param(title, marks=pytest.mark.slow) for title in [*MODELS][1:]),
    ],
)
def test_live_page_of_a_transformers_model_equals_explorer(browser, tmp_path, title):
    """A page that Python wrote, on a photo that it contains as the model gets it."""
    folder = write_model(title, tmp_path / "model of mine")
    page = python_page(folder)
    photos = {name: PHOTOS / f"{name}.jpg" for name in (FIRST, OTHER)}
    path = live.save_live_page(page.model, photos, tmp_path / "page.html")
    opened = Opened(browser, path, READY)
    frame = opened.wait_for_model("model of mine")
    assert control(frame, "photograph")["value"] == FIRST
    if page.forward.classes:
        assert_bars(frame, page)
    assert_views(opened, page)
    opened.close()


@pytest.mark.parametrize("kind", ["blank", "small_page"])
def test_footer_and_title_name_the_opened_model(browser, tmp_path, request, kind):
    """The sentences about the file itself stay, and a refused file changes nothing."""
    folder = write_model("Dinov2WithRegistersModel", tmp_path / "<i>mine")
    opened = Opened(browser, request.getfixturevalue(kind), "#page .headline")
    footer = opened.page.locator("footer")
    before = footer.inner_text()
    assert "which was opened" not in before
    opened.drop(folder)
    opened.wait_for_model("<i>mine")
    words = say("runs opened", name="<i>mine")
    assert footer.inner_text() == words + before
    assert opened.page.title() == "arch · <i>mine · vitlens"
    (tmp_path / "weights.bin").write_bytes(b"PK\x03\x04")
    opened.drop(tmp_path / "weights.bin")
    opened.wait_for_alert("is a pickle")
    assert footer.inner_text() == words + before
    opened.drop(write_model("ViTForImageClassification", tmp_path / "second"))
    opened.wait_for_model("second")
    assert footer.inner_text() == say("runs opened", name="second") + before
    assert opened.page.title() == "arch · second · vitlens"
    opened.close()


def state_of(opened: Opened) -> dict:
    """Values of the controls by name."""
    return {each["name"]: each["value"] for each in opened.drawn()["controls"]}


def wait_for_values(opened: Opened, **values) -> None:
    """Wait until the controls have these values."""
    for name, value in values.items():
        opened.page.wait_for_function(
            """([name, value]) => {
                const { controls } = document.querySelector("#page").source.get("frame");
                const control = controls.find((each) => each.name === name);
                return JSON.stringify(control.value) === JSON.stringify(value);
            }""",
            arg=[name, value],
        )


def change(opened: Opened, **values) -> None:
    """Set controls, and wait until the address is an entry of the history."""
    before = opened.page.evaluate("history.length")
    opened.frame(**values)
    opened.page.wait_for_function("before => history.length > before", arg=before)


@pytest.mark.slow
def test_address_of_another_model_shows_the_nearest_state(browser, small_page, tmp_path):
    """Back, Forward, a link and a reload, with a layer, head, patch, view, class, photo and heads that are absent."""
    opened = Opened(browser, small_page, READY)
    opened.page.wait_for_function("() => location.hash.includes('layer')")
    change(opened, layer=3, head=2, row=15, column=14, off=[[3, 2], [1, 0]])
    change(opened, view="lens", target=9, photograph="dog")
    opened.drop(write_model("Dinov2WithRegistersModel", tmp_path / "mine"))
    opened.wait_for_model("mine")
    opened.page.wait_for_function("() => !location.hash.includes('lens')")
    change(opened, view="norms", layer=0)
    opened.page.go_back()
    wait_for_values(opened, view="attention", layer=2, photograph="dog")
    opened.page.go_back()  # to a class of the model before
    opened.wait_for_alert("View has no value “lens”.")
    wait_for_values(opened, view="attention", photograph="dog", off=[[1, 0]])
    assert say("nearest") in opened.page.locator(".alert").inner_text()
    opened.page.go_back()
    wait_for_values(opened, layer=2, head=2, row=3, column=3, query="patch", off=[[1, 0]])
    wait_for_values(opened, photograph="arch")
    alert = opened.page.locator(".alert").inner_text()
    assert "Layer has no value 3." in alert and "There is no head “3.2”." in alert
    opened.page.go_forward()
    wait_for_values(opened, view="attention", photograph="dog", off=[[1, 0]])
    opened.page.evaluate("location.hash = '#view=attention&layer=1&patch=2,1&head=1'")
    wait_for_values(opened, layer=1, head=1, row=2, column=1, off=[])
    assert opened.page.locator(".alert").inner_text() == ""
    opened.page.evaluate(
        "location.hash = '#view=zzz&layer=99&head=x&query=4&off=0.1,7.7&sample=gone'"
    )
    wait_for_values(opened, layer=2, query=4, off=[[0, 1]], view="attention", photograph="arch")
    opened.page.wait_for_function("() => location.hash.includes('layer=2')")
    opened.page.reload()  # the model of the file has no registers
    opened.page.wait_for_selector(READY)
    wait_for_values(opened, layer=2, query="readout", off=[[0, 1]], photograph="arch")
    opened.wait_for_alert("Query has no value 4.")
    opened.close()


def test_link_names_a_class_of_a_photo_before_its_forward(browser, small_page):
    opened = Opened(browser, small_page, READY)
    opened.page.evaluate("location.hash = '#view=relevance&target=9&sample=dog'")
    wait_for_values(opened, view="relevance", target=9, photograph="dog")
    assert opened.page.locator(".alert").inner_text() == ""
    opened.close()


@pytest.mark.parametrize("word", ["length", "map", "1.5"])
def test_link_with_a_word_for_a_class_is_refused(browser, small_page, word):
    """Lists of JavaScript have properties of such names."""
    opened = Opened(browser, small_page, READY)
    opened.page.evaluate("word => { location.hash = `#view=relevance&target=${word}`; }", word)
    opened.wait_for_alert(f"has no value “{word}”.")
    wait_for_values(opened, view="relevance", target="predicted")
    opened.close()


def test_list_of_names_is_that_of_the_opened_model(browser, blank, tmp_path):
    """A click on a name explains that class."""
    opened = Opened(browser, blank, ".blank")
    opened.drop(CHECKPOINTS / "deit_tiny")
    opened.wait_for_model("DeiT-Tiny, ImageNet-1k")
    names = opened.page.locator(".knows li button")
    opened.page.locator(".knows summary").click()
    names.first.wait_for()
    opened.drop(write_model("ViTForImageClassification", tmp_path / "mine"))
    opened.wait_for_model("mine")
    assert names.all_inner_texts() == list(LABELS.values())
    names.nth(3).click()
    wait_for_values(opened, view="relevance", target=3)
    opened.close()


def test_smaller_model_is_opened_with_the_pointer_over_the_mosaic(browser, blank, tmp_path):
    """Over a head that it lacks."""
    opened = Opened(browser, blank, ".blank")
    opened.drop(CHECKPOINTS / "deit_tiny")
    opened.wait_for_model("DeiT-Tiny, ImageNet-1k")
    stage = opened.page.locator(".stage")
    box = stage.bounding_box()
    place = {"clientX": box["x"] + box["width"] - 3, "clientY": box["y"] + box["height"] - 3}
    stage.dispatch_event("pointermove", place)
    opened.page.locator(".mosaic .note", has_text="Layer 11").wait_for()
    folder = write_model("ViTForImageClassification", tmp_path / "mine")
    files = [[file.name, b64encode(file.read_bytes()).decode()] for file in folder.iterdir()]
    opened.page.evaluate(OPEN, files)
    opened.wait_for_model("mine")
    assert "Layer 11" not in opened.page.locator(".mosaic .note").inner_text()
    opened.close()


def test_refused_files_leave_the_page_as_it_was(browser, blank, tmp_path):
    """A pickle, a web page named safetensors and a lone config.json, with and without a model before them."""
    folder = write_model("ViTForImageClassification", tmp_path / "vit")
    bad = tmp_path / "bad"
    bad.mkdir()
    shutil.copy(folder / "config.json", bad)
    (bad / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    (bad / "model.safetensors").write_text("<!DOCTYPE html><script>alert(1)</script>")
    refused = {
        "is a pickle": [bad / "pytorch_model.bin", bad / "config.json"],
        "is a web page": [bad / "model.safetensors", bad / "config.json"],
        "got no weights": [bad / "config.json"],
        "Expected config.json": [folder / "model.safetensors"],
    }
    opened = Opened(browser, blank, ".blank")
    for words, files in refused.items():
        opened.drop(*files)
        opened.wait_for_alert(words)
    opened.drop(folder)
    opened.wait_for_model("vit")
    before = opened.frame(layer=2)
    for words, files in refused.items():
        opened.drop(*files)
        opened.wait_for_alert(words)
    after = opened.frame(layer=2)
    assert after["message"] == "" and after["bars"] == before["bars"]
    assert after["model"] == before["model"] and after["panels"] == before["panels"]
    opened.drop(PHOTOS / "koala.jpg")
    opened.page.locator(".heading", has_text="koala.jpg").wait_for()
    assert_bars(opened.frame(), python_page(folder, "koala"))
    opened.close()


def test_live_page_opens_another_model(vit, browser, tmp_path):
    """By its button, for the same photo. A canceled opening leaves the model as it was."""
    old, path = vit(num_classes=5), tmp_path / "page.html"
    live.save_live_page(old, {NAME: vitlens.samples()[NAME]}, path)
    folder = CHECKPOINTS / "vit_tiny_patch8_64"
    files = [folder / name for name in ("config.json", "model.safetensors")]
    opened = Opened(browser, path, READY)
    before = opened.frame(row=3, column=3)
    opened.page.evaluate(CANCEL)
    opened.drop(*files)
    opened.page.wait_for_function("() => window.canceled")
    after = opened.frame()
    assert after["model"] == before["model"] and after["bars"] == before["bars"]
    opened.page.evaluate("() => { window.canceled = true; }")
    with opened.page.expect_file_chooser() as chooser:
        opened.page.get_by_role("button", name="Open a model").click()
    chooser.value.set_files(files)
    model = vitlens.load_model(folder)
    frame = opened.wait_for_model("vit_tiny_patch16_224, patch 8, 64 px")
    seen = Image.fromarray(np.asarray(Explorer(old, vitlens.samples()[NAME]).forward.pixels))
    assert_bars(frame, Explorer(model, seen))
    assert control(frame, "layer")["high"] == len(model.blocks) - 1
    assert control(frame, "photograph")["value"] == NAME
    opened.close()


def test_heads_of_an_opened_model_are_replaced_by_their_mean(browser, blank, tmp_path):
    """Over the photos of the page, also after an upload with the name of one of them, and by zero."""
    folder = write_model("ViTForImageClassification", tmp_path / "vit")
    model, off = vitlens.load_model(folder), [(1, 0), (2, 2)]
    files = sorted(PHOTOS.glob("*.jpg"))
    names = [file.stem for file in files]
    batch = torch.cat([preprocess(model, file) for file in files])
    with torch.no_grad(), capture(model, values=True) as attn:
        model(batch)
    means = {(layer, head): attn[layer].output.mean(0)[head] for layer, head in off}
    opened = Opened(browser, blank, ".blank")
    opened.drop(folder)
    opened.wait_for_model("vit")
    upload = {"name": FIRST, "mimeType": "image/jpeg", "buffer": (PHOTOS / "dog.jpg").read_bytes()}
    before = opened.page.locator(READY).get_attribute("data-answers")
    opened.page.set_input_files("input[type=file]", upload)
    opened.page.wait_for_function(
        "before => document.querySelector('.vitlens').dataset.answers !== before", arg=before
    )
    for way, outputs in (("mean", means), ("zero", dict.fromkeys(off, "zero"))):
        frame = opened.frame(photograph="dog", off=[list(place) for place in off], way=way)
        with vitlens.intervene(model, heads=outputs), torch.no_grad():
            shares = model(batch[names.index("dog")][None]).logits[0].softmax(-1)
        for bar in frame["bars"]:
            assert bar["share"] == pytest.approx(shares[bar["number"]].item(), abs=1e-5), way
    words = opened.frame(way="mean")["panels"][0]["words"]
    assert say("by mean here", count=5).replace("their", "its") in words
    opened.close()
