"""Facts about a model from its adapter, its configuration and its modules."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported.lookup import family, is_known, library_file
from vitlens.recorder.supported.names import short_name


def title(model: nn.Module) -> str:
    """Name of a model for figures: `short_name`, with the sizes that differ from those in it, as in
    "vit_tiny_patch16_224, patch 8".

    >>> vitlens.models.title(model)
    'vit_tiny_patch16_224'
    """
    model = family(model).model
    name, embed = short_name(model), getattr(model, "patch_embed", None)
    sizes = ((r"patch(\d+)", "patch_size", "patch {}"), (r"_(\d{2,4})$", "img_size", "{} px"))
    parts = [name]
    for pattern, attribute, words in sizes:
        named, built = re.search(pattern, name.split(".")[0]), getattr(embed, attribute, None)
        if named and built and tuple(built) != (int(named[1]),) * 2:
            parts.append(words.format(" × ".join(map(str, dict.fromkeys(built)))))
    return ", ".join(parts)


def label_names(model: nn.Module) -> list[str] | None:
    """Names of the classes, or None. transformers numbers classes without names: LABEL_0, LABEL_1 …"""
    names = getattr(model, "label_names", None)
    numbered = getattr(getattr(model, "config", None), "id2label", None) or {}
    if names is not None or not is_known(model) or set(numbered) != set(range(len(numbered))):
        return names
    names = [numbered[number] for number in range(len(numbered))]
    return None if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


def states_preprocessing(model: nn.Module) -> bool:
    """False if the preprocessing is a guess: for timm's and unknown models without a `pretrained_cfg`."""
    return hasattr(model, "pretrained_cfg") or type(family(model)) is not library_file("timm").Timm


def token_grid(model: nn.Module, image: tuple[int, int]) -> TokenGrid:
    """The `TokenGrid` of a supported model for an input of (height, width) pixels."""
    return family(model).grid(image)


def read_tokens(grid: TokenGrid, prefix: Sequence[str]) -> tuple[list[int], list[str]]:
    """Positions of the tokens whose mean the head reads, and their names: prefix tokens, or one name for all others."""
    read = grid.readout.nonzero().flatten().tolist()
    if read[-1] < grid.prefix:
        return read, [prefix[position] for position in read]
    return read, ["mean of the patches" if read[0] >= grid.prefix else "mean of all tokens"]


def head_count(attention: nn.Module) -> int:
    """Number of heads of an attention module or pool."""
    for module in attention.modules():
        if count := getattr(module, "num_heads", None) or getattr(
            module, "num_attention_heads", None
        ):
            return count
    raise ValueError(f"{type(attention).__name__} has no number of heads (num_heads).")


def has_gate(modules: list[list[tuple[str, nn.Module]]]) -> bool:
    """True if attention outputs pass a learned gate, as in Eva and NaFlex, which the maps leave out."""
    return any(
        getattr(module, "gate", None) is not None for layer in modules for _, module in layer
    )


def input_channels(model: nn.Module) -> int:
    """Input channels of the first convolution, or of the preprocessing where patches are embedded linearly."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return family(model).preprocessing["input_size"][0] if first is None else first.in_channels
