"""How many validation images a model gets right, or how well it fills in their patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitlens.data import ImageSet
from vitlens.data.augment import normalized, seed_of
from vitlens.recorder.forward import evaluating
from vitlens.train.precision import trains_in_bf16
from vitlens.train.processes import World
from vitlens.train.settings import Recipe


@torch.no_grad()
def accuracy(
    model: nn.Module,
    data: ImageSet,
    recipe: Recipe,
    weights: dict[str, Tensor] | None = None,
    world: World | None = None,
) -> float:
    """Top-1 (%) of the model, or of the model with other `weights`, on `data`; no test-time augmentation.

    Images that stand in for damaged ones do not count. The model is evaluated as it is, uncompiled; the training flag
    of each module is left as found.
    """
    world = world or World(device=next(model.parameters()).device)
    bf16 = trains_in_bf16(recipe, world.device)
    at_once = min(500, max(recipe.batch_size // (recipe.accumulate * world.size), 64))  # no more than training takes
    mine = torch.arange(len(data), device=data.labels.device).split(at_once)[world.rank :: world.size]
    right = torch.zeros(len(data), dtype=torch.bool, device=world.device)
    with evaluating(model):
        for rows, (images, labels) in zip(mine, data.batches(mine), strict=True):
            x = normalized(images, recipe.mean, recipe.std)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                logits = torch.func.functional_call(model, weights, (x,)) if weights else model(x)
            right[rows.to(right.device, non_blocking=True)] = logits.argmax(-1) == labels
    hits = (right & ~data.stand_ins().to(right.device)).sum()
    world.sum([hits])
    return 100 * hits.item() / counting(data, world)


def counting(data: ImageSet, world: World) -> int:
    """How many images of `data` are undamaged, as far as all processes together know."""
    lost = data.stand_ins().sum().to(world.device)
    world.sum([lost])
    return len(data) - int(lost)


def validate(
    model: nn.Module, average: dict[str, Tensor], valid: ImageSet, recipe: Recipe, world: World | None = None
) -> dict[str, float]:
    """`top1` (%) of the model, and `top1_average` of its averaged weights where there are any.

    Without labels they are `valid_loss` and `valid_loss_average`, the loss of the model's objective.
    """
    name, measure = ("valid_loss", objective_loss) if hasattr(model, "objective") else ("top1", accuracy)
    metrics = {name: measure(model, valid, recipe, world=world)}
    return {**metrics, f"{name}_average": measure(model, valid, recipe, average, world)} if average else metrics


class ObjectiveLoss(nn.Module):
    """A model as a function from images to the loss of its objective."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.objective(self.model, x)


@torch.no_grad()
def objective_loss(
    model: nn.Module,
    data: ImageSet,
    recipe: Recipe,
    weights: dict[str, Tensor] | None = None,
    world: World | None = None,
) -> float:
    """The loss on `data` of the objective that the model carries, of the model or with other `weights`.

    Images that stand in for damaged ones do not count. Which patches are hidden is the same at every call with a recipe
    of the same batch size and parts; others move the loss in the third digit. The training flag of each module is left
    as found.
    """
    world = world or World(device=next(model.parameters()).device)
    bf16, swapped = trains_in_bf16(recipe, world.device), {f"model.{name}": t for name, t in (weights or {}).items()}
    at_once = min(500, max(recipe.batch_size // (recipe.accumulate * world.size), 64))
    mine = torch.arange(len(data), device=data.labels.device).split(at_once)[world.rank :: world.size]
    whole, total = ObjectiveLoss(model), torch.zeros((), device=world.device)
    with evaluating(model), torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
        for rows, (images, _) in zip(mine, data.batches(mine), strict=True):
            torch.manual_seed(seed_of(0, int(rows[0])))
            sound = ~data.stand_ins()[rows.cpu()].to(images.device)
            if not sound.any():
                continue
            x = normalized(images[sound], recipe.mean, recipe.std)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                loss = torch.func.functional_call(whole, swapped, (x,)) if swapped else whole(x)
            total += loss * len(x)
    world.sum([total])
    return total.item() / counting(data, world)
