"""Every model of the paper: how timm builds it, and the public weights that are nearest to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Weights:
    """Public weights. timm: model and tag, for `vitlens.load_model`. data: what they were pre-trained on.

    source: "paper" where the authors published them with it; else who trained the same architecture otherwise: "AugReg"
    (Steiner et al. 2021), "BiT-M" (Kolesnikov et al. 2020) or "Noisy Student" (Xie et al. 2020).
    """

    timm: str
    data: str
    source: str

    @property
    def classifies(self) -> bool:
        """Whether they know ImageNet's 1,000 classes; otherwise they are as pre-training left them."""
        return self.timm.endswith(("_in1k", "_475"))


@dataclass(frozen=True)
class Model:
    """One model of the paper.

    kind: "ViT", "hybrid", "ResNet" (BiT's: pre-activation, group norm, weight standardization) or "EfficientNet".
    timm: the name that builds it, with `arguments`; of a ResNet without `weights` its nearest relative, whose class is
    built with `arguments`. image_size: pixels at pre-training.
    """

    name: str
    kind: str
    timm: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    weights: tuple[Weights, ...] = ()
    image_size: int = 224


SOURCES = {"orig": "paper", "augreg": "AugReg", "augreg2": "AugReg", "goog": "BiT-M", "ns": "Noisy Student"}
DATA = {"in21k": "ImageNet-21k", "in1k": "ImageNet", "jft": "JFT-300M"}


def _weights(*names: str) -> tuple[Weights, ...]:
    """From names in timm's way, <model>.<source>_<pre-training data>[_ft_in1k]."""
    parts = [name.partition(".")[2].split("_") for name in names]
    return tuple(Weights(name, DATA[p[1]], SOURCES[p[0]]) for name, p in zip(names, parts, strict=True))


BASE = {"embed_dim": 768, "depth": 12, "num_heads": 12}
LARGE = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
HUGE = {"embed_dim": 1280, "depth": 32, "num_heads": 16}
HALVED = {"embed_dim": 384, "depth": 12, "num_heads": 6}  # the paper gives no number of heads: 6 keep their width

_ALL = (
    Model("ViT-B/16", "ViT", "vit_base_patch16_224", BASE, _weights(
        "vit_base_patch16_224.orig_in21k", "vit_base_patch16_224.orig_in21k_ft_in1k",
        "vit_base_patch16_384.orig_in21k_ft_in1k", "vit_base_patch16_224.augreg_in21k",
        "vit_base_patch16_224.augreg_in21k_ft_in1k", "vit_base_patch16_384.augreg_in21k_ft_in1k",
        "vit_base_patch16_224.augreg2_in21k_ft_in1k", "vit_base_patch16_224.augreg_in1k",
        "vit_base_patch16_384.augreg_in1k",
    )),
    Model("ViT-B/32", "ViT", "vit_base_patch32_224", BASE, _weights(
        "vit_base_patch32_224.orig_in21k", "vit_base_patch32_224.augreg_in21k",
        "vit_base_patch32_224.augreg_in21k_ft_in1k", "vit_base_patch32_384.augreg_in21k_ft_in1k",
        "vit_base_patch32_224.augreg_in1k", "vit_base_patch32_384.augreg_in1k",
    )),
    Model("ViT-L/16", "ViT", "vit_large_patch16_224", LARGE, _weights(
        "vit_large_patch16_224.orig_in21k", "vit_large_patch16_224.augreg_in21k",
        "vit_large_patch16_224.augreg_in21k_ft_in1k", "vit_large_patch16_384.augreg_in21k_ft_in1k",
    )),
    Model("ViT-L/32", "ViT", "vit_large_patch32_224", LARGE, _weights(
        "vit_large_patch32_224.orig_in21k", "vit_large_patch32_384.orig_in21k_ft_in1k",
    )),
    Model("ViT-H/14", "ViT", "vit_huge_patch14_224", HUGE, _weights("vit_huge_patch14_224.orig_in21k")),
    Model("ViT-b/32", "ViT", "vit_small_patch32_224", HALVED, _weights(
        "vit_small_patch32_224.augreg_in21k", "vit_small_patch32_224.augreg_in21k_ft_in1k",
        "vit_small_patch32_384.augreg_in21k_ft_in1k",
    )),
    # timm names one hybrid for each form of its ResNet; the transformer on it is a matter of arguments.
    Model("R50+ViT-B/16", "hybrid", "vit_base_r50_s16_224", BASE, _weights(
        "vit_base_r50_s16_224.orig_in21k", "vit_base_r50_s16_384.orig_in21k_ft_in1k",
    )),
    Model("R50+ViT-B/32", "hybrid", "vit_large_r50_s32_224", BASE),
    Model("R50+ViT-L/16", "hybrid", "vit_base_r50_s16_224", LARGE),
    Model("R50+ViT-L/32", "hybrid", "vit_large_r50_s32_224", LARGE, _weights(
        "vit_large_r50_s32_224.augreg_in21k", "vit_large_r50_s32_224.augreg_in21k_ft_in1k",
        "vit_large_r50_s32_384.augreg_in21k_ft_in1k",
    )),
    Model("R50x1", "ResNet", "resnetv2_50x1_bit", {"layers": (3, 4, 6, 3), "width_factor": 1}, _weights(
        "resnetv2_50x1_bit.goog_in21k", "resnetv2_50x1_bit.goog_in21k_ft_in1k",
    )),
    Model("R50x2", "ResNet", "resnetv2_50x1_bit", {"layers": (3, 4, 6, 3), "width_factor": 2}),
    Model("R101x1", "ResNet", "resnetv2_101x1_bit", {"layers": (3, 4, 23, 3), "width_factor": 1}, _weights(
        "resnetv2_101x1_bit.goog_in21k", "resnetv2_101x1_bit.goog_in21k_ft_in1k",
    )),
    Model("R152x1", "ResNet", "resnetv2_152x2_bit", {"layers": (3, 8, 36, 3), "width_factor": 1}),
    Model("R152x2", "ResNet", "resnetv2_152x2_bit", {"layers": (3, 8, 36, 3), "width_factor": 2}, _weights(
        "resnetv2_152x2_bit.goog_in21k", "resnetv2_152x2_bit.goog_in21k_ft_in1k",
    )),
    Model("R152x4", "ResNet", "resnetv2_152x4_bit", {"layers": (3, 8, 36, 3), "width_factor": 4}, _weights(
        "resnetv2_152x4_bit.goog_in21k", "resnetv2_152x4_bit.goog_in21k_ft_in1k",
    )),
    Model("R200x3", "ResNet", "resnetv2_152x4_bit", {"layers": (3, 24, 36, 3), "width_factor": 3}),
    Model("EfficientNet-L2", "EfficientNet", "tf_efficientnet_l2", {}, (
        Weights("tf_efficientnet_l2.ns_jft_in1k", "JFT-300M", "Noisy Student"),
        Weights("tf_efficientnet_l2.ns_jft_in1k_475", "JFT-300M", "Noisy Student"),
    ), image_size=800),
)  # fmt: skip

MODELS: dict[str, Model] = {model.name: model for model in _ALL}
"""By the paper's names: its ViTs, hybrids and ResNets, and the Noisy Student that Table 2 compares with."""

CALLED = {
    "R152x4": ("BiT-L R152x4", "BiT-M R152x4", "BiT-S R152x4"),  # one network, by the data of its pre-training
    "EfficientNet-L2": ("Noisy Student L2",),
}
"""Other names of a model. The first is the one in Table 2."""


def origin(name: str) -> tuple[Model | None, Weights | None]:
    """The model, and the weights, that a name means: the paper's or timm's, with or without a tag; None for unknown."""
    architecture = name.removeprefix("timm/").partition(".")[0]
    for model in MODELS.values():
        for weights in model.weights:
            if weights.timm == name.removeprefix("timm/"):
                return model, weights
    for model in MODELS.values():
        known = {weights.timm.partition(".")[0] for weights in model.weights}
        if name.replace("R50x1+", "R50+") == model.name or architecture in known:
            return model, None
    return None, None


def matching(text: str) -> list[Model]:
    """The models whose name has `text` in it: the paper's, timm's, or one that people write, whatever divides its parts
    ("BiT-L", "ViT-Base", "vit_b_16", "ResNet50", "noisy student", "hybrid")."""
    found = [
        model
        for model in MODELS.values()
        if any(text.lower() in name.lower() for name in (model.name, model.timm, *(w.timm for w in model.weights)))
    ]
    wanted = _plain(text)
    return found or [m for m in MODELS.values() if wanted and any(wanted in _plain(name) for name in _spoken(m))]


def _spoken(model: Model) -> list[str]:
    sizes = {"B/": "Base/", "L/": "Large/", "H/": "Huge/"}
    long = next((model.name.replace(short, size) for short, size in sizes.items() if short in model.name), model.name)
    names = [model.name, long, long.replace("R50+", "ResNet50 + "), model.name.replace("R50+", "R50x1+"), model.kind]
    names += [f"ResNet{model.name[1:]}", f"BiT {model.name}", "BiT ResNet"] if model.kind == "ResNet" else []
    return [*names, *CALLED.get(model.name, ()), *(weights.source for weights in model.weights)]


def _plain(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())


def find(name: str) -> Model:
    """A model by the paper's name, as in "ViT-L/16"; also "R50x1+ViT-B/32" as Table 6 has it. Raises ValueError."""
    name = name.replace("R50x1+", "R50+")
    if name not in MODELS:
        raise ValueError(f"The paper has no model called {name!r}; it has {', '.join(MODELS)}.")
    return MODELS[name]


def build(model: str | Model, **overrides) -> nn.Module:
    """A model of the paper with random weights, built by timm, in training mode.

    model: a name of `MODELS`, or a `Model`. overrides: further arguments of timm's class, which win over the paper's:
    `num_classes` (1,000 unless given), `img_size` (transformers), `depth`, `embed_dim`, `channels` (ResNets), …. Under
    `torch.device("meta")` nothing is allocated. Raises ValueError for an unknown name, or arguments that do not fit.
    """
    import timm
    from timm.layers import StdConv2d
    from timm.models import ResNetV2, build_model_with_cfg

    model = find(model) if isinstance(model, str) else model
    arguments = {"num_classes": 1000, **model.arguments, **overrides}
    try:
        if model.kind != "ResNet":
            return timm.create_model(model.timm, **arguments)
        # The form of BiT's weights; by class, since timm names only those ResNets that have weights.
        form = {"stem_type": "fixed", "conv_layer": partial(StdConv2d, eps=1e-8)}
        built = build_model_with_cfg(ResNetV2, model.timm, pretrained=False, **{**form, **arguments})
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(f"timm {timm.__version__} cannot build {model.name} with {overrides}: {reason}.") from error
    if not model.weights:
        built.pretrained_cfg = {**built.pretrained_cfg, "architecture": model.name}
    return built
