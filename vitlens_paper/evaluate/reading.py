"""Outputs of a model for all images of a split, batch by batch: features, or the most probable classes.

Shapes: N images, M of them readable, D width of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from vitlens.data import ImageSet, ImageStream, load
from vitlens.data.augment import normalize
from vitlens.models import data_config, pixels
from vitlens.recorder.forward import cast, eval_mode, pooled_features, run
from vitlens.recorder.supported import model_name
from vitlens.texts import shown
from vitlens.train import World


def open_images(
    model: nn.Module,
    source: str,
    split: str,
    *,
    root=None,
    workers: int | None = None,
    world: World | None = None,
    **keys: str,
) -> ImageStream:
    """A streamed split of a data set of `data.load`, preprocessed for `model`.

    keys: image_key and label_key of `load`. Raises ValueError for models whose input is not 3 × S × S, and the errors
    of `load`.

    >>> len(open_images(model, "digits", "valid"))
    360
    """
    channels, height, width = data_config(model)["input_size"]
    if height != width or channels != 3:
        raise ValueError(
            "Evaluation needs a model with square color input (3 × S × S), got "
            f"{channels} × {height} × {width}. Use another model."
        )
    world = world or World()

    def open_split() -> ImageStream:
        return load(
            source,
            split,
            size=height,
            fit=pixels(model),
            stream=True,
            root=root,
            workers=workers,
            **keys,
        )

    if world.rank == 0:  # the first process downloads
        images = open_split()
        world.wait_for_first(0, "opens the images")
    else:
        world.wait_for_first(0, "opens the images")
        images = open_split()
    return images


def features(
    model: nn.Module, data: ImageSet | ImageStream, *, world: World | None = None
) -> tuple[Tensor, Tensor]:
    """Features (N, D), the input of a model's head, and labels (N,) of all images, on the CPU.

    Features are float32, or float64 for float64 models. The images must have the model's input size. They are
    normalized for the model. The training flag of each module is unchanged. The processes of `world` share the images,
    and each returns all features.

    >>> digits = vitlens.data.load("digits", "valid", size=224).subset(4)
    >>> vitlens_paper.evaluate.features(model, digits)[0].shape
    torch.Size([4, 192])
    """
    return read(model, data, before_the_head(model), world=world)


def normalize_for(model: nn.Module, images: Tensor) -> Tensor:
    """Images (b, 3, H, W), uint8 or in 0…1, normalized for a model in the precision of its weights."""
    config = data_config(model)
    return cast(model, normalize(images, config["mean"], config["std"]))


def before_the_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Function from images (b, 3, H, W) to the input (b, D) of the model's head. Raises ValueError without pooling."""

    def features(x: Tensor) -> Tensor:
        values = pooled_features(model, x)
        if values.dim() != 2:
            raise ValueError(
                f"Expected features of shape (B, D), but {model_name(model)} returns shape {tuple(values.shape)}. Use "
                'a model that pools its tokens (in timm: `global_pool="token"` or "avg").'
            )
        return values

    return features


def top_classes(model: nn.Module, k: int = 5) -> Callable[[Tensor], Tensor]:
    """Function from a batch (b, 3, H, W) to the numbers of the `k` most probable classes, int64 (b, k), in order.

    Images with logits that are not finite get −1, because NaN would rank first.

    >>> top_classes(model, k=1)(images[:1]).shape
    torch.Size([1, 1])
    """

    def classes(x: Tensor) -> Tensor:
        logits = run(model, x)
        numbers = logits.topk(min(k, logits.shape[1])).indices
        finite = logits.isfinite().all(1, keepdim=True)
        return numbers.where(finite, -1)

    return classes


@torch.no_grad()
def read(
    model: nn.Module,
    data: ImageSet | ImageStream,
    output: Callable[[Tensor], Tensor],
    *,
    world: World | None = None,
    batch: int = 100,
    progress: str = "",
) -> tuple[Tensor, Tensor]:
    """`output` (N, …) of all images of `data`, normalized as in `features`, and their labels (N,), on the CPU.

    world: processes that share the batches. Each returns all outputs, which are those of one process. progress: title
    of a progress bar, or "". Raises ValueError for outputs that are not finite or −1, and the errors of the data's
    `batches`.

    >>> digits = vitlens.data.load("digits", "valid", size=224).subset(4)
    >>> read(model, digits, top_classes(model))[0].shape
    torch.Size([4, 5])
    """
    device = next(model.parameters()).device
    world = world or World(device=device)
    rows = torch.arange(len(data)).split(batch)
    mine = [*world.share(rows)]
    # On the CPU if they travel.
    place = device if world.size == 1 else torch.device("cpu")

    def results() -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs and labels of the batches of this process."""
        for images, truth in data.batches(mine):
            outputs = output(normalize_for(model, images.to(device)))
            if outputs.dtype in (torch.float16, torch.bfloat16):
                outputs = outputs.float()
            yield outputs.to(place), truth.to(place)

    values = None
    labels = torch.zeros(len(data), dtype=torch.int64, device=place)
    bar = tqdm(
        total=len(data),
        unit="image",
        desc=progress,
        disable=not progress or world.rank > 0,
        mininterval=0.1 if sys.stderr.isatty() else 60,
    )
    with eval_mode(model), bar:
        for row, (outputs, truth) in zip(rows, world.in_order(results()), strict=True):
            if values is None:
                values = outputs.new_zeros(len(data), *outputs.shape[1:])
            values[row] = outputs
            labels[row] = truth
            bar.update(len(row))
    if isinstance(data, ImageStream):
        data.share_counts(world)
    valid = values.isfinite() if values.is_floating_point() else values >= 0
    wrong = (~valid.flatten(1).all(1)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        name = f"number {first}"
        if isinstance(data, ImageStream):
            name = shown(data.samples.name(first))
        raise ValueError(
            f"The model's outputs for {len(wrong)} of {len(data)} images are not finite, the first being {name}. "
            "Check its weights and its precision."
        )
    return values.cpu(), labels.cpu()
