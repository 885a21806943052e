"""Matching of a data set's classes with a model's classes."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn

from vitlens import files, texts
from vitlens.models import class_count, label_names
from vitlens.names import require_known, suggestion, unknown_name
from vitlens.recorder import supported
from vitlens.recorder.supported import unwrap
from vitlens.recorder.supported.card import card_of

__all__ = ["ORDERS", "class_numbers", "describe_match", "imagenet_numbers"]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

ADVICE = (
    "Name the classes as the model does (by WordNet ids for ImageNet), give a file with the names of the model's "
    "classes (--classes), choose a protocol that learns the classes (fewshot, knn, probe, finetune), or audit without "
    "labels (--no-labels)."
)
LISTED, LETTERS = 3, 40
"""Number and length of the names of classes in a message."""


def class_numbers(
    model: nn.Module, names: tuple[str, ...], classes: str = "", *, stored: bool = False
) -> Tensor:
    """The model's number for each of the K classes of a data set, (K,) int64, in the order of `names`.

    Matches by name if both have names: the model's own, or WordNet ids (n01440764) and WordNet names (tench) for models
    of ImageNet. Otherwise matches by number (`by_number`), or by position if the numbers of classes are equal.
    `describe_match` returns the kind of match. Accuracy is always over all of the model's classes.

    classes: for a model without class names, an order of `ORDERS` in which it numbers the classes of the data, or for
    any model a file of its class names in order (one a line, or a JSON list). stored: True if the data hold their class
    numbers, as tables do, so that the order of `names` is not that of folders.

    Raises ValueError for a class without a match, for two classes with one match, for fewer classes called 0, 1, 2 …
    than the model's named classes, and if usual orders of class folders differ and none is chosen.

    >>> class_numbers(model, ("Egyptian cat", "Persian cat"))
    tensor([285, 283])
    """
    total = class_count(model)
    if not total:
        raise ValueError(
            "Accuracy needs a classifier head, which this model lacks. Fine-tune it, or choose a protocol on features "
            "(fewshot, knn, probe)."
        )
    count = len(names)
    if classes in ORDERS:
        return _numbers_in_order(model, names, classes)
    if classes:
        own = _names_in_file(Path(classes), total)
        return _match(names, total, _with_synonyms(own), own)
    model_names = _names(model)
    if not model_names and count == total and not stored:
        _require_one_order(names)
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
    return _match(names, total, model_names, label_names(model) or [])


def _match(
    names: tuple[str, ...], total: int, model_names: list[list[str]], own: Sequence[str]
) -> Tensor:
    """The model's number of each class by name, or by position if the model has no names.

    own: names as the model spells them, which tell apart the classes "A" and "a".
    """
    count = len(names)
    spelled = _numbers([[_composed(name)] for name in own])
    exact = [spelled.get(_composed(name)) for name in names]
    if None not in exact and len(set(exact)) == count == total:
        return torch.tensor(exact)
    if count == total and _in_order(names, model_names):
        return torch.arange(total)  # also with two classes of one name, as ImageNet's crane
    by_name = _numbers(model_names)
    matches = []
    for name, number in zip(names, exact, strict=True):
        match = _find(name, by_name)
        if match is None and number is not None:
            sharing = _having(name, model_names)
            if all(_plain(own[other]) == _plain(name) for other in sharing):
                match = number
        matches.append(match)
    reason = _mismatch(names, matches, model_names, own)
    if reason:
        raise ValueError(
            f"All classes of the data ({count}) must be among the model's {total}, but {reason} {ADVICE}"
        )
    return torch.tensor(matches)


def _having(name: str, model_names: list[list[str]]) -> list[int]:
    """Numbers of the model's classes that have a name."""
    plain = _plain(name)
    return [number for number, all_names in enumerate(model_names) if plain in all_names]


def _mismatch(
    names: Sequence[str],
    matches: Sequence[int | None],
    model_names: list[list[str]],
    own: Sequence[str],
) -> str:
    """Reason why classes and their matches do not fit, with some names of both sides, or "" if they fit."""
    missing = [name for name, match in zip(names, matches, strict=True) if match is None]
    if missing:
        return _missing(missing, model_names, own)
    first: dict[int, str] = {}
    for name, match in zip(names, matches, strict=True):
        if match in first:
            return f"{first[match]!r} and {name!r} match the same class, number {match}."
        first[match] = name
    return ""


def _missing(missing: Sequence[str], model_names: list[list[str]], own: Sequence[str]) -> str:
    """Names of the data's classes that the model lacks, and the first or the similar names of the model."""
    sharing = _having(missing[0], model_names)
    if len(sharing) > 1:
        numbers = ", ".join(map(str, sharing))
        return f"{missing[0]!r} is the name of several (numbers {numbers})."
    verb = "is" if len(missing) == 1 else "are"
    lacking = f"{_quoted(missing)} {verb} not."
    spelled = list(own) or [all_names[0] for all_names in model_names]
    if not spelled:
        return f"{lacking} The model has no class names."
    hint = suggestion(missing[0], spelled) if len(missing) == 1 else ""
    return f"{lacking} The model's classes are {_quoted(spelled)}.{hint}"


def _quoted(names: Sequence[str]) -> str:
    """The first names of a list in quotes, and the number of the others."""
    listed = ", ".join(repr(texts.shorten(name, LETTERS)) for name in names[:LISTED])
    others = len(names) - LISTED
    return f"{listed} and {others:,} more" if others > 0 else listed


def _find(name: str, by_name: dict[str, int]) -> int | None:
    """Number of a class by its name, or by the WordNet id with which it begins, as in n02085620-Chihuahua."""
    plain = _plain(name)
    if plain in by_name:
        return by_name[plain]
    wordnet_id = re.match(r"(n\d{8})(?!\w)", plain)
    return by_name.get(wordnet_id[1]) if wordnet_id else None


def _in_order(names: tuple[str, ...], model_names: list[list[str]]) -> bool:
    """True if each name is a name of the model's class with its number, and if the model has no names."""
    if not model_names:
        return True
    return all(_plain(name) in own for name, own in zip(names, model_names, strict=True))


# Orders of classes without names


def _text_key(name: str) -> str:
    return name


def _case_blind_key(name: str) -> str:
    return name.casefold()


def _timm_key(name: str) -> list[int | str]:
    """timm's `natural_key`."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name.lower())]


def _key_of_explorer(name: str) -> list[tuple[bool, int | str]]:
    return texts.natural_key(name.casefold())


def _locale_key(name: str) -> tuple[str, str]:
    """Key that sorts É next to e, as `ls` does in most languages."""
    apart = unicodedata.normalize("NFKD", name.casefold())
    letters = "".join(sign for sign in apart if not unicodedata.combining(sign))
    return letters, apart


def _value_key(name: str) -> tuple[bool, float, str]:
    """Key that sorts numbers such as -2 and 0.25 by value, and other names by code points after them."""
    if re.fullmatch(r"[-+−]?(\d+([.,]\d*)?|[.,]\d+)", name):
        return False, float(name.replace("−", "-").replace(",", ".")), name
    return True, 0.0, name


ORDERS = {
    "text": _text_key,
    "natural": texts.natural_key,
    "case-blind": _case_blind_key,
    "timm": _timm_key,
    "explorer": _key_of_explorer,
    "locale": _locale_key,
    "value": _value_key,
}
"""Keys of the usual orders of class folders: by code points as torchvision sorts them, with whole numbers by value,
without the case of letters, with both, as timm's reader and file managers sort them, without accents, and by the value
of names that are numbers."""


def _sorted_by(names: Sequence[str], order: str) -> list[str]:
    key = ORDERS[order]
    return sorted(sorted(names), key=key)


def _numbers_in_order(model: nn.Module, names: tuple[str, ...], order: str) -> Tensor:
    """The number of each class for a model that numbers them in an order of `ORDERS`."""
    total = class_count(model)
    if len(names) != total:
        raise ValueError(
            f"The order {order} numbers {len(names)} classes of the data, but the model has {total:,}. Give a file "
            "with the names of the model's classes."
        )
    if supported.label_names(model) is not None:
        raise ValueError(
            f"The model has class names, so its classes are matched by name, not in the order {order}. Leave it out."
        )
    in_order = _sorted_by(names, order)
    return torch.tensor([in_order.index(name) for name in names])


def _require_one_order(names: tuple[str, ...]) -> None:
    """Raise ValueError if names are in a usual order, and another one differs."""
    given = list(names)
    orders: dict[tuple[str, ...], str] = {}
    for order in ORDERS:
        orders.setdefault(tuple(_sorted_by(names, order)), order)
    if len(orders) == 1 or tuple(given) not in orders:
        return
    listed = [f"{_begin(in_order)} ({order})" for in_order, order in orders.items()]
    raise ValueError(
        f"The model has no class names, and usual orders of the data's classes differ: {'; '.join(listed)}. Choose the "
        f"order of its training with classes (--classes {' or '.join(orders.values())}), or give a file with the names "
        "of its classes in order."
    )


def _begin(names: Sequence[str], most: int = 12) -> str:
    """The first names of a list."""
    listed = ", ".join(names[:most])
    return f"{listed}, …" if len(names) > most else listed


def _names_in_file(file: Path, total: int) -> list[str]:
    """Names of the model's classes from a file: one a line, a JSON list, or a JSON object by number."""
    if not file.is_file():
        require_known(str(file), (*ORDERS, "a file of class names"), "classes")
    text = files.read_names(file)
    try:
        content = json.loads(text)
    except ValueError:
        content = texts.lines(text.strip())
    if isinstance(content, dict):
        content = [content[str(number)] for number in range(total) if str(number) in content]
    if not isinstance(content, list) or len(content) != total:
        number = len(content) if isinstance(content, list) else 0
        raise ValueError(
            f"{file} must hold the names of the model's {total:,} classes, got {number:,}."
        )
    return [str(name) for name in content]


def describe_match(model: nn.Module, names: tuple[str, ...], classes: str = "") -> str:
    """Note on the kind of match in `class_numbers`, or "" for a match by name.

    >>> describe_match(model, ("31", "32"))
    "The data's classes have no names, so their numbers are taken as the model's class numbers."
    """
    if classes in ORDERS:
        return f"The classes are matched by position, in the order {classes}, as chosen."
    if classes:
        return f"The model's classes are named by {Path(classes).name}."
    if by_number(model, names):
        return "The data's classes have no names, so their numbers are taken as the model's class numbers."
    if supported.label_names(model) is not None:
        return ""
    if _names(model):
        card = card_of(unwrap(model))
        if card is None or card.published:
            return ""
        total = class_count(model)
        return f"The model has no class names, so its {total:,} classes are taken as ImageNet's in their usual order."
    given = list(names)
    others = [order for order in ORDERS if _sorted_by(names, order) != given]
    if not others:
        return f"The classes {_begin(given)} are matched by position, because the model has no class names."
    note = (
        "The classes are matched by position, because the model has no class names. Their order is"
    )
    other = _sorted_by(names, others[0])
    first = 0
    while given[first] == other[first]:
        first += 1
    return (
        f"{note} {_begin(given)}; in the order {others[0]}, number {first} would be {other[first]}."
    )


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

    >>> imagenet_numbers(model)[285]
    tensor(285)
    """
    model_names = [names[0] for names in _names(model)]
    imagenet = _imagenet("imagenet-1k")
    count = len(imagenet)
    every = torch.arange(count)
    if len(model_names) == count:
        numbers = _numbers_in_imagenet(model_names, "imagenet-1k")
        return torch.tensor(numbers) if numbers else None
    by_name = _numbers(imagenet)
    numbers = [by_name.get(name, -1) for name in model_names]
    matches = torch.tensor(numbers, dtype=torch.int64)
    matched = matches[matches >= 0]
    in_order = matched.sort().values
    return matches if in_order.equal(every) else None


def _composed(name: str) -> str:
    """A name in Unicode's NFC form, in which class folders are read."""
    return unicodedata.normalize("NFC", name)


def _plain(name: str) -> str:
    words = _composed(name).replace("_", " ").lower().split()
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
    return _with_synonyms(label_names(model) or [])


IN_PLACE = 0.7
"""Share of ImageNet's names in their places, above which other names are taken for other words for the same classes:
torchvision has "crane bird" for one of two cranes, and a fifth of open_clip's names differ."""


def _with_synonyms(names: Sequence[str]) -> list[list[str]]:
    """Plain names of each class, with WordNet's id and names if all of the classes are ImageNet's.

    So a model with human names matches data with WordNet ids, and the other way round.
    """
    names = [_plain(name) for name in names]
    for subset in ("imagenet-1k", "imagenet-22k"):
        numbers = _numbers_in_imagenet(names, subset)
        if numbers:
            classes = _imagenet(subset)
            return [[name, *classes[n][1:]] for name, n in zip(names, numbers, strict=True)]
        if names and not re.fullmatch(r"n\d{8}", names[0]):
            break  # 22k has too many names for a match by these
    return [[name] for name in names]


def _numbers_in_imagenet(names: list[str], subset: str) -> list[int]:
    """The number in an ImageNet of each class, or [] if one is not among them, or two are the same."""
    classes = _imagenet(subset)
    by_name = _numbers(classes)
    numbers = [by_name.get(name) for name in names]
    if len(names) == len(classes):
        places = [i if names[i] in classes[i] else None for i in range(len(names))]
        if len(names) - places.count(None) > IN_PLACE * len(classes):
            numbers = _with_other_words(places, numbers)
    if None in numbers or len(set(numbers)) < len(numbers):
        return []
    return numbers


def _with_other_words(places: Sequence[int | None], numbers: Sequence[int | None]) -> list[int]:
    """The number of each class: its place if its name is there, else the class of its name, else its place.

    A name of another class whose own place is taken is another word, too.
    """
    taken = {place for place in places if place is not None}
    result = []
    for i, (place, number) in enumerate(zip(places, numbers, strict=True)):
        moved = place is None and number is not None and number not in taken
        result.append(number if moved else i)
    return result


@functools.cache
def _imagenet(subset: str) -> list[list[str]]:
    """Names of each class of ImageNet or of a subset: its WordNet id, twice as other classes have a name before it, its
    whole name, and the parts of that."""
    info = ImageNetInfo(subset)
    classes = []
    for wordnet_id in info.label_names():
        text = info.label_name_to_description(wordnet_id)
        parts = [_plain(part) for part in text.split(",")]
        classes.append([wordnet_id, wordnet_id, _plain(text), *parts])
    return classes


def _numbers(classes: list[list[str]]) -> dict[str, int]:
    """Class numbers by name, without names that two classes share. Whole names take precedence over their parts."""
    numbers: dict[str, int | None] = {}
    for part in (slice(0, 3), slice(3, None)):
        new: dict[str, int | None] = {}
        for number, names in enumerate(classes):
            for name in dict.fromkeys(names[part]):
                new[name] = None if name in new else number
        numbers = new | numbers
    return {name: number for name, number in numbers.items() if number is not None}
