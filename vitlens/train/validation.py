"""How many validation images a model gets right."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitlens.data import ImageSet
from vitlens.data.augment import normalized
from vitlens.recorder.running import evaluating
from vitlens.train.precision import settled
from vitlens.train.processes import World
from vitlens.train.recipes.recipe import Recipe


@torch.no_grad()
def accuracy(
    model: nn.Module,
    data: ImageSet,
    recipe: Recipe,
    weights: dict[str, Tensor] | None = None,
    world: World | None = None,
) -> float:
    """Top-1 (%) of ``model``, or of the model with other ``weights``, on ``data``; no test-time augmentation.

    What stands in for a damaged image does not count. The model is evaluated as it is, uncompiled; the training flag of
    each module is left as found.
    """
    world = world or World(device=next(model.parameters()).device)
    recipe = settled(recipe, world)
    at_once = min(500, max(recipe.batch_size // (recipe.accumulate * world.size), 64))  # no more than training takes
    mine = torch.arange(len(data), device=data.labels.device).split(at_once)[world.rank :: world.size]
    right = torch.zeros(len(data), dtype=torch.bool, device=world.device)
    with evaluating(model):
        for rows, (images, labels) in zip(mine, data.batches(mine), strict=True):
            x = normalized(images, recipe.mean, recipe.std)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
                logits = torch.func.functional_call(model, weights, (x,)) if weights else model(x)
            right[rows.to(right.device, non_blocking=True)] = logits.argmax(-1) == labels
    hits = (right & ~data.stand_ins().to(right.device)).sum()
    world.sum([hits])
    return 100 * hits.item() / counting(data, world)


def counting(data: ImageSet, world: World) -> int:
    """Images that count, once they were read: those that no other stands in for, which the process knows that read."""
    lost = data.stand_ins().sum().to(world.device)
    world.sum([lost])
    return len(data) - int(lost)


def validation(
    model: nn.Module, average: dict[str, Tensor], valid: ImageSet, recipe: Recipe, world: World | None = None
) -> dict[str, float]:
    """``top1`` (%) of the model, and ``top1_average`` of its averaged weights where there are any."""
    metrics = {"top1": accuracy(model, valid, recipe, world=world)}
    return {**metrics, "top1_average": accuracy(model, valid, recipe, average, world)} if average else metrics
