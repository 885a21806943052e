"""Labelled images, decoded once and held in memory as one uint8 tensor.

Small data sets fit: Tiny-ImageNet is 1.35 GB. Held on the device, a batch is an index, so the sample order is a
function of (seed, epoch) and a run can be resumed in the middle of an epoch at no cost.

Shapes: N images, C = 3 channels, H × W pixels.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torchvision.io
from PIL import Image
from torch import Tensor

SPLITS = {"train": ("train",), "valid": ("valid", "validation", "val", "test")}
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}


@dataclass(frozen=True)
class ImageSet:
    """Images and labels of one split.

    ``images`` is uint8 (N, 3, H, W), ``labels`` int64 (N,), ``class_names`` one name per label, in label order.
    ``damaged`` names the samples that could not be decoded and were left out, each with the reason.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    damaged: tuple[str, ...] = ()

    def __post_init__(self):
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] != 3:
            raise ValueError(
                f"An image set wants uint8 images of shape (N, 3, H, W); these are {self.images.dtype} of shape "
                f"{tuple(self.images.shape)}. Convert them to RGB and stack them first."
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"An image set wants one int64 label for each of its {len(self.images)} images; these labels are "
                f"{self.labels.dtype} of shape {tuple(self.labels.shape)}."
            )
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.class_names):
            raise ValueError(
                f"Labels must lie in 0…{len(self.class_names) - 1}, one for each of {len(self.class_names)} classes; "
                f"these run from {int(self.labels.min())} to {int(self.labels.max())}."
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self):
        return tuple(self.images.shape[2:])

    def batches(self, rows, augment, key):
        for chosen in rows:
            chosen = chosen.to(self.labels.device, non_blocking=True)
            yield self.images[chosen], self.labels[chosen]

    def remaining(self, augment):
        return augment

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set with its tensors on ``device``."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def subset(self, n: int, seed: int = 0) -> ImageSet:
        """``n`` of the images, drawn without replacement as a function of ``seed`` alone."""
        if not 0 < n <= len(self):
            raise ValueError(f"A subset holds between 1 and {len(self)} images, the size of the set; {n} were wanted.")
        chosen = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:n].to(self.labels.device)
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])


def load(
    source: str | os.PathLike,
    split: str = "train",
    *,
    size: int | None = None,
    on_damaged: str = "raise",
    allow_partial: bool = False,
    fold: int = 0,
    workers: int | None = None,
) -> ImageSet:
    """Read one split of a data set into memory.

    ``source`` is one of

    * ``"digits"``: the 1,797 handwritten digits of scikit-learn as they are, 8×8 grey, levels 0…16 scaled to 0…255.
      Five stratified folds: ``split="valid"`` is number ``fold``, ``"train"`` the other four;
    * a folder of Parquet shards in the Hugging Face layout: ``train-*.parquet`` and ``valid…-``, ``validation-`` or
      ``test-*.parquet`` with columns ``image: {bytes, path}`` and ``label``; class names from ``classes.json`` beside
      them, else from the shards' own metadata;
    * a folder ``train/`` and ``val/`` (or ``valid``, ``validation``, ``test``) of one folder of images per class.

    ``size``: side in pixels to which the short side is resized (bilinear, antialiased) before a centre crop; by
    default images stay as they are and must all be alike. ``on_damaged="skip"`` leaves out what cannot be decoded and
    lists it in ``damaged``. ``allow_partial`` accepts a folder that lacks some of the shards its file names announce.

    Raises ``ValueError`` with what was wanted, what came and what to do.
    """
    if split not in SPLITS:
        raise ValueError(f"A split is 'train' or 'valid'; {split!r} is neither.")
    if on_damaged not in ("raise", "skip"):
        raise ValueError(f"on_damaged is 'raise' or 'skip'; {on_damaged!r} is neither.")
    if size is not None and size < 1:
        raise ValueError(f"The image size is a positive number of pixels; {size} came.")
    if str(source) == "digits":
        return _digits(split, fold, size)
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(
            f"A data source is 'digits' or a folder of Parquet shards or images; {str(source)!r} is not a folder."
        )
    if any(folder.glob("*.parquet")):
        samples, labels, class_names = _parquet(folder, split, allow_partial)
    else:
        samples, labels, class_names = _image_folder(folder, split)
    images, damaged = _decode_all(samples, size, workers)
    if damaged and on_damaged == "raise":
        raise ValueError(
            f"{len(damaged)} of {len(samples)} samples cannot be decoded, the first being "
            f"{next(iter(damaged.values()))}. Repair them, or pass on_damaged='skip' to leave them out."
        )
    kept = [i for i in range(len(samples)) if i not in damaged]
    if not kept:
        raise ValueError(f"The {split} split of {folder} holds no image that can be decoded.")
    shapes = {tuple(images[i].shape) for i in kept}
    if len(shapes) > 1:
        sizes = ", ".join(f"{w}×{h}" for _, h, w in sorted(shapes)[:3])
        raise ValueError(
            f"The images of {folder} have {len(shapes)} sizes ({sizes}, …) and one tensor holds one size. Pass size=…, "
            "the side in pixels to which they are resized and cropped."
        )
    return ImageSet(
        torch.stack([images[i] for i in kept]),
        torch.tensor([labels[i] for i in kept], dtype=torch.int64),
        tuple(class_names),
        tuple(damaged.values()),
    )


def _digits(split: str, fold: int, size: int | None) -> ImageSet:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    if fold not in range(5):
        raise ValueError(f"digits is divided into folds 0…4; fold {fold} does not exist.")
    data = load_digits()
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(data.images, data.target)
    chosen = list(folds)[fold][0 if split == "train" else 1]
    grey = torch.from_numpy(np.rint(data.images[chosen] * (255 / 16)).astype(np.uint8))
    images = grey[:, None].expand(-1, 3, -1, -1).contiguous()
    if size is not None:
        images = torch.stack([_fit(image, size) for image in images])
    return ImageSet(images, torch.from_numpy(data.target[chosen].astype(np.int64)), tuple("0123456789"))


def _parquet(folder: Path, split: str, allow_partial: bool):
    import pyarrow.parquet as pq

    shards = sorted(p for p in folder.glob("*.parquet") if p.name.split("-")[0].split(".")[0] in SPLITS[split])
    if not shards:
        raise ValueError(
            f"{folder} holds Parquet files, but none of its {split} split, whose names begin with "
            f"{' or '.join(name + '-' for name in SPLITS[split])}."
        )
    # train-00002-of-00005.parquet announces five.
    announced = {p.stem.rpartition("-of-")[2] for p in shards if "-of-" in p.stem}
    wanted = max((int(n) for n in announced if n.isdigit()), default=len(shards))
    if len(shards) < wanted and not allow_partial:
        raise ValueError(
            f"{folder} holds {len(shards)} of the {wanted} {split} shards that their names announce. Add the missing "
            "ones, or pass allow_partial=True to use what is there."
        )
    samples: list[tuple[str, Callable[[], bytes]]] = []
    labels: list[int] = []
    class_names: Sequence[str] | None = None
    for shard in shards:
        try:
            table = pq.read_table(shard)
            column, label = table["image"].combine_chunks(), table["label"].to_pylist()
            encoded = column.field("bytes")
        except (OSError, KeyError, ValueError) as problem:
            raise ValueError(
                f"{shard} is not a Parquet shard with columns image: {{bytes, path}} and label ({problem})."
            ) from problem
        # Bound as defaults: a closure would see the last shard only.
        samples += [(f"{shard.name} row {i}", lambda b=b: b.as_py() or b"") for i, b in enumerate(encoded)]
        labels += label
        class_names = class_names or _names_in_metadata(table.schema.metadata)
    beside = folder / "classes.json"
    if beside.is_file():
        class_names = _names_in_json(beside)
    if class_names is None:
        class_names = [str(i) for i in range(max(labels, default=-1) + 1)]
    return samples, labels, class_names


def _names_in_metadata(metadata: dict | None) -> list[str] | None:
    try:
        return json.loads(metadata[b"huggingface"])["info"]["features"]["label"]["names"]
    except (TypeError, KeyError, ValueError):
        return None


def _names_in_json(path: Path) -> list[str]:
    """A list of names, or a dict with ``names``; ``wnids`` (WordNet numbers) stand in where there are no names."""
    content = json.loads(path.read_text(encoding="utf-8"))
    names = content if isinstance(content, list) else content.get("names") or content.get("wnids")
    if isinstance(names, dict):
        names = [names[key] for key in content.get("wnids", names)]
    if not isinstance(names, list):
        raise ValueError(f"{path} should hold a list of class names, or a dict with one under 'names'.")
    return [str(name) for name in names]


def _image_folder(folder: Path, split: str):
    root = next((folder / name for name in SPLITS[split] if (folder / name).is_dir()), None)
    if root is None:
        raise ValueError(
            f"{folder} holds neither Parquet shards nor a folder named {' or '.join(SPLITS[split])}, which the {split} "
            "split is read from."
        )
    # Labels number the training classes, so that a validation folder may lack one.
    train = next((folder / name for name in SPLITS["train"] if (folder / name).is_dir()), root)
    class_names = sorted(d.name for d in train.iterdir() if d.is_dir())
    unknown = sorted({d.name for d in root.iterdir() if d.is_dir()} - set(class_names))
    if unknown:
        raise ValueError(f"{root} holds a class {unknown[0]!r} that {train} lacks.")
    samples, labels = [], []
    for label, name in enumerate(class_names):
        for path in sorted((root / name).rglob("*")) if (root / name).is_dir() else ():
            if path.suffix.lower() in SUFFIXES:
                samples.append((str(path.relative_to(folder)), path.read_bytes))
                labels.append(label)
    return samples, labels, class_names


def _decode_all(samples: Sequence[tuple[str, Callable]], size: int | None, workers: int | None):
    """Decode in threads: torchvision's decoders leave Python's lock; a core does some 9,000 64-px JPEGs a second."""
    chunks = [range(i, min(i + 256, len(samples))) for i in range(0, len(samples), 256)]

    def decode_chunk(chunk: Iterable[int]):
        return [_decode(*samples[i], size) for i in chunk]

    with warnings.catch_warnings(), ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore", DeprecationWarning)  # torchvision ≥ 0.29 means to give its decoders away
        images = [image for chunk in pool.map(decode_chunk, chunks) for image in chunk]
    return images, {i: reason for i, reason in enumerate(images) if isinstance(reason, str)}


def _decode(name: str, read: Callable[[], bytes], size: int | None) -> Tensor | str:
    """One RGB image (3, H, W), or the sentence that says why there is none."""
    try:
        encoded = read()
        try:
            image = torchvision.io.decode_image(
                torch.frombuffer(bytearray(encoded), dtype=torch.uint8), mode=torchvision.io.ImageReadMode.RGB
            )
            if image.ndim != 3 or image.dtype != torch.uint8:  # animated, or 16 bits a channel
                raise RuntimeError("not a plain image")
        except (RuntimeError, ValueError, AttributeError):  # AttributeError: a torchvision without decoders
            # Pillow knows more formats, and has the last word on what is damaged.
            with Image.open(io.BytesIO(encoded)) as picture:
                image = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).contiguous()
        return image if size is None else _fit(image, size)
    except Exception as problem:  # a decoder may raise anything on untrusted bytes
        return f"{name} ({type(problem).__name__}: {problem})"


def _fit(image: Tensor, size: int) -> Tensor:
    """Short side to ``size``, then the centre ``size`` × ``size``."""
    _, h, w = image.shape
    if (h, w) == (size, size):
        return image
    scale = size / min(h, w)
    resized = torch.nn.functional.interpolate(
        image[None].float(), (max(size, round(h * scale)), max(size, round(w * scale))), mode="bilinear", antialias=True
    )[0]
    top, left = (resized.shape[1] - size) // 2, (resized.shape[2] - size) // 2
    return resized[:, top : top + size, left : left + size].round().clamp(0, 255).to(torch.uint8)
