"""Models of timm.

To support one, add its class to `MODELS` and the class of its attention to `ATTENTION`. To refuse one with a reason,
add it to `_REFUSED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported.adapter import Family, Pool, mean_readout
from vitlens.recorder.supported.names import qualified_name
from vitlens.recorder.supported.refusal import refuse, require_size

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
    "its attention stays inside windows of the image, so no map covers the whole image": (
        "SwinTransformer SwinTransformerV2 SwinTransformerV2Cr VisionTransformerSAM HieraDet MaxxVit GlobalContextVit "
        "Nest TinyVit DaVit EfficientVitMsra Twins"
    ),
    "it is not a Vision Transformer: its features come from convolutions or mixing layers": (
        "ResNet ByobNet MlpMixer ConvNeXt MetaFormer EfficientNet RegNet"
    ),
    "its attention shrinks the grid between stages": "Levit LevitDistilled PoolingVisionTransformer",
    "its attention reads pooled or strided tokens, so the keys are not the patches of the image": (
        "MultiScaleVit PyramidVisionTransformerV2"
    ),
    "its attention runs inside mask units and pools the queries, so no map covers the whole image": "Hiera",
    "its attention is a softmax over channels, not over patches": "Xcit",
    "it mixes the heads after the softmax, so no head's map is what the model uses": "Cait",
    "its outlook attention weighs a small neighborhood and is not a softmax over the patches": "VOLO",
    "its heads blend a softmax over content with one over positions, which no single map shows": "ConVit",
    "it runs two grids of different patch sizes side by side": "CrossVit",
    "it attends within patches and between them": "TNT",
}
REASONS = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
"""Reason for refusing a model, by class."""

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

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        """One module per layer, or two in the parallel blocks of "Three things everyone should know about ViTs"."""
        model, layers = self.model, []
        for index, block in enumerate(model.blocks):
            attention = []
            for path, module in block.named_modules():
                name = qualified_name(module)
                if type(module).__name__ in DIFFERENCES:
                    raise refuse(
                        model,
                        "its attention is the difference of two softmaxes, which no single map shows",
                    )
                if "attention" in name.rsplit(".", 1)[-1].lower() and name not in ATTENTION:
                    raise refuse(
                        model, f"layer {index} uses {name}, which vitlens does not support"
                    )
                if name in ATTENTION:
                    attention.append((f"blocks.{index}.{path}".rstrip("."), module))
            if not attention:
                raise refuse(
                    model,
                    f"layer {index} ({qualified_name(block)}) has no supported attention module",
                )
            layers.append(attention)
        return layers

    @property
    def capture_problem(self) -> str | None:
        """Layers that were built without timm's fused attention do not call the function that a capture intercepts."""
        if all(
            getattr(module, "fused_attn", True) for layer in self.attention() for _, module in layer
        ):
            return None
        return "it was built without fused attention; call timm.layers.set_fused_attn(True) and create it again"

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.model.blocks

    @property
    def stream_problem(self) -> str | None:
        for number, block in enumerate(self.blocks):
            if qualified_name(block) not in PRE_NORM:
                post = "Post" in type(block).__name__
                kind = "is post-norm: it normalizes what attention adds" if post else "is unknown"
                return f"layer {number} ({type(block).__name__}) {kind}"
        return None

    @property
    def pool(self) -> Pool | None:
        """PRR pools with T queries and has no single row."""
        module = getattr(self.model, "attn_pool", None)
        if module is None:
            return None
        queries = slice(0, 1) if getattr(module, "pool", "") == "token" else slice(None)
        return Pool(module, queries if hasattr(module, "latent_len") else None, self.model.norm)

    @property
    def embedding(self) -> nn.Module:
        """`embeds` in NaFlex."""
        return self.model.embeds if hasattr(self.model, "embeds") else self.model.patch_embed

    @property
    def prefix(self) -> list[str]:
        model = self.model
        special = (
            ["class token"]
            if getattr(getattr(model, "embeds", model), "cls_token", None) is not None
            else []
        )
        special += ["distillation token"] if hasattr(model, "dist_token") else []
        return special + [
            f"register {i + 1}" for i in range(model.num_prefix_tokens - len(special))
        ]

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        embed, image = self.embedding, tuple(image)
        plain = not hasattr(embed, "backbone")  # timm's hybrids take images of any size
        if plain and getattr(embed, "strict_img_size", False) and embed.img_size is not None:
            require_size(self.model, image, only=embed.img_size)
        elif getattr(embed, "is_linear", plain) and not embed.dynamic_img_pad:
            require_size(self.model, image, patch=embed.patch_size)
        measured = (
            not plain and not embed.dynamic_img_pad and image == tuple(embed.img_size)
        )  # by timm's own forward
        rows, cols = embed.grid_size if measured else embed.dynamic_feat_size(image)
        grid = TokenGrid(rows, cols, _stride(embed), self.model.num_prefix_tokens, image)
        return replace(grid, readout=_readout(self.model, grid))

    @property
    def built_size(self) -> tuple[int, int] | None:
        size = getattr(
            getattr(self.model, "embeds", getattr(self.model, "patch_embed", None)),
            "img_size",
            None,
        )
        return size and tuple(size)

    @property
    def preprocessing(self) -> dict:
        """From the model's own `pretrained_cfg`, else timm's defaults."""
        from timm.data import resolve_model_data_config

        config = resolve_model_data_config(self.model)
        channels, *size = config["input_size"]
        return config | {"input_size": (getattr(self.model, "in_chans", channels), *size)}

    @property
    def classes(self) -> int | None:
        """Number of the head's outputs, because the head may have been replaced, else `num_classes`."""
        declared = getattr(self.model, "num_classes", None)
        if not hasattr(self.model, "get_classifier"):
            return declared
        heads = self.model.get_classifier()
        layers = [
            layer
            for head in (heads if isinstance(heads, tuple | list) else [heads])
            for layer in head.modules()
        ]
        if all(
            isinstance(layer, nn.Identity | nn.Sequential | nn.Dropout | nn.ModuleList)
            for layer in layers
        ):
            return 0
        widths = [
            getattr(layer, "out_features", getattr(layer, "out_channels", None)) for layer in layers
        ]
        return next((width for width in reversed(widths) if width), declared)

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        return self.model.forward_head(self.model.norm(tokens), pre_logits=pre_logits)

    def positions(self) -> Tensor | None:
        model = self.model
        embed = getattr(model, "embeds", None) or getattr(model, "patch_embed", None)
        table = getattr(embed if hasattr(model, "embeds") else model, "pos_embed", None)
        width, grid = getattr(model, "embed_dim", None), getattr(embed, "grid_size", None)
        shape = tuple(table.shape) if isinstance(table, Tensor) else ()
        if (
            len(shape) == 4 and shape[0] == 1 and shape[-1] == width and hasattr(model, "embeds")
        ):  # NaFlex
            return table.detach()[0]
        if (
            len(shape) == 3
            and shape[0] == 1
            and shape[-1] == width
            and grid
            and shape[1] >= grid[0] * grid[1]
        ):
            return table.detach()[0, shape[1] - grid[0] * grid[1] :].unflatten(0, tuple(grid))
        return None


def _stride(embed: nn.Module) -> tuple[int, int]:
    """Pixels from one token to the next.

    For a hybrid, timm's ratio is image ÷ features, which is wrong if one was rounded. The reduction of the backbone is
    exact, unless the backbone was changed and no longer fits the feature size.
    """
    info = getattr(getattr(embed, "backbone", None), "feature_info", None)
    if info is None:
        return tuple(embed.feat_ratio(as_scalar=False))
    reduction = info.reduction()[-1] if hasattr(info, "reduction") else info[-1]["reduction"]
    sizes = zip(embed.img_size, embed.feature_size, embed.patch_size, strict=True)
    return tuple(
        p * (reduction if abs(side / reduction - n) < 1 else round(side / n))
        for side, n, p in sizes
    )


def _readout(model: nn.Module, grid: TokenGrid) -> Tensor | None:
    """Read-out, or None for attention pools (it depends on the image) and max, avgmax and no pooling (no row)."""
    if getattr(model, "attn_pool", None) is not None or model.global_pool not in ("token", "avg"):
        return None
    if model.global_pool == "avg":  # even with a class token, which the head then ignores
        return mean_readout(
            grid, slice(0 if getattr(model, "pool_include_prefix", False) else grid.prefix, None)
        )
    return mean_readout(
        grid, slice(0, 2 if hasattr(model, "head_dist") else 1)
    )  # distilled DeiT averages two heads


adapter = Timm
