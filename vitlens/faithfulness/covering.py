"""Covered patches: what covers them, and the score of a class when the model sees only the other patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitlens.attribution.forward import answered, require_said
from vitlens.attribution.target import Target, asked, bound, class_logits
from vitlens.recorder.arguments import fitted, require_count
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.running import evaluating, require_images, taking
from vitlens.recorder.supported import known, model_name, token_grid, unwrap

BASELINES = {
    "mean": "by the mean color",
    "blur": "by the blurred picture",
    "zero": "by the color that is zero to the model",
}
"""What may cover a patch, by name, and in words."""


@dataclass(frozen=True)
class Covered:
    """All that a score is made of, checked: a model, images (B, C, H, W) on its device, what covers them, a target."""

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
                pictures = seen * self.images[image] + (1 - seen) * self.blanks[image]
                output = answered(self.model, pictures, self.target.of_features).to(found.dtype)
                found[numbers] = self.target.of(image).measured(output, self.score)
        return found


def covered(
    model: nn.Module,
    images: Tensor,
    target,
    against,
    *,
    baseline: str | Tensor,
    score: str | None,
    grid: TokenGrid | None,
    internal_batch_size: int,
) -> Covered:
    """The arguments of a score, checked, on the model's device and in its dtype. Raises ValueError for wrong ones."""
    grid = patch_grid(model, images, grid)
    target = target_of(model, images, target, against, internal_batch_size)
    score = next(iter(target.measures)) if score is None else score
    if score not in target.measures:
        raise ValueError(
            f"The score of {target.called(0)} is one of {', '.join(target.measures)}, got {score!r}. Give one of these."
        )
    images = on_model(model, images)
    return Covered(model, images, blank(images, baseline, grid), grid, target, score, internal_batch_size)


def blank(images: Tensor, baseline: str | Tensor, grid: TokenGrid) -> Tensor:
    """(B, C, H, W) images with all patches covered.

    baseline: "mean", the mean color of each image, per channel; "blur", the image blurred by a Gaussian whose standard
    deviation is the longer side of a patch, so that nothing smaller than a patch survives; "zero", zero in the model's
    input space, the mean color of its training set if it normalizes by that; or a tensor that fits the images, such as
    `blurred(images, sigma)`. Raises ValueError for anything else.
    """
    if isinstance(baseline, Tensor):
        return fitted(baseline, images)
    if baseline == "mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    if baseline == "blur":
        return blurred(images, max(grid.patch))
    if baseline == "zero":
        return torch.zeros_like(images)
    raise ValueError(
        f"A baseline is one of {', '.join(BASELINES)}, or a tensor that fits the images, got {baseline!r}."
    )


def blurred(images: Tensor, sigma: float) -> Tensor:
    """(B, C, H, W) images blurred by a Gaussian of standard deviation sigma, in pixels.

    The Gaussian is cut off at 4 sigma, and the image mirrored at its edges.
    """
    from scipy.ndimage import gaussian_filter

    if not sigma > 0:
        raise ValueError(f"Expected a positive standard deviation in pixels, got sigma={sigma!r}.")
    smooth = gaussian_filter(images.detach().cpu().double().numpy(), (0, 0, sigma, sigma), mode="reflect")
    return torch.from_numpy(smooth).to(images)


def on_model(model: nn.Module, images: Tensor) -> Tensor:
    """The images where the model's parameters are, in their dtype."""
    return images.detach().to(next(model.parameters(), images))


def patch_grid(model: nn.Module, images: Tensor, grid: TokenGrid | None) -> TokenGrid:
    """The grid of the images' patches: the one given, or a known model's own."""
    bare = unwrap(model)
    require_images(images, bare)
    size = tuple(images.shape[-2:])
    if grid is None:
        if not known(bare):
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
    require_said(bare, target)
    require_count(internal_batch_size=internal_batch_size)
    target, against = bound(bare, target, against)
    if isinstance(target, Target):
        return target
    with taking(bare), evaluating(model), torch.no_grad():
        parts = on_model(model, images).split(internal_batch_size)
        logits = torch.cat([class_logits(bare, answered(model, part, False)) for part in parts])
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
