"""Methods with patches as features, compared with captum called by hand."""

import functools
import sys

import captum.attr
import maps_support
import numpy as np
import pytest
import torch
from maps_support import left_as_found, refuses

from vitlens import TokenGrid, attribution
from vitlens.attribution import METHODS, gradient_shap, input_x_gradient, integrated_gradients, kernel_shap, occlusion
from vitlens.attribution.captum_maps import OneImage, _covers, _shapley_values

OPTIONS = {"integrated_gradients": {"n_steps": 4}, "gradient_shap": {"n_samples": 4}, "kernel_shap": {"n_samples": 80}}


images = functools.partial(maps_support.images, dtype=torch.float32)


def tiles(values, rows=4, cols=6):
    """(C, H, W) → (rows, cols, numbers of a patch)."""
    return values.detach().reshape(-1, rows, 16, cols, 16).permute(1, 3, 0, 2, 4).flatten(2)


def patch_mask():
    row, col = torch.meshgrid(torch.arange(64) // 16, torch.arange(96) // 16, indexing="ij")
    return (row * 6 + col)[None, None]


def close(got, expected, within=1e-5):
    expected = expected.to(got)  # captum before 0.8 sums up in float64
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=within * expected.abs().max().item())


def near(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-3 * expected.abs().max().item())


def captums_gradient_shap(model, x, seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    return captum.attr.GradientShap(model).attribute(x, torch.zeros_like(x), n_samples=10, stdevs=0.1, target=3)


def test_pixel_methods_equal_captum_called_by_hand(vit):
    model, x = vit(img_size=(64, 96)), images()
    blank = torch.full_like(x, 0.25)
    whole = captum.attr.IntegratedGradients(model).attribute(x, blank, torch.tensor([3, 7]), n_steps=20)
    got = integrated_gradients(model, x, [3, 7], baseline=0.25, n_steps=20, internal_batch_size=6)
    close(got, torch.stack([tiles(v).sum(-1) for v in whole]))
    noisy = gradient_shap(model, x, 3, n_samples=10, seed=5)
    close(noisy, torch.stack([tiles(captums_gradient_shap(model, each[None], 5)[0]).sum(-1) for each in x]))
    whole, parts = (gradient_shap(model, x, 3, n_samples=5, stdevs=0.0, internal_batch_size=size) for size in (16, 2))
    close(parts, whole)
    with torch.inference_mode():
        assert torch.equal(input_x_gradient(model, x.clone(), [3, 7]), input_x_gradient(model, x, [3, 7]))
    whole = captum.attr.InputXGradient(model).attribute(x.requires_grad_(), torch.tensor([3, 7]))
    close(input_x_gradient(model, x, [3, 7]), torch.stack([tiles(v).sum(-1) for v in whole]))


def test_pixel_methods_sum_bfloat16_gradients_in_float32(vit):
    """Gradients are those of bfloat16, and their sums over points and pixels those of float64."""
    model, x = vit(img_size=(64, 96), dtype=torch.bfloat16), images(1).bfloat16()

    def gradients(pictures):
        pictures = pictures.bfloat16().requires_grad_()
        return torch.autograd.grad(model(pictures)[:, 3].float().sum(), pictures)[0].double()

    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(16))
    mean = torch.einsum("n,nchw->chw", weights / 2, gradients((nodes[:, None, None, None].float() + 1) / 2 * x.float()))
    got = integrated_gradients(model, x, 3, n_steps=16)[0].double()
    near(got, tiles(mean * x[0].double()).sum(-1))
    near(input_x_gradient(model, x, 3)[0].double(), tiles(gradients(x)[0] * x[0].double()).sum(-1))
    noisy = captums_gradient_shap(lambda z: model(z.bfloat16()).float(), x.float(), 5)
    near(gradient_shap(model, x, 3, n_samples=10, seed=5)[0].double(), tiles(noisy[0].double()).sum(-1))


def test_occlusion_and_ablation_by_hand(vit):
    model, x = vit(img_size=(64, 96)), images()
    target, blank = torch.tensor([3, 7]), torch.full_like(x, -0.5)
    for window in (1, 3):
        whole = captum.attr.Occlusion(model).attribute(
            x, (3, 16 * window, 16 * window), (3, 16, 16), blank, target, perturbations_per_eval=8
        )
        got = occlusion(model, x, target, baseline=-0.5, window=window)
        close(got, torch.stack([tiles(v).mean(-1) for v in whole]))
    ablated = captum.attr.FeatureAblation(model).attribute(x, blank, target, feature_mask=patch_mask())
    got = attribution.feature_ablation(model, x, target, baseline=blank[:1])
    close(got, torch.stack([tiles(v).mean(-1) for v in ablated]))
    assert occlusion(model, x, 3, window=9).std((1, 2)).max() < 1e-6  # a window over the whole image


class Given(captum.attr.KernelShap):
    """captum's KernelSHAP with these covers in place of its random ones."""

    covers = ()

    def kernel_shap_perturb_generator(self, original_inp, **kwargs):
        yield from self.covers[:, None]


def test_kernel_shap_equals_captum_with_the_same_covers(vit):
    model, x = vit(img_size=(64, 96), depth=2), images() + 3.0
    got = kernel_shap(model, x, [3, 7], n_samples=200, seed=2)
    seen = _covers(24, 200, 2)
    assert (seen[0] == 1).all() and not seen[1].any() and torch.equal(seen[2::2], 1 - seen[3::2])
    assert len(seen[2::2].unique(dim=0)) > 80
    theirs = Given(model)
    theirs.covers = seen
    for index, target in enumerate((3, 7)):
        values = theirs.attribute(
            x[index : index + 1], 0.0, target, feature_mask=patch_mask(), n_samples=200, perturbations_per_eval=50
        )
        close(got[index], tiles(values[0]).mean(-1), within=1e-4)
    with torch.no_grad():
        gain = (model(x) - model(torch.zeros_like(x)))[[0, 1], [3, 7]]
    torch.testing.assert_close(got.sum((1, 2)), gain, rtol=1e-3, atol=1e-4)


def played(game, n_samples, rows=14, cols=14):
    """KernelSHAP's map of a game on patches of one pixel, which is 1 for a visible patch."""
    whole, grid = torch.ones(1, 1, rows, cols), TokenGrid(rows, cols, (1, 1), 0)
    case = OneImage(whole, 0 * whole, lambda x: game(x.flatten(1))[:, None], grid)
    return _shapley_values(case, _covers(rows * cols, n_samples, 0), 64)[0].double()


def test_kernel_shap_equals_exact_shapley_values():
    """Exact values over all 720 orders."""
    weights = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))

    def game(seen):
        return (seen @ weights).tanh().sum(1)

    exact = captum.attr.ShapleyValues(game).attribute(torch.ones(1, 6), 0.0, perturbations_per_eval=64)
    torch.testing.assert_close(played(game, 20_000, 2, 3), exact[0].double(), rtol=0, atol=0.03)


def test_kernel_shap_in_closed_form():
    """Each of 19 equal patches of 196 has a nineteenth of their total, and each patch of a pair has half."""
    truth = torch.zeros(196).double()
    truth[:19] = 10 * np.tanh(19 / 6) / 19
    values = played(lambda seen: 10 * torch.tanh(seen[:, :19].sum(1) / 6), 16 * 196)
    assert torch.corrcoef(torch.stack([values, truth]))[0, 1] > 0.9
    pairs = torch.randn(196, 196, generator=torch.Generator().manual_seed(0)).triu(1)
    values = played(lambda seen: ((seen @ pairs) * seen).sum(1), 588)
    close(values, ((pairs.sum(0) + pairs.sum(1)) / 2).double(), within=0.02)
    assert played(lambda seen: 3 * seen[:, 0], 3, 1, 1).item() == pytest.approx(3)


def test_pixel_methods_ignore_cut_and_padded_pixels(vit):
    """70 × 100 pixels: 4 × 6 patches and a margin without effect, or 5 × 7 patches, the last ones narrower."""
    x = images(1, size=(70, 100))
    cut, padded = vit(img_size=(70, 100)), vit(dynamic_img_size=True, dynamic_img_pad=True)
    for method in (integrated_gradients, input_x_gradient, occlusion, kernel_shap):
        options = OPTIONS.get(method.__name__, {})
        close(method(cut, x, 3, **options), method(vit(img_size=(64, 96)), x[:, :, :64, :96], 3, **options))
    assert occlusion(padded, x, 3).shape == gradient_shap(padded, x, 3, n_samples=4).shape == (1, 5, 7)
    with torch.no_grad():
        gain = padded(x) - padded(torch.zeros_like(x))
    shares = kernel_shap(padded, x, 3, n_samples=140).sum((1, 2))
    torch.testing.assert_close(shares, gain[:, 3], rtol=1e-3, atol=1e-4)


def test_pixel_methods_depend_on_the_seed_and_not_on_the_batch(vit):
    model, x = vit(img_size=(64, 96), depth=2).train(), images()
    torch.manual_seed(0)
    for name, method in METHODS.items():
        options = OPTIONS.get(name, {})
        with left_as_found(model, x):
            got = method(model, x, [3, 7], **options)
            assert got.shape == (2, 4, 6) and got.dtype == torch.float32 and not got.requires_grad
            assert torch.equal(got, method(model, x, [3, 7], **options)), name
            alone = method(model, x[1:], 7, **options)
            torch.testing.assert_close(alone[0], got[1], rtol=1e-3, atol=1e-6, msg=name)
        if "seed" in method.options:
            assert not torch.allclose(method(model, x, [3, 7], **options, seed=1), got, rtol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pixel_methods_equal_on_a_gpu(vit):
    model, x = vit(img_size=(64, 96)), images()
    model.set_grad_checkpointing()
    for name, method in METHODS.items():
        options = OPTIONS.get(name, {}) | (dict(stdevs=0.0) if name == "gradient_shap" else {})
        expected = method(model.cpu(), x, [3, 7], **options)
        got = method(model.cuda(), x, [3, 7], **options)
        assert got.is_cuda
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-2, atol=1e-3 * expected.abs().max().item(), msg=name)


def test_pixel_methods_without_captum_and_with_small_batches(vit, monkeypatch):
    model, x, sizes = vit(img_size=(64, 96), depth=2), images(), []
    model.register_forward_hook(lambda m, args, out: sizes.append(len(args[0])))
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    for method in (occlusion, gradient_shap, kernel_shap):
        assert method(model, x, 3, **OPTIONS.get(method.__name__, {}), internal_batch_size=2).any()
    assert max(sizes) == 2
    for method in (integrated_gradients, input_x_gradient):
        refuses("needs captum: `pip install captum`", method, model, x, error=ImportError)
