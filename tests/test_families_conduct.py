"""What models of other libraries do besides their maps: precisions, sizes, modes, wrappers, and what is refused."""

import functools
import re
from collections import OrderedDict

import pytest
import torch
from families_support import EVERY, eager, sized, small
from torch import nn

import vitlens
from vitlens import (
    ablation,
    attention,
    attribution,
    capture,
    faithfulness,
    filters,
    intervene,
    models,
    positions,
    stream,
    tokens,
)
from vitlens.data import ImageSet
from vitlens.data.augment import normalized
from vitlens.evaluate import evaluate
from vitlens.recorder.running import run
from vitlens.recorder.supported import UnsupportedModelError, family, head_count, transformer

COMPILED = ["ViTForImageClassification", "DeiTModel", "BeitForImageClassification", "IJepaModel", "Dinov2Model",
            "Dinov2WithRegistersModel", "DINOv3ViTModel", "CLIPVisionModel", "SiglipVisionModel",
            "torchvision"]  # fmt: skip
"""A model of each kind whose forward is that of the image tower alone; ViTMAE and SigLIP 2 need more than images."""


def captured(model, images, **options):
    with torch.no_grad(), capture(model, **options) as attn:
        return attn, run(model, images)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(name, autocast):
    """The maps are those of the q and k that the model made; its own path rounds its maps, too."""
    model = small(name) if autocast else small(name).bfloat16()
    images = sized(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        attn, _ = captured(model, images, values=True)
        with torch.no_grad(), eager(model) as maps:
            run(model, images)
    for layer, expected in zip(attn, maps, strict=False):
        assert layer.v.dtype == torch.bfloat16 and layer.weights().dtype == torch.float32
        torch.testing.assert_close(layer.weights(), expected.view_as(layer.weights()).float(), atol=0.03, rtol=0)
        torch.testing.assert_close(layer.weights() @ layer.v.float(), layer.output.float(), atol=0.05, rtol=0.05)


def test_features_of_weights_in_mixed_precision():
    """As in open_clip's fp16: positions stay in float32, and what meets the pixels does not."""
    from open_clip.model import convert_weights_to_lp

    model = small("open_clip")
    x, exact = sized(model), tokens.features(model, sized(model))[1]
    convert_weights_to_lp(model, torch.bfloat16)
    assert next(model.parameters()).dtype == torch.float32
    found = tokens.features(model, x)[1].float()
    torch.testing.assert_close(found, exact, rtol=0, atol=0.1 * exact.abs().max().item())


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name):
    model = small(name)
    images = sized(model, 32, 32)
    attn, _ = captured(model, images)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(images)
        with capture(compiled) as again:
            compiled(images)
    assert torch.equal(again[1].weights(), attn[1].weights())


@pytest.mark.parametrize("name", [name for name in EVERY if name != "torchvision" and "open_clip" not in name])
def test_images_of_other_sizes(name):
    """Each image attends as it does alone, and patches are counted along each side."""
    model = small(name)
    images = sized(model, 24, 64)
    attn, output = captured(model, images)
    alone, single = captured(model, images[1:])
    assert (attn.grid.rows, attn.grid.cols) == (3, 8)
    torch.testing.assert_close(attn[1].weights()[1:], alone[1].weights(), atol=1e-5, rtol=0)
    torch.testing.assert_close(output[1:], single, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["torchvision", "open_clip"])
def test_models_of_one_size_say_so(name):
    with pytest.raises(ValueError, match="32 × 32.*got 24 × 32"):
        vitlens.tokens.features(small(name), torch.randn(1, 3, 24, 32))


@pytest.mark.parametrize("kind", ["eager", "flex_attention"])
def test_other_implementations_are_refused(kind):
    model = small("ViTForImageClassification")
    model.set_attn_implementation(kind)
    with pytest.raises(UnsupportedModelError, match=r'set_attn_implementation\("sdpa"\)'), capture(model):
        pass


def test_mae_is_refused_while_it_hides_or_shuffles():
    model = small("ViTMAEModel")
    images = sized(model, 32, 32)
    with pytest.raises(UnsupportedModelError, match="shuffles"), torch.no_grad(), capture(model):
        model(images)
    with torch.no_grad(), capture(model) as attn:
        model(images, noise=torch.arange(16).expand(2, -1))
    assert attn.complete
    model.config.mask_ratio = 0.75
    with pytest.raises(UnsupportedModelError, match="75%.*mask_ratio = 0"):
        captured(model, images)


def test_chance_is_refused():
    model = small("DINOv3ViTModel", pos_embed_rescale=2.0).train()
    with pytest.raises(UnsupportedModelError, match="positions.*eval"):
        captured(model, sized(model))
    model = small("ViTModel", attention_probs_dropout_prob=0.1).train()
    with pytest.raises(UnsupportedModelError, match="eval"):
        captured(model, sized(model))


def test_a_mask_of_tokens_is_seen():
    model = small("ViTModel")
    images, mask = sized(model, 32, 32), torch.ones(2, 17, dtype=torch.long)
    mask[:, 3] = 0
    with torch.no_grad(), capture(model) as attn:
        model(images, attention_mask=mask)
    assert not attn[0].weights()[..., 3].any()


def test_text_runs_beside_the_tower():
    model = small("CLIPModel")
    words = torch.randint(0, 99, (2, 5))
    with torch.no_grad():
        plain = model(input_ids=words, pixel_values=sized(model, 32, 32)).logits_per_image
        with capture(model) as attn:
            logits = model(input_ids=words, pixel_values=sized(model, 32, 32)).logits_per_image
    assert torch.equal(plain, logits) and len(attn) == 2 and attn[0].q.shape[2] == 17


@pytest.mark.parametrize("name", ["SiglipVisionModel", "open_clip, pool"])
def test_a_pool_reads_what_it_says(name):
    model = small(name).double()
    attn, _ = captured(model, sized(model))
    pool = model.head if hasattr(model, "head") else model.visual.attn_pool
    module, seen = getattr(pool, "attention", None) or pool.attn, []
    ask = dict(need_weights=True, average_attn_weights=False)
    module.register_forward_pre_hook(lambda m, args, kwargs: (args, kwargs | ask), with_kwargs=True)
    module.register_forward_hook(lambda m, args, out: seen.append(out[1]))
    with torch.no_grad():
        run(model, sized(model))
    torch.testing.assert_close(attn.pool.weights(), seen[0], atol=1e-9, rtol=0)
    torch.testing.assert_close(attn.grid.readout, seen[0][:, :, 0].mean(1), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "SiglipVisionModel", "torchvision", "open_clip, pool"])
def test_interventions(name):
    """A head that is put out changes the output as its zeroed columns of the output projection do; a capture beside it
    sees every layer and the pool."""
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
        with torch.no_grad(), vitlens.intervene(model, block={0: ("all", [2])}, heads={("pool", 1): "zero"}):
            assert not torch.equal(run(model, images), expected)


class Wrapped(nn.Module):
    """A head of one's own on what the encoder returns."""

    def __init__(self, encoder, read):
        super().__init__()
        self.encoder, self.read, self.head = encoder, read, nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.read(self.encoder(x)))


def test_wrapped_models_are_found():
    model = small("Dinov2Model")
    patches = Wrapped(model, lambda output: output.last_hidden_state[:, 1:].mean(1)).eval()
    assert transformer(patches) is model
    images = sized(model)
    maps = attribution.grad_cam(patches, images, 2)
    assert maps.shape == (2, 4, 6)
    with pytest.raises(ValueError, match="reads no weighted sum"):  # which tokens the wrapper reads is not known
        attribution.relevance(patches, images, 2)


def named(wrapper) -> str:
    """The expression that a refusal names."""
    with pytest.raises(UnsupportedModelError) as caught, capture(wrapper):
        pass
    return re.search(r"`capture\((.*)\)`", str(caught.value))[1]


@pytest.mark.parametrize("name", ["ViTModel", "CLIPModel", "torchvision", "open_clip", "open_clip, timm"])
def test_a_refused_wrapper_names_the_model_inside(name):
    """As a Python expression that is that model, whatever the modules on the way are called."""
    model = small(name)
    wrappers = [
        nn.Sequential(nn.Identity(), model), nn.Sequential(OrderedDict(backbone=model)), nn.ModuleDict({"a'b": model}),
        nn.ModuleList([nn.Sequential(OrderedDict({"class": nn.ModuleDict({"1": model})}))]),
    ]  # fmt: skip
    for wrapper in wrappers:
        assert eval(named(wrapper), {"model": wrapper}) is model


@pytest.mark.parametrize("name", ["Dinov2ForImageClassification", "CLIPModel", "open_clip", "open_clip, timm"])
def test_mlps_and_the_residual_stream_are_replaced(name):
    """An MLP that gives zero leaves the tokens as the attention made them."""
    model = small(name)
    images, about = sized(model, 32, 32), family(model)
    with torch.no_grad():
        with vitlens.intervene(model, mlps={1: "zero"}):
            changed = run(model, images)
        with vitlens.intervene(model, residual={(0, "patches"): "zero"}):
            assert not torch.equal(run(model, images), changed)
        last = [m for m in about.blocks[1].mlp.modules() if isinstance(m, nn.Linear)][-1]
        for parameter in last.parameters():
            parameter.zero_()
        torch.testing.assert_close(run(model, images), changed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["Dinov2ForImageClassification", "Siglip2ForImageClassification", "torchvision"])
def test_ablation(name):
    """What the table says of a head is what switching it off by hand does."""
    model, labels = small(name), torch.arange(9) % 7
    raw = torch.randint(0, 256, (9, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = ImageSet(raw, labels, tuple("0123456"))
    found = ablation.effects(model, data, ways=("zero",), progress=False, say=lambda text: None)
    assert len(found) == 4
    told = family(model).preprocessing
    images = normalized(raw, told["mean"], told["std"])
    for row in found.to_dict("records"):
        with torch.no_grad(), vitlens.intervene(model, heads={(row["layer"], row["head"]): "zero"}):
            right = run(model, images).argmax(1) == labels
        assert row["accuracy"] == pytest.approx(100 * right.float().mean().item())
    assert found.kl.min() > 0


def test_features_have_no_classes_to_lose():
    data = ImageSet(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4), tuple("0123"))
    for name in ("CLIPModel", "open_clip"):
        with pytest.raises(ValueError, match="has none"):
            ablation.effects(small(name), data, progress=False, say=lambda text: None)


def test_lora_is_found_and_seen():
    peft = pytest.importorskip("peft")
    model = small("ViTForImageClassification")
    images = sized(model, 32, 32)
    changed = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
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


BY_THE_MODEL = [positions.table, positions.similarity, filters.kernels, filters.components]
BY_BATCHES = [attention.mean_over]
BY_IMAGES = [
    *attribution.METHODS.values(), models.preprocess, models.restore, models.top_classes, stream.contributions,
    stream.direct, stream.lens, tokens.features,
]  # fmt: skip


@pytest.mark.parametrize("given", ["vit_tiny_patch16_224", {"head.bias": 0}, None])
def test_what_is_no_model_is_refused_in_a_sentence(given):
    x = torch.zeros(1, 3, 64, 64)
    calls = [functools.partial(call, given) for call in BY_THE_MODEL]
    calls += [functools.partial(call, given, [x]) for call in BY_BATCHES]
    calls += [functools.partial(call, given, x) for call in BY_IMAGES]
    calls += [functools.partial(faithfulness.curves, given, x, torch.ones(1, 4, 4), 3)]
    calls += [capture(given).__enter__, intervene(given).__enter__]
    for call in calls:
        with pytest.raises(TypeError, match=f"torch.nn.Module, but got {type(given).__name__}"):
            call()
    if not isinstance(given, str):
        for call in (evaluate, ablation.effects, ablation.pruning):
            with pytest.raises(TypeError, match=f"timm name, a folder or a model.* got {type(given).__name__}"):
                call(given, "digits")


def test_a_tower_that_is_no_transformer_is_refused():
    from open_clip.model import CLIP

    vision = dict(layers=(1, 1, 1, 1), width=32, image_size=32, head_width=16)
    model = CLIP(24, vision, dict(context_length=8, vocab_size=99, width=32, heads=2, layers=2))
    with pytest.raises(UnsupportedModelError, match="ModifiedResNet"), capture(model):
        pass
