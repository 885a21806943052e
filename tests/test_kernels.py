"""The kernels of `vitlens.recorder` in Triton's interpreter, and compiled for devices that are not there."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}

# PyTorch for CUDA on Linux brings Triton. There, its absence is a failure.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    and not (sys.platform == "linux" and torch.version.cuda),
    reason="PyTorch without CUDA brings no Triton",
)


@pytest.mark.slow
def test_kernels_are_right_in_the_interpreter():
    """In another process: Triton reads the variable when it is imported."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
        + ["tests/gpu/test_kernels_cuda.py"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    assert re.search(r"\b\d\d passed", run.stdout) and "skipped" not in run.stdout


@pytest.mark.parametrize(
    "dtype, capability, width",
    [
        (torch.float32, 80, 64),
        (torch.bfloat16, 90, 20),
        pytest.param(torch.float16, 80, 64, marks=pytest.mark.slow),
        pytest.param(torch.float32, 90, 64, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 89, 64, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 100, 128, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_devices(dtype, capability, width, tmp_path, monkeypatch):
    """With the products of tensor cores, without atomic additions, and within a device's shared memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton = pytest.importorskip("triton", minversion="3.3", reason="Its sources changed in 3.3")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitlens.recorder import kernels

    for kernel in (kernels.rows_kernel, kernels.columns_kernel):
        constants = kernels.constants(dtype, width) | {"WIDE": False}
        types = {}
        for name in kernel.arg_names:
            if name in constants:
                types[name] = "constexpr"
            elif name in ("Q", "K"):
                types[name] = POINTERS[dtype]
            elif name in ("T", "prefix", "heads"):
                types[name] = "i32"
            else:
                types[name] = "fp32" if name == "factor" else "*fp32"
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(
            ASTSource(kernel, types, places), target=GPUTarget("cuda", capability, 32)
        )
        code = compiled.asm["ptx"]
        assert re.search(r"\b(wg)?mma|\btcgen05\.mma", code), "no tensor cores"
        assert not re.search(r"\batom\.|\bred\.", code), "sums depend on the order of threads"
        assert compiled.metadata.shared <= 99 * 1024
