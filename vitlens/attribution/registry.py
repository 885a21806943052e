"""The attribution methods by name, without PyTorch. Each is imported on its first call."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vitlens.names import require_known

_ARGUMENTS = ("model", "images", "target", "against", "names")


@dataclass(frozen=True)
class Imported:
    """A function of a module that is imported on the first call. address: "module:name"."""

    address: str

    def load(self) -> Callable:
        module, name = self.address.split(":")
        return getattr(importlib.import_module(module), name)

    def __call__(self, *args, **options):
        return self.load()(*args, **options)


@dataclass(frozen=True)
class Method:
    """An attribution method. Calling it calls its function.

    >>> vitlens.attribution.METHODS["relevance"].cost
    'one forward and one backward, shared by all that need no more'

    name: in Python and on the command line. title: in figures and lists. needs: "capture", "gradients", "readings" or
    "inputs" for a method that takes an `Explained` made with these, "model" for one that runs the model once itself,
    "pixels" or "patches" for one that runs it many times, with gradients by the pixels or with patches covered. cost:
    of one map, in words. source: the function, which may be `Imported`. quick: True for the defaults of `explain`.
    forwards_per_patch: forwards that each patch adds to the cost.
    """

    name: str
    title: str
    needs: str
    cost: str
    source: Callable
    quick: bool = False
    forwards_per_patch: int = 0

    @property
    def function(self) -> Callable:
        if isinstance(self.source, Imported):
            return self.source.load()
        return self.source

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
    names = list(names)
    texts = [f"{method.name} {method.title}" for method in METHODS.values()]
    for name in names:
        require_known(name, METHODS, "A method", texts)
    return {name: METHODS[name] for name in names}


_ONCE = "one forward and one backward, shared by all that need no more"

register(
    Method(
        "relevance",
        "relevance (Chefer et al. 2021)",
        "gradients",
        _ONCE,
        Imported("vitlens.attribution.maps:relevance"),
        quick=True,
    )
)
register(
    Method(
        "gradient_rollout",
        "gradient rollout",
        "gradients",
        _ONCE,
        Imported("vitlens.attribution.maps:gradient_rollout"),
        quick=True,
    )
)
register(
    Method(
        "legrad",
        "LeGrad",
        "readings",
        f"{_ONCE}, and half a backward",
        Imported("vitlens.attribution.maps:legrad"),
        quick=True,
    )
)
register(
    Method(
        "attention_gradient",
        "attention × gradient",
        "gradients",
        _ONCE,
        Imported("vitlens.attribution.maps:attention_gradient"),
        quick=True,
    )
)
register(
    Method(
        "grad_cam",
        "Grad-CAM",
        "inputs",
        _ONCE,
        Imported("vitlens.attribution.maps:grad_cam"),
        quick=True,
    )
)
register(
    Method(
        "rollout",
        "rollout, the same for every class",
        "capture",
        "one forward, shared by all",
        Imported("vitlens.attribution.maps:rollout"),
        quick=True,
    )
)
register(
    Method(
        "balanced_gradients",
        "balanced gradient × input (LibraGrad)",
        "model",
        "one forward and one backward",
        Imported("vitlens.attribution.balanced:balanced_gradients"),
        quick=True,
    )
)
register(
    Method(
        "direct",
        "direct contributions",
        "model",
        "one forward",
        Imported("vitlens.stream:direct_map"),
    )
)
register(
    Method(
        "integrated_gradients",
        "Integrated Gradients",
        "pixels",
        "50 forwards and backwards",
        Imported("vitlens.attribution.pixels:integrated_gradients"),
    )
)
register(
    Method(
        "occlusion",
        "occlusion",
        "patches",
        "a forward for each patch",
        Imported("vitlens.attribution.pixels:occlusion"),
        forwards_per_patch=1,
    )
)
