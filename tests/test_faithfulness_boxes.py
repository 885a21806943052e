"""Scores that need no orders: drop in confidence, and maps beside a known box."""

import math

import numpy as np
import pytest
import torch
from maps_support import GRID, images, linear, maps, refuses

from vitlens import TokenGrid
from vitlens.faithfulness import confidence, energy_in_box, pointing

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


def test_pointing_by_hand():
    m = torch.zeros(3, 4, 6)
    m[0, 2, 3] = m[1, 0, 5] = m[2, 3, 0] = 1  # centers at (x, y) = (56, 40), (88, 8) and (8, 56)
    hit = lambda boxes, **kwargs: pointing(m, boxes, GRID, **kwargs).tolist()  # noqa: E731
    assert hit([48, 32, 64, 48]) == [1, 0, 0]
    assert hit([[48, 32, 64, 48], [80, 0, 96, 16], [0, 0, 96, 40]]) == [1, 1, 0]
    assert hit([0, 20, 96, 64]) == [1, 0, 1]
    assert hit([0, 0, 96, 64]) == [1, 1, 1]
    assert hit([0, 0, 53, 36]) == [0, 0, 0]
    assert hit([0, 0, 53, 36], tolerance=4.9) == [0, 0, 0]  # (3, 4) pixels beside the corner
    assert hit([0, 0, 53, 36], tolerance=5.0) == [1, 0, 0]
    stacked = pointing(torch.stack([m, 1 - m]), [48, 32, 64, 48], GRID)
    assert stacked.shape == (2, 3)
    torch.testing.assert_close(stacked[1], torch.tensor([0, 1 / 23, 1 / 23]))


@pytest.mark.parametrize("image", [(49, 81), (64, 96), (70, 100)])
def test_the_center_of_a_patch_lies_in_the_image(image):
    """The mean place of the pixels that a patch has in the image, also of a patch that is mostly padding."""
    grid = TokenGrid(4, 6, (16, 16), 0, image)
    height, width = min(image[0], 64), min(image[1], 96)
    for row in range(4):
        for col in range(6):
            y, x = (
                np.mean([k + 0.5 for k in range(pixels) if k // 16 == place])
                for pixels, place in ((height, row), (width, col))
            )
            one = torch.zeros(1, 4, 6)
            one[0, row, col] = 1
            assert pointing(one, [x - 0.4, y - 0.4, x + 0.4, y + 0.4], grid).item() == 1
    assert pointing(torch.ones(1, 4, 6), [0, 0, width, height], grid).item() == 1


def test_a_map_without_a_maximum_points_at_random():
    box = [16, 0, 64, 48]
    assert pointing(torch.full((1, 4, 6), -2.0), box, GRID).item() == pytest.approx(9 / 24)
    two = torch.zeros(1, 4, 6)
    two[0, 1, 1] = two[0, 3, 5] = 1
    assert pointing(two, box, GRID).item() == 0.5


@pytest.mark.parametrize("image", [(64, 96), (70, 100), (60, 90)])
def test_energy_equals_the_sum_over_pixels(image):
    """Pixels that no patch sees have no energy; patches beyond the image have only what is inside."""
    grid, m = TokenGrid(4, 6, (16, 16), 0, image), maps(5, 2, 4, 6)
    boxes = torch.tensor([[3, 5, 41, 60], [17, 30, 90, 31]])
    pixels = np.zeros((5, 2, *image))
    whole = np.kron(np.maximum(m.numpy(), 0), np.ones((16, 16)))[..., : image[0], : image[1]]
    pixels[..., : whole.shape[-2], : whole.shape[-1]] = whole
    found = energy_in_box(m, boxes, grid)
    for b, (left, top, right, bottom) in enumerate(boxes.tolist()):
        inside = pixels[:, b, top:bottom, left:right].sum((-2, -1)) / pixels[:, b].sum((-2, -1))
        np.testing.assert_allclose(found[:, b], inside)


def test_energy_in_closed_form():
    one = torch.zeros(1, 4, 6)
    one[0, 1, 2] = 3.0
    assert energy_in_box(one, [32, 16, 48, 32], GRID).item() == 1
    assert energy_in_box(one, [36, 20.5, 96, 64], GRID).item() == pytest.approx(12 / 16 * 11.5 / 16)
    assert energy_in_box(one - 1, [36, 20.5, 96, 64], GRID).item() == pytest.approx(12 / 16 * 11.5 / 16)
    even = energy_in_box(torch.ones(2, 4, 6), [10, 10, 30, 50], GRID)
    torch.testing.assert_close(even, torch.full((2,), 20 * 40 / (64 * 96)))
    assert math.isnan(energy_in_box(-torch.ones(1, 4, 6), [0, 0, 9, 9], GRID).item())


def test_a_box_lies_in_the_image():
    for box in ([0, 0, 97, 64], [0, 0, 96, 65], [-1, 0, 5, 5], [0, -0.5, 5, 5], [9, 0, 9, 5], [0, 9, 5, 8]):
        for score in (pointing, energy_in_box):
            for boxes in (box, [[0, 0, 96, 64], box]):
                refuses("left < right ≤ 96 and 0 ≤ top < bottom ≤ 64", score, torch.ones(2, 4, 6), boxes, GRID)
    refuses(r"= \(nan, 0.0, 5.0, 5.0\). Resize and crop", pointing, torch.ones(1, 4, 6), [math.nan, 0, 5, 5], GRID)
    for wrong in (-1, math.nan):
        refuses(f"from 0 up, not {wrong}", pointing, torch.ones(1, 4, 6), [0, 0, 9, 9], GRID, tolerance=wrong)
    for boxes in ([0, 0, 9], torch.zeros(3, 4), torch.zeros(2, 2, 4)):
        refuses(r"\(4,\), or for each, shape \(2, 4\), got", energy_in_box, torch.ones(2, 4, 6), boxes, GRID)
    for score in (pointing, energy_in_box):
        refuses(r"shape \(…, B, 4, 6\), got shape \(1, 6, 4\)", score, torch.ones(1, 6, 4), [0, 0, 9, 9], GRID)


def test_localization_equals_quantus():
    import quantus

    m = maps(8, 4, 6)
    boxes = torch.tensor(
        [[16, 0, 64, 48]] * 4 + [[0, 32, 96, 64]] * 4
    )  # along the patches, which is all that masks see
    masks, pixels = np.zeros((8, 1, 64, 96), dtype=bool), np.kron(m.numpy(), np.ones((16, 16)))[:, None]
    for mask, (left, top, right, bottom) in zip(masks, boxes.tolist(), strict=True):
        mask[0, top:bottom, left:right] = True
    options = dict(abs=False, normalise=False, disable_warnings=True)
    data = dict(x_batch=images(8).numpy(), y_batch=np.zeros(8, int), s_batch=masks, device="cpu")
    model = linear().eval()
    theirs = quantus.PointingGame(**options)(model, a_batch=pixels, **data)
    assert pointing(m, boxes, GRID).tolist() == [float(np.any(hit)) for hit in theirs] and 0 < np.mean(theirs) < 1
    theirs = quantus.RelevanceMassAccuracy(**options)(model, a_batch=pixels.clip(0), **data)
    np.testing.assert_allclose(energy_in_box(m, boxes, GRID), theirs, rtol=1e-6)
