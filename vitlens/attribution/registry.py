"""The attribution methods, one row for each. Help texts, lists and the explorer's menu are made of these rows.

A method of your own takes two steps, its function and its row:

    def mine(attn, *, power=1.0):              # what `needs` says, here a capture with gradients
        return attn.grid.image_map(attn[-1].gradient.norm(dim=-1).mean(1) ** power)      # (B, rows, cols)

    register(Method("mine", "my method", "gradients", "one forward and one backward", mine))

Nothing here imports PyTorch, so `vitlens explain --help` is quick: a function may be given by its place,
"package.module:name", and is then imported when it is first used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType

NEEDS = {
    "capture": "a capture of one forward",
    "gradients": "a capture in which every layer knows the gradient of the target's logit",
    "readings": "a capture in which every layer knows the gradient of the logit that is read after that very layer",
    "inputs": "what the attention of one layer is given, and the gradient of the target's logit by it",
    "pixels": "one image after the other, and the gradients of the model by its pixels",
    "patches": "one image after the other, and the model, to run with patches covered",
    "model": "the model itself, to run as it likes",
}
"""What a method's function takes first. The first four share one forward and one backward: `forward.explained`."""


@dataclass(frozen=True)
class Method:
    """One attribution method: its row in the registry, which is called like a function.

    `method(model, images, target, against=…, names=…, **options)` returns (B, rows, cols), float32 or wider; see
    `vitlens.attribution` for the arguments. `method.of(attn, **options)` makes the same map from a capture.

    name: its name in Python and on the command line. title: its name in texts for people. needs: a key of `NEEDS`.
    cost: the cost of one map, in words. function: the function, or its place as "package.module:name". It takes what
    `needs` says, and then its own options; with "model" its signature is (model, images, target=None, *, against=None,
    names=None, **options). quick: whether `explain` uses it by default. forwards_per_patch: how often it runs the model
    for each patch, for a method whose cost grows with the patches.
    """

    name: str
    title: str
    needs: str
    cost: str
    function: str | Callable
    quick: bool = False
    forwards_per_patch: int = 0

    @cached_property
    def loaded(self) -> Callable:
        """The function itself. The method takes over its docstring and its signature, for `help` and notebooks."""
        function = self.function
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(importlib.import_module(module), name)
        if self.needs == "model":
            signature = inspect.signature(function)
        else:
            options = list(inspect.signature(function).parameters.values())[1:]
            options = [option.replace(kind=option.KEYWORD_ONLY) for option in options]
            shared = inspect.signature(_shared)
            signature = shared.replace(parameters=[*shared.parameters.values(), *options])
        self.__dict__.update(__doc__=function.__doc__, __signature__=signature)
        return function

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Its own options by name: what is left of its signature after the arguments that all methods have."""
        self.loaded  # noqa: B018  gives it its signature
        shared = inspect.signature(_shared).parameters
        return {name: option for name, option in self.__signature__.parameters.items() if name not in shared}

    @property
    def knows_class(self) -> bool:
        """Whether the map depends on the target. One that needs no more than a capture of a forward cannot know it."""
        return self.needs != "capture"

    def of(self, attn, **options):
        """(B, rows, cols) from what it needs, as `explained(…).captures[method.needs]` has it. Raises ValueError for
        anything else, such as a capture without gradients."""
        self._require(attn)
        return self.loaded(attn, **options)

    def _require(self, given: object) -> None:
        from vitlens.attribution._captum import OneImage
        from vitlens.attribution.forward import Attention, Inputs

        kinds = {"inputs": Inputs, "pixels": OneImage, "patches": OneImage, "model": ()}
        fits = isinstance(given, kinds.get(self.needs, Attention))
        undone = fits and self.needs in ("gradients", "readings") and given[-1].gradient is None
        if fits and not undone:
            return
        if self.needs in ("pixels", "patches", "model"):
            call = f"`{self.name}(model, images, target)`"
            raise ValueError(f"{self.name} runs the model itself, so a capture is not enough. Call {call}.")
        came = "a capture that was not differentiated" if undone else type(given).__name__
        raise ValueError(
            f"{self.name} needs {NEEDS[self.needs]}, got {came}. Take it from "
            f"`explained(model, images, target, needs=[{self.needs!r}]).captures[{self.needs!r}]`."
        )

    def __call__(self, model, images, target=None, *, against=None, names=None, **options):
        if unknown := options.keys() - self.options.keys():
            known = ", ".join(self.options) or "none"
            raise TypeError(f"{self.name} has no option {', '.join(sorted(unknown))}. Its options are: {known}.")
        if self.needs == "model":
            return self.loaded(model, images, target, against=against, names=names, **options)
        if self.needs in ("pixels", "patches"):
            from vitlens.attribution._captum import per_image

            function = partial(self.loaded, **options)
            return per_image(function, model, images, target, against=against, names=names)
        from vitlens.attribution.forward import explained

        layer = options.get("layer", -1) if self.needs == "inputs" else -1
        found = explained(model, images, target, against=against, names=names, needs={self.needs}, layer=layer)
        return self.of(found.captures[self.needs], **options)


def _shared(model, images, target=None, *, against=None, names=None): ...


_methods: dict[str, Method] = {}
METHODS = MappingProxyType(_methods)
"""All methods by name, in the order in which lists show them. `register` adds to it."""


def register(method: Method) -> Method:
    """Add a method: to `METHODS`, `vitlens explain`, and the explorer. Raises ValueError for a name that is taken, or
    that is no Python name, and for unknown `needs`."""
    if method.name in _methods or not method.name.isidentifier():
        raise ValueError(
            f"A method needs a Python name of its own, but {method.name!r} is taken or no name. Taken are: "
            f"{', '.join(_methods)}."
        )
    if method.needs not in NEEDS:
        raise ValueError(f"Expected `needs` of {method.name} to be one of {', '.join(NEEDS)}, got {method.needs!r}.")
    _methods[method.name] = method
    return method


def methods(names: Iterable[str] | None = None) -> dict[str, Method]:
    """Methods by name; without names the quick ones. Raises ValueError for a name that no method has."""
    if names is None:
        return {name: method for name, method in METHODS.items() if method.quick}
    for name in (names := list(names)):
        if name not in METHODS:
            raise ValueError(f"There is no method {name!r}; there are {', '.join(METHODS)}.")
    return {name: METHODS[name] for name in names}


_SHARED, _EACH = "one forward and one backward, shared by all that need no more", "a forward for each patch"
for _row in (
    Method("relevance", "relevance (Chefer et al. 2021)", "gradients", _SHARED,
           "vitlens.attribution._relevance:relevance", quick=True),
    Method("gradient_rollout", "gradient rollout", "gradients", _SHARED,
           "vitlens.attribution._gradient_rollout:gradient_rollout", quick=True),
    Method("legrad", "LeGrad", "readings", f"{_SHARED}, and half a backward",
           "vitlens.attribution._legrad:legrad", quick=True),
    Method("attention_gradient", "attention × gradient", "gradients", _SHARED,
           "vitlens.attribution._relevance:attention_gradient", quick=True),
    Method("grad_cam", "Grad-CAM", "inputs", _SHARED,
           "vitlens.attribution._grad_cam:grad_cam", quick=True),
    Method("rollout", "rollout, the same for every class", "capture", "one forward, shared by all",
           "vitlens.attention:rollout", quick=True),
    Method("balanced_gradients", "balanced gradient × input (LibraGrad)", "model", "one forward and one backward",
           "vitlens.attribution._balanced:balanced_gradients"),
    Method("direct", "direct contributions", "model", "one forward", "vitlens.stream:direct_map"),
    Method("integrated_gradients", "Integrated Gradients", "pixels", "50 forwards and backwards",
           "vitlens.attribution._path:integrated_gradients"),
    Method("gradient_shap", "Gradient SHAP", "pixels", "50 forwards and backwards",
           "vitlens.attribution._path:gradient_shap"),
    Method("input_x_gradient", "Input × Gradient", "pixels", "one forward and one backward",
           "vitlens.attribution._path:input_x_gradient"),
    Method("occlusion", "occlusion", "patches", _EACH,
           "vitlens.attribution._perturbation:occlusion", forwards_per_patch=1),
    Method("feature_ablation", "feature ablation", "patches", _EACH,
           "vitlens.attribution._perturbation:feature_ablation", forwards_per_patch=1),
    Method("kernel_shap", "KernelSHAP", "patches", "16 forwards for each patch",
           "vitlens.attribution._perturbation:kernel_shap", forwards_per_patch=16),
):  # fmt: skip
    register(_row)
