"""PyTorch's `multi_head_attention_forward`, written out so that its attention can be intercepted.

Shapes: B batch, H heads, Q queries, T tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from vitlens.recorder.supported import UnsupportedModelError

MULTIHEAD = F.multi_head_attention_forward


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_, scale: float = 1.0
) -> Tensor:
    """(B, H, Q, K) attention as `MULTIHEAD` computes it with need_weights=True, from scaled queries."""
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            explicit_attention, (query, key, value), query, key, value, mask, scale=scale
        )
    return torch.bmm(_weights(query, key, mask), value.flatten(0, 1)).unflatten(0, query.shape[:2])


def _weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B·H, Q, T) softmax of the logits of scaled queries."""
    logits = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(-2, -1))
    if mask is not None:  # an intervention's
        logits = logits.unflatten(0, query.shape[:2]).masked_fill(~mask, -torch.inf).flatten(0, 1)
    return logits.softmax(-1)


def multihead_attention(
    attend: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    in_weight: Tensor,
    in_bias: Tensor | None,
    bias_k,
    bias_v,
    add_zero_attn: bool,
    dropout: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    training: bool = True,
    key_padding_mask=None,
    need_weights: bool = True,
    attn_mask=None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **separate,
) -> tuple[Tensor, Tensor | None]:
    """PyTorch's `multi_head_attention_forward` with attention computed by `attend`, the first argument.

    The operations and their order are PyTorch's, so outputs are equal bit for bit. PyTorch disables the fast path of
    `torch.nn.MultiheadAttention` (eval mode, no gradients) inside a mode. Its outputs differ from these by rounding.
    `torch.backends.mha.set_fastpath_enabled(False)` turns it off for good.
    """
    unsupported = (bias_k, bias_v, key_padding_mask, attn_mask)
    if (
        add_zero_attn
        or any(part is not None for part in unsupported)
        or query.dim() != 3
        or key is not value
    ):
        raise UnsupportedModelError(
            "torch.nn.MultiheadAttention is called with a mask, extra keys or without a batch."
        )
    length, batch, _ = query.shape
    if in_weight is None:
        biases = (None,) * 3 if in_bias is None else in_bias.chunk(3)
        matrices = (separate[f"{name}_proj_weight"] for name in "qkv")
        q, k, v = (
            F.linear(*inputs) for inputs in zip((query, key, value), matrices, biases, strict=True)
        )
    elif query is key:
        q, k, v = _unpack(F.linear(query, in_weight, in_bias), 3, width)
    else:
        (w_q, w_kv), (b_q, b_kv) = in_weight.split([width, 2 * width]), (None, None)
        if in_bias is not None:
            b_q, b_kv = in_bias.split([width, 2 * width])
        q = F.linear(query, w_q, b_q)
        k, v = _unpack(F.linear(key, w_kv, b_kv), 2, width)
    q, k, v = (
        t.view(len(t), batch * heads, -1).transpose(0, 1).unflatten(0, (batch, heads))
        for t in (q, k, v)
    )
    weights, dropout = None, dropout if training else 0.0
    if need_weights:
        q = q * math.sqrt(1.0 / float(q.shape[-1]))
        output = attend(explicit_attention, q, k, v, None, dropout, is_causal, scale=1.0)
        weights = _weights(q, k).unflatten(0, (batch, heads))
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        output = attend(F.scaled_dot_product_attention, q, k, v, None, dropout, is_causal)
    output = output.permute(2, 0, 1, 3).reshape(batch * length, width)
    return F.linear(output, out_weight, out_bias).view(length, batch, -1), weights


def _unpack(packed: Tensor, parts: int, width: int) -> Tensor:
    """(parts, T, B, D) projections from (T, B, parts·D)."""
    return (
        packed.unflatten(-1, (parts, width)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    )
