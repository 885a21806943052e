"""The explorer without a browser: what is shown against independent computations, and what happens to bad input."""

import copy
import gc
import io
import json
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from data_support import png, saved
from PIL import Image, ImageOps
from sklearn.decomposition import PCA
from test_capture import unfused_maps

from vitlens import TokenGrid, UnsupportedModelError, capture, widgets
from vitlens.attention import rollout
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.recorder.supported import family
from vitlens.widgets import subjects, worker
from vitlens.widgets.comparison import moved
from vitlens.widgets.saving import captioned

PICTURE = samples()["chelsea"]
MODELS = {
    "class token": {},
    "mean of patches": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "mean, with a class token": {"global_pool": "avg"},
    "registers": {"reg_tokens": 3},
    "distilled": {"name": "deit_tiny_distilled_patch16_224"},
}
every = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture
def explorer(vit):
    return widgets.explore(vit(), PICTURE)


def values(widget, name="picture"):
    panel = next(panel for panel in widget.frame["panels"] if panel["name"] == name)
    found = np.frombuffer(panel["values"], "<f4").reshape(panel["rows"], panel["cols"], -1)
    return found[..., 0] if found.shape[-1] == 1 else found


def words(widget):
    return " ".join(panel["words"] for panel in widget.frame["panels"])


def reference(model, picture=PICTURE, size=None, **kwargs):
    """Attention (L, H, T, T) by timm's unfused path, the outputs of the blocks (L, T, D), and the logits."""
    seen = []
    handles = [block.register_forward_hook(lambda _, __, output: seen.append(output[0])) for block in model.blocks]
    x = preprocess(model, picture, size=size or model.patch_embed.img_size, **kwargs)
    with torch.no_grad():
        logits = model(x)[0]
    for handle in handles:
        handle.remove()
    return torch.cat(unfused_maps(model, x)).numpy(), torch.stack(seen).numpy(), logits


def readout(model, tokens):
    """What the head reads, by what timm's forward_head does to marked tokens."""
    row, prefix = np.zeros(tokens), model.num_prefix_tokens
    if hasattr(model, "head_dist"):
        row[:2] = 0.5
    elif model.global_pool == "avg":
        row[prefix:] = 1 / (tokens - prefix)
    else:
        row[0] = 1
    return row


def assert_attention(explorer, picture=PICTURE, shape=(4, 4), **kwargs):
    """The map is the attention from the class token in the last layer, the mean of the heads."""
    maps, _, _ = reference(explorer.model, picture, **kwargs)
    np.testing.assert_allclose(values(explorer), maps[-1].mean(0)[0, 1:].reshape(shape), atol=1e-6)


@every
def test_attention_is_that_of_timms_unfused_path(vit, kind):
    model = vit(**MODELS[kind])
    explorer = widgets.explore(model, PICTURE)
    maps, _, _ = reference(model)
    prefix, row = model.num_prefix_tokens, readout(model, maps.shape[-1])
    tokens = {token: name for token, name in enumerate(family(model).prefix) if row[token] != 1}  # 1 is the read-out
    for controls, weights in [
        ({"layer": 1, "head": 2}, row @ maps[1, 2]),
        ({"layer": 0, "head": "max", "row": 1, "column": 3}, maps[0].max(0)[prefix + 7]),
        ({"head": "mean"}, maps[0].mean(0)[prefix + 7]),
        *(({"query": token}, maps[0].mean(0)[token]) for token in tokens),
    ]:
        explorer.set(**controls)
        np.testing.assert_allclose(values(explorer), weights[prefix:].reshape(4, 4), atol=1e-6)
        assert tokens.get(controls.get("query"), "Attention") in words(explorer)


@every
def test_rollout_and_received_are_those_of_whole_maps(vit, kind):
    model = vit(**MODELS[kind])
    explorer = widgets.explore(model, PICTURE)
    maps, _, _ = reference(model)
    prefix, tokens = model.num_prefix_tokens, maps.shape[-1]
    mixed = (maps.mean(1) + np.eye(tokens)) / 2
    explorer.set(view="rollout")
    expected = readout(model, tokens) @ mixed[2] @ mixed[1] @ mixed[0]
    np.testing.assert_allclose(values(explorer), expected[prefix:].reshape(4, 4), atol=1e-6)
    explorer.set(layer=1, row=2, column=0)
    expected = (mixed[1] @ mixed[0])[prefix + 8]
    np.testing.assert_allclose(values(explorer), expected[prefix:].reshape(4, 4), atol=1e-6)
    assert "through layers 0 to 1" in words(explorer)
    explorer.set(view="received", head=1)
    np.testing.assert_allclose(values(explorer), maps[1, 1].mean(0)[prefix:].reshape(4, 4), atol=1e-6)


@every
def test_tokens_are_those_of_hooks(vit, kind):
    model = vit(**MODELS[kind])
    explorer = widgets.explore(model, PICTURE)
    _, layers, logits = reference(model)
    prefix = model.num_prefix_tokens
    explorer.set(view="norms", layer=2)
    np.testing.assert_allclose(values(explorer), np.linalg.norm(layers[2], axis=-1)[prefix:].reshape(4, 4), rtol=1e-5)
    explorer.set(view="similarity", layer=1, row=3, column=1)
    unit = layers[1] / np.linalg.norm(layers[1], axis=-1, keepdims=True)
    np.testing.assert_allclose(values(explorer), (unit @ unit[prefix + 13])[prefix:].reshape(4, 4), atol=1e-5)
    explorer.set(view="components")
    scores = PCA(3).fit_transform(layers[1][prefix:].astype(np.float64))
    found = values(explorer).reshape(16, 3)
    for k in range(3):
        low, high = scores[:, k].min(), scores[:, k].max()
        expected = (scores[:, k] - low) / (high - low)
        expected = 1 - expected if high < -low else expected
        np.testing.assert_allclose(found[:, k], expected, atol=1e-4)
    first = explorer.frame["bars"][0]
    assert first["share"] == pytest.approx(logits.softmax(-1).max().item(), abs=1e-6)
    assert first["name"] == str(logits.argmax().item()) == str(first["number"]) and not first["now"]


def test_the_picture_is_what_the_model_saw(vit):
    explorer = widgets.explore(vit(img_size=224, patch_size=32), PICTURE)
    shown = np.asarray(Image.open(io.BytesIO(explorer.pictures["picture"])))
    assert shown.shape == (448, 448, 3)
    seen = preprocess(explorer.model, PICTURE)[0].permute(1, 2, 0).numpy()
    config = explorer.model.pretrained_cfg
    expected = np.rint((seen * config["std"] + config["mean"]) * 255).astype(np.uint8)
    enlarged = Image.fromarray(expected).resize((448, 448), Image.Resampling.BICUBIC)
    assert np.abs(shown.astype(int) - np.asarray(enlarged)).max() <= 1


def test_words_say_what_is_shown(explorer):
    assert "Attention from the read-out (class token), layer 2, mean of the heads" in words(explorer)
    assert "not renormalized" in words(explorer) and "64 × 64 pixels" in words(explorer)
    maps, _, _ = reference(explorer.model)
    assert f"{100 * maps[2].mean(0)[0, 0]:.0f} % goes to the class token" in words(explorer)
    explorer.set(row=1, column=2, head=0, layer=1)
    assert "Attention from the patch in row 1, column 2, layer 1, head 0" in words(explorer)
    low, high = values(explorer).min(), values(explorer).max()
    assert f"{low:.3g} to {high:.3g}" in words(explorer)
    assert explorer.frame["panels"][0]["ends"] == ("0", f"{high:.3g}")
    assert explorer.frame["panels"][0]["selected"] == (1, 2)
    explorer.set(view="norms")
    assert explorer.frame["panels"][0]["selected"] is None and not explorer.frame["panels"][0]["picks"]


def test_colors(explorer):
    scale = lambda: explorer.frame["panels"][0]["scale"]  # noqa: E731
    assert scale()["low"] == 0 and scale()["high"] == pytest.approx(values(explorer).max())
    shown = np.frombuffer(scale()["colors"], np.uint8).reshape(256, 4)
    assert shown[[0, -1]].tolist() == [[68, 1, 84, 0], [253, 231, 37, 191]]  # viridis, from clear to 0.75
    np.testing.assert_allclose(shown[:, 3], np.linspace(0, 191.25, 256), atol=0.5)
    explorer.set(opacity="even", strength=0.5)
    assert set(scale()["colors"][3::4]) == {128}
    explorer.set(stretch=True, colors="gray")
    assert scale()["low"] == pytest.approx(values(explorer).min()) and scale()["colors"][-4:-1] == b"\xff\xff\xff"
    explorer.set(stretch=False, colors="", view="similarity", opacity="value")
    assert (scale()["low"], scale()["high"]) == (-1, 1)
    signed = np.abs(np.linspace(-1, 1, 256)).clip(1 / 3)
    np.testing.assert_allclose(list(scale()["colors"][3::4]), 127.5 * signed, atol=0.5)


def test_mean_distance_follows_the_first_map(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    deadline = time.monotonic() + 60
    while explorer.frame["dots"] is None and time.monotonic() < deadline:
        time.sleep(0.02)
    maps, _, _ = reference(model)
    y, x = np.divmod(np.arange(16), 4)
    distances = 16 * np.hypot(y[:, None] - y, x[:, None] - x)
    expected = (maps[:, :, 1:, 1:] * distances).sum(-1).mean(-1)
    np.testing.assert_allclose(explorer.frame["dots"]["values"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("layer", 3, "'Layer' must be a whole number from 0 to 2, got 3"),
        ("layer", 1.5, "'Layer' must be a whole number"),
        ("head", True, "'Head' must be one of 'mean', 'max', 0, 1, 2, got True"),
        ("head", 9, "'Head' must be one of 'mean', 'max', 0, 1, 2, got 9"),
        ("row", -1, "'Row' must be a whole number from 0 to 3"),
        ("view", "saliency", "'View' must be one of"),
        ("smooth", 1, "'Smooth' must be True or False"),
        ("strength", float("nan"), "'Strength' must be a number from 0 to 1"),
        ("query", [0, 0], "'Query' must be one of"),
        ("nonsense", 1, "There is no control 'nonsense' here; there are photograph"),
    ],
)
def test_controls_refuse_what_there_is_not(explorer, name, value, match):
    state, picture = dict(explorer.state), explorer.frame["panels"]
    with pytest.raises(ValueError, match=match):
        explorer.set(layer=0, **{name: value}) if name != "layer" else explorer.set(layer=value)
    assert explorer.state == state and explorer.frame["panels"] == picture and match[:8] in explorer.frame["message"]
    explorer.set(layer=1)
    assert explorer.frame["message"] == ""


def browser(widget, content, *buffers):
    """What the page sends."""
    widget._receive(widget, content, list(buffers))
    assert widget.wait(60)
    return widget.frame["message"]


def test_a_click_asks_from_the_patch(explorer):
    assert browser(explorer, {"pick": "picture", "row": 3, "col": 1, "number": 7}) == ""
    assert explorer.frame["answers"] == 7 and explorer.frame["panels"][0]["selected"] == (3, 1)
    assert {c["name"]: c["value"] for c in explorer.frame["controls"]}["query"] == "patch"
    assert "'Row' must be a whole number from 0 to 3, got 4" in browser(
        explorer, {"pick": "picture", "row": 4, "col": 1}
    )
    assert explorer.frame["panels"][0]["selected"] == (3, 1)


def test_a_click_and_a_switch_open_no_file(vit, monkeypatch):
    """Opening the sample photographs to say how many they are took ten times as long as the rest of a click."""
    explorer = widgets.explore(vit(num_classes=1000), PICTURE)  # as many classes as ImageNet, whose names are looked up
    explorer.wait()
    monkeypatch.setattr(Image, "open", None)
    monkeypatch.setattr("timm.data.ImageNetInfo", None)
    assert browser(explorer, {"pick": "picture", "row": 3, "col": 1, "number": 8}) == ""
    explorer.set(view="rollout", layer=1)
    explorer.set(way="zero", off=[(0, 1)])
    assert "head 1 of layer 0" in words(explorer)


TURNED = Image.Exif()
TURNED[274] = 6  # to be turned by 90 degrees
SMALL, CUP = PICTURE.resize((80, 60)), samples()["coffee"]
UPLOADS = {
    "PNG": (saved(CUP), ""), "JPEG": (saved(CUP, "JPEG"), ""), "WEBP": (saved(CUP, "WEBP"), ""),
    "from a phone that lay on its side": (saved(PICTURE.rotate(90, expand=True), exif=TURNED), ""),
    "animation": (saved(SMALL, "GIF", save_all=True, append_images=[CUP.resize((80, 60))]),
                  "cup.bin holds 2 pictures; the first is shown."),
    "from a phone that adds a preview": (saved(PICTURE, "MPO", save_all=True, append_images=[SMALL]), ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", UPLOADS)
def test_uploads(explorer, kind):
    data, message = UPLOADS[kind]
    assert browser(explorer, {"upload": "cup.bin"}, memoryview(data)) == message
    assert explorer.state["photograph"] == "your picture"
    assert_attention(explorer, ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    explorer.set(photograph="the picture given")
    assert_attention(explorer)


BAD = {
    "notes.png": (b"not a picture at all", "in no format"),
    "cut.png": (saved(PICTURE)[:20000], "incomplete or damaged"),
    "bomb.png": (png(30_000, 30_000), "exceeds limit"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_uploads_leave_the_last_good_picture(explorer, name):
    explorer.set(layer=1, row=2)
    before = dict(explorer.state), explorer.frame["panels"], explorer.pictures
    message = browser(explorer, {"upload": name}, BAD[name][0])
    assert name in message and BAD[name][1] in message and message.endswith(".")
    assert (dict(explorer.state), explorer.frame["panels"], explorer.pictures) == before
    explorer.set(layer=2)
    assert explorer.frame["message"] == ""


def test_a_picture_in_its_own_shape(vit):
    model = vit(dynamic_img_size=True)
    explorer = widgets.explore(model, PICTURE)  # 451 × 300
    explorer.set(whole=True)
    panel = explorer.frame["panels"][0]
    assert (panel["rows"], panel["cols"]) == (3, 5)
    shown = Image.open(io.BytesIO(explorer.pictures["picture"]))
    assert shown.size == (5 * 16 * 5, 3 * 16 * 5)
    assert_attention(explorer, PICTURE.resize((80, 48), Image.Resampling.BICUBIC), (3, 5), size=(48, 80), whole=True)
    explorer.set(row=2, column=4, whole=False)
    explorer.set(row=3, whole=True)
    assert explorer.state["row"] == 2  # the grid has three rows now
    assert "squeezed" not in words(explorer)
    explorer = widgets.explore(model, PICTURE.resize((640, 10)))
    explorer.set(whole=True)
    assert (explorer.subject.grid.rows, explorer.subject.grid.cols) == (1, 16)
    assert "The picture is squeezed 4.0 times." in words(explorer)
    fixed = widgets.explore(vit(), PICTURE)
    assert "whole" not in [control["name"] for control in fixed.frame["controls"]]


def test_a_model_that_pools_nothing_has_views_and_no_classes(vit):
    explorer = widgets.explore(vit(global_pool=""), PICTURE)
    assert explorer.frame["bars"] == []
    views = next(control for control in explorer.controls() if control.name == "view")
    assert "attention" in dict(map(reversed, views.options)) and len(views.options) == 6


def test_without_a_readout_the_query_is_a_patch(vit):
    explorer = widgets.explore(vit(global_pool="max", class_token=False), PICTURE)
    assert "from the patch in row 2, column 2" in words(explorer)
    assert explorer.frame["controls"][4]["options"] == (("patch", "patch"),)


def test_refused_models_and_pictures(vit):
    for make in (widgets.explore, widgets.heads, lambda m: widgets.compare(vit(), m)):
        with pytest.raises(UnsupportedModelError, match="windows"):
            make(timm.create_model("swin_tiny_patch4_window7_224"))
    with pytest.raises(ValueError, match="No such file"):
        widgets.explore(vit(), "no-such.png")
    broken = vit()
    broken.head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        widgets.explore(broken, PICTURE)


def test_weights_that_changed_are_seen(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    before = values(explorer)
    with torch.no_grad():
        model.blocks[2].attn.qkv.weight.mul_(1.5)
    explorer.set(strength=0.5)
    assert np.abs(values(explorer) - before).max() > 1e-4
    assert_attention(explorer)


def test_captures_are_kept_within_a_bound(vit, monkeypatch):
    made, model = [], vit()  # work in the background for the widgets of other tests does not count
    run = subjects.Subject.__init__
    monkeypatch.setattr(
        subjects.Subject, "__init__", lambda *args: (args[1] is model and made.append(1), run(*args))[1]
    )
    monkeypatch.setattr(subjects, "_subjects", subjects.OrderedDict())
    explorer = widgets.explore(model, PICTURE)
    explorer.set(photograph="coffee")
    explorer.set(photograph="the picture given", layer=0)
    widgets.heads(model, PICTURE)
    assert len(made) == 2
    one = explorer.subject.bytes
    assert one == 3 * (3 * 17 * 96) * 4  # of each layer q, k and tokens
    monkeypatch.setattr(subjects, "CACHE", 2.5 * one)
    for name in ("rocket", "china", "flower"):
        explorer.set(photograph=name)
    assert len(subjects._subjects) == 2


def test_pages_that_push_each_other_out_come_to_an_end(vit, monkeypatch):
    """What was made of a picture outlives its capture, so that no page makes it again for ever."""
    monkeypatch.setattr(subjects, "_subjects", subjects.OrderedDict())
    monkeypatch.setattr(subjects, "CACHE", 0)
    model, photographs = vit(), [subjects.Photograph(samples()[name]) for name in ("coffee", "rocket", "china")]
    first = [subjects.subject(model, each) for each in photographs]
    distances = [each.mean_distance() for each in first]
    again = [subjects.subject(model, each) for each in photographs]
    assert len(subjects._subjects) == 2, "a comparison needs two"
    assert again[0] is not first[0] and subjects.subject(model, photographs[1]) is again[1]
    assert all(each.has("distance") for each in again)
    assert all(torch.equal(each.mean_distance(), d) for each, d in zip(again, distances, strict=True))
    with torch.no_grad():
        model.pos_embed += 1.0
    assert not subjects.subject(model, photographs[0]).has("distance"), "of other weights"


def copied(model, other):
    for mine, new in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(new.data)


def given(model, other):
    for mine, new in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = new.data.clone()


def as_a_vector(model, other):
    torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(other.parameters()).detach(), model.parameters()
    )


def another_head(model, other):
    model.head = copy.deepcopy(model.head)
    model.head.weight.data.copy_(other.head.weight.data)


def rows_of_the_head(model, _):
    model.head.weight.data.copy_(model.head.weight.data.roll(3, 0))


def one_head_cut(model, _):
    model.blocks[1].attn.proj.weight.data[:, 32:64] = 0


def pooled(model, _):
    model.global_pool = "avg"


@pytest.mark.parametrize(
    "change",
    [copied, given, as_a_vector, another_head, rows_of_the_head, one_head_cut, pooled],
    ids=lambda c: c.__name__,
)
def test_a_page_is_of_the_weights_that_there_are(vit, change):
    """However other weights came there, map and bars are those of a copy of the model that no page saw before."""
    model = vit()
    page = widgets.explore(model, PICTURE)
    page.set(view="rollout", layer=2)
    before = page.subject
    assert page.subject is before, "made once for the same weights"
    change(model, vit(seed=1))
    page.set(view="rollout", layer=1)
    page.set(layer=2)
    fresh = widgets.explore(copy.deepcopy(model), PICTURE)
    fresh.set(view="rollout", layer=2)
    assert np.array_equal(values(page), values(fresh)) and page.frame["bars"] == fresh.frame["bars"]
    logits = model(preprocess(model, PICTURE, size=(64, 64))).softmax(-1)[0]
    for bar in page.frame["bars"]:
        assert bar["share"] == pytest.approx(logits[bar["number"]].item(), abs=1e-5)
    assert page.subject is not before and page.subject is page.subject


def test_a_buffer_is_of_the_weights_too(vit):
    model = vit()
    model.register_buffer("extra", torch.zeros(3))
    before = subjects.weights(model)
    with worker.RUNNING:
        assert subjects.weights(model) == subjects.weights(model) == before
    model.extra.data[1] = 1.0
    with worker.RUNNING:
        assert subjects.weights(model) != before


def test_what_can_wait_gives_way_to_a_cell(vit):
    """A page that is being scored stops when a cell of the notebook wants the models."""
    entered = threading.Event()

    def cell():
        with worker.RUNNING:
            entered.set()

    with worker.RUNNING:
        thread = threading.Thread(target=cell)
        thread.start()
        while not worker.RUNNING.waiting:
            time.sleep(0.001)
        assert not worker.idle()
        with worker.RUNNING:  # the same thread may take it again
            assert not entered.is_set()
    assert entered.wait(10)
    thread.join()


def test_a_cell_that_is_interrupted_while_it_waits_waits_no_more(vit):
    taken, over = threading.Event(), threading.Event()

    def work():
        with worker.RUNNING:
            taken.set()
            over.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert taken.wait(10)
    stop = threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stop.start()
        with pytest.raises(KeyboardInterrupt), worker.RUNNING:
            pass
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
        thread.join()
    for _ in range(1000):  # pages of other tests may wait too, and get their turn
        if not worker.RUNNING.waiting:
            break
        time.sleep(0.01)
    assert not worker.RUNNING.waiting


def test_captures_go_with_their_model(vit):
    model = vit()
    key = id(model)
    kept = lambda: [known for known in subjects._subjects if known[0] == key]  # noqa: E731
    subjects.subject(model, subjects.Photograph(PICTURE))
    assert len(kept()) == 1
    del model
    gc.collect()
    subjects.subject(vit(seed=1), subjects.Photograph(PICTURE))
    assert not kept()


def test_what_is_no_longer_wanted_is_given_up(vit):
    explorer = widgets.explore(vit(depth=6), PICTURE)
    with pytest.raises(subjects.Superseded):
        explorer.subject.rollout(5, None, "mean", lambda: False)
    asked = []

    def wanted():
        asked.append(1)
        return len(asked) < 4

    with pytest.raises(subjects.Superseded):
        explorer.subject.rollout(5, 3, "mean", wanted)
    assert len(asked) == 4  # not all layers


def test_many_messages_at_once_end_at_the_last(explorer):
    for k in range(60):
        explorer._receive(explorer, {"pick": "picture", "row": k % 4, "col": k % 3, "number": k}, [])
    assert explorer.wait(60)
    assert explorer.frame["answers"] == 59 and explorer.frame["panels"][0]["selected"] == (3, 2)


def test_a_process_may_end_while_a_page_works():
    code = (
        "import threading, torch\n"
        "from vitlens.widgets.worker import ask\n"
        "class Page:\n"
        "    def draw(self):\n"
        "        started.set()\n"
        "        for _ in range(5000): torch.ones(64, 64) @ torch.ones(64, 64)\n"
        "started, page = threading.Event(), Page()\n"
        "ask(page.draw)\n"
        "started.wait()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_error_that_nobody_foresaw_keeps_the_page(explorer, monkeypatch):
    panels = explorer.frame["panels"]
    monkeypatch.setattr(explorer, "view", lambda wanted: 1 / 0)
    with pytest.raises(ValueError, match="could not be drawn .ZeroDivisionError"):
        explorer.set(layer=0)
    assert explorer.frame["panels"] == panels and explorer.state["layer"] == 2
    monkeypatch.undo()
    explorer.set(layer=0)


def test_heads(vit):
    model = vit(num_heads=2)
    page = widgets.heads(model, PICTURE)
    maps, _, _ = reference(model)
    assert (page.frame["panels"][0]["rows"], page.frame["panels"][0]["cols"]) == (2, 3)
    np.testing.assert_allclose(values(page, "heads"), maps[:, :, 0, 1:].max(-1).T, atol=1e-6)
    browser(page, {"pick": "heads", "row": 1, "col": 0})
    np.testing.assert_allclose(values(page), maps[0, 1, 0, 1:].reshape(4, 4), atol=1e-6)
    browser(page, {"pick": "picture", "row": 2, "col": 3})
    np.testing.assert_allclose(values(page), maps[0, 1, 12, 1:].reshape(4, 4), atol=1e-6)
    tiles = np.asarray(Image.open(io.BytesIO(page.pictures["heads"])))
    height, width = tiles.shape[0] // 2, tiles.shape[1] // 3
    brightest = (253, 231, 37)  # viridis
    for head in range(2):
        for layer in range(3):
            r, c = divmod(int(maps[layer, head, 12, 1:].argmax()), 4)
            side = (height - 2) // 4
            y, x = head * height + 1 + r * side + side // 2, layer * width + 1 + c * side + side // 2
            assert tuple(tiles[y, x]) == brightest


def selected(page):
    return [panel["selected"] for panel in page.frame["panels"]]


def test_compare_asks_from_the_same_place(vit):
    fine, coarse = vit(img_size=128), vit(seed=1, depth=2)
    page = widgets.compare(fine, coarse, PICTURE)
    browser(page, {"pick": "left", "row": 5, "col": 2})
    assert selected(page) == [(5, 2), (2, 1)]
    maps, _, _ = reference(coarse)
    np.testing.assert_allclose(values(page, "right"), maps[1].mean(0)[1 + 9, 1:].reshape(4, 4), atol=1e-6)
    browser(page, {"pick": "right", "row": 3, "col": 0})
    assert selected(page) == [(7, 1), (3, 0)]
    page.set(layer_left=0, head_right=1, layer_right=0)
    np.testing.assert_allclose(values(page, "right"), maps[0, 1, 1 + 12, 1:].reshape(4, 4), atol=1e-6)
    other = widgets.compare(vit(reg_tokens=2), coarse, PICTURE)
    with pytest.raises(ValueError, match="has no register 1 to look from"):
        other.set(query=1)


def test_positions(vit):
    model = vit(img_size=(48, 80))
    page = widgets.positions(model)
    table = model.pos_embed[0, 1:].detach().numpy()
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    page.set(row=2, column=3)
    np.testing.assert_allclose(values(page, "one"), (unit @ unit[13]).reshape(3, 5), atol=1e-6)
    browser(page, {"pick": "all", "row": 0, "col": 4})
    np.testing.assert_allclose(values(page, "one"), (unit @ unit[4]).reshape(3, 5), atol=1e-6)
    with pytest.raises(ValueError, match="position"):
        widgets.positions(timm.create_model("vit_medium_patch16_rope_reg1_gap_256", embed_dim=96, depth=1, num_heads=3))


def test_a_picture_that_only_the_model_refuses_does_not_stay(explorer):
    """A strip is a picture, but no model can be shown it; the good upload before it is still there."""
    assert browser(explorer, {"upload": "cup.png"}, saved(samples()["coffee"])) == ""
    before = values(explorer)
    assert "a strip of 3000 × 20 pixels" in browser(
        explorer, {"upload": "strip.png"}, saved(Image.new("L", (3000, 20)))
    )
    assert explorer.state["photograph"] == "your picture" and np.array_equal(values(explorer), before)
    explorer.set(layer=0)
    explorer.set(layer=2)
    np.testing.assert_array_equal(values(explorer), before)


def test_after_a_superseded_draw_the_last_good_page_is_what_was_shown(vit, monkeypatch):
    explorer, drawn = widgets.explore(vit(), PICTURE), []
    view = explorer.view

    def failing(wanted=lambda: True):
        drawn.append(explorer.state["layer"])
        if len(drawn) == 1:
            explorer._post({"set": {"head": 1}}, [])  # somebody asks for more meanwhile
            raise subjects.Superseded
        raise RuntimeError("broken")

    monkeypatch.setattr(explorer, "view", failing)
    with pytest.raises(ValueError, match="could not be drawn .RuntimeError: broken"):
        explorer.set(layer=0)
    assert drawn[0] == 0 and (explorer.state["layer"], explorer.state["head"]) == (2, "mean")
    monkeypatch.setattr(explorer, "view", view)
    explorer.set(strength=0.5)
    assert "layer 2, mean" in words(explorer)


def test_a_widget_may_move_another(vit):
    """From a callback, which runs on the thread that draws."""
    first, second = widgets.explore(vit(), PICTURE), widgets.explore(vit(seed=1), PICTURE)
    first.observe(lambda change: second.set(layer=first.state["layer"]), "frame")
    first.set(layer=1)
    assert first.wait(60) and second.wait(60) and second.state["layer"] == 1 and "layer 1" in words(second)


def test_a_failing_callback_of_the_user_harms_no_widget(vit):
    explorer, other = widgets.explore(vit(), PICTURE), widgets.explore(vit(), PICTURE)
    explorer.observe(lambda change: 1 / 0, "frame")
    explorer._receive(explorer, {"set": {"layer": 1}}, [])
    assert explorer.wait(60)
    other.set(layer=0)
    assert "layer 0" in words(other)


def test_set_returns_when_its_picture_is_drawn(explorer):
    for k in range(200):
        layer = k * 7 % 3
        explorer._receive(explorer, {"pick": "picture", "row": k % 4, "col": 0}, [])
        explorer.set(layer=layer)
        assert f"layer {layer}," in words(explorer)


def test_errors_are_not_lost_when_more_is_asked_at_once(explorer, monkeypatch):
    with subjects.RUNNING:  # the worker waits
        explorer._receive(explorer, {"upload": "notes.png"}, [b"no picture"])
        explorer._receive(explorer, {"set": {"layer": 0}}, [])
    assert explorer.wait(60)
    assert "notes.png" in explorer.frame["message"] and "layer 0" in words(explorer)


def test_wrapped_models(vit):
    model = vit()
    wrapped = widgets.explore(torch.nn.DataParallel(model), PICTURE)
    np.testing.assert_array_equal(values(wrapped), values(widgets.explore(model, PICTURE)))
    widgets.explore(torch.compile(model), PICTURE)


PAINTED = {"model", "words", "photograph", "view", "strength", "smooth", "lines"}
SET = {
    "attention": PAINTED | {"opacity", "colors", "stretch", "layer", "head", "query", "row", "column"},
    "rollout": PAINTED | {"opacity", "colors", "stretch", "layer", "head", "query", "row", "column"},
    "norms": PAINTED | {"opacity", "colors", "stretch", "layer"},
    "components": PAINTED | {"layer"},  # colors of their own
    "relevance": PAINTED | {"opacity", "colors", "stretch", "target", "against"},
}


@pytest.fixture
def save(explorer, monkeypatch):
    """Press `Save`; returns what was sent, as (content, width and height of the figure, arrays)."""
    sent = []
    monkeypatch.setattr(explorer, "send", lambda content, buffers: sent.append((content, *buffers)))

    def save(**message):
        assert browser(explorer, {"press": "save", **message}) == ""
        ((content, figure, arrays),) = sent
        return content, Image.open(io.BytesIO(figure)).size, np.load(io.BytesIO(arrays))

    return save


@pytest.mark.parametrize("view", SET)
def test_what_is_saved_is_what_was_shown(explorer, save, view):
    explorer.set(head=1, target=3, another="4", view=view)
    content, size, arrays = save(number=5)
    name = f"vitlens-{view}" + "-layer2" * ("layer" in SET[view])
    assert content == {"download": [f"{name}.png", f"{name}.npz"], "asked": 5} and min(size) > 500
    np.testing.assert_array_equal(arrays["values"].astype("f4"), values(explorer))
    np.testing.assert_array_equal(arrays["pixels"], explorer.subject.pixels)
    about = json.loads(str(arrays["about"]))
    assert set(about) == SET[view] and about["words"].startswith(words(explorer))
    wanted = {"view": view, "head": "mean" if view == "rollout" else 1, "query": "readout", "layer": 2, "target": 4}
    assert about.items() >= {name: value for name, value in wanted.items() if name in SET[view]}.items()
    if view == "rollout":
        assert explorer.frame["dots"] is None or explorer.frame["dots"]["head"] is None


def test_the_saved_figure_is_as_clear_as_the_page(explorer):
    explorer.set(stretch=True, smooth=False)
    row, col = divmod(int(values(explorer).argmin()), 4)
    place = int((0.35 + 5.1 * (row + 0.5) / 4) * 150), int((0.1 + 5.1 * (col + 0.5) / 4) * 150)
    for opacity, gray in (("value", True), ("even", False)):
        explorer.set(opacity=opacity)
        figure = captioned(explorer.subject, explorer._panel(explorer.view()))
        red, green, blue = Image.open(io.BytesIO(figure)).convert("RGB").getpixel(place[::-1])
        assert (red == green == blue) == gray


def test_pixels_that_no_patch_covers_are_named(vit):
    explorer = widgets.explore(vit(img_size=(70, 64)), PICTURE)
    assert "No patch covers the last 6 pixels at the bottom." in words(explorer)
    assert "at the right" not in words(explorer)
    padded = widgets.explore(vit(dynamic_img_size=True, dynamic_img_pad=True), PICTURE, size=(64, 70))
    assert "The last patches at the right reach 10 pixels beyond the picture." in words(padded)
    with pytest.raises(ValueError, match="does not take this size"):
        widgets.explore(vit(), PICTURE, size=(96, 96))


def test_a_query_and_a_row_at_once(explorer):
    explorer.set(query="readout", row=1)
    assert explorer.state["query"] == "readout" and explorer.state["row"] == 1


def test_compare_with_a_finer_model_on_the_right(vit):
    page = widgets.compare(vit(), vit(img_size=128, seed=1), PICTURE)
    browser(page, {"pick": "right", "row": 4, "col": 4})
    assert selected(page) == [(2, 2), (4, 4)]
    browser(page, {"pick": "right", "row": 5, "col": 4})
    assert selected(page) == [(2, 2), (5, 4)]
    page.set(row=0)
    assert selected(page) == [(0, 2), (1, 5)]


GRIDS = {
    "plain": TokenGrid(4, 4, (16, 16)),
    "finer": TokenGrid(8, 12, (8, 8)),
    "cut": TokenGrid(4, 5, (14, 14), image=(69, 82)),  # 13 and 12 pixels that no patch sees
    "padded": TokenGrid(5, 5, (16, 16), image=(66, 74)),
    "wide": TokenGrid(3, 9, (20, 6), image=(64, 59)),
}


@pytest.mark.parametrize("b", GRIDS)
@pytest.mark.parametrize("a", GRIDS)
def test_the_same_place_is_one_in_pixels(a, b):
    a, b = GRIDS[a], GRIDS[b]
    shares = a.centers(dtype=torch.float64) / torch.tensor(a.image)
    pixels = (shares * torch.tensor(b.image) + 1e-9).long().minimum(torch.tensor(b.image) - 1)
    wanted = b.pixel_patches()[pixels[:, 0], pixels[:, 1]].tolist()
    of, to = (SimpleNamespace(grid=grid) for grid in (a, b))
    found = [moved((r, c), of, to) for r in range(a.rows) for c in range(a.cols)]
    assert [r * b.cols + c for r, c in found] == wanted


def test_compare_with_a_model_that_does_not_see_the_rim(vit):
    """Of 78 pixels, 64 are in patches: the last of them are behind the others on the right."""
    page = widgets.compare(vit(img_size=78), vit(patch_size=8, seed=1), PICTURE)
    browser(page, {"pick": "left", "row": 3, "col": 0})  # its middle is at 56 of 78, 46 of 64
    assert selected(page) == [(3, 0), (5, 0)]
    browser(page, {"pick": "right", "row": 7, "col": 1})  # at 60 of 64, 73 of 78, where no patch is
    assert selected(page) == [(3, 0), (7, 1)]


def test_compare_without_a_readout_on_the_right(vit):
    page = widgets.compare(vit(), vit(global_pool="max", class_token=False), PICTURE)
    assert selected(page) == [(2, 2), (2, 2)]
    query = next(control for control in page.frame["controls"] if control["name"] == "query")
    assert query["options"] == (("class token", 0), ("patch", "patch"))


FAMILIES = {
    "vit_base_patch16_siglip_224": {},  # an attention pool, whose read-out depends on the image
    "deit_tiny_distilled_patch16_224": {},
    "eva02_tiny_patch14_224": {"patch_size": 16},
    "beit_base_patch16_224": {},
    "vit_relpos_small_patch16_224": {},
    "naflexvit_base_patch16_gap": {"img_size": None},
    "vit_small_patch16_18x2_224": {},  # parallel attentions
    "vit_tiny_patch16_224": {"in_chans": 1},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_shown_as_its_capture_says(name):
    torch.manual_seed(0)
    sizes = {"img_size": 64, "embed_dim": 96, "depth": 2, "num_heads": 3, "num_classes": 10} | FAMILIES[name]
    model = timm.create_model(name, **{key: value for key, value in sizes.items() if value is not None}).eval()
    explorer = widgets.explore(model, PICTURE, size=(64, 64))
    x = preprocess(model, PICTURE, size=(64, 64))
    with torch.no_grad(), capture(model) as attn:
        model(x)
    read = attn.grid.readout.reshape(-1, attn.grid.tokens)[0]
    explorer.set(layer=0, head=1)
    expected = attn.grid.image_map(read @ attn[0].weights()[0, 1])
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    explorer.set(row=3, column=0)
    expected = attn.grid.image_map(attn[0].weights(attn.grid.index(3, 0))[0, 1, 0])
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    explorer.set(view="rollout", layer=1)
    np.testing.assert_allclose(values(explorer), rollout(attn, (3, 0))[0], atol=1e-6)
    for view in ("received", "similarity", "components", "norms"):
        explorer.set(view=view)
        assert np.isfinite(values(explorer)).all() and values(explorer).std() > 0
