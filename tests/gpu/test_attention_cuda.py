"""On a GPU, captures are exact and change nothing, and statistics equal the CPU's in float32 and bfloat16."""

import pytest
import timm
import torch

from vitlens import attention, capture

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO CUDA DEVICE: the GPU tests were not run"
)

FAMILIES = [
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "eva02_tiny_patch14_224",
    "beit_base_patch16_224",
    "vit_base_patch16_siglip_224",
    "vit_relpos_small_patch16_224",
    "vit_tiny_r_s16_p8_224",
    "vit_small_patch16_18x2_224",
    "vit_base_patch16_xp_224",
    "naflexvit_base_patch16_gap",
]


def shrunk(name):
    torch.manual_seed(0)
    model = timm.create_model(name, depth=3, embed_dim=192, num_heads=3, num_classes=10).eval()
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.parameters():
                parameter.mul_(2.0)
    return model, torch.randn(2, *model.pretrained_cfg["input_size"])


def seen(model, images):
    with torch.no_grad(), capture(model, values=True) as attn:
        logits = model(images)
    return logits, attn


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capture_is_exact_and_invisible(name, dtype):
    model, images = shrunk(name)
    model, images = model.cuda().to(dtype), images.cuda().to(dtype)
    with torch.no_grad():
        plain = model(images)
    logits, attn = seen(model, images)
    assert torch.equal(plain, logits)
    tolerance = dict(atol=1e-5, rtol=1e-3) if dtype == torch.float32 else dict(atol=2e-2, rtol=2e-2)
    for layer in attn:
        torch.testing.assert_close(
            layer.weights() @ layer.v.float(), layer.output.float(), **tolerance
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_statistics_agree_with_the_cpu(name):
    model, images = shrunk(name)
    expected = attention.summary(seen(model, images)[1])
    got = attention.summary(seen(model.cuda(), images.cuda())[1])
    for part in ("mean_distance", "entropy", "received", "rollout"):
        torch.testing.assert_close(
            getattr(got, part).cpu(), getattr(expected, part), rtol=2e-3, atol=1e-6
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_statistics_are_those_of_its_queries_and_keys(name):
    """Given q and k in bfloat16, the statistics equal those in float64."""
    model, images = shrunk(name)
    model, images = model.cuda().bfloat16(), images.cuda().bfloat16()
    _, attn = seen(model, images)
    got = attention.summary(attn)
    prefix, distances = attn.grid.prefix, attn.grid.distances(dtype=torch.float64, device="cuda")
    for index, layer in enumerate(attn):
        logits = layer.q.double() @ layer.k.double().mT * layer.scale
        maps = (logits if layer.mask is None else logits + layer.mask.double()).softmax(-1)
        distance = (maps[:, :, prefix:, prefix:] * distances).sum((-1, -2)) / attn.grid.patches
        torch.testing.assert_close(
            got.mean_distance[:, index].double(), distance, rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            got.entropy[:, index].double(),
            torch.special.entr(maps).sum(-1).mean(-1),
            rtol=1e-4,
            atol=1e-4,
        )
        torch.testing.assert_close(
            got.received[:, index].double(), maps.mean(-2)[..., prefix:], rtol=1e-3, atol=1e-7
        )


def test_autocast_and_compile():
    model, images = shrunk("vit_tiny_patch16_224")
    model, images = model.cuda(), images.cuda()
    exact = attention.mean_distance(seen(model, images)[1])
    with torch.autocast("cuda", torch.bfloat16):
        low = attention.mean_distance(seen(model, images)[1])
    torch.testing.assert_close(low, exact, rtol=5e-2, atol=1.0)
    compiled = torch.compile(model)
    with torch.no_grad():
        before = compiled(images)
        with capture(model) as attn:
            compiled(images)
        assert torch.equal(compiled(images), before)
    torch.testing.assert_close(attention.mean_distance(attn), exact, rtol=1e-3, atol=1e-3)
