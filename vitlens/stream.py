"""Exact contributions of each head, MLP and patch to a logit, and the logits of tokens after any layer.

In a pre-norm Vision Transformer every head and every MLP adds a vector to the tokens, and nothing else changes them
before the final norm. With fixed multipliers behind them (deviations in norms, gates on the outputs of attention,
weights of an attention pool) a logit is the sum of their contributions:

    >>> added = vitlens.stream.contributions(model, images, "tabby")
    >>> added.heads.shape  # with the MLPs, the embedding and the biases they sum to the logits:
    torch.Size([2, 12, 3])
    >>> torch.allclose(added.parts.sum(1), added.logits, atol=1e-4)
    True

Each function takes `model`, `images`, `target`, `against` and `names` as in `vitlens.attribution`, and runs the model
once in eval mode, without autocast or TF32. Autograd follows the residual stream alone. Every sum is checked against
the logit. `lens` reads every token after any layer.

Raises UnsupportedModelError for models that a capture refuses, for blocks that normalize their additions or that
vitlens does not support, and if the parts do not sum to the logit. Raises ValueError as `vitlens.attribution` does.

Shapes: B batch, L layers, H heads, T tokens = R prefix + P patches, D width.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vitlens.attribution.balanced import detach, leaf, linear_forward, product, require_sum
from vitlens.attribution.maps import (
    Hook,
    attention_times_gradient,
    explanation_mode,
    prepare_inputs,
    require_layers,
    require_own_head,
    run_with_capture,
)
from vitlens.attribution.target import Target, of_features, resolve_target
from vitlens.names import unknown_name
from vitlens.recorder.layer import layer_number
from vitlens.recorder.record import Attention
from vitlens.recorder.shapes import repr_with_shapes
from vitlens.recorder.supported import (
    MLPS,
    NORMS,
    UnsupportedModelError,
    family,
    model_name,
    transformer,
    unwrap,
)
from vitlens.tokens import features

__all__ = [
    "Contributions",
    "contributions",
    "contributions_by_token",
    "direct_by_head",
    "lens",
    "read_each",
    "read_out",
]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)


@dataclass(frozen=True)
class Contributions:
    """Additions of each part of a model to the logit of each image's class, or to the difference of two.

    logits: (B,) of the model. embedding: (B,) of the tokens that enter the first layer. heads: (B, L, H). mlps: (B, L).
    pool: (B,) of the MLP of an attention pool, 0 without a pool. biases: (B,) of all biases behind the heads: those of
    the outputs of attention, of the final norm and of the head. parts: (B, parts) all of these, in the order of
    `names`. They sum to the logits.

    >>> vitlens.stream.contributions(model, images).names[:3]
    ['embedding', 'layer 0 head 0', 'layer 0 head 1']
    """

    logits: Tensor
    embedding: Tensor
    heads: Tensor
    mlps: Tensor
    pool: Tensor
    biases: Tensor

    __repr__ = repr_with_shapes

    @property
    def parts(self) -> Tensor:
        layers = torch.cat([self.heads, self.mlps[..., None]], -1)
        parts = [
            self.embedding[:, None],
            layers.flatten(1),
            self.pool[:, None],
            self.biases[:, None],
        ]
        return torch.cat(parts, 1)

    @property
    def names(self) -> list[str]:
        layers, heads = self.heads.shape[1:]
        names = ["embedding"]
        for layer in range(layers):
            names += [f"layer {layer} head {head}" for head in range(heads)]
            names.append(f"layer {layer} MLP")
        return [*names, "MLP of the pool", "biases"]


def contributions(
    model: nn.Module, images: Tensor, target=None, against=None, *, names=None
) -> Contributions:
    """The `Contributions` of every part to the logit of the target, which is their sum.

    Only the direct path of a head to the logit counts as its contribution. Effects through later layers are attributed
    to those layers. With `against`, the contributions are to the difference of the two logits. The weights of an
    attention pool are held fixed, and its MLP is one more part. Source: Elhage et al. 2021, "A Mathematical Framework
    for Transformer Circuits", and for ViTs Gandelsman, Efros and Steinhardt 2024.

    >>> vitlens.stream.contributions(model, images, "Egyptian cat", "tabby").heads.shape
    torch.Size([2, 12, 3])

    model, images, target, against, names: as in `help(vitlens.attribution)`.
    """
    added, _, _ = _contributions_and_capture(model, images, target, against, names)
    return added


def direct_by_head(
    model: nn.Module, images: Tensor, target=None, against=None, *, names=None
) -> Tensor:
    """(B, L, H, rows, cols) contribution of each patch, through each head of each layer, to the logit.

    For patch j it is Σ_i A_ij·(g_i·v_j) over the tokens i of the read-out, with g the gradient of the logit by the
    head's output along the residual stream. For a class token this is one row of attention per layer. The sum over
    patches and prefix tokens is the contribution of the head.

    >>> vitlens.stream.direct_by_head(model, images, "Egyptian cat").shape
    torch.Size([2, 12, 3, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`. `contributions_by_token`
    returns prefix tokens, too.
    """
    _, written = contributions_by_token(model, images, target, against, names=names)
    grid = family(transformer(unwrap(model))).grid(images.shape[-2:])
    return grid.image_map(written)


def contributions_by_token(
    model: nn.Module, images: Tensor, target=None, against=None, *, names=None
) -> tuple[Contributions, Tensor]:
    """The results of `contributions` and of `direct_by_head` with all tokens, (B, L, H, T), from one forward.

    >>> added, written = vitlens.stream.contributions_by_token(model, images, "Egyptian cat")
    >>> torch.allclose(written.sum(-1), added.heads, atol=1e-4)
    True

    model, images, target, against, names: as in `help(vitlens.attribution)`.
    """
    added, attn, target = _contributions_and_capture(model, images, target, against, names)
    require_layers(model, target, attn.has_gradient())
    layers = []
    with torch.no_grad():
        for layer in attn:
            written = torch.zeros_like(layer.k[..., 0], dtype=layer.wide)
            reached = layer.gradient.any(-1).any(1)
            for _, from_tokens in attention_times_gradient(layer, reached):
                written += from_tokens.sum(2)
            layers.append(written)
    return added, torch.stack(layers, 1)


def direct_map(
    model: nn.Module, images: Tensor, target=None, *, against=None, names=None
) -> Tensor:
    """(B, rows, cols) direct contribution of each patch to the logit, through all heads of all layers.

    The sum of `vitlens.stream.direct_by_head` over layers and heads. Effects through later layers are left out.

    >>> vitlens.attribution.direct(model, images, "Egyptian cat").shape
    torch.Size([2, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`.
    """
    return direct_by_head(model, images, target, against, names=names).sum((1, 2))


def _contributions_and_capture(
    model: nn.Module, images: Tensor, target, against, names
) -> tuple[Contributions, Attention, Target]:
    """The contributions, a capture with the gradients along the residual stream, and the target."""
    model, images, target, against = prepare_inputs(model, images, target, against)
    inner = transformer(model)
    require_pre_norm(inner)
    leaves = defaultdict(list)
    hooks = list(_hooks_on_stream(inner, leaves))
    with linear_forward(model, images, hooks) as zeros:
        attn, output = run_with_capture(model, images, of_features(target), gradients=True)
        attn.cuts.clear()  # the hooks detach the inputs of the layers
        target = resolve_target(model, output, target, against, names)
        tensors = [tensor for group in leaves.values() for tensor in group]
        score = target.score(output).sum()
        *gradients, by_zeros = attn.differentiate(score, also=[*tensors, zeros])
    with torch.no_grad():
        sums = _sum_by_part(leaves, gradients)
        heads = [product(layer.output, layer.gradient).sum(-1) for layer in attn]
        mlps = [sums[number] for number in range(len(attn))]
        added = Contributions(
            logits=target.score(output.detach()),
            embedding=sums["embedding"],
            heads=torch.stack(heads, 1),
            mlps=torch.stack(mlps, 1),
            pool=sums.get("pool", torch.zeros_like(by_zeros)),
            biases=by_zeros,
        )
    require_sum(model, added.parts, added.logits)
    return added, attn, target


Leaves = defaultdict[int | str, list[Tensor]]
"""Additions to the residual stream, as leaves of autograd's graph, by part: "embedding", the number of a layer for its
MLPs, and "pool" for that of an attention pool."""


def _hooks_on_stream(model: nn.Module, leaves: Leaves) -> Iterator[Hook]:
    """Hooks that detach the inputs of norms before heads and MLPs, so that only the residual stream has a gradient.

    They turn the input of the first block and the outputs of MLPs into leaves, which are appended to `leaves`.
    """

    def begin(_, args: tuple) -> tuple:
        return (leaf(args[0], leaves["embedding"]), *args[1:])

    def detach_input(_, args: tuple) -> Tensor:
        return detach(args[0])

    def leaf_of(part: int | str, _, args: tuple, output: Tensor) -> Tensor:
        return leaf(output, leaves[part])

    about = family(model)
    yield about.blocks[0].register_forward_pre_hook, begin
    parts = dict(enumerate(about.blocks))
    if about.pool:
        parts["pool"] = about.pool.module
    for part, block in parts.items():
        for name, module in block.named_modules():
            norm_of_pool = part == "pool" and name in ("norm", "layernorm")
            if norm_of_pool or re.fullmatch(NORMS, name):
                yield module.register_forward_pre_hook, detach_input
            elif re.fullmatch(MLPS, name):
                yield module.register_forward_hook, partial(leaf_of, part)


def _sum_by_part(leaves: Leaves, gradients: list[Tensor]) -> dict[int | str, Tensor]:
    """(B,) gradient × addition, summed over the additions of each part. gradients: in the order of the leaves."""
    gradients = iter(gradients)
    sums = {}
    for part, tensors in leaves.items():
        products = [product(tensor, next(gradients)) for tensor in tensors]
        sums[part] = sum(by_token.sum(1) for by_token in products)
    return sums


def require_pre_norm(model: nn.Module) -> None:
    """Raise UnsupportedModelError unless every block adds the outputs of attention and MLP to the tokens."""
    reason = family(model).stream_problem
    if reason:
        raise UnsupportedModelError(
            f"vitlens cannot take the logits of {model_name(model)} apart: {reason}."
        )


def lens(model: nn.Module, images: Tensor, layer: int = -1) -> tuple[Tensor, Tensor]:
    """The logits of a model that ends after a layer (nostalgebraist 2020, "interpreting GPT: the logit lens").

    >>> whole, by_token = vitlens.stream.lens(model, images, layer=9)
    >>> whole.shape, by_token.shape
    (torch.Size([2, 1000]), torch.Size([2, 197, 1000]))

    The tokens after the layer pass the model's final norm, pooling and head. The first result is the (B, classes)
    logits, after the last layer those of the model, bit for bit. The second is the (B, T, classes) logits of every
    token alone. Early layers are not trained for this norm and head, so a lens may miss information in them.

    layer: its number, −1 for the last. Raises IndexError for a layer that does not exist, and ValueError for a module
    with another head behind its Vision Transformer.
    """
    model, images, _, _ = prepare_inputs(model, images)
    inner = transformer(model)
    number = layer_number(len(family(inner).blocks), layer)
    with explanation_mode(model, gradients=False):
        layers, output = features(model, images)
        require_own_head(model, family(inner).head(layers[-1]), output)
        return read_out(inner, layers[number])


def read_out(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits that `lens` returns, from tokens (B, T, D) such as those of a layer of `vitlens.tokens.features`.

    >>> torch.equal(vitlens.stream.read_out(model, vitlens.tokens.features(model, images)[0][-1])[0], logits)
    True
    """
    return family(model).head(tokens), read_each(model, tokens)


def read_each(model: nn.Module, tokens: Tensor) -> Tensor:
    """(B, T, classes) logits of tokens (B, T, D) after a layer, each alone at all positions of a one-patch sequence.

    >>> vitlens.stream.read_each(model, torch.zeros(2, 197, 192)).shape
    torch.Size([2, 197, 1000])
    """
    about = family(model)
    length = len(about.prefix) + 1
    alone = tokens.flatten(0, 1)[:, None].expand(-1, length, -1)
    return about.head(alone).unflatten(0, tokens.shape[:2])
