"""What a run learns: labels, or without them to fill in patches that were hidden from it.

A row of `OBJECTIVES` without labels makes a module that a model carries as `model.objective` while it is trained:
(model, images) → loss. The model stays the plain transformer that it is, and is exported without that module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from vitlens.data.augment import seed_of
from vitlens.train import choices
from vitlens.train.autoencoder import MaskedAutoencoder, visible_count
from vitlens.train.masked import MaskedPatches

LABELS = "labels"
PATCHES = "timm's plain Vision Transformers, such as vit_tiny_patch16_224"


@dataclass(frozen=True)
class Objective:
    """One of the values of a recipe's `objective`."""

    name: str
    changes: str
    """What is learned."""
    source: str
    """The publication that defines it."""
    make: Callable | None = None
    """(model, recipe) → the module that gives the loss; none where labels do."""


def _patches(model: nn.Module, r) -> nn.Module:
    return MaskedPatches(model, r.objective, r.masked, r.mean, r.std)


def _autoencoder(model: nn.Module, r) -> nn.Module:
    return MaskedAutoencoder(model, r.decoder_depth, r.masked, r.mean, r.std)


B12 = "Dosovitskiy et al. 2021, B.1.2"
OBJECTIVES = {row.name: row for row in (
    Objective(LABELS, "The classes of the images.", "Dosovitskiy et al. 2021, section 3"),
    Objective("mean-color", "The mean color of each corrupted patch, one of 512.", B12, _patches),
    Objective("colors-4x4", "The mean colors of 4 × 4 parts of each corrupted patch.", B12, _patches),
    Objective("pixels", "The pixels of each corrupted patch.", B12, _patches),
    Objective("autoencoder", "The pixels of each hidden patch, from visible ones.", "He et al. 2022", _autoencoder),
)}  # fmt: skip
"""The objectives by name; the first one is what a recipe has if it says nothing."""


def attach(model: nn.Module, recipe) -> nn.Module:
    """Give the model the module of its recipe's objective, its weights a function of the seed; returns the model."""
    make = OBJECTIVES[recipe.objective].make
    if make is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(recipe.seed, 1))
            model.objective = make(model, recipe)
    return model


def check(r) -> None:
    """Raise ValueError for settings of a recipe that do not go with its objective."""
    what = f"objective={r.objective}"
    decodes = r.objective == "autoencoder"
    if decodes != bool(r.decoder_depth):
        raise ValueError(
            f"decoder_depth is of the decoder of objective=autoencoder, 1 or more there and else 0; got {what} and "
            f"decoder_depth {r.decoder_depth}."
        )
    if r.objective == LABELS:
        if r.masked:
            raise ValueError(f"masked={r.masked} is for an objective without labels; set one, or masked=0.")
        return
    if r.init or r.continues:
        raise ValueError(f"{what} begins with random weights; fine-tune its model by a recipe with labels.")
    if not choices.PLAIN.fullmatch(r.architecture):
        raise ValueError(
            f"{what} fills in the patches of {PATCHES}, and the architecture {r.architecture} is none of them. Choose "
            "another one."
        )
    for choice in choices.chosen(r):
        why = ""
        if choice.setting == "tokenizer":
            why = "a patch must not show in another's token"
        elif choice.setting not in ("positions", "positions_at", "readout", "registers"):
            why = "of the choices it takes positions, read-out and registers"
        elif decodes and (choice.setting == "positions_at" or choice.name in choices.IN_LAYERS):
            why = "its encoder sees some of the patches only"
        if why:
            raise ValueError(f"{what} does not go with {choice.setting}={choice.name}: {why}. Leave one of them out.")
    for setting, none in {"head": "linear", "loss": "softmax", "label_smoothing": 0, "patch_drop": 0}.items():
        if getattr(r, setting) != none:
            raise ValueError(
                f"{what} has no labels and leaves no patches out, and {setting}={getattr(r, setting)} is about these; "
                f"set {setting}={none}."
            )
    if r.augment.mixup or r.augment.cutmix:
        raise ValueError(f"{what} has no labels to mix; set augment.mixup=0 and augment.cutmix=0.")
    for keyword in ("dynamic_img_size", "dynamic_img_pad"):
        if r.model_kwargs.get(keyword):
            raise ValueError(f"{what} knows its patches by their number, so it takes images of one size: no {keyword}.")
    patches = (r.image_size // r.patch_size) ** 2
    if patches < 2 or not 0 < (visible_count(patches, r.masked) if decodes else r.masked) < (patches if decodes else 1):
        raise ValueError(
            f"{what} hides a part of the patches and needs some of each kind; masked={r.masked} of {patches} does not "
            "leave any. Set a share between 0 and 1."
        )
    if r.objective == "colors-4x4" and r.patch_size % 4:
        raise ValueError(f"{what} cuts patches into 4 × 4 equal parts, and {r.patch_size} pixels are no multiple of 4.")
    if decodes and (r.width % 8 or r.width % (2 * r.heads)):
        raise ValueError(
            f"The decoder is half as wide as the model and has as many heads, so width must be a multiple of 8 and of "
            f"{2 * r.heads}, got {r.width}."
        )
