"""Precision of the numbers: matrix products without TF32 or autocast, and float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Multiply matrices in the dtype of their factors in this block, without autocast and without TF32."""
    autocast = torch.amp.is_autocast_available(device.type)
    products = torch.backends.cuda.matmul
    # PyTorch's older name raises in programs that also set the newer one.
    name, exact = (
        ("fp32_precision", "ieee") if hasattr(products, "fp32_precision") else ("allow_tf32", False)
    )
    before = getattr(products, name)
    with torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext():
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
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
