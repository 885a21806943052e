"""Compare the settings that a training program stored in a checkpoint with those of the model in use."""

from __future__ import annotations

import contextlib
import re

import numpy as np
from torch import nn

from vitlens.models.patch_sizes import patch_size
from vitlens.recorder.supported import family, input_channels, short_name

_PREPROCESSING = ("mean", "std", "interpolation", "crop_pct")
"""Settings of timm's preprocessing that training programs store."""

_NAMES = (
    "class_names",
    "label_names",
    "classes",
    "labels",
    "idx_to_class",
    "class_to_idx",
    "id2label",
)
"""Settings with the names of the classes."""


def setting_notes(
    model: nn.Module, settings: dict[str, object], classes: int, size_option: str, path: str
) -> list[str]:
    """Notes about settings of a checkpoint that contradict the model or its preprocessing.

    settings: by name. classes: of the head. size_option: argument for the image size. path: of the model in the file.
    """
    notes = []
    for name, stated, used, option in _pairs(model, settings, classes, size_option):
        if not _agree(stated, used):
            notes.append(
                f"The file states {name} {_words(stated)}, and the model in use has {_words(used)}. "
                f"In Python, {option} changes it."
            )
    notes += _architecture_notes(model, settings, path)
    return notes


def _pairs(model: nn.Module, settings: dict, classes: int, size_option: str) -> list[tuple]:
    """(name, value in the file, value in use, option) of the settings that the file states."""
    used: dict[str, tuple[object, str]] = {}
    adapter = family(model)
    config = adapter.preprocessing
    size = adapter.built_size or tuple(config["input_size"][1:])
    for name in ("img_size", "image_size", "input_size", "crop_size", "img_sz", "resolution"):
        used[name] = (size, f"{size_option}=…")
    for name in _PREPROCESSING:
        used[name] = (config[name], f'pretrained_cfg_overlay={{"{name}": …}}')
    for name in ("in_chans", "num_channels", "in_channels"):
        used[name] = (input_channels(model), f"{name}=…")
    heads = _attention_heads(model)
    for name in ("num_heads", "n_heads", "num_attention_heads"):
        if heads:
            used[name] = (heads, f"{name}=…")
    pool = getattr(model, "global_pool", None)
    if isinstance(pool, str):
        used["global_pool"] = (pool, "global_pool=…")
        used["gp"] = (pool, "global_pool=…")
    epsilon = _epsilon(model)
    for name in ("layer_norm_eps", "norm_eps", "ln_eps"):
        if epsilon:
            used[name] = (epsilon, "norm_layer=…")
    patch = patch_size(model)
    used["patch_size"] = (tuple(patch), "patch_size=…")
    if classes:
        for name in ("num_classes", "nb_classes", "num_labels", "n_classes"):
            used[name] = (classes, "head=…")
    activation = _activation(model)
    for name in ("act_layer", "hidden_act", "activation"):
        if activation and isinstance(settings.get(name), str):
            used[name] = (activation, "act_layer=…")
    for name in ("force_quick_gelu", "quick_gelu"):
        if settings.get(name) is True:
            used[name] = (activation == "quickgelu", "the architecture with quickgelu in its name")
    pairs = []
    for name, (value, option) in used.items():
        if name in settings:
            pairs.append((name, settings[name], value, option))
    return pairs


def _agree(stated: object, used: object) -> bool:
    """True for equal settings, and for settings that cannot be compared."""
    if isinstance(stated, bool) or isinstance(used, bool):
        return isinstance(used, bool) and bool(stated) == used or isinstance(used, str)
    if isinstance(stated, str) and isinstance(used, str):
        plain = [re.sub(r"[_\W]|activation|layer", "", word.lower()) for word in (stated, used)]
        if plain[0] == "random":
            return True
        return plain[0] == plain[1]
    try:
        first = np.atleast_1d(np.asarray(stated, dtype=float)).ravel()
        second = np.atleast_1d(np.asarray(used, dtype=float)).ravel()
    except (TypeError, ValueError):
        return True
    if first.size == 3 and second.size == 2:
        first = first[1:]  # channels, height, width
    if 1 not in (first.size, second.size) and first.size != second.size:
        return True
    first, second = np.broadcast_arrays(first, second)
    return bool(np.allclose(first, second, rtol=1e-3, atol=1e-9))


def _words(value: object) -> str:
    """A setting in a sentence."""
    if isinstance(value, tuple | list) and value and all(isinstance(x, int | float) for x in value):
        numbers = [f"{x:g}" for x in value]
        same = len(set(numbers)) == 1
        return numbers[0] if same else f"({', '.join(numbers)})"
    return str(value)


def _attention_heads(model: nn.Module) -> int | None:
    """Number of attention heads of the first layer, or None if it cannot be told."""
    with contextlib.suppress(Exception):
        for _, module in family(model).attention()[0]:
            heads = getattr(module, "num_heads", None) or getattr(
                module, "num_attention_heads", None
            )
            if isinstance(heads, int):
                return heads
    return None


def _epsilon(model: nn.Module) -> float | None:
    """Epsilon of the first norm of the blocks."""
    for block in family(model).blocks:
        for module in block.modules():
            if isinstance(module, nn.LayerNorm):
                return module.eps
    return None


def _activation(model: nn.Module) -> str:
    """Name of the activation in the first MLP, such as "gelu" or "quickgelu", or ""."""
    for block in family(model).blocks:
        for module in block.modules():
            name = type(module).__name__.lower().removesuffix("activation")
            if re.search(r"elu$|silu|tanh|swish|mish", name):
                return name
    return ""


def _architecture_notes(model: nn.Module, settings: dict, path: str) -> list[str]:
    """Notes about an architecture that the file names, and about the number of heads, which is in no tensor."""
    notes = []
    opened = short_name(model)
    named = ""
    for key in ("arch", "architecture", "model_name", "model", "model_type"):
        value = settings.get(key)
        if (
            not named
            and isinstance(value, str)
            and re.search(r"(?i)vit|deit|beit|eva|dino|clip", value)
        ):
            named = value
    if named:
        ours, theirs = (_plain_name(name) for name in (opened, named))
        if ours not in theirs and theirs not in ours and not _words_of(theirs) <= _words_of(ours):
            notes.append(f"The file names the architecture {named}, and it is opened as {opened}.")
    heads = _attention_heads(model)
    is_moco = "base_encoder" in path or (named == "vit_small" and "teacher" not in path)
    if heads == 6 and is_moco and "num_heads" not in settings:
        notes.append(
            "The number of heads is in no tensor. MoCo v3's vit_small has 12 heads, and this model has 6: give "
            "num_heads=12 in Python for weights of MoCo v3."
        )
    is_clip = type(model).__module__.startswith("open_clip") or "clip" in opened.lower()
    if (
        is_clip
        and _activation(model) == "gelu"
        and settings.get("quick_gelu") is None
        and settings.get("force_quick_gelu") is None
    ):
        note = quickgelu_note(opened)
        if note:
            notes.append(note)
    return notes


def _plain_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().split(".")[0].split("/")[-1])


def _words_of(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|\d+", name))


def quickgelu_note(architecture: str) -> str:
    """Note that the activation is in no tensor, for an architecture of CLIP that has a twin with QuickGELU, or "".

    >>> quickgelu_note("vit_base_patch16_224")
    ''
    """
    twin = quickgelu_twin(architecture)
    if not twin:
        return ""
    return (
        "The activation is in no tensor. For weights that were trained with QuickGELU, as OpenAI's, open "
        f"{twin}."
    )


def quickgelu_twin(architecture: str) -> str:
    """Name of the architecture that differs from a CLIP of timm or open_clip by QuickGELU, or "".

    >>> quickgelu_twin("vit_base_patch32_clip_224")
    'vit_base_patch32_clip_quickgelu_224'
    """
    import timm

    name = architecture.split(".")[0]
    in_timm = name.replace("_clip_", "_clip_quickgelu_")
    if in_timm != name and timm.is_model(in_timm):
        return in_timm
    with contextlib.suppress(ImportError):
        import open_clip

        if f"{name}-quickgelu" in open_clip.list_models():
            return f"open_clip:{name}-quickgelu"
    return ""


def stated_names(settings: dict[str, object]) -> list[str]:
    """Names of the classes in a checkpoint, in the order of the head, or an empty list.

    >>> stated_names({"class_to_idx": {"dog": 1, "cat": 0}})
    ['cat', 'dog']
    """
    for key in _NAMES:
        names = _ordered(settings.get(key))
        if names is not None:
            return names
    return []


def _ordered(value: object) -> list[str] | None:
    """Names from a list, from numbers by name, or from names by number. None for anything else."""
    if isinstance(value, dict):
        if all(isinstance(number, int) for number in value.values()):
            value = {number: name for name, number in value.items()}
        with contextlib.suppress(TypeError, ValueError):
            by_number = {int(number): name for number, name in value.items()}
            if sorted(by_number) == list(range(len(by_number))):
                value = [by_number[number] for number in range(len(by_number))]
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return list(value)
    return None
