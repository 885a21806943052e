"""Adapter of a model by its class, and the Vision Transformers inside a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

from torch import nn

from vitlens.plugins import load_plugins
from vitlens.recorder.supported.adapter import Family
from vitlens.recorder.supported.names import qualified_name
from vitlens.recorder.supported.registration import FAMILIES

LIBRARIES = ("timm", "transformers", "open_clip", "torchvision")
"""Libraries with a module here, which has the full names of the classes in `MODELS`, and their `adapter`."""

HARMLESS = {
    "__init__",
    "init_weights",
    "_init_weights",
    "fix_init_weight",
    "no_weight_decay",
    "group_matcher",
    "load_pretrained",
    "get_classifier",
    "reset_classifier",
    "set_grad_checkpointing",
}
"""Methods of timm's models without an effect on the forward."""


def library_file(name: str) -> ModuleType:
    """The file with the adapter of one of `LIBRARIES`."""
    return import_module(f"{__package__}.{name}")


def _adapter(kind: type) -> Callable[[nn.Module], Family] | None:
    """Adapter of a class, or None for an unknown one, also after the other packages have added theirs."""
    name = qualified_name(kind)
    library = kind.__module__.split(".")[0]
    if library in LIBRARIES and name in library_file(library).MODELS:
        return library_file(library).adapter
    if name not in FAMILIES:
        load_plugins("models")
    return FAMILIES.get(name)


def _is_timm(kind: type) -> bool:
    """True for timm's classes, and for those of other packages that extend them and have their adapter."""
    return kind.__module__.startswith("timm.") or _adapter(kind) is library_file("timm").Timm


def known_base(model: nn.Module) -> tuple[type | None, list[str]]:
    """The known class that a model has or extends, or None, and the methods that it overrides."""
    kinds = type(model).__mro__
    for number, kind in enumerate(kinds):
        if _adapter(kind) and (number == 0 or _is_timm(kind)):
            return kind, _overrides(kind, kinds[:number])
    return None, []


def _overrides(kind: type, subclasses: Sequence[type]) -> list[str]:
    """Methods of a class that its subclasses override and that may take part in the forward."""
    own = set()
    for subclass in subclasses:
        own |= {name for name, value in vars(subclass).items() if callable(value)}
    if not own:
        return []
    forward = {*dir(kind)} - {*dir(nn.Module)} | {"forward", "__call__"}
    return sorted(own & forward - HARMLESS)


def is_known(model: nn.Module) -> bool:
    """True if the model's class is known, or extends a class of timm without changing its forward."""
    kind, overridden = known_base(model)
    return kind is not None and not overridden


def family(model: nn.Module) -> Family:
    """Adapter for a model's class. Unknown classes get the timm adapter."""
    kind, overridden = known_base(model)
    if kind is None or overridden:
        return library_file("timm").Timm(model)
    return _adapter(kind)(model)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside a wrapper of torch.compile, DataParallel or DistributedDataParallel. Raises TypeError for
    anything but a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected a torch.nn.Module, got {type(model).__name__}. `vitlens.load_model` opens one."
        )
    if hasattr(model, "_orig_mod"):
        return unwrap(model._orig_mod)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    return model


def transformers_in(model: nn.Module) -> dict[str, nn.Module]:
    """Known Vision Transformers inside a model, by name. The model itself has the name ""."""
    inner: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside_another = any(outer == "" or name.startswith(f"{outer}.") for outer in inner)
        if is_known(module) and not inside_another:
            inner[name] = module
    return inner


def inner_transformer(model: nn.Module) -> nn.Module:
    """The only Vision Transformer inside a model. With zero or several, the model itself."""
    model = unwrap(model)
    if is_known(model):
        return model
    inner = list(transformers_in(model).values())
    return inner[0] if len(inner) == 1 else model
