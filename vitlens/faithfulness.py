"""Tests of maps: scores from covering or showing the patches that a map highlights, and from random weights.

    maps = {"relevance": relevance(model, images, target), "rollout": …}     # each (B, rows, cols)
    table(model, images, maps, target)                # all areas and ranks, and the areas of random orders

Maps are tensors (…, B, rows, cols) on the patches of the images, with larger values for patches that raise the score.
Leading dimensions, such as one for methods, come first in the results too. model: any module that returns (B, classes)
logits. A model that vitlens does not support needs `grid=TokenGrid(…)`. images: (B, C, H, W), normalized as the model
expects. target, against: as in `vitlens.attribution`. The model is unchanged afterwards.

No score proves that a map is right. Each measures one consequence of a right map, and covered patches make images of a
kind that the model was not trained on. Compare maps by the same score, the same baseline and the same step.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitlens.attribution.maps import outputs_of
from vitlens.attribution.target import Target, bound, of_features, resolved
from vitlens.names import require_known
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
    return deque(parts, maxlen=1).pop()[-1]


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
    batch, patches = len(images), grid.patches
    if maps.shape[-3:] != (batch, grid.rows, grid.cols):
        raise ValueError(
            f"Maps must have the shape (…, {batch}, {grid.rows}, {grid.cols}), got {tuple(maps.shape)}. Give a map as "
            "its method returns it, not resized."
        )
    if not maps.isfinite().all():
        raise ValueError("Maps must be finite, or their order of the patches means nothing.")
    target = _target(model, images, target, against, internal_batch_size)
    score = next(iter(target.measures)) if score is None else score
    require_known(score, target.measures, "The score")
    step = usual_step(patches) if step is None else step
    images = _on_model(model, images)
    device, pixels, blanks = (
        images.device,
        grid.pixel_patches(images.device),
        blank(images, baseline, grid),
    )
    counts = torch.tensor([*range(0, patches, step), patches], device=device)
    # First the whole and the empty images, then, map by map, the steps of deletion and insertion.
    ranks = order(maps, seed).argsort(-1).to(device)
    shown = ranks.reshape(-1, batch, 1, patches) < counts[1:-1, None]  # (maps, B, S − 2, P)
    between = torch.stack([~shown, shown], 2).flatten(0, -2)
    ends = (
        torch.tensor([True, False], device=device)
        .repeat_interleave(batch)[:, None]
        .expand(-1, patches)
    )
    visible, image = torch.cat([ends, between]), torch.arange(batch, device=device)
    image = torch.cat(
        [image, image, image.repeat_interleave(2 * shown.shape[2]).repeat(len(shown))]
    )
    scores = images.new_full(
        (len(image),), math.nan, dtype=torch.promote_types(images.dtype, torch.float32)
    )
    for part in torch.arange(len(image), device=device).split(internal_batch_size):
        with eval_mode(model), torch.no_grad():
            seen, chosen = visible[part].to(images.dtype)[:, None, pixels], image[part]
            covered = seen * images[chosen] + (1 - seen) * blanks[chosen]
            output = outputs_of(model, covered, target.of_features).to(scores.dtype)
            scores[part] = target.of(chosen).measured(output, score)
            full, empty = (
                end.expand(maps.shape[:-2])[..., None] for end in scores[: 2 * batch].split(batch)
            )
            deleted, inserted = (
                scores[2 * batch :].reshape(*maps.shape[:-2], 2, shown.shape[2]).unbind(-2)
            )
            both = Curves(
                counts,
                torch.cat([full, deleted, empty], -1),
                torch.cat([empty, inserted, full], -1),
            )
        yield part[-1].item() + 1, len(image), both


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
    images. options: those of `curves`. Columns: as in `ranked`.
    """
    grid = _grid(model, images, grid)
    stacked = with_random(maps, grid, orders, seed)
    return ranked(
        curves(model, images, stacked, target, seed=seed, grid=grid, **options), list(maps)
    )


def with_random(maps: Mapping[str, Tensor], grid: TokenGrid, orders: int, seed: int = 0) -> Tensor:
    """(maps + orders, B, rows, cols) maps, followed by random orders of the patches, on the CPU in float64."""
    own = torch.stack([values.cpu().double() for values in maps.values()])
    return torch.cat(
        [own, random_maps(grid, orders, seed)[:, None].expand(-1, own.shape[1], -1, -1)]
    )


def ranked(both: Curves, names: Sequence[str]) -> DataFrame:
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

    areas = {"deletion": both.deletion_area, "insertion": both.insertion_area}
    areas = {name: area.cpu().double() for name, area in areas.items()}
    areas["difference"] = areas["insertion"] - areas["deletion"]
    parts = []
    for image in range(both.deletion.shape[-2]):
        scores = pd.DataFrame({name: area[:, image].numpy() for name, area in areas.items()})
        rows, chance = scores[: len(names)], scores[len(names) :].dropna()
        rows.insert(0, "image", image)
        rows.insert(1, "method", names)
        rows = rows.join(
            rows["difference"].rank(ascending=False, method="min").astype("Int64").rename("rank")
        )
        rows["random_orders"] = len(chance)
        for name in areas:
            rows[f"random_{name}_mean"], rows[f"random_{name}_std"] = (
                chance[name].mean(),
                chance[name].std(),
            )
        rows["difference_z_score"] = (
            rows.difference - rows.random_difference_mean
        ) / rows.random_difference_std
        parts.append(rows.assign(steps=len(both.counts) - 1))
    return pd.concat(parts, ignore_index=True)


def random_maps(grid: TokenGrid, count: int, seed: int = 0) -> Tensor:
    """(count, rows, cols) maps that rank the patches at random, without ties: the control of every score.

    >>> vitlens.faithfulness.random_maps(attn.grid, count=3).shape
    torch.Size([3, 14, 14])

    A larger count with the same seed begins with the same maps. None of them is the order that breaks ties.
    """
    return (
        _permutations(grid.patches, count + 1, seed)[1:]
        .float()
        .unflatten(-1, (grid.rows, grid.cols))
    )


def order(maps: Tensor, seed: int = 0) -> Tensor:
    """(…, P) patches in the order of `curves`, highest value first, of (…, rows, cols) maps.

    The seed breaks ties at random, in one order for all maps and images. So a constant map is a random order, equal
    maps have equal scores, and the scores of an image do not depend on its batch.
    """
    shuffled = _permutations(maps.shape[-2:].numel(), 1, seed)[0]
    return shuffled[
        maps.detach().cpu().flatten(-2)[..., shuffled].argsort(dim=-1, descending=True, stable=True)
    ]


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
    return blurred(images, max(grid.patch)) if baseline == "blur" else torch.zeros_like(images)


def blurred(images: Tensor, sigma: float) -> Tensor:
    """(B, C, H, W) images blurred by a Gaussian of sigma pixels, cut off at 4 sigma, with mirrored edges."""
    from scipy.ndimage import gaussian_filter

    smooth = gaussian_filter(
        images.detach().cpu().double().numpy(), (0, 0, sigma, sigma), mode="reflect"
    )
    return torch.from_numpy(smooth).to(images)


def _on_model(model: nn.Module, images: Tensor) -> Tensor:
    """The images on the device and in the dtype of the model's parameters."""
    return images.detach().to(next(model.parameters(), images))


def _grid(model: nn.Module, images: Tensor, grid: TokenGrid | None) -> TokenGrid:
    """The grid of the images' patches: the argument, or that of a supported model."""
    bare = unwrap(model)
    require_images(images, bare)
    if grid is None:
        if not is_known(bare):
            raise ValueError(
                f"The patches of {model_name(bare)} are unknown. Pass `grid=TokenGrid(…)`."
            )
        return token_grid(bare, tuple(images.shape[-2:]))
    return grid


def _target(model: nn.Module, images: Tensor, target, against, internal_batch_size: int) -> Target:
    """The `Target` of the images. Runs the model once on each image, unless target is a `Target`."""
    bare = unwrap(model)
    target, against = bound(bare, target, against)
    if isinstance(target, Target):
        return target
    with eval_mode(model), torch.no_grad():
        parts = _on_model(model, images).split(internal_batch_size)
        return resolved(
            bare, torch.cat([outputs_of(model, part, False) for part in parts]), target, against
        )


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
    target = target if target.numbers is None else target.numbers
    images = _on_model(model, images)
    subject = copy.deepcopy(unwrap(model)).eval()
    before = method(subject, images, target).cpu().double()
    parts, correlations, similarities = [], [], []
    for part in _cascade(subject, seed, images[:1], of_features(target)):
        if after is not None and part not in after:
            continue
        changed = method(subject, images, target).cpu().double()
        parts.append(part)
        correlations.append(
            [_rank_correlation(*pair) for pair in zip(before, changed, strict=True)]
        )
        similarities.append([_ssim(*pair) for pair in zip(before, changed, strict=True)])
    return Randomization(
        tuple(parts), torch.tensor(correlations), torch.tensor(similarities), threshold
    )


def _cascade(model: nn.Module, seed: int, image: Tensor, features: bool) -> Iterator[str]:
    """Randomize the model in place, part by part from the top, and yield the name of each random part.

    Parameters without effect on the logits or features of an image, as in a text tower, are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[Tensor]] = {}
    about = family(model) if is_known(model) else None
    blocks = next(
        (name for name, module in model.named_modules() if about and module is about.blocks), ""
    )
    named = {
        name: p.requires_grad_() for name, p in model.named_parameters() if p.is_floating_point()
    }
    with torch.enable_grad():
        output = pooled_features(model, image) if features else run(model, image)
        gradients = [output] * len(named)  # all of them, where autograd does not reach the output
        if output.requires_grad:
            gradients = torch.autograd.grad(output.sum(), [*named.values()], allow_unused=True)
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        if gradient is None:
            continue
        part, *rest = name.split(".")
        while rest and blocks.startswith(
            f"{part}."
        ):  # the parts of the module that holds the blocks
            part = f"{part}.{rest.pop(0)}"
        if isinstance(attrgetter(part)(model), nn.ModuleList | nn.Sequential):
            part = f"{part}.{rest[0]}"
        parts.setdefault(part, []).append(parameter)
    del gradients
    for part, parameters in reversed(parts.items()):
        with torch.no_grad():
            for p in parameters:
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.copy_(p.mean() + p.std(correction=0) * noise)
        yield part


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    from scipy.stats import spearmanr

    constant = [bool((m == m.flatten()[0]).all()) for m in (a, b)]
    return (
        float(all(constant))
        if any(constant)
        else float(spearmanr(a.flatten(), b.flatten()).statistic)
    )


def _ssim(a: Tensor, b: Tensor) -> float:
    from skimage.metrics import structural_similarity

    side = min(7, *a.shape)
    side -= 1 - side % 2  # a window has a middle
    if side < 3:
        return float("nan")
    a, b = ((m - m.min()) / (m.max() - m.min()).clamp(min=1e-300) for m in (a, b))
    return float(structural_similarity(a.numpy(), b.numpy(), win_size=side, data_range=1.0))
