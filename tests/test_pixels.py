"""Methods with patches as features, compared with captum called by hand."""

import functools
import sys

import captum.attr
import numpy as np
import pytest
import support
import torch
from support import left_as_found, refuses

from vitlens.attribution import METHODS, integrated_gradients, occlusion

OPTIONS = {"integrated_gradients": {"n_steps": 4}}


images = functools.partial(support.images, dtype=torch.float32)


def tiles(values, rows=4, cols=6):
    """(C, H, W) → (rows, cols, numbers of a patch)."""
    return values.detach().reshape(-1, rows, 16, cols, 16).permute(1, 3, 0, 2, 4).flatten(2)


def close(got, expected, within=1e-5):
    expected = expected.to(got)  # captum before 0.8 sums up in float64
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=within * expected.abs().max().item())


def near(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-3 * expected.abs().max().item())


def test_integrated_gradients_equal_captum_called_by_hand(vit):
    model, x = vit(img_size=(64, 96)), images()
    blank = torch.full_like(x, 0.25)
    whole = captum.attr.IntegratedGradients(model).attribute(
        x, blank, torch.tensor([3, 7]), n_steps=20
    )
    got = integrated_gradients(model, x, [3, 7], baseline=0.25, n_steps=20, internal_batch_size=6)
    close(got, torch.stack([tiles(v).sum(-1) for v in whole]))
    with torch.inference_mode():
        inside = integrated_gradients(model, x.clone(), [3, 7], n_steps=4)
    assert torch.equal(inside, integrated_gradients(model, x, [3, 7], n_steps=4))


def test_integrated_gradients_sum_bfloat16_gradients_in_float32(vit):
    """Gradients are those of bfloat16, and their sums over points and pixels those of float64."""
    model, x = vit(img_size=(64, 96), dtype=torch.bfloat16), images(1).bfloat16()

    def gradients(pictures):
        pictures = pictures.bfloat16().requires_grad_()
        return torch.autograd.grad(model(pictures)[:, 3].float().sum(), pictures)[0].double()

    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(16))
    mean = torch.einsum(
        "n,nchw->chw",
        weights / 2,
        gradients((nodes[:, None, None, None].float() + 1) / 2 * x.float()),
    )
    got = integrated_gradients(model, x, 3, n_steps=16)[0].double()
    near(got, tiles(mean * x[0].double()).sum(-1))


def test_occlusion_by_hand(vit):
    model, x = vit(img_size=(64, 96)), images()
    target, blank = torch.tensor([3, 7]), torch.full_like(x, -0.5)
    for window in (1, 3):
        whole = captum.attr.Occlusion(model).attribute(
            x, (3, 16 * window, 16 * window), (3, 16, 16), blank, target, perturbations_per_eval=8
        )
        got = occlusion(model, x, target, baseline=-0.5, window=window)
        close(got, torch.stack([tiles(v).mean(-1) for v in whole]))
    assert torch.equal(
        occlusion(model, x, target, baseline=blank[:1]), occlusion(model, x, target, baseline=-0.5)
    )
    assert (
        occlusion(model, x, 3, window=9).std((1, 2)).max() < 1e-6
    )  # a window over the whole image


def test_pixel_methods_ignore_cut_and_padded_pixels(vit):
    """70 × 100 pixels: 4 × 6 patches and a margin without effect, or 5 × 7 patches, the last ones narrower."""
    x = images(1, size=(70, 100))
    cut, padded = vit(img_size=(70, 100)), vit(dynamic_img_size=True, dynamic_img_pad=True)
    for method in (integrated_gradients, occlusion):
        options = OPTIONS.get(method.__name__, {})
        close(
            method(cut, x, 3, **options),
            method(vit(img_size=(64, 96)), x[:, :, :64, :96], 3, **options),
        )
    assert (
        occlusion(padded, x, 3).shape
        == integrated_gradients(padded, x, 3, n_steps=4).shape
        == (1, 5, 7)
    )
    with torch.no_grad():
        gain = padded(x) - padded(torch.zeros_like(x))
    sums = integrated_gradients(padded, x, 3, n_steps=200).sum((1, 2))
    torch.testing.assert_close(sums, gain[:, 3], rtol=1e-2, atol=1e-3)


def test_methods_repeat_and_do_not_depend_on_the_batch(vit):
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pixel_methods_equal_on_a_gpu(vit):
    model, x = vit(img_size=(64, 96)), images()
    model.set_grad_checkpointing()
    for name, method in METHODS.items():
        options = OPTIONS.get(name, {})
        expected = method(model.cpu(), x, [3, 7], **options)
        got = method(model.cuda(), x, [3, 7], **options)
        assert got.is_cuda
        torch.testing.assert_close(
            got.cpu(), expected, rtol=1e-2, atol=1e-3 * expected.abs().max().item(), msg=name
        )


def test_pixel_methods_without_captum_and_with_small_batches(vit, monkeypatch):
    model, x, sizes = vit(img_size=(64, 96), depth=2), images(), []
    model.register_forward_hook(lambda m, args, out: sizes.append(len(args[0])))
    for method in (occlusion, integrated_gradients):
        sizes.clear()
        assert method(model, x, 3, **OPTIONS.get(method.__name__, {}), internal_batch_size=2).any()
        assert max(sizes) == 2
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    assert occlusion(model, x, 3).any()
    refuses("needs captum: `pip install captum`", integrated_gradients, model, x, error=ImportError)
