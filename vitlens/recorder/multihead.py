"""PyTorch's `multi_head_attention_forward`, written out so that its attention can be intercepted.

Shapes: B batch, H heads, Q queries, T tokens, D width, K width of a head.
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
    """(B, H, Q, K) outputs of the heads as `MULTIHEAD` computes them with need_weights=True, from scaled queries.

    A stand-in for `scaled_dot_product_attention`, whose dropout and is_causal it ignores. Like PyTorch's functions, it
    first gives way to tensor subclasses and modes, so that the call can be intercepted.
    """
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            explicit_attention, (query, key, value), query, key, value, mask, scale=scale
        )
    outputs = torch.bmm(_weights(query, key, mask), value.flatten(0, 1))
    return outputs.unflatten(0, query.shape[:2])


def _weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B·H, Q, T) softmax of the logits of scaled queries."""
    logits = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(-2, -1))
    if mask is not None:  # set by an intervention
        by_head = logits.unflatten(0, query.shape[:2])
        logits = by_head.masked_fill(~mask, -torch.inf).flatten(0, 1)
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
    **separate_weights,
) -> tuple[Tensor, Tensor | None]:
    """PyTorch's `multi_head_attention_forward` with attention computed by `attend`, the first argument.

    The operations and their order are PyTorch's, so outputs are equal bit for bit. The exception is the fast path of
    `torch.nn.MultiheadAttention` (eval mode, no gradients), which PyTorch disables while calls are intercepted. Its
    outputs differ from these by rounding. `torch.backends.mha.set_fastpath_enabled(False)` turns it off for good.
    """
    options = (bias_k, bias_v, key_padding_mask, attn_mask)
    has_option = add_zero_attn or any(option is not None for option in options)
    if has_option or query.dim() != 3 or key is not value:
        raise UnsupportedModelError(
            "torch.nn.MultiheadAttention is called with a mask, extra keys or without a batch."
        )
    length, batch, _ = query.shape
    if in_weight is None:
        q, k, v = _project_separately(query, key, value, in_bias, separate_weights)
    elif query is key:
        q, k, v = _unpack(F.linear(query, in_weight, in_bias), 3, width)
    else:
        q, k, v = _project_query_and_key(query, key, width, in_weight, in_bias)
    q = _split_heads(q, batch, heads)
    k = _split_heads(k, batch, heads)
    v = _split_heads(v, batch, heads)
    if not training:
        dropout = 0.0
    weights = None
    if need_weights:
        q = q * math.sqrt(1.0 / float(q.shape[-1]))
        output = attend(explicit_attention, q, k, v, None, dropout, is_causal, scale=1.0)
        weights = _weights(q, k).unflatten(0, (batch, heads))
        if average_attn_weights:
            weights = weights.mean(1)
    else:
        output = attend(F.scaled_dot_product_attention, q, k, v, None, dropout, is_causal)
    output = output.permute(2, 0, 1, 3).reshape(batch * length, width)
    output = F.linear(output, out_weight, out_bias)
    return output.view(length, batch, -1), weights


def _project_separately(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, weights: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v by three matrices, which PyTorch keeps apart if keys or values have another width."""
    b_q, b_k, b_v = (None, None, None)
    if bias is not None:
        b_q, b_k, b_v = bias.chunk(3)
    q = F.linear(query, weights["q_proj_weight"], b_q)
    k = F.linear(key, weights["k_proj_weight"], b_k)
    v = F.linear(value, weights["v_proj_weight"], b_v)
    return q, k, v


def _project_query_and_key(
    query: Tensor, key: Tensor, width: int, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q from the query, k and v from the key, by one packed matrix."""
    sizes = [width, 2 * width]
    w_q, w_kv = weight.split(sizes)
    b_q, b_kv = (None, None)
    if bias is not None:
        b_q, b_kv = bias.split(sizes)
    q = F.linear(query, w_q, b_q)
    k, v = _unpack(F.linear(key, w_kv, b_kv), 2, width)
    return q, k, v


def _split_heads(projection: Tensor, batch: int, heads: int) -> Tensor:
    """(B, H, T, K) from (T, B, D)."""
    rows = projection.view(len(projection), batch * heads, -1)
    return rows.transpose(0, 1).unflatten(0, (batch, heads))


def _unpack(packed: Tensor, parts: int, width: int) -> Tensor:
    """(parts, T, B, D) projections from (T, B, parts·D), with PyTorch's operations."""
    split = packed.unflatten(-1, (parts, width)).unsqueeze(0)
    return split.transpose(0, -2).squeeze(-2).contiguous()
