"""The weights of a study's models, each in one file that says what it is the weights of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import nn

from vitlens.files import write
from vitlens.paper.studies.networks import Network
from vitlens.train.hub_layout import stored
from vitlens.train.recipes import Recipe


def save(path: Path, model: nn.Module, network: Network, recipe: Recipe, class_names: Sequence[str]) -> None:
    """Write the weights, in half precision where it can hold them, with what `trained` needs to build the model."""
    about = {"network": asdict(network), "recipe": recipe.to_dict(), "label_names": list(class_names)}
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in about.items()}
    write(path, safetensors.torch.save(stored(model.state_dict()), metadata=texts))


def trained(path: Path | str, *, weights: bool = True) -> nn.Module:
    """The model that a study left in `cells/NAME.safetensors`, in eval mode, with its class names as `label_names`.

    weights: without them it is the model as it was before its training.

    Raises ValueError for a file that is missing, or was not written by a study.
    """
    try:
        with safe_open(path, "pt") as file:
            about = {name: json.loads(text) for name, text in (file.metadata() or {}).items() if name != "format"}
            state = {name: file.get_tensor(name) for name in file.keys()} if weights else None  # noqa: SIM118
        network = Network(**{**about["network"], "stages": tuple(about["network"]["stages"])})
        model = network.build(Recipe.from_dict(about["recipe"]))
        if state is not None:
            model.load_state_dict(state)
        model.label_names = list(about["label_names"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as problem:
        reason = " ".join(str(problem).split())[:200].rstrip(".")
        raise ValueError(
            f"{path} is not a model of a study ({type(problem).__name__}: {reason}). `vitlens study` writes such "
            "files, cells/NAME.safetensors in its folder."
        ) from problem
    return model.eval()
