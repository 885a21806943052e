"""Names of a model for messages and figures."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from vitlens.recorder.supported.card import card_of


def qualified_name(thing: object) -> str:
    """Module and name of a class, or of the class of an object, as in 'timm.models.beit.Beit'."""
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def short_name(model: nn.Module) -> str:
    """Name by which `load_model` opened a model, or else its architecture by its configuration, the origin of its
    weights (transformers), or its class."""
    card = card_of(model)
    if card is not None and (card.name or card.architecture):
        return card.name or card.architecture
    config = getattr(model, "pretrained_cfg", None) or {}
    if config.get("architecture"):
        return config["architecture"]
    origin = getattr(getattr(model, "config", None), "name_or_path", None)
    if isinstance(origin, str) and origin:
        return Path(origin).name
    return type(model).__name__


def model_name(model: nn.Module) -> str:
    """Architecture and class of a model, for messages."""
    name = short_name(model)
    kind = type(model).__name__
    return kind if name == kind else f"{name} ({kind})"
