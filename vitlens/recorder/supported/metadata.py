"""Facts about a model from its adapter, its configuration and its modules."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported.card import card_of
from vitlens.recorder.supported.lookup import family, is_known
from vitlens.recorder.supported.names import short_name


def title(model: nn.Module) -> str:
    """Name of a model for figures: the title in its folder's config.json, or `short_name`, with the sizes that differ
    from those in it, as in "vit_tiny_patch16_224, patch 8".

    >>> vitlens.models.title(model)
    'DeiT-Tiny, ImageNet-1k'
    """
    model = family(model).model
    card = card_of(model)
    if card is not None and card.title:
        return card.title
    name = short_name(model)
    embed = getattr(model, "patch_embed", None)
    patch = _other_size(name, r"patch(\d+)", getattr(embed, "patch_size", None))
    image = _other_size(name, r"_(\d{2,4})$", getattr(embed, "img_size", None))
    parts = [name]
    if patch:
        parts.append(f"patch {patch}")
    if image:
        parts.append(f"{image} px")
    return ", ".join(parts)


def _other_size(name: str, pattern: str, size: Sequence[int] | None) -> str | None:
    """A size, as in "8" or "8 × 16", if the name contains another one in the place of the pattern."""
    architecture = name.split(".")[0]
    named = re.search(pattern, architecture)
    if not named or not size:
        return None
    side = int(named[1])
    if tuple(size) == (side, side):
        return None
    return " × ".join(str(length) for length in dict.fromkeys(size))


def label_names(model: nn.Module) -> list[str] | None:
    """Names of the classes, or None. transformers numbers classes without names: LABEL_0, LABEL_1 …"""
    card = card_of(model)
    names = getattr(model, "label_names", None)
    if names is None and card is not None:
        names = card.label_names
    if names is not None or not is_known(model):
        return None if _are_placeholders(names) else names
    config = getattr(model, "config", None)
    numbered = getattr(config, "id2label", None) or {}
    if set(numbered) != set(range(len(numbered))):
        return None
    names = [numbered[number] for number in range(len(numbered))]
    return None if not names or _are_placeholders(names) else names


def _are_placeholders(names: list[str] | None) -> bool:
    """True for LABEL_0, LABEL_1 …"""
    return bool(names) and all(re.fullmatch(r"LABEL_\d+", str(name)) for name in names)


def states_preprocessing(model: nn.Module) -> bool:
    """False if the preprocessing is a guess: for timm's and unknown models without a `pretrained_cfg` or a card."""
    if hasattr(model, "pretrained_cfg") or card_of(model) is not None:
        return True
    return not family(model).guesses_preprocessing


def token_grid(model: nn.Module, image: tuple[int, int]) -> TokenGrid:
    """The `TokenGrid` of a supported model for an input of (height, width) pixels."""
    return family(model).grid(image)


def read_tokens(grid: TokenGrid, prefix: Sequence[str]) -> tuple[list[int], list[str]]:
    """Positions of the tokens whose mean the head reads, and their names: prefix tokens, or one name for all others."""
    read = grid.readout.nonzero().flatten().tolist()
    if read[-1] < grid.prefix:
        return read, [prefix[position] for position in read]
    name = "mean of the patches" if read[0] >= grid.prefix else "mean of all tokens"
    return read, [name]


def head_count(attention: nn.Module) -> int:
    """Number of heads of an attention module or pool."""
    for module in attention.modules():
        for attribute in ("num_heads", "num_attention_heads"):
            count = getattr(module, attribute, None)
            if count:
                return count
    raise ValueError(f"{type(attention).__name__} has no number of heads (num_heads).")


def has_gate(modules: list[list[tuple[str, nn.Module]]]) -> bool:
    """True if attention outputs pass a learned gate, as in Eva and NaFlex, which the maps leave out."""
    for layer in modules:
        for _, module in layer:
            if getattr(module, "gate", None) is not None:
                return True
    return False


def input_channels(model: nn.Module) -> int:
    """Input channels of the first convolution, or of the preprocessing where patches are embedded linearly."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels
    channels, _, _ = family(model).preprocessing["input_size"]
    return channels
