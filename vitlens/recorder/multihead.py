"""Attention inside of torch.nn.MultiheadAttention, made visible: PyTorch's own function is run, line for line, and the
attention in it is handed out. So its results stay what they are, bit for bit.

PyTorch has a fast path for such modules too, in eval mode without gradients, which no capture can see: it is off while
a capture watches. Its results differ from those of the function by rounding, so logits may differ by that.
`torch.backends.mha.set_fastpath_enabled(False)` turns it off for good.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

MULTIHEAD = F.multi_head_attention_forward


def spelled_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_, scale: float = 1.0
) -> Tensor:
    """(B, H, Q, K) attention as `MULTIHEAD` computes it where it is asked for the weights, too: without a fused kernel.

    The queries are scaled already.
    """
    if has_torch_function((query, key, value)):
        return handle_torch_function(spelled_out, (query, key, value), query, key, value, mask, scale=scale)
    q, k, v = (t.flatten(0, 1) for t in (query, key, value))
    if mask is None:
        logits = torch.bmm(q, k.transpose(-2, -1))
    else:
        logits = torch.baddbmm(mask.expand(*query.shape[:-1], key.shape[-2]).flatten(0, 1), q, k.transpose(-2, -1))
    return torch.bmm(logits.softmax(-1), v).unflatten(0, query.shape[:2])


def opened(attend: Callable[..., Tensor], *args, **kwargs) -> tuple[Tensor, Tensor | None]:
    """What MULTIHEAD(*args, **kwargs) returns, with `attend(function, q, k, v, mask, …)` in place of its attention."""
    names = dict(MULTIHEAD.__globals__)
    names["has_torch_function"] = lambda tensors: False
    names["scaled_dot_product_attention"] = lambda *given: attend(F.scaled_dot_product_attention, *given)
    names["torch"] = _Products(attend, args[4], args[10] if kwargs.get("training", True) else 0.0)
    return types.FunctionType(MULTIHEAD.__code__, names, argdefs=MULTIHEAD.__defaults__)(*args, **kwargs)


class _Products:
    """PyTorch for one call of MULTIHEAD: its first product gives the logits, its second is taken over."""

    def __init__(self, attend: Callable[..., Tensor], heads: int, dropout: float):
        self.attend, self.heads, self.dropout, self.given = attend, heads, dropout, None

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def baddbmm(self, mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
        self.given = query, key, mask
        return torch.baddbmm(mask, query, key)

    def bmm(self, one: Tensor, other: Tensor) -> Tensor:
        if self.given is None:
            self.given = one, other, None
            return torch.bmm(one, other)
        query, key, mask = self.given
        apart = lambda t: t.unflatten(0, (-1, self.heads) if len(t) > 1 else (1, 1))  # noqa: E731
        q, k, v = apart(query), apart(key.transpose(-2, -1)), apart(other)
        return self.attend(
            spelled_out, q, k, v, None if mask is None else apart(mask), self.dropout, scale=1.0
        ).flatten(0, 1)
