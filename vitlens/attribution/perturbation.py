"""What the logit loses when patches are covered: captum's methods with patches as the features."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.attribution.patches import captum, patch_values, per_image, seeded


def occlusion(
    model: nn.Module,
    images: Tensor,
    target=None,
    *,
    against=None,
    names: Sequence[str] | None = None,
    baseline: float | Tensor = 0.0,
    window: int = 3,
    internal_batch_size: int = 16,
) -> Tensor:
    """(B, rows, cols) occlusion (Zeiler and Fergus 2014): the logit lost when a square around the patch is covered.

    A square of window × window patches moves patch by patch; a patch gets the mean over the squares that cover it.

    baseline: what covers it, a number or tensor in normalised units; 0 is the mean colour. internal_batch_size: images
    in one forward. target, against, names: see `vitlens.attribution`.
    """

    if window < 1:
        raise ValueError(f"A window is a whole number of patches, at least 1, but {window!r} came.")

    def attribute(forward, image, blank, number, grid):
        below, right = grid.cut  # pixels that no patch sees; squares that reach into them would be too small
        height, width = grid.image[0] - below, grid.image[1] - right
        image, blank = image[..., :height, :width], blank[..., :height, :width]
        method = captum().Occlusion(lambda x: forward(F.pad(x, (0, right, 0, below))))
        sides = zip((height, width), grid.patch, (grid.rows, grid.cols), strict=True)
        sizes = [(min(pixels, min(window, count) * side), min(pixels, side)) for pixels, side, count in sides]
        square, step = ((image.shape[1], *lengths) for lengths in zip(*sizes, strict=True))
        values = method.attribute(image, square, step, blank, number, perturbations_per_eval=internal_batch_size)
        return patch_values(values, grid)

    return per_image(model, images, target, against, names, baseline, attribute)


def feature_ablation(
    model: nn.Module,
    images: Tensor,
    target=None,
    *,
    against=None,
    names: Sequence[str] | None = None,
    baseline: float | Tensor = 0.0,
    internal_batch_size: int = 16,
) -> Tensor:
    """(B, rows, cols) the logit lost when one patch is covered: P forwards of an image.

    baseline, internal_batch_size, target, against, names: as in `occlusion`.
    """

    def attribute(forward, image, blank, number, grid):
        method, mask = captum().FeatureAblation(forward), grid.pixel_patches(image.device)[None, None]
        values = method.attribute(image, blank, number, feature_mask=mask, perturbations_per_eval=internal_batch_size)
        return patch_values(values, grid)

    return per_image(model, images, target, against, names, baseline, attribute)


def kernel_shap(
    model: nn.Module,
    images: Tensor,
    target=None,
    *,
    against=None,
    names: Sequence[str] | None = None,
    baseline: float | Tensor = 0.0,
    n_samples: int = 1000,
    seed: int = 0,
    internal_batch_size: int = 16,
) -> Tensor:
    """(B, rows, cols) KernelSHAP (Lundberg and Lee 2017): the patches' Shapley values, by regression on random covers.

    n_samples: covers tried, and forwards, of an image; fewer than patches leave the regression underdetermined. seed:
    where captum's random numbers begin, the same for every image; the global generators are left as they were.
    baseline, internal_batch_size, target, against, names: as in `occlusion`.
    """

    def attribute(forward, image, blank, number, grid):
        method, mask = captum().KernelShap(forward), grid.pixel_patches(image.device)[None, None]
        with seeded(seed, image.device):
            return method.attribute(
                image,
                blank,
                number,
                feature_mask=mask,
                n_samples=n_samples,
                perturbations_per_eval=internal_batch_size,
                return_input_shape=False,
            )

    return per_image(model, images, target, against, names, baseline, attribute)
