"""open_clip's image towers: its own transformer, whose attention is inside torch.nn.MultiheadAttention, and timm's.

A whole CLIP is seen as its image tower; its text tower runs beside it and is let pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import texts, timm
from vitlens.recorder.supported.protocol import Family, multihead, qualified_name, readout, refuse

TOWER = "open_clip.transformer.VisionTransformer"
WHOLE = {"open_clip.model.CLIP", "open_clip.model.CustomTextCLIP", "open_clip.coca_model.CoCa"}
MODELS = {TOWER, *WHOLE}
_MODES = {"shortest": "center", "squash": "squash", "longest": "border"}


def seen(model: nn.Module) -> Family:
    """The family of a model: that of its tower."""
    tower = model.visual if qualified_name(model) in WHOLE else model
    return TimmTower(model, tower) if hasattr(tower, "trunk") else OpenClip(model, tower)


def _run(tower: nn.Module, images: Tensor) -> Tensor:
    features = tower(images)
    return features[0] if isinstance(features, tuple) else features  # the tokens come along with CoCa's


def _preprocessing(tower: nn.Module) -> dict:
    """As open_clip says it, or as it is by default: OpenAI's."""
    said = getattr(tower, "preprocess_cfg", None) or {}
    return {
        "mean": tuple(said.get("mean", (0.48145466, 0.4578275, 0.40821073))),
        "std": tuple(said.get("std", (0.26862954, 0.26130258, 0.27577711))),
        "input_size": (3, *tower.image_size), "interpolation": said.get("interpolation", "bicubic"),
        "crop_pct": 1.0, "crop_mode": _MODES[said.get("resize_mode", "shortest")],
    }  # fmt: skip


class _Towers(Family):
    """What image towers have in common: the text tower beside them. whole: the model that holds both."""

    whole: nn.Module

    @property
    def classes(self) -> int:
        return 0

    @property
    def preprocessing(self) -> dict:
        return _preprocessing(self.tower)

    def run(self, images: Tensor) -> Tensor:
        return _run(self.tower, images)

    @property
    def reads_text(self) -> bool:
        return hasattr(self.whole, "encode_text")

    def texts(self, prompts: list[str], tokenizer: Callable | None = None) -> Tensor:
        if not self.reads_text:
            return super().texts(prompts, tokenizer)
        return texts.by_open_clip(self.whole, prompts, tokenizer)


class OpenClip(_Towers):
    """A tower of open_clip's own. It takes images of the one size that it was built for."""

    norms = r"ln_[12]"

    def __init__(self, model: nn.Module, tower: nn.Module):
        super().__init__(model)
        self.whole, self.tower = model, tower
        self.path = "" if tower is model else "visual."

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        if qualified_name(self.tower) != TOWER:
            raise refuse(self.model, f"its image tower is {qualified_name(self.tower)}, which vitlens does not know")
        if getattr(self.tower, "attn_pool_contrastive", None) is not None:
            raise refuse(self.model, "it has two attention pools, and which tokens they read together is no single map")
        if not self.tower.transformer.batch_first:
            raise refuse(self.model, "it runs with the tokens before the batch; build it with batch_first=True")
        return multihead(self.model, f"{self.path}transformer.resblocks", "attn")

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.tower.transformer.resblocks

    @property
    def pool(self) -> nn.Module | None:
        return self.tower.attn_pool

    def pool_readout(self, weights, grid: TokenGrid) -> Tensor | None:
        """Of a pool's queries the first is taken, or the mean of the others."""
        queries = {"tok": slice(0, 1), "avg": slice(1, None)}.get(self.tower.pool_type)
        return None if queries is None else weights(queries).mean((1, 2))

    @property
    def pool_heads(self) -> int:
        return 0 if self.pool is None else self.heads(self.pool.attn)

    @property
    def recomputing(self) -> list[nn.Module]:
        return [self.tower.transformer]

    @property
    def embedding(self) -> nn.Module:
        return self.tower.conv1

    @property
    def prefix(self) -> list[str]:
        return ["class token"]

    @property
    def patch(self) -> tuple[int, int]:
        return tuple(self.tower.patch_size)

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        rows, cols = (side // length for side, length in zip(image, self.patch, strict=True))
        grid = TokenGrid(rows, cols, self.patch, 1, tuple(image))
        read = {"tok": slice(0, 1), "avg": slice(1, None)}.get(self.tower.pool_type)
        return replace(grid, readout=None if self.pool is not None or read is None else readout(grid, read))

    @property
    def built_size(self) -> tuple[int, int]:
        return tuple(self.tower.image_size)

    @property
    def takes_only(self) -> tuple[int, int]:
        return self.built_size

    def head(self, tokens: Tensor) -> Tensor:
        pooled, _ = self.tower._pool(tokens)
        return pooled if self.tower.proj is None else pooled @ self.tower.proj

    def filters(self) -> Tensor:
        return self.embedding.weight.detach().permute(0, 2, 3, 1)

    def positions(self) -> Tensor:
        return self.tower.positional_embedding.detach()[1:].unflatten(0, tuple(self.tower.grid_size))


class TimmTower(_Towers, timm.Timm):
    """A model of timm that is the tower of a CLIP."""

    def __init__(self, whole: nn.Module, tower: nn.Module):
        super().__init__(tower.trunk)
        self.whole, self.tower = whole, tower

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        if qualified_name(self.model) not in timm.MODELS:
            reason = timm.REASONS.get(type(self.model).__name__, "which vitlens does not know")
            raise refuse(self.whole, f"its image tower is {qualified_name(self.model)}: {reason}")
        return [[(f"visual.trunk.{name}", module) for name, module in layer] for layer in super().attention()]

    @property
    def label_names(self) -> None:
        return None

    def features(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        layers, output = super().features(images)
        return layers, self.tower.head(output)

    def pooled(self, images: Tensor) -> Tensor:
        return self.run(images)

    def head(self, tokens: Tensor) -> Tensor:
        return self.tower.head(super().head(tokens))

    def pooling(self, tokens: Tensor) -> Tensor:
        return self.head(tokens)
