"""Registration of model classes that other people wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from vitlens.names import require_known
from vitlens.recorder.supported.adapter import Family, PlainPatches, pair
from vitlens.recorder.supported.names import qualified_name

FAMILIES: dict[str, Callable[[nn.Module], Family]] = {}
"""Adapters of registered classes, by full name."""


_READOUTS = ("class token", "patches", "tokens")
"""Tokens whose mean a head reads."""


class Registered(PlainPatches):
    """Adapter of a registered class. `register_model` sets its attributes."""

    attends = ""
    only = False
    declares_preprocessing = False
    positions_at: str | Callable[[nn.Module], Tensor] | None = None
    logits: Callable[[nn.Module, Tensor], Tensor] | None = None
    """Head of the model, a function from the model and its tokens."""

    @property
    def classes(self) -> int | None:
        return getattr(self.model, "num_classes", None)

    @property
    def guesses_preprocessing(self) -> bool:
        return not self.declares_preprocessing

    @property
    def table(self) -> Tensor | None:
        """The table at the path given as positions=, or from that function, (…, T, D) with the patches last."""
        place = type(self).positions_at
        if place is None:
            return None
        if callable(place):
            table = place(self.model)
        else:
            table = self.model
            for name in place.split("."):
                table = getattr(table, name, None)
            table = getattr(table, "weight", table)  # of torch.nn.Embedding
        self._require_rows(place, table)
        return table

    def _require_rows(self, place: object, table: object) -> None:
        """Raise ValueError unless a table has a row for each patch."""
        rows, cols = self._grid_size(self.built_size)
        count = 0
        got = type(table).__name__
        if isinstance(table, Tensor):
            got = f"shape {tuple(table.shape)}"
            if table.dim() >= 2:
                count = table[..., 0].numel()
        if count < rows * cols:
            raise ValueError(
                f"The positions ({place}) of {type(self.model).__name__} must have shape (…, tokens, D) with at least "
                f"{rows * cols} tokens for {rows} × {cols} patches, got {got}."
            )

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
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    interpolation: str = "bicubic",
    crop_pct: float = 1.0,
    positions: str | Callable[[nn.Module], Tensor] | None = None,
    head: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> None:
    """Register the class of a Vision Transformer that you wrote, so that captures, statistics and maps support it.

    >>> class MyViT(torch.nn.Module): ...
    >>> parts = {"blocks": "blocks", "attention": "attn", "embedding": "patch_embed", "positions": "pos_embed"}
    >>> vitlens.register_model(MyViT, **parts, patch=16, size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))

    Its attention must call `torch.nn.functional.scaled_dot_product_attention`, once in each block, on all tokens. Its
    forward must take images (B, C, height, width) and return logits (B, classes).

    kind: the class. blocks: path of the list of blocks in the model. attention: path of the attention module in a
    block. embedding: path of the module that turns pixels into tokens. patch: side or (height, width) of a patch.
    size: side or (height, width) of the images that the model was built for. prefix: names of the tokens before the
    patches. readout: the tokens whose mean the head reads, "class token", "patches" or "tokens" (all). With None,
    `rollout` and `relevance` need a query. mean, std: of the input's normalization, one number per channel, by which
    `preprocess` makes images. Without them, it takes 0.5 and notes that this is a guess. interpolation, crop_pct: of
    `preprocess`, as in timm. positions: path of the learned position embeddings, or a function that returns them from
    the model, (…, tokens, D) with the patches last. head: logits from (model, tokens of the last layer), for `legrad`
    and the lens.

    Raises ValueError for a readout that does not exist.
    """
    if readout is not None:
        require_known(readout, _READOUTS, "readout")
    half = (0.5,) * len(mean or std or (0, 0, 0))
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
        "declares_preprocessing": mean is not None and std is not None,
        "positions_at": staticmethod(positions) if callable(positions) else positions,
        "usual": {
            "input_size": (len(half), *pair(size)),
            "mean": tuple(mean or half),
            "std": tuple(std or half),
            "interpolation": interpolation,
            "crop_pct": crop_pct,
        },
    }
    adapter = type(f"Registered{kind.__name__}", (Registered,), settings)
    FAMILIES[qualified_name(kind)] = adapter
