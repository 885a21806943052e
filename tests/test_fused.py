"""What is asked of PyTorch's fused attention besides its output, against float64 and against rows."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitlens import attention, capture
from vitlens.recorder import fused
from vitlens.recorder.layer import Layer

sdpa = F.scaled_dot_product_attention


def qkv(dtype=torch.float32, tokens=40, scale=1.0, heads=3, width=16):
    """As a model has them: three views of one tensor."""
    torch.manual_seed(0)
    return (scale * torch.randn(2, tokens, 3, heads, width)).to(dtype).permute(2, 0, 3, 1, 4)


@pytest.mark.parametrize("options", [{}, {"scale": 0.7}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_output_is_the_same_to_the_bit_and_the_log_sum_exp_right(dtype, options):
    q, k, v = qkv(dtype)
    output, lse = fused.attend(sdpa, q, k, v, **options)
    assert torch.equal(output, sdpa(q, k, v, **options))
    logits = options.get("scale", 16**-0.5) * q.double() @ k.double().mT
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_no_log_sum_exp_where_torch_computes_otherwise():
    q, k, v = qkv()
    mask = torch.zeros(40, 40)
    assert fused.attend(sdpa, q, k, v, mask)[1] is None
    assert fused.attend(sdpa, q, k, v, None, 0.5)[1] is None
    assert fused.attend(sdpa, q, k, v, None, 0.0, True)[1] is None
    assert fused.attend(sdpa, q, k[:, :1], v[:, :1], enable_gqa=True)[1] is None
    with sdpa_kernel(SDPBackend.MATH):
        assert fused.attend(sdpa, q, k, v)[1] is None
    with torch.autocast("cpu", torch.bfloat16):
        output, lse = fused.attend(sdpa, q, k, v)
        assert lse is None and torch.equal(output, sdpa(q, k, v)) and output.dtype == torch.bfloat16
    assert fused.attend(sdpa, *(t.to("meta") for t in (q, k, v)))[1] is None
    assert fused.attend(sdpa, q, k, v)[1] is not None


@pytest.mark.parametrize("tokens", [40, 1000])  # a large one is taken in other blocks
@pytest.mark.parametrize("scale", [1.0, 7.0])  # the larger leaves many weights at 1e-30 and less
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_over_queries(dtype, scale, tokens):
    q, k, v = qkv(dtype, tokens, scale)
    lse = fused.attend(sdpa, q, k, v)[1]
    row = torch.rand(2, tokens) * (torch.arange(tokens) % 3 > 0)
    logits = q.double() @ k.double().mT / 4
    expected = torch.einsum("bq,bhqk->bhk", row.double(), logits.softmax(-1))
    got = fused.summed(q, k, 0.25, lse, row).double()
    # a logit is exact to some of its last places; of bfloat16, PyTorch takes a quicker exponential
    each = 4 * torch.finfo(lse.dtype).eps * logits.abs().max() + (1e-4 if dtype == torch.bfloat16 else 0)
    assert ((got - expected).abs() / expected.clamp(min=1e-20)).max() < each
    assert (got - expected).norm() < each * expected.norm()


MODELS = {
    "plain": ("vit_tiny_patch16_224", {}),
    "registers, RoPE": ("vit_medium_patch16_rope_reg1_gap_256", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
}


@pytest.mark.parametrize(("name", "kwargs"), MODELS.values(), ids=MODELS)
def test_rollout_and_attention_received_are_those_of_the_rows(vit, monkeypatch, name, kwargs):
    model = vit(name=name, **kwargs)
    with torch.no_grad(), capture(model) as attn:
        model(torch.randn(2, 3, 64, 64))
    assert all(layer.lse is not None for layer in attn)
    rows = capture_without(attn)
    monkeypatch.setattr(Layer.read, "__defaults__", (1,))
    monkeypatch.setattr(attention, "SMALL", 1)
    monkeypatch.setattr(Layer, "blocks", None)  # no rows are made
    monkeypatch.setattr(Layer, "rows", None)
    found = attention.rollout(attn), attention.rollout(attn, query=(1, 2)), attention.received(attn)
    monkeypatch.undo()
    expected = attention.rollout(rows), attention.rollout(rows, query=(1, 2)), attention.received(rows)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-7)


def capture_without(attn):
    """The same capture as where the log-sum-exp is not known."""
    without = object.__new__(type(attn))
    without.__dict__.update(attn.__dict__)
    without._calls = [[replace(call, lse=None) for call in calls] for calls in attn._calls]
    return without


def missing():
    raise AttributeError("no such operator")


def in_other_units():
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return lambda *a, **k: (operator(*a, **k)[0], operator(*a, **k)[1] / 0.6931)


@pytest.mark.parametrize("operator", [missing, in_other_units])
def test_without_the_operator_rows_are_made(vit, monkeypatch, operator):
    model, images = vit(), torch.randn(1, 3, 64, 64)
    with torch.no_grad(), capture(model) as attn:
        expected = model(images)
    monkeypatch.setattr(fused, "_operator", operator)
    fused._works.cache_clear()
    try:
        with torch.no_grad(), capture(model) as other:
            assert torch.equal(model(images), expected)
        assert all(layer.lse is None for layer in other)
        torch.testing.assert_close(attention.rollout(other), attention.rollout(attn))
    finally:
        fused._works.cache_clear()


def test_weights_that_autograd_follows_are_rows(vit):
    model = vit()
    with torch.no_grad(), capture(model) as attn:
        model(torch.randn(1, 3, 64, 64))
    layer, row = attn[0], torch.ones(17)
    for part in ("q", "k", "row"):
        tensor = {"q": layer.q, "k": layer.k, "row": row}[part].clone().requires_grad_()
        other = layer if part == "row" else replace(layer, **{part: tensor})
        other.read(tensor if part == "row" else row, block=1)[..., 3].sum().backward()
        assert tensor.grad.abs().max() > 0, part
    signed = torch.linspace(-1, 1, 17)
    torch.testing.assert_close(attn[0].read(signed, block=1), torch.einsum("q,bhqk->bhk", signed, attn[0].weights()))


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_no_map_is_held():
    """12 heads of 4,096 tokens: 805 MB of weights, as many of the bias, if they were."""
    code = (
        "import torch, torch.nn.functional as F\n"
        "from vitlens import fused\n"
        "torch.set_num_threads(1)\n"
        "q, k, v = torch.randn(3, 1, 12, 4096, 16)\n"
        "_, lse = fused.attend(F.scaled_dot_product_attention, q, k, v)\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024\n"
        "before = peak()\n"
        "fused.summed(q, k, 0.25, lse, torch.rand(1, 4096))\n"
        "print(peak() - before)"
    )
    grown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert float(grown) < 100
