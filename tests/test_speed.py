"""Speed and memory of models: closed forms, larger batches that were not measured."""

import pytest
import torch
from torch import nn

from vitlens.evaluate import speed

CPU = torch.device("cpu")


def pictures(batch):
    return torch.randn(batch, 3, 32, 32)


def chain(width=512, layers=6):
    """Matrices and tanh, each of whose outputs is kept for the backward pass."""
    parts = [nn.Flatten(), nn.Linear(3072, width), nn.Tanh()]
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts)


def test_memory_of_a_chain_of_matrices_by_hand():
    """Kept of each picture: its pixels and the outputs of all tanh; at the peak two gradients of one output beside."""
    per_image, fixed = speed.training_memory(chain(), pictures, CPU)
    assert per_image == pytest.approx(4 * (3072 + 512 * (7 + 2)), rel=0.12)
    weights = 4 * sum(p.numel() for p in chain().parameters())
    assert 4 * weights <= fixed <= 5 * weights  # weights, gradients, two averages; the gradient of one layer beside


def test_larger_batches_take_what_was_foretold():
    model = chain()
    per_image, fixed = speed.training_memory(model, pictures, CPU)
    weights = 4 * sum(p.numel() for p in model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    peak = speed._step_peak(model, pictures(5000), CPU)
    assert peak + 4 * weights == pytest.approx(fixed + 5000 * per_image, rel=0.002)


def test_gradients_stay_what_they_were():
    model = chain(16, 1)
    model(pictures(2)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    speed.training_memory(model, pictures, CPU)
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["test_vit", "resnet10t"])
def test_the_largest_batch_is_the_last_that_fits(name):
    model = speed.opened(name, 32).train()
    found = speed.measured(model, 32, seconds=0.0, memory=4)
    taken = [found["bytes_fixed"] + n * found["bytes_per_image"] for n in (0, 1)]
    most = found["largest_batch"]
    assert taken[0] + most * found["bytes_per_image"] <= 4 * 2**30 < taken[1] + most * found["bytes_per_image"]
    assert found["images_per_second"] > 0 and found["batch"] & (found["batch"] - 1) == 0
    assert model.training and all(p.grad is None for p in model.parameters())


def test_more_memory_than_there_is_for_one_picture():
    assert speed.measured(speed.opened("test_vit", 32), 32, seconds=0.0, memory=1e-3)["largest_batch"] == 0


def test_speed_is_that_of_the_fastest_batch(monkeypatch):
    """With a clock of its own: 3 s a batch and 1 s a picture up to 8, then 2 s each."""
    seconds = {n: 3 + (n if n <= 8 else 2 * n) for n in (2**k for k in range(12))}
    monkeypatch.setattr(speed, "_timed", lambda model, x, device: seconds[len(x)])
    tried = []
    found = speed.throughput(None, lambda n: tried.append(n) or torch.zeros(n), CPU, 0.0)
    assert found == (8 / 11, 8) and tried == [1, 2, 4, 8, 16, 32]


def test_memory_that_runs_out_ends_the_search(monkeypatch):
    def timed(model, x, device):
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return 1.0

    monkeypatch.setattr(speed, "_timed", timed)
    assert speed.throughput(None, torch.zeros, CPU, 0.0) == (4.0, 4)

