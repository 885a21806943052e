"""The table of all maps, what the scores refuse, and that they leave everything as they found it."""

import copy

import numpy as np
import pytest
import timm
import torch
from faithfulness_support import GRID, gains, images, linear, maps

from vitlens import TokenGrid
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


def test_refusals_of_a_table():
    model, x, m = linear(), images(2), maps(2, 4, 6)
    with pytest.raises(ValueError, match="at least 2 random orders, but orders=1"):
        table(model, x, {"a": m}, orders=1, grid=GRID)
    with pytest.raises(ValueError, match="At least one map was wanted"):
        table(model, x, {}, grid=GRID)
    with pytest.raises(
        ValueError, match=r"The map 'b' has one value for each patch of each image, .* \(2, 6, 4\) came"
    ):
        table(model, x, {"a": m, "b": m.mT}, grid=GRID)
    with pytest.raises(ValueError, match="by a name, but 'b' names several"):
        table(model, x, {"a": m, "b": m.expand(3, 2, 4, 6)}, grid=GRID)
    with pytest.raises(ValueError, match="A baseline is one of"):
        table(model, x, {"a": m}, grid=GRID, baseline="gray")


@pytest.mark.parametrize("score", SCORES)
def test_leaves_everything_as_found(vit, score):
    model, x, m = vit(drop_rate=0.5, drop_path_rate=0.2, img_size=(64, 96)), images(dtype=torch.float32), maps(2, 4, 6)
    model.train()
    model.blocks[0].eval()
    model.head.bias.grad = torch.ones(10)
    x.requires_grad_(), m.requires_grad_()
    state = {k: (id(v), v.detach().clone(), v.requires_grad) for k, v in model.state_dict(keep_vars=True).items()}
    modes, generator = [part.training for part in model.modules()], torch.get_rng_state()
    before = x.detach().clone()
    found = score(model, x, m)
    with torch.inference_mode():
        again = score(model, x.clone(), m.clone())
    assert all(torch.equal(v, getattr(again, k)) and not v.requires_grad for k, v in vars(found).items())
    with pytest.raises(ValueError, match="class 10"):
        score(model, x, m, 10)
    model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(model, x, m)
    assert [part.training for part in model.modules()] == modes and torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), generator) and x.grad is None and torch.equal(x, before)
    for k, v in model.state_dict(keep_vars=True).items():
        assert id(v) == state[k][0] and torch.equal(v, state[k][1]) and v.requires_grad == state[k][2]
    assert (model.head.bias.grad == 1).all() and all(p.grad is None for p in model.parameters() if p.shape != (10,))


def test_the_target_is_a_class_or_the_predicted_one(vit):
    model, x, m = vit(img_size=(64, 96)), images(3, dtype=torch.float32), maps(3, 4, 6)
    predicted = model(x).argmax(-1)
    for given in (predicted, predicted.tolist(), predicted.numpy()):
        assert torch.equal(curves(model, x, m).deletion, curves(model, x, m, given).deletion)
    for given in (3, np.int64(3), [3, 3, 3], torch.tensor(3), torch.tensor([3, 3, 3], dtype=torch.uint8)):
        assert torch.equal(curves(model, x, m, given).deletion, curves(model, x, m, 3).deletion)
    for score in SCORES:
        for wrong, number in ((10, 10), (-1, -1), ([0, 11, 3], 11)):
            with pytest.raises(ValueError, match=f"10 classes, numbered from 0 to 9, but class {number} was asked for"):
                score(model, x, m, wrong)
        for wrong in (1.5, [[1], [2], [3]]):
            with pytest.raises(TypeError, match="A target is a class number, a class name, one of these for each"):
                score(model, x, m, wrong)
        with pytest.raises(ValueError, match="10 classes, numbered from 0 to 9, but class True was asked for"):
            score(model, x, m, True)
        for wrong in ("dog", ["a", "b", "c"]):
            with pytest.raises(ValueError, match="cannot be found among them. Give the class as a number"):
                score(model, x, m, wrong)
        for wrong, count in (([1, 2], 2), ([[1, 2, 3]], 1)):
            with pytest.raises(ValueError, match=f"one class for each of the 3 images, but {count} came"):
                score(model, x, m, wrong)


@pytest.mark.parametrize("score", SCORES)
def test_refusals(vit, score):
    model, x, m = vit(img_size=(64, 96)), images(dtype=torch.float32), maps(2, 4, 6)
    for wrong in (m.mT, m[0], m[:1], m.repeat_interleave(16, 1), m[None, :, None], torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"shape \(…, 2, 4, 6\), but shape .* came; give the map as its method"):
            score(model, x, wrong)
    with pytest.raises(ValueError, match=r"tensor of shape \(…, 2, 4, 6\), but ndarray came"):
        score(model, x, m.numpy())
    for value in (float("nan"), float("inf")):
        m[1, 2, 3] = value
        with pytest.raises(ValueError, match="1 of its 48 values are not finite"):
            score(model, x, m)
    m = maps(2, 4, 6)
    for wrong in (x[0], x[:0], (255 * x).byte(), "cat.jpg"):
        with pytest.raises(ValueError, match="Images are a floating-point tensor"):
            score(model, wrong, m)
    with pytest.raises(ValueError, match="none .num_classes=0.: its output is features"):
        score(vit(img_size=(64, 96), num_classes=0), x, m)
    with pytest.raises(ValueError, match=r"\(B, classes\), but Identity gives outputs of shape \(2, 3, 64, 96\)"):
        score(torch.nn.Identity(), x, m, grid=GRID)
    with pytest.raises(ValueError, match=r"\(B, classes\), but Twice gives tuple. Give a model that ends in a class"):
        score(Twice(), x, m, grid=GRID)
    with pytest.raises(ValueError, match="does not know the patches of resnet18.*; tell them, as in `grid=TokenGrid"):
        score(timm.create_model("resnet18"), x, m)
    with pytest.raises(ValueError, match=r"images of \(64, 96\) pixels was wanted, but one for \(96, 64\) came"):
        score(model, x, m, grid=TokenGrid(6, 4, (16, 16)))
    with pytest.raises(ValueError, match="internal_batch_size is a whole number from 1 up, but 0 came"):
        score(model, x, m, internal_batch_size=0)


class Twice(torch.nn.Module):
    """Gives its input two times."""

    def forward(self, x):
        return x, x


def test_refusals_of_curves(vit):
    model, x, m = vit(img_size=(64, 96)), images(dtype=torch.float32), maps(2, 4, 6)
    for step in (0, 25, -1):
        with pytest.raises(ValueError, match=f"number of patches from 1 to 24, but {step} came"):
            curves(model, x, m, step=step)
    with pytest.raises(ValueError, match="A score is one of probability, logit, but 'odds' came"):
        curves(model, x, m, score="odds")


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
    metrics = pytest.importorskip("torchcam.metrics", reason="pip install torchcam to compare with its metrics")
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
