"""The widgets without a browser: their maps against independent computations, and wrong input."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from data_support import png, saved
from PIL import Image, ImageOps
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity
from test_capture import unfused_maps
from test_plot import snapshots

from vitlens import TokenGrid, UnsupportedModelError, capture, faithfulness, intervene, plot, stream, tokens, widgets
from vitlens.attention import rollout
from vitlens.attribution import METHODS, Method, like, register, relevance
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.recorder.supported import family
from vitlens.widgets import photographs, views
from vitlens.widgets.comparison import moved

SMALL, CUP = samples()["chelsea"].resize((80, 60)), samples()["coffee"]
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


def sample_photographs(model):
    return torch.cat([given(model, image) for image in samples().values()])


def words(widget):
    return " ".join(panel["words"] for panel in widget.frame["panels"])


def given(model, picture=PICTURE):
    return preprocess(model, picture, size=model.patch_embed.img_size)


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
    maps, _, _ = reference(explorer.page.model, picture, **kwargs)
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
    seen = preprocess(explorer.page.model, PICTURE)[0].permute(1, 2, 0).numpy()
    config = explorer.page.model.pretrained_cfg
    expected = np.rint((seen * config["std"] + config["mean"]) * 255).astype(np.uint8)
    enlarged = Image.fromarray(expected).resize((448, 448), Image.Resampling.BICUBIC)
    assert np.abs(shown.astype(int) - np.asarray(enlarged)).max() <= 1


def test_words_say_what_is_shown(explorer):
    assert "Attention from the read-out (class token), layer 2, mean of the heads" in words(explorer)
    assert "not renormalized" in words(explorer) and "64 × 64 pixels" in words(explorer)
    maps, _, _ = reference(explorer.page.model)
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
    assert explorer.wait(60, settled=True)
    maps, _, _ = reference(model)
    y, x = np.divmod(np.arange(16), 4)
    distances = 16 * np.hypot(y[:, None] - y, x[:, None] - x)
    expected = (maps[:, :, 1:, 1:] * distances).sum(-1).mean(-1)
    np.testing.assert_allclose(explorer.frame["dots"]["values"], expected, rtol=1e-5)


REFUSED = {
    "layer": (3, "'Layer' must be a whole number from 0 to 2, got 3"),
    "head": (True, "'Head' must be one of 'mean', 'max', 0, 1, 2, got True"),
    "row": (-1, "'Row' must be a whole number from 0 to 3"),
    "view": ("saliency", "'View' must be one of"),
    "smooth": (1, "'Smooth' must be True or False"),
    "strength": (float("nan"), "'Strength' must be a number from 0 to 1"),
    "nonsense": (1, "There is no control 'nonsense' here; there are photograph"),
}


def test_controls_refuse_impossible_values(explorer):
    state, panels = dict(explorer.page.state), explorer.frame["panels"]
    for name, (value, sentence) in REFUSED.items():
        with pytest.raises(ValueError, match=sentence):
            explorer.set(column=0, **{name: value})
        assert explorer.page.state == state and explorer.frame["panels"] == panels
        assert explorer.frame["message"].startswith(sentence[:8])
    explorer.set(layer=1)
    assert explorer.frame["message"] == ""


def browser(widget, content, *buffers):
    """What the page sends."""
    widget.connection.receive(content, buffers)
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


TURNED = Image.Exif()


UPLOADS = {
    "PNG": (saved(CUP), ""), "JPEG": (saved(CUP, "JPEG"), ""), "WEBP": (saved(CUP, "WEBP"), ""),
    "from a phone that lay on its side": (saved(PICTURE.rotate(90, expand=True), exif=TURNED), ""),
    "animation": (saved(SMALL, "GIF", save_all=True, append_images=[CUP.resize((80, 60))]),
                  ""),
    "from a phone that adds a preview": (saved(PICTURE, "MPO", save_all=True, append_images=[SMALL]), ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", UPLOADS)
def test_uploads(explorer, kind):
    data, message = UPLOADS[kind]
    assert browser(explorer, {"upload": "cup.bin"}, memoryview(data)) == message
    assert explorer.page.state["photograph"] == "cup.bin"
    assert_attention(explorer, ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    explorer.set(photograph="the image given")
    assert_attention(explorer)


BAD = {
    "notes.png": (b"not a picture at all", "in no format"),
    "cut.png": (saved(PICTURE)[:20000], "incomplete or damaged"),
    "bomb.png": (png(30_000, 30_000), "exceeds limit"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_uploads_leave_the_last_good_picture(explorer, name):
    explorer.set(layer=1, row=2)
    before = dict(explorer.page.state), explorer.frame["panels"], explorer.pictures
    message = browser(explorer, {"upload": name}, BAD[name][0])
    assert name in message and BAD[name][1] in message and message.endswith(".")
    assert (dict(explorer.page.state), explorer.frame["panels"], explorer.pictures) == before
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
    assert explorer.page.state["row"] == 2  # the grid has three rows now
    assert "squeezed" not in words(explorer)
    explorer = widgets.explore(model, PICTURE.resize((640, 10)))
    explorer.set(whole=True)
    assert (explorer.page.forward.grid.rows, explorer.page.forward.grid.cols) == (1, 16)
    assert "The image is squeezed 4.0 times." in words(explorer)
    fixed = widgets.explore(vit(), PICTURE)
    assert "whole" not in [control["name"] for control in fixed.frame["controls"]]


def test_a_model_that_pools_nothing_has_views_and_no_classes(vit):
    explorer = widgets.explore(vit(global_pool=""), PICTURE)
    assert explorer.frame["bars"] == []
    views = next(control for control in explorer.page.controls() if control.name == "view")
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


def test_an_error_that_nobody_foresaw_keeps_the_page(explorer, monkeypatch):
    panels = explorer.frame["panels"]
    monkeypatch.setattr(explorer.page, "view", lambda check: 1 / 0)
    with pytest.raises(ValueError, match="could not be drawn .ZeroDivisionError"):
        explorer.set(layer=0)
    assert explorer.frame["panels"] == panels and explorer.page.state["layer"] == 2
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
    monkeypatch.setattr(explorer.connection, "_send", lambda content, buffers: sent.append((content, *buffers)))

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
    np.testing.assert_array_equal(arrays["pixels"], explorer.page.forward.pixels)
    about = json.loads(str(arrays["about"]))
    assert set(about) == SET[view] and about["words"].startswith(words(explorer))
    wanted = {"view": view, "head": "mean" if view == "rollout" else 1, "query": "readout", "layer": 2, "target": 4}
    assert about.items() >= {name: value for name, value in wanted.items() if name in SET[view]}.items()
    if view == "rollout":
        assert explorer.frame["dots"] is None or explorer.frame["dots"]["head"] is None


def test_pixels_that_no_patch_covers_are_named(vit):
    explorer = widgets.explore(vit(img_size=(70, 64)), PICTURE)
    assert "No patch covers the last 6 pixels at the bottom." in words(explorer)
    assert "at the right" not in words(explorer)
    padded = widgets.explore(vit(dynamic_img_size=True, dynamic_img_pad=True), PICTURE, size=(64, 70))
    assert "The last patches at the right reach 10 pixels beyond the image." in words(padded)
    with pytest.raises(ValueError, match="does not take this size"):
        widgets.explore(vit(), PICTURE, size=(96, 96))


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


def likeliest(model):
    with torch.no_grad():
        return model(given(model))[0].softmax(-1).sort(descending=True)


def until_scored(explorer):
    assert explorer.wait(120, settled=True)
    return explorer.frame["score"]


def shown_controls(explorer):
    return [control["name"] for control in explorer.frame["controls"] if not control["hidden"]]


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.knows_class])
def test_the_map_is_the_methods(vit, name):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    _, order = likeliest(model)
    explorer.set(view=name)
    np.testing.assert_allclose(values(explorer), METHODS[name](model, given(model), order[0].item())[0], atol=1e-6)
    explorer.set(target=order[2].item(), against=order[1].item())
    expected = METHODS[name](model, given(model), order[2].item(), against=order[1].item())[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    assert f"for “{order[2]}” (" in words(explorer) and f"rather than “{order[1]}” (" in words(explorer)


def test_a_method_that_was_registered_is_a_view(vit, monkeypatch):
    """Also by an explorer that is open, and one that knows no class is not said to explain it."""
    for name in ("mine", "plain"):
        monkeypatch.setitem(METHODS, name, None)  # so that it is removed again
        del METHODS[name]
    explorer = widgets.explore(vit(), PICTURE)
    flat = lambda model, images, target, against: torch.ones(1, 4, 4)  # noqa: E731
    register(Method("mine", "my method", "gradients", "one forward", flat))
    register(Method("plain", "plain one", "capture", "one forward", flat))
    explorer.set(view="mine")
    assert (values(explorer) == 1).all() and "My method for “" in words(explorer)
    options = next(control["options"] for control in explorer.frame["controls"] if control["name"] == "view")
    assert {("My method", "mine"), ("Plain one", "plain")} <= set(options)
    explorer.set(view="plain")
    assert "for “" not in words(explorer)


def test_the_score_is_that_of_the_curves(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    _, order = likeliest(model)
    target, against = order[1].item(), order[3].item()
    explorer.set(view="legrad", target=target, against=against)
    found = until_scored(explorer)
    maps = torch.cat([METHODS["legrad"](model, given(model), target, against=against),
                      faithfulness.random_maps(explorer.page.forward.grid, views.ORDERS)])  # fmt: skip
    expected = faithfulness.curves(model, given(model), maps[:, None], target, against=against, step=2)
    assert found["shares"] == [k / 8 for k in range(9)]
    for name in ("deletion", "insertion"):
        curve = getattr(expected, name)[:, 0]
        np.testing.assert_allclose(found["curves"][name], curve[0], atol=1e-6)
        np.testing.assert_allclose(found["curves"][f"random {name}"], curve[1:].mean(0), atol=1e-6)
    deletion, insertion = expected.deletion_area[:, 0], expected.insertion_area[:, 0]
    gain = insertion - deletion
    sigmas = ((gain[0] - gain[1:].mean()) / gain[1:].std()).item()
    side = "above" if sigmas >= 0 else "below"
    assert found["words"].startswith("Patches are covered by the mean color. Areas: deletion")
    assert f"deletion {deletion[0]:.3g} (low is good), insertion {insertion[0]:.3g} (high is good)" in found["words"]
    assert f"lies {abs(sigmas):.3g} σ {side} 8 random orders" in found["words"]


def test_a_click_on_a_class_asks_why(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    probabilities, order = likeliest(model)
    bars = explorer.frame["bars"]
    assert [bar["number"] for bar in bars] == order[:5].tolist() and not any(bar["now"] for bar in bars)
    assert explorer.frame["score"] is None and {"layer", "head", "query"} < set(shown_controls(explorer))
    assert browser(explorer, {"why": bars[1]["number"]}) == ""
    assert explorer.page.state["view"] == "relevance" and explorer.page.state["target"] == order[1].item()
    assert [bar["now"] for bar in explorer.frame["bars"]] == [False, True, False, False, False]
    assert explorer.frame["dots"] is None and explorer.frame["score"]
    names = shown_controls(explorer)
    assert {"target", "against"} < set(names) and not {"layer", "head", "query", "row", "column"} & set(names)
    explorer.set(view="grad_cam")
    browser(explorer, {"why": bars[2]["number"]})
    assert explorer.page.state["view"] == "grad_cam" and explorer.page.choice.target == order[2].item()
    assert probabilities[2].item() == pytest.approx(explorer.frame["bars"][2]["share"], abs=1e-6)


def test_any_class_can_be_asked_for(vit):
    model = vit(num_classes=100)
    model.label_names = [f"animal {number}, beast" if number == 7 else f"plant {number}" for number in range(100)]
    explorer = widgets.explore(model, PICTURE)
    _, order = likeliest(model)
    rare, rarer = order[order != 7][-2:].tolist()
    explorer.set(view="legrad")
    assert browser(explorer, {"set": {"another": f" plant {rare} "}}) == ""
    assert explorer.page.state["target"] == rare
    np.testing.assert_allclose(values(explorer), METHODS["legrad"](model, given(model), rare)[0], atol=1e-6)
    for wrong, sentence in (("plant 7", "Did you mean plant"), ("100", "has classes 0 to 99")):
        assert sentence in browser(explorer, {"set": {"another": wrong}})
        assert explorer.page.state["target"] == rare and explorer.page.state["another"] == f" plant {rare} "
    browser(explorer, {"set": {"another": str(rarer)}})
    options = {control.name: control.options for control in explorer.page.controls()}
    explorer.set(against=rare)  # what was asked for before can be chosen
    assert {control.name: control.options for control in explorer.page.controls()}["target"] == options["target"]
    expected = METHODS["legrad"](model, given(model), rarer, against=rare)[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    explorer.set(target="Animal 7")
    assert explorer.page.state["target"] == 7 and explorer.page.state["another"] == ""
    for predicted, none in (("predicted", "none"), (None, None)):
        explorer.set(target=7, against=rare)
        explorer.set(target=predicted, against=none)
        assert (explorer.page.state["target"], explorer.page.state["against"]) == ("predicted", "none")
    for wrong in (-1, 100):
        with pytest.raises(ValueError, match="has classes 0 to 99"):
            explorer.set(target=wrong)
    with pytest.raises(ValueError, match="'Any class' .* text, got 5"):
        explorer.set(another=5)
    for _ in range(6):  # classes that can be chosen anyway do not drive these out
        explorer.set(target=order[0].item())
        explorer.set(target=order[1].item())
    explorer.set(target=rare, against=rarer)
    explorer.set(target=7, against="none")
    assert explorer.page.state["typed"][0] == 7 and sorted(explorer.page.state["typed"]) == sorted((7, rare, rarer))


def test_digits_are_a_name_first(vit):
    model = vit(num_classes=20)
    model.label_names = [str(number + 1) for number in range(20)]
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="legrad", another="1")
    assert explorer.page.state["target"] == 0 and "for “1” (" in words(explorer)


def test_a_model_without_classes_has_none_to_ask_for(vit):
    explorer = widgets.explore(vit(num_classes=0), PICTURE)
    with pytest.raises(ValueError, match="'View' .* one of 'attention', .* got 'lens'"):
        explorer.set(view="lens")
    explorer.set(view="relevance")  # what is left to ask is a likeness
    assert explorer.frame["bars"] == [] and explorer.page.state["target"] == ("picture", "astronaut")
    assert "another" not in {control["name"] for control in explorer.frame["controls"]}
    with pytest.raises(ValueError, match="no classifier head"):
        explorer.set(target=3)


def other(model, name):
    return preprocess(model, samples()[name], size=model.patch_embed.img_size)


@pytest.mark.parametrize("name", ["relevance", "occlusion"])
@pytest.mark.parametrize("classes", [0, 10])
def test_likeness_is_the_methods(vit, name, classes):
    model = vit(num_classes=classes)
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view=name, target=("picture", "coffee"))
    expected = METHODS[name](model, given(model), like(other(model, "coffee")))[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    assert "for likeness to “coffee”" in words(explorer)
    explorer.set(photograph="coffee")
    assert explorer.page.state["target"] == ("predicted" if classes else ("picture", "the image given"))
    with pytest.raises(ValueError, match="'Explain' must be one of"):
        explorer.set(target=("picture", "coffee"))
    with pytest.raises(ValueError, match="no text tower"):
        explorer.set(target=("text", "a cat"))


def test_two_uploads_can_be_alike(vit):
    model = vit(num_classes=0)
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="legrad")
    for name in ("coffee", "rocket"):
        assert browser(explorer, {"upload": f"{name}.png"}, saved(samples()[name])) == ""
    assert browser(explorer, {"set": {"target": ["picture", "coffee.png"]}}) == ""
    expected = METHODS["legrad"](model, other(model, "rocket"), like(other(model, "coffee")))[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)


@every
def test_contributions_and_direct_maps_are_those_of_stream(vit, kind):
    model = vit(**MODELS[kind])
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="contributions", target=3, another="4")
    x = given(model)
    found, direct = stream.contributions(model, x, 4), stream.direct(model, x, 4)[0]
    np.testing.assert_allclose(values(explorer), direct.sum((0, 1)), atol=1e-6)
    chart = explorer.frame["parts"]
    np.testing.assert_allclose(chart["heads"], found.heads[0], atol=1e-6)
    np.testing.assert_allclose(chart["mlps"], found.mlps[0], atol=1e-6)
    others = dict(chart["others"])
    assert others["embedding"] == pytest.approx(found.embedding.item(), abs=1e-6)
    assert others["biases"] == pytest.approx(found.biases.item(), abs=1e-6)
    total = np.sum(chart["heads"]) + np.sum(chart["mlps"]) + sum(others.values())
    assert total == pytest.approx(model(x)[0, 4].item(), rel=1e-4)
    assert (chart["layer"], chart["head"]) == (None, None) and "All heads of all layers" in words(explorer)
    assert browser(explorer, {"set": {"layer": 1, "head": 2}}) == ""  # a click on a bar
    np.testing.assert_allclose(values(explorer), direct[1, 2], atol=1e-6)
    assert (explorer.frame["parts"]["layer"], explorer.frame["parts"]["head"]) == (1, 2)
    explorer.set(head="sum", against=2)
    both = stream.direct(model, x, 4, 2)[0]
    np.testing.assert_allclose(values(explorer), both[1].sum(0), atol=1e-6)
    assert explorer.frame["panels"][0]["unit"] == "logits" and "minus that of" in words(explorer)


@every
def test_the_lens_is_that_of_stream(vit, kind):
    model = vit(**MODELS[kind])
    explorer = widgets.explore(model, PICTURE)
    x = given(model)
    prefix = model.num_prefix_tokens
    for layer, target in ((0, 3), (2, 5)):
        explorer.set(view="lens", layer=layer, target=target if target in explorer.page.forward.likeliest else None)
        explorer.set(another=str(target))
        _, each = stream.lens(model, x, layer)
        expected = each[0].softmax(-1)[prefix:, target].unflatten(0, (4, 4))
        np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    explorer.set(query="readout")
    for query, read in (("readout", None), ((2, 1), prefix + 9)):
        if read is not None:
            assert browser(explorer, {"pick": "picture", "row": 2, "col": 1}) == ""
        rows = explorer.frame["lens"]["rows"]
        for layer, row in enumerate(rows):
            pooled, each = stream.lens(model, x, layer)
            share, number = (pooled[0] if read is None else each[0, read]).softmax(-1).max(0)
            assert row["name"] == str(number.item()) and row["share"] == pytest.approx(share.item(), abs=1e-6), query
    assert "raw lens" in words(explorer).lower() and "Raw lens" in explorer.frame["panels"][0]["title"]
    assert explorer.frame["dots"] is None and explorer.frame["score"] is None
    assert {c["name"] for c in explorer.frame["controls"] if c["hidden"]} >= {"head", "against"}


@every
@pytest.mark.parametrize("way", ["mean", "zero"])
def test_switched_off_heads_are_those_of_intervene(vit, kind, way):
    model = vit(**MODELS[kind])
    explorer = widgets.explore(model, PICTURE)
    first, shares = explorer.page.forward.logits, [bar["share"] for bar in explorer.frame["bars"]]
    x, heads = given(model), [(0, 2), (2, 0)]
    if kind == "attention pool":
        heads.append(("pool", 1))
    explorer.set(off=heads[::-1], way=way)
    assert explorer.page.state["off"] == tuple(heads)
    with intervene(model, heads=dict.fromkeys(heads, way), reference=sample_photographs(model)), torch.no_grad():
        layers, logits = tokens.features(model, x)
    np.testing.assert_allclose(explorer.page.forward.logits, logits[0], atol=2e-6)
    assert (explorer.page.forward.logits - first).abs().max() > 1e-4
    for bar in explorer.frame["bars"]:
        assert bar["share"] == pytest.approx(logits[0].softmax(-1)[bar["number"]].item(), abs=1e-6)
        assert bar["before"] == pytest.approx(first.softmax(-1)[bar["number"]].item(), abs=1e-6)
    explorer.set(view="norms", layer=1)
    expected = tokens.norms(layers[1][0, model.num_prefix_tokens :]).unflatten(0, (4, 4))
    np.testing.assert_allclose(values(explorer), expected, rtol=1e-5)
    assert "head 0 of layer 2" in words(explorer) and ("zero" if way == "zero" else "6 sample") in words(explorer)
    explorer.set(off=[])
    assert torch.equal(explorer.page.forward.logits, first)
    assert [bar["share"] for bar in explorer.frame["bars"]] == shares and "before" not in explorer.frame["bars"][0]
    assert "Switched off" not in words(explorer)


def test_reasons_are_those_of_the_model_without_its_heads(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="relevance", target=explorer.page.forward.likeliest[1], off=[(1, 1)], way="mean")
    target = explorer.page.state["target"]
    with intervene(model, heads={(1, 1): "mean"}, reference=sample_photographs(model)):
        expected = relevance(model, given(model), target)[0]
    np.testing.assert_allclose(values(explorer), expected, atol=1e-6)
    assert np.abs(values(explorer) - relevance(model, given(model), target)[0].numpy()).max() > 1e-5
    explorer.set(way="zero", view="contributions", layer=1, head=1)
    assert explorer.frame["parts"]["heads"][1][1] == 0 and not values(explorer).any()
    with intervene(model, heads={(1, 1): "zero"}):
        found = stream.contributions(model, given(model), target)
    np.testing.assert_allclose(explorer.frame["parts"]["heads"], found.heads[0], atol=1e-6)


def test_what_cannot_be_shown_is_said(vit):
    explorer = widgets.explore(vit(), PICTURE)
    explorer.set(view="contributions", off=[(0, 0)], way="zero")
    with pytest.raises(ValueError, match="Let heads that are off give zero, or switch them on"):
        explorer.set(way="mean")
    assert explorer.page.state["way"] == "zero" and explorer.frame["parts"]
    for wrong, says in {(0, 3): r"no \(layer, head\) \(0, 3\); they go from \(0, 0\) to \(2, 2\)", 7: "pairs"}.items():
        with pytest.raises(ValueError, match=says):
            explorer.set(off=[wrong])
    assert "pairs of a layer and a head" in browser(explorer, {"set": {"off": 3}})
    assert explorer.page.state["off"] == ((0, 0),)
    pooled = widgets.explore(vit(name="vit_base_patch16_siglip_224"), PICTURE)
    pooled.set(view="lens", off=[(0, 0)])
    with pytest.raises(ValueError, match="needs all heads of the attention pool. Switch them on"):
        pooled.set(off=[("pool", 0)])
    assert pooled.page.state["off"] == ((0, 0),)


def test_compare_finds_the_nearest_patches_of_scikit_learn(vit):
    model, other = vit(img_size=128), samples()["coffee"]
    page = widgets.compare(model, image=PICTURE, other=other)
    page.set(view="correspondences", layer_left=1, row=2, column=5)
    with torch.no_grad():
        left, right = (tokens.features(model, given(model, each))[0][1][0, 1:].double() for each in (PICTURE, other))
    known = cosine_similarity(left, right)
    assert selected(page) == [(2, 5), divmod(int(known[21].argmax()), 8)]
    np.testing.assert_allclose(values(page, "right"), known[21].reshape(8, 8), atol=1e-5)
    np.testing.assert_allclose(values(page, "left"), cosine_similarity(left)[21].reshape(8, 8), atol=1e-5)
    browser(page, {"pick": "right", "row": 7, "col": 1})
    assert selected(page) == [divmod(int(known[:, 57].argmax()), 8), (7, 1)]
    two = widgets.compare(vit(), vit(seed=1), PICTURE)
    assert "within one model" in browser(two, {"set": {"view": "correspondences"}})
    assert two.page.state["view"] == "attention"


def test_training_slider_shows_its_snapshot():
    run = snapshots(3)
    controls, picture = widgets.training(run).children
    _, slider = controls.children
    assert (slider.min, slider.max, slider.value) == (0, 2, 0)
    for index in (2, 0, 1):
        slider.value = index
        plot.snapshot(run, index).savefig(file := io.BytesIO(), format="png")
        assert picture.value == file.getvalue()


def test_open_explorer_follows_a_model_that_trains_on(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    before = explorer.page.forward
    explorer.set(layer=2)
    assert explorer.page.forward is before, "made once for the same weights"
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model(given(model))[0, 3].backward()
    optimizer.step()
    explorer.set(strength=0.5)
    assert_attention(explorer)
    model.load_state_dict(vit(seed=1).state_dict())
    explorer.set(strength=0.6)
    assert_attention(explorer)
    model.register_buffer("extra", torch.zeros(3))
    explorer.set(strength=0.7)
    assert explorer.page.forward is not before


def test_a_click_renews_no_menu(vit, monkeypatch):
    """And opens no file: counting the sample photographs took ten times as long as the rest of a click."""
    explorer = widgets.explore(vit(), PICTURE)
    explorer.wait(60, settled=True)
    before = dict(explorer.page.shown)
    monkeypatch.setattr(explorer.page, "controls", None)
    monkeypatch.setattr(Image, "open", None)
    assert browser(explorer, {"pick": "picture", "row": 3, "col": 1}) == ""
    changed = [name for name, control in explorer.page.shown.items() if control is not before[name]]
    assert explorer.frame["panels"][0]["selected"] == (3, 1)
    assert sorted(changed) == ["column", "query", "row"]
    assert {name: explorer.page.shown[name].value for name in ("query", "row", "column")} == {
        "query": "patch", "row": 3, "column": 1,
    }  # fmt: skip


def test_a_page_keeps_captures_within_its_bound(vit, monkeypatch):
    explorer = widgets.explore(vit(), PICTURE)
    one = explorer.page.forward.bytes
    assert one == 3 * (3 * 17 * 96) * 4  # of each layer q, k and tokens
    monkeypatch.setattr(photographs, "KEPT", 2.5 * one)
    for name in ("rocket", "china", "flower"):
        explorer.set(photograph=name)
    assert len(explorer.page._forwards) == 2
    for name in ("a.png", "b.png"):
        assert browser(explorer, {"upload": name}, saved(PICTURE)) == ""
    assert "a.png" not in explorer.page.photographs


def test_a_single_output_is_a_value_without_percent(vit):
    model = vit(num_classes=1)
    explorer = widgets.explore(model, PICTURE)
    value = model(given(model)).item()
    (bar,) = explorer.frame["bars"]
    assert bar["share"] == pytest.approx(value, rel=1e-4) and bar["plain"]
    explorer.set(view="relevance")
    assert f"(“0” ({value:.3g})".replace("-", "−")[1:] in words(explorer)
    assert until_scored(explorer)["scale"] == "value of the output"
    assert "%" not in words(explorer)
