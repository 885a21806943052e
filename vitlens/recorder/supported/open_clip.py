"""open_clip's image towers: its own transformer with torch.nn.MultiheadAttention, and timm's models.

The adapter of a CLIP covers its image tower. Its text tower may run in the same forward.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from vitlens.recorder.supported import timm
from vitlens.recorder.supported.adapter import Family, PlainPatches, Pool
from vitlens.recorder.supported.card import card_of
from vitlens.recorder.supported.names import model_name, qualified_name
from vitlens.recorder.supported.refusal import refuse

TOWER = "open_clip.transformer.VisionTransformer"
WHOLE = {"open_clip.model.CLIP", "open_clip.model.CustomTextCLIP", "open_clip.coca_model.CoCa"}
MODELS = {TOWER, *WHOLE}
CLIP_VOCABULARY = 49408
"""Vocabulary size of CLIP's tokenizer, which open_clip includes."""


def adapter(model: nn.Module) -> Family:
    """Adapter for a model, by its image tower."""
    tower = model.visual if qualified_name(model) in WHOLE else model
    if hasattr(tower, "trunk"):
        return TimmTower(model, tower)
    return OpenClip(model, tower)


class Texts:
    """The text tower of a model and its tokenizer: that of the model's architecture, else CLIP's. limit: tokens that
    the tower reads."""

    def __init__(self, model: nn.Module, tokenizer: Callable | None):
        self.model = model
        self.tokenizer = tokenizer or _tokenizer(model)
        self.limit = len(self.tokens("a"))

    def tokens(self, prompt: str) -> list[int]:
        """Tokens of a prompt that the text tower reads, with padding."""
        return self.tokenizer([prompt])[0].tolist()

    def count(self, prompt: str) -> int:
        """Number of all tokens of a prompt, at most `limit` if the tokenizer cannot count further."""
        tokens = self.tokens(prompt)
        width = self.limit + 8 * len(prompt)
        try:
            whole, empty = self.tokenizer([prompt, ""], context_length=width).tolist()
        except TypeError:  # another function than open_clip's tokenizers
            return len(tokens)
        if whole[: self.limit] == tokens:
            return len(tokens)
        padding = empty[-1]
        while whole and whole[-1] == padding:
            whole.pop()
        return max(len(whole), self.limit + 1)  # the last token may equal the padding

    def embed(self, prompts: list[str]) -> Tensor:
        """(N, D) embeddings of prompts."""
        device = next(self.model.parameters()).device
        return self.model.encode_text(self.tokenizer(prompts).to(device))


def _tokenizer(model: nn.Module) -> Callable:
    """The tokenizer of the model's architecture, else CLIP's."""
    import open_clip

    card = card_of(model)
    name = None if card is None else card.architecture
    tower = getattr(model, "text", model)
    if name in open_clip.list_models() or str(name).startswith("local-dir:"):
        return open_clip.get_tokenizer(name)
    if tower.vocab_size == CLIP_VOCABULARY:
        return open_clip.SimpleTokenizer(context_length=tower.context_length)
    raise ValueError(
        f"The tokenizer of {model_name(model)}, for {tower.vocab_size} tokens, is unknown. Give it, as in "
        "`text(prompt, tokenizer=open_clip.get_tokenizer(…))`."
    )


class _Tower(Family):
    """Base class of both kinds of image towers. whole: the model with both towers, or the image tower."""

    guesses_preprocessing = False

    def __init__(self, whole: nn.Module, tower: nn.Module):
        super().__init__(getattr(tower, "trunk", whole))
        self.whole = whole
        self.tower = tower

    @property
    def classes(self) -> int:
        return 0

    def run(self, images: Tensor) -> Tensor:
        features = self.tower(images)
        if isinstance(features, tuple):  # CoCa also returns its tokens
            return features[0]
        return features

    def pooled_features(self, images: Tensor) -> Tensor:
        return self.run(images)


class OpenClip(_Tower, PlainPatches):
    """Adapter of open_clip's own tower. It takes only the image size that it was built for."""

    usual = {
        "mean": (0.48145466, 0.4578275, 0.40821073),
        "std": (0.26862954, 0.26130258, 0.27577711),
    }

    def __init__(self, whole: nn.Module, tower: nn.Module):
        super().__init__(whole, tower)
        path = "" if tower is whole else "visual."
        self.paths = (f"{path}transformer.resblocks", "attn", f"{path}conv1")

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        if qualified_name(self.tower) != TOWER:
            raise refuse(
                self.model,
                f"its image tower is {qualified_name(self.tower)}, which vitlens does not support",
            )
        if getattr(self.tower, "attn_pool_contrastive", None) is not None:
            raise refuse(
                self.model,
                "it has two attention pools, so a single map cannot show the tokens that it reads",
            )
        if not self.tower.transformer.batch_first:
            raise refuse(
                self.model,
                "it runs with the tokens before the batch; build it with batch_first=True",
            )
        return super().attention()

    @property
    def patch(self) -> tuple[int, int]:
        return tuple(self.tower.patch_size)

    @property
    def built_size(self) -> tuple[int, int]:
        return tuple(self.tower.image_size)

    @property
    def table(self) -> Tensor:
        return self.tower.positional_embedding

    @property
    def mean_over(self) -> slice | None:
        """Tokens or pool queries that are mean_over: the first, or all others."""
        slices = {"tok": slice(0, 1), "avg": slice(1, None)}
        return slices.get(self.tower.pool_type)

    @property
    def read(self) -> slice | None:
        return None if self.pool is not None else self.mean_over

    @property
    def pool(self) -> Pool | None:
        module = self.tower.attn_pool
        return None if module is None else Pool(module, self.mean_over)

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        pooled, _ = self.tower._pool(tokens)
        return pooled if self.tower.proj is None else pooled @ self.tower.proj


class TimmTower(_Tower, timm.Timm):
    """Adapter of a model of timm that is the image tower of a CLIP."""

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        kind = qualified_name(self.model)
        if kind not in timm.MODELS:
            reason = timm.why_not(type(self.model)) or "its class is not supported"
            raise refuse(self.whole, f"its image tower is {kind}: {reason}")
        layers = []
        for layer in super().attention():
            layers.append([(f"visual.trunk.{name}", module) for name, module in layer])
        return layers

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        return self.tower.head(super().head(tokens))
