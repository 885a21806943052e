"""Learning without labels: corruption, targets and losses of B.1.2 and He et al., and runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import binom, chisquare
from support import captured, refuses

from vitlens import load_model
from vitlens.data import ImageSet
from vitlens.data.augment import normalize
from vitlens.models import label_names
from vitlens.train import fit, recipe, runs, snapshots, starting_from
from vitlens.train.criteria import objective_loss
from vitlens.train.optim import optimizers
from vitlens_paper import masked
from vitlens_paper.variants import SETTINGS

torch.set_num_threads(1)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BASE = replace(
    recipe("masked-patches"),
    image_size=16,
    width=48,
    depth=2,
    heads=3,
    epochs=2,
    batch_size=32,
    log_every=1,
    precision="fp32",
    num_classes=10,
    model_kwargs={},
    optimizer="adamw",
    lr=1e-3,
)
VARIANTS = {name: replace(BASE, objective=name) for name in masked.OBJECTIVES}
each_variant = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="module")
def data():
    """64 + 48 images of 16 × 16 pixels with random labels."""
    generator = torch.Generator().manual_seed(0)

    def some(count):
        coarse = torch.randint(0, 256, (count, 3, 2, 2), generator=generator, dtype=torch.uint8)
        noise = torch.randint(-9, 10, (count, 3, 16, 16), generator=generator)
        pixels = (coarse.repeat_interleave(8, 2).repeat_interleave(8, 3).int() + noise).clamp(
            0, 255
        )
        return ImageSet(
            pixels.to(torch.uint8), torch.zeros(count, dtype=torch.int64), tuple("abcdefghij")
        )

    return some(64), some(48)


def batch(data, count=6):
    return normalize(data[0].images[:count], MEAN, STD)


@pytest.mark.parametrize("share", [0.5, 0.15])
def test_corruption_is_independent_with_paper_shares(share):
    """Counts of 640,000 draws stay within bounds that a right program leaves once in 10⁷ runs."""
    torch.manual_seed(0)
    corrupted, source = masked.corruption(10_000, 64, share)
    own = torch.arange(64)
    for chance, found in (
        (share, corrupted),
        (0.8 * share, source == -1),
        (0.1 * share, (source >= 0) & (source != own)),
        (0.1 * share, corrupted & (source == own)),
    ):
        low, high = binom.interval(1 - 1e-7, found.numel(), chance)
        assert low <= int(found.sum()) <= high
    assert (source == own)[~corrupted].all()
    offset = ((source - own) % 64)[(source >= 0) & (source != own)]
    assert (
        chisquare(torch.bincount(offset, minlength=64)[1:]).pvalue > 1e-6
    )  # every other patch is equally likely
    counts = masked.corruption(20_000, 16, share)[0].sum(1)  # of independent patches: binomial
    expected = 20_000 * binom.pmf(np.arange(17), 16, share)
    kept = expected > 5
    observed = torch.bincount(counts, minlength=17).numpy()
    pooled = [np.append(each[kept], each[~kept].sum() + 1e-9) for each in (observed, expected)]
    assert chisquare(pooled[0], pooled[1] * pooled[0].sum() / pooled[1].sum()).pvalue > 1e-6


def test_colors_equal_floor_of_mean():
    """All 256 even colors, and means a 256th of a pixel value to both sides of every border between two levels."""
    for side, patch in ((1, 4), (4, 16)):
        for value in range(256):
            ids = masked.colors(
                torch.full((1, 3, patch, patch), value, dtype=torch.uint8), patch, side
            )
            assert (ids == 73 * (value // 32)).all() and ids.shape == (1, 1, side * side)
    for border in range(32, 256, 32):
        image = torch.full((1, 3, 16, 16), border, dtype=torch.uint8)
        assert masked.colors(image, 16).item() == 73 * border // 32
        image[0, :, 3, 5] -= 1
        assert masked.colors(image, 16).item() == 73 * (border // 32 - 1)
    ids = torch.arange(512)  # the color of a number lies in the middle of its bin
    pixels = (
        (masked.color_of(ids) * 255).round().to(torch.uint8)[..., None, None].expand(-1, -1, 4, 4)
    )
    assert torch.equal(masked.colors(pixels, 4)[:, 0, 0], ids)


@pytest.mark.parametrize("side", [1, 4])
def test_colors_equal_independent_computation(data, side):
    images = data[0].images
    x = normalize(images, MEAN, STD)
    pixels = masked.restore_pixels(
        x, torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    )
    assert torch.equal(pixels, images.long())  # normalization is undone to the bit
    part, found = 8 // side, masked.colors(pixels, 8, side).numpy()
    values = images.numpy().astype(np.float64)
    for image, patch, cell in np.ndindex(*found.shape):
        top = patch // 2 * 8 + cell // side * part
        left = patch % 2 * 8 + cell % side * part
        mean = values[image, :, top : top + part, left : left + part].mean((1, 2))
        red, green, blue = np.floor(8 * mean / 256).astype(int)
        assert found[image, patch, cell] == 64 * red + 8 * green + blue


def test_assembled_inverts_in_patches(data):
    x = batch(data)
    cut = masked.in_patches(x, 4)
    assert torch.equal(cut[2, 5].reshape(4, 4, 3), x[2, :, 4:8, 4:8].permute(1, 2, 0))
    assert torch.equal(masked.assemble_patches(cut, 4, 4), x.permute(0, 2, 3, 1))


@each_variant
def test_loss_covers_corrupted_patches_only(data, name):
    model, x = VARIANTS[name].build(), batch(data)
    torch.manual_seed(0)
    corrupted, source = masked.corruption(len(x), 16, 0.5)
    predicted = model.objective.predict(model, x, source).detach().requires_grad_()
    loss = model.objective.loss(predicted, x, corrupted)
    loss.backward()
    assert not predicted.grad[~corrupted].any() and predicted.grad[corrupted].any(-1).all()
    said, each = predicted.detach().double().numpy(), []
    images = data[0].images[: len(x)].numpy().astype(np.float64)
    for image, patch in np.argwhere(corrupted.numpy()):
        top, left = patch // 4 * 4, patch % 4 * 4
        pixels = images[image, :, top : top + 4, left : left + 4]
        if name == "pixels":
            values = (pixels / 255 - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
            each.append(np.square(said[image, patch] - values.transpose(1, 2, 0).ravel()).mean())
            continue
        cells = [pixels.mean((1, 2))] if name == "mean-color" else pixels.reshape(3, 16).T
        for k, mean in enumerate(cells):
            logits = said[image, patch, 512 * k : 512 * (k + 1)]
            target = int(np.floor(8 * mean / 256) @ [64, 8, 1])
            each.append(np.log(np.exp(logits).sum()) - logits[target])
    np.testing.assert_allclose(loss.item(), np.mean(each), rtol=1e-5)
    assert model.objective.loss(predicted, x, torch.zeros_like(corrupted)).item() == 0, (
        "no NaN of 0 / 0"
    )


def test_predicted_corrupts_before_positions(data):
    """The same outputs as of timm's own forward, its patch embedding replaced by a list of corrupted embeddings."""
    model, x = VARIANTS["mean-color"].build().eval(), batch(data, 2)
    source = torch.arange(16).repeat(2, 1)
    source[0, 3], source[0, 7], source[1, 0] = -1, 2, 15
    clean = model.patch_embed(x)
    tokens = clean.clone()
    tokens[0, 3], tokens[0, 7], tokens[1, 0] = (
        model.objective.mask_token[0, 0],
        clean[0, 2],
        clean[1, 15],
    )
    handle = model.patch_embed.register_forward_hook(lambda *_: tokens)
    expected = model.objective.head(model.forward_features(x)[:, 1:])
    handle.remove()
    torch.testing.assert_close(model.objective.predict(model, x, source), expected)


@each_variant
def test_masked_variants_train_all_weights(data, name):
    r = replace(VARIANTS[name], average=0.5, epochs=10, lr=3e-3)
    model, average = r.build(), {}
    before = {n: t.clone() for n, t in model.state_dict().items()}
    steps = list(fit(model, data, r, device="cpu", average=average))
    assert all(not torch.equal(t, before[n]) for n, t in model.named_parameters())
    assert steps[-1].loss < 0.97 * steps[0].loss
    found, state = steps[-1].metrics, torch.get_rng_state()
    assert set(found) == {"valid_loss", "valid_loss_average"}
    assert (
        found["valid_loss"]
        == objective_loss(model, data[1], r)
        == objective_loss(model, data[1], r)
    )
    assert torch.equal(torch.get_rng_state(), state) and model.training
    model.load_state_dict(average, strict=False)
    assert found["valid_loss_average"] == pytest.approx(objective_loss(model, data[1], r), rel=1e-6)


def test_masked_patches_support_positions_and_precisions(data):
    for positions in SETTINGS["positions"]:
        r = replace(BASE, model_kwargs={"positions": positions})
        assert next(fit(r.build(), data, r, device="cpu")).loss == pytest.approx(
            np.log(512), rel=0.05
        )
    for precision, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        r, seen = replace(BASE, precision=precision), []
        model = r.build()
        model.objective.head.register_forward_hook(
            lambda _, __, out, seen=seen: seen.append(out.dtype)
        )
        assert np.isfinite(next(fit(model, data, r, device="cpu")).loss) and set(seen) == {kind}
        assert all(p.dtype == torch.float32 for p in model.parameters())


@each_variant
def test_masked_optimizers_train_all_without_mask_decay(name):
    for optimizer in ("adamw", "muon", "sgd"):
        r = replace(
            VARIANTS[name], optimizer=optimizer, layer_decay=0.5 if optimizer == "sgd" else 1.0
        )
        model = r.build()
        names = {p: n for n, p in model.named_parameters()}
        groups = [
            (names[p], g) for o in optimizers(model, r) for g in o.param_groups for p in g["params"]
        ]
        assert sorted(n for n, _ in groups) == sorted(names.values())
        assert dict(groups)["objective.mask_token"]["weight_decay"] == 0
        assert dict(groups)["objective.head.weight"]["peak_lr"] == r.lr
    one, same, other = (replace(VARIANTS[name], seed=s).build().state_dict() for s in (0, 0, 1))
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not torch.equal(one["objective.head.weight"], other["objective.head.weight"])


TINY = ("image_size=8", "patch_size=2")


def test_masked_run_resumes_and_fine_tunes(tmp_path):
    quiet = {"tiny": True, "device": "cpu", "quiet": True}
    options = {"overrides": (*TINY, "average=0.5"), "watch": 3, **quiet}
    account = runs.run("masked-patches", "digits", tmp_path / "a", **options)
    assert not runs.run("masked-patches", "digits", tmp_path / "b", max_minutes=1e-9, **options)[
        "finished"
    ]
    rest = runs.run(
        "masked-patches", "digits", tmp_path / "b", resume=True, **options | {"tiny": False}
    )
    assert rest["validation"] == account["validation"]
    a, b = ((tmp_path / run / "model" / "model.safetensors").read_bytes() for run in "ab")
    assert a == b
    found = account["validation"]
    assert found["valid_loss"] > 0 and "top1" not in found and account["finished"]
    folder = tmp_path / "a" / "model"
    model = load_model(folder)
    assert model.num_classes == 0 and not hasattr(model, "objective") and label_names(model) is None
    kept = load_file(folder / "model.safetensors")
    assert not any(n.startswith("objective") for n in kept)
    assert all(
        n.startswith("objective.")
        for n in load_file(folder / "pretraining_head" / "head.safetensors")
    )
    assert len(captured(model, torch.randn(2, 3, 8, 8))) == 2
    shots = snapshots.load(tmp_path / "a" / "snapshots.npz")
    assert shots["predicted"].shape[0] == len(shots["steps"]) and "top1_confidence" not in shots
    assert (shots["source"] == shots["source"][0]).all() and (
        shots["corrupted"] == shots["corrupted"][0]
    ).all()
    assert shots["predicted"].min() >= 0 and shots["predicted"].max() <= 1
    options = {"model": str(folder), "overrides": ["image_size=8"], "watch": 0, **quiet}
    assert runs.run("masked-tuning", "digits", tmp_path / "c", **options)["validation"]["top1"] > 0
    state = (
        starting_from(recipe("masked-tuning").override("image_size=8"), folder).build().state_dict()
    )
    assert all(torch.equal(state[n], kept[n].float()) for n in kept)


def test_masked_run_of_an_earlier_version_resumes(tmp_path):
    """Its files have the read-out among the settings, and the objective by the module where it was."""
    options = {"overrides": TINY, "watch": 0, "device": "cpu", "quiet": True}
    whole = runs.run("masked-patches", "digits", tmp_path / "a", tiny=True, **options)
    runs.run("masked-patches", "digits", tmp_path / "b", tiny=True, max_minutes=1e-9, **options)
    earlier = {
        "positions": "learned-1d",
        "positions_at": "stem",
        "readout": "mean",
        "attention": "plain",
    }
    for path in (tmp_path / "b" / "recipe.json", *(tmp_path / "b" / "checkpoints").glob("*.json")):
        content = json.loads(path.read_text())
        settings = content.get("recipe", content)
        assert settings.pop("model_kwargs") == {"readout": "mean"}
        settings |= {"model_kwargs": {}, **earlier}
        if "objective" in content and content is not settings:
            assert content["objective"] == "vitlens_paper.masked.MaskedPatches"
            content["objective"] = "vitlens.train.masked.MaskedPatches"
        path.write_text(json.dumps(content))
    rest = runs.run("masked-patches", "digits", tmp_path / "b", resume=True, **options)
    assert rest["finished"] and rest["validation"] == whole["validation"]


def test_masked_run_without_classes(data):
    r = replace(BASE, num_classes=1)
    one = tuple(replace(split, class_names=("photos",)) for split in data)
    assert next(fit(r.build(), one, r, device="cpu")).loss > 0
    with pytest.raises(ValueError, match="at least two classes"):
        fit(
            replace(r, objective="labels", masked=0.0).build(),
            one,
            replace(r, objective="labels", masked=0.0),
        )


REFUSALS = (
    ("masked=0", "share between 0 and 1"),
    ("masked=1", "below 1"),
    ("objective=colors", "one of labels"),
    ("architecture=vit_base_r50_s16_224", "plain Vision Transformers"),
    ("image_size=30", "multiple of patch_size"),
    ("objective=colors-4x4 image_size=36 patch_size=6", "multiple of 4"),
    ("model.attention=axial", "whole images"),
    ("label_smoothing=0.1", "label_smoothing"),
    ("loss=sigmoid", "loss"),
    ("head=mlp", "head"),
    ("patch_drop=0.5 patch_drop_until=0.5", "patch_drop"),
    ("augment.mixup=0.2", "mixup"),
    ("model.dynamic_img_size=true", "one size"),
    ("init=elsewhere", "come with the model"),
    ("tokenizer=conv-stem", "tokenizer"),
    ("objective=autoencoder", "one of labels"),
)
"""Settings that contradict each other, and decisive words."""


@pytest.mark.parametrize("settings, words", REFUSALS)
def test_masked_recipe_refuses(settings, words):
    refuses(words, recipe("masked-patches").override, *settings.split())
