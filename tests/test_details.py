"""The numbers behind attention weights and of the tour, against independent computations."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import unfused_maps

from vitlens import TokenGrid, capture, tokens
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.recorder.layer import Layer
from vitlens.recorder.supported import family
from vitlens_explorer.details import streams, tour, value
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.lanes import QUICK

MODELS = {
    "class token": {},
    "mean of patches": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "registers": {"reg_tokens": 3},
    "no head": {"num_classes": 0},
    "rotary": {"name": "vit_small_patch16_rope_224", "depth": 2},
}


def made(vit, kind):
    return Explorer(vit(**MODELS[kind]), samples()["chelsea"])


def softmax(logits):
    raised = np.exp([-np.inf if logit is None else logit for logit in logits])
    return raised / raised.sum()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("query", ["readout", (2, 1)])
@pytest.mark.parametrize("head", [1, "mean"])
def test_value_products_give_the_weight(vit, kind, query, head):
    """The weight of timm's unfused attention is the softmax of the shown products."""
    page = made(vit, kind)
    forward = page.forward
    maps = torch.cat(unfused_maps(page.model, forward.batch))[1].numpy()
    shown = json.loads(json.dumps(value(forward, 1, head, query, (3, 2))))
    key, position = forward.grid.position((3, 2)), shown["query"]
    grid = forward.grid
    row = grid.readout.numpy() if query == "readout" else np.eye(grid.tokens)[grid.index(*query)]
    combined = np.einsum("q,hqk->hk", row, maps)
    np.testing.assert_allclose(shown["heads"], combined[:, key], atol=1e-6)
    assert shown["head"] == (1 if head == 1 else combined[:, key].argmax()) and shown[
        "largest"
    ] == (head == "mean")
    assert position == (row * maps[shown["head"], :, key]).argmax() and shown[
        "averaged"
    ] == np.count_nonzero(row)
    product = np.dot(shown["q"], shown["k"]) * shown["scale"] + shown["mask"]
    assert product == pytest.approx(shown["logits"][key], abs=1e-4)
    assert softmax(shown["logits"])[key] == pytest.approx(shown["weight"], abs=1e-6)
    assert shown["weight"] == pytest.approx(maps[shown["head"], position, key], abs=1e-6)
    others = (combined[1] if head == 1 else combined.mean(0))[grid.prefix :]
    if query != "readout":
        others[grid.index(*query) - grid.prefix] = 0
    assert value(forward, 1, head, query, None)["key"] == grid.prefix + others.argmax()


def test_value_adds_masks():
    """A mask is part of the product, and a hidden key has no logit."""
    q, k = torch.randn(2, 1, 2, 5, 4)
    with_hidden = torch.tensor([[0.0, -0.5, -torch.inf, 1.0, 0.25]]).expand(5, 5)
    layer = Layer("layer", q, k, 0.5, mask=with_hidden)
    forward = SimpleNamespace(attn=[layer], grid=TokenGrid(2, 2, (1, 1)), prefix=["class token"])
    shown = value(forward, 0, 1, 0, 3)
    assert shown["mask"] == pytest.approx(1.0, abs=1e-6) and shown["logits"][2] is None
    assert np.dot(shown["q"], shown["k"]) * 0.5 + shown["mask"] == pytest.approx(
        shown["logits"][3], abs=1e-5
    )
    assert value(forward, 0, 1, 0, 2)["weight"] == 0


@pytest.mark.parametrize("kind", MODELS)
def test_tour_numbers_equal_the_model(vit, kind):
    page = made(vit, kind)
    model, forward = page.model, page.forward
    shown, position = json.loads(json.dumps(tour(forward, 1, 2, 2, 1))), forward.grid.index(2, 1)
    between, entering = [], []
    handles = [
        block.norm2.register_forward_pre_hook(lambda _, args: between.append(args[0]))
        for block in model.blocks
    ]
    handles.append(
        model.blocks[0].register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    )
    with torch.no_grad():
        layers, logits = tokens.features(model, forward.batch)
    for handle in handles:
        handle.remove()
    stream = torch.stack([entering[0], *layers])[:, 0, position]
    np.testing.assert_allclose(shown["token"], stream[0], rtol=1e-3)
    np.testing.assert_allclose(shown["lengths"], stream.norm(dim=-1), rtol=1e-3)
    middle = torch.stack(between)[:, 0, position]
    wanted = torch.stack(
        [(middle - stream[:-1]).norm(dim=-1), (stream[1:] - middle).norm(dim=-1)], 1
    )
    np.testing.assert_allclose(shown["added"], wanted, rtol=1e-3)
    maps = torch.cat(unfused_maps(model, forward.batch))[:, :, position, forward.grid.prefix :]
    np.testing.assert_allclose(shown["heads"], maps[1], rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(shown["depth"], maps.mean(1), rtol=1e-2, atol=1e-6)
    assert shown["value"] == json.loads(json.dumps(value(forward, 1, 2, (2, 1), None)))
    other = tour(forward, 1, 2, 2, 1, (3, 0))
    assert other["value"] == value(forward, 1, 2, (2, 1), (3, 0))
    assert "and row 3, column 0 a key" in other["sentences"][3]
    every, patch = streams(forward), 2 * forward.grid.cols + 1
    np.testing.assert_allclose(every["tokens"][patch], stream[0], rtol=1e-5)
    np.testing.assert_allclose(every["lengths"][:, patch], stream.norm(dim=-1), rtol=1e-5)
    np.testing.assert_allclose(every["added"][:, patch], wanted, rtol=1e-4)
    assert every["table"] == shown["table"]
    pixels = np.array(shown["pixels"])
    assert np.array_equal(pixels, forward.pixels[32:48, 16:32]) and shown["table"] == (
        kind != "rotary"
    )
    if kind != "rotary":
        np.testing.assert_allclose(
            shown["position"], family(model).positions()[2, 1].detach(), rtol=1e-3
        )
    if kind == "no head":
        assert shown["lens"] == []
    else:
        assert shown["lens"][-1] == [
            str(logits.argmax().item()),
            pytest.approx(logits[0].softmax(-1).max().item()),
        ]


def test_explorer_answers_questions_without_drawing(vit):
    page = made(vit, "class token")
    QUICK.run(page.first)
    before = page.state, page.frame
    answer, buffers = page.reply({"ask": "look", "row": 1, "col": 3}, lambda: None)
    with capture(page.model) as attn, torch.no_grad():
        page.model(preprocess(page.model, samples()["chelsea"], size=(64, 64)))
    wanted = attn[2].weights(query=(1, 3))[0].mean(0)[1:]
    np.testing.assert_allclose(np.frombuffer(buffers[0], "<f4"), wanted, atol=1e-6)
    assert answer["scale"]["high"] == pytest.approx(wanted.max().item()) and len(buffers[1]) == 1024
    assert page.reply({"ask": "value", "key": [1, 1]}, lambda: None)[0]["key"] == 6
    assert (
        "outside the 4 × 4 grid"
        in page.reply({"ask": "look", "row": 9, "col": 0}, lambda: None)[0]["problem"]
    )
    assert (page.state, page.frame) == before
