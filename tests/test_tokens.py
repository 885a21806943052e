"""Patch features equal hooks on the blocks, scikit-learn and closed forms."""

import numpy as np
import pytest
import timm
import torch
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.preprocessing import normalize
from support import refuses

from vitlens import UnsupportedModelError, capture, tokens

FAMILIES = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "vit_base_patch16_siglip_224": {},
    "vit_small_patch14_reg4_dinov2": {"patch_size": 16},
    "eva02_tiny_patch14_224": {"patch_size": 16},
    "beit_base_patch16_224": {},
    "vit_relpos_small_patch16_224": {},
    "vit_medium_patch16_reg1_gap_256": {},
    "naflexvit_base_patch16_gap": {"img_size": None},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_the_outputs_of_the_blocks(vit, name):
    model, seen = vit(name=name, **FAMILIES[name]), []
    handles = [
        block.register_forward_hook(lambda _, __, output: seen.append(output))
        for block in model.blocks
    ]
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(x)
        expected = list(seen)
        for handle in handles:
            handle.remove()
        with capture(model) as attn:
            layers, again = tokens.features(model, x)
    assert torch.equal(logits, again)
    assert len(layers) == len(expected) == len(attn) == 3
    assert all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))
    assert layers[0].shape == (2, attn.grid.tokens, 96)


def run_twice(vit):
    """A module that runs its model on an image and on the mirrored one."""
    module = torch.nn.Sequential(vit())
    module.forward = lambda x: module[0](x) + module[0](x.flip(-1))
    return module


def dropping(vit):
    """A model that leaves patches out."""
    model = vit()
    model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0][:, :9],))
    return model


REFUSALS = (
    (dropping, (64, 64), UnsupportedModelError, "17 tokens .* got 9 .*leaves patches out"),
    (run_twice, (64, 64), UnsupportedModelError, "after 6: .* than once"),
    (
        lambda vit: timm.create_model("swin_tiny_patch4_window7_224"),
        (224, 224),
        UnsupportedModelError,
        "windows",
    ),
    (lambda vit: vit(), (80, 80), ValueError, "not take this size"),
    (
        lambda vit: vit(name="naflexvit_base_patch16_gap", img_size=None),
        (40, 48),
        ValueError,
        "16 × 16 .* 40 × 48",
    ),
)
"""A model, the size of images, the error and decisive words."""


@pytest.mark.parametrize("build, size, error, words", REFUSALS)
def test_features_refuse(vit, build, size, error, words):
    refuses(words, tokens.features, build(vit), torch.zeros(1, 3, *size), error=error)


def test_features_of_the_only_model_inside_a_module(vit):
    model, x = vit(), torch.randn(2, 3, 64, 64)
    layers, logits = tokens.features(torch.nn.Sequential(model, torch.nn.Linear(10, 4)), x)
    assert logits.shape == (2, 4) and torch.equal(layers[-1], tokens.features(model, x)[0][-1])


def test_features_are_computed_in_eval_mode(vit):
    model, x = vit(proj_drop_rate=0.5, patch_drop_rate=0.5), torch.randn(2, 3, 64, 64)
    expected = tokens.features(model, x)
    layers, logits = tokens.features(model.train(), x)
    assert torch.equal(logits, expected[1]) and torch.equal(layers[1], expected[0][1])
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_features_have_the_precision_of_the_model(vit, dtype):
    model, x = vit(), torch.randn(2, 3, 64, 64)
    exact = tokens.features(model, x)[0]
    layers, _ = tokens.features(model.to(dtype), x)
    for layer, reference in zip(layers, exact, strict=True):
        norms = tokens.norms(layer)
        assert layer.dtype == dtype and norms.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(norms.float(), tokens.norms(reference), rtol=0.02, atol=0)


def test_similarity_equals_scikit_learn():
    x = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    row = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0], dtype=torch.float64)
    cosines = tokens.similarity(x, row)
    for batch in range(2):
        read = (x[batch, :1] + x[batch, 1:2]) / 2
        np.testing.assert_allclose(
            cosines[batch], cosine_similarity(x[batch], read)[:, 0], rtol=1e-12
        )
    one_hot = torch.eye(7, dtype=torch.float64)[3]
    assert tokens.similarity(x, one_hot)[:, 3].allclose(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(40, 6), (5, 30)])
def test_components_equal_scikit_learn(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * torch.linspace(
        1, 3, shape[1]
    )
    scores, variance = tokens.components(x)
    reference = PCA(3).fit(x.double())
    expected = reference.transform(x.double())
    expected *= np.where(
        np.take_along_axis(expected, np.abs(expected).argmax(0)[None], 0) < 0, -1, 1
    )
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    np.testing.assert_allclose(variance, reference.explained_variance_ratio_, rtol=1e-5)


def test_colors_and_norms_closed_forms():
    scores = torch.tensor([[-1.0, 10, 5], [1, 30, 5], [0, 20, 5]])
    assert tokens.colors(scores).tolist() == [[0, 0, 0], [1, 1, 0], [0.5, 0.5, 0]]
    assert tokens.norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).tolist() == [5, 2]


def test_colored_shares_one_basis_over_images():
    x = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(3)) * torch.tensor(
        [4.0, 3, 2, 1, 1, 1]
    )
    result = tokens.colored(x)
    reference = PCA(3).fit(units := normalize(x.double().flatten(0, 1)))
    scores = reference.transform(units)
    low, high = np.percentile(scores, [2, 98], axis=0)
    expected, colors = (
        ((scores - low) / (high - low)).clip(0, 1),
        result.colors.flatten(0, 1).numpy(),
    )
    for k in range(3):  # signs are arbitrary
        assert (
            min(abs(colors[:, k] - each).max() for each in (expected[:, k], 1 - expected[:, k]))
            < 1e-5
        )
    np.testing.assert_allclose(result.variance, reference.explained_variance_ratio_, rtol=1e-5)
    same = tokens.colored(x[[0, 0, 1]])
    assert torch.equal(same.colors[0], same.colors[1]), (
        "the same patch has the same color in any image"
    )


def test_colored_leaves_outliers_out_of_the_basis():
    x = torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(4)) * torch.tensor(
        [4.0, 3, 2, 1, 1, 1]
    )
    outliers = torch.zeros(2, 30, dtype=torch.bool)
    outliers[:, :5] = True
    far = x.clone()
    far[:, :5] = torch.tensor([0.0, 0, 0, 0, 0, 9])
    for each in (x, far):
        result = tokens.colored(each, outliers=outliers)
        assert (result.colors[:, :5] == result.colors[0, 0, 0]).all()
        torch.testing.assert_close(result.colors[:, 5:], tokens.colored(x[:, 5:]).colors)
    assert not torch.allclose(
        tokens.colored(far).colors[:, 5:], tokens.colored(x).colors[:, 5:], atol=0.1
    )


def test_colored_matches_order_and_signs_of_another_layer():
    x = torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(5)) * torch.tensor(
        [4.0, 3, 2, 0.1, 0.1, 0.1]
    )
    other = (1 - tokens.colored(x).colors)[..., [2, 0, 1]]
    torch.testing.assert_close(tokens.colored(x, like=other).colors, other)


def test_correspondences_equal_scikit_learn():
    rng = torch.Generator().manual_seed(5)
    a, b = torch.randn(9, 4, generator=rng), torch.randn(7, 4, generator=rng)
    pairs = tokens.correspondences(a, b)
    cosines = cosine_similarity(a, b)
    assert pairs.nearest.tolist() == cosines.argmax(1).tolist()
    np.testing.assert_allclose(pairs.similarity, cosines.max(1), rtol=1e-5)
    assert pairs.mutual.tolist() == [
        cosines.argmax(0)[j] == i for i, j in enumerate(cosines.argmax(1))
    ]
    assert 0 < pairs.mutual.sum() < 9
    moved = tokens.correspondences(a, 3 * a.flip(0))
    assert moved.nearest.tolist() == list(range(8, -1, -1)) and moved.mutual.all()
