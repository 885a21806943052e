"""Open one split of a data set: list it, decide where to hold it, decode what is held."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vitlens.data import memory
from vitlens.data.decode import decoded, shaped
from vitlens.data.folders import has_imagenet, in_folder
from vitlens.data.imageset import ImageSet, check_labels
from vitlens.data.named import digits, from_hugging_face, from_torchvision
from vitlens.data.parquet import Rows, in_parquet
from vitlens.data.samples import Listing, part
from vitlens.data.shards import MissingShards, fetched, in_shards
from vitlens.data.stream import ImageStream
from vitlens.data.tars import in_tars
from vitlens.data.tasks import TASKS
from vitlens.data.vtab import thousand


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
    """Open the ``"train"``, ``"valid"`` or ``"test"`` split of a data set.

    Where a source has only one of validation and test images, it is both. Test images without labels (all of them −1,
    or none in a folder of a class) give way to the validation images, and ``note`` says so. ``"whole"`` is the test
    split too, but of a folder or tar file that is not divided it is everything.

    ``source`` is one of

    * ``"digits"``: the 1,797 handwritten digits of scikit-learn as they are, 8×8 gray, levels 0…16 scaled to 0…255.
      Five stratified folds: ``split="valid"`` is number ``fold``, ``"train"`` the other four;
    * the name of a task (``"imagenet"``, ``"cifar10"``, ``"pets"``, ``"vtab/dtd"`` …; ``tasks.TASKS`` says where each
      comes from), unless there is a folder of that name. ``"vtab/…"`` are the 1,000 training images of VTAB-1k,
      ``"vtab800/…"`` the 800 that a setting is chosen with, both with 200 to choose it on as validation and with the
      task's own test images;
    * ``"torch/NAME"``: a data set of torchvision (``torch/cifar10``, ``torch/flowers102`` …; ``named.TORCH`` lists
      them and what they call the splits), read from ``root`` and fetched there if it is missing. ImageNet, which no
      program may fetch, is read from its archives, that of its development kit among them, or from folders ``train/``
      and ``val/`` of its classes;
    * ``"hfds/NAME"``: a data set of the Hugging Face hub, or a folder that ``datasets.load_dataset`` reads; ``root`` is
      its cache. Needs the package ``datasets``;
    * ``"wds/NAME"``: WebDataset shards in the folder ``root/NAME``, or ``root`` itself, with ``_info.json`` as timm has
      it or with the split in their names or as their folder; read as the tar files they are, so no package is needed.
      ``wds/OWNER/SET`` lies in ``root/OWNER/SET`` alone, and is fetched from the Hugging Face hub if it is missing;
    * a folder of Parquet shards in the Hugging Face layout: ``train-*.parquet`` and ``valid…-``, ``validation-``,
      ``val-`` or ``test-*.parquet`` (the first of these that is there) with columns ``image: {bytes, path}`` and
      ``label``, or, under other names, the only ones that can be these (CIFAR-100's ``img`` and ``fine_label``); class
      names from ``classes.json`` beside them, else from the shards' own metadata;
    * a folder ``train/`` and ``val/`` (or ``valid``, ``validation``, ``test``) of one folder of images per class;
    * a folder of one folder of images per class, not divided: of each class about a tenth, chosen by the names of its
      files, is the validation split, and ``note`` says so. A file stays on its side when others are added;
    * ImageNet's validation files side by side in a folder (``ILSVRC2012_val_00000001.JPEG`` …), with a file of their
      labels there or in the folder around it: that of the development kit, ``val.txt`` or WordNet ids;
    * an uncompressed tar file of either kind of folder, or a folder of such tar files: one a split, or one a class.

    ``root``: by default the folder that the environment variable ``VITLENS_DATA`` names, else ``~/.cache/vitlens``
    (for ``hfds/``, the cache of Hugging Face).

    ``size``: side in pixels to which the short side is resized (bilinear, antialiased) before a center crop; with
    ``squash`` the whole image is resized to ``size`` × ``size`` whatever its shape. ``fit``, where given, does it in
    its own way: from uint8 (3, H, W) to uint8 (3, ``size``, ``size``). By default images stay as they are and must all
    be alike. ``on_damaged="skip"`` leaves out what cannot be decoded, or is over 100 times as long as wide (or as wide
    as long), and lists it in ``damaged``.
    ``allow_partial`` accepts a folder that lacks some of the Parquet shards its file names announce.

    ``stream``: whether images stay where they lie and ``workers`` processes read them as they are wanted (an
    ``ImageStream``, which needs ``size``), or are decoded now and held (an ``ImageSet``). By default they are held if
    they fit into half of the free memory of the machine and of ``device``. To be read in any order, Parquet shards are
    unpacked once into ``root``, which takes as much of the disk again. ``device``: what the set is put on.

    Raises ``ValueError`` with what was wanted, what came and what to do.
    """
    if split not in ("train", "valid", "test", "whole"):
        raise ValueError(f"A split is 'train' or 'valid', 'test' or 'whole'; {split!r} is none of them.")
    if on_damaged not in ("raise", "skip"):
        raise ValueError(f"on_damaged is 'raise' or 'skip'; {on_damaged!r} is neither.")
    if size is not None and size < 1:
        raise ValueError(f"The image size is a positive number of pixels; {size} came.")
    if size is None and (squash or stream or fit):
        raise ValueError(
            f"{'Streaming' if stream else 'Squashing'} needs the side of the images in pixels: pass size=…."
        )
    if workers is not None and workers < 0:
        raise ValueError(f"workers is a number of processes from 0 up; {workers} came.")
    device = torch.device(device or "cpu")
    cache = Path(root or os.environ.get("VITLENS_DATA") or Path.home() / ".cache" / "vitlens")
    listing = _listed(str(source), split, fold, allow_partial, cache, root)
    if split in ("test", "whole") and not _labeled(listing):
        note = f"The test images of {source} have no labels, so its validation images count instead."
        listing = replace(_listed(str(source), "valid", fold, allow_partial, cache, root), note=note)
    if not _labeled(listing):
        raise ValueError(f"The {split} split of {source} holds no image with a label.")
    if stream is None:
        stream = size is not None and len(listing.samples) * 3 * size**2 > memory.free(device) / 2
    workers = workers if workers is not None else max(1, min(16, (os.cpu_count() or 1) // memory.processes()))
    shape = fit or (size and partial(shaped, side=size, squash=squash))
    if not stream:
        return _held(listing, f"the {split} split of {source}", size, shape, on_damaged, workers).to(device)
    samples = listing.samples.unpacked(cache / "parquet") if isinstance(listing.samples, Rows) else listing.samples
    labels = torch.as_tensor(listing.labels, dtype=torch.int64)
    return ImageStream(
        samples, labels, listing.class_names, size, shape, on_damaged, workers, device, note=listing.note
    )


def _labeled(listing: Listing) -> bool:
    """Whether there is a label: where they are kept back, folders of classes are missing or all labels are −1."""
    return any(label >= 0 for label in listing.labels)


def _listed(source: str, split: str, fold: int, allow_partial: bool, cache: Path, root) -> Listing:
    if source == "digits":
        return digits(part(split), fold)
    prefix, _, name = source.partition("/")
    if prefix in ("vtab", "vtab800"):
        return thousand(source, part(split), lambda *which: _listed(*which, fold, allow_partial, cache, root))
    if source in TASKS and not Path(source).is_dir():
        return _listed(TASKS[source].source, split, fold, allow_partial, cache, root)
    if prefix == "torch":
        try:
            return from_torchvision(name, part(split), cache)
        except ValueError:  # of ImageNet torchvision wants the archive of the development kit, too
            if name.lower() != "imagenet" or not has_imagenet(cache, part(split)):
                raise
        return in_folder(cache, split)
    if prefix == "hfds":
        return from_hugging_face(name, part(split), root and Path(root))
    if prefix == "wds":
        return _in_shards(name, part(split), cache)
    path = Path(source)
    if path.suffix == ".tar" and path.is_file():
        return in_tars([path], path, split)
    if not path.is_dir():
        raise ValueError(
            "A data source is 'digits', a task such as cifar10, torch/NAME, hfds/NAME, wds/NAME, a .tar file, or a "
            f"folder of Parquet shards, of tar files or of images, and {source!r} is not a folder."
        )
    return in_parquet(path, part(split), allow_partial) if any(path.glob("*.parquet")) else in_folder(path, split)


def _in_shards(name: str, split: str, cache: Path) -> Listing:
    folder = cache / name
    try:
        return in_shards(folder if folder.is_dir() or "/" in name else cache, split)
    except MissingShards:
        if name.count("/") != 1:  # no data set of the hub
            raise
    fetched(name, folder, split)
    return in_shards(folder, split)


def _held(
    listing: Listing, what: str, size: int | None, shape: Callable | None, on_damaged: str, workers: int
) -> ImageSet:
    """Decode everything, once and in order, and hold it."""
    labels = torch.as_tensor(listing.labels, dtype=torch.int64)
    n = len(listing.samples)
    check_labels(labels, n, listing.class_names)
    # Filled in place where the size is known: a list of images, stacked, would take the memory twice.
    images = [None] * n if size is None else torch.empty(n, 3, size, size, dtype=torch.uint8)
    damaged: dict[int, str] = {}

    def decode_chunk(chunk: Iterable[int]) -> None:
        for i in chunk:
            image = decoded(listing.samples, i)
            if isinstance(image, str):
                damaged[i] = image
            else:
                images[i] = shape(image) if shape else image

    # In threads: torchvision's decoders leave Python's lock; a core does some 9,000 64-px JPEGs a second.
    chunks = [range(i, min(i + 256, n)) for i in range(0, n, 256)]
    with warnings.catch_warnings(), ThreadPoolExecutor(max(1, workers)) as pool:
        warnings.simplefilter("ignore", DeprecationWarning)  # torchvision ≥ 0.29 means to give its decoders away
        list(pool.map(decode_chunk, chunks))
    reasons = tuple(damaged[i] for i in sorted(damaged))
    if damaged and on_damaged == "raise":
        raise ValueError(
            f"{len(damaged)} of {n} samples cannot be decoded, the first being {reasons[0]}. Repair them, or leave "
            "them out (--skip-damaged, in Python on_damaged='skip')."
        )
    kept = [i for i in range(n) if i not in damaged]
    if not kept:
        raise ValueError(f"Of {what} no image can be decoded.")
    if size is None:
        shapes = {tuple(images[i].shape) for i in kept}
        if len(shapes) > 1:
            sizes = ", ".join(f"{w}×{h}" for _, h, w in sorted(shapes)[:3])
            raise ValueError(
                f"The images of {what} have {len(shapes)} sizes ({sizes}, …) and one tensor holds one size. Pass "
                "size=…, the side in pixels to which they are resized and cropped."
            )
        images = torch.stack([images[i] for i in kept])
    elif damaged:
        images = images[kept]
    return ImageSet(images, labels[kept], listing.class_names, reasons, listing.note)
