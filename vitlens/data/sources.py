"""The registry of data sets that have a name: one row each, readable without PyTorch; readers load when used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from vitlens.data.tasks import TASKS

VALIDATION = ("valid", "validation", "val")
SPLITS = {
    "train": ("train", "training"),
    "valid": (*VALIDATION, "test", "testing"),
    "test": ("test", "testing", *VALIDATION),
}
SPLITS["whole"] = SPLITS["test"]
EVERY_SPLIT = {name for names in SPLITS.values() for name in names}


@dataclass(frozen=True)
class DataSource:
    """One named data set, or all of those with one prefix."""

    name: str
    """What `load` is given: a whole name, or a prefix and a placeholder such as "torch/NAME"."""
    reads: str
    """What it reads, for help texts."""
    opens: str | Callable[..., Any]
    """The function (or its "module:name") that opens a split as `vitlens.data.Samples`. It is called with the name
    behind the prefix, the split ("train", "valid", "test", or "whole": test, or all that is not divided), the root that
    was given or None, and the fold."""


SOURCES: dict[str, DataSource] = {}
"""All rows, by the name or the prefix with its "/"."""


def register(source: DataSource) -> None:
    """Make `source` a data set that `load`, `vitlens train` and `vitlens evaluate` open by its name."""
    prefix, slash, _ = source.name.partition("/")
    SOURCES[prefix + slash] = source


def source_names() -> str:
    """The names of all rows, as help texts list them."""
    return ", ".join(source.name for source in SOURCES.values())


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
    opens = resolve_name(row.opens) if isinstance(row.opens, str) else row.opens
    return opens(name, split, Path(root) if root else None, fold)


def first_of(split: str, present: Iterable[str]) -> str | None:
    """The first name for `split`, such as "valid" or "Val", that is among those `present`; None if none is."""
    by_name = {name.lower(): name for name in present}
    return next((by_name[name] for name in SPLITS[split] if name in by_name), None)


def data_root(root: str | Path | None) -> Path:
    """The folder that data sets lie in, or are fetched to."""
    return Path(root or os.environ.get("VITLENS_DATA") or Path.home() / ".cache" / "vitlens")


for _name, _reads, _opens in (
    ("digits", "8×8 digits of scikit-learn, in five folds", "vitlens.data.named:digits"),
    ("torch/NAME", "a data set of torchvision, fetched if missing", "vitlens.data.named:torchvision_set"),
    ("hfds/OWNER/SET", "a data set of the Hugging Face hub", "vitlens.data.tables:hub"),
    ("wds/OWNER/SET", "WebDataset shards in ROOT/OWNER/SET or of the hub", "vitlens.data.tables:webdataset"),
    ("vtab/TASK", "a task of VTAB-1k: 1,000 training images, 200 of them for validation", "vitlens.data.named:vtab"),
    ("vtab800/TASK", "the same, trained on the other 800", "vitlens.data.named:vtab800"),
):
    register(DataSource(_name, _reads, _opens))
