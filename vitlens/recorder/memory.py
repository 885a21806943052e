"""Errors that mean too little memory."""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """True if PyTorch or Python ran out of memory. PyTorch's CPU allocator raises a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "DefaultCPUAllocator" in str(error)
