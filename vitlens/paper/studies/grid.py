"""A study is a grid of trainings: which models, on how many images, with which seeds; all else is one recipe."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from vitlens.paper.studies.networks import Network, Variant
from vitlens.train.recipes import Recipe


@dataclass(frozen=True)
class Cell:
    """One training of a study."""

    network: Network | Variant
    images: int
    seed: int

    def __str__(self) -> str:
        return f"{self.network.name}, {self.images:,} images, seed {self.seed}"

    @property
    def name(self) -> str:
        return f"{re.sub('[^A-Za-z0-9+]+', '-', self.network.name)}_{self.images}_{self.seed}"


@dataclass(frozen=True)
class Study:
    """A grid of trainings by one recipe. Raises ValueError for sizes and settings that do not fit together."""

    name: str
    title: str
    """What it shows, for people."""
    networks: tuple[Network | Variant, ...]
    sizes: tuple[int, ...]
    """Numbers of training images, each a multiple of the number of classes."""
    recipe: Recipe
    """Shared by all trainings; networks replace its model settings. Its `steps` are those for the most images."""
    classes: int
    """Classes of the data that are used; if it has more, the same ones are drawn for all trainings."""
    seeds: tuple[int, ...] = (0, 1, 2)
    figure: str = "sizes"
    """What `vitlens study --figure` draws, a name in `figures.FIGURES`."""
    baseline: str = ""
    """The network that the others are compared with, seed by seed; "" for none."""
    validations: int = 10
    """How often a training is validated, about."""
    equal: str = "steps"
    """What is the same for all sizes: "steps", or "epochs", where fewer images mean fewer steps."""

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
            raise ValueError("A study sets its length in steps. Give its recipe steps, not epochs.")
        if self.equal not in ("steps", "epochs"):
            raise ValueError(f"A study has equal steps or equal epochs, got equal={self.equal!r}. Choose one.")
        for network in self.networks:
            before = network.before(network.plan(self.recipe))
            if before and (before.objective == "labels" or not before.steps):
                raise ValueError(
                    f"{network.name} learns without labels first, for a number of steps; got {before.name} with "
                    f"objective={before.objective} and steps={before.steps}. Give a recipe without labels, and steps."
                )
        if self.baseline and self.baseline not in [network.name for network in self.networks]:
            raise ValueError(f"The baseline {self.baseline!r} is none of the study's networks. Give the name of one.")
        twice = [name for name, n in Counter(cell.name for cell in self.cells()).items() if n > 1]
        if twice:
            raise ValueError(f"Two trainings of this study would be called {twice[0]}. Change the name of a network.")

    def cells(self) -> Iterator[Cell]:
        """All trainings, seed by seed: a study that was stopped has whole grids of fewer seeds."""
        return (Cell(n, images, seed) for seed in self.seeds for images in self.sizes for n in self.networks)

    def plan(self, cell: Cell) -> Recipe:
        """The recipe of one training. Raises ValueError for settings that do not go together."""
        recipe = cell.network.plan(self.recipe)
        steps = self.steps(cell)
        epochs = steps / (cell.images // recipe.batch_size)
        return replace(
            recipe, name=self.name, seed=cell.seed, num_classes=self.classes, steps=steps,
            evaluate_every=max(1, round(epochs / self.validations)),
        )  # fmt: skip

    def steps(self, cell: Cell) -> int:
        """Number of optimizer steps of one training."""
        share = cell.images / max(self.sizes) if self.equal == "epochs" else 1
        return max(1, round(share * self.recipe.steps))

    def before(self, cell: Cell) -> Recipe | None:
        """The recipe of the training without labels that comes before that of `cell`; None if none does."""
        return cell.network.before(self.plan(cell))

    def all_steps(self, cell: Cell) -> int:
        """Number of optimizer steps of one training, with those of the training without labels before it."""
        before = self.before(cell)
        return self.steps(cell) + (before.steps if before else 0)

    @property
    def pretrains(self) -> bool:
        """Whether some of its models learn without labels first."""
        return any(network.before(network.plan(self.recipe)) for network in self.networks)

    @property
    def length(self) -> str:
        """The length of a training in words: "3,000 steps", or "at most 3,000 steps" where not all are as long."""
        steps = max(self.all_steps(cell) for cell in self.cells())
        return f"{'at most ' if self.equal == 'epochs' or self.pretrains else ''}{steps:,} steps"

    def tiny(self) -> Study:
        """The same path in seconds: narrow models, two sizes, two seeds, a few steps."""
        classes = min(self.classes, 5)
        return replace(
            self, networks=tuple(n.tiny() for n in self.networks), sizes=(8 * classes, 16 * classes), seeds=(0, 1),
            classes=classes,
            recipe=replace(
                self.recipe, steps=6, batch_size=min(20, 8 * classes), log_every=2, width=16 * self.recipe.heads,
                depth=2,
            ),
        )  # fmt: skip

    def to_dict(self) -> dict:
        """What makes it this study: everything but its title and what is drawn of it."""
        about = {**asdict(self), "recipe": self.recipe.to_dict()}
        return {name: value for name, value in about.items() if name not in ("title", "figure", "baseline")}
