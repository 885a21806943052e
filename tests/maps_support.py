"""Images, maps, a model with scores in closed form, and a helper that tests refusals."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitlens import TokenGrid

GRID = TokenGrid(4, 6, (16, 16), prefix=0)
SMALL = TokenGrid(4, 6, (4, 4), prefix=0)


def images(batch=2, size=(64, 96), seed=0, dtype=torch.float64):
    return (
        torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        + 0.3
    )


def maps(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def linear(size=(64, 96), classes=5, seed=2):
    """Logits that are a weighted sum of all pixels, so every patch adds a term that is independent of the others."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * size[0] * size[1], classes)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(model[1].weight.shape, generator=generator) / 50)
    return model


def tiles(values):
    """(B, 3, H, W) → (B, 24), summed over each patch of a grid of 4 × 6."""
    batch, channels, height, width = values.shape
    return values.reshape(batch, channels, 4, height // 4, 6, width // 6).sum((1, 3, 5)).flatten(1)


def gains(model, x, blank, target):
    """(B, 24) change of a linear model's logit when a patch of the image replaces the baseline's."""
    return tiles(model[1].weight.detach()[target].reshape(-1, *x.shape[1:]) * (x - blank))


def refuses(message, call, *args, error=ValueError, **kwargs):
    """Assert that the call raises the error with a message that matches a regular expression."""
    with pytest.raises(error, match=message):
        call(*args, **kwargs)


class Largest(TorchDispatchMode):
    """The numbers in the storage of the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(
                self.numbers, result.untyped_storage().nbytes() // result.element_size()
            )
        return result


@contextlib.contextmanager
def left_as_found(model, *tensors):
    """Assert that the block leaves the model, the tensors, autograd and the random generators unchanged."""
    model.head.bias.grad = torch.ones_like(model.head.bias)
    kept = model.state_dict(keep_vars=True)
    before = {
        name: (value, value.detach().clone(), value.requires_grad, value.grad)
        for name, value in kept.items()
    }
    modes, copies = (
        [module.training for module in model.modules()],
        [tensor.detach().clone() for tensor in tensors],
    )
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    yield
    assert (
        torch.equal(torch.get_rng_state(), states[0])
        and (np.random.get_state()[1] == states[1]).all()
    )
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()
    assert all(block.attn.fused_attn for block in model.blocks)
    assert all(t.grad is None and torch.equal(t, c) for t, c in zip(tensors, copies, strict=True))
    for name, value in model.state_dict(keep_vars=True).items():
        same, copy, requires, grad = before[name]
        assert (
            value is same
            and torch.equal(value, copy)
            and value.requires_grad == requires
            and value.grad is grad
        )
    assert (model.head.bias.grad == 1).all()
