"""Planted truths: the patch that decides the class is known, so maps are tested against it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support import GRID, maps

from experiments.planted import COLORS, PATCH, RECIPE, energy_in_box, planted
from vitlens import TokenGrid, load_model
from vitlens.attribution import METHODS
from vitlens.data.augment import normalize
from vitlens.models import label_names
from vitlens.train import accuracy

GOOD = ("integrated_gradients", "direct", "balanced_gradients")
FAIR = ("relevance", "gradient_rollout", "occlusion")


@pytest.fixture(scope="module")
def model():
    """The stored model of `experiments/planted.py`: trained here, each processor would give another one."""
    return load_model(Path(__file__).parent.parent / "data" / "checkpoints" / "planted")


def hit_rate(images, model, name, mark=0, **kwargs):
    x = normalize(images.data.images, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    return (
        images.hits(METHODS[name](model, x, images.classes[:, mark], **kwargs), mark)
        .float()
        .mean()
        .item()
    )


def test_planted_model_is_accurate(model):
    assert accuracy(model, planted(400, 1).data, RECIPE) >= 99.5
    shapes = {name: p.shape for name, p in RECIPE.build().named_parameters()}
    assert shapes == {name: p.shape for name, p in model.named_parameters()} and label_names(
        model
    ) == list(COLORS)


def test_planted_marks_determine_class():
    images = planted(300, 5, marks=2)
    colors = torch.tensor(list(COLORS.values()), dtype=torch.float32)
    tiles = (
        images.data.images.float()
        .unfold(2, PATCH, PATCH)
        .unfold(3, PATCH, PATCH)
        .mean((-1, -2))
        .flatten(2)
    )
    for mark in (0, 1):
        means = tiles[torch.arange(300), :, images.patches[:, mark]]
        assert torch.equal(torch.cdist(means, colors).argmin(1), images.classes[:, mark])
    spread = tiles.amax(1) - tiles.amin(1)  # 0 in gray patches, but for noise
    assert torch.equal(spread.topk(2, 1).indices.sort(1).values, images.patches.sort(1).values)
    assert torch.equal(images.data.labels, images.classes[:, 0])
    assert torch.equal(images.data.images, planted(300, 5, marks=2).data.images)


@pytest.mark.slow
def test_methods_find_planted_mark(model):
    for name in (*GOOD, *FAIR):
        options = {"integrated_gradients": {"n_steps": 10}, "occlusion": {"window": 1}}.get(
            name, {}
        )
        count = 10 if options else 100
        assert hit_rate(planted(count, 2), model, name, **options) >= 0.95
        two = planted(count, 3, marks=2)
        rates = [hit_rate(two, model, name, mark, **options) for mark in (0, 1)]
        assert min(rates) >= 0.95 if name in GOOD else sum(rates) / 2 >= 0.6, name
        assert (
            name in GOOD or hit_rate(two, model, name, against=two.classes[:, 1], **options) >= 0.6
        ), name


def test_rollout_and_random_weights_miss_planted_mark(model):
    two = planted(60, 3, marks=2)
    rates = [hit_rate(two, model, "rollout", mark) for mark in (0, 1)]
    assert (
        hit_rate(planted(60, 2), model, "rollout") >= 0.95
        and sum(rates) <= 1 + 1e-6
        and max(rates) <= 0.75
    )
    torch.manual_seed(1)
    random = RECIPE.build().eval()
    torch.nn.init.normal_(random.head.weight)
    assert max(hit_rate(planted(200, 2), random, name) for name in ("relevance", "legrad")) <= 0.2


def test_energy_in_box_equals_sum_over_pixels():
    """Pixels outside all patches have no energy; patches that reach beyond the image are cut."""
    for size in ((64, 96), (70, 100), (60, 90)):
        grid, m = TokenGrid(4, 6, (16, 16), 0, size), maps(5, 4, 6)
        pixels = np.zeros((5, *size))
        whole = np.kron(np.maximum(m.numpy(), 0), np.ones((16, 16)))[..., : size[0], : size[1]]
        pixels[..., : whole.shape[-2], : whole.shape[-1]] = whole
        for left, top, right, bottom in ([3, 5, 41, 60], [17, 30, 90, 31]):
            expected = pixels[:, top:bottom, left:right].sum((-2, -1)) / pixels.sum((-2, -1))
            np.testing.assert_allclose(
                energy_in_box(m, (left, top, right, bottom), grid), expected, rtol=1e-6
            )


def test_energy_in_box_closed_form():
    one = torch.zeros(4, 6)
    one[1, 2] = 3.0
    assert energy_in_box(one, [32, 16, 48, 32], GRID).item() == 1
    assert energy_in_box(one - 1, [36, 20.5, 96, 64], GRID).item() == pytest.approx(
        12 / 16 * 11.5 / 16
    )
    assert energy_in_box(torch.ones(4, 6), [10, 10, 30, 50], GRID).item() == pytest.approx(
        20 * 40 / (64 * 96)
    )
    assert math.isnan(energy_in_box(-torch.ones(4, 6), [0, 0, 9, 9], GRID).item())
    with pytest.raises(ValueError, match="within 96 × 64 pixels"):
        energy_in_box(one, [0, 0, 97, 64], GRID)
