"""The registry of data sets that have a name, readable without PyTorch; their readers load when used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from vitlens.data.tasks import TASKS

VALIDATION = ("valid", "validation", "val")
SPLITS = {
    "train": ("train", "training"),
    "valid": (*VALIDATION, "test", "testing"),
    "test": ("test", "testing", *VALIDATION),
    "whole": ("test", "testing", *VALIDATION),
}
EVERY_SPLIT = {name for names in SPLITS.values() for name in names}


SOURCES: dict[str, tuple[str, str | Callable[..., Any]]] = {}
"""By its name or its prefix with the "/", each data set's name for help texts and the function that opens it."""


def register(name: str, opens: str | Callable[..., Any]) -> None:
    """Add a data set, or all with one prefix, that `load`, `vitlens train` and `vitlens evaluate` open by its name.

    name: a whole name, or a prefix and a placeholder such as "torch/NAME". opens: the function (or its "module:name")
    that opens a split as `vitlens.data.Samples`. It is called with the name behind the prefix, the split ("train",
    "valid", "test", or "whole": test, or all that is not divided), the root that was given or None, and the fold.
    """
    prefix, slash, _ = name.partition("/")
    SOURCES[prefix + slash] = name, opens


def source_names() -> str:
    """The names of all rows, for help texts."""
    return ", ".join(name for name, _ in SOURCES.values())


def opened(source: str, split: str, root: str | Path | None = None, fold: int = 0) -> Any:
    """The `Samples` of one split of a named data set or task, or of the folder `source`. The split "whole" is the test
    images, or all images of a folder that is not divided."""
    prefix, slash, name = source.partition("/")
    row = SOURCES.get(prefix + slash) or SOURCES.get(source)
    if row is None and Path(source).is_dir():
        return resolve_name("vitlens.data.folders:folder")(Path(source), split, root)
    if row is None and source in TASKS:
        return opened(TASKS[source].source, split, root, fold)
    if row is None:
        raise ValueError(
            f"{source!r} is not a folder, and no data set has that name. A source is {source_names()}, a task such as "
            "cifar10, or a folder of class folders, Parquet files or WebDataset shards."
        )
    opens = resolve_name(row[1]) if isinstance(row[1], str) else row[1]
    return opens(name, split, Path(root) if root else None, fold)


def first_of(split: str, present: Iterable[str], where: str | None = None) -> str | None:
    """The first of the `present` names that means `split`, such as "valid" or "Val", or None.

    where: with it, a split without a name is a ValueError.
    """
    present = list(present)
    by_name = {name.lower(): name for name in present}
    found = next((by_name[name] for name in SPLITS[split] if name in by_name), None)
    if found is None and where:
        raise ValueError(
            f"{where} is divided into {', '.join(present)}, but its {split} split must be named "
            f"{' or '.join(SPLITS[split])}."
        )
    return found


def data_root(root: str | Path | None) -> Path:
    """The folder that data sets lie in, or are fetched to."""
    return Path(root or os.environ.get("VITLENS_DATA") or Path.home() / ".cache" / "vitlens")


register("digits", "vitlens.data.named:digits")
register("torch/NAME", "vitlens.data.named:torchvision_set")
register("hfds/OWNER/SET", "vitlens.data.tables:hub")
register("wds/OWNER/SET", "vitlens.data.tables:webdataset")
register("vtab/TASK", "vitlens.data.named:vtab")
register("vtab800/TASK", "vitlens.data.named:vtab800")
