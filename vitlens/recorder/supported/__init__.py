"""Which models are accepted. Refusal is the default: a plausible but wrong picture is worse than none.

A model is accepted if its class is a known one and every block holds attention modules of a known kind: a softmax over
all tokens of one whole image. What the model then really calls is checked by the capture. What is known of a library's
models is in its file here, in the words of the `Family` protocol; everything else of vitlens asks `family(model)`.
"""

from __future__ import annotations

from collections.abc import Callable
from keyword import iskeyword

from torch import nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import open_clip, timm, torchvision, transformers
from vitlens.recorder.supported.protocol import (
    Family,
    UnsupportedModelError,
    model_name,
    qualified_name,
    refuse,
    short_name,
)

__all__ = [
    "FAMILIES", "Family", "UnsupportedModelError", "attention_modules", "family", "found_in", "known",
    "model_name", "qualified_name", "refuse", "refuse_chance", "short_name", "token_grid", "transformer",
    "unwrap", "within",
]  # fmt: skip

FAMILIES: dict[str, Callable[[nn.Module], Family]] = {
    **dict.fromkeys(timm.MODELS, timm.Timm),
    **dict.fromkeys(transformers.MODELS, transformers.Transformers),
    **dict.fromkeys(torchvision.MODELS, torchvision.TorchVision),
    **dict.fromkeys(open_clip.MODELS, open_clip.seen),
}
"""The family of every known class, by its full name, so that looking one up imports no library."""

_MULTIHEAD = "it attends in torch.nn.MultiheadAttention, but its class is not one whose tokens vitlens knows"


def known(model: nn.Module) -> bool:
    """Whether a model's own class is a known one."""
    return qualified_name(model) in FAMILIES


def family(model: nn.Module) -> Family:
    """What is known of a model. One that nobody knows is asked as if it were timm's, whose words many models use."""
    return FAMILIES.get(qualified_name(model), timm.Timm)(model)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's, DataParallel's or DistributedDataParallel's wrapper. Raises TypeError for what
    is no model."""
    if not isinstance(model, nn.Module):
        came = type(model).__name__
        raise TypeError(f"vitlens looks into a torch.nn.Module, but got {came}. `vitlens.load_model(name)` opens one.")
    if hasattr(model, "_orig_mod"):
        return unwrap(model._orig_mod)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    return model


def found_in(model: nn.Module) -> dict[str, nn.Module]:
    """The known Vision Transformers inside a model, by Python expression ("model.backbone", "model[1]")."""
    if known(model):
        return {"model": model}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if known(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return {_path(model, name): module for name, module in found.items()}


def _path(model: nn.Module, name: str) -> str:
    """The Python expression for a submodule of `model`."""
    path, parent = "model", model
    for part in filter(None, name.split(".")):
        if isinstance(parent, nn.Sequential | nn.ModuleList) and part.isdigit():
            path += f"[{part}]"
        elif isinstance(parent, nn.ModuleDict):
            path += f"[{part!r}]"
        elif part.isidentifier() and not iskeyword(part):
            path += f".{part}"
        else:
            return f"model.get_submodule({name!r})"
        parent = parent.get_submodule(part)
    return path


def transformer(model: nn.Module) -> nn.Module:
    """The Vision Transformer to look into: the model itself, or the only one inside a wrapper.

    Raises UnsupportedModelError if there is none, or more than one.
    """
    found = list(found_in(model).values())
    if len(found) != 1:
        raise refuse(model, _why_not(model))
    return found[0]


def within(model: nn.Module) -> nn.Module:
    """The only Vision Transformer inside a model, or the model itself if there is none or more than one."""
    model = unwrap(model)
    found = list(found_in(model).values())
    return found[0] if len(found) == 1 else model


def attention_modules(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Per layer the (name, module) of its attention, in the order of the calls. Raises UnsupportedModelError."""
    if not known(model):
        raise refuse(model, _why_not(model))
    return family(model).attention()


def gated(modules: list[list[tuple[str, nn.Module]]]) -> bool:
    """Whether the outputs of `attention_modules` pass a learned gate, as in Eva and NaFlex, which no map includes."""
    return any(getattr(module, "gate", None) is not None for layer in modules for _, module in layer)


def token_grid(model: nn.Module, image: tuple[int, int]) -> TokenGrid:
    """The `TokenGrid` of a supported model for an input of (height, width) pixels.

    The read-out of an attention pool depends on the image: it is None here, and a capture fills it in.
    """
    return family(model).grid(image)


def refuse_chance(model: nn.Module) -> None:
    """Raise if dropout, stochastic depth or patch dropout is active, because the captured map would be random."""
    if known(model) and (reason := family(model).chance):
        raise refuse(model, reason)
    for name, module in model.named_modules():
        if not (module.training and "drop" in type(module).__name__.lower()):
            continue
        rate = next((getattr(module, a) for a in ("p", "drop_prob", "prob") if hasattr(module, a)), 0)
        if rate and rate > 0:
            what = f"{name} ({type(module).__name__}, {rate:g})"
            raise refuse(model, f"in training mode {what} drops parts of it at random; call model.eval() first")


def _why_not(model: nn.Module) -> str:
    if (reason := timm.REASONS.get(type(model).__name__)) is not None:
        return reason
    inner = list(found_in(model))
    if not inner and any(isinstance(m, nn.MultiheadAttention) for m in model.modules()):
        return _MULTIHEAD
    if len(inner) == 1:
        return f"it wraps a Vision Transformer; capture that one instead (`capture({inner[0]})`)"
    if inner:
        named = ", ".join(f"`{path}`" for path in inner)
        return f"it holds {len(inner)} Vision Transformers ({named}); take the one that is run when the model is"
    return f"its class is not among those known to attend with a softmax over the patches of the image ({timm.KNOWN})"
