"""For every GPU test: convolutions in float32, and cuBLAS ready for deterministic algorithms."""

import os

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # up to PyTorch 2.9 it is read at the first product only

import pytest
import torch


@pytest.fixture(autouse=True)
def float32_means_float32(monkeypatch):
    """Switch off TF32 in cuDNN, so that results agree with a CPU to 1e-5."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
