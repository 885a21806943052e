"""Precision and determinism of the process, as blocks of several threads request them."""

import random
import threading
from contextlib import suppress

import pytest
import torch

from vitlens.recorder.precision import (
    _read_determinism,
    _read_precision,
    deterministic_algorithms,
    float32_precision,
    full_precision,
)

CPU = torch.device("cpu")
NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def older_tf32() -> None:
    torch.set_float32_matmul_precision("high")


def newer_tf32() -> None:
    torch.backends.fp32_precision = "tf32"


def one_operation() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


PROGRAMS = [lambda: None, older_tf32] + [newer_tf32, one_operation] * NEWER


@pytest.fixture(params=PROGRAMS, ids=lambda program: program.__name__)
def program(request):
    """The settings of a program, read after it has made them."""
    before = torch.backends.fp32_precision if NEWER else None
    convolutions = torch.backends.cudnn.allow_tf32
    request.param()
    yield _read_precision()
    if NEWER:
        torch.backends.fp32_precision = before
        for name in ("cuda.matmul", "mkldnn.conv", "mkldnn.matmul", "mkldnn.rnn"):
            backend, operation = name.split(".")
            getattr(getattr(torch.backends, backend), operation).fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = convolutions


def require_settings(program: tuple) -> None:
    """Assert that the settings are the program's, except an older one that PyTorch could not read (None)."""
    for before, now in zip(program, _read_precision(), strict=True):
        assert before is None or now == before


def rounds_products() -> bool:
    """True if products on CUDA are rounded to TF32."""
    products = torch.backends.cuda.matmul
    return products.fp32_precision == "tf32" if NEWER else products.allow_tf32


def test_settings_return_after_nested_blocks_and_exceptions(program):
    with full_precision(CPU), float32_precision(True):
        assert not rounds_products()
    with float32_precision(True):
        assert rounds_products()
        with suppress(KeyError), full_precision(CPU):
            with full_precision(CPU):
                assert not rounds_products()
            assert not rounds_products()
            raise KeyError
        assert rounds_products()
        with float32_precision(False):
            assert not rounds_products()
        assert rounds_products()
    require_settings(program)


def test_settings_return_after_interleaved_blocks(program):
    """Runs that are closed in the order in which they were opened, and one that ends within exact products."""
    first, second, exact = float32_precision(True), float32_precision(True), full_precision(CPU)
    first.__enter__()
    second.__enter__()
    exact.__enter__()
    assert not rounds_products()
    first.__exit__(None, None, None)
    assert not rounds_products()
    exact.__exit__(None, None, None)
    assert rounds_products()
    second.__exit__(None, None, None)
    require_settings(program)


def test_latest_request_is_in_force_after_an_equal_one_ends(program):
    first, second, third = (float32_precision(tf32) for tf32 in (True, False, True))
    for block in (first, second, third):
        block.__enter__()
    third.__exit__(None, None, None)
    assert not rounds_products()
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    require_settings(program)


def test_threads_compute_exactly_while_others_use_tf32(program):
    """Each thread enters and leaves blocks at random, and a third of them end by an exception."""
    wrong, errors = [], []
    start = threading.Barrier(6)

    def work(number: int) -> None:
        draw = random.Random(number)
        try:
            start.wait()
            for _ in range(60):
                step(draw)
        except BaseException as error:
            errors.append(error)

    def step(draw: random.Random) -> None:
        if draw.random() < 0.5:
            with float32_precision(True):
                draw.random()
            return
        with suppress(KeyError), full_precision(CPU):
            for _ in range(5):
                wrong.extend([1] * rounds_products())
            if draw.random() < 0.3:
                raise KeyError

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not wrong
    require_settings(program)


@pytest.mark.parametrize("program_value", [(False, False), (True, True), (True, False)])
def test_determinism_returns_after_interleaved_blocks(program_value):
    enabled, only_warns = program_value
    torch.use_deterministic_algorithms(enabled, warn_only=only_warns)
    try:
        first, second = deterministic_algorithms(), deterministic_algorithms()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert _read_determinism() == (True, False)
        second.__exit__(None, None, None)
        assert _read_determinism() == program_value
    finally:
        torch.use_deterministic_algorithms(False)
