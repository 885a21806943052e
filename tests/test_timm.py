"""Every model of timm is captured exactly or refused with a reason.

The quick part takes one model of each kind; `pytest -m slow` (make test-all) takes every name timm has.
"""

import re

import pytest
import timm
import torch
from support import CHUNKS, QUICK, check_all, chunk
from torch import nn
from torch.overrides import TorchFunctionMode

import vitlens
from experiments.timm_support import read_table, shrunk, survey
from vitlens import UnsupportedModelError, attention, capture
from vitlens.recorder.supported import lookup, registration
from vitlens.recorder.supported import timm as timm_models

VERSION, TABLE = read_table()


REFUSED = {
    "swin_tiny_patch4_window7_224": "windows",
    "cait_xxs24_224": "mixes the heads",
    "vit_dwee_patch16_reg1_gap_256": "two softmaxes",
    "resnet50_clip": "convolutional network",
    "repvit_m0_9": "convolutions, without attention",
    "coat_lite_tiny": "linear",
    "edgenext_xx_small": "softmax over channels",
    "efficientvim_m1": "state space model",
}


def check_survey(name):
    """Row of a model, equal to the table's if timm has the table's version."""
    row = survey(name)
    assert row["captured"] in ("yes", "no")
    if row["captured"] == "no":
        assert "vitlens cannot show the attention of" in row["reason"] and len(row["reason"]) > 60
    if timm.__version__ == VERSION:
        assert row == TABLE[name]
    return row


def check_exact(name):
    """Maps equal the module's, logits are unchanged, and the read-out row marks the tokens that the head reads."""
    model = shrunk(name)
    images = torch.randn(
        1, *model.pretrained_cfg["input_size"], generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        plain = model(images)
        with capture(model, values=True) as attn:
            logits = model(images)
        assert torch.equal(plain, logits)
        assert len(attn) == len(model.blocks)
        for layer in attn:
            weights = layer.weights()
            torch.testing.assert_close(
                weights.sum(-1), torch.ones_like(weights[..., 0]), atol=1e-5, rtol=0
            )
            torch.testing.assert_close(weights @ layer.v, layer.output, atol=1e-5, rtol=1e-4)
        check_readout(model, images, attn)
        total = attention.received(attn)
        assert total.shape == (1, len(attn), attn[0].q.shape[1], attn.grid.patches)


def check_readout(model, images, attn):
    """Perturb tokens after the last block, one per row of a batch. The output moves where the read-out is nonzero."""
    grid = attn.grid
    if grid.readout is None:
        return
    readout = grid.readout if grid.readout.dim() == 1 else grid.readout[0]
    torch.testing.assert_close(readout.sum(), torch.tensor(1.0))
    assert readout.shape == (grid.tokens,)
    generator = torch.Generator().manual_seed(2)
    some = torch.randperm(grid.patches, generator=generator)[:12] + grid.prefix
    tokens = torch.cat([torch.arange(grid.prefix), some])

    def perturb(module, args, output):
        batch = output.repeat(len(tokens) + 1, 1, 1)
        noise = torch.randn(output.shape[-1], generator=generator)
        batch[torch.arange(len(tokens)) + 1, tokens] += 10 * output.std() * noise
        return batch

    with model.blocks[-1].register_forward_hook(perturb):
        logits = model(images)
    moved = (logits[1:] - logits[0]).abs().amax(1) > 1e-4 * logits[0].abs().max()
    assert moved.tolist() == (readout[tokens] > 1e-6).tolist()


def check(name, must=False):
    captured = check_survey(name)["captured"] == "yes"
    assert captured or not must
    if captured:
        check_exact(name)


@pytest.mark.parametrize("names", [QUICK[0::2], QUICK[1::2]], ids=["even", "odd"])
def test_capture_is_exact_for_one_model_of_each_kind(names):
    check_all(lambda name: check(name, must=True), names)


def test_capture_refuses_with_the_reason():
    for name, word in REFUSED.items():
        row = check_survey(name)
        assert row["captured"] == "no" and word in row["reason"]


def test_refusals_without_attention_are_true():
    """The forward of a refused model makes no softmax and no call of fused attention."""
    for name in ("gmlp_ti16_224", "starnet_s050"):
        assert "without attention" in TABLE[name]["reason"]
        assert not attention_calls(name), name


@pytest.mark.slow
def test_refusals_without_attention_are_true_for_every_class():
    names = {
        row["class"]: name for name, row in TABLE.items() if "without attention" in row["reason"]
    }
    assert len(names) > 40
    made = {kind for kind, name in names.items() if attention_calls(name)}
    # the state space model weighs its states by a softmax, and its classifiers by another
    assert made == {"EfficientViM", "EfficientViMDistilled"}


class AttentionCalls(TorchFunctionMode):
    """The calls of softmax and fused attention."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if "softmax" in name or name == "scaled_dot_product_attention":
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


def attention_calls(name):
    """Names of the calls of softmax and fused attention in a forward on the meta device."""
    with torch.device("meta"):
        model = timm.create_model(name).eval()
        images = torch.empty(1, *model.pretrained_cfg["input_size"])
    with torch.no_grad(), AttentionCalls() as made:
        model(images)
    return made.calls


def test_refused_towers_are_captured_once_registered(monkeypatch):
    """The call that the refusal of a language model's image tower gives works with the tower's patch and size."""
    monkeypatch.setattr(registration, "FAMILIES", {})
    monkeypatch.setattr(lookup, "FAMILIES", registration.FAMILIES)
    for name in ("qwen3_vit_88m", "gemma4_vit_167m_enc", "deepseek_vit_412m"):
        with torch.device("meta"):
            model = timm.create_model(name, depth=2).eval()
            images = torch.empty(1, 3, 336, 672)
        with pytest.raises(UnsupportedModelError) as refusal, capture(model):
            pass
        patch = 14 if "deepseek" in name else 16
        call = re.search(r"`(.+?)`", str(refusal.value))[1]
        filled = call.replace("patch=…", f"patch={patch}").replace("size=…", "size=672")
        assert filled != call
        exec(filled, {"vitlens": vitlens, "model": model})
        with torch.no_grad(), capture(model) as attn:
            model(images)
        assert (attn.grid.rows, attn.grid.cols) == (336 // patch, 672 // patch)
        assert attn[0].q.shape[-2] == attn.grid.patches and attn.complete


def test_refusals_of_timm_do_not_reach_namesakes():
    """A class of another package with the name of a refused class of timm gets the general sentence."""

    class ResNet(nn.Module):
        pass

    class MyResNet(timm.models.resnet.ResNet):
        pass

    with pytest.raises(UnsupportedModelError, match="is not among those known.*register it by"):
        capture(ResNet()).__enter__()
    with torch.device("meta"):
        extended = MyResNet(timm.models.resnet.BasicBlock, (1, 1, 1, 1))
    with pytest.raises(UnsupportedModelError, match="without attention between patches"):
        capture(extended).__enter__()


def own_models():
    """Names of timm's models, without those that other tests have registered."""
    return [
        name
        for name in timm.list_models()
        if timm.models.model_entrypoint(name).__module__.startswith("timm.")
    ]


def test_support_table_has_every_model():
    if timm.__version__ != VERSION:
        pytest.skip(
            f"the table is of timm {VERSION}; `python -m experiments.timm_support` writes it anew"
        )
    assert set(TABLE) == {*own_models()}
    assert sum(row["captured"] == "yes" for row in TABLE.values()) == 303
    assert sum(row["stream"] == "yes" for row in TABLE.values()) == 297


def test_support_table_has_the_reasons_of_the_code():
    """Every refused class has a reason of its own. Only a part of the models of a supported class are refused."""
    supported = {name.rsplit(".", 1)[-1] for name in timm_models.MODELS}
    for row in TABLE.values():
        if row["captured"] == "no" and row["class"] not in supported:
            assert row["reason"].endswith(
                f"({row['class']}): {timm_models._REASONS[row['class']]}."
            )


@pytest.mark.slow
@pytest.mark.parametrize("number", range(CHUNKS))
def test_capture_is_exact_or_refuses_every_model(number):
    check_all(check, chunk(own_models(), number))
