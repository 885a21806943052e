"""Every model of the paper: how timm builds it, what it costs, and the public weights that are nearest to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from vitlens.paper.tables import CLASSES, IMAGES, cells

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

    kind: ViT, hybrid, ResNet (BiT's: pre-activation, group norm, weight standardization) or EfficientNet. timm: the
    name that builds it with `arguments`; of a ResNet without `weights` that of its nearest relative. image_size: pixels
    at pre-training.
    """

    name: str
    kind: str
    timm: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    weights: tuple[Weights, ...] = ()
    image_size: int = 224


class Cost(NamedTuple):
    """Cost of a model of the paper, with a head of 1,000 classes.

    flops: of one image of `image_size` pixels; a multiply-add is two. features: input features of the head.
    """

    parameters: int
    flops: int
    image_size: int
    features: int

    def pretraining(self, epochs: float, data: str = "JFT-300M") -> float:
        """ExaFLOPs of so many epochs of pre-training, with a head of that data's classes; data: of `paper.IMAGES`."""
        head = 2 * self.features * (CLASSES[data] - 1000)
        return exaflops(self.flops + head, IMAGES[data], epochs)


def exaflops(per_image: float, images: float, epochs: float) -> float:
    """Exa (10¹⁸) FLOPs of a training: forward and backward are three forwards, each of `per_image` FLOPs.

    The rule behind Table 6: it gives the printed numbers of ViTs and hybrids within 3 %, of ResNets within 5 %, with
    `vitlens.evaluate.compute.flops` at 224 pixels and a head of JFT's classes (the paper does not spell it out).
    """
    return 3 * per_image * images * epochs / 1e18


SOURCES = {"orig": "paper", "augreg": "AugReg", "augreg2": "AugReg", "goog": "BiT-M", "ns": "Noisy Student"}
DATA = {"in21k": "ImageNet-21k", "in1k": "ImageNet", "jft": "JFT-300M"}


def _weights(name: str) -> Weights:
    """From a name in timm's way, <model>.<source>_<pre-training data>[_ft_in1k]."""
    source, data = name.partition(".")[2].split("_")[:2]
    return Weights(name, DATA[data], SOURCES[source])


def _argument(text: str) -> tuple[str, int | tuple[int, ...]]:
    """From "depth=12" or "layers=3-4-6-3" to the name and the value."""
    name, value = text.split("=")
    return name, tuple(map(int, value.split("-"))) if "-" in value else int(value)


MODELS: dict[str, Model] = {}
"""By the paper's names: its ViTs, hybrids and ResNets, and the Noisy Student that Table 2 compares with."""
COSTS: dict[str, Cost] = {}
"""Costs by model name, counted once by `evaluate.compute.cost` so that `vitlens paper models` needs no PyTorch."""
for _row in cells("models"):
    _name, _size = _row["name"], int(_row["image_size"])
    _arguments = dict(map(_argument, _row["arguments"].split()))
    _public = tuple(map(_weights, _row["weights"].split()))
    MODELS[_name] = Model(_name, _row["kind"], _row["timm"], _arguments, _public, _size)
    COSTS[_name] = Cost(int(_row["parameters"]), int(_row["flops"]), _size, int(_row["features"]))

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
    """The models with `text` in one of their names: the paper's, timm's, the kind or the source of the weights."""

    def plain(name: str) -> str:
        return re.sub("[^a-z0-9]", "", name.lower())

    found = []
    for model in MODELS.values():
        names = [model.name, model.timm, model.kind, *CALLED.get(model.name, ())]
        names += [name for weights in model.weights for name in (weights.timm, weights.source)]
        if any(plain(text) in plain(name) for name in names):
            found.append(model)
    return found


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
