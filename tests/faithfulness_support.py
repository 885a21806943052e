"""Pictures, maps and a model whose every score is known in closed form."""

import torch
from torch import nn

from vitlens import TokenGrid

GRID = TokenGrid(4, 6, (16, 16), prefix=0)
SMALL = TokenGrid(4, 6, (4, 4), prefix=0)


def images(batch=2, size=(64, 96), seed=0, dtype=torch.float64):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed), dtype=dtype) + 0.3


def maps(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def linear(size=(64, 96), classes=5, seed=2):
    """Logits that are a weighted sum of all pixels: what one patch adds depends on no other."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * size[0] * size[1], classes)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(model[1].weight.shape, generator=generator) / 50)
    return model


def tiles(values):
    """(B, 3, H, W) → (B, 24), summed over each patch of a grid of 4 × 6."""
    batch, channels, height, width = values.shape
    return values.reshape(batch, channels, 4, height // 4, 6, width // 6).sum((1, 3, 5)).flatten(1)


def gains(model, x, blank, target):
    """(B, 24) what each patch of the image adds to the logit of a linear model when it takes the baseline's place."""
    return tiles(model[1].weight.detach()[target].reshape(-1, *x.shape[1:]) * (x - blank))
