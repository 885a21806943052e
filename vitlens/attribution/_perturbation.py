"""What the logit loses when patches are covered: captum's methods with patches as the features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch.nn.functional as F
from torch import Tensor

from vitlens.attribution._captum import Draws, OneImage, captum, patch_values
from vitlens.attribution.registry import METHODS
from vitlens.recorder.arguments import require_count

COVERS = METHODS["kernel_shap"].forwards_per_patch
LEAST = 3
"""Covers of KernelSHAP for each patch: the default, and the fewest that are accepted."""


def occlusion(
    case: OneImage, *, baseline: float | Tensor = 0.0, window: int = 3, internal_batch_size: int = 16
) -> Tensor:
    """(B, rows, cols) occlusion (Zeiler and Fergus 2014): the logit lost when a square around the patch is covered.

    A square of window × window patches moves patch by patch; a patch gets the mean over the squares that cover it.

    baseline: what covers it, a number or tensor in normalized units; 0 is the mean color. internal_batch_size: images
    in one forward.
    """
    require_count(window=window, internal_batch_size=internal_batch_size)
    grid = case.grid
    below, right = grid.cut  # pixels that no patch sees; squares that reach into them would be too small
    height, width = grid.image[0] - below, grid.image[1] - right
    image, blank = (pixels[..., :height, :width] for pixels in (case.image, case.blank(baseline)))
    method = captum().Occlusion(lambda x: case.forward(F.pad(x, (0, right, 0, below))))
    sides = zip((height, width), grid.patch, (grid.rows, grid.cols), strict=True)
    sizes = [(min(pixels, min(window, count) * side), min(pixels, side)) for pixels, side, count in sides]
    square, step = ((image.shape[1], *lengths) for lengths in zip(*sizes, strict=True))
    values = method.attribute(image, square, step, blank, case.number, perturbations_per_eval=internal_batch_size)
    return patch_values(values, grid)


def feature_ablation(case: OneImage, *, baseline: float | Tensor = 0.0, internal_batch_size: int = 16) -> Tensor:
    """(B, rows, cols) the logit lost when one patch is covered: P forwards of an image.

    baseline, internal_batch_size: as in `occlusion`.
    """
    require_count(internal_batch_size=internal_batch_size)
    values = captum().FeatureAblation(case.forward).attribute(
        case.image, case.blank(baseline), case.number, feature_mask=_patches(case),
        perturbations_per_eval=internal_batch_size,
    )  # fmt: skip
    return patch_values(values, case.grid)


def kernel_shap(
    case: OneImage,
    *,
    baseline: float | Tensor = 0.0,
    n_samples: int | None = None,
    seed: int = 0,
    internal_batch_size: int = 16,
) -> Tensor:
    """(B, rows, cols) KernelSHAP (Lundberg and Lee 2017): the patches' Shapley values, by regression on random covers.

    Each cover is tried with its complement (Covert and Lee 2021), so effects of pairs of patches do not disturb the
    estimate. It is still an estimate, and the less certain the more patches there are. Where a tenth of the patches
    counts alike, through tanh of a sum over those that are seen, it correlates with the known values of 196, 576 and
    1,024 patches by 0.99, 0.98 and 0.97 if the whole sum is 2; by 0.9, 0.4 and 0.3 if it is 3, 10 and 17, where a few
    of these patches are enough. To see how certain a map is, try a second seed: of two photographs and DeiT-Tiny, the
    maps of the one agree (0.6), and those of the other have nothing in common (0.02).

    n_samples: covers tried, and forwards, of an image; by default 16 for each patch. Below two for each patch the
    values are undetermined, and shortly above noise exceeds them: fewer than three raise ValueError. seed: of captum's
    random numbers, the same for every image; the global generators are left as they were. baseline,
    internal_batch_size: as in `occlusion`.
    """
    require_count(internal_batch_size=internal_batch_size)
    if case.grid.patches == 1:  # its Shapley value is what it adds
        return feature_ablation(case, baseline=baseline, internal_batch_size=internal_batch_size)
    covers, draws = _covers(n_samples, case.grid.patches), Draws(seed, case.images.device)
    method = captum().KernelShap(draws.aside(case.forward))
    method.perturb_func = _paired(method.perturb_func)
    with draws:
        return method.attribute(
            case.image, case.blank(baseline), case.number, feature_mask=_patches(case), n_samples=covers,
            perturbations_per_eval=internal_batch_size, return_input_shape=False,
        )  # fmt: skip


def _patches(case: OneImage) -> Tensor:
    """The number of the patch that each pixel belongs to, (1, 1, H, W)."""
    return case.grid.pixel_patches(case.images.device)[None, None]


def _covers(wanted: int | None, patches: int) -> int:
    """How many covers KernelSHAP tries. Raises ValueError for too few."""
    if wanted is None:
        return COVERS * patches
    require_count(n_samples=wanted)
    if wanted < LEAST * patches:
        raise ValueError(
            f"KernelSHAP needs at least {LEAST} covers for each patch, or its map is mostly noise: {LEAST * patches} "
            f"for {patches} patches, got n_samples={wanted}. Give more, or none for {COVERS * patches}."
        )
    return wanted


def _paired(perturb: Callable[..., Iterator[Tensor]]) -> Callable[..., Iterator[Tensor]]:
    """captum's covers: the first two, of nothing and of everything, as they are, all others with their complements."""

    def covers(*args, **kwargs) -> Iterator[Tensor]:
        found = perturb(*args, **kwargs)
        yield from islice(found, 2)
        for cover in found:
            yield cover
            yield 1 - cover

    return covers
