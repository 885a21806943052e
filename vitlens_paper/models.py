"""Models of the paper with their timm architectures, costs and public weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from vitlens.names import require_known
from vitlens_paper.tables import CLASSES, IMAGES, cells

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Weights:
    """Public weights. timm: model and tag, for `vitlens.load_model`. data: pre-training data.

    source: "paper" for weights published with it, else the work that trained the same architecture: "AugReg" (Steiner
    et al. 2021), "BiT-M" (Kolesnikov et al. 2020) or "Noisy Student" (Xie et al. 2020).

    >>> vitlens_paper.find("ViT-B/16").weights[0].source
    'paper'
    """

    timm: str
    data: str
    source: str


@dataclass(frozen=True)
class Model:
    """One model of the paper.

    kind: ViT, hybrid, ResNet (BiT's: pre-activation, group norm, weight standardization) or EfficientNet. timm: the
    architecture for `arguments`, or the most similar one for a ResNet without `weights`. image_size: pixels at
    pre-training.

    >>> vitlens_paper.find("ViT-L/16").kind
    'ViT'
    """

    name: str
    kind: str
    timm: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    weights: tuple[Weights, ...] = ()
    image_size: int = 224


class Cost(NamedTuple):
    """Cost of a model of the paper, with a head of 1,000 classes.

    flops: for one image of `image_size` pixels. A multiply-add is two. features: input features of the head.

    >>> round(vitlens_paper.COSTS["ViT-B/16"].pretraining(epochs=7))
    224
    """

    parameters: int
    flops: int
    image_size: int
    features: int

    def pretraining(self, epochs: float, data: str = "JFT-300M") -> float:
        """ExaFLOPs of `epochs` epochs of pre-training on a data set of `paper.IMAGES`, with a head of its classes."""
        head = 2 * self.features * (CLASSES[data] - 1000)
        return exaflops(self.flops + head, IMAGES[data], epochs)


def exaflops(per_image: float, images: float, epochs: float) -> float:
    """ExaFLOPs (10¹⁸) of a training. A forward and backward pass counts as three forwards of `per_image` FLOPs.

    With `evaluate.compute.flops` at 224 pixels and a head of JFT's classes, this gives the numbers of Table 6
    within 3 % for ViTs and hybrids and within 5 % for ResNets.

    >>> vitlens_paper.exaflops(per_image=1e9, images=1e9, epochs=1)
    3.0
    """
    return 3 * per_image * images * epochs / 1e18


SOURCES = {
    "orig": "paper",
    "augreg": "AugReg",
    "augreg2": "AugReg",
    "goog": "BiT-M",
    "ns": "Noisy Student",
}
DATA = {"in21k": "ImageNet-21k", "in1k": "ImageNet", "jft": "JFT-300M"}


def _weights(name: str) -> Weights:
    """Weights from a timm name, <model>.<source>_<pre-training data>[_ft_in1k]."""
    source, data = name.partition(".")[2].split("_")[:2]
    return Weights(name, DATA[data], SOURCES[source])


def _argument(text: str) -> tuple[str, int | tuple[int, ...]]:
    """Name and value of "depth=12" or "layers=3-4-6-3"."""
    name, value = text.split("=")
    numbers = tuple(int(number) for number in value.split("-"))
    return name, numbers if len(numbers) > 1 else numbers[0]


MODELS: dict[str, Model] = {}
"""ViTs, hybrids and ResNets by the paper's names, and the Noisy Student of Table 2."""
COSTS: dict[str, Cost] = {}
"""Costs by model name, counted once by `evaluate.compute.cost` so that `vitlens paper models` needs no PyTorch."""
for _row in cells("models"):
    _name, _size = _row["name"], int(_row["image_size"])
    MODELS[_name] = Model(
        name=_name,
        kind=_row["kind"],
        timm=_row["timm"],
        arguments=dict(_argument(text) for text in _row["arguments"].split()),
        weights=tuple(_weights(name) for name in _row["weights"].split()),
        image_size=_size,
    )
    COSTS[_name] = Cost(
        parameters=int(_row["parameters"]),
        flops=int(_row["flops"]),
        image_size=_size,
        features=int(_row["features"]),
    )

CALLED = {
    # one network, by the data of its pre-training
    "R152x4": ("BiT-L R152x4", "BiT-M R152x4", "BiT-S R152x4"),
    "EfficientNet-L2": ("Noisy Student L2",),
}
"""Other names of a model. The first is the one in Table 2."""


def origin(name: str) -> tuple[Model | None, Weights | None]:
    """Model and weights of a name of the paper or timm, with or without a tag. None for unknown ones.

    >>> vitlens_paper.origin("vit_base_patch16_224.augreg_in21k")[0].name
    'ViT-B/16'
    """
    timm_name = name.removeprefix("timm/")
    architecture = timm_name.partition(".")[0]
    for model in MODELS.values():
        for weights in model.weights:
            if weights.timm == timm_name:
                return model, weights
    for model in MODELS.values():
        known = {weights.timm.partition(".")[0] for weights in model.weights}
        if name.replace("R50x1+", "R50+") == model.name or architecture in known:
            return model, None
    return None, None


def find(name: str) -> Model:
    """Model by the paper's name, such as "ViT-L/16" or Table 6's "R50x1+ViT-B/32". Raises ValueError if unknown.

    >>> vitlens_paper.find("ViT-L/16").timm
    'vit_large_patch16_224'
    """
    name = name.replace("R50x1+", "R50+")
    require_known(name, MODELS, "A model of the paper")
    return MODELS[name]


def build(model: str | Model, **overrides) -> "nn.Module":
    """A model of the paper with random weights, built by timm, in training mode.

    model: a name of `MODELS`, or a `Model`. overrides: arguments of timm's class that replace the paper's:
    `num_classes` (default 1,000), `img_size` (transformers), `depth`, `embed_dim`, `channels` (ResNets), …. Allocates
    no weights under `torch.device("meta")`. Raises ValueError for an unknown name, and for arguments that timm rejects.

    >>> vitlens_paper.build("ViT-B/32", num_classes=10, depth=1).head.out_features
    10
    """
    import timm
    from timm.layers import StdConv2d
    from timm.models import ResNetV2, build_model_with_cfg

    if isinstance(model, str):
        model = find(model)
    arguments = {"num_classes": 1000, **model.arguments, **overrides}
    try:
        if model.kind != "ResNet":
            return timm.create_model(model.timm, **arguments)
        # The architecture of BiT's weights, by class, because timm names only ResNets with weights.
        arguments.setdefault("stem_type", "fixed")
        arguments.setdefault("conv_layer", partial(StdConv2d, eps=1e-8))
        built = build_model_with_cfg(ResNetV2, model.timm, pretrained=False, **arguments)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(
            f"timm {timm.__version__} cannot build {model.name} with {overrides}: {reason}."
        ) from error
    if not model.weights:
        built.pretrained_cfg = {**built.pretrained_cfg, "architecture": model.name}
    return built
