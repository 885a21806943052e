"""How class-specific maps are asked for, what they refuse, and that they leave everything as they found it."""

import copy
import threading
from collections import Counter

import numpy as np
import pytest
import timm
import torch
from maps_support import left_as_found, refuses
from torch.overrides import TorchFunctionMode

from vitlens import UnsupportedModelError, attribution, capture
from vitlens.attribution import (
    attention_gradient,
    balanced_gradients,
    direct,
    feature_ablation,
    grad_cam,
    gradient_rollout,
    gradient_shap,
    integrated_gradients,
    kernel_shap,
    legrad,
    occlusion,
    relevance,
)
from vitlens.attribution.forward import explaining
from vitlens.faithfulness import curves
from vitlens.recorder.running import evaluating

GRADIENT = (gradient_rollout, relevance, legrad, attention_gradient, grad_cam, balanced_gradients, direct)
SIZE, TARGET = (64, 96), [3, 7]


def images(batch=2, size=SIZE, seed=0):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


def test_leaves_everything_as_found(vit):
    model, x = vit(drop_rate=0.5, drop_path_rate=0.1, img_size=SIZE), images()
    model.train()
    model.blocks[0].eval()
    model.head.weight.requires_grad_(False)
    with left_as_found(model, x.requires_grad_()):
        with torch.no_grad():
            expected = [method(model, x, TARGET) for method in GRADIENT]
        for method, here in zip(GRADIENT, expected, strict=True):
            with torch.inference_mode():
                assert torch.equal(method(model, x.clone(), TARGET), here)
            got = method(model, x, TARGET)
            assert torch.equal(got, here) and not got.requires_grad
            refuses("class 10", method, model, x, 10)


def test_frozen_checkpointed_and_compiled_models_give_the_same(vit):
    model, x = vit(img_size=SIZE), images()
    expected = [method(model, x, TARGET) for method in GRADIENT]
    frozen = copy.deepcopy(model).requires_grad_(False)
    checkpointing = copy.deepcopy(model)
    checkpointing.set_grad_checkpointing()
    for other in (frozen, checkpointing, torch.compile(copy.deepcopy(model), backend="eager")):
        assert all(torch.equal(method(other, x, TARGET), e) for method, e in zip(GRADIENT, expected, strict=True))
    assert checkpointing.grad_checkpointing


def test_what_is_explained_is_what_the_model_does(vit):
    """Inside, parameters are constants and the logits are those of the model, to the bit."""
    model, x = vit(img_size=SIZE), images()
    with torch.no_grad():
        plain = model(x)
    with explaining(model), capture(model, gradients=True) as attn:
        logits = model(x)
    assert torch.equal(logits, plain) and not attn[0].q.requires_grad and attn[0].output.grad_fn is None
    assert torch.equal(relevance(model, x), relevance(model, x, plain.argmax(-1)))


def test_half_precision(vit):
    model, x = vit(img_size=SIZE), images()
    for method in GRADIENT:
        exact = method(model, x, TARGET)
        low = method(copy.deepcopy(model).bfloat16(), x, TARGET)
        assert low.dtype == torch.float32
        assert (low - exact).abs().max() < 0.05 * exact.abs().max(), method.name
        assert (low - exact).abs().mean() < 0.02 * exact.abs().max(), method.name


def test_threads_that_overlap_leave_the_modes_as_found(vit):
    model, inside, outside = vit().train(), threading.Event(), threading.Event()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]

    def other():
        with evaluating(model):
            inside.set()
            outside.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    with evaluating(model):
        outside.set()
        thread.join()
        assert not any(module.training for module in model.modules())  # though the other one is done
    assert [module.training for module in model.modules()] == before


def test_several_threads_at_once(vit):
    model, x = vit(img_size=SIZE), images(4)
    expected = {(m, i): m(model, x[i : i + 1], i) for m in GRADIENT for i in range(4)}
    found, barrier = {}, threading.Barrier(4, timeout=60)

    def explain(i):
        for method in GRADIENT:
            barrier.wait()
            found[method, i] = method(model, x[i : i + 1], i)

    threads = [threading.Thread(target=explain, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", [relevance, direct], ids=lambda method: method.title)
def test_who_watches_a_forward_reads_attributes_past_other_modes(vit, method):
    """Each would be a call of all modes outside: there were more of these than of the model's own functions."""
    seen = Counter()

    class Outer(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen[func] += 1
            return func(*args, **(kwargs or {}))

    with Outer():
        method(vit(img_size=SIZE), images(), TARGET)
    reads = seen[torch.Tensor.requires_grad.__get__] + seen[torch.Tensor.is_floating_point]
    assert 0 < reads < sum(seen.values()) / 4, "there were twice as many as other calls"


def test_targets(vit):
    model, x = vit(img_size=SIZE), images()
    names = [f"class {i}" for i in range(7)] + ["tabby, tabby cat", "Crane", "crane, machine"]
    three = relevance(model, x, 3)
    for target in (3, np.int64(3), torch.tensor(3), [3, 3], (3, 3), np.array([3, 3]), torch.tensor([3, 3])):
        assert torch.equal(relevance(model, x, target), three)
    refuses("names of vit_tiny.* are unknown, so 'class 3'.* from 0 to 9", relevance, model, x, "class 3")
    assert torch.equal(relevance(model, x, "Class 3", names=names), three)
    assert torch.equal(relevance(model, x, ["class 3", 3], names=names), three)
    assert torch.equal(relevance(model, x, "crane, machine", names=names), relevance(model, x, 9))
    assert torch.equal(relevance(model, x, "crane", names=names), relevance(model, x, 8))  # a whole name comes first
    model.label_names = names
    assert torch.equal(relevance(model, x, "tabby cat"), relevance(model, x, 7))
    for method in attribution.METHODS.values():
        refuses("no class called 'tabi'. Did you mean tabby", method, model, x, "tabi")
    refuses("no class called 'zebra'. .* from 0 to 9", relevance, model, x, "zebra")
    refuses("from 0 to 9, but class -1 was", relevance, model, x, "-1")
    for target, told in ((10, "0 to 9, but class 10"), (-1, "class -1"), (True, "class True"), ([1, 2, 3], "2 .* 3")):
        refuses(told, relevance, model, x, target)
    refuses(r"got 1.5 \(float\)", relevance, model, x, 1.5, error=TypeError)
    refuses("10 classes, got 3 names", relevance, model, x, "a", names=["a", "b", "c"])
    model.label_names = names[:8] + ["crane", "crane"]
    refuses(r"2 classes .* are called 'crane': 8 \(crane\), 9", relevance, model, x, "crane")


def test_refusals(vit):
    model, x = vit(img_size=SIZE), images()
    headless, maximum, untrained = vit(num_classes=0), vit(global_pool="max"), vit(img_size=SIZE)
    torch.nn.init.zeros_(untrained.head.weight)
    for method in GRADIENT:
        refuses("none .num_classes=0.: its output is features", method, headless, images(1, (64, 64)))
        refuses("No gradient of (class 3|the score) reaches", method, untrained, x, 3)
        for wrong in (x[0], x[:0], (255 * x).byte(), "cat.jpg"):
            refuses("images as a floating-point tensor", method, model, wrong)
        refuses("vitlens cannot show the attention of resnet18", method, timm.create_model("resnet18"), x)
    for method in (gradient_rollout, relevance, attention_gradient):
        refuses(r"no weighted sum .*query=\(row, column\).*grad_cam", method, maximum, images(1, (64, 64)))
        refuses("outside the 4 × 6 grid", method, model, x, query=(4, 0), error=IndexError)
    refuses(r"\(1, 2\) in layer 2 .*earlier layer", attention_gradient, model, x, 3, query=(1, 2))
    assert attention_gradient(model, x, 3, query=(1, 2), layer=1).any()
    assert attention_gradient(vit(img_size=SIZE, global_pool="avg"), x, 3, query=(1, 2)).any()
    assert legrad(maximum, images(1, (64, 64))).any() and grad_cam(maximum, images(1, (64, 64))).any()
    for method, option in [(attention_gradient, "layer"), (grad_cam, "layer"), (legrad, "first")]:
        for layer in (3, -4):
            refuses(f"3 layers.* layer {layer}", method, model, x, error=IndexError, **{option: layer})


def test_numpys_numbers_are_taken(vit):
    model, x = vit(img_size=SIZE), images(1)
    assert torch.equal(occlusion(model, x, 3, baseline=np.float32(0.25)), occlusion(model, x, 3, baseline=0.25))
    for query in (torch.tensor([1, 2]), np.array([1, 2]), [np.int64(1), 2]):
        assert torch.equal(relevance(model, x, 3, query=query), relevance(model, x, 3, query=(1, 2)))


@pytest.mark.parametrize("method, option, value, told", [
    (relevance, "query", 5, r"patch, \(row, column\).*5"),
    (relevance, "query", (1, 2, 3), r"patch \(row, column\).*\(1, 2, 3\)"),
    (relevance, "query", (1, 2.5), r"patch \(row, column\).*\(1, 2.5\)"),
    (gradient_rollout, "head_fusion", "max", '"mean" or "positive".*max'),
    (grad_cam, "layer", 1.5, "whole number.* 1.5"),
    (integrated_gradients, "n_steps", 0, "n_steps.* 0"),
    (integrated_gradients, "internal_batch_size", 0, "internal_batch_size.* 0"),
    (gradient_shap, "n_samples", 0, "n_samples.* 0"),
    (gradient_shap, "stdevs", -1, "stdevs.* -1"),
    (occlusion, "window", 1.5, "window.* 1.5"),
    (occlusion, "baseline", "mean", "finite number or tensor.* 'mean'"),
    (occlusion, "baseline", float("nan"), "finite number or tensor.* not finite"),
    (feature_ablation, "internal_batch_size", True, "whole number.* True"),
    (kernel_shap, "n_samples", 400.5, "n_samples.* 400.5"),
])  # fmt: skip
def test_bad_options_are_sentences(vit, method, option, value, told):
    refuses(told, method, vit(img_size=SIZE), images(1), 3, **{option: value})


def test_images_that_a_model_does_not_take(vit):
    model = vit(img_size=SIZE)
    naflex = timm.create_model("naflexvit_base_patch16_gap", embed_dim=96, depth=2, num_heads=3)
    damaged = images(2)
    damaged[1, 0, 3, 4] = float("nan")
    for method in attribution.METHODS.values():
        refuses(r"does not take this size: Input height \(80\)", method, model, torch.zeros(1, 3, 80, 80), 3)
        refuses("16 × 16 pixels do not divide .* 40 × 48", method, naflex, torch.zeros(1, 3, 40, 48), 3)
        refuses(r"3 channels.* \(1, 1, 64, 96\)", method, model, torch.zeros(1, 1, *SIZE), 3)
        refuses("finite.* 1 .*image 1", method, model, damaged, 3)


def test_outputs_that_are_no_numbers(vit):
    model = vit(img_size=SIZE)
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] = float("nan")
    maps = torch.zeros(1, 4, 6)
    for method in (*attribution.METHODS.values(), lambda m, x, target: curves(m, x, maps, target)):
        for target in (None, 3):
            refuses("outputs of .* are not finite numbers", method, model, images(1), target)
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] = 0.0
        model.head.bias[5] = -float("inf")  # a class that cannot be is no damage
    assert relevance(model, images(1), 3).isfinite().all()


class Normalized(torch.nn.Module):
    def forward(self, x):
        return (x - 0.5) / 0.25


class Headed(torch.nn.Module):
    """A backbone and a head; either pools the tokens."""

    def __init__(self, backbone, pools):
        super().__init__()
        self.backbone, self.pools, self.head = backbone, pools, torch.nn.Linear(backbone.embed_dim, 5)

    def forward(self, x):
        return self.head(self.backbone.forward_features(x)[:, 0] if self.pools else self.backbone(x))


def test_a_normalization_before_a_transformer_is_explained_as_the_transformer_is(vit):
    inner, x = vit(img_size=SIZE), images()
    wrapped, seen = torch.nn.Sequential(Normalized(), inner), Normalized()(x)
    inner.label_names = [f"plant {k}" for k in range(10)]
    for method in GRADIENT:
        torch.testing.assert_close(method(wrapped, x, "plant 3"), method(inner, seen, 3))
    for method in (occlusion, feature_ablation):  # the same cover, in the units of each
        torch.testing.assert_close(method(wrapped, x, TARGET, baseline=0.5), method(inner, seen, TARGET))
    found = integrated_gradients(wrapped, x, TARGET, baseline=0.5)
    torch.testing.assert_close(found, integrated_gradients(inner, seen, TARGET), rtol=1e-4, atol=1e-5)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in wrapped.modules())
    headless = torch.nn.Sequential(Normalized(), vit(img_size=SIZE, num_classes=0))
    refuses("its output is features", relevance, headless, x)


def test_a_backbone_and_a_head_are_explained_as_one_model(vit):
    """The same as a model whose own head has these weights."""
    whole, x = vit(img_size=SIZE, num_classes=5), images()
    for pools in (False, True):
        wrapped = Headed(vit(img_size=SIZE, num_classes=0), pools).eval()
        wrapped.backbone.load_state_dict({k: v for k, v in whole.state_dict().items() if not k.startswith("head.")})
        wrapped.head.load_state_dict(whole.head.state_dict())
        torch.testing.assert_close(grad_cam(wrapped, x, 3), grad_cam(whole, x, 3))
        torch.testing.assert_close(occlusion(wrapped, x, 3), occlusion(whole, x, 3))
        torch.testing.assert_close(relevance(wrapped, x, 3, query=(1, 2)), relevance(whole, x, 3, query=(1, 2)))
        if pools:
            refuses("is done by a wrapper.*Give a patch", relevance, wrapped, x, 3)
        else:
            for method in (relevance, gradient_rollout, attention_gradient):
                torch.testing.assert_close(method(wrapped, x, 3), method(whole, x, 3))
        refuses("LeGrad reads .* own head, but Headed", legrad, wrapped, x, 3)


def test_wrappers_whose_map_would_lie_elsewhere_or_that_hold_two_are_refused(vit):
    resized = torch.nn.Sequential(torch.nn.Upsample(SIZE), vit(img_size=SIZE))
    for method in (relevance, occlusion):
        refuses("Sequential makes images of 64 × 96 pixels out of 32 × 48", method, resized, images(size=(32, 48)))
    both, named = torch.nn.Sequential(vit(), vit()), r"2 Vision Transformers \(`model\[0\]`, `model\[1\]`\)"
    refuses(named, relevance, both, images(), error=UnsupportedModelError)


@pytest.mark.parametrize("form", [lambda logits: (logits, logits), lambda logits: {"classes": logits}])
def test_wrappers_whose_output_is_no_tensor_are_refused(vit, form):
    wrapped = torch.nn.Sequential(vit(img_size=SIZE))
    wrapped.register_forward_hook(lambda _, args, output: form(output))
    for method in attribution.METHODS.values():
        refuses(r"logits .*\(B, classes\), but Sequential gives (tuple|dict)", method, wrapped, images(2), 3)


def test_weights_that_are_nowhere_explain_nothing():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", depth=2).eval()
    for method in (relevance, occlusion):
        refuses("weights of vit_tiny_patch16_224 .* are on the meta device", method, model, torch.zeros(1, 3, 224, 224))


@pytest.mark.parametrize("method", [*GRADIENT, integrated_gradients, gradient_shap])
def test_a_graph_that_is_cut_gives_no_map(vit, method):
    model, x = vit(img_size=SIZE), images(1)
    mlp = model.blocks[2].mlp
    whole = mlp.forward
    mlp.forward = torch.no_grad()(whole)
    if method is not direct:  # which sends no gradient into an MLP
        refuses(r"cut in blocks\.2\.mlp|parts miss the logit", method, model, x, error=UnsupportedModelError)
    assert occlusion(model, x).isfinite().all()
    mlp.forward = whole
    assert method(model, x).isfinite().all()
    model.head.forward = lambda x: torch.nn.functional.linear(x.detach(), model.head.weight, model.head.bias)
    refuses("cut in head|logits have no gradients|parts miss the logit", method, model, x)
