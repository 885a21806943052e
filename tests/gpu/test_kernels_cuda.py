"""The kernels for statistics of attention equal float64 on a GPU, and on a CPU in Triton's interpreter."""

import os
import sys
from dataclasses import replace

import pytest
import torch

from experiments.gpu.statistics import Sample
from vitlens import attention
from vitlens.recorder import fused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()),
    reason="NO CUDA DEVICE: the GPU tests were not run",
)
DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = (16, 32, 4)  # tiles of 16 queries and 32 keys, of 40 to 45 tokens


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch):
    """As if the tested device had the kernels."""
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("The kernels need compute capability 8.")
    if INTERPRETED:
        monkeypatch.setattr(fused, "has_kernels", lambda device: True)
    fused.self_check.cache_clear()
    yield
    fused.self_check.cache_clear()


@pytest.fixture
def counted(monkeypatch):
    """Shapes of the queries that the kernels have read, a layer each."""
    from vitlens.recorder import kernels

    fused.self_check(*fused.kind(sample()[0].q))
    layers = []
    launch = kernels.layer_sums

    def counting(*arguments, **options):
        layers.append(arguments[0].shape)
        return launch(*arguments, **options)

    monkeypatch.setattr(kernels, "layer_sums", counting)
    return layers


def sample(*arguments, **options):
    return Sample(*fused.sample(DEVICE, *arguments, **options))


def by_kernels(attn, **options):
    return fused.fused_statistics(attn, attn.grid, attention.read_row(attn), **options)


def by_rows(attn):
    return attention._by_rows(attn, *attention.STATISTICS.values())


def by_float64(attn):
    layers = [replace(layer, q=layer.q.double(), k=layer.k.double()) for layer in attn]
    return by_rows(Sample(layers, attn.grid))


@pytest.mark.parametrize(
    "dtype, width, prefix",
    [
        (torch.float32, 20, 5),
        (torch.float32, 64, 1),
        (torch.float16, 16, 0),
        (torch.bfloat16, 20, 1),
    ],
)
def test_kernels_equal_float64(dtype, width, prefix):
    attn = sample(dtype, width, prefix)
    values = by_kernels(attn, tiling=SMALL)
    expected = by_float64(attn)
    assert list(values) == list(expected) == list(attention.STATISTICS)
    for name, tensor in values.items():
        assert tensor.dtype == torch.float32 and tensor.shape == expected[name].shape
        # products of 16-bit numbers are exact in float32
        assert fused.difference(tensor, expected[name]) <= 1e-6, name


def test_kernels_take_large_logits_and_transposed_tensors():
    """As models store them: (B, T, H, W) in memory. A scale of 20 gives logits beyond ±1000."""
    attn = sample(width=16, scale=20.0)
    layers = []
    for layer in attn:
        q, k = [tensor.mT.contiguous().mT for tensor in (layer.q, layer.k)]
        layers.append(replace(layer, q=q, k=k))
    values = by_kernels(Sample(layers, attn.grid))
    for name, expected in by_float64(attn).items():
        assert fused.difference(values[name], expected) <= 1e-4, name


def test_kernels_give_the_same_bits():
    attn = sample(torch.float16, 16)
    first, second = by_kernels(attn), by_kernels(attn)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_float64_of_the_check_agrees_with_the_rows():
    attn = sample(torch.float16, 16, 5)
    exact = fused.in_float64(attn, attn.grid, attention.read_row(attn))
    for name, expected in by_float64(attn).items():
        assert fused.difference(exact[name], expected) <= 1e-6, name


def test_summary_uses_the_kernels(counted):
    attn = sample()
    summary = attention.summary(attn)
    assert len(counted) == len(attn)
    expected = by_float64(attn)
    for name, values in summary.values.items():
        assert fused.difference(values, expected[name]) <= 1e-6
    assert summary.by_head == ("mean_distance", "entropy")


def test_options_are_computed_by_rows_beside_the_kernels(counted):
    attn = sample()
    summary = attention.summary(attn, "entropy", "mean_distance", renormalize=True)
    assert len(counted) == len(attn)
    counted.clear()
    renormalized = attention.mean_distance(attn, renormalize=True)
    torch.testing.assert_close(summary.mean_distance, renormalized)
    attention.received(attn, prefix=True)
    attention.rollout(attn, query=(2, 3))
    attention.rollout(attn, head_fusion="max")
    attention.rollout(attn, discard=0.5)
    assert not counted, "the kernels have no options"


def test_models_without_read_out(counted):
    attn = sample()
    attn.grid = replace(attn.grid, readout=None)
    summary = attention.summary(attn)
    assert summary.rollout is None and len(counted) == len(attn)
    with pytest.raises(ValueError, match="reads no weighted sum"):
        attention.rollout(attn)


@pytest.mark.parametrize("change", ["mask", "gradient", "float64"])
def test_other_captures_are_computed_by_rows(counted, change):
    attn = sample()
    last = attn[-1]
    if change == "mask":
        attn[-1] = replace(last, mask=torch.zeros(41, 41, device=DEVICE))
    elif change == "gradient":
        attn[-1] = replace(last, k=last.k.clone().requires_grad_())
    else:
        attn[:] = [replace(layer, q=layer.q.double(), k=layer.k.double()) for layer in attn]
    expected = by_rows(attn)
    for name, values in attention.summary(attn).values.items():
        assert torch.equal(values, expected[name])
    assert not counted


@pytest.mark.parametrize("fault", ["differ", "raise", "nan"])
def test_self_check_keeps_to_rows_and_warns_once(monkeypatch, fault):
    from vitlens.recorder import kernels

    launch = kernels.layer_sums

    def broken(*arguments, **options):
        if fault == "raise":
            raise RuntimeError("no compiler")
        distance, entropy, received, pulled = launch(*arguments, **options)
        return distance, entropy * (float("nan") if fault == "nan" else 1.001), received, pulled

    monkeypatch.setattr(kernels, "layer_sums", broken)
    attn = sample()
    expected = by_rows(attn)
    message = "do not run: RuntimeError: no compiler"
    if fault != "raise":
        message = "differ from float64 in entropy"
    with pytest.warns(UserWarning, match=message) as record:
        for _ in range(2):
            for name, values in attention.summary(attn).values.items():
                assert torch.equal(values, expected[name])
    assert len([warning for warning in record if warning.category is UserWarning]) == 1


def test_devices_with_kernels(monkeypatch):
    monkeypatch.undo()
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert fused.has_kernels(cuda) and not fused.has_kernels(torch.device("cpu"))
    with monkeypatch.context() as changed:
        changed.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not fused.has_kernels(cuda), "a T4"
    with monkeypatch.context() as changed:
        changed.setattr(torch.version, "cuda", None)
        assert not fused.has_kernels(cuda), "AMD"
    with monkeypatch.context() as changed:
        changed.setattr(sys, "platform", "win32")
        assert not fused.has_kernels(cuda)
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "triton", None)
        assert not fused.has_kernels(cuda), "not installed"
