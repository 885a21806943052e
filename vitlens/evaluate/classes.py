"""Matches the classes of a data set with those of a model."""

from __future__ import annotations

import functools
import re

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn

from vitlens.models import class_count, label_names
from vitlens.recorder import supported

ADVICE = (
    "Name the classes as the model does, by WordNet ids if it is one of ImageNet, or choose a protocol that learns the "
    "classes (fewshot, knn, probe, finetune)."
)


def class_numbers(model: nn.Module, names: tuple[str, ...]) -> Tensor:
    """(K,) int64: the model's number for each of the K classes of a data set, in the order of `names`.

    By name where both have names: the model's own, or, for models of ImageNet, WordNet ids (n01440764) and the names
    that WordNet has for them (tench). Otherwise by number (`by_number`), or, if there are equally many classes, by
    position; `matched` says which way it was. Accuracy is always among all of the model's classes.

    Raises ValueError where a class has no match, where two have the same one, and where fewer classes that are called
    0, 1, 2 … would become the first ones of a model whose classes have names.
    """
    count, every = class_count(model), _names(model)
    if not count:
        raise ValueError(
            "Accuracy needs a model with a classifier. Fine-tune this one, or choose a protocol that reads features "
            "(fewshot, knn, probe)."
        )
    if by_number(model, names):
        numbers = [int(name) for name in names]
        if every and len(names) < count and sorted(numbers) == list(range(len(names))):
            raise ValueError(
                f"The classes of the data are called 0 to {len(names) - 1}, which is no name of any of the model's "
                f"{count:,}; by their numbers they would be its first ones ({label_names(model)[0]} …). {ADVICE}"
            )
        return torch.tensor(numbers)
    if len(names) == count and all(not every or _plain(name) in every[i] for i, name in enumerate(names)):
        return torch.arange(count)  # in order; two of ImageNet's classes are called crane
    numbers = _numbers(every)
    found = [numbers.get(_plain(name)) for name in names]
    missing = [name for name, number in zip(names, found, strict=True) if number is None]
    if missing or len(set(found)) < len(found):
        reason = f"{missing[0]!r} is not" if missing else "several of them are the same one"
        raise ValueError(
            f"All classes of the data ({len(names)}) must be among the model's {count}, but {reason}. {ADVICE}"
        )
    return torch.tensor(found)


def matched(model: nn.Module, names: tuple[str, ...]) -> str:
    """A note on how `class_numbers` matched the classes, or "" if it was by name."""
    if by_number(model, names):
        return "The classes of the data have no names, so each number is taken to be that of the model's class."
    if _names(model):
        return ""
    pieces = [re.findall(r"\d+|\D+", name) for name in names]
    keys = [[(s.isdecimal(), int(s) if s.isdecimal() else s) for s in several] for several in pieces]
    note = "The classes are matched by position: the model names no classes."
    by_numbers, as_text = [name for _, name in sorted(zip(keys, names, strict=True))], sorted(names)
    if by_numbers == as_text == [*names]:
        return note
    how, other = ("as text", as_text) if by_numbers == [*names] else ("by their numbers", by_numbers)
    apart = next(i for i, name in enumerate(names) if name != other[i])
    shown = ", ".join(names[:12]) + ", …" * (len(names) > 12)
    return f"{note} Their order is {shown}; sorted {how}, number {apart} would be {other[apart]}."


def by_number(model: nn.Module, names: tuple[str, ...]) -> bool:
    """True if `names` are numbers of the model's classes, which themselves are not called by numbers."""
    if any(name.isdecimal() for name in label_names(model) or []):
        return False  # folders 0 … 11 come as 0, 1, 10, 11, 2 …, and so do the names of what was trained on them
    return all(name.isdecimal() for name in names) and max(map(int, names)) < class_count(model)


def imagenet_numbers(model: nn.Module) -> Tensor | None:
    """(C,) int64: the number in ImageNet of each class of `model`, found by name as in `class_numbers`, or −1.

    None unless the model knows all of the 1,000 classes by unambiguous names.
    """
    ours, theirs = _names(model), _imagenet("imagenet-1k")
    if len(ours) == len(theirs) and all(mine[0] in names for mine, names in zip(ours, theirs, strict=True)):
        return torch.arange(len(theirs))
    numbers = _numbers(theirs)
    found = torch.tensor([numbers.get(mine[0], -1) for mine in ours], dtype=torch.int64)
    return found if found[found >= 0].sort().values.equal(torch.arange(len(theirs))) else None


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").lower().split())


def _names(model: nn.Module) -> list[list[str]]:
    """The names of each class of the model, the most specific first; empty if they have none."""
    named = supported.label_names(model) is not None
    own = named or class_count(model) != getattr(model, "num_classes", None)  # another head has other classes
    subset = None if own else infer_imagenet_subset(model)
    if not subset:
        return [[_plain(name)] for name in label_names(model) or []]
    return _imagenet(subset)


@functools.cache
def _imagenet(subset: str) -> list[list[str]]:
    """The WordNet id and then the names of each class of ImageNet, or of a subset of it."""
    info = ImageNetInfo(subset)
    texts = [(wnid, info.label_name_to_description(wnid)) for wnid in info.label_names()]
    return [[wnid, _plain(text), *map(_plain, text.split(","))] for wnid, text in texts]


def _numbers(every: list[list[str]]) -> dict[str, int]:
    """Class numbers by name, without names that two classes share; whole names come before their parts."""
    found: dict[str, int | None] = {}
    for part in (slice(0, 2), slice(2, None)):
        new: dict[str, int | None] = {}
        for number, names in enumerate(every):
            for name in dict.fromkeys(names[part]):
                new[name] = None if name in new else number
        found = new | found
    return {name: number for name, number in found.items() if number is not None}
