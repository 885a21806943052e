"""Write the folder of the bundled model, DeiT-Tiny on ImageNet-1k, in timm's hub layout and half precision.

    python -m experiments.bundle --weights deit_tiny_patch16_224.safetensors --out data/checkpoints/deit_tiny

`--weights` is a file with the weights of timm's `deit_tiny_patch16_224`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import timm
from safetensors.torch import save_file
from timm.data import ImageNetInfo
from timm.models import load_state_dict

ARCHITECTURE = "deit_tiny_patch16_224"
TITLE = "DeiT-Tiny, ImageNet-1k"
SETTINGS = ("interpolation", "crop_pct", "crop_mode", "mean", "std", "num_classes")
LAYERS = ("first_conv", "classifier")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    model = timm.create_model(ARCHITECTURE)
    model.load_state_dict(load_state_dict(options.weights))
    options.out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, options.out / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config(model), indent=1, ensure_ascii=False)
    (options.out / "config.json").write_text(text + "\n", encoding="utf-8")


def config(model) -> dict:
    """The configuration of the model, with the names of ImageNet's classes and the title for figures."""
    published = model.pretrained_cfg
    info = ImageNetInfo()
    settings = {key: published[key] for key in (*SETTINGS, *LAYERS)}
    return {
        "title": TITLE,
        "license": "apache-2.0",
        "architecture": ARCHITECTURE,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "global_pool": model.global_pool,
        "label_names": [info.index_to_description(number) for number in range(model.num_classes)],
        "pretrained_cfg": {
            "tag": published["tag"],
            "custom_load": False,
            "input_size": list(published["input_size"]),
            "fixed_input_size": published["fixed_input_size"],
            **settings,
        },
    }


if __name__ == "__main__":
    main()
