"""Maps that stay as they are when the model's weights become random are flagged."""

import numpy as np
import pytest
import torch
from maps_support import left_as_found, refuses
from torch import nn

from vitlens.attribution import gradient_rollout, integrated_gradients, relevance
from vitlens.faithfulness import Randomization, randomization

PARTS = ("head", "norm", "blocks.2", "blocks.1", "blocks.0", "patch_embed", "pos_embed", "cls_token")


def images(batch=2, size=(64, 96), seed=0):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


def edges(model, x, target):
    """How much the pixels of a patch differ from their neighbors: it never looks at the model."""
    return x.diff(dim=-1)[..., :-1, :].abs().mean(1).unfold(-2, 15, 16).unfold(-2, 15, 16).mean((-1, -2))


def fixed(*values):
    """A method that gives these maps one after the other, whatever it is asked."""
    queue = list(values)
    return lambda model, x, target: queue.pop(0)


@pytest.mark.parametrize("method", [gradient_rollout, lambda *a: integrated_gradients(*a, n_steps=4)])
def test_an_edge_detector_is_flagged_and_a_gradient_method_is_not(vit, method):
    model, x = vit(img_size=(64, 96)), images()
    flagged = randomization(model, x, edges)
    assert flagged.unchanged and flagged.parts == PARTS
    torch.testing.assert_close(flagged.rank_correlation, torch.ones(8, 2))
    torch.testing.assert_close(flagged.ssim, torch.ones(8, 2))
    found = randomization(model, x, method, 3)
    assert not found.unchanged and found.rank_correlation[-1].abs().max() < 0.5 and found.ssim[-1].max() < 0.5


def test_parts_become_random_from_the_top(vit):
    model, x, states = vit(img_size=(64, 96)), images(), []

    def method(subject, given, target):
        states.append({k: v.clone() for k, v in subject.state_dict().items()})
        assert subject is not model and not any(m.training for m in subject.modules())
        assert target.tolist() == chosen and torch.equal(given, x)
        return torch.randn(2, 4, 6)

    with torch.no_grad():
        chosen = model(x).argmax(-1).tolist()
    assert randomization(model.train(), x, method).parts == PARTS and len(states) == 9
    own = model.state_dict()
    assert all(torch.equal(own[k], v) for k, v in states[0].items())
    for step, state in enumerate(states):
        for name, weight in state.items():
            part = ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])
            varied = own[name].std(correction=0) > 0  # what is the same all over keeps its size and says nothing
            assert torch.equal(weight, own[name]) == (part not in PARTS[:step] or not varied), (step, name)
    for name, weight in states[-1].items():
        if weight.numel() > 5000:  # redrawn with the mean and deviation it had
            assert weight.std().item() == pytest.approx(own[name].std().item(), rel=0.05)
            assert abs((weight.mean() - own[name].mean()).item()) < 0.05 * own[name].std().item()
            assert abs(np.corrcoef(weight.flatten(), own[name].flatten())[0, 1]) < 0.05


def test_the_model_is_left_as_it_was(vit):
    model, x = vit(img_size=(64, 96), drop_rate=0.5), images()
    model.train()
    model.blocks[0].eval()

    def careless(subject, given, target):  # leaves gradients behind, as plain backward passes do
        given = given.clone().requires_grad_()
        subject(given)[:, 3].sum().backward()
        return given.grad.abs().mean(1).unfold(-2, 16, 16).unfold(-2, 16, 16).mean((-1, -2))

    with left_as_found(model, x):
        found, again, other = (randomization(model, x, careless, 3, seed=seed).rank_correlation for seed in (7, 7, 8))
    assert torch.equal(found, again) and not torch.equal(found, other)


def one_layer():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 96, 5))


def test_rank_correlation_in_closed_form():
    """1 − 6 Σ d² / (n (n² − 1)) without ties, and what is agreed on where a map is constant."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.stack([torch.randperm(24, generator=generator) for _ in range(2)]).double() for _ in "ab")
    shaped = [m.exp().reshape(2, 4, 6) for m in (a, b)]  # ranks alone count
    found = randomization(one_layer(), images(), fixed(*shaped))
    assert found.parts == ("1",)
    expected = 1 - 6 * (a - b).square().sum(-1) / (24 * (24**2 - 1))
    torch.testing.assert_close(found.rank_correlation[0], expected.float())
    flat = torch.ones(2, 4, 6)
    assert randomization(one_layer(), images(), fixed(flat, 5 * flat)).rank_correlation.tolist() == [[1, 1]]
    for pair in ((flat, shaped[0]), (shaped[0], flat)):
        assert randomization(one_layer(), images(), fixed(*pair)).rank_correlation.tolist() == [[0, 0]]


def test_ssim_in_closed_form():
    """7 × 7 maps have one window: (2ab + c)(2·cov + d) / ((a² + b² + c)(var a + var b + d)), Wang et al. 2004."""
    a, b = (torch.rand(1, 7, 7, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (0, 1))
    found = randomization(one_layer(), images(1), fixed(3 * a + 2, b))
    a, b = ((m - m.min()) / (m.max() - m.min()) for m in (a, b))
    cov = torch.cov(torch.stack([a.flatten(), b.flatten()]))
    light, contrast = 0.01**2, 0.03**2
    expected = (2 * a.mean() * b.mean() + light) * (2 * cov[0, 1] + contrast)
    expected /= (a.mean() ** 2 + b.mean() ** 2 + light) * (cov[0, 0] + cov[1, 1] + contrast)
    assert found.ssim.item() == pytest.approx(expected.item(), rel=1e-5)
    tiny = [torch.rand(1, 2, 9) for _ in range(2)]
    assert randomization(one_layer(), images(1), fixed(*tiny)).ssim.isnan().all()
    for shape in ((1, 3, 9), (1, 4, 4), (1, 6, 6)):
        pair = [torch.rand(shape) for _ in range(2)]
        assert randomization(one_layer(), images(1), fixed(*pair)).ssim.isfinite().all()


def test_the_flag_is_about_the_last_step_and_size_alone():
    for last, unchanged in (([0.9, 0.2], True), ([-0.9, -0.2], True), ([0.6, 0.3], False), ([0.5, -0.5], False)):
        found = Randomization(("head", "stem"), torch.tensor([[1.0, 1.0], last]), torch.zeros(2, 2), 0.5)
        assert found.unchanged is unchanged


def test_refusals(vit):
    model, x = vit(img_size=(64, 96)), images()
    good = torch.rand(2, 4, 6)
    for threshold in (-0.1, 1.5, float("nan")):
        refuses("lies between 0 and 1, got", randomization, model, x, edges, threshold=threshold)
    for wrong in (good[0], good[:1], good.double().fill_(torch.nan), [good]):
        refuses(r"finite maps of shape \(2, rows, cols\), got", randomization, model, x, fixed(wrong, good))
        refuses(r"finite maps of shape \(2, rows, cols\), got", randomization, model, x, fixed(good, wrong))
    refuses("10 classes, numbered from 0 to 9, but class 10", randomization, model, x, edges, 10)
    refuses("none .num_classes=0.: its output is features", randomization, vit(num_classes=0), x, edges)
    refuses("model with weights, but Flatten has none", randomization, nn.Flatten(), x, edges)


def test_bad_input_is_one_sentence(vit):
    model, x = vit(), torch.randn(2, 3, 64, 64)
    for wrong in ("cat.jpg", x[0], x.byte()):
        refuses("images as a floating-point tensor", randomization, model, wrong, relevance)
    refuses("does not take this size", randomization, model, torch.randn(1, 3, 80, 80), relevance)
    refuses("internal_batch_size.* 0", randomization, model, x, relevance, internal_batch_size=0)
