"""Precision of the numbers: matrix products without TF32 or autocast, and float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Multiply matrices in the dtype of their factors in this block, without autocast and without TF32."""
    if torch.amp.is_autocast_available(device.type):
        without_autocast = torch.autocast(device.type, enabled=False)
    else:
        without_autocast = contextlib.nullcontext()
    with without_autocast, _without_tf32():
        yield


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    products = torch.backends.cuda.matmul
    if hasattr(products, "fp32_precision"):
        name, exact = "fp32_precision", "ieee"
    else:  # PyTorch's older name, which raises in programs that also set the newer one
        name, exact = "allow_tf32", False
    before = getattr(products, name)
    if before not in ("tf32", True):
        yield
        return
    setattr(products, name, exact)
    try:
        yield
    finally:
        setattr(products, name, before)


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, on the CPU if its device lacks float64 (Apple's MPS)."""
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    return tensor.double()
