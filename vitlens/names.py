"""Names that users type: similar ones for a wrong name, and names that are imported on first use."""

import re
from collections.abc import Callable, Iterable

import lazy_loader


def suggestion(word: str, names: Iterable[str], texts: Iterable[str] | None = None) -> str:
    """The sentence " Did you mean …?" with at most five names similar to a word, or "".

    Names that contain the whole word come first, then names with a word that begins with it. Without either, names that
    contain it, or else close matches. texts: the text to search for each name, by default the name.

    >>> suggestion("cat", ["bobcat", "catamount", "tabby cat"])
    ' Did you mean tabby cat, catamount?'
    """
    from difflib import get_close_matches

    key = _plain(word)
    if not key:
        return ""
    names = list(names)
    pairs = []
    for name, text in zip(names, texts or names, strict=True):
        words = _plain(text)
        pairs.append((name, f" {words} "))
    similar = [name for name, text in pairs if f" {key} " in text]
    similar += [name for name, text in pairs if f" {key}" in text]
    if not similar:
        letters = key.replace(" ", "")
        similar = [name for name, text in pairs if letters in text.replace(" ", "")]
    if not similar:
        by_text = {_plain(name): name for name in names}
        matches = get_close_matches(key, by_text, n=5)
        similar = [by_text[text] for text in matches]
    if not similar:
        return ""
    without_repeats = list(dict.fromkeys(similar))
    return f" Did you mean {', '.join(without_repeats[:5])}?"


def _plain(text: str) -> str:
    """Letters and digits of a text in lower case, with a space between words."""
    words = re.findall(r"[^\W_]+", text.lower())
    return " ".join(words)


def require_known(
    name: object, names: Iterable[str], what: str, texts: Iterable[str] | None = None
) -> None:
    """Raise ValueError with all names, and with similar ones, unless a name is among them.

    what: noun for the name, with which the message begins. texts: as in `suggestion`.

    >>> require_known("mean", ("mean", "zero"), "way")
    """
    names = list(names)
    if name not in names:
        hint = suggestion(str(name), names, texts)
        choices = ", ".join(names)
        raise ValueError(f"{what} must be one of {choices}, got {name!r}.{hint}")


def reject(rows: Iterable[tuple[object, str]]) -> None:
    """Raise ValueError with the message of the first row (is_wrong, message) whose is_wrong is True.

    >>> reject([(False, "Expected 1 image, got 2.")])
    """
    for is_wrong, message in rows:
        if is_wrong:
            raise ValueError(message)


def attach_lazily(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose stub `__init__.pyi` lists its names.

    Names are imported when they are first used, by `lazy_loader`. An unknown name raises AttributeError with similar
    ones.
    """
    find, list_names, names = lazy_loader.attach_stub(package, file)

    def find_or_suggest(name: str) -> object:
        if name in names:
            return find(name)
        hint = suggestion(name, names)
        raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")

    return find_or_suggest, list_names, names
