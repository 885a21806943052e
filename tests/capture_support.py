"""A captured forward without gradients, and checks over many models."""

import zlib

import torch

from vitlens import capture

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
