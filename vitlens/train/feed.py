"""What the loop is fed: augmented batches in an order that is a function of (seed, epoch, step)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitlens.data import ImageSet
from vitlens.data.augment import Targets, augmented, draws, generator, seed_of
from vitlens.train.processes import World
from vitlens.train.recipes.recipe import Recipe

Parts = Iterator[tuple[Tensor, Targets]]


def batches(
    model: nn.Module, train: ImageSet, recipe: Recipe, world: World, done: int, steps: int
) -> Iterator[tuple[int, Parts]]:
    """(step, parts of its batch that are this process's) from step ``done`` to ``steps``.

    A batch in parts is the batch at once: order and augmentation do not depend on how many there are. Dropout,
    stochastic depth and patch dropout do: they draw from the global generator, which is seeded anew before each part.
    """
    per_epoch, parts = len(train) // recipe.batch_size, world.size * recipe.accumulate
    mine = range(world.rank * recipe.accumulate, (world.rank + 1) * recipe.accumulate)
    size, remaining = recipe.batch_size // parts, train.remaining(recipe.augment)
    for epoch in range(done // per_epoch, -(-steps // per_epoch)):
        # Beside the labels: an index on another device than the images would make the host wait at every batch.
        order = torch.randperm(len(train), generator=generator("cpu", recipe.seed, epoch))
        order = order.to(train.labels.device).split(size)
        within = range(max(done - epoch * per_epoch, 0), min(steps - epoch * per_epoch, per_epoch))
        rows = (order[i * parts + k] for i in within for k in mine)
        loaded = train.batches(rows, recipe.augment, (recipe.seed, epoch))

        def part(k: int, i: int, epoch: int = epoch, loaded=loaded) -> tuple[Tensor, Targets]:
            progress = (epoch * per_epoch + i) / steps
            images, labels = next(loaded)
            torch.manual_seed(seed_of(recipe.seed, epoch, i, 1 + k))
            set_patch_drop(model, recipe.patch_drop if progress < recipe.patch_drop_until else 0.0)
            return augmented(
                images, labels, remaining, draws(images.device, recipe.seed, epoch, i, part=k, parts=parts),
                size=recipe.image_size, mean=recipe.mean, std=recipe.std, mix=progress < recipe.mix_until,
            )  # fmt: skip

        for i in within:
            yield epoch * per_epoch + i, (part(k, i) for k in mine)


def set_patch_drop(model: nn.Module, share: float) -> None:
    """Set timm's patch dropout. Raises ``ValueError`` if patches are to be dropped by a model built without it."""
    layer = getattr(model, "patch_drop", None)
    if not hasattr(layer, "prob"):
        if share:
            raise ValueError(
                "The recipe drops patches and the model has no layer that does; build it with patch_drop_rate above 0."
            )
    elif layer.prob != share:
        layer.prob = share
