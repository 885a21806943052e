"""Prepare images for a model as its library does, and measure what that is."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from vitlens.images import (
    MAX_ELONGATION,
    Change,
    ImageError,
    ModelInput,
    Readable,
    Remark,
    Remarks,
    load_image,
    named_sources,
)
from vitlens.models.arrival import Given, given, may_change
from vitlens.models.classes import module_with_facts
from vitlens.recorder.forward import cast
from vitlens.recorder.supported import (
    family,
    inner_transformer,
    input_channels,
    is_known,
    model_name,
    transformers_in,
)
from vitlens.recorder.supported.card import card_of, write_card
from vitlens.texts import shown


class TransformersProcessor:
    """An image processor of transformers as a function from an RGB image to (C, H, W)."""

    def __init__(self, processor):
        self.processor = processor
        self.interpolation = Image.Resampling(processor.resample).name.lower()

    def __call__(self, image: Image.Image) -> Tensor:
        processor = self.processor
        takes_any_shape = hasattr(processor, "max_num_patches")  # SigLIP 2
        if takes_any_shape:  # one square, so that images make a batch
            patches_a_side = int(processor.max_num_patches**0.5)
            side = patches_a_side * processor.patch_size
            image = image.resize((side, side), processor.resample)
        inputs = processor(images=image, return_tensors="pt")
        values = inputs["pixel_values"][0]
        if "spatial_shapes" in inputs:  # SigLIP 2 returns patches (P, p·q·C)
            rows, cols = inputs["spatial_shapes"][0].tolist()
            patch = processor.patch_size
            patches = values[: rows * cols]
            patches = patches.reshape(rows, cols, patch, patch, -1)
            by_rows = patches.permute(4, 0, 2, 1, 3)
            values = by_rows.flatten(3, 4).flatten(1, 2)
        return values


@dataclass(frozen=True)
class Renormalized:
    """A library's preprocessing with another normalization, as a function from an RGB image to (C, H, W)."""

    transform: Callable[[Image.Image], Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    given: Given

    @property
    def interpolation(self) -> object:
        return getattr(self.transform, "interpolation", "bicubic")

    def __call__(self, image: Image.Image) -> Tensor:
        own = self.transform(image)
        pixels = own * _column(self.std) + _column(self.mean)
        return (pixels - _column(self.given.mean)) / _column(self.given.std)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


_MAIN = 240
"""Levels of the ramp along one axis in an image of coordinates."""
_MINOR = 15
"""Levels of its perpendicular ramp, which averages out the rounding to 8 bits."""


def _measure_crop(
    transform: Callable[[Image.Image], Tensor], size: tuple[int, int], mode: str = "RGB"
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the part that a transform crops from an image of `size` = (width, height) pixels.

    Measured on images whose levels are coordinates. With padding it extends beyond the image. Raises ImageError for
    an aspect ratio over 100, and if the image fills too few rows or columns of the input.
    """
    width, height = size
    _require_compact(width, height)

    def transform_levels(levels) -> np.ndarray:
        """First channel of the transformed image with these levels."""
        pixels = np.round(levels).astype(np.uint8)
        whole = np.broadcast_to(pixels, (height, width)).copy()
        image = Image.fromarray(whole).convert(mode)
        channels = transform(image)
        return channels[0].double().numpy()

    black = transform_levels(0)
    white = transform_levels(255)
    contrast = white - black
    inside = contrast > 0.99 * contrast.max()  # padding is the same in both

    def read_levels(values: np.ndarray) -> np.ndarray:
        """Levels of the image's pixels, of which the transform made these values."""
        above_black = (values - black)[inside]
        return 255 * above_black / contrast[inside]

    x = np.linspace(0, 1, width, dtype=np.float32)
    y = np.linspace(0, 1, height, dtype=np.float32)
    y = y[:, None]
    across = transform_levels(_MAIN * x + _MINOR * y)
    down = transform_levels(_MAIN * y + _MINOR * x)
    across = read_levels(across)
    down = read_levels(down)
    seen_x = (_MAIN * across - _MINOR * down) * (width - 1)
    seen_y = (_MAIN * down - _MINOR * across) * (height - 1)
    seen = np.stack([seen_x, seen_y], 1)
    seen = seen / (_MAIN**2 - _MINOR**2)

    rows, cols = np.nonzero(inside)
    middle = _in_middle_half(rows) & _in_middle_half(cols)  # filters have less support at the edges
    ones = np.ones(len(rows))
    places = np.column_stack([cols + 0.5, rows + 0.5, ones])
    centers = seen + 0.5
    places = places[middle]
    centers = centers[middle]
    slopes, _, rank, _ = np.linalg.lstsq(places, centers, rcond=None)
    if rank < 3:
        raise ImageError(
            f"The model's input shows too little of an image of {width} × {height} pixels. Crop it first."
        )
    input_height, input_width = inside.shape
    corners = np.array([[0, 0, 1], [input_width, input_height, 1]])
    edges = corners @ slopes
    return tuple(edges.ravel().tolist())


def _in_middle_half(places: np.ndarray) -> np.ndarray:
    """True for places in the middle half of their range."""
    center = (places.min() + places.max()) / 2
    distance = np.abs(places - center)
    return distance <= np.ptp(places) / 4


def _require_compact(width: int, height: int) -> None:
    """Raise ImageError for an image with an aspect ratio over `MAX_ELONGATION`."""
    longer = max(width, height)
    shorter = min(width, height)
    if longer > MAX_ELONGATION * shorter:
        raise ImageError(
            f"Expected an image, got a strip of {width} × {height} pixels. Crop it first."
        )


@functools.lru_cache(maxsize=32)
def measure_preprocessing(transform: Callable[[Image.Image], Tensor], channels: int = 3) -> dict:
    """Preprocessing of a library in timm's settings, measured on images.

    Uniform images give the mean and the standard deviation. Images of coordinates give `crop_pct` and `crop_mode`.
    channels: of the model's input. Raises ValueError if the transform returns another number of channels.
    """
    mode = _image_mode(channels)

    def transform_level(level: int) -> Tensor:
        """Values of the channels in the middle of a transformed uniform image."""
        image = Image.new("RGB", (256, 256), (level, level, level)).convert(mode)
        flat = transform(image).double()
        _, height, width = flat.shape
        return flat[:, height // 2, width // 2]

    black = transform_level(0)
    gray = transform_level(51)  # a fifth of 255
    white = transform_level(255)
    contrast = white - black
    fifth = black + contrast / 5
    tolerance = 1e-3 * float(contrast.abs().max())
    if not torch.allclose(gray, fifth, atol=tolerance):
        raise ValueError("Its outputs are not a linear function of the levels of an image.")
    mean = -black / contrast
    std = 1 / contrast

    width = 320
    height = 240
    image = Image.new(mode, (width, height))
    returned, rows, cols = transform(image).shape
    if returned != channels:
        raise ValueError(f"It returns {returned} channels, and the model takes {channels}.")
    left, top, right, bottom = _measure_crop(transform, (width, height), mode)
    crop_width = right - left
    crop_height = bottom - top
    share = max(crop_width / width, crop_height / height)
    pixel_width = crop_width / cols
    pixel_height = crop_height / rows
    if abs(pixel_width - pixel_height) > 0.02 * pixel_height:
        mode = "squash"
    elif share > 1.02:
        mode = "border"
    else:
        mode = "center"
    crop_pct = 1.0
    if mode != "border":
        rounded = round(share * 200) / 200
        crop_pct = min(1.0, rounded)
    interpolation = getattr(transform, "interpolation", "bicubic")
    return {
        "input_size": (channels, rows, cols),
        "mean": tuple(mean.tolist()),
        "std": tuple(std.tolist()),
        "interpolation": getattr(interpolation, "value", interpolation),
        "crop_mode": mode,
        "crop_pct": crop_pct,
    }


@functools.lru_cache(maxsize=32)
def _keeps_shape(transform: Callable[[Image.Image], Tensor], mode: str) -> bool:
    """True if a library's output has another shape for a wide image than for a tall one."""
    wide = transform(Image.new(mode, (320, 240)))
    tall = transform(Image.new(mode, (240, 320)))
    return wide.shape != tall.shape


@dataclass(frozen=True)
class _Plan:
    """Preparation of images for a model: the only place that decides it.

    config: in timm's settings. transform: the library's, from an RGB or gray image to (C, H, W), or None for timm's.
    as_library: images have the size that the library configured, so its transform applies. notes: sentences if a module
    changes images before its Vision Transformer sees them, and if the library keeps their shape.
    """

    config: dict
    transform: Callable[[Image.Image], Tensor] | None
    as_library: bool
    notes: list[str]


def _plan(model: nn.Module, size: tuple[int, int] | None = None) -> _Plan:
    """Preparation of images of (H, W) pixels, by default the configured size."""
    source = module_with_facts(model, "pretrained_cfg")
    transform = _own_transform(model)
    _require_declared(source, transform)
    channels = _channels(source)
    config = dict(_measured_or_declared(source, transform, channels))
    for key in ("mean", "std"):
        values = config[key]
        if channels == 1:
            values = (float(np.mean(values)),)
        if np.size(values) not in (1, channels):
            raise ImageError(
                f"Expected {channels} numbers as the {key} of {model_name(source)}, got {values!r}."
            )
        config[key] = values
    _, *built_for = config["input_size"]
    built_for = tuple(built_for)
    chosen = tuple(size or built_for)
    as_library = transform is not None and chosen == built_for
    notes = []
    if transform is not None and _keeps_shape(transform, _image_mode(channels)):
        chosen = size or family(source).built_size
        as_library = size is None
        notes.append(
            f"The image processor of {model_name(source)} does not resize images to one size. Pass size=, such as "
            f"{family(source).built_size}, to resize them."
        )
    config["input_size"] = (channels, *chosen)
    if not may_change(model):
        return _Plan(config, transform, as_library, notes)
    levels = given(model, config)
    normalizes = levels.normalizes
    if transform is not None and normalizes:
        transform = Renormalized(transform, config["mean"], config["std"], levels)
    if normalizes:
        config.update(mean=levels.mean, std=levels.std)
    if levels.note:
        notes.append(levels.note)
    return _Plan(config, transform, as_library, notes)


def _measured_or_declared(source: nn.Module, transform: Callable | None, channels: int) -> dict:
    """Preprocessing in timm's settings, by measuring a library's transform or from the model's declaration."""
    if transform is None:
        return family(source).preprocessing
    return measure_preprocessing(transform, channels)


def _channels(source: nn.Module) -> int:
    """Input channels of a model, 1 or 3."""
    if is_known(source):
        channels = input_channels(source)
    else:
        channels, _, _ = family(source).preprocessing["input_size"]
    if channels not in (1, 3):
        raise ImageError(f"Expected a model with 1 or 3 input channels, got one with {channels}.")
    return channels


def _require_declared(source: nn.Module, transform: Callable | None) -> None:
    """Raise ValueError for a module that declares neither its input nor a known class."""
    card = card_of(source)
    if transform is not None or card is not None or is_known(source):
        return
    if vars(source).get("pretrained_cfg") or vars(source).get("default_cfg"):
        return
    name = type(source).__name__
    inner = transformers_in(source)
    why = "it declares no input"
    if inner:
        why = f"it contains {len(inner)} Vision Transformers ({', '.join(inner)})"
    raise ValueError(
        f"The images that {name} takes are unknown: {why}. Give "
        f"`vitlens.register_model({name}, …)` its size, mean and std, or set `model.pretrained_cfg = "
        '{"input_size": (3, 224, 224), "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}`.'
    )


def _own_transform(model: nn.Module) -> Callable[[Image.Image], Tensor] | None:
    """Preprocessing of the Vision Transformer itself by its library, or None for timm models."""
    model = module_with_facts(model, "pretrained_cfg")
    card = card_of(model)
    if card is not None:
        return card.transform
    if vars(model).get("pretrained_cfg"):
        return None
    transform = _open_clip_transform(model) or _transformers_transform(model)
    if transform is not None:
        write_card(model, transform=transform)
    return transform


def _open_clip_transform(model: nn.Module) -> Callable[[Image.Image], Tensor] | None:
    """Preprocessing of a model of open_clip, or None for other models."""
    tower = getattr(model, "visual", model)
    settings = getattr(tower, "preprocess_cfg", None)
    if not isinstance(settings, dict):
        return None
    from open_clip.transform import PreprocessCfg, image_transform_v2

    config = PreprocessCfg(**settings)
    return image_transform_v2(config, is_train=False)


def _transformers_transform(model: nn.Module) -> Callable[[Image.Image], Tensor] | None:
    """Image processor of a model of transformers, or None for other models and without one on this disk."""
    config = getattr(model, "config", None)
    origin = getattr(config, "name_or_path", None)
    if not origin:
        return None
    with suppress(Exception):  # without a processor on this disk, use that of its class
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(origin, local_files_only=True)
        return TransformersProcessor(processor)
    return None


def preprocessing_warning(model: nn.Module) -> str:
    """Warning if the preprocessing of a model is a guess, else "".

    >>> vitlens.models.preprocessing_warning(model)
    ''
    """
    model = module_with_facts(model, "pretrained_cfg")
    card = card_of(model)
    if card is not None:
        return card.guess
    if vars(model).get("pretrained_cfg") or _own_transform(model) is not None:
        return ""
    if is_known(model) and family(model).declares_preprocessing:
        return ""
    name = model_name(model)
    config = data_config(model)
    return f"{name} has no pretrained_cfg, so its preprocessing is a guess: {config}."


def built_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) in pixels of the images that a model was built for, or None if it takes any size.

    >>> vitlens.models.built_size(model)
    (224, 224)
    """
    transform = _own_transform(model)
    inner = inner_transformer(model)
    if transform is None:
        return family(inner).built_size
    channels = _channels(module_with_facts(model, "pretrained_cfg"))
    if _keeps_shape(transform, _image_mode(channels)):
        return family(inner).built_size
    _, height, width = measure_preprocessing(transform, channels)["input_size"]
    return height, width


def data_config(model: nn.Module, size: tuple[int, int] | None = None) -> dict:
    """Preprocessing of `model` in timm's settings, with the model's channels.

    size: (H, W) in pixels, in place of the configured size. Raises ImageError unless the model has one or three input
    channels and as many means and deviations.

    >>> vitlens.models.data_config(model)["interpolation"]
    'bicubic'
    """
    return _plan(model, size).config


def _make_transform(plan: _Plan, whole: bool = False) -> Callable[[Image.Image], Tensor]:
    """A function from a PIL image to the model's input (C, H, W)."""
    config = dict(plan.config)
    shows_whole = config["crop_mode"] == "squash" and config["crop_pct"] == 1
    if plan.as_library and (shows_whole or not whole):
        return plan.transform
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
    """Model input from an image or several: (B, C, H, W) on the CPU, in the model's dtype.

    Models of transformers, open_clip and torchvision use their library's preprocessing. All others, and all other
    sizes, use timm's evaluation transform with the model's `pretrained_cfg`. For models with one input channel images
    are converted to gray.

    A module without a `pretrained_cfg` gets the images with which its only Vision Transformer receives its own
    preprocessing: of the same normalization, or in 0 … 1, 0 … 255 or −1 … 1 if the module normalizes them itself. Test
    images show which one. Hooks of the module see these three images, too, in eval mode. The buffers of the module and
    the random states are restored afterwards.

    images: a source of `load_image`, a folder, a dictionary by name, or an iterable in order, such as a list, a
    generator or a pandas Series. size: (H, W) in pixels, in place of the configured size. After
    `timm.create_model(…, img_size=…)`, pass `built_size(model)`. whole: resize the whole image without a crop. on_note:
    called with a sentence for each image that `load_image` changed or that is cropped to less than half of its area, if
    the preprocessing is a guess, and if a module changes images before its Vision Transformer. By default one warning
    has the first three of each kind, and the number of the others.

    Raises ImageError for sources that `load_image` refuses, images with an aspect ratio over 100, and models of neither
    one nor three channels. Such images of a folder are left out, and counted in a note.
    Raises ValueError for a module that declares no input, and for one that changes images in another way than by such a
    normalization.

    >>> vitlens.models.preprocess(model, [cat, cat]).shape
    torch.Size([2, 3, 224, 224])
    """
    plan = _plan(model, size)
    transform = _make_transform(plan, whole)
    config = plan.config
    mode = _image_mode(config["input_size"][0])
    sentences: list[str] = []
    remarks = Remarks(sentences.append)
    say = on_note or remarks
    sources = [source for _, source in named_sources(images, say)]
    if not sources:
        raise ImageError("Expected an image or several, got none.")
    crops = config["crop_mode"] == "center" and not whole
    loaded = []
    readable = Readable()
    for source in sources:
        try:
            image = load_image(source, on_note=say)
            _require_compact(*image.size)
        except ImageError as error:
            readable.leave_out(source, error)
            continue
        loaded.append(image)
        if crops:
            _note_crop(source, image, config, say)
    readable.total(len(loaded), say)
    for note in plan.notes:
        say(note)
    guess = preprocessing_warning(model)
    if guess:
        say(guess)
    remarks.total(len(loaded))
    if sentences:
        warnings.warn(" ".join(sentences), stacklevel=2)
    inputs = [transform(image.convert(mode)) for image in loaded]
    shapes = {tuple(values.shape[1:]) for values in inputs}
    if len(shapes) > 1:
        raise ImageError(f"The images have several sizes: {sorted(shapes)}. {plan.notes[0]}")
    return torch.stack(inputs).to(_dtype(model))


def _dtype(model: nn.Module) -> torch.dtype:
    """Type of the numbers that enter a model: that of its embedding's parameters."""
    inner = inner_transformer(model)
    return cast(inner, torch.empty(0)).dtype


def _image_mode(channels: int) -> str:
    """Mode of the PIL images that a model takes."""
    return "L" if channels == 1 else "RGB"


def _note_crop(source, image: Image.Image, config: dict, on_note: Callable[[str], None]) -> None:
    """Call `on_note` with a sentence if the model's input shows less than half of an image."""
    width, height = image.size
    _, input_height, input_width = config["input_size"]
    down = height / input_height
    across = width / input_width
    cropped = min(down, across) * config["crop_pct"]
    seen = cropped**2 / (down * across)
    if seen >= 0.5:
        return
    name = Path(source).name if isinstance(source, str | os.PathLike) else "An image"
    change = Change("crop", f"is cropped: the model sees the middle {seen:.0%} of it")
    on_note(Remark(f"{shown(name)} of {width} × {height} pixels", [change]))


def crop_box(
    model: nn.Module, image, *, size: tuple[int, int] | None = None, whole: bool = False
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the part of an image that `preprocess` passes to the model, in pixels of the image.

    With padding it extends beyond the image. image: a source of `load_image`. size, whole: as for `preprocess`. Raises
    ImageError as `preprocess` does, and for an image that fills too few rows or columns of the input.

    >>> [round(edge) for edge in vitlens.models.crop_box(model, cat)]
    [90, 15, 361, 285]
    """
    plan = _plan(model, size)
    mode = _image_mode(plan.config["input_size"][0])
    transform = _make_transform(plan, whole)
    loaded = load_image(image)
    return _measure_crop(transform, loaded.size, mode)


def pixels(model: nn.Module) -> Callable[[Image.Image], Tensor]:
    """`preprocess` without normalization, as a function from an RGB image to uint8 (C, H, W).

    For data sets, which store images as bytes and normalize them later.

    >>> vitlens.models.pixels(model)(cat).shape
    torch.Size([3, 224, 224])
    """
    plan = _plan(model)
    config = plan.config
    transform = plan.transform
    mode = _image_mode(config["input_size"][0])
    if transform is None:
        return create_transform(**config, is_training=False, use_prefetcher=True)
    return functools.partial(_transform_to_levels, transform, mode, config["mean"], config["std"])


def _transform_to_levels(
    transform: Callable, mode: str, mean: tuple, std: tuple, image: Image.Image
) -> Tensor:
    """uint8 (C, H, W) levels of a transformed image."""
    if mode == "L":
        image = image.convert(mode)
    batch = transform(image)[None]
    levels = _to_levels(batch, mean, std)
    return levels[0]


def restore(model: nn.Module, batch: Tensor) -> np.ndarray:
    """The images in a preprocessed `batch` (B, C, H, W) without normalization, as uint8 (B, H, W, 3).

    They stay resized and cropped. Gray is repeated over the three channels, and values outside 0 to 255, as in a
    perturbed batch, are clamped. Raises ImageError if the shape does not fit the model.

    >>> vitlens.models.restore(model, images).shape
    (2, 224, 224, 3)
    """
    config = data_config(model)
    channels = config["input_size"][0]
    if batch.ndim != 4 or batch.shape[1] != channels:
        raise ImageError(f"Expected a batch (B, {channels}, H, W), got {tuple(batch.shape)}.")
    batch = batch.detach().cpu().float()
    levels = _to_levels(batch, config["mean"], config["std"])
    colors = levels.expand(-1, 3, -1, -1)
    channels_last = colors.permute(0, 2, 3, 1).contiguous()
    return ModelInput(channels_last.numpy())


def _to_levels(batch: Tensor, mean: tuple, std: tuple) -> Tensor:
    """uint8 (B, C, H, W) levels of a normalized batch."""
    means = torch.tensor(mean, dtype=torch.float32)
    deviations = torch.tensor(std, dtype=torch.float32)
    colors = batch * deviations.view(1, -1, 1, 1) + means.view(1, -1, 1, 1)
    levels = (colors * 255).round().clamp(0, 255)
    return levels.to(torch.uint8)
