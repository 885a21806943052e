"""Names of a model for messages and figures."""

from __future__ import annotations

from pathlib import Path

from torch import nn


def qualified_name(thing: object) -> str:
    """Module and class of an object, as in 'timm.models.beit.Beit'."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def short_name(model: nn.Module) -> str:
    """Name by which `load_model` opened a model, or else its architecture by its configuration, the origin of its
    weights (transformers), or its class."""
    if name := vars(model).get("opened_as"):
        return name
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    origin = getattr(getattr(model, "config", None), "name_or_path", None)
    return architecture or (
        Path(origin).name if isinstance(origin, str) and origin else type(model).__name__
    )


def model_name(model: nn.Module) -> str:
    """Architecture and class of a model, for messages."""
    name, kind = short_name(model), type(model).__name__
    return kind if name == kind else f"{name} ({kind})"
