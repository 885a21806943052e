"""Targets, the registry of methods, refusals, and models that stay unchanged."""

import copy
import inspect
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from support import Headed, left_as_found, refuses
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import Normalize

from vitlens import UnsupportedModelError, attribution, capture
from vitlens.attribution import (
    METHODS,
    attention_gradient,
    explained,
    grad_cam,
    gradient_rollout,
    legrad,
    relevance,
)
from vitlens.attribution.maps import explanation_mode

GRADIENT = (
    gradient_rollout,
    relevance,
    legrad,
    attention_gradient,
    grad_cam,
    METHODS["balanced_gradients"].function,
    METHODS["direct"].function,
)
SIZE, TARGET = (64, 96), [3, 7]


def images(batch=2, size=SIZE):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(0))


class Attentions(TorchDispatchMode):
    """Count the forward and backward passes of fused attention."""

    forward = backward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in func.__name__:
            passed = "backward" if "backward" in func.__name__ else "forward"
            setattr(self, passed, getattr(self, passed) + 1)
        return func(*args, **(kwargs or {}))


def test_explained_runs_one_forward_and_one_backward(vit):
    model, calls = vit(img_size=SIZE), []
    x = images()
    shared = [
        n
        for n, method in METHODS.items()
        if method.depends_on_target and method.needs in attribution.registry.SHARED
    ]
    alone = {name: METHODS[name](model, x, TARGET, against=5) for name in shared}
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with Attentions() as seen:
        run = explained(model, x, TARGET, against=5, needs=attribution.registry.SHARED)
        together = {name: METHODS[name](run) for name in alone}
    assert len(calls) == 1 and seen.forward == len(model.blocks)
    assert (
        seen.backward == len(model.blocks) - 1
    )  # the first layer's queries and keys need no gradient
    for name, values in alone.items():
        torch.testing.assert_close(together[name], values, rtol=1e-6, atol=0)


def test_methods_take_a_capture(vit):
    model, x = vit(img_size=SIZE), images()
    with capture(model, gradients=True) as attn:
        logits = model(x)
    torch.testing.assert_close(attribution.rollout(attn), attribution.rollout(model, x))
    attn.differentiate(logits[0, 3] + logits[1, 7])
    for method in (relevance, gradient_rollout, attention_gradient):
        torch.testing.assert_close(method(attn), method(model, x, TARGET))


def test_methods_are_registered_with_signature_and_source():
    for name, method in METHODS.items():
        function = getattr(attribution, name)
        assert method.function is function and function.__doc__.startswith("(B, rows, cols)")
        assert list(inspect.signature(function).parameters)[:3] == ["model", "images", "target"]
        assert name in dir(attribution) and name in attribution.__all__
    assert [name for name, method in METHODS.items() if not method.depends_on_target] == ["rollout"]


def test_methods_leave_the_model_unchanged(vit):
    model, x = vit(drop_rate=0.5, drop_path_rate=0.1, img_size=SIZE), images()
    model.train()
    model.blocks[0].eval()
    model.head.weight.requires_grad_(False)
    with torch.no_grad():
        expected = [method(model, x, TARGET) for method in GRADIENT]
    with left_as_found(model, x.requires_grad_()):
        for method, here in zip(GRADIENT, expected, strict=True):
            with torch.inference_mode():
                assert torch.equal(method(model, x.clone(), TARGET), here)
            got = method(model, x, TARGET)
            assert torch.equal(got, here) and not got.requires_grad
            refuses("classes 0 to 9, got 10", method, model, x, 10)
    checkpointing = copy.deepcopy(model).requires_grad_(False)
    checkpointing.set_grad_checkpointing()
    for other in (checkpointing, torch.compile(copy.deepcopy(model), backend="eager")):
        assert all(
            torch.equal(method(other, x, TARGET), e)
            for method, e in zip(GRADIENT, expected, strict=True)
        )
    assert checkpointing.grad_checkpointing


def test_explaining_makes_parameters_constants(vit):
    model, x = vit(img_size=SIZE), images()
    with torch.no_grad():
        plain = model(x)
    with explanation_mode(model), capture(model, gradients=True) as attn:
        logits = model(x)
    assert (
        torch.equal(logits, plain)
        and not attn[0].q.requires_grad
        and attn[0].output.grad_fn is None
    )
    assert torch.equal(relevance(model, x), relevance(model, x, plain.argmax(-1)))


def test_methods_in_half_precision(vit):
    model, x = vit(img_size=SIZE), images()
    half = copy.deepcopy(model).bfloat16()
    for method in GRADIENT:
        exact, low = method(model, x, TARGET), method(half, x, TARGET)
        assert low.dtype == torch.float32
        assert (low - exact).abs().max() < 0.05 * exact.abs().max(), method.__name__
        assert (low - exact).abs().mean() < 0.02 * exact.abs().max(), method.__name__


def test_methods_in_several_threads(vit):
    model, x = vit(img_size=SIZE).train(), images(3)
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    expected = {(m, i): m(model, x[i : i + 1], i) for m in GRADIENT for i in range(3)}
    maps, barrier = {}, threading.Barrier(3, timeout=60)

    def explain(i):
        for method in GRADIENT:
            barrier.wait()
            maps[method, i] = method(model, x[i : i + 1], i)

    threads = [threading.Thread(target=explain, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key, value in expected.items():
        torch.testing.assert_close(maps[key], value, rtol=1e-4, atol=1e-7)
    assert [module.training for module in model.modules()] == before


def test_classes_by_number_and_name(vit):
    model, x = vit(img_size=SIZE, depth=2), images()
    names = [f"class {i}" for i in range(7)] + ["tabby, tabby cat", "Crane", "crane, machine"]
    three = relevance(model, x, 3)
    for target in (
        3,
        np.int64(3),
        torch.tensor(3),
        "3",
        [3, 3],
        (3, 3),
        np.array([3, 3]),
        torch.tensor([3, 3]),
    ):
        assert torch.equal(relevance(model, x, target), three)
    assert torch.equal(relevance(model, x, ["Class 3", 3], names=names), three)
    assert all(
        torch.equal(method(model, x, "class 3", names=names), method(model, x, 3))
        for method in GRADIENT
    )
    assert torch.equal(relevance(model, x, "crane, machine", names=names), relevance(model, x, 9))
    assert torch.equal(
        relevance(model, x, "crane", names=names), relevance(model, x, 8)
    )  # a whole name comes first
    model.label_names = names
    assert torch.equal(relevance(model, x, "tabby cat"), relevance(model, x, 7))


def test_maps_read_at_a_query_or_of_another_head(vit):
    model, x = vit(img_size=SIZE), images()
    assert not attention_gradient(model, x, 3, query=(1, 2)).any()  # the head reads no patch
    assert attention_gradient(model, x, 3, query=(1, 2), layer=1).any()
    assert attention_gradient(vit(img_size=SIZE, global_pool="avg"), x, 3, query=(1, 2)).any()
    maximum, square = vit(global_pool="max"), images(1, (64, 64))
    assert legrad(maximum, square).any() and grad_cam(maximum, square).any()
    with torch.no_grad():
        model.head.bias[5] = -float("inf")  # an excluded class
    assert relevance(model, images(1), 3).isfinite().all()


def test_methods_explain_a_normalization_before_a_transformer(vit):
    inner, x = vit(img_size=SIZE), images()
    normalize = Normalize((0.5,) * 3, (0.25,) * 3)
    wrapped, seen = torch.nn.Sequential(normalize, inner), normalize(x)
    inner.label_names = [f"plant {k}" for k in range(10)]
    for method in GRADIENT:
        torch.testing.assert_close(method(wrapped, x, "plant 3"), method(inner, seen, 3))
    covered = attribution.occlusion(
        wrapped, x, TARGET, baseline=0.5
    )  # the same cover, in the units of each
    torch.testing.assert_close(covered, attribution.occlusion(inner, seen, TARGET))
    values = attribution.integrated_gradients(wrapped, x, TARGET, baseline=0.5)
    torch.testing.assert_close(
        values, attribution.integrated_gradients(inner, seen, TARGET), rtol=1e-4, atol=1e-5
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in wrapped.modules())


def test_methods_explain_a_backbone_with_a_head(vit):
    """Maps equal those of a model whose head has these weights."""
    whole, x = vit(img_size=SIZE, num_classes=5), images()
    for pools in (False, True):
        wrapped = Headed(vit(img_size=SIZE, num_classes=0), pools).eval()
        wrapped.backbone.load_state_dict(
            {k: v for k, v in whole.state_dict().items() if not k.startswith("head.")}
        )
        wrapped.head.load_state_dict(whole.head.state_dict())
        torch.testing.assert_close(grad_cam(wrapped, x, 3), grad_cam(whole, x, 3))
        torch.testing.assert_close(
            attribution.occlusion(wrapped, x, 3), attribution.occlusion(whole, x, 3)
        )
        torch.testing.assert_close(
            relevance(wrapped, x, 3, query=(1, 2)), relevance(whole, x, 3, query=(1, 2))
        )
        if not pools:
            for method in (relevance, gradient_rollout, attention_gradient):
                torch.testing.assert_close(method(wrapped, x, 3), method(whole, x, 3))


@pytest.fixture(scope="module")
def given(vit):
    """Models and images of the calls in REFUSALS."""
    named, ambiguous = vit(img_size=SIZE), vit(img_size=SIZE)
    names = [f"class {i}" for i in range(7)] + ["tabby, tabby cat", "Crane", "crane, machine"]
    named.label_names, ambiguous.label_names = names, names[:8] + ["crane", "crane"]
    untrained, broken, damaged = vit(img_size=SIZE), vit(img_size=SIZE), images()
    damaged[1, 0, 3, 4] = float("nan")
    with torch.no_grad():
        untrained.head.weight.zero_()
        broken.blocks[1].mlp.fc1.weight[0, 0] = float("nan")
    features = vit(img_size=SIZE, num_classes=0)
    return SimpleNamespace(
        model=vit(img_size=SIZE),
        x=images(),
        square=images(1, (64, 64)),
        damaged=damaged,
        named=named,
        ambiguous=ambiguous,
        untrained=untrained,
        broken=broken,
        features=features,
        headless=torch.nn.Sequential(Normalize((0.5,) * 3, (0.25,) * 3), features),
        maximum=vit(global_pool="max"),
        resnet=timm.create_model("resnet18"),
        resized=torch.nn.Sequential(torch.nn.Upsample(SIZE), vit(img_size=SIZE)),
        two=torch.nn.Sequential(vit(), vit()),
        pooled_outside=Headed(features, pools=True).eval(),
        read_outside=Headed(features, pools=False).eval(),
    )


BY_CLASS = [method for method in METHODS.values() if method.depends_on_target]
PIXELS = attribution.integrated_gradients, attribution.occlusion
EVERY = (relevance, legrad, grad_cam, *GRADIENT[-2:], *PIXELS)
SUMS = gradient_rollout, relevance, attention_gradient
REFUSALS = (
    # targets
    ([relevance], lambda f, g: f(g.model, g.x, "class 3"), ValueError, "'class 3'.*have no names"),
    (BY_CLASS, lambda f, g: f(g.named, g.x, "tabi"), ValueError, "'tabi'. Did you mean tabby"),
    ([relevance], lambda f, g: f(g.named, g.x, "zebra"), ValueError, "'zebra'.* from 0 to 9"),
    ([relevance], lambda f, g: f(g.named, g.x, "-1"), ValueError, "0 to 9, got -1"),
    ([relevance], lambda f, g: f(g.named, g.x, 10), ValueError, "0 to 9, got 10"),
    ([relevance], lambda f, g: f(g.named, g.x, [1, 2, 3]), ValueError, "2 images, got 3"),
    ([relevance], lambda f, g: f(g.ambiguous, g.x, "crane"), ValueError, r"'crane', \[8, 9\]"),
    # models and images
    (EVERY, lambda f, g: f(g.features, g.square), ValueError, "no classifier head"),
    ([relevance], lambda f, g: f(g.headless, g.x), ValueError, "output is features"),
    (EVERY, lambda f, g: f(g.model, g.x[0]), ValueError, "floating-point tensor"),
    (EVERY, lambda f, g: f(g.resnet, g.x), ValueError, "cannot show .* resnet18"),
    (EVERY, lambda f, g: f(g.model, images(1, (80, 80)), 3), ValueError, "not take this size"),
    (EVERY, lambda f, g: f(g.model, g.damaged, 3), ValueError, "outputs .* not finite"),
    (EVERY, lambda f, g: f(g.broken, g.x, 3), ValueError, "outputs .* not finite"),
    (
        (*GRADIENT, PIXELS[0]),
        lambda f, g: f(g.untrained, g.x, 3),
        ValueError,
        "No gradient .* layer 0",
    ),
    (
        (relevance, PIXELS[1]),
        lambda f, g: f(g.resized, images(size=(32, 48))),
        ValueError,
        "Sequential resizes",
    ),
    ([relevance], lambda f, g: f(g.two, g.x), UnsupportedModelError, "2 Vision Transformers"),
    # read-outs, queries and layers
    (SUMS, lambda f, g: f(g.maximum, g.square), ValueError, r"query=\(row, column\).*grad_cam"),
    (SUMS, lambda f, g: f(g.model, g.x, query=(4, 0)), IndexError, "outside the 4 × 6 grid"),
    ([relevance], lambda f, g: f(g.pooled_outside, g.x, 3), ValueError, "wrapper.*Pass a patch"),
    ([legrad], lambda f, g: f(g.pooled_outside, g.x, 3), ValueError, "own head, but Headed"),
    ([legrad], lambda f, g: f(g.read_outside, g.x, 3), ValueError, "own head, but Headed"),
    (
        (attention_gradient, grad_cam),
        lambda f, g: f(g.model, g.x, layer=3),
        IndexError,
        "0 to 2 .* got 3",
    ),
    ([legrad], lambda f, g: f(g.model, g.x, first=3), IndexError, "0 to 2 .* got 3"),
    # runs and names of methods
    (
        [grad_cam],
        lambda f, g: f(explained(g.model, g.x, needs=["inputs"], layer=1)),
        KeyError,
        "2",
    ),
    (
        [attribution.methods],
        lambda f, g: f(["relevanz"]),
        ValueError,
        "got 'relevanz'.*relevance, gradient_rollout, ",
    ),
)
"""Methods, a call of each, its error and decisive words."""


@pytest.mark.parametrize("methods, call, error, words", REFUSALS)
def test_attribution_refuses(given, methods, call, error, words):
    for method in methods:
        refuses(words, call, method, given, error=error)
