"""A stream's batches arrive on the device whole, through pinned memory, while the device is busy."""

import pytest
import torch

from vitlens.data import load
from vitlens.data.augment import Augment

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO CUDA DEVICE: nothing of this file was tested"
)


@pytest.mark.parametrize("augment", [None, Augment(scale=(0.3, 1.0), ratio=(3 / 4, 4 / 3))])
def test_batches_on_cuda_are_those_on_the_cpu(augment):
    here, there = (
        load("digits", size=32, stream=True, workers=2, device=device) for device in ("cpu", "cuda")
    )
    rows, busy = list(torch.randperm(len(here)).split(200)), torch.randn(4096, 4096, device="cuda")
    for (a, b), (c, d) in zip(
        here.batches(rows, augment, (1,)), there.batches(rows, augment, (1,)), strict=True
    ):
        busy = (
            busy @ busy / 64
        )  # copies must wait for their turn and their source must live until then
        assert (
            c.device.type == d.device.type == "cuda"
            and torch.equal(a, c.cpu())
            and torch.equal(b, d.cpu())
        )
