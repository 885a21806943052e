"""Registration of model classes that other people wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from vitlens.recorder.supported.adapter import Family, PlainPatches, pair
from vitlens.recorder.supported.names import qualified_name

FAMILIES: dict[str, Callable[[nn.Module], Family]] = {}
"""Adapters of registered classes, by full name."""


class Registered(PlainPatches):
    """Adapter of a registered class. `register_model` sets its attributes."""

    attends = ""
    only = False
    logits: Callable[[nn.Module, Tensor], Tensor] | None = None
    """Head of the model, a function from the model and its tokens."""

    @property
    def classes(self) -> int | None:
        return getattr(self.model, "num_classes", None)

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        if self.logits is None or pre_logits:
            raise ValueError(
                f"The head of {type(self.model).__name__} is unknown. Pass `register_model` a function as head=, from "
                "the model and the tokens (B, T, D) of its last layer to the logits."
            )
        return type(self).logits(self.model, tokens)


def register_model(
    kind: type[nn.Module],
    *,
    blocks: str,
    attention: str,
    embedding: str,
    patch: int | tuple[int, int],
    size: int | tuple[int, int],
    prefix: Sequence[str] = ("class token",),
    readout: str | None = "class token",
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    head: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> None:
    """Register the class of a Vision Transformer that you wrote, so that captures, statistics and maps support it.

    >>> class MyViT(torch.nn.Module): ...
    >>> vitlens.register_model(MyViT, blocks="blocks", attention="attn", embedding="patch_embed", patch=16, size=224)

    Its attention must call `torch.nn.functional.scaled_dot_product_attention`, once in each block, on all tokens. Its
    forward must take images (B, C, height, width) and return logits (B, classes).

    kind: the class. blocks: path of the list of blocks in the model. attention: path of the attention module in a
    block. embedding: path of the module that turns pixels into tokens. patch: side or (height, width) of a patch.
    size: side or (height, width) of the images that the model was built for. prefix: names of the tokens before the
    patches. readout: the tokens whose mean the head reads, "class token", "patches" or "tokens" (all). With None,
    `rollout` and `relevance` need a query. mean, std: of the input's normalization, one number per channel. head:
    logits from (model, tokens of the last layer), for `legrad` and the lens.
    """
    readouts = {
        "class token": slice(0, 1),
        "patches": slice(len(prefix), None),
        "tokens": slice(None),
    }
    settings = {
        "paths": (blocks, attention, embedding),
        "patch": pair(patch),
        "built_size": pair(size),
        "prefix": list(prefix),
        "read": readouts[readout] if readout else None,
        "logits": staticmethod(head) if head else None,
        "usual": {
            "input_size": (len(mean), *pair(size)),
            "mean": tuple(mean),
            "std": tuple(std),
        },
    }
    adapter = type(f"Registered{kind.__name__}", (Registered,), settings)
    FAMILIES[qualified_name(kind)] = adapter
