"""Every model of timm is captured exactly or refused with a reason.

The quick part takes one model of each kind; `pytest -m slow` (make test-all) takes every name timm has.
"""

import pytest
import timm
import torch
from support import CHUNKS, QUICK, check_all, chunk

from experiments.timm_support import read_table, shrunk, survey
from vitlens import attention
from vitlens.recorder.record import capture

VERSION, TABLE = read_table()


REFUSED = {
    "swin_tiny_patch4_window7_224": "windows",
    "cait_xxs24_224": "mixes the heads",
    "vit_dwee_patch16_reg1_gap_256": "two softmaxes",
    "resnet50_clip": "convolutions",
    "repvit_m0_9": "is not among those known",
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


@pytest.mark.slow
@pytest.mark.parametrize("number", range(CHUNKS))
def test_capture_is_exact_or_refuses_every_model(number):
    check_all(check, chunk(own_models(), number))
