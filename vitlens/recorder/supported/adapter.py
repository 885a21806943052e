"""Base classes of the adapters: everything that vitlens must know of a model.

Shapes: B batch, T tokens, D width, C channels, sizes (height, width).
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.supported.names import qualified_name
from vitlens.recorder.supported.refusal import UnsupportedModelError, refuse, require_size

NORMS = r"norm[12]|ln_[12]|layer_norm[12]|layernorm_(before|after)|in_norm|(attns|ffns)\.\d+\.norm"
"""Pattern of names: the modules of a block that normalize the input of attention and MLP."""

MLPS = r"mlp|mlp_drop|ffns\.\d+\.mlp"
"""Pattern of names: the MLPs of a block, whose outputs are added to the residual stream."""


@dataclass(frozen=True)
class Pool:
    """Attention pool after the last layer.

    module: the attention with the norm and MLP that follow it. queries: the queries whose mean attention is the
    read-out, or None without a single row. norm: the norm before a pool without parameters.
    """

    module: nn.Module
    queries: slice | None
    norm: nn.Module | None = None


class Family(ABC):
    """Adapter of one model. Shapes: B batch, T tokens, D width, C channels, sizes (height, width)."""

    def __init__(self, model: nn.Module):
        self.model = model

    @abstractmethod
    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        """Per layer the (name, module) of its attention, in the order of the calls. Raises UnsupportedModelError."""

    @property
    def capture_problem(self) -> str | None:
        """Reason why the attention cannot be captured in the model's mode and settings, or None. `require_capturable`
        checks dropout."""
        return None

    def forward_checks(self) -> list[RemovableHandle]:
        """Hooks that raise UnsupportedModelError in a forward whose attention cannot be shown."""
        return []

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The layers, from tokens (B, T, D) to tokens (B, T, D)."""

    @contextlib.contextmanager
    def calling_blocks(self) -> Iterator[None]:
        """Raise UnsupportedModelError at the end of this block if blocks were not called, so that hooks saw nothing."""
        idle = dict(enumerate(self.blocks))

        def note(number: int, *_) -> None:
            idle.pop(number, None)

        hooks = []
        for number, block in idle.items():
            hooks.append((block.register_forward_pre_hook, partial(note, number)))
        with thread_hooks(hooks):
            yield
        if idle:
            kind = type(next(iter(idle.values()))).__name__
            numbers = ", ".join(map(str, idle))
            raise UnsupportedModelError(
                f"The tokens between the blocks of {type(self.model).__name__} cannot be read: of its "
                f"{len(self.blocks)} blocks, {numbers} ({kind}) never ran as modules. Give each a forward that runs "
                "its parts, and call it, as ListBlock in docs/recipes.md does."
            )

    @property
    def stream_problem(self) -> str | None:
        """Reason why the outputs of attention and MLPs are inseparable (blocks that are not pre-norm), or None."""
        for number, block in enumerate(self.blocks):
            if not (_has_part(block, NORMS) and _has_part(block, MLPS)):
                kind = type(block).__name__
                return f"layer {number} ({kind}) has other parts than a pre-norm block"
        return None

    @property
    def pool(self) -> Pool | None:
        """The attention pool, or None."""
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
        """The token grid of an image of this size, with the read-out. Raises ValueError for a size that the model does
        not take. The read-out of an attention pool depends on the image: None here, and set by a capture."""

    @property
    def built_size(self) -> tuple[int, int] | None:
        """Image size that the model was built for, or None for any."""
        return None

    @property
    @abstractmethod
    def preprocessing(self) -> dict:
        """`input_size` (C, H, W), `mean`, `std`, `interpolation`, `crop_pct` and `crop_mode`, as
        `timm.data.create_transform` takes them."""

    guesses_preprocessing = False
    """True if `preprocessing` is a guess for a model without a `pretrained_cfg`."""

    declares_preprocessing = False
    """True if `preprocessing` is declared for the class, also for a model without a `pretrained_cfg`."""

    @property
    @abstractmethod
    def classes(self) -> int | None:
        """Number of classes, 0 for a model whose output is features, or None if unknown."""

    def run(self, images: Tensor) -> Tensor:
        """(B, classes) logits, or (B, D) features of a model without classes, without other outputs."""
        return self.model(images)

    def pooled_features(self, images: Tensor) -> Tensor:
        """(B, D) input of the classifier, or the output of a model without one."""
        if self.classes == 0:
            return self.run(images)
        recorded = []

        def record(module: nn.Module, args: tuple, tokens: Tensor) -> None:
            recorded.append(tokens)

        hooks = [(self.blocks[-1].register_forward_hook, record)]
        with self.calling_blocks(), thread_hooks(hooks):
            self.run(images)
        return self.head(recorded[-1], pre_logits=True)

    @abstractmethod
    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Output of `run` for these tokens (B, T, D) of the last layer.

        pre_logits: return the (B, D) input of the classifier instead, or the same without a classifier.
        """

    @abstractmethod
    def positions(self) -> Tensor | None:
        """(rows, cols, D) learned position embeddings of the patches, or None."""


class PlainPatches(Family):
    """Adapter of a model whose patches begin at the top left. Margins at the bottom and right belong to no patch.

    paths: names of the list of blocks in the model, of the attention in a block, and of the embedding in the model.
    attends: the beginning of the full name of the attention's class. patch: (height, width) in pixels. only: True for a
    model that takes only the image size it was built for. read: the tokens whose mean the head reads, or None. table:
    learned position embeddings (…, T, D), those of the patches last, or None. usual: preprocessing of most published
    weights, the default for a model that declares none.
    """

    paths: tuple[str, str, str]
    attends = "torch.nn.modules.activation.MultiheadAttention"
    patch: tuple[int, int]
    built_size: tuple[int, int] = (0, 0)
    prefix: list[str] = ["class token"]
    only = True
    read: slice | None = slice(0, 1)
    table: Tensor | None = None
    usual: dict

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        blocks_path, attention_path, _ = self.paths
        layers = []
        for number, block in enumerate(self.blocks):
            name = f"{blocks_path}.{number}.{attention_path}"
            module = dict(block.named_modules()).get(attention_path)
            kind = qualified_name(module)
            if module is None or not kind.startswith(self.attends):
                raise refuse(self.model, f"{name} is {kind}, which vitlens does not support")
            layers.append([(name, module)])
        return layers

    @property
    def blocks(self) -> Sequence[nn.Module]:
        path, _, _ = self.paths
        return self.model.get_submodule(path)

    @property
    def embedding(self) -> nn.Module:
        _, _, path = self.paths
        return self.model.get_submodule(path)

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        if self.only:
            require_size(self.model, image, only=self.built_size)
        rows, cols = self._grid_size(image)
        grid = TokenGrid(rows, cols, self.patch, len(self.prefix), tuple(image))
        if self.read is None:
            return grid
        return replace(grid, readout=grid.mean_readout(self.read))

    def _grid_size(self, image: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of complete patches in an image."""
        return image[0] // self.patch[0], image[1] // self.patch[1]

    @property
    def preprocessing(self) -> dict:
        """From `pretrained_cfg`, else `usual`."""
        defaults = {
            "input_size": (3, *self.built_size),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
        }
        config = defaults | self.usual
        own = getattr(self.model, "pretrained_cfg", None) or {}
        for key in config:
            config[key] = own.get(key, config[key])
        return config

    def positions(self) -> Tensor | None:
        if self.table is None:
            return None
        rows, cols = self._grid_size(self.built_size)
        patches = self.table.detach().flatten(0, -2)[-rows * cols :]
        return patches.unflatten(0, (rows, cols))


def _has_part(block: nn.Module, pattern: str) -> bool:
    """True if a module of the block has a name that matches the pattern."""
    return any(re.fullmatch(pattern, name) for name, _ in block.named_modules())


def pair(sides: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) from one side or both."""
    return (sides, sides) if isinstance(sides, int) else tuple(sides)
