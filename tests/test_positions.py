"""Similarity of positions equals NumPy's, and resizing equals SciPy's and timm's, with a random control."""

import numpy as np
import pytest
import scipy.ndimage
import timm
import torch
from book import by_direction
from scipy.stats import spearmanr
from support import refuses
from timm.layers import resample_abs_pos_embed

from vitlens import positions


def test_similarity_equals_numpy():
    table = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
    got = positions.similarity(table)
    assert got.shape == (4, 6, 4, 6)
    flat = table.numpy().reshape(24, 16).astype(np.float64)
    norms = np.linalg.norm(flat, axis=1)
    np.testing.assert_allclose(
        got.reshape(24, 24), flat @ flat.T / np.outer(norms, norms), atol=1e-6
    )


def test_similarity_leaves_out_prefix_rows():
    for name, kwargs in (
        ("vit_tiny_patch16_224", dict(reg_tokens=4)),
        ("deit_tiny_distilled_patch16_224", {}),
        ("deit3_small_patch16_224", {}),  # no row for the class token
        ("vit_small_patch14_reg4_dinov2", {}),
        ("eva02_tiny_patch14_224", {}),
    ):
        model = timm.create_model(
            name, img_size=(64, 96) if "14" not in name else (56, 84), depth=1, **kwargs
        )
        table = positions.table(model)
        assert table.shape == (4, 6, model.embed_dim)
        torch.testing.assert_close(table.flatten(0, 1), model.pos_embed[0, -24:])
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=96, num_heads=3)
    assert positions.table(model).shape == (*model.embeds.pos_embed.shape[1:3], 96)


@pytest.mark.parametrize(
    "rows, cols, step", [(3, 1, 0), (2, 2, 0), (5, 4, 0), (5, 4, 1), (8, 8, 0.25)]
)
def test_rank_correlation_equals_spearman(rows, cols, step):
    cells = rows * cols
    similarity = torch.randn(
        cells, cells, dtype=torch.float64, generator=torch.Generator().manual_seed(cells)
    )
    similarity = (similarity / step).round() * step if step else similarity
    row, col = np.divmod(np.arange(cells), cols)
    distance = np.hypot(row[:, None] - row, col[:, None] - col)
    different = ~np.eye(cells, dtype=bool)
    expected = spearmanr(similarity.numpy()[different], distance[different]).statistic
    got = positions.rank_correlation(similarity.view(rows, cols, rows, cols))
    assert got == pytest.approx(expected, abs=1e-12)


OTHER_TABLES = "pit_ti_224", "resnet18", "sam2_hiera_tiny"  # or none
NO_TABLE = ("vit_small_patch16_dinov3", "vit_relpos_small_patch16_224", "beit_base_patch16_224")


@pytest.mark.parametrize("name", (*NO_TABLE, *OTHER_TABLES))
def test_similarity_refuses_models_without_a_table(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    refuses("no table of learned position embeddings", positions.similarity, model)


def test_rank_correlation_of_equal_positions_is_zero():
    assert positions.rank_correlation(torch.zeros(3, 4, 3, 4)) == 0  # no structure, and no warning


def test_resize_paper_equals_scipy():
    table = torch.randn(
        1, 1 + 14 * 14, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    grid = table[0, 1:].reshape(14, 14, 8).numpy()
    for size in ((24, 24), (7, 7), (14, 20), (14, 14)):
        got = positions.resize(table, size, prefix=1, grid=(14, 14))
        assert got.shape == (1, 1 + size[0] * size[1], 8) and torch.equal(got[:, :1], table[:, :1])
        zoomed = scipy.ndimage.zoom(grid, (size[0] / 14, size[1] / 14, 1), order=1)
        np.testing.assert_allclose(got[0, 1:].reshape(*size, 8), zoomed, atol=1e-12)


def test_resize_timm_equals_timm():
    table = torch.randn(1, 2 + 4 * 6, 8, generator=torch.Generator().manual_seed(0))
    got = positions.resize(table, (8, 9), prefix=2, grid=(4, 6), method="timm")
    expected = resample_abs_pos_embed(table, [8, 9], [4, 6], num_prefix_tokens=2)
    assert torch.equal(got, expected)
    assert (got - positions.resize(table, (8, 9), prefix=2, grid=(4, 6))).abs().max() > 0.1


def test_rank_correlation_is_nan_without_variation():
    table = positions.similarity(timm.create_model("vit_tiny_patch16_224", img_size=48, depth=1))
    assert np.isfinite(positions.rank_correlation(table))
    assert np.isnan(positions.rank_correlation(table[:1, :1, :1, :1]))
    table[0, 1, 2, 2] = float("nan")
    assert np.isnan(positions.rank_correlation(table))


def test_by_direction_is_the_mean_over_all_pairs_of_an_offset():
    rows, cols = torch.meshgrid(torch.arange(4), torch.arange(3), indexing="ij")
    down, across = ((each[..., None, None] - each).abs() for each in (rows, cols))
    means = by_direction((10 * down + across).float())
    assert torch.equal(means[:2], torch.tensor([[1.0, 2.0], [10.0, 20.0]]))
    assert means[2, 0].isnan(), "no offset in another direction has length 1"
    x, y = (
        np.hypot([1, 1, 2, 2], [1, 2, 1, 2]),
        np.array([11.0, 12, 21, 22]),
    )  # all of length 1 to 3
    right, up = x - x.mean(), y - y.mean()
    slope = (right * up).sum() / (right**2).sum()
    at_two = y.mean() + slope * (2 - x.mean())
    assert means[2, 1].item() == pytest.approx(at_two)
    far = by_direction((down**2 + across**2).sqrt())  # the same in all directions
    assert torch.allclose(far[:, 1], torch.tensor(2.0))
    noisy = torch.rand(4, 3, 4, 3, generator=torch.Generator().manual_seed(0))
    pairs = [
        noisy[r, c, r, d] for r in range(4) for c in range(3) for d in range(3) if abs(c - d) == 1
    ]
    assert by_direction(noisy)[0, 0] == pytest.approx(torch.stack(pairs).mean().item())
