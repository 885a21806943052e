"""`Recipe`: every setting of a training run, its meaning, and the combinations that contradict each other.

A recipe holds everything that a run depends on except the images. It is frozen, goes to JSON and back, and has a
`tiny()` mode that takes the same path in seconds on a CPU. Schedules are functions of progress (0 at the first step, 1
after the last), so that the number of epochs can be fitted to the time at hand without touching anything else.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from vitlens import variants
from vitlens.data.augment import Augment, check_pad, check_settings, seed_of, setting
from vitlens.models import suggestion
from vitlens.train.masked import OBJECTIVES, MaskedPatches
from vitlens.train.model import build

FROM_MODEL = ("architecture", "patch_size", "width", "depth", "heads", "mlp_ratio", "mean", "std", *variants.SETTINGS)
"""Settings that a run takes from the model that it starts from, if it does."""
SIZES = {
    "img_size": "image_size", "patch_size": "patch_size", "embed_dim": "width", "depth": "depth", "num_heads": "heads",
    "mlp_ratio": "mlp_ratio",
}  # fmt: skip
RATES = {"drop_path_rate": "drop_path", "patch_drop_rate": "patch_drop", "pos_drop_rate": "dropout",
         "proj_drop_rate": "dropout"}  # fmt: skip
"""timm's keywords for settings of a recipe."""
STAIRS = (10 / 40, 23 / 40, 30 / 40, 37 / 40)
"""Progress at which `schedule="stairs"` falls to a tenth: BiT's epochs 10, 23, 30 and 37 of 40."""
REMOVED = ("registers", "tokenizer", "equivariance", "decoder_depth")
"""Settings of earlier versions, read at values that change nothing."""
COUNT, AMOUNT, POSITIVE = "at least 1", "0 or more", "above 0"
SHARE, BELOW_1 = "between 0 and 1", "from 0 up and below 1"
# fmt: off
CONTRADICTIONS = (
    (lambda r: r.image_size < r.patch_size or r.image_size % r.patch_size and not (r.init or r.continues),
     "image_size {r.image_size} must be a multiple of patch_size {r.patch_size}, or pixels at the edge are not seen"),
    (lambda r: r.width % r.heads, "width {r.width} must be a multiple of heads {r.heads}"),
    (lambda r: bool(r.patch_drop) != bool(r.patch_drop_until), "patch_drop and patch_drop_until only work together"),
    (lambda r: bool(r.epochs) == bool(r.steps),
     "set the length in epochs ({r.epochs}) or in steps ({r.steps}), the other to 0"),
    (lambda r: r.warmup and r.warmup_steps,
     "set warmup ({r.warmup}) or warmup_steps ({r.warmup_steps}), the other to 0"),
    (lambda r: r.end_lr > r.lr, "end_lr {r.end_lr} must not exceed lr {r.lr}"),
    (lambda r: r.layer_decay < 1 and r.optimizer == "muon", "layer_decay={r.layer_decay} needs optimizer=adamw or sgd"),
    (lambda r: r.batch_size % r.accumulate,
     "batch_size {r.batch_size} must be a multiple of accumulate {r.accumulate}"),
    (lambda r: 0 < r.resize < r.image_size, "resize {r.resize} must be at least image_size {r.image_size}"),
    (lambda r: r.init and (variants.chosen(vars(r)) or r.head != "linear" or r.patch_drop),
     "positions, readout, attention, head and patch_drop come with the model that the run starts from (init)"),
    (lambda r: (r.objective != "labels" or r.architecture_name == variants.NAME) and not r.is_plain,
     "objective={r.objective} and variants of attention or positions need one of timm's plain Vision Transformers such "
     "as vit_tiny_patch16_224, got architecture={r.architecture}"),
    (lambda r: set(r.model_kwargs) & {*RATES, "num_classes"} or not r.init and set(r.model_kwargs) &
     {*SIZES, *variants.SETTINGS, *variants.keywords(vars(r))},
     "one of the keywords model.{r.model_kwargs} has a setting of its own in the recipe; set that one"),
    (lambda r: bool(r.masked) == (r.objective == "labels"), "masked={r.masked} must be 0 with objective=labels and a "
     "share between 0 and 1 with objective=mean-color, colors-4x4 or pixels"),
    (lambda r: r.objective != "labels" and (r.init or r.continues or r.patch_drop or r.attention == "axial" or
     r.head != "linear" or r.loss != "softmax" or r.label_smoothing or r.augment.mixup or r.augment.cutmix or
     any(map(r.model_kwargs.get, ("dynamic_img_size", "dynamic_img_pad")))),
     "objective={r.objective} starts from random weights without labels, on whole images of one size: leave out init, "
     "patch_drop, attention=axial, head, loss, label_smoothing, mixup, cutmix and dynamic sizes"),
    (lambda r: r.objective == "colors-4x4" and r.patch_size % 4,
     "objective=colors-4x4 needs a patch_size that is a multiple of 4, got {r.patch_size}"),
)
"""(predicate, sentence) for every combination of settings that is refused."""


@dataclass(frozen=True)
class Recipe:
    """One training run. Sizes in pixels; progress is a fraction of the run. `described` lists what settings mean."""

    name: str = setting(dataclasses.MISSING, "Its name, as `vitlens train --recipe` takes it.")
    # The model: a timm VisionTransformer, described so that it can be built anew.
    architecture: str = setting("vit_tiny_patch16_224", "timm architecture whose arguments the next six replace.")
    image_size: int = setting(64, "Side in pixels of what the model sees.", COUNT)
    patch_size: int = setting(4, "Side in pixels of a patch.", COUNT)
    width: int = setting(192, "D, the embedding dimension.", COUNT)
    depth: int = setting(12, "L, the number of layers.", COUNT)
    heads: int = setting(3, "H; width / heads is the head width K.", COUNT)
    mlp_ratio: float = setting(4.0, "Hidden width of the MLPs by D.", POSITIVE)
    positions: str = setting("learned-1d", """How the model knows where a patch lies: "learned-1d", as in the paper;
        "none"; "learned-2d", half a vector for the column and half for the row; or within attention "relative-1d"
        (Table 8).""", variants.SETTINGS["positions"])
    positions_at: str = setting("stem", """Where learned ones are added: "stem", "every-layer" with a table for each, or
        "every-layer-shared".""", variants.SETTINGS["positions_at"])
    readout: str = setting("class-token", """What the head reads: "class-token", as in the paper, or "mean", of the
        patches after the last norm, which the paper found as good at a lower rate (Fig. 9).""",
        variants.SETTINGS["readout"])
    attention: str = setting("plain", """"plain", as in the paper, or "axial", along rows and then along columns, which
        makes two layers of each and costs the time of both (Fig. 13).""", variants.SETTINGS["attention"])
    num_classes: int = setting(200, "Classes; a run takes the number from its data.", COUNT)
    head: str = setting("linear", """"linear", or "mlp": the paper's for pre-training, a hidden layer with tanh before a
        zero-initialized one.""", ("linear", "mlp"))
    head_bias: float = setting(0.0, """Initial output biases of an "mlp" head; −10 keeps a sigmoid loss over many
        classes small at first.""")
    init: str = setting("", """Model to start from, a timm name or a folder; its head is replaced by a linear one of
        zeros (`starting_from`).""")
    continues: bool = setting(False, "Made for trained models: refuses to start from random weights.")
    model_kwargs: dict = setting(dict, """More keywords of timm's architecture, set as model.pos_embed=none; with init,
        those that it was built with.""")
    # What is learned.
    objective: str = setting("labels", """"labels", or without them what corrupted patches show (the paper's B.1.2):
        their "mean-color", "colors-4x4" of their parts or "pixels".""", ("labels", *OBJECTIVES))
    masked: float = setting(0.0, "Share of the patches that are corrupted; 0 with labels.", BELOW_1)
    # Length.
    epochs: int = setting(100, "Passes over the training images; 0 where steps are given.", AMOUNT)
    steps: int = setting(0, "Optimizer steps, where a run is counted in them; then epochs is 0.", AMOUNT)
    batch_size: int = setting(1024, """Images per optimizer step. What does not fill a batch at the end of an epoch is
        dropped, each time others.""", COUNT)
    accumulate: int = setting(1, """Parts that a batch is cut into, one after the other, to save memory; the gradient is
        that of the whole, but where each part has its own random numbers (dropout, hidden patches) or batch
        normalization.""", COUNT)
    # Optimizer.
    optimizer: str = setting("adamw", """"adamw", "sgd" with momentum, or "muon": Muon for the hidden matrices and AdamW
        for the rest.""", ("adamw", "muon", "sgd"))
    lr: float = setting(1e-3, "Peak learning rate of AdamW or SGD.", POSITIVE)
    muon_lr: float = setting(2e-3, """Peak learning rate of Muon, whose updates are scaled to the root mean square of
        AdamW's (Liu et al. 2025).""", POSITIVE)
    weight_decay: float = setting(0.05, """Weight decay of matrices, times the learning rate: decoupled, except for SGD,
        where it joins the momentum.""", AMOUNT)
    betas: tuple[float, float] = setting((0.9, 0.999), "AdamW's decays of the mean gradient and its square.", BELOW_1)
    momentum: float = setting(0.95, "Momentum of Muon and SGD.", BELOW_1)
    layer_decay: float = setting(1.0, """Factor of the learning rate from each layer to the one below it (Clark et al.
        2020); 1 treats all alike.""", "above 0, at most 1")
    warmup: float = setting(0.05, "Progress at which the learning rate has risen linearly to its peak.", BELOW_1)
    warmup_steps: int = setting(0, "The same counted in steps; then warmup is 0.", AMOUNT)
    schedule: str = setting("cosine", """Shape of the decay after warm-up: "cosine", "linear", or "stairs", tenfold at
        25, 57.5, 75 and 92.5 % of the run: BiT's, beside sgd with momentum=0.9, lr=0.03 · batch_size / 256 and
        weight_decay=1e-4 (paper, Table 7).""", ("cosine", "linear", "stairs"))
    end_lr: float = setting(0.0, "Where `lr` ends; Muon's rate falls by the same factor.", AMOUNT)
    clip: float = setting(1.0, "Largest norm of the gradient; 0 does not clip.", AMOUNT)
    loss: str = setting("softmax", """"softmax": cross-entropy. "sigmoid": binary cross-entropy of each class, summed,
        as for labels that overlap.""", ("softmax", "sigmoid"))
    outputs: str = setting("", """How the model's outputs are read, written to its config.json: "independent", a
        probability for each; "value"; or "" for the usual, one softmax over all. The loss does not decide it.""",
        ("", "independent", "value"))
    # Regularization.
    dropout: float = setting(0.0, """The paper's: after adding positions, after attention's projection, and after both
        layers of each MLP.""", BELOW_1)
    drop_path: float = setting(0.0, """Chance of skipping a residual branch in the last layer, rising linearly from 0 in
        the first.""", BELOW_1)
    label_smoothing: float = setting(0.0, "Share of the target that is spread over all classes (Szegedy et al. 2016).",
        SHARE)
    augment: Augment = setting(Augment, "Augmentation of training images, set as augment.flip=0.5 and so on.")
    mix_until: float = setting(1.0, """Progress after which mixup and cutmix are off: the end is spent on images as they
        are at validation.""", SHARE)
    patch_drop: float = setting(0.0, """Share of the patch tokens left out at random of every training image (Liu et al.
        2022) …""", BELOW_1)
    patch_drop_until: float = setting(0.0, "… up to this progress. Costs one more compilation.", SHARE)
    average: float = setting(0.0, "Decay per step of the exponential moving average of the weights; 0 keeps none.",
        BELOW_1)
    # Images.
    resize: int = setting(0, """Side in pixels at which training images are held, to cut image_size from at random; 0:
        image_size itself.""", AMOUNT)
    squash: bool = setting(False, """Squeeze whole images into squares (the paper's fine-tuning), instead of cutting the
        center square out.""")
    train_images: int = setting(0, "Training images used, a random subset; 0 for all.", AMOUNT)
    valid_images: int = setting(0, "Validation images used, a random subset; 0 for all.", AMOUNT)
    mean: tuple[float, float, float] = setting((0.485, 0.456, 0.406), """Subtracted from the red, green and blue of
        pixels in 0…1 …""")
    std: tuple[float, float, float] = setting((0.229, 0.224, 0.225), "… before they are divided by this.", POSITIVE)
    # Running.
    seed: int = setting(0, "Seed of the initial weights, the order of the images, augmentation and dropout.", AMOUNT)
    evaluate_every: int = setting(1, "Epochs between validations; the last step is always followed by one.", COUNT)
    log_every: int = setting(50, "Steps between readings of the loss: each makes the host wait for the device.", COUNT)
    save_every: float = setting(60.0, "Seconds between checkpoints.", AMOUNT)
    precision: str = setting("auto", """"bf16": autocast and Muon's products, with weights and moments in fp32. "fp32":
        everything. "auto": bf16 where the device multiplies it in hardware, else fp32; a run keeps what was chosen when
        it began.""", ("auto", "bf16", "fp32"))
    compile: str = setting("default", """Mode of torch.compile on CUDA: "default" (under a minute),
        "max-autotune-no-cudagraphs" (many), or "off".""", ("off", "default", "max-autotune-no-cudagraphs"))
    compile_cpu: bool = setting(False, """Compile on a CPU too, which takes a C++ compiler, gains some percent in fp32
        and loses some in bf16.""")
    tf32: bool = setting(False, "Let fp32 matrix products on CUDA use TF32.")
    deterministic: bool = setting(False, """Ask for deterministic algorithms on CUDA; the CPU is deterministic
        anyway.""")
    # fmt: on

    def __post_init__(self):
        check_settings(self)
        for contradicts, sentence in CONTRADICTIONS:
            if contradicts(self):
                raise ValueError(f"{sentence.format(r=self)}.")
        if self.architecture_name == variants.NAME:
            variants.check({**self.arguments(), "patch_drop_rate": self.patch_drop})
        check_pad(self.augment.pad, self.resize or self.image_size, self.resize or self.image_size)

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

    @property
    def is_plain(self) -> bool:
        """True for timm's architectures that differ in their sizes only, so that a variant is all that changes."""
        words = self.architecture.split("_")
        plain = len(words) == 4 and words[1] in ("tiny", "small", "base", "large", "huge")
        return plain and words[2].startswith("patch") and words[3].isdigit() or self.architecture == variants.NAME

    @property
    def architecture_name(self) -> str:
        """Name of the architecture that timm builds: the recipe's, or `vitlens_vit` for variants that timm has not."""
        own = any(value not in variants.BY_TIMM for value in variants.chosen(vars(self)).values())
        return variants.NAME if own else self.architecture

    def arguments(self) -> dict:
        """Keywords for `timm.create_model(architecture_name, …)`, without those that only training needs."""
        sizes = {} if self.init else {keyword: getattr(self, name) for keyword, name in SIZES.items()}
        classes = self.num_classes if self.objective == "labels" else 0  # 0: no head for classes
        return {**sizes, **variants.keywords(vars(self)), **self.model_kwargs, "num_classes": classes}

    def pixels(self) -> dict:
        """How images are preprocessed, in the words of timm's `pretrained_cfg`: as for validation."""
        return {
            "input_size": [3, self.image_size, self.image_size],
            "fixed_input_size": "img_size" in self.arguments(),  # timm builds such a model for its size
            "interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash" if self.squash else "center",
            "mean": list(self.mean), "std": list(self.std),
        }  # fmt: skip

    def build(self, weights: bool = True) -> nn.Module:
        """A timm model in training mode; its fresh weights are a function of `seed`.

        weights: False does not read the model to start from, which is enough if a checkpoint is loaded next.
        Raises ValueError if timm cannot build the architecture with these settings.
        """
        rates = {keyword: getattr(self, name) for keyword, name in RATES.items() if getattr(self, name)}
        mlp_bias = self.head_bias if self.head == "mlp" else None
        source = self.init if weights else ""
        model = build(self.architecture_name, {**self.arguments(), **rates}, self.seed, mlp_bias, source)
        model.pretrained_cfg = {**model.pretrained_cfg, **self.pixels()}
        if self.objective != "labels":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(self.seed, 1))
                model.objective = MaskedPatches(model, self.objective, self.masked, self.mean, self.std)
        return model

    def to_dict(self) -> dict:
        """Plain data; the settings of the augmentation are a dictionary within."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Recipe:
        """The recipe that `to_dict` was called on. Raises ValueError for unknown settings and wrong types.

        Settings that earlier versions had are ignored at values that change nothing.
        """
        variants.check_moved(values)
        values = {name: value for name, value in values.items() if name not in REMOVED}
        augment = values.pop("augment", {})
        if isinstance(augment, dict) and not augment.get("operations"):  # RandAugment's
            augment = {name: value for name, value in augment.items() if name not in ("operations", "magnitude")}
        return cls(**known(cls, values), augment=Augment(**known(Augment, augment, "augment.")))

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that `to_json` was called on. Raises ValueError for other text."""
        return cls.from_dict(json.loads(text))

    def override(self, *assignments: str) -> Recipe:
        """A copy with each `"key=value"` applied, converted to the field's type.

        `"augment.flip=0"` changes the augmentation, `"model.pos_embed=none"` a keyword of timm's architecture.
        """
        changes: dict = {"": {}, "augment": {}, "model": {}}
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals:
                raise ValueError(f"A setting reads key=value; {assignment!r} has no equals sign.")
            group, dot, name = key.rpartition(".")
            if key in ("augment", "model_kwargs") or group not in changes:
                raise ValueError(f"{key} cannot be set; set augment.flip=0.5, model.pos_embed=none or another setting.")
            changes[group][name] = parsed(text)
        variants.check_moved(changes[""])
        own = known(Recipe, changes[""])
        if changes["augment"]:
            own["augment"] = replace(self.augment, **known(Augment, changes["augment"], "augment."))
        return replace(self, **own, model_kwargs={**self.model_kwargs, **changes["model"]})

    def described(self) -> Iterator[tuple[str, object, str]]:
        """(setting, value, meaning) of each field; those of the augmentation as `augment.flip` and so on.

        A recipe for trained models leaves out what the model brings.
        """
        brought = (*FROM_MODEL, "model_kwargs") if self.continues else ()
        for owner, prefix in ((self, ""), (self.augment, "augment.")):
            for field in dataclasses.fields(owner):
                if field.name not in ("augment", *brought):
                    yield prefix + field.name, getattr(owner, field.name), field.metadata["meaning"]

    def tiny(self) -> Recipe:
        """The same path in seconds on a CPU: one narrow layer pair, two short epochs; nothing is switched off."""
        return replace(
            self, width=16 * self.heads, depth=2, epochs=2, steps=0, warmup=self.warmup or 0.1, warmup_steps=0,
            batch_size=min(self.batch_size, 32 * self.accumulate), train_images=256, valid_images=128, log_every=1,
        )  # fmt: skip


def parsed(text: str) -> object:
    """The JSON value of a text, numbers separated by commas as a list, or the text itself."""
    for candidate in (text.lower() if text.lower() in ("true", "false") else text, f"[{text.strip('()')}]"):
        try:
            return json.loads(candidate) if text else text
        except ValueError:
            continue
    return text


def known(owner: type, values: object, prefix: str = "") -> dict:
    """The values by name. Raises ValueError unless each is named as a field of the dataclass."""
    if not isinstance(values, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'A recipe'} must be a table of settings, got {values!r}.")
    names = [field.name for field in dataclasses.fields(owner)]
    for name in values:
        if name not in names:
            listed = ", ".join(prefix + each for each in sorted(names))
            hint = suggestion(name, names)
            raise ValueError(f"There is no setting {prefix}{name}.{hint} The settings are: {listed}.")
    return values
