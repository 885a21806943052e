"""Matching of a data set's classes with a model's classes."""

from __future__ import annotations

import functools
import re

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn

from vitlens.models import class_count, label_names
from vitlens.recorder import supported

__all__ = ["class_numbers", "describe_match", "imagenet_numbers"]
__dir__ = __all__.copy

ADVICE = (
    "Name the classes as the model does (by WordNet ids for ImageNet), or choose a protocol that learns the classes "
    "(fewshot, knn, probe, finetune)."
)


def class_numbers(model: nn.Module, names: tuple[str, ...]) -> Tensor:
    """The model's number for each of the K classes of a data set, (K,) int64, in the order of `names`.

    Matches by name if both have names: the model's own, or WordNet ids (n01440764) and WordNet names (tench) for models
    of ImageNet. Otherwise matches by number (`by_number`), or by position if the numbers of classes are equal.
    `describe_match` returns the kind of match. Accuracy is always over all of the model's classes.

    Raises ValueError for a class without a match, for two classes with one match, and for fewer classes called 0, 1, 2
    … than the model's named classes.

    >>> class_numbers(model, ("Egyptian cat", "Persian cat"))
    tensor([32, 31])
    """
    total = class_count(model)
    if not total:
        raise ValueError(
            "Accuracy needs a classifier head, which this model lacks. Fine-tune it, or choose a protocol on features "
            "(fewshot, knn, probe)."
        )
    count = len(names)
    model_names = _names(model)
    if by_number(model, names):
        numbers = [int(name) for name in names]
        first_classes = sorted(numbers) == list(range(count))
        if model_names and count < total and first_classes:
            first_name = label_names(model)[0]
            raise ValueError(
                f"The data's classes 0 to {count - 1} would match the first of the model's {total:,} classes by "
                f"number ({first_name} …). {ADVICE}"
            )
        return torch.tensor(numbers)
    if count == total and _in_order(names, model_names):
        return torch.arange(total)  # also with two classes of one name, as ImageNet's crane
    by_name = _numbers(model_names)
    matches = [by_name.get(_plain(name)) for name in names]
    reason = None
    if None in matches:
        missing = names[matches.index(None)]
        reason = f"{missing!r} is not"
    elif len(set(matches)) < count:
        reason = "several match the same class"
    if reason:
        raise ValueError(
            f"All classes of the data ({count}) must be among the model's {total}, but {reason}. {ADVICE}"
        )
    return torch.tensor(matches)


def _in_order(names: tuple[str, ...], model_names: list[list[str]]) -> bool:
    """True if each name is a name of the model's class with its number, and if the model has no names."""
    if not model_names:
        return True
    return all(_plain(name) in own for name, own in zip(names, model_names, strict=True))


def describe_match(model: nn.Module, names: tuple[str, ...]) -> str:
    """Note on the kind of match in `class_numbers`, or "" for a match by name.

    >>> describe_match(model, ("31", "32"))
    "The data's classes have no names, so their numbers are taken as the model's class numbers."
    """
    if by_number(model, names):
        return "The data's classes have no names, so their numbers are taken as the model's class numbers."
    if _names(model):
        return ""
    note = "The classes are matched by position, because the model has no class names."
    given = list(names)
    as_text = sorted(names)
    by_numbers = sorted(names, key=_natural_key)
    if given == by_numbers == as_text:
        return note
    if given == by_numbers:
        how = "as text"
        other = as_text
    else:
        how = "by their numbers"
        other = by_numbers
    first = 0
    while given[first] == other[first]:
        first += 1
    listed = ", ".join(names[:12])
    if len(names) > 12:
        listed += ", …"
    return f"{note} Their order is {listed}; sorted {how}, number {first} would be {other[first]}."


def _natural_key(name: str) -> tuple[list[tuple[bool, int | str]], str]:
    """Key that sorts names by the numbers in them."""
    parts: list[tuple[bool, int | str]] = []
    for part in re.findall(r"\d+|\D+", name):
        if part.isdecimal():
            parts.append((True, int(part)))
        else:
            parts.append((False, part))
    return parts, name


def by_number(model: nn.Module, names: tuple[str, ...]) -> bool:
    """True if `names` are numbers of the model's classes, whose names are not numbers."""
    if any(name.isdecimal() for name in label_names(model) or []):
        return False  # directories 0 … 11 are sorted as 0, 1, 10, 11, 2 …, as are the names of a model trained on them
    if not all(name.isdecimal() for name in names):
        return False
    highest = max(map(int, names))
    return highest < class_count(model)


def imagenet_numbers(model: nn.Module) -> Tensor | None:
    """ImageNet's number of each class of `model`, (C,) int64, matched by name as in `class_numbers`, or −1.

    None unless the model has unambiguous names for all of the 1,000 classes.

    >>> imagenet_numbers(model) is None  # the bundled model has 200 classes
    True
    """
    model_names = [names[0] for names in _names(model)]
    imagenet = _imagenet("imagenet-1k")
    count = len(imagenet)
    every = torch.arange(count)
    if len(model_names) == count and _in_order(tuple(model_names), imagenet):
        return every
    by_name = _numbers(imagenet)
    numbers = [by_name.get(name, -1) for name in model_names]
    matches = torch.tensor(numbers, dtype=torch.int64)
    matched = matches[matches >= 0]
    in_order = matched.sort().values
    return matches if in_order.equal(every) else None


def _plain(name: str) -> str:
    words = name.replace("_", " ").lower().split()
    return " ".join(words)


def _names(model: nn.Module) -> list[list[str]]:
    """Names of each class of the model, the most specific first, or [] without names."""
    named = supported.label_names(model) is not None
    replaced = class_count(model) != getattr(model, "num_classes", None)  # another head
    subset = None
    if not named and not replaced:
        subset = infer_imagenet_subset(model)
    if subset:
        return _imagenet(subset)
    return [[_plain(name)] for name in label_names(model) or []]


@functools.cache
def _imagenet(subset: str) -> list[list[str]]:
    """WordNet id and names of each class of ImageNet or of a subset."""
    info = ImageNetInfo(subset)
    classes = []
    for wordnet_id in info.label_names():
        text = info.label_name_to_description(wordnet_id)
        parts = [_plain(part) for part in text.split(",")]
        classes.append([wordnet_id, _plain(text), *parts])
    return classes


def _numbers(classes: list[list[str]]) -> dict[str, int]:
    """Class numbers by name, without names that two classes share. Whole names take precedence over their parts."""
    numbers: dict[str, int | None] = {}
    for part in (slice(0, 2), slice(2, None)):
        new: dict[str, int | None] = {}
        for number, names in enumerate(classes):
            for name in dict.fromkeys(names[part]):
                new[name] = None if name in new else number
        numbers = new | numbers
    return {name: number for name, number in numbers.items() if number is not None}
