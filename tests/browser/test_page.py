"""Saved pages in a real browser: what their scripts compute, against Python's explorer."""

import base64
import gzip
import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from support import saved_model, vitlens

import vitlens_explorer as widgets
from browser.fronts import MARKS, assert_covered
from vitlens import UnsupportedModelError
from vitlens.attribution import grad_cam
from vitlens.images import samples
from vitlens.models import OUTPUTS, built_size, preprocess
from vitlens.models.classes import prediction_beside
from vitlens_explorer import in_page, save_page
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.photographs import Photograph
from vitlens_explorer.views import VIEWS
from vitlens_explorer.words import fine_percent, number, percent

pytestmark = MARKS

MODELS = {
    "class token": {},
    "mean": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "pooled read-out": {"name": "vit_base_patch16_siglip_224"},
    "registers": {"reg_tokens": 3},
    "RoPE": {"name": "eva02_tiny_patch14_224", "img_size": 56},
    "non-square grid": {"img_size": (48, 80)},
}
NAME = "chelsea"
FRAME = """async (messages) => {
    const { source } = document.querySelector("#page");
    for (const message of messages) source.send(message);
    await source.turn;
    while (source.timer) await new Promise((done) => setTimeout(done, 2));
    const bytes = ({ buffer, byteOffset, byteLength }) => new Uint8Array(buffer, byteOffset, byteLength);
    const text = (_, value) => (value instanceof DataView ? btoa(String.fromCharCode(...bytes(value))) : value);
    return JSON.parse(JSON.stringify(source.get("frame"), text));
}"""


def opened(browser, path):
    """A page of the browser with the file, and the lists of its requests and errors."""
    page, requests, errors = browser.new_page(viewport={"width": 1300, "height": 1000}), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: (
            errors.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.goto(path.as_uri())
    page.wait_for_selector(".vitlens[data-answers]")
    return page, requests, errors


def floats(text):
    return np.frombuffer(base64.b64decode(text), "<f4")


def plain(value):
    """A value as JSON has it, without arrays."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


class Reference:
    """Python's explorer of a model. rounded: with queries, keys and tokens as the file has them."""

    def __init__(self, model, image, rounded):
        self.page, self.number = Explorer(model, image), 0
        self.page.state |= {"photographs": {NAME: Photograph.read(image)}, "photograph": NAME}
        if rounded:
            self.round()
        self.page.first(lambda *_: None)

    def round(self):
        forward = self.page.forward

        def read(stored, shape):
            values = np.frombuffer(
                stored["data"], "<f4" if stored["type"] == "f4" else "<f2"
            ).astype(np.float32)
            return torch.from_numpy(values).reshape(shape)

        for k, layer in enumerate(forward.attn):
            stored = in_page._layer(forward, layer)
            q, keys = read(stored["q"], layer.q.shape), read(stored["k"], layer.k.shape)
            forward.attn[k] = replace(layer, q=q, k=keys, scale=1.0)
        forward.tokens = [read(in_page.array(tokens), tokens.shape) for tokens in forward.tokens]

    def send(self, **values):
        """The frame after a setting, with all slow parts."""
        self.number += 1
        answer = self.page.answer([({"set": values, "number": self.number}, [])], lambda *_: None)
        while answer.job:
            try:
                done = answer.job.function(lambda *_: None)
            except (
                ValueError
            ) as error:  # such as a method that heads replaced by their mean exclude
                done = str(error)
            answer = self.page.answer([({"job": answer.job.key}, [done])], lambda *_: None)
        return self.page.frame


def settings(frame, chance):
    """Random values of some controls."""
    chosen = {}
    for control in frame["controls"]:
        if (
            control["hidden"]
            or control["disabled"]
            or control["name"] == "photograph"
            or chance.random() < 0.3
        ):
            continue
        if control["options"]:
            chosen[control["name"]] = chance.choice(control["options"])[1]
        elif control["kind"] == "check":
            chosen[control["name"]] = chance.random() < 0.5
        else:
            steps = chance.randint(0, round(control["high"] / control["step"]))
            chosen[control["name"]] = steps * control["step"] if control["step"] != 1 else steps
    return chosen


EVERY_DAY = ("class token",)
"""The other models are compared in the slow tests."""


@pytest.mark.parametrize(
    "kind",
    [kind if kind in EVERY_DAY else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS],
)
def test_saved_page_equals_explorer(vit, browser, tmp_path, kind):
    """Frames, character by character, from the same rounded numbers, and maps against those of the model itself."""
    model, image = vit(num_classes=5, **MODELS[kind]), samples()[NAME]
    path = save_page(model, {NAME: image}, tmp_path / "page.html", scores=True)
    page, requests, errors = opened(browser, path)
    rounded, exact = Reference(model, image, True), Reference(model, image, False)
    chance, frame = random.Random(kind), page.evaluate(FRAME, [])
    views, seen = [value for _, value in control(frame, "view")["options"]], set()
    draws = [{"view": view} for view in views] + [{} for _ in range(10)]
    for draw in draws:
        values = draw | ({} if draw else settings(frame, chance))
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        frame = page.evaluate(FRAME, [{"set": values, "number": 10**15}])
        expected, true = rounded.send(**values), exact.send(**values)
        mosaic = expected["mosaic"]
        expected = (
            true if rounded.page.state["view"] == "lens" else expected
        )  # Python's, from exact tokens
        seen.add(control(frame, "view")["value"])
        assert bool(frame["message"]) == bool(expected["message"])
        (drawn,), (wanted,), (right,) = frame["panels"], expected["panels"], true["panels"]
        named = (
            "title words plain selected picks unit ends rows cols cell tokens legend sinks hides"
        )
        for name in named.split():
            assert drawn[name] == plain(wanted[name]), (values, name)
        for name in ("bars", "parts", "lens", "score", "model", "asks"):
            assert_alike(frame[name], plain(expected[name]))
        assert_mosaic(frame["mosaic"], mosaic)
        assert_six(frame["six"], expected["six"])
        listed = [
            plain(each) for each in expected["controls"] if each["name"] not in in_page.ABSENT
        ]
        menu, fewer = control({"controls": listed}, "view"), control(frame, "view")
        menu["options"] = [
            option for option in menu["options"] if option[1] in views
        ]  # without slow ones
        menu["groups"] = fewer["groups"]
        assert frame["controls"] == listed
        shown, map_ = floats(drawn["values"]), np.frombuffer(right["values"], "<f4")
        assert np.abs(shown - map_).max() <= 3e-3 * np.abs(map_).max(), values
        assert (
            np.abs(shown - np.frombuffer(wanted["values"], "<f4")).max()
            <= 2e-5 * np.abs(map_).max()
        ), values
        if scale := wanted["scale"]:
            assert drawn["scale"]["low"] == pytest.approx(scale["low"], rel=1e-5)
            assert drawn["scale"]["uniform"] == about(scale["uniform"])
            off = np.frombuffer(base64.b64decode(drawn["scale"]["colors"]), np.uint8).astype(int)
            assert np.abs(off - np.frombuffer(scale["colors"], np.uint8)).max() <= 1
    assert {*VIEWS} <= {*views} and len(seen) == len(views) and errors == []
    assert requests == [path.as_uri()]
    page.close()


def about(number):
    """An expected number, or None."""
    return None if number is None else pytest.approx(number, rel=1e-5)


def assert_mosaic(found, expected):
    if expected is None:
        assert found is None
        return
    maps, colors = (
        np.frombuffer(base64.b64decode(found.pop(name)), np.uint8) for name in ("maps", "colors")
    )
    expected = {name: value for name, value in expected.items() if name not in ("off", "pool")}
    assert np.abs(maps.astype(int) - np.frombuffer(expected.pop("maps"), np.uint8)).max() <= 1
    assert (colors == np.frombuffer(expected.pop("colors"), np.uint8)).all()
    assert found.pop("off") is None and found.pop("pool") == 0
    assert_alike(found, plain(expected))


def assert_six(found, expected):
    if expected is None:
        assert found is None
        return
    assert found["title"] == expected["title"] and found["picture"] == expected["picture"]
    for tile, right in zip(found["tiles"], expected["tiles"], strict=True):
        assert (
            np.abs(floats(tile.pop("values")) - np.frombuffer(right["values"], "<f4")).max() < 1e-5
        )
        off = floats_of_bytes(tile["scale"].pop("colors")) - floats_of_bytes(
            right["scale"]["colors"]
        )
        assert np.abs(off).max() <= 1
        right = right | {
            "scale": {name: right["scale"][name] for name in ("low", "high", "uniform")}
        }
        assert_alike(
            tile, plain({name: value for name, value in right.items() if name != "values"})
        )


def floats_of_bytes(colors):
    return np.frombuffer(
        base64.b64decode(colors) if isinstance(colors, str) else colors, np.uint8
    ).astype(int)


def control(frame, name):
    return next(each for each in frame["controls"] if each["name"] == name)


def assert_alike(found, expected):
    """Equal texts, and numbers that differ by rounding alone."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_alike(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_alike(*pair)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)
    else:
        assert found == expected


NUMBERS = """([values, shares]) => {
    const { number, percent, finePercent } = document.querySelector("#page").source.constructor.formats;
    return [values.map(number), shares.map(percent), shares.map(finePercent)];
}"""


@pytest.fixture(scope="module")
def hostile(browser, tmp_path_factory):
    """A page of a model and a photo whose names hold scripts."""
    torch.manual_seed(0)
    attack = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, embed_dim=48, depth=2, num_heads=2, num_classes=4
    )
    model.label_names = [f"{attack}{k}" for k in range(4)]
    path = save_page(
        model, {attack: samples()[NAME]}, tmp_path_factory.mktemp("hostile") / "page.html"
    )
    page, requests, errors = opened(browser, path)
    yield page, path, attack, requests, errors
    page.close()


def test_saved_page_runs_no_script_in_names(hostile):
    page, path, attack, requests, errors = hostile
    for view in ("lens", "contributions", "relevance"):
        frame = page.evaluate(FRAME, [{"set": {"view": view}, "number": 10**15}])
        assert attack in frame["panels"][0]["words"]
    assert attack in page.locator("footer").inner_text() and page.title().startswith(attack)
    assert page.evaluate("window.hit") is None and requests == [path.as_uri()] and errors == []


def test_saved_page_refuses_a_dropped_or_pasted_photo(hostile):
    """Otherwise the browser would leave the page for the photo that was dropped."""
    page = hostile[0]
    assert page.evaluate(
        "() => !document.dispatchEvent(new DragEvent('dragover', { cancelable: true }))"
    )
    for event in ("new DragEvent('drop', {", "new ClipboardEvent('paste', { bubbles: true,"):
        page.evaluate(f"() => document.dispatchEvent({event} cancelable: true }}))")
        assert (
            page.locator(".alert").inner_text()
            == "A saved page takes no other photos. Use vitlens app."
        )
        page.get_by_role("button", name="Close").click()
        assert page.locator(".alert").is_hidden()


def test_saved_page_formats_numbers_as_python(hostile):
    page, chance = hostile[0], random.Random(0)
    values = [chance.choice((-1, 1)) * 10 ** chance.uniform(-8, 6) for _ in range(2000)]
    values += [0, 1, 0.125, 2.125, 0.5, 1000, 999.5, 0.0001, 0.00001, 1e5, 12.25, 12.35, 1 / 3]
    shares = [chance.random() for _ in range(500)] + [
        0,
        1,
        0.005,
        0.0049,
        0.125,
        0.375,
        0.625,
        0.994999,
        0.995,
    ]
    shares += [1 / tokens for tokens in range(1, 600)] + [k / 400 for k in range(401)]
    found = page.evaluate(NUMBERS, [values, shares])
    assert found == [
        [*map(number, values)],
        [*map(percent, shares)],
        [*map(fine_percent, shares)],
    ]


BESIDE = """([record, targets]) => {
    const { predictionBeside } = document.querySelector("#page").source.constructor.formats;
    return targets.map((target) => predictionBeside({ ...record, label: String }, target));
}"""


@pytest.mark.parametrize("kind", OUTPUTS)
def test_saved_page_states_the_prediction_as_python(hostile, kind):
    chance, targets = random.Random(0), range(6)
    for scale in (0.4, 0.6, 1.0):
        shares = [scale * chance.random() for _ in targets]
        score = number if kind == "value" else percent
        words = [f"“{k}” ({score(share)})" for k, share in enumerate(shares)]
        expected = [
            prediction_beside(kind, torch.tensor(shares), k, words.__getitem__) for k in targets
        ]
        record = {"outputs": kind, "shares": shares}
        assert hostile[0].evaluate(BESIDE, [record, [*targets]]) == expected
        assert any(expected) == (kind != "value")


def test_saved_page_names_versions_hash_and_photo(hostile):
    footer = hostile[0].locator("footer").inner_text()
    assert re.search(
        r"weights [0-9a-f]{12}\. Written by vitlens \S+, torch \S+, timm \S+\. This file contains",
        footer,
    )


@pytest.mark.parametrize("place", [(9, 0), (0, 9), (-1, 0)])
def test_question_about_a_patch_outside_of_the_grid_is_refused(hostile, place):
    row, col = place
    hostile[0].evaluate(FRAME, [{"set": {"view": "attention"}}])
    problem = f"There is no patch in row {row}, column {col}."
    for question in ({"ask": "look", "row": row, "col": col}, {"ask": "value", "key": [row, col]}):
        answer, _ = hostile[0].evaluate(ASK, question)
        assert answer == {"problem": problem}, question


def test_layers_that_a_view_has_swept_are_not_measured_again(vit, browser, tmp_path):
    """A rollout sweeps all layers before the page measures them for the mosaic."""
    photos = {name: samples()[name] for name in (NAME, "coffee")}
    page, _, errors = opened(browser, save_page(vit(), photos, tmp_path / "page.html"))
    page.evaluate("""async () => {
        const { source } = document.querySelector("#page");
        source.send({ set: { photograph: "coffee", view: "attention" } });
        source.send({ set: { view: "rollout" } });
        await source.turn;
        while (source.timer) await new Promise((done) => setTimeout(done, 2));
    }""")
    frame = page.evaluate(FRAME, [{"set": {"view": "attention"}}])
    assert frame["mosaic"]["distances"] and errors == []
    page.close()


ASK = """(question) => new Promise((done) => {
    const { source } = document.querySelector("#page");
    const take = (content, buffers) => {
        source.off("msg:custom", take);
        done([content.answer, buffers.map((view) => btoa(String.fromCharCode(...new Uint8Array(view.buffer))))]);
    };
    source.on("msg:custom", take);
    source.send({...question, number: -1});
})"""


@pytest.mark.parametrize(
    "size",
    [(48, 80), *(pytest.param(size, marks=pytest.mark.slow) for size in (64, (70, 83)))],
)
def test_saved_page_shows_covered_photos(vit, browser, tmp_path, size):
    """Also of a map with ties, on a grid that is not square, and with a margin that no patch covers."""
    model, image = vit(img_size=size), samples()[NAME]
    path = save_page(model, {NAME: image}, tmp_path / "page.html", scores=True)
    page, _, errors = opened(browser, path)
    x = preprocess(model, image, size=built_size(model))
    maps = {k: grad_cam(model, x, k) for k in model(x)[0].topk(5).indices.tolist()}
    target = min(maps, key=lambda k: maps[k].unique().numel())
    assert maps[target].unique().numel() < maps[target].numel()
    page.evaluate(FRAME, [{"set": {"view": "grad_cam", "target": target}, "number": 10**15}])
    assert_covered(page, page, model, x, maps[target], target)
    assert errors == []
    page.close()


@pytest.mark.parametrize("kind", ["class token", "mean"])
def test_saved_page_answers_as_explorer(vit, browser, tmp_path, kind):
    """The numbers behind a weight, the map under the pointer and the tour, against those of the model itself."""
    model, image = vit(**MODELS[kind]), samples()[NAME]
    path = save_page(model, {NAME: image}, tmp_path / "page.html", scores=True)
    page, _, errors = opened(browser, path)
    explorer = Reference(model, image, False).page
    for head, query, key in (
        (1, "readout", [1, 2]),
        ("mean", [2, 1], [0, 3]),
        ("max", "readout", None),
        (2, 3, 0),
    ):
        question = {"ask": "value", "layer": 1, "head": head, "query": query, "key": key}
        shown, _ = page.evaluate(ASK, question)
        wanted = plain(explorer.look_up(question, lambda: None)[0])
        assert shown.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, float) or (
                isinstance(value, list) and value and isinstance(value[0], float)
            ):
                limit = 3e-3 * np.abs(value).max()
                assert np.abs(np.array(shown[name]) - value).max() <= limit, name
            else:
                assert shown[name] == value, name
        logits = np.array(shown["logits"])
        assert np.exp(logits)[shown["key"]] / np.exp(logits).sum() == pytest.approx(
            shown["weight"], abs=1e-6
        )
        assert np.dot(shown["q"], shown["k"]) * shown["scale"] == pytest.approx(
            logits[shown["key"]], rel=1e-6
        )
    shown, (values, _) = page.evaluate(ASK, {"ask": "look", "row": 1, "col": 3})
    wanted, (right, _) = explorer.look_up({"ask": "look", "row": 1, "col": 3}, lambda: None)
    right = np.frombuffer(right, "<f4")
    assert (
        shown["title"] == wanted["title"]
        and np.abs(floats(values) - right).max() <= 3e-3 * right.max()
    )
    assert page.evaluate(ASK, {"ask": "tour"})[0] == plain(
        explorer.look_up({"ask": "tour"}, lambda: None)[0]
    )
    walk(page)
    assert errors == []
    page.close()


def assert_tour(found, exact):
    """Equal texts and whole numbers, and numbers that Python rounds to three or more digits."""
    if isinstance(exact, dict):
        assert {*exact} - {*found} <= {"channels", "table"}
        for name in found:
            assert_tour(found[name], exact[name])
    elif exact == []:
        assert found == []
    elif np.array(exact).dtype.kind == "f":
        found, exact = np.array(found), np.array(exact)
        assert (
            found.shape == exact.shape and np.abs(found - exact).max() <= 5e-3 * np.abs(exact).max()
        )
    elif isinstance(exact, list) and exact and isinstance(exact[0], list):
        for pair in zip(found, exact, strict=True):
            for each in zip(*pair, strict=True):
                assert_tour(*each)
    else:
        assert found == exact


TOURED = MODELS | {"not enlarged": {"img_size": 240}}


def without_numbers(sentences):
    return [re.sub(r"[−\d][\d.e−]*", "#", each) for each in sentences]


def numbers_in(sentences):
    """The numbers of each sentence."""
    number = re.compile(r"−?\d+(?:\.\d+)?(?:e−\d+)?")
    return [
        [float(each.replace("−", "-")) for each in number.findall(words)] for words in sentences
    ]


@pytest.mark.parametrize(
    "kind",
    [kind if kind in EVERY_DAY else pytest.param(kind, marks=pytest.mark.slow) for kind in TOURED],
)
def test_saved_page_makes_the_tour_of_any_patch(vit, browser, tmp_path, kind):
    """Its numbers for other patches, layers, heads and keys equal Python's."""
    model, image = vit(num_classes=5, **TOURED[kind]), samples()[NAME]
    path = save_page(model, {NAME: image}, tmp_path / "page.html")
    page, _, errors = opened(browser, path)
    explorer = Reference(model, image, False)
    for values, question in (
        ({"row": 0, "column": 3, "layer": 0, "head": 1}, {}),
        ({"row": 2, "column": 1, "layer": 1, "head": "mean"}, {}),
        ({"row": 1, "column": 0, "layer": 2, "head": 2}, {"head": 0, "key": [2, 2]}),
    ):
        page.evaluate(FRAME, [{"set": values, "number": 10**15}])
        explorer.send(**values)
        question |= {"ask": "tour"}
        found = page.evaluate(ASK, question)[0]
        exact = plain(explorer.page.look_up(question, lambda: None)[0])
        assert without_numbers(found.pop("sentences")) == without_numbers(exact.pop("sentences"))
        simply, wanted = found.pop("simply"), exact.pop("simply")
        assert without_numbers(simply) == without_numbers(wanted)
        for ours, theirs in zip(numbers_in(simply), numbers_in(wanted), strict=True):
            assert ours == pytest.approx(theirs, rel=6e-3, abs=0.11)  # one decimal
        assert found.keys() == exact.keys()
        assert_tour(found, exact)
    assert errors == []
    page.close()


def content_of(path):
    """The data of a file, without its arrays."""
    data = re.search(r'id="data">([^<]+)</script>', path.read_text("utf-8"))[1]
    packed = gzip.decompress(base64.b64decode(data))
    return json.loads(packed[4 : 4 + int.from_bytes(packed[:4], "little")])["value"], packed


@pytest.mark.slow
def test_save_page_leaves_out_layers_above_the_limit(vit, browser, tmp_path, monkeypatch):
    """The page says which, and has no views that need them all."""
    photos, path = {"one": samples()[NAME], "two": samples()["coffee"]}, tmp_path / "page.html"
    model = vit(num_classes=3)
    _, packed = content_of(save_page(model, photos, path))
    total = len(packed) - 4 - int.from_bytes(packed[:4], "little")  # bytes of all arrays
    layer = 2 * 2 * 3 * 17 * 96  # bytes of queries, keys and tokens of both photos
    monkeypatch.setattr(in_page, "LIMIT", 10**6 + (total - layer / 2) * 4 / 3)
    save_page(model, photos, path)
    page, requests, errors = opened(browser, path)
    frame = page.evaluate(FRAME, [])
    menu = [value for _, value in control(frame, "view")["options"]]
    assert (
        "rollout and layers 1." in frame["about"] and "rollout" not in menu and "attention" in menu
    )
    assert [value for _, value in control(frame, "layer")["options"]] == [0, 2]
    frame = page.evaluate(FRAME, [{"set": {"photograph": "two", "layer": 0}, "number": 10**15}])
    expected = Reference(model, samples()["coffee"], False).send(layer=0, photograph=NAME)
    shown, right = (
        floats(frame["panels"][0]["values"]),
        np.frombuffer(expected["panels"][0]["values"], "<f4"),
    )
    assert np.abs(shown - right).max() <= 3e-3 * right.max() and frame["message"] == ""
    tour = page.evaluate(ASK, {"ask": "tour"})[0]
    assert [values is None for values in tour["depth"]] == [False, True, False]
    assert len(walk(page)) == 8
    frame = page.evaluate(FRAME, [{"set": {"layer": 1}, "number": 10**15}])
    assert frame["message"] == "Layer has no value 1." and control(frame, "layer")["value"] == 0
    assert frame["mosaic"]["distances"] is None and errors == [] and requests == [path.as_uri()]
    page.close()
    monkeypatch.setattr(in_page, "LIMIT", 10_000)
    with pytest.raises(
        ValueError, match="over the limit of .* Give fewer images or a smaller size"
    ):
        save_page(model, photos, path)


def test_save_page_refuses_biases_between_tokens(tmp_path):
    model = timm.create_model(
        "beit_base_patch16_224", img_size=64, embed_dim=48, depth=2, num_heads=2
    ).eval()
    with pytest.raises(
        UnsupportedModelError, match="adds a bias to each pair of tokens in .*vitlens app"
    ):
        save_page(model, {NAME: samples()[NAME]}, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_save_page_stores_exact_queries_where_half_precision_would_show(vit, tmp_path):
    model = vit(num_classes=3)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[:192].mul_(20)  # of queries and keys
    content, _ = content_of(save_page(model, {NAME: samples()[NAME]}, tmp_path / "page.html"))
    assert [layer["q"]["type"] for layer in content["records"][0]["layers"]] == ["f2", "f4", "f2"]


def test_page_command_writes_photos_without_metadata(tmp_path):
    photo, exif = samples()[NAME], Image.Exif()
    exif[0x010E], exif[0x8825] = "a secret place", {1: "N", 2: (48.0, 51.0, 30.0)}
    photo.save(tmp_path / "cat.jpg", exif=exif)
    folder = saved_model(tmp_path / "vit")
    done = vitlens("page", folder, tmp_path / "cat.jpg", "--out", tmp_path / "out" / "cat.html")
    path = tmp_path / "out" / "cat.html"
    assert re.fullmatch(
        rf"{re.escape(str(path))}: 0\.\d MB\. This file contains the photo: cat\.jpg\.\n",
        done.stdout,
    )
    content, packed = content_of(path)
    assert (
        b"secret" not in packed
        and b"Exif" not in packed
        and str(tmp_path) not in path.read_text("utf-8")
    )
    assert content["state"]["photograph"] == "cat.jpg"


def test_explorer_saves_its_photo_and_state(vit, tmp_path):
    explorer = widgets.explore(vit(num_classes=3), samples()["coffee"])
    explorer.set(view="rollout", layer=1, row=2, column=3)
    content, _ = content_of(explorer.save_page(tmp_path / "page.html"))
    assert {"view": "rollout", "layer": 1, "row": 2, "column": 3}.items() <= content[
        "state"
    ].items()
    assert len(content["records"]) == 1 and explorer.page.state["view"] == "rollout"
    with pytest.raises(TypeError, match="Only an explorer"):
        widgets.positions(vit()).save_page(tmp_path / "page.html")


def walk(page):
    """Sentences of the tour, step by step to the end."""
    page.get_by_role("button", name="Tour", exact=True).click()
    said = []
    for step in range(1, 9):
        page.wait_for_selector(f".tour header:has-text('Step {step} of 8')")
        said.append(page.locator(".tour .exact").text_content())
        assert (
            page.locator(".tour .scene canvas, .tour .scene svg").count()
            and "undefined" not in said[-1]
        )
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Escape")
    return said


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"reg_tokens": 3}, {2: "with 4 prefix tokens"}),
        (
            {"global_pool": "avg", "class_token": False, "fc_norm": False},
            {2: "there are 16 tokens."},
        ),
        ({"num_classes": 0}, {7: "the model has no classes"}),
        ({"name": "vit_small_patch16_rope_224"}, {2: "adds no vector for its place"}),
    ],
)
def test_tour_fits_the_model(vit, browser, tmp_path, kwargs, words):
    path = save_page(vit(**kwargs), {NAME: samples()[NAME]}, tmp_path / "page.html")
    page, _, errors = opened(browser, path)
    said = walk(page)
    for step, part in words.items():
        assert part in said[step]
    page.evaluate("""() => {
        const { source } = document.querySelector("#page");
        const get = source.get.bind(source);
        source.get = (name) => (name === "frame" ? { ...get(name), tour: true } : get(name));
        source.emit("change:frame");
    }""")
    page.get_by_role("button", name="Tour", exact=True).click()
    page.wait_for_selector(".touring .tour[open]")
    assert page.locator(".body").is_hidden() and page.locator(".questions").is_hidden()
    assert page.get_by_role("button", name="Close the tour").count() == 0
    page.get_by_role("button", name="Step 8").click()
    page.locator(".tour .next", has_text="vitlens_explorer.explore").wait_for()
    assert page.locator(".tour .next button").count() == 0
    page.get_by_role("button", name="Step 1").click()
    before = page.locator(".tour .exact").text_content()
    page.locator(".tour .scene .picture").click(position={"x": 5, "y": 5})
    page.wait_for_function(
        "before => document.querySelector('.tour .exact').textContent !== before", arg=before
    )
    assert page.locator(".touring .tour[open] header", has_text="Step 1 of 8").count() == 1
    assert errors == []
    page.close()
