"""LeGrad: how each layer's attention would have to change for the model to see more of the class there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vitlens.attribution.forward import captured, checked, explaining, require_gradient, score
from vitlens.attribution.rows import blocks, layer_number
from vitlens.attribution.target import asked
from vitlens.recorder.families import model_name, transformer
from vitlens.recorder.layer import Layer


def legrad(
    model: nn.Module, images: Tensor, target=None, *, against=None, names: Sequence[str] | None = None, first: int = 0
) -> Tensor:
    """(B, rows, cols) LeGrad (Bousselham et al., ICCV 2025, arXiv 2404.03214).

    The tokens Z_l that leave layer l are read as if it were the last, by the model's own final norm, pooling and head:
    s_l = head(pool(norm(Z_l))), the logit of the target. The map is the mean over layers of (∂s_l/∂A_l)⁺, averaged over
    heads and over all T queries; it is not multiplied by A_l. Prefix tokens are dropped. The authors sum over layers
    and stretch to 0…1 at the end, which is left to whoever draws the map; for models with an attention pool they take
    the gradient of the pool's map, while here every model is read through its layers.

    first: the first layer of the mean (the authors' code takes the last two: −2). target, against, names: see
    `vitlens.attribution`.
    """
    model, images = checked(model, images)
    inner = transformer(model)
    first = layer_number(len(inner.blocks), first)
    with explaining(model):
        with _tokens(inner) as tokens:
            attn, logits = captured(model, images, gradients=True)
        read = [inner.forward_head(inner.norm(z)) for z in tokens]
        if inner is not model and not torch.equal(read[-1], logits):
            raise ValueError(
                f"LeGrad reads every layer with the Vision Transformer's own head, but {model_name(model)} gives other "
                "logits than the one in it. Use another method, such as relevance or grad_cam."
            )
        chosen = asked(model, logits, target, against, names)
        attn.differentiate([score(logits, chosen) for logits in read])
        require_gradient(model, chosen, [layer.gradient for layer in attn[first:]])
    received = torch.stack([_received(layer) for layer in attn[first:]])
    return attn.grid.image_map(received.mean(0))


def _received(layer: Layer) -> Tensor:
    """(B, T) positive gradient of the attention to each token, mean over heads and queries."""
    total = torch.zeros_like(layer.k[:, 0, :, 0], dtype=layer.wide)
    for queries in blocks(layer, layer.gradient.any(-1).any(1).any(0)):  # the others' gradient is zero
        total += layer.weights_gradient(queries).clamp_(min=0).mean(1).sum(1)
    return total / layer.q.shape[-2]


@contextlib.contextmanager
def _tokens(model: nn.Module) -> Iterator[list[Tensor]]:
    """What leaves each block. The next block is given it without its history: a layer's score is its own layer's."""
    tokens, thread = [], threading.get_ident()

    def keep(block, args, output):
        if threading.get_ident() != thread:
            return output
        tokens.append(output)
        return output.detach().requires_grad_()

    with contextlib.ExitStack() as hooks:
        for block in model.blocks:
            hooks.enter_context(block.register_forward_hook(keep))
        yield tokens
