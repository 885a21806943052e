"""Curves of a run, its snapshots and its film strip: the numbers given are the numbers drawn, on one scale for all."""

from dataclasses import asdict

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from test_plot import heads_of, history, snapshots

from vitlens import attention, capture, plot, widgets
from vitlens.recorder.grid import TokenGrid
from vitlens.train.snapshots import record


def points(line):
    return list(zip(*line.get_data(), strict=True))


# Curves


@pytest.mark.parametrize("kind", [lambda step: step, asdict])
def test_curves_are_the_readings_of_the_run(kind):
    steps = list(history(90))
    loss, accuracy, rate = (figure := plot.training(map(kind, steps), marks={"mixing off": 81})).axes
    assert [text.get_text() for text in loss.texts] == ["mixing off "] and loss.lines[1].get_xdata() == [81, 81]
    assert points(loss.lines[0]) == [(s.step, s.loss) for s in steps if s.step % 10 == 0]
    assert points(rate.lines[0]) == [(s.step, s.rate) for s in steps]
    for line, key in zip(accuracy.lines, ("top1", "top1_average"), strict=True):
        assert points(line) == [(s.step, s.metrics[key]) for s in steps if s.step % 30 == 0]
    older = [{name: value for name, value in asdict(s).items() if name != "rate"} | {"lr": s.rate} for s in steps]
    assert points(plot.training(older).axes[2].lines[0]) == points(rate.lines[0])
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["weights: 98.0 %", "their moving average: 99.0 %"]
    figure.draw_without_rendering()
    assert not any(ax.bbox.overlaps(legend.get_window_extent()) for ax in figure.axes), "it hides nothing"
    assert not any(line.get_clip_on() for line in accuracy.lines), "the marker of the last step is whole"


def test_the_axes_of_a_running_run_stay_where_they_are():
    steps = list(history(90))
    early, late = (plot.training(steps[:count]).axes for count in (35, 90))
    assert [ax.get_xlim() for ax in early] == [ax.get_xlim() for ax in late] == [(0, 90)] * 3
    assert [ax.get_ylim() for ax in early[1:]] == [ax.get_ylim() for ax in late[1:]] == [(0, 100), (0, 1.05)]
    assert early[0].get_ylim() == late[0].get_ylim() and early[0].get_ylim()[1] > steps[9].loss
    assert [len(ax.lines) for ax in plot.training(steps[:5]).axes] == [0, 0, 1]
    assert not any(ax.lines for ax in plot.training([]).axes)


def test_the_loss_on_validation_images_stays_within_its_panel():
    records = [asdict(step) | {"metrics": {"valid_loss": 9.0} if step.metrics else {}} for step in history(90)]
    loss, valid, _ = plot.training(records).axes
    assert loss.get_ylim() == valid.get_ylim() and valid.get_ylim()[1] > 9


# Snapshots


def pictures(ax):
    """What axes show, in reading order."""
    return [im.get_array() for im in sorted(ax.images, key=lambda im: (im.get_extent()[3], im.get_extent()[0]))]


@pytest.mark.parametrize("index", [0, 1, -1])
def test_a_snapshot_shows_the_arrays_of_its_step(index):
    run = snapshots(3)
    figure = plot.snapshot(run, index)
    filters, positions, distances, rollouts, *_ = figure.axes
    kernels = run["filters"][index]
    scaled = 0.5 + 0.5 * kernels / np.abs(kernels).max((1, 2, 3), keepdims=True)
    assert np.allclose(pictures(filters), scaled)
    assert np.array_equal(pictures(positions), run["positions"][index].reshape(64, 8, 8))
    assert np.allclose(heads_of(distances)[..., 1], run["distances"][index])
    assert np.array_equal(pictures(rollouts), run["rollout"][index])
    step = run["steps"][index]
    assert figure.get_suptitle() == f"Step {step}"


def test_scales_are_those_of_the_whole_run():
    run = snapshots(3)
    run["rollout"][2] *= 5
    run["distances"][1] *= 2
    for index in range(3):
        _, positions, distances, rollouts, _, bar = plot.snapshot(run, index).axes
        assert {im.get_clim() for im in positions.images} == {(-1, 1)}
        assert {im.get_clim() for im in rollouts.images} == {(0, run["rollout"].max())}
        assert distances.get_ylim() == (0, pytest.approx(1.08 * run["distances"].max()))
        assert bar.get_ylim() == (0, pytest.approx(run["rollout"].max()))
    for given, prefix in ((run, 1), ({**run, "prefix": np.full(3, 4.0)}, 4), ({**run, "prefix": np.zeros(3)}, 0)):
        dashed = TokenGrid(8, 8, (8, 8)).distances(dtype=torch.float64).mean().item() * 64 / (64 + prefix)
        (line,) = set(plot.snapshot(given).axes[2].lines[-1].get_ydata())
        assert line == pytest.approx(dashed, rel=1e-6)


KINDS = {
    "class token": {},
    "registers": {"reg_tokens": 4},
    "distilled": {"name": "deit_tiny_distilled_patch16_224"},
    "patches alone": {"global_pool": "avg", "class_token": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_look_everywhere_alike_lie_on_the_dashed_line(vit, kind):
    """Without queries all logits are 0, and every token gets as much, prefix tokens among them."""
    model = vit(**KINDS[kind])
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:96] = 0
            block.attn.qkv.bias[:96] = 0
        images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        with capture(model) as attn:
            model(images)
    for renormalize in (False, True):
        distance = attention.mean_distance(attn, renormalize)
        ax = plot.attention_distance(distance, uniform=attn.grid.uniform_distance(renormalize))
        np.testing.assert_allclose(heads_of(ax)[..., 1], ax.lines[-1].get_ydata()[0], rtol=1e-5)
        plt.close(ax.figure)
    moment = {name: array[None] for name, array in record(model, images).items()}
    drawn = plot.snapshot({"steps": [0], **moment}).axes[2]
    np.testing.assert_allclose(heads_of(drawn)[..., 1], drawn.lines[-1].get_ydata()[0], rtol=1e-3)  # of halves
    page = widgets.explore(model)
    page.wait(60, settled=True)
    np.testing.assert_allclose(page.frame["dots"]["values"], page.frame["dots"]["uniform"], rtol=1e-5)


def test_components_that_only_fill_up_are_left_out():
    run = snapshots(2, grid=4, patch=2)
    run["filters"][:, 12:] = 0
    run["filters"][0, 3] = 0  # nothing learned yet, but there
    assert len(plot.snapshot(run).axes[0].images) == 12
    assert np.array_equal(pictures(plot.snapshot(run, 0).axes[0])[3], np.full((2, 2, 3), 0.5))


def test_a_film_strip_is_one_column_a_snapshot():
    run = snapshots(9)
    grid = np.reshape(plot.film_strip(run, [0, 4, -1]).axes, (4, 4))
    for index, (filters, positions, distances, rollouts) in zip((0, 4, 8), grid.T[:3], strict=True):
        assert len(filters.images) == 9 and filters.get_title() == f"step {run['steps'][index]}"
        assert np.array_equal(pictures(positions), run["positions"][index].reshape(64, 8, 8))
        assert np.allclose(heads_of(distances)[..., 1], run["distances"][index])
        assert np.array_equal(pictures(rollouts), run["rollout"][index, :4])
        assert {im.get_clim() for im in rollouts.images} == {(0, run["rollout"][:, :4].max())}
