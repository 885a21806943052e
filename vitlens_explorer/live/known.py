"""Settings that the files of a model leave out and a page needs, written to known.json from the libraries.

timm's `config.json` names an architecture, but not its number of heads, the epsilon of its norms or its activation, and
no tensor has them. transformers leaves out settings that have their default. `python -m vitlens_explorer.live.known`
writes the file again, for a newer timm or transformers.
"""

from __future__ import annotations

import json
import re

from torch import nn

from vitlens import files
from vitlens.recorder.supported import qualified_name
from vitlens_explorer.live.model_files import KNOWN, TIMM_ACTIVATIONS, TIMM_CLASSES, TIMM_PARTS

INNER_NORM = re.compile(r"\.(attn|mlp)\.(\w_)?norm\.")
"""Names of weights of a norm inside attention or an MLP."""
CONFIGS = {
    "vit": "ViTConfig",
    "deit": "DeiTConfig",
    "dinov2": "Dinov2Config",
    "dinov2_with_registers": "Dinov2WithRegistersConfig",
    "clip_vision_model": "CLIPVisionConfig",
    "siglip_vision_model": "SiglipVisionConfig",
}
"""Class of transformers' configuration by its `model_type`."""
SETTINGS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "layer_norm_eps",
    "image_size",
    "patch_size",
)
PROCESSORS = {
    "vit": "ViT",
    "deit": "DeiT",
    "dinov2": "Bit",
    "dinov2_with_registers": "Bit",
    "clip_vision_model": "CLIP",
    "siglip_vision_model": "Siglip",
}
"""Class of transformers' preprocessing by the `model_type` of the model, without "ImageProcessor"."""
STEPS = (
    *("do_resize", "size", "resample", "do_center_crop", "crop_size"),
    *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
)


def known_models() -> dict:
    """The content of known.json: {"timm": groups of architectures, "configs", "processors", "processorOf"}.

    A group has the `names` of architectures that differ in nothing else.
    """
    import transformers

    configs = {
        kind: {name: getattr(getattr(transformers, title)(), name) for name in SETTINGS}
        for kind, title in CONFIGS.items()
    }
    processors = {
        title: _steps(getattr(transformers, f"{title}ImageProcessor")())
        for title in dict.fromkeys(PROCESSORS.values())
    }
    return {
        "timm": _timm_groups(),
        "configs": configs,
        "processors": processors,
        "processorOf": PROCESSORS,
    }


def _steps(processor: object) -> dict:
    """Settings of a preprocessing that a page reads."""
    return {name: value for name, value in processor.to_dict().items() if name in STEPS}


def _timm_groups() -> list[dict]:
    """Settings of timm's plain Vision Transformers, each with the names that have them."""
    groups: dict[str, dict] = {}
    for name, settings in _timm_settings():
        group = groups.setdefault(json.dumps(settings), settings | {"names": []})
        group["names"].append(name)
    return list(groups.values())


def _timm_settings():
    """Yield (name, settings) of timm's architectures that the scripts run."""
    import timm
    import torch

    modules = ["vision_transformer", "deit"]
    names = [name for module in modules for name in timm.list_models(module=module)]
    for name in sorted(names):
        with torch.device("meta"):
            model = timm.create_model(name, weight_init="skip")
        if _is_plain(model):
            yield name, _settings_of(model)


def _is_plain(model: nn.Module) -> bool:
    """True for a model that consists of the parts that the scripts run."""
    if qualified_name(model) not in TIMM_CLASSES:
        return False
    parts = {type(part).__qualname__ for part in model.modules() if part is not model}
    if not parts <= TIMM_PARTS:
        return False
    if model.global_pool not in ("token", "avg") or model.pool_include_prefix:
        return False
    inner_norms = [name for name in model.state_dict() if INNER_NORM.search(name)]
    return not inner_norms


def _settings_of(model: nn.Module) -> dict:
    """Settings of a model for the scripts."""
    block = model.blocks[0]
    norms = {part.eps for part in model.modules() if isinstance(part, nn.LayerNorm)}
    (eps,) = norms
    return {
        "heads": block.attn.num_heads,
        "width": model.embed_dim,
        "depth": len(model.blocks),
        "patch": model.patch_embed.patch_size[0],
        "eps": eps,
        "activation": TIMM_ACTIVATIONS[type(block.mlp.act).__qualname__],
        "pool": model.global_pool,
        "placesPrefix": not model.no_embed_class,
        "classToken": model.cls_token is not None,
        "registers": model.num_reg_tokens,
        "qkvBias": block.attn.qkv.bias is not None,
        "scaled": not isinstance(block.ls1, nn.Identity),
        "normPre": not isinstance(model.norm_pre, nn.Identity),
        "normPooled": not isinstance(model.fc_norm, nn.Identity),
        "distilled": hasattr(model, "head_dist"),
    }


def main() -> None:
    """Write known.json, one line for each group, configuration and preprocessing."""
    known = known_models()
    groups = [json.dumps(group) for group in known["timm"]]
    parts = ['"timm": [\n' + ",\n".join(groups) + "\n]"]
    for title in ("configs", "processors", "processorOf"):
        lines = [f"{json.dumps(kind)}: {json.dumps(value)}" for kind, value in known[title].items()]
        parts.append(f'"{title}": {{\n' + ",\n".join(lines) + "\n}")
    files.write(KNOWN, "{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    main()
