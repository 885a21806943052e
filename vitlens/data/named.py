"""Readers of data sets known by a name: scikit-learn's digits, torchvision's, Hugging Face's and VTAB-1k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torchvision.datasets
from PIL import Image

from vitlens.data.files import announce, quiet, reach
from vitlens.data.folders import has_imagenet, in_folder
from vitlens.data.imageset import drawn
from vitlens.data.samples import SPLITS, Chosen, Listing, Numbered, first_of, numbers_as_names
from vitlens.data.sources import Request, listed
from vitlens.data.tasks import TASKS, VTAB

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


# scikit-learn


def digits(request: Request) -> Listing:
    """scikit-learn's digits: 8×8 gray, levels 0…16 scaled to 0…255; fold number `fold` of five is for validation."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    if request.fold not in range(5):
        raise ValueError(f"digits is divided into folds 0…4; fold {request.fold} does not exist.")
    data = load_digits()
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(data.images, data.target)
    chosen = list(folds)[request.fold][0 if request.split == "train" else 1]
    gray = torch.from_numpy(np.rint(data.images[chosen] * (255 / 16)).astype(np.uint8))
    return Listing(Numbered("digits", gray[:, None].repeat(1, 3, 1, 1)), data.target[chosen], tuple("0123456789"))


# torchvision


class Torchvision(Numbered):
    """A data set of torchvision."""

    def name(self, i: int) -> str:
        files = getattr(self.images, "samples", None)
        return super().name(i) + (f" ({Path(files[i][0]).name})" if files else "")

    def content(self, i: int) -> Image.Image:
        return self.images[i][0]


def torchvision_set(request: Request) -> Listing:
    """`torch/NAME`: read from `root`, where torchvision expects it, and fetched if it is not there."""
    name, split, root = request.name, request.part, request.root
    if name.lower() not in TORCH:
        raise ValueError(f"torch/{name} is not known. Known are torch/ and {', '.join(TORCH)}.")
    kind, word, train, valid, *test = TORCH[name.lower()]
    options = {word: {"train": train, "valid": valid, "test": test[0] if test else valid}[split]}
    try:
        dataset = _torchvision(getattr(torchvision.datasets, kind), str(root), options)
    except Exception as problem:  # whatever the network, the disk and a dozen readers may raise
        if kind == "ImageNet" and has_imagenet(root, split):
            return in_folder(root, request)  # torchvision wants the archive of the development kit, too
        call = f"torchvision.datasets.{kind}({str(root)!r}, {word}={options[word]!r}, download=True)"
        remedy = f"Run {call} where there is a network, and copy the result there."
        if kind == "ImageNet":
            remedy = "Download its archives by hand, with that of its development kit, and put them there."
        raise ValueError(
            f"torch/{name} is not in {root} and cannot be fetched from here ({_in_a_line(problem)}). {remedy}"
        ) from problem
    labels = _labels(dataset)
    names = getattr(dataset, "classes", None) or getattr(dataset, "all_categories", None) or numbers_as_names(labels)
    # ImageNet's classes have several names each.
    names = tuple(", ".join(name) if isinstance(name, tuple) else str(name) for name in names)
    return Listing(Torchvision(f"torch/{name} {split}", dataset), labels, names)


def _torchvision(kind: type, root: str, options: dict):
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


def _in_a_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"


# Hugging Face


@dataclass(frozen=True)
class HuggingFace(Numbered):
    """One column of a Hugging Face data set, its images left encoded."""

    column: str

    def name(self, i: int) -> str:
        return f"{self.title} row {i}"

    def content(self, i: int) -> bytes:
        item = self.images[i][self.column]
        return item["bytes"] or Path(item["path"]).read_bytes()


def hugging_face_set(request: Request) -> Listing:
    """`hfds/NAME`: a data set of the Hugging Face hub, or a folder that `datasets.load_dataset` reads."""
    name, split, root = request.name, request.part, request.given_root
    try:
        import datasets
    except ImportError as problem:
        raise ValueError(f"hfds/{name} needs the package datasets. Install it: pip install datasets") from problem
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
            f"hfds/{name} has the splits {', '.join(splits)}, but the {split} split must be named "
            f"{' or '.join(SPLITS[split])}."
        )
    dataset = splits[present]
    image = [c for c, kind in dataset.features.items() if isinstance(kind, datasets.Image)]
    label = [c for c, kind in dataset.features.items() if isinstance(kind, datasets.ClassLabel)]
    label = ["label"] if "label" in dataset.features else label
    if not image or not label:
        raise ValueError(
            f"hfds/{name} has the columns {', '.join(dataset.features)}, but needs one of images and one of class "
            "labels. Choose a data set for image classification."
        )
    labels = _whole_numbers(dataset, label[0], name)
    names = getattr(dataset.features[label[0]], "names", None)
    if not names:
        train = first_of("train", splits)
        names = numbers_as_names(labels, _whole_numbers(splits[train], label[0], name) if train else ())
    encoded = dataset.select_columns(image[:1]).cast_column(image[0], datasets.Image(decode=False))
    return Listing(HuggingFace(f"hfds/{name} {present}", encoded, image[0]), labels, tuple(names))


@contextmanager
def _reaching(name: str, config) -> Iterator[None]:
    """If the hub cannot be reached, make `datasets` use only its cache in this block, instead of retrying for half a
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
        raise ValueError(f"hfds/{name} has the label {wrong[0]!r}, but each image needs a whole number as its label.")
    return labels


# VTAB-1k

TRAIN, VALID = 800, 200


def vtab(request: Request) -> Listing:
    """`vtab/NAME`, which trains on all 1,000 images of a task, or `vtab800/NAME`, which trains on 800 of them.

    The 1,000 are drawn once and for all as a function of their number, so a copy sorted by class gives all classes.
    VTAB's own script takes the first of its own order, which the copies do not tell: other images of the same split.
    """
    split, task = request.part, TASKS.get(f"vtab/{request.name}")
    if task is None:
        raise ValueError(f"{request.source} is no task of VTAB-1k. Choose from {', '.join(t.name for t in VTAB)}.")
    whole = listed(replace(request, source=task.source, split="test" if split == "test" else "train"))
    labels = torch.as_tensor(whole.labels, dtype=torch.int64)
    raw = task.raw_classes or task.classes
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < raw:
        raise ValueError(
            f"{task.name} has labels from 0 to {raw - 1}, but those of {task.source} run from {int(labels.min())} to "
            f"{int(labels.max())}. Check that the copy is the right one."
        )
    labels = labels * task.classes // raw
    same = len(whole.class_names) == task.classes
    names = whole.class_names if same else tuple(str(i) for i in range(task.classes))
    if split == "test":
        return replace(whole, labels=labels, class_names=names)
    if len(labels) < TRAIN + VALID:
        raise ValueError(
            f"{task.name} needs {TRAIN + VALID:,} training images, but {task.source} has {len(labels):,}. Fetch it "
            "again, all of it."
        )
    rows = drawn(len(labels), TRAIN + VALID, seed=0)
    if split == "valid":
        rows = rows[TRAIN:]
    elif request.source.startswith("vtab800/"):
        rows = rows[:TRAIN]
    return Listing(Chosen(whole.samples, np.asarray(rows)), labels[rows], names, whole.note)
