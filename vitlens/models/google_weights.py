"""Weights of the paper's authors, in files of NumPy arrays (.npz)."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlens.models.classes import class_count
from vitlens.models.conversion import compare
from vitlens.models.patch_sizes import require_patches
from vitlens.recorder.supported import model_name


def fill_from_google(
    model: nn.Module, file: Path, arrays: dict[str, Tensor], kwargs: dict
) -> tuple[int, list[str]]:
    """Copy the arrays of a file into a timm model. Returns its number of classes, 0 without a head, and notes.

    kwargs: of the model's constructor. Raises ValueError for arrays that do not fit.
    """
    try:
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        require_patches(shapes, model, file)
        depth = _depth(shapes)
        if depth != len(model.blocks):
            raise ValueError(f"it has {depth} layers, and the model has {len(model.blocks)}")
        count = _classes(shapes)
        _reset_head(model, count, kwargs, file)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)  # timm copies the arrays of the file and skips others
        model.load_pretrained(str(file))
        state = model.state_dict()
        missing = [name for name, value in state.items() if value.isnan().any()]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing[:3])}")
        arrival = compare(_by_layer(arrays), state)
        resampled = [name for name in arrival.changed if "pos_embed" in name]
        if "img_size" not in kwargs and resampled:
            raise ValueError(
                f"its positions would be resampled to {tuple(state[resampled[0]].shape)}. Use the architecture of its "
                "image size, or give img_size"
            )
        changed = [name for name in arrival.changed if name not in resampled]
        if changed:
            raise ValueError(f"{len(changed)} tensors would be changed, such as {changed[0]}")
    except Exception as error:
        raise ValueError(
            f"{file} does not hold the weights of {model_name(model)}: {error}."
        ) from error
    notes = [f"{name} is resampled for the image size that you gave." for name in resampled]
    lost = [name for name in arrival.lost if "pos_embed" not in name]
    if lost:
        notes.append(f"Left out: {', '.join(lost[:8])}{' …' if len(lost) > 8 else ''}.")
    return count, notes


def _by_layer(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays with the number of their layer between dots, and one array a layer."""
    separate = {}
    for name, array in arrays.items():
        if "encoderblock/" in name:
            for number, part in enumerate(array):
                separate[f"{number}.{name}"] = part
        else:
            separate[re.sub(r"^(.*encoderblock_(\d+)/)", r"\2.\1", name)] = array
    return separate


def _reset_head(model: nn.Module, count: int, kwargs: dict, file: Path) -> None:
    """Give the model as many classes as the file, because a random head predicts random classes."""
    number = kwargs.get("num_classes")
    if number not in (None, 0, count):
        raise ValueError(f"its head has {count} classes, not {number}. Leave num_classes out")
    if number != 0 and count != class_count(model):
        model.reset_classifier(count)


def _depth(shapes: dict) -> int:
    """Number of layers in a file, which has an array a layer, or all layers in one array."""
    blocks = set()
    stacked = [0]
    for name, shape in shapes.items():
        block = re.search(r"encoderblock_(\d+)/", name)
        if block:
            blocks.add(block[1])
        if name.endswith("encoderblock/LayerNorm_0/scale"):
            stacked.append(shape[0])
    return len(blocks) or max(stacked)


def _classes(shapes: dict) -> int:
    """Number of classes of the head in a file, 0 without a head."""
    if any("pre_logits" in name for name in shapes):
        return 0  # timm drops this layer, whose output the head reads
    for name, shape in shapes.items():
        if re.search(r"(^|/)head/bias$", name):
            return shape[0]
    return 0
