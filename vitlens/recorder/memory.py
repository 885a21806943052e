"""Errors of PyTorch that mean too little memory."""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """True if PyTorch ran out of memory. Its CPU allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
