"""Fields of a dataclass of settings: the meaning of each, its type, and its range or values."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Collection
from typing import Any

from vitlens.names import require_known

RANGES = {
    "at least 1": lambda n: n >= 1,
    "0 or more": lambda n: n >= 0,
    "above 0": lambda n: n > 0,
    "above 0, at most 1": lambda n: 0 < n <= 1,
    "between 0 and 1": lambda n: 0 <= n <= 1,
    "from 0 up and below 1": lambda n: 0 <= n < 1,
}
"""Predicates for the ranges of settings."""
LARGEST = 1e30
"""Bound of the numbers. Larger ones would overflow in float32."""

type_hints = functools.cache(typing.get_type_hints)


def setting(default: object, meaning: str, fits: str | Collection[str] = "") -> Any:
    """Field of a dataclass of settings.

    default: a value, or a class to call. fits: one of `RANGES`, or the values. Values that are registered later count.
    """
    words = meaning.split()
    metadata = {"meaning": " ".join(words), "fits": fits}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(settings: object, prefix: str = "") -> None:
    """Raise ValueError for a wrong type or range. Lists become tuples, and numbers become strings where text is due."""
    kinds = type_hints(type(settings))
    for field in dataclasses.fields(settings):
        kind = kinds[field.name]
        given = getattr(settings, field.name)
        value = _convert(given, kind)
        object.__setattr__(settings, field.name, value)
        name = prefix + field.name
        fits = field.metadata.get("fits", "")
        _check_type(name, value, kind)
        _check_range(name, value, fits)


def _convert(value: object, kind: type) -> object:
    if isinstance(value, list) and typing.get_args(kind):
        return tuple(value)
    if kind is str and isinstance(value, int | float):
        return str(value)
    return value


def _check_type(name: str, value: object, kind: type) -> None:
    """Raise ValueError for a value of another type, and for numbers that are not finite or too large."""
    parts = typing.get_args(kind)
    if parts:
        expected = parts
        shape = f"{len(parts)} numbers separated by commas"
    else:
        expected = (kind,)
        shape = kind.__name__
    values = value if parts and isinstance(value, tuple) else (value,)
    fits = len(values) == len(expected) and all(map(_has_type, values, expected))
    if not fits:
        raise ValueError(f"{name} must be of type {shape}, got {value!r}.")
    if float not in expected:
        return
    bounded = all(abs(number) < LARGEST for number in values)
    if not bounded:
        raise ValueError(f"{name} must be finite and below 1e30, got {value}.")


def _check_range(name: str, value: object, fits: str | Collection[str]) -> None:
    if not isinstance(fits, str):
        require_known(value, fits, name)
        return
    if not fits:
        return
    is_in_range = RANGES[fits]
    values = value if isinstance(value, tuple) else (value,)
    for number in values:
        if not is_in_range(number):
            raise ValueError(f"{name} must be {fits}, got {value}.")


def _has_type(value: object, kind: type) -> bool:
    """True if a value has the type. An int counts as a float, and a bool only as a bool."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind)
