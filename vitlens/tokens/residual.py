"""The residual stream, token by token: what a model has after every layer.

Shapes: B batch, L layers, T tokens = R prefix + P patches, D width.
"""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import Tensor, nn

from vitlens.recorder.running import cast, evaluating, require_images, run, taking
from vitlens.recorder.supported import UnsupportedModelError, attention_modules, family, unwrap


def features(model: nn.Module, images: Tensor) -> tuple[list[Tensor], Tensor]:
    """The tokens after every layer, one (B, T, D) each, and the logits (B, classes), from one forward.

    They are the residual stream as it leaves the layer, before any final norm, prefix tokens first. The model runs in
    eval mode and is left in the mode it was in; images are given to it in its precision, on its device. Works inside
    `capture(model)` too. Raises UnsupportedModelError for models that a capture refuses, and ValueError
    for images that the model does not take.
    """
    model = unwrap(model)
    attention_modules(model)
    require_images(images, model)
    expected = family(model).grid(tuple(images.shape[-2:])).tokens
    with taking(model), evaluating(model):
        layers, output = _after_blocks(model, cast(model, images))
    if layers[0].shape[1] != expected:
        raise UnsupportedModelError(
            f"Expected {expected} tokens after each layer of {type(model).__name__}, got {layers[0].shape[1]}: "
            "it leaves patches out or merges them."
        )
    return layers, output


def _after_blocks(model: nn.Module, images: Tensor) -> tuple[list[Tensor], Tensor]:
    layers, thread = [], threading.get_ident()

    def keep(_, args: tuple, output: Tensor) -> None:
        if threading.get_ident() == thread:
            layers.append(output)

    with contextlib.ExitStack() as hooks:
        for block in family(model).blocks:
            hooks.callback(block.register_forward_hook(keep).remove)
        return layers, run(model, images)


def similarity(tokens: Tensor, query: Tensor) -> Tensor:
    """(…, T) cosine similarity of every token with what a query reads: 1 the same direction, 0 unrelated.

    tokens: (…, T, D). query: (T,) or (…, T), a probability row: one-hot for one token, `grid.readout` for the read-out.
    """
    read = (query.to(tokens)[..., None, :] @ tokens).squeeze(-2)
    return torch.cosine_similarity(tokens, read[..., None, :], dim=-1)


def norms(tokens: Tensor) -> Tensor:
    """(…, T) Euclidean norms of tokens (…, T, D), in float32 or wider.

    Some large models store global information in a few background patches, whose norms are several times as large
    (Darcet et al. 2024, "Vision Transformers Need Registers")."""
    return tokens.norm(dim=-1, dtype=torch.promote_types(tokens.dtype, torch.float32))


def median(values: Tensor) -> Tensor:
    """(…) medians of values (…, P); for an even P the mean of the two in the middle, where PyTorch takes the lower."""
    return (values.median(-1).values - (-values).median(-1).values) / 2
