"""Attribution maps: the patches that raise a class's logit, or another score, by many methods with one signature.

    relevance(model, images, target)            # (B, rows, cols), float32 or wider, on the model's device

model: a supported Vision Transformer (`recorder.supported`). images: (B, C, H, W), normalized as the model expects.
target: a class number, a class name, a sequence with one for each image, None for the predicted class, or a function of
the model's output, (B, outputs) → (B,). `like(image)` and `text("a cat")` are such functions: the similarity of the
features, which models without classes have too. names: the class names in order, by default the model's own.

The map explains the target's logit, or, with `against` another class or function, the difference of the two.

The model runs in eval mode. Its mode and every `.grad` are unchanged afterwards. Maps are not rescaled. The quick
methods can share one forward and one backward, or take your capture in place of the model (`Explainable`):

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

from vitlens.attribution.registry import METHODS
from vitlens.names import attach_lazily

_find, _, _names = attach_lazily(__name__, __file__)
__all__ = sorted({*_names, *METHODS})


def __getattr__(name: str) -> object:
    # "direct", and methods that other packages have registered
    if name in METHODS and name not in _names:
        return METHODS[name].function
    return _find(name)


def __dir__() -> list[str]:
    return sorted({*_names, *METHODS})
