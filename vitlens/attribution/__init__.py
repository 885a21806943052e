"""Attribution maps: which patches speak for a class, or for another score, by many methods with one signature.

    relevance(model, images, target)            # (B, rows, cols), float32 or wider, on the model's device

model: a supported Vision Transformer (`recorder.supported`), in any mode, frozen or not. images: (B, C, H, W),
normalized as the model wants them. target: a class number, a class name, a sequence with one for each image, or None
for the predicted class; names: the class names in order, by default the model's own. The map explains the target's
logit, or, with `against` another class, the difference of the two logits: why this class and not that one. A target
need not be a class: `like(picture)`, `centroid(pictures)`, `text("a cat")`, `direction(vector)` and `norm()` are about
the features, which models without classes have, too (`vitlens.attribution.features`).
The model runs in eval mode and is left as it was, including flags and every `.grad`. Maps are not rescaled. Methods
that start from a row of attention take `query=(row, column)` to start from a patch instead of the read-out.

Every method is a row of `METHODS`; `register` adds one (see `vitlens.attribution.registry`). The quick methods share
one forward and one backward, where each is given what it needs:

    found = explained(model, images, target, needs={"gradients", "readings"})
    relevance.of(found.captures["gradients"]), legrad.of(found.captures["readings"])

A capture of your own serves too: `with capture(model, gradients=True) as attn: logits = model(images)`, then
`attn.differentiate(logits[:, 3].sum())` and `relevance.of(attn)`. `rollout` knows no class. The methods that need
"pixels" or "patches" are captum's, and need captum.

Raises ValueError for a target that is no class of the model, for images that the model does not take, for a model
without classes, for outputs that are not finite, and where no gradient reaches a layer; UnsupportedModelError for a
model that vitlens refuses.
"""

from vitlens.attribution.registry import METHODS, Method, methods, register

_FEATURES = ("centroid", "direction", "like", "norm", "text")
__all__ = ["METHODS", "Method", "explained", "methods", "register", *_FEATURES, *METHODS]


def __getattr__(name: str):
    if name == "explained":
        from vitlens.attribution.forward import explained

        return explained
    if name in _FEATURES:
        from vitlens.attribution import features

        return getattr(features, name)
    if name not in METHODS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    METHODS[name].loaded  # noqa: B018  its docstring and signature are those of the function
    return METHODS[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *METHODS})
