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
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitlens.attribution.balanced import held, held_fixed, leaf, product, require_sum
from vitlens.attribution.maps import (
    attention_times_gradient,
    captured,
    checked,
    explaining,
    require_layers,
    require_own_head,
)
from vitlens.attribution.target import Target, of_features, resolved
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
        layers = torch.cat([self.heads, self.mlps[..., None]], -1).flatten(1)
        return torch.cat(
            [self.embedding[:, None], layers, self.pool[:, None], self.biases[:, None]], 1
        )

    @property
    def names(self) -> list[str]:
        layers, heads = self.heads.shape[1:]
        names = [
            [*(f"layer {i} head {j}" for j in range(heads)), f"layer {i} MLP"]
            for i in range(layers)
        ]
        return ["embedding", *sum(names, []), "MLP of the pool", "biases"]


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
    return _read_directly(model, images, target, against, names)[0]


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
    return family(transformer(unwrap(model))).grid(images.shape[-2:]).image_map(written)


def contributions_by_token(
    model: nn.Module, images: Tensor, target=None, against=None, *, names=None
) -> tuple[Contributions, Tensor]:
    """The results of `contributions` and of `direct_by_head` with all tokens, (B, L, H, T), from one forward.

    >>> added, written = vitlens.stream.contributions_by_token(model, images, "Egyptian cat")
    >>> torch.allclose(written.sum(-1), added.heads, atol=1e-4)
    True

    model, images, target, against, names: as in `help(vitlens.attribution)`.
    """
    added, attn, chosen = _read_directly(model, images, target, against, names)
    require_layers(model, chosen, attn.has_gradient())
    layers = []
    with torch.no_grad():
        for layer in attn:
            written = torch.zeros_like(layer.k[..., 0], dtype=layer.wide)
            for _, read in attention_times_gradient(layer, layer.gradient.any(-1).any(1)):
                written += read.sum(2)
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


def _read_directly(
    model: nn.Module, images: Tensor, target, against, names
) -> tuple[Contributions, Attention, Target]:
    """The contributions, a capture with the gradients along the residual stream, and the target."""
    model, images, target, against = checked(model, images, target, against)
    inner, leaves = transformer(model), defaultdict(list)
    require_pre_norm(inner)
    about = family(inner)
    blocks, pool = about.blocks, about.pool.module if about.pool else nn.Identity()
    hooks = [
        (
            blocks[0].register_forward_pre_hook,
            lambda _, args: (leaf(args[0], leaves["embedding"]), *args[1:]),
        )
    ]
    for where, block in [*enumerate(blocks), ("pool", pool)]:
        for name, module in block.named_modules():
            if re.fullmatch(NORMS, name) or (where == "pool" and name in ("norm", "layernorm")):
                hooks.append((module.register_forward_pre_hook, lambda _, args: held(args[0])))
            elif re.fullmatch(MLPS, name):
                hooks.append(
                    (
                        module.register_forward_hook,
                        lambda _, args, out, at=where: leaf(out, leaves[at]),
                    )
                )
    with held_fixed(model, images, hooks) as zeros:
        attn, output = captured(model, images, of_features(target), gradients=True)
        attn.cuts.clear()  # the hooks detach the inputs of the layers
        chosen = resolved(model, output, target, against, names)
        also = [tensor for group in leaves.values() for tensor in group]
        *gradients, by_zeros = attn.differentiate(chosen.score(output).sum(), also=[*also, zeros])
    with torch.no_grad():
        written = {"pool": torch.zeros_like(by_zeros)}
        for where, group in leaves.items():
            written[where] = sum(product(tensor, gradients.pop(0)).sum(1) for tensor in group)
        added = Contributions(
            chosen.score(output.detach()),
            written["embedding"],
            torch.stack([product(layer.output, layer.gradient).sum(-1) for layer in attn], 1),
            torch.stack([written[number] for number in range(len(attn))], 1),
            written["pool"],
            by_zeros,
        )
    require_sum(model, added.parts, added.logits)
    return added, attn, chosen


def require_pre_norm(model: nn.Module) -> None:
    """Raise UnsupportedModelError unless every block adds the outputs of attention and MLP to the tokens."""
    if reason := family(model).stream_problem:
        raise UnsupportedModelError(
            f"vitlens cannot take the logits of {model_name(model)} apart: {reason}."
        )


def lens(model: nn.Module, images: Tensor, layer: int = -1) -> tuple[Tensor, Tensor]:
    """The logits of a model that ends after a layer (nostalgebraist 2020, "interpreting GPT: the logit lens").

    >>> whole, by_token = vitlens.stream.lens(model, images, layer=9)
    >>> whole.shape, by_token.shape
    (torch.Size([2, 200]), torch.Size([2, 197, 200]))

    The tokens after the layer pass the model's final norm, pooling and head. The first result is the (B, classes)
    logits, after the last layer those of the model, bit for bit. The second is the (B, T, classes) logits of every
    token alone. Early layers are not trained for this norm and head, so a lens may miss information in them.

    layer: its number, −1 for the last. Raises IndexError for a layer that does not exist, and ValueError for a module
    with another head behind its Vision Transformer.
    """
    model, images, *_ = checked(model, images)
    inner = transformer(model)
    number = layer_number(len(family(inner).blocks), layer)
    with explaining(model, gradients=False):
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
    torch.Size([2, 197, 200])
    """
    alone = tokens.flatten(0, 1)[:, None].expand(-1, len(family(model).prefix) + 1, -1)
    return family(model).head(alone).unflatten(0, tokens.shape[:2])
