"""Geometry of token grids, against closed forms."""

import math
from dataclasses import replace

import pytest
import timm
import torch
from support import refuses

from vitlens import TokenGrid
from vitlens.recorder.supported import family, token_grid

UNIFORM = [
    (14, 14, 16, 116.492),
    (7, 7, 32, 115.5),
    (16, 16, 14, 116.6),
    (24, 24, 16, 200.1),
    (8, 8, 4, 16.55),
]


@pytest.mark.parametrize("rows, cols, patch, expected", UNIFORM)
def test_uniform_distance_equals_the_mean_of_all_distances(rows, cols, patch, expected):
    grid = TokenGrid(rows, cols, (patch, patch))
    assert grid.uniform_distance(renormalize=True) == pytest.approx(expected, abs=0.06)
    wide, registers = (
        TokenGrid(rows, cols + 3, (patch, 2 * patch), prefix=0),
        replace(grid, prefix=5),
    )
    for layout in (grid, wide, registers):
        mean = layout.distances(dtype=torch.float64).mean().item()
        assert layout.uniform_distance(renormalize=True) == pytest.approx(mean, rel=1e-12)
        assert layout.uniform_distance() == pytest.approx(
            mean * layout.patches / layout.tokens, rel=1e-12
        )


def test_distances_on_a_rectangular_grid():
    grid = TokenGrid(14, 20, (16, 8), prefix=5)
    distances = grid.distances(dtype=torch.float64)
    for i, j in [(0, 0), (0, 1), (0, 20), (3, 279), (45, 17)]:
        dy, dx = (i // 20 - j // 20) * 16, (i % 20 - j % 20) * 8
        assert distances[i, j].item() == pytest.approx(math.hypot(dy, dx), abs=1e-9)
    torch.testing.assert_close(grid.distances(30, 47, dtype=torch.float64), distances[30:47])
    assert TokenGrid(14, 14, (16, 16)).distances()[0, -1].item() == pytest.approx(294.156, abs=1e-3)


def test_index_matches_image_map():
    grid = TokenGrid(14, 20, (16, 16), prefix=2)
    assert (grid.patches, grid.tokens) == (280, 282)
    assert grid.index(0, 0) == 2 and grid.index(1, 3) == 25 and grid.index(13, 19) == 281
    values = torch.arange(282.0)
    assert grid.image_map(values)[1, 3] == 25


def test_position_of_tokens_and_patches():
    grid = TokenGrid(2, 3, (16, 16), prefix=2)
    assert [grid.position(query) for query in (0, 7, (0, 0), (1, 2), [1, 0])] == [0, 7, 2, 7, 5]


def test_prefix_names():
    for name, kwargs, names in (
        ("vit_tiny_patch16_224", {}, ["class token"]),
        ("vit_tiny_patch16_224", {"reg_tokens": 2}, ["class token", "register 1", "register 2"]),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}, []),
        ("vit_medium_patch16_reg1_gap_256", {"num_heads": 3}, ["register 1"]),
        ("deit_tiny_distilled_patch16_224", {}, ["class token", "distillation token"]),
        (
            "naflexvit_base_patch16_map",
            {"num_heads": 3, "class_token": True},
            ["class token", "register 1"],
        ),
    ):
        model = timm.create_model(name, embed_dim=48, depth=1, **kwargs)
        assert (
            family(model).prefix[: len(names)] == names
            and len(family(model).prefix) == model.num_prefix_tokens
        )


def readout(name, **kwargs):
    with torch.device("meta"):
        model = timm.create_model(name, **kwargs)
    return token_grid(model, (224, 224)).readout


def test_pixel_patches_are_the_nearest():
    """The nearest center, also for pixels in a margin and in last patches that the image cuts."""
    for grid in (
        TokenGrid(2, 3, (4, 5), 1),
        TokenGrid(2, 3, (4, 5), 1, (11, 16)),
        TokenGrid(2, 3, (4, 5), 1, (7, 12)),
    ):
        patches = grid.pixel_patches()
        assert patches.shape == grid.image
        pixels = torch.cartesian_prod(
            torch.arange(grid.image[0]) + 0.5, torch.arange(grid.image[1]) + 0.5
        )
        nearest = (
            ((pixels[:, None] - grid.centers()).abs() / torch.tensor(grid.patch)).sum(-1).argmin(-1)
        )
        assert torch.equal(patches.flatten(), nearest)


def test_token_grid_readouts():
    assert readout("vit_tiny_patch16_224").tolist() == [1.0] + [0.0] * 196
    assert readout("deit_tiny_distilled_patch16_224").tolist() == [0.5, 0.5] + [0.0] * 196
    # a class token that the head ignores
    gap = readout("vit_tiny_patch16_224", global_pool="avg")
    assert gap[0] == 0 and torch.allclose(gap[1:], torch.tensor(1 / 196))
    every = readout("vit_tiny_patch16_224", global_pool="avg", pool_include_prefix=True)
    assert torch.allclose(every, torch.tensor(1 / 197))
    for pool in ("max", "avgmax", "", "prr", "map"):
        assert readout("vit_tiny_patch16_224", global_pool=pool) is None


def test_token_grid_ignores_default_dtype_and_device():
    torch.set_default_dtype(torch.bfloat16)
    try:
        # as by set_default_device, which PyTorch 2.6 does not undo: get_default_device raises AttributeError afterwards
        with torch.device("meta"):
            model = timm.create_model("vit_tiny_patch16_224", global_pool="avg")
            row = token_grid(model, (224, 224)).readout
            uniform = TokenGrid(14, 14, (16, 16), 0).uniform_distance()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (
        row.dtype == torch.float32
        and row.device.type == "cpu"
        and row.sum().item() == pytest.approx(1, abs=1e-5)
    )
    assert uniform == pytest.approx(116.492, abs=1e-3)


WIDE, SMALL = TokenGrid(14, 20, (16, 16), prefix=2), TokenGrid(2, 3, (16, 16), prefix=2)
REFUSALS = (
    (lambda: WIDE.image_map(torch.arange(280.0)), RuntimeError, ""),
    (lambda: WIDE.index(-1, 0), IndexError, "outside the 14 × 20 grid"),
    (lambda: WIDE.index(14, 0), IndexError, "outside the 14 × 20 grid"),
    (lambda: WIDE.index(0, 20), IndexError, "outside the 14 × 20 grid"),
    (lambda: SMALL.position(8), IndexError, "outside"),
    (lambda: SMALL.position(-1), IndexError, "outside"),
    (lambda: SMALL.position((2, 0)), IndexError, "outside"),
)
"""A call, its error and decisive words."""


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_grid_refuses(call, error, words):
    refuses(words, call, error=error)
