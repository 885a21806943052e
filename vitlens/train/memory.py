"""Batches that fit into memory, found by trial after memory has run out."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitlens.data import ImageSet
from vitlens.processes import World
from vitlens.recorder.memory import is_out_of_memory
from vitlens.train.criteria import batch_statistics, restorer, validate
from vitlens.train.optim import set_rates
from vitlens.train.settings import Recipe


def smaller_recipes(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes that hold fewer images at once, for one process: with `accumulate` doubled, then the batch halved.

    >>> digits = vitlens.train.recipe("digits").override("batch_size=12")
    >>> [(r.batch_size, r.accumulate) for r in vitlens.train.memory.smaller_recipes(digits)]
    [(12, 2), (3, 1), (1, 1)]
    """
    smallest = recipe.batch_size // recipe.accumulate
    accumulate = 2 * recipe.accumulate
    while recipe.batch_size % (2 * accumulate) == 0:
        smallest = recipe.batch_size // accumulate
        yield replace(recipe, accumulate=accumulate)
        accumulate *= 2
    batch = recipe.batch_size // 2
    while batch >= 1:
        if batch < smallest:
            yield replace(recipe, accumulate=1, batch_size=batch)
        batch //= 2


@dataclass
class MemoryTrial:
    """The state of a run in one process, to find a batch that fits after memory has run out.

    backward: (recipe, step) → None computes the gradients of a step of the run by a recipe, as the loop does.
    """

    model: nn.Module
    average: dict[str, Tensor]
    valid: ImageSet
    recipe: Recipe
    optimizers: list[Optimizer]
    world: World
    backward: Callable[[Recipe, int], None]
    images: int

    @contextmanager
    def on_failure(self) -> Iterator[None]:
        """Raise MemoryError with a setting that fits, in place of an error of memory in this block.

        Several processes try nothing, because the others wait for the gradients of this one.
        """
        try:
            yield
        except Exception as error:
            if self.world.size > 1 or not is_out_of_memory(error):
                raise
            release(error)
            raise MemoryError(self.message()) from error

    def message(self) -> str:
        """Sentences about the recipe that does not fit, and the first smaller one that does."""
        recipe = self.recipe
        at_once = recipe.batch_size // recipe.accumulate
        start = f"The memory of {self.world.device} does not hold {at_once} images of {recipe.image_size} pixels"
        tried = []
        for smaller in smaller_recipes(recipe):
            if self.fits(smaller):
                return f"{start}. The last checkpoint is intact. {advice(recipe, smaller)}"
            tried.append(smaller)
        if not tried:
            return f"{start}, and no batch is smaller. Take a smaller model or image_size."
        least = tried[-1].batch_size // tried[-1].accumulate
        return f"{start}, nor {least} (tried). The last checkpoint is intact. Take a smaller model or image_size."

    def fits(self, recipe: Recipe) -> bool:
        """True if steps and validation by the recipe fit into memory, with the optimizers' state. Weights remain."""
        restore = restorer(self.world.device, batch_statistics(self.model))
        training = self.model.training
        try:
            self.try_run(recipe)
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            return False
        finally:
            self.model.train(training)
            self.model.zero_grad()
            restore()

    def try_run(self, recipe: Recipe) -> None:
        """Compute the gradients of the first and last step, which differ in patch dropout and mixing, and validate."""
        self.model.zero_grad()
        self.fill_optimizers()
        self.model.train()
        for step in (0, recipe.length(self.images) - 1):
            self.backward(recipe, step)
        batch = self.valid.subset(min(len(self.valid), 500))
        validate(self.model, self.average, batch, recipe, self.world)

    def fill_optimizers(self) -> None:
        """Allocate the optimizers' state, if the first step has not, by a step of length and gradient 0."""
        set_rates(self.optimizers, 0.0)
        for optimizer in self.optimizers:
            if optimizer.state:
                continue
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()


def advice(recipe: Recipe, fitting: Recipe) -> str:
    """Sentence with the setting that fits."""
    if fitting.batch_size == recipe.batch_size:
        setting = f"accumulate={fitting.accumulate}"
        return f"Resume or start again with --set {setting}, which fits here (tried) and trains the same."
    accumulate = "" if recipe.accumulate == 1 else " --set accumulate=1"
    return (
        f"Start a new run with --set batch_size={fitting.batch_size}{accumulate}, which fits here (tried). It trains "
        "otherwise than the larger batch."
    )


def release(error: BaseException) -> None:
    """Free the tensors of the step that failed, which the frames of its traceback hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
