"""Which models are accepted. Refusal is the default: a plausible but wrong picture is worse than none.

A model is accepted if its class is a known one and every block holds attention modules of a known kind, that is, a
softmax over all tokens of one whole image. What the model then really calls is checked by the capture.
"""

from __future__ import annotations

from torch import nn

MODELS = {
    "timm.models.vision_transformer.VisionTransformer",
    "timm.models.deit.VisionTransformerDistilled",
    "timm.models.vision_transformer_relpos.VisionTransformerRelPos",
    "timm.models.beit.Beit",
    "timm.models.eva.Eva",
    "timm.models.naflexvit.NaFlexVit",
}

# Modules that make exactly one attention call. ParallelScalingBlock is a block and its own attention.
ATTENTION = {
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.vision_transformer.Attention",
    "timm.models.vision_transformer.ParallelScalingBlock",
    "timm.models.vision_transformer_relpos.RelPosAttention",
    "timm.models.beit.Attention",
    "timm.models.eva.EvaAttention",
}

_WINDOWS = "its attention stays inside windows of the image, so no map covers the whole image"
_POOLED = "its attention reads pooled or strided tokens, so the keys are not the patches of the image"
_CONVOLUTION = "it is not a Vision Transformer: its features come from convolutions or mixing layers"
_MULTIHEAD = "it computes attention inside torch.nn.MultiheadAttention, which does not show its queries and keys"
_SHRINKING = "its attention shrinks the grid between stages"
_DIFFERENCE = "its attention is the difference of two softmaxes, which no single map shows"
_MIXED = "it mixes the heads after the softmax, so no head's map is what the model uses"

REASONS = {
    "SwinTransformer": _WINDOWS,
    "SwinTransformerV2": _WINDOWS,
    "SwinTransformerV2Cr": _WINDOWS,
    "VisionTransformerSAM": _WINDOWS,
    "HieraDet": _WINDOWS,
    "MaxxVit": _WINDOWS,
    "GlobalContextVit": _WINDOWS,
    "Nest": _WINDOWS,
    "TinyVit": _WINDOWS,
    "DaVit": _WINDOWS,
    "EfficientVitMsra": _WINDOWS,
    "Hiera": "its attention runs inside mask units and pools the queries, so no map covers the whole image",
    "Xcit": "its attention is a softmax over channels, not over patches",
    "Cait": _MIXED,
    "VOLO": "its outlook attention weighs a small neighborhood and is not a softmax over the patches",
    "ConVit": "its heads blend a softmax over content with one over positions, which no single map shows",
    "Levit": _SHRINKING,
    "LevitDistilled": _SHRINKING,
    "MultiScaleVit": _POOLED,
    "PyramidVisionTransformerV2": _POOLED,
    "Twins": _WINDOWS,
    "CrossVit": "it runs two grids of different patch sizes side by side",
    "TNT": "it attends within patches and between them",
    "PoolingVisionTransformer": _SHRINKING,
    "ResNet": _CONVOLUTION,
    "ByobNet": _CONVOLUTION,
    "MlpMixer": _CONVOLUTION,
    "ConvNeXt": _CONVOLUTION,
    "MetaFormer": _CONVOLUTION,
    "EfficientNet": _CONVOLUTION,
    "RegNet": _CONVOLUTION,
}

ATTENTION_REASONS = {"DiffAttention": _DIFFERENCE, "DiffParallelScalingBlock": _DIFFERENCE}


class UnsupportedModelError(ValueError):
    """The model, or what it did in this forward, cannot be shown truthfully. The message names it and says why."""


def qualified_name(thing: object) -> str:
    """Module and class of an object, as in 'timm.models.beit.Beit'."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's, DataParallel's or DistributedDataParallel's wrapper."""
    if hasattr(model, "_orig_mod"):
        return unwrap(model._orig_mod)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    return model


def transformers(model: nn.Module) -> dict[str, nn.Module]:
    """The known Vision Transformers inside a model, by Python expression ("model.backbone", "model[1]")."""
    if qualified_name(model) in MODELS:
        return {"model": model}
    return {_path(model, name): m for name, m in model.named_modules() if qualified_name(m) in MODELS}


def _path(model: nn.Module, name: str) -> str:
    """The Python expression for a submodule of `model`."""
    path, parent = "model", model
    for part in filter(None, name.split(".")):
        if isinstance(parent, nn.Sequential | nn.ModuleList):
            path += f"[{part}]"
        elif isinstance(parent, nn.ModuleDict):
            path += f'["{part}"]'
        elif part.isidentifier():
            path += f".{part}"
        else:
            return f'model.get_submodule("{name}")'
        parent = parent.get_submodule(part)
    return path


def transformer(model: nn.Module) -> nn.Module:
    """The Vision Transformer to look into: the model itself, or the only one inside a wrapper (normalization + ViT,
    backbone + head). Raises UnsupportedModelError if there is none, or more than one."""
    found = list(transformers(model).values())
    if len(found) != 1:
        raise refuse(model, REASONS.get(type(model).__name__) or _unknown(model))
    return found[0]


def within(model: nn.Module) -> nn.Module:
    """The only Vision Transformer inside a model, or the model itself if there is none or more than one."""
    model = unwrap(model)
    found = list(transformers(model).values())
    return found[0] if len(found) == 1 else model


def model_name(model: nn.Module) -> str:
    """What to call a model in a message: its timm architecture and class."""
    name, kind = timm_name(model), type(model).__name__
    return kind if name == kind else f"{name} ({kind})"


def timm_name(model: nn.Module) -> str:
    return (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or type(model).__name__


def refuse(model: nn.Module, reason: str) -> UnsupportedModelError:
    """The error to raise for a model and a reason."""
    return UnsupportedModelError(f"vitlens cannot show the attention of {model_name(model)}: {reason}.")


def attention_modules(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Per layer the (name, module) of its attention, in the order of the calls. Raises UnsupportedModelError.

    One module a layer, two for the parallel blocks of "Three things everyone should know about ViTs".
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"vitlens looks into a torch.nn.Module, but got {type(model).__name__}.")
    if qualified_name(model) not in MODELS:
        raise refuse(model, REASONS.get(type(model).__name__) or _unknown(model))
    layers = []
    for index, block in enumerate(model.blocks):
        names = {qualified_name(m): m for m in block.modules()}
        for name, module in names.items():
            if (reason := ATTENTION_REASONS.get(type(module).__name__)) is not None:
                raise refuse(model, reason)
            if "attention" in name.rsplit(".", 1)[-1].lower() and name not in ATTENTION:
                raise refuse(model, f"layer {index} uses {name}, which vitlens does not know")
        parts = ((f"blocks.{index}.{name}".rstrip("."), m) for name, m in block.named_modules())
        found = [(name, m) for name, m in parts if qualified_name(m) in ATTENTION]
        if not found:
            raise refuse(model, f"layer {index} ({qualified_name(block)}) holds no attention that vitlens knows")
        layers.append(found)
    if not layers:
        raise refuse(model, "it has no blocks")
    if len({id(m) for layer in layers for _, m in layer}) < sum(map(len, layers)):
        raise refuse(model, "its blocks share one attention module, so its calls cannot be told apart")
    return layers


def refuse_chance(model: nn.Module) -> None:
    """Raise if dropout, stochastic depth or patch dropout is active, because the captured map would be random."""
    for name, module in model.named_modules():
        rate = next((getattr(module, a) for a in ("p", "drop_prob", "prob") if hasattr(module, a)), 0)
        if module.training and "drop" in type(module).__name__.lower() and rate and rate > 0:
            raise refuse(
                model,
                f"it is in training mode and {name} ({type(module).__name__}, {rate:g}) leaves things out at random, "
                "so no map is what the whole model does; call model.eval() first",
            )


def gated(modules: list[list[tuple[str, nn.Module]]]) -> bool:
    """True if attention outputs pass a learned gate (Eva, NaFlex), which maps of attention do not include."""
    return any(getattr(m, "gate", None) is not None for layer in modules for _, m in layer)


def _unknown(model: nn.Module) -> str:
    if any(isinstance(m, nn.MultiheadAttention) for m in model.modules()):
        return _MULTIHEAD
    inner = list(transformers(model))
    if len(inner) == 1:
        return f"it wraps a Vision Transformer; capture that one instead (`capture({inner[0]})`)"
    if inner:
        named = ", ".join(f"`{path}`" for path in inner)
        return f"it holds {len(inner)} Vision Transformers ({named}); take the one that is run when the model is"
    known = ", ".join(sorted(name.rsplit(".", 1)[-1] for name in MODELS))
    return f"its class is not among those known to attend with a softmax over the patches of the image ({known})"
