"""A sanity check of methods: a map that stays the same under random weights does not show what the model learned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

from vitlens.faithfulness.covering import on_model, target_of
from vitlens.recorder.running import require_images, run
from vitlens.recorder.supported import family, known, unwrap

_WINDOW = 7  # the side of SSIM's window in patches, where the grid is as large


@dataclass(frozen=True)
class Randomization:
    """How similar the maps of ever more random models are to the model's own map.

    parts: (S,) the model's parts in the order in which they were randomized; step s has all of parts[: s + 1] random. A
    map that is still the same when the head is random does not depend on the class: rollout, for one.
    rank_correlation: (S, B) Spearman's, over the patches of each image; two constant maps count as 1, one as 0. ssim:
    (S, B) structural similarity of the maps stretched to 0 … 1, nan on grids below 3 × 3. threshold: see `unchanged`.
    """

    parts: tuple[str, ...]
    rank_correlation: Tensor
    ssim: Tensor
    threshold: float

    @property
    def unchanged(self) -> bool:
        """Whether the map is flagged: with all weights random, its mean |rank correlation| is above the threshold.

        The sign is left out, because a random model may turn the map of a class into its negative.
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
    internal_batch_size: int = 32,
) -> Randomization:
    """Cascading randomization (Adebayo et al., Sanity Checks for Saliency Maps, 2018), from the head to the input.

    The parts are the model's own, blocks one by one, from the last it holds to the first: in a timm model the head, the
    final norm, the last block … the first, the patch embedding, the position embedding and the class token. Parts that
    the target does not depend on, such as the text tower of CLIP, are left out. Every parameter of a part is drawn anew
    from a normal distribution with its own mean and standard deviation, so that activations keep their size; buffers
    stay.

    method: (model, images, target (B,)) → (B, rows, cols), as all of `vitlens.attribution` are; it is called once for
    the model and once for each part. It is only ever given a copy in eval mode. The class stays that of the model as it
    is; so does what a target of features is compared with, and such a target is given to the method as it is.
    threshold: above which a map is flagged, 0.5 by choice, as Adebayo et al. name none; unrelated maps of P
    patches have a mean |rank correlation| of about 0.8 / √P, 0.06 for 196. internal_batch_size: images in one forward
    where the class is looked up.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"A threshold for |rank correlation| lies between 0 and 1, got {threshold!r}.")
    require_images(images, unwrap(model))
    chosen, _ = target_of(model, images, target, None, internal_batch_size).arguments
    images = on_model(model, images)
    subject = copy.deepcopy(unwrap(model)).eval()
    before = _map(method, subject, images, chosen)
    parts, correlations, similarities = [], [], []
    for part in _cascade(subject, seed, _used(subject, images[:1], classes=isinstance(chosen, Tensor))):
        after = _map(method, subject, images, chosen)
        pairs = list(zip(before, after, strict=True))
        parts.append(part)
        correlations.append([_rank_correlation(*pair) for pair in pairs])
        similarities.append([_ssim(*pair) for pair in pairs])
    return Randomization(tuple(parts), torch.tensor(correlations), torch.tensor(similarities), threshold)


def _used(model: nn.Module, image: Tensor, classes: bool) -> set[str]:
    """The names of the parameters that the logits of an image depend on, or its features: a text tower is none."""
    parameters = {name: p.requires_grad_() for name, p in model.named_parameters() if p.is_floating_point()}
    with torch.enable_grad():
        out = run(model, image) if classes else family(model).pooled(image)
        if not (parameters and out.requires_grad):
            return set(parameters)
        found = torch.autograd.grad(out.sum(), [*parameters.values()], allow_unused=True)
    return {name for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def _cascade(model: nn.Module, seed: int, used: set[str]) -> Iterator[str]:
    """Randomize the model in place, part by part from the top; yield the name of each part once it is random."""
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[Tensor]] = {}
    about = family(model) if known(model) else None
    blocks = next((name for name, module in model.named_modules() if about and module is about.blocks), "")
    for name, parameter in model.named_parameters():
        if name not in used:
            continue
        part, *rest = name.split(".")
        while rest and blocks.startswith(f"{part}."):  # what holds the blocks is no part itself
            part = f"{part}.{rest.pop(0)}"
        if isinstance(attrgetter(part)(model), nn.ModuleList | nn.Sequential):
            part = f"{part}.{rest[0]}"
        parts.setdefault(part, []).append(parameter)
    if not parts:
        raise ValueError(f"Expected a model with weights, but {type(model).__name__} has none to randomize.")
    for part, parameters in reversed(parts.items()):
        with torch.no_grad():
            for p in parameters:
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.copy_(p.mean() + p.std(correction=0) * noise)
        yield part


def _map(method: Callable, model: nn.Module, images: Tensor, target: object) -> Tensor:
    """(B, rows, cols), float64 on the CPU."""
    maps = method(model, images, target)
    if not isinstance(maps, Tensor) or maps.dim() != 3 or len(maps) != len(images) or not maps.isfinite().all():
        came = type(maps).__name__
        if isinstance(maps, Tensor):
            came = f"{maps.isfinite().sum()} finite values of shape {tuple(maps.shape)}"
        raise ValueError(f"A method returns finite maps of shape ({len(images)}, rows, cols), got {came}.")
    return maps.detach().cpu().double()


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    from scipy.stats import spearmanr

    constant = [bool((m == m.flatten()[0]).all()) for m in (a, b)]
    return float(all(constant)) if any(constant) else float(spearmanr(a.flatten(), b.flatten()).statistic)


def _ssim(a: Tensor, b: Tensor) -> float:
    from skimage.metrics import structural_similarity

    side = min(_WINDOW, *a.shape)
    side -= 1 - side % 2  # a window has a middle
    if side < 3:
        return float("nan")
    a, b = ((m - m.min()) / (m.max() - m.min()).clamp(min=1e-300) for m in (a, b))
    return float(structural_similarity(a.numpy(), b.numpy(), win_size=side, data_range=1.0))
