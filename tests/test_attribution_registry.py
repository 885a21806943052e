"""The registry of methods: what a row says, that quick methods share their passes, and a method from outside."""

import inspect
import subprocess
import sys

import pytest
import torch
from maps_support import refuses
from torch.utils._python_dispatch import TorchDispatchMode

from vitlens import attribution, capture
from vitlens.attribution import METHODS, Method, explained, methods, register, registry
from vitlens.images import samples
from vitlens.reports import explanation

QUICK = ["relevance", "gradient_rollout", "legrad", "attention_gradient", "grad_cam", "rollout"]
IMAGES = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mine():
    """A method that somebody adds: the length of the last layer's gradient."""

    def length(attn, *, power=1.0):
        """(B, rows, cols) lengths."""
        return attn.grid.image_map(attn[-1].gradient.norm(dim=-1).mean(1) ** power)

    yield register(Method("mine", "my method", "gradients", "one forward and one backward", length, quick=True))
    registry._methods.pop("mine")


class Attentions(TorchDispatchMode):
    """Counts the forward and backward passes of fused attention."""

    forward = backward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in func.__name__:
            passed = "backward" if "backward" in func.__name__ else "forward"
            setattr(self, passed, getattr(self, passed) + 1)
        return func(*args, **(kwargs or {}))


def test_quick_methods_of_a_picture_share_one_forward_and_one_backward(vit):
    model, calls = vit(img_size=(64, 96)), []
    alone = {name: method(model, IMAGES, [3, 7], against=5) for name, method in methods().items()}
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with Attentions() as seen:
        found = explained(model, IMAGES, [3, 7], against=5, needs={m.needs for m in methods().values()})
        together = {name: method.of(found.captures[method.needs]) for name, method in methods().items()}
    assert len(calls) == 1 and seen.forward == len(model.blocks)
    assert seen.backward == len(model.blocks) - 1  # the first layer's queries and keys need no gradient
    for name, values in alone.items():
        torch.testing.assert_close(together[name], values, rtol=1e-6, atol=0)


def test_a_capture_of_ones_own_serves(vit):
    model = vit(img_size=(64, 96))
    with capture(model, gradients=True) as attn:
        logits = model(IMAGES)
    attn.differentiate(logits[0, 3] + logits[1, 7])
    for name in ("relevance", "gradient_rollout", "attention_gradient"):
        torch.testing.assert_close(METHODS[name].of(attn), METHODS[name](model, IMAGES, [3, 7]))


def test_a_capture_with_a_step_forgotten_serves_no_method(vit):
    model = vit(img_size=(64, 96))
    with capture(model) as attn:
        model(IMAGES)
    for name, method in METHODS.items():
        if method.needs in ("gradients", "readings"):
            refuses(f"{name} needs .* not differentiated.*captures..{method.needs}", method.of, attn)
        elif method.needs == "inputs":
            refuses(f"{name} needs .*got Attention.*captures..inputs", method.of, attn)
        elif method.needs != "capture":
            refuses(rf"{name} runs the model.*`{name}\(model, images, target\)`", method.of, attn)
    refuses("relevance needs .* got NoneType", METHODS["relevance"].of, None)


def test_a_picture_is_explained_and_scored_with_as_few_forwards(vit):
    model, calls = vit(), []
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    (found,) = explanation.explain(model, [("cat", samples()["chelsea"])], step=4, orders=2)
    assert list(found.maps) == QUICK
    pictures = 2 + (len(QUICK) + 2) * 2 * 3  # whole and empty, then 3 steps of two curves for each map and order
    assert calls == [1, 32, pictures - 32]


def test_a_row_tells_everything():
    assert list(methods()) == QUICK == list(METHODS)[:6]
    assert list(methods(["legrad", "rollout"])) == ["legrad", "rollout"]
    for name, method in METHODS.items():
        assert method.name == name and method.title and method.cost and method.needs in registry.NEEDS
        assert getattr(attribution, name) is method and name in dir(attribution) and name in attribution.__all__
        assert method.__doc__.startswith("(B, rows, cols)")
        parameters = list(inspect.signature(method).parameters)
        assert parameters == ["model", "images", "target", "against", "names", *method.options] or name == "rollout"
    assert [name for name, method in METHODS.items() if not method.knows_class] == ["rollout"]
    assert list(METHODS["relevance"].options) == ["query"]
    with pytest.raises(TypeError):
        METHODS["mine"] = METHODS["relevance"]
    with pytest.raises(AttributeError, match="no attribute 'relevanz'"):
        attribution.relevanz  # noqa: B018
    refuses("no method 'relevanz'; there are relevance, gradient_rollout", methods, ["relevanz"])
    refuses("no option layer. Its options are: query", METHODS["relevance"], None, None, error=TypeError, layer=3)


def test_a_method_from_outside_is_one_of_them(vit, mine):
    model = vit()
    expected = mine(model, IMAGES[:, :, :, :64], 3, power=2.0)
    assert expected.shape == (2, 4, 4) and attribution.mine is METHODS["mine"] is mine
    (found,) = explanation.explain(model, [("cat", samples()["chelsea"])], names=["mine", "relevance"], orders=2)
    assert list(found.maps) == ["mine", "relevance"] and "mine" in set(found.scores["method"])
    for name, needs, told in (
        ("mine", "gradients", "'mine' is taken"),
        ("a b", "gradients", "'a b' is taken or no name"),
        ("other", "wishes", "one of capture, gradients, .* got 'wishes'"),
    ):
        refuses(told, register, Method(name, "title", needs, "nothing", len))


def test_help_lists_a_method_from_outside_without_importing_torch():
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'timm', 'matplotlib'): sys.modules[name] = None\n"
        "from vitlens.attribution import Method, register\n"
        "register(Method('mine', 'my method', 'gradients', 'one forward', 'my_package.my_module:mine'))\n"
        "from vitlens.commands import main\n"
        "sys.argv = ['vitlens', 'explain', '--help']\n"
        "main()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "kernel_shap, mine" in " ".join(found.stdout.replace("│", " ").split())
