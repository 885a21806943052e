"""Every supported class of transformers, torchvision and open_clip, against the library's own attention."""

import csv
import importlib.metadata
import json

import pytest
import torch
from support import check_all, refuses
from support import vitlens as command
from timm.data import constants
from torch import nn

import vitlens
from experiments.support import (
    CLASSIFIERS,
    EVERY,
    LIBRARIES,
    TABLE,
    eager,
    last_linear,
    sized,
    small,
    survey,
)
from vitlens import attribution, capture, report, stream, tokens
from vitlens.attribution import like
from vitlens.attribution.target import bind_target
from vitlens.images import samples
from vitlens.recorder.forward import pooled_features, run
from vitlens.recorder.supported import UnsupportedModelError, family, head_count, transformer
from vitlens.recorder.supported.transformers import HALF, IMAGENET, OPENAI

SOME = [
    "ViTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "BeitForImageClassification",
    "Dinov2WithRegistersForImageClassification",
    "CLIPModel",
    "Siglip2Model",
    "torchvision",
    "open_clip",
    "open_clip, pool",
    "open_clip, timm",
]


def captured(model, images, **options):
    with torch.no_grad(), capture(model, **options) as attn:
        return attn, run(model, images)


@pytest.fixture(autouse=True)
def without_the_fast_path():
    """Switch off the fast path of nn.MultiheadAttention, which rounds differently."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def check_maps(name, atol=1e-9):
    """Maps equal the library's own attention."""
    model = small(name).double()
    images = sized(model)
    with torch.no_grad():
        plain = run(model, images)
    attn, output = captured(model, images)
    assert torch.equal(output, plain)
    with torch.no_grad(), eager(model) as maps:
        run(model, images)
    maps = maps[: len(attn)]  # without the pool
    assert len(attn) == len(maps) >= 2
    for layer, expected in zip(attn, maps, strict=True):
        torch.testing.assert_close(
            layer.weights(), expected.view_as(layer.weights()), atol=atol, rtol=0
        )
    assert attn.grid.image == tuple(images.shape[-2:]) and attn.grid.tokens == maps[0].shape[-1]


def check_readout(name):
    """The read-out row is nonzero at the tokens whose change changes the output."""
    model = small(name)
    attn, plain = captured(model, sized(model, batch=1))
    grid, generator = attn.grid, torch.Generator().manual_seed(2)

    def change(module, args, output):
        batch = output.repeat(grid.tokens + 1, 1, 1)
        tokens = torch.arange(grid.tokens)
        batch[tokens + 1, tokens] += torch.randn(output.shape[-1], generator=generator)
        return batch

    with torch.no_grad(), family(model).blocks[-1].register_forward_hook(change):
        output = run(model, sized(model, batch=1))
    assert torch.allclose(output[:1], plain, atol=1e-5)
    moved = (output[1:] - output[0]).abs().amax(1) > 1e-5
    if grid.readout is None:  # the class token and the mean of the patches, concatenated
        assert "Dinov2" in name and moved.tolist() == [
            p not in range(1, grid.prefix) for p in range(grid.tokens)
        ]
    else:
        row = grid.readout.expand(1, -1)[0]
        torch.testing.assert_close(row.sum(), torch.tensor(1.0))
        assert moved.tolist() == (row > 1e-6).tolist()
        assert row[moved].std(correction=0) < 1e-6 or attn.pool is not None


def check_head(name):
    model = small(name)
    images, adapter = sized(model), family(model)
    with torch.no_grad():
        layers, output = tokens.features(model, images)
        assert torch.equal(output, run(model, images))
        torch.testing.assert_close(adapter.head(layers[-1]), output, atol=1e-5, rtol=1e-5)
    assert len(layers) == len(adapter.blocks) and layers[0].shape[:2] == (
        2,
        adapter.grid(images.shape[-2:]).tokens,
    )
    assert len(adapter.prefix) == adapter.grid(images.shape[-2:]).prefix
    assert ("distillation token" in adapter.prefix) == ("DeiT" in name)


@pytest.mark.parametrize("check", [check_maps, check_readout, check_head])
@pytest.mark.parametrize("part", range(2))
def test_capture_is_exact_for_every_class(check, part):
    check_all(check, EVERY[part::2])


@pytest.mark.parametrize("name", ["ViTModel", "Siglip2Model", "torchvision", "open_clip"])
def test_kernels_give_the_tokens_of_patches(name):
    model = small(name)
    images, adapter = sized(model), family(model)
    filters, patch_size = vitlens.filters.kernels(model), adapter.grid(images.shape[-2:]).patch
    assert filters.shape[1:] == (*patch_size, 3)
    patch = images[:1, :, : patch_size[0], : patch_size[1]]
    first = torch.einsum("dpqc,cpq->d", filters, patch[0])
    tokens = []
    with (
        torch.no_grad(),
        adapter.embedding.register_forward_hook(lambda m, args, out: tokens.append(out)),
    ):
        run(model, images[:1])
    bias = 0 if adapter.embedding.bias is None else adapter.embedding.bias
    token = tokens[0][0, :, 0, 0] if tokens[0].dim() == 4 else tokens[0][0, 0]
    torch.testing.assert_close(token, first + bias, atol=1e-5, rtol=1e-5)


def check_positions(name):
    """Changing one entry of the position table changes the token of one patch at the first block."""
    model = small(name)
    adapter = family(model)
    table = adapter.positions()
    if table is None:
        assert any(kind in name for kind in ("Beit", "DINOv3"))
        return
    images, inputs = sized(model, *adapter.built_size, batch=1), []
    row, col = 1, table.shape[1] - 1
    with (
        torch.no_grad(),
        adapter.blocks[0].register_forward_pre_hook(lambda m, args: inputs.append(args[0][0])),
    ):
        run(model, images)
        table[row, col] += torch.randn(table.shape[-1])  # a view of the parameter
        run(model, images)
    changed = (inputs[1] - inputs[0]).abs().amax(1) > 1e-6
    assert changed.nonzero().tolist() == [[adapter.grid(adapter.built_size).index(row, col)]]


def check_gradients(name):
    """Gradients of a class equal autograd's through the library's own attention."""
    if name not in CLASSIFIERS:
        return
    model = small(name).double()
    images, target = sized(model), [3, 5]
    with capture(model, gradients=True) as attn:
        logits = run(model, images)
    attn.differentiate(logits[[0, 1], target].sum())
    with eager(model) as maps:
        again = run(model, images)
        gradients = torch.autograd.grad(again[[0, 1], target].sum(), maps)
    torch.testing.assert_close(again, logits, atol=1e-9, rtol=0)
    for layer, expected in zip(attn, gradients, strict=True):
        gradient = layer.weights_gradient()
        torch.testing.assert_close(gradient, expected.view_as(gradient), atol=1e-6, rtol=1e-6)
        assert expected.abs().max() > 1e-5


def check_stream(name):
    """Parts add up to the logit or to the cosine with another image, and patches to their heads."""
    model = small(name).double()
    images = sized(model, 32, 32, batch=3)
    target = [2, 5, 0] if family(model).classes else like(sized(model, 32, 32, batch=1, seed=5))
    parts, written = stream.contributions_by_token(model, images, target)
    torch.testing.assert_close(parts.parts.sum(1), parts.logits, atol=1e-9, rtol=0)
    torch.testing.assert_close(written.sum(-1), parts.heads, atol=1e-9, rtol=0)
    with torch.no_grad():
        features = pooled_features(model, images)
        if not family(model).classes:
            expected = bind_target(model, target)[0].score(features)
        else:
            expected = run(model, images)[range(3), target]
    torch.testing.assert_close(parts.logits, expected, atol=1e-9, rtol=0)
    assert parts.heads.abs().amax((0, 2)).min() > 1e-6 and parts.mlps.abs().amax(0).min() > 1e-6


@pytest.mark.parametrize("check", [check_positions, check_gradients, check_stream])
def test_positions_gradients_and_stream_are_exact(check):
    check_all(check, SOME)


def test_contributions_refuse_a_nonlinear_pooler():
    model = small("ViTModel")
    with pytest.raises(UnsupportedModelError, match="pooler"):
        stream.contributions(model, sized(model), like(sized(model, batch=1)))


def test_survey_equals_the_committed_table():
    """Rows equal those of the table, except for rounding errors, if the libraries have the table's versions."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    command_line = table[0]["command"]
    assert [row["model"] for row in table][-len(EVERY) :] == EVERY
    if any(f"{name} {importlib.metadata.version(name)}" not in command_line for name in LIBRARIES):
        pytest.skip(
            f"the table is of {command_line.strip()}; `python -m experiments.support` writes it anew"
        )
    for name in ("torchvision", "SiglipModel", "open_clip"):
        row = survey(name)
        assert float(row.pop("error")) < 1e-9
        known = next(known for known in table if known["model"] == name)
        assert row == {k: v for k, v in known.items() if k not in ("error", "command")}


@pytest.mark.parametrize("name", ["BeitModel", "open_clip"])
@pytest.mark.parametrize("autocast", [False, True])
def test_capture_equals_bfloat16_attention(name, autocast):
    """The maps follow from the model's own q and k. The library's path also rounds the maps."""
    model = small(name) if autocast else small(name).bfloat16()
    images = sized(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        attn, _ = captured(model, images, values=True)
        with torch.no_grad(), eager(model) as maps:
            run(model, images)
    for layer, expected in zip(attn, maps, strict=False):
        assert layer.v.dtype == torch.bfloat16 and layer.weights().dtype == torch.float32
        torch.testing.assert_close(
            layer.weights(), expected.view_as(layer.weights()).float(), atol=0.03, rtol=0
        )
        torch.testing.assert_close(
            layer.weights() @ layer.v.float(), layer.output.float(), atol=0.05, rtol=0.05
        )


def _eager(kind: str):
    model = small("ViTForImageClassification")
    model.set_attn_implementation(kind)
    return model


def _resnet_tower():
    from open_clip.model import CLIP

    vision = dict(layers=(1, 1, 1, 1), width=32, image_size=32, head_width=16)
    return CLIP(24, vision, dict(context_length=8, vocab_size=99, width=32, heads=2, layers=2))


REFUSED = [
    (lambda: _eager("eager"), r'set_attn_implementation\("sdpa"\)'),
    (lambda: _eager("flex_attention"), r'set_attn_implementation\("sdpa"\)'),
    (lambda: small("DINOv3ViTModel", pos_embed_rescale=2.0).train(), "positions.*eval"),
    (lambda: small("ViTModel", attention_probs_dropout_prob=0.1).train(), "eval"),
    (_resnet_tower, "ModifiedResNet"),
]


@pytest.mark.parametrize("build, words", REFUSED)
def test_capture_refuses(build, words):
    refuses(words, captured, build(), torch.randn(1, 3, 32, 32), error=UnsupportedModelError)


def test_capture_refuses_sizes_that_patches_do_not_divide():
    images = torch.zeros(1, 3, 30, 32)
    refuses("8 × 8 pixels .* 30 × 32", captured, small("Siglip2Model"), images)


def test_capture_refuses_mae_that_hides_or_shuffles_patches():
    model = small("ViTMAEModel")
    images = sized(model, 32, 32)
    with pytest.raises(UnsupportedModelError, match="shuffles"), torch.no_grad(), capture(model):
        model(images)
    with torch.no_grad(), capture(model) as attn:
        model(images, noise=torch.arange(16).expand(2, -1))
    assert attn.complete
    model.config.mask_ratio = 0.75
    refuses("75%.*mask_ratio = 0", captured, model, images, error=UnsupportedModelError)


@pytest.mark.parametrize("name", ["SiglipVisionModel", "open_clip, pool"])
def test_pool_equals_the_attention_of_its_module(name):
    model = small(name).double()
    attn, _ = captured(model, sized(model))
    pool = model.head if hasattr(model, "head") else model.visual.attn_pool
    module, maps = getattr(pool, "attention", None) or pool.attn, []
    flags = dict(need_weights=True, average_attn_weights=False)
    module.register_forward_pre_hook(
        lambda m, args, kwargs: (args, kwargs | flags), with_kwargs=True
    )
    module.register_forward_hook(lambda m, args, out: maps.append(out[1]))
    with torch.no_grad():
        run(model, sized(model))
    torch.testing.assert_close(attn.pool.weights(), maps[0], atol=1e-9, rtol=0)
    torch.testing.assert_close(attn.grid.readout, maps[0][:, :, 0].mean(1), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "name", ["ViTForImageClassification", "SiglipVisionModel", "torchvision", "open_clip, pool"]
)
def test_intervene_heads_equals_zeroed_weights(name):
    """Switching a head off equals zeroing its columns of the output projection. A capture records every layer and the
    pool."""
    model = small(name)
    images = sized(model)
    with torch.no_grad():
        with vitlens.intervene(model, heads={(1, 0): "zero"}), capture(model) as attn:
            changed = run(model, images)
        assert len(attn) == 2 and (attn.pool is not None) == (family(model).pool is not None)
        ((_, module),) = family(model).attention()[1]
        projection = next(getattr(module, n) for n in ("o_proj", "out_proj") if hasattr(module, n))
        projection.weight[:, : 32 // head_count(module)] = 0
        expected = run(model, images)
    torch.testing.assert_close(changed, expected, atol=1e-5, rtol=1e-5)
    if family(model).pool is not None:
        with (
            torch.no_grad(),
            vitlens.intervene(model, block={0: ("all", [2])}, heads={("pool", 1): "zero"}),
        ):
            assert not torch.equal(run(model, images), expected)


def test_transformer_is_found_in_a_wrapper():
    model = small("Dinov2Model")
    patches = nn.Sequential(model, nn.Linear(32, 5)).eval()
    patches.forward = lambda x: patches[1](model(x).last_hidden_state[:, 1:].mean(1))
    assert transformer(patches) is model
    images = sized(model)
    assert attribution.grad_cam(patches, images, 2).shape == (2, 4, 6)
    refuses(
        "reads no weighted sum", attribution.relevance, patches, images, 2
    )  # its read-out is unknown


@pytest.mark.parametrize("name", ["Dinov2ForImageClassification", "open_clip, timm"])
def test_intervene_mlps_equals_zeroed_weights(name):
    """Replacing an MLP by zero equals zeroing its last layer."""
    model = small(name)
    images, adapter = sized(model, 32, 32), family(model)
    with torch.no_grad():
        with vitlens.intervene(model, mlps={1: "zero"}):
            changed = run(model, images)
        with vitlens.intervene(model, residual={(0, "patches"): "zero"}):
            assert not torch.equal(run(model, images), changed)
        last = [m for m in adapter.blocks[1].mlp.modules() if isinstance(m, nn.Linear)][-1]
        for parameter in last.parameters():
            parameter.zero_()
        torch.testing.assert_close(run(model, images), changed, atol=1e-5, rtol=1e-5)


def test_transformer_is_found_in_a_lora_model():
    peft = pytest.importorskip("peft")
    model = small("ViTForImageClassification")
    images = sized(model, 32, 32)
    changed = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    changed.eval()
    inner = transformer(changed)
    attn, logits = captured(inner, images)
    with torch.no_grad():
        assert torch.equal(changed(images).logits, logits)
        with eager(inner) as maps:
            run(inner, images)
    torch.testing.assert_close(attn[1].weights(), maps[1], atol=1e-5, rtol=0)
    maps = attribution.relevance(changed, images, 2)
    torch.testing.assert_close(maps, attribution.relevance(inner, images, 2))


def test_inspect_omits_rollouts_without_a_readout(tmp_path):
    inspection = report.inspect(
        small("Dinov2ForImageClassification"), [("chelsea", samples()["chelsea"])]
    )
    names = {path.name for path in report.write_inspection(inspection, tmp_path)}
    assert names == {
        "summary.json",
        "distance.png",
        "filters.png",
        "positions.png",
        "inspection.png",
    }


def test_commands_take_a_folder_in_transformers_layout(tmp_path):
    model, folder, out = (
        small("ViTForImageClassification", num_labels=3),
        tmp_path / "vit",
        tmp_path / "why",
    )
    model.config.id2label = {0: "blue", 1: "green", 2: "red"}
    model.save_pretrained(folder)
    processor = {
        "size": {"height": 32, "width": 32},
        "resample": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    samples()["chelsea"].save(tmp_path / "cat.png")
    command(
        "explain",
        folder,
        tmp_path / "cat.png",
        "--target",
        "green",
        "--scores",
        "--orders",
        0,
        "--out",
        out,
    )
    assert len([*out.iterdir()]) == 2


def test_normalizations_equal_those_of_timm():
    names = ("IMAGENET_DEFAULT", "IMAGENET_INCEPTION", "OPENAI_CLIP")
    expected = [
        tuple(getattr(constants, f"{name}_{part}") for part in ("MEAN", "STD")) for name in names
    ]
    assert expected == [IMAGENET, HALF, OPENAI]


@pytest.mark.parametrize(
    "name", ["ViTForImageClassification", "ViTModel", "torchvision", "open_clip"]
)
def test_run_returns_one_tensor_for_every_library(name):
    """Also of a module around the model, under autocast, and with gradients."""
    model = small(name)
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    outputs = vitlens.run(model, images)
    own = model.encode_image(images) if name == "open_clip" else model(images)
    expected = getattr(own, "logits", getattr(own, "pooler_output", own))
    assert outputs.equal(expected) and outputs.requires_grad
    if name in CLASSIFIERS:
        assert vitlens.run(torch.nn.DataParallel(model), images).equal(outputs)
        assert vitlens.run(_Answer(model), images).equal(outputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert vitlens.run(model, images).dtype == torch.bfloat16


class _Answer(torch.nn.Module):
    """Returns a dictionary with the logits of a model, as modules for training do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return {"loss": None, "logits": vitlens.run(self.model, images)}


def test_pooled_is_the_input_of_the_classifier():
    for name in ("Dinov2ForImageClassification", "Siglip2ForImageClassification", "torchvision"):
        model = small(name)
        with torch.no_grad():
            features = pooled_features(model, sized(model))
            torch.testing.assert_close(last_linear(model)(features), run(model, sized(model)))
