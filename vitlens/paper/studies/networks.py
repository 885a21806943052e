"""The small models of a study (ViTs, BiT-style ResNets, hybrids, variants of one recipe) and files of their weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from timm.layers import GroupNormAct, HybridEmbed, StdConv2d
from timm.models import ResNetV2, VisionTransformer
from torch import nn

from vitlens.data.files import write
from vitlens.train.hub_layout import stored
from vitlens.train.recipes import FROM_MODEL, Recipe, recipe

SIZES_AND_CHOICES = (
    *(name for name in FROM_MODEL if name not in ("mean", "std")), "head", "head_bias", "init", "continues",
    "model_kwargs", "dropout", "drop_path", "objective", "masked",
)  # fmt: skip
"""Settings of a recipe that a `Network` is not built by; in a `Variant`, any may change."""


@dataclass(frozen=True)
class _Model:
    """What all models of a study have: a name, and changes of the study's recipe."""

    name: str
    settings: tuple[str, ...] = ()
    """Settings of the recipe to change, as `vitlens train --set` takes them, such as "positions=none"."""

    def plan(self, recipe: Recipe) -> Recipe:
        """The recipe with these settings changed. Raises ValueError if they contradict each other."""
        return recipe.override(*self.settings)

    def before(self, plan: Recipe) -> Recipe | None:
        """The recipe of the training without labels that comes before the one by `plan`; None if none does."""
        return None


@dataclass(frozen=True)
class Network(_Model):
    """A model by its sizes: a transformer, a ResNet, or both, which is a hybrid (paper, section 3.1).

    `settings` change how it is trained, such as "optimizer=sgd"; raises ValueError for those of the model.
    """

    patch: int = 0
    """Side of a patch in pixels; those of a hybrid are one feature each."""
    width: int = 0
    depth: int = 0
    """Layers of the transformer; 0 for a ResNet."""
    heads: int = 0
    stages: tuple[int, ...] = ()
    """Bottlenecks in each stage of the ResNet; all stages but the first halve height and width."""
    channels: int = 0
    """Output channels of the first stage; each next one doubles them."""

    def __post_init__(self):
        names = [setting.partition("=")[0].strip() for setting in self.settings]
        told = [name for name in names if name in SIZES_AND_CHOICES or name.startswith("model.")]
        if told:
            raise ValueError(
                f"{self.name} is a Network, which has sizes only and would ignore {told[0]}. Use a Variant for it."
            )

    @property
    def kind(self) -> str:
        return "ResNet" if not self.depth else "hybrid" if self.stages else "ViT"

    def build(self, recipe: Recipe) -> nn.Module:
        """The model in training mode, for the recipe's image size and classes; its weights are a function of its seed.

        Raises ValueError for sizes that timm cannot build from.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            try:
                model = self._resnet(recipe.num_classes) if not self.depth else self._transformer(recipe)
            except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
                raise ValueError(f"{self.name} cannot be built from {self}: {error}.") from error
        model.pretrained_cfg = {"architecture": self.name, **recipe.pixels()}
        return model.train()

    def tiny(self) -> Network:
        """The same kind, narrow and shallow."""
        return replace(
            self, width=8 * self.heads, depth=min(self.depth, 2), stages=(1,) * len(self.stages), channels=32
        )

    def _transformer(self, recipe: Recipe) -> VisionTransformer:
        embed = partial(HybridEmbed, backbone=self._resnet(0, global_pool="", preact=False)) if self.stages else None
        return VisionTransformer(
            img_size=recipe.image_size, patch_size=1 if self.stages else self.patch, embed_dim=self.width,
            depth=self.depth, num_heads=self.heads, num_classes=recipe.num_classes, patch_drop_rate=recipe.patch_drop,
            **({"embed_layer": embed} if embed else {}),
        )  # fmt: skip

    def _resnet(self, classes: int, **form) -> ResNetV2:
        """BiT's: weights standardized, GroupNorm, no other norm (Kolesnikov et al. 2020)."""
        groups = min(32, self.channels // 8)  # BiT's 32, but never of a single channel
        model = ResNetV2(
            layers=self.stages, channels=tuple(self.channels * 2**k for k in range(len(self.stages))),
            stem_chs=self.channels // 4, num_classes=classes, norm_layer=partial(GroupNormAct, num_groups=groups),
            conv_layer=partial(StdConv2d, eps=1e-8), **form,
        )  # fmt: skip
        model.stem.pool = nn.Identity()  # images of 64 pixels are too small to be halved twice before the first stage
        for stage in model.feature_info[1:]:  # the first is the stem before its pool
            stage["reduction"] //= 2
        return model


@dataclass(frozen=True)
class Variant(_Model):
    """The Vision Transformer of a study's recipe with some of its settings changed."""

    pretraining: tuple[str, ...] = ()
    """The name of a recipe without labels and changes of it: how the model first learns from all images. Empty for a
    model that begins with random weights."""
    kind: ClassVar[str] = "ViT"

    def before(self, plan: Recipe) -> Recipe | None:
        """The pre-training, with the model, pixels, seed and precision of `plan`."""
        if not self.pretraining:
            return None
        name, *changes = self.pretraining
        shared = (*FROM_MODEL, "image_size", "num_classes", "seed", "precision")
        return replace(recipe(name).override(*changes), **{field: getattr(plan, field) for field in shared})

    def build(self, recipe: Recipe) -> nn.Module:
        """The model in training mode, by its plan; its weights are a function of the recipe's seed."""
        return recipe.build()

    def tiny(self) -> Variant:
        """The same model, whose sizes are the recipe's, with a few steps of pre-training."""
        few = ("epochs=0", "steps=4", "batch_size=20", "log_every=2", "evaluate_every=1")
        return replace(self, pretraining=(*self.pretraining, *few) if self.pretraining else ())


def save(path: Path, model: nn.Module, network: Network | Variant, recipe: Recipe, class_names: Sequence[str]) -> None:
    """Write the weights, in half precision where it can hold them, and what `trained` needs to build the model."""
    about = {"network": asdict(network), "recipe": recipe.to_dict(), "label_names": list(class_names)}
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in about.items()}
    write(path, safetensors.torch.save(stored(model.state_dict()), metadata=texts))


def trained(path: Path | str, *, weights: bool = True) -> nn.Module:
    """The model of `cells/NAME.safetensors` of a study, in eval mode, with its class names as `label_names`.

    weights: without them it is the model before its training. Raises ValueError for a file that is missing, or was not
    written by a study.
    """
    try:
        with safe_open(path, "pt") as file:
            about = {name: json.loads(text) for name, text in (file.metadata() or {}).items() if name != "format"}
            state = {name: file.get_tensor(name) for name in file.keys()} if weights else None  # noqa: SIM118
        kind = Network if "stages" in about["network"] else Variant
        lists = {name: tuple(value) for name, value in about["network"].items() if isinstance(value, list)}
        network = kind(**{**about["network"], **lists})
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
