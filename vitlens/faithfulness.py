"""Tests of maps: scores from covering or showing the patches that a map highlights, and from random weights.

    maps = {"relevance": relevance(model, images, target), "rollout": …}     # each (B, rows, cols)
    table(model, images, maps, target)                # all areas and ranks, and the areas of random orders

Maps are tensors (…, B, rows, cols) on the patches of the images, with larger values for patches that raise the score.
Leading dimensions, such as one for methods, come first in the results too. model: any module that returns (B, classes)
logits. A model that vitlens does not support needs `grid=TokenGrid(…)`. images: (B, C, H, W), normalized as the model
expects. target, against: as in `vitlens.attribution`.

The model is unchanged afterwards.

No score proves that a map is right. Each measures one consequence of a right map, and covered patches make images of a
kind that the model was not trained on. Compare maps by the same score, the same baseline and the same step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitlens.attribution.maps import outputs_of
from vitlens.attribution.target import Target, bind_target, of_features, resolve_target
from vitlens.names import require_known, unknown_name
from vitlens.recorder.forward import eval_mode, pooled_features, require_images, run
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import family, is_known, model_name, token_grid, unwrap

__all__ = [
    "BASELINES",
    "Curves",
    "Randomization",
    "curves",
    "random_maps",
    "randomization",
    "table",
]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

if TYPE_CHECKING:
    from pandas import DataFrame

BASELINES = {
    "mean": "by the mean color",
    "blur": "by the blurred image",
    "zero": "by the color that is zero to the model",
}
"""Replacements of covered patches, by name, as words of a figure."""


@dataclass(frozen=True)
class Curves:
    """(…, B, S) scores after deletion and insertion of counts[s] patches. counts: (S,) from 0 to P.

    >>> rollout = vitlens.attribution.rollout(model, images[:1])
    >>> vitlens.faithfulness.curves(model, images[:1], rollout, step=98).counts.tolist()
    [0, 98, 196]
    """

    counts: Tensor
    deletion: Tensor
    insertion: Tensor

    @property
    def deletion_area(self) -> Tensor:
        """(…, B) area under the deletion curve over the share of patches, by the trapezoidal rule. Low is good."""
        return self._area(self.deletion)

    @property
    def insertion_area(self) -> Tensor:
        """(…, B) area under the insertion curve. High is good."""
        return self._area(self.insertion)

    def _area(self, curve: Tensor) -> Tensor:
        return torch.trapezoid(curve, self.counts.to(curve) / self.counts[-1])


def usual_step(patches: int, steps: int = 32) -> int:
    """Smallest number of patches per step that gives at most `steps` steps. The default of `curves` has at most 32.

    >>> usual_step(patches=196)
    7
    """
    return math.ceil(patches / steps)


def curves(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    target=None,
    *,
    against=None,
    baseline: str | Tensor = "mean",
    step: int | None = None,
    score: str | None = None,
    seed: int = 0,
    grid: TokenGrid | None = None,
    internal_batch_size: int = 32,
) -> Curves:
    """Insertion and deletion curves of maps (…, B, rows, cols), patch by patch (Petsiuk, Das and Saenko, RISE, 2018).

    Deletion covers the patches of the image with the baseline, highest value first. Insertion uncovers them in the same
    order. Scores are computed after 0, step, 2·step … P patches. Both use one baseline, so the end of one curve is the
    start of the other. Petsiuk et al. delete to "zero" and insert into a blurred image, which takes two calls.

    >>> rollout = vitlens.attribution.rollout(model, images[:1])
    >>> both = vitlens.faithfulness.curves(model, images[:1], rollout, step=98)
    >>> both.insertion.shape, both.insertion_area.shape
    (torch.Size([1, 3]), torch.Size([1]))

    baseline: "mean" (the mean color of each image), "blur" (standard deviation: a patch's longer side), "zero" (in the
    model's input space) or a tensor that fits the images. step: patches per step, by default for at most 32 steps, 7
    of 196. score: the "probability" of a class (the default) or its "logit". With `against` another class, that
    among the two, or the difference of the logits. The score of a function is its value. A cosine need not be 0 for a
    covered image, so compare areas of one target only. seed: of the order among patches of one value, the same for all
    maps and images. internal_batch_size: images in one forward.

    Raises ValueError for maps that do not fit the patches or are not finite, and the errors of `vitlens.attribution`.
    """
    parts = partial_curves(
        model,
        images,
        maps,
        target,
        against=against,
        baseline=baseline,
        step=step,
        score=score,
        seed=seed,
        grid=grid,
        internal_batch_size=internal_batch_size,
    )
    for part in parts:
        _, _, both = part
    return both


def partial_curves(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    target=None,
    *,
    against=None,
    baseline: str | Tensor = "mean",
    step: int | None = None,
    score: str | None = None,
    seed: int = 0,
    grid: TokenGrid | None = None,
    internal_batch_size: int = 32,
) -> Iterator[tuple[int, int, Curves]]:
    """Yield (images done, total, `curves` so far) after each batch. Scores that are not computed yet are NaN.

    The uncovered and the fully covered image come first, once for all maps and both curves, then map after map.
    """
    grid = _grid(model, images, grid)
    _require_maps(maps, len(images), grid)
    target = _target(model, images, target, against, internal_batch_size)
    if score is None:
        score = next(iter(target.measures))
    require_known(score, target.measures, "The score")
    if step is None:
        step = usual_step(grid.patches)
    images = _on_model(model, images)
    blanks = blank(images, baseline, grid)
    patch_of_pixel = grid.pixel_patches(images.device)
    counts = torch.tensor([*range(0, grid.patches, step), grid.patches], device=images.device)
    visible, numbers = _steps(maps, counts, seed)
    wide = torch.promote_types(images.dtype, torch.float32)
    scores = images.new_full((len(numbers),), math.nan, dtype=wide)
    for part in torch.arange(len(numbers), device=images.device).split(internal_batch_size):
        image = numbers[part]
        with eval_mode(model), torch.no_grad():
            shown = visible[part].to(images.dtype)[:, None, patch_of_pixel]
            covered = shown * images[image] + (1 - shown) * blanks[image]
            output = outputs_of(model, covered, target.of_features).to(scores.dtype)
            scores[part] = target.of(image).measure(output, score)
            both = _curves_of(scores, counts, maps.shape[:-2])
        yield part[-1].item() + 1, len(numbers), both


def _require_maps(maps: Tensor, images: int, grid: TokenGrid) -> None:
    """Raise ValueError unless the maps, (…, B, rows, cols), fit the images and their patches and are finite."""
    if maps.shape[-3:] != (images, grid.rows, grid.cols):
        raise ValueError(
            f"Maps must have the shape (…, {images}, {grid.rows}, {grid.cols}), got {tuple(maps.shape)}. Give a map as "
            "its method returns it, not resized."
        )
    if not maps.isfinite().all():
        raise ValueError("Maps must be finite, or their order of the patches means nothing.")


def _steps(maps: Tensor, counts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The patches that each forward of `curves` shows, (N, P) bool, and the number of its image, (N,).

    First the uncovered and the fully covered images, then, for each map and image, the steps of deletion between the
    two and those of insertion.
    """
    *_, batch, rows, cols = maps.shape
    ranks = order(maps, seed).argsort(-1).to(counts.device)
    inserted = ranks.reshape(-1, batch, 1, rows * cols) < counts[1:-1, None]  # (maps, B, S − 2, P)
    between = torch.stack([~inserted, inserted], 2)
    everything = inserted.new_ones(batch, rows * cols)
    visible = torch.cat([everything, ~everything, between.flatten(0, -2)])
    image = torch.arange(batch, device=counts.device)
    image_of_step = image.repeat_interleave(2 * inserted.shape[2]).repeat(len(inserted))
    return visible, torch.cat([image, image, image_of_step])


def _curves_of(scores: Tensor, counts: Tensor, shape: torch.Size) -> Curves:
    """The curves from the scores of all `_steps`. shape: (…, B), that of the maps without rows and cols."""
    batch = shape[-1]
    full = scores[:batch].expand(shape)[..., None]
    empty = scores[batch : 2 * batch].expand(shape)[..., None]
    between = scores[2 * batch :].reshape(*shape, 2, len(counts) - 2)
    deleted, inserted = between.unbind(-2)
    deletion = torch.cat([full, deleted, empty], -1)
    insertion = torch.cat([empty, inserted, full], -1)
    return Curves(counts, deletion, insertion)


def table(
    model: nn.Module,
    images: Tensor,
    maps: Mapping[str, Tensor],
    target=None,
    *,
    orders: int = 10,
    seed: int = 0,
    grid: TokenGrid | None = None,
    **options,
) -> DataFrame:
    """A DataFrame with one row for each image and map: its areas, its rank, and the areas of random orders.

    >>> maps = {"rollout": vitlens.attribution.rollout(model, images[:1])}
    >>> vitlens.faithfulness.table(model, images[:1], maps, orders=2, step=98)["rank"].tolist()
    [1]

    maps: (B, rows, cols) by the name of their method. orders: number of random orders (`random_maps`), the same for all
    images. options: those of `curves`.

    Columns: as in `rank_maps`.
    """
    grid = _grid(model, images, grid)
    stacked = add_random_maps(maps, grid, orders, seed)
    both = curves(model, images, stacked, target, seed=seed, grid=grid, **options)
    return rank_maps(both, list(maps))


def add_random_maps(
    maps: Mapping[str, Tensor], grid: TokenGrid, orders: int, seed: int = 0
) -> Tensor:
    """(maps + orders, B, rows, cols) maps, followed by random orders of the patches, on the CPU in float64."""
    own = torch.stack([values.cpu().double() for values in maps.values()])
    images = own.shape[1]
    random = random_maps(grid, orders, seed)[:, None].expand(-1, images, -1, -1)
    return torch.cat([own, random])


def rank_maps(both: Curves, names: Sequence[str]) -> DataFrame:
    """A DataFrame with one row for each image and map, from the curves of maps of these names and of random orders.

    Columns, all per image and map:

    * image: number in the batch. method: name of the map. deletion, insertion: areas. difference: insertion − deletion.
    * rank: 1 for the map of this image with the largest difference. Equal maps share the better rank.
    * random_orders: their number. random_deletion_mean, random_deletion_std …: mean and standard deviation (n − 1) of
      their areas. difference_z_score: standard deviations by which the difference exceeds their mean, not finite if all
      orders have one score.
    * steps: number of steps of the curves.
    """
    import pandas as pd

    deletion = both.deletion_area.cpu().double()
    insertion = both.insertion_area.cpu().double()
    areas = {"deletion": deletion, "insertion": insertion, "difference": insertion - deletion}
    tables = []
    for image in range(both.deletion.shape[-2]):
        scores = pd.DataFrame({name: area[:, image].numpy() for name, area in areas.items()})
        random = scores[len(names) :].dropna()
        table = scores[: len(names)].copy()
        table.insert(0, "image", image)
        table.insert(1, "method", names)
        ranks = table["difference"].rank(ascending=False, method="min")
        table["rank"] = ranks.astype("Int64")
        table["random_orders"] = len(random)
        for name in areas:
            table[f"random_{name}_mean"] = random[name].mean()
            table[f"random_{name}_std"] = random[name].std()
        above = table["difference"] - table["random_difference_mean"]
        table["difference_z_score"] = above / table["random_difference_std"]
        table["steps"] = len(both.counts) - 1
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def random_maps(grid: TokenGrid, count: int, seed: int = 0) -> Tensor:
    """(count, rows, cols) maps that rank the patches at random, without ties: the control of every score.

    >>> vitlens.faithfulness.random_maps(attn.grid, count=3).shape
    torch.Size([3, 14, 14])

    A larger count with the same seed begins with the same maps. None of them is the order that breaks ties.
    """
    orders = _permutations(grid.patches, count + 1, seed)[1:]
    return orders.float().unflatten(-1, (grid.rows, grid.cols))


def order(maps: Tensor, seed: int = 0) -> Tensor:
    """(…, P) patches in the order of `curves`, highest value first, of (…, rows, cols) maps.

    The seed breaks ties at random, in one order for all maps and images. So a constant map is a random order, equal
    maps have equal scores, and the scores of an image do not depend on its batch.
    """
    values = maps.detach().cpu().flatten(-2)
    shuffled = _permutations(values.shape[-1], 1, seed)[0]
    places = values[..., shuffled].argsort(dim=-1, descending=True, stable=True)
    return shuffled[places]


def _permutations(patches: int, count: int, seed: int) -> Tensor:
    """(count, P) random orders, drawn on the CPU, so that a seed gives the same numbers on all devices."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(patches, generator=generator) for _ in range(count)])


def blank(images: Tensor, baseline: str | Tensor, grid: TokenGrid) -> Tensor:
    """(B, C, H, W) images with all patches covered, by a baseline as in `curves`."""
    if isinstance(baseline, Tensor):
        return baseline.detach().to(images).expand_as(images)
    require_known(baseline, BASELINES, "baseline")
    if baseline == "mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    if baseline == "blur":
        return blur(images, max(grid.patch))
    return torch.zeros_like(images)


def blur(images: Tensor, sigma: float) -> Tensor:
    """(B, C, H, W) images blurred by a Gaussian of sigma pixels, cut off at 4 sigma, with mirrored edges."""
    from scipy.ndimage import gaussian_filter

    pixels = images.detach().cpu().double().numpy()
    smooth = gaussian_filter(pixels, (0, 0, sigma, sigma), mode="reflect")
    return torch.from_numpy(smooth).to(images)


def _on_model(model: nn.Module, images: Tensor) -> Tensor:
    """The images on the device and in the dtype of the model's parameters."""
    return images.detach().to(next(model.parameters(), images))


def _grid(model: nn.Module, images: Tensor, grid: TokenGrid | None) -> TokenGrid:
    """The grid of the images' patches: the argument, or that of a supported model."""
    bare = unwrap(model)
    require_images(images, bare)
    if grid is not None:
        return grid
    if not is_known(bare):
        raise ValueError(
            f"The patches of {model_name(bare)} are unknown. Pass `grid=TokenGrid(…)`."
        )
    return token_grid(bare, tuple(images.shape[-2:]))


def _target(model: nn.Module, images: Tensor, target, against, internal_batch_size: int) -> Target:
    """The `Target` of the images. Runs the model once on each image, unless target is a `Target`."""
    bare = unwrap(model)
    target, against = bind_target(bare, target, against)
    if isinstance(target, Target):
        return target
    with eval_mode(model), torch.no_grad():
        parts = _on_model(model, images).split(internal_batch_size)
        output = torch.cat([outputs_of(model, part, False) for part in parts])
        return resolve_target(bare, output, target, against)


@dataclass(frozen=True)
class Randomization:
    """Similarity of a model's map to its maps after more and more parts are randomized.

    >>> small, x = vitlens.load_model("test_vit", pretrained=False), torch.zeros(1, 3, 160, 160)
    >>> vitlens.faithfulness.randomization(small, x, vitlens.attribution.rollout).parts[:2]
    ('head', 'norm')

    parts: (S,) names in the order of randomization. At step s all of parts[: s + 1] are random. rank_correlation:
    (S, B) Spearman's correlation over the patches of each image, 1 for two constant maps and 0 for one. ssim: (S, B)
    structural similarity of the maps stretched to 0 … 1, nan on grids below 3 × 3. threshold: as in `unchanged`.
    """

    parts: tuple[str, ...]
    rank_correlation: Tensor
    ssim: Tensor
    threshold: float

    @property
    def unchanged(self) -> bool:
        """True if the mean |rank correlation| exceeds the threshold when all weights are random.

        The sign is dropped, because a random model may turn the map of a class into its negative.
        """
        return self.rank_correlation[-1].abs().mean().item() > self.threshold


def randomization(
    model: nn.Module,
    images: Tensor,
    method: Callable[[nn.Module, Tensor, Tensor], Tensor],
    target=None,
    *,
    threshold: float = 0.5,
    seed: int = 0,
    after: Collection[str] | None = None,
) -> Randomization:
    """Cascading randomization (Adebayo et al., Sanity Checks for Saliency Maps, 2018), from the head to the input.

    The parts of a timm model are the head, the final norm, the last block … the first block, the patch embedding, the
    position embedding and the class token. Parts without effect on the target, such as the text tower of CLIP, are left
    out. Every parameter of a part is replaced by normal random numbers of its mean and standard deviation. Buffers
    stay.

    >>> small, x = vitlens.load_model("test_vit", pretrained=False), torch.zeros(1, 3, 160, 160)
    >>> vitlens.faithfulness.randomization(small, x, vitlens.attribution.rollout).rank_correlation.shape
    torch.Size([11, 1])

    method: (model, images, target (B,)) → (B, rows, cols), such as a function of `vitlens.attribution`. It is called
    once for the model and once for each part, with a copy of the model in eval mode and the target of the original
    model. threshold: limit of `unchanged`, 0.5 by choice, because Adebayo et al. state none. Unrelated maps of P
    patches have a mean |rank correlation| of about 0.8 / √P, 0.06 for 196. after: names of the parts after which the
    maps are compared, by default all.
    """
    target = _target(model, images, target, None, 32)
    if target.numbers is not None:
        target = target.numbers
    images = _on_model(model, images)
    subject = copy.deepcopy(unwrap(model)).eval()
    original = method(subject, images, target).cpu().double()
    parts = []
    correlations = []
    similarities = []
    for part in _randomize_parts(subject, seed, images[:1], of_features(target)):
        if after is not None and part not in after:
            continue
        changed = method(subject, images, target).cpu().double()
        pairs = list(zip(original, changed, strict=True))
        parts.append(part)
        correlations.append([_rank_correlation(a, b) for a, b in pairs])
        similarities.append([_ssim(a, b) for a, b in pairs])
    return Randomization(
        tuple(parts), torch.tensor(correlations), torch.tensor(similarities), threshold
    )


def _randomize_parts(model: nn.Module, seed: int, image: Tensor, features: bool) -> Iterator[str]:
    """Randomize the model in place, part by part from the top, and yield the name of each random part.

    Parameters without effect on the logits or features of an image, as in a text tower, are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    path_of_blocks = _path_of_blocks(model)
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in _parameters_with_effect(model, image, features):
        part = _part_of_parameter(model, name, path_of_blocks)
        parts.setdefault(part, []).append(parameter)
    for part, parameters in reversed(parts.items()):
        with torch.no_grad():
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.copy_(parameter.mean() + parameter.std(correction=0) * noise)
        yield part


def _parameters_with_effect(
    model: nn.Module, image: Tensor, features: bool
) -> list[tuple[str, Tensor]]:
    """Names and parameters on which the logits or features of an image depend, for all that autograd knows."""
    named = {
        name: parameter.requires_grad_()
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
    }
    with torch.enable_grad():
        output = pooled_features(model, image) if features else run(model, image)
        if not output.requires_grad:  # autograd does not reach the output
            return list(named.items())
        gradients = torch.autograd.grad(output.sum(), [*named.values()], allow_unused=True)
    return [
        (name, parameter)
        for (name, parameter), gradient in zip(named.items(), gradients, strict=True)
        if gradient is not None
    ]


def _path_of_blocks(model: nn.Module) -> str:
    """The name of the module that holds the blocks, or "" if the model is not supported or does not hold them so."""
    if not is_known(model):
        return ""
    blocks = family(model).blocks
    for name, module in model.named_modules():
        if module is blocks:
            return name
    return ""


def _part_of_parameter(model: nn.Module, name: str, path_of_blocks: str) -> str:
    """The name of the part that a parameter belongs to: a block, or a module or parameter beside the blocks."""
    part, *rest = name.split(".")
    while rest and path_of_blocks.startswith(f"{part}."):
        part = f"{part}.{rest.pop(0)}"
    if isinstance(attrgetter(part)(model), nn.ModuleList | nn.Sequential):
        part = f"{part}.{rest[0]}"
    return part


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    from scipy.stats import spearmanr

    constant = [bool((values == values[0, 0]).all()) for values in (a, b)]
    if any(constant):
        return float(all(constant))
    return float(spearmanr(a.flatten(), b.flatten()).statistic)


def _ssim(a: Tensor, b: Tensor) -> float:
    from skimage.metrics import structural_similarity

    side = min(7, *a.shape)
    side -= 1 - side % 2  # a window has a middle
    if side < 3:
        return float("nan")
    a, b = _stretch(a).numpy(), _stretch(b).numpy()
    return float(structural_similarity(a, b, win_size=side, data_range=1.0))


def _stretch(values: Tensor) -> Tensor:
    """The values stretched to 0 … 1. Constant values become 0."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low).clamp(min=1e-300)
