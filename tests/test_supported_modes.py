"""What models of other libraries do besides their maps: precisions, sizes, modes, wrappers, and what is refused."""

import re
from collections import OrderedDict

import pytest
import torch
from supported_support import eager, sized, small
from torch import nn

import vitlens
from vitlens import (
    attribution,
    capture,
    tokens,
)
from vitlens.recorder.forward import run
from vitlens.recorder.supported import UnsupportedModelError, family, head_count, transformer


def captured(model, images, **options):
    with torch.no_grad(), capture(model, **options) as attn:
        return attn, run(model, images)


@pytest.mark.parametrize("name", ["BeitModel", "DINOv3ViTModel", "SiglipModel", "torchvision", "open_clip"])
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


@pytest.mark.parametrize("name", ["ViTForImageClassification", "DINOv3ViTModel", "torchvision"])
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


@pytest.mark.parametrize("name", ["ViTModel", "BeitModel", "DINOv3ViTModel", "CLIPModel", "Siglip2Model"])
def test_images_of_other_sizes(name):
    """Each image attends as it does alone, and patches are counted along each side."""
    model = small(name)
    images = sized(model, 24, 64)
    attn, output = captured(model, images)
    alone, single = captured(model, images[1:])
    assert (attn.grid.rows, attn.grid.cols) == (3, 8)
    torch.testing.assert_close(attn[1].weights()[1:], alone[1].weights(), atol=1e-5, rtol=0)
    torch.testing.assert_close(output[1:], single, atol=1e-5, rtol=1e-5)


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
    (_resnet_tower, "ModifiedResNet"),
]


@pytest.mark.parametrize("build, words", REFUSED)
def test_capture_refuses(build, words):
    with pytest.raises(UnsupportedModelError, match=words), capture(build()):
        pass


def test_capture_refuses_attention_dropout():
    model = small("ViTModel", attention_probs_dropout_prob=0.1).train()
    with pytest.raises(UnsupportedModelError, match="eval"):
        captured(model, sized(model))


@pytest.mark.parametrize("name", ["torchvision", "open_clip"])
def test_images_of_another_size_are_refused(name):
    with pytest.raises(ValueError, match="32 × 32.*got 24 × 32"):
        tokens.features(small(name), torch.randn(1, 3, 24, 32))


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


@pytest.mark.parametrize("name", ["ViTModel", "open_clip, timm"])
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
