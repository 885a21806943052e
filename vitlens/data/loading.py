"""Open one split of a data set: list it, decide where to hold it, decode what is held."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vitlens.data.decode import shaped
from vitlens.data.imageset import ImageSet, held
from vitlens.data.parquet import Rows
from vitlens.data.samples import Listing, fingerprint
from vitlens.data.sources import SOURCES, Request, listed
from vitlens.data.stream import ImageStream


def load(
    source: str | os.PathLike,
    split: str = "train",
    *,
    size: int | None = None,
    squash: bool = False,
    fit: Callable[[Tensor], Tensor] | None = None,
    on_damaged: str = "raise",
    allow_partial: bool = False,
    fold: int = 0,
    workers: int | None = None,
    root: str | os.PathLike | None = None,
    stream: bool | None = None,
    device: torch.device | str | None = None,
) -> ImageSet | ImageStream:
    """Open the `"train"`, `"valid"` or `"test"` split of a data set.

    Where a source has only one of validation and test images, it is both. Test images without labels (all of them −1,
    or none in a folder of a class) give way to the validation images, and `note` says so. `"whole"` is the test split
    too, but of a folder or tar file that is not divided it is everything.

    `source` is the name of a data set in `vitlens.data.SOURCES`:

    SOURCES

    or the name of a task (`"imagenet"`, `"cifar10"`, `"pets"` …; `vitlens.data.tasks.TASKS` says where each comes from)
    unless there is a folder of that name, or the path of

    * a folder of Parquet shards in the Hugging Face layout: `train-*.parquet` and `valid…-`, `validation-`, `val-` or
      `test-*.parquet` (the first of these that is there) with columns `image: {bytes, path}` and `label`, or, under
      other names, the only ones that can be these (CIFAR-100's `img` and `fine_label`); class names from `classes.json`
      beside them, else from the shards' own metadata;
    * a folder `train/` and `val/` (or `training`, `valid`, `validation`, `test`, `testing`, in small or capital
      letters) of one folder of images per class; hidden files and folders do not count;
    * a folder of one folder of images per class, not divided: of each class about a tenth, chosen by the names of its
      files, is the validation split, and `note` says so. A file stays in its split when others are added;
    * ImageNet's validation files side by side in a folder (`ILSVRC2012_val_00000001.JPEG` …), with a file of their
      labels there or in the folder around it: that of the development kit, `val.txt` or WordNet ids;
    * an uncompressed tar file of either kind of folder, or a folder of such tar files: one a split, or one a class.

    `root`: by default the folder that the environment variable `VITLENS_DATA` names, else `~/.cache/vitlens` (for
    `hfds/`, the cache of Hugging Face).

    `size`: side in pixels to which the short side is resized (bilinear, antialiased) before a center crop; with
    `squash` the whole image is resized to `size` × `size` whatever its shape. `fit`, where given, does it in its own
    way: from uint8 (3, H, W) to uint8 (3, `size`, `size`). By default images stay as they are and must all be alike.
    `on_damaged="skip"` leaves out what cannot be decoded, or is over 100 times as long as wide (or as wide as long),
    and lists it in `damaged`. `allow_partial` accepts a folder that lacks some of the Parquet shards its file names
    announce.

    `stream`: whether images stay where they lie and `workers` processes read them as they are wanted (an `ImageStream`,
    which needs `size`), or are decoded now and held (an `ImageSet`). By default they are held if they fit into half of
    the free memory of the machine and of `device`. To be read in any order, Parquet shards are unpacked once into
    `root`, which takes as much of the disk again. `device`: what the set is put on.

    Raises `ValueError` with what was expected, what came and what to do.
    """
    if split not in ("train", "valid", "test", "whole"):
        raise ValueError(f"split must be 'train', 'valid', 'test' or 'whole', got {split!r}.")
    if on_damaged not in ("raise", "skip"):
        raise ValueError(f"on_damaged must be 'raise' or 'skip', got {on_damaged!r}.")
    if size is not None and size < 1:
        raise ValueError(f"size must be a positive number of pixels, got {size}.")
    if size is None and (squash or stream or fit):
        raise ValueError(
            f"{'Streaming' if stream else 'Squashing'} needs the side of the images in pixels. Pass size=…."
        )
    if workers is not None and workers < 0:
        raise ValueError(f"workers is a number of processes from 0 up, got {workers}.")
    device = torch.device(device or "cpu")
    request = Request(str(source), split, fold, allow_partial, Path(root) if root else None)
    listing = listed(request)
    if split in ("test", "whole") and not _labeled(listing):
        note = f"The test images of {source} have no labels, so its validation images count instead."
        listing = replace(listed(replace(request, split="valid")), note=note)
    if not _labeled(listing):
        raise ValueError(f"The {split} split of {source} holds no image with a label.")
    if stream is None:
        stream = size is not None and len(listing.samples) * 3 * size**2 > free_memory(device) / 2
    workers = workers if workers is not None else max(1, min(16, (os.cpu_count() or 1) // _processes()))
    shape = fit or (size and partial(shaped, side=size, squash=squash))
    if not stream:
        return held(listing, f"the {split} split of {source}", size, shape, on_damaged, workers).to(device)
    samples = listing.samples
    if isinstance(samples, Rows):
        samples = samples.unpacked(request.root / "parquet")
    labels = torch.as_tensor(listing.labels, dtype=torch.int64)
    return ImageStream(
        samples, labels, listing.class_names, size, shape, on_damaged, workers, device, note=listing.note,
        pictures=fingerprint(samples),
    )  # fmt: skip


_rows = "\n".join(
    textwrap.fill(f'`"{row.name}"`: {row.reads};', 120, initial_indent="    * ", subsequent_indent="      ")
    for row in SOURCES.values()
)
load.__doc__ = (load.__doc__ or "").replace("    SOURCES\n", _rows + "\n")


def _labeled(listing: Listing) -> bool:
    """Whether there is a label: where they are kept back, folders of classes are missing or all labels are −1."""
    return any(label >= 0 for label in listing.labels)


def free_memory(device: torch.device) -> int:
    """Bytes free on `device` and, for this process, on the machine that reads for it, whichever is less.

    From /proc and cgroups: psutil would be one more dependency and does not know a container's limit.
    """
    machine = _machine_memory() // _processes()
    return min(machine, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else machine


def _processes() -> int:
    """Processes that train together on this machine, as torchrun and accelerate say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: all that there is
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * 2**30
    try:  # a container may have less than its machine
        return min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such limit, or "max"
        return available
