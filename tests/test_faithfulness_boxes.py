"""Drop in confidence."""

import numpy as np
import pytest
import torch
from maps_support import GRID, images, linear, maps

from vitlens.faithfulness import confidence

TARGET = torch.tensor([3, 1, 0])


@torch.no_grad()
@pytest.mark.parametrize("baseline", ["zero", "mean"])
def test_drop_and_increase_one_at_a_time(vit, baseline):
    model, x, m = vit(img_size=(64, 96), dtype=torch.float64), images(3), maps(4, 3, 4, 6)
    model.head.weight.mul_(20)
    found = confidence(model, x, m, TARGET, baseline=baseline, internal_batch_size=5)
    for b in range(3):
        whole = model(x[b : b + 1]).softmax(-1)[0, TARGET[b]].item()
        assert found.whole[b].item() == pytest.approx(whole)
        blank = 0 if baseline == "zero" else x[b].mean((1, 2), keepdim=True)
        for i in range(4):
            stretched = (m[i, b] - m[i, b].min()) / (m[i, b].max() - m[i, b].min())
            mask = torch.from_numpy(np.kron(stretched.numpy(), np.ones((16, 16))))
            kept = model((mask * x[b] + (1 - mask) * blank)[None]).softmax(-1)[0, TARGET[b]].item()
            assert found.kept[i, b].item() == pytest.approx(kept)
            assert found.drop[i, b].item() == pytest.approx(max(0, 100 * (whole - kept) / whole))
            assert found.increase[i, b].item() == (100 if kept > whole else 0)
    assert 0 < found.increase.mean() < 100 and found.drop.max() > 1


def test_a_constant_map_keeps_nothing():
    model, x = linear(), images(2)
    found = confidence(model, x, torch.full((2, 4, 6), 7.0), 3, grid=GRID)
    torch.testing.assert_close(found.kept, model(0 * x).softmax(-1)[:, 3].detach())
    one = torch.zeros(2, 4, 6)
    one[:, 2, 3] = 1e-30  # what is highest is kept in full, however low
    only = torch.zeros_like(x)
    only[..., 32:48, 48:64] = x[..., 32:48, 48:64]
    torch.testing.assert_close(
        confidence(model, x, one, 3, grid=GRID).kept, model(only).softmax(-1)[:, 3].detach(), rtol=1e-5, atol=0
    )
