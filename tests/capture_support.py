"""One forward under a capture, without gradients; and one test for many models."""

import zlib

import torch

from vitlens import capture

CHUNKS = 16
"""Tests into which a sweep over all models is divided, so that several processes share it."""


def captured(model, images, **options):
    with torch.no_grad(), capture(model, **options) as attn:
        model(images)
    return attn


def chunk(names, number):
    """The names of one of the `CHUNKS`, the same ones in every process."""
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
