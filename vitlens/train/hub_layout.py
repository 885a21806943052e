"""A trained model in timm's hub layout, which `vitlens.load_model` opens.

So does `timm.create_model("local-dir:FOLDER", pretrained=True)`, unless the architecture is `vitlens_vit`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from vitlens.data.files import write
from vitlens.train.settings import Recipe

STATISTICS = ("running_mean", "running_var")
"""Name endings of batch normalization's running statistics."""


def export(
    model: nn.Module, folder: Path | str, recipe: Recipe, class_names: Sequence[str], *,
    weights: dict[str, Tensor] | None = None, training: dict | None = None, dtype: torch.dtype = torch.float16,
) -> Path:  # fmt: skip
    """Write `config.json` and `model.safetensors` in timm's hub layout, ready for a model hub; returns the folder.

    weights: replace the model's by name, as the moving average does. training: how the model was made, written to
    `training.json`. dtype: on disk, for what it can hold; fp16 halves the file and changes logits by about 1e-3.

    Parts that are for pre-training alone go into `pretraining_head/head.safetensors`: an "mlp" head, and those of an
    objective without labels. Such a model is written without a head (`num_classes` 0).

    Raises ValueError if the number of names is not the number of classes. Layout: timm/models/_hub.py.
    """
    if len(class_names) != recipe.num_classes:
        raise ValueError(f"Expected {recipe.num_classes} class names, one for each class, got {len(class_names)}.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = stored({**model.state_dict(), **(weights or {})}, dtype)
    head = {name: state.pop(name) for name in list(state) if name.startswith(aside_of(model, recipe))}
    if head:
        aside = folder / "pretraining_head"  # timm up to 1.0.28 opens no folder with two files of weights
        aside.mkdir(exist_ok=True)
        write(aside / "head.safetensors", safetensors.torch.save(head))
    write(folder / "model.safetensors", safetensors.torch.save(state, metadata={"format": "pt"}))
    write(folder / "config.json", json.dumps(hub_config(model, recipe, class_names), indent=2).encode())
    if training is not None:
        write(folder / "training.json", json.dumps(training, indent=2, ensure_ascii=False).encode())
    return folder


def aside_of(model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
    """Prefixes of the names of weights that only pre-training needs; none if the model keeps its head."""
    if hasattr(model, "objective"):
        return ("objective.", "head.")
    return ("head.",) if recipe.head == "mlp" else ()


def stored(state: dict[str, Tensor], dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """The tensors on the CPU, floating-point ones in `dtype` unless that would overflow.

    The statistics of batch normalization keep their type: they are few, and a variance of 1e-8 would become 0.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    for name, tensor in tensors.items():
        converted = tensor.to(dtype) if tensor.is_floating_point() and not name.endswith(STATISTICS) else tensor
        tensors[name] = converted if converted.isfinite().all() else tensor
    return tensors


def hub_config(model: nn.Module, recipe: Recipe, class_names: Sequence[str]) -> dict:
    """The content of timm's `config.json`."""
    source, args = getattr(model, "pretrained_cfg", {}), recipe.arguments()
    more = {"outputs": recipe.outputs} if recipe.outputs else {}
    if isinstance(getattr(model, "global_pool", None), str):
        more["global_pool"] = model.global_pool
    if not type(model).__module__.startswith(("timm.", "vitlens.")):  # a class of whoever passed build=…
        more["architecture"] = type(model).__name__
        more["built_by"] = getattr(model, "built_by", type(model).__module__)
    if aside_of(model, recipe):
        args, class_names = {**args, "num_classes": 0}, ()
    return {
        "architecture": recipe.architecture_name, "num_classes": args["num_classes"], "num_features": recipe.width,
        "label_names": list(class_names), "model_args": args, **more,
        "pretrained_cfg": {
            "tag": recipe.name, "custom_load": False, **recipe.pixels(), "num_classes": args["num_classes"],
            "pool_size": None, "first_conv": source.get("first_conv", "patch_embed.proj"),
            "classifier": source.get("classifier", "head"),
        },
    }  # fmt: skip
