"""Relative changes of weights: known ones come back, each in its own part."""

import copy
import math

import pytest
import torch

from vitlens.train import relative_change

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10)
BLOCK = ("norm1", "attn", "norm2", "mlp")
PARTS = ("cls_token", "pos_embed", "patch_embed", *(f"blocks.{k}.{part}" for k in (0, 1) for part in BLOCK), "norm")


@pytest.fixture
def model(vit):
    return vit(**SMALL)


def test_known_changes_come_back(model):
    after = copy.deepcopy(model)
    with torch.no_grad():
        after.patch_embed.proj.weight *= 3  # and its bias stays, which counts too
        after.pos_embed *= -1
        for parameter in after.blocks[1].mlp.parameters():
            parameter *= 1.25
        after.head.bias += 3
    found = relative_change(model, after)
    weight, bias = (p.double().norm().item() for p in model.patch_embed.parameters())
    expected = dict.fromkeys((*PARTS, "head"), 0.0)
    expected |= {"patch_embed": 2 * weight / math.hypot(weight, bias), "pos_embed": 2, "blocks.1.mlp": 0.25}
    expected["head"] = 3 * 10**0.5 / math.hypot(*(p.double().norm().item() for p in model.head.parameters()))
    assert list(found) == list(expected) and found == pytest.approx(expected, abs=1e-6)


def test_what_began_at_zero(model):
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    assert math.isnan(relative_change(model, model)["head"])
    assert relative_change(model, moved := copy.deepcopy(model))["norm"] == 0
    torch.nn.init.ones_(moved.head.bias)
    assert relative_change(model, moved)["head"] == math.inf


@pytest.mark.parametrize("other", [{"img_size": 64}, {"num_classes": 5}, {"depth": 3}])
def test_models_of_another_shape_are_refused(vit, model, other):
    for pair in ((model, vit(**SMALL | other)), (vit(**SMALL | other), model)):
        with pytest.raises((ValueError, RuntimeError)):
            relative_change(*pair)
