"""PyTorch's fused attention on a CPU, asked for what it knows besides its output.

On its way it finds every query's log-sum-exp, which its public function throws away. With it each weight stands by
itself, A_ij = exp(x_ij − lse_i), and a sum over queries is fused attention once more, with queries and keys in each
other's place: Σ_i r_i·A_ij is the exponential of a log-sum-exp over i, of x_ij + ln r_i − lse_i. No rows are made.

The operator behind it is PyTorch's own but not public. Where it is missing or answers otherwise than here expected,
`attend` has no log-sum-exp to give, and sums are made from rows.

Shapes: B batch, H heads, T tokens, Q queries, K head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def attend(
    attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
    dropout: float = 0.0, causal: bool = False, **options,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What `attention`, torch's scaled_dot_product_attention, gives, bit for bit; and lse (B, H, Q) where it is known.

    It is known on a CPU, without mask, autocast and grouped heads, where nothing else (another capture) looks on.
    Natural logarithms, in float32 or wider; of 16-bit queries right to 1e-4, as PyTorch takes a quicker exponential for
    them.
    """
    plain = query.device.type == "cpu" and type(query) is Tensor and options.keys() <= {"scale"}
    plain = plain and all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    if plain and mask is None and not dropout and not causal and not torch.is_autocast_enabled("cpu") and _works():
        chosen = torch._fused_sdp_choice(query, key, value, **options)  # torch's own choice of a way to compute it
        if chosen == SDPBackend.FLASH_ATTENTION.value:
            return _operator()(query, key, value, **options)
    return attention(query, key, value, mask, dropout, causal, **options), None


def summed(q: Tensor, k: Tensor, scale: float, lse: Tensor, row: Tensor) -> Tensor:
    """(B, H, T) Σ_i row_i·A_ij over the queries i, at the price of one fused attention, in float32 or wider.

    q: (B, H, Q, K), k: (B, H, T, K), lse: (B, H, Q) as `attend` gives it. row: (B, Q), not negative.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    shares = row.to(wide).clamp(min=torch.finfo(wide).tiny).log()[:, None] - lse.to(wide)
    bias = shares.contiguous()[:, :, None].expand(*k.shape[:-1], -1)
    q, k = q.to(wide), k.to(wide)
    return _operator()(k, q, q, attn_mask=bias, scale=scale)[1].exp()


def _operator() -> Callable:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@functools.cache
def _works() -> bool:
    """Whether this version of PyTorch has the operator, and it gives what is wanted of it."""
    here = {"device": "cpu", "dtype": torch.float32}
    with torch.no_grad():
        q, k, v = torch.linspace(-1, 1, 3 * 2 * 5 * 8, **here).sin().view(3, 1, 2, 5, 8)
        row, logits = torch.arange(1, 6, **here), 1.5 * q @ k.mT
        weights = logits.softmax(-1)
        try:
            torch._fused_sdp_choice(q, k, v, scale=1.5)
            output, lse = _operator()(q, k, v, scale=1.5)
            found = output, lse, summed(q, k, 1.5, lse, row[None])
            right = weights @ v, logits.logsumexp(-1), row @ weights
            return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, right, strict=True))
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
