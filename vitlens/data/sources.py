"""The registry of data sets that have a name: one row each, readable without PyTorch; readers load when used."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from vitlens.data.tasks import TASKS


@dataclass(frozen=True)
class Request:
    """What `load` asks a source for."""

    source: str
    """As it was given, such as "torch/cifar10"."""
    split: str
    """"train", "valid", "test", or "whole": the test images, or all images if they are not divided into splits."""
    fold: int = 0
    allow_partial: bool = False
    given_root: Path | None = None

    @property
    def name(self) -> str:
        """What follows the prefix: "cifar10" of "torch/cifar10"."""
        return self.source.partition("/")[2]

    @property
    def part(self) -> str:
        """The split, with "test" for "whole": what most sources need."""
        return "test" if self.split == "whole" else self.split

    @property
    def root(self) -> Path:
        """The folder that data sets lie in, or are fetched to."""
        return Path(self.given_root or os.environ.get("VITLENS_DATA") or Path.home() / ".cache" / "vitlens")


@dataclass(frozen=True)
class DataSource:
    """One named data set, or all of those with one prefix."""

    name: str
    """What `load` is given: a whole name, or a prefix and a placeholder such as "torch/NAME"."""
    reads: str
    """What it reads, in a sentence or two for people."""
    listing: str | Callable[[Request], Any]
    """Lists the samples of one split, as a `vitlens.data.Listing`; a function or its "module:name"."""


SOURCES: dict[str, DataSource] = {}
"""All rows, by the name or the prefix with its "/"."""


def register(source: DataSource) -> None:
    """Make `source` a data set that `load`, `vitlens train` and `vitlens evaluate` open by its name."""
    prefix, slash, _ = source.name.partition("/")
    SOURCES[prefix + slash] = source


def source_names() -> str:
    """The names of all rows, as help texts list them."""
    return ", ".join(source.name for source in SOURCES.values())


def listed(request: Request) -> Any:
    """The `Listing` of one split: of a named data set or task, or of the folder or tar file at the path `source`."""
    row = SOURCES.get(request.source.partition("/")[0] + "/") or SOURCES.get(request.source)
    task = TASKS.get(request.source)
    if row is None and task and not Path(request.source).is_dir():
        return listed(replace(request, source=task.source))
    listing = row.listing if row else "vitlens.data.folders:at_path"
    return (resolve_name(listing) if isinstance(listing, str) else listing)(request)


for _row in (
    DataSource(
        "digits",
        "the 1,797 handwritten digits of scikit-learn as they are, 8×8 gray, levels 0…16 scaled to 0…255. Five "
        "stratified folds: the validation split is number `fold`, the training split the other four",
        "vitlens.data.named:digits",
    ),
    DataSource(
        "torch/NAME",
        "a data set of torchvision (`torch/cifar10`, `torch/flowers102` …; `vitlens.data.named.TORCH` lists them), "
        "read from `root` and fetched there if it is missing. ImageNet, which no program may fetch, is read from its "
        "archives, that of its development kit among them, or from folders `train/` and `val/` of its classes",
        "vitlens.data.named:torchvision_set",
    ),
    DataSource(
        "hfds/NAME",
        "a data set of the Hugging Face hub, or a folder that `datasets.load_dataset` reads; `root` is its cache. "
        "Needs the package `datasets`",
        "vitlens.data.named:hugging_face_set",
    ),
    DataSource(
        "wds/NAME",
        "WebDataset shards in the folder `root/NAME`, or `root` itself, with `_info.json` as timm has it or with the "
        "split in their names or as their folder. `wds/OWNER/SET` lies in `root/OWNER/SET` alone, and is fetched from "
        "the Hugging Face hub if it is missing",
        "vitlens.data.tars:webdataset",
    ),
    DataSource(
        "vtab/TASK",
        "a task of VTAB-1k: its 1,000 training images, the last 200 of them as validation, and its own test images",
        "vitlens.data.named:vtab",
    ),
    DataSource(
        "vtab800/TASK",
        "the same, but training on the 800 images that settings are chosen with",
        "vitlens.data.named:vtab",
    ),
):
    register(_row)
