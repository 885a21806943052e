"""Fields of a dataclass as settings: what each means, and their values read from text or JSON."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
import typing
from collections.abc import Iterable

from vitlens.data.augment import check_finite

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def meanings(owner: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, by the field's name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body
    return {
        field.target.id: " ".join(docstring.value.value.split())
        for field, docstring in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(docstring, ast.Expr)
    }


def check_names(owner: type, names: Iterable[str], prefix: str = "") -> None:
    """Raise ValueError for the first name that is no field of the dataclass."""
    known = sorted(field.name for field in dataclasses.fields(owner))
    for name in names:
        if name not in known:
            raise ValueError(
                f"There is no setting {prefix}{name}. The settings are: {', '.join(prefix + each for each in known)}."
            )


def check(settings: object, ranges: dict, choices: dict) -> None:
    """Raise ValueError for a number outside of its range, and for a word that is none of the choices.

    ranges: from a rule in words to the rule and the names of the settings that it holds for.
    """
    numbers = {}
    for name, value in vars(settings).items():
        parts = value if isinstance(value, tuple) else (value,)
        numbers[name] = [part for part in parts if isinstance(part, (int, float))]
        check_finite(name, numbers[name], value)
    for rule, (fits, names) in ranges.items():
        for name in names.split():
            if not all(map(fits, numbers[name])):
                raise ValueError(f"{name} {rule}, got {getattr(settings, name)}.")
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {getattr(settings, name)!r}.")


def from_json(owner: type, values: dict, prefix: str = "") -> dict:
    """The values of a JSON object, once every name and type is known to fit the dataclass."""
    if not isinstance(values, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'A recipe'} must be a table of settings, got {values!r}.")
    check_names(owner, values, prefix)
    kinds = typing.get_type_hints(owner)
    for name, value in values.items():
        if not _fits(value, kinds[name]):
            kind = getattr(kinds[name], "__name__", kinds[name])
            raise ValueError(f"{prefix}{name} must be of type {kind}, got {value!r}.")
    return dict(values)


def _fits(value: object, kind: type) -> bool:
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        return isinstance(value, (list, tuple)) and len(value) == len(inner) and all(map(_fits, value, inner))
    if dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)


def from_text(owner: type, name: str, text: str, prefix: str = "") -> object:
    """The value that the text after `name=` stands for, in the field's type."""
    check_names(owner, [name], prefix)
    kind = typing.get_type_hints(owner)[name]
    inner = typing.get_args(kind)
    try:
        if kind is bool:
            return BOOLEANS[text.lower()]
        if typing.get_origin(kind) is tuple:
            parts = text.strip("()[] ").split(",")
            return tuple(one(part) for one, part in zip(inner, parts, strict=True))
        return kind(text)
    except (ValueError, KeyError):
        shape = f"{len(inner)} numbers separated by commas" if inner else kind.__name__
        raise ValueError(f"{prefix}{name} must be of type {shape}, got {text!r}.") from None


def from_free_text(text: str) -> object:
    """The value of a setting of unknown type: a number, true, false or another JSON value, else the text itself."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
