"""Models of transformers, open_clip and torchvision by their names, each opened by its own library.

A model opened here has a `pretrained_cfg` in timm's words, which says its name and how pictures become inputs.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vitlens.recorder.supported.transformers import MODELS


def of_transformers(name: str, pretrained: bool, local: bool, **kwargs) -> nn.Module:
    """A model of transformers from a repository of the hub, or a folder in its layout. Its weights are safetensors.

    local: only what is on this disk; raises OSError where it is not. kwargs: settings of the configuration. Raises
    ValueError for a class that vitlens does not know, for weights that are not all there, have other sizes or belong to
    more layers, and for a `preprocessor_config.json` with wrong settings. ViTMAE leaves out no patches, and is opened
    without its decoder.
    """
    import transformers

    here = {"local_files_only": local}
    config, kwargs = transformers.AutoConfig.from_pretrained(name, **here, **kwargs, return_unused_kwargs=True)
    said = (config.architectures or [""])[0].replace("ViTMAEForPreTraining", "ViTMAEModel")
    known = sorted(key.rsplit(".", 1)[-1] for key in MODELS)
    if config.model_type == "timm_wrapper":
        raise ValueError(f"{name} is a model of timm, not of transformers. Give it without hf: before it.")
    if said not in known or kwargs:
        wrong = f"setting called {next(iter(kwargs))}" if kwargs else f"class {said or 'that config.json names'}"
        raise ValueError(f"vitlens knows no {wrong} in transformers. It knows the classes {', '.join(known)}.")
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
    kind, processor = getattr(transformers, said), _processor(name, local)
    if not pretrained:
        model = kind._from_config(config, attn_implementation="sdpa")
    else:
        model = _weighted(kind, name, config=config, **here)
    model.pretrained_cfg = {"architecture": Path(name).name} | prepared(processor)
    return model


def _weighted(kind: type, name: str, **given) -> nn.Module:
    """The model with its weights. A pooler without weights is left out: transformers would make it up."""
    given |= {"attn_implementation": "sdpa", "use_safetensors": True, "output_loading_info": True}
    given["ignore_mismatched_sizes"] = True  # they are refused below
    model, told = kind.from_pretrained(name, **given)
    missing = sorted(told["missing_keys"])
    if missing and all(key.startswith("pooler.") for key in missing):
        model, told = kind.from_pretrained(name, **given, add_pooling_layer=False)
        missing = sorted(told["missing_keys"])
    if told["mismatched_keys"]:
        key, *shapes = sorted(told["mismatched_keys"])[0]
        came, wanted = (" × ".join(map(str, shape)) for shape in shapes)
        raise ValueError(
            f"The weights of {name} do not fit its configuration: expected {key} of {wanted}, got {came}. Use the "
            "settings that they were saved with."
        )
    base = f"{kind.base_model_prefix}."  # a model without a head may come from the weights of one with a head
    lists = [path.removeprefix(base) for path, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    inside = tuple(f"{path}." for path in lists)
    beyond = sorted(key for key in told["unexpected_keys"] if key.removeprefix(base).startswith(inside))
    if beyond:
        raise ValueError(
            f"{name} has weights that its configuration leaves no place for, such as {beyond[0]}. Use the settings "
            "that they were saved with."
        )
    if missing:
        raise ValueError(
            f"{name} has no weights for {len(missing)} parts of {kind.__name__}, such as {missing[0]}. Download it "
            "again, or open it with transformers itself if these are meant to be random."
        )
    return model


def _processor(name: str, local: bool) -> dict:
    """What `preprocessor_config.json` says; nothing where there is none. Raises ValueError for wrong settings."""
    from transformers.utils import cached_file

    path = cached_file(
        name, "preprocessor_config.json", local_files_only=local,
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    if not path:
        return {}
    try:
        said = json.loads(Path(path).read_text(encoding="utf-8"))
        require_settings(said, path)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not the settings of an image processor ({type(error).__name__}: {error}). Correct it, or "
            "download it again."
        ) from error
    return said


def _number(value: object, above: float = -math.inf) -> bool:
    return isinstance(value, int | float) and above < value < math.inf


def _numbers(value: object, above: float = -math.inf) -> bool:
    return isinstance(value, list) and all(_number(each, above) for each in value)


def _pixels(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _size(value: object) -> bool:
    if isinstance(value, list):
        return len(value) == 2 and all(map(_pixels, value))
    sides = _sides(value)
    return all(map(_pixels, sides.values())) and ("height" in sides) == ("width" in sides)


def _sides(size: object) -> dict:
    """The sides that a size names: height and width, or the shortest or longest edge."""
    if isinstance(size, dict):
        return {name: side for name, side in size.items() if side is not None}
    return dict(zip(("height", "width"), size if isinstance(size, list) else (size, size), strict=True))


_MEANS = ("a list of numbers, one for each channel", _numbers)
_DEVIATIONS = ("a list of positive numbers, one for each channel", partial(_numbers, above=0))
_SIZES = ("a positive number of pixels, or sides by their names, such as height and width", _size)
_FILTERS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_SETTINGS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "mean": _MEANS, "std": _DEVIATIONS, "image_mean": _MEANS, "image_std": _DEVIATIONS,
    "input_size": ("three positive whole numbers: channels, height and width",
                   lambda value: isinstance(value, list) and len(value) == 3 and all(map(_pixels, value))),
    "crop_pct": ("a positive number", partial(_number, above=0)),
    "interpolation": (f"one of {', '.join(_FILTERS)}", _FILTERS.__contains__),
    "size": _SIZES, "crop_size": _SIZES,
    "resample": (f"a number from 0 to 5, or one of {', '.join(_FILTERS)}", (*range(6), *_FILTERS).__contains__),
}  # fmt: skip
"""What timm's `config.json` and transformers' `preprocessor_config.json` say of inputs: what is wanted, and whether a
value is that."""


def require_settings(said: dict, file: object) -> None:
    """Raise ValueError for a wrong setting of `preprocess` in a file."""
    for key, (wanted, fits) in _SETTINGS.items():
        if said.get(key) is not None and not fits(said[key]):
            raise ValueError(f"{key} in {file} must be {wanted}, but is {said[key]!r}. Correct it, or leave it out.")


def prepared(processor: dict) -> dict:
    """What `preprocessor_config.json` says, as the settings of a timm transform."""
    from PIL.Image import Resampling

    size, crop = (_sides(processor.get(key) or {}) for key in ("size", "crop_size"))
    cropped = crop if "height" in crop and processor.get("do_center_crop") else None
    if "shortest_edge" in size:
        shown = cropped or {"height": size["shortest_edge"], "width": size["shortest_edge"]}
        mode, part = "center", min(shown.values()) / size["shortest_edge"]
    elif "height" in size:
        shown, mode = cropped or size, "squash"
        part = shown["height"] / size["height"]
    else:
        shown, mode, part = None, "center", 1.0
    said = {"crop_mode": mode, "crop_pct": part}
    said |= {key: tuple(processor[f"image_{key}"]) for key in ("mean", "std") if processor.get(f"image_{key}")}
    if shown:
        said["input_size"] = (len(said.get("mean", (0, 0, 0))), shown["height"], shown["width"])
    resample = processor.get("resample")
    if resample is not None:
        said["interpolation"] = resample if isinstance(resample, str) else Resampling(resample).name.lower()
    return said


def of_torchvision(name: str, pretrained: bool, local: bool, **kwargs) -> nn.Module:
    """A Vision Transformer of torchvision by its name, with the weights torchvision calls its default ones, or those of
    the name after a slash ("vit_b_16/IMAGENET1K_SWAG_E2E_V1").

    local: only what is on this disk; raises OSError where it is not. Raises ValueError for an unknown name.
    """
    from torch import hub
    from torchvision import models

    name, _, tag = name.partition("/")
    known = [each for each in models.list_models() if each.startswith("vit_")]
    if name not in known:
        raise ValueError(f"torchvision has no Vision Transformer called {name}. It has {', '.join(known)}.")
    weights = models.get_model_weights(name)
    if tag and tag not in weights.__members__:
        raise ValueError(f"torchvision has no weights {tag} of {name}. It has {', '.join(weights.__members__)}.")
    chosen = (weights[tag] if tag else weights.DEFAULT) if pretrained else None
    if chosen is not None and local and not (Path(hub.get_dir()) / "checkpoints" / Path(chosen.url).name).is_file():
        raise OSError(f"{chosen.url} is not on this disk")
    model = models.get_model(name, weights=chosen, **kwargs)
    model.pretrained_cfg = {"architecture": name}
    if chosen is not None:
        shown = chosen.transforms()
        model.label_names = chosen.meta["categories"]
        model.pretrained_cfg |= {
            "mean": tuple(shown.mean), "std": tuple(shown.std), "interpolation": shown.interpolation.value,
            "input_size": (3, shown.crop_size[0], shown.crop_size[0]),
            "crop_pct": shown.crop_size[0] / shown.resize_size[0],
        }  # fmt: skip
    return model


def of_open_clip(name: str, pretrained: bool, local: bool, **kwargs) -> nn.Module:
    """A CLIP of open_clip by the name of its architecture and, after a slash, that of its weights.

    local: only what is on this disk; raises OSError where it is not. Raises ValueError for names that open_clip does
    not have.
    """
    import open_clip

    name, _, tag = name.partition("/")
    if name not in open_clip.list_models():
        raise ValueError(f"open_clip has no model called {name}; open_clip.list_models() gives all.")
    tags = open_clip.list_pretrained_tags_by_model(name)
    if pretrained and tag not in tags:
        if not tags:
            raise ValueError(f"open_clip has no weights of {name}. In Python, pretrained=False gives random ones.")
        came = f"no weights called {tag}" if tag else "several weights"
        raise ValueError(f"open_clip has {came} of {name}. Name one of them: {', '.join(f'{name}/{t}' for t in tags)}.")
    if pretrained and local:
        from huggingface_hub import try_to_load_from_cache

        repository = open_clip.get_pretrained_cfg(name, tag).get("hf_hub", "").rstrip("/")
        files = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
        if not any(isinstance(try_to_load_from_cache(repository, file), str) for file in files if repository):
            raise OSError(f"the weights {tag} are not on this disk")
    before = logging.root.manager.disable
    logging.disable(before if pretrained else logging.WARNING)  # it warns that random weights are random
    try:
        here = {"device": torch.empty(0).device}  # open_clip moves what it builds, also off the meta device
        model = open_clip.create_model(name, pretrained=tag if pretrained else None, **here | kwargs)
    finally:
        logging.disable(before)
    model.pretrained_cfg = {"architecture": name}
    return model


@dataclass(frozen=True)
class Library:
    """Where models come from by name. extra: of vitlens, that installs it; "" for what vitlens needs anyway. open: a
    function (name, pretrained, local, **kwargs) that returns a model, and raises OSError where it cannot be reached."""

    name: str
    extra: str
    open: Callable[..., nn.Module]


LIBRARIES = {
    "hf": Library("transformers", "transformers", of_transformers),
    "open_clip": Library("open_clip", "openclip", of_open_clip),
    "torchvision": Library("torchvision", "", of_torchvision),
}
"""By what stands before the colon in a name, as in "hf:facebook/dinov2-small"."""
