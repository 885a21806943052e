"""Models that people write or change themselves: attention that is written out, partial and foreign forwards."""

import contextlib
import copy
import random
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from forms import form
from PIL import Image
from torch import nn

import vitlens
from vitlens import UnsupportedModelError, capture
from vitlens.models import preprocess
from vitlens.models.opening import load_vit
from vitlens.recorder.supported import FAMILIES

SIDE = 32


def by_matrix_products(q, k, v):
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


def by_einsum(q, k, v):
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bhjd->bhid", F.softmax(logits, -1), v)


def by_baddbmm(q, k, v):
    shape = q.shape[:2]
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    start = torch.zeros(())
    logits = torch.baddbmm(start, q, k.transpose(1, 2), beta=0, alpha=q.shape[-1] ** -0.5)
    return (torch.softmax(logits, -1) @ v).unflatten(0, shape)


def by_exponentials(q, k, v):
    weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


class Kernel(torch.autograd.Function):
    """Stands for an attention kernel that is compiled, as flash_attn's."""

    @staticmethod
    def forward(ctx, q, k, v):
        return torch.ops.aten.scaled_dot_product_attention(q, k, v)


class OwnAttention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.num_heads = 3
        self.qkv = nn.Linear(24, 72)
        self.proj = nn.Linear(24, 24)
        self.attend = attend

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class PackedAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=True)[0]


class OwnBlock(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm1 = nn.LayerNorm(24)
        self.attn = attention
        self.norm2 = nn.LayerNorm(24)
        self.mlp = nn.Linear(24, 24)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class OwnViT(nn.Module):
    """A ViT as courses write it: a class token, a learned table and blocks in a list."""

    def __init__(self, *attends, skipped=()):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 24, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 24))
        self.pos = nn.Parameter(torch.randn(1, 17, 24))
        self.blocks = nn.ModuleList(OwnBlock(OwnAttention(attend)) for attend in attends)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 5)
        self.num_classes = 5
        self.skipped = skipped

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return self.head(self.norm(x)[:, 0])


PARTS = dict(blocks="blocks", attention="attn", embedding="patch_embed", patch=8, size=SIDE)


@pytest.fixture(autouse=True)
def registered():
    vitlens.register_model(OwnViT, **PARTS)
    torch.manual_seed(0)
    yield
    FAMILIES.pop(f"{__name__}.OwnViT", None)


def images():
    return torch.rand(2, 3, SIDE, SIDE)


def reason(model, run=None):
    """Sentence of a capture that refuses a forward."""
    with pytest.raises(UnsupportedModelError) as caught, torch.no_grad(), capture(model.eval()):
        (run or model)(images())
    return str(caught.value)


@form(
    8,
    door="Python: capture, own model",
    case="softmax(QKᵀ)V by matrix products, einsum, baddbmm, exponentials, a kernel",
    right="all 4 blocks ran, counted by hand",
)
@pytest.mark.parametrize(
    "attend", [by_matrix_products, by_einsum, by_baddbmm, by_exponentials, Kernel.apply]
)
def test_capture_names_attention_that_is_written_out(attend):
    sentence = reason(OwnViT(*[attend] * 4))
    assert "its 4 blocks ran, but none of them called scaled_dot_product_attention" in sentence
    assert "x = torch.nn.functional.scaled_dot_product_attention(q, k, v)" in sentence
    writes_softmax = attend not in (by_exponentials, Kernel.apply)
    assert ("blocks.0.attn computes a softmax itself" in sentence) == writes_softmax


def test_the_line_that_capture_names_gives_the_maps_of_the_written_out_softmax():
    model = OwnViT(F.scaled_dot_product_attention)
    batch = images()
    with torch.no_grad(), capture(model) as attn:
        model(batch)
    tokens = model.patch_embed(batch).flatten(2).transpose(1, 2)
    tokens = torch.cat([model.cls_token.expand(2, -1, -1), tokens], 1) + model.pos
    q, k, _ = model.blocks[0].attn.qkv(model.blocks[0].norm1(tokens)).double().chunk(3, -1)
    q = q.unflatten(-1, (3, 8)).transpose(1, 2)
    k = k.unflatten(-1, (3, 8)).transpose(1, 2)
    expected = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
    torch.testing.assert_close(attn[0].weights().double(), expected, rtol=1e-5, atol=1e-7)


@form(
    8,
    door="Python: capture, own model, blocks of two kinds",
    case="one of three blocks writes its softmax out",
    right="the block's name",
)
def test_capture_names_the_block_that_is_not_fused():
    fused = F.scaled_dot_product_attention
    sentence = reason(OwnViT(fused, by_einsum, fused))
    assert "not all of them (not blocks.1.attn)" in sentence


@form(
    8,
    door="Python: capture, nn.MultiheadAttention(need_weights=True)",
    case="own blocks with PyTorch's module",
    right="PyTorch's weights",
)
def test_capture_equals_weights_of_multihead_attention():
    model = OwnViT(None)
    model.blocks[0].attn = PackedAttention(24, 3, batch_first=True)
    batch = images()
    with torch.no_grad(), capture(model.eval()) as attn:
        model(batch)
        given = []
        hook = model.blocks[0].norm1.register_forward_hook(
            lambda m, a, output: given.append(output)
        )
    with torch.no_grad():
        model(batch)
        hook.remove()
        x = given[-1]
        _, weights = nn.MultiheadAttention.forward(
            model.blocks[0].attn, x, x, x, average_attn_weights=False
        )
    torch.testing.assert_close(attn[0].weights(), weights, rtol=1e-5, atol=1e-7)


@form(
    8,
    door="Python: capture, own model that drops layers",
    case="blocks 1 and 2 of 4 are skipped",
    right="the skipped blocks, counted by hand",
)
def test_capture_names_skipped_blocks():
    sentence = reason(OwnViT(*[F.scaled_dot_product_attention] * 4, skipped=(1, 2)))
    assert "2 of its 4 blocks ran, and blocks 1 and 2 did not" in sentence


@form(
    8,
    door="Python: capture, an error that the caller catches",
    case="block 1 raises",
    right="the number of the block",
)
def test_capture_names_the_block_of_an_error():
    def fail(q, k, v):
        raise RuntimeError

    model = OwnViT(F.scaled_dot_product_attention, fail)

    def run(batch):
        with contextlib.suppress(RuntimeError):
            model(batch)

    assert "ended with an error in block 1" in reason(model, run)


@form(
    8,
    door="Python: capture, another thread",
    case="the model runs in a thread",
    right="the thread is named",
)
def test_capture_names_another_thread():
    model = OwnViT(F.scaled_dot_product_attention)

    def run(batch):
        thread = threading.Thread(target=model, args=(batch,))
        thread.start()
        thread.join()

    assert "ran in another thread" in reason(model, run)


@form(
    8,
    door="Python: capture, a copy or a traced program",
    case="deepcopy, torch.jit.trace, torch.export",
    right="the model itself did not run",
)
@pytest.mark.parametrize("program", ["deepcopy", "jit", "export"])
@pytest.mark.filterwarnings("ignore")
def test_capture_names_a_copy(program):
    model = OwnViT(F.scaled_dot_product_attention).eval()
    batch = images()
    programs = {
        "deepcopy": lambda x: copy.deepcopy(model)(x),
        "jit": torch.jit.trace(model, batch),
        "export": torch.export.export(model, (batch,)).module(),
    }
    assert "it was not run inside" in reason(model, programs[program])


@form(
    8,
    door="Python: capture, torch.func.functional_call",
    case="other parameters than the model's",
    right="the module's name",
)
def test_capture_names_other_parameters():
    model = OwnViT(F.scaled_dot_product_attention)
    others = {name: value.detach().clone() for name, value in model.named_parameters()}
    sentence = reason(model, lambda x: torch.func.functional_call(model, others, x))
    assert "blocks.0.attn ran without its own parameters" in sentence


@form(
    8,
    door="Python: capture, int8 by quantize_dynamic",
    case="timm's ViT and an own one",
    right="the class of the weights",
)
@pytest.mark.parametrize("own", [True, False])
def test_capture_names_quantized_weights(own):
    model = OwnViT(F.scaled_dot_product_attention)
    if not own:
        model = timm.models.VisionTransformer(
            img_size=SIDE, patch_size=8, embed_dim=24, depth=1, num_heads=3
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        int8 = torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, torch.qint8)
    sentence = reason(int8)
    assert "quantized weights (torch.ao.nn.quantized" in sentence and "not run" not in sentence


class OwnProjections(nn.Module):
    """Only the output projection: q, k and v come from outside."""

    def __init__(self):
        super().__init__()
        self.num_heads = 3
        self.proj = nn.Linear(24, 24)

    def forward(self, qkv):
        q, k, v = qkv.unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@form(
    8,
    door="Python: register_model(attention=)",
    case="a module without the projections of q, k and v",
    right="one call of fused attention, counted by hand",
)
def test_capture_names_an_attention_module_without_its_projections():
    model = OwnViT(None)
    model.blocks[0].norm1 = nn.Linear(24, 72)
    model.blocks[0].attn = OwnProjections()
    assert "the 1 calls of scaled_dot_product_attention came after" in reason(model)


@form(
    8,
    door="Python: intervene, own model",
    case="softmax(QKᵀ)V by matrix products",
    right="the block ran",
)
def test_intervene_names_attention_that_is_written_out():
    model = OwnViT(by_matrix_products)
    with pytest.raises(RuntimeError) as caught, vitlens.intervene(model, heads={(0, 0): "zero"}):
        model(images())
    assert "called scaled_dot_product_attention" in str(caught.value)
    assert "did not run" not in str(caught.value)


@form(
    8,
    door="Python: capture, a model built in inference_mode",
    case="own softmax in float64",
    right="softmax of q and k",
)
def test_capture_reads_a_model_built_in_inference_mode():
    with torch.inference_mode():
        model = OwnViT(F.scaled_dot_product_attention).eval()
    with torch.no_grad(), capture(model) as attn:
        model(images())
    q = attn[0].q.double()
    k = attn[0].k.double()
    expected = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
    torch.testing.assert_close(attn[0].weights().double(), expected, rtol=1e-5, atol=1e-7)


@form(
    6,
    door="Python: register_model(mean=, std=, size=)",
    case="gray of level 51 for an own model",
    right="(0.2 − mean) / std by hand",
)
def test_preprocess_uses_the_registered_input():
    vitlens.register_model(OwnViT, **PARTS, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    gray = Image.new("RGB", (SIDE, SIDE), (51, 51, 51))
    notes = []
    batch = preprocess(OwnViT(by_einsum), gray, on_note=notes.append)
    expected = torch.tensor([0.2, 0.0, -0.8]).view(1, 3, 1, 1).expand(1, 3, SIDE, SIDE)
    torch.testing.assert_close(batch, expected, rtol=1e-5, atol=1e-6)
    assert not notes


def test_preprocess_notes_a_registered_model_without_mean_and_std():
    with pytest.warns(UserWarning, match="its preprocessing is a guess"):
        preprocess(OwnViT(by_einsum), Image.new("RGB", (SIDE, SIDE)))


@form(
    8,
    door="Python: register_model(positions=), path, embedding and function",
    case="a parameter, nn.Embedding and a function",
    right="the rows of the parameter after the class token",
)
def test_positions_are_those_that_register_model_names():
    model = OwnViT(by_einsum)
    expected = model.pos.detach()[0, 1:].unflatten(0, (4, 4))
    with pytest.raises(ValueError, match="Give `register_model` their path as positions="):
        vitlens.positions.table(model)
    model.table = nn.Embedding.from_pretrained(model.pos.detach()[0])
    for positions in ("pos", "table", lambda own: own.pos):
        vitlens.register_model(OwnViT, **PARTS, positions=positions)
        assert torch.equal(vitlens.positions.table(model), expected)
    for positions in ("absent", "cls_token", "blocks"):
        vitlens.register_model(OwnViT, **PARTS, positions=positions)
        with pytest.raises(ValueError, match="at least 16 tokens for 4 × 4 patches"):
            vitlens.positions.table(model)


def test_register_model_example_of_the_documentation_runs():
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## Your own ViT")
    code = section.split("```python")[1].split("```")[0]
    names = {"__name__": "example"}
    try:
        exec(compile(code, "docs/models.md", "exec"), names)
    finally:
        FAMILIES.pop("example.MyViT", None)
    assert names["images"].shape == (1, 3, 96, 96)
    assert names["attn"][1].weights().shape == (1, 3, 37, 37)
    assert names["similarity"].shape == (6, 6, 6, 6)


@form(
    8,
    door="Python: capture, classes of transformers and torchvision",
    case="VideoMAE, Swin, MViT",
    right="the library's own classes, and no register_model",
)
def test_refusals_name_the_classes_of_the_library():
    transformers = pytest.importorskip("transformers")
    small = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=24)
    swin = transformers.SwinConfig(depths=[1], num_heads=[1], embed_dim=12)
    with torch.device("meta"):
        models = {
            transformers.VideoMAEModel(transformers.VideoMAEConfig(**small)): "Dinov2Model",
            transformers.SwinModel(swin): "windows of the image.*Dinov2Model",
            torchvision.models.video.mvit_v2_s(): "vit_b_16 to vit_h_14",
            torchvision.models.swin_t(): "windows of the image",
        }
    for model, words in models.items():
        with pytest.raises(UnsupportedModelError, match=words) as caught:
            capture(model).__enter__()
        assert "register_model" not in str(caught.value) and "NaFlexVit" not in str(caught.value)


@form(
    8,
    door="command: inspect, explain and page, a name",
    case="resnet50, a Swin and torchvision:swin_t, without a network",
    right="refused before the weights are opened",
)
@pytest.mark.parametrize("name", ["resnet50", "swin_tiny_patch4_window7_224", "torchvision:swin_t"])
def test_commands_refuse_a_class_before_its_weights(name, monkeypatch):
    opened = []
    monkeypatch.setattr(timm.models._builder, "load_pretrained", lambda *a, **b: opened.append(a))
    with pytest.raises(UnsupportedModelError, match="cannot show the attention of"):
        load_vit(name)
    assert not opened


@form(
    8,
    door="Python: load_model(size=), timm and torchvision",
    case="arguments of another library",
    right="the argument of the library's constructor",
)
def test_load_model_names_the_argument_that_was_meant():
    for name, option, meant in (
        ("vit_tiny_patch16_224", "size", "img_size"),
        ("vit_tiny_patch16_224", "classes", "num_classes"),
        ("torchvision:vit_b_32", "img_size", "image_size"),
    ):
        with pytest.raises(ValueError, match=f"Did you mean {meant}"):
            vitlens.load_model(name, pretrained=False, **{option: 64})


@form(
    8,
    door="Python: load_model, a path",
    case="a file of weights that does not exist",
    right="the path",
)
def test_load_model_names_a_missing_file():
    with pytest.raises(ValueError, match=r"absent/model.safetensors does not exist"):
        vitlens.load_model("absent/model.safetensors")


class Counting(nn.Module):
    """A timm model with a hook that counts images in a buffer, updates statistics and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.inner = timm.create_model(
            "vit_tiny_patch16_224", img_size=SIDE, embed_dim=24, depth=1, num_heads=3
        )
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_forward_pre_hook(self.count)

    def count(self, module, args):
        self.seen += len(args[0])
        F.batch_norm(args[0], self.norm.running_mean, self.norm.running_var, training=True)
        random.random()
        np.random.rand()
        torch.rand(1)

    def forward(self, images):
        return self.inner(images)


@form(
    6,
    door="Python: preprocess, a module with hooks",
    case="a pre-hook that counts in a buffer, updates batch statistics and draws random numbers, in training mode",
    right="the state before",
)
def test_preprocess_leaves_the_state_of_a_module_with_hooks():
    model = Counting().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert preprocess(model, Image.new("RGB", (40, 40)), size=(SIDE, SIDE)).shape[2:] == (
        SIDE,
        SIDE,
    )
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert states == after
    assert model.training and model.norm.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@form(
    8,
    door="Python: capture, a recorded program",
    case="torch.jit.trace and torch.fx",
    right="the class of the program",
)
@pytest.mark.parametrize("record", [torch.fx.symbolic_trace, torch.jit.script])
def test_capture_names_a_recorded_program(record):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        program = record(model)
    assert "a program that torch.jit, torch.export or torch.fx recorded" in reason(program)


@form(
    8,
    door="Python: ablation.effects, a name of an unsupported class",
    case="a ConvNet of timm by its name",
    right="refused before its weights are opened",
)
def test_ablation_refuses_a_class_before_its_weights(monkeypatch):
    from vitlens_paper.evaluate import ablation

    monkeypatch.setattr(ablation, "open_session", None)
    with pytest.raises(UnsupportedModelError, match="not a Vision Transformer"):
        ablation.effects("resnet18", "digits")
