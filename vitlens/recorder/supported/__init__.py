"""Which models are accepted. Refusal is the default: a plausible but wrong image is worse than none.

A model is accepted if its class is a known one and every block holds attention modules of a known kind: a softmax over
all tokens of one whole image. The calls that the model then makes are checked by the capture. Each library has its file
here, with an adapter that fills in the `Family` protocol. The rest of vitlens uses `family(model)`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from torch import Tensor, nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import open_clip, timm, torchvision, transformers
from vitlens.recorder.supported.protocol import (
    MLPS,
    NORMS,
    Family,
    Pool,
    UnsupportedModelError,
    model_name,
    qualified_name,
    refuse,
    short_name,
)

__all__ = [
    "FAMILIES", "MLPS", "NORMS", "Family", "Pool", "UnsupportedModelError", "attention_modules", "embed_texts",
    "embeds_texts", "family", "found_in", "gated", "head_count", "known", "label_names", "model_name", "pooled",
    "qualified_name", "refuse", "require_capturable", "short_name", "states_preprocessing", "title", "token_grid",
    "transformer", "unwrap", "within",
]  # fmt: skip

FAMILIES: dict[str, Callable[[nn.Module], Family]] = {
    **dict.fromkeys(timm.MODELS, timm.Timm),
    **dict.fromkeys(transformers.MODELS, transformers.Transformers),
    **dict.fromkeys(torchvision.MODELS, torchvision.TorchVision),
    **dict.fromkeys(open_clip.MODELS, open_clip.of_tower),
}
"""The adapter for every known class, by its full name, so that looking one up imports no library."""

_MULTIHEAD = "it attends in torch.nn.MultiheadAttention, but its class is not one whose tokens vitlens knows"


HARMLESS = {
    "__init__", "init_weights", "_init_weights", "fix_init_weight", "no_weight_decay", "group_matcher",
    "load_pretrained", "get_classifier", "reset_classifier", "set_grad_checkpointing",
}  # fmt: skip
"""Methods of timm's models that do not change the forward."""


def extended(model: nn.Module) -> tuple[str | None, list[str]]:
    """Full name of the model's class, or of the timm class that it extends, and the methods that it overrides."""
    kinds = type(model).__mro__
    for number, kind in enumerate(kinds):
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in FAMILIES and (number == 0 or name in timm.MODELS):
            own = {method for each in kinds[:number] for method, value in vars(each).items() if callable(value)}
            forward = {*dir(kind)} - {*dir(nn.Module)} | {"forward", "__call__"}
            return name, sorted(own & forward - HARMLESS)
    return None, []


def known(model: nn.Module) -> bool:
    """True if the model's class is a known one, or extends one of timm without changing its forward."""
    name, overridden = extended(model)
    return name is not None and not overridden


def family(model: nn.Module) -> Family:
    """Adapter for a model's class. Unknown classes get the timm adapter."""
    return FAMILIES[extended(model)[0]](model) if known(model) else timm.Timm(model)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's, DataParallel's or DistributedDataParallel's wrapper. Raises TypeError for
    anything but a module."""
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise TypeError(f"vitlens looks into a torch.nn.Module, but got {got}. `vitlens.load_model(name)` opens one.")
    if hasattr(model, "_orig_mod"):
        return unwrap(model._orig_mod)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    return model


def found_in(model: nn.Module) -> dict[str, nn.Module]:
    """The known Vision Transformers inside a model, or the model itself, by name ("" for itself)."""
    inner: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if known(module) and not any(outer == "" or name.startswith(f"{outer}.") for outer in inner):
            inner[name] = module
    return inner


def within(model: nn.Module) -> nn.Module:
    """The only Vision Transformer inside a model, or the model itself if there is none or more than one."""
    inner = list(found_in(model := unwrap(model)).values())
    return inner[0] if len(inner) == 1 else model


def transformer(model: nn.Module) -> nn.Module:
    """The Vision Transformer to look into: the model itself, or the only one inside a wrapper.

    Raises UnsupportedModelError if there is none, or more than one.
    """
    if not known(inner := within(model)):
        raise refuse(model, _why_not(model))
    return inner


def attention_modules(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Per layer the (name, module) of its attention, in the order of the calls. Raises UnsupportedModelError."""
    if not known(model):
        raise refuse(model, _why_not(model))
    layers = family(model).attention()
    if not layers:
        raise refuse(model, "it has no layers")
    if len({id(module) for layer in layers for _, module in layer}) < sum(map(len, layers)):
        raise refuse(model, "its layers share one attention module, so its calls cannot be told apart")
    return layers


def gated(modules: list[list[tuple[str, nn.Module]]]) -> bool:
    """True if outputs of `attention_modules` pass a learned gate, as in Eva and NaFlex, which no map includes."""
    return any(getattr(module, "gate", None) is not None for layer in modules for _, module in layer)


def head_count(attention: nn.Module) -> int:
    """H of an attention module, or of an attention pool."""
    for module in attention.modules():
        if count := getattr(module, "num_heads", None) or getattr(module, "num_attention_heads", None):
            return count
    raise TypeError(f"{type(attention).__name__} has no number of heads.")


def token_grid(model: nn.Module, image: tuple[int, int]) -> TokenGrid:
    """The `TokenGrid` of a supported model for an input of (height, width) pixels.

    The read-out of an attention pool depends on the image: it is None here, and a capture fills it in.
    """
    return family(model).grid(image)


def require_capturable(model: nn.Module) -> None:
    """Raise UnsupportedModelError if attention would be missed in the model's settings, or is random in its mode:
    dropout, stochastic depth or patch dropout is active."""
    if reason := family(model).capture_problem:
        raise refuse(model, reason)
    for name, module in model.named_modules():
        if not (module.training and "drop" in type(module).__name__.lower()):
            continue
        rate = next((getattr(module, a) for a in ("p", "drop_prob", "prob") if hasattr(module, a)), 0)
        if rate and rate > 0:
            what = f"{name} ({type(module).__name__}, {rate:g})"
            raise refuse(model, f"in training mode {what} drops parts of it at random; call model.eval() first")


def pooled(model: nn.Module, images: Tensor) -> Tensor:
    """(B, D) features: the input of the classifier, or the output of a model without one."""
    about = family(model)
    if type(about) is timm.Timm:
        return model.forward_head(model.forward_features(images), pre_logits=True)
    if about.classes == 0:
        return about.run(images)
    tokens, thread = [], threading.get_ident()

    def keep(_, args: tuple, output: Tensor) -> None:
        if threading.get_ident() == thread:
            tokens.append(output)

    hook = about.blocks[-1].register_forward_hook(keep)
    try:
        about.run(images)
    finally:
        hook.remove()
    return about.head(tokens[-1], pre_logits=True)


def title(model: nn.Module) -> str:
    """Architecture of a model for figures, with the sizes that differ from those in its name:
    "vit_tiny_patch16_224, patch 8"."""
    model = family(model).model
    name, embed = short_name(model), getattr(model, "patch_embed", None)
    sizes = ((r"patch(\d+)", "patch_size", "patch {}"), (r"_(\d{2,4})$", "img_size", "{} px"))
    parts = [name]
    for pattern, attribute, words in sizes:
        named, built = re.search(pattern, name), getattr(embed, attribute, None)
        if named and built and tuple(built) != (int(named[1]),) * 2:
            parts.append(words.format(" × ".join(map(str, dict.fromkeys(built)))))
    return ", ".join(parts)


def states_preprocessing(model: nn.Module) -> bool:
    """False for a model whose preprocessing is a guess: timm's, or an unknown one, without a `pretrained_cfg`."""
    return hasattr(model, "pretrained_cfg") or type(family(model)) is not timm.Timm


def label_names(model: nn.Module) -> list[str] | None:
    """Names of the classes, where the model has them. transformers numbers classes without names: LABEL_0, LABEL_1 …"""
    names = getattr(model, "label_names", None)
    numbered = getattr(getattr(model, "config", None), "id2label", None) or {}
    if names is not None or not known(model) or set(numbered) != set(range(len(numbered))):
        return names
    names = [numbered[number] for number in range(len(numbered))]
    return None if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


def embeds_texts(model: nn.Module) -> bool:
    """True if the model has a text tower, whose embeddings lie in the space of `pooled`."""
    return hasattr(model, "get_text_features") or hasattr(model, "encode_text")


def embed_texts(model: nn.Module, prompts: list[str], tokenizer: Callable | None = None) -> Tensor:
    """(N, D) embeddings of prompts, in the space of `pooled`. tokenizer: prompts → input of the text tower; by default
    the model's own.

    Raises ValueError for a model without a text tower, and OSError without a tokenizer.
    """
    if hasattr(model, "get_text_features"):
        return transformers.embed_texts(model, prompts, tokenizer)
    if hasattr(model, "encode_text"):
        return open_clip.embed_texts(model, prompts, tokenizer)
    raise ValueError(
        f"{model_name(model)} has no text tower, so it cannot be asked about a text. Open a CLIP or SigLIP model with "
        "both towers, or compare with a picture."
    )


def _why_not(model: nn.Module) -> str:
    if (reason := timm.REASONS.get(type(model).__name__)) is not None:
        return reason
    inner = list(found_in(model))
    if not inner and any(isinstance(m, nn.MultiheadAttention) for m in model.modules()):
        return _MULTIHEAD
    if len(inner) == 1:
        return f"it wraps a Vision Transformer; capture that one instead (`model.get_submodule({inner[0]!r})`)"
    if inner:
        named = ", ".join(map(repr, inner))
        return f"it holds {len(inner)} Vision Transformers ({named}); take the one that is run when the model is"
    name, overridden = extended(model)
    register = f"register it by `vitlens.register_model({type(model).__name__}, …)`"
    if name is not None:
        return (
            f"it extends timm's {name.rsplit('.', 1)[-1]} and overrides {', '.join(overridden)}, so its tokens and "
            f"read-out are unknown; use timm's own class, or {register}"
        )
    return (
        "its class is not among those known to attend with a softmax over the patches of the image "
        f"({timm.KNOWN}); if it does, {register}"
    )
