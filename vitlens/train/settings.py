"""`Recipe`: every setting of a training run, what each means, and which go together.

A recipe says everything that a run depends on except the images. It is frozen, refuses contradictions when it is made,
goes to JSON and back, and has a `tiny()` mode that takes the same path in seconds on a CPU.

Schedules are functions of progress (0 at the first step, 1 after the last), so that the number of epochs can be fitted
to the time at hand without touching anything else.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from vitlens.data.augment import Augment
from vitlens.data.transforms import check_pad
from vitlens.train import choices, fields, objectives
from vitlens.train.model import build

FROM_MODEL = ("architecture", "patch_size", "width", "depth", "heads", "mlp_ratio", "mean", "std", *choices.SETTINGS)
"""Settings that a run takes from the model that it starts from, if it does."""

CHOICES = {
    "optimizer": ("adamw", "muon", "sgd"),
    "schedule": ("cosine", "linear", "stairs"),
    "loss": ("softmax", "sigmoid"),
    "head": ("linear", "mlp"),
    "objective": tuple(objectives.OBJECTIVES),
    "precision": ("auto", "bf16", "fp32"),
    "compile": ("off", "default", "max-autotune-no-cudagraphs"),
    **choices.SETTINGS,
}
STAIRS = (10 / 40, 23 / 40, 30 / 40, 37 / 40)
"""Progress at which `schedule="stairs"` falls to a tenth: BiT's epochs 10, 23, 30 and 37 of 40."""
# fmt: off
RANGES = {
    "is at least 1": (lambda n: n >= 1, "image_size patch_size width depth heads batch_size accumulate num_classes "
                                        "evaluate_every log_every"),
    "is a number from 0 up": (lambda n: n >= 0, "seed train_images valid_images epochs steps warmup_steps resize clip "
                                                "weight_decay save_every decoder_depth"),
    "is above 0": (lambda n: n > 0, "lr muon_lr mlp_ratio layer_decay std"),
    "lies between 0 and 1": (lambda n: 0 <= n <= 1, "warmup dropout drop_path label_smoothing mix_until patch_drop "
                                                    "patch_drop_until average layer_decay masked"),
    "stays below 1, from 0 up, or nothing would be learned": (lambda n: 0 <= n < 1, "average patch_drop drop_path "
                                                                                    "dropout momentum betas"),
}
# fmt: on
"""What the numbers of a setting must satisfy: the rule in words, the rule, and the settings that it holds for."""


@dataclass(frozen=True)
class Recipe:
    """One training run. Sizes in pixels, fractions of the run where a field says progress."""

    name: str
    """Its name, as `vitlens train --recipe` takes it."""
    # The model: a timm VisionTransformer, described so that it can be built anew.
    architecture: str = "vit_tiny_patch16_224"
    """timm architecture whose arguments the next six replace."""
    image_size: int = 64
    """Side in pixels of what the model sees."""
    patch_size: int = 4
    """Side in pixels of a patch."""
    width: int = 192
    """D, the embedding dimension."""
    depth: int = 12
    """L, the number of layers."""
    heads: int = 3
    """H; width / heads is the head width K."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLPs by D."""
    positions: str = "learned-1d"
    """How the model knows where a patch lies: "learned-1d", as in the paper; "none"; "learned-2d", half a vector for
    the column and half for the row; "sinusoidal"; and within attention "relative-1d", "relative-2d" and "rotary"."""
    positions_at: str = "stem"
    """Where learned ones are added: "stem", "every-layer" with a table for each, or "every-layer-shared"."""
    readout: str = "class-token"
    """What the head reads: "class-token", as in the paper; "mean", of the patches after the last norm, which the paper
    found as good at a lower rate; or "attention-pool", with a learned query."""
    registers: int = 0
    """Tokens beside the patches that no head reads, 0 or 4; they take up what would become artifacts of maps."""
    tokenizer: str = "patches"
    """How pixels become tokens: "patches", as in the paper; "conv-stem", convolutions of stride 2; or
    "shifted-patches", each patch with four shifted copies."""
    attention: str = "plain"
    """"plain", as in the paper; "locality", with a learned temperature and hidden from oneself; or "axial", along rows
    and then along columns, which makes two layers of each and costs the time of both."""
    equivariance: str = "none"
    """What turns tokens with the picture and leaves logits as they are: "flips", left to right, or "rotations" by 90°,
    averaged over two or four copies of each picture, at their cost; "none" as in the paper."""
    num_classes: int = 200
    """Classes; a run takes the number from its data."""
    head: str = "linear"
    """"linear", or "mlp": the paper's for pre-training, a hidden layer with tanh before a zero-initialized one."""
    head_bias: float = 0.0
    """Initial output biases of an "mlp" head; −10 keeps a sigmoid loss over many classes small at first."""
    init: str = ""
    """Model to start from, a timm name or a folder; its head is replaced by a linear one of zeros (`starting_from`)."""
    continues: bool = False
    """Made for trained models: refuses to start from random weights."""
    model_kwargs: dict = field(default_factory=dict)
    """More keywords of timm's architecture, set as model.pos_embed=none; with init, those that it was built with."""
    # What is learned.
    objective: str = "labels"
    """"labels", or without them what corrupted patches show (the paper's B.1.2): their "mean-color", "colors-4x4" of
    their parts or "pixels"; or "autoencoder", the pixels of hidden patches from visible ones (He et al. 2022)."""
    masked: float = 0.0
    """Share of the patches that are corrupted or hidden; 0 with labels."""
    decoder_depth: int = 0
    """Layers of the decoder of an autoencoder, which is half as wide as the model; else 0."""
    # Length.
    epochs: int = 100
    """Passes over the training images; 0 where steps are given."""
    steps: int = 0
    """Optimizer steps, where a run is counted in them; then epochs is 0."""
    batch_size: int = 1024
    """Images per optimizer step. What does not fill a batch at the end of an epoch is dropped, each time others."""
    accumulate: int = 1
    """Parts that a batch is cut into, one after the other, to save memory; the gradient is that of the whole,
    but where each part has its own random numbers (dropout, hidden patches) or batch normalization."""
    # Optimizer.
    optimizer: str = "adamw"
    """"adamw", "sgd" with momentum, or "muon": Muon for the hidden matrices and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate of AdamW or SGD."""
    muon_lr: float = 2e-3
    """Peak learning rate of Muon, whose updates are scaled to the root mean square of AdamW's (Liu et al. 2025)."""
    weight_decay: float = 0.05
    """Weight decay of matrices, times the learning rate: decoupled, except for SGD, where it joins the momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decays of the mean gradient and of its square."""
    momentum: float = 0.95
    """Momentum of Muon and SGD."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each layer to the one below it (Clark et al. 2020); 1 treats all alike."""
    warmup: float = 0.05
    """Progress at which the learning rate has risen linearly to its peak."""
    warmup_steps: int = 0
    """The same counted in steps; then warmup is 0."""
    schedule: str = "cosine"
    """Shape of the decay after warm-up: "cosine", "linear", or "stairs", tenfold at 25, 57.5, 75 and 92.5 % of the run:
    BiT's, beside sgd with momentum=0.9, lr=0.03 · batch_size / 256 and weight_decay=1e-4 (paper, Table 7)."""
    end_lr: float = 0.0
    """Where `lr` ends; Muon's rate falls by the same factor."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    loss: str = "softmax"
    """"softmax": cross-entropy. "sigmoid": binary cross-entropy of each class, summed, as for labels that overlap."""
    # Regularization.
    dropout: float = 0.0
    """The paper's: after adding positions, after attention's projection, and after both layers of each MLP."""
    drop_path: float = 0.0
    """Chance of skipping a residual branch in the last layer, rising linearly from 0 in the first."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes (Szegedy et al. 2016)."""
    augment: Augment = field(default_factory=Augment)
    """Augmentation of training images, set as augment.flip=0.5 and so on."""
    mix_until: float = 1.0
    """Progress after which mixup and cutmix are off: the end is spent on images as they are at validation."""
    patch_drop: float = 0.0
    """Share of the patch tokens left out at random of every training image (Liu et al. 2022) …"""
    patch_drop_until: float = 0.0
    """… up to this progress. Costs one more compilation."""
    average: float = 0.0
    """Decay per step of the exponential moving average of the weights; 0 keeps none."""
    # Images.
    resize: int = 0
    """Side in pixels at which training images are held, to cut image_size from at random; 0: image_size itself."""
    squash: bool = False
    """Squeeze whole images into squares (the paper's fine-tuning), instead of cutting the center square out."""
    train_images: int = 0
    """Training images used, a random subset; 0 for all."""
    valid_images: int = 0
    """Validation images used, a random subset; 0 for all."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Subtracted from the red, green and blue of pixels in 0…1 …"""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """… before they are divided by this."""
    # Running.
    seed: int = 0
    """Seed of the initial weights, the order of the images, augmentation and dropout."""
    evaluate_every: int = 1
    """Epochs between validations; the last step is always followed by one."""
    log_every: int = 50
    """Steps between readings of the loss: each makes the host wait for the device."""
    save_every: float = 60.0
    """Seconds between checkpoints."""
    precision: str = "auto"
    """"bf16": autocast and Muon's products, with weights and moments in fp32. "fp32": everything. "auto": bf16 where
    the device multiplies it in hardware, else fp32; a run keeps what was chosen when it began."""
    compile: str = "default"
    """Mode of torch.compile on CUDA: "default" (under a minute), "max-autotune-no-cudagraphs" (many), or "off"."""
    compile_cpu: bool = False
    """Compile on a CPU too, which takes a C++ compiler, gains some percent in fp32 and loses some in bf16."""
    tf32: bool = False
    """Let fp32 matrix products on CUDA use TF32."""
    deterministic: bool = False
    """Ask for deterministic algorithms on CUDA; the CPU is deterministic anyway."""

    def __post_init__(self):
        for name in ("betas", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has no tuples
        fields.check(self, RANGES, CHOICES)
        objectives.check(self)
        choices.check_model(self)
        _check_run(self)

    def length(self, images: int) -> int:
        """Optimizer steps of a run on that many training images."""
        return self.steps or images // self.batch_size * self.epochs

    def rate(self, step: int, steps: int) -> float:
        """Factor of the peak learning rates in step `step` (from 0) of `steps`.

        Linear from 0 up to 1, then down to `end_lr` along a cosine, a line or stairs; neither end is a step of its own.
        """
        progress, warmup = (step + 1) / (steps + 1), self.warmup or self.warmup_steps / (steps + 1)
        if progress < warmup:
            return progress / warmup
        left = (1 - progress) / (1 - warmup)
        if self.schedule == "stairs":
            decay = 0.1 ** sum(progress >= stair for stair in STAIRS)
        else:
            decay = 0.5 * (1 - math.cos(math.pi * left)) if self.schedule == "cosine" else left
        return decay + (1 - decay) * self.end_lr / self.lr

    def pixels(self) -> dict:
        """How images are preprocessed, in the words of timm's `pretrained_cfg`: as for validation."""
        return {
            "input_size": [3, self.image_size, self.image_size],
            "fixed_input_size": "img_size" in choices.arguments(self),  # timm builds such a model for its size
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "squash" if self.squash else "center",
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def build(self, weights: bool = True) -> nn.Module:
        """A timm model in training mode; its fresh weights are a function of `seed`.

        weights: False does not read the model to start from, which is enough if a checkpoint is loaded next.
        Raises ValueError if timm cannot build the architecture with these settings.
        """
        rates = {keyword: getattr(self, name) for keyword, name in choices.RATES.items() if getattr(self, name)}
        mlp_bias = self.head_bias if self.head == "mlp" else None
        source = self.init if weights else ""
        arguments = {**choices.arguments(self), **rates}
        model = build(choices.architecture(self), arguments, self.seed, mlp_bias, source)
        model.pretrained_cfg = {**model.pretrained_cfg, **self.pixels()}
        return objectives.attach(model, self)

    def to_dict(self) -> dict:
        """Plain data; the settings of the augmentation are a dictionary within."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Recipe:
        """The recipe that `to_dict` was called on. Raises ValueError for unknown settings and wrong types."""
        values = fields.from_json(cls, values)
        if "augment" in values:
            values["augment"] = Augment(**fields.from_json(Augment, values["augment"], "augment."))
        return cls(**values)

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that `to_json` was called on. Raises ValueError for text that is none."""
        return cls.from_dict(json.loads(text))

    def override(self, *assignments: str) -> Recipe:
        """A copy with each `"key=value"` applied, converted to the field's type.

        `"augment.flip=0"` changes the augmentation, `"model.pos_embed=none"` a keyword of timm's architecture.
        """
        changes, augment, model = {}, {}, {}
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals:
                raise ValueError(f"A setting reads key=value; {assignment!r} has no equals sign.")
            if key in ("augment", "model_kwargs"):
                example = "augment.flip=0.5" if key == "augment" else "model.pos_embed=none"
                raise ValueError(f"{key} is made of parts; set them one by one, as in {example}.")
            prefix, _, name = key.partition(".")
            if name and prefix == "augment":
                augment[name] = fields.from_text(Augment, name, text, "augment.")
            elif name and prefix == "model":
                model[name] = fields.from_free_text(text)
            else:
                changes[key] = fields.from_text(Recipe, key, text)
        if augment:
            changes["augment"] = replace(self.augment, **augment)
        if model:
            changes["model_kwargs"] = {**self.model_kwargs, **model}
        return replace(self, **changes)

    def described(self) -> Iterator[tuple[str, object, str]]:
        """(setting, value, meaning) of each field; those of the augmentation as `augment.flip` and so on.

        A recipe for trained models leaves out what the model brings.
        """
        brought = (*FROM_MODEL, "model_kwargs") if self.continues else ()
        for owner, values, prefix in ((Recipe, vars(self), ""), (Augment, vars(self.augment), "augment.")):
            for name, meaning in fields.meanings(owner).items():
                if name not in ("augment", *brought):
                    yield prefix + name, values[name], meaning

    def tiny(self) -> Recipe:
        """The same path in seconds on a CPU: one narrow layer pair, two short epochs; nothing is switched off."""
        return replace(
            self, width=16 * self.heads, depth=2, epochs=2, steps=0, warmup=self.warmup or 0.1, warmup_steps=0,
            batch_size=min(self.batch_size, 32 * self.accumulate), train_images=256, valid_images=128, log_every=1,
        )  # fmt: skip


def _check_run(r: Recipe) -> None:
    """Raise ValueError for settings that contradict each other."""
    if r.warmup == 1:
        raise ValueError("warmup is a share of the run below 1, or the learning rate would never decay.")
    if r.seed >= 2**63:
        raise ValueError(f"seed must be below 2⁶³, got {r.seed}.")
    if bool(r.patch_drop) != bool(r.patch_drop_until):
        given = f"patch_drop {r.patch_drop} and patch_drop_until {r.patch_drop_until}"
        raise ValueError(f"{given} only work together; set both, or neither.")
    if bool(r.epochs) == bool(r.steps):
        given = f"epochs {r.epochs} and steps {r.steps}"
        raise ValueError(f"Expected the length of a run in epochs or in steps, got {given}. Set one of them to 0.")
    if r.warmup and r.warmup_steps:
        given = f"warmup {r.warmup} and warmup_steps {r.warmup_steps}"
        raise ValueError(f"Expected the warm-up in steps or as a share of the run, got {given}. Set one of them to 0.")
    if not 0 <= r.end_lr <= r.lr:
        raise ValueError(f"end_lr must be between 0 and lr {r.lr}, got {r.end_lr}.")
    if r.layer_decay < 1 and r.optimizer == "muon":
        raise ValueError(f"Muon's steps have one size, so it takes layer_decay=1, got {r.layer_decay}. Or use adamw.")
    if r.batch_size % r.accumulate:
        raise ValueError(f"A batch of {r.batch_size} does not divide into {r.accumulate} equal parts.")
    if r.resize and r.resize < r.image_size:
        raise ValueError(f"{r.image_size} pixels cannot be cut from images held at {r.resize}: raise resize.")
    check_pad(r.augment.pad, r.resize or r.image_size, r.resize or r.image_size)
