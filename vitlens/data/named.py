"""Data sets known by a name: scikit-learn's digits, torchvision's sets, Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.datasets
from PIL import Image
from torch import Tensor

from vitlens.data.samples import SPLITS, Listing, first_of, numbered
from vitlens.files import announce, quiet, reach

# timm's names where timm has one: torchvision's class, its word for a split, what it calls training and validation, and
# test where that is another.
TORCH = {
    "cifar10": ("CIFAR10", "train", True, False),
    "cifar100": ("CIFAR100", "train", True, False),
    "mnist": ("MNIST", "train", True, False),
    "kmnist": ("KMNIST", "train", True, False),
    "fashion_mnist": ("FashionMNIST", "train", True, False),
    "qmnist": ("QMNIST", "train", True, False),
    "svhn": ("SVHN", "split", "train", "test"),
    "stl10": ("STL10", "split", "train", "test"),
    "gtsrb": ("GTSRB", "split", "train", "test"),
    "flowers102": ("Flowers102", "split", "train", "val", "test"),
    "oxford_iiit_pet": ("OxfordIIITPet", "split", "trainval", "test"),
    "food101": ("Food101", "split", "train", "test"),
    "dtd": ("DTD", "split", "train", "val", "test"),
    "fgvc_aircraft": ("FGVCAircraft", "split", "train", "val", "test"),
    "stanford_cars": ("StanfordCars", "split", "train", "test"),
    "country211": ("Country211", "split", "train", "valid", "test"),
    "imagenette": ("Imagenette", "split", "train", "val"),
    "imagenet": ("ImageNet", "split", "train", "val"),
    "places365": ("Places365", "split", "train-standard", "val"),
    "inaturalist": ("INaturalist", "version", "2021_train", "2021_valid"),
}


@dataclass(frozen=True)
class Held:
    """Samples that are pixels already: uint8 (N, 3, H, W)."""

    title: str
    images: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def name(self, i: int) -> str:
        return f"{self.title} image {i}"

    def content(self, i: int) -> Tensor:
        return self.images[i]


@dataclass(frozen=True)
class Torchvision:
    """A data set of torchvision."""

    title: str
    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, i: int) -> str:
        files = getattr(self.dataset, "samples", None)
        return f"{self.title} image {i}" + (f" ({Path(files[i][0]).name})" if files else "")

    def content(self, i: int) -> Image.Image:
        return self.dataset[i][0]


@dataclass(frozen=True)
class HuggingFace:
    """One column of a Hugging Face data set, its images left encoded."""

    title: str
    dataset: Any
    column: str

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, i: int) -> str:
        return f"{self.title} row {i}"

    def content(self, i: int) -> bytes:
        item = self.dataset[i][self.column]
        return item["bytes"] or Path(item["path"]).read_bytes()


def digits(split: str, fold: int) -> Listing:
    """scikit-learn's digits: 8×8 gray, levels 0…16 scaled to 0…255; fold number ``fold`` of five is for validation."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    if fold not in range(5):
        raise ValueError(f"digits is divided into folds 0…4; fold {fold} does not exist.")
    data = load_digits()
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(data.images, data.target)
    chosen = list(folds)[fold][0 if split == "train" else 1]
    gray = torch.from_numpy(np.rint(data.images[chosen] * (255 / 16)).astype(np.uint8))
    return Listing(Held("digits", gray[:, None].repeat(1, 3, 1, 1)), data.target[chosen], tuple("0123456789"))


def from_torchvision(name: str, split: str, root: Path) -> Listing:
    """``torch/NAME``: read from ``root``, where torchvision expects it, and fetched if it is not there."""
    if name.lower() not in TORCH:
        raise ValueError(f"torch/{name} is not known. Known are torch/ and {', '.join(TORCH)}.")
    kind, word, train, valid, *test = TORCH[name.lower()]
    options = {word: {"train": train, "valid": valid, "test": test[0] if test else valid}[split]}
    try:
        dataset = _opened(getattr(torchvision.datasets, kind), str(root), options)
    except Exception as problem:  # whatever the network, the disk and a dozen readers may raise
        call = f"torchvision.datasets.{kind}({str(root)!r}, {word}={options[word]!r}, download=True)"
        by_hand = "fetch its archives by hand, with that of its development kit"
        how = by_hand if kind == "ImageNet" else f"run {call} where there is a network"
        raise ValueError(
            f"torch/{name} is not in {root} and cannot be fetched from here ({_in_a_line(problem)}). To have it, "
            f"{how}, and put what that leaves into {root}."
        ) from problem
    labels = _labels(dataset)
    names = getattr(dataset, "classes", None) or getattr(dataset, "all_categories", None) or numbered(labels)
    # ImageNet's classes have several names each.
    names = tuple(", ".join(name) if isinstance(name, tuple) else str(name) for name in names)
    return Listing(Torchvision(f"torch/{name} {split}", dataset), labels, names)


def _in_a_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"


def _opened(kind: type, root: str, options: dict):
    try:
        return kind(root, **options)
    except (RuntimeError, FileNotFoundError):  # torchvision's words for "not there"
        if kind is torchvision.datasets.ImageNet:  # which no program may fetch
            raise
        Path(root).mkdir(parents=True, exist_ok=True)
        found = kind(root, **options, download=True)
        announce(f"Fetched torchvision's {kind.__name__}", root)
        return found


def _labels(dataset) -> Sequence[int]:
    """The labels of a torchvision data set, read without opening its images."""
    for name in ("targets", "labels", "_labels"):
        if (labels := getattr(dataset, name, None)) is not None:
            labels = torch.as_tensor(labels)
            return (labels[:, 0] if labels.ndim == 2 else labels).tolist()  # QMNIST's rows begin with the label
    if hasattr(dataset, "index"):  # iNaturalist: (label, file)
        return [label for label, _ in dataset.index]
    return [label for _, label in dataset._samples]


def from_hugging_face(name: str, split: str, root: Path | None) -> Listing:
    """``hfds/NAME``: a data set of the Hugging Face hub, or a folder that ``datasets.load_dataset`` understands."""
    try:
        import datasets
    except ImportError as problem:
        raise ValueError(
            f"hfds/{name} is read by a package that is not installed, datasets. Install it: pip install datasets"
        ) from problem
    cache = root or Path(datasets.config.HF_DATASETS_CACHE)
    before = {*cache.glob("*/*/*/*")}
    try:
        with quiet(), _reaching(name, datasets.config):
            splits = datasets.load_dataset(name, cache_dir=root and str(root))
    except Exception as problem:  # the network, the hub, the builder of the data set
        where = root or "the cache of Hugging Face"
        raise ValueError(
            f"hfds/{name} is not in {where} and cannot be fetched from here ({_in_a_line(problem)}). Check the name, "
            f"or run datasets.load_dataset({name!r}) where there is a network and copy its cache."
        ) from problem
    if {*cache.glob("*/*/*/*")} - before:
        announce(f"Put hfds/{name}, as the package datasets reads it,", cache)
    present = first_of(split, splits)
    if present is None:
        raise ValueError(
            f"hfds/{name} has the splits {', '.join(splits)}, and the {split} split is one named "
            f"{' or '.join(SPLITS[split])}."
        )
    dataset = splits[present]
    image = [c for c, kind in dataset.features.items() if isinstance(kind, datasets.Image)]
    label = [c for c, kind in dataset.features.items() if isinstance(kind, datasets.ClassLabel)]
    label = ["label"] if "label" in dataset.features else label
    if not image or not label:
        raise ValueError(
            f"hfds/{name} has the columns {', '.join(dataset.features)}, and one of images and one of class labels are "
            "wanted. Choose a data set for image classification."
        )
    labels = _whole_numbers(dataset, label[0], name)
    names = getattr(dataset.features[label[0]], "names", None)
    if not names:
        names = numbered(labels, _whole_numbers(splits["train"], label[0], name) if "train" in splits else ())
    encoded = dataset.select_columns(image[:1]).cast_column(image[0], datasets.Image(decode=False))
    return Listing(HuggingFace(f"hfds/{name} {present}", encoded, image[0]), labels, tuple(names))


@contextmanager
def _reaching(name: str, config) -> Iterator[None]:
    """If the hub cannot be reached, make ``datasets`` use only its cache in this block, instead of retrying for half a
    minute. Folders need no hub, so nothing is checked for them."""
    words = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # newer versions' word, and older ones'
    before = {each: getattr(config, each) for each in words if hasattr(config, each)}
    if not Path(name).exists():
        try:
            reach()
        except OSError:
            for each in before:
                setattr(config, each, True)
    try:
        yield
    finally:
        for each, value in before.items():
            setattr(config, each, value)


def _whole_numbers(dataset, column: str, name: str) -> Sequence[int]:
    labels = dataset.select_columns([column])[:][column]
    if wrong := [each for each in labels if type(each) is not int]:
        raise ValueError(f"hfds/{name} has the label {wrong[0]!r}, and each image needs a whole number as its label.")
    return labels
