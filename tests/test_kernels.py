"""The fused kernels without a GPU: under Triton's interpreter, against a naive twin; and how they give way.

    TRITON_INTERPRET=1 python tests/test_kernels.py

prints the relative errors as JSON. The interpreter must be chosen before Triton is imported, so that is how the tests
run it: in a process of its own. On CUDA the compiled kernels are tested, by tests/gpu/test_kernels_cuda.py.
"""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import timm
import torch

from vitlens import attention, capture
from vitlens.recorder import kernels
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.recording import Layer

CASES = {  # rows, cols, prefix, head width, precision (the interpreter cannot multiply bfloat16)
    "ViT-B at 224 px": (14, 14, 1, 64, torch.float32),
    "registers, not square": (14, 20, 5, 48, torch.float32),
    "no prefix, float16": (10, 12, 0, 32, torch.float16),
    "one odd head width": (5, 7, 1, 72, torch.float32),
}


def random_layer(grid, heads=3, width=64, dtype=torch.float32, batch=2, device="cpu", seed=0):
    """Peaked attention over the grid's tokens; q and k are views of a fused qkv, as a model's are."""
    torch.manual_seed(seed)
    q, k, _ = torch.randn(batch, grid.tokens, 3, heads, width, device=device).mul(2).to(dtype).permute(2, 0, 3, 1, 4)
    return Layer("random", q, k, width**-0.5), torch.rand(batch, grid.tokens, device=device)


def naive(layer, grid, row):
    """All of `kernels.Sums` from a map in float64."""
    weights = (layer.q.double() @ layer.k.double().mT * layer.scale).softmax(-1)
    patches = weights[..., grid.prefix :, grid.prefix :]
    return kernels.Sums(
        entropy=torch.special.entr(weights).sum(-1),
        distance=(patches * grid.distances(dtype=torch.float64, device=weights.device)).sum(-1),
        mass=patches.sum(-1),
        received=weights.sum(-2),
        pulled=torch.einsum("bq,bhqk->bk", row.double(), weights) / weights.shape[1],
    )


def errors(got, expected):
    """{name: ‖got − expected‖ / ‖expected‖} of two `Sums` or `Summary`s; never NaN."""
    got, expected = (vars(each).get("values", vars(each)) for each in (got, expected))
    error = {}
    for name, tensor in expected.items():
        if tensor is not None:
            assert got[name].shape == tensor.shape, name
            difference = (got[name].double() - tensor).norm() / tensor.double().norm()
            error[name] = difference.nan_to_num(torch.inf).item()
    return error


def interpreted_errors():
    """Run in a process with TRITON_INTERPRET=1: errors by case, and of a whole summary of a model."""
    kernels.supported = lambda layer, grid: kernels.enabled and layer.mask is None  # CPU tensors are fine here
    result = {}
    for case, (rows, cols, prefix, width, dtype) in CASES.items():
        grid = TokenGrid(rows, cols, (16, 12), prefix)
        layer, row = random_layer(grid, width=width, dtype=dtype)
        result[case] = errors(kernels._launch(layer, grid, True, row), naive(layer, grid, row))

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    with torch.no_grad(), capture(model) as attn:
        model(torch.randn(2, 3, 64, 64))
    launches, launch = [], kernels._launch
    kernels._launch = lambda *args: launches.append(1) or launch(*args)
    fused = attention.summary(attn, renormalize=True)
    kernels.enabled = False
    result["summary"] = errors(fused, attention.summary(attn, renormalize=True)) | {"launches": len(launches)}
    return result


@pytest.fixture(scope="module")
def interpreted():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("TRITON ABSENT: the fused kernels cannot be run under its interpreter")
    if torch.cuda.is_available():
        pytest.skip("the compiled kernels are tested instead, by tests/gpu/test_kernels_cuda.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    if "only 0-dimensional arrays" in run.stderr:
        pytest.skip("the interpreter of this Triton does not go together with this NumPy")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [*CASES, "summary"])
def test_kernels_equal_the_naive_sums(interpreted, case):
    if case == "summary":
        assert interpreted[case].pop("launches") == 3, "one comparison and two layers were wanted"
    assert set(interpreted[case]) >= {"entropy", "received"}
    assert max(interpreted[case].values()) < 1e-5, interpreted[case]


def test_imports_and_gives_way_without_triton():
    code = "import sys; sys.modules['triton'] = None; from vitlens.recorder import kernels; kernels._compiled()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "in _compiled" in run.stderr and "ModuleNotFoundError" in run.stderr, run.stderr


def test_what_is_not_supported_takes_the_rows():
    grid = TokenGrid(3, 4, (16, 16))
    layer, _ = random_layer(grid)
    assert kernels.sums(layer, grid) is None  # a CPU
    assert not kernels.supported(dataclasses.replace(layer, mask=torch.zeros(13, 13)), grid)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """A function that takes the kernels' place, on a CPU: all sums from whole maps, changed as wanted."""

    def place(change=lambda sums: sums):
        monkeypatch.setattr(kernels, "enabled", True)
        monkeypatch.setattr(kernels, "supported", lambda layer, grid: kernels.enabled)
        monkeypatch.setattr(kernels, "_launch", lambda layer, grid, _, row: change(naive(layer, grid, row)))
        kernels._compare.cache_clear()

    yield place
    kernels._compare.cache_clear()


def fails(sums):
    raise OSError("no compiler")


BROKEN = {
    "no compiler": fails,
    "entropy of a random layer": lambda sums: dataclasses.replace(sums, entropy=sums.entropy / math.log(2)),
    "pulled of a random layer": lambda sums: dataclasses.replace(sums, pulled=sums.pulled * torch.nan),
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_broken_kernel_warns_once_and_gives_way_to_rows(vit, on_the_cpu, words):
    with torch.no_grad(), capture(model := vit()) as attn:
        model(torch.randn(2, 3, 64, 64))
    expected = attention.summary(attn)
    on_the_cpu(BROKEN[words])
    with pytest.warns(RuntimeWarning, match=words) as caught:
        found = attention.summary(attn), attention.summary(attn)
    assert len(caught) == 1 and not kernels.enabled
    assert all(max(errors(each, expected).values()) == 0 for each in found)


def test_kernels_are_compared_once_before_they_are_used(on_the_cpu, monkeypatch):
    launched = []
    on_the_cpu()
    launch = kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda layer, *rest: launched.append(layer.name) or launch(layer, *rest))
    layer, row = random_layer(TokenGrid(3, 4, (16, 16)))
    layer = dataclasses.replace(layer, name="model's")
    state = torch.get_rng_state()
    for _ in range(2):
        kernels.sums(layer, TokenGrid(3, 4, (16, 16)), row=row)
    kernels.sums(dataclasses.replace(layer, q=layer.q.half(), k=layer.k.half()), TokenGrid(3, 4, (16, 16)), row=row)
    assert launched == ["random", "model's", "model's", "random", "model's"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_statistic_without_fused_sums_leaves_the_others_to_the_kernels(vit, on_the_cpu, monkeypatch):
    class Peak(attention.Statistic):
        name, title = "peak", "largest weight of a query"

        def add(self, queries, logits, weights):
            self.sums.append(weights.amax(-1))

    with torch.no_grad(), capture(model := vit()) as attn:
        model(torch.randn(3, 3, 64, 64))
    expected = attention.summary(attn, "received", Peak(), "rollout")
    on_the_cpu()
    taken = []
    monkeypatch.setattr(
        attention._Received, "take", lambda self, sums: taken.append(1) or self.sums.append(sums.received)
    )
    found = attention.summary(attn, "received", Peak(), "rollout")
    assert len(taken) == len(attn) and list(found.values) == ["received", "peak", "rollout"]
    assert max(errors(found, expected).values()) < 1e-5


if __name__ == "__main__":
    print(json.dumps(interpreted_errors()))
