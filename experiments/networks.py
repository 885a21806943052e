"""Small ViTs, BiT-style ResNets and hybrids (paper, section 3.1) for images of 8 to 64 pixels.

Importing this file registers the hybrid with timm, so `vitlens.load_model` opens a folder that holds one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from timm.layers import GroupNormAct, HybridEmbed, StdConv2d
from timm.models import (
    ResNetV2,
    VisionTransformer,
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
)
from torch import nn

from vitlens.train.recipes import Recipe
from vitlens.train.run_folder import convert_weights

HYBRID = "vit_small_resnet_hybrid"

default_cfgs = generate_default_cfgs(
    {
        HYBRID: {
            "num_classes": 1000,
            "input_size": (3, 64, 64),
            "fixed_input_size": True,
            "classifier": "head",
            "first_conv": "patch_embed.backbone.stem.conv",
        }
    }
)


@register_model
def vit_small_resnet_hybrid(
    pretrained: bool = False, stages: tuple[int, ...] = (1, 1, 1), channels: int = 64, **kwargs
) -> VisionTransformer:
    """A Vision Transformer whose patches are the features of a small ResNet, one each."""
    embed = partial(HybridEmbed, backbone=resnet(stages, channels, global_pool="", preact=False))
    return build_model_with_cfg(
        VisionTransformer, HYBRID, pretrained, embed_layer=embed, patch_size=1, **kwargs
    )


def resnet(stages: tuple[int, ...], channels: int, classes: int = 0, **form) -> ResNetV2:
    """BiT's ResNet: weights standardized, GroupNorm, no other norm (Kolesnikov et al. 2020).

    stages: bottlenecks in each stage; all stages but the first halve height and width. channels: outputs of the first
    stage; each next one doubles them.
    """
    groups = min(32, channels // 8)  # BiT's 32, but never of a single channel
    model = ResNetV2(
        layers=stages,
        channels=tuple(channels * 2**k for k in range(len(stages))),
        stem_chs=channels // 4,
        num_classes=classes,
        norm_layer=partial(GroupNormAct, num_groups=groups),
        conv_layer=partial(StdConv2d, eps=1e-8),
        **form,
    )
    model.stem.pool = (
        nn.Identity()
    )  # images of 64 pixels are too small to be halved twice before the first stage
    for stage in model.feature_info[1:]:  # the first is the stem before its pool
        stage["reduction"] //= 2
    return model


@dataclass(frozen=True)
class Network:
    """Sizes of a transformer, a ResNet or a hybrid of both. `build` is an argument of `vitlens.train.run`."""

    patch: int = 0
    """Side of a patch in pixels; those of a hybrid are one feature each."""
    width: int = 0
    depth: int = 0
    """Layers of the transformer; 0 for a ResNet."""
    heads: int = 0
    stages: tuple[int, ...] = ()
    channels: int = 0

    @property
    def kind(self) -> str:
        return "ResNet" if not self.depth else "hybrid" if self.stages else "ViT"

    def arguments(self, recipe: Recipe) -> dict:
        """Arguments of timm's constructor of a ViT or hybrid."""
        sizes = dict(
            embed_dim=self.width,
            depth=self.depth,
            num_heads=self.heads,
            num_classes=recipe.num_classes,
        )
        own = (
            dict(stages=self.stages, channels=self.channels)
            if self.stages
            else dict(patch_size=self.patch)
        )
        return dict(img_size=recipe.image_size, **sizes, **own)

    def build(self, recipe: Recipe) -> nn.Module:
        """The model in training mode, for the recipe's image size and classes; its weights depend on its seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            if not self.depth:
                model = resnet(self.stages, self.channels, recipe.num_classes)
            else:
                kind = vit_small_resnet_hybrid if self.stages else VisionTransformer
                model = kind(**self.arguments(recipe), patch_drop_rate=recipe.patch_drop)
        model.pretrained_cfg = {"architecture": self.kind, **recipe.pixels()}
        return model.train()

    def save(
        self, model: nn.Module, folder: Path, recipe: Recipe, class_names: Sequence[str]
    ) -> None:
        """Write a ViT or a hybrid in timm's hub layout, in half precision."""
        first = "patch_embed.backbone.stem.conv" if self.stages else "patch_embed.proj"
        config = {
            "architecture": HYBRID if self.stages else "vit_tiny_patch16_224",
            "num_classes": recipe.num_classes,
            "num_features": self.width,
            "global_pool": "token",
            "label_names": list(class_names),
            "model_args": self.arguments(recipe),
            "pretrained_cfg": {
                "tag": recipe.name,
                "custom_load": False,
                **recipe.pixels(),
                "num_classes": recipe.num_classes,
                "pool_size": None,
                "first_conv": first,
                "classifier": "head",
            },
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        state = convert_weights(model.state_dict())
        safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    def tiny(self) -> "Network":
        """The same kind, narrow and shallow."""
        return Network(
            self.patch,
            8 * self.heads,
            min(self.depth, 2),
            self.heads,
            (1,) * len(self.stages),
            32 * bool(self.stages),
        )
