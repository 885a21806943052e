"""Precision of the numbers: matrix products without TF32 or autocast, and float64."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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


_RUN, _EXACT = 0, 1
"""Ranks of requests: exact products go before the precision of a training run."""


@dataclass(frozen=True, eq=False)
class _Request:
    rank: int
    value: object


class SharedSetting:
    """Setting of the process that blocks of all threads request. After the last block the program's own value returns.

    The latest request of the highest rank is in force. Blocks may end in any order.

    read: the present value. write: set a value. is_met: (rank, value) → True if nothing must be set for it.
    """

    def __init__(
        self,
        read: Callable[[], object],
        write: Callable[[Any], None],
        is_met: Callable[[int, Any], bool],
    ):
        self.read = read
        self.write = write
        self.is_met = is_met
        # Reentrant, because Python may close an abandoned run, which requests settings, at any moment.
        self.lock = threading.RLock()
        self.requests: list[_Request] = []
        self.is_changed = False
        self.program: object = None

    @contextlib.contextmanager
    def hold(self, value: object, rank: int = _RUN) -> Iterator[None]:
        """Request the value in this block."""
        request = _Request(rank, value)
        with self.lock:
            self.requests.append(request)
            self._update()
        try:
            yield
        finally:
            with self.lock:
                self.requests.remove(request)
                self._update()

    def _update(self) -> None:
        if not self.requests:
            if self.is_changed:
                self.write(self.program)
            self.is_changed = False
            return
        latest_of_rank = {request.rank: request for request in self.requests}
        request = latest_of_rank[max(latest_of_rank)]
        if self.is_met(request.rank, request.value):
            return
        if not self.is_changed:
            self.program = self.read()
        self.is_changed = True
        self.write(request.value)


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Multiply matrices in the dtype of their factors in this block, without autocast and without TF32.

    Autocast is a setting of the thread, TF32 of the process: it stays off until the last thread leaves its block, also
    if a run that uses TF32 begins or ends meanwhile.
    """
    if torch.amp.is_autocast_available(device.type):
        without_autocast = torch.autocast(device.type, enabled=False)
    else:
        without_autocast = contextlib.nullcontext()
    with without_autocast, _float32.hold(_uniform(tf32=False), _EXACT):
        yield


def float32_precision(tf32: bool) -> contextlib.AbstractContextManager[None]:
    """Multiply and convolve float32 in TF32 in this block if `tf32`, else exactly. Restores the program's settings.

    Programs set the precision by PyTorch's older functions or, since PyTorch 2.9, by `torch.backends`. The older ones
    raise in programs that use the newer ones, and torch.compile reads the older ones, so both are set here.
    """
    return _float32.hold(_uniform(tf32))


def deterministic_algorithms() -> contextlib.AbstractContextManager[None]:
    """Context that uses deterministic algorithms. Operations without one raise RuntimeError."""
    return _determinism.hold((True, False))


def _uniform(tf32: bool) -> tuple:
    """One precision for all operations, as `_read_precision` returns it."""
    precisions = dict.fromkeys(_precisions(), "tf32" if tf32 else "ieee")
    return "high" if tf32 else "highest", tf32, precisions


def _read_precision() -> tuple:
    """Precision of products and permission of TF32 in convolutions (older), and precision by operation (newer)."""
    products = _older(torch.get_float32_matmul_precision)
    convolutions = _older(lambda: torch.backends.cudnn.allow_tf32)
    return products, convolutions, _precisions()


def _write_precision(value: tuple) -> None:
    products, convolutions, precisions = value
    if products is not None:
        torch.set_float32_matmul_precision(products)
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions
    _set_precisions(precisions)


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


def _products_are_exact() -> bool:
    """True if products of float32 matrices are computed in float32 on every device."""
    precisions = _precisions()
    if not precisions:
        return torch.get_float32_matmul_precision() == "highest"
    products = [value for (_, name), value in precisions.items() if name == "matmul"]
    return all(value in ("ieee", "none") for value in products)


def _precision_is_met(rank: int, _value: tuple) -> bool:
    return rank == _EXACT and _products_are_exact()


def _read_determinism() -> tuple[bool, bool]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, torch.is_deterministic_algorithms_warn_only_enabled()


def _write_determinism(value: tuple[bool, bool]) -> None:
    enabled, only_warns = value
    torch.use_deterministic_algorithms(enabled, warn_only=only_warns)


_float32 = SharedSetting(_read_precision, _write_precision, _precision_is_met)
_determinism = SharedSetting(
    _read_determinism, _write_determinism, lambda _rank, value: value == _read_determinism()
)


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, on the CPU if its device lacks float64 (Apple's MPS)."""
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    return tensor.double()
