"""A model as the files that a page reads: those of its own library, `config.json` and `model.safetensors`.

`architectures.js` reads these files, whether a person drops them on a page or Python puts them into one. Here is what
the scripts run, so that a page is refused before it is written.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from vitlens.models import built_size, data_config, label_names, output_kind
from vitlens.models.preprocessing import TransformersProcessor
from vitlens.recorder.supported import (
    UnsupportedModelError,
    model_name,
    qualified_name,
    title,
    unwrap,
)
from vitlens.recorder.supported.card import card_of

KNOWN = Path(__file__).parent / "known.json"
"""Settings that the files of a model do not contain. `vitlens_explorer.live.known` writes this file."""
MOST_PARAMETERS = 32_000_000
"""Largest number of parameters. ViT-S/16 has 22 million with 1,000 classes and 30 million with 21,843."""
TIMM_CLASSES = {
    "timm.models.vision_transformer.VisionTransformer",
    "timm.models.deit.VisionTransformerDistilled",
}
TIMM_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
"""timm's name of an activation by its class."""
TIMM_PARTS = {
    "VisionTransformer",
    "VisionTransformerDistilled",
    "Sequential",
    "Block",
    "Attention",
    "Mlp",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "PatchEmbed",
    "Conv2d",
    "Dropout",
    "DropPath",
    "PatchDropout",
    "Identity",
} | TIMM_ACTIVATIONS.keys()
"""Classes of the parts of timm's models that the scripts run."""
TRANSFORMERS_CLASSES = {
    "ViTModel",
    "ViTForImageClassification",
    "DeiTModel",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "Dinov2Model",
    "Dinov2ForImageClassification",
    "Dinov2WithRegistersModel",
    "Dinov2WithRegistersForImageClassification",
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    "CLIPModel",
    "CLIPForImageClassification",
    "SiglipForImageClassification",
}
TRANSFORMERS_ACTIVATIONS = {
    "gelu",
    "gelu_python",
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "quick_gelu",
}


def model_files(model: nn.Module) -> dict[str, bytes]:
    """The files of a model by name. Weights are in half precision or bfloat16 if that is exact, else in float32.

    Raises UnsupportedModelError for models that the scripts cannot run exactly.
    """
    model = unwrap(model)
    check_runs(model)
    if qualified_name(model) in TIMM_CLASSES:
        return _timm_files(model)
    return _transformers_files(model)


def check_runs(model: nn.Module) -> None:
    """Raise UnsupportedModelError for a model that the scripts cannot run."""
    model = unwrap(model)
    library = qualified_name(model).split(".")[0]
    if qualified_name(model) in TIMM_CLASSES:
        problems = _timm_problems(model)
    elif library == "transformers" and type(model).__name__ in TRANSFORMERS_CLASSES:
        problems = _transformers_problems(model)
    else:
        raise _refusal(model, "it is not a plain VisionTransformer of timm or transformers")
    for is_wrong, reason in (*problems, *_pixel_problems(model)):
        if is_wrong:
            raise _refusal(model, reason)


def _refusal(model: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{model_name(model)} cannot run in a page: {reason}. `vitlens page MODEL IMAGE` makes a page of your images "
        "for every supported model."
    )


def _pixel_problems(model: nn.Module):
    """Yield (True if it is so, reason) of the size of a model and of its preprocessing."""
    count = sum(parameter.numel() for parameter in model.parameters())
    yield (
        count > MOST_PARAMETERS,
        f"it has {count:,} parameters, over the limit of {MOST_PARAMETERS:,}",
    )
    config = data_config(model, built_size(model))
    channels, height, width = config["input_size"]
    is_square = channels == 3 and height == width
    is_resized = config["interpolation"] in ("bilinear", "bicubic")
    is_cropped = config["crop_mode"] in ("center", "squash")
    yield (
        not (is_square and is_resized and is_cropped),
        "it does not take the square middle of a photo, resized bilinearly or bicubically",
    )


def _width_problem(width: int, heads: int, hidden: int) -> tuple[bool, str]:
    """True if the kernels do not compute the widths of tokens, heads and MLPs, with the reason."""
    is_uneven = width % heads != 0
    is_odd = any(size % 8 for size in (width, width // heads, hidden))
    return is_uneven or is_odd, "the widths of its tokens, heads and MLPs must be multiples of 8"


def _timm_problems(model: nn.Module):
    """Yield (True if it is so, reason) why the scripts cannot run a model of timm."""
    parts = list(model.modules())
    others = sorted({type(part).__qualname__ for part in parts if not _is_timm_part(part)})
    yield others, f"it has parts that the page does not know ({', '.join(others)})"
    norms = {(part.eps, part.normalized_shape) for part in parts if isinstance(part, nn.LayerNorm)}
    yield len(norms) != 1, "its layer norms differ from each other"
    yield (
        _architecture(model) is None,
        f"no model of timm has layer norms with the epsilon {model.blocks[0].norm1.eps}",
    )
    is_pooled = model.global_pool in ("token", "avg")
    yield (
        not is_pooled or getattr(model, "pool_include_prefix", False),
        "its read-out is neither a class token nor the mean of the patches",
    )
    height, width = model.patch_embed.patch_size
    yield height != width, f"its patches are not square ({height} × {width} pixels)"
    block = model.blocks[0]
    hidden = block.mlp.fc1.out_features
    yield _width_problem(block.attn.proj.out_features, block.attn.num_heads, hidden)
    width_of_heads = block.attn.num_heads * block.attn.head_dim
    yield width_of_heads != model.embed_dim, "its heads are not as wide as its tokens"


def _is_timm_part(part: nn.Module) -> bool:
    """True for a part of timm or PyTorch that the scripts run."""
    library = type(part).__module__.split(".")[0]
    return library in ("timm", "torch") and type(part).__qualname__ in TIMM_PARTS


def _architecture(model: nn.Module) -> str | None:
    """A plain architecture of timm whose norms have the epsilon of the model, which no argument sets, or None."""
    is_distilled = hasattr(model, "head_dist")
    eps = model.blocks[0].norm1.eps
    for group in json.loads(KNOWN.read_text(encoding="utf-8"))["timm"]:
        if group["eps"] == eps and group["distilled"] == is_distilled:
            return group["names"][0]
    return None


def _timm_files(model: nn.Module) -> dict[str, bytes]:
    """The files of a model of timm. `config.json` states every argument, so that it holds for changed models, too."""
    block = model.blocks[0]
    pixels = data_config(model, built_size(model))
    state = dict(model.state_dict())
    arguments = {
        "img_size": pixels["input_size"][1],
        "patch_size": model.patch_embed.patch_size[0],
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": block.attn.num_heads,
        "qkv_bias": block.attn.qkv.bias is not None,
        "proj_bias": block.attn.proj.bias is not None,
        "init_values": None if isinstance(block.ls1, nn.Identity) else 1e-5,
        "class_token": model.cls_token is not None,
        "no_embed_class": model.no_embed_class,
        "reg_tokens": model.num_reg_tokens,
        "pre_norm": not isinstance(model.norm_pre, nn.Identity),
        "final_norm": isinstance(model.norm, nn.LayerNorm)
        or isinstance(model.fc_norm, nn.LayerNorm),
        "fc_norm": isinstance(model.fc_norm, nn.LayerNorm),
        "act_layer": _activation(block.mlp.act),
    }
    if "pos_embed" not in state:
        arguments["no_embed_class"] = True
        state["pos_embed"] = torch.zeros(1, model.patch_embed.num_patches, model.embed_dim)
    config = {
        "architecture": _architecture(model),
        "title": title(model),
        "outputs": output_kind(model),
        "label_names": label_names(model),
        "model_args": arguments,
        "pretrained_cfg": pixels,
    }
    return {"config.json": _json(config), "model.safetensors": _weights(state)}


def _activation(part: nn.Module) -> str:
    """timm's name of an activation. PyTorch's GELU may be the approximate one."""
    is_tanh = getattr(part, "approximate", "none") == "tanh"
    return "gelu_tanh" if is_tanh else TIMM_ACTIVATIONS[type(part).__qualname__]


def _transformers_problems(model: nn.Module):
    """Yield (True if it is so, reason) why the scripts cannot run a model of transformers."""
    config = getattr(model.config, "vision_config", model.config)
    activation = config.hidden_act
    yield (
        activation not in TRANSFORMERS_ACTIVATIONS,
        f"the page does not know its activation ({activation})",
    )
    yield getattr(config, "use_swiglu_ffn", False), "its MLPs are SwiGLU"
    bend = getattr(config, "pooler_act", "tanh")
    yield bend != "tanh", f"the page does not know the activation of its pooler ({bend})"
    width = config.hidden_size
    hidden = getattr(config, "intermediate_size", None) or width * config.mlp_ratio
    yield _width_problem(width, config.num_attention_heads, hidden)


def _transformers_files(model: nn.Module) -> dict[str, bytes]:
    """The files that transformers writes for a model, with its names of classes and its preprocessing."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, safe_serialization=True)
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        state = safetensors.torch.load_file(Path(folder, "model.safetensors"))
    config |= {
        "title": title(model),
        "outputs": output_kind(model),
        "architectures": [type(model).__name__],
    }
    names = label_names(model)
    if names is not None:
        config["id2label"] = dict(enumerate(names))
    return {
        "config.json": _json(config),
        "preprocessor_config.json": _json(_processor(model)),
        "model.safetensors": _weights(state),
    }


def _processor(model: nn.Module) -> dict:
    """Preprocessing in the settings of transformers: those of the model's processor, else those that vitlens uses."""
    pixels = data_config(model, built_size(model))
    card = card_of(model)
    if card is not None and isinstance(card.transform, TransformersProcessor):
        return card.transform.processor.to_dict()
    _, side, _ = pixels["input_size"]
    is_squeezed = pixels["crop_mode"] == "squash"
    shorter = {"shortest_edge": int(side / pixels["crop_pct"])}
    return {
        "do_resize": True,
        "size": {"height": side, "width": side} if is_squeezed else shorter,
        "resample": {"bilinear": 2, "bicubic": 3}[pixels["interpolation"]],
        "do_center_crop": not is_squeezed,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": pixels["mean"],
        "image_std": pixels["std"],
    }


def _json(value: dict) -> bytes:
    return json.dumps(value, indent=1, default=str).encode()


def _weights(state: dict[str, Tensor]) -> bytes:
    """Tensors by name as a safetensors file."""
    return safetensors.torch.save({name: _shortest(tensor) for name, tensor in state.items()})


def _shortest(tensor: Tensor) -> Tensor:
    """A copy of a tensor in the shortest format that holds its values exactly."""
    tensor = tensor.detach().cpu().clone().contiguous()
    if not tensor.is_floating_point():
        return tensor
    whole = tensor.float()
    for dtype in (torch.float16, torch.bfloat16):
        short = whole.to(dtype)
        if torch.equal(short.float(), whole):
            return short
    return whole
