"""Fill models with the weights in a file, and refuse weights that do not fit."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm
import torch
from torch import nn

from vitlens.models.classes import class_count
from vitlens.recorder.supported import family, input_channels, model_name, unwrap

_FILTERS = (
    r"((patch_embed|embeds|patchifier|vision_embed)\.proj|visual\.conv1)\.weight$|embedding/kernel$"
)
"""Names of the weights that embed patches, as a regular expression."""

_PREFERRED = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Names of the weights in a checkpoint of a training program, in the order in which timm takes them."""


def weights_digest(model: nn.Module) -> str:
    """First 12 hexadecimal digits of the SHA-256 of all weights and buffers with their names, sorted by name.

    >>> vitlens.models.weights_digest(model)
    'fcd98dd5565f'
    """
    digest = hashlib.sha256()
    state = unwrap(model).state_dict()
    for name, tensor in sorted(state.items()):
        values = tensor.cpu().contiguous().flatten()
        in_bytes = values.view(torch.uint8).numpy()
        digest.update(name.encode())
        digest.update(in_bytes.tobytes())
    return digest.hexdigest()[:12]


def print_note(sentence: str) -> None:
    """Print a sentence to the standard error, so that tables on the standard output stay clean."""
    print(sentence, file=sys.stderr, flush=True)


def fill(model: nn.Module, file: Path, kwargs: dict) -> nn.Module:
    """A timm model with the weights in a file, which must be complete."""
    if not file.is_file():
        raise ValueError(f"Found no checkpoint {file}.")
    if file.suffix == ".npz":
        return _fill_from_google(model, file, kwargs)
    state, parts = _read(file)
    taken = [name for name in _PREFERRED if name in parts][:1]
    if isinstance(state.get("teacher"), dict):  # DINO saves a student and its average, the teacher
        state = state["teacher"]
        taken = ["teacher"]
    shapes = {name: value.shape for name, value in state.items() if hasattr(value, "shape")}
    require_patches(shapes, model, file)

    prefixes = _prefixes(model, state)
    prefix = prefixes[0] if prefixes else ""
    own = {}
    misplaced = []
    for name, value in state.items():
        if name.startswith(prefix):
            own[name.removeprefix(prefix)] = value
        elif not name.startswith(prefixes) and not _is_head(name):
            misplaced.append(name)

    first_parts = {name.split(".")[0] for name in parts}
    names = ", ".join(sorted(first_parts)[:12])
    mismatch = f"{file} does not hold the weights of {model_name(model)}: it holds {names}"
    convert = _checkpoint_filter(model)
    try:
        weights = convert(own, model) if convert else own
        head_name = _head_name(model)
        head_weight = weights.get(f"{head_name}.weight", ())
        count = len(head_weight)
        mismatch += f", and its head has {count} classes" if count else ", and no head"
        model = _with_head(model, count, kwargs, file)
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except (RuntimeError, KeyError, AttributeError, TypeError) as error:
        words = str(error).split()
        text = " ".join(words)[:300]
        raise ValueError(f"{mismatch}. {text}") from error
    unexpected = [name for name in unexpected if not _is_head(name)]
    wrong = missing + unexpected + misplaced
    if wrong:
        raise ValueError(f"{mismatch}. {len(wrong)} names do not fit, such as {wrong[0]}.")

    if prefix:
        taken.append(f"without the prefix {prefix}")
    source = ", ".join(taken) or "the weights"
    head = f"its head has {count} classes" if count else "it has no head"
    print_note(f"Took {source} of {file}; {head}.")
    return model


def _read(file: Path) -> tuple[dict, list[str]]:
    """The weights in a file, averaged ones if it has them, and the names of all that it holds."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            state = timm.models.load_state_dict(str(file), use_ema=True, weights_only=True)
        except Exception as error:
            reason = f"{type(error).__name__}: it is damaged, or holds pickled code"
            raise ValueError(
                f"{file} cannot be read ({reason}). Save the model's state_dict()."
            ) from error
        try:  # names only: the weights are read above
            whole = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            return state, list(whole.keys())
        except Exception:  # a file that only timm reads, such as safetensors
            return state, list(state)


def _prefixes(model: nn.Module, state: dict) -> tuple[str, ...]:
    """Prefixes, such as "module.", with which a checkpoint holds the blocks of a model. DINO's teacher is the first."""
    blocks = [name for name in model.state_dict() if "blocks." in name]
    if not blocks:
        return ()
    last = blocks[-1]
    prefixes = {name.removesuffix(last) for name in state if name.endswith(f".{last}")}
    ordered = sorted(prefixes)
    ordered.sort(key=lambda prefix: "teacher." not in prefix)
    return tuple(ordered)


def _checkpoint_filter(model: nn.Module) -> Callable[[dict, nn.Module], dict] | None:
    """timm's function that converts published weights for the class of a model, or None."""
    for kind in type(model).__mro__:
        module = sys.modules.get(kind.__module__)
        convert = getattr(module, "checkpoint_filter_fn", None)
        if convert:
            return convert
    return None


def _head_name(model: nn.Module) -> str:
    """Name of the classifier, the first of two in a distilled model."""
    classifier = model.pretrained_cfg.get("classifier") or "head"
    return classifier if isinstance(classifier, str) else classifier[0]


def _fill_from_google(model: nn.Module, file: Path, kwargs: dict) -> nn.Module:
    """A timm model with the weights of the paper's authors, in NumPy arrays."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            shapes = {name: arrays[name].shape for name in arrays.files}
        require_patches(shapes, model, file)
        depth = _google_depth(shapes)
        if depth != len(model.blocks):
            raise ValueError(f"it has {depth} layers, and the model has {len(model.blocks)}")
        count = _google_classes(shapes)
        model = _with_head(model, count, kwargs, file)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)  # timm copies the arrays of the file and skips others
        model.load_pretrained(str(file))
        missing = [name for name, value in model.named_parameters() if value.isnan().any()]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing[:3])}")
    except Exception as error:
        raise ValueError(
            f"{file} does not hold the weights of {model_name(model)}: {error}."
        ) from error
    head = f"its head has {count} classes" if count else "without a head"
    print_note(f"Took the weights of {file}; {head}.")
    return model


def _google_depth(shapes: dict) -> int:
    """Number of layers in a file of the paper's authors, which has an array a layer, or all layers in one array."""
    blocks = set()
    stacked = [0]
    for name, shape in shapes.items():
        block = re.search(r"encoderblock_(\d+)/", name)
        if block:
            blocks.add(block[1])
        if name.endswith("encoderblock/LayerNorm_0/scale"):
            stacked.append(shape[0])
    return len(blocks) or max(stacked)


def _google_classes(shapes: dict) -> int:
    """Number of classes of the head in a file of the paper's authors, 0 without a head."""
    if any("pre_logits" in name for name in shapes):
        return 0  # timm drops this layer, whose output the head reads
    for name, shape in shapes.items():
        if re.search(r"(^|/)head/bias$", name):
            return shape[0]
    return 0


def _is_head(name: str) -> bool:
    module = name.split(".")[0]
    match = re.fullmatch(r"(\w+_)?heads?(_\w+)?|classifier|fc", module)
    return match is not None


def _with_head(model: nn.Module, count: int, kwargs: dict, file: Path) -> nn.Module:
    """The model with as many classes as the file, because a random head predicts random classes."""
    number = kwargs.get("num_classes")
    if number not in (None, 0, count):
        raise ValueError(
            f"{file}: its head has {count} classes, not {number}. Leave num_classes out."
        )
    if number != 0 and count != class_count(model):
        model.reset_classifier(count)
    return model


def require_patches(shapes: dict, model: nn.Module, source: object) -> None:
    """Raise ValueError if weights have another patch size than the model, because timm would resample the filters.

    shapes: of the weights by name. source: the file or name of the weights, for the message.
    """
    filters = {}
    for name, shape in shapes.items():
        embeds_patches = re.search(_FILTERS, str(name))
        if embeds_patches and len(shape) in (2, 4):
            filters[name] = tuple(shape)
    if not filters:
        return
    height, width = family(model).embedding.patch_size
    channels = input_channels(model)
    for name, shape in filters.items():
        p, q = _patch_size(name, shape, channels)
        if (p, q) != (height, width):
            raise ValueError(
                f"{source} has patches of {p} × {q} and the model {height} × {width} pixels. Use the architecture of "
                "the weights, because resampled filters differ."
            )


def _patch_size(name: str, shape: tuple[int, ...], channels: int) -> tuple[int, int]:
    """(height, width) in pixels of the patches that a filter with this name and shape embeds."""
    if len(shape) == 2:  # NaFlex: (D, p·q·C)
        pixels = shape[1] / channels
        side = round(pixels**0.5)
        return side, side
    if name.endswith("kernel"):  # (p, q, C, D)
        return shape[:2]
    return shape[2:]
