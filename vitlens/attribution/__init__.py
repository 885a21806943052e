"""Attribution maps: which patches speak for a class, or for another score, by many methods with one signature.

    relevance(model, images, target)            # (B, rows, cols), float32 or wider, on the model's device

model: a supported Vision Transformer (`recorder.supported`). images: (B, C, H, W), normalized as the model expects.
target: a class number, a class name, a sequence with one for each image, None for the predicted class, or a function of
the model's output, (B, outputs) → (B,). `like(image)` and `text("a cat")` are such functions: the similarity of the
features, which models without classes have too. names: the class names in order, by default the model's own. The map
explains the target's logit, or, with `against` another class or function, the difference of the two.

The model runs in eval mode and is left as it was, including every `.grad`. Maps are not rescaled. The quick methods can
share one forward and one backward, or take a capture of your own:

    run = explained(model, images, target, needs={"gradients", "readings"})
    relevance(run), legrad(run)
    with capture(model, gradients=True) as attn: logits = model(images)
    attn.differentiate(logits[:, 3].sum()); relevance(attn)

Help texts, lists and the explorer's menu are made from the rows of `METHODS`; to add one:

    def mine(model, images=None, target=None, *, against=None, names=None, power=1.0):
        attn = explained(model, images, target, against=against, names=names).attn
        return attn.grid.image_map(attn[-1].gradient.norm(dim=-1).mean(1) ** power)      # (B, rows, cols)

    register(Method("mine", "my method", "gradients", "one forward and one backward", mine))

Raises ValueError for classes and images that the model does not take, for outputs that are not finite, and where no
gradient reaches a layer; UnsupportedModelError for a model that vitlens refuses.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vitlens import lazily

_ARGUMENTS = ("model", "images", "target", "against", "names")


@dataclass(frozen=True)
class Method:
    """One attribution method. It is called like its function.

    name: in Python and on the command line. title: for people. needs: "capture", "gradients", "readings" or "inputs"
    for a method that takes an `Explained` made with these; "model" for one that runs the model once itself, "pixels" or
    "patches" for one that does so many times, with gradients by the pixels or with patches covered. cost: of one map,
    in words. source: the function, or the module to import it from when it is first used. quick: `explain` uses it by
    default. forwards_per_patch: where the cost grows with the patches.
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
        """Its own options by name: its parameters without those that all methods have."""
        parameters = inspect.signature(self.function).parameters
        return {name: option for name, option in parameters.items() if name not in _ARGUMENTS}

    @property
    def knows_class(self) -> bool:
        """True if the map depends on the target."""
        return self.needs != "capture"

    def __call__(self, *args, **options):
        return self.function(*args, **options)


SHARED = ("capture", "gradients", "readings", "inputs")
"""`needs` of methods that take an `Explained` in place of the model."""

METHODS: dict[str, Method] = {}
"""All methods by name, in the order in which lists show them."""


def register(method: Method) -> Method:
    """Add a method to `METHODS`, `vitlens explain`, and the explorer."""
    METHODS[method.name] = method
    return method


def methods(names: Iterable[str] | None = None) -> dict[str, Method]:
    """Methods by name; without names the quick ones. Raises ValueError for an unknown name."""
    if names is None:
        return {name: method for name, method in METHODS.items() if method.quick}
    for name in (names := list(names)):
        if name not in METHODS:
            from vitlens.models import suggestion

            hint = suggestion(name, METHODS, [f"{method.name} {method.title}" for method in METHODS.values()])
            raise ValueError(f"There is no method {name!r}.{hint} The methods are {', '.join(METHODS)}.")
    return {name: METHODS[name] for name in names}


_ONCE, _EACH = "one forward and one backward, shared by all that need no more", "a forward for each patch"
_MAPS, _CAPTUM = "vitlens.attribution.maps", "vitlens.attribution.captum_maps"
for _row in (
    Method("relevance", "relevance (Chefer et al. 2021)", "gradients", _ONCE, _MAPS, quick=True),
    Method("gradient_rollout", "gradient rollout", "gradients", _ONCE, _MAPS, quick=True),
    Method("legrad", "LeGrad", "readings", f"{_ONCE}, and half a backward", _MAPS, quick=True),
    Method("attention_gradient", "attention × gradient", "gradients", _ONCE, _MAPS, quick=True),
    Method("grad_cam", "Grad-CAM", "inputs", _ONCE, _MAPS, quick=True),
    Method("rollout", "rollout, the same for every class", "capture", "one forward, shared by all", _MAPS, quick=True),
    Method("balanced_gradients", "balanced gradient × input (LibraGrad)", "model", "one forward and one backward",
           "vitlens.attribution.balanced", quick=True),
    Method("direct", "direct contributions", "model", "one forward", "vitlens.stream:direct_map"),
    Method("integrated_gradients", "Integrated Gradients", "pixels", "50 forwards and backwards", _CAPTUM),
    Method("gradient_shap", "Gradient SHAP", "pixels", "50 forwards and backwards", _CAPTUM),
    Method("input_x_gradient", "Input × Gradient", "pixels", "one forward and one backward", _CAPTUM),
    Method("occlusion", "occlusion", "patches", _EACH, _CAPTUM, forwards_per_patch=1),
    Method("feature_ablation", "feature ablation", "patches", _EACH, _CAPTUM, forwards_per_patch=1),
    Method("kernel_shap", "KernelSHAP", "patches", "16 forwards for each patch", _CAPTUM, forwards_per_patch=16),
):  # fmt: skip
    register(_row)

_OTHERS = {"explained": "maps", "like": "target", "text": "target"}
__all__ = ["METHODS", "Method", "methods", "register", *_OTHERS, *METHODS]
_find, _ = lazily(__name__, _OTHERS)


def __getattr__(name: str):
    if name in METHODS:
        return METHODS[name].function
    return _find(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *METHODS})
