"""A training run as data.

A ``Recipe`` says everything that a run depends on except the images. It is frozen, refuses contradictions when it is
made, goes to JSON and back, and has a ``tiny()`` mode that takes the same path in seconds on a CPU.

Schedules are functions of progress (0 at the first step, 1 after the last), so that the number of epochs can be fitted
to the time at hand without touching anything else.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field, replace

from vitlens.augment import Augment

CHOICES = {
    "optimizer": ("adamw", "muon"),
    "schedule": ("cosine", "linear"),
    "precision": ("bf16", "fp32"),
    "compile": ("off", "default", "max-autotune-no-cudagraphs"),
}


@dataclass(frozen=True)
class Recipe:
    """One training run. Sizes in pixels, fractions of the run where a field says progress."""

    name: str
    # The model: a timm VisionTransformer, described so that it can be built anew.
    architecture: str = "vit_tiny_patch16_224"
    """timm architecture whose arguments the next six replace."""
    image_size: int = 64
    patch_size: int = 4
    width: int = 192
    """D, the embedding dimension."""
    depth: int = 12
    """L, the number of layers."""
    heads: int = 3
    """H; width / heads is the head width K."""
    mlp_ratio: float = 4.0
    num_classes: int = 200
    # Length.
    epochs: int = 100
    batch_size: int = 1024
    """Images per optimiser step. What does not fill a batch at the end of an epoch is dropped, each time others."""
    # Optimiser.
    optimizer: str = "adamw"
    """"adamw", or "muon": Muon for the hidden matrices and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    muon_lr: float = 2e-3
    """Peak learning rate of Muon, whose updates are scaled to the root mean square of AdamW's (Liu et al. 2025)."""
    weight_decay: float = 0.05
    """Decoupled, multiplied by the learning rate; matrices only."""
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.95
    """Muon's."""
    warmup: float = 0.05
    """Progress at which the learning rate has risen linearly to its peak."""
    schedule: str = "cosine"
    """Shape of the decay to zero after warm-up: "cosine" or "linear"."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip. Muon's step does not depend on it."""
    # Regularisation.
    drop_path: float = 0.0
    """Chance of skipping a residual branch in the last layer, rising linearly from 0 in the first."""
    label_smoothing: float = 0.0
    augment: Augment = field(default_factory=Augment)
    mix_until: float = 1.0
    """Progress after which mixup and cutmix are off: the end is spent on images as they are at validation."""
    patch_drop: float = 0.0
    """Share of the patch tokens left out at random of every training image (Liu et al. 2022) …"""
    patch_drop_until: float = 0.0
    """… up to this progress. Costs one more compilation."""
    average: float = 0.0
    """Decay per step of the exponential moving average of the weights; 0 keeps none."""
    # Images.
    train_images: int = 0
    """Training images used, a random subset; 0 for all."""
    valid_images: int = 0
    """The same for validation."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    # Running.
    seed: int = 0
    evaluate_every: int = 1
    """Epochs between validations; the last step is always followed by one."""
    log_every: int = 50
    """Steps between readings of the loss: each makes the host wait for the device."""
    save_every: float = 60.0
    """Seconds between checkpoints."""
    precision: str = "bf16"
    """"bf16": autocast, with weights and optimiser in fp32; faster on recent CPUs too. "fp32": everything."""
    compile: str = "default"
    """Mode of torch.compile on CUDA: "default" (under a minute), "max-autotune-no-cudagraphs" (many), or "off"."""
    compile_cpu: bool = False
    """Compile on a CPU too, where it takes a C++ compiler and pays only over long runs."""
    tf32: bool = False
    """Let fp32 matrix products on CUDA use TF32."""
    deterministic: bool = False
    """Ask for deterministic algorithms on CUDA; the CPU is deterministic anyway."""

    def __post_init__(self):
        for name in ("betas", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has no tuples
        if isinstance(self.augment, dict):
            object.__setattr__(self, "augment", Augment(**self.augment))
        counts = "image_size patch_size width depth heads epochs batch_size num_classes evaluate_every log_every"
        shares = "warmup drop_path label_smoothing mix_until patch_drop patch_drop_until average"
        for name in counts.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1; {getattr(self, name)} came.")
        for name in shares.split():
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} lies between 0 and 1; {getattr(self, name)} came.")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}; {getattr(self, name)!r} came.")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"{self.image_size} pixels do not divide into patches of {self.patch_size}; the rest would never be "
                "seen. Choose an image_size that is a multiple of patch_size."
            )
        if self.width % self.heads:
            raise ValueError(f"A width of {self.width} does not divide among {self.heads} heads.")
        if self.average >= 1 or self.patch_drop >= 1 or self.drop_path >= 1:
            raise ValueError("average, patch_drop and drop_path stay below 1: at 1 nothing would be learned.")
        if bool(self.patch_drop) != bool(self.patch_drop_until):
            raise ValueError(
                f"patch_drop {self.patch_drop} and patch_drop_until {self.patch_drop_until} only work together; "
                "set both, or neither."
            )
        if min(self.seed, self.train_images, self.valid_images) < 0:
            raise ValueError("seed, train_images and valid_images are numbers from 0 up.")
        if self.warmup >= 1:
            raise ValueError("warmup is a share of the run below 1, or the learning rate would never decay.")

    def model_args(self) -> dict:
        """Arguments for ``timm.create_model(recipe.architecture, …)``, without what only training needs."""
        return {
            "img_size": self.image_size, "patch_size": self.patch_size, "embed_dim": self.width, "depth": self.depth,
            "num_heads": self.heads, "mlp_ratio": self.mlp_ratio, "num_classes": self.num_classes,
        }  # fmt: skip

    def build(self):
        """A fresh timm model in training mode; its weights are a function of ``seed``."""
        import timm
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return timm.create_model(
                self.architecture, **self.model_args(), drop_path_rate=self.drop_path, patch_drop_rate=self.patch_drop
            ).train()

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Recipe:
        _known(cls, values, "")
        values = dict(values)
        if isinstance(values.get("augment"), dict):
            _known(Augment, values["augment"], "augment.")
            values["augment"] = Augment(**values["augment"])
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        return cls.from_dict(json.loads(text))

    def override(self, *assignments: str) -> Recipe:
        """A copy with ``"key=value"`` applied, converted to the field's type; ``"augment.flip=0"`` reaches inside."""
        changes: dict = {}
        inner: dict = {}
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals:
                raise ValueError(f"A setting reads key=value; {assignment!r} has no equals sign.")
            owner, into, name = (Augment, inner, key[8:]) if key.startswith("augment.") else (Recipe, changes, key)
            _known(owner, [name], "augment." if owner is Augment else "")
            into[name] = _converted(typing.get_type_hints(owner)[name], key, text)
        if inner:
            changes["augment"] = replace(self.augment, **inner)
        return replace(self, **changes)

    def tiny(self) -> Recipe:
        """The same path in seconds on a CPU: one narrow layer pair, two short epochs; nothing is switched off."""
        return replace(
            self, width=16 * self.heads, depth=2, epochs=2, batch_size=min(self.batch_size, 32), train_images=256,
            valid_images=128, log_every=1,
        )  # fmt: skip


def _known(owner: type, names, prefix: str) -> None:
    fields = {f.name for f in dataclasses.fields(owner)}
    for name in names:
        if name not in fields:
            raise ValueError(
                f"There is no setting {prefix}{name}. The settings are: "
                f"{', '.join(prefix + f for f in sorted(fields))}."
            )


def _converted(kind, key: str, text: str):
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if origin is tuple:
            parts = text.strip("()[] ").split(",")
            if len(parts) != len(inner):
                raise ValueError
            return tuple(one(part) for one, part in zip(inner, parts, strict=True))
        if kind in (int, float, str):
            return kind(text)
    except (ValueError, KeyError):
        shape = f"{len(inner)} numbers separated by commas" if origin is tuple else kind.__name__
        raise ValueError(f"{key} is of type {shape}; {text!r} cannot be read as that.") from None
    raise ValueError(f"{key} is made of parts; set them one by one, as in {key}.flip=0.5.")
