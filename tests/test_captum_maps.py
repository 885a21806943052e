"""captum's methods with patches as the features, against captum called by hand."""

import sys
from functools import partial

import captum.attr
import numpy as np
import pytest
import torch
from maps_support import left_as_found, refuses

from vitlens import TokenGrid
from vitlens.attribution import (
    METHODS,
    feature_ablation,
    gradient_shap,
    input_x_gradient,
    integrated_gradients,
    kernel_shap,
    occlusion,
)
from vitlens.attribution.captum_maps import OneImage, _covers, _shapley_values

OPTIONS = {
    "integrated_gradients": dict(n_steps=8),
    "gradient_shap": dict(n_samples=5),
    "kernel_shap": dict(n_samples=120),
}
CAPTUM = [integrated_gradients, input_x_gradient, occlusion, feature_ablation]
PIXELS = [*CAPTUM, gradient_shap, kernel_shap]


def images(batch=2, size=(64, 96), seed=0):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


def tiles(values, rows=4, cols=6):
    """(C, H, W) → (rows, cols, numbers of a patch)."""
    return values.detach().reshape(-1, rows, 16, cols, 16).permute(1, 3, 0, 2, 4).flatten(2)


def patch_mask():
    row, col = torch.meshgrid(torch.arange(64) // 16, torch.arange(96) // 16, indexing="ij")
    return (row * 6 + col)[None, None]


def close(got, expected, within=1e-5):
    expected = expected.to(got)  # captum before 0.8 sums up in float64
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=within * expected.abs().max().item())


def test_gradients_along_a_path_by_hand(vit):
    model, x = vit(img_size=(64, 96)), images()
    blank = torch.full_like(x, 0.25)
    whole = captum.attr.IntegratedGradients(model).attribute(x, blank, torch.tensor([3, 7]), n_steps=20)
    got = integrated_gradients(model, x, [3, 7], baseline=0.25, n_steps=20, internal_batch_size=6)
    close(got, torch.stack([tiles(v).sum(-1) for v in whole]))
    with torch.inference_mode():
        assert torch.equal(input_x_gradient(model, x.clone(), [3, 7]), input_x_gradient(model, x, [3, 7]))
    whole = captum.attr.InputXGradient(model).attribute(x.requires_grad_(), torch.tensor([3, 7]))
    close(input_x_gradient(model, x, [3, 7]), torch.stack([tiles(v).sum(-1) for v in whole]))


def test_what_a_bfloat16_model_says_is_added_up_in_float32(vit):
    """Its gradients are its own, their sums over points and pixels those of float64."""
    model, x = vit(img_size=(64, 96), dtype=torch.bfloat16), images(1).bfloat16()

    def gradients(pictures):
        pictures = pictures.bfloat16().requires_grad_()
        return torch.autograd.grad(model(pictures)[:, 3].float().sum(), pictures)[0].double()

    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(40))
    mean = torch.einsum("n,nchw->chw", weights / 2, gradients((nodes[:, None, None, None].float() + 1) / 2 * x.float()))
    found = integrated_gradients(model, x, 3, n_steps=40, internal_batch_size=40)[0].double()
    near(found, tiles(mean * x[0].double()).sum(-1))
    near(input_x_gradient(model, x, 3)[0].double(), tiles(gradients(x)[0] * x[0].double()).sum(-1))
    captum_by_hand = captum.attr.GradientShap(lambda z: model(z.bfloat16()).float())
    torch.manual_seed(5)
    np.random.seed(5)
    noisy = captum_by_hand.attribute(x.float(), torch.zeros(1, 3, 64, 96), n_samples=10, stdevs=0.1, target=3)
    near(gradient_shap(model, x, 3, n_samples=10, seed=5)[0].double(), tiles(noisy[0].double()).sum(-1))


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 * expected.abs().max().item())


def test_gradient_shap_by_hand(vit):
    model, x = vit(img_size=(64, 96)), images()
    got = gradient_shap(model, x, 3, n_samples=10, seed=5)
    for i in range(2):
        torch.manual_seed(5)
        np.random.seed(5)
        values = captum.attr.GradientShap(model).attribute(
            x[i : i + 1], torch.zeros(1, 3, 64, 96), n_samples=10, stdevs=0.1, target=3
        )
        close(got[i], tiles(values[0]).sum(-1))


@pytest.mark.parametrize("window", [1, 3])
def test_covering_by_hand(vit, window):
    model, x = vit(img_size=(64, 96)), images()
    target, blank = torch.tensor([3, 7]), torch.full_like(x, -0.5)
    whole = captum.attr.Occlusion(model).attribute(
        x, (3, 16 * window, 16 * window), (3, 16, 16), blank, target, perturbations_per_eval=1
    )
    got = occlusion(model, x, target, baseline=-0.5, window=window)
    close(got, torch.stack([tiles(v).mean(-1) for v in whole]))
    ablated = captum.attr.FeatureAblation(model).attribute(x, blank, target, feature_mask=patch_mask())
    single = feature_ablation(model, x, target, baseline=blank[:1])
    close(single, torch.stack([tiles(v).mean(-1) for v in ablated]))
    if window == 1:
        close(got, single)


def test_gradients_along_a_path_and_covering_equal_zennit(vit):
    """A library that shares no code with captum, whose sums over the path converge as 1 / steps."""
    from zennit.attribution import IntegratedGradients, Occlusion, occlude_independent

    model, x = vit(img_size=(64, 96), dtype=torch.float64), images().double()
    target = torch.eye(10, dtype=torch.float64)[[3, 7]]
    half = lambda image: image / 2  # noqa: E731  # the norms are smooth on the way from there
    once, twice = (IntegratedGradients(model, baseline_fn=half, n_iter=n)(x, target)[1] for n in (24, 48))
    path = torch.stack([tiles(v).sum(-1) for v in 2 * twice - once])  # without what falls as 1 / steps
    near(integrated_gradients(model, x, [3, 7], baseline=half(x)), path)
    covered = partial(occlude_independent, invert=True)
    sliding = Occlusion(model, None, lambda out: out * target, occlusion_fn=covered, window=(16, 16), stride=(16, 16))
    logits, left = sliding(x)
    lost = logits[[0, 1], [3, 7]][:, None, None] - torch.stack([tiles(v).mean(-1) for v in left])
    torch.testing.assert_close(feature_ablation(model, x, [3, 7]), lost)


def test_ablation_is_the_logit_lost(vit):
    model, x = vit(img_size=(64, 96)), images(1)
    covered = x.clone()
    covered[:, :, 32:48, 80:96] = 0.5
    with torch.no_grad():
        lost = (model(x) - model(covered))[0, 3]
    torch.testing.assert_close(feature_ablation(model, x, 3, baseline=0.5)[0, 2, 5], lost, rtol=1e-4, atol=1e-5)


def test_kernel_shap_by_hand_and_its_sum(vit):
    """Least squares in float64 on the covers that the model was shown, and what it said of them."""
    model, x, shown = vit(img_size=(64, 96)), images() + 3.0, []
    model.register_forward_hook(lambda m, args, out: shown.append((args[0].detach(), out.detach())))
    got = kernel_shap(model, x, [3, 7], n_samples=200, seed=2)
    pictures, logits = (torch.cat(parts)[2:].unflatten(0, (2, 200)) for parts in zip(*shown, strict=True))
    for i, target in enumerate((3, 7)):
        seen = torch.stack([tiles(p).ne(0).double().mean(-1).flatten() for p in pictures[i]]).numpy()
        assert set(seen.flat) == {0, 1} and (seen[0] == 1).all() and (seen[1] == 0).all()
        assert (seen[2::2] == 1 - seen[3::2]).all() and len(np.unique(seen[2::2], axis=0)) > 80
        value = logits[i, :, target].double().numpy()
        whole = value[0] - value[1]
        expected = np.linalg.lstsq(
            seen[2:] - seen[2:].mean(1, keepdims=True), value[2:] - value[1] - whole * seen[2:].mean(1), rcond=1e-9
        )[0]
        close(got[i].flatten(), torch.from_numpy(whole / 24 + expected).float())
    with torch.no_grad():
        gain = (model(x) - model(torch.zeros_like(x)))[[0, 1], [3, 7]]
    torch.testing.assert_close(got.sum((1, 2)), gain, rtol=1e-3, atol=1e-4)


def test_kernel_shap_of_a_single_patch_is_what_it_adds(vit):
    model, x = vit(img_size=16), images()[..., :16, :16] + 3.0
    with torch.no_grad():
        gain = (model(x) - model(torch.zeros_like(x)))[:, 3]
    torch.testing.assert_close(kernel_shap(model, x, 3).flatten(), gain)


def played(game, n_samples=16 * 196):
    """KernelSHAP's map of a game on 14 × 14 patches of one pixel, 1 where it is seen."""
    grid = TokenGrid(14, 14, (1, 1), 0)
    case = OneImage(torch.ones(1, 1, 14, 14), torch.zeros(1, 1, 14, 14), lambda x: game(x.flatten(1))[:, None], grid)
    return _shapley_values(case, _covers(196, n_samples, 0), 64)[0].double()


@pytest.mark.parametrize("steepness, least", [(2 / 19, 0.98), (1 / 6, 0.9)])
def test_kernel_shap_where_a_tenth_of_the_patches_counts(steepness, least):
    """Nineteen of 196 patches count alike, so each has a nineteenth of what all of them bring."""
    asked = []

    def game(seen):
        asked.append(len(seen))
        return 10 * torch.tanh(steepness * seen[:, :19].sum(1))

    truth = torch.zeros(196).double()
    truth[:19] = 10 * np.tanh(19 * steepness) / 19
    assert torch.corrcoef(torch.stack([played(game), truth]))[0, 1] > least and sum(asked) == 16 * 196


def test_kernel_shap_of_patches_that_act_two_at_a_time():
    """Each has half of what a pair of them brings; no noise disturbs that, but captum fits in float32."""
    pairs = torch.randn(196, 196, generator=torch.Generator().manual_seed(0)).triu(1)
    got = played(lambda seen: ((seen @ pairs) * seen).sum(1), n_samples=588)
    close(got, ((pairs.sum(0) + pairs.sum(1)) / 2).double(), within=0.02)


@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("vit_tiny_patch16_224", {}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_tiny_patch16_224", dict(global_pool="map", class_token=False)),
    ],
)
def test_integrated_gradients_are_complete(vit, name, kwargs):
    """They sum to what the logit gains over the baseline, within 1 %."""
    model, x = vit(name=name, img_size=(64, 96), **kwargs), images()
    with torch.no_grad():
        model.head.weight.mul_(10)
        gain = model(x) - model(torch.zeros_like(x))
    target = gain.abs().argmax(-1)
    got = integrated_gradients(model, x, target, n_steps=100).sum((1, 2))
    torch.testing.assert_close(got, gain.gather(-1, target[:, None])[:, 0], rtol=0.01, atol=0)


def test_pixels_that_are_cut_or_padded(vit):
    """70 × 100 pixels: 4 × 6 patches and a rest that counts for nothing, or 5 × 7 patches, the last ones narrower."""
    x = images(size=(70, 100))
    cut, padded = vit(img_size=(70, 100)), vit(dynamic_img_size=True, dynamic_img_pad=True)
    for method in PIXELS:
        options = OPTIONS.get(method.__name__, {})
        if method is not gradient_shap:  # which draws noise for every pixel
            close(method(cut, x, 3, **options), method(vit(img_size=(64, 96)), x[:, :, :64, :96], 3, **options))
        assert method(padded, x, 3, **options).shape == (2, 5, 7)
    with torch.no_grad():
        gain = padded(x) - padded(torch.zeros_like(x))
    shares = kernel_shap(padded, x, 3).sum((1, 2))
    torch.testing.assert_close(shares, gain[:, 3], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_is_its_images_and_the_seed_decides(vit, name):
    method, options = METHODS[name], OPTIONS.get(name, {})
    model, x = vit(img_size=(64, 96)).train(), images(3)
    torch.manual_seed(0)
    with left_as_found(model, x):
        got, predicted = method(model, x, [3, 7, 0], **options), method(model, x, **options)
        assert got.shape == (3, 4, 6) and got.dtype == torch.float32 and not got.requires_grad
        assert torch.equal(got, method(model, x, [3, 7, 0], **options))
        for i, target in enumerate((3, 7, 0)):
            torch.testing.assert_close(method(model, x[i : i + 1], target, **options)[0], got[i], rtol=1e-3, atol=1e-6)
    with torch.no_grad():
        close(predicted, method(model.eval(), x, model(x).argmax(-1), **options))
    if "seed" in method.options:
        assert not torch.allclose(method(model, x, [3, 7, 0], **options, seed=1), got, rtol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_gives_the_same(vit, name):
    model, x, method = vit(img_size=(64, 96)), images(), METHODS[name]
    model.set_grad_checkpointing()
    options = OPTIONS.get(name, {}) | (dict(stdevs=0.0) if name == "gradient_shap" else {})
    expected = method(model, x, [3, 7], **options)
    got = method(model.cuda(), x, [3, 7], **options)
    assert got.is_cuda
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-2, atol=1e-3 * expected.abs().max().item())


def test_without_captum(vit, monkeypatch):
    model, x = vit(img_size=(64, 96)), images()
    assert occlusion(model, x, 3, window=9).std((1, 2)).max() < 1e-6  # a window over everything
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    assert all(method(model, x, 3, n_samples=72).any() for method in (gradient_shap, kernel_shap))
    for method in CAPTUM:
        refuses("needs captum: `pip install captum`", method, model, x, error=ImportError)


def test_no_forward_holds_more_images_than_asked(vit):
    model, seen = vit(img_size=(64, 96)), []
    model.register_forward_hook(lambda m, args, out: seen.append(len(args[0])))
    occlusion(model, images(5), internal_batch_size=2)
    assert max(seen) == 2
