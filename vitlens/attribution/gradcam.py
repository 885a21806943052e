"""Grad-CAM on tokens: the channels of one layer, weighed by what the class gains from each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vitlens.attribution.forward import captured, checked, explaining, require_gradient, score
from vitlens.attribution.rows import layer_number
from vitlens.attribution.target import asked
from vitlens.recorder.families import attention_modules, transformer


def grad_cam(
    model: nn.Module, images: Tensor, target=None, *, against=None, names: Sequence[str] | None = None, layer: int = -1
) -> Tensor:
    """(B, rows, cols) Grad-CAM (Selvaraju et al. 2017, eq. 1 and 2) of the tokens that one layer's attention is given.

    The activation a_pc of patch p is what the attention reads: the output of the block's `norm1`, where
    pytorch-grad-cam puts its hook on a ViT, or what the block is given where it normalizes afterwards. The map is
    (Σ_c w_c·a_pc)⁺ with w_c the mean over the patches of ∂y/∂a_pc and y the target's logit; prefix tokens are dropped,
    nothing is rescaled. After the last attention a class token has read all it will, and the gradient of every patch is
    zero: hence here. Blocks with two attentions side by side have the channels of both; where attention and MLP share
    one norm, its output is the activation, read by both; what is normalized afterwards goes on past the attention too,
    and ∂y/∂a_pc counts both ways.

    layer: its number, −1 for the last. target, against, names: see `vitlens.attribution`.
    """
    model, images = checked(model, images)
    inner = transformer(model)
    layers = attention_modules(inner)
    number = layer_number(len(layers), layer)
    modules = [module for _, module in layers[number]]
    with explaining(model):
        with _inputs(inner.blocks[number], modules) as found:
            attn, logits = captured(model, images)
        chosen = asked(model, logits, target, against, names)
        gradients = torch.autograd.grad(score(logits, chosen), found)
    require_gradient(model, chosen, list(gradients))
    wide = torch.promote_types(images.dtype, torch.float32)
    activation, gradient = (
        torch.cat(parts, -1)[:, attn.grid.prefix :].to(wide) for parts in ([f.detach() for f in found], gradients)
    )
    values = (activation * gradient.mean(1, keepdim=True)).sum(-1).clamp_(min=0)
    return values.unflatten(-1, (attn.grid.rows, attn.grid.cols))


@contextlib.contextmanager
def _inputs(block: nn.Module, modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """What the attention of a block is given, in this thread; autograd's graph begins where the block does."""
    found, thread = [], threading.get_ident()

    def begin(_, args: tuple) -> tuple:
        return (args[0].detach().requires_grad_(), *args[1:]) if threading.get_ident() == thread else args

    def keep(tensor: Tensor) -> None:
        if threading.get_ident() == thread:
            found.append(tensor)

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(block.register_forward_pre_hook(begin))
        for module in modules:
            if hasattr(module, "in_norm"):
                # A ParallelScalingBlock is its own attention, which does not read what the block is given.
                hook = module.in_norm.register_forward_hook(lambda _, args, output: keep(output))
            else:
                hook = module.register_forward_pre_hook(lambda _, args: keep(args[0]))
            hooks.enter_context(hook)
        yield found
