"""LeGrad: how each layer's attention would have to change for the model to see more of the class there."""

from __future__ import annotations

import torch
from torch import Tensor

from vitlens.attribution.rows import blocks
from vitlens.recorder.arguments import layer_number
from vitlens.recorder.layer import Layer
from vitlens.recorder.recording import Attention


def legrad(attn: Attention, *, first: int = 0) -> Tensor:
    """(B, rows, cols) LeGrad (Bousselham et al., ICCV 2025, arXiv 2404.03214).

    The tokens Z_l that leave layer l are read as if it were the last, by the model's own final norm, pooling and head:
    s_l = head(pool(norm(Z_l))), the logit of the target. The map is the mean over layers of (∂s_l/∂A_l)⁺, averaged over
    heads and over all T queries; it is not multiplied by A_l. Prefix tokens are dropped. The authors sum over layers
    and stretch to 0…1 at the end, which is left to whoever draws the map; for models with an attention pool they take
    the gradient of the pool's map, while here every model is read through its layers.

    attn: a capture in which every layer knows the gradient of its own s_l. first: the first layer of the mean (the
    authors' code takes the last two: −2).
    """
    layers = attn[layer_number(len(attn), first) :]
    return attn.grid.image_map(torch.stack([_received(layer) for layer in layers]).mean(0))


def _received(layer: Layer) -> Tensor:
    """(B, T) positive gradient of the attention to each token, mean over heads and queries."""
    total = torch.zeros_like(layer.k[:, 0, :, 0], dtype=layer.wide)
    for queries in blocks(layer, layer.gradient.any(-1).any(1).any(0)):  # the others' gradient is zero
        total += layer.weights_gradient(queries).clamp_(min=0).mean(1).sum(1)
    return total / layer.q.shape[-2]
