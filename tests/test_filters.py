"""Principal components of embedding filters equal scikit-learn's, with a random control."""

import numpy as np
import pytest
import timm
import torch
from book import spectral_centroid
from sklearn.decomposition import PCA
from support import refuses

from vitlens import filters


def test_components_equal_scikit_learn():
    weight = torch.randn(
        96, 3, 8, 4, generator=torch.Generator().manual_seed(0)
    )  # patches that are not square
    components, variance = filters.principal(weight, k=10)
    assert components.shape == (10, 8, 4, 3) and variance.shape == (10,)
    matrix = weight.permute(0, 2, 3, 1).flatten(1).double().numpy()
    pca = PCA(10, svd_solver="full").fit(matrix)
    np.testing.assert_allclose(variance, pca.explained_variance_ratio_, rtol=1e-5)
    ours = components.flatten(1).double().numpy()
    np.testing.assert_allclose(np.abs((ours * pca.components_).sum(1)), 1, atol=1e-6)
    np.testing.assert_allclose(ours @ ours.T, np.eye(10), atol=1e-6)
    assert all(row[np.abs(row).argmax()] > 0 for row in ours)


def test_components_are_at_most_the_rank():
    assert len(filters.principal(torch.randn(16, 3, 2, 2), k=13)[0]) == 12, (
        "a patch has twelve values"
    )
    assert len(filters.principal(torch.randn(5, 3, 2, 2))[1]) == 4, "five filters about their mean"


def test_kernels_of_models():
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    components, _ = filters.principal(model)
    assert components.shape == (28, 16, 16, 3)
    torch.testing.assert_close(
        filters.kernels(model)[5, 2, 3], model.patch_embed.proj.weight[5, :, 2, 3]
    )
    assert filters.principal(timm.create_model("test_vit", in_chans=1), k=4)[0].shape[-1] == 1


@pytest.mark.parametrize("channels_last", [True, False])
def test_kernels_of_naflex_have_its_pixel_layout(channels_last):
    model = timm.create_model(
        "naflexvit_base_patch16_gap",
        depth=1,
        embed_dim=96,
        num_heads=3,
        embed_proj_type="linear",
        patchify_channels_last=channels_last,
    ).eval()
    kernel = filters.kernels(model)
    assert kernel.shape == (96, 16, 16, 3)
    picture = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        before = model.embeds.proj.bias + torch.einsum("dpqc,bcpq->bd", kernel, picture)
        model.embeds.pos_embed.zero_()
        token = model.embeds(picture)[0]
    torch.testing.assert_close(token[:, -1], before, rtol=1e-4, atol=1e-4)


HYBRID = "vit_tiny_r_s16_p8_224"
REFUSALS = (
    (lambda: timm.create_model(HYBRID, depth=1), "hybrid"),
    (lambda: torch.nn.Linear(3, 3), "no linear patch embedding"),
)
"""A model without filters, and decisive words."""


@pytest.mark.parametrize("build, words", REFUSALS)
def test_filters_refuse(build, words):
    refuses(words, filters.principal, build())


def test_spectral_centroid_of_waves_is_their_frequency():
    y, x = torch.meshgrid(torch.arange(8.0), torch.arange(12.0), indexing="ij")
    waves = [
        torch.ones(8, 12),
        (-1) ** (y + x),
        torch.cos(2 * torch.pi * 3 * x / 12),
        torch.sin(2 * torch.pi * y / 8),
    ]
    waves.append(waves[2] + waves[3])  # equal power: the mean of both
    tiles = torch.stack(waves)[..., None] * torch.tensor([1.0, -2.0, 0.5])
    expected = torch.tensor([0, 0.5**0.5, 3 / 12, 1 / 8, (3 / 12 + 1 / 8) / 2])
    torch.testing.assert_close(spectral_centroid(tiles), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        spectral_centroid(7 * tiles[:, None]), expected[:, None], atol=1e-5, rtol=0
    )
    noise = spectral_centroid(
        torch.randn(200, 16, 16, 3, generator=torch.Generator().manual_seed(0))
    )
    assert noise.mean().item() == pytest.approx(0.38, abs=0.01)
    assert spectral_centroid(torch.zeros(1, 4, 4, 3)).isnan().all()
