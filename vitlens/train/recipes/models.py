"""The model of a recipe: built anew, or started from one that was trained before (paper, section 3.2)."""

from __future__ import annotations

import inspect
import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import timm
import torch
from torch import nn

from vitlens import positions
from vitlens.models import load_model
from vitlens.recorder.running import channels

if TYPE_CHECKING:
    from vitlens.train.recipes.recipe import Recipe


FROM_MODEL = ("architecture", "patch_size", "width", "depth", "heads", "mlp_ratio", "mean", "std")
"""What a recipe says of the model, where the run does not start from one."""


def model_args(recipe: Recipe) -> dict:
    """Arguments for ``timm.create_model(recipe.architecture, …)``, without what only training needs."""
    if recipe.init:
        return {**recipe.model_kwargs, "num_classes": recipe.num_classes}
    return {
        "img_size": recipe.image_size, "patch_size": recipe.patch_size, "embed_dim": recipe.width,
        "depth": recipe.depth, "num_heads": recipe.heads, "mlp_ratio": recipe.mlp_ratio,
        "num_classes": recipe.num_classes,
    }  # fmt: skip


def build(recipe: Recipe, weights: bool = True) -> nn.Module:
    """A timm model in training mode; what of its weights is fresh is a function of the recipe's seed."""
    rates = {"drop_path_rate": recipe.drop_path, "patch_drop_rate": recipe.patch_drop,
             "pos_drop_rate": recipe.dropout, "proj_drop_rate": recipe.dropout}  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        try:
            model = timm.create_model(
                recipe.architecture, **model_args(recipe), **{name: rate for name, rate in rates.items() if rate}
            )
        except (TypeError, RuntimeError, AssertionError) as error:
            raise ValueError(f"timm {timm.__version__} cannot build this {recipe.architecture}: {error}.") from error
        if recipe.head == "mlp":
            model.head = mlp_head(model.head, recipe.head_bias)
    if recipe.init and weights:
        transfer(load_model(recipe.init), model)
    model.pretrained_cfg = {**model.pretrained_cfg, **pixels(recipe)}
    return model.train()


def pixels(recipe: Recipe) -> dict:
    """How pictures are made ready for the model, in the words of timm's ``pretrained_cfg``: as for validation."""
    return {
        "input_size": [3, recipe.image_size, recipe.image_size],
        "fixed_input_size": "img_size" in model_args(recipe),  # timm builds such a model for its size
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "crop_mode": "squash" if recipe.squash else "center",
        "mean": list(recipe.mean),
        "std": list(recipe.std),
    }


def mlp_head(linear: nn.Linear, bias: float) -> nn.Sequential:
    """The paper's head for pre-training: D → D, tanh, D → classes; the last starts at zero, its bias at ``bias``."""
    output = nn.Linear(linear.in_features, linear.out_features)
    nn.init.zeros_(output.weight)
    nn.init.constant_(output.bias, bias)
    hidden = nn.Linear(linear.in_features, linear.in_features)
    nn.init.xavier_uniform_(hidden.weight)
    nn.init.zeros_(hidden.bias)
    return nn.Sequential(OrderedDict(pre_logits=hidden, act=nn.Tanh(), output=output))


def starting_from(recipe: Recipe, source: str | Path) -> Recipe:
    """The recipe, to be continued from a trained model: a timm name or a folder in timm's hub layout.

    Any classifier of timm whose head can be replaced: the paper tunes BiT's ResNets like its transformers (Table 4).
    Architecture, sizes, mean and standard deviation of the pixels become the model's; image_size stays the recipe's.
    What exceeds whole patches is not seen, as in the paper: of 384 pixels H/14 sees 27 × 14. Of a model that is no
    transformer over patches, patch_size, depth and heads are 1, and width is that of the features that its head reads.
    Raises what ``load_model`` raises, and ``ValueError`` for models without a head, and for settings that are of
    transformers alone.
    """
    model = load_model(source)
    kind = type(model).__name__
    if kind == "NaFlexVit":
        raise ValueError("A NaFlexVit takes images of any shape in one batch, and training here does not; use another.")
    if not model.pretrained_cfg.get("classifier"):
        raise ValueError(f"{source} ({kind}) has no head for classes, so it cannot be tuned; use another model.")
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    patched = patch is not None and hasattr(model, "blocks")
    if not patched and (recipe.dropout or recipe.optimizer == "muon"):
        setting = "dropout" if recipe.dropout else "optimizer=muon"
        raise ValueError(
            f"{setting} is for the layers of transformers over patches, and {source} ({kind}) has none. Leave it out, "
            "or start from another model."
        )
    if (count := channels(model)) != 3:
        raise ValueError(f"Training gives a model images of 3 channels, and {source} takes {count}; use another.")
    config, folder = model.pretrained_cfg, Path(str(source).removeprefix("local-dir:"))
    folder, kwargs = folder.parent if folder.is_file() else folder, {}
    if folder.is_dir():
        kwargs = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_args") or {}
    ours = ("num_classes", "drop_rate", "drop_path_rate")  # the recipe says them; so pos_drop_rate and its like
    kwargs = {name: value for name, value in kwargs.items() if not name.endswith(ours)}
    if _has_size(model):
        kwargs["img_size"] = recipe.image_size
    sizes = {"patch_size": 1, "width": model.num_features, "depth": 1, "heads": 1}
    if patched:
        sizes = {
            "patch_size": patch if isinstance(patch, int) else patch[0], "width": model.embed_dim,
            "depth": len(model.blocks),
            "heads": next((m.num_heads for m in model.blocks[0].modules() if hasattr(m, "num_heads")), 1),
        }  # fmt: skip
    return replace(
        recipe, init=str(source), model_kwargs=kwargs, architecture=config["architecture"],
        mean=tuple(config["mean"]), std=tuple(config["std"]), **sizes,
    )  # fmt: skip


def _has_size(model: nn.Module) -> bool:
    """Whether timm builds this model for one image size (`img_size`), as it does transformers but not ConvNets."""
    return any("img_size" in inspect.signature(each.__init__).parameters for each in type(model).__mro__[:-1])


def transfer(source: nn.Module, model: nn.Module) -> None:
    """Copy every weight but the head's, positions resized the paper's way; the linear head starts at zero.

    Raises ``ValueError`` if another weight has another shape (relative positions of another grid, say).
    """
    heads = model.pretrained_cfg["classifier"]
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    within = tuple(f"{head}." for head in heads)
    state = {name: t for name, t in source.state_dict().items() if not name.startswith(within)}
    wanted = model.state_dict()
    if "pos_embed" in state and state["pos_embed"].shape != wanted["pos_embed"].shape:
        grid = source.patch_embed.grid_size
        prefix = state["pos_embed"].shape[1] - grid[0] * grid[1]
        state["pos_embed"] = positions.resize(
            state["pos_embed"], model.patch_embed.grid_size, prefix=prefix, grid=grid, method="paper"
        )
    other = [n for n in wanted if not n.startswith(within) and (n not in state or state[n].shape != wanted[n].shape)]
    if other:
        raise ValueError(
            f"{other[0]} of {type(model).__name__} has another shape at this resolution, and only learned position "
            "embeddings are resized. Train at the resolution that the model was made for."
        )
    model.load_state_dict(state, strict=False)
    for name in heads:
        for parameter in model.get_submodule(name).parameters():
            nn.init.zeros_(parameter)
