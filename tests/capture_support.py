"""A captured forward without gradients, and checks over many models."""

import zlib

import torch

from vitlens import capture


class Headed(torch.nn.Module):
    """Scales images, and classifies by features of a backbone, or by its class token."""

    def __init__(self, backbone, pools, scale=1.0):
        super().__init__()
        self.backbone, self.pools, self.scale = backbone, pools, scale
        self.head = torch.nn.Linear(backbone.embed_dim, 5)

    def forward(self, x):
        x = x * self.scale
        return self.head(
            self.backbone.forward_features(x)[:, 0] if self.pools else self.backbone(x)
        )


CHUNKS = 16
"""Number of tests that share a sweep over all models, for parallel processes."""


def captured(model, images, **options):
    with torch.no_grad(), capture(model, **options) as attn:
        model(images)
    return attn


def chunk(names, number):
    """Names in one of the `CHUNKS`, the same in every process."""
    return [name for name in names if zlib.crc32(name.encode()) % CHUNKS == number]


def check_all(check, names):
    """Call `check` with every name, and fail with all failures in one message."""
    failed = []
    for name in names:
        try:
            check(name)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n\n".join(failed)
