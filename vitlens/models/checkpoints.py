"""Fill models with the weights in a file, and refuse weights that do not fit.

`fill` is the one way from a file to a model. Every tensor of the file arrives in the model unchanged, or a sentence
names it: a note if the model is complete without it, else an error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import io
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlens.models.architecture_guess import describe, fitting_architectures
from vitlens.models.checkpoint_heads import (
    Head,
    choose_head,
    head_names,
    outermost,
    set_head,
    split_heads,
)
from vitlens.models.checkpoint_settings import setting_notes, stated_names
from vitlens.models.conversion import compare
from vitlens.models.google_weights import fill_from_google
from vitlens.models.patch_sizes import require_patches
from vitlens.models.preprocessing import built_size
from vitlens.models.weight_files import (
    damaged_entries,
    flat_tensors,
    hidden_tensors,
    is_numpy,
    plain_settings,
    read_weights,
)
from vitlens.recorder.supported import family, is_known, model_name, short_name, unwrap
from vitlens.recorder.supported.card import write_card

_WRAPPERS = r"(_orig_mod|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
"""Modules of torch.compile, Lightning and FSDP that stand inside names."""

_CHUNKS = r"(?<![^.])(blocks\.)\d+\.(?=\d+\.)"
"""Number of a chunk of layers, as in blocks.0.3.norm1 of DINOv2."""

_AVERAGED = r"(^|[._])(ema|teacher|target_encoder|averaged?|swa)(?=[._]|$)"
_SECOND = r"(^|[._])(student|momentum_encoder|momentum)(?=[._]|$)"
"""Names of copies of a model in a file. Averaged ones are preferred, and second ones come last."""

_POSITIONS = r"pos(ition(al)?)?_embed(ding)?s?(\.weight)?$|relative_position_bias_table$"
"""Names of weights that depend on the number of patches, as a regular expression."""

_PARAMETRIZED = r"(^|\.)parametrizations\.|_(orig|mask)$(?<!token_mask)|(^|\.)weight_[guv]$"
"""Names of the parts of weights that torch.nn.utils computes, as a regular expression."""

SIZE_OPTIONS = {
    "timm": "img_size",
    "torchvision": "image_size",
    "transformers": "image_size",
    "open_clip": "force_image_size",
}
"""Argument of each library for the image size that a model is built for."""


def weights_digest(model: nn.Module) -> str:
    """First 12 hexadecimal digits of the SHA-256 of all weights and buffers with their names, sorted by name.

    >>> vitlens.models.weights_digest(model)
    'caadf0384a2b'
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


@dataclass(frozen=True)
class Chosen:
    """The tensors of a file that are one copy of a model.

    path: of the copy in the file, with a dot at its end, or "". own: its tensors by their names in the copy. rest:
    other tensors by their names in the file. copies: paths of the other copies of the model.
    """

    path: str
    own: dict[str, Tensor]
    rest: dict[str, Tensor]
    copies: list[str]


def fill(
    model: nn.Module,
    file: Path,
    kwargs: dict,
    *,
    head: str | None = None,
    build: Callable[..., nn.Module] | None = None,
) -> nn.Module:
    """A model with the weights in a file, which must be complete.

    kwargs: of the model's constructor. head: path of the classifier in the file, or "none". build: function from more
    keyword arguments to a new model, for a file with positions of another image size.
    """
    content = read_weights(file)
    if file.is_file() and is_numpy(file):
        if any(name.endswith("embedding/kernel") for name in content):
            return _fill_arrays(model, file, content, kwargs, build)
        content = {name.replace("/", "."): array for name, array in content.items()}
    settings = plain_settings(content)
    tensors = _without_wrappers(dict(flat_tensors(content)))
    mismatch = _Mismatch(model, file, content)
    if not tensors:
        raise mismatch.error(_without_tensors(content))
    _require_present(tensors, file)
    chosen = _choose(model, tensors, file)
    if chosen is None:
        raise mismatch.error(foreign_parts(tensors))
    _require_values(chosen.own, file)
    shapes = {name: value.shape for name, value in chosen.own.items()}
    require_patches(shapes, model, file)
    notes = []

    library = library_of(model)
    size_option = SIZE_OPTIONS[library]
    size = _size_of_positions(model, chosen.own)
    if size and build and size_option not in kwargs and library != "transformers":
        notes.append(_built_for(model, size, size_option))
        model = build(**{size_option: size[0] if size[0] == size[1] else size})
        _write_size(model, size)

    mismatch.model = model
    try:
        weights = _convert(model, chosen.own)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise mismatch.error(f"{chosen_reason(model, chosen.own)} {text}", chosen.own) from error
    before, folded = _folded(chosen.own, weights)
    arrival = compare(before, weights)
    notes += folded
    resampled = [name for name in arrival.changed if re.search(_POSITIONS, name)]
    changed = [name for name in arrival.changed if name not in resampled]
    if changed:
        raise mismatch.error(
            f"{len(changed)} tensors would be changed, such as {changed[0]}.", chosen.own
        )
    if resampled and size_option not in kwargs:
        raise mismatch.error(_resampled(resampled, chosen.own, weights, size_option), chosen.own)
    if resampled:
        notes.append(_resampled(resampled, chosen.own, weights, ""))

    parts = split_heads(model, weights, chosen.path, _beyond_copies(chosen))
    wrong = _wrong_names(model, parts.backbone, parts.unplaced)
    count_in_file = next((unit.classes for unit in parts.heads if unit.problem is None), 0)
    if count_in_file or not parts.heads:
        mismatch.classes = count_in_file
    if wrong:
        reason = chosen_reason(model, chosen.own)
        raise mismatch.error(f"{reason}{_misfits(wrong)}", chosen.own)
    kept, head_notes = choose_head(model, parts.heads, kwargs, head, file)
    left = [name for name in arrival.lost if name not in resampled]
    lost = _lost(model, left, chosen.own)
    if kept and any("pre_logits" in name for name in lost):
        raise ValueError(
            f"{file}: its head reads the layer pre_logits, which {model_name(model)} lacks. Take the features only, "
            'with head="none" (--head none).'
        )
    _load(model, parts.backbone, kept, mismatch, chosen.own)

    notes += head_notes
    notes += _left_out_notes(chosen, [*lost, *parts.unused, *parts.unplaced])
    notes += _precision_notes(model, chosen.own)
    notes += _damage_notes(file)
    classes = kept[0].classes if kept else 0
    stated = stated_names(settings)
    if len(stated) == classes > 0:
        write_card(model, label_names=stated)
        notes.append(f"It names its {classes} classes: {', '.join(stated[:3])} …")
    elif stated and classes:
        notes.append(
            f"It names {len(stated)} classes, and its head has {classes}. The names are not used."
        )
    notes += setting_notes(model, settings, classes, size_option, chosen.path)
    source = chosen.path.rstrip(".") or "the weights"
    about = f"its head has {classes} classes" if kept else "it has no head"
    if library == "open_clip":
        about = "both towers"
    print_note(f"Took {source} of {file}; {about}.")
    for sentence in notes:
        print_note(sentence)
    return model


def _fill_arrays(
    model: nn.Module,
    file: Path,
    arrays: dict[str, Tensor],
    kwargs: dict,
    build: Callable[..., nn.Module] | None,
) -> nn.Module:
    """A timm model with the weights of the paper's authors, in NumPy arrays."""
    if not hasattr(model, "load_pretrained"):
        raise ValueError(
            f"{file} holds NumPy arrays of the paper's authors, which only timm's Vision Transformers read, not "
            f"{model_name(model)}."
        )
    require_patches({name: tuple(array.shape) for name, array in arrays.items()}, model, file)
    positions = [array for name, array in arrays.items() if name.endswith("pos_embedding")]
    notes = []
    if positions and build and "img_size" not in kwargs:
        size = _size_of_positions(model, {"pos_embed": positions[0]})
        if size:
            notes.append(_built_for(model, size, "img_size"))
            model = build(img_size=size)
            _write_size(model, size)
    count, more = fill_from_google(model, file, arrays, kwargs)
    head = f"its head has {count} classes" if count else "without a head"
    print_note(f"Took the weights of {file}; {head}.")
    for sentence in [*notes, *more]:
        print_note(sentence)
    return model


def _built_for(model: nn.Module, size: tuple[int, int], option: str) -> str:
    """Note about a model that is built for the image size of the positions in a file."""
    was = built_size(model)
    advice = f" In Python, {option}={was[0]} resamples them." if library_of(model) == "timm" else ""
    return (
        f"Its positions are for images of {size[0]} × {size[1]} pixels, so {model_name(model)} is built for them, not "
        f"for {was[0]} × {was[1]}.{advice}"
    )


class _Mismatch:
    """Maker of the error for weights that do not fit a model."""

    def __init__(self, model: nn.Module, file: Path, content: dict):
        self.model = model
        self.file = file
        self.classes = None
        first_parts = {name.split(".")[0] for name in content if isinstance(name, str)}
        self.names = ", ".join(sorted(first_parts)[:12]) or "nothing"

    def error(self, reason: str, own: dict[str, Tensor] | None = None) -> ValueError:
        sentence = f"{self.file} does not hold the weights of {model_name(self.model)}: it holds {self.names}"
        if self.classes is not None:
            sentence += (
                f", and its head has {self.classes} classes" if self.classes else ", and no head"
            )
        guess = ""
        if own is not None and library_of(self.model) == "timm":
            fitting = fitting_architectures(own)
            about = describe(own)
            if fitting:
                guess = f" Its tensors fit {' or '.join(fitting)}."
            elif about:
                guess = f" It has {about}."
        return ValueError(f"{sentence}. {reason.strip()}{guess}")


def library_of(model: nn.Module) -> str:
    """The library of a model: a key of `SIZE_OPTIONS`. timm for own classes."""
    for kind in type(model).__mro__:
        library = kind.__module__.split(".")[0]
        if library in SIZE_OPTIONS:
            return library
    return "timm"


def _without_tensors(content: dict) -> str:
    """Sentence about a file without a dictionary of weights."""
    count = hidden_tensors(content)
    if "param_groups" in content:
        return "It is the state of an optimizer alone, without weights."
    if count:
        return (
            f"Its {count} tensors are in lists or have numbers for names. Save the one state_dict() that you mean: "
            "torch.save(weights, 'one.pth')."
        )
    return "It holds no tensors."


def _without_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without the names of wrappers and chunks of layers inside of theirs."""
    clean = {
        re.sub(_CHUNKS, r"\1", re.sub(_WRAPPERS, "", name)): value
        for name, value in tensors.items()
    }
    return clean if len(clean) == len(tensors) else tensors


def _backbone_names(model: nn.Module) -> set[str]:
    """Names of a model's weights without those of its classifiers."""
    heads = tuple(f"{name}." for name in head_names(model))
    return {name for name in model.state_dict() if not name.startswith(heads)}


def _choose(model: nn.Module, tensors: dict[str, Tensor], file: Path) -> Chosen | None:
    """The copy of a model in a file, or None. Averaged weights are preferred. Raises ValueError for unlike copies."""
    names = _backbone_names(model)
    counts: Counter[str] = Counter()
    for name in tensors:
        for start in _starts(name):
            if name[start:] in names:
                counts[name[:start]] += 1
    most = max(counts.values(), default=0)
    paths = [path for path, count in counts.items() if 2 * count > most]
    paths = [path for path in paths if not _is_nested(path, paths, counts)]
    if 2 * most < len(names):
        paths = _paths_to_convert(model, tensors, names) or paths
        if not paths or (most == 0 and not paths):
            return None
    paths.sort(key=_preference)
    if len(paths) > 1 and _preference(paths[0])[:2] == _preference(paths[1])[:2]:
        first, second = (_under(tensors, path) for path in paths[:2])
        if not _same_values(first, second):
            raise ValueError(
                f"{file} holds several copies of {model_name(model)}: {_listed(paths)}. Save the one that you mean: "
                "torch.save(weights, 'one.pth')."
            )
    path = paths[0]
    own = _under(tensors, path)
    rest = {name: value for name, value in tensors.items() if not name.startswith(path)}
    return Chosen(path, own, rest, paths[1:])


def _is_nested(path: str, paths: list[str], counts: Counter[str]) -> bool:
    """True for a path inside or around one with more of the model's weights, such as one tower of two."""
    for other in paths:
        inside = path != other and path.startswith(other)
        around = path != other and other.startswith(path)
        if (inside and counts[other] >= counts[path]) or (around and counts[other] > counts[path]):
            return True
    return False


def _starts(name: str) -> list[int]:
    """Places in a name at which a module's name starts."""
    return [0, *(dot.end() for dot in re.finditer(r"\.", name))]


def _under(tensors: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """The tensors below a path, without it."""
    return {
        name.removeprefix(path): value for name, value in tensors.items() if name.startswith(path)
    }


def _preference(path: str) -> tuple[int, int, int, str]:
    """Sorting key of the copies of a model in a file."""
    rank = 1
    if re.search(_AVERAGED, path):
        rank = 0
    elif re.search(_SECOND, path):
        rank = 2
    order = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model", "base_encoder")
    known = [number for number, name in enumerate(order) if name in path.split(".")]
    return (rank, min(known, default=len(order)), len(path), path)


def _same_values(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(torch.equal(value, second[name]) for name, value in first.items())


def _paths_to_convert(model: nn.Module, tensors: dict[str, Tensor], names: set[str]) -> list[str]:
    """The path whose tensors get the model's names by the library's conversion, or none."""
    shares = Counter(name[:start] for name in tensors for start in _starts(name)[:4])
    paths = [path for path, count in shares.items() if 2 * count > len(tensors) or path == ""]
    best, most = [], 0
    for path in sorted(paths, key=len):
        with contextlib.suppress(Exception):
            fitting = len(names & _convert(model, _under(tensors, path)).keys())
            if fitting > most:
                best, most = [path], fitting
    return best if 2 * most >= len(names) else []


def _beyond_copies(chosen: Chosen) -> dict[str, Tensor]:
    """The tensors outside of the chosen copy that belong to no other copy, such as a head beside a backbone."""
    branches = tuple(_branch(chosen.path, other) for other in chosen.copies)
    return {name: value for name, value in chosen.rest.items() if not name.startswith(branches)}


def _branch(path: str, other: str) -> str:
    """The path of another copy up to where it leaves the path of the chosen one."""
    ours = path.split(".")
    theirs = other.rstrip(".").split(".")
    for number, part in enumerate(theirs):
        if number >= len(ours) or part != ours[number]:
            return ".".join(theirs[: number + 1]) + "."
    return other


def _require_present(tensors: dict[str, Tensor], file: Path) -> None:
    """Raise ValueError for tensors without values."""
    for name, value in tensors.items():
        if value.is_meta:
            raise ValueError(
                f"{file}: {name} is on the meta device, so the file holds shapes without values. Save the model after "
                "its weights are loaded."
            )


def _require_values(own: dict[str, Tensor], file: Path) -> None:
    """Raise ValueError for quantized and parametrized weights, and LoRA matrices."""
    for name, value in own.items():
        if "lora_" in name or ".base_layer." in name:
            raise ValueError(
                f"{file} holds LoRA matrices ({name}) beside the weights. Call merge_and_unload() of peft, and save "
                "the result."
            )
        if re.search(_PARAMETRIZED, name):
            raise ValueError(
                f"{file}: {name} is a part from which a parametrization or pruning computes a weight. Save the model "
                "after torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm or prune.remove."
            )
        if value.is_complex():
            raise ValueError(
                f"{file}: {name} holds complex numbers ({_type_name(value.dtype)}), and models take "
                "real ones."
            )
        few_bits = value.is_floating_point() and value.element_size() == 1
        if value.is_quantized or few_bits:
            raise ValueError(
                f"{file}: {name} is {_type_name(value.dtype)}, so the weights are quantized. Use those "
                "before quantization."
            )
        integers = not value.is_floating_point() and value.ndim >= 2
        if integers and name.endswith((".weight", "_embed", "_token")):
            raise ValueError(
                f"{file}: {name} holds integers ({_type_name(value.dtype)}), so the weights are "
                "quantized. Use those before quantization."
            )


def _type_name(dtype: torch.dtype) -> str:
    """Name of a type of numbers, such as float16."""
    return str(dtype).removeprefix("torch.")


def _convert(model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of a model, by the conversion of its library. The given ones stay unchanged."""
    convert = _checkpoint_filter(model)
    # timm adds positions to the class token in place.
    given = {name: value.clone() if value.numel() < 2**16 else value for name, value in own.items()}
    if convert is None:
        return given
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return convert(given, model)
    finally:
        logging.disable(logging.NOTSET)


def _checkpoint_filter(model: nn.Module) -> Callable[[dict, nn.Module], dict] | None:
    """Function of a library that converts published weights for the class of a model, or None."""
    if library_of(model) == "open_clip":
        return _convert_open_clip
    if library_of(model) == "transformers":
        return _convert_transformers
    for kind in type(model).__mro__:
        module = sys.modules.get(kind.__module__)
        convert = getattr(module, "checkpoint_filter_fn", None)
        if convert:
            if "adapt_layer_scale" in inspect.signature(convert).parameters:
                return functools.partial(convert, adapt_layer_scale=True)
            return convert
    return None


def _convert_open_clip(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights of a CLIP under open_clip's names, as `open_clip.load_checkpoint` does without resizing."""
    from open_clip.convert import convert_state_dict
    from open_clip.model import convert_to_custom_text_state_dict

    weights = convert_state_dict(model, weights)
    if "positional_embedding" in weights and not hasattr(model, "positional_embedding"):
        weights = convert_to_custom_text_state_dict(weights)
    own = model.state_dict()
    for name in ("logit_scale", "logit_bias"):
        if name in weights and name in own:
            weights[name] = weights[name].reshape(own[name].shape)
    return weights


def _convert_transformers(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights under the names of a class of transformers, whose files may have those of earlier versions."""
    names = model.state_dict().keys()
    if 2 * len(names & weights.keys()) >= len(names):
        return weights
    with contextlib.redirect_stderr(io.StringIO()):  # without its progress bar
        loaded, info = type(model).from_pretrained(
            None, config=model.config, state_dict=dict(weights), output_loading_info=True
        )
    missing = set(info["missing_keys"])
    found = {name: value for name, value in loaded.state_dict().items() if name not in missing}
    return found | {name: weights[name] for name in info["unexpected_keys"] if name in weights}


def require_arrival(model: nn.Module, file: Path, kwargs: dict) -> None:
    """Raise ValueError if a library has changed weights of a file in a model, and print a note for what was left out.

    kwargs: of the model's constructor, in which the caller may have asked for another image size or head. Positions are
    resampled for such an image size, as `load_model` documents.
    """
    own = require_usable(file)
    state = model.state_dict()
    before, folded = _folded(own, state)
    arrival = compare(before, state)
    heads = tuple(f"{name}." for name in head_names(model))
    lost = [name for name in _lost(model, arrival.lost, before) if not name.startswith(heads)]
    requested = [name for name in lost if re.search(_POSITIONS, name) and "img_size" in kwargs]
    changed = [name for name in lost if name in state and name not in requested]
    if changed:
        name = changed[0]
        raise ValueError(
            f"{file}: {name} has the shape {tuple(own[name].shape)}, and config.json describes a model with "
            f"{tuple(state[name].shape)}, so timm changes its values. Correct config.json, or give img_size."
        )
    others = [name for name in lost if name not in requested]
    if others:
        folded.append(f"Left out of {file}: {grouped(others)}.")
    for sentence in [*folded, *_precision_notes(model, own, names_half=False)]:
        print_note(sentence)


def require_usable(file: Path) -> dict[str, Tensor]:
    """The tensors of a file or folder of weights. Raises ValueError for unreadable, quantized and valueless ones."""
    own = dict(flat_tensors(read_weights(file)))
    _require_present(own, file)
    _require_values(own, file)
    return own


def require_same_values(model: nn.Module, own: dict[str, Tensor], name: str) -> None:
    """Raise ValueError if a library has put other values into a model than its weights hold. Print notes on precision.

    own: the weights. name: of the model. Values that are rounded to the model's precision are a note.
    """
    if not own:
        return
    state = model.state_dict()
    kept = next((value.dtype for value in state.values() if value.is_floating_point()), None)
    rounded = {
        name: value.to(kept) if value.is_floating_point() else value for name, value in own.items()
    }
    changed = compare(rounded, state).changed
    changed = [name for name in changed if torch.isfinite(state[name]).all()]
    if changed:
        raise ValueError(
            f"{name}: {len(changed)} weights of {model_name(model)} have other values than its file, such as "
            f"{changed[0]}. The library has changed them."
        )
    for sentence in _precision_notes(model, own):
        print_note(sentence)


def _folded(
    own: dict[str, Tensor], weights: dict[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors before a conversion, with the class token's position added to it if the conversion did so."""
    token, positions = own.get("cls_token"), own.get("pos_embed")
    if token is None or positions is None or positions.ndim != 3:
        return own, []
    place = positions[:, :1].to(token.dtype)
    if place.shape != token.shape or not place.any():
        return own, []
    moved = token + place
    for name, value in weights.items():
        if name.endswith("cls_token") and torch.equal(value, moved):
            before = own | {"cls_token": moved, "pos_embed": positions[:, 1:]}
            return before, ["The position of its class token is added to the token (cls_token)."]
    return own, []


def _size_of_positions(model: nn.Module, own: dict[str, Tensor]) -> tuple[int, int] | None:
    """(height, width) of the images that the positions in a file are for, if the model is built for another size."""
    built = built_size(model)
    if built is None or not is_known(model):
        return None
    grid = family(model).grid(built)
    rows, cols = grid.rows, grid.cols
    height, width = built[0] // rows, built[1] // cols
    state = model.state_dict()
    for name, value in own.items():
        model_value = state.get(name)
        if model_value is None or not re.search(_POSITIONS, name) or value.ndim < 2:
            continue
        place = -2 if value.ndim < 4 else None
        if place is None or value.shape[place] == model_value.shape[place]:
            continue
        if name.endswith("table"):
            extra = model_value.shape[-2] - (2 * rows - 1) * (2 * cols - 1)
            side = ((value.shape[-2] - extra) ** 0.5 + 1) / 2
        else:
            extra = model_value.shape[-2] - rows * cols
            side = (value.shape[-2] - extra) ** 0.5 if value.shape[-2] > extra else 0.5
        if isinstance(side, float) and side == int(side) and side > 0:
            return int(side) * height, int(side) * width
    return None


def _write_size(model: nn.Module, size: tuple[int, int]) -> None:
    """Write the image size of a timm model to its preprocessing."""
    config = vars(model).get("pretrained_cfg")
    if isinstance(config, dict):
        channels = config.get("input_size", (3,))[0]
        model.pretrained_cfg = config | {"input_size": (channels, *size)}


def _resampled(
    names: list[str], own: dict[str, Tensor], weights: dict[str, Tensor], option: str
) -> str:
    """Sentence about resampled positions."""
    name = names[0]
    was = tuple(own[name].shape) if name in own else "another shape"
    now = tuple(weights[name].shape)
    if option:
        return (
            f"{name} has the shape {was} and would be resampled to {now}. Use the architecture of the file, or give "
            f"{option} to have it resampled."
        )
    return f"{', '.join(names[:3])} is resampled from {was} to {now}, for the image size that you gave."


def _misfits(names: list[str]) -> str:
    """Sentence about names of weights that do not fit."""
    if len(names) == 1:
        return f"1 name does not fit: {names[0]}."
    return f"{len(names)} names do not fit, such as {names[0]}."


def _wrong_names(
    model: nn.Module, backbone: dict[str, Tensor], unplaced: dict[str, Tensor]
) -> list[str]:
    """Names of weights that the model lacks, or that the file lacks. Counters of training programs do not count."""
    names = _backbone_names(model)
    modules = tuple({f"{name.split('.')[0]}." for name in names if "." in name})
    missing = sorted(names - backbone.keys(), key=len)
    wrong = []
    for name, value in unplaced.items():
        in_the_model = value.ndim > 0 or name.startswith(modules)
        if value.is_floating_point() and in_the_model:
            wrong.append(name)
    return missing + wrong


def chosen_reason(model: nn.Module, own: dict[str, Tensor]) -> str:
    """The likely cause of weights that do not fit, as a sentence with a space at its end, or ""."""
    names = model.state_dict().keys()
    called = short_name(model)
    if library_of(model) != "transformers" and any("patch_embeddings." in name for name in own):
        return "Its names are those of transformers. Open its folder, or hf:OWNER/NAME. "
    if "dist_token" in own and "dist_token" not in names:
        return (
            "The file is of a distilled model, and this one is plain. Use an architecture with `distilled` in its "
            "name, such as deit_tiny_distilled_patch16_224. "
        )
    if "dist_token" in names and "dist_token" not in own and "cls_token" in own:
        plain = called.replace("_distilled", "")
        return f"The file is of a plain model, and {called} is distilled. Use {plain}. "
    if "fc_norm.weight" in own and "fc_norm.weight" not in names:
        return 'The file pools the patches (fc_norm). Give global_pool="avg" in Python. '
    if "fc_norm.weight" in names and "fc_norm.weight" not in own:
        return 'The model pools the patches (fc_norm), and the file does not. Give global_pool="token". '
    registers = [name for name in own if re.search(r"reg(ister)?_tokens?$|storage_tokens$", name)]
    if registers and "reg_token" not in names:
        count = own[registers[0]].shape[-2]
        return f"The file has {count} register tokens, and {called} has none. "
    for pattern, words in _PARTS.items():
        found = any(re.search(pattern, name) for name in own)
        built = any(re.search(pattern, name) for name in names)
        if found and not built:
            return f"The file has {words}, which {called} lacks. "
        if built and not found:
            return f"{called} has {words}, which the file lacks. "
    layers = set(re.findall(_LAYER, " ".join(own)))
    own_layers = set(re.findall(_LAYER, " ".join(names)))
    if layers and own_layers and len(layers) != len(own_layers):
        return f"The file has {len(layers)} layers, and {called} has {len(own_layers)}. "
    return ""


_LAYER = r"(?:blocks|layers?|encoder_layer)[._](\d+)\."
"""The number of a layer in the name of a weight, as a regular expression."""

_PARTS = {
    r"(ls\d\.gamma|\bgamma_\d)$": "layer scale (init_values)",
    r"attn\.q_norm\.": "query-key norms (qk_norm)",
    r"norm_pre\.": "a norm before the blocks, as CLIP",
}
"""Parts that a model has or lacks: a pattern of names, and words."""


def foreign_parts(tensors: dict[str, Tensor]) -> str:
    """Sentence about weights of which no copy fits the model."""
    if any("lora_" in name for name in tensors):
        return "It is a LoRA adapter. Call merge_and_unload() of peft, and save the result."
    if any("_flat_param" in name for name in tensors):
        return "Its weights are sharded by FSDP. Save a full state dict (FullStateDictConfig)."
    return f"None of its {len(tensors)} names fits, such as {next(iter(tensors))}."


def _lost(model: nn.Module, lost: list[str], own: dict[str, Tensor]) -> list[str]:
    """Names of tensors that a conversion leaves out, without those whose values the model's buffers have."""
    buffers = [buffer.cpu() for buffer in model.buffers() if not buffer.is_meta]

    def is_buffer(value: Tensor) -> bool:
        return any(
            value.shape == each.shape and torch.equal(value.to(each.dtype), each)
            for each in buffers
        )

    return [name for name in lost if not is_buffer(own[name])]


def _load(
    model: nn.Module,
    backbone: dict[str, Tensor],
    heads: list[Head],
    mismatch: _Mismatch,
    own: dict[str, Tensor],
) -> None:
    """Copy weights into a model, and compare each with the model's afterwards."""
    weights = dict(backbone)
    set_head(model, heads)
    for name, kept in zip(head_names(model), heads, strict=False):
        weights[f"{name}.weight"] = kept.weight
        if f"{name}.bias" in model.state_dict():
            bias = kept.bias
            weights[f"{name}.bias"] = torch.zeros(kept.classes) if bias is None else bias
    state = model.state_dict()
    for name, value in weights.items():
        if state[name].shape != value.shape:
            raise mismatch.error(
                f"{chosen_reason(model, own)}{name} has the shape {tuple(value.shape)}, and the model's "
                f"{tuple(state[name].shape)}.",
                own,
            )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    wrong = [*missing, *unexpected]
    state = model.state_dict()
    for name, value in weights.items():
        loaded = state[name]
        if not loaded.is_meta and not _equal(loaded.cpu(), value.to(loaded.dtype)):
            wrong.append(name)
    if wrong:
        raise mismatch.error(_misfits(wrong), own)


def _equal(first: Tensor, second: Tensor) -> bool:
    """True for equal values, also where both are no numbers."""
    return torch.equal(first, second) or torch.allclose(first, second, 0, 0, equal_nan=True)


def _left_out_notes(chosen: Chosen, names: list[str]) -> list[str]:
    """Notes about the tensors of a file that are not in the model."""
    notes = []
    if chosen.copies:
        paths = _listed(chosen.copies)
        notes.append(f"Left out: the other copies {paths}.")
    if names:
        notes.append(f"Left out: {grouped(names, chosen.path)}.")
    return notes


def _listed(paths: list[str]) -> str:
    return ", ".join(path.rstrip(".") or "(the file itself)" for path in paths[:6])


def grouped(names: list[str], path: str = "") -> str:
    """Names of tensors, with those of one module as one name and their number.

    path: of the model in the file, whose modules are no groups.

    >>> grouped(["mask_token", "decoder.0.weight", "decoder.0.bias"])
    'mask_token, decoder (2 tensors)'
    """
    modules = {name: outermost(name, path) for name in names}
    counts = Counter(modules.values())
    parts = [name if counts[module] == 1 else module for name, module in modules.items()]
    shown = [
        f"{part} ({counts[part]} tensors)" if counts[part] > 1 else part
        for part in dict.fromkeys(parts)
    ]
    if len(shown) > 12:
        shown = [*shown[:12], f"and {len(shown) - 12} more"]
    return ", ".join(shown)


def _damage_notes(file: Path) -> list[str]:
    """Warning about a file whose bytes have changed since it was saved."""
    damaged = damaged_entries(file)
    if not damaged:
        return []
    return [
        f"Warning: {len(damaged)} parts of {file} differ from their checksums, such as {damaged[0]}. The "
        "file is damaged, unless it was saved without checksums. Download or copy it again."
    ]


def _precision_notes(
    model: nn.Module, own: dict[str, Tensor], *, names_half: bool = True
) -> list[str]:
    """Notes about weights in another precision than the model's, and about those that are no numbers.

    names_half: also about half precision that the model computes with in float32, which changes no value.
    """
    notes = []
    kept = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    kinds = {value.dtype for value in own.values() if value.is_floating_point()} - {kept}
    half = [_type_name(kind) for kind in kinds if kind.itemsize < kept.itemsize]
    if half and names_half:
        notes.append(
            f"Its weights are {', '.join(sorted(half))}. The model computes with them in "
            f"{_type_name(kept)}."
        )
    elif kept.itemsize < 4:
        notes.append(f"The model computes in {_type_name(kept)}.")
    rounded = [
        name
        for name, value in own.items()
        if value.is_floating_point()
        and value.dtype.itemsize > kept.itemsize
        and not _equal(value.to(kept).to(value.dtype), value)
    ]
    if rounded:
        notes.append(
            f"{len(rounded)} tensors are rounded to {_type_name(kept)}, such as {rounded[0]}."
        )
    broken = [
        name
        for name, value in own.items()
        if value.is_floating_point() and not torch.isfinite(value).all()
    ]
    if broken:
        notes.append(
            f"Warning: {len(broken)} tensors hold values that are not finite, such as {broken[0]}."
        )
    return notes
