"""Augmentation of a batch equals augmentation sample by sample, and is a function of its key."""

import math

import pytest
import torch
import torch.nn.functional as F
from support import refuses
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torchvision.transforms.v2 import functional as tv

from vitlens.data import augment as transforms
from vitlens.data.augment import (
    Augment,
    Targets,
    augment_batch,
    draws,
    generator,
    normalize,
    seed_of,
)
from vitlens.train.criteria import sigmoid_cross_entropy, soft_cross_entropy

EVERYTHING = Augment(
    flip=0.5,
    pad=4,
    scale=(0.4, 1.0),
    ratio=(0.75, 1.33),
    rotate=10,
    jitter=0.3,
    policy=0.5,
    erase=0.3,
    cutmix=0.5,
    mixup=0.3,
)
PLAIN = {"mean": (0, 0, 0), "std": (1, 1, 1)}


def uniform(n, samples, key):
    return draws("cpu", key).uniform(n, samples)


@pytest.fixture
def batch():
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (32, 3, 16, 16), generator=rng, dtype=torch.uint8)
    return images, torch.randint(0, 10, (32,), generator=rng)


def test_augment_batch_is_a_function_of_the_key(batch):
    def run(*key):
        return augment_batch(
            *batch, EVERYTHING, draws("cpu", *key), mean=(0.5,) * 3, std=(0.2,) * 3
        )

    before = torch.get_rng_state()
    a, b = run(0, 1, 2), run(0, 1, 2)
    assert torch.equal(a[0], b[0]) and all(
        torch.equal(s, t) for s, t in zip(a[1], b[1], strict=True)
    )
    for key in ((1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 12)):
        assert not torch.equal(a[0], run(*key)[0])
    assert torch.equal(before, torch.get_rng_state())
    assert a[0].shape == batch[0].shape and a[0].isfinite().all()
    assert (seed_of(0), seed_of(0, 1, 2)) == (7896617691693857887, 1535930435702422785), (
        "resumed runs need them"
    )


def test_augment_batch_equals_frozen_numbers(batch):
    options = {"size": 12, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.1)}
    x, y = augment_batch(*batch, EVERYTHING, draws("cpu", 0, 3), **options)
    pixels = x[[0, 9, 31], [0, 1, 2], 3, 7]
    assert pixels.tolist() == pytest.approx([-0.3044841, 0.7262695, 3.7996864], abs=1e-4)
    assert y.lam.sum().item() == pytest.approx(19.895346, abs=1e-4)


@pytest.mark.parametrize("mix", [True, False])
def test_transform_batch_is_one_graph(batch, mix):
    options = {"size": 12, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.1)}
    numbers = transforms.draw_numbers(batch[0].shape, EVERYTHING, draws("cpu", 1), size=12, mix=mix)
    names = ["window", "crop", "jitter", "policy", "erase", "mix"]
    assert [*numbers] == names[: 6 if mix else 5]

    def transform(images, labels, numbers):
        return transforms.transform_batch(images, labels, numbers, EVERYTHING, **options)

    compiled = torch.compile(transform, backend="eager", fullgraph=True, dynamic=False)
    expected = augment_batch(*batch, EVERYTHING, draws("cpu", 1), **options, mix=mix)
    x, y = compiled(*batch, numbers)
    torch.testing.assert_close(x, expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(tuple(y), tuple(expected[1]))


def test_augment_batch_by_default_only_normalizes(batch):
    x, y = augment_batch(*batch, Augment(), draws("cpu", 0), **PLAIN)
    assert torch.equal(x, batch[0].float() / 255)
    assert torch.equal(y.a, batch[1]) and torch.equal(y.b, batch[1]) and (y.lam == 1).all()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    torch.testing.assert_close(
        normalize(batch[0], mean, std), tv.normalize(x, mean, std), rtol=0, atol=1e-6
    )


def test_shift_and_flip_cuts_slices_of_the_padded_image(batch):
    images, pad = batch[0], 3
    out = transforms.shift_and_flip(images, (16, 16), pad, 0.5, uniform(3, 32, 5))
    padded = F.pad(images.float(), (pad,) * 4, mode="reflect").to(torch.uint8)
    positions = [places(image, border, 16) for image, border in zip(out, padded, strict=True)]
    assert all(len(matches) == 1 for matches in positions)
    assert len({*sum(positions, [])}) > 20 and {mirrored for ((_, _, mirrored),) in positions} == {
        False,
        True,
    }


def places(window, image, size):
    """Corners (y, x, mirrored) at which a window, or its mirror image, equals a part of an image."""
    corners = range(image.shape[-1] - size + 1)
    cuts = {(y, x): image[:, y : y + size, x : x + size] for y in corners for x in corners}
    return [
        (*at, m)
        for at, cut in cuts.items()
        for m in (False, True)
        if window.equal(cut.flip(-1) if m else cut)
    ]


def test_random_resized_crop_has_the_requested_area_and_ratio():
    # The first two channels are the coordinates, which show the corners of the crop.
    n = 64
    coordinate = (torch.arange(n) + 0.5) / n
    x = torch.stack([coordinate.expand(n, n), coordinate[:, None].expand(n, n), torch.zeros(n, n)])
    out = transforms.random_resized_crop(
        x.expand(500, -1, -1, -1), (n, n), (0.3, 0.8), (0.75, 4 / 3), 0.0, uniform(5, 500, 0)
    )
    width = (out[:, 0, 0, -1] - out[:, 0, 0, 0]) * n / (n - 1)
    height = (out[:, 1, -1, 0] - out[:, 1, 0, 0]) * n / (n - 1)
    inside = (width < 0.97) & (height < 0.97)  # larger crops are cut to the image
    area, ratio = (width * height)[inside], (width / height)[inside]
    assert 0.28 < area.min() < 0.35 and 0.7 < area.max() < 0.85
    assert 0.72 < ratio.min() < 0.85 and 1.2 < ratio.max() < 1.4
    assert out.min() >= 0 and out[:, :2].max() <= 1


def test_random_resized_crop_equals_affine_grid():
    x = torch.rand(6, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    area, log_ratio, angle, cx, cy = draws("cpu", 2).uniform(5, 6)
    area, log_ratio, angle = (
        0.1 + 0.5 * area,
        (2 * log_ratio - 1) * math.log(2),
        (2 * angle - 1) * math.radians(30),
    )
    w, h = (area.sqrt() * (sign * log_ratio / 2).exp() for sign in (1, -1))
    across = torch.stack([w * angle.cos(), -h * angle.sin(), (2 * cx - 1) * (1 - w)], dim=1)
    down = torch.stack([w * angle.sin(), h * angle.cos(), (2 * cy - 1) * (1 - h)], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), [6, 3, 24, 33], align_corners=False)
    expected = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    out = transforms.random_resized_crop(
        x, (24, 33), (0.1, 0.6), (0.5, 2.0), 30.0, uniform(5, 6, 2)
    )
    assert max(w.max(), h.max()) < 1
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    same = transforms.random_resized_crop(
        x, (40, 56), (1.0, 1.0), (1.0, 1.0), 0.0, uniform(5, 6, 0)
    )
    torch.testing.assert_close(same, x, atol=1e-5, rtol=0)


def test_color_operations_equal_torchvision(batch):
    x = batch[0].float() / 255
    torch.testing.assert_close(transforms.gray(x), tv.rgb_to_grayscale(x), atol=1e-3, rtol=0)
    expected = tv.posterize(batch[0], 3).float() / 255
    torch.testing.assert_close(transforms.posterize(x), expected, atol=1e-6, rtol=0)
    out = transforms.gray_solarize_posterize(x, 1.0, uniform(1, 32, 0))
    kinds = [tv.rgb_to_grayscale(x, 3), torch.where(x < 0.5, x, 1 - x), expected]
    hits = torch.stack([(out - k).abs().amax((1, 2, 3)) < 1e-3 for k in kinds])
    assert (hits.sum(0) == 1).all() and (hits.sum(1) > 3).all()
    assert torch.equal(transforms.gray_solarize_posterize(x, 0.0, uniform(1, 32, 0)), x)


def test_color_jitter_equals_torchvision_per_image(batch):
    x = batch[0].float() / 255
    factors = 1 + 0.4 * (2 * torch.rand(3, 32, generator=generator("cpu", 3)) - 1)
    out = transforms.color_jitter(x, 0.4, uniform(3, 32, 3))
    for i in range(32):
        b, c, s = factors[:, i].flatten().tolist()
        expected = tv.adjust_saturation(tv.adjust_contrast(tv.adjust_brightness(x[i], b), c), s)
        torch.testing.assert_close(out[i], expected, atol=2e-3, rtol=0)


def test_mix_neighbors_equals_a_loop_over_samples(batch):
    x, labels = batch[0].float() / 255, batch[1]
    out, y = transforms.mix_neighbors(x, labels, 0.4, 0.4, uniform(4, 32, 7))
    kind, lam, cy, cx = torch.rand(4, 32, generator=generator("cpu", 7))
    counts = {"cutmix": 0, "mixup": 0, "none": 0}
    for i in range(32):
        other, expected, share = x[i ^ 1], x[i].clone(), 1.0
        if kind[i] < 0.4:
            counts["cutmix"] += 1
            side = math.sqrt(1 - lam[i])
            top, bottom = (round(float((cy[i] + s * side / 2) * 16)) for s in (-1, 1))
            left, right = (round(float((cx[i] + s * side / 2) * 16)) for s in (-1, 1))
            top, bottom, left, right = (min(max(v, 0), 16) for v in (top, bottom, left, right))
            expected[:, top:bottom, left:right] = other[:, top:bottom, left:right]
            share = 1 - (bottom - top) * (right - left) / 256
        elif kind[i] < 0.8:
            counts["mixup"] += 1
            share = lam[i].item()
            expected = share * x[i] + (1 - share) * other
        else:
            counts["none"] += 1
        torch.testing.assert_close(out[i], expected, atol=1e-6, rtol=0)
        assert y.lam[i].item() == pytest.approx(share, abs=1e-6)
    assert min(counts.values()) > 2
    assert torch.equal(y.a, labels) and torch.equal(y.b, labels.view(16, 2).flip(1).flatten())


def test_augment_batch_crops_a_larger_image(batch):
    out, _ = augment_batch(*batch, Augment(flip=0.5), draws("cpu", 4), size=11, **PLAIN)
    positions = [
        places(window, image, 11) for window, image in zip(out, batch[0].float() / 255, strict=True)
    ]
    assert all(len(matches) == 1 for matches in positions)
    assert {y for ((y, _, _),) in positions} == set(range(6)) == {x for ((_, x, _),) in positions}
    resized, _ = augment_batch(*batch, Augment(scale=(0.5, 1.0)), draws("cpu", 4), size=11, **PLAIN)
    assert resized.shape == (32, 3, 11, 11)


def test_augment_batch_in_parts_equals_the_whole_batch(batch):
    whole, y = augment_batch(*batch, EVERYTHING, draws("cpu", 0, 3), size=12, **PLAIN)
    for parts in (2, 16):
        images, labels = (t.chunk(parts) for t in batch)
        pieces = [
            augment_batch(
                images[k],
                labels[k],
                EVERYTHING,
                draws("cpu", 0, 3, part=k, parts=parts),
                size=12,
                **PLAIN,
            )
            for k in range(parts)
        ]
        assert torch.equal(whole, torch.cat([x for x, _ in pieces]))
        for field in range(3):
            assert torch.equal(y[field], torch.cat([target[field] for _, target in pieces]))


def test_mix_neighbors_keeps_the_last_sample_and_other_random_choices(batch):
    x, labels = batch[0][:5].float(), batch[1][:5]
    out, y = transforms.mix_neighbors(x, labels, 1.0, 0.0, uniform(4, 5, 7))
    assert torch.equal(out[4], x[4]) and y.b.tolist() == labels[[1, 0, 3, 2, 4]].tolist()
    quiet = Augment(flip=0.5, pad=2, erase=0.5)
    a, _ = augment_batch(
        *batch, Augment(flip=0.5, pad=2, erase=0.5, cutmix=1.0), draws("cpu", 1), **PLAIN, mix=False
    )
    b, _ = augment_batch(*batch, quiet, draws("cpu", 1), **PLAIN)
    assert torch.equal(a, b)


def test_erase_rectangles_zeroes_one_rectangle(batch):
    x = batch[0].float() / 255 + 1
    out = transforms.erase_rectangles(x, 0.5, uniform(5, 32, 0))
    erased = out[:, 0] == 0
    assert 5 < erased.any(dim=(1, 2)).sum() < 27
    for mask in erased[erased.any(dim=(1, 2))]:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        assert mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    kept = ~erased[:, None].expand_as(x)
    assert torch.equal(out[kept], x[kept])


def test_soft_losses_equal_timm_on_one_hot_rows(batch):
    logits = torch.randn(32, 10, generator=torch.Generator().manual_seed(1))
    _, y = transforms.mix_neighbors(batch[0].float(), batch[1], 0.5, 0.5, uniform(4, 32, 2))
    rows = y.lam[:, None] * F.one_hot(y.a, 10) + (1 - y.lam[:, None]) * F.one_hot(y.b, 10)
    for smoothing in (0.0, 0.1):
        soft = (1 - smoothing) * rows + smoothing / 10
        torch.testing.assert_close(
            soft_cross_entropy(logits, y, smoothing), SoftTargetCrossEntropy()(logits, soft)
        )
        expected = BinaryCrossEntropy(smoothing=0.0, sum_classes=True)(logits, soft)
        torch.testing.assert_close(sigmoid_cross_entropy(logits, y, smoothing), expected)
        hard = Targets(y.a, y.b, torch.ones(32))
        expected = F.cross_entropy(logits, y.a, label_smoothing=smoothing)
        torch.testing.assert_close(soft_cross_entropy(logits, hard, smoothing), expected)


def cut_out(batch, size):
    return augment_batch(*batch, Augment(), draws("cpu", 4), size=size, **PLAIN)


REFUSALS = (
    (lambda batch: Augment(flip=2), "flip .* 0 and 1, got 2"),
    (lambda batch: Augment(cutmix=0.7, mixup=0.7), "more than 1"),
    (lambda batch: Augment(scale=(0.0, 1.0)), "scale"),
    (lambda batch: Augment(ratio=(2.0, 1.0)), "ratio"),
    (lambda batch: Augment(pad=-1), "pad .* got -1"),
    (lambda batch: cut_out(batch, 17), "17×17 .* 16×16"),
)
"""A call that raises ValueError, and decisive words."""


@pytest.mark.parametrize("call, words", REFUSALS)
def test_augment_refuses(batch, call, words):
    refuses(words, call, batch)
