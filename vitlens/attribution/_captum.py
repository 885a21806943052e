"""captum's methods on patches: what it gives for pixels, gathered by patch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from vitlens.attribution.forward import answered, captured, checked, explaining
from vitlens.attribution.target import Target, asked, bound, class_logits, of_features
from vitlens.recorder.arguments import fitted
from vitlens.recorder.grid import TokenGrid


def captum():
    """Import captum.attr. Raises ModuleNotFoundError if captum is not installed."""
    try:
        import captum.attr
    except ImportError as error:
        raise ModuleNotFoundError(
            "This map is made by captum, which is not installed. Install it (`pip install captum`), or use another "
            "method, such as relevance."
        ) from error
    return captum.attr


@dataclass(frozen=True)
class OneImage:
    """Image number `index` of a batch, and the model, as captum's methods take them.

    image: (1, C, H, W), of `images`. forward: images → (B, n) scores, of which number `number` is explained. Images,
    scores and gradients are in float32 or wider, because captum adds them up; the model itself runs in its own
    precision. require_slope: raises where the score has no gradient at the image.
    """

    forward: Callable[[Tensor], Tensor]
    images: Tensor
    index: int
    number: int
    grid: TokenGrid
    require_slope: Callable[[], None] = lambda: None

    @property
    def image(self) -> Tensor:
        return self.images[self.index : self.index + 1]

    def blank(self, baseline: float | Tensor) -> Tensor:
        """(1, C, H, W) the baseline of this image, given one for all images or one for each."""
        return fitted(baseline, self.images)[self.index : self.index + 1]


def per_image(
    function: Callable[[OneImage], Tensor],
    model: nn.Module,
    images: Tensor,
    target: object = None,
    *,
    against: object = None,
    names: Sequence[str] | None = None,
) -> Tensor:
    """(B, rows, cols) from function(OneImage) → (1, P) of each image.

    Images are taken one at a time: so a batch gives what its images give alone, and `internal_batch_size` alone bounds
    how many images are in one forward.
    """
    model, images = checked(model, images, target)
    target, against = bound(model, target, against)
    features = of_features(target)
    captum()
    with explaining(model):
        with torch.no_grad():
            one, *others = images.split(1)
            attn, output = captured(model, one, features)
            if not features:
                class_logits(model, output)
            output = torch.cat([output, *(answered(model, each, features) for each in others)])
        chosen = asked(model, output, target, against, names)
        wide = images.to(torch.promote_types(images.dtype, torch.float32))
        maps = []
        for index in range(len(images)):
            forward = _forward(model, images.dtype, chosen, index)
            slope = partial(chosen.require_slope, output[index : index + 1])
            maps.append(function(OneImage(forward, wide, index, 0, attn.grid, slope)).detach())
    return torch.cat(maps).to(wide).unflatten(-1, (attn.grid.rows, attn.grid.cols))


def _forward(model: nn.Module, dtype: torch.dtype, chosen: Target, index: int) -> Callable[[Tensor], Tensor]:
    def forward(images: Tensor) -> Tensor:
        output = answered(model, images.to(dtype), chosen.of_features).to(images.dtype)
        same = torch.full((len(images),), index, device=images.device)
        return chosen.of(same).score(output)[:, None]

    return forward


def patch_sums(values: Tensor, grid: TokenGrid) -> Tensor:
    """(B, C, H, W) values of pixels → (B, P), summed over the channels and pixels of each patch."""
    pixels, patches = values.sum(1).flatten(1), grid.pixel_patches(values.device).flatten()
    return pixels.new_zeros(len(pixels), grid.patches).index_add_(1, patches, pixels)


def patch_values(values: Tensor, grid: TokenGrid) -> Tensor:
    """(B, C, H, W) values that are the same all over a patch → (B, P), that of its first pixel."""
    return values[:, 0, :: grid.patch[0], :: grid.patch[1]][:, : grid.rows, : grid.cols].flatten(1)


class Draws:
    """Random numbers for captum, which draws from the global generators.

    Inside a `with` block the global generators run from `seed`, each block continuing the last one. Outside, and while
    the model runs (`aside`), they are as if nothing had been drawn. Only one thread at a time is inside a block.
    """

    _turn = threading.Lock()

    def __init__(self, seed: int, device: torch.device):
        self.device, self._outer = device, None
        with self:
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)

    def __enter__(self) -> Draws:
        self._turn.acquire()
        self._outer = self._states()
        if hasattr(self, "_own"):
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
