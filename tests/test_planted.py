"""A planted truth: where a map has to point is known."""

from pathlib import Path

import pytest
import torch
from maps_support import refuses

from vitlens import load_model
from vitlens.attribution import METHODS
from vitlens.data.augment import normalized
from vitlens.data.marks import COLORS, PATCH, SIDE, planted
from vitlens.train import accuracy
from vitlens.train.planted import RECIPE

WEIGHTS = Path(__file__).parent.parent / "data" / "checkpoints" / "planted"
GOOD = ("integrated_gradients", "direct", "balanced_gradients")
FAIR = ("relevance", "gradient_rollout", "feature_ablation")


@pytest.fixture(scope="module")
def model():
    """One of those that `experiments/planted.py` trains: trained here, each processor would have another one."""
    return load_model(WEIGHTS)


def shown(model, pictures):
    config = model.pretrained_cfg
    return normalized(pictures.data.images, config["mean"], config["std"])


def test_the_model_knows_the_marks_and_is_the_recipes(model):
    assert accuracy(model, planted(400, 1).data, RECIPE) >= 99.5
    made = RECIPE.build()
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert model.label_names == list(COLORS) and (WEIGHTS / "model.safetensors").stat().st_size < 2**19


def mean_of(pictures, model, name, mark=0, **kwargs):
    maps = METHODS[name](model, shown(model, pictures), pictures.classes[:, mark], **kwargs)
    return pictures.hits(maps, mark).float().mean().item()


def test_a_picture_tells_its_class_by_its_marks_alone():
    pictures = planted(300, 5, marks=2)
    colors = torch.tensor(list(COLORS.values()), dtype=torch.float32)
    assert (pictures.classes[:, 0] != pictures.classes[:, 1]).all()
    assert (pictures.patches[:, 0] != pictures.patches[:, 1]).all()
    assert torch.equal(pictures.data.labels, pictures.classes[:, 0])
    tiles = pictures.data.images.float().unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).mean((-1, -2)).flatten(2)
    for mark in (0, 1):
        means = tiles[torch.arange(300), :, pictures.patches[:, mark]]
        assert torch.equal(torch.cdist(means, colors).argmin(1), pictures.classes[:, mark])
    spread = tiles.amax(1) - tiles.amin(1)  # what is gray has none
    assert torch.equal(spread.topk(2, 1).indices.sort(1).values, pictures.patches.sort(1).values)
    assert planted(1, 0).data.size == (SIDE, SIDE)
    assert torch.bincount(planted(4000, 0).data.labels).min() > 900
    assert len(planted(4000, 0).patches.unique()) == (SIDE // PATCH) ** 2
    assert torch.equal(planted(10, 3).data.images, planted(10, 3).data.images)
    assert not torch.equal(planted(10, 3).data.images, planted(10, 4).data.images)
    refuses("1 to 4 marks.*marks=5", planted, 1, 0, marks=5)


@pytest.mark.parametrize("name", [*GOOD, *FAIR])
def test_good_methods_point_at_the_mark(model, name):
    """Of this model: gradient rollout is at 0.90 in another seed's, and at 1.00 here."""
    count = {"feature_ablation": 60, "integrated_gradients": 100}.get(name, 200)  # each picture takes many forwards
    assert mean_of(planted(count, 2), model, name) >= 0.95


@pytest.mark.parametrize("name", GOOD)
def test_of_two_marks_they_point_at_that_of_the_class(model, name):
    pictures = planted(40, 3, marks=2)
    for mark in (0, 1):
        assert mean_of(pictures, model, name, mark) >= 0.95


@pytest.mark.parametrize("name", FAIR)
def test_others_know_the_class_too(model, name):
    """Less surely, as `data/results/planted.csv` says; a map that knows no class is right half the time at most,
    and chance adds 0.08 to that at three deviations of 400 answers."""
    pictures = planted(40 if name == "feature_ablation" else 200, 3, marks=2)
    assert sum(mean_of(pictures, model, name, mark) for mark in (0, 1)) / 2 >= 0.6
    assert mean_of(pictures, model, name, against=pictures.classes[:, 1]) >= 0.6


def test_rollout_does_not_know_which_class_was_asked_for(model):
    assert mean_of(planted(60, 2), model, "rollout") >= 0.95
    pictures = planted(60, 3, marks=2)
    found = [mean_of(pictures, model, "rollout", mark) for mark in (0, 1)]
    assert sum(found) <= 1 + 1e-6 and max(found) <= 0.75


def test_a_model_with_random_weights_points_nowhere(model):
    torch.manual_seed(1)
    random = RECIPE.build().eval()
    with torch.no_grad():
        random.head.weight.normal_()
    for name in ("relevance", "legrad"):
        assert mean_of(planted(200, 2), random, name) <= 0.2
