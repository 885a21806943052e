"""Photographs to train a small model on, for the chapter that trains one."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitlens import load_image
from vitlens.data import ImageSet, load
from vitlens.train.settings import Recipe

FREE_PHOTOGRAPHS = Path(__file__).parents[1] / "data" / "photographs"
REAL_DATA = "VITLENS_REAL_DATA"
"""Environment variable with the folder that holds Tiny-ImageNet as `tiny-imagenet`."""
CLASSES = 20
CROPS = {"train": 250, "valid": 50}
"""Number of crops of each photograph."""


def open_training_photos(source: str | None, recipe: Recipe) -> tuple[ImageSet, ImageSet, str]:
    """Images to train on, images held out, both as the recipe stores them, and a sentence about their origin.

    source: a folder or a name as for `vitlens.data.load`. None stands for twenty classes of Tiny-ImageNet if the
    variable VITLENS_REAL_DATA names its place, else for crops of twenty free photographs. The crops also replace a
    data set of torchvision that cannot be downloaded.

    >>> len(book.open_training_photos(None, train.recipe("photos-t4"))[0].class_names)
    20
    """
    sides = {"train": recipe.resize or recipe.image_size, "valid": recipe.image_size}
    tiny_imagenet = Path(os.environ.get(REAL_DATA, "")) / "tiny-imagenet"
    if source is not None:
        return _open_source(source, sides)
    if REAL_DATA in os.environ and tiny_imagenet.is_dir():
        splits = [_every_tenth_class(each) for each in _load(tiny_imagenet, sides)]
        return *splits, f"{CLASSES} classes of Tiny-ImageNet."
    return _open_crops(sides)


def _load(source: str | Path, sides: Mapping[str, int]) -> list[ImageSet]:
    return [load(source, split, size=side, stream=False) for split, side in sides.items()]


def _open_source(source: str, sides: Mapping[str, int]) -> tuple[ImageSet, ImageSet, str]:
    try:
        return *_load(source, sides), f"{source}."
    except ValueError as problem:
        if not source.startswith("torch/"):
            raise
        training, held_out, sentence = _open_crops(sides)
        return training, held_out, f"{problem} Until then: {sentence}"


def _every_tenth_class(images: ImageSet) -> ImageSet:
    """The images of every tenth class of Tiny-ImageNet, with labels from 0."""
    count = len(images.class_names)
    return images.select_classes(range(0, count, count // CLASSES))


def _open_crops(sides: Mapping[str, int]) -> tuple[ImageSet, ImageSet, str]:
    """Crops of free photographs, whose class is the photograph."""
    files = sorted(FREE_PHOTOGRAPHS.glob("*/*.jpg"))
    files = files[:: len(files) // CLASSES][:CLASSES]
    photographs = {file.stem: load_image(file) for file in files}
    training, held_out = (_crops(photographs, split, side) for split, side in sides.items())
    sentence = f"A stand-in: crops of {CLASSES} photographs. Which photograph is a crop from?"
    return training, held_out, sentence


def _crops(photographs: Mapping[str, Image.Image], split: str, size: int) -> ImageSet:
    """Random squares of each photograph: for training of its left two thirds, for validation of the rest."""
    generator = np.random.default_rng(list(CROPS).index(split))
    pixels = []
    for photograph in photographs.values():
        border = photograph.width * 2 // 3
        left, right = (0, border) if split == "train" else (border, photograph.width)
        part = photograph.crop((left, 0, right, photograph.height))
        for _ in range(CROPS[split]):
            side = int(generator.uniform(0.5, 1) * min(part.size))
            x, y = (int(generator.integers(0, length - side + 1)) for length in part.size)
            box = (x, y, x + side, y + side)
            crop = part.resize((size, size), Image.Resampling.BICUBIC, box)
            pixels.append(np.asarray(crop))
    labels = torch.arange(len(photographs)).repeat_interleave(CROPS[split])
    return ImageSet(
        torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), labels, tuple(photographs)
    )
