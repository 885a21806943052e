"""Fill models with the weights in a file, and refuse weights that do not fit."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import timm
import torch
from torch import nn

from vitlens.models.classes import class_count
from vitlens.recorder.supported import family, input_channels, model_name, unwrap

_KERNELS = (
    r"((patch_embed|embeds|patchifier|vision_embed)\.proj|visual\.conv1)\.weight$|embedding/kernel$"
)


def weights_digest(model: nn.Module) -> str:
    """First 12 hexadecimal digits of the SHA-256 of all weights and buffers with their names, sorted by name.

    >>> vitlens.models.weights_digest(model)
    'fcd98dd5565f'
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(unwrap(model).state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def report(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def fill(model: nn.Module, file: Path, kwargs: dict) -> nn.Module:
    """A timm model with the weights in a file, which must be complete."""
    if not file.is_file():
        raise ValueError(f"Found no checkpoint {file}.")
    if file.suffix == ".npz":
        return _fill_from_google(model, file, kwargs)
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            state = timm.models.load_state_dict(str(file), use_ema=True, weights_only=True)
        except Exception as error:
            reason = f"{type(error).__name__}: it is damaged, or holds pickled code"
            raise ValueError(
                f"{file} cannot be read ({reason}). Save the model's state_dict()."
            ) from error
        inside = state.keys()
        with suppress(Exception):  # names only: the weights are read above
            inside = torch.load(file, map_location="cpu", weights_only=True, mmap=True).keys()
    taken = [
        name for name in ("state_dict_ema", "model_ema", "state_dict", "model") if name in inside
    ][:1]
    if isinstance(state.get("teacher"), dict):  # DINO saves a student and its average, the teacher
        state, taken = state["teacher"], ["teacher"]
    convert = next(
        (
            f
            for kind in type(model).__mro__
            if (f := getattr(sys.modules.get(kind.__module__), "checkpoint_filter_fn", None))
        ),
        lambda weights, _: weights,
    )
    heads = tuple(
        f"{name}." for name in np.atleast_1d(model.pretrained_cfg.get("classifier") or "head")
    )
    require_patches(
        {name: value.shape for name, value in state.items() if hasattr(value, "shape")}, model, file
    )
    last = next((name for name in reversed(model.state_dict()) if "blocks." in name), "")
    prefixes = {name.removesuffix(last) for name in state if name.endswith(f".{last}")}
    prefix = next((p for p in prefixes if "teacher." in p), min(prefixes, default=""))
    part = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
    beside = (
        [n for n in state if not n.startswith(tuple(prefixes)) and not _is_head(n)]
        if prefix
        else []
    )
    names = ", ".join(sorted({name.split(".")[0] for name in inside})[:12])
    holds = f"{file} does not hold the weights of {model_name(model)}: it holds {names}"
    try:
        weights = convert(part, model)
        count = len(weights.get(f"{heads[0]}weight", ()))
        holds += f", and its head has {count} classes" if count else ", and no head"
        model = _with_head(model, count, kwargs, file)
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except (RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{holds}. {' '.join(str(error).split())[:300]}") from error
    if wrong := [*missing, *(name for name in unexpected if not _is_head(name)), *beside]:
        raise ValueError(f"{holds}. {len(wrong)} names do not fit, such as {wrong[0]}.")
    taken += [f"without the prefix {prefix}"] if prefix else []
    report(
        f"Took {', '.join(taken) or 'the weights'} of {file}; "
        f"{f'its head has {count} classes' if count else 'it has no head'}."
    )
    return model


def _fill_from_google(model: nn.Module, file: Path, kwargs: dict) -> nn.Module:
    """A timm model with the weights of the paper's authors, in NumPy arrays."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            shapes = {name: arrays[name].shape for name in arrays.files}
        require_patches(shapes, model, file)
        blocks = {match[1] for name in shapes if (match := re.search(r"encoderblock_(\d+)/", name))}
        stacked = [
            shape[0]
            for name, shape in shapes.items()
            if name.endswith("encoderblock/LayerNorm_0/scale")
        ]
        depth = len(blocks) or max(stacked, default=0)
        if depth != len(model.blocks):
            raise ValueError(f"it has {depth} layers, and the model has {len(model.blocks)}")
        count = next(
            (shape[0] for name, shape in shapes.items() if re.search(r"(^|/)head/bias$", name)), 0
        )
        if any("pre_logits" in name for name in shapes):
            count = 0  # timm drops this layer, whose output the head reads
        model = _with_head(model, count, kwargs, file)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)  # timm copies the arrays of the file and skips others
        model.load_pretrained(str(file))
        if missing := [
            name for name, parameter in model.named_parameters() if parameter.isnan().any()
        ]:
            raise ValueError(f"it lacks {', '.join(missing[:3])}")
    except Exception as error:
        raise ValueError(
            f"{file} does not hold the weights of {model_name(model)}: {error}."
        ) from error
    report(
        f"Took the weights of {file}; {f'its head has {count} classes' if count else 'without a head'}."
    )
    return model


def _is_head(name: str) -> bool:
    return re.fullmatch(r"(\w+_)?heads?(_\w+)?|classifier|fc", name.split(".")[0]) is not None


def _with_head(model: nn.Module, count: int, kwargs: dict, file: Path) -> nn.Module:
    """The model with as many classes as the file, because a random head predicts random classes."""
    if (number := kwargs.get("num_classes")) not in (None, 0, count):
        raise ValueError(
            f"{file}: its head has {count} classes, not {number}. Leave num_classes out."
        )
    if number != 0 and count != class_count(model):
        model.reset_classifier(count)
    return model


def require_patches(shapes: dict, model: nn.Module, source: object) -> None:
    """Raise ValueError if weights have another patch size than the model, because timm would resample the filters."""
    built = None
    for name, shape in shapes.items():
        if not re.search(_KERNELS, str(name)) or len(shape) not in (2, 4):
            continue
        built = built or tuple(family(model).embedding.patch_size)
        if len(shape) == 2:  # NaFlex: (D, p·q·C)
            patch = (round((shape[1] / input_channels(model)) ** 0.5),) * 2
        else:
            patch = tuple(shape[:2] if name.endswith("kernel") else shape[2:])
        if patch != built:
            sizes = " and the model ".join(f"{p} × {q}" for p, q in (patch, built))
            raise ValueError(
                f"{source} has patches of {sizes} pixels. Use the architecture of the weights, because "
                "resampled filters differ."
            )
