"""Scores of a class when the model sees only some patches of an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitlens.attribution.target import Target, asked, class_logits
from vitlens.faithfulness.baselines import blank
from vitlens.models import require_classes
from vitlens.recorder.arguments import require_count
from vitlens.recorder.families import MODELS, model_name, qualified_name, unwrap
from vitlens.recorder.grid import TokenGrid, token_grid
from vitlens.recorder.running import evaluating, require_images, taking

SCORES = ("probability", "logit")


@dataclass(frozen=True)
class Covered:
    """All that a score is made of, checked: a model, images (B, C, H, W) on its device, what covers them, a class."""

    model: nn.Module
    images: Tensor
    blanks: Tensor
    grid: TokenGrid
    target: Target
    score: str
    internal_batch_size: int

    def scores(self, total: int, shown: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """(total,) scores of pictures, float32 or wider. No more than one batch of pictures exists at a time.

        shown: (N,) numbers of pictures → (N,) numbers of their images and (N, P) how much of each patch is seen, 0 … 1.
        """
        device = self.images.device
        patches = self.grid.pixel_patches(device)
        found = self.images.new_empty(total, dtype=torch.promote_types(self.images.dtype, torch.float32))
        with evaluating(self.model), torch.no_grad():
            for start in range(0, total, self.internal_batch_size):
                numbers = torch.arange(start, min(start + self.internal_batch_size, total), device=device)
                image, seen = shown(numbers)
                seen = seen.to(self.images.dtype)[:, None, patches]
                logits = self.model(seen * self.images[image] + (1 - seen) * self.blanks[image]).to(found.dtype)
                chosen = self.target.of(image)
                found[numbers] = (chosen.probabilities if self.score == "probability" else chosen.logits)(logits)
        return found


def covered(
    model: nn.Module,
    images: Tensor,
    target,
    against,
    *,
    baseline: str | Tensor,
    score: str,
    grid: TokenGrid | None,
    internal_batch_size: int,
) -> Covered:
    """The arguments of a score, checked, on the model's device and in its dtype. Raises ValueError for wrong ones."""
    if score not in SCORES:
        raise ValueError(f"A score is one of {', '.join(SCORES)}, got {score!r}.")
    grid = patch_grid(model, images, grid)
    target = target_of(model, images, target, against, internal_batch_size)
    images = on_model(model, images)
    return Covered(model, images, blank(images, baseline, grid), grid, target, score, internal_batch_size)


def on_model(model: nn.Module, images: Tensor) -> Tensor:
    """The images where the model's parameters are, in their dtype."""
    return images.detach().to(next(model.parameters(), images))


def patch_grid(model: nn.Module, images: Tensor, grid: TokenGrid | None) -> TokenGrid:
    """The patches of the images: those of a supported timm model, or the grid that is given."""
    bare = unwrap(model)
    require_images(images, bare)
    size = tuple(images.shape[-2:])
    if grid is None:
        if qualified_name(bare) not in MODELS:
            raise ValueError(
                f"vitlens does not know the patches of {model_name(bare)}. Give its grid, as in "
                "`grid=TokenGrid(rows, cols, patch=(height, width), prefix=0)`."
            )
        return token_grid(bare, size)
    if tuple(grid.image) != size:
        raise ValueError(f"Expected a grid for images of {size} pixels, got one for {tuple(grid.image)}.")
    return grid


def target_of(model: nn.Module, images: Tensor, target, against, internal_batch_size: int) -> Target:
    """The `Target` of the images. Runs the model once on each, unless target is a `Target` already."""
    bare = unwrap(model)
    require_classes(bare)
    require_count(internal_batch_size=internal_batch_size)
    if isinstance(target, Target) and against is None:
        return target
    with taking(bare), evaluating(model), torch.no_grad():
        parts = on_model(model, images).split(internal_batch_size)
        logits = torch.cat([class_logits(bare, model(part)) for part in parts])
    return asked(bare, logits, target, against)


def checked_maps(maps: Tensor, grid: TokenGrid, batch: int | None = None, name: str = "A map") -> Tensor:
    """The maps, detached. Raises ValueError unless they are finite and of shape (…, B, rows, cols)."""
    wanted = f"(…, {'B' if batch is None else batch}, {grid.rows}, {grid.cols})"
    if not isinstance(maps, Tensor):
        raise ValueError(f"{name} is a tensor of shape {wanted}, got {type(maps).__name__}.")
    if maps.dim() < 3 or maps.shape[-2:] != (grid.rows, grid.cols) or batch not in (None, maps.shape[-3]):
        raise ValueError(
            f"{name} has one value for each patch of each image, shape {wanted}, got shape {tuple(maps.shape)}. "
            "Give the map as its method returns it, not resized."
        )
    if not maps.isfinite().all():
        raise ValueError(
            f"{name} has {int((~maps.isfinite()).sum())} of {maps.numel()} values that are not finite. Look for a "
            "division by zero or an overflow where it was made."
        )
    return maps.detach()
