"""Vision Transformers of the user's own: `vitlens.register_model` opens vitlens to a class that no library defines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from vitlens.recorder.supported.protocol import PlainPatches

READOUTS = {
    "class token": lambda prefix: slice(0, 1),
    "patches": lambda prefix: slice(prefix, None),
    "tokens": lambda prefix: slice(None),
}
"""Tokens whose mean the head reads, by the number of prefix tokens."""


class Registered(PlainPatches):
    """Adapter of a registered class. The keyword arguments of `register_model` are its attributes."""

    blocks_path: str
    attention_path: str
    embedding_path: str
    prefix: list[str] = []
    readout: str | None = None
    built_size: tuple[int, int] = (0, 0)
    logits: Callable[[nn.Module, Tensor], Tensor] | None = None

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        names = [f"{self.blocks_path}.{number}.{self.attention_path}" for number in range(len(self.blocks))]
        return [[(name, self.model.get_submodule(name))] for name in names]

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.model.get_submodule(self.blocks_path)

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_submodule(self.embedding_path)

    @property
    def read(self) -> slice | None:
        return READOUTS[self.readout](len(self.prefix)) if self.readout else None

    @property
    def classes(self) -> int | None:
        return getattr(self.model, "num_classes", None)

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        if self.logits is None or pre_logits:
            raise ValueError(
                f"The head of {type(self.model).__name__} is unknown. Give `register_model` a function as head=, from "
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
    """Let vitlens look into a Vision Transformer that you wrote: captures, statistics and maps then take its models.

        vitlens.register_model(
            MyViT, blocks="blocks", attention="attn", embedding="patch_embed", patch=16, size=224, readout="patches"
        )

    Its attention must call `torch.nn.functional.scaled_dot_product_attention`, once in each block, on all tokens, and
    its forward takes images (B, C, height, width) and returns logits (B, classes).

    kind: the class. blocks: path of the list of blocks in the model. attention: path of the attention module in a
    block. embedding: path of the module that turns pixels into tokens. patch: side or (height, width) of a patch.
    size: side or (height, width) of the images that the model was built for. prefix: names of the tokens before the
    patches. readout: the tokens whose mean the head reads, "class token", "patches" or "tokens" (all); None where it
    reads no such mean, and then `rollout` and `relevance` need a query. mean, std: of the input's normalization; their
    length is the number of channels. head: logits from (model, tokens of the last layer), for `legrad` and the lens.
    """
    from vitlens.recorder.supported import FAMILIES

    if readout is not None and readout not in READOUTS:
        raise ValueError(f"readout must be one of {', '.join(READOUTS)} or None, got {readout!r}.")
    pair = lambda sides: (sides, sides) if isinstance(sides, int) else tuple(sides)  # noqa: E731
    settings = dict(
        blocks_path=blocks, attention_path=attention, embedding_path=embedding, patch=pair(patch),
        built_size=pair(size), prefix=list(prefix), readout=readout, logits=head and staticmethod(head),
        usual={"input_size": (len(mean), *pair(size)), "mean": tuple(mean), "std": tuple(std)},
    )  # fmt: skip
    FAMILIES[f"{kind.__module__}.{kind.__qualname__}"] = type(f"Registered{kind.__name__}", (Registered,), settings)
