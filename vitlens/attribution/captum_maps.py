"""captum's methods with patches as the features. captum is imported when a map is made.

All take model, images, target, against and names as in `vitlens.attribution`, and these options. baseline: what
replaces pixels, a number or a tensor that fits the images, in normalized units; 0 is the mean color.
internal_batch_size: images in one forward. seed: of captum's random numbers, the same for every image; the global
generators are left as they were. Images are explained one at a time, so a batch gives what its images give alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.attribution import METHODS
from vitlens.attribution.maps import captured, checked, explained, explaining, outputs_of
from vitlens.attribution.target import bound, of_features, resolved
from vitlens.recorder.grid import TokenGrid

COVERS = METHODS["kernel_shap"].forwards_per_patch
LEAST = 3
"""Covers of KernelSHAP for each patch: the default, and the fewest that are accepted."""


@dataclass(frozen=True)
class OneImage:
    """An image (1, C, H, W), its baseline, and scores: images → (B, 1), in float32 or wider, because captum adds them
    up. The model itself runs in its own precision."""

    image: Tensor
    blank: Tensor
    scores: Callable[[Tensor], Tensor]
    grid: TokenGrid

    @property
    def patches(self) -> Tensor:
        """(1, 1, H, W) number of the patch that each pixel belongs to."""
        return self.grid.pixel_patches(self.image.device)[None, None]


def integrated_gradients(
    model, images, target=None, *, against=None, names=None, baseline: float | Tensor = 0.0,
    n_steps: int = 50, internal_batch_size: int = 16,
) -> Tensor:  # fmt: skip
    """(B, rows, cols) Integrated Gradients (Sundararajan, Taly and Yan 2017), summed over each patch.

    The gradient of the target's logit by the pixels, averaged on the straight line from the baseline to the image and
    multiplied by their difference. The map sums to logit(image) − logit(baseline), as closely as n_steps allows: of
    photographs and DeiT-Tiny it is off by 0.5 to 4 % with 50 steps, and by less than 0.1 % with 1,000.

    n_steps: points on the line, by Gauss-Legendre quadrature. Other arguments as in `vitlens.attribution.captum_maps`.
    """

    def map_of(one: OneImage) -> Tensor:
        values = _captum().IntegratedGradients(one.scores).attribute(
            one.image, one.blank, 0, n_steps=n_steps, internal_batch_size=internal_batch_size
        )  # fmt: skip
        return _patch_sums(values, one.grid)

    return _each_image(map_of, model, images, target, against, names, baseline, gradients=True)


def gradient_shap(
    model, images, target=None, *, against=None, names=None, baseline: float | Tensor = 0.0,
    n_samples: int = 50, stdevs: float = 0.1, seed: int = 0, internal_batch_size: int = 16,
) -> Tensor:  # fmt: skip
    """(B, rows, cols) Gradient SHAP (Lundberg and Lee 2017; Erion et al. 2021), summed over each patch.

    The mean over n_samples of gradient × (noisy image − baseline), each at a random point between the two. stdevs:
    standard deviation of the noise on the image, in normalized units. The random numbers depend on internal_batch_size.
    Other arguments as in `vitlens.attribution.captum_maps`.
    """

    def map_of(one: OneImage) -> Tensor:
        draws, total = Draws(seed, one.image.device), 0
        method = _captum().GradientShap(draws.aside(one.scores, last=True))
        for start in range(0, n_samples, internal_batch_size):
            count = min(internal_batch_size, n_samples - start)
            with draws:
                total = total + count * method.attribute(one.image, one.blank, count, stdevs, 0)
        return _patch_sums(total / n_samples, one.grid)

    return _each_image(map_of, model, images, target, against, names, baseline, gradients=True)


def input_x_gradient(model, images, target=None, *, against=None, names=None) -> Tensor:
    """(B, rows, cols) Input × Gradient (Shrikumar et al. 2016), in normalized units, summed over each patch."""

    def map_of(one: OneImage) -> Tensor:
        image = one.image.clone().requires_grad_()
        return _patch_sums(_captum().InputXGradient(one.scores).attribute(image, 0), one.grid)

    return _each_image(map_of, model, images, target, against, names, 0.0, gradients=True)


def occlusion(
    model, images, target=None, *, against=None, names=None, baseline: float | Tensor = 0.0, window: int = 3,
    internal_batch_size: int = 16,
) -> Tensor:  # fmt: skip
    """(B, rows, cols) occlusion (Zeiler and Fergus 2014): the logit lost when a square around the patch is covered.

    A square of window × window patches moves patch by patch; a patch gets the mean over the squares that cover it.
    Other arguments as in `vitlens.attribution.captum_maps`.
    """

    def map_of(one: OneImage) -> Tensor:
        grid = one.grid
        below, right = grid.cut  # pixels that no patch sees; squares that reach into them would be too small
        height, width = grid.image[0] - below, grid.image[1] - right
        image, blank = (pixels[..., :height, :width] for pixels in (one.image, one.blank))
        sides = zip((height, width), grid.patch, (grid.rows, grid.cols), strict=True)
        sizes = [(min(pixels, min(window, count) * side), min(pixels, side)) for pixels, side, count in sides]
        square, step = ((image.shape[1], *lengths) for lengths in zip(*sizes, strict=True))
        method = _captum().Occlusion(lambda x: one.scores(F.pad(x, (0, right, 0, below))))
        values = method.attribute(image, square, step, blank, 0, perturbations_per_eval=internal_batch_size)
        return _patch_values(values, grid)

    return _each_image(map_of, model, images, target, against, names, baseline)


def feature_ablation(
    model, images, target=None, *, against=None, names=None, baseline: float | Tensor = 0.0,
    internal_batch_size: int = 16,
) -> Tensor:  # fmt: skip
    """(B, rows, cols) the logit lost when one patch is covered: P forwards of an image.

    Arguments as in `vitlens.attribution.captum_maps`.
    """

    def map_of(one: OneImage) -> Tensor:
        values = _captum().FeatureAblation(one.scores).attribute(
            one.image, one.blank, 0, feature_mask=one.patches, perturbations_per_eval=internal_batch_size
        )  # fmt: skip
        return _patch_values(values, one.grid)

    return _each_image(map_of, model, images, target, against, names, baseline)


def kernel_shap(
    model, images, target=None, *, against=None, names=None, baseline: float | Tensor = 0.0,
    n_samples: int | None = None, seed: int = 0, internal_batch_size: int = 16,
) -> Tensor:  # fmt: skip
    """(B, rows, cols) KernelSHAP (Lundberg and Lee 2017): the patches' Shapley values, by regression on random covers.

    Each cover is tried with its complement (Covert and Lee 2021), so effects of pairs of patches do not disturb the
    estimate. It is still an estimate, and the less certain the more patches there are. Where a tenth of the patches
    counts alike, through tanh of a sum over those that are seen, it correlates with the known values of 196, 576 and
    1,024 patches by 0.99, 0.98 and 0.97 if the whole sum is 2; by 0.9, 0.4 and 0.3 if it is 3, 10 and 17, where a few
    of these patches are enough. To see how certain a map is, try a second seed: of two photographs and DeiT-Tiny, the
    maps of the one agree (0.6), and those of the other have nothing in common (0.02).

    n_samples: covers tried, and forwards, of an image; by default 16 for each patch. Below two for each patch the
    values are undetermined, and shortly above noise exceeds them: fewer than three raise ValueError. Other arguments
    as in `vitlens.attribution.captum_maps`.
    """
    map_of = partial(_kernel_shap, n_samples=n_samples, seed=seed, internal_batch_size=internal_batch_size)
    return _each_image(map_of, model, images, target, against, names, baseline)


def _kernel_shap(one: OneImage, *, n_samples: int | None = None, seed: int = 0, internal_batch_size: int) -> Tensor:
    patches = one.grid.patches
    if patches == 1:  # its Shapley value is what it adds
        return one.scores(one.image) - one.scores(one.blank)
    n_samples = COVERS * patches if n_samples is None else n_samples
    if n_samples < LEAST * patches:
        raise ValueError(
            f"KernelSHAP of {patches} patches needs {LEAST * patches} covers or more, got n_samples={n_samples}: its "
            "map would be noise."
        )
    draws = Draws(seed, one.image.device)
    method = _captum().KernelShap(draws.aside(one.scores))
    method.perturb_func = _paired(method.perturb_func)
    with draws:
        return method.attribute(
            one.image, one.blank, 0, feature_mask=one.patches, n_samples=n_samples,
            perturbations_per_eval=internal_batch_size, return_input_shape=False,
        )  # fmt: skip


def _paired(perturb: Callable[..., Iterator[Tensor]]) -> Callable[..., Iterator[Tensor]]:
    """captum's covers: the first two, of nothing and of everything, as they are, all others with their complements."""

    def covers(*args, **kwargs) -> Iterator[Tensor]:
        found = perturb(*args, **kwargs)
        yield from islice(found, 2)
        for cover in found:
            yield cover
            yield 1 - cover

    return covers


def _captum():
    try:
        import captum.attr
    except ImportError as error:
        raise ModuleNotFoundError(
            "This map needs captum: `pip install captum`, or use another method, such as relevance."
        ) from error
    return captum.attr


def _each_image(
    map_of: Callable[[OneImage], Tensor], model: nn.Module, images: Tensor, target: object, against: object,
    names: object, baseline: float | Tensor, gradients: bool = False,
) -> Tensor:  # fmt: skip
    """(B, rows, cols) from map_of(OneImage) → (1, P) of each image. gradients: the map is made of gradients, so they
    must reach every layer, and the score must have a slope."""
    _captum()
    model, images = checked(model, images, target)
    target, against = bound(model, target, against)
    with explaining(model):
        with torch.no_grad():
            one, *others = images.split(1)
            attn, output = captured(model, one, of_features(target))
            output = torch.cat([output, *(outputs_of(model, each, of_features(target)) for each in others)])
        target = resolved(model, output, target, against, names)
        if gradients:
            explained(model, images[:1], target.of(torch.zeros(1, dtype=torch.long, device=images.device)))
            target.require_slope(output)
        wide = images.to(torch.promote_types(images.dtype, torch.float32))
        blanks = torch.as_tensor(baseline).detach().to(wide).expand_as(wide)
        maps = []
        for index in range(len(images)):

            def scores(pixels: Tensor, index: int = index) -> Tensor:
                output = outputs_of(model, pixels.to(images.dtype), target.of_features).to(pixels.dtype)
                return target.of(torch.full((len(pixels),), index, device=pixels.device)).score(output)[:, None]

            chosen = slice(index, index + 1)
            maps.append(map_of(OneImage(wide[chosen], blanks[chosen], scores, attn.grid)).detach())
    return torch.cat(maps).to(wide).unflatten(-1, (attn.grid.rows, attn.grid.cols))


def _patch_sums(values: Tensor, grid: TokenGrid) -> Tensor:
    """(B, C, H, W) values of pixels → (B, P), summed over the channels and pixels of each patch."""
    pixels, patches = values.sum(1).flatten(1), grid.pixel_patches(values.device).flatten()
    return pixels.new_zeros(len(pixels), grid.patches).index_add_(1, patches, pixels)


def _patch_values(values: Tensor, grid: TokenGrid) -> Tensor:
    """(B, C, H, W) values that are the same all over a patch → (B, P), that of its first pixel."""
    return values[:, 0, :: grid.patch[0], :: grid.patch[1]][:, : grid.rows, : grid.cols].flatten(1)


class Draws:
    """Random numbers for captum, which draws from the global generators.

    Inside a `with` block the global generators run from `seed`, each block continuing the last one. Outside, and while
    the model runs (`aside`), they are as if nothing had been drawn. Only one thread at a time is inside a block.
    """

    _turn = threading.Lock()

    def __init__(self, seed: int, device: torch.device):
        self.device, self._own, self._outer = device, None, None
        with self:
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)

    def __enter__(self) -> Draws:
        self._turn.acquire()
        self._outer = self._states()
        if self._own is not None:
            self._begin(self._own)
        return self

    def __exit__(self, *_) -> None:
        if self._outer is not None:
            self._own = self._states()
            self._begin(self._outer)
            self._outer = None
            self._turn.release()

    def aside(self, forward: Callable[[Tensor], Tensor], last: bool = False) -> Callable[[Tensor], Tensor]:
        """Wrap `forward` so that it runs outside the `with` block that calls it. last: the block draws no more."""

        def called(images: Tensor) -> Tensor:
            self.__exit__()
            try:
                return forward(images)
            finally:
                if not last:
                    self.__enter__()

        return called

    def _states(self) -> tuple:
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return np.random.get_state(), torch.get_rng_state(), cuda

    def _begin(self, states: tuple) -> None:
        numpys, torchs, cuda = states
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.device)
