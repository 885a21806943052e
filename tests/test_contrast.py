"""Why one class rather than another: what a model says whose head was made to answer exactly that."""

import copy

import pytest
import torch
from maps_support import refuses

from vitlens import faithfulness
from vitlens.attribution import METHODS

KWARGS = {"kernel_shap": dict(n_samples=80)}
A, B = 3, 7


def images(count=2):
    return torch.randn(count, 3, 64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(params=["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224"])
def model(request, vit):
    model = vit(name=request.param, dtype=torch.float64, img_size=(64, 96), patch_size=16)
    with torch.no_grad():
        for head in heads(model):
            head.weight.normal_(generator=torch.Generator().manual_seed(1))
            head.bias.normal_(generator=torch.Generator().manual_seed(2))
    return model


def heads(model):
    return [getattr(model, name) for name in ("head", "head_dist") if hasattr(model, name)]


def difference(model):
    """The same model, whose class A answers with the difference of A and B."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for head in heads(model):
            head.weight[A] -= head.weight[B]
            head.bias[A] -= head.bias[B]
    return model


def only_two(model):
    """The same model, whose classes are B and A."""
    model = copy.deepcopy(model)
    for head in heads(model):
        head.weight, head.bias = (torch.nn.Parameter(p[[B, A]].detach()) for p in (head.weight, head.bias))
    model.num_classes = 2
    return model


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.knows_class])
def test_a_map_of_the_difference(model, name):
    method, kwargs = METHODS[name], KWARGS.get(name, {})
    found = method(model, images(), A, against=B, **kwargs)
    torch.testing.assert_close(found, method(difference(model), images(), A, **kwargs), rtol=1e-9, atol=0)
    for other in (method(model, images(), A, **kwargs), method(model, images(), B, against=A, **kwargs)):
        assert (found - other).abs().max() > 0.1 * found.abs().max()


def test_each_image_has_its_own_classes(model):
    for name in ("relevance", "integrated_gradients"):
        both = METHODS[name](model, images(), [A, B], against=[B, 0])
        for k, (target, against) in enumerate(((A, B), (B, 0))):
            alone = METHODS[name](model, images()[k : k + 1], target, against=against)
            torch.testing.assert_close(both[k : k + 1], alone, rtol=1e-9, atol=1e-15)


def test_scores_of_the_difference_and_among_two(model):
    x, maps = images(), torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(3))
    for score, reference in (("logit", (difference(model), A)), ("probability", (only_two(model), 1))):
        found = faithfulness.curves(model, x, maps, A, against=B, score=score)
        expected = faithfulness.curves(reference[0], x, maps, reference[1], score=score)
        torch.testing.assert_close(found.deletion, expected.deletion)
        torch.testing.assert_close(found.insertion, expected.insertion)
    kept = faithfulness.confidence(model, x, maps, A, against=B).kept
    torch.testing.assert_close(kept, faithfulness.confidence(only_two(model), x, maps, 1).kept)


def test_refusals(model):
    for name in ("relevance", "grad_cam", "occlusion"):
        refuses("class 3 .* rather than itself. Give another", METHODS[name], model, images(), [0, A], against=A)
        refuses("numbered from 0 to .*, but class 99999", METHODS[name], model, images(), A, against=99999)
    refuses("rather than itself", faithfulness.curves, model, images(), torch.rand(2, 4, 6), A, against=A)
