"""The registry of named data sets, without PyTorch. Their readers are imported on use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from vitlens.plugins import load_plugins

TRAINING = ("train", "training")
VALIDATION = ("valid", "validation", "val", "dev")
TEST = ("test", "testing")
SPLITS = {
    "train": TRAINING,
    "valid": VALIDATION + TEST,
    "test": TEST + VALIDATION,
    "whole": TEST + VALIDATION,
}
EVERY_SPLIT = {*TRAINING, *VALIDATION, *TEST}


class Columns(NamedTuple):
    """Columns of a table, or fields of a WebDataset sample, with the images and the labels. "" for the usual ones."""

    image: str = ""
    label: str = ""


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
    key = prefix + slash
    SOURCES[key] = (name, opens)


def source_names() -> str:
    """Names of all sources, for help texts."""
    return ", ".join(name for name, _ in SOURCES.values())


def open_samples(
    source: str,
    split: str,
    root: str | os.PathLike | None = None,
    fold: int = 0,
    columns: Columns | None = None,
) -> Any:
    """`Samples` of one split of a named data set, a task or a folder. "whole" is the test split, or all images of a
    folder that is not divided."""
    options = {"columns": columns} if columns and any(columns) else {}
    prefix, slash, name = source.partition("/")
    row = SOURCES.get(prefix + slash) or SOURCES.get(source)
    if row is not None:
        _, function = row
        opens = import_function(function)
        folder = Path(root) if root else None
        if options and "columns" not in signature(opens).parameters:
            raise without_columns(source)
        return opens(name, split, folder, fold, **options)
    if Path(source).is_dir():
        open_folder = import_function("vitlens.data.folders:open_folder")
        return open_folder(Path(source), split, root, **options)
    if source in ALIASES:
        return open_samples(ALIASES[source], split, root, fold, columns)
    raise _unknown_source(source)


def require_source(source: str) -> None:
    """Raise ValueError for a name that is neither a folder nor a data set."""
    prefix, slash, _ = source.partition("/")
    known = source in SOURCES or source in ALIASES or prefix + slash in SOURCES
    if not known and not Path(source).exists():
        raise _unknown_source(source)


def _unknown_source(source: str) -> ValueError:
    tasks = ""
    if ALIASES:
        first_two = list(ALIASES)[:2]
        tasks = f", a task such as {', '.join(first_two)}"
    return ValueError(
        f"{source!r} is not a folder or data set. A source is {source_names()}{tasks}, or a folder of class "
        "folders, Parquet files or WebDataset shards."
    )


def without_columns(source: object) -> ValueError:
    """Error for a data set without columns."""
    return ValueError(
        f"image_key and label_key (--image-key, --label-key) name columns of tables and fields of WebDataset samples, "
        f"and {source} has none. Leave them out."
    )


def import_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function, imported if it is given as "module:name"."""
    if isinstance(function, str):
        return resolve_name(function)
    return function


def find_split(split: str, present: Iterable[str], title: str | None = None) -> str | None:
    """The name of a split among the `present` ones, such as "valid" or "Val", or None.

    title: description of the data in the ValueError for a missing split, instead of None.
    """
    present = list(present)
    groups = (TRAINING,) if split == "train" else (VALIDATION, TEST)
    if split not in ("train", "valid"):
        groups = (TEST, VALIDATION)
    for group in groups:
        fitting = [name for name in present if name.lower() in group]
        if len(fitting) > 1:
            place = title or "The data"
            raise ValueError(
                f"{place} has several splits for {split}: {', '.join(sorted(fitting))}. Rename or move all but one."
            )
        if fitting:
            return fitting[0]
    if title:
        parts = ", ".join(present)
        expected = " or ".join(SPLITS[split])
        raise ValueError(
            f"{title} is divided into {parts}, but its {split} split must be named {expected}."
        )
    return None


def data_root(root: str | os.PathLike | None) -> Path:
    """The folder of downloaded data sets."""
    chosen = root or os.environ.get("VITLENS_DATA")
    if chosen:
        return Path(chosen)
    return Path.home() / ".cache" / "vitlens"


register("digits", "vitlens.data.named:digits")
register("torch/NAME", "vitlens.data.named:torchvision_set")
register("hfds/OWNER/SET", "vitlens.data.tables:hub")
load_plugins("data")
