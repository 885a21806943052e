"""Classifiers in a file of weights: find them, choose one, and put it on a model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlens.models.classes import class_count
from vitlens.recorder.supported import model_name

NO_HEAD = "none"
"""Name of the head that leaves out all classifiers of a file."""

_CLASSIFIERS = (
    "classifier",
    "cls_classifier",
    "distillation_classifier",
    "heads.head",
    "head",
)
"""Names of the classifiers of transformers and torchvision."""

_PRETRAINING = (
    r"(^|[._])((dino|ibot|koleo|mim|lm|projection|proj|contrast\w*)_?heads?|predictor|projectors?|pooler|mask_token|masked_embed|"
    r"queue|center|decoder|decoder_(blocks|embed|norm|pred|pos_embed))([._]|$)|\bheads?\.(mlp\.|last_layer)|"
    r"(^|\.)(criterion|loss|loss_?(fn|func|function))\.|\.(exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|step)$"
)
"""Names of parts of training without a use afterwards, as a regular expression."""


@dataclass(frozen=True)
class Head:
    """A linear classifier in a file. problem: reason why it cannot be put on the model, or None."""

    path: str
    weight: Tensor | None
    bias: Tensor | None
    problem: str | None = None

    @property
    def classes(self) -> int:
        return 0 if self.weight is None else len(self.weight)


def head_names(model: nn.Module) -> list[str]:
    """Names of the classifiers of a model, two of a distilled one.

    >>> head_names(model)
    ['head']
    """
    config = vars(model).get("pretrained_cfg")
    if config:
        named = config.get("classifier") or "head"
        return [named] if isinstance(named, str) else list(named)
    modules = dict(model.named_modules())
    return [name for name in _CLASSIFIERS if isinstance(modules.get(name), nn.Linear | nn.Identity)]


def is_pretraining_part(name: str) -> bool:
    """True for the name of a weight that only pretraining uses.

    >>> is_pretraining_part("embeddings.mask_token"), is_pretraining_part("norm.weight")
    (True, False)
    """
    return re.search(_PRETRAINING, name) is not None


@dataclass(frozen=True)
class Parts:
    """The tensors of a file by their use in a model.

    backbone: weights of the model without its classifiers. heads: classifiers. unused: parts of pretraining. unplaced:
    the others.
    """

    backbone: dict[str, Tensor]
    heads: list[Head]
    unused: dict[str, Tensor]
    unplaced: dict[str, Tensor]


def split_heads(
    model: nn.Module, weights: dict[str, Tensor], path: str, beyond: dict[str, Tensor]
) -> Parts:
    """The parts of a file.

    weights: under the model's names. path: of the model in the file. beyond: other tensors by their names in the file.
    """
    heads = tuple(f"{name}." for name in head_names(model))
    names = {name for name in model.state_dict() if not name.startswith(heads)}
    modules = tuple({name.split(".")[0] + "." for name in names if "." in name})
    parts = Parts({}, [], {}, {})
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in weights.items():
        if name in names:
            parts.backbone[name] = value
        elif name.startswith(modules):
            parts.unplaced[name] = value
        elif re.search(_PRETRAINING, name):
            parts.unused[name] = value
        else:
            groups[name.split(".")[0]][name] = value
    for name, value in beyond.items():
        if re.search(_PRETRAINING, _beside(name, path)):
            parts.unused[name] = value
        else:
            groups[outermost(name, path)][name] = value
    width = _width(model)
    for tensors in groups.values():
        units = _units(tensors, width)
        parts.heads.extend(units)
        if not units:
            parts.unplaced.update(tensors)
    return parts


def _beside(name: str, path: str) -> str:
    """A name without the modules that it shares with a path.

    >>> _beside("model.fc.weight", "model.backbone.")
    'fc.weight'
    """
    for part in path.split("."):
        if part and name.startswith(f"{part}."):
            name = name.removeprefix(f"{part}.")
        else:
            break
    return name


def outermost(name: str, path: str) -> str:
    """The outermost module of a name beside a path.

    >>> outermost("model.fc.weight", "model.backbone.")
    'model.fc'
    """
    shown = _beside(name, path)
    return name.removesuffix(shown) + shown.split(".")[0]


def _width(model: nn.Module) -> int | None:
    """Number of features that a model's classifier reads."""
    modules = dict(model.named_modules())
    for name in head_names(model):
        if isinstance(modules.get(name), nn.Linear):
            return modules[name].in_features
    for name in ("head_hidden_size", "num_features", "hidden_dim"):
        if isinstance(getattr(model, name, None), int):
            return getattr(model, name)
    return getattr(getattr(model, "config", None), "hidden_size", None)


def _units(tensors: dict[str, Tensor], width: int | None) -> list[Head]:
    """The classifiers among the tensors of one module: parallel linear layers, or layers after each other as one."""
    linear = [
        name for name, value in tensors.items() if name.endswith("weight") and value.ndim == 2
    ]
    if not linear:
        return []
    known = set(linear) | {_bias_of(name) for name in linear}
    extra = [name for name, value in tensors.items() if name not in known and not _counts(value)]
    inputs = {tensors[name].shape[1] for name in linear}
    outputs = {tensors[name].shape[0] for name in linear}
    in_a_row = len(linear) > 1 and bool(inputs & outputs)
    if extra or in_a_row:
        path = _common(list(tensors))
        scales = not in_a_row and all(tensors[name].numel() == 1 for name in extra)
        if scales:
            problem = f"has more than a linear layer ({', '.join(extra)})"
        else:
            problem = f"has several layers ({', '.join(list(tensors)[:3])} …)"
        return [Head(path, None, None, problem)]
    heads = []
    for name in linear:
        weight = tensors[name]
        problem = None
        if width is not None and weight.shape[1] != width:
            problem = f"reads {weight.shape[1]} numbers, and the model has {width} features"
        path = name.removesuffix("weight").rstrip(".") or name
        heads.append(Head(path, weight, tensors.get(_bias_of(name)), problem))
    return heads


def _counts(value: Tensor) -> bool:
    """True for a counter of a training program."""
    return value.ndim == 0 and not value.is_floating_point()


def _bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def _common(names: list[str]) -> str:
    """The modules that all names begin with."""
    parts = []
    for level in zip(*(name.split(".") for name in names), strict=False):
        if len(set(level)) > 1:
            break
        parts.append(level[0])
    return ".".join(parts) or names[0]


def choose_head(
    model: nn.Module, heads: Sequence[Head], kwargs: dict, name: str | None, file: Path
) -> tuple[list[Head], list[str]]:
    """The classifiers to put on a model, and notes. Raises ValueError if several fit and none is named.

    name: path of a classifier in the file or its end, "none" for no classifier, or None for the only one.
    """
    if name == NO_HEAD or (name is None and kwargs.get("num_classes") == 0):
        return [], []
    listed = ", ".join(_shown(head) for head in heads) or "none"
    if name is not None:
        ends = [head for head in heads if head.path == name or head.path.endswith(f".{name}")]
        exact = [head for head in ends if head.path == name] or ends
        if len(exact) != 1:
            raise ValueError(f"{file} has no head {name!r}. Its heads are {listed}.")
        if exact[0].problem:
            raise ValueError(f"{file}: the head {name} {exact[0].problem}. Its heads are {listed}.")
        return _checked(exact, kwargs, file), _bias_notes(exact, name)
    fitting = [head for head in heads if head.problem is None]
    own = head_names(model)
    if len(own) > 1 and sorted(head.path for head in fitting) == sorted(own):
        by_path = {head.path: head for head in fitting}
        return _checked([by_path[path] for path in own], kwargs, file), []
    if len(heads) > 1 and not _all_same(heads):
        raise ValueError(
            f'{file} has {len(heads)} heads: {listed}. Name one with head= (--head), or head="none" for the features.'
        )
    if not fitting:
        return [], [f"Left out: the head {head.path}, which {head.problem}." for head in heads]
    head = fitting[0]
    if len(own) > 1:
        raise ValueError(
            f"{model_name(model)} has {len(own)} classifiers ({', '.join(own)}), and {file} has {head.path} alone. Use "
            "the architecture of the file."
        )
    return _checked([head], kwargs, file), _bias_notes([head], own[0] if own else "")


def _shown(head: Head) -> str:
    """A head in a list: its path, and its classes or the problem."""
    if head.problem:
        return f"{head.path} ({head.problem})"
    return f"{head.path} ({head.classes} classes)"


def _all_same(heads: Sequence[Head]) -> bool:
    """True for heads with equal values."""
    first = heads[0]
    for head in heads:
        if head.problem or not torch.equal(head.weight, first.weight):
            return False
        if (head.bias is None) != (first.bias is None):
            return False
        if head.bias is not None and not torch.equal(head.bias, first.bias):
            return False
    return True


def _checked(heads: list[Head], kwargs: dict, file: Path) -> list[Head]:
    """The heads, if they have the number of classes that the caller gave. Raises ValueError for another."""
    number = kwargs.get("num_classes")
    count = heads[0].classes
    if number not in (None, 0, count):
        raise ValueError(
            f"{file}: its head has {count} classes, not {number}. Leave num_classes out."
        )
    return heads


def _bias_notes(heads: list[Head], usual: str) -> list[str]:
    head = heads[0]
    notes = []
    if head.path != usual and not head.path.endswith(f".{usual}"):
        notes.append(f"Its head is {head.path}.")
    if head.bias is None:
        notes.append(f"{head.path} has no bias, so the model's is zero.")
    return notes


def set_head(model: nn.Module, heads: Sequence[Head]) -> None:
    """Give a model as many classes as the heads of a file, because a random head predicts random classes."""
    count = heads[0].classes if heads else 0
    if count == class_count(model):
        return
    if hasattr(model, "reset_classifier"):
        model.reset_classifier(count)
        return
    width = _width(model)
    for name in head_names(model):
        layer = nn.Linear(width, count) if count else nn.Identity()
        model.set_submodule(name, layer)
    config = getattr(model, "config", None)
    if config is not None and count:
        config.num_labels = count
        model.num_labels = count
