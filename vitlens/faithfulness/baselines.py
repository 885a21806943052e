"""What covers a patch."""

from __future__ import annotations

import torch
from torch import Tensor

from vitlens.recorder.arguments import fitted
from vitlens.recorder.grid import TokenGrid

BASELINES = {
    "mean": "by the mean color",
    "blur": "by the blurred picture",
    "zero": "by the color that is zero to the model",
}
"""What may cover a patch, by name, and in words."""


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
