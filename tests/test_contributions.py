"""Contributions sum to the logit in every kind of model and equal products of weights. Balanced gradients and lens."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import timm
import torch
from support import CHUNKS, QUICK, check_all, chunk, images, left_as_found, refuses

import vitlens_paper.variants  # noqa: F401  registers vitlens_vit with timm
from experiments.timm_support import read_table
from vitlens import UnsupportedModelError, capture, plot, report, stream
from vitlens.attribution import balanced_gradients, direct

SIZE = (64, 96)
MORE = {
    "vit_tiny_patch16_224": [
        dict(init_values=0.1),
        dict(qk_norm=True, qkv_bias=True),
        dict(scale_attn_norm=True, scale_mlp_norm=True),
        dict(proj_bias=False),
        dict(global_pool="avg", fc_norm=False),
        dict(global_pool="max"),
        dict(global_pool="avg", pool_include_prefix=True, reg_tokens=2),
        dict(global_pool="map", class_token=False),
    ],
    "naflexvit_base_patch16_gap": [
        dict(attn_gated=True),
        dict(swiglu_mlp=True),
        dict(global_pool="map"),
    ],
}
CASES = [(name, {}) for name in QUICK] + [
    (name, more) for name, all_ in MORE.items() for more in all_
]


def small(name, **more):
    """A tiny model in float64 without parameters that are 0 or 1, except for a hybrid's backbone, and images for it."""
    size = (56, 84) if "patch14" in name else SIZE
    for sizes in (
        dict(img_size=size, embed_dim=32),
        dict(embed_dim=32, num_kv_heads=(1, 2)),
        dict(img_size=64),
    ):
        try:
            model = (
                timm.create_model(name, depth=2, num_heads=2, num_classes=5, **sizes, **more)
                .eval()
                .double()
            )
            break
        except (TypeError, AssertionError, RuntimeError, ValueError):
            continue
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for owner, parameter in model.named_parameters():
            if "backbone" not in owner:
                parameter.normal_(std=0.2, generator=generator).add_(0.1)
    if isinstance(model, timm.models.NaFlexVit) or sizes.get("img_size") == size:
        return model, images(size=size)
    return model, images(
        size=sizes.get("img_size") and (64, 64) or model.pretrained_cfg["input_size"][1:]
    )


@pytest.mark.parametrize("part", range(4))
def test_contributions_sum_to_the_logit(part):
    check_all(lambda case: check_parts(*small(case[0], **case[1])), CASES[part::4])


def test_contributions_are_equal_in_inference_mode():
    model, x = small("vit_tiny_patch16_224")
    added, maps = stream.contributions(model, x, 1), stream.direct_by_head(model, x, 1)
    with torch.inference_mode():
        again, same = stream.contributions(model, x.clone(), 1), stream.direct_by_head(model, x, 1)
    assert added.biases.abs().min() > 1e-3
    torch.testing.assert_close(again.parts, added.parts)
    torch.testing.assert_close(same, maps)


def test_write_heads_shows_images_of_one_file_name(tmp_path, monkeypatch):
    model, x = small("vit_tiny_patch16_224")
    drawn, draw = [], plot.contributions
    monkeypatch.setattr(plot, "contributions", lambda maps: drawn.extend(maps) or draw(maps))
    added = stream.contributions(model, x[:1], 1)
    names = ("a/frame.png", "b/frame.png", "b/other.png")
    report.write_heads({name: ("tabby, cat", added) for name in names}, tmp_path)
    assert [title.splitlines()[0] for title in drawn] == [
        f"{name}: tabby" for name in (*names[:2], "other.png")
    ]
    number = f"{added.logits[0]:.1f}".replace("-", "−")
    assert all(f"logit {number}: heads" in title for title in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(CHUNKS))
def test_contributions_sum_to_the_logit_in_every_model(number):
    names = [name for name, row in read_table()[1].items() if row["stream"] == "yes"]
    check_all(lambda name: check_parts(*small(name)), chunk(names, number))


def test_contributions_sum_to_the_logit_for_other_heads():
    for layers in ([(32, 5)], [(32, 16), (16, 5)]):  # without a bias, and with pre-logits
        model, x = small("vit_tiny_patch16_224")
        model.head = torch.nn.Sequential(
            *(torch.nn.Linear(*sizes, bias=len(layers) > 1) for sizes in layers)
        ).double()
        check_parts(model, x)


def check_parts(model, x):
    with torch.no_grad():
        logits = model(x)
    added = stream.contributions(model, x, [1, 3], against=0)
    expected = logits[[0, 1], [1, 3]] - logits[:, 0]
    assert torch.equal(added.logits, expected) and len(added.names) == added.parts.shape[1]
    torch.testing.assert_close(added.parts.sum(1), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        stream.contributions_by_token(model, x, [1, 3], 0)[1].sum(-1), added.heads
    )
    assert (
        added.heads.any(0).all()
        and added.mlps.any(0).all()
        and added.embedding.all()
        and added.biases.all()
    )
    assert (
        balanced_gradients(model, x, 1).isfinite().all()
    )  # it raises if gradient × input is not complete
    read, tokens = stream.lens(model, x)
    assert torch.equal(read, logits)
    assert tokens.shape[::2] == (2, 5)
    if model.global_pool == "token" and not hasattr(model, "head_dist"):
        torch.testing.assert_close(tokens[:, 0], logits)
    model, x = model.float(), x.float()
    parts, logit = stream.contributions(model, x, 1).parts.sum(1), model(x)[:, 1]
    assert ((parts - logit).abs() < 1e-4 * logit.abs().clamp_min(0.1)).all()


def plain(vit):
    model = vit(dtype=torch.float64, img_size=SIZE, embed_dim=24)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return model, images()


def test_contributions_equal_products_of_weights(vit):
    """For a class token: A·V·W_O, the norm with its deviation held fixed, and the vector of the class."""
    model, x = plain(vit)
    tokens = {}
    hooks = [
        b.mlp.register_forward_hook(lambda m, _, out: tokens.update({m: out[:, 0]}))
        for b in model.blocks
    ]
    hooks += [
        model.blocks[0].register_forward_pre_hook(
            lambda m, args: tokens.update(embedding=args[0][:, 0])
        )
    ]
    hooks += [
        model.norm.register_forward_pre_hook(lambda m, args: tokens.update(last=args[0][:, 0]))
    ]
    with torch.no_grad(), capture(model, values=True) as attn:
        model(x)
    for hook in hooks:
        hook.remove()
    deviation = (tokens["last"].var(-1, unbiased=False, keepdim=True) + model.norm.eps).sqrt()
    vector = model.norm.weight * model.head.weight[4] / deviation
    vector = (vector - vector.mean(-1, keepdim=True)).detach()  # minus the mean, as in the norm
    added, maps = stream.contributions(model, x, 4), stream.direct_by_head(model, x, 4)
    torch.testing.assert_close(added.embedding, (tokens["embedding"] * vector).sum(-1))
    biases = model.head.bias[4] + model.norm.bias @ model.head.weight[4]
    for i, block in enumerate(model.blocks):
        torch.testing.assert_close(added.mlps[:, i], (tokens[block.mlp] * vector).sum(-1))
        biases = biases + vector @ block.attn.proj.bias
        for head, weight in enumerate(block.attn.proj.weight.split(8, 1)):
            written = attn[i].v[:, head] @ weight.T  # (B, T, D) by each token, before attention
            expected = attn[i].weights()[:, head, 0] * torch.einsum("btd,bd->bt", written, vector)
            torch.testing.assert_close(maps[:, i, head], attn.grid.image_map(expected.detach()))
    torch.testing.assert_close(added.biases, biases.detach())
    torch.testing.assert_close(direct(model, x, 4), maps.sum((1, 2)))


def test_balanced_gradients_equal_a_hand_made_linear_model():
    """Relative positions, a mask that depends on the queries, are constant, too."""
    sizes = dict(img_size=SIZE, patch_size=16, embed_dim=24, depth=3, num_heads=3, num_classes=5)
    model, x = (
        timm.create_model("vitlens_vit", positions="relative-1d", **sizes).eval().double(),
        images(),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)), alpha=0.3
            )
    tokens, kept = model.patch_embed(x), []

    def norm(module, t):
        deviation = (t.var(-1, unbiased=False, keepdim=True) + module.eps).sqrt().detach()
        return (t - t.mean(-1, keepdim=True)) / deviation * module.weight + module.bias

    tokens = torch.cat([model.cls_token.expand(2, -1, -1), tokens], 1).detach().requires_grad_()
    with capture(model) as attn:
        model(x)
    for layer, block in zip(attn, model.blocks, strict=True):
        kept.append(tokens)
        _, _, v = (
            block.attn.qkv(norm(block.norm1, tokens)).reshape(2, 25, 3, 3, 8).permute(2, 0, 3, 1, 4)
        )
        tokens = tokens + block.attn.proj(
            (layer.weights().detach() @ v).transpose(1, 2).reshape(2, 25, 24)
        )
        hidden = block.mlp.fc1(norm(block.norm2, tokens))
        gate = torch.special.ndtr(hidden).detach()
        tokens = tokens + block.mlp.fc2(hidden * gate)
    logit = model.head(norm(model.norm, tokens)[:, 0])[:, 4].sum()
    gradients = torch.autograd.grad(logit, kept)
    expected = sum((t * g).sum(-1) for t, g in zip(kept, gradients, strict=True))[:, 1:].unflatten(
        1, (4, 6)
    )
    torch.testing.assert_close(balanced_gradients(model, x, 4), expected.detach())


def test_balanced_gradients_equal_lxt(monkeypatch):
    """CP-LRP of LXT (Achtibat et al. 2024) on torchvision's ViT of the same weights, as gradient × input."""
    models = types.ModuleType(
        "lxt.efficient.models"
    )  # without its language models, which need an old transformers
    models.__path__ = [
        str(Path(importlib.util.find_spec("lxt").origin).parent / "efficient" / "models")
    ]
    models.get_default_map = None
    monkeypatch.setitem(sys.modules, models.__name__, models)
    from lxt.efficient import monkey_patch
    from lxt.efficient.models.vit_torch import cp_LRP
    from torchvision.models import vision_transformer

    theirs = (
        vision_transformer.VisionTransformer(32, 8, 3, 2, 24, 96, num_classes=5).eval().double()
    )
    names = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=5)
    ours, x = (
        timm.create_model("vit_tiny_patch16_224", **names).eval().double(),
        images(size=(32, 32)),
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(
                std=0.3, generator=torch.Generator().manual_seed(parameter.numel())
            ).add_(0.1)
    layer = {
        "ln_1": "norm1",
        "ln_2": "norm2",
        "self_attention": "attn",
        "in_proj_": "qkv.",
        "out_proj": "proj",
    }
    layer |= {"mlp.0": "mlp.fc1", "mlp.3": "mlp.fc2"}
    whole = {
        "class_token": "cls_token",
        "conv_proj": "patch_embed.proj",
        "encoder.pos_embedding": "pos_embed",
    }
    whole |= {
        "encoder.layers.encoder_layer_": "blocks.",
        "encoder.ln": "norm",
        "heads.head": "head",
    } | layer
    state = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in whole.items():
            name = name.replace(old, new)
        state[name] = tensor
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(x), theirs(x))
    with monkeypatch.context() as patch:
        for kind in (
            torch.nn.GELU,
            torch.nn.LayerNorm,
            torch.nn.MultiheadAttention,
        ):  # restored after LXT's patch
            patch.setattr(kind, "forward", kind.forward)
            patch.setattr(kind, "original_forward", None, raising=False)
        monkey_patch(vision_transformer, cp_LRP)
        kept = []
        for block in theirs.encoder.layers:
            block.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        gradients = torch.autograd.grad(theirs(x)[:, 4].sum(), kept)
    expected = sum((tokens * by).sum(-1) for tokens, by in zip(kept, gradients, strict=True))[:, 1:]
    torch.testing.assert_close(
        balanced_gradients(ours, x, 4), expected.detach().unflatten(1, (4, 4))
    )


def with_own_block(model):
    """The model, with a block in its layer 1 of a class that vitlens does not know."""
    model.blocks[1].__class__ = type("Own", (type(model.blocks[1]),), {})
    return model


def with_tanh(model):
    """The model, with a logit that is not a sum."""
    model.head = torch.nn.Sequential(torch.nn.Tanh(), model.head)
    return model


def post_norm():
    sizes = dict(depth=2, embed_dim=24, num_heads=2, img_size=SIZE)
    return timm.create_model("vit_base_patch16_rpn_224", **sizes)


X = images(dtype=torch.float32)
REFUSED_MODELS = (
    (lambda model: stream.contributions(post_norm(), X, 3), "layer 0 .ResPostBlock. .*post-norm"),
    (lambda model: stream.direct_by_head(with_own_block(model), X, 3), "layer 1 .Own. .*unknown"),
    (lambda model: stream.contributions(with_tanh(model), X, 3), "miss the logit"),
)
"""Calls that raise UnsupportedModelError, and decisive words."""


@pytest.mark.parametrize("call, words", REFUSED_MODELS)
def test_contributions_refuse_models(vit, call, words):
    refuses(words, call, vit(img_size=SIZE, embed_dim=24), error=UnsupportedModelError)


REFUSALS = (
    (lambda model: stream.contributions(model, X, 10), ValueError, "0 to 9, got 10"),
    (lambda model: stream.lens(model, X, 3), IndexError, "0 to 2 .* got 3"),
    (lambda model: stream.contributions(model, X[0], 3), ValueError, "floating-point tensor"),
)
"""Calls that leave the model as it was, their errors and decisive words."""


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_contributions_refuse_arguments(vit, call, error, words):
    model = vit(img_size=SIZE, embed_dim=24)
    with left_as_found(model):
        refuses(words, call, model, error=error)
