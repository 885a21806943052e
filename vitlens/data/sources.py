"""The registry of named data sets, without PyTorch. Their readers are imported on use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from vitlens.plugins import load_plugins

VALIDATION = ("valid", "validation", "val")
SPLITS = {
    "train": ("train", "training"),
    "valid": (*VALIDATION, "test", "testing"),
    "test": ("test", "testing", *VALIDATION),
    "whole": ("test", "testing", *VALIDATION),
}
EVERY_SPLIT = {name for names in SPLITS.values() for name in names}


SOURCES: dict[str, tuple[str, str | Callable[..., Any]]] = {}
"""Name for help texts and opening function of each data set, by its name or by its prefix with the "/"."""
ALIASES: dict[str, str] = {}
"""Sources by a short name, such as that of a data set in a paper."""
FORMATS: dict[str, str | Callable[..., Any]] = {}
"""Reader of folders of archives by the suffix of the archives, from (folder, split) to `Samples`."""


def register(name: str, opens: str | Callable[..., Any]) -> None:
    """Add a data set, or all with one prefix, that `load`, `vitlens train` and `vitlens evaluate` open by name.

    >>> def opens(name, split, root, fold):
    ...     return vitlens.data.Samples([cat] * 4, [0, 0, 1, 1], ("cat", "tabby"), range(4))
    >>> vitlens.data.register("cats", opens)

    name: a whole name, or a prefix and a placeholder such as "torch/NAME". opens: the function (or its "module:name")
    that returns a split as `vitlens.data.Samples`. It gets the name after the prefix, the split ("train", "valid",
    "test", or "whole", which is the test split or all undivided images), the root or None, and the fold.
    """
    prefix, slash, _ = name.partition("/")
    SOURCES[prefix + slash] = name, opens


def source_names() -> str:
    """Names of all sources, for help texts."""
    return ", ".join(name for name, _ in SOURCES.values())


def opened(source: str, split: str, root: str | Path | None = None, fold: int = 0) -> Any:
    """`Samples` of one split of a named data set, a task or a folder. "whole" is the test split, or all images of a
    folder that is not divided."""
    prefix, slash, name = source.partition("/")
    row = SOURCES.get(prefix + slash) or SOURCES.get(source)
    if row is None and Path(source).is_dir():
        return resolved("vitlens.data.folders:folder")(Path(source), split, root)
    if row is None and source in ALIASES:
        return opened(ALIASES[source], split, root, fold)
    if row is None:
        tasks = f", a task such as {', '.join([*ALIASES][:2])}" if ALIASES else ""
        raise ValueError(
            f"{source!r} is not a folder or data set. A source is {source_names()}{tasks}, or a folder of class "
            "folders, Parquet files or WebDataset shards."
        )
    _, opens = row
    return resolved(opens)(name, split, Path(root) if root else None, fold)


def resolved(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function, which may be given as "module:name"."""
    return resolve_name(function) if isinstance(function, str) else function


def first_of(split: str, present: Iterable[str], title: str | None = None) -> str | None:
    """The first of the `present` names of a split, such as "valid" or "Val", or None.

    title: description of the data in the ValueError for a missing split, instead of None.
    """
    present = list(present)
    by_name = {name.lower(): name for name in present}
    first = next((by_name[name] for name in SPLITS[split] if name in by_name), None)
    if first is None and title:
        raise ValueError(
            f"{title} is divided into {', '.join(present)}, but its {split} split must be named "
            f"{' or '.join(SPLITS[split])}."
        )
    return first


def data_root(root: str | Path | None) -> Path:
    """The folder of downloaded data sets."""
    return Path(root or os.environ.get("VITLENS_DATA") or Path.home() / ".cache" / "vitlens")


register("digits", "vitlens.data.named:digits")
register("torch/NAME", "vitlens.data.named:torchvision_set")
register("hfds/OWNER/SET", "vitlens.data.tables:hub")
load_plugins("data")
