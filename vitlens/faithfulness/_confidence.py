"""Drop and increase in confidence: the probability of the class when only what a map highlights is visible."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitlens.faithfulness.scoring import checked_maps, covered
from vitlens.recorder.grid import TokenGrid


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
