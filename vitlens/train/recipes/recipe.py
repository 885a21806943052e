"""A training run as data.

A ``Recipe`` says everything that a run depends on except the images. It is frozen, refuses contradictions when it is
made, goes to JSON and back, and has a ``tiny()`` mode that takes the same path in seconds on a CPU.

Schedules are functions of progress (0 at the first step, 1 after the last), so that the number of epochs can be fitted
to the time at hand without touching anything else.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import math
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from vitlens.data.augment import Augment
from vitlens.train.recipes.checks import check
from vitlens.train.recipes.models import FROM_MODEL, build


@dataclass(frozen=True)
class Recipe:
    """One training run. Sizes in pixels, fractions of the run where a field says progress."""

    name: str
    """What the recipe is called by."""
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
    num_classes: int = 200
    """Classes; a run takes the number from its data."""
    head: str = "linear"
    """"linear", or "mlp": the paper's for pre-training, a hidden layer with tanh before a zero-initialized one."""
    head_bias: float = 0.0
    """Where the output biases of an "mlp" head start; −10 keeps a sigmoid loss over many classes small at first."""
    init: str = ""
    """A model to start from, a timm name or a folder, with a zero-initialized linear head (``starting_from``)."""
    continues: bool = False
    """Made for trained models: refuses to start from random weights."""
    model_kwargs: dict = field(default_factory=dict)
    """With ``init``: what its architecture was built with, in place of the sizes above."""
    # Length.
    epochs: int = 100
    """Passes over the training images; 0 where steps are given."""
    steps: int = 0
    """Optimizer steps, where a run is counted in them; then epochs is 0."""
    batch_size: int = 1024
    """Images per optimizer step. What does not fill a batch at the end of an epoch is dropped, each time others."""
    accumulate: int = 1
    """Parts that a batch is cut into, one after the other, to save memory; the gradient is that of the whole, but
    where a model has batch normalization, which sees one part at a time."""
    # Optimizer.
    optimizer: str = "adamw"
    """"adamw", "sgd" with momentum, or "muon": Muon for the hidden matrices and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate of AdamW or SGD."""
    muon_lr: float = 2e-3
    """Peak learning rate of Muon, whose updates are scaled to the root mean square of AdamW's (Liu et al. 2025)."""
    weight_decay: float = 0.05
    """On matrices only, times the learning rate: decoupled, but for SGD, where it joins the momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decays of the mean gradient and of its square."""
    momentum: float = 0.95
    """Muon's and SGD's."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each layer to the one below it (Clark et al. 2020); 1 treats all alike."""
    warmup: float = 0.05
    """Progress at which the learning rate has risen linearly to its peak."""
    warmup_steps: int = 0
    """The same counted in steps; then warmup is 0."""
    schedule: str = "cosine"
    """Shape of the decay after warm-up: "cosine" or "linear"."""
    end_lr: float = 0.0
    """Where ``lr`` ends; Muon's rate falls by the same factor."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    loss: str = "softmax"
    """"softmax": cross-entropy. "sigmoid": binary cross-entropy of each class, summed, as for labels that overlap."""
    # Regularisation.
    dropout: float = 0.0
    """The paper's: after adding positions, after attention's projection, and after both layers of each MLP."""
    drop_path: float = 0.0
    """Chance of skipping a residual branch in the last layer, rising linearly from 0 in the first."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes (Szegedy et al. 2016)."""
    augment: Augment = field(default_factory=Augment)
    """What is done to training images; its parts are set as augment.flip and so on."""
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
    """The same for validation."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Subtracted from the red, green and blue of pixels in 0…1 …"""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """… before they are divided by this."""
    # Running.
    seed: int = 0
    """Of the initial weights, the order of the images, augmentation and dropout."""
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
        check(self)

    def length(self, images: int) -> int:
        """Optimizer steps of a run on that many training images."""
        return self.steps or images // self.batch_size * self.epochs

    def rate(self, step: int, steps: int) -> float:
        """Multiplier of the peak learning rates in step ``step`` (from 0) of ``steps``.

        Linear from 0 up to 1, then down to ``end_lr`` along a cosine or a line; neither end is a step of its own.
        """
        progress, warmup = (step + 1) / (steps + 1), self.warmup or self.warmup_steps / (steps + 1)
        if progress < warmup:
            return progress / warmup
        left = (1 - progress) / (1 - warmup)
        decay = 0.5 * (1 - math.cos(math.pi * left)) if self.schedule == "cosine" else left
        return decay + (1 - decay) * self.end_lr / self.lr

    def build(self, weights: bool = True):
        """A timm model in training mode; what of its weights is fresh is a function of ``seed``.

        Without ``weights`` a model to start from is not read: enough for a checkpoint to be restored into.
        """
        return build(self, weights)

    def to_dict(self) -> dict:
        """Plain data, those of the augmentation in a table of their own."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Recipe:
        """From what ``to_dict`` gave. Raises ``ValueError`` for settings that there are not, or of another type."""
        values = _typed(cls, values, "")
        if "augment" in values:
            values["augment"] = Augment(**_typed(Augment, values["augment"], "augment."))
        return cls(**values)

    def to_json(self) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """``from_dict`` of a text. Raises ``ValueError`` for one that is no JSON, too."""
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

    def described(self) -> Iterator[tuple[str, object, str]]:
        """(setting, value, meaning) of each field; those of the augmentation as ``augment.flip`` and so on.

        Of a recipe that continues a model, without what the model brings.
        """
        brought = (*FROM_MODEL, "model_kwargs") if self.continues else ()
        for owner, values, prefix in ((Recipe, vars(self), ""), (Augment, vars(self.augment), "augment.")):
            for name, meaning in _meanings(owner).items():
                if name not in ("augment", *brought):
                    yield prefix + name, values[name], meaning

    def tiny(self) -> Recipe:
        """The same path in seconds on a CPU: one narrow layer pair, two short epochs; nothing is switched off."""
        return replace(
            self, width=16 * self.heads, depth=2, epochs=2, steps=0, warmup=self.warmup or 0.1, warmup_steps=0,
            batch_size=min(self.batch_size, 32 * self.accumulate), train_images=256, valid_images=128, log_every=1,
        )  # fmt: skip


def _meanings(owner: type) -> dict[str, str]:
    """What the source of a dataclass says below each of its fields, in one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body
    return {
        field.target.id: " ".join(said.value.value.split())
        for field, said in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr)
    }


def _known(owner: type, names, prefix: str) -> None:
    fields = {f.name for f in dataclasses.fields(owner)}
    for name in names:
        if name not in fields:
            raise ValueError(
                f"There is no setting {prefix}{name}. The settings are: "
                f"{', '.join(prefix + f for f in sorted(fields))}."
            )


def _typed(owner: type, values: dict, prefix: str) -> dict:
    """``values`` as read from JSON, refused where a name or a type is not the owner's."""
    if not isinstance(values, dict):
        raise ValueError(f"{prefix or 'A recipe '}is a table of settings; {values!r} came.")
    _known(owner, values, prefix)
    hints = typing.get_type_hints(owner)
    for name, value in values.items():
        kind, inner = typing.get_origin(hints[name]) or hints[name], typing.get_args(hints[name])
        parts = list(value) if kind is tuple and isinstance(value, (list, tuple)) else [value]
        wanted = inner if kind is tuple else [dict if kind is Augment else kind]
        fits = len(parts) == len(wanted) and all(
            isinstance(part, (int, float) if w is float else w) and (w is bool or not isinstance(part, bool))
            for part, w in zip(parts, wanted, strict=True)
        )
        if not fits:
            kind = getattr(hints[name], "__name__", hints[name])
            raise ValueError(f"{prefix}{name} is of type {kind}; {value!r} came.")
    return dict(values)


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
    if kind is Augment:
        raise ValueError(f"{key} is made of parts; set them one by one, as in {key}.flip=0.5.")
    raise ValueError(f"{key} comes with the model that the run starts from, and cannot be set.")
