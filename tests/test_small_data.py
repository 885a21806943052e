"""The choices of experiments/small_data.py: definitions, exact capture, exact resume and equivariance."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import captured

from experiments import small_data
from experiments.small_data import build, change_under
from vitlens import attention, capture
from vitlens.train import recipe, runs

torch.set_num_threads(1)
BASE = replace(recipe("digits").tiny(), image_size=32, patch_size=8, width=24, depth=2, heads=2)
CHOICES = (
    {"positions": "sinusoidal"},
    {"positions": "relative-2d"},
    {"positions": "rotary"},
    {"tokenizer": "conv-stem"},
    {"tokenizer": "shifted-patches"},
    {"attention": "locality"},
    {"equivariance": "flips"},
)
ALL = {
    "equivariance": "rotations",
    "attention": "locality",
    "positions": "rotary",
    "tokenizer": "conv-stem",
}


def images(*shape):
    return torch.randn(
        *(shape or (3, 3, 32, 32)), generator=torch.Generator().manual_seed(0)
    ).double()


def made(plan=BASE, **choices):
    model = build(plan, **choices).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10.0 if "pos" in name else 4.0 if "blocks" in name else 1.0)
    return model


def test_small_data_logits_equal_definitions():
    x, plain = images(), captured(made(), images())[0].logits()
    same = torch.eye(17, dtype=torch.bool)
    local = captured(made(attention="locality"), x)[
        0
    ]  # √K as temperature, and four times that in `made`
    torch.testing.assert_close(4 * local.logits()[:, :, ~same], plain[:, :, ~same])
    assert not local.weights()[:, :, same].any()
    placed = made(positions="relative-2d")
    table, layer = (
        placed.blocks[0].attn.rel_pos.relative_position_bias_table,
        captured(placed, x)[0],
    )
    expected = layer.q @ layer.k.mT / math.sqrt(12)
    for a in range(16):
        for b in range(16):
            expected[:, :, a + 1, b + 1] += table[(a // 4 - b // 4 + 3) * 7 + a % 4 - b % 4 + 3]
    torch.testing.assert_close(layer.logits(), expected)
    rotated = captured(made(positions="rotary"), x)[0]
    plain = captured(made(BASE.override("model.pos_embed=none")), x)[0]
    q = plain.q[:, :, 6].unflatten(-1, (6, 2)).contiguous()  # patch 5: row 1, column 1
    angle = torch.tensor(
        [n * 100 ** (-i / 3) for n in (1, 1) for i in range(3)], dtype=torch.float64
    )
    turned = torch.view_as_real(
        torch.view_as_complex(q) * torch.polar(torch.ones_like(angle), angle)
    ).flatten(-2)
    torch.testing.assert_close(rotated.q[:, :, 6], turned, atol=1e-5, rtol=1e-5)


def test_shifted_patches_contain_five_images():
    model, x = made(tokenizer="shifted-patches"), images()
    shifts, pixels = (
        [(0, 0), (4, 4), (4, -4), (-4, 4), (-4, -4)],
        torch.zeros(16, 5, 3, 8, 8, dtype=x.dtype),
    )
    padded = F.pad(x[0], (8, 8, 8, 8))
    for patch in range(16):
        top, left = 8 + patch // 4 * 8, 8 + patch % 4 * 8
        for n, (down, right) in enumerate(shifts):
            pixels[patch, n] = padded[
                :, top - down : top - down + 8, left - right : left - right + 8
            ]
    flat = F.layer_norm(
        pixels.flatten(1),
        (960,),
        model.patch_embed.proj.norm.weight,
        model.patch_embed.proj.norm.bias,
    )
    torch.testing.assert_close(
        model.patch_embed(x)[0], model.patch_embed.proj.linear(flat), atol=1e-4, rtol=1e-4
    )


def test_small_data_capture_is_exact():
    for choices in (*CHOICES, ALL):
        with small_data.one_copy(model := made(**choices)):
            assert len(captured(model, images())) == 2


@pytest.mark.slow
def test_small_data_run_resumes_and_opens(tmp_path):
    options = {
        "tiny": True,
        "device": "cpu",
        "quiet": True,
        "watch": 0,
        "build": partial(build, **ALL),
        "overrides": ["image_size=8", "patch_size=2", "width=24", "heads=2", "average=0"],
    }
    runs.run("digits", "digits", tmp_path / "a", **options)
    assert not runs.run("digits", "digits", tmp_path / "b", max_minutes=1e-9, **options)["finished"]
    runs.run("digits", "digits", tmp_path / "b", resume=True, **options | {"tiny": False})
    a, b = (small_data.load(tmp_path / run / "model", **ALL) for run in "ab")
    assert (
        all(torch.equal(t, b.state_dict()[name]) for name, t in a.state_dict().items())
        and len(a.label_names) == 10
    )
    with pytest.raises(ValueError, match="experiments.small_data.build"):
        runs.run("digits", "digits", tmp_path / "b", resume=True, device="cpu", quiet=True)


@pytest.mark.parametrize(
    "group, turns", [("flips", [(0, True)]), ("rotations", [(1, False), (2, False), (3, False)])]
)
def test_equivariant_tokens_rotate_with_image(group, turns):
    model, x = made(equivariance=group), images()
    with torch.no_grad():
        tokens, logits = model.forward_features(x), model(x)
        for quarters, mirrored in turns:
            turn = lambda t, q=quarters, m=mirrored: (t.flip(-1) if m else t).rot90(q, (-2, -1))  # noqa: E731
            after, places = (
                model.forward_features(turn(x)),
                turn(torch.arange(16).view(4, 4)).flatten(),
            )
            torch.testing.assert_close(after[:, 1:], tokens[:, 1:][:, places])
            torch.testing.assert_close(model(turn(x)), logits)
        with small_data.one_copy(model):
            assert (model(turn(x)) - model(x)).norm() > 0.01 * logits.norm()
    found = change_under(group, model, x)
    assert (
        found["before"].logits > 0.01
        and found["after"].logits < 1e-10
        and found["after"].maps < 1e-10
    )


def test_change_equals_definition():
    def seen(x):
        with torch.no_grad(), capture(model) as attn:
            logits = model(x)
        return logits, attention.rollout(attn)

    model, x = made(), images()
    found = change_under("flips", model, x)["before"]
    (straight, map_), (mirrored, other) = seen(x), seen(x.flip(-1))
    logits, classes, maps = [], 0, []
    for image in range(3):
        a, b = straight[image] - straight[image].mean(), mirrored[image] - mirrored[image].mean()
        logits.append((((a - b) ** 2).sum() / (a**2).sum()).sqrt().item())
        classes += int(a.argmax() != b.argmax())
        one, two = map_[image] / map_[image].sum(), other[image].flip(1) / other[image].sum()
        maps.append((one - two).clamp(min=0).sum().item())
    assert found.logits == pytest.approx(sum(logits) / 3) and found.classes == pytest.approx(
        classes / 3
    )
    assert found.maps == pytest.approx(sum(maps) / 3) and found.maps > 0.001
