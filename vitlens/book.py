"""Names that every chapter of the book uses: `from vitlens.book import *`."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from PIL import Image

from vitlens import (
    TokenGrid,
    attention,
    attribution,
    capture,
    evaluate,
    faithfulness,
    filters,
    intervene,
    load_image,
    load_model,
    overlay,
    paper,
    plot,
    positions,
    preprocess,
    restore,
    samples,
    tokens,
    top_classes,
    train,
    variants,
    widgets,
)

__all__ = [
    "Path", "TokenGrid", "attention", "attribution", "capture", "evaluate", "faithfulness", "filters", "intervene",
    "load_model", "np", "open_images", "overlay", "paper", "pd", "pick", "plot", "plt", "positions", "preprocess",
    "restore", "tokens", "top_classes", "torch", "train", "variants", "widgets",
]  # fmt: skip
__dir__ = __all__.copy


def open_images(files=None) -> dict[str, Image.Image]:
    """Images by name: those of the files, named by their file names, or without files the six samples.

    >>> list(vitlens.book.open_images())[:2]
    ['astronaut', 'chelsea']

    files: a path or a list of paths. Raises ImageError for a file that cannot be read as an image, and ValueError for
    an empty list or two files of the same name.
    """
    if files is None:
        return samples()
    files = [files] if isinstance(files, (str, Path)) else list(files)
    images = {Path(file).name: load_image(file) for file in files}
    if not files or len(images) < len(files):
        raise ValueError(f"IMAGES must be None or paths with different file names, got {[*map(str, files)]}.")
    return images


def pick(images: dict[str, Image.Image], name: str) -> str:
    """The name, or the first name of `images` if it is not among them, as with your own images.

    >>> vitlens.book.pick({"cat.jpg": None}, "rocket")
    'cat.jpg'
    """
    return name if name in images else next(iter(images))
