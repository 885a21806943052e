"""Table of the forms in which people's own files, folders and machines were tried. Tests in tests/field fill it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

KINDS = {
    1: "identity of a model or an image decided by the text of a path",
    2: "results written without a lock, or in place",
    3: "waiting without a word",
    4: "one file under several names, and walks that do not end",
    5: "the first reading that fits",
    6: "what a library drops, resamples or assumes",
    7: "a name used as text",
    8: "sentences that mislead",
}


@dataclass(frozen=True)
class Form:
    """One form of a kind of fault, as a test tries it.

    kind: number in `KINDS`. door: the way in, such as "command: evaluate, folder". case: what was given. right: the
    independent reference of the right result. test: name of the test.
    """

    kind: int
    door: str
    case: str
    right: str
    test: str


FORMS: list[Form] = []
"""Forms of the imported tests."""

CLOSED: dict[tuple[int, str], str] = {}
"""Reason why a kind of fault cannot occur at a door, by kind and door."""


def form(kind: int, *, door: str, case: str, right: str) -> Callable:
    """Decorator that adds a test to the table. A door may have several forms of a kind."""

    def add(test: Callable) -> Callable:
        FORMS.append(Form(kind, door, case, right, test.__name__))
        return test

    return add


def cannot_occur(kind: int, *, door: str, reason: str) -> None:
    """Add a door that a kind of fault cannot come through to the table."""
    CLOSED[kind, door] = reason
