"""The masked autoencoder of experiments/autoencoder.py: visible patches, loss, runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom

from experiments import autoencoder
from vitlens import load_model
from vitlens.train import recipe, runs

torch.set_num_threads(1)
PLAN = replace(
    recipe(autoencoder.RECIPE), image_size=16, width=48, depth=2, heads=3, model_kwargs={}
)


@pytest.fixture(scope="module")
def model():
    return autoencoder.build(PLAN, depth=1).eval()


def batch(count):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_encoder_ignores_hidden_patches(model):
    x = batch(3)
    torch.manual_seed(0)
    order, visible = autoencoder.shuffled(3, 16, 0.75)
    assert visible == 4
    hidden = torch.ones(3, 16, dtype=torch.bool).scatter(1, order[:, :visible], False)
    noise = 10 * torch.randn_like(x)
    of_patch = hidden.view(3, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    tokens = model.objective.encoded(model, x, order[:, :visible])
    assert tokens.shape == (3, 1 + 4, 48)
    assert torch.equal(
        model.objective.encoded(model, x + noise * of_patch, order[:, :visible]), tokens
    )
    assert not torch.equal(
        model.objective.encoded(model, x + noise * ~of_patch, order[:, :visible]), tokens
    )


def test_encoder_of_all_patches_equals_timm(model):
    x = batch(3)
    every = torch.arange(16).expand(3, -1)
    torch.testing.assert_close(model.objective.encoded(model, x, every), model.forward_features(x))


def test_shuffle_is_uniform_and_inverted():
    torch.manual_seed(0)
    order, visible = autoencoder.shuffled(40_000, 16, 0.75)
    seen = torch.bincount(order[:, :visible].flatten(), minlength=16)
    low, high = binom.interval(1 - 1e-7, 40_000, 0.25)
    assert (seen >= low).all() and (seen <= high).all()
    tokens = torch.randn(5, 16, 7)
    mixed = torch.stack([each[rows] for each, rows in zip(tokens, order[:5], strict=True)])
    assert not torch.equal(mixed, tokens) and torch.equal(
        autoencoder.unshuffled(mixed, order[:5]), tokens
    )


def test_decoder_ignores_order_of_patches(model):
    x = batch(2)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0)).expand(2, -1)
    again = torch.cat([order[:, :4].flip(1), order[:, 4:].flip(1)], 1)
    one, other = (
        model.objective.decoded(model.objective.encoded(model, x, o[:, :4]), o)
        for o in (order, again)
    )
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_loss_equals_squared_error_of_hidden_patches(model):
    x = batch(3)
    torch.manual_seed(0)
    order, visible = autoencoder.shuffled(3, 16, 0.75)
    predicted = torch.randn(3, 16, 48, requires_grad=True)
    loss = model.objective.loss(predicted, x, order[:, visible:])
    loss.backward()
    each, values = [], x.double().numpy()
    for image, patch in ((i, int(p)) for i in range(3) for p in order[i, visible:]):
        top, left = patch // 4 * 4, patch % 4 * 4
        pixels = values[image, :, top : top + 4, left : left + 4].transpose(1, 2, 0).ravel()
        target = (pixels - pixels.mean()) / np.sqrt(pixels.var(ddof=1) + 1e-6)
        each.append(np.square(predicted[image, patch].detach().numpy() - target).mean())
    np.testing.assert_allclose(loss.item(), np.mean(each), rtol=1e-5)
    shown = torch.zeros(3, 16, dtype=torch.bool).scatter(1, order[:, :visible], True)
    assert not predicted.grad[shown].any() and predicted.grad[~shown].any(-1).all()


def test_autoencoder_run_fine_tunes(tmp_path):
    options = {"tiny": True, "device": "cpu", "quiet": True, "watch": 3, "build": autoencoder.build}
    options["overrides"] = ["image_size=8", "patch_size=2"]
    whole = runs.run("masked-autoencoder", "digits", tmp_path / "a", **options)
    assert (
        whole["validation"]["valid_loss"] > 0
        and load_model(tmp_path / "a" / "model").num_classes == 0
    )
    tuned = runs.run(
        "masked-tuning",
        "digits",
        tmp_path / "c",
        model=str(tmp_path / "a" / "model"),
        overrides=["image_size=8"],
        tiny=True,
        device="cpu",
        quiet=True,
        watch=0,
    )
    assert tuned["validation"]["top1"] > 0
