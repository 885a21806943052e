"""The table of all maps, what the scores refuse, and that they leave everything as they found it."""

import copy
import math

import numpy as np
import pytest
import timm
import torch
from maps_support import GRID, gains, images, left_as_found, linear, maps, refuses

from vitlens import TokenGrid
from vitlens.attribution.target import ClassTarget
from vitlens.faithfulness import confidence, curves, random_maps, table

SCORES = (curves, confidence)


def test_table():
    model, x = linear(), images(2)
    target = torch.tensor([3, 1])
    gain = gains(model, x, x.mean((2, 3), keepdim=True), target).reshape(2, 4, 6)
    named = {"best": gain, "worst": -gain, "again": 2 * gain, "any": maps(2, 4, 6).float()}
    options = dict(score="logit", step=1, grid=GRID)
    found = table(model, x, named, target, orders=7, seed=3, internal_batch_size=50, **options)
    assert list(found.columns) == [
        "image", "method", "deletion", "insertion", "difference", "rank", "deletion_sigmas", "insertion_sigmas",
        "difference_sigmas",
    ]  # fmt: skip
    assert (
        found.method.tolist() == 2 * [*named, "random mean", "random std"] and found.image.tolist() == [0] * 6 + [1] * 6
    )
    control = curves(model, x, random_maps(GRID, 7, seed=3)[:, None].expand(-1, 2, -1, -1), target, **options)
    for b in range(2):
        rows = found[found.image == b].set_index("method")
        assert rows["rank"].tolist()[:4] == [1, 4, 1, 3] and rows["rank"].isna().tolist() == [False] * 4 + [True] * 2
        np.testing.assert_allclose(rows.difference[:4], rows.insertion[:4] - rows.deletion[:4])
        for name, m in named.items():
            alone = curves(model, x, m, target, seed=3, **options)
            assert rows.deletion[name] == pytest.approx(alone.deletion_area[b].item())
            assert rows.insertion[name] == pytest.approx(alone.insertion_area[b].item())
        areas = {"deletion": control.deletion_area[:, b], "insertion": control.insertion_area[:, b]}
        areas["difference"] = areas["insertion"] - areas["deletion"]
        for column, chance in areas.items():
            mean, std = np.mean(chance.numpy()), np.std(chance.numpy(), ddof=1)
            assert rows[column]["random mean"] == pytest.approx(mean)
            assert rows[column]["random std"] == pytest.approx(std)
            np.testing.assert_allclose(rows[f"{column}_sigmas"][:4], (rows[column][:4] - mean) / std)
            assert rows[f"{column}_sigmas"][4:].isna().all()
        assert rows.deletion_sigmas["best"] < -2 and rows.insertion_sigmas["best"] > 2
        assert rows.difference["best"] == pytest.approx(-rows.difference["worst"])


def test_one_image_of_a_table_is_as_alone(vit):
    model, x, m = vit(img_size=(64, 96), dtype=torch.float64), images(2), maps(2, 4, 6)
    both = table(model, x, {"a": m, "b": m.sign()}, orders=3)
    alone = table(model, x[1:], {"a": m[1:], "b": m[1:].sign()}, orders=3)
    numbers = ["deletion", "insertion", "difference"]
    np.testing.assert_allclose(both[both.image == 1][numbers], alone[numbers], rtol=1e-9)


@pytest.mark.parametrize("change, options, told", [
    (lambda m: {"a": m}, dict(orders=1), "at least 2 random orders.* orders=1"),
    (lambda m: {}, {}, "at least one map"),
    (lambda m: {"a": m, "b": m.mT}, {}, r"The map 'b' has one value for each patch .* \(2, 6, 4\)"),
    (lambda m: {"a": m, "b": m.expand(3, 2, 4, 6)}, {}, "'b' names several"),
    (lambda m: {"a": m}, dict(baseline="gray"), "mean, blur, zero"),
])  # fmt: skip
def test_refusals_of_a_table(change, options, told):
    refuses(told, table, linear(), images(2), change(maps(2, 4, 6)), grid=GRID, **options)


@pytest.mark.parametrize("score", SCORES)
def test_leaves_everything_as_found(vit, score):
    model, x, m = vit(drop_rate=0.5, drop_path_rate=0.2, img_size=(64, 96)), images(dtype=torch.float32), maps(2, 4, 6)
    model.train()
    model.blocks[0].eval()
    with left_as_found(model, x.requires_grad_(), m.requires_grad_()):
        found = score(model, x, m)
        with torch.inference_mode():
            again = score(model, x.clone(), m.clone())
        assert all(torch.equal(v, getattr(again, k)) and not v.requires_grad for k, v in vars(found).items())
        refuses("class 10", score, model, x, m, 10)
        with model.norm.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            score(model, x, m)


def test_the_target_is_a_class_or_the_predicted_one(vit):
    """Or what is known of it from before; `test_attribution_conduct` has all that a target may be."""
    model, x, m = vit(img_size=(64, 96)), images(3, dtype=torch.float32), maps(3, 4, 6)
    predicted = model(x).argmax(-1)
    for given in (predicted, predicted.tolist(), predicted.numpy(), ClassTarget(predicted)):
        assert torch.equal(curves(model, x, m).deletion, curves(model, x, m, given).deletion)
    for given in (np.int64(3), [3, 3, 3], torch.tensor([3, 3, 3], dtype=torch.uint8)):
        assert torch.equal(curves(model, x, m, given).deletion, curves(model, x, m, 3).deletion)
    against = ClassTarget(predicted, (predicted + 1) % 10)
    known = curves(model, x, m, against)
    assert torch.equal(known.deletion, curves(model, x, m, predicted, against=against.against).deletion)
    for score in SCORES:
        for wrong, error, told in (
            (10, ValueError, "class 10"), ([0, 11, 3], ValueError, "class 11"), (True, ValueError, "class True"),
            ("dog", ValueError, "class as a number"), ([1, 2], ValueError, "3 images, got 2"), (1.5, TypeError, "1.5"),
            (against.numbers.float(), TypeError, "A target is"),
        ):  # fmt: skip
            refuses(told, score, model, x, m, wrong, error=error)


@pytest.mark.parametrize("score", SCORES)
def test_refusals(vit, score):
    model, x, m = vit(img_size=(64, 96)), images(dtype=torch.float32), maps(2, 4, 6)
    headless, resnet = vit(img_size=(64, 96), num_classes=0), timm.create_model("resnet18")
    damaged = {value: m.clone().index_fill_(2, torch.tensor(3), value) for value in (math.nan, math.inf)}
    shape = r"shape \(…, 2, 4, 6\), got "
    for told, arguments, options in (
        *[(shape + "shape", (model, x, wrong), {})
          for wrong in (m.mT, m[0], m[:1], m.repeat_interleave(16, 1), m[None, :, None], torch.tensor(1.0))],
        (shape + "ndarray", (model, x, m.numpy()), {}),
        *[("8 of 48 values that are not finite", (model, x, wrong), {}) for wrong in damaged.values()],
        *[("images as a floating-point tensor", (model, wrong, m), {})
          for wrong in (x[0], x[:0], (255 * x).byte(), "cat.jpg")],
        ("none .num_classes=0.: its output is features", (headless, x, m), {}),
        (r"Identity gives outputs of shape \(2, 3, 64, 96\)", (torch.nn.Identity(), x, m), dict(grid=GRID)),
        ("Twice gives tuple. Give a model that ends in a class", (Twice(), x, m), dict(grid=GRID)),
        ("does not know the patches of resnet18.*`grid=TokenGrid", (resnet, x, m), {}),
        (r"\(64, 96\) pixels.*\(96, 64\)", (model, x, m), dict(grid=TokenGrid(6, 4, (16, 16)))),
        ("internal_batch_size must be a whole number of at least 1, got 0", (model, x, m), dict(internal_batch_size=0)),
    ):  # fmt: skip
        refuses(told, score, *arguments, **options)


class Twice(torch.nn.Module):
    """Gives its input two times."""

    def forward(self, x):
        return x, x


@pytest.mark.parametrize("options, told", [
    *[(dict(step=step), f"number of patches from 1 to 24, got {step}") for step in (0, 25, -1)],
    (dict(score="odds"), "one of probability, logit, got 'odds'"),
])  # fmt: skip
def test_refusals_of_curves(options, told):
    refuses(told, curves, linear(), images(), maps(2, 4, 6), grid=GRID, **options)


@pytest.mark.parametrize("score", SCORES)
def test_wrapped_compiled_and_half_models(vit, score):
    model, x, m = vit(img_size=(64, 96)), images(dtype=torch.float32), maps(2, 4, 6)
    expected = vars(score(model, x, m, 3))
    for other in (torch.nn.DataParallel(model), torch.compile(copy.deepcopy(model), backend="eager")):
        for k, v in vars(score(other, x, m, 3)).items():
            torch.testing.assert_close(v, expected[k])
    for k, v in vars(score(copy.deepcopy(model).bfloat16(), x, m, 3)).items():
        assert v.dtype == expected[k].dtype
        torch.testing.assert_close(v, expected[k], atol=0.02, rtol=0.05)


def test_models_without_tokens():
    model, x, m = timm.create_model("resnet18", num_classes=7), images(1, dtype=torch.float32), maps(1, 2, 3)
    found = curves(model, x, m, 3, grid=TokenGrid(2, 3, (32, 32), prefix=0))
    assert found.deletion.shape == (1, 7) and found.deletion.isfinite().all()


def test_equal_to_torch_cam(vit):
    """Its drop, increase, deletion and insertion, when it is given our map as its own."""
    from torchcam import metrics

    model, x, m = vit(img_size=(64, 96)), images(3, dtype=torch.float32), maps(3, 4, 6, dtype=torch.float32)
    model.head.weight.data.mul_(20)
    stretched = (m - m.amin((1, 2), keepdim=True)) / (m.amax((1, 2), keepdim=True) - m.amin((1, 2), keepdim=True))
    pixels = stretched.repeat_interleave(16, 1).repeat_interleave(16, 2)

    class Given:
        def __init__(self):
            self.model, self._hooks_off = model, torch.no_grad

        def __call__(self, *args, **kwargs):
            return [pixels]

        def fuse_cams(self, cams):
            return cams[0]

    softmax = lambda logits: logits.softmax(-1)  # noqa: E731
    theirs = metrics.ClassificationMetric(Given(), softmax)
    theirs.update(x, [3, 1, 0])
    ours = confidence(model, x, m, [3, 1, 0])
    assert ours.drop.mean().item() == pytest.approx(100 * theirs.summary()["avg_drop"], rel=1e-4)
    assert ours.increase.mean().item() == pytest.approx(100 * theirs.summary()["conf_increase"])
    theirs = metrics.DeletionInsertionMetric(Given(), softmax, steps=24)
    theirs.update(x, [3, 1, 0])
    ours = curves(model, x, m, [3, 1, 0], baseline="zero", step=1)
    assert ours.deletion_area.mean().item() == pytest.approx(theirs.summary()["deletion_auc"], rel=1e-4)
    assert ours.insertion_area.mean().item() == pytest.approx(theirs.summary()["insertion_auc"], rel=1e-4)
