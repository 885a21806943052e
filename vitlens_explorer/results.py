"""Results of a page that are computed once, by key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CANCELED = "Canceled. It is computed again after another choice."
"""Result of an optional job that the user canceled, until the next change of the state."""
RESULTS = 100
"""Number of results, such as maps and scores, that a page keeps."""


@dataclass(frozen=True)
class Key:
    """Key of a result.

    kind: such as "map" or "score". subject: what the result depends on. needed: True if the page cannot be drawn
    without the result, so that its failure restores the last valid page. The failure of others is their result, as a
    sentence.
    """

    kind: str
    subject: tuple = ()
    needed: bool = False


class Results(dict[Key, object]):
    """Results by key. The oldest beyond `RESULTS` are dropped."""

    def once(self, key: Key, make: Callable[[], object]) -> object:
        """A result, computed if missing."""
        if key not in self:
            self.add(key, make())
        return self[key]

    def add(self, key: Key, value: object) -> None:
        self.setdefault(key, value)
        while len(self) > RESULTS:
            del self[next(iter(self))]

    def forget_canceled(self) -> None:
        for key in [key for key, value in self.items() if value is CANCELED]:
            del self[key]
