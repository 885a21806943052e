"""Speed and memory of models: closed forms, larger batches that were not measured, the committed table."""

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch import nn

from experiments import speed

TABLE = Path(__file__).parent.parent / "data" / "results" / "speed-cpu.csv"


def chain(width=512, layers=6):
    """Matrices and tanh, each of whose outputs is kept for the backward pass."""
    parts = [nn.Flatten(), nn.Linear(3072, width), nn.Tanh()]
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts)


@pytest.mark.slow
def test_training_memory_equals_closed_form_and_predicts_larger_batches():
    """Kept of each image: its pixels and the outputs of all tanh. At the peak two gradients of one output beside."""
    model = chain()
    per_image, fixed = speed.training_memory(model, torch.randn(1, 3, 32, 32))
    assert per_image == pytest.approx(4 * (3072 + 512 * (7 + 2)), rel=0.12)
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert (
        4 * weights <= fixed <= 5 * weights
    )  # weights, gradients, two averages; the gradient of one layer beside
    large = speed.peak(model, torch.randn(5000, 3, 32, 32))
    assert large + 4 * weights == pytest.approx(fixed + 5000 * per_image, rel=0.002)


def test_throughput_equals_fastest_batch(monkeypatch):
    """With a simulated clock: 3 s a batch and 1 s an image up to 8, then 2 s each. Memory runs out at the limit."""
    for limit, expected in ((99, (8 / 11, 8)), (4, (4 / 7, 4))):

        def timer(_, globals, num_threads, limit=limit):
            n = len(globals["x"])
            if n > limit:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            measurement = SimpleNamespace(median=3 + (n if n <= 8 else 2 * n))
            return SimpleNamespace(blocked_autorange=lambda min_run_time: measurement)

        monkeypatch.setattr("torch.utils.benchmark.Timer", timer)
        assert speed.throughput(None, torch.zeros(1, 3, 2, 2)) == expected


@pytest.mark.slow
def test_speed_script_writes_rows_within_memory(tmp_path):
    speed.main(["--tiny", "--out", str(tmp_path / "speed.csv")])
    rows, committed = pd.read_csv(tmp_path / "speed.csv"), pd.read_csv(TABLE)
    assert set(rows) == set(committed) and (rows["images_per_second"] > 0).all()
    assert (
        rows["bytes_fixed"] + rows["largest_batch"] * rows["bytes_per_image"]
        <= rows["memory"] * 2**30
    ).all()
    assert [len(ax.lines) for ax in speed.figure(committed).axes] == [6, 6]
