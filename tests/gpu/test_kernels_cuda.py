"""The fused kernels on CUDA: against a naive twin in float64, against the row blocks, and against themselves."""

import dataclasses
import warnings

import pytest
import timm
import torch
from test_kernels import errors, naive, random_layer

from vitlens import attention, capture
from vitlens.recorder import kernels
from vitlens.recorder.grid import TokenGrid

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA ABSENT: the compiled kernels are not tested"),
    pytest.mark.filterwarnings("error:Attention statistics run without"),
]
PRECISIONS = {torch.float32: 3e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}  # q and k are rounded before both
GRIDS = {  # rows, cols, prefix, heads, head width
    "T=17": (4, 4, 1, 3, 64),
    "T=197": (14, 14, 1, 12, 64),
    "T=285, registers, not square": (14, 20, 5, 3, 48),
    "T=256, no prefix": (16, 16, 0, 4, 32),
    "T=401, wide heads": (20, 20, 1, 2, 128),
    "T=730, SigLIP's head width": (27, 27, 1, 2, 72),
    "T=4097": (64, 64, 1, 2, 64),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """New tensors begin as NaN, so that a number nobody writes is seen."""
    empty = torch.empty

    def poisoned(*shape, **kwargs):
        tensor = empty(*shape, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_cuda and tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(kernels, "enabled", True)


@pytest.fixture
def launches(monkeypatch):
    """A list that grows with every layer the kernels sum."""
    seen, launch = [], kernels._launch
    monkeypatch.setattr(kernels, "_compare", lambda *_: None)
    monkeypatch.setattr(kernels, "_launch", lambda *args: seen.append(1) or launch(*args))
    return seen


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("case", GRIDS)
def test_equal_the_naive_sums(case, dtype):
    rows, cols, prefix, heads, width = GRIDS[case]
    grid = TokenGrid(rows, cols, (16, 14), prefix)
    layer, row = random_layer(grid, heads, width, dtype, device="cuda")
    got = kernels.sums(layer, grid, received=True, row=row)
    assert got is not None, "the kernels were not used"
    error = errors(got, naive(layer, grid, row))
    assert max(error.values()) < PRECISIONS[dtype], error


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("width", [32, 48, 64, 72, 128])
def test_pass_the_comparison_before_their_first_use(dtype, width):
    kernels._compare.__wrapped__(torch.device("cuda", 0), dtype, width)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_two_runs_agree_bit_for_bit(dtype):
    grid = TokenGrid(20, 30, (16, 16), 1)
    layer, row = random_layer(grid, 6, 64, dtype, batch=8, device="cuda")
    first, *others = (kernels.sums(layer, grid, received=True, row=row) for _ in range(4))
    for other in others:
        for field in dataclasses.fields(first):
            assert torch.equal(getattr(first, field.name), getattr(other, field.name)), field.name


def test_large_and_lopsided_logits_stay_finite():
    grid = TokenGrid(14, 14, (16, 16), 1)
    layer, row = random_layer(grid, 2, 64, device="cuda")
    layer = dataclasses.replace(layer, q=layer.q * 30)  # logits of several hundred: rows are nearly one-hot
    got, expected = kernels.sums(layer, grid, received=True, row=row), naive(layer, grid, row)
    for field in dataclasses.fields(expected):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        torch.testing.assert_close(a.double(), b, rtol=2e-3, atol=2e-3)


def test_offsets_beyond_32_bits():
    grid = TokenGrid(32, 32, (16, 16), 1)
    batch = 2**31 // (16 * grid.tokens * 128) + 2
    if torch.cuda.mem_get_info()[0] < 6 * 2**32:
        pytest.skip("24 GiB of free GPU memory are needed to get beyond 32 bits")
    q, k = (torch.randn(batch, 16, grid.tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert q.numel() > 2**31
    layer = kernels.Layer("large", q, k, 128**-0.5)
    row = torch.rand(batch, grid.tokens, device="cuda")
    last = slice(batch - 1, batch)
    got = kernels.sums(layer, grid, received=True, row=row)
    alone = kernels.sums(layer.images(last), grid, received=True, row=row[last])
    for field in dataclasses.fields(got):
        torch.testing.assert_close(getattr(got, field.name)[last], getattr(alone, field.name))


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 4, "global_pool": "avg"}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_the_row_blocks_on_a_model(dtype, options, launches, monkeypatch):
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", img_size=(160, 224), depth=4, **options).cuda().eval()
    with torch.no_grad():
        for block in model.blocks:  # attention far from uniform
            block.attn.qkv.weight.mul_(8)
    images = torch.randn(3, 3, 160, 224, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", dtype, enabled=dtype != torch.float32), capture(model) as attn:
        model(images)

    statistics = {
        "summary": lambda: attention.summary(attn),
        "renormalized": lambda: attention.summary(attn, renormalize=True),
        "mean_distance": lambda: attention.Summary({"mean_distance": attention.mean_distance(attn)}, 3),
        "received": lambda: attention.Summary({"received": attention.received(attn)}, 3),
        "rollout": lambda: attention.Summary({"rollout": attention.rollout(attn, query=(3, 5))}, 3),
    }
    fused = {name: statistic() for name, statistic in statistics.items()}
    assert len(launches) == 4 * len(statistics), "attention.summary and the others did not use the kernels"
    monkeypatch.setattr(kernels, "enabled", False)
    for name, statistic in statistics.items():
        error = errors(fused[name], statistic())
        assert max(error.values()) < 1e-4, (name, error)
    assert len(launches) == 4 * len(statistics)


def test_what_no_kernel_knows_takes_the_rows(launches):
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).cuda().eval()
    with torch.no_grad(), capture(model) as attn:
        model(torch.randn(2, 3, 64, 64, device="cuda"))
    assert attention.rollout(attn, head_fusion="max").isfinite().all()
    assert attention.rollout(attn, discard=0.5).isfinite().all()
    assert not launches


@pytest.mark.filterwarnings("default")
def test_gives_way_with_one_warning(monkeypatch):
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).cuda().eval()
    with torch.no_grad(), capture(model) as attn:
        model(torch.randn(2, 3, 64, 64, device="cuda"))
    fused = attention.summary(attn)

    def fail(*_):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(kernels, "_compiled", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = attention.summary(attn)
    assert len([w for w in caught if "out of shared memory" in str(w.message)]) == 1
    assert max(errors(fused, rows).values()) < 1e-4
