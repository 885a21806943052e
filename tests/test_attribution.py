"""Class-specific maps from the gradient of attention, compared with autograd through materialized attention."""

import copy
import math

import numpy as np
import pytest
import torch
from support import QUICK, images
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.timm_support import shrunk
from vitlens import attention, capture
from vitlens.attribution import (
    attention_gradient,
    balanced_gradients,
    grad_cam,
    gradient_rollout,
    legrad,
    relevance,
)
from vitlens.stream import contributions, direct_map

GRADIENT = (gradient_rollout, relevance, legrad, attention_gradient, grad_cam)
SIZE, TARGET = (64, 96), [3, 7]
FIRST, MEAN, POOL = "first token", "mean of patches", "attention pool"

MODELS = {
    "registers": ("vit_tiny_patch16_224", dict(reg_tokens=4), FIRST),
    "distilled": ("deit_tiny_distilled_patch16_224", {}, "first two tokens"),
    "rope and register": ("vit_medium_patch16_rope_reg1_gap_256", {}, MEAN),
    "mean": (
        "vit_tiny_patch16_224",
        dict(global_pool="avg", class_token=False, fc_norm=True),
        MEAN,
    ),
    "pool beside a prefix": ("vit_tiny_patch16_224", dict(global_pool="map", reg_tokens=2), POOL),
    "bias": ("beit_base_patch16_224", {}, MEAN),
    "two attentions": ("vit_small_patch16_18x2_224", {}, FIRST),
    "relative positions": ("vit_relpos_base_patch16_cls_224", {}, FIRST),
    "block that is its own attention": ("vit_base_patch16_xp_224", {}, FIRST),
    "two in one": ("vit_pwee_patch16_reg1_gap_256", {}, MEAN),
    "norm after": ("vit_relpos_base_patch16_rpn_224", {}, MEAN),
}


class Softmaxes(TorchFunctionMode):
    """Record every softmax of a model."""

    def __init__(self):
        super().__init__()
        self.maps = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.softmax:
            self.maps.append(result)
        return result


def materialized(model, x, target=TARGET):
    """Attention and its gradients of each layer and of the pool, by timm's unfused path and autograd."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    with Softmaxes() as seen:
        logits = model(x)
    score = sum(logits[i, c] for i, c in enumerate(target))
    gradients = torch.autograd.grad(score, seen.maps)
    pairs = [(a.detach(), g) for a, g in zip(seen.maps, gradients, strict=True)]
    pool = pairs.pop() if getattr(model, "attn_pool", None) is not None else None
    each = len(pairs) // len(model.blocks)
    layers = [
        tuple(torch.cat([pair[k] for pair in pairs[i : i + each]], 1) for k in (0, 1))
        for i in range(0, len(pairs), each)
    ]
    return layers, pool


def starts(read, layers, pool):
    """(B, T) rows of the read-out and of a pool."""
    batch, _, tokens, _ = layers[0][0].shape
    row, pooled = torch.zeros(2, batch, tokens, dtype=torch.float64)
    patches = math.prod(n // 16 for n in SIZE)
    if read == POOL:
        product = (pool[0] * pool[1]).clamp(min=0).mean(1)[:, 0]
        pooled[:, tokens - product.shape[-1] :] = product
    elif read == MEAN:
        row[:, -patches:] = 1 / patches
    else:
        first = {FIRST: 1, "first two tokens": 2}[read]
        row[:, :first] = 1 / first
    return row, pooled


def rollout_of(layers, row, pooled, fusion="mean"):
    eye = torch.eye(row.shape[-1], dtype=torch.float64)
    whole, still = eye, eye
    for a, g in layers:
        fused = (a * g).mean(1).clamp(min=0) if fusion == "mean" else (a * g).clamp(min=0).mean(1)
        total = (fused + eye).sum(-1, keepdim=True)
        whole, still = (fused + eye) / total @ whole, eye / total @ still
    pooled = pooled / pooled.sum(-1, keepdim=True).clamp(min=1e-300)
    return (row[:, None] @ (whole - still) + pooled[:, None] @ whole)[:, 0]


def relevance_of(layers, row, pooled):
    eye, gain = (
        torch.eye(row.shape[-1], dtype=torch.float64),
        0,
    )  # R = I + gain, apart: a gain may be as small as 1e-11
    for a, g in layers:
        gain = gain + (a * g).clamp(min=0).mean(1) @ (eye + gain)
    return (row[:, None] @ gain + pooled[:, None] @ (eye + gain))[:, 0]


def agree(got, expected):
    """Compare to 1e-6, relative to the largest number for numbers close to 0. expected: (B, T)."""
    rows, cols = (n // 16 for n in SIZE)
    expected = expected[:, -rows * cols :].reshape(-1, rows, cols)
    assert expected.abs().max() > 0 and expected.std() > 0
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9 * expected.abs().max().item())


@pytest.mark.parametrize("case", MODELS)
def test_maps_equal_autograd(vit, case):
    name, kwargs, read = MODELS[case]
    model, x = vit(name=name, dtype=torch.float64, img_size=SIZE, **kwargs), images()
    with torch.no_grad():  # larger heads, because initial ones are close to 0
        factor = 50 / model(x).std()
        model.head.weight.mul_(factor)
        if hasattr(model, "head_dist"):
            model.head_dist.weight.mul_(factor)
    layers, pool = materialized(model, x)
    row, pooled = starts(read, layers, pool)
    agree(gradient_rollout(model, x, TARGET), rollout_of(layers, row, pooled))
    agree(
        gradient_rollout(model, x, TARGET, head_fusion="positive"),
        rollout_of(layers, row, pooled, "positive"),
    )
    agree(relevance(model, x, TARGET), relevance_of(layers, row, pooled))
    product = [(a * g).clamp(min=0).mean(1) for a, g in layers]
    last = pooled if read == POOL else (row[:, None] @ product[-1])[:, 0]
    agree(attention_gradient(model, x, TARGET), last)
    agree(
        attention_gradient(model, x, TARGET, layer=1), ((row + pooled)[:, None] @ product[1])[:, 0]
    )
    ends = torch.stack(cut_off(model, x))
    agree(legrad(model, x, TARGET), ends.mean(0))
    agree(legrad(model, x, TARGET, first=-2), ends[1:].mean(0))
    for layer in (0, -1):
        agree(grad_cam(model, x, TARGET, layer=layer), by_hand(model, x, layer))


def cut_off(model, x):
    """LeGrad of each layer, as that of the last layer of a shorter model."""
    maps = []
    for depth in (1, 2, 3):
        cut = copy.deepcopy(model)
        cut.blocks = cut.blocks[:depth]
        layers, _ = materialized(cut, x)
        maps.append(layers[-1][1].clamp(min=0).mean((1, 2)))
    return maps


def by_hand(model, x, layer):
    """Grad-CAM by hooks and NumPy."""
    kept, block = [], (reference := copy.deepcopy(model)).blocks[layer]
    if type(block).__name__ == "ResPostRelPosBlock":
        block.attn.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    else:
        norms = [branch.norm for branch in getattr(block, "attns", ())]  # two parallel attentions
        for norm in norms or [getattr(block, "in_norm", None) or block.norm1]:
            norm.register_forward_hook(lambda m, args, out: kept.append(out))
    logits = reference(x)
    gradients = torch.autograd.grad(logits[0, 3] + logits[1, 7], kept)
    a, g = (torch.cat(parts, -1)[:, -24:].detach().numpy() for parts in (kept, gradients))
    return torch.from_numpy(np.maximum(np.einsum("bpc,bc->bp", a, g.mean(1)), 0))


def test_maps_equal_autograd_in_every_family():
    """Relevance at the built size equals the full product."""
    for name in QUICK:
        if name == "vit_small_patch14_reg4_dinov2":  # long in float64
            continue
        model = shrunk(name).double()
        x = images(1, model.pretrained_cfg["input_size"][1:])
        layers, pool = materialized(model, x, [3])
        with torch.no_grad(), capture(model) as attn:
            model(x)
        row, pooled = torch.zeros(2, 1, attn.grid.tokens, dtype=torch.float64)
        if pool is None:
            row += attn.grid.readout
        else:
            pooled[:, -pool[0].shape[-1] :] = (pool[0] * pool[1]).clamp(min=0).mean(1)[:, 0]
        expected = attn.grid.image_map(relevance_of(layers, row, pooled))
        got = relevance(model, x, 3)
        torch.testing.assert_close(
            got, expected, rtol=1e-6, atol=1e-9 * expected.abs().max().item(), msg=name
        )


def test_grad_cam_equals_pytorch_grad_cam(vit):
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.image import scale_cam_image
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    model, x = vit(img_size=SIZE), images(dtype=torch.float32)
    other = copy.deepcopy(model)
    grid = lambda t: t[:, 1:].reshape(len(t), 4, 6, -1).permute(0, 3, 1, 2)  # noqa: E731
    with GradCAM(other, [other.blocks[-1].norm1], reshape_transform=grid) as cam:
        theirs = cam(x, [ClassifierOutputTarget(number) for number in TARGET])
    ours = scale_cam_image(scale_cam_image(grad_cam(model, x, TARGET).numpy(), (96, 64)))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_maps_start_from_a_patch(vit):
    model, x = vit(dtype=torch.float64, img_size=SIZE), images()
    layers, pool = materialized(model, x)
    row, pooled = torch.zeros(2, 2, 25, dtype=torch.float64)
    row[:, 1 + 2 * 6 + 5] = 1
    agree(relevance(model, x, TARGET, query=(2, 5)), relevance_of(layers, row, pooled))
    agree(gradient_rollout(model, x, TARGET, query=(2, 5)), rollout_of(layers, row, pooled))
    product = (layers[0][0] * layers[0][1]).clamp(min=0).mean(1)
    agree(
        attention_gradient(model, x, TARGET, query=(2, 5), layer=0), (row[:, None] @ product)[:, 0]
    )


def test_maps_do_not_depend_on_blocks_and_batches(vit, monkeypatch):
    for kwargs in ({}, dict(global_pool="avg"), dict(global_pool="map", class_token=False)):
        model, x = vit(dtype=torch.float64, img_size=SIZE, **kwargs), images(3)
        whole = [method(model, x, [3, 7, 0]) for method in GRADIENT]
        monkeypatch.setitem(attention.BLOCK, "cpu", 1)  # eight rows at a time
        for method, expected in zip(GRADIENT, whole, strict=True):
            for i, c in enumerate([3, 7, 0]):
                torch.testing.assert_close(
                    method(model, x[i : i + 1], c), expected[i : i + 1], rtol=1e-9, atol=1e-14
                )
        monkeypatch.undo()


def test_maps_allocate_no_full_map(vit, monkeypatch):
    """No tensor of the size of a map is allocated at 576 tokens, except for the biases of BEiT and their copy."""

    class Large(TorchDispatchMode):
        made = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            known = {
                t.untyped_storage().data_ptr()
                for t in tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor)
            }
            for tensor in [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]:
                large = tensor.shape[-2:].numel() > 0.75 * 576**2
                if large and tensor.untyped_storage().data_ptr() not in known:
                    self.made += (func.__name__,)
            return result

    monkeypatch.setitem(attention.BLOCK, "cpu", 2**16)
    for name, most in (("beit_base_patch16_224", 2 * 2), ("vit_tiny_patch16_224", 0)):
        model = vit(name=name, img_size=384, depth=2, global_pool="avg")
        for method in (*GRADIENT, direct_map, balanced_gradients, contributions):
            with Large() as large:
                method(model, images(1, (384, 384), dtype=torch.float32), 3)
            assert len(large.made) <= most, (method, large.made)
