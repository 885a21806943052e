"""Attribution maps: the patches that raise a class's logit, or another score, by many methods with one signature.

    relevance(model, images, target)            # (B, rows, cols), float32 or wider, on the model's device

model: a supported Vision Transformer (`recorder.supported`). images: (B, C, H, W), normalized as the model expects.
target: a class number, a class name, a sequence with one for each image, None for the predicted class, or a function of
the model's output, (B, outputs) → (B,). `like(image)` and `text("a cat")` are such functions: the similarity of the
features, which models without classes have too. names: the class names in order, by default the model's own. The map
explains the target's logit, or, with `against` another class or function, the difference of the two.

The model runs in eval mode. Its mode and every `.grad` are unchanged afterwards. Maps are not rescaled. The quick
methods can share one forward and one backward, or take your capture:

    run = explained(model, images, target, needs={"gradients", "readings"})
    relevance(run), legrad(run)
    with capture(model, gradients=True) as attn: logits = model(images)
    attn.differentiate(logits[:, 3].sum()); relevance(attn)

Help texts, lists and the explorer's menu are made from the rows of `METHODS`. `register` adds a method:

    def mine(model, images=None, target=None, *, against=None, names=None, power=1.0):
        attn = explained(model, images, target, against=against, names=names).attn
        return attn.grid.image_map(attn[-1].gradient.norm(dim=-1).mean(1) ** power)      # (B, rows, cols)

    register(Method("mine", "my method", "gradients", "one forward and one backward", mine))

Raises ValueError for classes and images that the model does not take, for outputs that are not finite, and if no
gradient reaches a layer. Raises UnsupportedModelError for a model that vitlens refuses.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vitlens import lazily, require_known

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
    Method("occlusion", "occlusion", "patches", "a forward for each patch", _CAPTUM, forwards_per_patch=1),
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
