"""The models of a study, all small: plain ViTs, BiT-style ResNets, and transformers on features of such ResNets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from timm.layers import GroupNormAct, HybridEmbed, StdConv2d
from timm.models import ResNetV2, VisionTransformer
from torch import nn

from vitlens.train.recipes import Recipe


@dataclass(frozen=True)
class Network:
    """A model by its sizes: a transformer, a ResNet, or both, which is a hybrid (paper, section 3.1)."""

    name: str
    patch: int = 0
    """Side in pixels of a patch; a hybrid has patches of one feature."""
    width: int = 0
    depth: int = 0
    """Layers of the transformer; a ResNet has none."""
    heads: int = 0
    stages: tuple[int, ...] = ()
    """Bottlenecks in each stage of the ResNet; all stages but the first halve the sides."""
    channels: int = 0
    """That the first stage gives out; each next one doubles them."""

    @property
    def kind(self) -> str:
        return "ResNet" if not self.depth else "hybrid" if self.stages else "ViT"

    def build(self, recipe: Recipe) -> nn.Module:
        """The model in training mode, for the recipe's image size and classes; its weights are a function of its seed.

        Raises ValueError for sizes that timm cannot build from.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            try:
                model = self._resnet(recipe.num_classes) if not self.depth else self._transformer(recipe)
            except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
                raise ValueError(f"{self.name} cannot be built from {self}: {error}.") from error
        model.pretrained_cfg = {"architecture": self.name, **recipe.pixels()}
        return model.train()

    def tiny(self) -> Network:
        """The same kind, narrow and shallow."""
        return replace(
            self, width=8 * self.heads, depth=min(self.depth, 2), stages=(1,) * len(self.stages), channels=32
        )

    def _transformer(self, recipe: Recipe) -> VisionTransformer:
        embed = partial(HybridEmbed, backbone=self._resnet(0, global_pool="", preact=False)) if self.stages else None
        return VisionTransformer(
            img_size=recipe.image_size, patch_size=1 if self.stages else self.patch, embed_dim=self.width,
            depth=self.depth, num_heads=self.heads, num_classes=recipe.num_classes, patch_drop_rate=recipe.patch_drop,
            **({"embed_layer": embed} if embed else {}),
        )  # fmt: skip

    def _resnet(self, classes: int, **form) -> ResNetV2:
        """BiT's: weights standardized, GroupNorm, no other norm (Kolesnikov et al. 2020)."""
        groups = min(32, self.channels // 8)  # BiT's 32, but never of a single channel
        model = ResNetV2(
            layers=self.stages, channels=tuple(self.channels * 2**k for k in range(len(self.stages))),
            stem_chs=self.channels // 4, num_classes=classes, norm_layer=partial(GroupNormAct, num_groups=groups),
            conv_layer=partial(StdConv2d, eps=1e-8), **form,
        )  # fmt: skip
        model.stem.pool = nn.Identity()  # pictures of 64 pixels are too small to be halved twice before the first stage
        for stage in model.feature_info[1:]:  # the first is the stem before its pool
            stage["reduction"] //= 2
        return model
