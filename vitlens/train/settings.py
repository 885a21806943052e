"""`Recipe`: the settings of a training run, their meanings, and invalid combinations.

A recipe determines a run up to its images. It is frozen, converts to JSON and back, and has a `tiny()` mode that runs
the same code in seconds on a CPU. Schedules are functions of progress (0 at the first step, 1 after the last), so that
the number of epochs can be set independently.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from vitlens.data.augment import Augment, check_pad, seed_of
from vitlens.fields import check_settings, setting
from vitlens.names import require_known
from vitlens.train.model import VARIANTS, build, variants_among
from vitlens.train.objectives import LABELS, OBJECTIVES, meanings

FROM_MODEL = ("architecture", "patch_size", "width", "depth", "heads", "mlp_ratio", "mean", "std")
"""Settings that a run takes from the model that it starts from."""
SIZES = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "embed_dim": "width",
    "depth": "depth",
    "num_heads": "heads",
    "mlp_ratio": "mlp_ratio",
}
RATES = {
    "drop_path_rate": "drop_path",
    "patch_drop_rate": "patch_drop",
    "pos_drop_rate": "dropout",
    "proj_drop_rate": "dropout",
}
"""timm's keywords for settings of a recipe."""
STAIRS = (10 / 40, 23 / 40, 30 / 40, 37 / 40)
"""Progress at which `schedule="stairs"` falls to a tenth: BiT's epochs 10, 23, 30 and 37 of 40."""
COUNT, AMOUNT, POSITIVE = "at least 1", "0 or more", "above 0"
SHARE, BELOW_1 = "between 0 and 1", "from 0 up and below 1"


def check_sizes(r: Recipe) -> None:
    """Raise ValueError for sizes that do not divide each other."""
    cut = r.image_size % r.patch_size and not (r.init or r.continues)
    if r.image_size < r.patch_size or cut:
        raise ValueError(
            f"image_size {r.image_size} must be a multiple of patch_size {r.patch_size}, or edge pixels are cut off."
        )
    if r.width % r.heads:
        raise ValueError(f"width {r.width} must be a multiple of heads {r.heads}.")


def check_course(r: Recipe) -> None:
    """Raise ValueError for invalid combinations of length, schedule, batch and optimizer."""
    if bool(r.patch_drop) != bool(r.patch_drop_until):
        raise ValueError("patch_drop and patch_drop_until only work together.")
    if bool(r.epochs) == bool(r.steps):
        raise ValueError(
            f"set the length in epochs ({r.epochs}) or in steps ({r.steps}), the other to 0."
        )
    if r.warmup and r.warmup_steps:
        raise ValueError(
            f"set warmup ({r.warmup}) or warmup_steps ({r.warmup_steps}), the other to 0."
        )
    if r.end_lr > r.lr:
        raise ValueError(f"end_lr {r.end_lr} must not exceed lr {r.lr}.")
    if r.layer_decay < 1 and r.optimizer == "muon":
        raise ValueError(f"layer_decay={r.layer_decay} needs optimizer=adamw or sgd.")
    if r.batch_size % r.accumulate:
        raise ValueError(
            f"batch_size {r.batch_size} must be a multiple of accumulate {r.accumulate}."
        )
    if 0 < r.resize < r.image_size:
        raise ValueError(f"resize {r.resize} must be at least image_size {r.image_size}.")


def check_model(r: Recipe) -> None:
    """Raise ValueError for choices in the model that come with another model, or have another setting."""
    has_variants = variants_among(r.model_kwargs) and r.architecture not in VARIANTS
    if r.init and (has_variants or r.head != "linear" or r.patch_drop):
        names = [name for row in VARIANTS.values() for name in row.values]
        raise ValueError(
            f"{', '.join([*names, 'head'])} and patch_drop come with the model that the run starts from (init)."
        )
    if (r.objective != LABELS or r.architecture_name in VARIANTS) and not r.is_plain:
        raise ValueError(
            f"objective={r.objective} and variants of attention or positions need one of timm's plain Vision "
            f"Transformers such as vit_tiny_patch16_224, got architecture={r.architecture}."
        )
    reserved = {*RATES, "num_classes"}
    if not r.init:
        reserved |= {*SIZES}
    if not reserved.isdisjoint(r.model_kwargs):
        raise ValueError(
            f"a keyword of model.{r.model_kwargs} has its own setting in the recipe. Use that setting."
        )


def check_objective(r: Recipe) -> None:
    """Raise ValueError for settings that the objective does not support."""
    row = OBJECTIVES[r.objective]
    if row is not None:
        row.check(r)
    elif r.masked:
        others = ", ".join(name for name in OBJECTIVES if name != LABELS)
        raise ValueError(
            f"masked={r.masked} must be 0 with objective={LABELS} and a share between 0 and 1 with objective={others}."
        )


def check_variants(r: Recipe) -> None:
    """Raise ValueError for invalid combinations of variants of the model."""
    if r.architecture_name in VARIANTS:
        VARIANTS[r.architecture_name].check({**r.arguments(), "patch_drop_rate": r.patch_drop})


CHECKS: tuple[Callable[[Recipe], None], ...] = (
    check_sizes,
    check_course,
    check_model,
    check_objective,
    check_variants,
)
"""Checks of invalid combinations of settings, in their order."""


# fmt: off
@dataclass(frozen=True)
class Recipe:
    """Settings of a training run. Sizes are in pixels, progress is a fraction of the run.

    `describe` lists the meanings. Raises ValueError for settings out of range and for invalid combinations.

    >>> vitlens.train.recipe("digits").override("epochs=2", "augment.rotate=0").length(1437)
    44
    """

    name: str = setting(dataclasses.MISSING, "Name for `vitlens train --recipe`.")
    # The model: arguments of a timm VisionTransformer.
    architecture: str = setting("vit_tiny_patch16_224", "timm architecture. The next six settings are its arguments.")
    image_size: int = setting(64, "Side of the model's input in pixels.", COUNT)
    patch_size: int = setting(4, "Side in pixels of a patch.", COUNT)
    width: int = setting(192, "D, the embedding dimension.", COUNT)
    depth: int = setting(12, "L, the number of layers.", COUNT)
    heads: int = setting(3, "H. The head width K is width / heads.", COUNT)
    mlp_ratio: float = setting(4.0, "Hidden width of the MLPs divided by D.", POSITIVE)
    num_classes: int = setting(200, "Number of classes. A run takes it from its data.", COUNT)
    head: str = setting("linear", """"linear", or "mlp" as in the paper's pre-training: a hidden layer with tanh before
        a zero-initialized one.""", ("linear", "mlp"))
    head_bias: float = setting(0.0, """Initial output biases of an "mlp" head; −10 keeps a sigmoid loss over many
        classes small at first.""")
    init: str = setting("", """Model to start from, a timm name or a directory. A linear head of zeros replaces its head
        (`starting_from`).""")
    continues: bool = setting(False, "The recipe fine-tunes trained models and needs one to start from.")
    model_kwargs: dict = setting(dict, """More keywords of timm's architecture, set as model.pos_embed=none. With init,
        the keywords of that model.""")
    # Objective.
    objective: str = setting(LABELS, "Name of an objective in `OBJECTIVES`.", OBJECTIVES)
    masked: float = setting(0.0, "Share of corrupted patches, 0 with labels.", BELOW_1)
    # Length.
    epochs: int = setting(100, "Passes over the training images, 0 if steps is set.", AMOUNT)
    steps: int = setting(0, "Optimizer steps, 0 if epochs is set.", AMOUNT)
    batch_size: int = setting(1024, """Images per optimizer step. An incomplete batch at the end of an epoch is
        dropped.""", COUNT)
    accumulate: int = setting(1, """Parts of a batch, computed one after the other to save memory. The gradient is that
        of the whole batch, except for dropout, hidden patches and batch normalization.""", COUNT)
    # Optimizer.
    optimizer: str = setting("adamw", """"adamw", "sgd" with momentum, or "muon": Muon for the hidden matrices and AdamW
        for the rest.""", ("adamw", "muon", "sgd"))
    lr: float = setting(1e-3, "Peak learning rate of AdamW or SGD.", POSITIVE)
    muon_lr: float = setting(2e-3, """Peak learning rate of Muon, whose updates are scaled to the root mean square of
        AdamW's (Liu et al. 2025).""", POSITIVE)
    weight_decay: float = setting(0.05, """Weight decay of matrices, multiplied by the learning rate. Decoupled, except
        for SGD, where it joins the momentum.""", AMOUNT)
    betas: tuple[float, float] = setting((0.9, 0.999), "AdamW's decays of the mean gradient and its square.", BELOW_1)
    momentum: float = setting(0.95, "Momentum of Muon and SGD.", BELOW_1)
    layer_decay: float = setting(1.0, """Factor of the learning rate from each layer to the one below it (Clark et al.
        2020). 1 gives all layers the same rate.""", "above 0, at most 1")
    warmup: float = setting(0.05, "Progress at which the learning rate has risen linearly to its peak.", BELOW_1)
    warmup_steps: int = setting(0, "Warm-up in steps, which needs warmup=0.", AMOUNT)
    schedule: str = setting("cosine", """Decay after warm-up: "cosine", "linear", or BiT's "stairs", a factor of 0.1 at
        25, 57.5, 75 and 92.5 % of the run. BiT has sgd, momentum=0.9, lr=0.03 · batch_size / 256 and weight_decay=1e-4
        (paper, Table 7).""", ("cosine", "linear", "stairs"))
    end_lr: float = setting(0.0, "Final value of `lr`. Muon's rate falls by the same factor.", AMOUNT)
    clip: float = setting(1.0, "Largest norm of the gradient. 0 disables clipping.", AMOUNT)
    loss: str = setting("softmax", """"softmax": cross-entropy. "sigmoid": binary cross-entropy summed over classes, for
        labels that overlap.""", ("softmax", "sigmoid"))
    outputs: str = setting("", """Meaning of the model's outputs, written to its config.json: "independent" for a
        probability per class, "value", or "" for one softmax over all. Independent of the loss.""",
        ("", "independent", "value"))
    # Regularization.
    dropout: float = setting(0.0, """The paper's dropout: after adding positions, after attention's projection, and
        after both layers of each MLP.""", BELOW_1)
    drop_path: float = setting(0.0, """Probability of skipping a residual branch in the last layer, rising linearly from
        0 in the first.""", BELOW_1)
    label_smoothing: float = setting(0.0, "Share of the target that is spread over all classes (Szegedy et al. 2016).",
        SHARE)
    augment: Augment = setting(Augment, "Augmentation of training images, set as augment.flip=0.5.")
    mix_until: float = setting(1.0, """Progress after which mixup and cutmix are off, so that training ends on unmixed
        images as in validation.""", SHARE)
    patch_drop: float = setting(0.0, """Share of the patch tokens randomly left out of each training image (Liu et al.
        2022) …""", BELOW_1)
    patch_drop_until: float = setting(0.0, "… up to this progress. Takes one more compilation.", SHARE)
    average: float = setting(0.0, "Decay per step of the exponential moving average of the weights. 0 disables it.",
        BELOW_1)
    # Images.
    resize: int = setting(0, """Side in pixels of stored training images, from which image_size is cut at random; 0 for
        image_size.""", AMOUNT)
    squash: bool = setting(False, """Resize whole images to squares (the paper's fine-tuning), instead of cutting out
        the center square.""")
    train_images: int = setting(0, "Training images used, a random subset. 0 for all.", AMOUNT)
    valid_images: int = setting(0, "Validation images used, a random subset. 0 for all.", AMOUNT)
    mean: tuple[float, float, float] = setting((0.485, 0.456, 0.406), """Subtracted from the red, green and blue of
        pixels in 0…1 …""")
    std: tuple[float, float, float] = setting((0.229, 0.224, 0.225), "… before they are divided by this.", POSITIVE)
    # Running.
    seed: int = setting(0, "Seed of the initial weights, the order of the images, augmentation and dropout.", AMOUNT)
    evaluate_every: int = setting(1, "Epochs between validations. Validation also follows the last step.", COUNT)
    log_every: int = setting(50, "Steps between readings of the loss, for which the host waits for the device.", COUNT)
    save_every: float = setting(60.0, "Seconds between checkpoints.", AMOUNT)
    precision: str = setting("auto", """"bf16", "fp16": autocast and Muon's products, with weights and moments in fp32.
        "fp16" scales the loss by 1,024 and skips steps whose gradient overflows. "fp32": all tensors. "auto": bf16 if
        the device multiplies it in hardware, else fp16 on CUDA (T4, V100), else fp32. Resumed runs keep their
        choice.""", ("auto", "bf16", "fp16", "fp32"))
    compile: str = setting("auto", """Mode of torch.compile on CUDA: "default" (under a minute),
        "max-autotune-no-cudagraphs" (many), "off", or "auto": "off" below 2e8 tokens in the whole run, else "default".
        Resumed runs keep their choice.""", ("auto", "off", "default", "max-autotune-no-cudagraphs"))
    compile_cpu: bool = setting(False, """Compile on a CPU too. Needs a C++ compiler, a few percent faster in fp32 and
        slower in bf16.""")
    tf32: bool = setting(False, "Use TF32 for fp32 matrix products on CUDA.")
    deterministic: bool = setting(False, "Use deterministic algorithms on CUDA. The CPU is always deterministic.")
    # fmt: on

    def __post_init__(self):
        check_settings(self)
        for check in CHECKS:
            check(self)
        stored = self.resize or self.image_size
        check_pad(self.augment.pad, stored, stored)

    def length(self, images: int) -> int:
        """Number of optimizer steps of a run on `images` training images."""
        return self.steps or images // self.batch_size * self.epochs

    def rate(self, step: int, steps: int) -> float:
        """Factor of the peak learning rates in step `step` (from 0) of `steps`.

        Linear from 0 to 1, then down to `end_lr` along a cosine, a line or stairs. Both ends lie outside the steps.
        """
        progress = (step + 1) / (steps + 1)
        warmup = self.warmup or self.warmup_steps / (steps + 1)
        if progress < warmup:
            return progress / warmup
        left = (1 - progress) / (1 - warmup)
        if self.schedule == "stairs":
            decay = 0.1 ** sum(progress >= stair for stair in STAIRS)
        elif self.schedule == "cosine":
            decay = 0.5 * (1 - math.cos(math.pi * left))
        else:
            decay = left
        return decay + (1 - decay) * self.end_lr / self.lr

    @property
    def is_plain(self) -> bool:
        """True for timm's plain ViTs, which differ in size only, and for those of other packages in `VARIANTS`."""
        if self.architecture in VARIANTS:
            return True
        words = self.architecture.split("_")
        if len(words) != 4:
            return False
        _, size, patch, image = words
        return size in ("tiny", "small", "base", "large", "huge") and patch.startswith("patch") and image.isdigit()

    def _architecture_and_keywords(self) -> tuple[str, dict]:
        """Architecture and keywords for timm, without sizes. With `init`, unchanged."""
        architecture, keywords = self.architecture, self.model_kwargs
        if self.init:
            return architecture, keywords
        for row in VARIANTS.values():
            architecture, keywords = row.resolve(architecture, keywords)
        return architecture, keywords

    @property
    def architecture_name(self) -> str:
        """Architecture name for timm: the recipe's, or one of `VARIANTS` for choices in the model that timm lacks."""
        architecture, _ = self._architecture_and_keywords()
        return architecture

    def arguments(self) -> dict:
        """Keywords for `timm.create_model(architecture_name, …)`, without dropout rates."""
        sizes = {}
        if not self.init:
            sizes = {keyword: getattr(self, name) for keyword, name in SIZES.items()}
        _, keywords = self._architecture_and_keywords()
        classes = self.num_classes if self.objective == LABELS else 0  # 0: no classifier head
        return {**sizes, **keywords, "num_classes": classes}

    def pixels(self) -> dict:
        """Preprocessing of validation images, in the format of timm's `pretrained_cfg`."""
        return {
            "input_size": [3, self.image_size, self.image_size],
            "fixed_input_size": "img_size" in self.arguments(),  # timm builds such a model for one size
            "interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash" if self.squash else "center",
            "mean": list(self.mean), "std": list(self.std),
        }

    def build(self, weights: bool = True) -> nn.Module:
        """A timm model in training mode, with initial weights that are a function of `seed`.

        weights: False skips reading the model to start from, for a checkpoint that is loaded next.
        Raises ValueError if timm cannot build the architecture with these settings.
        """
        arguments = self.arguments()
        for keyword, name in RATES.items():
            if getattr(self, name):
                arguments[keyword] = getattr(self, name)
        mlp_bias = self.head_bias if self.head == "mlp" else None
        source = self.init if weights else ""
        model = build(self.architecture_name, arguments, self.seed, mlp_bias, source)
        model.pretrained_cfg = {**model.pretrained_cfg, **self.pixels()}
        objective = OBJECTIVES[self.objective]
        if objective is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(self.seed, 1))
                model.objective = objective.build(model, self)
        return model

    def to_dict(self) -> dict:
        """Settings as a dictionary of plain data, with a nested dictionary for the augmentation."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Recipe:
        """The recipe of a `to_dict` dictionary. Raises ValueError for unknown settings and wrong types.

        Settings of earlier versions that are keywords of the model now move there.
        """
        for row in VARIANTS.values():
            values = row.upgrade(values)
        values = {**values}
        augment = values.pop("augment", {})
        require_settings(cls, values)
        require_settings(Augment, augment, "augment")
        return cls(**values, augment=Augment(**augment))

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe of a `to_json` text. Raises ValueError for other text."""
        return cls.from_dict(json.loads(text))

    def override(self, *assignments: str) -> Recipe:
        """A copy with each `"key=value"` applied, converted to the setting's type.

        `"augment.flip=0"` changes the augmentation, `"model.pos_embed=none"` a keyword of timm's architecture.
        """
        changes: dict = {"": {}, "augment": {}, "model": {}}
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals:
                raise ValueError(f"A setting must be key=value, but {assignment!r} has no equals sign.")
            group, dot, name = key.rpartition(".")
            if key in ("augment", "model_kwargs") or group not in changes:
                raise ValueError(f"{key} cannot be set. Set augment.flip=0.5, model.pos_embed=none or another setting.")
            changes[group][name] = parse_value(text)
        own = changes[""]
        for row in VARIANTS.values():
            row.check_former(own)
        require_settings(Recipe, own)
        if changes["augment"]:
            require_settings(Augment, changes["augment"], "augment")
            own["augment"] = replace(self.augment, **changes["augment"])
        keywords = {**self.model_kwargs, **changes["model"]}
        if not self.init:
            keywords = drop_plain_values(keywords)
        return replace(self, **own, model_kwargs=keywords)

    def describe(self) -> Iterator[tuple[str, object, str]]:
        """(setting, value, meaning) of each field, with names such as `augment.flip` for the augmentation.

        Fine-tuning recipes omit the settings of the trained model.
        """
        omitted = {"augment"}
        if self.continues:
            omitted |= {*FROM_MODEL, "model_kwargs"}
        for field in dataclasses.fields(self):
            meaning = meanings() if field.name == "objective" else field.metadata["meaning"]
            if field.name not in omitted:
                yield field.name, getattr(self, field.name), meaning
            if field.name == "model_kwargs" and not self.continues:
                yield from self._describe_variants()
        for field in dataclasses.fields(self.augment):
            yield f"augment.{field.name}", getattr(self.augment, field.name), field.metadata["meaning"]

    def _describe_variants(self) -> Iterator[tuple[str, object, str]]:
        """(keyword, value, meaning) of each of `VARIANTS`."""
        for row in VARIANTS.values():
            for name, values in row.values.items():
                yield f"model.{name}", self.model_kwargs.get(name, values[0]), row.meanings[name]

    def tiny(self) -> Recipe:
        """The recipe with two narrow layers and two short epochs, for the same code in seconds on a CPU."""
        return replace(
            self,
            width=16 * self.heads,
            depth=2,
            epochs=2,
            steps=0,
            warmup=self.warmup or 0.1,
            warmup_steps=0,
            batch_size=min(self.batch_size, 32 * self.accumulate),
            train_images=256,
            valid_images=128,
            log_every=1,
        )


def parse_value(text: str) -> object:
    """JSON value of a text, a list for numbers separated by commas, or the text itself."""
    if not text:
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for candidate in (text, f"[{text.strip('()')}]"):
        try:
            return json.loads(candidate)
        except ValueError:
            continue
    return text


def drop_plain_values(keywords: dict) -> dict:
    """Keywords of a model without the variants at the plain model's value."""
    keywords = {**keywords}
    for row in VARIANTS.values():
        for name, values in row.values.items():
            if name in keywords and keywords[name] == values[0]:
                del keywords[name]
    return keywords


def require_settings(owner: type, values: object, what: str = "a recipe") -> None:
    """Raise ValueError unless `values` is a dictionary whose keys are fields of the dataclass."""
    if not isinstance(values, dict):
        raise ValueError(f"The settings of {what} must be a table, got {values!r}.")
    names = sorted(field.name for field in dataclasses.fields(owner))
    for name in values:
        require_known(name, names, f"A setting of {what}")
