"""Gradients of the logit by the pixels, along a path from a baseline or at the image itself: captum's, over patches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from vitlens.attribution._captum import Draws, captum, patch_sums, per_image
from vitlens.recorder.arguments import require_count


def integrated_gradients(
    model: nn.Module,
    images: Tensor,
    target=None,
    *,
    against=None,
    names: Sequence[str] | None = None,
    baseline: float | Tensor = 0.0,
    n_steps: int = 50,
    internal_batch_size: int = 16,
) -> Tensor:
    """(B, rows, cols) Integrated Gradients (Sundararajan, Taly and Yan 2017), summed over each patch.

    The gradient of the target's logit by the pixels, averaged on the straight line from the baseline to the image and
    multiplied by their difference. The map sums to logit(image) − logit(baseline), as closely as n_steps allows.

    baseline: a number or tensor in normalized units; 0 is the mean color. n_steps: points on the line, by the rule of
    Gauss and Legendre. internal_batch_size: images in one forward. target, against, names: see
    `vitlens.attribution`.
    """
    require_count(n_steps=n_steps, internal_batch_size=internal_batch_size)

    def attribute(forward, image, blank, number, grid):
        method = captum().IntegratedGradients(forward)
        values = method.attribute(image, blank, number, n_steps=n_steps, internal_batch_size=internal_batch_size)
        return patch_sums(values, grid)

    return per_image(model, images, target, against, names, baseline, attribute, gradients=True)


def gradient_shap(
    model: nn.Module,
    images: Tensor,
    target=None,
    *,
    against=None,
    names: Sequence[str] | None = None,
    baseline: float | Tensor = 0.0,
    n_samples: int = 50,
    stdevs: float = 0.1,
    seed: int = 0,
    internal_batch_size: int = 16,
) -> Tensor:
    """(B, rows, cols) Gradient SHAP (Lundberg and Lee 2017; Erion et al. 2021), summed over each patch.

    The mean over n_samples of gradient × (noisy image − baseline), each at a random point between the two.

    stdevs: standard deviation of the noise on the image, in normalized units. seed: where captum's random numbers
    begin, the same for every image; the global generators are left as they were. internal_batch_size: images in one
    forward; which numbers are drawn depends on it. baseline, target, against, names: as in `integrated_gradients`.
    """
    require_count(n_samples=n_samples, internal_batch_size=internal_batch_size)
    if not 0 <= stdevs < math.inf:
        raise ValueError(f"stdevs is the standard deviation of the noise, a finite number from 0 up, not {stdevs!r}.")

    def attribute(forward, image, blank, number, grid):
        draws, total = Draws(seed, image.device), 0
        method = captum().GradientShap(draws.aside(forward, last=True))
        for start in range(0, n_samples, internal_batch_size):
            count = min(internal_batch_size, n_samples - start)
            with draws:
                total = total + count * method.attribute(image, blank, count, stdevs, number)
        return patch_sums(total / n_samples, grid)

    return per_image(model, images, target, against, names, baseline, attribute, gradients=True)


def input_x_gradient(
    model: nn.Module, images: Tensor, target=None, *, against=None, names: Sequence[str] | None = None
) -> Tensor:
    """(B, rows, cols) Input × Gradient (Shrikumar et al. 2016), in normalized units, summed over each patch.

    target, against, names: see `vitlens.attribution`.
    """

    def attribute(forward, image, blank, number, grid):
        return patch_sums(captum().InputXGradient(forward).attribute(image.clone().requires_grad_(), number), grid)

    return per_image(model, images, target, against, names, 0.0, attribute, gradients=True)
