"""Tokens after every layer: features, similarity, norms, principal components and nearest patches.

Shapes: B batch, L layers, T tokens = R prefix + P patches, D width.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.names import unknown_name
from vitlens.recorder.forward import cast, eval_mode, require_images, run
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.precision import to_float64
from vitlens.recorder.shapes import repr_with_shapes
from vitlens.recorder.supported import (
    UnsupportedModelError,
    attention_modules,
    family,
    transformer,
    unwrap,
)

__all__ = [
    "Colored",
    "Pairs",
    "colored",
    "colors",
    "components",
    "correspondences",
    "features",
    "norms",
    "similarity",
]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

GRAY = 0.7
"""Red, green and blue of patches that `colored` leaves out."""


def features(model: nn.Module, images: Tensor) -> tuple[list[Tensor], Tensor]:
    """(layers, logits): the tokens (B, T, D) after every layer, and the logits (B, classes), from one forward.

    >>> layers, logits = vitlens.tokens.features(model, images)
    >>> len(layers), layers[-1].shape
    (12, torch.Size([2, 197, 192]))

    Tokens are the residual stream after the layer, before any final norm, prefix tokens first. The model runs in eval
    mode, and images are cast to its precision and device. Works inside `capture(model)` too. The logits of a module
    that holds one supported model are the output of the module. Raises UnsupportedModelError for models that a capture
    refuses, and ValueError for images that the model does not take.
    """
    model = unwrap(model)
    inner = transformer(model)
    attention_modules(inner)  # raises for a model without layers to read
    require_images(images, model)
    about = family(inner)
    height, width = images.shape[-2:]
    expected = about.grid((height, width)).tokens
    layers = []

    def append(_, args: tuple, output: Tensor) -> None:
        layers.append(output)

    hooks = [(block.register_forward_hook, append) for block in about.blocks]
    with eval_mode(model), about.calling_blocks(), thread_hooks(hooks):
        inputs = cast(model, images)
        output = run(model, inputs)
    depth = len(about.blocks)
    counts = [tokens.shape[1] for tokens in layers]
    if counts != [expected] * depth:
        distinct = sorted(set(counts))
        different = ", ".join(map(str, distinct))
        raise UnsupportedModelError(
            f"Expected {expected} tokens after each of {depth} layers of {type(model).__name__}, got "
            f"{different} after {len(counts)}: it leaves patches out, merges them, resizes the images, or runs the "
            "layers more or less than once."
        )
    return layers, output


def similarity(tokens: Tensor, query: Tensor) -> Tensor:
    """(…, T) cosine similarity of every token with a weighted sum of tokens: 1 same direction, 0 unrelated.

    >>> vitlens.tokens.similarity(vitlens.tokens.features(model, images)[0][-1], attn.grid.readout).shape
    torch.Size([2, 197])

    tokens: (…, T, D). query: (T,) or (…, T) weights of sum 1: one-hot for a token, `grid.readout` for the read-out.
    """
    weights = query.to(tokens)
    weighted_sum = weights[..., None, :] @ tokens  # (…, 1, D)
    return torch.cosine_similarity(tokens, weighted_sum, dim=-1)


def norms(tokens: Tensor) -> Tensor:
    """(…, T) Euclidean norms of tokens (…, T, D), in float32 or wider.

    Some large models store global information in a few background patches of large norms (Darcet et al. 2024).

    >>> vitlens.tokens.norms(torch.tensor([[3.0, 4.0]]))
    tensor([5.])
    """
    precision = torch.promote_types(tokens.dtype, torch.float32)
    return tokens.norm(dim=-1, dtype=precision)


def components(tokens: Tensor, k: int = 3) -> tuple[Tensor, Tensor]:
    """The first k principal components of patch features: ((P, k) scores, (k,) explained variance ratio).

    >>> patches = vitlens.tokens.features(model, images)[0][-1][0, attn.grid.prefix:]
    >>> scores, variance = vitlens.tokens.components(patches)
    >>> scores.shape
    torch.Size([196, 3])

    tokens: (P, D) of one image, or of several concatenated images for common colors.

    The mean is subtracted. Components are ordered by variance and signed so that the largest score is positive, because
    the sign is arbitrary.
    """
    tokens = to_float64(tokens)
    centered = tokens - tokens.mean(0)
    scatter = centered.mT @ centered
    variances, axes = torch.linalg.eigh(scatter)  # in ascending order
    first_axes = axes.flip(-1)[:, :k]
    scores = centered @ first_axes
    position = scores.abs().argmax(0, keepdim=True)
    largest = scores.gather(0, position)
    signs = torch.where(largest < 0, -1.0, 1.0)
    scores = scores * signs
    tiny = torch.finfo(torch.float64).tiny
    total = variances.sum().clamp_min(tiny)
    shares = variances.flip(0)[:k] / total
    return scores.float(), shares.float()


def colors(scores: Tensor) -> Tensor:
    """(P, k) scores of components, each stretched to 0 … 1: red, green and blue for k = 3 (Oquab et al. 2024, DINOv2).

    The stretch hides differences of variance.

    >>> vitlens.tokens.colors(torch.tensor([[-1.0], [0.0], [3.0]])).flatten()
    tensor([0.0000, 0.2500, 1.0000])
    """
    low = scores.amin(0)
    high = scores.amax(0)
    return _stretch(scores, low, high)


def _stretch(scores: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Scores (…, k) on a scale of 0 at `low` and 1 at `high`, both (k,)."""
    extent = (high - low).clamp_min(1e-12)
    return (scores - low) / extent


class Colored(NamedTuple):
    """Colors of the patches of several images in one basis.

    >>> vitlens.tokens.colored(vitlens.tokens.features(model, images)[0][-1]).variance.shape
    torch.Size([3])

    colors: (B, P, 3) from 0 to 1. variance: (3,) share of each component in the variance.
    """

    colors: Tensor
    variance: Tensor

    __repr__ = repr_with_shapes


def colored(
    tokens: Tensor, *, outliers: Tensor | None = None, like: Tensor | None = None
) -> Colored:
    """Colors of the patches of several images: three principal components in one basis (Oquab et al. 2024, DINOv2).

    A color means the same in each image. tokens: (B, P, D), without prefix tokens. They are scaled to length 1, and the
    colors reach from the 2nd to the 98th percentile of each component. outliers: (B, P) True for patches that are left
    out of the basis and drawn in gray. like: colors (B, P, 3) of another layer, whose order and signs are matched.

    >>> vitlens.tokens.colored(vitlens.tokens.features(model, images)[0][-1][:, attn.grid.prefix:])
    Colored(colors=(2, 196, 3), variance=(3))
    """
    units = F.normalize(to_float64(tokens), dim=-1)
    if outliers is None:
        outliers = torch.zeros(units.shape[:2], dtype=torch.bool)
    outliers = outliers.cpu()
    kept = ~outliers
    kept_scores, variance = components(units[kept])
    scores = units.new_zeros(*kept.shape, 3)
    scores[kept] = kept_scores.double()
    variance = variance.double()
    if like is not None:
        order, signs = _match_components(scores[kept], like[kept])
        scores = scores[..., order] * signs
        variance = variance[order]
    percentiles = torch.tensor([0.02, 0.98], dtype=torch.double)
    low, high = scores[kept].quantile(percentiles, 0)
    stretched = _stretch(scores, low, high).clamp(0, 1)
    colors = torch.where(kept[..., None], stretched, GRAY)
    return Colored(colors.float(), variance.float())


def _match_components(scores: Tensor, like: Tensor) -> tuple[list[int], Tensor]:
    """The order of components and their signs, (3,), for which scores (P, 3) correlate best with `like`, (P, 3)."""
    variables = torch.cat([scores, like], 1).mT
    of_all = torch.corrcoef(variables)
    correlations = of_all[:3, 3:].nan_to_num()  # (component, color)
    numbers = range(3)

    def total(order: tuple[int, ...]) -> Tensor:
        matched = correlations[order, numbers]
        return matched.abs().sum()

    orders = itertools.permutations(numbers)
    best = list(max(orders, key=total))
    signs = torch.where(correlations[best, numbers] < 0, -1.0, 1.0)
    return best, signs


class Pairs(NamedTuple):
    """The nearest patches of two images A and B.

    >>> vitlens.tokens.correspondences(torch.eye(3), torch.eye(3)).mutual
    tensor([True, True, True])

    nearest: (P,) number of the most similar patch of B, for each patch of A. similarity: (P,) the cosine of the two.
    mutual: (P,) True if the patch of A is also the most similar one to its nearest patch of B.
    """

    nearest: Tensor
    similarity: Tensor
    mutual: Tensor

    __repr__ = repr_with_shapes


def correspondences(a: Tensor, b: Tensor) -> Pairs:
    """The nearest patch in image B of each patch of image A, by the cosine of their features.

    Pairs that are nearest in both directions are mutual: the best buddies of Amir et al. 2022, "Deep ViT Features as
    Dense Visual Descriptors". a, b: (P, D) and (Q, D) patches of the same layer, without prefix tokens. Every patch has
    a nearest one, also between unrelated images, so look at the similarity and at `mutual`.

    >>> vitlens.tokens.correspondences(torch.eye(3), torch.eye(3)[[2, 0, 1]]).nearest
    tensor([1, 2, 0])
    """
    units_of_a = F.normalize(to_float64(a), dim=1)
    units_of_b = F.normalize(to_float64(b), dim=1)
    cosines = units_of_a @ units_of_b.mT
    similarity, nearest = cosines.max(1)
    nearest_in_a = cosines.argmax(0)
    own = torch.arange(len(a), device=a.device)
    mutual = nearest_in_a[nearest] == own
    return Pairs(nearest, similarity.float(), mutual)
