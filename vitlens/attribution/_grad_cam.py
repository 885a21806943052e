"""Grad-CAM on tokens: the channels of one layer, weighed by what the class gains from each."""

from __future__ import annotations

import torch
from torch import Tensor

from vitlens.attribution.forward import Inputs
from vitlens.recorder.arguments import layer_number


def grad_cam(inputs: Inputs, *, layer: int = -1) -> Tensor:
    """(B, rows, cols) Grad-CAM (Selvaraju et al. 2017, eq. 1 and 2) of the tokens that one layer's attention is given.

    The activation a_pc of patch p is what the attention reads: the output of the block's `norm1`, where
    pytorch-grad-cam puts its hook on a ViT, or the block's input where the block normalizes afterwards. The map is
    (Σ_c w_c·a_pc)⁺ with w_c the mean over the patches of ∂y/∂a_pc and y the target's logit; prefix tokens are dropped,
    nothing is rescaled. It is not taken after the last attention, because the class token reads no patch there, so
    every patch's gradient is zero. Blocks with two attentions side by side have the channels of both. Where attention
    and MLP share one norm, its output is the activation, read by both; where the block normalizes afterwards, its input
    also goes on past the attention. ∂y/∂a_pc counts both ways.

    layer: its number, −1 for the last.
    """
    if layer_number(inputs.layers, layer) != inputs.layer:
        raise ValueError(f"The inputs of layer {inputs.layer} were recorded, but Grad-CAM was asked of layer {layer}.")
    wide = torch.promote_types(inputs.activation.dtype, torch.float32)
    activation, gradient = (part[:, inputs.grid.prefix :].to(wide) for part in (inputs.activation, inputs.gradient))
    values = (activation * gradient.mean(1, keepdim=True)).sum(-1).clamp_(min=0)
    return values.unflatten(-1, (inputs.grid.rows, inputs.grid.cols))
