"""What the logit loses when patches are covered: captum's methods with patches as the features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.attribution._captum import Draws, captum, patch_values, per_image
from vitlens.attribution.registry import METHODS
from vitlens.recorder.arguments import require_count

COVERS = METHODS["kernel_shap"].forwards_per_patch
LEAST = 3
"""Covers of KernelSHAP for each patch: the default, and the fewest that are accepted."""


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

    baseline: what covers it, a number or tensor in normalized units; 0 is the mean color. internal_batch_size: images
    in one forward. target, against, names: see `vitlens.attribution`.
    """
    require_count(window=window, internal_batch_size=internal_batch_size)

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
    require_count(internal_batch_size=internal_batch_size)

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
    n_samples: int | None = None,
    seed: int = 0,
    internal_batch_size: int = 16,
) -> Tensor:
    """(B, rows, cols) KernelSHAP (Lundberg and Lee 2017): the patches' Shapley values, by regression on random covers.

    Each cover is tried with its complement (Covert and Lee 2021), so that patches that act two at a time disturb
    nothing. What comes is an estimate, the less sure the more patches there are. Where a tenth of the patches counts
    alike, by tanh of a sum over those that are seen, it correlates with the known values of 196, 576 and 1,024 patches
    by 0.99, 0.98 and 0.97 if the whole sum is 2; by 0.9, 0.4 and 0.3 if it is 3, 10 and 17, so that a few of these
    patches are enough. How sure a map is, a second seed tells: of two photographs and DeiT-Tiny, those of the one agree
    (0.6), and those of the other have nothing in common (0.02).

    n_samples: covers tried, and forwards, of an image; 16 for each patch unless told otherwise. Below two for each the
    values are undetermined, and shortly above noise exceeds them: fewer than three raise ValueError. seed: where
    captum's random numbers begin, the same for every image; the global generators are left as they were. baseline,
    internal_batch_size, target, against, names: as in `occlusion`.
    """
    require_count(internal_batch_size=internal_batch_size)

    def attribute(forward, image, blank, number, grid):
        draws = Draws(seed, image.device)
        method = captum().KernelShap(draws.aside(forward))
        method.perturb_func, mask = _paired(method.perturb_func), grid.pixel_patches(image.device)[None, None]
        with draws:
            return method.attribute(
                image,
                blank,
                number,
                feature_mask=mask,
                n_samples=_covers(n_samples, grid.patches),
                perturbations_per_eval=internal_batch_size,
                return_input_shape=False,
            )

    return per_image(model, images, target, against, names, baseline, attribute)


def _covers(wanted: int | None, patches: int) -> int:
    """How many covers KernelSHAP tries. Raises ValueError for too few."""
    if wanted is None:
        return COVERS * patches
    require_count(n_samples=wanted)
    if wanted < LEAST * patches:
        raise ValueError(
            f"KernelSHAP needs at least {LEAST} covers for each patch, {LEAST * patches} for {patches} patches, or its "
            f"map is mostly noise, but n_samples={wanted} came. Give more, or none for {COVERS * patches}."
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
