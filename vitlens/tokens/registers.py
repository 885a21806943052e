"""A register at test time: one more token that takes over what outlier patches hold, without any training.

After Jiang, Dravid, Efros and Gandelsman (2025, "Vision Transformers Don't Need Trained Registers"): a few neurons in
the MLPs make the outliers. What these neurons give is moved from the patches to a token that is appended for it.

    neurons = vitlens.tokens.register_neurons(model, images)
    other = vitlens.tokens.with_register(model, neurons)    # an ordinary timm model with one more prefix token

Shapes: B batch, L layers, T tokens = R prefix + P patches, D width.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vitlens.recorder.arguments import layer_number, require_count
from vitlens.recorder.running import evaluating
from vitlens.recorder.supported import attention_modules, model_name, qualified_name, refuse, unwrap
from vitlens.tokens.residual import features, norms
from vitlens.tokens.sinks import TIMES, outliers, ratios

VIT = "timm.models.vision_transformer.VisionTransformer"


def register_neurons(
    model: nn.Module, images: Tensor, count: int = 10, *, times: float = TIMES, layer: int | None = None
) -> dict[int, list[int]]:
    """The neurons that make the outliers, by layer: those whose mean activation at the outlier patches of all images is
    farthest above that at the other patches.

    images: (B, C, height, width), as the model wants them. count: how many neurons, over all layers. times: what an
    outlier is (`vitlens.tokens.outliers`). layer: outliers are those after it, and it is the last layer whose neurons
    are compared, −1 the last of all; by default the first after which there are at least half as many as after any.
    Raises ValueError where no patch is an outlier, which is how small models are, IndexError for a layer that does not
    exist, and UnsupportedModelError for other models than timm's plain Vision Transformer.
    """
    require_count(count=count)
    model = _plain(model)
    if layer is not None:
        layer = layer_number(len(model.blocks), layer)
    hidden: list[Tensor] = []
    with torch.no_grad(), evaluating(model), contextlib.ExitStack() as hooks:
        for block in model.blocks:
            hooks.enter_context(block.mlp.fc2.register_forward_pre_hook(lambda _, args: hidden.append(args[0])))
        layers, _ = features(model, images)
    prefix = model.num_prefix_tokens
    lengths = torch.stack([norms(tokens)[:, prefix:] for tokens in layers])
    found = outliers(lengths, times)
    shares = found.flatten(1).float().mean(1)
    if layer is None:
        layer = int((shares >= shares.max() / 2).nonzero()[0])
    where = found[layer]
    if not where.any():
        raise ValueError(
            f"No patch of these images has a norm above {times:g} times the median (the largest: "
            f"{ratios(lengths).max():.2f} times), so a register has nothing to take over from {model_name(model)}. "
            "Lower `times`, or take a larger model."
        )
    above = [each[:, prefix:][where].mean(0) - each[:, prefix:][~where].mean(0) for each in hidden[: layer + 1]]
    best = torch.cat(above).topk(min(count, sum(map(len, above)))).indices.tolist()
    neurons: dict[int, list[int]] = {}
    for number in sorted(best):
        neurons.setdefault(number // len(above[0]), []).append(number % len(above[0]))
    return neurons


def with_register(model: nn.Module, neurons: Mapping[int, Sequence[int]]) -> nn.Module:
    """A copy of a model with one more register, the last of its prefix tokens, that takes over these neurons.

    The register begins as zeros, without a position. In each MLP it gets the largest activation of each of the neurons
    over all tokens, and the other tokens get none. The copy is a timm model like any other: capture, maps and the rest
    see a prefix token more. neurons: numbers of hidden units by layer, as `register_neurons` finds them; without any,
    the copy has a register that nothing is moved to. Raises IndexError for a layer or neuron that does not exist, and
    UnsupportedModelError for other models than timm's plain Vision Transformer or a head that reads prefix tokens.
    """
    model = _plain(model)
    if model.pool_include_prefix:
        raise refuse(model, "its head reads all prefix tokens, so it would read the register too")
    for layer, numbers in neurons.items():
        if not 0 <= layer < len(model.blocks):
            raise IndexError(
                f"There is no layer {layer}: {model_name(model)} has {len(model.blocks)} of them, counted from 0."
            )
        size = model.blocks[layer].mlp.fc2.in_features
        if wrong := [number for number in numbers if not 0 <= number < size]:
            raise IndexError(
                f"There is no neuron {wrong[0]} in layer {layer} of {model_name(model)}: it has {size}, counted from 0."
            )
    other = copy.deepcopy(model)
    place = other.num_prefix_tokens  # behind the other prefix tokens
    with torch.no_grad():
        empty = other.pos_embed.new_zeros(1, 1, other.embed_dim)
        tokens = [empty] if other.reg_token is None else [other.reg_token, empty]
        other.reg_token = nn.Parameter(torch.cat(tokens, 1))
        if not other.no_embed_class:
            other.pos_embed = nn.Parameter(
                torch.cat([other.pos_embed[:, :place], empty, other.pos_embed[:, place:]], 1)
            )
    other.num_reg_tokens += 1
    other.num_prefix_tokens += 1
    for layer, numbers in neurons.items():
        if numbers:
            other.blocks[layer].mlp.fc2.register_forward_pre_hook(_Moved(list(numbers), place))
    return other


class _Moved:
    """A hook that moves the activations (B, T, hidden) of some neurons from all tokens to one token."""

    def __init__(self, neurons: list[int], place: int):
        self.neurons, self.place = neurons, place

    def __call__(self, _, args: tuple[Tensor]) -> tuple[Tensor]:
        hidden = args[0].clone()
        largest = hidden[..., self.neurons].amax(1)
        hidden[..., self.neurons] = 0
        hidden[:, self.place, self.neurons] = largest
        return (hidden,)


def _plain(model: nn.Module) -> nn.Module:
    """The model itself, a Vision Transformer of timm's with position embeddings and an MLP with two layers a block."""
    model = unwrap(model)
    attention_modules(model)
    if qualified_name(model) != VIT or model.pos_embed is None:
        raise refuse(model, "a register at test time is made for timm's plain Vision Transformers only")
    if not all(isinstance(getattr(getattr(block, "mlp", None), "fc2", None), nn.Linear) for block in model.blocks):
        raise refuse(model, "its blocks have no MLP whose neurons could be moved")
    return model
