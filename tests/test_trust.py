"""Figures of insertion, deletion and randomization, by their artists."""

import numpy as np
import pytest
import torch
from support import assert_tidy

from vitlens import plot
from vitlens.faithfulness import Randomization

SHARES = np.linspace(0, 1, 9)
NAMES = ("relevance", "integrated_gradients", "rollout")
CURVES = {name: (SHARES[::-1] ** (k + 1), SHARES ** (k + 1)) for k, name in enumerate(NAMES)}
CONTROL = torch.rand(2, 5, 9, generator=torch.Generator().manual_seed(0))


def test_insertion_deletion_draws_curves_and_band():
    figure = plot.insertion_deletion(CURVES, CONTROL, shares=SHARES, score="Probability of “cat”")
    assert_tidy(figure)
    for k, ax in enumerate(figure.axes):
        drawn = {line.get_label(): line for line in ax.lines}
        assert list(drawn) == ["random orders", *NAMES]
        for name, both in CURVES.items():
            np.testing.assert_allclose(drawn[name].get_xydata(), np.stack([SHARES, both[k]], -1))
        np.testing.assert_allclose(drawn["random orders"].get_ydata(), CONTROL[k].mean(0))
        (band,) = ax.collections
        low, high = (
            band.get_paths()[0].vertices[:, 1].min(),
            band.get_paths()[0].vertices[:, 1].max(),
        )
        assert (low, high) == pytest.approx((CONTROL[k].min().item(), CONTROL[k].max().item()))
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    legend = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert legend == ["random orders", *NAMES]
    assert len({line.get_color() for line in figure.axes[0].lines}) == 4


def test_insertion_deletion_draws_negative_scores():
    below = {"relevance": (-SHARES, SHARES - 2)}
    figure = plot.insertion_deletion(below, -CONTROL, shares=SHARES, score="Logit")
    assert all(ax.get_ylim()[0] <= -2 for ax in figure.axes)


def randomization(values, parts=("head", "blocks.1", "blocks.0")):
    correlations = torch.tensor(values)[:, None].expand(-1, 2) * torch.tensor([1.0, -0.5])
    return Randomization(parts, correlations, correlations, 0.4)


def test_randomized_draws_bars_over_draws():
    draws = [randomization([1.0, 0.8, 0.4]), randomization([0.8, 0.4, 0.0])]
    figure = plot.randomized(
        {"rollout": draws, "grad_cam": [randomization([0.2, 0.1, 0.0])]}, titles="abc"
    )
    assert_tidy(figure)
    assert [ax.get_title("left") for ax in figure.axes] == [*"abc"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "rollout",
        "grad_cam",
    ]
    middle = figure.axes[1]
    rollout, cam, threshold = middle.lines
    np.testing.assert_allclose(
        rollout.get_xydata(), [[0.6, 0], [0.3, 0]]
    )  # means of |ρ| of both images
    np.testing.assert_allclose(cam.get_xydata(), [[0.075, 1]])
    np.testing.assert_allclose([bar.get_width() for bar in middle.patches], [0.45, 0.075])
    assert list(threshold.get_xdata()) == [0.4, 0.4]
    assert {ax.get_xlim() for ax in figure.axes} == {(0, 1)}, "bars begin at 0"
