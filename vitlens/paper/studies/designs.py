"""Studies by name: which models are trained on how many images, with which seeds; all else is one recipe.

Numbers stand here with their reasons, so that the name of a study says what was done. `register` adds one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from vitlens.data.augment import Augment
from vitlens.paper.studies.networks import Network
from vitlens.train.recipes import Recipe, recipe


@dataclass(frozen=True)
class Cell:
    """One training of a study."""

    network: Network
    images: int
    seed: int

    def __str__(self) -> str:
        return f"{self.network.name}, {self.images:,} images, seed {self.seed}"

    @property
    def name(self) -> str:
        return f"{re.sub('[^A-Za-z0-9+]+', '-', self.network.name)}_{self.images}_{self.seed}"


@dataclass(frozen=True)
class Study:
    """A grid of trainings by one recipe. Raises ValueError for sizes that do not fit the classes or the batch."""

    name: str
    title: str
    """What it shows, for people."""
    networks: tuple[Network, ...]
    sizes: tuple[int, ...]
    """Numbers of training images, each a multiple of the number of classes."""
    recipe: Recipe
    """Of every training, except for what it says of the model. Its length is given in steps."""
    classes: int
    """Classes of the data that are used; if it has more, the same ones are drawn for all trainings."""
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self):
        uneven = [n for n in self.sizes if n % self.classes or n < 1]
        if uneven:
            raise ValueError(
                f"Each of {self.classes} classes gets equally many training images, but {uneven[0]} is no multiple."
            )
        if min(self.sizes) < self.recipe.batch_size:
            raise ValueError(
                f"A batch of {self.recipe.batch_size} exceeds {min(self.sizes)} training images. Lower batch_size."
            )
        if not self.recipe.steps:
            raise ValueError("All trainings of a study are equally long. Give its recipe steps, not epochs.")
        twice = [name for name, n in Counter(cell.name for cell in self.cells()).items() if n > 1]
        if twice:
            raise ValueError(f"Two trainings of this study would be called {twice[0]}. Change the name of a network.")

    def cells(self) -> Iterator[Cell]:
        """All trainings, seed by seed: a study that was stopped has whole grids of fewer seeds."""
        return (Cell(n, images, seed) for seed in self.seeds for images in self.sizes for n in self.networks)

    def plan(self, cell: Cell) -> Recipe:
        """The recipe of one training, validated about ten times."""
        epochs = self.recipe.steps / (cell.images // self.recipe.batch_size)
        return replace(
            self.recipe, name=self.name, seed=cell.seed, num_classes=self.classes,
            evaluate_every=max(1, round(epochs / 10)),
        )  # fmt: skip

    def tiny(self) -> Study:
        """The same path in seconds: narrow models, two sizes, two seeds, a few steps."""
        classes = min(self.classes, 5)
        return replace(
            self, networks=tuple(n.tiny() for n in self.networks), sizes=(8 * classes, 16 * classes), seeds=(0, 1),
            classes=classes, recipe=replace(self.recipe, steps=6, batch_size=min(20, 8 * classes), log_every=2),
        )  # fmt: skip

    def to_dict(self) -> dict:
        """What makes it this study: everything but its title."""
        about = {**asdict(self), "recipe": self.recipe.to_dict()}
        del about["title"]
        return about


STUDIES: dict[str, Study] = {}
"""All studies by name."""


def register(study: Study) -> Study:
    """Add a study, or replace the one of the same name; returns it."""
    STUDIES[study.name] = study
    return study


# fmt: off
STANDARD = dict(
    # Table 3 of the paper, for JFT-300M: Adam, weight decay 0.1, linear decay of the rate, no dropout. One rate for all
    # models, that of its R50x1; its ViT-B has 8e-4.
    optimizer="adamw", lr=1e-3, weight_decay=0.1, schedule="linear", warmup=0.05, clip=1.0,
    # The paper's crops and flips, and nothing else that could stand in for data; 64-px images are crops already.
    augment=Augment(flip=0.5, scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3)),
)
register(Study(
    name="data-size", title="Fig. 3 and 4 in miniature, on all of Tiny-ImageNet: 48 trainings",
    networks=(
        Network("ViT-Ti/8", patch=8, width=192, depth=12, heads=3),  # 0.7 GFLOPs
        Network("ViT-S/8", patch=8, width=384, depth=12, heads=6),  # 2.8
        # The transformer of ViT-Ti on three stages that reduce by 8, as the patches do: the same 8×8 tokens.
        Network("R10+ViT-Ti/8", width=192, depth=12, heads=3, stages=(1, 1, 1), channels=128),  # 0.9
        Network("R26x1", stages=(2, 2, 2, 2), channels=256),  # 1.5, between the ViTs
    ),
    sizes=(5_000, 10_000, 30_000, 100_000),  # apart as the paper's 9, 30, 90 and 303 million are, about
    classes=200,
    # 3,000 steps of 512: 15 epochs of all images, 307 of the fewest. All trainings of a model cost the same.
    recipe=Recipe(
        name="data-size", image_size=64, batch_size=512, epochs=0, steps=3000, log_every=50, **STANDARD
    ),
))
register(Study(
    name="data-size-cpu", title="the same question in a quarter of an hour of one core, with ten classes at 24 px",
    networks=(
        Network("ViT, patch 4", patch=4, width=64, depth=4, heads=2),  # 16 MFLOPs
        Network("ResNet", stages=(2, 2, 2), channels=64),  # 10
    ),
    sizes=(500, 1_500, 5_000),  # all there are of ten classes, a third, a tenth
    classes=10,
    recipe=Recipe(
        name="data-size-cpu", image_size=24, batch_size=25, epochs=0, steps=400, log_every=50,
        precision="fp32",  # faster than bf16 in models this narrow
        **STANDARD,
    ),
))
# Two models with the same tokens, one of them with a small ResNet before its transformer, to be looked into.
register(Study(
    name="hybrid-cpu", title="Fig. 11, right: a ViT and a hybrid trained alike, in 90 minutes of one core",
    networks=(
        Network("ViT, patch 8", patch=8, width=128, depth=6, heads=4),  # 0.17 GFLOPs
        Network("R10+ViT/8", width=128, depth=6, heads=4, stages=(1, 1, 1), channels=64),  # 0.22
    ),
    sizes=(100_000,),
    classes=200,
    seeds=(0,),
    # The bundled model's recipe, but for what a long run wants: three epochs do not overfit.
    recipe=replace(
        recipe("tiny-imagenet-cpu"), epochs=0, steps=1170, average=0.0,
        augment=Augment(flip=0.5, scale=(0.5, 1.0), ratio=(3 / 4, 4 / 3)), mix_until=1.0, patch_drop_until=0.7,
    ),
))
register(Study(
    name="data-size-digits", title="a minute a seed on a laptop, on scikit-learn's handwritten digits",
    networks=(
        Network("ViT, patch 2", patch=2, width=96, depth=3, heads=3),  # 11.7 MFLOPs
        Network("ResNet", stages=(2, 2), channels=256),  # 10.9: the paper compares at equal compute
    ),
    sizes=(50, 200, 1_000),
    classes=10,
    recipe=Recipe(
        name="data-size-digits", image_size=8, batch_size=25, epochs=0, steps=600, log_every=50,
        precision="fp32", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
        **STANDARD | dict(
            lr=2e-3, warmup=0.1,  # in so few steps, the ViT learns little at 1e-3
            augment=Augment(scale=(0.8, 1.2), ratio=(3 / 4, 4 / 3)),  # a mirrored digit is none
        ),
    ),
))
# fmt: on


def study(name: str) -> Study:
    """The study of that name; ValueError if there is none."""
    if name not in STUDIES:
        raise ValueError(f"There is no study {name!r}. The studies are: {', '.join(STUDIES)}.")
    return STUDIES[name]
