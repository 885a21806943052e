"""Insertion and deletion, against closed forms of a linear model and pictures covered one at a time."""

import itertools
import math

import numpy as np
import pytest
import torch
from maps_support import GRID, SMALL, gains, images, linear, maps, refuses
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms.functional import gaussian_blur

from vitlens import TokenGrid
from vitlens.faithfulness import blurred, curves, random_maps

TARGET = torch.tensor([3, 1])


def midpoints(map_, step):
    """(24,) for each patch the share of patches covered when it goes, in the middle of its step."""
    patches = map_.numel()
    places = (-map_.flatten()).argsort().argsort()
    start = places // step * step
    return (start + (start + step).clamp(max=patches)) / 2 / patches


@pytest.mark.parametrize("step", [1, 5, 24])
@pytest.mark.parametrize("baseline", ["mean", "blur", "zero"])
def test_areas_of_a_linear_model(step, baseline):
    """Each patch adds its gain for as long as it is there."""
    model, x, m = linear(), images(), maps(2, 4, 6)
    blank = {"mean": x.mean((2, 3), keepdim=True).expand_as(x), "blur": blurred(x, 16), "zero": 0 * x}[baseline]
    found = curves(model, x, m, TARGET, baseline=baseline, step=step, score="logit", grid=GRID)
    gain = gains(model, x, blank, TARGET)
    empty = model(blank).detach()[[0, 1], TARGET]
    gone = torch.stack([midpoints(one, step) for one in m])
    torch.testing.assert_close(found.deletion_area, empty + (gain * gone).sum(-1))
    torch.testing.assert_close(found.insertion_area, empty + (gain * (1 - gone)).sum(-1))
    assert found.counts.tolist() == [*range(0, 24, step), 24]
    sorted_gains = gain.gather(-1, (-m.flatten(1)).argsort(-1)).cumsum(-1)
    inserted = torch.cat([empty[:, None], empty[:, None] + sorted_gains], -1)[:, found.counts]
    torch.testing.assert_close(found.insertion, inserted)


def one_at_a_time(model, image, map_, target, blank, step, score):
    """Deletion and insertion of one picture and map: pictures made by slices of pixels, one forward each."""
    order = sorted(range(map_.numel()), key=lambda p: -map_.flatten()[p].item())
    rows = []
    for start, cover in ((image, blank), (blank, image)):
        picture, row = start.clone(), []
        for count in range(map_.numel() + 1):
            if count % step == 0 or count == map_.numel():
                logits = model(picture[None])[0]
                row.append((logits.softmax(0) if score == "probability" else logits)[target].item())
            if count < map_.numel():
                top, left = order[count] // map_.shape[1] * 16, order[count] % map_.shape[1] * 16
                bottom = None if top == 48 else top + 16  # the last patches also have the pixels that no patch sees
                right = None if left == 80 else left + 16
                picture[:, top:bottom, left:right] = cover[:, top:bottom, left:right]
        rows.append(row)
    return rows


@torch.no_grad()
@pytest.mark.parametrize("score", ["probability", "logit"])
def test_pictures_covered_one_at_a_time(vit, score):
    model, x, m = vit(img_size=(64, 96), dtype=torch.float64), images(), maps(3, 2, 4, 6)
    model.head.weight.mul_(20)
    blank = x.mean((2, 3), keepdim=True).expand_as(x)
    found = curves(model, x, m, TARGET, step=7, score=score, internal_batch_size=5)
    assert found.deletion.shape == found.insertion.shape == (3, 2, 5) and found.deletion_area.shape == (3, 2)
    width = torch.tensor([7, 7, 7, 3]) / 24
    for i, b in itertools.product(range(3), range(2)):
        deleted, inserted = one_at_a_time(model, x[b], m[i, b], TARGET[b], blank[b], 7, score)
        np.testing.assert_allclose(found.deletion[i, b], deleted, rtol=1e-9)
        np.testing.assert_allclose(found.insertion[i, b], inserted, rtol=1e-9)
        for area, row in ((found.deletion_area, deleted), (found.insertion_area, inserted)):
            by_hand = sum(w * (a + z) / 2 for w, a, z in zip(width.tolist(), row[:-1], row[1:], strict=True))
            assert area[i, b].item() == pytest.approx(by_hand, rel=1e-6)
    assert (found.deletion[..., 0] - found.deletion[..., -1]).abs().min() > 1e-3


@torch.no_grad()
def test_pixels_beside_the_patches_go_with_the_next_one():
    x, m, grid = images(1, (70, 100)), maps(1, 4, 6), TokenGrid(4, 6, (16, 16), 0, (70, 100))
    model = linear((70, 100))
    found = curves(model, x, m, 2, baseline="zero", step=1, score="logit", grid=grid)
    deleted, inserted = one_at_a_time(model, x[0], m[0], 2, 0 * x[0], 1, "logit")
    np.testing.assert_allclose(found.deletion[0], deleted)
    np.testing.assert_allclose(found.insertion[0], inserted)


def test_batches_make_no_difference(vit):
    model, x, m = vit(img_size=(64, 96), dtype=torch.float64), images(3), maps(2, 3, 4, 6)
    whole = curves(model, x, m, internal_batch_size=1000)
    for size in (1, 7):
        for name, curve in vars(curves(model, x, m, internal_batch_size=size)).items():
            torch.testing.assert_close(curve, getattr(whole, name), rtol=1e-9, atol=0)
    alone = curves(model, x[1:2], m[1, 1:2])
    torch.testing.assert_close(alone.deletion[0], whole.deletion[1, 1], rtol=1e-9, atol=0)
    torch.testing.assert_close(alone.insertion[0], whole.insertion[1, 1], rtol=1e-9, atol=0)


class OnePatch(nn.Module):
    """Knows class 1 by the color of one patch of six."""

    def __init__(self, patch):
        super().__init__()
        self.y, self.x = patch // 3 * 8, patch % 3 * 8

    def forward(self, x):
        return torch.stack(
            [x.new_zeros(len(x)), 4 * x[..., self.y : self.y + 8, self.x : self.x + 8].mean((1, 2, 3))], 1
        )


@pytest.mark.parametrize("planted", range(6))
def test_a_map_that_points_at_the_deciding_patch_is_best(planted):
    """Among all 720 orders of six patches."""
    grid, x = TokenGrid(2, 3, (8, 8), prefix=0), torch.zeros(1, 3, 16, 24)
    x[..., planted // 3 * 8 :, planted % 3 * 8 :][..., :8, :8] = 1
    all_orders = torch.tensor(list(itertools.permutations(range(6))), dtype=torch.float32).reshape(720, 1, 2, 3)
    found = curves(OnePatch(planted), x, all_orders, 1, baseline="zero", grid=grid, internal_batch_size=500)
    pointing = torch.zeros(1, 2, 3)
    pointing[0, planted // 3, planted % 3] = 1
    best = curves(OnePatch(planted), x, pointing, 1, baseline="zero", grid=grid)
    assert torch.isclose(best.deletion_area, found.deletion_area.min())
    assert torch.isclose(best.insertion_area, found.insertion_area.max())
    points = all_orders.flatten(1).argmax(-1) == planted
    assert best.deletion_area < found.deletion_area[~points].min() - 0.05
    sure, even = 1 / (1 + math.exp(-4)), 0.5
    assert best.deletion_area.item() == pytest.approx((sure - even) / 12 + even)
    assert best.insertion_area.item() == pytest.approx(sure - (sure - even) / 12)


def test_random_orders_have_the_mean_and_spread_of_theory():
    """Of a linear model: mean (full + empty) / 2, variance Σ(g − ḡ)² · Σ(r − r̄)² / (P − 1) / P², g gains, r places."""
    model, x, n = linear(SMALL.image), images(1, SMALL.image), 1000
    control = random_maps(SMALL, n, seed=5)[:, None]
    found = curves(model, x, control, 3, baseline="zero", step=1, score="logit", grid=SMALL, internal_batch_size=500)
    gain, empty = gains(model, x, 0 * x, [3])[0], model[1].bias[3].item()
    places = torch.arange(24, dtype=torch.float64)
    square = lambda v: (v - v.mean()).square().sum().item()  # noqa: E731
    std = math.sqrt(square(gain) * square(places) / 23) / 24
    for area in (found.deletion_area, found.insertion_area):
        assert abs(area.mean().item() - (empty + gain.sum().item() / 2)) < 4 * std / math.sqrt(n)
        assert area.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * n))


def test_random_maps_are_drawn_from_the_seed():
    some = random_maps(GRID, 5, seed=3)
    assert torch.equal(some, random_maps(GRID, 9, seed=3)[:5]) and some.shape == (5, 4, 6)
    assert not torch.equal(some, random_maps(GRID, 5, seed=4))
    assert all(sorted(one.flatten().tolist()) == list(range(24)) for one in some)
    assert len({tuple(one.flatten().tolist()) for one in random_maps(GRID, 50)}) == 50


def test_a_constant_map_is_a_random_order():
    model, x, n = linear(SMALL.image), images(1, SMALL.image), 300
    options = dict(baseline="zero", step=1, score="logit", grid=SMALL, internal_batch_size=100)
    areas = torch.stack([curves(model, x, torch.ones(1, 4, 6), 3, seed=s, **options).deletion_area for s in range(n)])
    gain = gains(model, x, 0 * x, [3])[0].sum().item()
    assert abs(areas.mean().item() - model[1].bias[3].item() - gain / 2) < 4 * areas.std().item() / math.sqrt(n)
    assert areas.std() > 0


def test_ties_are_broken_by_the_seed_alone():
    model, x = linear(), images(3)
    options = dict(step=1, grid=GRID)
    coarse = maps(3, 4, 6).sign().expand(2, 3, 4, 6)
    found = curves(model, x, coarse, 3, **options)
    torch.testing.assert_close(found.deletion[0], found.deletion[1], rtol=1e-12, atol=0)  # equal maps score alike
    torch.testing.assert_close(
        curves(model, x[2:], coarse[0, 2:], 3, **options).deletion[0], found.deletion[0, 2], rtol=1e-9, atol=0
    )
    other = curves(model, x, coarse, 3, seed=1, **options)
    assert not torch.allclose(found.deletion, other.deletion)
    counts = (coarse[0] > 0).sum((1, 2))
    for i, count in enumerate(counts):  # what is higher goes first, whatever the seed
        torch.testing.assert_close(found.deletion[0, i, count], other.deletion[0, i, count])
    m = maps(3, 4, 6)
    assert torch.equal(curves(model, x, m, 3, **options).deletion, curves(model, x, m, 3, seed=1, **options).deletion)
    shifted = curves(model, x, 5 * m - 7, 3, **options)  # only the order counts
    assert torch.equal(curves(model, x, m, 3, **options).insertion, shifted.insertion)


def test_baselines(vit):
    x, m = images(), maps(2, 4, 6)
    model, options = linear(), dict(target=TARGET, score="logit", grid=GRID)
    logits = lambda blank: model(blank).detach()[[0, 1], TARGET]  # noqa: E731
    end = lambda baseline: curves(model, x, m, baseline=baseline, **options).deletion[:, -1]  # noqa: E731
    torch.testing.assert_close(end("zero"), logits(torch.zeros_like(x)))
    by_hand = torch.stack([torch.stack([c.mean().expand(64, 96) for c in one]) for one in x])
    torch.testing.assert_close(end("mean"), logits(by_hand))
    torch.testing.assert_close(end("blur"), logits(blurred(x, 16)))
    torch.testing.assert_close(end(torch.tensor([1.0, 2.0, 3.0])[:, None, None]), logits(by_hand * 0 + end_color()))
    for baseline in ("gray", None):
        refuses("one of mean, blur, zero, or a tensor that fits", end, baseline)
    refuses(r"images of shape \(2, 3, 64, 96\), got .* \(4,\)", end, torch.zeros(4))


def end_color():
    return torch.tensor([1.0, 2.0, 3.0]).double()[:, None, None]


def test_blur_equals_torchvisions():
    x = images(1, (81, 81))
    inside = (..., slice(24, -24), slice(24, -24))  # edges are mirrored in two ways
    torch.testing.assert_close(blurred(x, 3)[inside], gaussian_blur(x, [25, 25], [3.0, 3.0])[inside])
    torch.testing.assert_close(blurred(torch.ones(1, 3, 20, 9), 16), torch.ones(1, 3, 20, 9))  # wider than the image
    assert blurred(x.bfloat16(), 3).dtype == torch.bfloat16
    refuses("positive standard deviation in pixels, got sigma=0", blurred, x, 0)


def test_all_maps_share_full_batches():
    sizes = []
    model = linear()
    model.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    curves(model, images(2), maps(3, 2, 4, 6), 3, step=5, grid=GRID, internal_batch_size=7)
    pictures = 2 + 2 + 3 * 2 * 2 * 4  # images whole, images empty, and maps × images × two curves × steps
    assert sizes == [2, *[7] * (pictures // 7), pictures % 7]


def test_memory_is_that_of_one_batch():
    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.numbers = max(self.numbers, result.numel())
            return result

    with Largest() as largest:
        curves(linear(), images(2), maps(30, 2, 4, 6), 3, step=1, grid=GRID, internal_batch_size=4)
    assert largest.numbers <= max(4 * 3 * 64 * 96, linear()[1].weight.numel())


def test_deletion_equals_quantus():
    import quantus

    model, x, m = linear().eval(), images(), maps(2, 4, 6)
    flipping = quantus.PixelFlipping(
        features_in_step=3 * 256, perturb_baseline=0.0, abs=False, normalise=False, disable_warnings=True
    )
    pixels = m.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None].numpy()
    theirs = flipping(model.float(), x.float().numpy(), TARGET.numpy(), a_batch=pixels, softmax=True, device="cpu")
    ours = curves(model, x.float(), m, TARGET, baseline="zero", step=1, grid=GRID)
    np.testing.assert_allclose(ours.deletion[:, 1:], np.array(theirs), rtol=1e-4)  # theirs begins after the first step
