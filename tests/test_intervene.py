"""Interventions equal models edited by hand, and leave no trace."""

import threading
from functools import partial

import pytest
import timm
import torch
from support import refuses
from timm.models.vision_transformer import ParallelScalingBlock

import vitlens
from vitlens import UnsupportedModelError, capture, intervene
from vitlens.attribution import gradient_rollout

DOOR = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=7)


def small(name="vit_tiny_patch16_224", seed=0, dtype=torch.float64, **more):
    """A small model whose heads differ and matter."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **(DOOR | more)).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def pictures(n=3, size=32, seed=0, dtype=torch.float64):
    return torch.randn(
        n, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def run(model, images, **changes):
    with torch.no_grad(), intervene(model, **changes):
        return model(images)


def plain(model, images):
    with torch.no_grad():
        return model(images)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def output_projections(model):
    """For each layer, the output projection of each of its attentions, and its width for one head."""
    names = ("proj", "attn_out_proj")
    for block in model.blocks:
        owners = [m for m in block.modules() if hasattr(m, "num_heads")]
        yield [(next(getattr(m, n) for n in names if hasattr(m, n)), m.num_heads) for m in owners]


EVA = "eva02_tiny_patch14_336"
FAMILIES = {
    "plain": {},
    "mean of patches": dict(global_pool="avg", class_token=False),
    "registers": dict(name="vit_medium_patch16_rope_reg1_gap_256"),
    "distilled": dict(name="deit_tiny_distilled_patch16_224"),
    "attention pool": dict(name="vit_base_patch16_siglip_224"),
    "biases": dict(name="beit_base_patch16_224"),
    "eva": dict(name=EVA),
    "parallel": dict(name="vit_small_patch16_18x2_224"),
    "parallel and scaled": dict(name="vit_base_patch32_plus_256", block_fn=ParallelScalingBlock),
    "grouped queries": dict(
        name=EVA, attn_type="rope", num_heads=4, num_kv_heads=2, qkv_fused=False
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_intervene_zero_equals_zeroed_columns_of_the_output_projection(family):
    model, x = small(**FAMILIES[family]), pictures()
    before = plain(model, x)
    for layer, attentions in enumerate(output_projections(model)):
        chosen = 0
        for projection, heads in attentions:
            logits = run(model, x, heads={(layer, chosen + 1): "zero"})
            width = projection.in_features // heads
            kept = projection.weight.detach().clone()
            with torch.no_grad():
                projection.weight[:, width : 2 * width] = 0
            close(logits, plain(model, x))
            with torch.no_grad():
                projection.weight.copy_(kept)
            assert (logits - before).abs().max() > 1e-3
            chosen += heads
    assert torch.equal(plain(model, x), before)


def test_intervene_replaces_a_head_of_the_attention_pool():
    model, x = small("vit_base_patch16_siglip_224"), pictures()
    logits = run(model, x, heads={("pool", 2): "zero"})
    with torch.no_grad():
        model.attn_pool.proj.weight[:, 32:] = 0
    close(logits, plain(model, x))


@pytest.mark.parametrize(
    "family", ["plain", "biases", "eva", "parallel", "parallel and scaled", "grouped queries"]
)
def test_intervene_mean_equals_an_edited_bias(family):
    """In the last layer, if only the class token is read, its mean can be added to the bias."""
    model, x = small(**FAMILIES[family], global_pool="token"), pictures()
    before, others = plain(model, x), pictures(9, seed=1)
    *_, attentions = output_projections(model)
    projection, heads = attentions[-1]
    logits = run(model, x, heads={(2, heads * (len(attentions) - 1) + 1): "mean"}, reference=others)
    assert (logits - before).abs().max() > 1e-3
    width, kept = projection.in_features // heads, []
    with projection.register_forward_pre_hook(lambda _, args: kept.append(args[0])):
        plain(model, others)
    with torch.no_grad():
        mine = slice(width, 2 * width)
        projection.bias += projection.weight[:, mine] @ kept[0][:, 0, mine].mean(0)
        projection.weight[:, mine] = 0
    close(logits, plain(model, x))


def test_intervene_without_replacements_keeps_outputs_bit_for_bit():
    for family in ("plain", "biases"):
        model, x = small(**FAMILIES[family], dtype=torch.bfloat16), pictures(dtype=torch.bfloat16)
        assert torch.equal(
            run(model, x, heads={}, mlps={}, residual={}, block={}, reference=x), plain(model, x)
        )


def by_hand(model, x, layer, change):
    """Logits after `change` edits the concatenated heads, (B, T, H·K), of a layer in place."""

    def edit(_, args):
        edited = args[0].clone()
        change(edited)
        return (edited,)

    with model.blocks[layer].attn.proj.register_forward_pre_hook(edit):
        return plain(model, x)


def test_intervene_mean_is_over_reference_images_at_each_position():
    model, x, others, kept = small(), pictures(), pictures(3, seed=1), []
    by_hand(model, others, 1, kept.append)
    mean = kept[0][:, :, 16:32].mean(0).expand(3, -1, -1)
    expected = by_hand(model, x, 1, lambda heads: heads[:, :, 16:32].copy_(mean))
    for reference in (others, [others[:1], others[1:]]):
        close(run(model, x, heads={(1, 1): "mean"}, reference=reference), expected)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit_base_patch16_224"])
def test_intervene_block_equals_masked_logits(name):
    model, x = small(name), pictures()
    logits = run(model, x, block={1: (0, "patches"), (0, 1): ([(0, 1), 5], [(3, 3), 4, 5, 6])})
    hidden = {layer: torch.zeros(17, 17, dtype=torch.bool) for layer in (0, 1)}
    for mask in hidden.values():
        mask[[2, 5]] = mask[[2, 5]].index_fill(1, torch.tensor([16, 4, 5, 6]), True)
    hidden[1][0, 1:] = True
    for layer, mask in hidden.items():
        attention = model.blocks[layer].attn

        def forward(tokens, attention=attention, mask=mask, **given):
            q, k, v = attention.qkv(tokens).reshape(3, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
            if name.startswith("beit"):
                bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
                q, k, v = (
                    (attention.qkv(tokens) + bias).reshape(3, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
                )
            logits = q @ k.mT / 4
            if name.startswith("beit"):
                logits = logits + attention._get_rel_pos_bias()
            weights = logits.masked_fill(mask, -torch.inf).softmax(-1)
            return attention.proj((weights @ v).transpose(1, 2).reshape(3, 17, 48))

        attention.forward = forward
    close(logits, plain(model, x))
    del model.blocks[0].attn.forward, model.blocks[1].attn.forward
    assert (logits - plain(model, x)).abs().max() > 1e-3


def test_intervene_mlps_equal_edited_weights():
    model, x, others = small(), pictures(), pictures(5, seed=1)
    logits = run(model, x, mlps={1: "zero"})
    kept = []
    with model.blocks[2].mlp.register_forward_hook(lambda _, args, output: kept.append(output)):
        plain(model, others)
    mean = run(model, x, mlps={(2, "prefix"): "mean"}, reference=others)
    both = run(model, x, mlps={2: "mean"}, reference=others)
    close(mean, both)  # the head reads only the class token of the last layer
    last = model.blocks[2].mlp.fc2
    before = [p.detach().clone() for p in last.parameters()]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(kept[0][:, 0].mean(0))
    close(mean, plain(model, x))
    with torch.no_grad():
        for parameter, value in zip(last.parameters(), before, strict=True):
            parameter.copy_(value)
        for parameter in model.blocks[1].mlp.fc2.parameters():
            parameter.zero_()
    close(logits, plain(model, x))


def test_intervene_residual_replaces_tokens():
    model, clean, changed = small(), pictures(), pictures(seed=1)
    with torch.no_grad():
        layers, logits = vitlens.tokens.features(model, clean)
        ours, _ = vitlens.tokens.features(model, changed)
    for layer in range(3):
        close(run(model, changed, residual={layer: layers[layer]}), logits)
    stream = ours[1].clone()
    stream[:, [0, 7]] = layers[1][:, [0, 7]]
    with torch.no_grad():
        expected = model.forward_head(model.norm(model.blocks[2](stream)))
    close(
        run(model, changed, residual={(1, 0): layers[1][:, [0]], (1, (1, 2)): layers[1][:, [7]]}),
        expected,
    )
    close(
        run(model, changed, residual={(2, "patches"): "zero"}), plain(model, changed)
    )  # the head ignores them


def test_intervene_leaves_no_trace_after_an_exception():
    model, x = small(dtype=torch.float32), pictures(dtype=torch.float32)
    before, state = plain(model, x), {k: v.clone() for k, v in model.state_dict().items()}
    runs = []
    backend = lambda graph, _: lambda *inputs: runs.append(1) or graph(*inputs)  # noqa: E731
    handle = torch.compile(model, backend=backend)
    changes = dict(
        heads={(0, 0): "mean"},
        mlps={1: "zero"},
        residual={0: "mean"},
        block={2: (0, 5)},
        reference=x,
    )
    with pytest.raises(KeyError), intervene(handle, **changes):
        assert not torch.equal(plain(handle, x), before)
        raise KeyError("mine")
    assert not runs
    assert not torch.overrides._get_current_function_mode_stack()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(plain(handle, x), before) and len(runs) == 1
    with intervene(handle):
        logits = handle(x)
    assert torch.equal(logits, before) and logits.requires_grad and len(runs) == 1


def test_intervene_changes_only_its_thread():
    model, x = small(), pictures()
    expected = [
        plain(model, x),
        *(run(model, x, heads={(0, h): "zero"}, mlps={h: "zero"}) for h in range(3)),
    ]
    logits, barrier = {}, threading.Barrier(4, timeout=60)

    def repeat(which):
        for _ in range(5):
            barrier.wait()
            changes = (
                {} if which == 0 else dict(heads={(0, which - 1): "zero"}, mlps={which - 1: "zero"})
            )
            logits.setdefault(which, []).append(
                run(model, x, **changes) if which else plain(model, x)
            )

    threads = [threading.Thread(target=repeat, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, results in logits.items():
        assert len(results) == 5
        for result in results:
            close(result, expected[which])


def test_capture_is_equal_inside_and_outside_of_intervene():
    model, x = small(), pictures()
    changes = dict(
        heads={(1, 1): "mean"}, block={(0, 1): (0, [3, 4])}, reference=pictures(2, seed=1)
    )
    expected = run(model, x, **changes)
    with torch.no_grad(), capture(model, values=True) as outside, intervene(model, **changes):
        one = model(x)
    with torch.no_grad(), intervene(model, **changes), capture(model, values=True) as inside:
        other = model(x)
    assert torch.equal(one, expected) and torch.equal(other, expected)
    for a, b in zip(outside, inside, strict=True):
        assert (
            torch.equal(a.q, b.q)
            and torch.equal(a.weights(), b.weights())
            and torch.equal(a.output, b.output)
        )
        close(a.weights() @ a.v, a.output)
    assert (outside[1].weights()[:, :, 0, [3, 4]] == 0).all() and (outside[2].weights() > 0).all()
    with torch.no_grad():
        assert torch.equal(model(x), plain(model, x))


def test_differentiate_gives_zero_for_a_replaced_head():
    model, x = small(), pictures()
    gradients = []
    for order in (0, 1):
        first, second = (capture(model, gradients=True), intervene(model, heads={(1, 1): "zero"}))[
            :: 1 - 2 * order
        ]
        with first as one, second as two:
            logits = model(x)
        attn = one or two
        attn.differentiate(logits[:, 2].sum())
        assert not attn[1].gradient[:, 1].any() and attn[1].gradient[:, 0].any()
        gradients.append(attn[0].gradient)
    assert torch.equal(*gradients)
    with intervene(model, heads={(1, 1): "zero"}):
        within = gradient_rollout(model, x, 2)
    assert (within - gradient_rollout(model, x, 2)).abs().max() > 1e-6


def test_intervene_nests_and_reads_references_without_interventions():
    model, x, others = small(), pictures(), pictures(4, seed=1)
    alone = run(model, x, heads={(1, 0): "mean"}, reference=others)
    with torch.no_grad(), intervene(model, heads={(1, 0): "zero"}), capture(model) as attn:
        assert torch.equal(run(model, x, heads={(1, 0): "mean"}, reference=others), alone)
    assert len(attn) == 3, "the capture ignores the reference images"
    with torch.no_grad(), intervene(model, heads={(0, 0): "zero"}, mlps={0: "zero"}):
        both = run(model, x, heads={(1, 0): "mean"}, mlps={2: "mean"}, reference=others)
    together = dict(heads={(1, 0): "mean"}, mlps={2: "mean"}, reference=others)
    with torch.no_grad(), intervene(model, **together):
        close(run(model, x, heads={(0, 0): "zero"}, mlps={0: "zero"}), both)


def test_intervene_holds_in_the_backward_pass_of_checkpointed_models():
    model, x = small(), pictures()
    gradients = []
    for checkpointed in (False, True):
        model.set_grad_checkpointing(checkpointed)
        with intervene(model, heads={(1, 1): "zero"}):
            score = model(x).sum()
        gradients.append(torch.autograd.grad(score, list(model.parameters())))
        assert model.grad_checkpointing == checkpointed
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


WRONG = [
    (dict(heads={(0, 3): "zero"}), IndexError, "no head 3 of layer 0: it has 3 heads"),
    (
        dict(heads={("pool", 0): "zero"}),
        IndexError,
        "no head 0 of the attention pool: it has 0 heads",
    ),
    (dict(heads={(3, 0): "zero"}), IndexError, "from 0 to 2 .* got 3"),
    (dict(mlps={-4: "zero"}), IndexError, "from 0 to 2 .* got -4"),
    (dict(block={(0, 9): (0, 1)}), IndexError, "from 0 to 2 .* got 9"),
    (dict(residual={(0, 17): "zero"}), IndexError, "Token 17 lies outside"),
    (
        dict(heads={(2, 0): "zero", (-1, 0): "mean"}),
        ValueError,
        "one replacement, got two for head 0 of layer 2",
    ),
    (
        dict(mlps={1: "zero", (-2, "all"): 1.0}),
        ValueError,
        "one replacement, got two for the MLP of layer 1",
    ),
    (
        dict(mlps={1: "mean"}, reference=torch.zeros(3, 32, 32)),
        ValueError,
        r"\(B, C, height, width\)",
    ),
    (dict(block={2: (4, "all")}), ValueError, "query of layer 2 without a visible key"),
]


@pytest.mark.parametrize("changes, error, words", WRONG)
def test_intervene_refuses_arguments(changes, error, words):
    model, x = small(dtype=torch.float32), pictures(dtype=torch.float32)
    refuses(words, run, model, x, error=error, **changes)


def with_shared_attention():
    """A model with one attention module in two layers."""
    model = small()
    model.blocks[1].attn = model.blocks[0].attn
    return model


def run_causally():
    with intervene(model := small()):
        model(pictures(), is_causal=True)


def run_in_a_thread():
    with intervene(model := small(), heads={(2, 0): "zero"}):
        thread = threading.Thread(target=model, args=(pictures(),))
        thread.start()
        thread.join()


def run_with_other_parameters():
    model = small()
    others = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with intervene(model, block={1: (0, 1)}):
        torch.func.functional_call(model, others, pictures())


REFUSALS = (
    (
        lambda: run(with_shared_attention(), pictures(), heads={(2, 0): "zero"}),
        UnsupportedModelError,
        "share one attention",
    ),
    (
        lambda: run(small(attn_drop_rate=0.1).train(), pictures()),
        UnsupportedModelError,
        "at random",
    ),
    (run_causally, UnsupportedModelError, "causal"),
    (run_in_a_thread, RuntimeError, "head 0 of layer 2.* in another thread"),
    (run_with_other_parameters, RuntimeError, "Nothing .*attention of layer 1"),
)
"""A call, its error and decisive words."""


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_intervene_refuses(call, error, words):
    refuses(words, call, error=error)


def test_interventions_reach_the_only_model_inside_a_module():
    """Means are those of reference images as the module passes them on."""
    model, x, others = small(), pictures(), pictures(4, seed=1)
    wrapped = torch.nn.Sequential(torch.nn.Hardtanh(), model)
    changes = {"heads": {(1, 0): "mean"}, "mlps": {2: "zero"}}
    expected = run(model, x.clamp(-1, 1), **changes, reference=others.clamp(-1, 1))
    assert torch.equal(run(wrapped, x, **changes, reference=others), expected)
    assert not torch.equal(expected, plain(wrapped, x))


AUGMENTED = {
    "with 6 of 3 images": lambda vit, x: torch.stack(
        vit(torch.cat([x, x.flip(-1)])).split(len(x))
    ).mean(0),
    "ran it again": lambda vit, x: (vit(x) + vit(x.flip(-1))) / 2,
    "with 1 of 3 images": lambda vit, x: torch.cat([vit(image[None]) for image in x]),
}


def test_intervene_refuses_means_of_several_runs():
    x = pictures()
    for match, forward in AUGMENTED.items():
        model = torch.nn.Sequential(small())
        model.forward = partial(forward, model[0])
        for changes in (
            {"heads": {(1, 0): "mean"}},
            {"mlps": {1: "mean"}},
            {"residual": {(1, 0): "mean"}},
        ):
            refuses(match, run, model, x, reference=x, error=UnsupportedModelError, **changes)
        with torch.no_grad(), intervene(model[0], heads={(1, 0): "mean"}, reference=x):
            assert torch.equal(model(x), forward(model[0], x))


def test_parts_that_do_not_add_up_name_the_replacement():
    """With values that no part of the model writes. With zero, parts add up to the changed logit."""
    model, images = small(), pictures()
    many = {(layer, head): torch.ones(()) for layer in range(2) for head in range(2)}
    cases = {
        "head 2 of layer 1": {"heads": {(1, 2): "mean"}, "reference": images},
        "head 0 of layer 0, head 1 of layer 0, head 0 of layer 1, 1 more": {"heads": many},
    }
    for places, changes in cases.items():
        for parts in (vitlens.stream.contributions, vitlens.attribution.balanced_gradients):
            refusal = pytest.raises(UnsupportedModelError, match=f"in place of {places}[.] Replace")
            with intervene(model, **changes), refusal:
                parts(model, images, 3)
    with intervene(model, heads={(1, 2): "zero"}):
        added = vitlens.stream.contributions(model, images, 3)
    logits = run(model, images, heads={(1, 2): "zero"})[:, 3]
    torch.testing.assert_close(added.parts.sum(1), logits)
