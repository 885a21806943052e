"""Curves of a run, its snapshots and its film strip show the numbers of the run on one scale."""

from dataclasses import asdict

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from support import heads_of, history, snapshots, tile

from vitlens import plot
from vitlens.recorder.grid import TokenGrid


def points(line):
    return list(zip(*line.get_data(), strict=True))


def test_training_draws_the_readings_of_the_run():
    steps = list(history(90))
    loss, accuracy, rate = (figure := plot.training(steps, marks={"mixing off": 81})).axes
    assert [text.get_text() for text in loss.texts] == ["mixing off "] and loss.lines[
        1
    ].get_xdata() == [81, 81]
    assert points(loss.lines[0]) == [(s.step, s.loss) for s in steps if s.step % 10 == 0]
    assert points(rate.lines[0]) == [(s.step, s.rate) for s in steps]
    for line, key in zip(accuracy.lines, ("top1", "top1_average"), strict=True):
        assert points(line) == [(s.step, s.metrics[key]) for s in steps if s.step % 30 == 0]
    older = [
        {name: value for name, value in asdict(s).items() if name != "rate"} | {"lr": s.rate}
        for s in steps
    ]
    assert points(plot.training(older).axes[2].lines[0]) == points(rate.lines[0])
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "weights: 98.0 %",
        "their moving average: 99.0 %",
    ]
    unlabeled = [
        asdict(step) | {"metrics": {"valid_loss": 9.0} if step.metrics else {}} for step in steps
    ]
    loss, valid, _ = plot.training(unlabeled).axes
    assert loss.get_ylim() == valid.get_ylim() and valid.get_ylim()[1] > 9


def test_training_keeps_the_axes_of_a_running_run():
    steps = list(history(90))
    early, late = (plot.training(steps[:count]).axes for count in (35, 90))
    assert [ax.get_xlim() for ax in early] == [ax.get_xlim() for ax in late] == [(0, 90)] * 3
    assert (
        [ax.get_ylim() for ax in early[1:]]
        == [ax.get_ylim() for ax in late[1:]]
        == [(0, 100), (0, 1.05)]
    )
    assert early[0].get_ylim() == late[0].get_ylim() and early[0].get_ylim()[1] > steps[9].loss
    assert not any(ax.lines for ax in plot.training([]).axes)


def tiles(ax, cols, size):
    """(n, size, size, 3) the colors of the tiles of a mosaic, in reading order."""
    _, right, bottom, _ = ax.images[0].get_extent()
    step = (right - cols * size) / (cols - 1) + size
    lines = round(bottom / step)
    places = [
        (size / 2 + col * step, size / 2 + row * step)
        for row in range(lines)
        for col in range(cols)
    ]
    return np.stack([tile(ax, x, y, size, size) for x, y in places])


def colored(values, low, high, cmap):
    return colormaps[cmap]((values - low) / (high - low))[..., :3]


def check(axes, run, index, filters, images):
    """The four figures of a snapshot hold its arrays."""
    first, second, third, fourth = axes
    kernels = run["filters"][index][: filters[1]]
    scaled = 0.5 + 0.5 * kernels / np.abs(kernels).max((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(tiles(first, filters[0], 8)[: filters[1]], scaled)
    cosines = colored(run["positions"][index].reshape(64, 8, 8), -1, 1, "RdBu_r")
    np.testing.assert_allclose(tiles(second, 8, 8), cosines, atol=0.01)
    np.testing.assert_allclose(heads_of(third)[..., 1], run["distances"][index])
    shown = run["rollout"][:, : images[1]]
    expected = colored(shown[index], 0, shown.max(), "viridis")
    np.testing.assert_allclose(tiles(fourth, images[0], 8), expected, atol=0.01)


def test_snapshot_draws_the_arrays_of_its_step():
    run = snapshots(3)
    run["rollout"][2] *= 5
    run["distances"][1] *= 2
    for index in range(3):
        figure = plot.snapshot(run, index)
        check(figure.axes, run, index, (7, 28), (4, 8))
        assert figure.get_suptitle() == f"Step {run['steps'][index]}"
        low, high = figure.axes[2].get_ylim()
        assert (
            0.9 * run["distances"].min() < low < run["distances"].min()
            and run["distances"].max() < high
        )
        assert low < 0.8 * set(figure.axes[2].lines[-1].get_ydata()).pop()
        assert figure.axes[3].child_axes[0].get_ylim() == (0, pytest.approx(run["rollout"].max()))
    for given, prefix in (
        (run, 1),
        ({**run, "prefix": np.full(3, 4.0)}, 4),
        ({**run, "prefix": np.zeros(3)}, 0),
    ):
        dashed = (
            TokenGrid(8, 8, (8, 8)).distances(dtype=torch.float64).mean().item()
            * 64
            / (64 + prefix)
        )
        (line,) = set(plot.snapshot(given).axes[2].lines[-1].get_ydata())
        assert line == pytest.approx(dashed, rel=1e-6)


def test_film_strip_has_a_column_for_each_snapshot():
    run = snapshots(9)
    grid = np.reshape(plot.film_strip(run, [0, 4, -1]).axes, (4, 3))
    for index, column in zip((0, 4, 8), grid.T, strict=True):
        check(column, run, index, (3, 9), (2, 4))
        assert column[0].get_title("left") == f"step {run['steps'][index]}"


def test_snapshot_omits_padded_components():
    run = snapshots(2, grid=4, patch=2)
    run["filters"][:, 12:] = 0
    run["filters"][0, 3] = 0  # a component without variance
    ax = plot.snapshot(run, 0).axes[0]
    _, right, bottom, _ = ax.images[0].get_extent()
    assert bottom < 5 and right > 14, "two lines of seven"
    assert (tiles(ax, 7, 2)[3] == 0.5).all()
