"""Principal components of the patch-embedding filters (paper, section 4.5 and Fig. 7 left)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitlens.names import unknown_name
from vitlens.recorder.precision import to_float64
from vitlens.recorder.supported import family, inner_transformer

__all__ = ["kernels", "principal"]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)


def kernels(model: nn.Module) -> Tensor:
    """(D, p, q, C) filters of the patch embedding, one per output channel.

    >>> vitlens.filters.kernels(model).shape
    torch.Size([192, 16, 16, 3])

    Raises ValueError for hybrids, whose patches come from a feature map, for shifted patches, which are normalized
    before the filters, and for models without a patch embedding.
    """
    model = inner_transformer(model)
    about = family(model)
    kind = type(model).__name__
    try:
        embed = about.embedding
        projection = getattr(embed, "proj", embed)
        weight = projection.weight.detach()
    except AttributeError:
        raise ValueError(f"{kind} has no linear patch embedding, so it has no filters.") from None
    if hasattr(embed, "backbone"):
        raise ValueError(f"{kind} is a hybrid: its filters are of a feature map, not of an image.")
    if weight.dim() == 4:
        return weight.permute(0, 2, 3, 1)
    # The embedding is linear over flattened patches, as in NaFlex and SigLIP 2.
    size = about.preprocessing["input_size"][1:]
    p, q = about.grid(size).patch
    if getattr(embed, "channels_last", True):
        return weight.unflatten(1, (p, q, -1))
    channels_first = weight.unflatten(1, (-1, p, q))
    return channels_first.permute(0, 2, 3, 1)


def principal(model_or_weight: nn.Module | Tensor, k: int = 28) -> tuple[Tensor, Tensor]:
    """The first k principal components of the filters: ((k, p, q, C) components, (k,) explained variance ratio).

    >>> figure = vitlens.plot.filters(vitlens.filters.principal(model))

    The D filters are the samples, and the p·q·C pixels of a patch the variables. The mean filter is subtracted.
    Components are orthonormal over pixels, ordered by variance, and signed so that their largest entry is positive,
    because the sign is arbitrary. Their number is at most min(D − 1, p·q·C).
    model_or_weight: a model, or a kernel (D, C, p, q) as PyTorch stores it.
    """
    if isinstance(model_or_weight, Tensor):
        weight = model_or_weight.detach()
        filters = weight.permute(0, 2, 3, 1)
    else:
        filters = kernels(model_or_weight)
    # Not scikit-learn's PCA: its signs differ between versions, and constant filters give NaN.
    matrix = to_float64(filters).flatten(1)
    matrix = matrix - matrix.mean(0)
    _, singular, vectors = torch.linalg.svd(matrix, full_matrices=False)
    position = vectors.abs().argmax(1, keepdim=True)
    largest = vectors.gather(1, position)
    signs = torch.where(largest < 0, -1.0, 1.0)
    vectors = vectors * signs
    squares = singular.square()
    tiny = torch.finfo(torch.float64).tiny
    total = squares.sum().clamp_min(tiny)
    variance = squares / total
    k = min(k, len(filters) - 1)  # without its mean, each filter is given by the others
    components = vectors[:k].unflatten(1, filters.shape[1:])
    return components.float(), variance[:k].float()
