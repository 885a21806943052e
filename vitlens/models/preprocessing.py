"""Prepare images for a model as its library does, and measure what that is."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from vitlens.images import MAX_ELONGATION, ImageError, ModelInput, image_files, load_image
from vitlens.models.classes import module_with_facts
from vitlens.recorder.supported import family, inner_transformer, model_name
from vitlens.recorder.supported.card import card_of, write_card


class TransformersProcessor:
    """An image processor of transformers as a function from an RGB image to (C, H, W)."""

    def __init__(self, processor):
        self.processor, self.interpolation = (
            processor,
            Image.Resampling(processor.resample).name.lower(),
        )

    def __call__(self, image: Image.Image) -> Tensor:
        if hasattr(
            self.processor, "max_num_patches"
        ):  # SigLIP 2: one square, so that images make a batch
            side = int(self.processor.max_num_patches**0.5) * self.processor.patch_size
            image = image.resize((side, side), self.processor.resample)
        inputs = self.processor(images=image, return_tensors="pt")
        values = inputs["pixel_values"][0]
        if "spatial_shapes" in inputs:  # SigLIP 2: patches (P, p·q·C)
            (rows, cols), side = inputs["spatial_shapes"][0].tolist(), self.processor.patch_size
            patches = (
                values[: rows * cols].unflatten(1, (side, side, -1)).unflatten(0, (rows, cols))
            )
            values = patches.permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2)
        return values


def _crop_box(
    transform: Callable[[Image.Image], Tensor], size: tuple[int, int], mode: str = "RGB"
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the part that a transform crops from an image of `size` = (width, height) pixels.

    Measured on images whose levels are coordinates. With padding it extends beyond the image. Raises ImageError for
    an aspect ratio over 100, and if the image fills too few rows or columns of the input.
    """

    def transformed(levels) -> np.ndarray:
        image = Image.fromarray(
            np.broadcast_to(np.round(levels).astype(np.uint8), size[::-1]).copy()
        )
        return transform(image.convert(mode))[0].double().numpy()

    width, height = size
    _require_compact(width, height)
    x, y = (np.linspace(0, 1, side, dtype=np.float32) for side in size)
    y = y[:, None]
    low, high = transformed(0), transformed(255)
    inside = high - low > 0.99 * (high - low).max()  # padding is the same in both
    # each ramp has a small perpendicular one, which averages out the rounding to 8 bits
    ramps = (240 * a + 15 * b for a, b in ((x, y), (y, x)))
    one, other = (255 * (transformed(ramp) - low)[inside] / (high - low)[inside] for ramp in ramps)
    rows, cols = np.nonzero(inside)
    middle = np.ones(len(rows), bool)
    for places in (rows, cols):  # filters have less support at the edges
        middle &= np.abs(places - (places.min() + places.max()) / 2) <= np.ptp(places) / 4
    places = np.column_stack([cols + 0.5, rows + 0.5, np.ones(len(rows))])[middle]
    seen = np.stack(
        [(240 * one - 15 * other) * (width - 1), (240 * other - 15 * one) * (height - 1)], 1
    )
    seen = seen[middle] / (240**2 - 15**2)
    slopes, _, rank, _ = np.linalg.lstsq(places, seen + 0.5, rcond=None)
    if rank < 3:
        raise ImageError(
            f"The model's input shows too little of an image of {width} × {height} pixels. Crop it first."
        )
    edges = np.array([[0, 0, 1], [inside.shape[1], inside.shape[0], 1]]) @ slopes
    return tuple(edges.ravel().tolist())


def _require_compact(width: int, height: int) -> None:
    """Raise ImageError for an image with an aspect ratio over `MAX_ELONGATION`."""
    if max(width, height) > MAX_ELONGATION * min(width, height):
        raise ImageError(
            f"Expected an image, got a strip of {width} × {height} pixels. Crop it first."
        )


@functools.lru_cache(maxsize=32)
def measured(transform: Callable[[Image.Image], Tensor]) -> dict:
    """Preprocessing of a library in timm's settings, measured on images.

    Uniform images give the mean and the standard deviation. Images of coordinates give `crop_pct` and `crop_mode`.
    """

    def level(value: int) -> Tensor:
        flat = transform(Image.new("RGB", (256, 256), (value,) * 3)).double()
        return flat[:, flat.shape[1] // 2, flat.shape[2] // 2]

    black, gray, white = level(0), level(51), level(255)
    if not torch.allclose(
        gray, black + (white - black) / 5, atol=1e-3 * float((white - black).abs().max())
    ):
        raise ValueError("Its outputs are not a linear function of the levels of an image.")
    mean, std = -black / (white - black), 1 / (white - black)
    width, height = 320, 240
    channels, rows, cols = transform(Image.new("RGB", (width, height))).shape
    left, top, right, bottom = _crop_box(transform, (width, height))
    across, down = (right - left) / cols, (bottom - top) / rows
    shares = (right - left) / width, (bottom - top) / height
    mode = (
        "squash"
        if abs(across - down) > 0.02 * down
        else "border"
        if max(shares) > 1.02
        else "center"
    )
    name = getattr(transform, "interpolation", "bicubic")
    return {
        "input_size": (channels, rows, cols),
        "mean": tuple(mean.tolist()),
        "std": tuple(std.tolist()),
        "interpolation": getattr(name, "value", name),
        "crop_mode": mode,
        "crop_pct": 1.0 if mode == "border" else min(1.0, round(max(shares) * 200) / 200),
    }


def _own_transform(model: nn.Module) -> Callable[[Image.Image], Tensor] | None:
    """Preprocessing by the library of a model, from an RGB image to (C, H, W). None for timm models."""
    model = module_with_facts(model, "pretrained_cfg")
    card = card_of(model)
    if card is not None:
        return card.transform
    if vars(model).get("pretrained_cfg"):
        return None
    tower = getattr(model, "visual", model)
    if isinstance(settings := getattr(tower, "preprocess_cfg", None), dict):  # open_clip
        from open_clip.transform import PreprocessCfg, image_transform_v2

        transform = image_transform_v2(PreprocessCfg(**settings), is_train=False)
        write_card(model, transform=transform)
        return transform
    if origin := getattr(getattr(model, "config", None), "name_or_path", None):
        with suppress(Exception):  # without a processor on this disk, use that of its class
            from transformers import AutoImageProcessor

            processor = AutoImageProcessor.from_pretrained(origin, local_files_only=True)
            transform = TransformersProcessor(processor)
            write_card(model, transform=transform)
            return transform
    return None


def guessed(model: nn.Module) -> str:
    """Warning if the preprocessing of a model is a guess, else "".

    >>> vitlens.models.guessed(model)
    ''
    """
    model = module_with_facts(model, "pretrained_cfg")
    card = card_of(model)
    if card is not None:
        return card.guess
    if vars(model).get("pretrained_cfg") or _own_transform(model) is not None:
        return ""
    return f"{model_name(model)} has no pretrained_cfg, so its preprocessing is a guess: {data_config(model)}."


def built_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) in pixels of the images that a model was built for, or None if it takes any size.

    >>> vitlens.models.built_size(model)
    (224, 224)
    """
    transform = _own_transform(model)
    return (
        family(inner_transformer(model)).built_size
        if transform is None
        else measured(transform)["input_size"][1:]
    )


def data_config(model: nn.Module, size: tuple[int, int] | None = None) -> dict:
    """Preprocessing of `model` in timm's settings, with the model's channels.

    size: (H, W) in pixels, in place of the configured size. Raises ImageError unless the model has one or three input
    channels and as many means and deviations.

    >>> vitlens.models.data_config(model)["interpolation"]
    'bilinear'
    """
    own = _own_transform(model)
    model = module_with_facts(model, "pretrained_cfg")
    config = dict(family(model).preprocessing if own is None else measured(own))
    channels, height, width = config["input_size"]
    if channels not in (1, 3):
        raise ImageError(f"Expected a model with 1 or 3 input channels, got one with {channels}.")
    height, width = size or (height, width)
    if channels == 1:
        config.update({key: (float(np.mean(config[key])),) for key in ("mean", "std")})
    for key in ("mean", "std"):
        if np.size(config[key]) not in (1, channels):
            raise ImageError(
                f"Expected {channels} numbers as the {key} of {model_name(model)}, got {config[key]!r}."
            )
    return config | {"input_size": (channels, height, width)}


def _transform(
    model: nn.Module, size: tuple[int, int] | None = None, whole: bool = False
) -> Callable:
    """A function from a PIL image to the model's input (C, H, W)."""
    config, own = data_config(model, size), _own_transform(model)
    squashed = config["crop_mode"] == "squash" and config["crop_pct"] == 1
    if (
        own is not None
        and config["input_size"] == measured(own)["input_size"]
        and (squashed or not whole)
    ):
        return own
    if whole:
        config.update(crop_mode="squash", crop_pct=1.0)
    return create_transform(**config, is_training=False)


def preprocess(
    model: nn.Module,
    images,
    *,
    size: tuple[int, int] | None = None,
    whole: bool = False,
    on_note: Callable[[str], None] | None = None,
) -> Tensor:
    """Model input from an image, a folder, or a list or dictionary of images: float32 (B, C, H, W) on the CPU.

    Models of transformers, open_clip and torchvision use their library's preprocessing. All others, and all other
    sizes, use timm's evaluation transform with the model's `pretrained_cfg`. A module without one gets the images of
    the only Vision Transformer that it contains, whatever it does to them. For models with one input channel images are
    converted to gray.

    images: sources of `load_image`. size: (H, W) in pixels, in place of the configured size. After
    `timm.create_model(…, img_size=…)`, pass `built_size(model)`. whole: resize the whole image without a crop. on_note:
    called with a sentence for each image that `load_image` changed or that is cropped to less than half of its area,
    and if the preprocessing is a guess.

    Raises ImageError for sources that `load_image` refuses, images with an aspect ratio over 100, and models of neither
    one nor three channels.

    >>> vitlens.models.preprocess(model, [cat, cat]).shape
    torch.Size([2, 3, 224, 224])
    """
    transform, config = _transform(model, size, whole), data_config(model, size)
    channels, *sides = config["input_size"]
    images = [*images.values()] if isinstance(images, dict) else images
    if isinstance(images, str | os.PathLike) and os.path.isdir(images):
        images = [file for _, file in image_files(Path(images), on_note)]
    sources = images if isinstance(images, (list, tuple)) else [images]
    if not sources:
        raise ImageError("Expected an image or several, got none.")
    loaded = [load_image(source, on_note=on_note) for source in sources]
    for source, image in zip(sources, loaded, strict=True):
        width, height = image.size
        _require_compact(width, height)
        scales = [length / side for length, side in zip((height, width), sides, strict=True)]
        seen = (min(scales) * config["crop_pct"]) ** 2 / (
            scales[0] * scales[1]
        )  # share of the image
        if on_note is not None and seen < 0.5 and config["crop_mode"] == "center" and not whole:
            name = Path(source).name if isinstance(source, str | os.PathLike) else "An image"
            on_note(
                f"{name} of {width} × {height} pixels is cropped: the model sees the middle {seen:.0%} of it."
            )
    if on_note is not None and (sentence := guessed(model)):
        on_note(sentence)
    return torch.stack(
        [transform(image.convert("L" if channels == 1 else "RGB")) for image in loaded]
    )


def crop_box(
    model: nn.Module, image, *, size: tuple[int, int] | None = None, whole: bool = False
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the part of an image that `preprocess` passes to the model, in pixels of the image.

    With padding it extends beyond the image. image: a source of `load_image`. size, whole: as for `preprocess`. Raises
    ImageError as `preprocess` does, and for an image that fills too few rows or columns of the input.

    >>> [round(edge) for edge in vitlens.models.crop_box(model, cat)]
    [75, 0, 376, 300]
    """
    config = data_config(model, size)
    mode = "L" if config["input_size"][0] == 1 else "RGB"
    return _crop_box(_transform(model, size, whole), load_image(image).size, mode)


def pixels(model: nn.Module) -> Callable[[Image.Image], Tensor]:
    """`preprocess` without normalization, as a function from an RGB image to uint8 (C, H, W).

    For data sets, which store images as bytes and normalize them later.

    >>> vitlens.models.pixels(model)(cat).shape
    torch.Size([3, 224, 224])
    """
    config = data_config(model)
    if (own := _own_transform(model)) is not None:
        return functools.partial(_unnormalized, own, config["mean"], config["std"])
    return create_transform(**config, is_training=False, use_prefetcher=True)


def _unnormalized(transform: Callable, mean: tuple, std: tuple, image: Image.Image) -> Tensor:
    return _levels(transform(image)[None], mean, std)[0]


def restore(model: nn.Module, batch: Tensor) -> np.ndarray:
    """The images in a preprocessed `batch` (B, C, H, W) without normalization, as uint8 (B, H, W, 3).

    They stay resized and cropped. Gray is repeated over the three channels, and values outside 0 to 255, as in a
    perturbed batch, are clamped. Raises ImageError if the shape does not fit the model.

    >>> vitlens.models.restore(model, images).shape
    (2, 224, 224, 3)
    """
    config = data_config(model)
    if batch.ndim != 4 or batch.shape[1] != config["input_size"][0]:
        raise ImageError(
            f"Expected a batch (B, {config['input_size'][0]}, H, W), got {tuple(batch.shape)}."
        )
    levels = _levels(batch.detach().cpu().float(), config["mean"], config["std"])
    return ModelInput(levels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy())


def _levels(batch: Tensor, mean: tuple, std: tuple) -> Tensor:
    """uint8 (B, C, H, W) levels of a normalized batch."""
    mean, std = (torch.tensor(part, dtype=torch.float32).view(1, -1, 1, 1) for part in (mean, std))
    return ((batch * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
