"""Refusal of models whose attention cannot be shown exactly, with the reason."""

from __future__ import annotations

import torch
from torch import nn

from vitlens.recorder.supported.lookup import (
    family,
    inner_transformer,
    is_known,
    known_base,
    library_file,
    transformers_in,
)
from vitlens.recorder.supported.refusal import refuse


def transformer(model: nn.Module) -> nn.Module:
    """The Vision Transformer to analyze: the model itself, or the only one inside it.

    Raises UnsupportedModelError if it contains zero or several.
    """
    return _require_known(inner_transformer(model), model)


def attention_modules(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Per layer the (name, module) of its attention, in the order of the calls. Raises UnsupportedModelError."""
    layers = family(_require_known(model, model)).attention()
    modules = [id(module) for layer in layers for _, module in layer]
    if len(set(modules)) < len(modules):
        raise refuse(
            model,
            "its layers share one attention module, so its calls cannot be assigned to layers",
        )
    return layers


def require_capturable(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the model's settings hide its attention, or its mode makes it random: dropout,
    stochastic depth or patch dropout is active."""
    reason = family(model).capture_problem
    if reason is not None:
        raise refuse(model, reason)
    for name, module in model.named_modules():
        rate = _drop_rate(module) if module.training else 0
        if rate > 0:
            layer = f"{name} ({type(module).__name__}, {rate:g})"
            raise refuse(
                model,
                f"in training mode {layer} drops parts of it at random; call model.eval() first",
            )


def _drop_rate(module: nn.Module) -> float:
    """Rate of a module that drops values, paths or patches in training mode, else 0."""
    if "drop" not in type(module).__name__.lower():
        return 0
    for attribute in ("p", "drop_prob", "prob"):
        if hasattr(module, attribute):
            return getattr(module, attribute) or 0
    return 0


def _require_known(inner: nn.Module, model: nn.Module) -> nn.Module:
    """The inner module. Raises UnsupportedModelError about the whole model if its class is not supported."""
    if not is_known(inner):
        raise refuse(model, _why_not(model))
    return inner


def _why_not(model: nn.Module) -> str:
    """Reason why a model's class is refused."""
    timm = library_file("timm")
    name = type(model).__name__
    reason = timm.why_not(type(model))
    if reason is not None:
        return reason
    if isinstance(model, torch.jit.ScriptModule | torch.fx.GraphModule):
        return (
            "it is a program that torch.jit, torch.export or torch.fx recorded, without the modules of the model; pass "
            "the model itself"
        )
    library = type(model).__module__.split(".")[0]
    if library in ("transformers", "torchvision") and not list(transformers_in(model)):
        return library_file(library).why_not(name)
    inner = list(transformers_in(model))
    multihead = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    if multihead and not inner:
        return "it uses torch.nn.MultiheadAttention, and its class is not supported, so its tokens are unknown"
    if len(inner) == 1:
        return f"it wraps a Vision Transformer; capture that one instead (`model.get_submodule({inner[0]!r})`)"
    if inner:
        named = ", ".join(map(repr, inner))
        return f"it contains {len(inner)} Vision Transformers ({named}); pass the one that the forward runs"
    kind, overridden = known_base(model)
    register = f"register it by `vitlens.register_model({name}, …)`"
    if kind is not None:
        methods = ", ".join(overridden)
        return (
            f"it extends timm's {kind.__name__} and overrides {methods}, so its tokens and read-out are "
            f"unknown; use timm's own class, or {register}"
        )
    return (
        "its class is not among those known to attend with a softmax over the patches of the image "
        f"({timm.KNOWN}); if it does, {register}"
    )
