"""Studies in miniature by name: models that differ in one choice, the data, and one recipe for all of them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from experiments import autoencoder, small_data
from experiments.networks import Network
from vitlens.data.augment import Augment
from vitlens.train.recipes import FROM_MODEL, Recipe, recipe


@dataclass(frozen=True)
class Model:
    """One model of a study: changed settings of its recipe, and a `Network` for other sizes."""

    settings: str = ""
    """As `vitlens train --set` takes them, separated by spaces."""
    choices: str = ""
    """Choices of `experiments/small_data.py`, such as "tokenizer=conv-stem"."""
    network: Network | None = None
    pretraining: str = ""
    """A recipe without labels and changes of it, by which the model first learns from all images."""

    @property
    def kind(self) -> str:
        return self.network.kind if self.network else "ViT"

    def build(self, plan: Recipe) -> nn.Module:
        """The model in training mode; its weights depend on the plan's seed alone."""
        if plan.name == autoencoder.RECIPE:
            return autoencoder.build(plan)
        if self.choices:
            return small_data.build(
                plan, **dict(choice.split("=") for choice in self.choices.split())
            )
        return self.network.build(plan) if self.network else plan.build()

    def before(self, plan: Recipe) -> Recipe | None:
        """The recipe of the pre-training, with the model, pixels, seed and precision of `plan`; None without one."""
        if not self.pretraining:
            return None
        name, *changes = self.pretraining.split()
        shared = (*FROM_MODEL, "model_kwargs", "image_size", "num_classes", "seed", "precision")
        return replace(
            recipe(name).override(*changes), **{name: getattr(plan, name) for name in shared}
        )

    def tiny(self) -> "Model":
        few = " epochs=0 steps=4 batch_size=20 log_every=2 evaluate_every=1"
        network = self.network.tiny() if self.network else None
        return replace(
            self, network=network, pretraining=self.pretraining + few if self.pretraining else ""
        )


@dataclass(frozen=True)
class Cell:
    """One training of a study."""

    model: str
    images: int
    seed: int

    @property
    def name(self) -> str:
        return f"{re.sub('[^A-Za-z0-9+]+', '-', self.model)}_{self.images}_{self.seed}"


@dataclass(frozen=True)
class Study:
    """A grid of trainings by one recipe."""

    name: str
    models: Mapping[str, Model]
    sizes: tuple[int, ...]
    """Numbers of training images, each a multiple of the number of classes."""
    recipe: Recipe = field(repr=False)
    """Of all trainings; its `steps` are those for the most images."""
    classes: int
    """Classes of the data that are used; if it has more, the same ones are drawn for all trainings."""
    seeds: tuple[int, ...] = (0, 1, 2)
    figure: str = "sizes"
    """Name in `FIGURES`."""
    baseline: str = ""
    validations: int = 10
    """Number of validations of a training, about."""
    equal: str = "steps"
    """Same for all sizes: "steps", or "epochs", so that fewer images mean fewer steps."""
    turns: tuple[str, ...] = ()
    """Of "flips" and "rotations", those under which the change of each trained model is measured (`change_under`)."""

    def cells(self) -> Iterator[Cell]:
        """All trainings, seed by seed: a study that was stopped has whole grids of fewer seeds."""
        return (
            Cell(name, images, seed)
            for seed in self.seeds
            for images in self.sizes
            for name in self.models
        )

    def plan(self, cell: Cell) -> Recipe:
        """The recipe of one training."""
        settings = self.models[cell.model].settings.split()
        plan = self.recipe.override(*settings)
        share = cell.images / max(self.sizes) if self.equal == "epochs" else 1
        steps = max(1, round(share * plan.steps))
        epochs = steps / (cell.images // plan.batch_size)
        return replace(
            plan,
            name=self.name,
            seed=cell.seed,
            num_classes=self.classes,
            steps=steps,
            evaluate_every=max(1, round(epochs / self.validations)),
        )

    def tiny(self) -> "Study":
        """The same path in seconds: narrow models, two sizes, two seeds, a few steps."""
        classes = min(self.classes, 5)
        small = replace(
            self.recipe,
            steps=6,
            batch_size=min(20, 8 * classes),
            log_every=2,
            width=16 * self.recipe.heads,
            depth=2,
        )
        models = {name: model.tiny() for name, model in self.models.items()}
        return replace(
            self,
            models=models,
            sizes=(8 * classes, 16 * classes),
            seeds=(0, 1),
            classes=classes,
            recipe=small,
        )


# fmt: off
STANDARD = dict(
    # Table 3 of the paper, for JFT-300M: Adam, weight decay 0.1, linear decay of the rate, no dropout. One rate for all
    # models, that of its R50x1; its ViT-B has 8e-4.
    optimizer="adamw", lr=1e-3, weight_decay=0.1, schedule="linear", warmup=0.05, clip=1.0,
    # The paper's crops and flips, and nothing else that could stand in for data; 64-px images are crops already.
    augment=Augment(flip=0.5, scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3)),
)
# In a pilot of 1,500 steps on 25,000 images with one seed, AdamW brought the ViT to 20.1 %, the hybrid to 17.0 and the
# ResNet to 24.7 (better of two rates each), and Muon to 31.4, 25.2 and 26.5.
VIT = Network(patch=4, width=64, depth=4, heads=2)  # 16.2 MFLOPs at 24 px
HYBRID = Network(width=64, depth=3, heads=2, stages=(1, 1), channels=64)  # 16.7, with the same 6×6 tokens
RESNET = Network(stages=(2, 2, 2, 2), channels=64)  # 15.7: the paper compares at equal compute
DATA_SIZE = Study(
    name="data-size-cpu", models={"ViT, patch 4": Model(network=VIT), "hybrid": Model(network=HYBRID),
                                  "ResNet": Model(network=RESNET)},
    sizes=(2_500, 7_500, 25_000),  # a tenth, three tenths, all there are of fifty classes
    classes=50,
    recipe=Recipe(
        name="data-size-cpu", image_size=24, batch_size=64, epochs=0, steps=2500, log_every=100,  # 6.4 epochs of all
        precision="fp32",  # as fast as bf16 in models this narrow, and the same on every machine
        **STANDARD | dict(optimizer="muon", muon_lr=3e-3),
    ),
)
# Fashion-MNIST: thumbnails whose class is in their shape. In a pilot with one seed and 10,000 validation images,
# learned positions led none by 4.7 points after 1,500 steps on 6,000 images (80.7 %) and by 3.6 after 3,000 (83.8 %);
# on 60,000 images by 2.7 (81.0 %) and 3.2 (83.9 %). So more images change little, and more steps the level.
SHAPES = Recipe(
    name="positions-cpu", image_size=20, patch_size=4, width=48, depth=3, heads=3,  # 25 patches, 0.1 M parameters
    epochs=0, steps=3000, batch_size=50,  # 25 epochs of 6,000 images, a minute of one core
    optimizer="muon", lr=2e-3, muon_lr=8e-3, schedule="linear", warmup=0.1,
    augment=Augment(pad=2), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
    precision="fp32", valid_images=10_000, log_every=100,
)
POSITIONS = {
    "none": "none", "learned, 1-D": "learned-1d", "learned, 2-D": "learned-2d", "relative, 1-D": "relative-1d",
}
NEWER = {"relative, 2-D": "relative-2d", "sines and cosines": "sinusoidal", "rotary": "rotary"}
PLACES = {"every layer": "every-layer", "every layer, shared": "every-layer-shared"}
ADAM = dict(optimizer="adamw", weight_decay=0.1)  # one rate for all weights, as in the paper
PLAIN, FLIPS = Model(), Model(choices="equivariance=flips")
# Without a pilot, with the lengths of an earlier benchmark: it found a lead after 1,000 steps and 10 epochs of tuning,
# no lead after 40 epochs, and a lead of the autoencoder after 8,000 steps and 40 epochs.
TUNING = replace(
    recipe("masked-tuning"), continues=False,
    model_kwargs={"readout": "mean"},  # nothing trains a class token without labels
    patch_size=8, width=96, depth=4, heads=3, epochs=0, steps=1560,  # 40 epochs of 2,500 images
    precision="fp32",
)
SGD = "optimizer=sgd momentum=0.9 weight_decay=1e-4 schedule=stairs"  # BiT's, with its rate for batches of 64


# The recipe of the book's model from scratch without regularization for long runs, because three epochs do not overfit.
THREE_EPOCHS = replace(
    recipe("tiny-imagenet-cpu"), epochs=0, steps=1170, average=0.0,
    augment=Augment(flip=0.5, scale=(0.5, 1.0), ratio=(3 / 4, 4 / 3)), mix_until=1.0, patch_drop_until=0.7,
)


def pretrained(*lengths: int) -> dict[str, Model]:
    """Random weights, and both ways without labels for each number of steps."""
    return {"random weights": PLAIN} | {
        f"{name.replace('-', ' ')}, {steps:,} steps": Model(
            pretraining=f"{name} epochs=0 steps={steps} batch_size=64"
        )
        for name in ("masked-patches", "masked-autoencoder") for steps in lengths
    }


def scaled(**values: tuple[str, ...]) -> dict[str, Model]:
    """A model called "base", and larger ones, one dimension at a time."""
    return {"base": PLAIN} | {
        f"{name.replace('_', ' ')}, {k}": Model(each)
        for name, larger in values.items() for k, each in enumerate(larger, 1)
    }


STUDIES = {each.name: each for each in (
    # Fig. 3 and 4: models of equal compute on more and more images of Tiny-ImageNet.
    DATA_SIZE,
    # There, 2,500 steps are 21 epochs of 7,500 images; so those are left out here.
    replace(DATA_SIZE, name="data-size-cpu-epochs", equal="epochs", sizes=(2_500, 25_000),
            recipe=replace(DATA_SIZE.recipe, steps=8333)),
    Study(
        name="data-size-digits", sizes=(50, 200, 1_000), classes=10,
        models={"ViT, patch 2": Model(network=Network(patch=2, width=96, depth=3, heads=3)),  # 11.7 MFLOPs
                "ResNet": Model(network=Network(stages=(2, 2), channels=256))},  # 10.9
        recipe=Recipe(
            name="data-size-digits", image_size=8, batch_size=25, epochs=0, steps=600, log_every=50,
            precision="fp32", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
            **STANDARD | dict(
                lr=2e-3, warmup=0.1,  # 1e-3 is too low for 600 steps of the ViT
                augment=Augment(scale=(0.8, 1.2), ratio=(3 / 4, 4 / 3)),  # mirrored digits are invalid
            ),
        ),
    ),
    # The same on a GPU, on all of Tiny-ImageNet: 15 epochs of all images, 307 of the fewest.
    Study(
        name="data-size", sizes=(5_000, 10_000, 30_000, 100_000), classes=200,
        models={"ViT-Ti/8": Model(network=Network(patch=8, width=192, depth=12, heads=3)),  # 0.73 GFLOPs
                "ViT-S/8": Model(network=Network(patch=8, width=384, depth=12, heads=6)),  # 2.8
                "R10+ViT/8": Model(network=Network(width=192, depth=9, heads=3, stages=(1, 1, 1), channels=128)),
                "R23x0.75": Model(network=Network(stages=(2, 2, 2, 1), channels=192))},
        recipe=Recipe(name="data-size", image_size=64, batch_size=512, epochs=0, steps=3000, log_every=50, **STANDARD),
    ),
    # Settings of the recipe of two minutes, at equal compute: images of 32 px with the same 8×8 grid of patches.
    Study(
        name="recipe-pilot-cpu", figure="models", baseline="tiny-imagenet-2min", sizes=(7_500,), classes=50,
        seeds=(0, 1), validations=1,
        models={"tiny-imagenet-2min": PLAIN, "mean of the patches": Model("model.readout=mean"),
                "milder crops": Model("augment.scale=0.6,1"),
                "half the batch": Model("batch_size=64 steps=2400"),
                "narrower": Model("width=64 heads=2 steps=2560"),
                "patch dropout": Model("patch_drop=0.5 patch_drop_until=0.6 steps=1735")},
        recipe=replace(
            recipe("tiny-imagenet-2min"), image_size=32, patch_size=4, width=96, depth=6, heads=3,
            epochs=0, steps=1200, batch_size=128, log_every=100,  # 20 epochs, about seven minutes of one core
            precision="bf16", save_every=60,
            # As the recipe was before these pilots.
            model_kwargs={}, augment=replace(recipe("tiny-imagenet-2min").augment, scale=(0.4, 1.0)),
        ),
    ),
    # Fig. 11, right: two models with the same tokens, one of them with a small ResNet before its transformer.
    Study(
        name="hybrid-cpu", sizes=(100_000,), classes=200, seeds=(0,),
        models={"ViT, patch 8": Model(network=Network(patch=8, width=128, depth=6, heads=4)),
                "R10+ViT/8": Model(network=Network(width=128, depth=6, heads=4, stages=(1, 1, 1), channels=64))},
        recipe=THREE_EPOCHS,
    ),
    # Fig. 10: as in the paper, the second training has twice the rate and ten times the weight decay of the first, and
    # the third is twice as long.
    Study(
        name="settings-cpu", figure="models", sizes=(100_000,), classes=200, seeds=(0,),
        models={"600 steps, rate 0.0005, decay 0.01": Model("steps=600 lr=5e-4 muon_lr=1.5e-3 weight_decay=0.01"),
                "600 steps, rate 0.001, decay 0.1": Model("steps=600 weight_decay=0.1"),
                "1,200 steps, rate 0.001, decay 0.1": Model("weight_decay=0.1")},
        recipe=replace(THREE_EPOCHS, steps=1200, width=128, depth=6, heads=4),
    ),
    # Fig. 13: axial attention doubles the layers, so a third model has as many layers without it.
    Study(
        name="axial-cpu", figure="models", baseline="ViT", sizes=(7_500,), classes=50, validations=1,
        models={"ViT": Model("model.readout=mean"), "axial ViT": Model("model.readout=mean model.attention=axial"),
                "ViT, twice the layers": Model("model.readout=mean depth=8")},
        recipe=replace(DATA_SIZE.recipe, name="axial-cpu", steps=1250, patch_size=4, width=64, depth=4, heads=2),
    ),
    # Table 7. In a pilot with one seed, the ResNet's loss at BiT's rate was that of chance, 3.91, even after 300 steps,
    # and at ten times the rate 3.82 after 100; so both rates are there.
    Study(
        name="optimizers-cpu", figure="models", sizes=(7_500,), classes=50, validations=1,
        models={f"{name}, {title}": Model(settings, network=network)
                for name, network in (("ResNet", RESNET), ("ViT, patch 4", VIT))
                for title, settings in {"Adam": "", "SGD": f"{SGD} lr=0.0075", "SGD, rate × 10": f"{SGD} lr=0.075",
                                        "Muon": "optimizer=muon"}.items()},
        recipe=replace(DATA_SIZE.recipe, name="optimizers-cpu", optimizer="adamw"),
    ),
    # Table 8.
    Study(
        name="positions-cpu", figure="models", baseline="none", sizes=(6_000,), classes=10, seeds=(0, 1, 2, 3, 4),
        validations=1, recipe=SHAPES,
        models={name: Model(f"model.positions={value}") for name, value in POSITIONS.items()} | {
            name: Model(choices=f"positions={value}") for name, value in NEWER.items()
        } | {
            f"{name}, {title}": Model(f"model.positions={POSITIONS[name]} model.positions_at={at}")
            for name in ("learned, 1-D", "learned, 2-D") for title, at in PLACES.items()
        },
    ),
    # Fig. 9: a sweep of rates.
    Study(
        name="readout-cpu", figure="rates", sizes=(6_000,), classes=10, validations=1, recipe=replace(SHAPES, **ADAM),
        models={f"{title}, {rate:g}": Model(f"model.readout={value} lr={rate}")
                for title, value in (("class token", "class-token"), ("mean of patches", "mean"))
                for rate in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)},
    ),
    # Fig. 8, from a smaller base with the paper's MLP ratio. In a pilot with three seeds and 1,000 steps on 60,000
    # images, the base came to 75.9 %, and only the largest width, and all dimensions together, were ahead by more than
    # their intervals.
    Study(
        name="scaling-cpu", figure="scaling", baseline="base", sizes=(6_000,), classes=10, validations=1,
        recipe=replace(SHAPES, name="scaling-cpu", patch_size=5, width=24, depth=2, heads=3, mlp_ratio=2.0),
        models=scaled(
            depth=("depth=4", "depth=8"), patch_size=("patch_size=4", "patch_size=2"),
            MLP_width=("mlp_ratio=4", "mlp_ratio=8"), width=("width=48 heads=6", "width=96 heads=12"),
            all=("depth=4 patch_size=4 width=48 heads=6 mlp_ratio=4",),
        ),
    ),
    # A bias toward images, on few of them.
    Study(
        name="bias-cpu", figure="models", baseline="plain", sizes=(1_000,), classes=10, seeds=(0, 1, 2, 3, 4),
        validations=1, recipe=SHAPES,
        models={"plain": PLAIN, "convolution stem": Model(choices="tokenizer=conv-stem"),
                "shifted patches": Model(choices="tokenizer=shifted-patches"),
                "locality attention": Model(choices="attention=locality"),
                "shifted patches, locality": Model(choices="tokenizer=shifted-patches attention=locality"),
                "rotary positions": Model(choices="positions=rotary"), "averaged over flips": FLIPS},
    ),
    Study(
        name="equivariance-cpu", figure="models", baseline="plain", sizes=(1_000,), classes=10, validations=1,
        recipe=SHAPES, turns=("flips", "rotations"),
        models={"plain": PLAIN, "averaged over flips": FLIPS,
                "averaged over rotations": Model(choices="equivariance=rotations")},
    ),
    # B.1.2 and a newer way: learning without labels from all images, then tuning on a tenth of the labels.
    Study(
        name="masked-cpu", figure="models", baseline="random weights", sizes=(2_500,), classes=50, seeds=(0, 1, 2, 3),
        validations=2, recipe=TUNING, models=pretrained(1_000, 8_000),
    ),
    Study(
        name="masked-cpu-short", figure="models", baseline="random weights", sizes=(2_500,), classes=50,
        seeds=(0, 1, 2, 3), validations=2, recipe=replace(TUNING, steps=390), models=pretrained(1_000),
    ),
)}
"""All studies by name."""
# fmt: on


def study(name: str) -> Study:
    """The study of that name."""
    return STUDIES[name]
