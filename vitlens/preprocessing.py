"""From RGB to what a model sees, and back: timm's own evaluation transform and its inverse.

Shapes: B batch, C channels, H height and W width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from vitlens.images import MAX_ELONGATION, ImageError, load_image
from vitlens.recorder.families import unwrap, within


def preprocess(
    model: nn.Module,
    images,
    *,
    size: tuple[int, int] | None = None,
    whole: bool = False,
    on_note: Callable[[str], None] | None = None,
) -> Tensor:
    """What `model` is shown for `images`, one picture or a list of them: float32 (B, C, H, W) on the CPU.

    This is timm's evaluation transform for the model's own `pretrained_cfg` (size, interpolation, crop, mean, standard
    deviation). A model without one gets that of the only Vision Transformer in it, or else timm's defaults: 224 × 224,
    bicubic, the middle 0.875, ImageNet statistics.
    `size` = (H, W) in pixels replaces the configured size and nothing else: the picture is resized until it covers
    H × W divided by `crop_pct`, and the middle is cut out (a `crop_mode` of "squash" or "border" stretches or pads, as
    at any size). `timm.create_model(..., img_size=...)` does not change the configured size: give `size`, such as
    `built_size(model)`. `whole` squeezes all of the picture into the size and cuts nothing off. Models with one input
    channel are shown gray, normalized by the averages of the configured means and deviations. `on_note` is called with
    a sentence for each picture to which `load_image` has done something.

    Raises `ImageError` for what `load_image` refuses, an empty list, a picture over 100 times as long as wide (or as
    wide as long), a `size` that is not two positive integers, and a model of neither one nor three channels.
    """
    config = _data_config(model, size)
    if whole:
        config.update(crop_mode="squash", crop_pct=1.0)
    transform = create_transform(**config, is_training=False)
    mode = "L" if config["input_size"][0] == 1 else "RGB"
    sources = images if isinstance(images, (list, tuple)) else [images]
    pictures = [load_image(source, on_note=on_note) for source in sources]
    if not pictures:
        raise ImageError("At least one image was wanted, but the list is empty; give one or more.")
    for width, height in (picture.size for picture in pictures):
        if max(width, height) > MAX_ELONGATION * min(width, height):
            raise ImageError(f"A picture was wanted, but a strip of {width} × {height} pixels came; crop it first.")
    return torch.stack([transform(picture.convert(mode)) for picture in pictures])


def built_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) in pixels that the model was built for, which its configuration need not know; None of models
    that have no size of their own."""
    model = within(model)
    embed = getattr(model, "embeds", None) or getattr(model, "patch_embed", None)
    size = getattr(embed, "img_size", None)
    return size and tuple(size)


@dataclass(frozen=True)
class Pixels:
    """`preprocess` up to the normalization, one decoded picture at a time: uint8 (C, H, W) in, uint8 (C, H, W) out."""

    transform: Callable

    def __call__(self, picture: Tensor) -> Tensor:
        return self.transform(Image.fromarray(picture.permute(1, 2, 0).numpy()))


def pixels(model: nn.Module) -> Pixels:
    """What makes pictures ready for `model` where they are held as bytes, as data sets do, and normalized later.

    Raises `ImageError` for a model of neither one nor three channels.
    """
    return Pixels(create_transform(**_data_config(model), is_training=False, use_prefetcher=True))


def restore(model: nn.Module, batch: Tensor) -> np.ndarray:
    """The pictures in a preprocessed `batch` (B, C, H, W) as uint8 (B, H, W, 3): what `model` really sees.

    Undoes the normalization of `preprocess` to within one level; resizing and cropping stay. Gray is repeated over the
    three channels. Values that no picture has, as in a perturbed batch, become 0 or 255.
    Raises `ImageError` if the shape is not that of a batch for this model.
    """
    config = _data_config(model)
    channels = config["input_size"][0]
    if batch.ndim != 4 or batch.shape[1] != channels:
        wanted, came = f"A batch of shape (B, {channels}, H, W) was wanted", f"one of shape {tuple(batch.shape)} came"
        raise ImageError(f"{wanted}, but {came}; give what preprocess returns for this model.")
    mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    levels = ((batch.detach().cpu().float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return levels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()


def _data_config(model: nn.Module, size: tuple[int, int] | None = None) -> dict:
    """timm's preprocessing of `model`, with the channels that the model has and, if given, another size."""
    model = unwrap(model)
    model = model if hasattr(model, "pretrained_cfg") else within(model)
    config = resolve_model_data_config(model)
    channels, height, width = config["input_size"]
    channels = getattr(model, "in_chans", channels)
    if channels not in (1, 3):
        raise ImageError(f"A model of 1 or 3 input channels was wanted, but this one has {channels}; use another.")
    if size is not None:
        if not isinstance(size, (tuple, list)) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise ImageError(f"A size (height, width) was wanted, but {size!r} came; give two positive integers.")
        height, width = size
    if channels == 1:
        config.update({key: (float(np.mean(config[key])),) for key in ("mean", "std")})
    return config | {"input_size": (channels, height, width)}
