"""Images of which the model sees some patches only, and what it then says of a class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitlens.attribution.target import Target, asked, class_logits
from vitlens.faithfulness.baselines import blank
from vitlens.models import require_classes
from vitlens.recorder.arguments import require_count, require_images, taking
from vitlens.recorder.families import MODELS, evaluating, model_name, qualified_name, unwrap
from vitlens.recorder.grid import TokenGrid, token_grid

SCORES = ("probability", "logit")


@dataclass(frozen=True)
class Covered:
    """A model, images (B, C, H, W) on its device, what covers them, and the class whose score is read."""

    model: nn.Module
    images: Tensor
    blanks: Tensor
    grid: TokenGrid
    target: Target
    score: str
    internal_batch_size: int

    def scores(self, total: int, shown: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """(total,) scores of pictures that exist only while the model looks at them, float32 or wider.

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

    def whole(self, seen: float = 1.0) -> Tensor:
        """(B,) scores of the images with every patch seen, or with none (0)."""
        patches = self.images.new_full((1, self.grid.patches), seen)
        return self.scores(len(self.images), lambda numbers: (numbers, patches.expand(len(numbers), -1)))


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
    """Everything checked, on the model's device and in its dtype. Raises ValueError for what cannot be scored."""
    if score not in SCORES:
        raise ValueError(f"A score is one of {', '.join(SCORES)}, but {score!r} came.")
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
                f"vitlens does not know the patches of {model_name(bare)}; tell them, as in "
                "`grid=TokenGrid(rows, cols, patch=(height, width), prefix=0)`."
            )
        return token_grid(bare, size)
    if tuple(grid.image) != size:
        raise ValueError(f"A grid for images of {size} pixels was wanted, but one for {tuple(grid.image)} came.")
    return grid


def target_of(model: nn.Module, images: Tensor, target, against, internal_batch_size: int) -> Target:
    """The class of each image, and what it is contrasted with. Runs the model once, unless target is a `Target`."""
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
    """(…, B, rows, cols) the maps, detached. Raises ValueError for another shape or values that are no numbers."""
    wanted = f"(…, {'B' if batch is None else batch}, {grid.rows}, {grid.cols})"
    if not isinstance(maps, Tensor):
        raise ValueError(f"{name} is a tensor of shape {wanted}, but {type(maps).__name__} came.")
    if maps.dim() < 3 or maps.shape[-2:] != (grid.rows, grid.cols) or batch not in (None, maps.shape[-3]):
        raise ValueError(
            f"{name} has one value for each patch of each image, shape {wanted}, but shape {tuple(maps.shape)} came; "
            "give the map as its method returns it, not resized."
        )
    if not maps.isfinite().all():
        raise ValueError(
            f"{name} ranks the patches by finite numbers, but {int((~maps.isfinite()).sum())} of its "
            f"{maps.numel()} values are not finite; look for a division by zero or an overflow where it was made."
        )
    return maps.detach()
