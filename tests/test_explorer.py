"""The widgets without a browser: their maps against independent computations, and wrong input."""

import functools
import io
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageOps
from sklearn.decomposition import PCA
from support import (
    PICTURE,
    assert_near,
    caption,
    given,
    png,
    reference_attention,
    refuses,
    saved,
    selected,
    send,
    values,
)

import vitlens_explorer as widgets
from vitlens import (
    UnsupportedModelError,
    capture,
    faithfulness,
    intervene,
    stream,
    tokens,
)
from vitlens.attention import rollout
from vitlens.attribution import METHODS, Method, like, register, relevance
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.recorder.supported import family
from vitlens_explorer import drawing, photographs, views
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.lanes import never_cancel

MODELS = {
    "class token": {},
    "mean of patches": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "registers": {"reg_tokens": 3},
    "distilled": {"name": "deit_tiny_distilled_patch16_224"},
}


def control(widget, name):
    return next((each for each in widget.frame["controls"] if each["name"] == name), None)


def visible(widget):
    return {each["name"] for each in widget.frame["controls"] if not each["hidden"]}


def readout(model, tokens):
    """(T,) weights of the tokens that the head reads."""
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
    maps, _, _ = reference_attention(explorer.page.model, picture, **kwargs)
    assert_near(values(explorer), maps[-1].mean(0)[0, 1:].reshape(shape))


@pytest.mark.parametrize("kind", MODELS)
def test_explorer_layer_views_equal_independent_computations(vit, kind):
    model = vit(**MODELS[kind])
    explorer = widgets.explore(model, PICTURE)
    maps, layers, logits = reference_attention(model)
    count, prefix = maps.shape[-1], model.num_prefix_tokens
    row, bar = readout(model, count), explorer.frame["bars"][0]
    assert bar["share"] == pytest.approx(logits.softmax(-1).max().item(), abs=1e-6)
    assert bar["name"] == str(logits.argmax().item()) == str(bar["number"]) and not bar["now"]

    def shows(expected, **controls):
        explorer.set(**controls)
        assert_near(values(explorer), expected[prefix:].reshape(4, 4), rtol=1e-5, atol=1e-5)

    mixed = (maps.mean(1) + np.eye(count)) / 2
    shows(row @ mixed[2] @ mixed[1] @ mixed[0], view="rollout")
    shows(row @ maps[1, 2], view="attention", layer=1, head=2)
    shows(maps[0].max(0)[prefix + 7], layer=0, head="max", row=1, column=3)
    for token, name in enumerate(family(model).prefix):
        if row[token] != 1:  # 1 is the read-out
            shows(maps[0].mean(0)[token], query=token, head="mean")
            assert name in caption(explorer)
    shows((mixed[1] @ mixed[0])[prefix + 8], view="rollout", head="mean", layer=1, row=2, column=0)
    assert "through layers 0 to 1" in caption(explorer)
    shows(maps[1, 1].mean(0), view="received", head=1)
    shows(np.linalg.norm(layers[2], axis=-1), view="norms", layer=2)
    unit = layers[1] / np.linalg.norm(layers[1], axis=-1, keepdims=True)
    shows(unit @ unit[prefix + 13], view="similarity", layer=1, row=3, column=1)
    explorer.set(view="components")
    scores = PCA(3).fit_transform(layers[1][prefix:].astype(np.float64))
    for k, found in enumerate(values(explorer).reshape(16, 3).T):
        low, high = scores[:, k].min(), scores[:, k].max()
        expected = (scores[:, k] - low) / (high - low)
        assert_near(found, 1 - expected if high < -low else expected, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_explorer_contributions_and_lens_equal_stream(vit, kind):
    model = vit(**MODELS[kind])
    explorer, x, prefix = widgets.explore(model, PICTURE), given(model), model.num_prefix_tokens
    explorer.set(view="contributions", target=3, another="4")
    found, direct = stream.contributions(model, x, 4), stream.direct_by_head(model, x, 4)[0]
    assert_near(values(explorer), direct.sum((0, 1)))
    chart = explorer.frame["parts"]
    assert_near(chart["heads"], found.heads[0])
    assert_near(chart["mlps"], found.mlps[0])
    others = dict(chart["others"])
    assert_near(
        [others["embedding"], others["biases"]], [found.embedding.item(), found.biases.item()]
    )
    total = np.sum(chart["heads"]) + np.sum(chart["mlps"]) + sum(others.values())
    assert total == pytest.approx(model(x)[0, 4].item(), rel=1e-4)
    assert send(explorer, {"set": {"layer": 1, "head": 2}}) == ""  # a click on a bar
    assert_near(values(explorer), direct[1, 2])
    assert (explorer.frame["parts"]["layer"], explorer.frame["parts"]["head"]) == (1, 2)
    explorer.set(head="sum", against=2)
    assert_near(values(explorer), stream.direct_by_head(model, x, 4, 2)[0, 1].sum(0))
    assert explorer.frame["panels"][0]["unit"] == "logits" and "minus that of" in caption(explorer)
    lenses = [stream.lens(model, x, layer) for layer in range(3)]
    for layer, target in ((0, 3), (2, 5)):
        explorer.set(view="lens", layer=layer, target=target)
        assert_near(
            values(explorer), lenses[layer][1][0].softmax(-1)[prefix:, target].unflatten(0, (4, 4))
        )
    for token, content in (
        (None, {"set": {"query": "readout"}}),
        (9, {"pick": "picture", "row": 2, "col": 1}),
    ):
        assert send(explorer, content) == ""
        for row, (pooled, each) in zip(explorer.frame["lens"]["rows"], lenses, strict=True):
            share, number = (
                (pooled[0] if token is None else each[0, prefix + token]).softmax(-1).max(0)
            )
            assert row["name"] == str(number.item()) and row["share"] == pytest.approx(
                share.item(), abs=1e-6
            )
    assert explorer.frame["score"] is None and not {"head", "against"} & visible(explorer)


@pytest.mark.parametrize(
    "kind, way", [("class token", "mean"), ("registers", "zero"), ("distilled", "mean")]
)
def test_explorer_heads_off_equal_intervene(vit, kind, way):
    model = vit(**MODELS[kind])
    explorer, x, heads = widgets.explore(model, PICTURE), given(model), [(0, 2), (2, 0)]
    first, shares = explorer.page.forward.logits, [bar["share"] for bar in explorer.frame["bars"]]
    explorer.set(off=heads[::-1], way=way)
    assert explorer.page.state["off"] == tuple(heads)
    reference = torch.cat([given(model, image) for image in samples().values()])
    off = functools.partial(intervene, model, heads=dict.fromkeys(heads, way), reference=reference)
    with off(), torch.no_grad():
        layers, logits = tokens.features(model, x)
    assert_near(explorer.page.forward.logits, logits[0], atol=2e-6)
    assert (explorer.page.forward.logits - first).abs().max() > 1e-4
    for bar in explorer.frame["bars"]:
        assert bar["share"] == pytest.approx(logits[0].softmax(-1)[bar["number"]].item(), abs=1e-6)
        assert bar["before"] == pytest.approx(first.softmax(-1)[bar["number"]].item(), abs=1e-6)
    explorer.set(view="norms", layer=1)
    expected = tokens.norms(layers[1][0, model.num_prefix_tokens :]).unflatten(0, (4, 4))
    assert_near(values(explorer), expected, rtol=1e-5)
    assert "head 0 of layer 2" in caption(explorer) and (
        "zero" if way == "zero" else "6 sample"
    ) in caption(explorer)
    explorer.set(view="relevance", target=explorer.page.forward.likeliest[1])
    target = explorer.page.state["target"]
    with off():
        assert_near(values(explorer), relevance(model, x, target)[0])
    assert np.abs(values(explorer) - relevance(model, x, target)[0].numpy()).max() > 1e-5
    explorer.set(off=[], view="attention")
    assert [
        bar["share"] for bar in explorer.frame["bars"]
    ] == shares and "before" not in explorer.frame["bars"][0]
    assert torch.equal(explorer.page.forward.logits, first) and "Switched off" not in caption(
        explorer
    )


def test_explorer_heads_off_limit_contributions_and_lens(vit):
    explorer = widgets.explore(model := vit(), PICTURE)
    explorer.set(view="contributions", off=[(1, 1)], way="zero", layer=1, head=1, target=3)
    assert explorer.frame["parts"]["heads"][1][1] == 0 and not values(explorer).any()
    with intervene(model, heads={(1, 1): "zero"}):
        assert_near(
            explorer.frame["parts"]["heads"], stream.contributions(model, given(model), 3).heads[0]
        )
    refuses("Replace with zero, or turn the heads on", explorer.set, way="mean")
    refuses(r"from \(0, 0\) to \(2, 2\)", explorer.set, off=[(0, 3)])
    assert explorer.page.state["way"] == "zero" and explorer.page.state["off"] == ((1, 1),)


@pytest.fixture(scope="module")
def explained(vit):
    """An explorer of one model for all methods, and its classes in the order of their logits."""
    model = vit()
    return (
        widgets.explore(model, PICTURE),
        model,
        model(given(model))[0].argsort(descending=True).tolist(),
    )


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if method.depends_on_target]
)
def test_explorer_maps_equal_methods(explained, name):
    explorer, model, order = explained
    explorer.set(view=name, target="predicted", against="none")
    assert_near(values(explorer), METHODS[name](model, given(model), order[0])[0])
    explorer.set(target=order[2], against=order[1])
    assert_near(values(explorer), METHODS[name](model, given(model), order[2], against=order[1])[0])
    assert f"for “{order[2]}” (" in caption(explorer) and f"rather than “{order[1]}” (" in caption(
        explorer
    )


def test_explorer_score_equals_curves(explained):
    explorer, model, order = explained
    target, against = order[1], order[3]
    explorer.set(view="legrad", target=target, against=against)
    assert explorer.wait(120, settled=True)
    found = explorer.frame["score"]
    maps = torch.cat(
        [
            METHODS["legrad"](model, given(model), target, against=against),
            faithfulness.random_maps(explorer.page.forward.grid, views.ORDERS),
        ]
    )
    expected = faithfulness.curves(
        model, given(model), maps[:, None], target, against=against, step=2
    )
    assert found["shares"] == [k / 8 for k in range(9)] and found["scale"].startswith("probability")
    assert found["order"] == maps[0].flatten().argsort(descending=True).tolist()
    assert found["name"] == f"{target} rather than {against}"
    for name in ("deletion", "insertion"):
        curve = getattr(expected, name)[:, 0]
        assert_near(found["curves"][name], curve[0])
        assert_near(found["curves"][f"random {name}"], curve[1:].mean(0))
    deletion, insertion = expected.deletion_area[:, 0], expected.insertion_area[:, 0]
    gain = insertion - deletion
    sigmas = ((gain[0] - gain[1:].mean()) / gain[1:].std()).item()
    side = "above" if sigmas >= 0 else "below"
    areas = f"deletion {deletion[0]:.3g} (lower is better), insertion {insertion[0]:.3g} (higher is better)"
    assert areas in found["words"]
    assert f"is {abs(sigmas):.3g} σ {side} 8 random orderings" in found["words"]
    verdict = "Clearly better" if sigmas >= 2 else "Worse" if sigmas <= -2 else "No better"
    assert found["verdict"] == f"{verdict} than chance"


def test_explorer_six_maps_equal_methods(explained):
    """Beside the chosen map stand those of six methods, each with the score that it has when it is chosen."""
    explorer, model, order = explained
    explorer.set(view="relevance", target=order[1], against="none")
    assert explorer.wait(120, settled=True)
    tiles = explorer.frame["six"]["tiles"]
    assert [tile["now"] for tile in tiles] == [
        tile["view"] == "relevance" for tile in tiles
    ] and len(tiles) == 6
    for tile in tiles:
        found = np.frombuffer(tile["values"], "<f4").reshape(4, 4)
        assert_near(found, METHODS[tile["view"]](model, given(model), order[1])[0])
        explorer.set(view=tile["view"])
        above = tile["words"].removesuffix(" σ").removeprefix("−")
        assert (
            f"is {above} σ {'below' if '−' in tile['words'] else 'above'} 8"
            in explorer.frame["score"]["words"]
        )
    explorer.set(view="attention")
    assert explorer.frame["six"] is None


def test_explorer_scores_a_map_that_was_computed_as_a_tile(vit):
    """A click on a tile before the scores have come does not end them."""
    explorer = Explorer(vit(num_classes=3), PICTURE)
    explorer.first(never_cancel)
    answer = explorer.answer([({"set": {"view": "relevance"}}, [])], never_cancel)
    while answer.job.key.kind != "random":
        message = {"job": answer.job.key}
        answer = explorer.answer([(message, [answer.job.function(never_cancel)])], never_cancel)
    answer = explorer.answer([({"set": {"view": "grad_cam"}}, [])], never_cancel)
    assert answer.job.key.kind == "random"
    while answer.job:
        message = {"job": answer.job.key}
        answer = explorer.answer([(message, [answer.job.function(never_cancel)])], never_cancel)
    assert "curves" in explorer.frame["score"]


def test_explorer_shows_registered_methods(vit, monkeypatch):
    """Also of an explorer that is open. A method without a class does not name one."""
    for name in ("mine", "plain"):
        monkeypatch.setitem(METHODS, name, None)  # so that it is removed again
        del METHODS[name]
    explorer = widgets.explore(vit(), PICTURE)
    flat = lambda model, images, target, against: torch.ones(1, 4, 4)  # noqa: E731
    register(Method("mine", "my method", "gradients", "one forward", flat))
    register(Method("plain", "plain one", "capture", "one forward", flat))
    explorer.set(view="mine")
    assert (values(explorer) == 1).all() and "My method for “" in caption(explorer)
    assert {("My method", "mine"), ("Plain one", "plain")} <= set(
        control(explorer, "view")["options"]
    )
    explorer.set(view="plain")
    assert "for “" not in caption(explorer)


def test_explorer_click_on_class_explains_it(vit):
    explorer = widgets.explore(model := vit(), PICTURE)
    with torch.no_grad():
        probabilities, order = model(given(model))[0].softmax(-1).sort(descending=True)
    bars = explorer.frame["bars"]
    assert [bar["number"] for bar in bars] == order[:5].tolist() and not any(
        bar["now"] for bar in bars
    )
    assert explorer.frame["score"] is None and {"layer", "head", "query"} < visible(explorer)
    assert send(explorer, {"why": bars[1]["number"]}) == ""
    assert (
        explorer.page.state["view"] == "relevance"
        and explorer.page.state["target"] == order[1].item()
    )
    assert [bar["now"] for bar in explorer.frame["bars"]] == [False, True, False, False, False]
    assert explorer.frame["mosaic"] is None and explorer.frame["score"]
    assert {"target", "against"} < visible(explorer) and not {
        "layer",
        "head",
        "query",
        "row",
    } & visible(explorer)
    explorer.set(view="grad_cam")
    send(explorer, {"why": bars[2]["number"]})
    assert (
        explorer.page.state["view"] == "grad_cam" and explorer.page.choice.target == order[2].item()
    )
    assert probabilities[2].item() == pytest.approx(explorer.frame["bars"][2]["share"], abs=1e-6)


def test_explorer_target_accepts_all_classes(vit):
    model = vit(num_classes=100)
    model.label_names = [
        f"animal {number}, beast" if number == 7 else f"plant {number}" for number in range(100)
    ]
    explorer = widgets.explore(model, PICTURE)
    order = model(given(model))[0].argsort(descending=True)
    rare, rarer = order[order != 7][-2:].tolist()
    explorer.set(view="legrad")
    assert send(explorer, {"set": {"another": f" plant {rare} "}}) == ""
    assert explorer.page.state["target"] == rare
    assert_near(values(explorer), METHODS["legrad"](model, given(model), rare)[0])
    for wrong, sentence in (("plant 7", "Did you mean plant"), ("100", "has classes 0 to 99")):
        assert sentence in send(explorer, {"set": {"another": wrong}})
        assert (
            explorer.page.state["target"] == rare
            and explorer.page.state["another"] == f" plant {rare} "
        )
    send(explorer, {"set": {"another": str(rarer)}})
    explorer.set(against=rare)  # a class that was typed before can be chosen
    assert_near(values(explorer), METHODS["legrad"](model, given(model), rarer, against=rare)[0])
    explorer.set(target="Animal 7")
    assert explorer.page.state["target"] == 7 and explorer.page.state["another"] == ""
    assert (
        send(explorer, {"set": {"another": "beast"}}) == "" and explorer.page.state["target"] == 7
    ), "a whole word"
    assert (
        "no class called" in send(explorer, {"set": {"another": "plan"}})
        and explorer.page.state["target"] == 7
    )
    explorer.set(another="plant")
    assert explorer.page.state["target"] == next(k for k in order.tolist() if k != 7), (
        "the likeliest"
    )
    explorer.set(target=None, against=None)
    assert (explorer.page.state["target"], explorer.page.state["against"]) == ("predicted", "none")
    for _ in range(6):  # classes that are in the menu anyway do not drive these out
        explorer.set(target=order[0].item())
        explorer.set(target=order[1].item())
    assert sorted(explorer.page.state["typed"]) == sorted((7, rare, rarer))
    model.label_names = [str(number + 1) for number in range(100)]
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="legrad", another="1")
    assert explorer.page.state["target"] == 0 and "for “1” (" in caption(explorer), (
        "digits are a name first"
    )


@pytest.mark.parametrize("name, classes", [("relevance", 0), ("occlusion", 10)])
def test_explorer_similarity_equals_method(vit, name, classes):
    explorer = widgets.explore(model := vit(num_classes=classes), PICTURE)
    explorer.set(view=name, target=("picture", "coffee"))
    other = functools.partial(given, model)
    assert_near(
        values(explorer), METHODS[name](model, other(), like(other(samples()["coffee"])))[0]
    )
    assert "for similarity to “coffee”" in caption(explorer)
    explorer.set(photograph="coffee")
    assert explorer.page.state["target"] == (
        "predicted" if classes else ("picture", "the image given")
    )
    refuses("'Explain' must be one of", explorer.set, target=("picture", "coffee"))
    for upload in ("rocket", "china"):
        assert send(explorer, {"upload": f"{upload}.png"}, saved(samples()[upload])) == ""
    assert send(explorer, {"set": {"target": ["picture", "rocket.png"]}}) == ""
    assert_near(
        values(explorer),
        METHODS[name](model, other(samples()["china"]), like(other(samples()["rocket"])))[0],
    )


def test_explorer_without_classes_readout_or_pooling(vit):
    explorer = widgets.explore(vit(num_classes=0), samples()["coffee"])
    explorer.set(view="relevance")  # only a likeness can be explained
    assert explorer.frame["bars"] == [] and explorer.page.state["target"] == ("picture", "chelsea")
    assert control(explorer, "another") is None
    unpooled = widgets.explore(vit(global_pool=""), PICTURE)
    assert unpooled.frame["bars"] == [] and len(control(unpooled, "view")["options"]) == 6
    unread = widgets.explore(vit(global_pool="max", class_token=False), PICTURE)
    assert "from the patch in row 2, column 2" in caption(unread)
    assert control(unread, "query")["options"] == (("patch", "patch"),)


def test_explorer_shows_single_output_as_value(vit):
    explorer = widgets.explore(model := vit(num_classes=1), PICTURE)
    value = model(given(model)).item()
    (bar,) = explorer.frame["bars"]
    assert bar["share"] == pytest.approx(value, rel=1e-4) and bar["plain"]
    explorer.set(view="relevance")
    assert f"(“0” ({value:.3g})".replace("-", "−")[1:] in caption(explorer)
    assert (
        explorer.wait(60, settled=True)
        and explorer.frame["score"]["scale"] == "value of the output"
    )
    assert "%" not in caption(explorer)


def test_explorer_image_equals_model_input(vit):
    explorer = widgets.explore(vit(img_size=224, patch_size=32), PICTURE)
    shown = np.asarray(Image.open(io.BytesIO(explorer.pictures["picture"])))
    seen = preprocess(explorer.page.model, PICTURE)[0].permute(1, 2, 0).numpy()
    config = explorer.page.model.pretrained_cfg
    expected = np.rint((seen * config["std"] + config["mean"]) * 255).astype(np.uint8)
    enlarged = np.asarray(Image.fromarray(expected).resize((448, 448), Image.Resampling.BICUBIC))
    assert shown.shape == (448, 448, 3) and np.abs(shown.astype(int) - enlarged).max() <= 1


def test_explorer_caption_colors_and_distances(explorer):
    maps, _, _ = reference_attention(explorer.page.model)
    assert "Attention from class token (read-out), layer 2, mean over heads" in caption(explorer)
    assert "not rescaled" in caption(explorer) and "64 × 64 pixels" in caption(explorer)
    assert (
        f"{100 * maps[2].mean(0)[0, 0]:.0f}% of the attention goes to the class token"
        in caption(explorer)
    )
    scale = lambda: explorer.frame["panels"][0]["scale"]  # noqa: E731
    assert scale()["low"] == 0 and scale()["high"] == pytest.approx(values(explorer).max())
    shown = np.frombuffer(scale()["colors"], np.uint8).reshape(256, 4)
    assert shown[[0, -1]].tolist() == [
        [68, 1, 84, 0],
        [253, 231, 37, 191],
    ]  # viridis, from clear to 0.75
    assert_near(shown[:, 3], np.linspace(0, 191.25, 256), atol=0.5)
    explorer.set(opacity="even", strength=0.5)
    assert set(scale()["colors"][3::4]) == {128}
    explorer.set(stretch=True, colors="gray")
    assert (
        scale()["low"] == pytest.approx(values(explorer).min())
        and scale()["colors"][-4:-1] == b"\xff\xff\xff"
    )
    explorer.set(stretch=False, colors="", view="similarity", opacity="value")
    assert scale()["high"] == -scale()["low"] == pytest.approx(np.abs(values(explorer)).max())
    assert explorer.frame["panels"][0]["legend"] == "cosine, ± the largest of other patches"
    assert_near(
        list(scale()["colors"][3::4]), 127.5 * np.abs(np.linspace(-1, 1, 256)).clip(1 / 3), atol=0.5
    )
    assert explorer.wait(60, settled=True)
    y, x = np.divmod(np.arange(16), 4)
    distances = 16 * np.hypot(y[:, None] - y, x[:, None] - x)
    assert_near(
        explorer.frame["mosaic"]["distances"],
        (maps[:, :, 1:, 1:] * distances).sum(-1).mean(-1),
        rtol=1e-5,
    )
    assert_near(
        explorer.frame["mosaic"]["entropies"], -(maps * np.log(maps)).sum(-1).mean(-1), rtol=1e-5
    )
    assert explorer.frame["mosaic"]["uniform"] == pytest.approx(
        distances.mean() * 16 / 17
    )  # of 17 tokens


REFUSED = {
    "layer": (3, "'Layer' must be a whole number from 0 to 2, got 3"),
    "head": (True, "'Head' must be one of 'mean', 'max', 0, 1, 2, got True"),
    "row": (-1, "'Row' must be a whole number from 0 to 3"),
    "smooth": (1, "'Interpolate' must be True or False"),
    "strength": (float("nan"), "'Overlay strength' must be a number from 0 to 1"),
    "nonsense": (1, "A control of this page must be one of photograph"),
}


def test_explorer_opens_on_cat_and_eye(vit):
    """The first page shows the attention of one patch, two thirds up the model."""
    explorer = widgets.explore(model := vit(img_size=224, depth=6))
    state = explorer.page.state
    assert (state["photograph"], state["query"], state["layer"], state["head"]) == (
        "chelsea",
        "patch",
        4,
        "mean",
    )
    assert selected(explorer) == [(5, 4)]
    assert_near(
        values(explorer),
        reference_attention(model)[0][4].mean(0)[1 + 5 * 14 + 4, 1:].reshape(14, 14),
    )
    given = widgets.explore(model, samples()["coffee"]).page.state
    assert (given["query"], given["row"], given["column"]) == ("readout", 7, 7)


@pytest.mark.parametrize("kind", MODELS)
def test_explorer_token_tiles_choose_query(vit, kind):
    """Each token outside the image has a tile, with its share of the attention."""
    model = vit(**MODELS[kind])
    explorer, maps = widgets.explore(model, PICTURE), reference_attention(model)[0]
    names = {
        "mean of patches": ["the mean of the patches"],
        "registers": ["class token", *(f"register {n}" for n in (1, 2, 3))],
        "distilled": ["class token and distillation token", "class token", "distillation token"],
    }
    send(explorer, {"pick": "picture", "row": 1, "col": 2})
    tiles = explorer.frame["panels"][0]["tokens"]
    assert [tile["name"] for tile in tiles] == names.get(kind, ["class token"]) and not any(
        tile["now"] for tile in tiles
    )
    shares = maps[2].mean(0)[model.num_prefix_tokens + 6, : model.num_prefix_tokens]
    assert [tile["share"] for tile in tiles if tile["share"]] == [
        views.percent(share) for share in shares
    ]
    for k, tile in enumerate(tiles):
        assert send(explorer, {"set": {"query": tile["query"]}}) == "" and selected(explorer) == [
            None
        ]
        assert [each["now"] for each in explorer.frame["panels"][0]["tokens"]] == [
            j == k for j in range(len(tiles))
        ]
    explorer.set(view="norms")
    assert explorer.frame["panels"][0]["tokens"] == ()


@pytest.mark.parametrize(
    "kind, side", [("class token", 64), ("registers", 64), ("mean of patches", 64), ("wide", 320)]
)
def test_explorer_mosaic_equals_all_heads(vit, kind, side):
    """A tile for each head of each layer, each up to its own largest weight. Large grids show the largest of blocks."""
    model = vit(img_size=(64, side), **MODELS.get(kind, {}))
    explorer = widgets.explore(model, PICTURE)
    maps, prefix = reference_attention(model)[0], model.num_prefix_tokens
    for content in ({"pick": "picture", "row": 2, "col": 3}, {"set": {"query": "readout"}}):
        assert send(explorer, content) == ""
        mosaic = explorer.frame["mosaic"]
        row = (
            readout(model, maps.shape[-1])
            if "set" in content
            else np.eye(maps.shape[-1])[prefix + 2 * (side // 16) + 3]
        )
        heads = np.einsum("q,lhqk->lhk", row, maps)[..., prefix:].reshape(3, 3, 4, side // 16)
        every = np.concatenate(
            [heads.mean(1, keepdims=True), heads.max(1, keepdims=True), heads], 1
        )
        assert_near(mosaic["tops"], every.max((2, 3)))
        found = np.frombuffer(mosaic["maps"], np.uint8).reshape(
            3, 5, mosaic["rows"], mosaic["cols"]
        )
        if side == 320:  # 16 blocks of 2 columns, at the distance of 20 / 16 columns
            starts = np.arange(16) * 20 // 16
            every = np.maximum(every[..., starts], every[..., starts + 1])
        assert (
            np.abs(found / 255 - every / every.max((2, 3), keepdims=True)).max() <= 0.5 / 255 + 1e-5
        )
    assert mosaic["picks"] == ["mean", "max", 0, 1, 2] and (mosaic["layer"], mosaic["head"]) == (
        2,
        "mean",
    )
    for view, picks, head in (
        ("rollout", ["mean", "max"] + [None] * 3, "mean"),
        ("norms", [None] * 5, None),
        ("contributions", ["sum", None, 0, 1, 2], "every"),
    ):
        explorer.set(view=view)
        mosaic = explorer.frame["mosaic"]
        assert (mosaic["picks"], mosaic["head"]) == (picks, head)
        assert mosaic["layer"] == (None if view == "contributions" else 2)


def test_explorer_marks_and_hides_sinks(vit):
    """A patch that all others look at is marked. Hidden, it takes no part in the scale."""
    model = vit()
    with torch.no_grad():  # all queries meet the key of one patch
        model.pos_embed[0, 1 + 6] *= 40
        model.blocks[2].attn.qkv.weight[96:192] *= 0
        model.blocks[2].attn.qkv.weight[96:192] += 0.5 * torch.outer(
            torch.ones(96), model.pos_embed[0, 7] / model.pos_embed[0, 7].norm()
        )
        model.blocks[2].attn.qkv.bias[:96] = 1
    explorer = widgets.explore(model, PICTURE)
    received = reference_attention(model)[0][2].mean((0, 1))[1:]
    assert np.sum(received > 5 / 17) == 1
    expected = [divmod(k, 4) for k in np.flatnonzero(received > 20 * np.median(received))]
    panel = explorer.frame["panels"][0]
    assert panel["sinks"] == tuple(expected) and len(expected) == 1 and not panel["hides"]
    assert "Dashed: sinks (1), patches that receive more than 20 times the median" in caption(
        explorer
    )
    before = values(explorer)
    assert panel["scale"]["high"] == before.max()
    explorer.set(sinks=True)
    panel, others = (
        explorer.frame["panels"][0],
        np.delete(before.ravel(), 4 * expected[0][0] + expected[0][1]),
    )
    assert (
        panel["hides"]
        and panel["scale"]["high"] == others.max()
        and (values(explorer) == before).all()
    )
    image, sharp = Image.open(io.BytesIO(explorer.pictures["picture"])), panel | {"smooth": False}
    shown, plain = (
        drawing.paint_panel(sharp, image),
        drawing.paint_panel(sharp | {"hides": False}, image),
    )
    (row, col), side = expected[0], shown.shape[0] // 4
    changed = np.abs(shown - plain).max(-1).reshape(4, side, 4, side).max((1, 3))
    assert changed[row, col] > 0 and np.count_nonzero(changed) == 1
    with mock.patch("vitlens.plot.on_images.mark") as mark:
        drawing.figure_png(explorer.page.forward, explorer.page._panel(explorer.page.view()))
    assert [call.args[1] for call in mark.call_args_list if call.kwargs] == expected
    assert panel["legend"] == "attention weight, without sinks"
    explorer.set(view="norms")
    assert explorer.frame["panels"][0]["sinks"] == () and "sinks" not in visible(explorer)


def test_explorer_errors_keep_last_valid_page(explorer, monkeypatch):
    explorer.set(layer=1, row=2)
    state, panels = dict(explorer.page.state), explorer.frame["panels"]
    for name, (value, sentence) in REFUSED.items():
        refuses(sentence, explorer.set, column=0, **{name: value})
        assert explorer.frame["message"].startswith(sentence[:8])
    bad = {
        "notes.png": (b"not a picture at all", "in no format"),
        "cut.png": (saved(PICTURE)[:20000], "incomplete or damaged"),
        "bomb.png": (png(30_000, 30_000), "900000000 pixels"),
    }
    for name, (data, sentence) in bad.items():
        message = send(explorer, {"upload": name}, data)
        assert name in message and sentence in message
    monkeypatch.setattr(explorer.page, "view", lambda check: 1 / 0)
    refuses("Drawing failed .ZeroDivisionError", explorer.set, layer=0)
    assert (dict(explorer.page.state), explorer.frame["panels"]) == (state, panels)
    monkeypatch.undo()
    explorer.set(layer=0)
    assert explorer.frame["message"] == ""


def test_explorer_click_changes_one_control(explorer, monkeypatch):
    """It opens no file, makes no menu and looks from the patch."""
    assert explorer.wait(60, settled=True)
    before = dict(explorer.page.controls)
    monkeypatch.setattr(explorer.page, "make_controls", None)
    monkeypatch.setattr(Image, "open", None)
    assert send(explorer, {"pick": "picture", "row": 3, "col": 1, "number": 7}) == ""
    changed = {
        name: each.value
        for name, each in explorer.page.controls.items()
        if each is not before[name]
    }
    assert changed == {"query": "patch", "row": 3, "column": 1} and selected(explorer) == [(3, 1)]
    assert explorer.frame["answers"] == 7
    assert "got 4" in send(explorer, {"pick": "picture", "row": 4, "col": 1}) and selected(
        explorer
    ) == [(3, 1)]


def test_explorer_uploads(explorer):
    exif = Image.Exif()
    exif[274] = 6
    phone = saved(PICTURE.rotate(90, expand=True), exif=exif)
    several = saved(PICTURE, "MPO", save_all=True, append_images=[PICTURE])
    for data in (phone, saved(samples()["coffee"], "WEBP"), several):
        assert send(explorer, {"upload": "cup.bin"}, memoryview(data)) == ""
        assert explorer.page.state["photograph"] == "cup.bin"
        assert_attention(explorer, ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    explorer.set(photograph="the image given")
    assert_attention(explorer)


def test_explorer_limits_memory_of_uploads_and_captures(vit, monkeypatch):
    assert photographs.KEPT == 256 * 2**20
    explorer = widgets.explore(vit(), PICTURE)
    one, page = explorer.page.forward.bytes, explorer.page
    assert one == 3 * (3 * 17 * 96) * 4  # of each layer q, k and tokens
    monkeypatch.setattr(photographs, "KEPT", 2.5 * one)
    for name in ("rocket", "china", "flower"):
        explorer.set(photograph=name)
    assert len(page.gallery.forwards) == 2 and page.photographs.keys() >= samples().keys()
    small = Image.new("RGB", (100, 80))
    monkeypatch.setattr(photographs, "KEPT", 2 * one + 2.5 * 3 * 100 * 80)
    for name in ("a.png", "b.png", "c.png"):
        assert send(explorer, {"upload": name}, saved(small)) == ""
    assert [name for name, each in page.photographs.items() if each.uploaded] == ["c.png", "b.png"]
    explorer.set(photograph="b.png")
    assert send(explorer, {"upload": "d.png"}, saved(small)) == ""
    assert [name for name, each in page.photographs.items() if each.uploaded] == [
        "d.png",
        "c.png",
    ], "the oldest goes"


def test_explorer_whole_image_keeps_aspect_ratio(vit):
    model = vit(dynamic_img_size=True)
    explorer = widgets.explore(model, PICTURE)  # 451 × 300
    explorer.set(whole=True)
    panel = explorer.frame["panels"][0]
    assert (panel["rows"], panel["cols"]) == (3, 5)
    assert Image.open(io.BytesIO(explorer.pictures["picture"])).size == (5 * 16 * 5, 3 * 16 * 5)
    assert_attention(
        explorer,
        PICTURE.resize((80, 48), Image.Resampling.BICUBIC),
        (3, 5),
        size=(48, 80),
        whole=True,
    )
    explorer.set(row=2, column=4, whole=False)
    explorer.set(row=3, whole=True)
    assert explorer.page.state["row"] == 2, "the grid has three rows now"
    assert "squeezed" not in caption(explorer)
    explorer = widgets.explore(model, PICTURE.resize((640, 10)))
    explorer.set(whole=True)
    assert (explorer.page.forward.grid.rows, explorer.page.forward.grid.cols) == (1, 16)
    assert "The photo is squeezed 4.0 times." in caption(explorer)
    assert control(widgets.explore(vit(), PICTURE), "whole") is None
    cut = widgets.explore(vit(img_size=(70, 64)), PICTURE)
    assert "No patch covers the last 6 pixels at the bottom." in caption(
        cut
    ) and "at the right" not in caption(cut)
    padded = widgets.explore(
        vit(dynamic_img_size=True, dynamic_img_pad=True), PICTURE, size=(64, 70)
    )
    assert "The last patches at the right reach 10 pixels beyond the image." in caption(padded)


FAMILIES = {
    "vit_base_patch16_siglip_224": {},  # an attention pool, whose read-out depends on the image
    "eva02_tiny_patch14_224": {"patch_size": 16},
    "beit_base_patch16_224": {},
    "naflexvit_base_patch16_gap": {"img_size": None},
    "vit_small_patch16_18x2_224": {},  # parallel attentions
    "vit_tiny_patch16_224": {"in_chans": 1},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_explorer_of_families_equals_captures(vit, name):
    model = vit(name=name, depth=2, **FAMILIES[name])
    explorer = widgets.explore(model, PICTURE, size=(64, 64))
    x = preprocess(model, PICTURE, size=(64, 64))
    with torch.no_grad(), capture(model) as attn:
        model(x)
    read = attn.grid.readout.reshape(-1, attn.grid.tokens)[0]
    explorer.set(layer=0, head=1)
    assert_near(values(explorer), attn.grid.image_map(read @ attn[0].weights()[0, 1]))
    explorer.set(row=3, column=0)
    assert_near(
        values(explorer), attn.grid.image_map(attn[0].weights(attn.grid.index(3, 0))[0, 1, 0])
    )
    explorer.set(view="rollout", layer=1)
    assert_near(values(explorer), rollout(attn, (3, 0))[0])
    for view in ("received", "similarity", "components", "norms"):
        explorer.set(view=view)
        assert np.isfinite(values(explorer)).all() and values(explorer).std() > 0


def test_explorer_of_wrapped_and_training_models(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    wrapped = widgets.explore(torch.nn.DataParallel(model), PICTURE)
    np.testing.assert_array_equal(values(wrapped), values(explorer))
    widgets.explore(torch.compile(model), PICTURE)
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


def windowed():
    return timm.create_model("swin_tiny_patch4_window7_224")


def rotary():
    name = "vit_medium_patch16_rope_reg1_gap_256"
    return timm.create_model(name, embed_dim=96, depth=1, num_heads=3)


def broken(model):
    model.head.weight.data.fill_(float("nan"))
    return model


def similarity(vit, view, classes):
    explorer = widgets.explore(vit(num_classes=classes), PICTURE)
    explorer.set(view=view, target=("picture", "coffee"))
    return explorer


def unclassified(vit):
    """Similarity alone can be explained."""
    explorer = widgets.explore(vit(num_classes=0), samples()["coffee"])
    explorer.set(view="relevance")
    return explorer


def without_a_head(vit):
    """The lens of a model with an attention pool, and one head switched off."""
    explorer = widgets.explore(vit(name="vit_base_patch16_siglip_224"), PICTURE)
    explorer.set(view="lens", off=[(0, 0)])
    return explorer


def two_models(vit):
    return widgets.compare(vit(reg_tokens=2), vit(seed=1, depth=2), PICTURE)


A_TEXT = ("text", "a cat")
REFUSALS = (
    # models and images
    (lambda vit: widgets.explore(windowed()), UnsupportedModelError, "windows"),
    (lambda vit: widgets.compare(vit(), windowed()), UnsupportedModelError, "windows"),
    (lambda vit: widgets.explore(broken(vit()), PICTURE), ValueError, "not finite"),
    (lambda vit: widgets.positions(rotary()), ValueError, "position"),
    (lambda vit: widgets.explore(vit(), "no-such.png"), ValueError, "No such file"),
    (lambda vit: widgets.explore(vit(), PICTURE, size=(96, 96)), ValueError, "not take this size"),
    # controls
    (
        lambda vit: widgets.explore(vit(num_classes=0), PICTURE).set(view="lens"),
        ValueError,
        "'View' must be one of its menu, got 'lens'",
    ),
    (lambda vit: unclassified(vit).set(target=3), ValueError, "no classifier head"),
    (lambda vit: similarity(vit, "relevance", 0).set(target=A_TEXT), ValueError, "no text tower"),
    (lambda vit: similarity(vit, "occlusion", 10).set(target=A_TEXT), ValueError, "no text tower"),
    (lambda vit: without_a_head(vit).set(off=[("pool", 0)]), ValueError, "all heads .* pool"),
    (lambda vit: two_models(vit).set(query=1), ValueError, "no register 1"),
)
"""A call, its error and decisive words."""


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_explorer_refuses(vit, call, error, words):
    refuses(words, call, vit, error=error)
