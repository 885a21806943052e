"""Named data sets: scikit-learn's digits and torchvision's data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torchvision.datasets

from vitlens import waiting
from vitlens.data.folders import open_folder
from vitlens.data.imageset import Samples
from vitlens.data.sources import SPLITS, data_root
from vitlens.data.tables import default_class_names, reason
from vitlens.files import announce
from vitlens.names import require_known

TORCH = {
    "cifar10": ("CIFAR10", "train", True, False, False),
    "cifar100": ("CIFAR100", "train", True, False, False),
    "mnist": ("MNIST", "train", True, False, False),
    "kmnist": ("KMNIST", "train", True, False, False),
    "fashion_mnist": ("FashionMNIST", "train", True, False, False),
    "qmnist": ("QMNIST", "train", True, False, False),
    "svhn": ("SVHN", "split", "train", "test", "test"),
    "stl10": ("STL10", "split", "train", "test", "test"),
    "gtsrb": ("GTSRB", "split", "train", "test", "test"),
    "flowers102": ("Flowers102", "split", "train", "val", "test"),
    "oxford_iiit_pet": ("OxfordIIITPet", "split", "trainval", "test", "test"),
    "food101": ("Food101", "split", "train", "test", "test"),
    "dtd": ("DTD", "split", "train", "val", "test"),
    "fgvc_aircraft": ("FGVCAircraft", "split", "train", "val", "test"),
    "stanford_cars": ("StanfordCars", "split", "train", "test", "test"),
    "country211": ("Country211", "split", "train", "valid", "test"),
    "imagenette": ("Imagenette", "split", "train", "val", "val"),
    "imagenette160": ("Imagenette", "split", "train", "val", "val"),
    "imagenet": ("ImageNet", "split", "train", "val", "val"),
    "places365": ("Places365", "split", "train-standard", "val", "val"),
    "inaturalist": ("INaturalist", "version", "2021_train", "2021_valid", "2021_valid"),
}
"""torchvision's class, the argument that selects a split, and its values for training, validation and test.

The keys are timm's names, or torchvision's in lower case. Without a separate test split, test repeats validation.
"""

OPTIONS = {"imagenette160": {"size": "160px"}}
"""More arguments of torchvision's class. Images with a shorter side of 160 pixels are 0.1 GB to download, not 1.5."""


def digits(_, split: str, root: Path | None, fold: int) -> Samples:
    """scikit-learn's digits: 8×8 gray, levels 0…16 scaled to 0…255. Fold `fold` of five is for validation."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    data = load_digits()
    division = StratifiedKFold(5, shuffle=True, random_state=0)
    folds = list(division.split(data.images, data.target))
    train, valid = folds[fold]
    rows = train if split == "train" else valid
    levels = np.rint(data.images[rows] * (255 / 16))
    gray = torch.from_numpy(levels.astype(np.uint8))
    images = gray[:, None].repeat(1, 3, 1, 1)
    labels = data.target[rows]
    class_names = tuple("0123456789")
    names = range(len(rows))
    return Samples(images, labels, class_names, names, title="digits image ")


def torchvision_set(name: str, split: str, root: Path | None, _=0) -> Samples:
    """`torch/NAME`: read from `root` in torchvision's layout, and downloaded if missing."""
    root = data_root(root)
    require_known(name.lower(), TORCH, "NAME of torch/NAME")
    kind, keyword, train, valid, test = TORCH[name.lower()]
    values = {"train": train, "valid": valid}
    value = values.get(split, test)  # "whole" is the test split
    options = {keyword: value, **OPTIONS.get(name.lower(), {})}
    try:
        dataset_class = getattr(torchvision.datasets, kind)
        data = _read_or_download(dataset_class, root, options)
    except Exception as problem:  # the network, the disk and many readers raise many types
        # torchvision's ImageNet also needs the archive of the development kit.
        if kind == "ImageNet" and _has_folders(root, split):
            return open_folder(root, split)
        arguments = ", ".join(f"{option}={chosen!r}" for option, chosen in options.items())
        call = f"torchvision.datasets.{kind}({str(root)!r}, {arguments}, download=True)"
        remedy = f"Run {call} on a machine with network access, and copy the result."
        if kind == "ImageNet":
            remedy = "Download its archives by hand, with the archive of its development kit, and put them there."
        raise ValueError(
            f"torch/{name} is not in {root} and cannot be downloaded ({reason(problem)}). {remedy}"
        ) from problem
    labels = _labels(data)
    class_names = _class_names(data, labels)
    names = range(len(labels))
    if getattr(data, "samples", None):
        names = [Path(file).name for file, _ in data.samples]
    title = f"torch/{name} {split} image "
    return Samples(data, labels, class_names, names, title=title, files=_files(data, len(labels)))


def _files(data, count: int) -> list[Path] | None:
    """The files of the images of a torchvision data set, or None if it holds them in memory."""
    for attribute in ("samples", "_samples", "_image_files", "_images"):
        rows = getattr(data, attribute, None)
        if rows is None or len(rows) != count:
            continue
        files = [Path(row[0] if isinstance(row, tuple) else row) for row in rows]
        if files[0].is_file():
            return files
    return None


def _has_folders(root: Path, split: str) -> bool:
    """True if a folder holds a folder named like the split or like training."""
    names = SPLITS["train"] + SPLITS[split]
    return any((root / name).is_dir() for name in names)


def _read_or_download(kind: type, root: Path, options: dict):
    """A torchvision data set from `root`, downloaded if its files are missing. ImageNet cannot be downloaded."""
    try:
        return kind(str(root), **options)
    except (RuntimeError, FileNotFoundError):  # torchvision's errors for missing files
        if kind is torchvision.datasets.ImageNet:
            raise
    root.mkdir(parents=True, exist_ok=True)
    with waiting.fetching(
        f"the download of torchvision's {kind.__name__} into {root}",
        "Ctrl-C ends it. Data that are there already are named by --root or VITLENS_DATA.",
    ):
        data = kind(str(root), **options, download=True)
    announce(f"Downloaded torchvision's {kind.__name__}", root)
    return data


def _class_names(data, labels: Sequence[int]) -> tuple[str, ...]:
    """The class names of a torchvision data set, by default numbers. ImageNet's classes have several names each."""
    for attribute in ("classes", "all_categories"):
        names = getattr(data, attribute, None)
        if names:
            return tuple(_join_synonyms(name) for name in names)
    return default_class_names(labels)


def _join_synonyms(name: str | tuple[str, ...]) -> str:
    if isinstance(name, tuple):
        return ", ".join(name)
    return str(name)


def _labels(data) -> Sequence[int]:
    """The labels of a torchvision data set, read without opening its images."""
    for attribute in ("targets", "labels", "_labels"):
        labels = getattr(data, attribute, None)
        if labels is not None:
            labels = torch.as_tensor(labels)
            if labels.ndim == 2:  # QMNIST's rows begin with the label
                labels = labels[:, 0]
            return labels.tolist()
    if hasattr(data, "index"):  # iNaturalist: (label, file)
        return [label for label, _ in data.index]
    return [label for _, label in data._samples]  # (file, label)
