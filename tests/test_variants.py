"""The paper's variants equal their definitions: computed by hand, counted, saved and opened."""

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from support import captured, refuses

import vitlens_paper.variants
from vitlens import capture, filters, load_model, positions
from vitlens.recorder import supported
from vitlens.train import Recipe, export, recipe, starting_from
from vitlens.train.optim import UNDECAYED, optimizers
from vitlens_paper.variants import keywords

torch.set_num_threads(1)
NAMES = "abcdefghij"
# D = 24, H = 2, K = 12, L = 3, 4 × 4 patches of 8 pixels: P = 16, T = 17
BASE = replace(recipe("digits").tiny(), image_size=32, patch_size=8, width=24, depth=3, heads=2)
VARIANTS = [
    {},
    {"positions": "none"},
    {"positions": "learned-2d"},
    {"positions": "relative-1d"},
    {"readout": "mean"},
    {"attention": "axial", "readout": "mean"},
    {"attention": "axial", "readout": "mean", "positions": "relative-1d"},
    {"positions": "learned-2d", "positions_at": "every-layer"},
    {"positions_at": "every-layer"},
    {"positions": "learned-2d", "positions_at": "every-layer-shared"},
    {"positions_at": "every-layer-shared"},
    {
        "attention": "axial",
        "positions": "learned-1d",
        "readout": "mean",
        "positions_at": "every-layer",
    },
]
each_variant = pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda v: "+".join(map(str, v.values())) or "plain"
)


def images(count=2, side=32):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def made(variant):
    """The model in float64, its attention not uniform and its positions large enough to matter."""
    model = replace(BASE, model_kwargs=variant).build().eval().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(20.0 if "pos" in name else 5.0 if "blocks" in name else 1.0)
    return model


def by_hand(model, variant: dict, x: torch.Tensor):
    """(logits, maps) of a model from its weights, in float64 and without timm's blocks."""
    weights, kind = model.state_dict(), variant.get("positions", "learned-1d")

    def linear(name, z):
        return F.linear(z, weights[name + ".weight"], weights[name + ".bias"])

    def norm(name, z):
        return F.layer_norm(
            z, z.shape[-1:], weights[name + ".weight"], weights[name + ".bias"], 1e-6
        )

    tokens = (
        F.conv2d(x, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=8)
        .flatten(2)
        .mT
    )
    prefix = [weights["cls_token"].expand(len(x), -1, -1)] if "cls_token" in weights else []
    z = torch.cat([*prefix, tokens], 1)
    first = z.shape[1] - 16
    table = (
        of_table(weights, "positions." if kind == "learned-2d" else "", first)
        if "learned" in kind
        else 0
    )
    z, maps = z + table, []
    for i in range(len(model.blocks)):
        at = f"blocks.{i}."
        if i and hasattr(model.blocks[i], "positions"):
            own = any(name.startswith(at + "positions.") for name in weights)
            z = z + (of_table(weights, at + "positions.", first) if own else table)
        q, k, v = (
            linear(at + "attn.qkv", norm(at + "norm1", z))
            .unflatten(-1, (3, 2, 12))
            .permute(2, 0, 3, 1, 4)
        )
        logits = torch.empty(len(x), 2, z.shape[1], z.shape[1], dtype=torch.float64)
        for a in range(z.shape[1]):
            for b in range(z.shape[1]):
                key = k[:, :, b]
                if kind == "relative-1d" and a >= first and b >= first:
                    key = key + weights[at + "attn.offset_pos_embed"][a - b + 15]
                logits[:, :, a, b] = (q[:, :, a] * key).sum(-1) / math.sqrt(12)
        maps.append(softmax_by_hand(logits, variant.get("attention"), i))
        z = z + linear(at + "attn.proj", (maps[-1] @ v).transpose(1, 2).flatten(2))
        z = z + linear(at + "mlp.fc2", F.gelu(linear(at + "mlp.fc1", norm(at + "norm2", z))))
    z = norm("norm", z)
    return linear(
        "head", z[:, first:].mean(1) if variant.get("readout") == "mean" else z[:, 0]
    ), maps


def softmax_by_hand(logits: torch.Tensor, attention: str | None, layer: int) -> torch.Tensor:
    """(B, H, T, T) the map of logits: over all tokens, or a line of 4 patches at a time."""
    if attention != "axial":
        return logits.softmax(-1)
    maps = torch.zeros_like(logits)
    for n in range(4):
        line = range(n, 16, 4) if layer % 2 else range(4 * n, 4 * n + 4)
        for a in line:
            maps[:, :, a, line] = logits[:, :, a, line].softmax(-1)
    return maps


def of_table(weights, prefix: str, first: int) -> torch.Tensor:
    """(T, D) a table from the weights below a prefix; first: position of the first patch."""
    if prefix + "pos_embed" in weights:
        return weights[prefix + "pos_embed"][0]
    row, col = weights[prefix + "row_pos_embed"], weights[prefix + "col_pos_embed"]
    patches = [torch.cat([col[c], row[r]]) for r in range(4) for c in range(4)]
    return torch.stack([torch.zeros(24)] * first + patches)


@each_variant
def test_variants_capture_equals_computation_by_hand(variant):
    model, x = made(variant), images().double()
    logits, maps = by_hand(model, variant, x)
    for layer, expected in zip(captured(model, x), maps, strict=True):
        torch.testing.assert_close(layer.weights(), expected, atol=1e-12, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(x), logits, atol=1e-10, rtol=0)
    assert (
        0.2 < maps[0].amax(-1).mean() < 0.99
    )  # neither uniform nor one-hot, so that differences are visible


# Parameters beside those of the plain model: T = 17, D = 24, P = 16, K = 12, L = 3.
COUNTS = (
    ({"positions": "none"}, -17 * 24),
    ({"positions_at": "every-layer"}, 2 * 17 * 24),
    ({"positions_at": "every-layer-shared"}, 0),
    ({"positions": "learned-2d"}, 8 * 12 - 17 * 24),
    ({"positions": "learned-2d", "positions_at": "every-layer"}, 3 * 8 * 12 - 17 * 24),
    ({"positions": "relative-1d"}, 3 * 31 * 12 - 17 * 24),
    ({"readout": "mean"}, -2 * 24),
    ({"attention": "axial", "readout": "mean"}, 3 * (12 * 24**2 + 13 * 24) - 2 * 24),
)


def test_variants_parameters_equal_formula():
    plain = sum(p.numel() for p in BASE.build().parameters())
    for variant, count in COUNTS:
        assert (
            sum(p.numel() for p in replace(BASE, model_kwargs=variant).build().parameters()) - plain
            == count
        ), variant


def test_variants_save_and_open_in_timm(tmp_path):
    for number, variant in enumerate(VARIANTS):
        r, model = (
            replace(BASE, model_kwargs=variant),
            replace(BASE, model_kwargs=variant).build().eval(),
        )
        assert Recipe.from_json(r.to_json()) == r
        opened = load_model(export(model, tmp_path / str(number), r, NAMES, dtype=torch.float32))
        copied = copy.deepcopy(model)  # with a shared table
        sizes = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=10)
        direct = timm.create_model("vitlens_vit", **sizes, **keywords(variant)).eval()
        direct.load_state_dict(model.state_dict())
        with torch.no_grad():
            logits = model(images())
            for parameter in model.parameters():
                parameter.add_(1)
            assert all(torch.equal(each(images()), logits) for each in (opened, copied, direct)), (
                variant
            )
        assert type(opened) is type(model)


REFUSALS = (
    ({"positions": "spiral"}, "learned-1d, none.*'spiral'"),
    ({"positions": "rotary"}, "positions .*'rotary'"),
    ({"positions": "relative-1d"}, "cannot be opened .*offset_pos_embed"),
    ({"whiskers": 3}, "whiskers"),
    ({"pos_embed": "learn"}, "pos_embed"),
    ({"dynamic_img_size": True}, "Leave dynamic_img_size"),
    ({"tokenizer": "conv-stem"}, "tokenizer"),
)
"""Changed arguments of an exported model, and decisive words."""


@pytest.mark.parametrize("change, words", REFUSALS)
def test_variants_refuse(tmp_path, change, words):
    r = replace(BASE, model_kwargs={"positions": "learned-2d"})
    export(r.build(), tmp_path, r, NAMES)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuses(words, load_model, tmp_path)


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_variants_positions_and_tokens_without_decay(optimizer):
    r = replace(
        BASE, optimizer=optimizer, weight_decay=0.1, layer_decay=1.0 if optimizer == "muon" else 0.5
    )
    for variant in VARIANTS:
        model = replace(r, model_kwargs=variant).build()
        names = {p: name for name, p in model.named_parameters()}
        *muon, plain = optimizers(model, r)
        decay = {names[p]: g["weight_decay"] for g in plain.param_groups for p in g["params"]}
        placed = [name for name in names.values() if name.endswith(UNDECAYED)]
        assert all(decay[name] == 0 for name in placed)
        linear = [
            n + ".weight"
            for n, m in model.named_modules()
            if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)
        ]
        assert len(linear) > 13 and all(decay.get(name, 0.1) == 0.1 for name in linear)
        if optimizer == "sgd":
            rates = {names[p]: g["peak_lr"] for g in plain.param_groups for p in g["params"]}
            stem = {
                v
                for n, v in rates.items()
                if n.startswith("patch_embed.") or n in placed and "blocks" not in n
            }
            assert stem == {min(rates.values())} and rates["head.weight"] == max(rates.values())


def test_variants_filters_and_positions():
    for variant in (v for v in VARIANTS if not v.get("readout")):
        model = made(variant)
        assert filters.principal(model, 3)[0].shape == (3, 8, 8, 3)
        kind = variant.get("positions", "learned-1d")
        if kind in ("none", "relative-1d"):
            refuses("no learned", positions.similarity, model)
            continue
        expected = of_table(model.state_dict(), "positions." if kind == "learned-2d" else "", 1)[1:]
        cosine = F.cosine_similarity(expected[:, None], expected, dim=-1).reshape(4, 4, 4, 4)
        torch.testing.assert_close(positions.similarity(model).double(), cosine, atol=1e-5, rtol=0)


def test_variants_readout_with_registers():
    for readout, expected in (
        ("class-token", [1.0] + [0.0] * 20),
        ("mean", [0.0] * 4 + [1 / 16] * 16),
    ):
        model = made({"readout": readout, "reg_tokens": 4})
        with torch.no_grad(), capture(model) as attn:
            model(images().double())
        assert attn.grid.readout.tolist() == expected and attn.grid.prefix == len(expected) - 16


@pytest.mark.slow
def test_variants_open_in_a_new_process(tmp_path):
    """Without the training package, whose recipes name the variants too."""
    r = replace(BASE, model_kwargs={"positions": "relative-1d"})
    folder = export(r.build(), tmp_path / "model", r, NAMES)
    code = (
        f"import sys, torch, vitlens\nmodel = vitlens.load_model({str(folder)!r})\n"
        "with vitlens.capture(model) as attn: model(torch.zeros(1, 3, 32, 32))\n"
        "assert len(attn) == 3 and 'vitlens.train' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_variants_subclass_that_changes_the_forward_is_refused():
    class Changed(vitlens_paper.variants.PaperTransformer):
        def forward_features(self, x):
            return super().forward_features(x)

    class Unchanged(vitlens_paper.variants.PaperTransformer):
        pass

    sizes = dict(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2)
    assert supported.is_known(Unchanged(**sizes)) and not supported.is_known(Changed(**sizes))
    refuses(
        "extends timm's PaperTransformer and overrides forward_features",
        supported.transformer,
        Changed(**sizes),
    )


def test_starting_from_variant(tmp_path):
    r = replace(BASE, model_kwargs={"positions": "learned-2d", "positions_at": "every-layer"})
    model = r.build()
    export(model, tmp_path, r, NAMES, dtype=torch.float32)
    small = recipe("finetune-small").override("image_size=32", "resize=0", "num_classes=4")
    tuned = starting_from(small, tmp_path)
    state, before = tuned.build().state_dict(), model.state_dict()
    assert Recipe.from_json(tuned.to_json()) == tuned and not state["head.weight"].any()
    assert all(
        torch.equal(state[name], before[name]) for name in state if not name.startswith("head.")
    )
    refuses("comes with the model", starting_from, small.override("model.positions=none"), tmp_path)
    refuses(
        "come with the model", replace, BASE, init="elsewhere", model_kwargs={"positions": "none"}
    )
    with pytest.raises(ValueError, match="another shape at this resolution"):
        starting_from(
            recipe("finetune-small").override("image_size=48", "resize=0", "num_classes=4"),
            tmp_path,
        ).build()
