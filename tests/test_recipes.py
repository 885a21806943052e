"""A recipe is data: it goes to JSON and back, takes settings from a shell, and refuses contradictions."""

import dataclasses

import pytest
import torch

from vitlens.recipes import RECIPES, Recipe, recipe


@pytest.mark.parametrize("name", RECIPES)
def test_json_round_trip(name):
    r = RECIPES[name]
    assert Recipe.from_json(r.to_json()) == r and recipe(name) is r and r.name == name
    assert Recipe.from_json(r.tiny().to_json()) == r.tiny()


@pytest.mark.parametrize("name", RECIPES)
def test_the_tiny_mode_is_small_and_switches_nothing_off(name):
    full, tiny = RECIPES[name], RECIPES[name].tiny()
    trunk = sum(p.numel() for name, p in tiny.build().named_parameters() if not name.startswith("head"))
    assert trunk < (3e5 if full.image_size <= 64 else 3e6)
    same = {
        "optimizer",
        "augment",
        "patch_drop",
        "drop_path",
        "average",
        "mix_until",
        "schedule",
        "image_size",
        "heads",
    }
    assert all(getattr(full, field) == getattr(tiny, field) for field in same)
    images = torch.zeros(1, 3, tiny.image_size, tiny.image_size)
    assert tiny.build().eval()(images).shape == (1, tiny.num_classes)


def test_settings_from_a_shell_are_converted():
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


@pytest.mark.parametrize("setting, message", [
    ("epochs", "no equals sign"), ("epoch=1", "no setting epoch.*epochs"), ("augment.flop=1", "no setting augment."),
    ("epochs=1.5", "epochs is of type int; '1.5'"), ("tf32=maybe", "of type bool"), ("betas=0.9", "2 numbers"),
    ("augment=0", "one by one"), ("epochs=0", "its epochs or its steps"), ("steps=9", "its epochs or its steps"),
    ("warmup_steps=9", "a share of the run or a number"), ("layer_decay=0.5", "Muon"), ("resize=32", "raise resize"),
    ("accumulate=3", "equal parts"), ("end_lr=1", "between 0 and lr"), ("width=0", "at least 1"),
    ("warmup=2", "between 0 and 1"),
    ("drop_path=1", "below 1"),
    ("image_size=65", "do not divide"), ("width=100", "3 heads"), ("patch_drop_until=0", "only work together"),
    ("optimizer=adam", "one of adamw"), ("seed=-1", "from 0 up"), ("augment.cutmix=0.9", "more than 1"),
    ("warmup=1", "never decay"),
])  # fmt: skip
def test_what_cannot_be_set_is_refused_in_a_sentence(setting, message):
    with pytest.raises(ValueError, match=message) as caught:
        recipe("tiny-imagenet").override(setting)
    assert str(caught.value).endswith(".") or "flip=0.5" in str(caught.value)


def test_an_unknown_recipe_or_field_is_refused():
    with pytest.raises(ValueError, match="no recipe 'imagenet'.*tiny-imagenet"):
        recipe("imagenet")
    with pytest.raises(ValueError, match="no setting batchsize"):
        Recipe.from_dict({"name": "x", "batchsize": 3})


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe("digits").epochs = 3
    with pytest.raises(TypeError):
        RECIPES["mine"] = recipe("digits")


def test_models_are_functions_of_the_seed_and_of_the_promised_size():
    before = torch.get_rng_state()
    a, b = (recipe("digits").build() for _ in range(2))
    c = dataclasses.replace(recipe("digits"), seed=1).build()
    assert torch.equal(torch.get_rng_state(), before) and a.training
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head.weight, c.head.weight)
    assert sum(p.numel() for p in a.parameters()) <= 1_000_000
    bundled = recipe("tiny-imagenet").build()
    assert (
        bundled.patch_embed.grid_size == (16, 16) and bundled.global_pool == "token" and bundled.num_prefix_tokens == 1
    )
    assert 2 * sum(p.numel() for p in bundled.parameters()) < 12e6  # bytes in fp16
