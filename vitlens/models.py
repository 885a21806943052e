"""Open models, name their classes, and show them pictures.

A model is timm's by name, or a local folder in timm's own hub layout; no pickled code is ever run. Pictures are made
ready by timm's own evaluation transform, and its inverse gives them back.

Shapes: B batch, C channels, H height and W width in pixels.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from vitlens.files import announce, reach
from vitlens.images import MAX_ELONGATION, ImageError, load_image
from vitlens.recorder.families import model_name, timm_name, unwrap, within


def load_model(name_or_path: str | os.PathLike, *, pretrained: bool = True, **kwargs) -> nn.Module:
    """A timm model in eval mode.

    name_or_path: a timm name such as "vit_tiny_patch16_224" (weights come from timm's hub, unless
    `pretrained=False`), or a folder with `config.json` and `model.safetensors` in timm's hub layout, as `vitlens train`
    and timm's `push_to_hf_hub` write it. kwargs go to the model's constructor (`dynamic_img_size=True`, `img_size=…`).
    Class names, where the folder has them, are the model's `label_names`.

    Raises ValueError for an unknown name, a folder that is not a model, or weights that do not fit; ConnectionError
    where the hub cannot be reached.
    """
    name = str(name_or_path).removeprefix("local-dir:")
    if not name or name.startswith(("hf-hub:", "hf_hub:", "timm/")):
        raise ValueError(
            f"Expected a timm name such as vit_tiny_patch16_224.augreg_in21k_ft_in1k, or a folder, got {name!r}. "
            "For a model of the hub give its timm name, or download its folder."
        )
    path = Path(name)
    if path.is_dir() or path.name in ("config.json", "model.safetensors"):
        return _open_folder(path if path.is_dir() else path.parent, pretrained, kwargs)
    if os.sep in name or name.startswith(".") or name.endswith((".safetensors", ".pth", ".pt", ".bin")):
        raise ValueError(
            f"There is no model folder {name}. Give a folder with config.json and model.safetensors, or a timm name."
        )
    if not timm.is_model(name.split(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise ValueError(f"timm {timm.__version__} has no model called {name}, and there is no such folder.{hint}")
    try:
        place = _place_to_fetch_to(name) if pretrained else None
        model = timm.create_model(name, pretrained=pretrained, **kwargs)
    except Exception as error:
        raise _creation_error(name, pretrained, error) from error
    if place:
        announce(f"Fetched the weights of {name}", place)
    return model.eval()


def _open_folder(folder: Path, pretrained: bool, kwargs: dict) -> nn.Module:
    for file in (folder / "config.json", folder / "model.safetensors"):
        if not file.is_file():
            raise ValueError(
                f"The folder {folder} is not a model: it has no {file.name}. A model folder holds config.json and "
                "model.safetensors; pickled weights (.bin, .pth) are not opened."
            )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names = config.get("label_names") or (config.get("pretrained_cfg") or {}).get("label_names")
        architecture = config["architecture"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / 'config.json'} is not a model's configuration, which names at least an architecture "
            f"({type(error).__name__}: {error})."
        ) from error
    if timm.models.parse_model_name(f"local-dir:{folder}")[1] != str(folder):  # before 1.0.30 it reads an address
        raise ValueError(f"timm {timm.__version__} opens no folder with # or ? in its path, as in {folder}; rename it.")
    # Named, because timm before 1.0.29 may take other weights in the folder for the model's, pickled ones too.
    weights = {"source": "", "file": str(folder / "model.safetensors"), "custom_load": False}
    weights = kwargs.pop("pretrained_cfg_overlay", {}) | weights
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained, pretrained_cfg_overlay=weights, **kwargs)
    except Exception as error:
        reason = _one_line(error)
        raise ValueError(f"timm {timm.__version__} cannot open {architecture} from {folder}: {reason}.") from error
    if names and ("num_classes" not in kwargs or len(names) == model.num_classes):  # not those of another head
        model.label_names = _ordered(names, model.num_classes, folder)
    return model.eval()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def _ordered(names: list | dict, count: int, folder: Path) -> list[str]:
    """Class names in the order of the classes; some publishers write {"0": "tench", …}."""
    if isinstance(names, dict) and set(names) == {str(i) for i in range(len(names))}:
        names = [names[str(i)] for i in range(len(names))]
    if not isinstance(names, list) or len(names) != count:
        raise ValueError(
            f"label_names in {folder / 'config.json'} must be a list of {count} names, one for each class, but is "
            f"{type(names).__name__} of length {len(names)}. Correct it, or leave it out."
        )
    return [str(name) for name in names]


def _place_to_fetch_to(name: str) -> str | None:
    """The hub's cache if the weights are not in it yet. Raises OSError at once if the hub is out of reach."""
    from huggingface_hub import constants, try_to_load_from_cache

    config = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    repository = (config.hf_hub_id or "") if config else ""
    if not repository or config.file:
        return None
    repository = f"timm/{config.architecture}.{config.tag}" if repository == "timm/" else repository
    if isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
        return None
    reach()
    return constants.HF_HUB_CACHE


def _creation_error(name: str, pretrained: bool, error: Exception) -> Exception:
    """What timm or the hub raised, as one sentence that says what to do."""
    text = _one_line(error)
    if pretrained and isinstance(error, OSError) or _is_hub_error(error):
        return ConnectionError(
            f"The pre-trained weights of {name} could not be fetched from the hub ({type(error).__name__}). Check the "
            "network, open a folder on disk, or ask for random weights with pretrained=False."
        )
    if pretrained and ("No pretrained weights" in text or "Invalid pretrained tag" in text):
        tags = ", ".join(timm.list_pretrained(name.split(".")[0] + "*")[:4])
        remedy = f"There are: {tags}." if tags else "Ask for random weights with pretrained=False."
        return ValueError(f"timm has no pre-trained weights called {name}. {remedy}")
    return ValueError(f"timm could not build {name}: {text}.")


def _is_hub_error(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, comes from the libraries that fetch weights."""
    libraries = ("huggingface_hub", "requests", "httpx", "urllib", "urllib3", "httpcore")
    while error is not None:
        if type(error).__module__.split(".")[0] in libraries:
            return True
        error = error.__cause__ or error.__context__
    return False


def architecture(model: nn.Module) -> str:
    """What to call a model in a figure: its timm architecture, or else its class.

    Sizes follow where they are not those in timm's name, as of vit_tiny_patch16_224 with patches of 8 pixels.
    """
    name, embed = timm_name(model), getattr(model, "patch_embed", None)
    sizes = ((r"patch(\d+)", "patch_size", "patch {}"), (r"_(\d{2,4})$", "img_size", "{} px"))
    parts = [name]
    for pattern, attribute, words in sizes:
        said, built = re.search(pattern, name), getattr(embed, attribute, None)
        if said and built and tuple(built) != (int(said[1]),) * 2:
            parts.append(words.format(" × ".join(map(str, dict.fromkeys(built)))))
    return ", ".join(parts)


def class_count(model: nn.Module) -> int | None:
    """Number of classes: the head's outputs, or `num_classes` where the head does not say; None where neither does.

    0 for a model whose output is features. The head is asked first, as it may have been replaced.
    """
    model = unwrap(model)
    said = getattr(model, "num_classes", None)
    if not hasattr(model, "get_classifier"):
        return said
    heads = model.get_classifier()
    layers = [layer for head in (heads if isinstance(heads, tuple | list) else [heads]) for layer in head.modules()]
    if all(isinstance(layer, nn.Identity | nn.Sequential | nn.Dropout | nn.ModuleList) for layer in layers):
        return 0
    widths = [getattr(layer, "out_features", getattr(layer, "out_channels", None)) for layer in layers]
    return next((width for width in reversed(widths) if width), said)


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
    names = getattr(model, "label_names", None)
    if names is None and count is not None:
        model = within(model)  # a wrapper has the names of its model, if there are as many
        names = getattr(model, "label_names", None)
    classes = class_count(model)
    count = classes if count is None else count
    if names is None and count == classes == 1000:
        from timm.data import ImageNetInfo

        info = ImageNetInfo()
        names = [info.index_to_description(i) for i in range(1000)]
    return names if names is not None and count in (None, len(names)) else None


def top_classes(model: nn.Module, logits: Tensor, k: int = 5) -> list[list[tuple[str, float]]]:
    """The k likeliest classes for each row of (B, classes) logits: (name or number, probability).

    Raises ValueError for logits of another shape, and for a model without a classifier.
    """
    require_classes(model)
    if logits.dim() != 2:
        raise ValueError(f"Expected logits of shape (B, classes), got {tuple(logits.shape)}.")
    names = label_names(model, logits.shape[-1])
    probabilities, classes = logits.float().softmax(-1).topk(min(k, logits.shape[-1]))
    return [
        [(names[c] if names else str(c), p) for c, p in zip(cs, ps, strict=True)]
        for cs, ps in zip(classes.tolist(), probabilities.tolist(), strict=True)
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
    config = _data_config(model, size)
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
    model = within(model)
    embed = getattr(model, "embeds", None) or getattr(model, "patch_embed", None)
    size = getattr(embed, "img_size", None)
    return size and tuple(size)


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
    return Pixels(create_transform(**_data_config(model), is_training=False, use_prefetcher=True))


def restore(model: nn.Module, batch: Tensor) -> np.ndarray:
    """The pictures in a preprocessed `batch` (B, C, H, W) as uint8 (B, H, W, 3): what `model` really sees.

    Undoes the normalization of `preprocess` to within one level; resizing and cropping stay. Gray is repeated over the
    three channels, and values that no picture has, as in a perturbed batch, become 0 or 255.
    Raises `ImageError` if the shape is not that of a batch for this model.
    """
    config = _data_config(model)
    channels = config["input_size"][0]
    if batch.ndim != 4 or batch.shape[1] != channels:
        raise ImageError(
            f"Expected a batch of shape (B, {channels}, H, W), got {tuple(batch.shape)}. Give what `preprocess` makes."
        )
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
        raise ImageError(f"Expected a model with 1 or 3 input channels, got one with {channels}.")
    if size is not None:
        if not isinstance(size, (tuple, list)) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise ImageError(f"Expected a size (height, width) of two positive integers, got {size!r}.")
        height, width = size
    if channels == 1:
        config.update({key: (float(np.mean(config[key])),) for key in ("mean", "std")})
    return config | {"input_size": (channels, height, width)}
