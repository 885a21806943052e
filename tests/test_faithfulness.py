"""Insertion and deletion, randomized weights and the table of maps, compared with closed forms, images covered one at a
time and independent libraries."""

import copy
import itertools
import math

import numpy as np
import pytest
import timm
import torch
from support import GRID, SMALL, Largest, gains, images, left_as_found, linear, maps, refuses
from torch import nn
from torchvision.transforms.functional import gaussian_blur

from vitlens import TokenGrid
from vitlens.attribution import relevance
from vitlens.attribution.target import Target
from vitlens.faithfulness import Randomization, blur, curves, random_maps, randomization, table

TARGET = torch.tensor([3, 1])
PARTS = (
    "head",
    "norm",
    "blocks.2",
    "blocks.1",
    "blocks.0",
    "patch_embed",
    "pos_embed",
    "cls_token",
)


def midpoints(map_, step):
    """(24,) share of covered patches when each patch is covered, in the middle of its step."""
    patches = map_.numel()
    places = (-map_.flatten()).argsort().argsort()
    start = places // step * step
    return (start + (start + step).clamp(max=patches)) / 2 / patches


def test_curves_of_a_linear_model_have_closed_areas():
    """Each patch adds its gain while it is visible."""
    model, x, m = linear(), images(), maps(2, 4, 6)
    mean = torch.stack([torch.stack([c.mean().expand(64, 96) for c in one]) for one in x])
    colors = torch.tensor([1.0, 2.0, 3.0]).double()[:, None, None]
    blanks = {"mean": mean, "blur": blur(x, 16), "zero": 0 * x, colors: colors.expand_as(x)}
    for (baseline, blank), step in itertools.product(blanks.items(), (1, 5, 24)):
        result = curves(model, x, m, TARGET, baseline=baseline, step=step, score="logit", grid=GRID)
        gain = gains(model, x, blank, TARGET)
        empty = model(blank).detach()[[0, 1], TARGET]
        gone = torch.stack([midpoints(one, step) for one in m])
        torch.testing.assert_close(result.deletion_area, empty + (gain * gone).sum(-1))
        torch.testing.assert_close(result.insertion_area, empty + (gain * (1 - gone)).sum(-1))
        assert result.counts.tolist() == [*range(0, 24, step), 24]
        sorted_gains = gain.gather(-1, (-m.flatten(1)).argsort(-1)).cumsum(-1)
        inserted = torch.cat([empty[:, None], empty[:, None] + sorted_gains], -1)[:, result.counts]
        torch.testing.assert_close(result.insertion, inserted)


def one_at_a_time(model, image, map_, target, blank, step, score):
    """Deletion and insertion of one image and map, with slices of pixels and a forward per image."""
    order = sorted(range(map_.numel()), key=lambda p: -map_.flatten()[p].item())
    rows = []
    for start, cover in ((image, blank), (blank, image)):
        covered, row = start.clone(), []
        for count in range(map_.numel() + 1):
            if count % step == 0 or count == map_.numel():
                logits = model(covered[None])[0]
                row.append((logits.softmax(0) if score == "probability" else logits)[target].item())
            if count < map_.numel():
                top, left = order[count] // map_.shape[1] * 16, order[count] % map_.shape[1] * 16
                bottom = (
                    None if top == 48 else top + 16
                )  # the last patches include pixels outside of patches
                right = None if left == 80 else left + 16
                covered[:, top:bottom, left:right] = cover[:, top:bottom, left:right]
        rows.append(row)
    return rows


@torch.no_grad()
def test_curves_equal_images_covered_one_at_a_time(vit):
    model, x, m = vit(img_size=(64, 96), depth=2, dtype=torch.float64), images(), maps(2, 2, 4, 6)
    model.head.weight.mul_(20)
    blank = x.mean((2, 3), keepdim=True).expand_as(x)
    width = torch.tensor([7, 7, 7, 3]) / 24
    for score in ("probability", "logit"):
        result = curves(model, x, m, TARGET, step=7, score=score, internal_batch_size=5)
        assert result.deletion.shape == result.insertion.shape == (
            2,
            2,
            5,
        ) and result.deletion_area.shape == (2, 2)
        for i, b in itertools.product(range(2), range(2)):
            deleted, inserted = one_at_a_time(model, x[b], m[i, b], TARGET[b], blank[b], 7, score)
            np.testing.assert_allclose(result.deletion[i, b], deleted, rtol=1e-9)
            np.testing.assert_allclose(result.insertion[i, b], inserted, rtol=1e-9)
            for area, row in ((result.deletion_area, deleted), (result.insertion_area, inserted)):
                by_hand = sum(
                    w * (a + z) / 2
                    for w, a, z in zip(width.tolist(), row[:-1], row[1:], strict=True)
                )
                assert area[i, b].item() == pytest.approx(by_hand, rel=1e-6)
    alone = curves(model, x[1:2], m[1, 1:2], TARGET[1:], step=7, score="logit")
    torch.testing.assert_close(alone.insertion[0], result.insertion[1, 1], rtol=1e-9, atol=0)


@torch.no_grad()
def test_curves_cover_pixels_beside_the_patches_with_the_nearest():
    x, m, grid = images(1, (70, 100)), maps(1, 4, 6), TokenGrid(4, 6, (16, 16), 0, (70, 100))
    model = linear((70, 100))
    result = curves(model, x, m, 2, baseline="zero", step=1, score="logit", grid=grid)
    deleted, inserted = one_at_a_time(model, x[0], m[0], 2, 0 * x[0], 1, "logit")
    np.testing.assert_allclose(result.deletion[0], deleted)
    np.testing.assert_allclose(result.insertion[0], inserted)


def test_random_maps_have_the_mean_and_spread_of_theory():
    """For a linear model: mean (full + empty) / 2, variance Σ(g − ḡ)² · Σ(r − r̄)² / (P − 1) / P², g gains, r places."""
    model, x, n = linear(SMALL.image), images(1, SMALL.image), 1000
    control = random_maps(SMALL, n, seed=5)[:, None]
    result = curves(
        model,
        x,
        control,
        3,
        baseline="zero",
        step=1,
        score="logit",
        grid=SMALL,
        internal_batch_size=500,
    )
    gain, empty = gains(model, x, 0 * x, [3])[0], model[1].bias[3].item()
    places = torch.arange(24, dtype=torch.float64)
    square = lambda v: (v - v.mean()).square().sum().item()  # noqa: E731
    std = math.sqrt(square(gain) * square(places) / 23) / 24
    for area in (result.deletion_area, result.insertion_area):
        assert abs(area.mean().item() - (empty + gain.sum().item() / 2)) < 4 * std / math.sqrt(n)
        assert area.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * n))


def test_curves_break_ties_by_the_seed():
    model, x = linear(), images(3)
    options = dict(step=1, grid=GRID)
    coarse = maps(3, 4, 6).sign().expand(2, 3, 4, 6)
    result = curves(model, x, coarse, 3, **options)
    torch.testing.assert_close(
        result.deletion[0], result.deletion[1], rtol=1e-12, atol=0
    )  # equal maps, equal scores
    torch.testing.assert_close(
        curves(model, x[2:], coarse[0, 2:], 3, **options).deletion[0],
        result.deletion[0, 2],
        rtol=1e-9,
        atol=0,
    )
    other = curves(model, x, coarse, 3, seed=1, **options)
    assert not torch.allclose(result.deletion, other.deletion)
    counts = (coarse[0] > 0).sum((1, 2))
    for i, count in enumerate(counts):  # higher patches come first, for every seed
        torch.testing.assert_close(result.deletion[0, i, count], other.deletion[0, i, count])
    m = maps(3, 4, 6)
    assert torch.equal(
        curves(model, x, m, 3, **options).deletion,
        curves(model, x, m, 3, seed=1, **options).deletion,
    )
    shifted = curves(model, x, 5 * m - 7, 3, **options)  # only the order counts
    assert torch.equal(curves(model, x, m, 3, **options).insertion, shifted.insertion)


def test_blur_equals_torchvision():
    x = images(1, (81, 81))
    inside = (..., slice(24, -24), slice(24, -24))  # the two mirror edges differently
    torch.testing.assert_close(blur(x, 3)[inside], gaussian_blur(x, [25, 25], [3.0, 3.0])[inside])
    torch.testing.assert_close(
        blur(torch.ones(1, 3, 20, 9), 16), torch.ones(1, 3, 20, 9)
    )  # wider than the image
    assert blur(x.bfloat16(), 3).dtype == torch.bfloat16


def test_curves_share_full_batches_and_memory_of_one_batch():
    sizes, model = [], linear()
    model.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    with Largest() as largest:
        curves(model, images(2), maps(3, 2, 4, 6), 3, step=5, grid=GRID, internal_batch_size=7)
    count = (
        2 + 2 + 3 * 2 * 2 * 4
    )  # whole images, empty images, and maps × images × two curves × steps
    assert sizes == [2, *[7] * (count // 7), count % 7]
    assert largest.numbers <= max(7 * 3 * 64 * 96, model[1].weight.numel())


def fixed(*values):
    """A method that returns these maps one after the other, for every input."""
    queue = list(values)
    return lambda model, x, target: queue.pop(0)


def test_randomization_starts_from_the_top(vit):
    model, x, states = vit(img_size=(64, 96)), images(dtype=torch.float32), []

    def method(subject, images, target):
        states.append({k: v.clone() for k, v in subject.state_dict().items()})
        assert subject is not model and not any(m.training for m in subject.modules())
        assert target.tolist() == chosen and torch.equal(images, x)
        return torch.randn(2, 4, 6)

    with torch.no_grad():
        chosen = model(x).argmax(-1).tolist()
    assert randomization(model.train(), x, method).parts == PARTS and len(states) == 9
    original = model.state_dict()
    assert all(torch.equal(original[k], v) for k, v in states[0].items())
    for step, state in enumerate(states):
        for name, weight in state.items():
            part = ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])
            varied = original[name].std(correction=0) > 0  # constant parameters keep their value
            assert torch.equal(weight, original[name]) == (
                part not in PARTS[:step] or not varied
            ), (step, name)
    for name, weight in states[-1].items():
        if weight.numel() > 5000:  # redrawn with the same mean and deviation
            assert weight.std().item() == pytest.approx(original[name].std().item(), rel=0.05)
            assert (
                abs((weight.mean() - original[name].mean()).item())
                < 0.05 * original[name].std().item()
            )
            assert abs(np.corrcoef(weight.flatten(), original[name].flatten())[0, 1]) < 0.05


def test_randomization_compares_maps_after_chosen_parts(vit):
    model, x, method = vit(img_size=(64, 96)), images(dtype=torch.float32), relevance
    every, some = (
        randomization(model, x, method, after=after) for after in (None, [PARTS[4], PARTS[0]])
    )
    assert some.parts == (PARTS[0], PARTS[4])
    assert torch.equal(some.rank_correlation, every.rank_correlation[[0, 4]])


def test_randomization_leaves_the_model_unchanged(vit):
    model, x = vit(img_size=(64, 96), drop_rate=0.5), images(dtype=torch.float32)
    model.train()
    model.blocks[0].eval()

    def careless(subject, x, target):  # leaves gradients behind, as plain backward passes do
        x = x.clone().requires_grad_()
        subject(x)[:, 3].sum().backward()
        return x.grad.abs().mean(1).unfold(-2, 16, 16).unfold(-2, 16, 16).mean((-1, -2))

    with left_as_found(model, x):
        result, again, other = (
            randomization(model, x, careless, 3, seed=seed).rank_correlation for seed in (7, 7, 8)
        )
    assert torch.equal(result, again) and not torch.equal(result, other)


def one_layer():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 96, 5))


def test_randomization_rank_correlation_closed_form():
    """1 − 6 Σ d² / (n (n² − 1)) without ties, and 1 or 0 for constant maps."""
    x, generator = images(dtype=torch.float32), torch.Generator().manual_seed(0)
    a, b = (
        torch.stack([torch.randperm(24, generator=generator) for _ in range(2)]).double()
        for _ in "ab"
    )
    shaped = [m.exp().reshape(2, 4, 6) for m in (a, b)]  # only ranks matter
    result = randomization(one_layer(), x, fixed(*shaped))
    assert result.parts == ("1",)
    expected = 1 - 6 * (a - b).square().sum(-1) / (24 * (24**2 - 1))
    torch.testing.assert_close(result.rank_correlation[0], expected.float())
    flat = torch.ones(2, 4, 6)
    assert randomization(one_layer(), x, fixed(flat, 5 * flat)).rank_correlation.tolist() == [
        [1, 1]
    ]
    for pair in ((flat, shaped[0]), (shaped[0], flat)):
        assert randomization(one_layer(), x, fixed(*pair)).rank_correlation.tolist() == [[0, 0]]


def test_randomization_ssim_closed_form():
    """7 × 7 maps have one window: (2ab + c)(2·cov + d) / ((a² + b² + c)(var a + var b + d)), Wang et al. 2004."""
    a, b = (
        torch.rand(1, 7, 7, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
        for s in (0, 1)
    )
    result = randomization(one_layer(), images(1, dtype=torch.float32), fixed(3 * a + 2, b))
    a, b = ((m - m.min()) / (m.max() - m.min()) for m in (a, b))
    cov = torch.cov(torch.stack([a.flatten(), b.flatten()]))
    light, contrast = 0.01**2, 0.03**2
    expected = (2 * a.mean() * b.mean() + light) * (2 * cov[0, 1] + contrast)
    expected /= (a.mean() ** 2 + b.mean() ** 2 + light) * (cov[0, 0] + cov[1, 1] + contrast)
    assert result.ssim.item() == pytest.approx(expected.item(), rel=1e-5)
    assert result.threshold == 0.5
    for last, unchanged in (([-0.9, -0.2], True), ([0.6, 0.3], False), ([0.5, -0.5], False)):
        flagged = Randomization(
            ("head", "stem"), torch.tensor([[1.0, 1.0], last]), torch.zeros(2, 2), 0.5
        )
        assert flagged.unchanged is unchanged
    tiny = [torch.rand(1, 2, 9) for _ in range(2)]
    assert (
        randomization(one_layer(), images(1, dtype=torch.float32), fixed(*tiny)).ssim.isnan().all()
    )
    for shape in ((1, 3, 9), (1, 4, 4), (1, 6, 6)):
        pair = [torch.rand(shape) for _ in range(2)]
        assert (
            randomization(one_layer(), images(1, dtype=torch.float32), fixed(*pair))
            .ssim.isfinite()
            .all()
        )


def test_table_equals_curves():
    model, x = linear(), images(2)
    target = torch.tensor([3, 1])
    gain = gains(model, x, x.mean((2, 3), keepdim=True), target).reshape(2, 4, 6)
    named = {"best": gain, "worst": -gain, "again": 2 * gain, "any": maps(2, 4, 6).float()}
    options = dict(score="logit", step=1, grid=GRID)
    result = table(model, x, named, target, orders=7, seed=3, internal_batch_size=50, **options)
    assert list(result.columns) == [
        "image",
        "method",
        "deletion",
        "insertion",
        "difference",
        "rank",
        "random_orders",
        "random_deletion_mean",
        "random_deletion_std",
        "random_insertion_mean",
        "random_insertion_std",
        "random_difference_mean",
        "random_difference_std",
        "difference_z_score",
        "steps",
    ]
    assert result.method.tolist() == 2 * [*named] and result.image.tolist() == [0] * 4 + [1] * 4
    assert (
        set(result.random_orders) == {7}
        and set(result.steps) == {24}
        and result.index.tolist() == [*range(8)]
    )
    control = curves(
        model, x, random_maps(GRID, 7, seed=3)[:, None].expand(-1, 2, -1, -1), target, **options
    )
    for b in range(2):
        rows = result[result.image == b].set_index("method")
        assert rows["rank"].tolist() == [1, 4, 1, 3]
        np.testing.assert_allclose(rows.difference, rows.insertion - rows.deletion)
        for name, m in named.items():
            alone = curves(model, x, m, target, seed=3, **options)
            assert rows.deletion[name] == pytest.approx(alone.deletion_area[b].item())
            assert rows.insertion[name] == pytest.approx(alone.insertion_area[b].item())
        areas = {"deletion": control.deletion_area[:, b], "insertion": control.insertion_area[:, b]}
        areas["difference"] = areas["insertion"] - areas["deletion"]
        for column, chance in areas.items():
            mean, std = np.mean(chance.numpy()), np.std(chance.numpy(), ddof=1)
            np.testing.assert_allclose(rows[f"random_{column}_mean"], mean)
            np.testing.assert_allclose(rows[f"random_{column}_std"], std)
        np.testing.assert_allclose(rows.difference_z_score, (rows.difference - mean) / std)
        assert rows.difference_z_score["best"] > 2
        assert rows.difference["best"] == pytest.approx(-rows.difference["worst"])


def test_curves_leave_everything_unchanged(vit):
    model, x, m = (
        vit(drop_rate=0.5, drop_path_rate=0.2, img_size=(64, 96)),
        images(dtype=torch.float32),
        maps(2, 4, 6),
    )
    model.train()
    model.blocks[0].eval()
    with left_as_found(model, x.requires_grad_(), m.requires_grad_()):
        result = curves(model, x, m)
        with torch.inference_mode():
            again = curves(model, x.clone(), m.clone())
        assert all(
            torch.equal(v, getattr(again, k)) and not v.requires_grad
            for k, v in vars(result).items()
        )
        refuses("classes 0 to 9, got 10", curves, model, x, m, 10)
        with model.norm.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            curves(model, x, m)


def test_curves_take_classes_or_the_predicted_one(vit):
    model, x, m = vit(img_size=(64, 96)), images(3, dtype=torch.float32), maps(3, 4, 6)
    predicted = model(x).argmax(-1)
    for target in (predicted, predicted.tolist(), Target(predicted)):
        assert torch.equal(curves(model, x, m).deletion, curves(model, x, m, target).deletion)
    other = (predicted + 1) % 10
    known = curves(model, x, m, Target(predicted, other))
    assert torch.equal(known.deletion, curves(model, x, m, predicted, against=other).deletion)
    pair = torch.stack([curves(model, x, m, k, score="logit").deletion for k in (3, 7)])
    contrast = curves(model, x, m, 3, against=7, score="logit")
    torch.testing.assert_close(contrast.deletion, pair[0] - pair[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        curves(model, x, m, 3, against=7).deletion, contrast.deletion.sigmoid()
    )


def test_curves_of_a_model_without_tokens():
    grid = TokenGrid(2, 3, (32, 32), prefix=0)
    model, x, m = timm.create_model("resnet18"), images(dtype=torch.float32), maps(2, 2, 3)
    result = curves(model, x, m, 3, grid=grid)
    assert result.deletion.shape == (2, 7) and result.deletion.isfinite().all()


def test_curves_in_half_precision(vit):
    model, x, m = vit(img_size=(64, 96)), images(dtype=torch.float32), maps(2, 4, 6)
    expected = vars(curves(model, x, m, 3))
    for k, v in vars(curves(copy.deepcopy(model).bfloat16(), x, m, 3)).items():
        assert v.dtype == expected[k].dtype
        torch.testing.assert_close(v, expected[k], atol=0.02, rtol=0.05)


def test_curves_equal_torch_cam(vit):
    """TorchCAM scores our map."""
    from torchcam import metrics

    model, x, m = (
        vit(img_size=(64, 96)),
        images(3, dtype=torch.float32),
        maps(3, 4, 6, dtype=torch.float32),
    )
    model.head.weight.data.mul_(20)
    pixels = m.repeat_interleave(16, 1).repeat_interleave(16, 2)

    class Given:
        def __init__(self):
            self.model, self._hooks_off = model, torch.no_grad

        def __call__(self, *args, **kwargs):
            return [pixels]

        def fuse_cams(self, cams):
            return cams[0]

    theirs = metrics.DeletionInsertionMetric(Given(), lambda logits: logits.softmax(-1), steps=24)
    theirs.update(x, [3, 1, 0])
    ours = curves(model, x, m, [3, 1, 0], baseline="zero", step=1)
    assert ours.deletion_area.mean().item() == pytest.approx(
        theirs.summary()["deletion_auc"], rel=1e-4
    )
    assert ours.insertion_area.mean().item() == pytest.approx(
        theirs.summary()["insertion_auc"], rel=1e-4
    )


X, MAPS, OBLONG = images(dtype=torch.float32), maps(2, 4, 6), (64, 96)
DAMAGED = MAPS.clone().index_fill_(2, torch.tensor(3), math.nan)
REFUSALS = (
    # maps, images and models
    (lambda vit: curves(vit(img_size=OBLONG), X, MAPS.mT), r"2, 4, 6\), got \(2, 6, 4\)"),
    (lambda vit: curves(vit(img_size=OBLONG), X, DAMAGED), "Maps .* finite"),
    (lambda vit: curves(vit(img_size=OBLONG), X[0], MAPS), "floating-point tensor"),
    (lambda vit: curves(vit(img_size=OBLONG, num_classes=0), X, MAPS), "no classifier head"),
    (lambda vit: curves(nn.Identity(), X, MAPS, grid=GRID), "one row of outputs"),
    (lambda vit: curves(timm.create_model("resnet18"), X, MAPS), "patches of (ResNet|resnet18)"),
    # options
    (
        lambda vit: curves(vit(img_size=OBLONG), X, MAPS, baseline="gray"),
        "mean, blur, zero, got 'gray'",
    ),
    (
        lambda vit: curves(vit(img_size=OBLONG), X, MAPS, score="odds"),
        "probability, logit, got 'odds'",
    ),
)
"""A call that raises ValueError, and decisive words."""


@pytest.mark.parametrize("call, words", REFUSALS)
def test_curves_refuse(vit, call, words):
    refuses(words, call, vit)
