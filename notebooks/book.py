"""Names that every chapter of the book uses, and what only the book draws: `from book import *`."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from architecture import architecture
from PIL import Image
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from training_photos import FREE_PHOTOGRAPHS, open_training_photos

import vitlens_explorer as widgets
import vitlens_paper as paper
from vitlens import (
    TokenGrid,
    UnsupportedModelError,
    attention,
    attribution,
    capture,
    data,
    faithfulness,
    filters,
    intervene,
    load_image,
    load_model,
    overlay,
    plot,
    positions,
    preprocess,
    restore,
    run,
    samples,
    scores,
    tokens,
    top_classes,
    train,
)
from vitlens.data import ImageSet, ImageStream
from vitlens.models import class_count
from vitlens.plot.mosaic import mosaic
from vitlens.plot.painting import covered_size, resolve_grid
from vitlens.plot.style import GRAY, WIDTH, bare, page, use_style
from vitlens.recorder.precision import to_float64
from vitlens.recorder.supported import family, model_name, unwrap
from vitlens_paper import evaluate, variants
from vitlens_paper.evaluate.compute import flops

__all__ = [
    "FREE_PHOTOGRAPHS",
    "Path",
    "TokenGrid",
    "affordable",
    "architecture",
    "attention",
    "attribution",
    "by_direction",
    "capture",
    "evaluate",
    "faithfulness",
    "filters",
    "intervene",
    "load_model",
    "np",
    "open_images",
    "open_training_photos",
    "overlay",
    "has_timm_parts",
    "paper",
    "patches",
    "pd",
    "pick",
    "plot",
    "plt",
    "positions",
    "preprocess",
    "require_parts",
    "restore",
    "run",
    "scores",
    "spectral_centroid",
    "split_photographs",
    "tokens",
    "top_classes",
    "torch",
    "train",
    "variants",
    "widgets",
]
__dir__ = __all__.copy

# A notebook loads its backend at the first figure. If that is inside of `plt.style.context`, its settings are lost.
plt.draw_if_interactive()


def open_images(files=None) -> dict[str, Image.Image]:
    """Images by name: those of the files, named by their file names, or without files the six samples.

    >>> list(book.open_images())[:2]
    ['astronaut', 'chelsea']

    files: a path or a list of paths. Raises ImageError for a file that cannot be read as an image, and ValueError for
    an empty list or two files of the same name.
    """
    if files is None:
        return samples()
    files = [files] if isinstance(files, (str, Path)) else list(files)
    images = {Path(file).name: load_image(file) for file in files}
    if not files or len(images) < len(files):
        got = [str(file) for file in files]
        raise ValueError(f"IMAGES must be None or paths with different file names, got {got}.")
    return images


def pick(images: dict[str, Image.Image], name: str) -> str:
    """The name, or the first name of `images` if it is not among them, as with your own images.

    >>> book.pick({"cat.jpg": None}, "rocket")
    'cat.jpg'
    """
    return name if name in images else next(iter(images))


def has_timm_parts(model: nn.Module) -> bool:
    """True for timm's `VisionTransformer` whose layers are those of the paper.

    These are a class token that the head reads, one table of positions, queries, keys and values from one matrix, and
    an MLP with the exact GELU. Registers and layer scale are allowed.

    >>> book.has_timm_parts(vitlens.load_model("vit_tiny_patch16_224", pretrained=False))
    True
    """
    if type(model) is not VisionTransformer or type(model.patch_embed) is not PatchEmbed:
        return False
    block = model.blocks[0]
    if type(block) is not Block:
        return False
    activation = getattr(block.mlp, "act", None)
    is_exact_gelu = isinstance(activation, nn.GELU) and activation.approximate == "none"
    reads_class_token = model.cls_token is not None and model.global_pool == "token"
    norms = [
        model.norm_pre,
        model.fc_norm,
        model.patch_embed.norm,
        getattr(block.attn, "q_norm", None),
    ]
    has_no_more_norms = all(isinstance(norm, nn.Identity) for norm in norms)
    has_parts = model.pos_embed is not None and hasattr(block.attn, "qkv")
    return has_parts and is_exact_gelu and reads_class_token and has_no_more_norms


def _has_classes(model: nn.Module) -> bool:
    return class_count(model) != 0


def _has_readout(model: nn.Module) -> bool:
    """True if the head reads a weighted sum of tokens. Only a forward gives the weights of an attention pool."""
    adapter = family(unwrap(model))
    size = adapter.preprocessing["input_size"][1:]
    return adapter.pool is not None or adapter.grid(size).readout is not None


def _has_positions(model: nn.Module) -> bool:
    return family(unwrap(model)).positions() is not None


def _has_timm_classifier(model: nn.Module) -> bool:
    bare = unwrap(model)
    return hasattr(bare, "pretrained_cfg") and hasattr(bare, "get_classifier")


def _has_timm_positions(model: nn.Module) -> bool:
    table = getattr(model, "pos_embed", None)
    is_timm = hasattr(model, "patch_embed") and isinstance(table, nn.Parameter)
    return is_timm and _has_positions(model)


def _adds_parts(model: nn.Module) -> bool:
    return family(unwrap(model)).stream_problem is None


@dataclass(frozen=True)
class _Need:
    """A requirement of a chapter: the use of the model, the test for it, and the models that pass."""

    fits: Callable[[nn.Module], bool]
    action: str
    models: str


_TIMM_MODELS = (
    'one by its name, such as "vit_base_patch16_224", or to a folder that vitlens trained'
)
_CLASSES = _Need(_has_classes, "reads classes", "a model with a classifier")
_READOUT = _Need(
    _has_readout,
    "starts its maps at the token or mean that the classifier reads",
    "a model that reads the class token or the mean of the patches",
)
_POSITIONS = _Need(_has_positions, "draws learned positions", "a model with a table of positions")
_PARTS = _Need(_adds_parts, "adds what heads and MLPs write", "a model with pre-norm layers")
_TIMM_PARTS = _Need(
    has_timm_parts,
    "computes timm's VisionTransformer with a class token and exact GELU by hand",
    _TIMM_MODELS,
)
_TIMM_POSITIONS = _Need(
    _has_timm_positions,
    "replaces the table of positions of a timm model",
    _TIMM_MODELS,
)
_TIMM_CLASSIFIER = _Need(
    _has_timm_classifier,
    "gives a model of timm a new classifier",
    _TIMM_MODELS,
)
NEEDS = {
    "0": [_CLASSES, _READOUT],
    "1": [_TIMM_PARTS, _CLASSES],
    "5": [_POSITIONS],
    "6": [_CLASSES, _READOUT],
    "7": [_CLASSES, _READOUT],
    "8": [_CLASSES],
    "9": [_CLASSES, _PARTS],
    "10": [_CLASSES],
    "11": [_READOUT],
    "12": [_TIMM_CLASSIFIER],
    "15": [_CLASSES, _READOUT],
    "B": [_TIMM_POSITIONS],
}
"""Requirements of chapters. The others take every model that `load_model` opens."""


def require_parts(model: nn.Module, chapter: str) -> None:
    """Raise UnsupportedModelError for a model without a part that a chapter uses.

    >>> book.require_parts(vitlens.load_model("vit_tiny_patch16_224", pretrained=False), "1")

    chapter: such as "7" or "B". The message is one sentence on the chapter and the model, and one on models that fit.
    """
    for need in NEEDS.get(chapter, []):
        if not need.fits(model):
            raise UnsupportedModelError(
                f"Chapter {chapter} {need.action}, got {model_name(unwrap(model))}. Set MODEL to {need.models}."
            )


LIMIT = 1e14
"""Operations after which a cell does less: eight minutes of two CPU cores, which do 210 billion a second in
data/results/speed-cpu.csv. Not seconds, because results must not depend on what else the machine does."""
UNANNOUNCED = 2e13
"""Operations that a cell may take without a printed cost."""


@torch.no_grad()
def _seconds_of_a_forward(model: nn.Module, image: Tensor) -> float:
    """Seconds of the fastest of three forwards. Other programs, and the first forward, take longer."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run(model, image)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def affordable(model: nn.Module, images: Tensor, rounds: int, forwards: int, name: str) -> int:
    """Number of rounds, 1 to `rounds`, whose operations are within `LIMIT`.

    images: (B, C, H, W), of which the first one is timed. forwards: of one image in each round, where a backward counts
    as two. name: of the rounds, such as "draws". Above `UNANNOUNCED` operations the cost is printed.

    >>> book.affordable(vitlens.load_model("test_vit", pretrained=False), torch.zeros(1, 3, 160, 160), 4, 10, "draws")
    4
    """
    operations = forwards * flops(model, tuple(images.shape[-2:]))
    chosen = min(rounds, max(1, int(LIMIT / operations)))
    if chosen == rounds and rounds * operations <= UNANNOUNCED:
        return rounds
    minutes = chosen * forwards * _seconds_of_a_forward(model, images[:1]) / 60
    cost = f"{chosen * forwards:,} forwards of one image, about {minutes:.1f} minutes here"
    if chosen < rounds:
        cost = f"{chosen} of {rounds} {name}, because all of them take too long: {cost}"
    print(f"{cost}.")
    return chosen


LIGHT = 205
"""Gray level of prefix tokens and of padding."""
MOST_TOKENS = 18
"""Largest number of tokens in the sequence of `patches`."""


def patches(image, *, grid: TokenGrid) -> plt.Figure:
    """An image, its patches, and the sequence of tokens (paper, Fig. 1 and section 3.1).

    image: the model's input, as for `overlay`. grid: of its patches (`TokenGrid`, or `attn.grid`). Of long sequences
    only the first and last tokens are shown. Numbers are positions in the sequence, from 0. Prefix tokens and padding
    are gray. Pixels outside of patches are on the left only.

    >>> figure = book.patches(vitlens.restore(model, images)[0], grid=attn.grid)
    """
    picture = load_image(image)
    resolve_grid((grid.rows, grid.cols), image, grid)
    p, q = grid.patch
    tiles = _cut(picture, grid)
    numbers = list(range(min(grid.tokens, MOST_TOKENS)))
    if grid.tokens > MOST_TOKENS:
        numbers[-3:] = [None, grid.tokens - 2, grid.tokens - 1]
    prefix_tiles = np.full((grid.prefix, p, q, 3), LIGHT, np.uint8)
    tokens = np.concatenate([prefix_tiles, tiles])
    gap = np.full((p, q, 3), 255, np.uint8)
    sequence = [gap if number is None else tokens[number] for number in numbers]
    tall, wide = covered_size(grid)
    height = min(330, 400 * tall / wide)
    strip = min(60, 860 / len(numbers)) * p / q
    layout = [["input", "patches"], ["tokens", "tokens"]]
    with use_style():
        figure = page(WIDTH, height + strip + 100)
        axes = figure.subplot_mosaic(layout, height_ratios=[height, strip])
        left, right, below = axes.values()
        left.imshow(picture)
        bare(left)
        _, ys = mosaic(right, tiles, grid.cols, (0.1 * p, 0.1 * q))
        xs, _ = mosaic(below, sequence, len(numbers), (0, 0.1 * q))
        step = -(-grid.rows * 14 // int(height))
        rows = range(0, grid.rows, step)
        right.set_yticks(ys[::step], [grid.index(row, 0) for row in rows])
        below.set_xticks(xs, ["…" if number is None else number for number in numbers])
        prefix = "all of them patches"
        if grid.prefix:
            prefix = f"{grid.prefix} of them before the first patch"
        titles = {
            left: f"Input: {grid.image[0]} × {grid.image[1]} pixels",
            right: f"Patches: {grid.rows} × {grid.cols} of {p} × {q} pixels",
            below: f"Sequence: {grid.tokens} tokens, {prefix}",
        }
        for ax, title in titles.items():
            ax.set_title(title, loc="left", size=10.5, pad=6)
            ax.tick_params(length=0, labelsize=8, labelcolor=GRAY)
    return figure


def _cut(picture: Image.Image, grid: TokenGrid) -> np.ndarray:
    """(n, p, q, 3): the patches of an image, with padding in gray."""
    p, q = grid.patch
    height, width = covered_size(grid)
    whole = Image.new("RGB", (width, height), (LIGHT, LIGHT, LIGHT))
    whole.paste(picture, (0, 0))
    lines = np.asarray(whole).reshape(grid.rows, p, grid.cols, q, 3)
    return lines.swapaxes(1, 2).reshape(-1, p, q, 3)


def spectral_centroid(tiles: Tensor) -> Tensor:
    """(…,) mean spatial frequency of tiles (…, p, q, C), weighted by power, in cycles per pixel.

    0 for a uniform tile, √½ for a chessboard, about 0.38 for noise of any size, NaN for a tile of zeros.

    >>> book.spectral_centroid(torch.ones(16, 16, 3))
    tensor(0.)
    """
    spectrum = torch.fft.fft2(tiles, dim=(-3, -2))
    power = spectrum.abs().square().sum(-1)
    p, q = tiles.shape[-3:-1]
    down = torch.fft.fftfreq(p, device=tiles.device)
    across = torch.fft.fftfreq(q, device=tiles.device)
    frequency = torch.hypot(down[:, None], across)
    return (power * frequency).sum((-2, -1)) / power.sum((-2, -1))


def by_direction(similarities: Tensor) -> Tensor:
    """(3, n) mean similarity of positions 1 … n patches apart: in one row, in one column, and in other directions.

    similarities: (rows, cols, rows, cols). n = min(rows, cols) − 1. Pairs of one offset are averaged first. Other
    directions have few lengths that are whole numbers, so a straight line is fitted to the offsets of lengths up to one
    patch shorter or longer, and read at the whole number. The first value is nan, because their shortest length is √2.

    >>> book.by_direction(vitlens.positions.similarity(model)).shape
    torch.Size([3, 13])
    """
    rows, cols = similarities.shape[:2]
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
    offsets = (places[:, None] - places).abs()
    offset_number = (offsets @ torch.tensor([cols, 1])).flatten()
    values = to_float64(similarities).cpu().flatten()
    sums = offset_number.bincount(values)
    mean = (sums / offset_number.bincount()).view(rows, cols)  # of each offset
    length = places.double().norm(dim=1).view(rows, cols)
    n = min(rows, cols) - 1
    in_row = mean[0, 1 : n + 1]
    in_column = mean[1 : n + 1, 0]
    other_means = mean[1:, 1:].flatten()
    other_lengths = length[1:, 1:].flatten()
    elsewhere = [math.nan]
    for step in range(2, n + 1):
        is_near = (other_lengths - step).abs() <= 1
        slope, at_step = np.polyfit(other_lengths[is_near] - step, other_means[is_near], 1)
        elsewhere.append(at_step)
    return torch.stack([in_row, in_column, torch.tensor(elsewhere)]).float()


USED_IMAGES = 200
"""Number of photographs that `split_photographs` uses at most, if classes are few."""


def split_photographs(
    folder: str | Path, size: int, most: int = 40, seed: int = 12
) -> tuple[ImageSet, ImageSet]:
    """Photographs to learn from and to test on, of `size` × `size` pixels, drawn as a function of `seed`.

    folder: a source of `vitlens.data.load`. Of a folder without `train` and `test`, a quarter of each class is for
    testing. most: largest number of images of a class that are used, fewer if there are over five classes. `note` of
    the first set is a sentence with the numbers. Only images that are used are decoded. Raises ValueError for fewer
    than two classes, and the errors of `load`.

    >>> learn, test = book.split_photographs(FREE_PHOTOGRAPHS, size=64)
    >>> len(learn), len(test)
    (90, 30)
    """
    names = ("train", "valid", "whole")
    learn, test, whole = (
        data.load(folder, name, size=size, stream=True, workers=0) for name in names
    )
    count = len(learn.class_names)
    if count < 2:
        raise ValueError(f"{folder} must hold two or more class folders, got {count}. Add another.")
    most = max(4, min(most, USED_IMAGES // count))
    generator = torch.Generator().manual_seed(seed)
    is_divided = len(learn) + len(test) != len(whole)  # of divided data, the whole is the test part
    if is_divided:
        tested = most // 4
        there = len(learn) + len(test)
        learn_rows = torch.cat(_draw(learn.labels, most - tested, generator))
        test_rows = torch.cat(_draw(test.labels, tested, generator))
    else:
        there = len(whole)
        drawn = _draw(whole.labels, most, generator)
        learn = test = whole
        learn_rows = torch.cat([rows[_quarter(rows) :] for rows in drawn])
        test_rows = torch.cat([rows[: _quarter(rows)] for rows in drawn])
    used = len(learn_rows) + len(test_rows)
    cut = "all" if used == there else f"at most {most} of each class"
    note = (
        f"The folder has {there:,} images of {count} classes. This chapter uses {cut}: "
        f"{len(learn_rows)} to learn from, {len(test_rows)} to test on."
    )
    return _decoded(learn, learn_rows, note), _decoded(test, test_rows, note)


def _draw(labels: Tensor, most: int, generator: torch.Generator) -> list[Tensor]:
    """Rows of at most `most` images of each class, in random order."""
    drawn = []
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        order = torch.randperm(len(rows), generator=generator)
        drawn.append(rows[order[:most]])
    return drawn


def _quarter(rows: Tensor) -> int:
    """Number of the images of a class that are for testing."""
    return max(1, round(len(rows) / 4))


def _decoded(stream: ImageStream, rows: Tensor, note: str) -> ImageSet:
    """The images at some rows of a stream, in memory, in the order of the folder."""
    images, labels = next(stream.batches([rows.sort().values]))
    return ImageSet(images, labels, stream.class_names, note)
