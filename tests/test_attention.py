"""Statistics equal closed forms and naive implementations that hold every map."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import Largest, captured, refuses

from vitlens import TokenGrid, attention
from vitlens.recorder import fused
from vitlens.recorder.record import Layer


class Maps(list):
    """A capture of given logits of attention, or of their maps. One-hot keys turn queries into logits."""

    model_name = "given maps"

    def __init__(self, maps, grid, logits=False):
        self.grid, eye = grid, torch.eye(grid.tokens)
        for a in maps if logits else [a.double().clamp_min(1e-300).log() for a in maps]:
            self.append(Layer(str(len(self)), a, eye.to(a.dtype).expand(a.shape), 1.0))


@pytest.fixture
def attn(vit):
    return captured(vit(), torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))


def one_hot(grid, index):
    row = torch.zeros(grid.tokens)
    row[index] = 1
    return row


def given(a, grid, readout=0):
    a = torch.as_tensor(a, dtype=torch.float64)
    grid = TokenGrid(
        grid.rows, grid.cols, grid.patch, grid.prefix, grid.image, one_hot(grid, readout)
    )
    return Maps([a.expand(1, 1, *a.shape[-2:])], grid)


SQUARE = TokenGrid(14, 14, (16, 16), prefix=1)
WIDE = TokenGrid(14, 20, (16, 8), prefix=5)


def test_mean_distance_closed_forms():
    tokens = SQUARE.tokens
    uniform = torch.full((tokens, tokens), 1 / tokens)
    distance = lambda a, **kw: attention.mean_distance(given(a, SQUARE), **kw).item()  # noqa: E731
    assert distance(uniform) == pytest.approx(115.901, abs=5e-4)
    assert distance(uniform, renormalize=True) == pytest.approx(116.492, abs=5e-4)
    sink = torch.full((tokens, tokens), 0.1 / 196)
    sink[:, 0] = 0.9
    assert distance(sink) == pytest.approx(11.649, abs=5e-4)
    assert distance(sink, renormalize=True) == pytest.approx(116.492, abs=5e-4)
    right, below = torch.arange(WIDE.tokens), torch.arange(WIDE.tokens)
    right[5:] += torch.arange(280) % 20 < 19  # each patch looks at its neighbor
    below[5:-20] += 20
    for neighbor, expected in ((right, 8 * 19 / 20), (below, 16 * 13 / 14)):
        got = attention.mean_distance(given(torch.eye(WIDE.tokens)[neighbor], WIDE))
        assert got.item() == pytest.approx(expected, rel=1e-9)


def test_entropy_and_received_closed_forms():
    tokens = WIDE.tokens
    uniform, identity = torch.full((tokens, tokens), 1 / tokens), torch.eye(tokens)
    assert attention.entropy(given(uniform, WIDE)).item() == pytest.approx(
        math.log(tokens), rel=1e-12
    )
    assert attention.entropy(given(identity, WIDE)).item() == pytest.approx(0, abs=1e-9)
    to_seven = one_hot(WIDE, 5 + 7).expand(tokens, -1)
    for maps, expected in (
        (uniform, torch.full((280,), 1 / tokens)),
        (to_seven, one_hot(WIDE, 5 + 7)[5:]),
    ):
        torch.testing.assert_close(
            attention.received(given(maps, WIDE))[0, 0, 0], expected.double()
        )


def test_sinks_exceed_multiples_of_median_and_uniform():
    """Uniform attention is 1/285, so a sink needs 0.0175. Shares are means over heads and all queries."""

    def found(shares, base):
        heads = torch.full((1, 2, WIDE.tokens, WIDE.tokens), base, dtype=torch.float64)
        for patch, share in shares.items():  # all of it comes from one head
            heads[:, 1, :, WIDE.prefix + patch] = 2 * share - base
        heads[..., 0] += 1 - heads.sum(-1)
        mask = attention.sinks(Maps([heads], WIDE))
        assert mask.shape == (1, 1, WIDE.patches)
        return mask[0, 0].nonzero().flatten().tolist()

    assert found({3: 0.0174, 7: 0.0177}, base=0.0002) == [7], "5 times uniform"
    assert found({7: 0.0610}, base=0.0030) == [7]
    assert found({7: 0.0590}, base=0.0030) == [], "20 times the median"


def test_mean_distance_renormalizes_without_underflow():
    """Attention to the patches underflows in float32 next to such a class token, but its distribution is known."""
    logits, distances = torch.randn(1, 1, 25, 25, generator=torch.Generator().manual_seed(0)), []
    for sink in (0.0, 200.0):
        logits[..., 0] = sink
        maps = Maps([logits.clone()], TokenGrid(4, 6, (16, 16), 1), logits=True)
        distances.append(attention.mean_distance(maps, renormalize=True).item())
    assert distances[1] == pytest.approx(distances[0], rel=1e-5)


def test_entropy_has_no_cancellation():
    """Logits with a large common offset have the same softmax and entropy."""
    logits = torch.randn(1, 1, 25, 25, generator=torch.Generator().manual_seed(0))
    expected = torch.special.entr(logits.double().softmax(-1)).sum(-1).mean().item()
    for offset in (0.0, 1e3):
        maps = Maps([logits + offset], TokenGrid(4, 6, (16, 16), 1), logits=True)
        assert attention.entropy(maps).item() == pytest.approx(expected, rel=1e-4)


def test_rollout_of_uniform_layers():
    """L uniform layers give 2^-L·I + (1 − 2^-L)/T."""
    tokens, depth = WIDE.tokens, 4
    uniform = torch.full((1, 1, tokens, tokens), 1 / tokens)
    grid = TokenGrid(14, 20, (16, 8), 5, None, one_hot(WIDE, 0))
    got = attention.rollout(Maps([uniform] * depth, grid))
    torch.testing.assert_close(
        got, torch.full((1, 14, 20), (1 - 2.0**-depth) / tokens, dtype=torch.float64)
    )
    query = attention.rollout(Maps([uniform] * depth, grid), query=(3, 17))[0]
    assert query[3, 17].item() == pytest.approx(2.0**-depth + (1 - 2.0**-depth) / tokens)
    assert query[4, 17].item() == pytest.approx((1 - 2.0**-depth) / tokens)


def random_maps(grid, layers=3, batch=2, heads=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            3
            * torch.randn(
                batch, heads, grid.tokens, grid.tokens, generator=generator, dtype=torch.float64
            )
        ).softmax(-1)
        for _ in range(layers)
    ]


def naive_rollout(maps, start, fusion="mean", discard=0.0):
    """Abnar and Zuidema's joint attention in NumPy, with the full product."""
    joint = None
    for a in maps:
        fused = getattr(a.numpy(), {"mean": "mean", "max": "max", "min": "min"}[fusion])(axis=1)
        dropped = int(discard * fused.shape[-1])
        order = np.argsort(fused, axis=-1)[..., :dropped]
        fused = fused.copy()
        np.put_along_axis(fused, order, 0.0, axis=-1)
        fused = fused + np.eye(fused.shape[-1])
        fused = fused / fused.sum(axis=-1, keepdims=True)
        joint = fused if joint is None else fused @ joint
    return torch.from_numpy(np.einsum("t,btk->bk", start.double().numpy(), joint))


@pytest.mark.parametrize("discard", (0.0, 0.5))
@pytest.mark.parametrize("fusion", ("mean", "max", "min"))
def test_rollout_equals_the_full_product(fusion, discard, monkeypatch):
    """Random layers do not commute, so the order matters."""
    monkeypatch.setitem(attention.BLOCK, "cpu", 500)  # several blocks of rows
    maps = random_maps(TokenGrid(4, 6, (16, 16), 2))
    start = torch.zeros(26)
    start[:2] = 0.5
    grid = TokenGrid(4, 6, (16, 16), 2, None, start)
    got = attention.rollout(Maps(maps, grid), head_fusion=fusion, discard=discard)
    torch.testing.assert_close(
        got, grid.image_map(naive_rollout(maps, start, fusion, discard)), rtol=1e-9, atol=1e-12
    )
    backwards = grid.image_map(naive_rollout(maps[::-1], start, fusion, discard))
    assert (got - backwards).abs().max() > 1e-3
    query = attention.rollout(Maps(maps, grid), query=(3, 1), head_fusion=fusion, discard=discard)
    expected = naive_rollout(maps, one_hot(grid, grid.index(3, 1)), fusion, discard)
    torch.testing.assert_close(query, grid.image_map(expected), rtol=1e-9, atol=1e-12)


def test_read_equals_a_weighted_sum_of_rows(attn, block=3):
    layer, row = (
        attn[1],
        torch.rand(2, 17, generator=torch.Generator().manual_seed(1)) * (torch.arange(17) % 3 > 0),
    )
    torch.testing.assert_close(
        layer.read(row, block), torch.einsum("bq,bhqk->bhk", row, layer.weights())
    )
    torch.testing.assert_close(layer.read(one_hot(attn.grid, 5)), layer.weights(5)[:, :, 0])
    q, k, row = (tensor.clone().requires_grad_() for tensor in (layer.q, layer.k, row))
    replace(layer, q=q, k=k).read(row, block)[..., 3].sum().backward()
    assert all(tensor.grad.abs().max() > 0 for tensor in (q, k, row))


def test_rows_reuse_memory_and_skip_queries(attn):
    for block in (5, 100):
        plain = list(attn[1].rows(block))
        for (queries, weights), (again, expected) in zip(
            attn[1].rows(block, reuse=True), plain, strict=True
        ):
            assert queries == again and torch.equal(weights, expected)
    starts = [
        queries.start for queries, _ in attn[1].rows(5, reuse=True, only=torch.arange(17) == 9)
    ]
    assert starts == [5]


def test_contrast_closed_forms():
    torch.manual_seed(0)
    maps = torch.rand(3, 8, 9, dtype=torch.float64) ** 4
    one = torch.zeros(4, 4).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(0.3))
    assert attention.contrast(torch.full((2, 7, 5), 0.1)).tolist() == pytest.approx([1, 1])
    assert attention.contrast(one).item() == pytest.approx(10)
    assert attention.contrast(one[1:3, 2:]).item() == pytest.approx(4)
    assert attention.contrast(torch.zeros(4, 4)).item() == 1
    for values, value in zip(maps.flatten(1).numpy(), attention.contrast(maps), strict=True):
        lorenz = np.cumsum([0, *np.sort(values)[::-1]]) / values.sum()
        assert value.item() == pytest.approx(10 * np.interp(0.1, np.linspace(0, 1, 73), lorenz))
    split = maps.repeat_interleave(3, 1).repeat_interleave(2, 2)
    torch.testing.assert_close(attention.contrast(5 * split), attention.contrast(maps))


def naive_summary(attn, renormalize):
    grid, maps = attn.grid, [layer.weights().double() for layer in attn]
    patches = [a[:, :, grid.prefix :, grid.prefix :] for a in maps]
    share = [p / p.sum(-1, keepdim=True) if renormalize else p for p in patches]
    distances = grid.distances(dtype=torch.float64)
    return (
        torch.stack([(p * distances).sum((-1, -2)) / grid.patches for p in share], 1),
        torch.stack([torch.special.entr(a).sum(-1).mean(-1) for a in maps], 1),
        torch.stack([a.mean(-2)[..., grid.prefix :] for a in maps], 1),
    )


@pytest.mark.parametrize(
    "name, kwargs, block, renormalize",
    [
        ("vit_tiny_patch16_224", dict(reg_tokens=4, global_pool="avg"), 2**20, False),
        ("vit_tiny_patch16_224", dict(global_pool="map", class_token=False), 500, True),
        ("beit_base_patch16_224", {}, 500, False),
        ("deit_tiny_distilled_patch16_224", {}, 2**20, True),
    ],
)
def test_summary_equals_a_naive_implementation(vit, monkeypatch, name, kwargs, block, renormalize):
    monkeypatch.setitem(
        attention.BLOCK, "cpu", block
    )  # 500: several blocks of rows, one image at a time
    attn = captured(
        vit(name=name, dtype=torch.float64, img_size=(96, 160), **kwargs),
        torch.randn(3, 3, 96, 160, generator=torch.Generator().manual_seed(3)).double(),
    )
    got = attention.summary(attn, renormalize=renormalize)
    distance, entropy, received = naive_summary(attn, renormalize)
    torch.testing.assert_close(got.mean_distance, distance, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.entropy, entropy, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.received, received, rtol=1e-9, atol=1e-12)
    readout = attn.grid.readout.expand(3, -1) if attn.grid.readout.dim() == 1 else attn.grid.readout
    maps = [layer.weights() for layer in attn]
    for i in range(3):
        expected = naive_rollout([a[i : i + 1] for a in maps], readout[i])
        torch.testing.assert_close(
            got.rollout[i : i + 1], attn.grid.image_map(expected), rtol=1e-6, atol=1e-9
        )
    assert got.images == 3
    torch.testing.assert_close(attention.mean_distance(attn, renormalize), got.mean_distance)
    torch.testing.assert_close(attention.entropy(attn), got.entropy)
    torch.testing.assert_close(attention.received(attn), got.received)
    torch.testing.assert_close(attention.rollout(attn), got.rollout)


def test_rollout_requires_a_readout_or_a_query(vit):
    attn = captured(vit(global_pool="max"), torch.randn(1, 3, 64, 64))
    assert attention.rollout(attn, query=(0, 3)).shape == (1, 4, 4)
    assert attention.summary(attn).rollout is None


def test_mean_over_equals_the_mean_of_summaries(vit):
    model = vit().train()
    x = torch.randn(5, 3, 64, 64, generator=torch.Generator().manual_seed(7))
    attn = captured(model, x)
    whole = attention.summary(attn)
    got = attention.mean_over(model, [(x[:2], torch.zeros(2)), (x[2:3],), (x[3:], 0)])
    assert got.images == 5 and model.training
    for name in ("mean_distance", "entropy", "received", "rollout"):
        torch.testing.assert_close(
            getattr(got, name), getattr(whole, name).double().mean(0), rtol=1e-4, atol=1e-5
        )


def test_summary_to_pandas_by_image_has_rows_of_each_image(attn):
    summary = attention.summary(attn, "entropy", "mean_distance")
    count, layers, heads = summary.entropy.shape
    names = [f"{number}.png" for number in range(count)]
    table = summary.to_pandas(by="image", images=names)
    assert table.columns.tolist() == ["image", "layer", "head", "entropy", "mean_distance"]
    assert len(table) == count * layers * heads
    for row in table.itertuples():
        place = names.index(row.image), row.layer, row.head
        assert row.entropy == summary.entropy[place].item()
        assert row.mean_distance == summary.mean_distance[place].item()
    assert summary.to_pandas(by="image").image.unique().tolist() == list(range(count))
    refuses("got 1", summary.to_pandas, by="image", images=["a"])
    refuses("must be one of head, image", summary.to_pandas, by="layer")
    mean = attention.Summary({"entropy": summary.entropy.mean(0)}, count, ("entropy",))
    refuses(f"means over {count} images", mean.to_pandas, by="image")


def test_summary_to_pandas_has_a_row_for_each_head(vit, attn):
    summary = attention.summary(attn)
    table = summary.to_pandas()
    assert table.columns.tolist() == ["layer", "head", "mean_distance", "entropy"]
    layers, heads = summary.entropy.shape[1:]
    assert len(table) == layers * heads and len(repr(summary)) < 250
    for row in table.itertuples():
        assert row.entropy == pytest.approx(
            summary.entropy[:, row.layer, row.head].mean().item(), rel=1e-6
        )
    mean = attention.mean_over(vit(), [torch.zeros(2, 3, 64, 64)]).to_pandas()
    assert mean.columns.tolist() == table.columns.tolist()


def test_summary_allocates_no_full_map(vit, monkeypatch):
    """No tensor of T × T numbers is allocated at 1,025 tokens."""
    monkeypatch.setitem(attention.BLOCK, "cpu", 2**16)
    attn = captured(vit(img_size=512, depth=2), torch.randn(1, 3, 512, 512))
    with Largest() as largest:
        attention.summary(attn)
    assert 2**15 < largest.numbers <= 2**17 < 1025**2 / 8  # q itself has 98,400


class Peak(attention.Statistic):
    """A statistic defined by a user."""

    name, title = "peak", "largest weight of a query"

    def add(self, queries, logits, weights):
        self.sums.append(weights.amax(-1))


def test_summary_computes_every_row_of_statistics(vit, monkeypatch):
    monkeypatch.setitem(attention.STATISTICS, "peak", Peak())
    model, images = vit(), torch.randn(3, 3, 64, 64)
    attn = captured(model, images)
    expected = torch.stack([layer.weights().amax(-1).mean(-1) for layer in attn], 1)
    everything = attention.summary(attn)
    assert list(everything.values) == ["mean_distance", "entropy", "received", "rollout", "peak"]
    torch.testing.assert_close(everything.peak, expected)
    assert list(attention.summary(attn, "peak", Peak()).values) == ["peak"]
    means = attention.mean_over(model, images.split(1), "peak", "entropy")
    torch.testing.assert_close(means.peak.float(), expected.mean(0))
    assert means.images == 3 and list(means.values) == ["peak", "entropy"]


def unread(vit):
    """A capture without a read-out."""
    return captured(vit(global_pool="max"), torch.randn(1, 3, 64, 64))


def measured(vit, name):
    return attention.summary(captured(vit(), torch.randn(1, 3, 64, 64)), name)


TWO_SIZES = [torch.randn(1, 3, 64, 96), torch.randn(1, 3, 96, 64)]  # as many patches
REFUSALS = (
    (lambda vit: attention.contrast(torch.rand(3, 8, 9) - 0.1), ValueError, "0 or more"),
    (lambda vit: attention.rollout(unread(vit)), ValueError, "no weighted sum .*query="),
    (
        lambda vit: attention.mean_over(vit(), [{"image": torch.zeros(5, 3, 64, 64)}]),
        ValueError,
        "tensor .* got dict",
    ),
    (
        lambda vit: attention.mean_over(vit(), [torch.zeros(1, 3, 80, 80)]),
        ValueError,
        "not take this size.* got 80 × 80",
    ),
    (
        lambda vit: attention.mean_over(vit(dynamic_img_size=True), TWO_SIZES),
        ValueError,
        "one size, got .*64, 96.* and .*96, 64",
    ),
    (lambda vit: measured(vit, "rollout").to_pandas(), ValueError, "one number per head"),
    (
        lambda vit: measured(vit, "received").entropy,
        AttributeError,
        "'entropy'.*received",
    ),
)
"""A call, its error and decisive words."""


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_attention_refuses(vit, call, error, words):
    refuses(words, call, vit, error=error)


KERNEL = -7.0
"""Value that the replaced kernels return, which no statistic has."""


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that apply everywhere and return `KERNEL`. Returns the list of their calls."""
    calls = []

    def fused_statistics(layers, grid, row):
        calls.append(row is not None)
        return {name: torch.tensor(KERNEL) for name in attention.STATISTICS}

    monkeypatch.setattr(fused, "applies", lambda layers: True)
    monkeypatch.setattr(fused, "fused_statistics", fused_statistics)
    return calls


def doubled(statistic: attention.Statistic) -> attention.Statistic:
    """A user's subclass of a built-in statistic, whose result is twice as large and keeps its name."""

    class Doubled(type(statistic)):
        def result(self):
            return 2 * super().result()

    return Doubled()


@pytest.mark.parametrize("name", attention.STATISTICS)
def test_subclass_of_a_statistic_is_computed_by_rows(attn, kernels, monkeypatch, name):
    own = doubled(attention.STATISTICS[name])
    assert own.in_kernels and isinstance(own, type(attention.STATISTICS[name]))
    computed = attention.summary(attn, own).values[name]
    assert not kernels
    monkeypatch.setattr(fused, "applies", lambda layers: False)
    expected = attention.summary(attn, attention.STATISTICS[name]).values[name]
    torch.testing.assert_close(computed, 2 * expected)


def test_subclass_of_a_statistic_beside_statistics_of_the_kernels(attn, kernels):
    own = doubled(attention.STATISTICS["entropy"])
    own.name = "own"
    statistics = [attention.STATISTICS[name] for name in ("entropy", "received")]
    values = attention.summary(attn, *statistics, own).values
    assert kernels == [False], "without a rollout, no row to start from"
    assert values["entropy"] == values["received"] == KERNEL
    assert values["own"].shape == (2, 3, 3) and (values["own"] > 0).all()


def test_own_statistic_that_claims_a_kernel_is_computed_by_rows(attn, kernels):
    class Own(Peak):
        name = "entropy"
        in_kernels = True

    assert (attention.summary(attn, Own()).entropy > 0).all()
    assert not kernels
