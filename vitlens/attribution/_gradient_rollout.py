"""Gradient rollout: attention rollout in which each layer's attention is weighed by its own gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from vitlens.attribution.rows import attention_times_gradient, readout
from vitlens.recorder.recording import Attention
from vitlens.recorder.running import full_precision


def gradient_rollout(attn: Attention, *, query: tuple[int, int] | None = None, head_fusion: str = "mean") -> Tensor:
    """(B, rows, cols) rollout of attention × gradient, from the read-out to the patches.

    Abnar and Zuidema's rollout (2020), the read-out's row of Â_L ⋯ Â_1 with Â = (G + I) / row sum, in which G takes the
    place of the attention A. With ∇A the gradient of the target's logit,

    * head_fusion="mean": G = (mean over heads of A ⊙ ∇A)⁺, as in Gildenblat's vit-explain (2020), but each layer is
      paired with its own gradient;
    * head_fusion="positive": G = mean over heads of (A ⊙ ∇A)⁺, the average of Chefer, Gur and Wolf (CVPR 2021, eq. 13).

    The row is pulled back through the layers from the top, so no T × T matrix is formed. Prefix tokens are dropped and
    nothing is rescaled. What reaches a patch through identities alone is left out: a mean over patches reads the
    patches themselves, and the identities would carry that into the map. An attention pool is one more layer, without
    identity.

    attn: a capture in which every layer knows the gradient of the target's logit. query: (row, column) of a patch, to
    start from instead of the read-out.
    """
    if head_fusion not in ("mean", "positive"):
        raise ValueError(f'head_fusion is "mean" or "positive", but got {head_fusion!r}.')
    still, moved = readout(attn, query)  # `still` has met nothing but identities
    moved /= moved.sum(-1, keepdim=True).clamp_min_(torch.finfo(moved.dtype).tiny)
    for layer in reversed(attn):
        row, pulled = still + moved, torch.zeros_like(moved)
        for queries, product in attention_times_gradient(layer, row):
            fused = product.mean(1).clamp_(min=0) if head_fusion == "mean" else product.clamp_(min=0).mean(1)
            total = fused.sum(-1) + 1
            with full_precision(row.device):
                pulled += torch.einsum("bq,bqk->bk", row[:, queries] / total, fused)
            pulled[:, queries] += moved[:, queries] / total
            still[:, queries] /= total
        moved = pulled
    return attn.grid.image_map(moved)
