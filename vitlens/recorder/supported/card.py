"""Facts about a model that its library does not keep in the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from PIL import Image
from torch import Tensor, nn

from vitlens.digests import TrainedOn


@dataclass(frozen=True)
class ModelCard:
    """Facts about a model from the place that it was opened from. An attribute of the model keeps it, so that copies
    and saved models have it, too.

    name: by which `load_model` opened the model. title: name for figures, in the place of `name`. architecture: its
    name in another library than timm. label_names: names of the classes. outputs: one of `vitlens.models.OUTPUTS`.
    transform: preprocessing by its library, from an RGB image to (C, H, W). guess: a sentence, if preprocessing is a
    guess. trained_on: record of the training images. published: True for weights that a library provides by their name.
    """

    name: str = ""
    title: str = ""
    architecture: str = ""
    label_names: list[str] | None = None
    outputs: str | None = None
    transform: Callable[[Image.Image], Tensor] | None = None
    guess: str = ""
    trained_on: TrainedOn | None = None
    published: bool = False


def card_of(model: nn.Module) -> ModelCard | None:
    """The card of a model, or None if nobody wrote one."""
    return vars(model).get("vitlens_card")


def write_card(model: nn.Module, **facts) -> None:
    """Write facts on the card of a model, the fields of `ModelCard`. Other fields keep their values."""
    model.vitlens_card = replace(card_of(model) or ModelCard(), **facts)
