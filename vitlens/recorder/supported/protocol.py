"""The `Family` protocol: what the rest of vitlens needs from a model of any library."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitlens.recorder.grid import TokenGrid

NORMS = r"norm[12]|ln_[12]|layer_norm[12]|layernorm_(before|after)|in_norm|(attns|ffns)\.\d+\.norm"
"""Modules of a block, by name, that normalize the tokens for attention and MLP."""
MLPS = r"mlp|mlp_drop|ffns\.\d+\.mlp"
"""Modules of a block, by name, whose output is added besides that of attention, as it is or after a linear layer."""


class UnsupportedModelError(ValueError):
    """The attention of the model, or of this forward, cannot be shown exactly. The message gives the reason."""


def qualified_name(thing: object) -> str:
    """Module and class of an object, as in 'timm.models.beit.Beit'."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def short_name(model: nn.Module) -> str:
    """Architecture of a model by its configuration, or where its weights came from (transformers), or its class."""
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    origin = getattr(getattr(model, "config", None), "name_or_path", None)
    return architecture or (Path(origin).name if isinstance(origin, str) and origin else type(model).__name__)


def model_name(model: nn.Module) -> str:
    """Architecture and class of a model, for messages."""
    name, kind = short_name(model), type(model).__name__
    return kind if name == kind else f"{name} ({kind})"


def refuse(model: nn.Module, reason: str) -> UnsupportedModelError:
    """The error to raise for a model and a reason."""
    return UnsupportedModelError(f"vitlens cannot show the attention of {model_name(model)}: {reason}.")


def require_size(model: nn.Module, image: tuple[int, int], size: tuple[int, int]) -> None:
    """Raise ValueError unless the image has the only (height, width) that the model takes."""
    if tuple(image) != tuple(size):
        got, built = (" × ".join(map(str, sides)) for sides in (image, size))
        raise ValueError(f"{model_name(model)} does not take this size: it was built for {built}, got {got}.")


def require_whole_patches(model: nn.Module, image: tuple[int, int], patch: tuple[int, int]) -> None:
    """Raise ValueError unless patches of (height, width) divide the image."""
    if any(side % length for side, length in zip(image, patch, strict=True)):
        size, patch = (" × ".join(map(str, sides)) for sides in (image, patch))
        raise ValueError(
            f"{model_name(model)} does not take this size: patches of {patch} pixels do not divide images of {size}."
        )


def multihead_layers(model: nn.Module, path: str, name: str) -> list[list[tuple[str, nn.Module]]]:
    """`Family.attention` of blocks at `path` that each hold one nn.MultiheadAttention called `name`."""
    layers = []
    for number, block in enumerate(model.get_submodule(path)):
        module = getattr(block, name, None)
        if type(module) is not nn.MultiheadAttention:
            raise refuse(model, f"layer {number} ({qualified_name(block)}) holds no attention that vitlens knows")
        layers.append([(f"{path}.{number}.{name}", module)])
    return layers


@dataclass(frozen=True)
class Pool:
    """Attention after the last layer that sums the tokens up.

    module: the attention with the norm and MLP that follow it. queries: those whose attention is averaged for the
    read-out; None where there is no single row. norm: runs right before, for a pool without parameters.
    """

    module: nn.Module
    queries: slice | None
    norm: nn.Module | None = None


class Family(ABC):
    """One model, seen as a Vision Transformer. B batch, T tokens, D width, C channels, sizes (height, width)."""

    def __init__(self, model: nn.Module):
        self.model = model

    @abstractmethod
    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        """Per layer the (name, module) of its attention, in the order of the calls. Raises UnsupportedModelError."""

    @property
    def capture_problem(self) -> str | None:
        """Reason why a capture would miss or randomize the attention in the model's present mode and settings, or None.
        Dropout is checked by `require_capturable`."""
        return None

    def forward_checks(self) -> list[RemovableHandle]:
        """Hooks that raise UnsupportedModelError in a forward that cannot be shown."""
        return []

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The layers: each takes the tokens (B, T, D) and returns them."""

    @property
    def stream_problem(self) -> str | None:
        """Reason why what attention and MLPs add to the tokens cannot be told apart (blocks that are not pre-norm), or
        None."""
        for number, block in enumerate(self.blocks):
            names = [name for name, _ in block.named_modules()]
            if not all(any(re.fullmatch(parts, name) for name in names) for parts in (NORMS, MLPS)):
                return f"layer {number} ({type(block).__name__}) has other parts than a pre-norm block"
        return None

    @property
    def pool(self) -> Pool | None:
        """The attention pool, if there is one."""
        return None

    @property
    @abstractmethod
    def embedding(self) -> nn.Module:
        """The module that turns pixels into tokens."""

    @property
    @abstractmethod
    def prefix(self) -> list[str]:
        """Names of the R prefix tokens: "class token", "distillation token", "register 1" …"""

    @abstractmethod
    def grid(self, image: tuple[int, int]) -> TokenGrid:
        """The tokens of an image of this size, and the read-out. Raises ValueError for a size that the model does not
        take.

        The read-out of an attention pool depends on the image: it is None here, and a capture fills it in.
        """

    @property
    def built_size(self) -> tuple[int, int] | None:
        """Image size that the model was built for, or None if it has no size of its own."""
        return None

    @property
    @abstractmethod
    def preprocessing(self) -> dict:
        """`input_size` (C, H, W), `mean`, `std`, `interpolation`, `crop_pct` and `crop_mode`, as
        `timm.data.create_transform` takes them."""

    @property
    @abstractmethod
    def classes(self) -> int | None:
        """Number of classes; 0 for a model whose output is features, None where it is unknown."""

    def run(self, images: Tensor) -> Tensor:
        """(B, classes) logits, or (B, D) features of a model without classes. Other outputs are left out."""
        return self.model(images)

    @abstractmethod
    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Output of `run`, had the last layer returned these tokens (B, T, D).

        pre_logits: the (B, D) input of the classifier instead; the same where there is none.
        """

    @abstractmethod
    def positions(self) -> Tensor | None:
        """(rows, cols, D) learned position embeddings of the patches, or None."""


class PlainPatches(Family):
    """A model whose patches are cut out from the top left. What is left at the bottom and at the right is not seen.

    patch: (height, width) in pixels. read: the tokens whose mean the head reads, or None. table: learned position
    embeddings (…, T, D), the patches' last, or None. usual: preprocessing of most of the published weights, taken for a
    model without its own.
    """

    patch: tuple[int, int]
    read: slice | None = slice(0, 1)
    table: Tensor | None = None
    usual: dict

    @property
    def prefix(self) -> list[str]:
        return ["class token"]

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        rows, cols = self._counts(image)
        grid = TokenGrid(rows, cols, self.patch, len(self.prefix), tuple(image))
        return grid if self.read is None else replace(grid, readout=mean_of(grid, self.read))

    def _counts(self, image: tuple[int, int]) -> list[int]:
        return [side // length for side, length in zip(image, self.patch, strict=True)]

    @property
    def preprocessing(self) -> dict:
        """From `pretrained_cfg`, else the usual one."""
        config = {"input_size": (3, *self.built_size), "interpolation": "bicubic", "crop_pct": 1.0,
                  "crop_mode": "center"} | self.usual  # fmt: skip
        own = getattr(self.model, "pretrained_cfg", None) or {}
        return config | {key: own[key] for key in config if key in own}

    def positions(self) -> Tensor | None:
        if self.table is None:
            return None
        rows, cols = self._counts(self.built_size)
        return self.table.detach().flatten(0, -2)[-rows * cols :].unflatten(0, (rows, cols))


def mean_of(grid: TokenGrid, tokens: slice) -> Tensor:
    """(T,) read-out that is the mean of some tokens."""
    row = torch.zeros(grid.tokens, dtype=torch.float32, device="cpu")
    row[tokens] = 1.0 / len(row[tokens])
    return row
