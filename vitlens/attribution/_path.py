"""Gradients of the logit by the pixels, along a path from a baseline or at the image itself: captum's, over patches."""

from __future__ import annotations

import math

from torch import Tensor

from vitlens.attribution._captum import Draws, OneImage, captum, patch_sums
from vitlens.recorder.arguments import require_count


def integrated_gradients(
    case: OneImage, *, baseline: float | Tensor = 0.0, n_steps: int = 50, internal_batch_size: int = 16
) -> Tensor:
    """(B, rows, cols) Integrated Gradients (Sundararajan, Taly and Yan 2017), summed over each patch.

    The gradient of the target's logit by the pixels, averaged on the straight line from the baseline to the image and
    multiplied by their difference. The map sums to logit(image) − logit(baseline), as closely as n_steps allows: of
    photographs and DeiT-Tiny it is off by 0.5 to 4 % with 50 steps, and by less than 0.1 % with 1,000.

    baseline: a number or tensor in normalized units; 0 is the mean color. n_steps: points on the line, by
    Gauss-Legendre quadrature. internal_batch_size: images in one forward.
    """
    require_count(n_steps=n_steps, internal_batch_size=internal_batch_size)
    values = (
        captum()
        .IntegratedGradients(case.forward)
        .attribute(
            case.image, case.blank(baseline), case.number, n_steps=n_steps, internal_batch_size=internal_batch_size
        )
    )
    return patch_sums(values, case.grid)


def gradient_shap(
    case: OneImage,
    *,
    baseline: float | Tensor = 0.0,
    n_samples: int = 50,
    stdevs: float = 0.1,
    seed: int = 0,
    internal_batch_size: int = 16,
) -> Tensor:
    """(B, rows, cols) Gradient SHAP (Lundberg and Lee 2017; Erion et al. 2021), summed over each patch.

    The mean over n_samples of gradient × (noisy image − baseline), each at a random point between the two.

    stdevs: standard deviation of the noise on the image, in normalized units. seed: of captum's random numbers, the
    same for every image; the global generators are left as they were. internal_batch_size: images in one forward; the
    random numbers depend on it. baseline: as in `integrated_gradients`.
    """
    require_count(n_samples=n_samples, internal_batch_size=internal_batch_size)
    if not 0 <= stdevs < math.inf:
        raise ValueError(f"stdevs is the standard deviation of the noise, a finite number from 0 up, not {stdevs!r}.")
    image, blank, draws, total = case.image, case.blank(baseline), Draws(seed, case.images.device), 0
    method = captum().GradientShap(draws.aside(case.forward, last=True))
    for start in range(0, n_samples, internal_batch_size):
        count = min(internal_batch_size, n_samples - start)
        with draws:
            total = total + count * method.attribute(image, blank, count, stdevs, case.number)
    return patch_sums(total / n_samples, case.grid)


def input_x_gradient(case: OneImage) -> Tensor:
    """(B, rows, cols) Input × Gradient (Shrikumar et al. 2016), in normalized units, summed over each patch."""
    case.require_slope()
    image = case.image.clone().requires_grad_()
    return patch_sums(captum().InputXGradient(case.forward).attribute(image, case.number), case.grid)
