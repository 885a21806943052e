"""The classes of a model: their number and names, and scores from logits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import timm
import torch
from torch import Tensor, nn

from vitlens.formatting import PREDICTION
from vitlens.recorder import supported
from vitlens.recorder.supported import family, inner_transformer, model_name, unwrap
from vitlens.recorder.supported.card import card_of

OUTPUTS = ("classes", "independent", "value")
"""Meanings of a model's outputs: classes that compete (softmax), independent labels (sigmoid), or plain values."""

LISTED = 3
"""Largest number of predicted labels in a sentence."""

_PROBLEMS = {"multi_label_classification": "independent", "regression": "value"}


def module_with_facts(model: nn.Module, *attributes: str) -> nn.Module:
    """The model if it has a card or one of these attributes itself, else the only Vision Transformer inside it."""
    model = unwrap(model)
    if card_of(model) is not None or any(name in vars(model) for name in attributes):
        return model
    return inner_transformer(model)


def class_count(model: nn.Module) -> int | None:
    """Number of classes: the outputs of the head, or `num_classes` without a head, 0 for features, None if unknown.

    >>> vitlens.models.class_count(model)
    1000
    """
    return family(unwrap(model)).classes


def require_classes(model: nn.Module) -> None:
    """Raise ValueError for a model without a classifier, whose output is features."""
    if class_count(model) == 0:
        raise ValueError(
            f"{model_name(unwrap(model))} has no classifier head, so its output is features."
        )


def label_names(model: nn.Module, count: int | None = None) -> list[str] | None:
    """Names of the classes in the model's folder, else ImageNet's for a model of 1,000 classes, else None.

    count: number of logits, by default the outputs of the head. Names for another number of classes are not returned,
    because the head was replaced.

    >>> vitlens.models.label_names(model)[285]
    'Egyptian cat'
    """
    model = module_with_facts(model, "label_names")
    names = supported.label_names(model)
    classes = class_count(model)
    if count is None:
        count = classes
    if names is None and count == classes == 1000:
        names = list(imagenet_names())
    if names is None or count not in (None, len(names)):
        return None
    return names


@functools.cache
def imagenet_names() -> list[str]:
    """Names of the 1,000 classes of ImageNet-1k, by number.

    >>> from vitlens.models.classes import imagenet_names
    >>> imagenet_names()[0]
    'tench, Tinca tinca'
    """
    info = timm.data.ImageNetInfo()
    numbers = range(1000)
    return [info.index_to_description(number) for number in numbers]


def output_kind(model: nn.Module) -> str:
    """Meaning of a model's outputs, one of `OUTPUTS`.

    It comes from `load_model(outputs=…)`, a folder's config.json or transformers' `problem_type`. Otherwise it is
    "value" for a single output and "classes" for several.

    >>> vitlens.models.output_kind(model)
    'classes'
    """
    model = module_with_facts(model, "outputs", "config")
    own = getattr(model, "outputs", None)
    if own in OUTPUTS:
        return own
    card = card_of(model)
    if card is not None and card.outputs in OUTPUTS:
        return card.outputs
    config = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem in _PROBLEMS:
        return _PROBLEMS[problem]
    return "value" if class_count(model) == 1 else "classes"


def scores(model: nn.Module | str, logits: Tensor) -> Tensor:
    """Scores of logits (…, classes), in float32 or wider.

    Softmax for classes, sigmoid for independent labels, else the values. model: the model, or one of `OUTPUTS`.

    >>> vitlens.models.scores(model, logits).sum(-1)
    tensor([1.0000, 1.0000])
    """
    precision = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(precision)
    count = logits.shape[-1]
    kind = model if isinstance(model, str) else output_kind(model)
    if kind == "classes" and count > 1:
        return logits.softmax(-1)
    if kind == "independent":
        return logits.sigmoid()
    return logits


def predicted_classes(model: nn.Module | str, scores: Tensor) -> list[int]:
    """Numbers of the predicted classes of one image, the highest first, from its scores (classes,).

    The class with the highest score, all independent labels above 0.5, or [] for values. model: the model, or one of
    `OUTPUTS`.

    >>> from vitlens.models.classes import predicted_classes
    >>> predicted_classes("independent", torch.tensor([0.7, 0.1, 0.9]))
    [2, 0]
    """
    kind = model if isinstance(model, str) else output_kind(model)
    count = len(scores)
    if kind == "value" or (kind == "classes" and count == 1):
        return []
    order = scores.argsort(descending=True, stable=True).tolist()
    if kind == "classes":
        return order[:1]
    return [number for number in order if scores[number] > 0.5]


def prediction_beside(
    model: nn.Module | str,
    scores: Tensor,
    target: int | None,
    words: Callable[[int], str],
) -> str:
    """A sentence with the prediction of one image, to stand beside a target and its score.

    "" if the target alone is predicted, and for values. scores: (classes,). target: a class number, or None for a
    function. words: name and score of a class, by its number.

    >>> from vitlens.models.classes import prediction_beside
    >>> prediction_beside("classes", torch.tensor([0.7, 0.3]), 1, ["cat (70%)", "dog (30%)"].__getitem__)
    'The model predicts cat (70%).'
    """
    kind = model if isinstance(model, str) else output_kind(model)
    predicted = predicted_classes(kind, scores)
    others = [number for number in predicted if number != target]
    if not predicted and kind == "independent":
        highest = int(scores.argmax())
        if highest == target:
            return PREDICTION["no label"]
        return PREDICTION["highest label"].format(classes=words(highest))
    if not others:
        return ""
    classes = ", ".join(words(number) for number in others[:LISTED])
    if len(others) > LISTED:
        count = len(others) - LISTED
        classes = PREDICTION["more classes"].format(classes=classes, count=count)
    name = "predicts" if others == predicted else "also predicts"
    return PREDICTION[name].format(classes=classes)


def top_classes(model: nn.Module, logits: Tensor, k: int = 5) -> list[list[tuple[str, float]]]:
    """The k highest outputs for each row of (B, classes) logits, as (name or number, score).

    Raises ValueError for a model without a classifier, and for logits of another shape.

    >>> [(name, round(score, 2)) for name, score in vitlens.models.top_classes(model, logits, k=2)[0]]
    [('Egyptian cat', 0.44), ('tabby, tabby cat', 0.23)]
    """
    require_classes(model)
    if logits.dim() != 2:
        raise ValueError(f"Expected logits of shape (B, classes), got {tuple(logits.shape)}.")
    count = logits.shape[-1]
    names = label_names(model, count)
    if not names:
        names = [str(number) for number in range(count)]
    values, classes = scores(model, logits).topk(min(k, count))
    best = []
    for numbers, row in zip(classes.tolist(), values.tolist(), strict=True):
        labels = [names[number] for number in numbers]
        pairs = zip(labels, row, strict=True)
        best.append(list(pairs))
    return best
