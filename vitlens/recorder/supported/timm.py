"""Models of timm.

To support one, add its class to `MODELS` and the class of its attention to `ATTENTION`. To refuse one with a reason,
add it to `_REFUSED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported.adapter import Family, Pool
from vitlens.recorder.supported.names import qualified_name
from vitlens.recorder.supported.refusal import (
    CONVOLUTIONS,
    MASK_UNITS,
    POOLED,
    SHRINKS,
    WINDOWS,
    refuse,
    require_size,
)

MODELS = {
    "timm.models.vision_transformer.VisionTransformer",
    "timm.models.deit.VisionTransformerDistilled",
    "timm.models.vision_transformer_relpos.VisionTransformerRelPos",
    "timm.models.beit.Beit",
    "timm.models.eva.Eva",
    "timm.models.naflexvit.NaFlexVit",
}

# Modules that make exactly one attention call. ParallelScalingBlock is both the block and the attention.
ATTENTION = {
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.vision_transformer.Attention",
    "timm.models.vision_transformer.ParallelScalingBlock",
    "timm.models.vision_transformer_relpos.RelPosAttention",
    "timm.models.beit.Attention",
    "timm.models.eva.EvaAttention",
}

_REFUSED = {
    CONVOLUTIONS: (
        "ConvMixer ConvNeXt CspNet CspNext DLA DPN DenseNet EfficientNet FasterNet GhostNet HighPerfGpuNet "
        "HighResolutionNet InceptionResnetV2 InceptionV3 InceptionV4 LCNetV2 MambaOut MetaNeXt NASNetALarge "
        "NormFreeNet PNASNet5Large RDNet RegNet RepGhostNet RepVit ResNet ResNetV2 RexNet SENet SelecSls StarNet "
        "TResNet VGG VovNet Xception XceptionAligned"
    ),
    "it is a convolutional network, and attention, if it has any, reads the features of its convolutions on coarser "
    "grids, not patches of the image": (
        "ByobNet CSATv2 CPUBone EfficientFormer EfficientFormerV2 FastVit IFormer LowFormer MobileNetV3 MobileNetV5 "
        "MobileNetV5Encoder NextViT SHViT Visformer"
    ),
    "its blocks mix patches by pooling or convolutions, and attention, if it has any, is in its last stages on coarser "
    "grids": "MetaFormer",
    "its attention follows convolutions, on grids that shrink between stages or inside windows": "MaxxVit",
    WINDOWS: (
        "DaVit EfficientVitMsra GlobalContextVit HieraDet Nest SwinTransformer SwinTransformerV2 SwinTransformerV2Cr "
        "TinyVit VisionTransformerSAM"
    ),
    SHRINKS: "Levit LevitDistilled PoolingVisionTransformer",
    POOLED: "MultiScaleVit PyramidVisionTransformerV2 Twins",
    MASK_UNITS: "Hiera",
    "its attention is a softmax over channels, not over patches": "EdgeNeXt Xcit",
    "its attention is linear: it sums keys and values before the queries come, so there is no weight of one patch for "
    "another": "CoaT EfficientVit EfficientVitLarge",
    "its additive attention sums all queries to one vector, so there is no weight of one patch for another": (
        "SwiftFormer"
    ),
    "it mixes patches by MLPs, without attention": "MlpMixer",
    "it mixes patches by recurrent layers along rows and columns, without attention": "Sequencer2d",
    "it mixes patches by a state space model, without attention": "EfficientViM EfficientViMDistilled",
    "it mixes patches by focal modulation, which are gated convolutions, without attention": "FocalNet",
    "it mixes the heads after the softmax, so no head's map is what the model uses": "Cait",
    "its outlook attention weighs a small neighborhood and is not a softmax over the patches": "VOLO",
    "its heads blend a softmax over content with one over positions, which no single map shows": "ConVit",
    "it runs two grids of different patch sizes side by side": "CrossVit",
    "it attends within patches and between them": "TNT",
    "it attends with a softmax over patches, but vitlens has no adapter for its tokens; register it by "
    '`vitlens.register_model(type(model), blocks="blocks", attention="attn", embedding="patch_embed", prefix=(), '
    'readout="patches", patch=…, size=…)`': "DeepseekVitEncoder Gemma4VitEncoder Qwen3VitEncoder",
    "it attends with a softmax over patches, but vitlens has no adapter for its tokens; register it by "
    '`vitlens.register_model(type(model), blocks="encoder.blocks", attention="attn", '
    'embedding="encoder.patch_embed", prefix=(), readout="patches", patch=…, size=…)`': (
        "DeepseekVitClassifier Gemma4VitClassifier Qwen3VitClassifier"
    ),
}
_REASONS = {name: reason for reason, names in _REFUSED.items() for name in names.split()}


def why_not(kind: type) -> str | None:
    """Reason why a class of timm, or a class that extends it, is refused. None for others and for unknown ones."""
    for base in kind.__mro__:
        if base.__module__.startswith("timm.") and base.__name__ in _REASONS:
            return _REASONS[base.__name__]
    return None


DIFFERENCES = {"DiffAttention", "DiffParallelScalingBlock"}
"""Attention modules that subtract two softmaxes."""

PRE_NORM = {
    "timm.models.vision_transformer.Block",
    "timm.models.vision_transformer.ParallelScalingBlock",
    "timm.models.vision_transformer.ParallelThingsBlock",
    "timm.models.vision_transformer_relpos.RelPosBlock",
    "timm.models.beit.Block",
    "timm.models.eva.EvaBlock",
}
"""Pre-norm blocks: attention and MLP read normalized tokens, and their outputs are added to the residual stream."""

KNOWN = ", ".join(sorted(name.rsplit(".", 1)[-1] for name in MODELS if name.startswith("timm.")))


class Timm(Family):
    """Adapter of timm's models, and of unknown classes, because many have timm's attributes."""

    guesses_preprocessing = True

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        """One module per layer, or two in the parallel blocks of "Three things everyone should know about ViTs"."""
        return [self._attention_of(index, block) for index, block in enumerate(self.model.blocks)]

    def _attention_of(self, index: int, block: nn.Module) -> list[tuple[str, nn.Module]]:
        """The (name, module) of the attention of one layer."""
        attention = []
        for path, module in block.named_modules():
            kind = type(module).__name__
            full_name = qualified_name(module)
            if kind in DIFFERENCES:
                raise refuse(
                    self.model,
                    "its attention is the difference of two softmaxes, which no single map shows",
                )
            if full_name in ATTENTION:
                attention.append((f"blocks.{index}.{path}".rstrip("."), module))
            elif "attention" in kind.lower():
                raise refuse(
                    self.model, f"layer {index} uses {full_name}, which vitlens does not support"
                )
        if not attention:
            raise refuse(
                self.model,
                f"layer {index} ({qualified_name(block)}) has no supported attention module",
            )
        return attention

    @property
    def capture_problem(self) -> str | None:
        """Layers that were built without timm's fused attention do not call the function that a capture intercepts."""
        for layer in self.attention():
            for _, module in layer:
                if not getattr(module, "fused_attn", True):
                    return (
                        "it was built without fused attention; call timm.layers.set_fused_attn(True) and create it "
                        "again"
                    )
        return None

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.model.blocks

    @property
    def stream_problem(self) -> str | None:
        for number, block in enumerate(self.blocks):
            name = type(block).__name__
            if qualified_name(block) in PRE_NORM:
                continue
            if "Post" in name:
                return f"layer {number} ({name}) is post-norm: it normalizes what attention adds"
            return f"layer {number} ({name}) is unknown"
        return None

    @property
    def pool(self) -> Pool | None:
        """PRR pools with T queries and has no single row."""
        module = getattr(self.model, "attn_pool", None)
        if module is None:
            return None
        if not hasattr(module, "latent_len"):
            queries = None
        elif getattr(module, "pool", "") == "token":
            queries = slice(0, 1)
        else:
            queries = slice(None)
        return Pool(module, queries, self.model.norm)

    @property
    def embedding(self) -> nn.Module:
        """`embeds` in NaFlex."""
        return self.model.embeds if hasattr(self.model, "embeds") else self.model.patch_embed

    @property
    def prefix(self) -> list[str]:
        names = []
        owner = getattr(self.model, "embeds", self.model)
        if getattr(owner, "cls_token", None) is not None:
            names.append("class token")
        if hasattr(self.model, "dist_token"):
            names.append("distillation token")
        registers = self.model.num_prefix_tokens - len(names)
        return names + [f"register {number + 1}" for number in range(registers)]

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        embed = self.embedding
        image = tuple(image)
        hybrid = hasattr(embed, "backbone")  # timm's hybrids take images of any size
        strict = not hybrid and getattr(embed, "strict_img_size", False)
        if strict and embed.img_size is not None:
            require_size(self.model, image, only=embed.img_size)
        elif getattr(embed, "is_linear", not hybrid) and not embed.dynamic_img_pad:
            require_size(self.model, image, patch=embed.patch_size)
        if hybrid and not embed.dynamic_img_pad and image == tuple(embed.img_size):
            rows, cols = embed.grid_size  # measured by a forward of timm
        else:
            rows, cols = embed.dynamic_feat_size(image)
        grid = TokenGrid(rows, cols, _stride(embed), self.model.num_prefix_tokens, image)
        return replace(grid, readout=_readout(self.model, grid))

    @property
    def built_size(self) -> tuple[int, int] | None:
        embed = getattr(self.model, "patch_embed", None)
        embed = getattr(self.model, "embeds", embed)
        size = getattr(embed, "img_size", None)
        return tuple(size) if size else None

    @property
    def preprocessing(self) -> dict:
        """From the model's own `pretrained_cfg`, else timm's defaults."""
        from timm.data import resolve_model_data_config

        config = resolve_model_data_config(self.model)
        channels, height, width = config["input_size"]
        channels = getattr(self.model, "in_chans", channels)
        return config | {"input_size": (channels, height, width)}

    @property
    def classes(self) -> int | None:
        """Number of the head's outputs, because the head may have been replaced, else `num_classes`."""
        declared = getattr(self.model, "num_classes", None)
        if not hasattr(self.model, "get_classifier"):
            return declared
        heads = self.model.get_classifier()
        if not isinstance(heads, tuple | list):
            heads = [heads]
        layers = [layer for head in heads for layer in head.modules()]
        without_weights = nn.Identity | nn.Sequential | nn.Dropout | nn.ModuleList
        if all(isinstance(layer, without_weights) for layer in layers):
            return 0
        for layer in reversed(layers):
            width = getattr(layer, "out_features", getattr(layer, "out_channels", None))
            if width:
                return width
        return declared

    def pooled_features(self, images: Tensor) -> Tensor:
        tokens = self.model.forward_features(images)
        return self.model.forward_head(tokens, pre_logits=True)

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        return self.model.forward_head(self.model.norm(tokens), pre_logits=pre_logits)

    def positions(self) -> Tensor | None:
        model = self.model
        naflex = hasattr(model, "embeds")
        embed = model.embeds if naflex else getattr(model, "patch_embed", None)
        table = getattr(embed if naflex else model, "pos_embed", None)
        if not isinstance(table, Tensor) or table.dim() < 3:
            return None
        width = getattr(model, "embed_dim", None)
        if table.shape[0] != 1 or table.shape[-1] != width:
            return None
        table = table.detach()[0]
        if naflex and table.dim() == 3:
            return table
        grid = getattr(embed, "grid_size", None)
        if table.dim() != 2 or not grid:
            return None
        rows, cols = grid
        prefix = len(table) - rows * cols
        return table[prefix:].unflatten(0, (rows, cols)) if prefix >= 0 else None


def _stride(embed: nn.Module) -> tuple[int, int]:
    """Pixels from one token to the next.

    For a hybrid, timm's ratio is image ÷ features, which is wrong if one was rounded. The reduction of the backbone is
    exact, unless the backbone was changed and no longer fits the feature size.
    """
    info = getattr(getattr(embed, "backbone", None), "feature_info", None)
    if info is None:
        return tuple(embed.feat_ratio(as_scalar=False))
    reduction = info.reduction()[-1] if hasattr(info, "reduction") else info[-1]["reduction"]
    stride = []
    for side, features, patch in zip(
        embed.img_size, embed.feature_size, embed.patch_size, strict=True
    ):
        fits = abs(side / reduction - features) < 1
        stride.append(patch * (reduction if fits else round(side / features)))
    return tuple(stride)


def _readout(model: nn.Module, grid: TokenGrid) -> Tensor | None:
    """Read-out, or None for attention pools (it depends on the image) and max, avgmax and no pooling (no row)."""
    if getattr(model, "attn_pool", None) is not None:
        return None
    if model.global_pool == "token":
        heads = 2 if hasattr(model, "head_dist") else 1  # distilled DeiT averages two heads
        return grid.mean_readout(slice(0, heads))
    if model.global_pool == "avg":  # even with a class token, which the head then ignores
        start = 0 if getattr(model, "pool_include_prefix", False) else grid.prefix
        return grid.mean_readout(slice(start, None))
    return None


adapter = Timm
