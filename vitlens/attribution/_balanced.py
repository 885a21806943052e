"""Balanced gradients: gradient × input of every layer's tokens in a model that is made linear first."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitlens.attribution.forward import captured, checked, require_gradient, score
from vitlens.attribution.linear import held, held_fixed, leaf, product, require_sum
from vitlens.attribution.target import asked, bound, of_features
from vitlens.recorder.supported import family, transformer


def balanced_gradients(model: nn.Module, images: Tensor, target=None, *, against=None, names=None) -> Tensor:
    """(B, rows, cols) gradient × input, summed over the inputs of all layers, with all multipliers held fixed.

    LibraGrad (Mehri et al., CVPR 2025): gradients flow as if the weights of attention, the deviations by which norms
    divide and the gates of the activations (Φ(x) in GELU's x·Φ(x), the gating half of a GLU) were constants. So the
    model is a linear function of each layer's tokens, and gradient × input, summed over all tokens, is the logit minus
    what the biases add. That is checked for the first layer. The gradients are those of CP-LRP in LXT (Ali et al.
    2022).
    """
    model, images = checked(model, images, target)
    target, against = bound(model, target, against)
    inner = transformer(model)
    first, *others = family(inner).blocks
    tokens = []
    hooks = [(first.register_forward_pre_hook, lambda _, args: (leaf(args[0], tokens), *args[1:]))]
    hooks += [(block.register_forward_pre_hook, lambda _, args: tokens.append(args[0])) for block in others]
    for mlp in model.modules():
        if "glu" in type(mlp).__name__.lower() and hasattr(mlp, "act"):  # one half is a gate of the other
            hooks.append((mlp.act.register_forward_hook, lambda _, args, out: held(out)))
    with held_fixed(model, images, hooks, activations=True) as zeros:
        attn, output = captured(model, images, of_features(target))
        chosen = asked(model, output, target, against, names)
        *by_tokens, by_zeros = torch.autograd.grad(
            score(output, chosen, linear=True), [*tokens, zeros], allow_unused=True, materialize_grads=True
        )
    require_gradient(model, chosen, by_tokens)
    written = [product(each, by) for each, by in zip(tokens, by_tokens, strict=True)]
    require_sum(model, torch.cat([written[0], by_zeros[:, None]], 1), chosen.score(output.detach()))
    return attn.grid.image_map(torch.stack(written).sum(0))
