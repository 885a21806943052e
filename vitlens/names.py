"""Names that users type: similar ones for a wrong name, and names that are imported on first use."""

import ast
import functools
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import lazy_loader

MEANT = {
    **dict.fromkeys(
        ("show", "view", "display", "heatmap", "visualize", "visualise", "draw", "imshow"),
        "overlay",
    ),
    **dict.fromkeys(("predict", "forward", "infer", "logits", "classify"), "run"),
    **dict.fromkeys(("hook", "hooks", "record", "attend", "attentions"), "capture"),
    **dict.fromkeys(("open", "from_pretrained", "create_model", "vit"), "load_model"),
    **dict.fromkeys(("transform", "transforms", "processor", "normalize"), "preprocess"),
    **dict.fromkeys(("denormalize", "unnormalize"), "restore"),
    **dict.fromkeys(("ablate", "patching", "knockout"), "intervene"),
    **dict.fromkeys(("entropies", "distances", "statistics", "stats"), "summary"),
}
"""Public names by what other libraries call the same, for names that resemble none."""


def suggestion(word: str, names: Iterable[str], texts: Iterable[str] | None = None) -> str:
    """The sentence " Did you mean …?" with at most five names similar to a word, or "".

    Names that contain the whole word come first, then names with a word that begins with it. Without either, names that
    contain it, or else close matches. texts: the text to search for each name, by default the name.

    >>> suggestion("cat", ["bobcat", "catamount", "tabby cat"])
    ' Did you mean tabby cat, catamount?'
    """
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
        if hint:  # before a long list
            raise ValueError(f"{what} is unknown, got {name!r}.{hint} It must be one of {choices}.")
        raise ValueError(f"{what} must be one of {choices}, got {name!r}.")


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
    ones, here and elsewhere.
    """
    find, list_names, names = lazy_loader.attach_stub(package, file)
    refuse = unknown_name(package, names)

    def find_or_suggest(name: str) -> object:
        return find(name) if name in names else refuse(name)

    return find_or_suggest, list_names, names


def unknown_name(module: str, names: Iterable[str]) -> Callable[[str], object]:
    """`__getattr__` of a module with these public names. It raises AttributeError with the right place or names.

    >>> vitlens.gradcam
    Traceback (most recent call last):
    AttributeError: module 'vitlens' has no attribute 'gradcam'. Did you mean vitlens.attribution.grad_cam?
    """

    def refuse(name: str) -> object:
        if name.startswith("_"):  # Python and tools look for these
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        hint = same_name_elsewhere(module, name) or suggestion(name, names)
        hint = hint or _similar_elsewhere(module, name) or f" `dir({module})` lists its names."
        raise AttributeError(f"module {module!r} has no attribute {name!r}.{hint}")

    return refuse


def same_name_elsewhere(module: str, name: str) -> str:
    """The sentence " Did you mean …?" with the places of a public name, whatever its case and underscores, or ""."""
    places = _places(module)
    letters = _letters(name)
    same = [place for place in places if _letters(_last(place)) == letters]
    if not same:
        singular = letters.removesuffix("s")
        same = [place for place in places if _letters(_last(place)).removesuffix("s") == singular]
    if not same:
        return ""
    same.sort(key=functools.partial(_is_other, name))
    return f" Did you mean {', '.join(same[:5])}?"


def _is_other(name: str, place: str) -> bool:
    return _last(place) != name


def _similar_elsewhere(module: str, name: str) -> str:
    """As `same_name_elsewhere`, for a similar name, one of its words, or what other libraries call the same."""
    key = name.lower()
    if key in MEANT:
        return same_name_elsewhere(module, MEANT[key])
    last = {_last(place): place for place in reversed(_places(module))}
    matches = get_close_matches(name, last, n=5, cutoff=0.75)
    if matches:
        return f" Did you mean {', '.join(last[match] for match in matches)}?"
    for word in sorted(key.split("_"), key=len, reverse=True):
        hint = same_name_elsewhere(module, word) if len(word) > 3 else ""
        if hint:
            return hint
    return suggestion(name, last.values(), last)


def _places(module: str) -> list[str]:
    """All public names in the package of a module, and in the packages that extend vitlens, its own package first."""
    package = module.partition(".")[0]
    points = entry_points(group="vitlens.commands")
    extending = sorted(point.module.partition(".")[0] for point in points)
    packages = dict.fromkeys([package, "vitlens", *extending])
    places: list[str] = []
    for each in packages:
        for place in public_names(each):
            parent, _, name = place.rpartition(".")
            above = parent.rpartition(".")[0]
            if (
                not above or f"{above}.{name}" not in places
            ):  # a package repeats names of its modules
                places.append(place)
    return places


@functools.cache
def public_names(package: str) -> tuple[str, ...]:
    """Full names of all that a package lists in `__all__`, and of all in its public modules, without importing them.

    >>> "vitlens.report.inspect" in vitlens.names.public_names("vitlens")
    True
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return ()
    return tuple(_names_below(package, Path(spec.submodule_search_locations[0])))


def _names_below(module: str, path: Path) -> Iterable[str]:
    """Full names of the public names of a module, whose path is without a suffix, each followed by those below it."""
    files = (path / "__init__.pyi", path / "__init__.py", path.with_name(f"{path.name}.py"))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return
    for name in _listed(file):
        yield f"{module}.{name}"
        yield from _names_below(f"{module}.{name}", path / name)


def _listed(file: Path) -> list[str]:
    """The names in `__all__` of a file of Python, if they are written out."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = getattr(node, "targets", [])
        if [getattr(target, "id", "") for target in targets] == ["__all__"]:
            return ast.literal_eval(node.value) if isinstance(node.value, ast.List) else []
    return []


def _last(place: str) -> str:
    return place.rpartition(".")[2]


def _letters(name: str) -> str:
    """A name in lower case without underscores."""
    return name.lower().replace("_", "")


def listed_names(thing: object, public: Iterable[str]) -> list[str]:
    """`__dir__` of an object, for completion by tab: these names, and those that begin with an underscore.

    Its other attributes, such as those that it inherits, stay usable.
    """
    inherited = object.__dir__(thing)
    return sorted({*public, *(name for name in inherited if name.startswith("_"))})


class PlaceFinder:
    """A finder of modules that raises ImportError for `from package import name` if the name is public elsewhere.

    It is the last of `sys.meta_path`, and finds nothing itself.
    """

    def __init__(self, *packages: str):
        self.packages = packages

    def find_spec(
        self, full_name: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        package, _, name = full_name.partition(".")
        if package not in self.packages or not name.isidentifier() or name.startswith("_"):
            return None
        hint = same_name_elsewhere(package, name)
        if hint:
            raise ImportError(f"{package} has no name {name!r}.{hint}")
        return None
