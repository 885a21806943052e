"""Outputs of a model for every image of a split, batch by batch: features, or the likeliest classes.

Shapes: N images, M of them read, D width of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from vitlens.data import ImageSet, ImageStream, load
from vitlens.data.augment import normalized
from vitlens.models import data_config, pixels
from vitlens.recorder.forward import cast, evaluating, run
from vitlens.recorder.supported import model_name, pooled
from vitlens.train import World


class Reading(NamedTuple):
    """The outputs for the M images that could be decoded, on the CPU, in the order of the split."""

    values: Tensor
    """(M, …)"""
    labels: Tensor
    """(M,) int64"""
    rows: Tensor
    """(M,) int64, the place of each image in the split."""
    damaged: tuple[str, ...]
    """The other images, each with the reason."""


def opened(
    model: nn.Module, source: str, split: str, *, root=None, workers: int | None = None, world: World | None = None
) -> ImageStream:
    """A split of what `data.load` reads, streamed, each image as `models.preprocess` shows it to `model`.

    Raises ValueError for what `load` refuses, and for models whose images are not square or have no three channels.
    """
    channels, height, width = data_config(model)["input_size"]
    if height != width or channels != 3:
        raise ValueError(
            "Evaluation needs a model of square images in color (3 × S × S), but this model takes "
            f"{channels} × {height} × {width}."
        )
    options = dict(size=height, fit=pixels(model), on_damaged="skip", stream=True, root=root, workers=workers)
    world = world or World()
    found = load(source, split, **options) if world.rank == 0 else None  # the first fetches what is missing
    world.total(0)  # the others wait for it
    return found or load(source, split, **options)


def lost_classes(images: ImageStream, found: Reading) -> str:
    """A warning about the classes of which every image is damaged, or ""."""
    count = len(images.class_names)
    had, left = (torch.bincount(labels, minlength=count) for labels in (images.labels, found.labels))
    gone = ((had > 0) & (left == 0)).nonzero()[:, 0].tolist()
    if not gone:
        return ""
    named = ", ".join(f"{images.class_names[i]} ({had[i]})" for i in gone[:5]) + ", …" * (len(gone) > 5)
    return (
        f"All images of {len(gone)} of {int((had > 0).sum())} classes are damaged, {named}, so this is not the "
        "accuracy on all of them; repair the images, or leave these classes out."
    )


def features(model: nn.Module, data: ImageSet | ImageStream, *, world: World | None = None) -> tuple[Tensor, Tensor]:
    """Features (N, D), the input of a model's head, and labels (N,) of all images; both on the CPU. Features are
    float32, or float64 where the model is.

    The images must have the size that the model takes, and are normalized by its settings. Each module stays in its
    mode (training or eval). Damaged images of a stream are left out. The processes of `world` share the images, and
    each returns all features.
    """
    return read(model, data, before_the_head(model), world=world)[:2]


def normalized_for(model: nn.Module, images: Tensor) -> Tensor:
    """Images (b, 3, H, W), uint8 or of [0, 1], normalized as a model wants them, in the precision of its weights."""
    config = data_config(model)
    return cast(model, normalized(images, config["mean"], config["std"]))


def before_the_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function from images (b, 3, H, W) to the input of the model's head, (b, D), ValueError if it does not pool."""

    def features(x: Tensor) -> Tensor:
        found = pooled(model, x)
        if found.dim() != 2:
            raise ValueError(
                f"Expected features of shape (B, D), but {model_name(model)} gives shape {tuple(found.shape)}. Give a "
                'model that pools its tokens (in timm: `global_pool="token"` or "avg").'
            )
        return found

    return features


def named_classes(model: nn.Module, k: int = 5) -> Callable[[Tensor], Tensor]:
    """A function from a batch (b, 3, H, W) to the numbers of the `k` likeliest classes, int64 (b, k), likeliest first.

    They are −1 for an image whose logits are not all finite: NaN would rank as the likeliest.
    """

    def named(x: Tensor) -> Tensor:
        logits = run(model, x)
        found = logits.topk(min(k, logits.shape[1])).indices
        return found.where(logits.isfinite().all(1, keepdim=True), -1)

    return named


@torch.no_grad()
def read(
    model: nn.Module,
    data: ImageSet | ImageStream,
    output: Callable[[Tensor], Tensor],
    *,
    world: World | None = None,
    batch: int = 100,
    progress: str = "",
) -> Reading:
    """`output` of every normalized batch of `data`; see `features`. progress: title of a progress bar, "" for none.

    Raises ValueError for outputs that are not finite (of classes: −1), and what `batches` of the data raises.
    """
    device = next(model.parameters()).device
    world = world or World(device=device)
    rows = torch.arange(len(data)).split(min(batch, len(data) // world.size))
    mine = rows[world.rank :: world.size]
    values, labels = None, torch.zeros(len(data), dtype=torch.int64, device=device)
    bar = tqdm(
        total=len(data), unit="image", desc=progress, disable=not progress or world.rank > 0,
        mininterval=0.1 if sys.stderr.isatty() else 10,
    )  # fmt: skip
    with evaluating(model), bar:
        for row, (images, found) in zip(mine, data.batches(mine), strict=True):
            outputs = output(normalized_for(model, images.to(device)))
            outputs = outputs.float() if outputs.is_floating_point() and outputs.element_size() < 4 else outputs
            if values is None:
                values = outputs.new_zeros(len(data), *outputs.shape[1:])
            values[row], labels[row] = outputs, found.to(device)
            bar.update(min(len(row) * world.size, len(data) - bar.n))
    lost = data.stand_ins().float().to(device)
    for shared in (values, labels, lost):
        world.sum([shared])
    kept = (lost == 0).nonzero()[:, 0].cpu()
    damaged = tuple(sorted(set(world.joined(data.damaged))))
    found = Reading(values.cpu()[kept], labels.cpu()[kept], kept, damaged)
    sound = found.values.isfinite() if found.values.is_floating_point() else found.values >= 0
    if len(wrong := kept[~sound.flatten(1).all(1)]):
        first = int(wrong[0])
        name = data.samples.name(first) if isinstance(data, ImageStream) else f"number {first}"
        raise ValueError(
            f"The model's outputs for {len(wrong)} of {len(kept)} images are not finite, the first being {name}. "
            "Check its weights and its precision."
        )
    return found
