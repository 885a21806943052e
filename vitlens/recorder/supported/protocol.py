"""What vitlens must be told about a model of some library: the protocol that each file of this folder fills in.

Everything else of vitlens works through it and knows no family.
"""

from __future__ import annotations

import contextlib
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitlens.recorder.grid import TokenGrid


class UnsupportedModelError(ValueError):
    """The model, or what it did in this forward, cannot be shown truthfully. The message names it and says why."""


def qualified_name(thing: object) -> str:
    """Module and class of an object, as in 'timm.models.beit.Beit'."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def short_name(model: nn.Module) -> str:
    """The architecture that a model says it is, where it came from (transformers), or else its class."""
    said = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    origin = getattr(getattr(model, "config", None), "name_or_path", None)
    return said or (Path(origin).name if isinstance(origin, str) and origin else type(model).__name__)


def model_name(model: nn.Module) -> str:
    """What to call a model in a message: its architecture and class."""
    name, kind = short_name(model), type(model).__name__
    return kind if name == kind else f"{name} ({kind})"


def refuse(model: nn.Module, reason: str) -> UnsupportedModelError:
    """The error to raise for a model and a reason."""
    return UnsupportedModelError(f"vitlens cannot show the attention of {model_name(model)}: {reason}.")


def readout(grid: TokenGrid, tokens: slice) -> Tensor:
    """(T,) the read-out that is the mean of some tokens."""
    row = torch.zeros(grid.tokens, dtype=torch.float32, device="cpu")
    row[tokens] = 1.0 / len(row[tokens])
    return row


def multihead(model: nn.Module, path: str, name: str) -> list[list[tuple[str, nn.Module]]]:
    """The attention of layers that hold one torch.nn.MultiheadAttention each, by this name. Raises
    UnsupportedModelError for others.

    model: what the path to the layers starts from.
    """
    layers = []
    for number, block in enumerate(model.get_submodule(path)):
        module = getattr(block, name, None)
        if type(module) is not nn.MultiheadAttention:
            raise refuse(model, f"layer {number} ({qualified_name(block)}) holds no attention that vitlens knows")
        layers.append([(f"{path}.{number}.{name}", module)])
    if not layers:
        raise refuse(model, "it has no layers")
    return layers


class Family(ABC):
    """One model, seen as a Vision Transformer. Reading a property is cheap; what may raise says so.

    A pool is attention after the last layer that sums the tokens up. B batch, T tokens, D width, C channels.
    """

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def title(self) -> str:
        """What to call the model in a figure."""
        return short_name(self.model)

    # What attends

    @abstractmethod
    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        """Per layer the (name, module) of its attention, in the order of the calls. Raises UnsupportedModelError."""

    @property
    def blind(self) -> str | None:
        """Why the calls of fused attention will not be seen, and what to set; None if they will."""
        return None

    @property
    def chance(self) -> str | None:
        """What is random in the mode that the model is in, besides layers that drop something; None if nothing is."""
        return None

    def watch(self) -> list[RemovableHandle]:
        """Hooks that raise UnsupportedModelError in a forward that cannot be shown."""
        return []

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The layers: each takes the tokens (B, T, D) and returns them."""

    @property
    def pool(self) -> nn.Module | None:
        """The attention pool, if there is one."""
        return None

    @property
    def before_pool(self) -> Sequence[nn.Module]:
        """Modules that run after the last layer and right before the pool attends."""
        return ()

    norms, mlps = r"norm[12]", r"mlp"
    """Which modules of a block, by name, normalize the tokens for attention and MLP, and what it adds besides attention
    (or adds after a linear layer): regular expressions."""

    @property
    def apart(self) -> str | None:
        """Why the blocks cannot be taken apart into what each part adds to the tokens; None if they can."""
        for number, block in enumerate(self.blocks):
            found = [name for name, _ in block.named_modules()]
            if not all(any(re.fullmatch(wanted, name) for name in found) for wanted in (self.norms, self.mlps)):
                return f"layer {number} ({type(block).__name__}) has other parts than a pre-norm block"
        return None

    @property
    def pool_parts(self) -> nn.Module | None:
        """What holds the attention pool and the norm and MLP that follow it."""
        return self.pool

    def heads(self, module: nn.Module) -> int:
        """H of an attention module."""
        return getattr(module, "num_heads", None) or module.num_attention_heads

    @property
    def pool_heads(self) -> int:
        """H of the attention pool, 0 without one."""
        return 0 if self.pool is None else self.heads(self.pool)

    @property
    def recomputing(self) -> list[nn.Module]:
        """Modules whose attribute `grad_checkpointing` makes the backward pass run layers again."""
        return []

    # Where tokens come from, and which are read

    @property
    @abstractmethod
    def embedding(self) -> nn.Module:
        """The module that turns pixels into tokens."""

    @property
    def enters(self) -> list[nn.Parameter]:
        """The parameters that meet the image."""
        return list(self.embedding.parameters())

    @property
    def pads(self) -> bool:
        """Whether the embedding pads the image."""
        return False

    @property
    def channels(self) -> int:
        """Number of input channels: those of the first convolution."""
        return next(each for each in self.model.modules() if isinstance(each, nn.Conv2d)).in_channels

    @property
    @abstractmethod
    def prefix(self) -> list[str]:
        """Names of the R prefix tokens: "class token", "distillation token", "register 1" …"""

    @abstractmethod
    def grid(self, image: tuple[int, int]) -> TokenGrid:
        """The tokens of an input of (height, width) pixels, and which of them are read.

        The read-out of an attention pool depends on the image: it is None here, and a capture fills it in.
        """

    def pool_readout(self, weights, grid: TokenGrid) -> Tensor | None:
        """(B, T) what the pool reads, by its own attention; None if there is no such row.

        weights: a function of queries, all by default, that returns the pool's attention (B, H, Q, T or P).
        """
        return None

    # The input

    @property
    def whole_patches(self) -> tuple[int, int] | None:
        """(height, width) of a patch if the model refuses images that patches do not divide."""
        return None

    @property
    def built_size(self) -> tuple[int, int] | None:
        """(height, width) in pixels that the model was built for, or None if it has no size of its own."""
        return None

    @property
    @abstractmethod
    def patch(self) -> tuple[int, int]:
        """(height, width) of a patch in pixels, for a hybrid of its feature map."""

    @property
    def takes_only(self) -> tuple[int, int] | None:
        """(height, width) in pixels of the only images that the model takes; None if it takes others, or says itself
        that it does not."""
        return None

    @property
    def any_size(self) -> bool:
        """Whether images of other sizes than the one it was built for go in as they are."""
        return False

    @property
    @abstractmethod
    def preprocessing(self) -> dict:
        """How pictures become inputs: `input_size` (C, H, W), `mean`, `std`, `interpolation`, `crop_pct`, `crop_mode`,
        as `timm.data.create_transform` takes them."""

    @property
    def told(self) -> bool:
        """Whether the model itself says how pictures become inputs."""
        return True

    # What comes out

    @property
    @abstractmethod
    def classes(self) -> int | None:
        """Number of classes; 0 for a model whose output is features, None where it does not say."""

    @property
    def label_names(self) -> list[str] | None:
        """Names of the classes, where the model has them."""
        return getattr(self.model, "label_names", None)

    def run(self, images: Tensor) -> Tensor:
        """(B, classes) logits, or (B, D) features of a model without classes. What else it returns is left out."""
        return self.model(images)

    def features(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """The tokens after every layer, one (B, T, D) each, before any final norm, and what `run` returns."""
        layers, thread = [], threading.get_ident()

        def keep(_, args: tuple, output: Tensor) -> None:
            if threading.get_ident() == thread:
                layers.append(output)

        with contextlib.ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(block.register_forward_hook(keep))
            return layers, self.run(images)

    @property
    def classifier(self) -> nn.Module | None:
        """The layer that ends in classes; None without classes."""
        return None

    def pooled(self, images: Tensor) -> Tensor:
        """(B, D) what the classifier is given, or what `run` returns where there is none."""
        return self._before_the_classifier(self.run, images)

    def pooling(self, tokens: Tensor) -> Tensor:
        """(B, D) what `pooled` would return, had the last layer given these tokens (B, T, D)."""
        return self._before_the_classifier(self.head, tokens)

    def _before_the_classifier(self, run: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        if self.classifier is None or not self.classes:
            return run(given)
        kept, thread = [], threading.get_ident()

        def keep(_, args: tuple) -> None:
            if threading.get_ident() == thread:
                kept.append(args[0])

        with contextlib.ExitStack() as hooks:
            hooks.enter_context(self.classifier.register_forward_pre_hook(keep))
            run(given)
        return kept[-1]

    @property
    def reads_text(self) -> bool:
        """Whether a text tower embeds texts in the space of `pooled`."""
        return False

    def texts(self, prompts: list[str], tokenizer: Callable | None = None) -> Tensor:
        """(N, D) the embeddings of prompts, in the space of `pooled`. tokenizer: prompts → what the text tower takes.

        Raises ValueError for a model without a text tower, and OSError without a tokenizer.
        """
        raise ValueError(
            f"{model_name(self.model)} has no text tower, so it cannot be asked about a text. Open a CLIP or SigLIP "
            "model with both towers, or compare with a picture."
        )

    @abstractmethod
    def head(self, tokens: Tensor) -> Tensor:
        """What `run` would return, had the last layer given these tokens (B, T, D)."""

    # Learned pictures

    @abstractmethod
    def filters(self) -> Tensor:
        """(D, p, q, C) the filters of the patch embedding. Raises ValueError where they are no pictures."""

    @abstractmethod
    def positions(self) -> Tensor | None:
        """(rows, cols, D) the learned position embeddings of the patches, or None."""
