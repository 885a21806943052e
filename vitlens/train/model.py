"""Models for training: built by timm with fresh weights, or with weights of a trained model (paper, section 3.2)."""

from __future__ import annotations

import inspect
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch import nn

from vitlens import positions
from vitlens.files import read_text
from vitlens.models import load_model
from vitlens.recorder.supported import input_channels

SET_BY_RECIPES = ("num_classes", "drop_rate", "drop_path_rate")
"""Endings of timm's keywords that a recipe sets, such as `pos_drop_rate`."""


@dataclass(frozen=True)
class Variants:
    """Choices in timm's plain Vision Transformer that another package adds, set as `model.KEY=VALUE`.

    values: values of each keyword, the plain model's first. meanings: meaning of each keyword. resolve: the
    architecture and the keywords of a recipe → those for timm. check: raises ValueError for invalid combinations of the
    keywords for timm. check_former: raises ValueError, with the new spelling, for settings that are keywords now.
    upgrade: the settings of a recipe in a file of any version → today's.
    """

    values: Mapping[str, tuple[str, ...]]
    meanings: Mapping[str, str]
    resolve: Callable[[str, dict], tuple[str, dict]]
    check: Callable[[dict], None]
    check_former: Callable[[dict], None]
    upgrade: Callable[[dict], dict]


VARIANTS: dict[str, Variants] = {}
"""Variants by the timm architecture that has them. Other packages add a row by an entry point `vitlens.recipes`."""


def variants_among(keywords: Mapping) -> bool:
    """True if keywords of a model hold a value of `VARIANTS`."""
    for row in VARIANTS.values():
        for name, values in row.values.items():
            if keywords.get(name) in values:
                return True
    return False


def build(
    architecture: str, arguments: dict, seed: int, mlp_bias: float | None = None, source: str = ""
) -> nn.Module:
    """A timm model in training mode, with initial weights that are a function of the seed.

    mlp_bias: output bias of an `mlp_head` in place of the linear head. source: a model whose weights are copied, except
    the head's. Raises ValueError if timm cannot build the architecture.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = timm.create_model(architecture, **arguments)
        except (TypeError, RuntimeError, AssertionError) as error:
            raise ValueError(
                f"timm {timm.__version__} cannot build this {architecture}: {error}."
            ) from error
        if mlp_bias is not None:
            model.head = mlp_head(model.head, mlp_bias)
    if source:
        transfer(load_model(source), model)
    return model.train()


def mlp_head(linear: nn.Linear, bias: float) -> nn.Sequential:
    """The paper's head for pre-training: D → D, tanh, D → classes. The last layer starts at zero with bias `bias`."""
    output = nn.Linear(linear.in_features, linear.out_features)
    nn.init.zeros_(output.weight)
    nn.init.constant_(output.bias, bias)
    hidden = nn.Linear(linear.in_features, linear.in_features)
    nn.init.xavier_uniform_(hidden.weight)
    nn.init.zeros_(hidden.bias)
    return nn.Sequential(OrderedDict(pre_logits=hidden, act=nn.Tanh(), output=output))


def settings_of(source: str | os.PathLike, image_size: int) -> dict:
    """Recipe settings for fine-tuning a trained model at `image_size`.

    Models other than transformers over patches get patch_size, depth and heads 1, and the width of the head's input
    features. Raises ValueError for models that cannot be fine-tuned, and the errors of `load_model`.
    """
    model = load_model(source)
    reason = _reason_against_training(model)
    if reason:
        kind = type(model).__name__
        raise ValueError(
            f"Training takes timm's models of RGB images, but {source} ({kind}) {reason}. Use another."
        )
    config = model.pretrained_cfg
    arguments = _arguments_of(source)
    if _has_image_size(type(model)):
        arguments["img_size"] = image_size
    return {
        "init": os.fspath(source),
        "architecture": config["architecture"],
        "mean": tuple(config["mean"]),
        "std": tuple(config["std"]),
        "model_kwargs": arguments,
        **_sizes_of(model),
    }


def _reason_against_training(model: nn.Module) -> str:
    """Predicate that completes a sentence about a model that cannot be fine-tuned, or ""."""
    if type(model).__name__ == "NaFlexVit":
        return "takes images of any shape"
    if not hasattr(model, "forward_head"):
        return "is not a model of timm"
    count = input_channels(model)
    return "" if count == 3 else f"takes {count} channels"


def _has_image_size(kind: type) -> bool:
    """True if timm builds such models for one size of images, as transformers but not as ConvNets."""
    bases = kind.__mro__[:-1]
    return any("img_size" in inspect.signature(base.__init__).parameters for base in bases)


def _sizes_of(model: nn.Module) -> dict:
    """patch_size, width, depth and heads of a model."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if patch is None or not hasattr(model, "blocks"):
        return {"patch_size": 1, "width": model.num_features, "depth": 1, "heads": 1}
    heads = 1
    for module in model.blocks[0].modules():
        if hasattr(module, "num_heads"):
            heads = module.num_heads
            break
    return {
        "patch_size": patch if isinstance(patch, int) else patch[0],
        "width": model.embed_dim,
        "depth": len(model.blocks),
        "heads": heads,
    }


def _arguments_of(source: str | os.PathLike) -> dict:
    """Keywords that built the model in a directory in timm's hub layout, or {} for a model name."""
    folder = Path(os.fspath(source).removeprefix("local-dir:"))
    if folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        return {}
    config = json.loads(read_text(folder / "config.json"))
    arguments = {}
    for name, value in (config.get("model_args") or {}).items():
        if value is not None and not name.endswith(SET_BY_RECIPES):
            arguments[name] = value
    return arguments


def transfer(source: nn.Module, model: nn.Module) -> None:
    """Copy all weights except the head's, with positions resized as in the paper. The linear head starts at zero.

    Raises ValueError if another weight has a different shape, such as relative positions of another grid.
    """
    heads = _head_names(model)
    if not heads:
        raise ValueError(
            f"Fine-tuning needs a classifier head, which {type(model).__name__} lacks. Use another model."
        )
    in_head = tuple(f"{head}." for head in heads)
    state = {name: t for name, t in source.state_dict().items() if not name.startswith(in_head)}
    target = model.state_dict()
    if "pos_embed" in state and state["pos_embed"].shape != target["pos_embed"].shape:
        state["pos_embed"] = _resize_positions(source, model)
    for name, tensor in target.items():
        if name.startswith(in_head):
            continue
        if name not in state or state[name].shape != tensor.shape:
            raise ValueError(
                f"{name} of {type(model).__name__} has another shape at this resolution, and only learned positions at "
                "the stem are resized. Train at the model's own resolution."
            )
    model.load_state_dict(state, strict=False)
    for name in heads:
        for parameter in model.get_submodule(name).parameters():
            nn.init.zeros_(parameter)


def _head_names(model: nn.Module) -> list[str]:
    """Names of the classifier heads: two for a distilled DeiT, none for an Identity."""
    classifier = model.get_classifier()
    classifiers = classifier if isinstance(classifier, tuple | list) else [classifier]
    heads = {id(module) for module in classifiers if not isinstance(module, nn.Identity)}
    return [name for name, module in model.named_modules() if id(module) in heads]


def _resize_positions(source: nn.Module, model: nn.Module) -> torch.Tensor:
    """Position embeddings of `source` for the grid of `model`."""
    embeddings = source.state_dict()["pos_embed"]
    grid = source.patch_embed.grid_size
    return positions.resize(
        embeddings,
        model.patch_embed.grid_size,
        prefix=embeddings.shape[1] - grid[0] * grid[1],
        grid=grid,
        method="paper",
    )
