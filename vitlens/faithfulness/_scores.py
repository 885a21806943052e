"""Insertion and deletion, and drop in confidence: the score of a target while patches are covered as a map says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitlens.attribution.target import of_features
from vitlens.faithfulness.covering import checked_maps, covered
from vitlens.faithfulness.orders import ranks
from vitlens.recorder.arguments import whole
from vitlens.recorder.grid import TokenGrid

STEPS = 32  # at most, unless told otherwise


@dataclass(frozen=True)
class Curves:
    """(…, B, S) scores after deletion and insertion of counts[s] patches. counts: (S,) from 0 to P."""

    counts: Tensor
    deletion: Tensor
    insertion: Tensor

    @property
    def deletion_area(self) -> Tensor:
        """(…, B) area under the deletion curve over the share of patches, by the trapezoidal rule; low is good."""
        return self._area(self.deletion)

    @property
    def insertion_area(self) -> Tensor:
        """(…, B) area under the insertion curve; high is good."""
        return self._area(self.insertion)

    def _area(self, curve: Tensor) -> Tensor:
        return torch.trapezoid(curve, self.counts.to(curve) / self.counts[-1])


def usual_step(patches: int) -> int:
    """The default step of `curves`: as many patches at a time as make at most 32 steps."""
    return math.ceil(patches / STEPS)


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

    Deletion covers the patches of the image with the baseline, highest value first; insertion uncovers them in the same
    order. Scores are read after 0, step, 2·step … P patches. Both use one baseline, so one's end is the other's start;
    Petsiuk et al. delete to "zero" and insert into a blurred image, which takes two calls.

    baseline: "mean" (each image's own mean color), "blur" (standard deviation: a patch's longer side), "zero" (in the
    model's input space) or a tensor; see `blank`. step: patches at a time; by default as many as make at most 32 steps,
    7 of 196. score: of a class its "probability", the default, or its "logit"; with `against` another class, the
    probability among the two, or the difference of the logits. Of features it is the target itself, not rescaled: for a
    likeness the cosine, which need not be 0 where all patches are covered, so compare areas of one question only. seed:
    the order among patches of the same value, the same for all maps and images. internal_batch_size: pictures in one
    forward, whichever images and maps they are of; no more than these are in memory. model, images, target, against,
    grid: see `vitlens.faithfulness`.

    Raises ValueError for maps that do not fit the patches or are not finite, a target that is no class, outputs that
    are no numbers, and a model without classes.
    """
    case = covered(
        model, images, target, against, baseline=baseline, score=score, grid=grid,
        internal_batch_size=internal_batch_size,
    )  # fmt: skip
    batch, patches = len(case.images), case.grid.patches
    maps = checked_maps(maps, case.grid, batch)
    step = usual_step(patches) if step is None else step
    if whole(step) is None or not 1 <= step <= patches:
        raise ValueError(f"A step is a whole number of patches from 1 to {patches}, got {step!r}.")
    counts = torch.tensor([*range(0, patches, step), patches], device=case.images.device)
    rank = ranks(maps, seed).flatten(0, -2).to(counts.device)
    # First every image whole and empty, then, map by map, what lies between: deletion and insertion.
    image, inner = torch.arange(batch, device=counts.device), counts[1:-1]
    row = torch.cat([image, image, torch.arange(len(rank), device=counts.device).repeat_interleave(2 * len(inner))])
    count = torch.cat([0 * image, 0 * image + patches, inner.repeat(2 * len(rank))])
    inserted = torch.tensor([False] * 2 * batch + ([False] * len(inner) + [True] * len(inner)) * len(rank))
    inserted = inserted.to(counts.device)

    def shown(numbers: Tensor) -> tuple[Tensor, Tensor]:
        named = rank[row[numbers]] < count[numbers, None]
        return row[numbers] % batch, named == inserted[numbers, None]

    full, empty, between = case.scores(len(row), shown).split([batch, batch, len(row) - 2 * batch])
    full, empty = (end.expand(maps.shape[:-2])[..., None] for end in (full, empty))
    between = between.reshape(*maps.shape[:-2], 2, len(inner))
    deletion = torch.cat([full, between[..., 0, :], empty], -1)
    return Curves(counts, deletion, torch.cat([empty, between[..., 1, :], full], -1))


@dataclass(frozen=True)
class Confidence:
    """Probability of the target: whole, (B,), for the image, and kept, (…, B), for the part that a map keeps."""

    whole: Tensor
    kept: Tensor

    @property
    def drop(self) -> Tensor:
        """(…, B) loss of probability in percent, at least 0; its mean over images is the Average Drop."""
        return 100 * ((self.whole - self.kept) / self.whole).clamp(min=0)

    @property
    def increase(self) -> Tensor:
        """(…, B) 100 where the probability rose, else 0; its mean over images is the Increase in Confidence."""
        return 100 * (self.kept > self.whole).to(self.kept)


def confidence(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    target=None,
    *,
    against=None,
    baseline: str | Tensor = "zero",
    grid: TokenGrid | None = None,
    internal_batch_size: int = 32,
) -> Confidence:
    """Average Drop and Increase in Confidence of maps (…, B, rows, cols), after Chattopadhay et al. (Grad-CAM++, 2018).

    The map is stretched to 0 … 1 (least to highest value of the image; a constant map names nothing and is 0), laid
    over the pixels of its patches, and the model sees map · image + (1 − map) · baseline: with "zero" that is the
    paper's product of map and image, in the model's input space. Arguments and errors as in `curves`.
    """
    if of_features(target):
        raise ValueError(
            "Drop and increase in confidence are shares of a probability, which a score of features does not have. Use "
            "`curves`, which is defined for it."
        )
    case = covered(
        model, images, target, against, baseline=baseline, score="probability", grid=grid,
        internal_batch_size=internal_batch_size,
    )  # fmt: skip
    batch = len(case.images)
    maps = checked_maps(maps, case.grid, batch)
    values = maps.to(case.images.device, torch.promote_types(maps.dtype, torch.float32)).flatten(-2).flatten(0, -2)
    low, high = values.aminmax(dim=-1, keepdim=True)
    seen = torch.where(high > low, (values - low) / (high - low), 0)
    seen = torch.cat([torch.ones_like(seen[:batch]), seen])
    whole, kept = case.scores(len(seen), lambda numbers: (numbers % batch, seen[numbers])).split(
        [batch, len(seen) - batch]
    )
    return Confidence(whole, kept.reshape(maps.shape[:-2]))
