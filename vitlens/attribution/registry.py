"""The attribution methods by name, without PyTorch. Each is imported on its first call."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vitlens.names import require_known

_ARGUMENTS = ("model", "images", "target", "against", "names")


@dataclass(frozen=True)
class Method:
    """An attribution method. Calling it calls its function.

    >>> vitlens.attribution.METHODS["relevance"].cost
    'one forward and one backward, shared by all that need no more'

    name: in Python and on the command line. title: in figures and lists. needs: "capture", "gradients", "readings" or
    "inputs" for a method that takes an `Explained` made with these, "model" for one that runs the model once itself,
    "pixels" or "patches" for one that runs it many times, with gradients by the pixels or with patches covered. cost:
    of one map, in words. source: the function, or the module from which its first call imports it. quick: True for the
    defaults of `explain`. forwards_per_patch: forwards that each patch adds to the cost.
    """

    name: str
    title: str
    needs: str
    cost: str
    source: str | Callable
    quick: bool = False
    forwards_per_patch: int = 0

    @property
    def function(self) -> Callable:
        if callable(self.source):
            return self.source
        module, _, name = self.source.partition(":")
        return getattr(importlib.import_module(module), name or self.name)

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Options by name: the parameters that other methods do not have."""
        parameters = inspect.signature(self.function).parameters
        return {name: option for name, option in parameters.items() if name not in _ARGUMENTS}

    @property
    def depends_on_target(self) -> bool:
        """True if the map depends on the target."""
        return self.needs != "capture"

    def __call__(self, *args, **options):
        return self.function(*args, **options)


SHARED = ("capture", "gradients", "readings", "inputs")
"""Values of `needs` of the methods that take an `Explained` in place of the model."""

METHODS: dict[str, Method] = {}
"""All methods by name, in the order of lists and menus."""


def register(method: Method) -> Method:
    """Add a method to `METHODS`, `vitlens explain` and the explorer, in place of one of its name, and return it.

    >>> vitlens.attribution.register(vitlens.attribution.METHODS["legrad"]).title
    'LeGrad'
    """
    METHODS[method.name] = method
    return method


def methods(names: Iterable[str] | None = None) -> dict[str, Method]:
    """Methods by name, by default the quick ones. Raises ValueError for an unknown name.

    >>> list(vitlens.attribution.methods(["relevance", "legrad"]))
    ['relevance', 'legrad']
    """
    if names is None:
        return {name: method for name, method in METHODS.items() if method.quick}
    texts = [f"{method.name} {method.title}" for method in METHODS.values()]
    for name in (names := list(names)):
        require_known(name, METHODS, "A method", texts)
    return {name: METHODS[name] for name in names}


_ONCE = "one forward and one backward, shared by all that need no more"
_MAPS, _CAPTUM = "vitlens.attribution.maps", "vitlens.attribution.pixels"
for _row in (
    Method("relevance", "relevance (Chefer et al. 2021)", "gradients", _ONCE, _MAPS, quick=True),
    Method("gradient_rollout", "gradient rollout", "gradients", _ONCE, _MAPS, quick=True),
    Method("legrad", "LeGrad", "readings", f"{_ONCE}, and half a backward", _MAPS, quick=True),
    Method("attention_gradient", "attention × gradient", "gradients", _ONCE, _MAPS, quick=True),
    Method("grad_cam", "Grad-CAM", "inputs", _ONCE, _MAPS, quick=True),
    Method(
        "rollout",
        "rollout, the same for every class",
        "capture",
        "one forward, shared by all",
        _MAPS,
        quick=True,
    ),
    Method(
        "balanced_gradients",
        "balanced gradient × input (LibraGrad)",
        "model",
        "one forward and one backward",
        "vitlens.attribution.balanced",
        quick=True,
    ),
    Method("direct", "direct contributions", "model", "one forward", "vitlens.stream:direct_map"),
    Method(
        "integrated_gradients",
        "Integrated Gradients",
        "pixels",
        "50 forwards and backwards",
        _CAPTUM,
    ),
    Method(
        "occlusion",
        "occlusion",
        "patches",
        "a forward for each patch",
        _CAPTUM,
        forwards_per_patch=1,
    ),
):
    register(_row)
