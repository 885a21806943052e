"""Every choice of a recipe is built, trained, captured exactly, saved, opened, and is what its definition says."""

import copy
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from capture_support import captured

from vitlens import capture, filters, load_model, positions
from vitlens.data import load
from vitlens.recorder import UnsupportedModelError
from vitlens.train import Recipe, checkpoint, export, fit, recipe, snapshots, starting_from
from vitlens.train.choices import CHOICES, SETTINGS
from vitlens.train.optim import UNDECAYED, optimizers

torch.set_num_threads(1)
NAMES = "abcdefghij"
# D = 24, H = 2, K = 12, L = 3, 4 × 4 patches of 8 pixels: P = 16, T = 17
BASE = replace(recipe("digits").tiny(), image_size=32, patch_size=8, width=24, depth=3, heads=2)
TABLES = [(p, at) for p in ("learned-1d", "learned-2d") for at in ("every-layer", "every-layer-shared")]
WITH = {"axial": {"readout": "mean"}}  # what else a choice takes
VARIANTS = [{c.setting: c.name, **WITH.get(c.name, {})} for c in CHOICES if c.setting != "positions_at"]
VARIANTS += [{"positions": p, "positions_at": at} for p, at in TABLES]
VARIANTS += [
    {"readout": "mean", "registers": 4, "positions": "relative-2d", "tokenizer": "shifted-patches"},
    {"readout": "attention-pool", "registers": 4, "positions": "rotary", "tokenizer": "conv-stem"},
    {"readout": "mean", "positions": "learned-2d", "positions_at": "every-layer"},
    {"attention": "locality", "positions": "relative-1d", "registers": 4},
    {"attention": "locality", "positions": "rotary", "readout": "mean", "tokenizer": "shifted-patches"},
    {"attention": "axial", "positions": "relative-2d", "readout": "attention-pool", "tokenizer": "conv-stem"},
    {"attention": "axial", "positions": "learned-1d", "readout": "mean", "positions_at": "every-layer"},
    {"equivariance": "rotations", "readout": "mean", "registers": 4, "positions": "learned-2d"},
]
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(map(str, v.values())))


def images(count=2, side=32):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def made(variant):
    """The model in float64, its attention not uniform and its positions large enough to matter."""
    model = replace(BASE, **variant).build().eval().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(20.0 if "pos" in name else 5.0 if "blocks" in name or "pool" in name else 1.0)
        for name, buffer in model.named_buffers():
            if "running" in name:  # of batch normalization: as after training
                buffer.add_(0.5 * torch.rand(buffer.shape, generator=torch.Generator().manual_seed(2)))
    return model


def by_hand(model, variant: dict, x: torch.Tensor):
    """(logits, maps) of a model from its weights, in float64 and without timm's blocks."""
    weights, kind = model.state_dict(), variant.get("positions", "learned-1d")
    weight = lambda name: weights[name + ".weight"]  # noqa: E731
    bias = lambda name: weights.get(name + ".bias")  # noqa: E731
    linear = lambda name, z: F.linear(z, weight(name), bias(name))  # noqa: E731
    norm = lambda name, z: F.layer_norm(z, z.shape[-1:], weight(name), bias(name), 1e-6)  # noqa: E731
    split = lambda z, n: z.unflatten(-1, (n, 2, 12)).permute(2, 0, 3, 1, 4)  # noqa: E731
    prefix = [weights[name].expand(len(x), -1, -1) for name in ("cls_token", "reg_token") if name in weights]
    z = torch.cat([*prefix, tokens_by_hand(weights, variant.get("tokenizer"), x)], 1)
    first, table = z.shape[1] - 16, stem_table(model, kind, z.shape[1] - 16)
    z = z + table
    maps = []
    for i in range(len(model.blocks)):
        at = f"blocks.{i}."
        if i and hasattr(model.blocks[i], "positions"):
            own = {name: t for name, t in weights.items() if name.startswith(at + "positions.")}
            z = z + (of_table(own, at + "positions.", first) if own else table)
        q, k, v = split(linear(at + "attn.qkv", norm(at + "norm1", z)), 3)
        logits = torch.empty(len(x), 2, z.shape[1], z.shape[1], dtype=torch.float64)
        for a in range(z.shape[1]):
            for b in range(z.shape[1]):
                logits[:, :, a, b] = logit(q[:, :, a], k[:, :, b], a - first, b - first, kind, weights, at + "attn.")
        maps.append(softmax_by_hand(logits, variant.get("attention"), i))
        z = z + linear(at + "attn.proj", (maps[-1] @ v).transpose(1, 2).flatten(2))
        z = z + linear(at + "mlp.fc2", F.gelu(linear(at + "mlp.fc1", norm(at + "norm2", z))))
    z = norm("norm", z)
    if variant.get("readout") == "mean":
        return linear("head", z[:, first:].mean(1)), maps
    if variant.get("readout") == "attention-pool":
        (q,), (k, v) = split(linear("attn_pool.q", weights["attn_pool.latent"]), 1), split(
            linear("attn_pool.kv", z[:, first:]), 2
        )
        pooled = linear("attn_pool.proj", ((q @ k.mT / math.sqrt(12)).softmax(-1) @ v).transpose(1, 2).flatten(1))
        hidden = F.gelu(linear("attn_pool.mlp.fc1", norm("attn_pool.norm", pooled)))
        return linear("head", pooled + linear("attn_pool.mlp.fc2", hidden)), maps
    return linear("head", z[:, 0]), maps


def softmax_by_hand(logits: torch.Tensor, attention: str | None, layer: int) -> torch.Tensor:
    """(B, H, T, T) the map of logits: over all tokens, all but oneself, or a line of 4 patches at a time."""
    size, maps = logits.shape[-1], torch.zeros_like(logits)
    if attention == "locality":
        for a in range(size):
            others = [b for b in range(size) if b != a]
            maps[:, :, a, others] = logits[:, :, a, others].softmax(-1)
        return maps
    if attention == "axial":
        for n in range(4):
            line = range(n, 16, 4) if layer % 2 else range(4 * n, 4 * n + 4)
            for a in line:
                maps[:, :, a, line] = logits[:, :, a, line].softmax(-1)
        return maps
    return logits.softmax(-1)


def tokens_by_hand(weights, tokenizer: str | None, x: torch.Tensor) -> torch.Tensor:
    """(B, P, D) what the tokenizer makes of images."""
    at = "patch_embed."
    if tokenizer == "shifted-patches":  # pixel by pixel, where each of the five images has it from
        shifts = [(0, 0), (4, 4), (4, -4), (-4, 4), (-4, -4)]
        pixels = torch.zeros(len(x), 16, 5, 3, 8, 8, dtype=x.dtype)
        for patch, (n, (down, right)), y, column in itertools.product(range(16), enumerate(shifts), range(8), range(8)):
            row, col = patch // 4 * 8 + y - down, patch % 4 * 8 + column - right
            if 0 <= row < 32 and 0 <= col < 32:
                pixels[:, patch, n, :, y, column] = x[:, :, row, col]
        flat = pixels.flatten(2)
        flat = (flat - flat.mean(-1, keepdim=True)) / (flat.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        flat = flat * weights[at + "proj.norm.weight"] + weights[at + "proj.norm.bias"]
        return flat @ weights[at + "proj.linear.weight"].T + weights[at + "proj.linear.bias"]
    stride = 8
    if tokenizer == "conv-stem":
        stride = 1
        for i, channels in enumerate((6, 12, 24)):
            layer = f"{at}backbone.{i}."
            x = F.conv2d(x, weights[layer + "conv.weight"], stride=2, padding=1)
            scale = weights[layer + "bn.weight"] / (weights[layer + "bn.running_var"] + 1e-5).sqrt()
            shift = weights[layer + "bn.bias"] - scale * weights[layer + "bn.running_mean"]
            x = (x * scale[:, None, None] + shift[:, None, None]).clamp(min=0)
            assert x.shape[1:] == (channels, 16 >> i, 16 >> i)
    return F.conv2d(x, weights[at + "proj.weight"], weights[at + "proj.bias"], stride=stride).flatten(2).mT


def of_table(weights, prefix: str, first: int) -> torch.Tensor:
    """(T, D) a table from the weights below a prefix; first: position of the first patch."""
    if prefix + "pos_embed" in weights:
        return weights[prefix + "pos_embed"][0]
    row, col = weights[prefix + "row_pos_embed"], weights[prefix + "col_pos_embed"]
    patches = [torch.cat([col[c], row[r]]) for r in range(4) for c in range(4)]
    return torch.stack([torch.zeros(24)] * first + patches)


def stem_table(model, kind: str, first: int = 1) -> torch.Tensor:
    """(T, D) what is added at the stem, by its definition."""
    if kind == "sinusoidal":  # sines, then cosines, of the row and of the column at six frequencies from 1 down
        rates = [10000 ** (-i / 6) for i in range(6)]
        places = [(r, c) for r in range(4) for c in range(4)]
        patches = [[f(n * rate) for f in (math.sin, math.cos) for n in at for rate in rates] for at in places]
        return torch.tensor([[0.0] * 24] * first + patches, dtype=torch.float64)
    weights = model.state_dict()
    if kind == "learned-2d":
        return of_table(weights, "positions.", first)
    return of_table(weights, "", first) if kind == "learned-1d" else torch.zeros(first + 16, 24)


def logit(q, k, a: int, b: int, kind: str, weights, at: str):
    """(B, H) logit of query patch a and key patch b; −1 is the class token."""
    patches = a >= 0 and b >= 0
    if kind == "rotary":
        q, k = (rotated(t, n) if n >= 0 else t for t, n in ((q, a), (k, b)))
    if kind == "relative-1d" and patches:
        k = k + weights[at + "offset_pos_embed"][a - b + 15]
    result = (q * k).sum(-1) / weights.get(at + "temperature", math.sqrt(12))
    if kind == "relative-2d" and patches:
        down, right = a // 4 - b // 4 + 3, a % 4 - b % 4 + 3
        result = result + weights[at + "rel_pos.relative_position_bias_table"][down * 7 + right]
    return result


def rotated(t: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, H, 12) pairs of entries turned: three by the column, three by the row, at rates from 1 down to 100^(−2/3)."""
    column, row = patch % 4, patch // 4
    angle = torch.tensor([n * 100 ** (-i / 3) for n in (column, row) for i in range(3)], dtype=torch.float64)
    turned = torch.view_as_complex(t.unflatten(-1, (6, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def test_every_choice_is_told_apart_in_figures():
    assert all(c.title and c.changes.endswith(".") and c.source for c in CHOICES)
    for names in SETTINGS.values():
        first, *others = names.values()
        assert len({c.title for c in names.values()}) == len(names)
        assert not first.keywords and not first.own and all(c.keywords or c.own for c in others)


@each_variant
def test_captured_exactly_and_equal_to_a_computation_by_hand(variant):
    model = made(variant)
    x, group = images().double(), variant.get("equivariance", "none")
    logits, maps = by_hand(model, variant, x)
    if group != "none":  # the head is linear, so the logits of mean tokens are mean logits
        copies = [x.flip(-1)] if group == "flips" else [x.rot90(n, (2, 3)) for n in (1, 2, 3)]
        with torch.no_grad():
            found = model(x)
        torch.testing.assert_close(
            found, torch.stack([logits, *(by_hand(model, variant, each)[0] for each in copies)]).mean(0)
        )
        with pytest.raises(UnsupportedModelError, match=f"equivariance={group}.*look at what it makes of one copy"):
            captured(model, x)
        model.equivariance = "none"
    attn = captured(model, x)
    fixed = variant.get("positions") in ("sinusoidal", "rotary")  # timm keeps sines and cosines in float32
    for layer, expected in zip(attn, maps, strict=True):
        torch.testing.assert_close(layer.weights(), expected, atol=1e-5 if fixed else 1e-12, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(x), logits, atol=1e-4 if fixed else 1e-10, rtol=0)
    assert 0.2 < maps[0].amax(-1).mean() < 0.99  # neither uniform nor one-hot, or little would be told apart


# Parameters beside those of a model without positions: T = 17, D = 24, P = 16, K = 12, H = 2, L = 3.
COUNTS = {
    ("none", "stem"): 0, ("sinusoidal", "stem"): 0, ("rotary", "stem"): 0,
    ("learned-1d", "stem"): 17 * 24, ("learned-1d", "every-layer"): 3 * 17 * 24,
    ("learned-1d", "every-layer-shared"): 17 * 24, ("learned-2d", "stem"): (4 + 4) * 12,
    ("learned-2d", "every-layer"): 3 * (4 + 4) * 12, ("learned-2d", "every-layer-shared"): (4 + 4) * 12,
    ("relative-1d", "stem"): 3 * (2 * 16 - 1) * 12, ("relative-2d", "stem"): 3 * 7 * 7 * 2,
}  # fmt: skip


TABLE = {"learned-1d": {"pos_embed": (1, 17, 24)}, "learned-2d": {"row_pos_embed": (4, 12), "col_pos_embed": (4, 12)}}
"""Shapes of one table."""


def shapes_of(kind: str, at: str) -> dict[str, tuple[int, ...]]:
    """Of the parameters for positions, by name."""
    each = {"relative-1d": ("offset_pos_embed", (2 * 16 - 1, 12)),
            "relative-2d": ("rel_pos.relative_position_bias_table", (7 * 7, 2))}.get(kind)  # fmt: skip
    if each:
        return {f"blocks.{i}.attn.{each[0]}": each[1] for i in range(3)}
    stem = "positions." if kind == "learned-2d" else ""
    places = [stem, *(f"blocks.{i}.positions." for i in (1, 2) if at == "every-layer")]
    return {place + name: shape for place in places for name, shape in TABLE.get(kind, {}).items()}


@pytest.mark.parametrize("kind, at", COUNTS)
def test_parameters_are_counted_by_formula(kind, at):
    bag, placed = replace(BASE, positions="none"), replace(BASE, positions=kind, positions_at=at)
    assert size(placed) - size(bag) == COUNTS[kind, at]
    others = {name for name, _ in bag.build().named_parameters()}
    found = {name: tuple(p.shape) for name, p in placed.build().named_parameters() if name not in others}
    assert found == shapes_of(kind, at)


def size(r):
    return sum(p.numel() for p in r.build().parameters())


PROJECTION = 192 * 24 + 24  # of 8 × 8 × 3 pixels to D = 24
OTHERS = {  # parameters beside those of the model with the defaults
    ("readout", "mean"): -2 * 24,  # the class token and its position
    # the query, q, k and v, their projection, a norm and an MLP of ratio 4; no class token
    ("readout", "attention-pool"): 24 + (24**2 + 24) + 2 * (24**2 + 24) + (24**2 + 24) + 2 * 24 + (8 * 24**2 + 5 * 24)
    - 2 * 24,
    ("registers", 4): 2 * 4 * 24,
    # 3 × 3 convolutions to D/4, D/2 and D channels, a scale and a shift for each channel, and a linear map
    ("tokenizer", "conv-stem"): 9 * (3 * 6 + 6 * 12 + 12 * 24) + 2 * (6 + 12 + 24) + (24**2 + 24) - PROJECTION,
    ("tokenizer", "shifted-patches"): 2 * 5 * 192 + 5 * 192 * 24 + 24 - PROJECTION,
    ("attention", "locality"): 3 * 2,  # a temperature for each head
    ("attention", "axial"): 3 * (12 * 24**2 + 13 * 24) - 2 * 24,  # twice the layers; no class token
}


@pytest.mark.parametrize("setting, name", [(c.setting, c.name) for c in CHOICES if "positions" not in c.setting])
def test_parameters_of_other_choices_are_counted_by_formula(setting, name):
    variant = {setting: name, **WITH.get(name, {})}
    assert size(replace(BASE, **variant)) - size(BASE) == OTHERS.get((setting, name), 0)


@pytest.mark.parametrize("kind", SETTINGS["positions"])
def test_only_a_bag_of_patches_does_not_notice_that_they_are_shuffled(kind):
    model = made({"positions": kind})
    x = images().double()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    patches = F.unfold(x, 8, stride=8)[..., order]
    with torch.no_grad():
        change = (model(F.fold(patches, 32, 8, stride=8)) - model(x)).abs().max()
    assert change < 1e-5 if kind == "none" else change > 1e-3


@each_variant
def test_opened_from_its_folder_as_it_was_saved(variant, tmp_path):
    r, model = replace(BASE, **variant), replace(BASE, **variant).build().eval()
    assert Recipe.from_json(r.to_json()) == r
    opened = load_model(export(model, tmp_path, r, NAMES, dtype=torch.float32))
    copied = copy.deepcopy(model)  # with a shared table of its own
    with torch.no_grad():
        logits = model(images())
        for parameter in model.parameters():
            parameter.add_(1)
        assert torch.equal(opened(images()), logits) and torch.equal(copied(images()), logits)
    assert type(opened) is type(model)


KEYWORDS = ("positions", "positions_at", "tokenizer", "attention", "equivariance")


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c.setting}={c.name}")
def test_built_by_timm_directly_as_by_a_recipe(choice):
    """With the one keyword where `vitlens_vit` has one, else with those of timm."""
    variant = {choice.setting: choice.name, **WITH.get(choice.name, {})}
    asked = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=10)
    for setting, name in variant.items():
        asked |= {setting: name} if setting in KEYWORDS else SETTINGS[setting][name].keywords
    direct, expected = timm.create_model("vitlens_vit", **asked).eval(), replace(BASE, **variant).build().eval()
    shapes = [{name: t.shape for name, t in model.state_dict().items()} for model in (direct, expected)]
    assert shapes[0] == shapes[1]
    direct.load_state_dict(expected.state_dict())
    with torch.no_grad():
        assert torch.equal(direct(images()), expected(images()))


def test_timm_alone_opens_no_folder_of_ours(tmp_path):
    export(replace(BASE, positions="learned-2d").build(), tmp_path, replace(BASE, positions="learned-2d"), NAMES)
    code = f"import timm; timm.create_model('local-dir:{tmp_path}', pretrained=True)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode and "Unknown model (vitlens_vit)" in found.stderr


@pytest.mark.parametrize("change, message", [
    ({"positions": "spiral"}, "positions must be one of learned-1d, none.*'spiral'"),
    ({"whiskers": 3}, "whiskers"),
    ({"positions": "relative-1d"}, "cannot open vitlens_vit.*offset_pos_embed"),
    ({"positions": "learned-1d", "pos_embed": "learn"}, "pos_embed"),
    ({"dynamic_img_size": True}, "no dynamic_img_size"),
])  # fmt: skip
def test_a_folder_that_says_something_else_is_refused(change, message, tmp_path):
    r = replace(BASE, positions="learned-2d")
    export(r.build(), tmp_path, r, NAMES)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("settings, message", [
    (["positions=polar"], "positions must be one of learned-1d"),
    (["positions=none", "positions_at=every-layer"], "is for learned tables"),
    (["model.pos_embed=none", "positions_at=every-layer"], "is for learned tables"),
    (["positions=learned-2d", "model.pos_embed=learn"], "model.pos_embed is a part of positions=learned-2d"),
    (["positions=learned-2d", "width=9", "heads=3"], "multiple of 2, got 9"),
    (["positions=sinusoidal", "width=90"], "multiple of 4, got 90"),
    (["positions=rotary", "width=90"], "head width to be a multiple of 4, got 30"),
    (["positions=rotary", "patch_drop=0.5", "patch_drop_until=0.5"], "patch_drop=0"),
    (["positions_at=every-layer", "patch_drop=0.5", "patch_drop_until=0.5"], "patch_drop=0"),
    (["positions=rotary", "model.dynamic_img_size=true"], "no dynamic_img_size"),
    (["positions=learned-2d", "architecture=vit_base_r50_s16_224"], "vit_base_r50_s16_224 is none of them"),
    (["model.positions=rotary"], "set positions instead"),
    (["registers=3"], "registers must be one of 0, 4, got 3"),
    (["readout=mean", "model.class_token=true"], "model.class_token is a part of readout=mean"),
    (["tokenizer=conv-stem", "image_size=36", "patch_size=6"], "power of 2, got 6"),
    (["tokenizer=conv-stem", "image_size=64", "patch_size=32", "width=48"], "from 4 up; got width 48"),
    (["tokenizer=shifted-patches", "image_size=9", "patch_size=3"], "must be even, got 3"),
    (["attention=axial"], "set readout=mean and registers=0"),
    (["attention=axial", "readout=mean", "registers=4"], "set readout=mean and registers=0"),
    (["attention=axial", "readout=mean", "patch_drop=0.5", "patch_drop_until=0.5"], "whole rows and columns"),
    (["attention=locality", "readout=mean", "patch_size=8"], "no other to see"),
    (["attention=locality", "architecture=resnet50"], "resnet50 is none of them"),
    (["equivariance=flips", "patch_drop=0.5", "patch_drop_until=0.5"], "all patches of every copy"),
    (["tokenizer=conv-stem", "architecture=vit_base_r50_s16_224"], "vit_base_r50_s16_224 is none of them"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_in_a_sentence(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        recipe("digits").override(*settings)
    assert str(caught.value).endswith(".")


@pytest.fixture(scope="module")
def data():
    return tuple(load("digits", split).subset(64) for split in ("train", "valid"))


@each_variant
def test_trained_and_resumed_to_the_bit(variant, data, tmp_path):
    """Stopped after one of two epochs' steps, it goes on to the same weights."""
    r = replace(recipe("digits").tiny(), batch_size=32, width=24, heads=2, precision="fp32", **variant)
    whole, part, rest = r.build(), r.build(), replace(r, seed=r.seed).build()
    before = {name: t.clone() for name, t in whole.state_dict().items()}
    assert len(list(fit(whole, data, r, device="cpu"))) == 4
    still = [n for n, t in whole.named_parameters() if torch.equal(t, before[n])]
    # The last layer's class token is all that is read, and it has no offsets.
    assert all(name.startswith("blocks.1.attn.") for name in still)
    assert len(still) == ("relative" in variant.get("positions", "") and "readout" not in variant)
    for _, step in zip(range(2), fit(part, data, r, device="cpu", out=tmp_path), strict=False):
        assert step.step <= 2
    assert checkpoint.newest_first(tmp_path / "checkpoints")
    list(fit(rest, data, r, device="cpu", out=tmp_path, resume=True))
    assert all(torch.equal(t, rest.state_dict()[name]) for name, t in whole.state_dict().items())


KILLED = [{"positions": p} for p in SETTINGS["positions"] if "learned" not in p]
KILLED += [{"positions": "learned-2d", "positions_at": at} for at in ("every-layer", "every-layer-shared")]
KILLED += [{"tokenizer": "shifted-patches"}, {"attention": "axial", "readout": "mean"}, {"readout": "attention-pool"}]
KILLED += [{"equivariance": "rotations"}]
KILLED += [{
    "positions": "learned-2d", "readout": "mean", "registers": 4, "tokenizer": "conv-stem", "attention": "locality",
    "equivariance": "flips",
}]  # fmt: skip


def killed_run(r, data, out) -> None:
    torch.set_num_threads(1)
    for step in fit(r.build(), data, r, device="cpu", out=out):
        if step.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("variant", KILLED, ids=lambda v: "+".join(map(str, v.values())))
def test_killed_and_resumed_to_the_bit(variant, data, tmp_path, forked):
    """By SIGKILL, which no process hears, also with batch normalization and with copies of each picture."""
    r = replace(
        recipe("digits").tiny(), batch_size=16, width=24, heads=2, precision="fp32", save_every=0.0, **variant
    )  # fmt: skip
    child = forked(killed_run, r, data, tmp_path)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    whole, rest = r.build(), r.build()
    steps = [step.step for step in fit(rest, data, r, device="cpu", out=tmp_path, resume=True)]
    assert len(list(fit(whole, data, r, device="cpu"))) == 8 and steps[-1] == 8 and 4 <= steps[0] <= 6
    assert all(torch.equal(t, rest.state_dict()[name]) for name, t in whole.state_dict().items())


@each_variant
@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_positions_and_tokens_are_no_matrices_to_an_optimizer(variant, optimizer):
    r = replace(BASE, optimizer=optimizer, weight_decay=0.1, layer_decay=1.0 if optimizer == "muon" else 0.5, **variant)
    model = r.build()
    names = {p: name for name, p in model.named_parameters()}
    *muon, plain = optimizers(model, r)
    decay = {names[p]: g["weight_decay"] for g in plain.param_groups for p in g["params"]}
    placed = [name for name in names.values() if name.endswith(UNDECAYED)]
    tokens = [name for name in placed if name in ("cls_token", "reg_token", "attn_pool.latent")]
    assert len(tokens) == (variant.get("readout") != "mean") + bool(variant.get("registers"))
    learned = variant.get("positions") not in ("none", "sinusoidal", "rotary")
    assert all(decay[name] == 0 for name in placed) and (len(placed) > len(tokens)) == learned
    assert all(decay[name] == 0 for name, p in model.named_parameters() if p.ndim == 1)
    linear = [n + ".weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    assert len(linear) > 13 and all(decay.get(name, 0.1) == 0.1 for name in linear)
    if optimizer == "sgd":
        rates = {names[p]: g["peak_lr"] for g in plain.param_groups for p in g["params"]}
        in_stem = lambda name: name in placed and "blocks" not in name and "pool" not in name  # noqa: E731
        stem = {rate for name, rate in rates.items() if in_stem(name) or name.startswith("patch_embed.")}
        assert stem == {min(rates.values())} and rates["head.weight"] == max(rates.values())


@pytest.mark.parametrize("variant, shown", [
    *(({"positions": p}, p in ("learned-1d", "learned-2d", "sinusoidal")) for p in SETTINGS["positions"]),
    *(({"positions": p, "positions_at": at}, True) for p, at in TABLES),
])  # fmt: skip
def test_looked_into(variant, shown):
    model = made(variant)
    components, _ = filters.components(model, 3)
    assert components.shape == (3, 8, 8, 3)
    if not shown:
        with pytest.raises(ValueError, match="rotary embeddings" if variant["positions"] == "rotary" else "no learned"):
            positions.similarity(model)
        return
    expected = stem_table(model, variant["positions"])[1:]
    cosine = F.cosine_similarity(expected[:, None], expected, dim=-1).reshape(4, 4, 4, 4)
    torch.testing.assert_close(positions.similarity(model).double(), cosine, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tokenizer, reason", [("conv-stem", "is a hybrid"), ("shifted-patches", "five shifted")])
def test_filters_of_what_is_no_linear_map_of_a_patch_are_refused(tokenizer, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        filters.components(made({"tokenizer": tokenizer}))
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("readout", SETTINGS["readout"])
def test_what_is_read_is_told_with_the_capture(readout):
    model, x = made({"readout": readout, "registers": 4}), images().double()
    with torch.no_grad(), capture(model) as attn:
        model(x)
    row, first = attn.grid.readout, 4 + (readout == "class-token")
    assert attn.grid.prefix == first and row.shape[-1] == first + 16
    if readout == "class-token":
        assert row.tolist() == [1.0] + [0.0] * 20
    elif readout == "mean":
        assert row.tolist() == [0.0] * 4 + [1 / 16] * 16
    else:
        torch.testing.assert_close(row, F.pad(attn.pool.weights().mean((1, 2)), (4, 0)))
        assert row.amax() > 1.1 / 16


def test_a_temperature_starts_at_the_root_of_the_head_width_and_divides():
    model, plain = replace(BASE, attention="locality").build().eval(), replace(BASE).build().eval()
    assert model.blocks[0].attn.temperature.tolist() == pytest.approx([math.sqrt(12)] * 2)
    plain.load_state_dict(model.state_dict(), strict=False)
    found, whole = (captured(each, images())[0] for each in (model, plain))
    same, maps = torch.eye(17, dtype=torch.bool), found.weights()
    torch.testing.assert_close(found.logits()[:, :, ~same], whole.logits()[:, :, ~same])
    assert not maps[:, :, same].any()
    with torch.no_grad():
        model.blocks[0].attn.temperature.mul_(2)
    torch.testing.assert_close(captured(model, images())[0].logits()[:, :, ~same], whole.logits()[:, :, ~same] / 2)


def test_a_row_and_a_column_of_axial_attention_compose_to_a_map_over_the_image():
    """Along the row, then along the column, attention is computed line by line, and differentiated by its values."""
    attn = captured(made({"attention": "axial", "readout": "mean"}), images().double())
    assert len(attn) == 6
    for rows, columns in zip(attn[::2], attn[1::2], strict=True):
        whole = columns.weights() @ rows.weights()
        torch.testing.assert_close(whole.sum(-1), torch.ones_like(whole.sum(-1)))
        assert (whole > 0).all() and (rows.weights() == 0).sum() == (columns.weights() == 0).sum() == 2 * 2 * 16 * 12

        def both(v, rows=rows, columns=columns):
            """(B, H, rows, cols, K) values → the same, from the queries and keys of both."""
            grid = lambda t: t.unflatten(2, (4, 4))  # noqa: E731
            along = F.scaled_dot_product_attention(grid(rows.q), grid(rows.k), v)
            turned = [t.transpose(2, 3) for t in (grid(columns.q), grid(columns.k), along)]
            return F.scaled_dot_product_attention(*turned).transpose(2, 3)

        values = torch.zeros(2, 2, 4, 4, 1, dtype=torch.float64)
        slope = torch.autograd.functional.jacobian(lambda v, both=both: both(v).sum((0, 1)), values)
        slope = slope.squeeze((2, -1)).permute(2, 3, 0, 1, 4, 5).flatten(4).flatten(2, 3)
        torch.testing.assert_close(slope, whole)


@pytest.mark.parametrize("group, turns", [("flips", [(0, True)]), ("rotations", [(1, False), (2, False), (3, False)])])
@pytest.mark.parametrize("readout", SETTINGS["readout"])
def test_tokens_turn_with_the_picture_and_logits_stay(group, turns, readout):
    model, x = made({"equivariance": group, "readout": readout, "registers": 4}), images().double()
    first = model.num_prefix_tokens
    with torch.no_grad():
        tokens, logits = model.forward_features(x), model(x)
        for quarters, mirrored in turns:
            turn = lambda t, q=quarters, m=mirrored: (t.flip(-1) if m else t).rot90(q, (-2, -1))  # noqa: E731
            after = model.forward_features(turn(x))
            torch.testing.assert_close(after[:, :first], tokens[:, :first])
            places = turn(torch.arange(16).view(4, 4)).flatten()
            torch.testing.assert_close(after[:, first:], tokens[:, first:][:, places])
            torch.testing.assert_close(model(turn(x)), logits)
        model.equivariance = "none"
        assert (model(turn(x)) - model(x)).norm() > 0.01 * logits.norm()


@pytest.mark.parametrize("positions", [name for name in SETTINGS["positions"] if name != "learned-1d"])
def test_a_second_table_of_positions_is_refused(positions):
    with pytest.raises(ValueError, match=rf"pos_embed=learn adds .* positions={positions}; leave pos_embed out\."):
        timm.create_model("vitlens_vit", positions=positions, pos_embed="learn")


def test_rotations_of_an_oblong_image_are_refused():
    with pytest.raises(ValueError, match=r"needs square images, got 32 × 64\."):
        timm.create_model("vitlens_vit", equivariance="rotations", img_size=(32, 64), patch_size=8)


def test_snapshots_of_a_model_that_averages_show_one_copy():
    model, x = replace(BASE, equivariance="flips").build().eval(), images()
    found = snapshots.record(model, x)
    assert model.equivariance == "flips"
    with torch.no_grad():
        confidence = model(x).softmax(-1).amax(-1)
    model.equivariance = "none"
    once = snapshots.record(model, x)
    assert all((found[name] == once[name]).all() for name in ("filters", "positions", "distances", "rollout"))
    assert (found["top1_confidence"] != once["top1_confidence"]).any()
    torch.testing.assert_close(torch.tensor(found["top1_confidence"]).float(), confidence, atol=1e-3, rtol=0)


def test_a_grid_of_three_rows_is_not_taken_for_an_image_of_three_channels():
    for tokenizer in SETTINGS["tokenizer"]:
        model = replace(BASE, image_size=24, tokenizer=tokenizer).build().eval()
        assert captured(model, images(side=24)).grid.image == (24, 24)


def test_a_model_with_a_choice_is_started_from(tmp_path):
    r = replace(BASE, positions="learned-2d", positions_at="every-layer")
    model = r.build()
    export(model, tmp_path, r, NAMES, dtype=torch.float32)
    tuned = starting_from(recipe("finetune-small").override("image_size=32", "resize=0", "num_classes=4"), tmp_path)
    state, before = tuned.build().state_dict(), model.state_dict()
    assert Recipe.from_json(tuned.to_json()) == tuned and not state["head.weight"].any()
    assert all(torch.equal(state[name], before[name]) for name in state if not name.startswith("head."))
    with pytest.raises(ValueError, match="positions comes with the model"):
        replace(tuned, positions="rotary")
    with pytest.raises(ValueError, match="another shape at this resolution"):
        starting_from(recipe("finetune-small").override("image_size=48", "resize=0", "num_classes=4"), tmp_path).build()
