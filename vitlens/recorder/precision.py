"""Precision of the numbers: matrix products without TF32 or autocast, and float64."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_OPERATIONS = (
    ("cuda", "matmul"),
    ("cudnn", "conv"),
    ("cudnn", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
"""Operations on float32 whose precision PyTorch sets in `torch.backends`, by backend."""


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Multiply matrices in the dtype of their factors in this block, without autocast and without TF32.

    Autocast is a setting of the thread, TF32 of the process: it stays off until the last thread leaves its block.
    """
    if torch.amp.is_autocast_available(device.type):
        without_autocast = torch.autocast(device.type, enabled=False)
    else:
        without_autocast = contextlib.nullcontext()
    with without_autocast, _exact_products.hold():
        yield


@contextlib.contextmanager
def float32_precision(tf32: bool) -> Iterator[None]:
    """Multiply and convolve float32 in TF32 in this block if `tf32`, else exactly. Restores the program's settings.

    Programs set the precision by PyTorch's older functions or, since PyTorch 2.9, by `torch.backends`. The older ones
    raise in programs that use the newer ones, and torch.compile reads the older ones, so both are set here.
    """
    products = _older(torch.get_float32_matmul_precision)
    convolutions = _older(lambda: torch.backends.cudnn.allow_tf32)
    before = _precisions()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    _set_precisions(dict.fromkeys(before, "tf32" if tf32 else "ieee"))
    try:
        yield
    finally:
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            torch.backends.cudnn.allow_tf32 = convolutions
        _set_precisions(before)


def _older(read):
    """Value of an older setting, or None where the program has set a newer one to something else."""
    try:
        return read()
    except RuntimeError:
        return None


def _precisions() -> dict[tuple[str, str], str]:
    """Precision of each operation: ieee, tf32, bf16, or none (exact). Empty before PyTorch 2.9."""
    precisions = {}
    for backend, name in _OPERATIONS:
        operation = getattr(getattr(torch.backends, backend), name, None)
        if hasattr(operation, "fp32_precision"):
            precisions[backend, name] = operation.fp32_precision
    return precisions


def _set_precisions(precisions: dict[tuple[str, str], str]) -> None:
    """Set the precision of operations. One that has it from its backend, or from all backends, has it from there."""
    for (backend, name), precision in precisions.items():
        operation = getattr(getattr(torch.backends, backend), name)
        operation.fp32_precision = "none"
        if operation.fp32_precision != precision:
            operation.fp32_precision = precision


class _ExactProducts:
    """The switch of `full_precision`, which counts the blocks of all threads."""

    def __init__(self):
        self.lock = threading.Lock()
        self.blocks = 0
        self.switched = contextlib.ExitStack()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        with self.lock:
            if self.blocks == 0 and not _products_are_exact():
                self.switched.enter_context(float32_precision(tf32=False))
            self.blocks += 1
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1
                if self.blocks == 0:
                    self.switched.close()


_exact_products = _ExactProducts()


def _products_are_exact() -> bool:
    """True if products of float32 matrices are computed in float32 on every device."""
    precisions = _precisions()
    if not precisions:
        return torch.get_float32_matmul_precision() == "highest"
    products = [value for (_, name), value in precisions.items() if name == "matmul"]
    return all(value in ("ieee", "none") for value in products)


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, on the CPU if its device lacks float64 (Apple's MPS)."""
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    return tensor.double()
