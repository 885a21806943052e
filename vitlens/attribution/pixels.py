"""Methods that differentiate by pixels or cover patches. Integrated Gradients calls captum, imported on first use.

Both take model, images, target, against and names as in `vitlens.attribution`, and these options. baseline: the pixels
that replace the image's, a number or a tensor that fits the images, in normalized units. 0 is the mean color.
internal_batch_size: number of images in one forward. Images are explained one at a time, so a batch gives the maps of
its images alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from vitlens.attribution.maps import (
    explained,
    explanation_mode,
    outputs_of,
    prepare_inputs,
    run_with_capture,
)
from vitlens.attribution.target import Target, of_features, resolve_target
from vitlens.recorder.grid import TokenGrid


@dataclass(frozen=True)
class OneImage:
    """An image (1, C, H, W), its baseline, and the function from images to scores (B, 1).

    Scores are summed, so they are float32 or wider. The model runs in its precision.
    """

    image: Tensor
    blank: Tensor
    scores: Callable[[Tensor], Tensor]
    grid: TokenGrid

    @torch.no_grad()
    def scores_with_covers(self, covers: Tensor, internal_batch_size: int) -> Tensor:
        """(N,) scores of the image with covered patches. covers: (N, P), 1 for a patch that shows the baseline."""
        patch_of_pixel = self.grid.pixel_patches(self.image.device)[None]
        scores = []
        for part in (1 - covers).to(self.image).split(internal_batch_size):
            visible = part[:, patch_of_pixel]
            pixels = visible * self.image + (1 - visible) * self.blank
            scores.append(self.scores(pixels)[:, 0])
        return torch.cat(scores)


def integrated_gradients(
    model,
    images,
    target=None,
    *,
    against=None,
    names=None,
    baseline: float | Tensor = 0.0,
    n_steps: int = 50,
    internal_batch_size: int = 16,
) -> Tensor:
    """(B, rows, cols) Integrated Gradients (Sundararajan, Taly and Yan 2017), summed over each patch.

    The gradient of the target's logit by the pixels, averaged on the straight line from the baseline to the image and
    multiplied by their difference. The map sums to logit(image) − logit(baseline). For photographs and DeiT-Tiny the
    error is 0.5 to 4 % with 50 steps, and less than 0.1 % with 1,000.

    >>> vitlens.attribution.integrated_gradients(model, images, "Egyptian cat", n_steps=4).shape
    torch.Size([2, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`. n_steps: points on the line, by
    Gauss-Legendre quadrature. baseline, internal_batch_size: as in `help(vitlens.attribution.pixels)`.
    """

    def map_of(one: OneImage) -> Tensor:
        method = _captum().IntegratedGradients(one.scores)
        values = method.attribute(
            one.image, one.blank, 0, n_steps=n_steps, internal_batch_size=internal_batch_size
        )
        return _patch_sums(values, one.grid)

    return _map_each_image(map_of, model, images, target, against, names, baseline, gradients=True)


def occlusion(
    model,
    images,
    target=None,
    *,
    against=None,
    names=None,
    baseline: float | Tensor = 0.0,
    window: int = 3,
    internal_batch_size: int = 16,
) -> Tensor:
    """(B, rows, cols) occlusion (Zeiler and Fergus 2014): loss of the logit when a square around the patch is covered.

    A square of window × window patches moves patch by patch. The value of a patch is the mean over the squares on it.

    >>> vitlens.attribution.occlusion(model, images[:1], window=13).shape
    torch.Size([1, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`. baseline, internal_batch_size: as in
    `help(vitlens.attribution.pixels)`.
    """

    def map_of(one: OneImage) -> Tensor:
        rows = one.grid.rows
        cols = one.grid.cols
        height = min(window, rows)
        width = min(window, cols)
        covers = torch.zeros(rows - height + 1, cols - width + 1, rows, cols)
        for top, left in np.ndindex(*covers.shape[:2]):
            covers[top, left, top : top + height, left : left + width] = 1
        covers = covers.view(-1, rows * cols)
        nothing = torch.zeros(1, rows * cols)
        scores = one.scores_with_covers(torch.cat([nothing, covers]), internal_batch_size)
        losses = scores[0] - scores[1:]
        covers = covers.to(scores)
        means = losses @ covers / covers.sum(0)
        return means[None]

    return _map_each_image(map_of, model, images, target, against, names, baseline)


def _captum():
    try:
        import captum.attr
    except ImportError as error:
        raise ModuleNotFoundError(
            "This map needs captum: `pip install captum`, or use another method, such as relevance."
        ) from error
    return captum.attr


def _map_each_image(
    map_of: Callable[[OneImage], Tensor],
    model: nn.Module,
    images: Tensor,
    target: object,
    against: object,
    names: object,
    baseline: float | Tensor,
    gradients: bool = False,
) -> Tensor:
    """(B, rows, cols) maps from `map_of`: OneImage → (1, P).

    gradients: require that gradients reach every layer and that the score has a slope.
    """
    model, images, target, against = prepare_inputs(model, images, target, against)
    with explanation_mode(model):
        with torch.no_grad():
            first, *others = images.split(1)
            attn, output = run_with_capture(model, first, of_features(target))
            outputs = [outputs_of(model, other, of_features(target)) for other in others]
            output = torch.cat([output, *outputs])
        target = resolve_target(model, output, target, against, names)
        if gradients:
            number = torch.zeros(1, dtype=torch.long, device=images.device)
            explained(model, images[:1], target.of(number))  # raises if a layer has no gradient
            target.require_slope(output)
        wide = images.to(torch.promote_types(images.dtype, torch.float32))
        blanks = torch.as_tensor(baseline).detach().to(wide).expand_as(wide)
        maps = []
        for index in range(len(images)):
            score = partial(_scores_of, model, target, index, images.dtype)
            chosen = slice(index, index + 1)
            one = OneImage(wide[chosen], blanks[chosen], score, attn.grid)
            maps.append(map_of(one).detach())
    return torch.cat(maps).to(wide).unflatten(-1, (attn.grid.rows, attn.grid.cols))


def _scores_of(
    model: nn.Module, target: Target, image: int, dtype: torch.dtype, pixels: Tensor
) -> Tensor:
    """(B, 1) scores of pixels, (B, C, H, W), for the target of one image. The model runs in `dtype`."""
    output = outputs_of(model, pixels.to(dtype), target.of_features).to(pixels.dtype)
    numbers = torch.full((len(pixels),), image, device=pixels.device)
    return target.of(numbers).score(output)[:, None]


def _patch_sums(values: Tensor, grid: TokenGrid) -> Tensor:
    """(B, P) sums of pixel values (B, C, H, W) over the channels and pixels of each patch."""
    pixels = values.sum(1).flatten(1)
    patches = grid.pixel_patches(values.device).flatten()
    return pixels.new_zeros(len(pixels), grid.patches).index_add_(1, patches, pixels)
