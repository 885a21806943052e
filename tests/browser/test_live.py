"""The model of a live page in Chromium, against the same model in PyTorch: pixels, forward, heads off and backward."""

import base64
import io
import json
import random
import zipfile
from functools import partial

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import transformers
from PIL import Image
from support import WIDE
from torch import nn

import vitlens
from browser.fronts import MARKS, press_share
from browser.test_page import (
    ASK,
    FRAME,
    NAME,
    Reference,
    assert_alike,
    assert_tour,
    control,
    floats,
    opened,
    plain,
    settings,
)
from vitlens import attention, attribution, stream
from vitlens.models import preprocess, weights_digest
from vitlens.recorder.record import capture
from vitlens.tokens import features
from vitlens_explorer import live
from vitlens_explorer.live.model_files import (
    TRANSFORMERS_ACTIVATIONS,
    TRANSFORMERS_CLASSES,
    check_runs,
    model_files,
)
from vitlens_explorer.photographs import Photograph
from vitlens_explorer.words import percent, say

pytestmark = MARKS
SIZE = 64
MODELS = {
    "ti": ("vit_tiny_patch16_224", {}),
    "ti-mean": ("vit_tiny_patch16_224", {"depth": 4, "global_pool": "avg"}),
    "s": ("vit_small_patch16_224", {"depth": 3}),
    "s-mean": ("vit_small_patch16_224", {"depth": 3, "global_pool": "avg", "class_token": False}),
    "others": (
        "vit_tiny_patch16_224",
        {
            "depth": 2,
            "reg_tokens": 2,
            "no_embed_class": True,
            "pre_norm": True,
            "init_values": 0.5,
            "global_pool": "avg",
            "fc_norm": False,
        },
    ),
}
METHODS = (
    "relevance",
    "gradient_rollout",
    "attention_gradient",
    "grad_cam",
    "legrad",
    "balanced_gradients",
)
HARNESS = """<script type="text/plain" id="worker">{script}</script><script>
const worker = new Worker(URL.createObjectURL(new Blob([document.getElementById("worker").textContent])));
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
const text = ({{ buffer, byteOffset, byteLength }}) => {{
  let letters = "";
  for (const byte of new Uint8Array(buffer, byteOffset, byteLength)) letters += String.fromCharCode(byte);
  return btoa(letters);
}};
const given_bytes = (probe) => ({{ ...probe, file: bytes(probe.file), levels: new Uint8Array(bytes(probe.levels)) }});
const plain = (value) => {{
  if (ArrayBuffer.isView(value)) return {{ type: value.constructor.name, data: text(value) }};
  if (Array.isArray(value)) return value.map(plain);
  if (!value || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, plain(item)]));
}};
window.ask = (task, given) => new Promise((done) => {{
  for (const name of ["wasm", "bytes"]) if (name in given) given[name] = bytes(given[name]);
  if ("probes" in given) given.probes = given.probes.map(given_bytes);
  if ("files" in given) given.files = given.files.map(([name, data]) => new File([bytes(data)], name));
  if ("input" in given) given.input = new Float32Array(bytes(given.input));
  if ("inputs" in given) given.inputs = given.inputs.map((input) => new Float32Array(bytes(input)));
  const {{ port1, port2 }} = new MessageChannel();
  port1.onmessage = ({{ data }}) => "share" in data || done(plain(data));
  worker.onerror = ({{ message }}) => done({{ error: message }});
  worker.postMessage({{ task, ...given, port: port2 }}, [port2]);
}});</script>"""


def arrays(value):
    """An answer of the page with NumPy arrays in place of their bytes."""
    if isinstance(value, list):
        return [arrays(item) for item in value]
    if not isinstance(value, dict):
        return value
    if {*value} == {"type", "data"}:
        kind = {"Float32Array": np.float32, "Uint8Array": np.uint8}[value["type"]]
        return np.frombuffer(base64.b64decode(value["data"]), kind)
    return {name: arrays(item) for name, item in value.items()}


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Page:
    """A page from disk that runs the model of a live page in its worker."""

    def __init__(self, browser, folder):
        (folder / "page.html").write_text(
            HARNESS.format(script=live.worker_script()), encoding="utf-8"
        )
        self.page = browser.new_page()
        self.page.goto(f"file://{folder}/page.html")

    def ask(self, task: str, **given):
        given = {
            name: text(value) if isinstance(value, bytes) else value
            for name, value in given.items()
        }
        if isinstance(given.get("input"), torch.Tensor):
            given["input"] = text(given["input"].numpy().tobytes())
        answer = self.page.evaluate("([task, given]) => ask(task, given)", [task, given])
        assert "error" not in answer, answer["error"]
        return arrays(answer).get("result")

    def open(self, model):
        """Open the files that Python writes for a model. Returns its description."""
        probes = [
            each | {"file": text(each["file"]), "levels": text(each["levels"])}
            for each in live.probes()
        ]
        given = [[name, text(file)] for name, file in model_files(model).items()]
        opened = self.ask("read", files=given, wasm=(live.LIVE / "kernels.wasm").read_bytes())
        self.ask("prove", probes=probes)
        return opened


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    return Page(browser, tmp_path_factory.mktemp("live"))


def model_of(name: str):
    """A model with random weights whose attention and logits differ from patch to patch."""
    torch.manual_seed(0)
    architecture, options = MODELS[name]
    model = timm.create_model(architecture, img_size=SIZE, num_classes=10, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, SIZE, SIZE)}
    return model


def near(got, exact: torch.Tensor, what: str, limit: float = 1e-4) -> None:
    """Assert that values differ by at most `limit` of the largest."""
    got, exact = np.asarray(got, np.float64).reshape(exact.shape), exact.double().numpy()
    assert np.abs(got - exact).max() <= limit * np.abs(exact).max(), what


def rows(record: dict, layer: int, heads: int) -> torch.Tensor:
    """Attention (H, T, T) from the queries and keys of a record."""
    part = record["layers"][layer]
    q, k = (torch.tensor(part[name]).view(heads, -1, 64) for name in "qk")
    return (q @ k.mT).softmax(-1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("ti", "s-mean") else name
        for name in MODELS
    ],
)
def test_forward_and_backward_equal_torch(page, name):
    model, heads = model_of(name), 3 if name[0] != "s" else 6
    page.open(model)
    batch = torch.randn(1, 3, SIZE, SIZE)
    with torch.no_grad(), capture(model) as attn:
        tokens, logits = features(model, batch)
    record = page.ask("forward", key="a", input=batch, off=[], mean=False)
    near(record["logits"], logits, "logits")
    random = np.random.default_rng(0)
    for _ in range(10):
        layer, head, query = (int(random.integers(n)) for n in (len(attn), heads, attn.grid.tokens))
        exact = attn[layer].weights(queries=query)[0, head, 0]
        near(rows(record, layer, heads)[head, query], exact, f"row {layer, head, query}")
        near(record["tokens"][layer], tokens[layer][0], "tokens")
    moved = [torch.eye(attn.grid.tokens).double()]
    for layer in range(len(attn)):
        moved.append(
            (rows(record, layer, heads).mean(0).double() + torch.eye(attn.grid.tokens))
            / 2
            @ moved[-1]
        )
    row = (attention.read_row(attn).double() @ moved[-1]).float()
    near(attn.grid.image_map(row), attention.rollout(attn), "rollout")
    for target, against in ((2, None), (0, 7)):
        maps = page.ask("why", key="a", target=target, against=against)
        for method in METHODS:
            near(
                maps[method],
                attribution.METHODS[method](model, batch, target, against=against)[0],
                method,
            )
        added, written = stream.contributions_by_token(model, batch, target, against)
        parts = page.ask("contributions", key="a", target=target, against=against)
        near(parts["written"], written[0], "contributions of tokens")
        for name, value in (
            ("heads", added.heads),
            ("mlps", added.mlps),
            ("embedding", added.embedding),
            ("biases", added.biases),
            ("logit", added.logits),
        ):
            assert (
                np.abs(np.array(parts[name]) - value[0].numpy()).max()
                < 1e-4 * added.parts.abs().max()
            ), name
    for layer, found in enumerate(page.ask("lens", key="a", targets=[1, 5])):
        whole, each = stream.lens(model, batch, layer)
        shares, classes = torch.cat([whole, each[0]]).softmax(-1).max(-1)
        assert found["classes"] == classes.tolist()
        near(found["shares"], shares, "lens")
        near(found["of"]["5"], each[0].softmax(-1)[attn.grid.prefix :, 5], "lens of a class")


def test_worker_reads_a_model_from_its_own_files(browser, tmp_path):
    """A distilled DeiT of transformers, and a pickle, which leaves the model as it was."""
    sizes = dict(num_hidden_layers=2, num_attention_heads=3, hidden_size=192, image_size=SIZE)
    config = transformers.DeiTConfig(**sizes, intermediate_size=384, num_labels=10)
    model = transformers.DeiTForImageClassificationWithTeacher(config).eval()
    model.save_pretrained(tmp_path / "model")
    paths = [tmp_path / "model" / name for name in ("config.json", "model.safetensors")]
    page = Page(browser, tmp_path)
    wasm = (live.LIVE / "kernels.wasm").read_bytes()
    opened = page.ask(
        "read", files=[[path.name, text(path.read_bytes())] for path in paths], wasm=wasm
    )
    assert opened["about"]["heads"] == 3 and opened["labels"] is None
    batch = torch.randn(1, 3, SIZE, SIZE)
    given = {"key": "a", "input": text(batch.numpy().tobytes()), "off": [], "mean": False}
    with torch.no_grad():
        exact = model(batch).logits[0]
    near(page.ask("forward", **given)["logits"], exact, "logits")
    pickle = {"files": [["pytorch_model.bin", text(b"PK\x03\x04")]], "wasm": text(wasm)}
    refused = page.page.evaluate("given => ask('read', given)", pickle)
    assert refused["problem"] == "pickle"
    assert "weights_only=True" in say(refused["problem"], **refused["fields"])
    near(page.ask("forward", **given)["logits"], exact, "logits after a refusal")


SMALL = dict(
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=3,
    image_size=SIZE,
    patch_size=16,
)
OTHERS = {
    "ViTModel": ("ViTConfig", {}),
    "ViTForImageClassification": ("ViTConfig", {"hidden_act": "gelu_new", "num_labels": 5}),
    "DeiTForImageClassification": ("DeiTConfig", {"num_labels": 5}),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", {"num_labels": 5}),
    "Dinov2Model": ("Dinov2Config", {}),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", {"num_labels": 5}),
    "CLIPVisionModel": ("CLIPVisionConfig", {}),
    "SiglipForImageClassification": ("SiglipConfig", {"num_labels": 5}),
}
"""Configurations of transformers by the class of the model."""


def model_of_transformers(title: str):
    """A model with random weights, in bfloat16 precision."""
    torch.manual_seed(0)
    kind, options = OTHERS[title]
    if kind == "SiglipConfig":
        config = transformers.SiglipConfig(vision_config=SMALL, **options)
    else:
        config = getattr(transformers, kind)(**SMALL, **options)
    model = getattr(transformers, title)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
            parameter.copy_(parameter.bfloat16())
    return model


def final_tokens(model, batch):
    """Tokens (T, D) after the last layer of a model of transformers."""
    tower = getattr(model, "vision_model", model)
    with torch.no_grad():
        return tower(pixel_values=batch, output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("title", OTHERS)
def test_files_of_transformers_models_equal_torch(page, title):
    """Logits, or the tokens of a model without classes, from the files that Python writes into a page."""
    model, batch = model_of_transformers(title), torch.randn(1, 3, SIZE, SIZE)
    opened = page.open(model)
    assert opened["kind"] == title and opened["title"] == vitlens.models.title(model)
    record = page.ask("forward", key=title, input=batch, off=[], mean=False)
    near(record["tokens"][-1], final_tokens(model, batch), "tokens")
    with torch.no_grad():
        logits = getattr(model(pixel_values=batch), "logits", None)
    if logits is not None:
        near(record["logits"], logits, "logits")
    else:
        assert record["logits"].size == 0


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_tiny_patch16_224", {"act_layer": "gelu_tanh"}),
        ("vit_tiny_patch16_224", {"act_layer": partial(nn.GELU, approximate="tanh")}),
        ("vit_tiny_patch16_224", {"act_layer": "quick_gelu", "qkv_bias": False}),
        ("vit_tiny_patch16_224", {"norm_layer": partial(nn.LayerNorm, eps=1e-5)}),
        ("vit_tiny_patch16_224", {"pos_embed": "none", "global_pool": "avg"}),
        ("vit_tiny_patch16_224", {"final_norm": False, "mlp_ratio": 2}),
        ("vit_tiny_patch16_224", {"num_classes": 0}),
    ],
)
def test_files_of_timm_models_equal_torch(page, architecture, options):
    torch.manual_seed(0)
    sizes = dict(img_size=SIZE, embed_dim=48, depth=2, num_heads=3)
    model = timm.create_model(architecture, **sizes | {"num_classes": 5} | options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    batch = torch.randn(1, 3, SIZE, SIZE)
    opened = page.open(model)
    record = page.ask("forward", key=str(options), input=batch, off=[], mean=False)
    with torch.no_grad():
        tokens = model.forward_intermediates(
            batch, intermediates_only=True, return_prefix_tokens=True, output_fmt="NLC"
        )
        logits = model(batch)[0]
    patches, prefix = tokens[-1]
    near(record["tokens"][-1], torch.cat([prefix, patches], 1)[0], "tokens")
    assert opened["about"]["classes"] == model.num_classes
    if model.num_classes:
        near(record["logits"], logits, "logits")


def test_described_names_are_read(page):
    """Short names that timm describes, as Python reads them from the same folder."""
    model = model_of("ti-mean")
    written = model_files(model)
    config = json.loads(written["config.json"])
    config["label_names"] = [f"n{k}" for k in range(10)]
    config["label_descriptions"] = {"n1": "cat, puss", "n7": "owl", "toString": "no"}
    written["config.json"] = json.dumps(config).encode()
    given = [[name, text(file)] for name, file in written.items()]
    opened = page.ask("read", files=given, wasm=(live.LIVE / "kernels.wasm").read_bytes())
    expected = [config["label_descriptions"].get(name, name) for name in config["label_names"]]
    assert opened["labels"] == expected


def test_python_and_the_page_take_the_same_transformers_models(browser):
    """Classes and activations that Python writes files of are those that the worker's script reads."""
    page = browser.new_page()
    names = "[HUB_MODELS, HUB_ACTIVATIONS].map((each) => Object.keys(each))"
    classes, activations = page.evaluate(f"() => {{ {live.worker_script()}; return {names}; }}")
    assert {*classes} == TRANSFORMERS_CLASSES and {*activations} == TRANSFORMERS_ACTIVATIONS
    page.close()


@pytest.mark.parametrize("way", ["zero", "mean"])
def test_heads_off_equal_intervene(page, way):
    model = model_of("ti-mean")
    off, reference, batch = (
        [(0, 2), (2, 1), (2, 0)],
        torch.randn(4, 3, SIZE, SIZE),
        torch.randn(1, 3, SIZE, SIZE),
    )
    with torch.no_grad(), capture(model, values=True) as attn:
        model(reference)
    means = {
        (layer, head): attn[layer].output.mean(0)[head] for layer in range(4) for head in range(3)
    }
    page.open(model)
    page.ask("means", inputs=[text(image.numpy().tobytes()) for image in reference])
    with vitlens.intervene(
        model, heads={head: "zero" if way == "zero" else means[head] for head in off}
    ):
        with torch.no_grad():
            logits = model(batch)
        methods = (
            METHODS if way == "zero" else METHODS[:-1]
        )  # parts of replaced heads do not add up
        exact = {method: attribution.METHODS[method](model, batch, 4)[0] for method in methods}
    given = {"key": way, "input": batch, "off": off, "mean": way == "mean"}
    near(page.ask("forward", **given)["logits"], logits, "logits")
    page.ask("forward", **given | {"key": "other", "off": []})
    maps = page.ask("why", **given, target=4, against=None)
    for method in methods:
        near(maps[method], exact[method], method)


def file_of(image: Image.Image, kind: str, **options) -> bytes:
    image.save(file := io.BytesIO(), format=kind, **options)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_inputs_equal_preprocess(page, interpolation):
    model = model_of("others")
    model.pretrained_cfg |= {"interpolation": interpolation, "crop_pct": 0.9}
    page.open(model)
    photos = vitlens.samples()
    alpha = np.random.default_rng(0).integers(0, 256, photos["chelsea"].size[::-1], np.uint8)
    upright = Image.Exif()
    upright[0x0112] = 6
    strips = [
        Image.effect_noise((width, 80), 90).convert("RGB") for width in (30, *range(80, 120, 3))
    ]
    files = [
        *(file_of(photo, "png") for photo in photos.values()),
        *(file_of(photo, "jpeg") for photo in photos.values()),
        file_of(Image.fromarray(np.dstack([np.asarray(photos["chelsea"]), alpha])), "png"),
        file_of(photos["coffee"], "jpeg", exif=upright, quality=95, subsampling=0),
        file_of(photos["rocket"].convert("L"), "jpeg"),
        file_of(photos["rocket"].convert("P"), "png"),
        *(file_of(strip, "png") for strip in strips),
    ]
    for number, file in enumerate(files):
        photo = page.ask("photo", bytes=file)
        assert photo["exact"] and photo["clear"] == (number == 12), f"file {number}"
        assert photo["turned"] == (number == 13) and photo["frames"] == 1 and not photo["gray"]
        exact = preprocess(model, file)[0]
        assert np.array_equal(photo["input"].reshape(exact.shape), exact), f"file {number}"
    other = page.ask("photo", bytes=file_of(photos["rocket"], "webp"))
    assert not other["exact"]
    for kind in ("png", "jpeg"):  # the browser converts to sRGB as Pillow does, to one level
        file = file_of(photos["coffee"], kind, icc_profile=WIDE)
        photo, exact = page.ask("photo", bytes=file), preprocess(model, file)[0].numpy()
        level = np.reshape(model.pretrained_cfg["std"], (3, 1, 1)) * 255
        levels = np.abs(photo["input"].reshape(exact.shape) - exact) * level
        assert not photo["exact"] and levels.max() < 1.01 and levels.mean() < 0.1


def test_pictures_equal_those_of_python(page):
    from vitlens_explorer.drawing import enlarged_png

    model = model_of("others")
    page.open(model)
    file = file_of(vitlens.samples()["chelsea"], "png")
    picture = page.ask("photo", bytes=file)["picture"].tobytes()
    exact = enlarged_png(vitlens.models.restore(model, preprocess(model, file))[0])
    got, expected = (
        np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in (picture, exact)
    )
    assert np.array_equal(got, expected)


LIVE = {"view", "layer", "head", "query", "row", "column", "off", "way", "target", "against"}


@pytest.mark.parametrize("pooling", ["token", pytest.param("avg", marks=pytest.mark.slow)])
def test_live_page_equals_explorer(vit, browser, tmp_path, pooling):
    """Captions, bars and maps of the page's own photo and of an uploaded file, also with heads off."""
    model, photo = vit(num_classes=5, global_pool=pooling), vitlens.samples()["rocket"]
    live.save_live_page(model, {NAME: vitlens.samples()[NAME]}, path := tmp_path / "page.html")
    shown, requests, errors = opened(browser, path)
    exact = Reference(model, vitlens.samples()[NAME], False)
    photo.save(tmp_path / "rocket.jpg", quality=90)
    chance, drawn = random.Random(pooling), shown.evaluate(FRAME, [])
    views = [{"view": value} for _, value in control(drawn, "view")["options"]]
    for number in range(len(views) + 10):
        if number == len(views):
            shown.set_input_files("input[type=file]", tmp_path / "rocket.jpg")
            while (
                shown.evaluate("document.querySelector('#page').source.state.photograph")
                != "rocket.jpg"
            ):
                shown.wait_for_timeout(50)
            photographs = {
                "rocket.jpg": Photograph.read(tmp_path / "rocket.jpg"),
                NAME: Photograph(vitlens.samples()[NAME]),
            }
            exact.page.state |= {"photographs": photographs, "photograph": "rocket.jpg"}
        values = views[number] if number < len(views) else settings(drawn, chance)
        values = {name: value for name, value in values.items() if name in LIVE}
        if number > len(views) and chance.random() < 0.6:
            values["off"] = [[chance.randrange(3), chance.randrange(3)] for _ in range(2)]
        frame = shown.evaluate(FRAME, [{"set": values, "number": 10**15 + number}])
        expected = exact.send(
            **{k: tuple(v) if isinstance(v, list) and k != "off" else v for k, v in values.items()}
        )
        assert bool(frame["message"]) == bool(expected["message"]), (
            frame["message"] or expected["message"]
        )
        (got,), (wanted,) = frame["panels"], expected["panels"]
        for name in ("title", "words", "selected", "unit", "ends"):
            assert got[name] == plain(wanted[name]), (values, name)
        assert_alike(frame["bars"], plain(expected["bars"]))
        for name in ("target", "against"):
            menus = [plain(control(each, name)) for each in (frame, expected)]
            options = [[value for _, value in menu["options"]] for menu in menus]
            assert options[0] == options[1], name
            assert (
                menus[0]["value"] == menus[1]["value"] and menus[0]["hidden"] == menus[1]["hidden"]
            )
        near(
            floats(got["values"]),
            torch.from_numpy(np.frombuffer(wanted["values"], "<f4").copy()),
            str(values),
        )
        if number in (
            0,
            len(views),
            len(views) + 9,
        ):  # the page's own photo, and an uploaded one, also with heads off
            tour = shown.evaluate(ASK, {"ask": "tour"})[0]
            assert_tour(tour, plain(exact.page.look_up({"ask": "tour"}, lambda: None)[0]))
            assert len(tour["sentences"]) == 8
        drawn = frame
    assert (
        frame["about"] == f"{expected['about']} {say('live')}" and "rocket.jpg" in shown.content()
    )
    (tmp_path / "wrong.jpg").write_bytes(b"no image")
    shown.set_input_files("input[type=file]", tmp_path / "wrong.jpg")
    shown.get_by_role("alert").filter(has_text="Export it as JPEG or PNG").wait_for()
    assert errors == [] and not [
        address for address in requests if not address.startswith(("file:", "blob:"))
    ]
    shown.close()


def test_live_page_explains_typed_classes_and_saves(vit, browser, tmp_path):
    """A typed class against another one, and the zip file of its map."""
    model = vit(num_classes=5)
    model.label_names = ["tabby, tabby cat", "tiger cat", "otter", "sea otter, sea cat", "cat bird"]
    live.save_live_page(model, {NAME: vitlens.samples()[NAME]}, path := tmp_path / "page.html")
    shown, _, errors = opened(browser, path)
    batch = preprocess(model, vitlens.samples()[NAME], size=(SIZE, SIZE))
    shares, figcaption = model(batch)[0].softmax(-1), shown.locator("figcaption").first

    def typed(words, caption):
        shown.get_by_label("Any class").fill(words)
        shown.keyboard.press("Enter")
        shown.locator("figcaption, .alert", has_text=caption).first.wait_for()

    shown.get_by_role("button", name="Why this class?").click()
    for words, classes in (
        ("TABBY", [0]),
        ("cat sea", [3]),
        ("otter", [2]),
        ("4", [4]),
        ("cat", [0, 1, 3, 4]),
    ):
        best = max(classes, key=lambda k: shares[k])
        typed(words, f"for “{['tabby', 'tiger cat', 'otter', 'sea otter', 'cat bird'][best]}” (")
    typed("cats", "No class is named “cats”")
    typed("bird", "for “cat bird”")
    shown.get_by_label("Contrast with").select_option(
        label=f"sea otter ({percent(shares[3].item())})"
    )
    shown.locator("figcaption", has_text="rather than “sea otter”").wait_for()
    with shown.expect_download() as saved:
        press_share(shown, "Save")
    with zipfile.ZipFile(saved.value.path()) as archive:
        files = {
            name.removeprefix(f"vitlens-{NAME}-relevance"): archive.read(name)
            for name in archive.namelist()
        }
    assert {*files} == {".png", ".csv", "-heads.csv", ".json", "-input.png"}
    with torch.no_grad(), capture(model) as attn:
        model(batch)
    heads = vitlens.attention.summary(attn).to_pandas()
    saved_heads = pd.read_csv(io.BytesIO(files["-heads.csv"]))
    pd.testing.assert_frame_equal(saved_heads, heads, rtol=1e-4)
    values = np.loadtxt(io.StringIO(files[".csv"].decode()), delimiter=",", dtype=np.float32)
    near(values, attribution.relevance(model, batch, 4, against=3)[0], "saved map")
    about, seen = (
        json.loads(files[".json"]),
        np.asarray(Image.open(io.BytesIO(files["-input.png"]))),
    )
    assert (
        about["weights"] == weights_digest(model)
        and about["words"] == figcaption.locator(".exact").text_content()
    )
    assert (about["target"], about["against"], about["view"]) == (4, 3, "relevance")
    canvas = shown.locator(".picture canvas").first.evaluate(
        "node => node.toDataURL('image/png').split(',')[1]"
    )
    pictures = base64.b64decode(canvas), files[".png"]
    drawn = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in pictures]
    assert np.array_equal(*drawn) and seen.shape[:2] == drawn[0].shape[:2]
    assert (
        shown.locator(".bars button").first.get_attribute("title").startswith("Why “")
        and errors == []
    )
    shown.close()


def test_live_page_keeps_the_map_after_an_error(vit, browser, tmp_path):
    """The similarity to the same photo is refused: the heads stay on, and the map is that of the whole model."""
    model = vit(num_classes=5)
    photos = {name: vitlens.samples()[NAME] for name in (NAME, "twin")}
    live.save_live_page(model, photos, path := tmp_path / "page.html")
    shown, _, errors = opened(browser, path)
    before = shown.evaluate(FRAME, [{"set": {"layer": 2}, "number": 10**15}])
    target = ["picture", "twin"]
    wrong = {"off": [[0, 1]], "way": "zero", "view": "relevance", "target": target}
    after = shown.evaluate(FRAME, [{"set": wrong, "number": 10**15 + 1}])
    assert after["message"] == say("alike", name="twin")
    assert control(after, "off")["value"] == []
    assert after["panels"] == before["panels"] and after["bars"] == before["bars"] and errors == []
    shown.close()


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("vit_tiny_patch16_224", {"qk_norm": True}, "norms differ"),
        ("vit_base_patch16_224", {}, "parameters"),
        ("vit_tiny_patch16_224", {"act_layer": "relu"}, "ReLU"),
        ("vit_tiny_patch16_224", {"global_pool": "max"}, "read-out"),
        (
            "vit_tiny_patch16_224",
            {"global_pool": "avg", "class_token": True, "pool_include_prefix": True},
            "read-out",
        ),
        ("vit_tiny_patch16_224", {"patch_size": (8, 16)}, "8 × 16 pixels"),
        ("vit_tiny_patch16_224", {"embed_dim": 60}, "multiples of 8"),
        ("vit_tiny_patch16_224", {"in_chans": 1}, "square middle"),
        ("vit_tiny_patch16_224", {"norm_layer": partial(nn.LayerNorm, eps=1e-3)}, "epsilon 0.001"),
        ("cait_xxs24_224", {}, "plain VisionTransformer"),
    ],
)
def test_other_models_are_refused_with_the_saved_page(architecture, options, reason):
    model = timm.create_model(architecture, img_size=32, **options)
    with pytest.raises(
        vitlens.UnsupportedModelError, match=f"{reason}.*`vitlens page MODEL IMAGE`"
    ):
        check_runs(model)


@pytest.mark.slow
def test_live_page_keeps_the_forwards_of_the_latest_photos(vit, browser, tmp_path):
    """Of 60 uploads. The first photo is shown as before when it is chosen again."""
    model = vit(num_classes=5)
    live.save_live_page(model, {NAME: vitlens.samples()[NAME]}, path := tmp_path / "page.html")
    shown, _, errors = opened(browser, path)
    before = shown.evaluate(FRAME, [])
    upload = """async (count) => {
        const { source } = document.querySelector("#page");
        for (let k = 0; k < count; k += 1) {
            const canvas = new OffscreenCanvas(9 + k, 9);
            canvas.getContext("2d").fillRect(0, 0, k, 5);
            const bytes = await (await canvas.convertToBlob()).arrayBuffer();
            source.send({ upload: `${k}.png`, file: k, of: 1, number: 10 ** 15 + k }, undefined, [bytes]);
            await source.turn;
        }
        const { records } = source.page;
        const kept = [...records.values()].filter(({ layers }) => layers.length);
        return [source.state.photograph, records.size, kept.length, source.traits.frame.message];
    }"""
    assert shown.evaluate(upload, 60) == ["59.png", 1 + 40, 3, ""]
    names = [value for _, value in control(shown.evaluate(FRAME, []), "photograph")["options"]]
    assert names == [*(f"{k}.png" for k in range(59, 19, -1)), NAME]
    after = shown.evaluate(FRAME, [{"set": {"photograph": NAME}, "number": 10**15 + 99}])
    assert plain(after["panels"]) == plain(before["panels"]) and after["bars"] == before["bars"]
    assert errors == []
    shown.close()


def cut_files():
    """Files that end before their image does, by name."""
    photo = vitlens.samples()["coffee"]
    files = {
        f"{name}.{kind}": file_of(photo, kind, **options)
        for kind, name, options in (
            ("jpeg", "baseline", {}),
            ("jpeg", "progressive", {"progressive": True}),
            ("jpeg", "restarts", {"restart_marker_rows": 1}),
            ("png", "rgb", {}),
            ("gif", "gif", {}),
            ("webp", "lossy", {}),
            ("webp", "lossless", {"lossless": True}),
            ("avif", "avif", {}),
        )
    }
    cut = {}
    for name, file in files.items():
        half = file[: len(file) // 2]
        cut[f"half a {name}"] = half
        cut[f"{name} with zeros"] = half + bytes(len(file) - len(half))
        cut[f"{name} without its last 40 bytes"] = file[:-40]
    for name in ("lossy.webp", "lossless.webp", "avif.avif"):
        del cut[f"{name} with zeros"]  # their headers have the whole size
    return files, cut


def test_cut_files_are_refused(page):
    """By the page as by Pillow. A JPEG that was closed after the cut is gray below, which both say."""
    page.open(model_of("others"))
    files, cut = cut_files()
    for name, file in files.items():
        assert not page.ask("photo", bytes=file)["gray"], name
        vitlens.load_image(file)
    for name, file in cut.items():
        with pytest.raises(vitlens.ImageError):
            vitlens.load_image(file)
        given = {"bytes": text(file)}
        answer = page.page.evaluate("given => ask('photo', given)", given)
        assert "error" in answer, name
        if "avif" not in name:
            assert answer.get("problem") == "broken off", name
    for name, file in files.items():
        if name in ("baseline.jpeg", "restarts.jpeg"):
            closed = file[: len(file) // 2] + b"\xff\xd9"
            notes = []
            vitlens.load_image(closed, on_note=notes.append)
            assert page.ask("photo", bytes=closed)["gray"], name
            assert "ends in an even gray, as a file that was cut" in notes[0], name


def test_notes_on_files_equal_those_of_python(page):
    """Frames, turned files and strips, beside pixels that differ only where the page says so."""
    model = model_of("others")
    page.open(model)
    photo = vitlens.samples()["chelsea"]
    second = vitlens.samples()["coffee"].resize(photo.size)
    several = {"save_all": True, "append_images": [second, photo.rotate(9)]}
    files = {
        "gif": file_of(photo, "gif", **several),
        "webp": file_of(photo, "webp", **several),
        "apng": file_of(photo, "png", **several),
    }
    for number in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = number
        files[f"turned jpeg {number}"] = file_of(photo, "jpeg", exif=exif)
    files["turned png"] = file_of(photo, "png", exif=exif)
    files["turned webp"] = file_of(photo, "webp", exif=exif)
    for name, file in files.items():
        notes = []
        vitlens.load_image(file, on_note=notes.append)
        found = page.ask("photo", bytes=file)
        assert found["frames"] == (3 if "turned" not in name else 1), name
        assert ("holds 3 images; the first is shown" in notes[0]) == (found["frames"] == 3), name
        assert found["turned"] == ("was turned upright" in notes[0]), name
        assert (found["width"], found["height"]) == vitlens.load_image(file).size, name
        assert found["exact"] == name.startswith(("turned jpeg", "turned png")), name
        exact = preprocess(model, file)[0]
        assert np.abs(found["input"].reshape(exact.shape) - exact.numpy()).max() < 1e-6, name
    strip = Image.new("RGB", (4000, 10))
    answer = page.page.evaluate(
        "given => ask('photo', given)", {"bytes": text(file_of(strip, "png"))}
    )
    with pytest.raises(vitlens.ImageError) as refused:
        preprocess(model, strip)
    assert say(answer["problem"], name="", **answer["fields"]) == str(refused.value)


@pytest.mark.slow
def test_live_page_keeps_the_address_of_a_link(vit, browser, tmp_path):
    """While the model runs without some heads. The link is one entry of the history."""
    model = vit(num_classes=5)
    live.save_live_page(model, {NAME: vitlens.samples()[NAME]}, path := tmp_path / "page.html")
    shown, _, errors = opened(browser, path)
    shown.wait_for_function("() => location.hash.startsWith('#view=attention')")
    entries = shown.evaluate("history.length")
    shown.evaluate("""() => {
        const { source } = document.querySelector("#page");
        const { prepare } = source.page;
        source.page.prepare = async (...message) => {
            await prepare(...message);
            await new Promise((done) => setTimeout(done, 1000)); // a slow model
        };
        window.seen = [];
        location.hash = "#view=rollout&layer=1&patch=1,2&off=0.2";
        setInterval(() => seen.push(location.hash), 20);
    }""")
    shown.locator("figcaption", has_text="Rollout from the patch in row 1").wait_for()
    shown.wait_for_timeout(500)  # until the address is written
    seen = set(shown.evaluate("seen"))
    assert len(seen) <= 2 and all("view=rollout" in each for each in seen), seen
    assert shown.evaluate("history.length") == entries + 1
    shown.evaluate("location.hash = '#off=x'")
    shown.locator(".alert", has_text="There is no head “x”.").wait_for()
    shown.evaluate("location.hash = '#view=zzz'")
    shown.locator(".alert", has_text="View has no value “zzz”.").wait_for()
    assert errors == []
    shown.close()
