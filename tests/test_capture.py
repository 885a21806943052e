"""Captures equal explicit attention, change nothing, and refuse models and calls that they cannot show exactly."""

import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from support import Headed, Materialized, captured, refuses, unfused_maps
from torch.overrides import TorchFunctionMode

from vitlens import UnsupportedModelError, capture
from vitlens.attention import entropy, mean_distance, rollout
from vitlens.attribution import METHODS
from vitlens.recorder.multihead import MULTIHEAD, multihead_attention
from vitlens.recorder.precision import full_precision


def images(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "vit_medium_patch16_rope_reg1_gap_256", "beit_base_patch16_224"],
)
def test_capture_equals_timms_unfused_path(vit, name):
    model, x = vit(name=name, dtype=torch.float64), images(2, 3, 64, 64).double()
    for layer, expected in zip(captured(model, x), unfused_maps(model, x), strict=True):
        assert layer.weights().dtype == torch.float64
        torch.testing.assert_close(layer.weights(), expected, atol=1e-12, rtol=1e-10)


def test_capture_changes_neither_model_nor_logits(vit):
    model = vit()
    x = images(2, 3, 64, 64)
    before = {k: (id(v), v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    sdpa, forward = F.scaled_dot_product_attention, model.forward
    plain = model(x)
    with capture(model) as attn:
        logits = model(x)
    assert torch.equal(plain, logits) and logits.requires_grad
    assert F.scaled_dot_product_attention is sdpa and model.forward == forward
    assert not model._forward_hooks and not model._forward_pre_hooks
    after = model.state_dict(keep_vars=True)
    assert all(id(after[k]) == i and torch.equal(after[k], v) for k, (i, v) in before.items())
    assert not attn[0].q.requires_grad
    assert [layer.name for layer in attn] == [f"blocks.{i}.attn" for i in range(3)]


def test_capture_measures_rectangular_cut_and_padded_grids(vit):
    attn = captured(vit(img_size=(230, 330)), images(1, 3, 230, 330))
    grid = attn.grid
    assert (grid.rows, grid.cols, grid.patch, grid.image, grid.cut) == (
        14,
        20,
        (16, 16),
        (230, 330),
        (6, 10),
    )
    assert rollout(attn).shape == (1, 14, 20)
    grid = captured(vit(dynamic_img_size=True, dynamic_img_pad=True), images(1, 3, 230, 330)).grid
    assert (grid.rows, grid.cols, grid.image, grid.padded) == (15, 21, (230, 330), (10, 6))
    grid = captured(vit(dynamic_img_size=True), images(1, 3, 224, 320)).grid  # built for 64 px
    assert (grid.rows, grid.cols) == (14, 20)


def test_capture_places_a_bright_patch_at_its_row_and_column(vit):
    """The patch whose attention differs has the row and column of the bright patch, not transposed."""
    model = vit(img_size=(224, 320), global_pool="avg", class_token=False)
    x = torch.zeros(1, 3, 224, 320)
    x[:, :, 16 * 3 : 16 * 4, 16 * 17 : 16 * 18] = 8.0
    with torch.no_grad():
        model.pos_embed.zero_()
        with capture(model) as attn:
            model(x)
    weights = attn.grid.image_map(attn[0].weights().mean((0, 1, 2)))
    odd = (weights - weights.median()).abs()
    assert divmod(odd.argmax().item(), 20) == (3, 17)


def test_capture_computes_statistics_of_bfloat16_in_float32(vit):
    model, x = vit(), images(2, 3, 64, 64)
    exact = captured(model, x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), capture(model) as auto:
        model(x)
    model = model.bfloat16()
    low = captured(model, x.bfloat16())
    for attn in (auto, low):
        assert attn[0].q.dtype == torch.bfloat16 and attn[0].weights().dtype == torch.float32
        assert (attn[0].weights().sum(-1) - 1).abs().max() < 1e-6  # the softmax is taken in float32
        torch.testing.assert_close(mean_distance(attn), mean_distance(exact), rtol=3e-2, atol=0.3)


def test_capture_runs_compiled_models_eagerly(vit):
    model, x = vit(), images(1, 3, 64, 64)
    runs = []

    def counting(graph, _):
        return lambda *inputs: runs.append(1) or graph(*inputs)

    compiled = torch.compile(model, backend=counting)
    with torch.no_grad():
        plain = compiled(x)
        with capture(model) as expected:
            model(x)
        for handle in (compiled, model):  # either may be captured
            with capture(handle) as attn:
                compiled(x)
            assert all(torch.equal(a.q, b.q) for a, b in zip(attn, expected, strict=True))
        assert len(runs) == 1  # uncompiled inside the blocks
        assert torch.equal(compiled(x), plain) and len(runs) == 2  # and compiled again after them


def test_capture_ignores_other_models_in_the_block(vit):
    mine, other = vit(), vit(seed=1)
    with torch.no_grad(), capture(mine) as attn:
        other(images(1, 3, 64, 64, seed=5))
        mine(F.interpolate(images(1, 3, 32, 48), (64, 64)))
        other(images(1, 3, 64, 64, seed=6))
    expected = captured(mine, F.interpolate(images(1, 3, 32, 48), (64, 64)))
    assert all(torch.equal(a.q, b.q) for a, b in zip(attn, expected, strict=True))
    assert attn.grid.image == (64, 64)


@pytest.mark.parametrize(
    "name, kwargs, calls, frozen",
    [
        ("vit_small_patch16_18x2_224", {}, 2, False),
        ("beit_base_patch16_224", {}, 1, True),
        ("vit_tiny_patch16_224", dict(global_pool="map", class_token=False), 1, False),
    ],
)
def test_differentiate_equals_gradients_of_explicit_maps(vit, name, kwargs, calls, frozen):
    model, x = vit(name=name, dtype=torch.float64, **kwargs), images(2, 3, 64, 64).double()
    with Materialized() as explicit:
        score = model(x)[:, 3].sum()
    expected = torch.autograd.grad(score, explicit.maps)
    model.requires_grad_(not frozen)
    plain = model(x)
    with capture(model, gradients=True) as attn:
        logits = model(x)
    assert torch.equal(logits, plain) and not attn[0].q.requires_grad
    attn.differentiate(logits[:, 3].sum())
    assert all(p.grad is None for p in model.parameters())
    for i, layer in enumerate([*attn, *([attn.pool] if attn.pool else [])]):
        gradient = torch.cat(expected[calls * i : calls * (i + 1)], 1)
        torch.testing.assert_close(layer.weights_gradient(), gradient, rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(
            layer.weights_gradient([0]), gradient[:, :, :1], rtol=1e-9, atol=1e-15
        )
        assert not layer.output.requires_grad


def test_weights_selects_queries(vit):
    attn = captured(vit(), images(2, 3, 64, 64))
    layer, full = attn[1], attn[1].weights()
    assert full.shape == (2, 3, 17, 17)
    for five in (
        5,
        np.int64(5),
        torch.tensor(5),
        torch.tensor([5]),
        slice(5, 6),
    ):  # one number keeps the axis
        torch.testing.assert_close(layer.weights(five), full[:, :, 5:6])
    for two in ([2, 5], torch.tensor([2, 5]), torch.isin(torch.arange(17), torch.tensor([2, 5]))):
        torch.testing.assert_close(layer.weights(two), full[:, :, [2, 5]])
    blocks = list(layer.rows(5))
    assert [queries.stop - queries.start for queries, _ in blocks] == [5, 5, 5, 2]
    torch.testing.assert_close(torch.cat([rows for _, rows in blocks], 2), full)


def test_read_requires_a_weight_for_every_token(vit):
    """A row of the patches alone would be shifted by the prefix."""
    layer = captured(vit(), images(2, 3, 64, 64))[1]
    one_hot = torch.eye(17)
    for row in (one_hot[5], one_hot[5][None], one_hot[[5, 5]]):
        torch.testing.assert_close(layer.read(row), layer.weights(5)[:, :, 0])


def test_capture_applies_boolean_masks(vit):
    model = vit()
    allowed = torch.ones(17, 17, dtype=torch.bool).tril()
    with torch.no_grad(), capture(model, values=True) as attn:
        model(images(1, 3, 64, 64), attn_mask=allowed)
    assert (attn[0].weights()[:, :, ~allowed] == 0).all()
    torch.testing.assert_close(attn[0].weights() @ attn[0].v, attn[0].output, atol=1e-5, rtol=1e-4)
    naive = attn[0].weights().clamp_min(1e-38)
    torch.testing.assert_close(
        entropy(attn)[:, 0], -(attn[0].weights() * naive.log()).sum(-1).mean(-1)
    )


def test_capture_takes_the_grid_of_the_image_that_ran(vit):
    """Using parameters, embedding another image or padding before the forward does not set the grid."""
    model = vit(dynamic_img_size=True)
    with torch.no_grad(), capture(model) as attn:
        photo = images(1, 3, 64, 128).float().clamp(-1, 1)
        photo = photo.to(next(model.parameters()).device)
        model.patch_embed(photo)
        model(photo.transpose(2, 3))
    assert (attn.grid.rows, attn.grid.cols, attn.grid.image) == (8, 4, (128, 64))
    attn = captured(model, F.pad(images(1, 3, 58, 90), (3, 3, 3, 3)))
    assert attn.grid.image == (64, 96) and attn.grid.cut == (0, 0)


def test_grid_of_hybrids_has_the_stride_of_the_backbone():
    """timm's ratio, image ÷ features, would give 15 pixels for a stride of 16 at an image size of 225."""
    for name, stride, size in (
        ("vit_small_r26_s32_224", 32, (230, 330)),
        ("vit_base_r50_s16_224", 16, (225, 225)),
    ):
        with torch.device("meta"):
            attn = captured(
                timm.create_model(name, img_size=size, depth=1).eval(), torch.empty(1, 3, *size)
            )
        assert attn.grid.patch == (stride, stride)
        assert (attn.grid.rows, attn.grid.cols) == tuple(-(-side // stride) for side in size)


def test_capture_takes_a_model_with_drop_path_in_eval_mode(vit):
    assert captured(vit(drop_path_rate=0.1), images(1, 3, 64, 64)).complete


def pooled(**kwargs):
    """A small SigLIP, with an attention pool and without a class token."""
    torch.manual_seed(0)
    small = dict(img_size=64, embed_dim=96, depth=3, num_heads=3) | kwargs
    return timm.create_model("vit_base_patch16_siglip_224", **small).eval()


def test_statistics_ignore_autocast():
    size = 480  # enough tokens for rows to share memory
    model, x = pooled(img_size=size, num_classes=10), torch.randn(1, 3, size, size)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with capture(model) as attn:
            model(x)
        inside = [
            attn[0].weights([3]),
            attn[0].read(torch.ones(attn.grid.tokens)),
            mean_distance(attn),
            rollout(attn),
        ]
    outside = [
        attn[0].weights([3]),
        attn[0].read(torch.ones(attn.grid.tokens)),
        mean_distance(attn),
        rollout(attn),
    ]
    for one, other in zip(inside, outside, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)
    torch.testing.assert_close(
        attn.grid.readout, attn.pool.weights([0]).mean((1, 2)), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("fp32_precision", [False, True])
def test_full_precision_switches_tf32_off(fp32_precision):
    """Only GPUs round to TF32, but the settings exist everywhere, in newer versions of PyTorch under two names."""
    products = torch.backends.cuda.matmul
    newer = hasattr(products, "fp32_precision")
    rounded = (
        (lambda: products.fp32_precision == "tf32") if newer else (lambda: products.allow_tf32)
    )
    try:
        if fp32_precision and newer:
            products.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        assert rounded()
        with full_precision(torch.device("cpu")):
            assert not rounded()
        assert rounded()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not rounded() and torch.get_float32_matmul_precision() == "highest"


def test_capture_refuses_a_query_without_visible_keys(vit):
    """Its softmax would be 0 / 0."""
    for mask, hidden in (
        (torch.ones(17, 17, dtype=torch.bool), False),
        (torch.zeros(17, 17), -torch.inf),
    ):
        model, x = vit(), images(1, 3, 64, 64)
        attend = model.blocks[1].attn.forward
        model.blocks[1].attn.forward = lambda x, attend=attend, mask=mask, **_: attend(
            x, attn_mask=mask
        )
        mask[3, 1:] = hidden
        attn = captured(model, x)
        assert attn[1].weights().isfinite().all() and attn[1].weights()[:, :, 3, 0].eq(1).all()
        mask[3] = hidden
        refuses(
            "mask of layer 1 leaves a query without a visible key",
            captured,
            model,
            x,
            error=UnsupportedModelError,
        )


def cut(model, x, match):
    """Assert that `differentiate` raises."""
    with capture(model, gradients=True) as attn:
        logits = model(x)
    refuses(match, attn.differentiate, logits.sum(), error=(ValueError, RuntimeError))


def test_differentiate_refuses_a_cut_graph(vit):
    """Autograd would return the gradients of the other branch only."""
    for where, how, frozen in (
        ("blocks.1.mlp", "no_grad", True),
        ("blocks.2.mlp.fc1", "detach", False),
        ("norm", "detach", True),
    ):
        model, x = vit().requires_grad_(not frozen), images(1, 3, 64, 64)
        plain, layer = model(x), model.get_submodule(where)
        forward = layer.forward
        layer.forward = (
            torch.no_grad()(forward) if how == "no_grad" else lambda x, f=forward: f(x).detach()
        )
        with torch.no_grad(), capture(model):
            assert torch.equal(model(x), plain)  # a capture without gradients works
        cut(model, x, rf"cut in {where}|does not lead back")


@pytest.mark.parametrize("how, frozen", [("no_grad", True), ("detach", False)])
def test_differentiate_refuses_attention_without_a_graph(vit, how, frozen):
    """Otherwise the graph would restart at its output."""
    model, x = vit().requires_grad_(not frozen), images(1, 3, 64, 64)
    inner = model.blocks[1].attn

    def forward(x, **_):
        parts = inner.qkv(x).reshape(*x.shape[:2], 3, 3, 32).permute(2, 0, 3, 1, 4).unbind(0)
        with torch.set_grad_enabled(how != "no_grad"):
            out = F.scaled_dot_product_attention(
                *(part.detach() if how == "detach" else part for part in parts)
            )
        return inner.proj(out.transpose(1, 2).reshape(x.shape))

    inner.forward = forward
    cut(model, x, "cut in the attention of layer 1")


def refuses_maps(model, x, match):
    """Assert that all methods that differentiate the blocks raise."""
    for name in METHODS:
        if name not in ("occlusion", "rollout", "grad_cam", "direct"):
            refuses(
                match,
                METHODS[name],
                model,
                x,
                error=(UnsupportedModelError, ValueError, RuntimeError),
            )


def skipped(block, skip=lambda x: x, attend=lambda x: x, mlp=lambda x: x):
    """The forward of a block, with a function on its skip connection and on the inputs of attention and MLP."""

    def forward(x, **_):
        x = skip(x) + block.attn(block.norm1(attend(x)))
        return x + block.mlp(block.norm2(mlp(x)))

    return forward


@pytest.mark.parametrize("way", ["skip", "mlp", "stream"])
def test_differentiate_names_the_block_that_detaches_the_stream(vit, way):
    """Even if only the skip connection or the input of the MLP is detached, while other paths have gradients."""
    for number in (1, 2):
        model, x = vit().requires_grad_(way != "mlp"), images(1, 3, 64, 64)
        block, plain = model.blocks[number], model(x)
        if way == "stream":
            forward = block.forward
            block.forward = lambda x, forward=forward, **options: forward(x.detach(), **options)
        else:
            block.forward = skipped(block)
            with capture(model, gradients=True) as attn:
                logits = model(x)
            attn.differentiate(logits.sum())
            block.forward = skipped(block, **{way: torch.Tensor.detach})
        assert torch.equal(model(x), plain) and METHODS["occlusion"](model, x).isfinite().all()
        cut(model, x, rf"cut in blocks\.{number} ")
        refuses_maps(
            model, x, rf"cut in blocks\.{number}[ .]|parts miss the logit|does not require grad"
        )


def test_differentiate_names_the_layer_without_gradients(vit):
    model, x = vit(), images(2, 3, 64, 64)
    torch.nn.init.zeros_(model.blocks[1].attn.proj.weight)
    for name in ("gradient_rollout", "relevance"):
        refuses("No gradient of .* reaches the attention of layer 1 ", METHODS[name], model, x)
    cut(model, x, "No gradient of the score reaches the attention of layer 1 ")


def test_differentiate_allows_detached_inputs_and_scores(vit):
    """Only tensors inside the model count."""
    model, x = vit(), images(2, 3, 64, 64).requires_grad_()
    with capture(model, gradients=True) as attn:
        logits = model((x * 2).detach())
        shown = logits.detach().softmax(-1)
        score = (logits * shown).sum() + (logits.detach() - logits).square().sum()
    attn.differentiate(score)
    assert attn[0].gradient.any()


def test_differentiate_refuses_quantized_layers(vit):
    model, x = vit(), images(1, 3, 64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in model.blocks[1:]:
            block.mlp = torch.ao.quantization.quantize_dynamic(block.mlp, {torch.nn.Linear})
    assert len(captured(model, x)) == 3 and METHODS["occlusion"](model, x).isfinite().all()
    cut(model, x, r"cut in blocks\.1\.mlp\.fc1")
    refuses_maps(model, x, r"cut in blocks\.1\.mlp\.fc1|parts miss the logit")


@pytest.mark.parametrize(
    "options", [{}, {"need_weights": True}, {"pool": True, "bias": False}, {"kdim": 64}]
)
def test_multihead_attention_equals_pytorchs_function_bit_for_bit(options):
    torch.manual_seed(0)
    kdim = options.get("kdim", 48)
    module = torch.nn.MultiheadAttention(
        48, 3, bias=options.get("bias", True), kdim=kdim, vdim=kdim, batch_first=True
    )
    x, mask = torch.randn(2, 17, 48), torch.rand(17, 17) > 0.9
    keys = x if kdim == 48 else torch.randn(2, 17, kdim)
    inputs = (x[:, :2] if options.get("pool") else x, keys, keys)
    flags = dict(need_weights=options.get("need_weights", False))
    expected = module(*inputs, **flags)  # training mode calls the function
    calls = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is not MULTIHEAD:
                return func(*args, **(kwargs or {}))
            calls.append(func)
            return multihead_attention(
                lambda func, *args, **named: func(*args[:4], **named), *args, **kwargs
            )

    with Mode():
        output, weights = module(*inputs, **flags)
    assert calls and torch.equal(output, expected[0])
    assert weights is expected[1] is None or torch.equal(weights, expected[1])
    for refused in (
        dict(key_padding_mask=torch.zeros(2, 17, dtype=torch.bool)),
        dict(attn_mask=mask),
    ):
        with Mode(), pytest.raises(UnsupportedModelError, match="called with a mask"):
            module(*inputs, **refused)


def test_capture_finds_the_only_model_inside_a_module(vit):
    """Its read-out is left out where the module may pool the tokens itself."""
    x = images(2, 3, 64, 64)
    for pools in (False, True):
        model = Headed(vit(num_classes=0), pools, 0.5).eval()
        with torch.no_grad(), capture(model) as attn:
            logits = model(x)
        expected = captured(model.backbone, x / 2)
        assert torch.equal(logits, model(x)) and not model.backbone._forward_hooks
        assert attn.grid == expected.grid and torch.equal(attn[1].weights(), expected[1].weights())
        if pools:
            assert attn.grid.readout is None
        else:
            torch.testing.assert_close(rollout(attn), rollout(expected))


def test_weights_of_one_head_and_one_query(vit):
    for options in (
        {},
        dict(name="beit_base_patch16_224"),
        dict(name="vit_small_patch16_18x2_224"),
    ):
        attn = captured(vit(**options, img_size=(64, 96)), images(2, 3, 64, 96))
        layer, position = attn[1], attn.grid.index(2, 3)
        whole = layer.weights()
        assert torch.equal(layer.weights(head=2), whole[:, 2])
        for query in ((2, 3), position):
            torch.testing.assert_close(layer.weights(query=query), whole[:, :, position])
            torch.testing.assert_close(layer.weights(head=-1, query=query), whole[:, -1, position])


class TweakedAttention(timm.layers.Attention):
    def forward(self, x, **kwargs):
        return super().forward(x.flip(1), **kwargs)


@pytest.fixture(scope="module")
def given(vit):
    """Models, images and captures of the calls in REFUSALS."""
    model, x, tweaked, mixed, masked = vit(), images(1, 3, 64, 64), vit(), vit(), vit()
    tweaked.blocks[1].attn, mixed.blocks[1].attn = TweakedAttention(96, 3), torch.nn.Identity()
    masked.patch_drop = torch.nn.Identity()
    masked.patch_drop.forward = lambda x: x[:, :9]
    timm.layers.set_fused_attn(False)
    try:
        unfused = vit()
    finally:
        timm.layers.set_fused_attn(True)
    with capture(model, values=True) as plain:
        plain_score = model(x).sum()
    with capture(model, gradients=True) as spent:
        spent_score = model(x).sum()
    spent.differentiate(spent_score)
    return SimpleNamespace(
        model=model,
        x=x,
        tweaked=tweaked,
        mixed=mixed,
        masked=masked,
        unfused=unfused,
        pair=torch.nn.ModuleDict(
            {"teacher": vit(), "student": torch.nn.Sequential(torch.nn.Identity(), vit())}
        ),
        training={
            rate: vit(**{rate: 0.1}).train()
            for rate in ("attn_drop_rate", "patch_drop_rate", "drop_path_rate")
        },
        dropping=with_functional_dropout(vit()),
        naflex=timm.create_model(
            "naflexvit_base_patch16_gap", depth=1, embed_dim=96, num_heads=3
        ).eval(),
        patches={
            "patches": torch.randn(1, 10, 768),
            "patch_coord": torch.zeros(1, 10, 2, dtype=torch.long),
            "patch_valid": torch.ones(1, 10, dtype=torch.bool),
        },
        others={name: tensor.clone() for name, tensor in model.state_dict().items()},
        attn=captured(model, x),
        pooled=captured(vit(name="vit_base_patch16_siglip_224"), x),
        kinds=[
            captured(vit(name=name), x)[1]
            for name in (
                "vit_tiny_patch16_224",
                "beit_base_patch16_224",
                "vit_small_patch16_18x2_224",
            )
        ],
        plain=plain,
        plain_score=plain_score,
        spent=spent,
        spent_score=spent_score,
    )


def with_functional_dropout(model):
    """The model, with dropout of attention weights in its layer 1 without a dropout module."""
    inner, attend = model.blocks[1].attn, F.scaled_dot_product_attention

    def forward(x, **_):
        parts = inner.qkv(x).reshape(*x.shape[:2], 3, 3, 32).permute(2, 0, 3, 1, 4)
        return attend(*parts.unbind(0), dropout_p=0.2)

    inner.forward = forward
    return model


def enter(model):
    capture(model).__enter__()


def run_captured(model, *inputs, times=1, **options):
    """Run the model in a capture, not at all if `times` is 0."""
    with capture(model):
        for _ in range(times):
            model(*inputs, **options)


def embed_captured(model, x):
    with capture(model):
        model.patch_embed(x)


def run_captured_in_a_thread(model, x):
    with capture(model):
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()


def run_captured_with_parameters(model, parameters, x):
    with capture(model):
        torch.func.functional_call(model, parameters, x)


UNSUPPORTED = (
    # models
    (lambda g: enter(torch.nn.TransformerEncoderLayer(32, 2)), "MultiheadAttention"),
    (lambda g: enter(g.pair), r"2 Vision Transformers \('teacher', 'student\.1'\)"),
    (lambda g: enter(g.tweaked), "layer 1 .*TweakedAttention.* not support"),
    (lambda g: enter(g.mixed), r"layer 1 \(timm.*Block\) has no supported attention"),
    (lambda g: enter(g.unfused), "without fused attention"),
    (lambda g: enter(g.training["attn_drop_rate"]), r"in training mode .*model\.eval\(\)"),
    (lambda g: enter(g.training["patch_drop_rate"]), r"in training mode .*model\.eval\(\)"),
    (lambda g: enter(g.training["drop_path_rate"]), r"in training mode .*model\.eval\(\)"),
    # forwards
    (lambda g: run_captured(g.dropping, g.x), "layer 1 drops .*dropout 0.2"),
    (lambda g: run_captured(g.masked, g.x), "from 9 to 9 tokens.* 64 × 64"),
    (lambda g: run_captured(g.naflex, g.patches), "not an image"),
    (lambda g: run_captured(g.model, g.x, is_causal=True), "causal"),
    (lambda g: run_captured(g.model, g.x, times=2), "second time"),
    (lambda g: run_captured(g.model, times=0), "it was not run inside"),
    (lambda g: embed_captured(g.model, g.x), "it was not run inside"),
    (lambda g: run_captured_in_a_thread(g.model, g.x), "ran in another thread"),
    (lambda g: run_captured_with_parameters(g.model, g.others, g.x), "own parameters"),
)
"""Calls that raise UnsupportedModelError, and decisive words."""

REFUSALS = (
    *((call, UnsupportedModelError, words) for call, words in UNSUPPORTED),
    (lambda g: enter(g.attn), TypeError, "torch.nn.Module, got Attention"),
    # reading a layer
    (lambda g: g.attn[1].weights(17), IndexError, ""),
    (lambda g: g.attn[1].weights(limit=1e-6), MemoryError, "blocks.1.attn for 17 queries .* GiB"),
    (lambda g: g.attn[1].read(torch.eye(16)[5]), ValueError, r"blocks\.1\.attn.*got \(16,"),
    (lambda g: g.attn[1].read(torch.eye(17)[:3]), ValueError, r"17 queries.*got \(3, 17"),
    (lambda g: g.attn[1].read(torch.tensor(1.0)), ValueError, r"17 queries.*got \(\)"),
    (lambda g: g.pooled.pool.weights(query=(0, 0)), ValueError, "not tokens"),
    *(
        (
            lambda g, kind=kind, more=more: g.kinds[kind].weights([1, 2], query=(0, 0), **more),
            ValueError,
            r"not both, got \[1, 2\] and \(0, 0\)",
        )
        for kind in range(3)
        for more in ({}, {"head": 0})
    ),
    # gradients
    (
        lambda g: g.plain.differentiate(g.plain_score),
        RuntimeError,
        r"capture\(model, gradients=True\)",
    ),
    (lambda g: g.spent.differentiate(g.spent_score), RuntimeError, "once"),
)
"""A call, its error and decisive words."""


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_capture_refuses(given, call, error, words):
    refuses(words, call, given, error=error)
