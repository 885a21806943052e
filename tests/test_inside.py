"""The explorer's views of what is inside, and its switches, against `vitlens.stream` and `vitlens.intervene`."""

import io
import json
import time

import numpy as np
import pytest
import timm
import torch
from data_support import saved
from test_explorer import PICTURE, browser, values, words

from vitlens import intervene, stream, tokens, widgets
from vitlens.attribution import relevance
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.widgets import subjects, switches

MODELS = {
    "class token": {},
    "mean of patches": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "registers": {"reg_tokens": 3},
    "distilled": {"name": "deit_tiny_distilled_patch16_224"},
    "attention pool": {"name": "vit_base_patch16_siglip_224"},
}
every = pytest.mark.parametrize("kind", MODELS)


def given(model, picture=PICTURE):
    return preprocess(model, picture, size=model.patch_embed.img_size)


def control(explorer, name):
    return next(each for each in explorer.frame["controls"] if each["name"] == name)


def reference(model):
    return torch.cat([given(model, each) for each in samples().values()])


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
        explorer.set(view="lens", layer=layer, target=target if target in explorer.subject.likeliest else None)
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
    first, shares = explorer.subject.logits, [bar["share"] for bar in explorer.frame["bars"]]
    x, heads = given(model), [(0, 2), (2, 0)]
    if kind == "attention pool":
        heads.append(("pool", 1))
    explorer.set(off=heads[::-1], way=way)
    assert explorer.state["off"] == tuple(heads)
    with intervene(model, heads=dict.fromkeys(heads, way), reference=reference(model)), torch.no_grad():
        layers, logits = tokens.features(model, x)
    np.testing.assert_allclose(explorer.subject.logits, logits[0], atol=2e-6)
    assert (explorer.subject.logits - first).abs().max() > 1e-4
    for bar in explorer.frame["bars"]:
        assert bar["share"] == pytest.approx(logits[0].softmax(-1)[bar["number"]].item(), abs=1e-6)
        assert bar["before"] == pytest.approx(first.softmax(-1)[bar["number"]].item(), abs=1e-6)
    explorer.set(view="norms", layer=1)
    expected = tokens.norms(layers[1][0, model.num_prefix_tokens :]).unflatten(0, (4, 4))
    np.testing.assert_allclose(values(explorer), expected, rtol=1e-5)
    assert "head 0 of layer 2" in words(explorer) and ("zero" if way == "zero" else "6 sample") in words(explorer)
    subjects._subjects.clear()  # so that it is computed again
    explorer.set(off=[])
    assert torch.equal(explorer.subject.logits, first)
    assert [bar["share"] for bar in explorer.frame["bars"]] == shares and "before" not in explorer.frame["bars"][0]
    assert "Switched off" not in words(explorer)


def test_reasons_are_those_of_the_model_without_its_heads(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    explorer.set(view="relevance", target=explorer.subject.likeliest[1], off=[(1, 1)], way="mean")
    target = explorer.state["target"]
    with intervene(model, heads={(1, 1): "mean"}, reference=reference(model)):
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
    assert explorer.state["way"] == "zero" and explorer.frame["parts"]
    for wrong, says in {(0, 3): r"no \(layer, head\) \(0, 3\); they go from \(0, 0\) to \(2, 2\)", 7: "pairs"}.items():
        with pytest.raises(ValueError, match=says):
            explorer.set(off=[wrong])
    assert "pairs of a layer and a head" in browser(explorer, {"set": {"off": 3}})
    assert explorer.state["off"] == ((0, 0),)
    pooled = widgets.explore(vit(**MODELS["attention pool"]), PICTURE)
    pooled.set(view="lens", off=[(0, 0)])
    with pytest.raises(ValueError, match="needs all heads of the attention pool. Switch them on"):
        pooled.set(off=[("pool", 0)])
    assert pooled.state["off"] == ((0, 0),)
    post = timm.create_model(
        "vit_relpos_small_patch16_rpn_224", img_size=64, embed_dim=96, depth=2, num_heads=3, num_classes=10
    )
    explorer = widgets.explore(post.eval(), PICTURE, size=(64, 64))
    picture = values(explorer)
    message = browser(explorer, {"set": {"view": "contributions"}})
    assert "post-norm" in message and message.endswith(".") and explorer.state["view"] == "attention"
    np.testing.assert_array_equal(values(explorer), picture)


def test_without_classes_no_view_is_about_classes_alone(vit):
    explorer = widgets.explore(vit(num_classes=0), PICTURE)
    offered = dict(map(reversed, control(explorer, "view")["options"]))
    assert {"norms", "relevance"} <= set(offered) and not {"lens", "contributions"} & set(offered)
    explorer.set(off=[(1, 0)], way="zero")  # maps change none the less
    model = explorer.model
    with intervene(model, heads={(1, 0): "zero"}), torch.no_grad():
        layers, _ = tokens.features(model, given(model))
    explorer.set(view="norms", layer=2)
    np.testing.assert_allclose(values(explorer), tokens.norms(layers[2][0, 1:]).unflatten(0, (4, 4)), rtol=1e-5)


def test_the_menu_is_in_groups(vit):
    explorer = widgets.explore(vit(), PICTURE)
    menu = control(explorer, "view")
    assert sum(count for _, count in menu["groups"]) == len(menu["options"])
    assert [name for name, _ in menu["groups"]][:3] == ["Where heads look", "What tokens hold", "What heads write"]
    assert [name for _, name in menu["options"]][:8] == [
        "attention", "received", "rollout", "similarity", "components", "norms", "lens", "contributions",
    ]  # fmt: skip


def test_a_head_that_a_view_has_not_is_replaced(vit):
    explorer = widgets.explore(vit(), PICTURE)
    explorer.set(view="contributions")
    assert control(explorer, "head")["value"] == "every" and control(explorer, "layer")["disabled"]
    explorer.set(head="sum")
    assert not control(explorer, "layer")["disabled"]
    explorer.set(view="attention")
    assert control(explorer, "head")["value"] == "mean" and "mean of the heads" in words(explorer)


def test_another_picture_keeps_the_switches(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    explorer.set(off=[(2, 1)])
    assert browser(explorer, {"upload": "cup.png"}, saved(samples()["coffee"])) == ""
    x = given(model, samples()["coffee"])
    with intervene(model, heads={(2, 1): "mean"}, reference=reference(model)), torch.no_grad():
        np.testing.assert_allclose(explorer.subject.logits, model(x)[0], atol=2e-6)


def test_means_follow_the_weights_and_the_size(vit):
    model = vit(dynamic_img_size=True)
    explorer = widgets.explore(model, PICTURE)
    explorer.set(off=[(0, 0)])
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(1.5)
    for whole in (False, True):
        explorer.set(whole=whole)
        size = tuple(explorer.subject.batch.shape[-2:])
        others = torch.cat([preprocess(model, each, size=size) for each in samples().values()])
        with intervene(model, heads={(0, 0): "mean"}, reference=others), torch.no_grad():
            expected = model(explorer.subject.batch)[0]
        np.testing.assert_allclose(explorer.subject.logits, expected, atol=2e-6)


def test_means_are_taken_once_the_switches_are_in_sight(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    seen = explorer.subject
    assert not switches.known(model, seen.batch, seen.weights)
    assert browser(explorer, {"press": "switches"}) == ""
    deadline = time.monotonic() + 60
    while not switches.known(model, seen.batch, seen.weights) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert switches.known(model, seen.batch, seen.weights)


def test_what_is_saved_says_what_was_off(vit, monkeypatch):
    explorer, sent = widgets.explore(vit(), PICTURE), []
    monkeypatch.setattr(explorer, "send", lambda content, buffers: sent.append(buffers))
    explorer.set(view="contributions", off=[(1, 2)], way="zero")
    assert browser(explorer, {"press": "save", "number": 4}) == ""
    arrays = np.load(io.BytesIO(sent[0][1]))
    about = json.loads(str(arrays["about"]))
    assert about["off"] == [[1, 2]] and about["way"] == "zero" and about["head"] == "every"
    np.testing.assert_allclose(arrays["heads"], explorer.frame["parts"]["heads"])
    assert "Switched off: head 2 of layer 1; it gives zero." in about["words"]
