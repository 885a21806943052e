"""A recipe is data: it goes to JSON and back, takes settings from a shell, and refuses contradictions."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from scipy.ndimage import zoom
from support import refuses
from timm.models import save_for_hf

from vitlens import load_model
from vitlens.models import label_names, preprocess
from vitlens.train import RECIPES, Recipe, export, read_recipe, recipe, register, starting_from
from vitlens.train.optim import optimizers
from vitlens_paper import TABLE_4

ROOT = Path(__file__).parent.parent


def test_recipe_json_round_trip():
    for name, r in RECIPES.items():
        assert Recipe.from_json(r.to_json()) == r and recipe(name) is r and r.name == name
        assert Recipe.from_json(r.tiny().to_json()) == r.tiny()


def test_recipe_tiny_changes_sizes_only():
    sizes = {
        "width",
        "depth",
        "epochs",
        "steps",
        "warmup",
        "warmup_steps",
        "batch_size",
        "train_images",
        "valid_images",
        "log_every",
    }
    for name, full in RECIPES.items():
        tiny = full.tiny()
        assert {key for key, value in vars(full).items() if value != getattr(tiny, key)} <= sizes
        if full.image_size == 384 and name != "finetune-pets" or "jft" in name or "21k" in name:
            continue  # as others of the same size
        model = tiny.build()
        trunk = sum(p.numel() for key, p in model.named_parameters() if not key.startswith("head"))
        assert trunk < (3e5 if full.image_size <= 64 else 3e6)
        images = torch.zeros(1, 3, tiny.image_size, tiny.image_size)
        assert model.eval()(images).shape == (
            1,
            tiny.num_classes if tiny.objective == "labels" else tiny.width,
        )


def test_override_converts_types():
    r = recipe("tiny-imagenet").override(
        "epochs=7",
        "lr=2e-3",
        "tf32=true",
        "betas=0.9,0.95",
        "augment.flip=0",
        "augment.scale=(0.5, 1)",
        "optimizer=adamw",
    )
    assert (r.epochs, r.lr, r.tf32, r.betas, r.optimizer) == (7, 2e-3, True, (0.9, 0.95), "adamw")
    assert r.augment.flip == 0.0 and r.augment.scale == (0.5, 1.0)
    assert r.augment.cutmix == recipe("tiny-imagenet").augment.cutmix


WRONG = (
    ("epochs", "no equals sign"),
    ("epoch=1", "got 'epoch'. Did you mean epochs"),
    ("augment.flop=1", "got 'flop'"),
    ("epochs=1.5", "epochs must be of type int, got 1.5"),
    ("tf32=maybe", "of type bool"),
    ("betas=0.9", "2 numbers"),
    ("augment=0", "cannot be set"),
    ("epochs=0", "epochs .0. or in steps .0."),
    ("warmup_steps=9", "steps .9."),
    ("steps=9", "epochs .150. or in steps .9."),
    ("layer_decay=0.5", "adamw or sgd"),
    ("resize=32", "at least image"),
    ("accumulate=3", "multiple of accumulate"),
    ("end_lr=1", "must not exceed lr"),
    ("width=0", "at least 1"),
    ("clip=-1", "0 or more"),
    ("clip=NaN", "finite"),
    ("augment.rotate=NaN", "finite"),
    ("std=0,0,0", "above 0"),
    ("betas=1,2", "below 1"),
    ("lr=0", "above 0"),
    ("mlp_ratio=-1", "above 0"),
    ("augment.pad=64", "63 pixels into"),
    ("muon_lr=1e308", "finite and below"),
    ("drop_path=1", "below 1"),
    ("image_size=65", "multiple of patch"),
    ("width=100", "multiple of heads 3"),
    ("patch_drop_until=0", "work together"),
    ("optimizer=adam", "one of adamw"),
    ("augment.cutmix=0.9", "more than 1"),
    ("warmup=1", "below 1"),
    ("registers=4", "registers"),
    ("masked=0.5", "must be 0 with objective=labels"),
    ("model.positions=polar", "positions must be one of learned-1d"),
    ("model.positions=rotary", "one of learned-1d"),
    ("model.attention=axial", "readout"),
    ("model=1", "got 'model'"),
    ("positions=none", "Set model.positions=none"),
    ("model.embed_dim=64", "its own"),
    ("outputs=percent", "one of"),
    ("model.positions_at=every-layer", "patch_drop=0"),
    ("model.positions=relative-1d", "patch_drop=0"),
    ("model.drop_path_rate=0.1", "its own setting"),
    ("model.num_classes=3", "its own setting"),
    ("model.nothing=1", "nothing"),
    ("model_kwargs=1", "cannot be set"),
)


@pytest.mark.parametrize("setting, words", WRONG)
def test_override_refuses(setting, words):
    refuses(words, lambda: recipe("tiny-imagenet").override(setting).tiny().build())


@pytest.mark.parametrize(
    "setting", ["model.pos_embed=none", "model.positions=learned-2d", "architecture=resnet50"]
)
def test_override_allows_settings_that_others_would_contradict(setting):
    assert recipe("tiny-imagenet").override(setting) != recipe("tiny-imagenet")


SIZES = {
    "img_size": 8,
    "patch_size": 2,
    "embed_dim": 96,
    "depth": 6,
    "num_heads": 3,
    "mlp_ratio": 4.0,
}
PLAIN = {
    "positions": "learned-1d",
    "positions_at": "stem",
    "readout": "class-token",
    "attention": "plain",
}
MEAN = {"global_pool": "avg", "fc_norm": False, "class_token": False}
EARLIER = (  # settings, timm's architecture and keywords
    ({}, "vit_tiny_patch16_224", {}),
    ({"positions": "none"}, "vit_tiny_patch16_224", {"pos_embed": "none"}),
    ({"positions": "learned-2d"}, "vitlens_vit", {"pos_embed": "none", "positions": "learned-2d"}),
    ({"positions_at": "every-layer"}, "vitlens_vit", {"positions_at": "every-layer"}),
    ({"readout": "mean"}, "vit_tiny_patch16_224", MEAN),
    ({"readout": "mean", "attention": "axial"}, "vitlens_vit", MEAN | {"attention": "axial"}),
)


@pytest.mark.parametrize("settings, architecture, keywords", EARLIER)
def test_from_dict_moves_variants_of_earlier_versions(settings, architecture, keywords):
    """Earlier versions wrote four settings that are keywords of the model now."""
    digits = recipe("digits")
    r = Recipe.from_dict(digits.to_dict() | PLAIN | settings)
    assert r == digits.override(*(f"model.{name}={value}" for name, value in settings.items()))
    assert r.architecture_name == architecture and r.arguments() == SIZES | keywords | {
        "num_classes": 10
    }
    kept = Recipe.from_dict(
        digits.to_dict() | PLAIN | settings | {"model_kwargs": {"init_values": 0.5}}
    )
    assert kept.arguments() == r.arguments() | {"init_values": 0.5}


def test_from_dict_keeps_keywords_of_a_model_to_start_from():
    keywords = {"positions": "learned-2d", "pos_embed": "none", "img_size": 8}
    earlier = {
        "init": "model",
        "architecture": "vitlens_vit",
        "model_kwargs": keywords,
        "width": 192,
        "depth": 12,
    }
    r = Recipe.from_dict(recipe("digits").to_dict() | PLAIN | earlier)
    assert r.model_kwargs == keywords and r.arguments() == keywords | {"num_classes": 10}


@pytest.mark.parametrize("name", ["specimen", "vit_tiny_patch8_64"])
def test_from_dict_reads_bundled_training(name):
    account = json.loads((ROOT / "data" / "checkpoints" / name / "training.json").read_text())
    r, written = Recipe.from_dict(account["recipe"]), account["recipe"]
    assert all(
        getattr(r, key) == written[key]
        for key in ("name", "architecture", "lr", "model_kwargs", "init")
    )


@pytest.mark.parametrize(
    "setting",
    [
        "positions=none",
        "positions=learned-1d",
        "positions_at=stem",
        "readout=mean",
        "attention=axial",
    ],
)
def test_former_spelling_of_variants_gives_the_new_one(tmp_path, setting):
    refuses(f"keyword of the model. Set model.{setting}", recipe("digits").override, setting)
    name, _, value = setting.partition("=")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "mine", name: value}))
    refuses(f"mine.json cannot be read .*Set model.{setting}", read_recipe, file)


def test_variants_of_the_plain_model_are_left_out():
    plain = [f"model.{name}={value}" for name, value in PLAIN.items()]
    assert recipe("digits").override(*plain) == recipe("digits")
    assert recipe("masked-patches").override("model.readout=class-token").model_kwargs == {}


def read(**fields):
    return Recipe.from_dict({"name": "x", **fields})


REFUSALS = (
    (lambda: setattr(recipe("digits"), "epochs", 3), dataclasses.FrozenInstanceError, "epochs"),
    # keywords
    (
        lambda: recipe("digits").override(*(f"{name}={value}" for name, value in PLAIN.items())),
        ValueError,
        "Set model.positions=learned-1d",
    ),
    (
        lambda: recipe("digits").override("model.positions=none", "model.pos_embed=learn"),
        ValueError,
        "model.pos_embed .*model.positions=none. Leave",
    ),
    (
        lambda: recipe("digits").override("model.readout=mean", "model.global_pool=max"),
        ValueError,
        "model.global_pool .*model.readout=mean. Leave",
    ),
    # names and types
    (lambda: recipe("imagenet"), ValueError, "got 'imagenet'. Did you mean tiny-imagenet"),
    (lambda: read(batchsize=3), ValueError, "batchsize"),
    (lambda: read(batch_size=32.0), ValueError, "batch_size"),
    (lambda: read(augment=5), ValueError, "augment"),
    (lambda: read(lr="fast"), ValueError, "lr"),
    (lambda: read(tf32=1), ValueError, "tf32"),
    (lambda: read(betas=[0.9]), ValueError, "betas"),
    (lambda: read(epochs=True), ValueError, "epochs"),
)
"""A call, its error and decisive words."""


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_recipes_refuse(call, error, words):
    refuses(words, call, error=error)


def test_register_adds_recipe(request):
    request.addfinalizer(lambda: RECIPES.pop("mine"))
    mine = register(replace(recipe("digits"), name="mine"))
    assert recipe("mine") is mine


def test_export_keeps_model_kwargs(tmp_path):
    r = (
        recipe("digits")
        .tiny()
        .override("model.pos_embed=none", "model.init_values=0.5", "model.qk_norm=true")
    )
    r = Recipe.from_json(replace(r, num_classes=4).to_json())
    model = r.build().eval()
    assert model.pos_embed is None and isinstance(model.blocks[0].attn.q_norm, torch.nn.LayerNorm)
    opened, x = exported(model, r, tmp_path), torch.randn(2, 3, 8, 8)
    assert opened.pos_embed is None and torch.equal(opened(x), model(x))


def test_build_depends_on_seed_with_documented_size():
    before = torch.get_rng_state()
    a, b = (recipe("digits").build() for _ in range(2))
    c = replace(recipe("digits"), seed=1).build()
    assert torch.equal(torch.get_rng_state(), before) and a.training
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head.weight, c.head.weight)
    assert sum(p.numel() for p in a.parameters()) <= 1_000_000
    bundled = recipe("tiny-imagenet").build()
    assert (
        bundled.patch_embed.grid_size == (16, 16)
        and bundled.global_pool == "token"
        and bundled.num_prefix_tokens == 1
    )
    assert 2 * sum(p.numel() for p in bundled.parameters()) < 12e6  # bytes in fp16


TABLE_3 = (  # models, data, (the smaller number of) epochs, learning rate, schedule, weight decay, dropout; as printed
    ("b16 b32", "jft", 7, 8e-4, "linear", 0.1, 0.0),
    ("l32", "jft", 7, 6e-4, "linear", 0.1, 0.0),
    ("l16", "jft", 7, 4e-4, "linear", 0.1, 0.0),
    ("h14", "jft", 14, 3e-4, "linear", 0.1, 0.0),
    ("b16 b32", "imagenet21k", 90, 1e-3, "linear", 0.03, 0.1),
    ("l16 l32", "imagenet21k", 30, 1e-3, "linear", 0.03, 0.1),
    ("b16 b32 l16 l32 h14", "imagenet", 300, 3e-3, "cosine", 0.3, 0.1),
)


def test_pretraining_recipes_equal_table_3():
    seen = set()
    for models, data, *numbers in TABLE_3:
        for model in models.split():
            r = recipe(f"vit-{model}-{data}")
            seen.add(r.name)
            assert [r.epochs, r.lr, r.schedule, r.weight_decay, r.dropout] == numbers
            assert (r.batch_size, r.warmup_steps, r.image_size, r.betas) == (
                4096,
                10_000,
                224,
                (0.9, 0.999),
            )
            assert (r.optimizer, r.patch_size, r.clip) == (
                "adamw",
                int(model[1:]),
                float(data == "imagenet"),
            )
            assert r.head == "mlp" and r.loss == "sigmoid" and r.augment.scale == (0.05, 1.0)
    assert seen == {name for name in RECIPES if name.startswith("vit-")}


def test_fine_tuning_recipes_equal_table_4():
    for name, steps, grid, warmup in (
        ("finetune-imagenet", 20_000, (0.003, 0.01, 0.03, 0.06), 500),
        ("finetune-cifar", 10_000, (0.001, 0.003, 0.01, 0.03), 500),
        ("finetune-pets", 500, (0.001, 0.003, 0.01, 0.03), 100),
        ("finetune-vtab", 2_500, (0.01,), 500),
    ):
        r, row = recipe(name), next(row for row in TABLE_4 if row.steps == steps)
        assert (r.steps, r.epochs, r.batch_size, r.warmup_steps, r.clip) == (
            steps,
            0,
            512,
            warmup,
            1.0,
        )
        assert (r.optimizer, r.momentum, r.weight_decay, r.schedule) == ("sgd", 0.9, 0.0, "cosine")
        assert row.lr == grid and r.lr in grid
        assert (r.image_size, r.resize, r.squash, r.continues) == (384, 448, True, True)


def test_mlp_head_starts_at_bias():
    r = replace(recipe("vit-b16-imagenet").tiny(), num_classes=7)
    model = r.build().eval()
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), torch.full((2, 7), -10.0))  # zero weights, so the bias alone
    hidden = torch.tanh(
        model.head.pre_logits(model.forward_head(model.forward_features(x), pre_logits=True))
    )
    torch.nn.init.normal_(model.head.output.weight)
    torch.testing.assert_close(model(x), model.head.output(hidden))
    before = torch.get_rng_state()
    same, other = (
        replace(r, seed=seed).build().head.pre_logits.weight for seed in (r.seed, r.seed + 1)
    )
    assert torch.equal(same, model.head.pre_logits.weight) and not torch.equal(same, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_build_places_dropout_as_in_paper():
    r = replace(recipe("vit-b16-imagenet").tiny(), dropout=0.25)
    found = {
        name
        for name, m in r.build().named_modules()
        if isinstance(m, torch.nn.Dropout) and m.p == 0.25
    }
    inside = {
        f"blocks.{i}.{place}"
        for i in range(2)
        for place in ("attn.proj_drop", "mlp.drop1", "mlp.drop2")
    }
    assert found == {"pos_drop"} | inside


@pytest.fixture
def published(tmp_path):
    """`published("test_resnet", …)`: a folder with a model as timm publishes them, and the model."""

    def make(name: str, **args):
        torch.manual_seed(3)
        model = timm.create_model(name, **args)
        if getattr(model, "pos_embed", None) is not None:
            torch.nn.init.normal_(model.pos_embed)
        save_for_hf(model, tmp_path / name, model_args=args, safe_serialization=True)
        return tmp_path / name, model

    return make


SMALL = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 3,
    "num_classes": 10,
}


@pytest.fixture
def trained(published):
    """A folder with a small ViT of 32 pixels and 10 classes, with unusual mean and std, and the model."""
    folder, model = published("vit_tiny_patch16_224", **SMALL)
    configure(folder, pretrained_cfg={"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)})
    return folder, model


def configure(folder, **changes: dict) -> None:
    """Change tables of a folder's `config.json`; None takes a key out."""
    config = json.loads((folder / "config.json").read_text())
    for table, values in changes.items():
        config[table] = {k: v for k, v in {**config[table], **values}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


def tuned(name: str = "finetune-small", *settings: str, size: int = 32) -> Recipe:
    """A recipe for fine-tuning on 4 classes at another size."""
    return recipe(name).override(f"image_size={size}", "resize=0", "num_classes=4", *settings)


def test_starting_from_keeps_weights_with_zero_head(trained):
    folder, source = trained
    for size in (32, 48):
        r = starting_from(tuned("finetune-pets", size=size), folder)
        assert (r.width, r.depth, r.heads, r.patch_size, r.mean) == (48, 3, 3, 8, (0.1, 0.2, 0.3))
        assert Recipe.from_json(r.to_json()) == r
        state, before = r.build().state_dict(), source.state_dict()
        assert not state["head.weight"].any() and state["head.weight"].shape == (4, 48)
        same = [
            name
            for name in state
            if not name.startswith("head.") and (size == 32 or name != "pos_embed")
        ]
        assert len(same) > 30 and all(torch.equal(state[name], before[name]) for name in same)
    # 4×4 → 6×6, as scipy.ndimage.zoom of order 1 does it (paper, section 3.2)
    grid = before["pos_embed"][0, 1:].reshape(4, 4, 48).numpy()
    expected = torch.from_numpy(zoom(grid, (1.5, 1.5, 1), order=1)).reshape(36, 48)
    torch.testing.assert_close(state["pos_embed"][0, 1:], expected, atol=1e-6, rtol=0)
    assert torch.equal(state["pos_embed"][0, :1], before["pos_embed"][0, :1])


def test_starting_from_vit_huge_at_384_pixels(published, tmp_path):
    """H/14 sees 27 × 14 of 384 pixels, as in the paper, whose convolution has no padding."""
    folder, _ = published(
        "vit_huge_patch14_224", embed_dim=48, depth=2, num_heads=3, num_classes=10
    )
    r = starting_from(recipe("finetune-pets").override("num_classes=4"), folder)
    model = r.build().eval()
    assert model.patch_embed.grid_size == (27, 27) and model.pos_embed.shape == (1, 1 + 27 * 27, 48)
    torch.nn.init.normal_(model.head.weight)
    opened, x = exported(model, r, tmp_path), torch.randn(1, 3, 384, 384)
    assert torch.equal(opened(x), model(x)) and opened.patch_embed.grid_size == (27, 27)


def exported(model, r: Recipe, tmp_path):
    """The model, opened from its export in full precision."""
    return load_model(export(model, tmp_path / "exported", r, "abcd", dtype=torch.float32))


def test_starting_from_parallel_layers(published):
    folder, _ = published(
        "vit_small_patch16_18x2_224", **SMALL | {"embed_dim": 64, "depth": 2, "num_heads": 4}
    )
    r = starting_from(tuned(size=48), folder)
    assert (r.heads, r.width, r.depth) == (4, 64, 2)
    assert r.build()(torch.randn(1, 3, 48, 48)).tolist() == [[0.0] * 4]


def test_starting_from_takes_multiples_of_the_patch_size(trained):
    small = recipe("finetune-pets").override("image_size=42", "resize=0")
    assert starting_from(small, trained[0]).image_size == 42


VIT, BEIT, RESNET = "vit_tiny_patch16_224", "beit_base_patch16_224", "test_resnet"
WRONG_STARTS = (
    (VIT, SMALL, ["image_size=4"], "image_size 4 .* patch_size 8"),
    (VIT, SMALL, ["model.pos_embed=none"], "model.pos_embed comes with the model"),
    (BEIT, SMALL, ["image_size=64"], "another shape"),
    ("deit_tiny_patch16_224", SMALL | {"in_chans": 1}, [], "takes 1 channels"),
    (RESNET, {}, ["dropout=0.1"], f"dropout needs .*{RESNET} is another model"),
    (RESNET, {}, ["optimizer=muon"], f"optimizer=muon needs .*{RESNET} is another model"),
)
"""A published model, settings that do not fit it, and decisive words."""


@pytest.mark.parametrize("name, args, settings, words", WRONG_STARTS)
def test_starting_from_refuses(published, name, args, settings, words):
    folder, _ = published(name, **args)
    refuses(words, lambda: starting_from(tuned("finetune-small", *settings), folder).build())


def test_starting_from_convnets(published, tmp_path):
    """ResNets, EfficientNets and their like, by the paper's Table 4: all weights and statistics, and a zero head."""
    for name in ("test_resnet", "test_efficientnet"):
        folder, source = published(name, num_classes=10)
        with torch.no_grad():
            for buffer in source.buffers():
                buffer.copy_(torch.rand(buffer.shape) + 1)
        save_for_hf(source, folder, model_args={"num_classes": 10}, safe_serialization=True)
        r = starting_from(tuned(size=48), folder)
        assert Recipe.from_json(r.to_json()) == r
        model, before = r.build(), source.state_dict()
        heads = model.pretrained_cfg["classifier"] + "."
        state = model.state_dict()
        assert all(
            torch.equal(state[name], before[name]) for name in state if not name.startswith(heads)
        )
        x = torch.randn(2, 3, 48, 48)
        assert model.eval()(x).tolist() == [[0.0] * 4] * 2
        torch.nn.init.normal_(model.get_classifier().weight)
        opened = exported(model, r, tmp_path)
        assert torch.equal(opened(x), model(x)) and label_names(opened) == list("abcd")
        assert preprocess(opened, np.zeros((90, 60, 3), np.uint8)).shape == (1, 3, 48, 48)


def test_starting_from_size_in_pretrained_cfg(trained):
    folder, source = trained
    pixels = {"input_size": [3, 32, 32], "fixed_input_size": True}
    configure(folder, model_args={"img_size": None}, pretrained_cfg=pixels)
    model = starting_from(tuned(), folder).build()
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 4) and torch.equal(
        model.pos_embed, source.pos_embed
    )


def test_starting_from_uses_dropout_of_recipe(trained):
    rates = ("drop_path_rate", "proj_drop_rate", "attn_drop_rate", "drop_rate")
    configure(trained[0], model_args=dict.fromkeys(rates, 0.3))
    for expected in (0, 0.2):
        model = starting_from(tuned("finetune-small", f"drop_path={expected}"), trained[0]).build()
        highest = max(getattr(m, "p", getattr(m, "drop_prob", 0)) for m in model.modules())
        assert highest == pytest.approx(expected)


def test_layer_decay_lowers_rates_of_early_layers(trained):
    settings = ("layer_decay=0.5", "optimizer=adamw", "weight_decay=0.1")
    r = starting_from(tuned("finetune-pets", *settings), trained[0])
    model = r.build()
    names = {p: name for name, p in model.named_parameters()}
    (optimizer,) = optimizers(model, r)
    peaks = {
        names[p]: (g["peak_lr"], g["weight_decay"])
        for g in optimizer.param_groups
        for p in g["params"]
    }
    assert len(peaks) == len(names)
    for depth, prefixes in enumerate(
        [
            ("patch_embed", "pos_embed", "cls_token"),
            "blocks.0.",
            "blocks.1.",
            ("blocks.2.", "norm"),
            "head",
        ]
    ):
        for name, (peak, decay) in peaks.items():
            if name.startswith(prefixes):
                assert peak == pytest.approx(r.lr * 0.5 ** (4 - depth)), name
                assert (decay > 0) == (model.get_parameter(name).ndim in (2, 4)), name


def test_build_sets_pretrained_cfg():
    levels = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.4, 0.2)}
    chosen = replace(RECIPES["digits"].tiny(), image_size=32, patch_size=8, **levels)
    picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    expected = (picture / 255 - np.array(chosen.mean)) / np.array(chosen.std)
    np.testing.assert_allclose(
        preprocess(chosen.build(), picture)[0].permute(1, 2, 0), expected, atol=1e-6
    )
