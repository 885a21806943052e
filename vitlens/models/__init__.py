"""Open models, name their classes, and show them pictures.

A model is timm's by name, that of another library by its name after the library's ("hf:facebook/dinov2-small"), or a
local folder in timm's or transformers' layout; no pickled code is ever run. Pictures are made ready by timm's own
evaluation transform, with the settings of the model, and its inverse gives them back.

Shapes: B batch, C channels, H height and W width in pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from vitlens.images import MAX_ELONGATION, ImageError, load_image
from vitlens.models.opening import SPECIMEN, load_model
from vitlens.recorder import supported
from vitlens.recorder.running import run
from vitlens.recorder.supported import family, model_name, states_preprocessing, title, unwrap, within

__all__ = [
    "SPECIMEN", "Pixels", "architecture", "built_size", "class_count", "data_config", "label_names", "load_model",
    "pixels", "preprocess", "probabilities", "require_classes", "restore", "run", "top_classes",
]  # fmt: skip


def architecture(model: nn.Module) -> str:
    """What to call a model in a figure: its architecture, or else its class.

    Sizes that differ from those in timm's name are added: "vit_tiny_patch16_224, patch 8".
    """
    return title(model)


def class_count(model: nn.Module) -> int | None:
    """Number of classes: the head's outputs, or `num_classes` where the head does not say; None where neither does.

    0 for a model whose output is features. The head is asked first, as it may have been replaced.
    """
    return family(unwrap(model)).classes


def require_classes(model: nn.Module) -> None:
    """Raise ValueError for a model without a classifier: its output looks like logits, but is features."""
    if class_count(model) == 0:
        why = "its head is none" if getattr(unwrap(model), "num_classes", 0) else "num_classes=0"
        raise ValueError(
            f"Expected a model with classes, but {model_name(unwrap(model))} has none ({why}): its output is "
            "features. Open it with its classifier, or create it with num_classes=… and train one."
        )


def label_names(model: nn.Module, count: int | None = None) -> list[str] | None:
    """Names of the classes: the folder's own, else ImageNet's for a model of 1,000 classes, else None.

    count: number of logits the model gave; by default as many as its head has outputs. None also where there are names
    for another number of classes, because the head was replaced.
    """
    model = unwrap(model)
    names = supported.label_names(model)
    if names is None and count is not None:
        model = within(model)  # a wrapper has the names of its model, if there are as many
        names = supported.label_names(model)
    classes = class_count(model)
    count = classes if count is None else count
    if names is None and count == classes == 1000:
        names = list(_imagenet_names())
    return names if names is not None and count in (None, len(names)) else None


@functools.cache
def _imagenet_names() -> tuple[str, ...]:
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return tuple(info.index_to_description(i) for i in range(1000))


def probabilities(logits: Tensor) -> Tensor:
    """(…, classes) probabilities of logits (…, classes): their softmax, and of a single logit the logistic function, as
    models of one class learn to tell it from anything else. In float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(-1)


def top_classes(model: nn.Module, logits: Tensor, k: int = 5) -> list[list[tuple[str, float]]]:
    """The k likeliest classes for each row of (B, classes) logits: (name or number, probability).

    Raises ValueError for logits of another shape, and for a model without a classifier.
    """
    require_classes(model)
    if logits.dim() != 2:
        raise ValueError(f"Expected logits of shape (B, classes), got {tuple(logits.shape)}.")
    names = label_names(model, logits.shape[-1])
    shares, classes = probabilities(logits).topk(min(k, logits.shape[-1]))
    return [
        [(names[c] if names else str(c), p) for c, p in zip(cs, ps, strict=True)]
        for cs, ps in zip(classes.tolist(), shares.tolist(), strict=True)
    ]


def preprocess(
    model: nn.Module,
    images,
    *,
    size: tuple[int, int] | None = None,
    whole: bool = False,
    on_note: Callable[[str], None] | None = None,
) -> Tensor:
    """Pictures, one or a list of them, as `model` wants its input: float32 (B, C, H, W) on the CPU.

    This is timm's evaluation transform for the model's own `pretrained_cfg` (size, interpolation, crop, mean, standard
    deviation), else for that of the only Vision Transformer in it, else with timm's defaults: 224 × 224, bicubic, the
    middle 0.875, ImageNet statistics. Models with one input channel are shown gray, normalized by the means of the
    configured means and deviations.

    size: (H, W) in pixels, in place of the configured size: the picture is resized until it covers H × W divided by
    `crop_pct`, and the middle is cut out (a `crop_mode` of "squash" or "border" stretches or pads).
    `timm.create_model(..., img_size=...)` does not change the configured size: give `built_size(model)`.
    whole: squeeze the whole picture into the size and cut nothing off.
    on_note: called with a sentence for each picture that `load_image` has changed.

    Raises `ImageError` for what `load_image` refuses, an empty list, a picture over 100 times as long as wide (or as
    wide as long), a `size` that is not two positive integers, and a model of neither one nor three channels.
    """
    config = data_config(model, size)
    if whole:
        config.update(crop_mode="squash", crop_pct=1.0)
    transform = create_transform(**config, is_training=False)
    mode = "L" if config["input_size"][0] == 1 else "RGB"
    sources = images if isinstance(images, (list, tuple)) else [images]
    pictures = [load_image(source, on_note=on_note) for source in sources]
    if not pictures:
        raise ImageError("Expected at least one image, got an empty list.")
    for width, height in (picture.size for picture in pictures):
        if max(width, height) > MAX_ELONGATION * min(width, height):
            raise ImageError(f"Expected a picture, got a strip of {width} × {height} pixels. Crop it first.")
    return torch.stack([transform(picture.convert(mode)) for picture in pictures])


def built_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) in pixels that the model was built for, or None if it has no size of its own."""
    return family(within(model)).built_size


@dataclass(frozen=True)
class Pixels:
    """`preprocess` without the normalization, for one decoded picture: uint8 (C, H, W) in, uint8 (C, H, W) out."""

    transform: Callable

    def __call__(self, picture: Tensor) -> Tensor:
        return self.transform(Image.fromarray(picture.permute(1, 2, 0).numpy()))


def pixels(model: nn.Module) -> Pixels:
    """The `Pixels` of a model, for data sets, which hold pictures as bytes and normalize them later.

    Raises `ImageError` for a model of neither one nor three channels.
    """
    return Pixels(create_transform(**data_config(model), is_training=False, use_prefetcher=True))


def restore(model: nn.Module, batch: Tensor) -> np.ndarray:
    """The pictures in a preprocessed `batch` (B, C, H, W) as uint8 (B, H, W, 3): what `model` really sees.

    Undoes the normalization of `preprocess` to within one level; resizing and cropping stay. Gray is repeated over the
    three channels, and values that no picture has, as in a perturbed batch, become 0 or 255.
    Raises `ImageError` if the shape is not that of a batch for this model.
    """
    config = data_config(model)
    channels = config["input_size"][0]
    if batch.ndim != 4 or batch.shape[1] != channels:
        raise ImageError(
            f"Expected a batch of shape (B, {channels}, H, W), got {tuple(batch.shape)}. Give what `preprocess` makes."
        )
    mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    levels = ((batch.detach().cpu().float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return levels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()


def data_config(model: nn.Module, size: tuple[int, int] | None = None) -> dict:
    """Preprocessing of `model` as timm describes it, with the model's own channels and, if given, another size.

    Raises `ImageError` for a model of neither one nor three channels, for means or deviations of another number of
    them, and for a `size` that is no (height, width).
    """
    model = unwrap(model)
    config = family(model if states_preprocessing(model) else within(model)).preprocessing
    channels, height, width = config["input_size"]
    if channels not in (1, 3):
        raise ImageError(f"Expected a model with 1 or 3 input channels, got one with {channels}.")
    if size is not None:
        if not isinstance(size, (tuple, list)) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise ImageError(f"Expected a size (height, width) of two positive integers, got {size!r}.")
        height, width = size
    if channels == 1:
        config.update({key: (float(np.mean(config[key])),) for key in ("mean", "std")})
    elif wrong := [key for key in ("mean", "std") if np.size(config[key]) not in (1, channels)]:
        raise ImageError(
            f"Expected {channels} numbers as the {wrong[0]} of {model_name(model)}, one for each channel, got "
            f"{config[wrong[0]]!r}. Correct its pretrained_cfg, or config.json if it comes from a folder."
        )
    return config | {"input_size": (channels, height, width)}
