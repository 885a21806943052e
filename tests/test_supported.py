"""Every class of transformers, torchvision and open_clip that vitlens knows, against the library's own attention."""

import csv
import importlib.metadata

import pytest
import torch
from supported_support import CLASSIFIERS, EVERY, LIBRARIES, TABLE, eager, last_linear, sized, small, survey

import vitlens
from vitlens import capture, stream, tokens
from vitlens.attribution import METHODS, like
from vitlens.attribution.target import bound
from vitlens.recorder.forward import run
from vitlens.recorder.supported import UnsupportedModelError, family, pooled

every = pytest.mark.parametrize("name", EVERY)
SOME = ["ViTForImageClassification", "DeiTForImageClassificationWithTeacher", "BeitForImageClassification",
        "Dinov2WithRegistersForImageClassification", "CLIPModel", "Siglip2Model", "torchvision", "open_clip",
        "open_clip, pool", "open_clip, timm"]  # fmt: skip
some = pytest.mark.parametrize("name", SOME)


def captured(model, images, **options):
    with torch.no_grad(), capture(model, **options) as attn:
        return attn, run(model, images)


@pytest.fixture(autouse=True)
def without_the_fast_path():
    """PyTorch's, of nn.MultiheadAttention: its rounding is another."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@every
def test_maps_equal_the_librarys_own_path(name, atol=1e-9):
    model = small(name).double()
    images = sized(model)
    with torch.no_grad():
        plain = run(model, images)
    attn, output = captured(model, images)
    assert torch.equal(output, plain)
    with torch.no_grad(), eager(model) as maps:
        run(model, images)
    maps = maps[: len(attn)]  # without those of a pool
    assert len(attn) == len(maps) >= 2
    for layer, expected in zip(attn, maps, strict=True):
        torch.testing.assert_close(layer.weights(), expected.view_as(layer.weights()), atol=atol, rtol=0)
    assert attn.grid.image == tuple(images.shape[-2:]) and attn.grid.tokens == maps[0].shape[-1]


@every
def test_the_row_that_is_read_is_found_by_changing_tokens(name):
    model = small(name)
    attn, plain = captured(model, sized(model, batch=1))
    grid, generator = attn.grid, torch.Generator().manual_seed(2)

    def change(module, args, output):
        batch = output.repeat(grid.tokens + 1, 1, 1)
        each = torch.arange(grid.tokens)
        batch[each + 1, each] += torch.randn(output.shape[-1], generator=generator)
        return batch

    hook = family(model).blocks[-1].register_forward_hook(change)
    with torch.no_grad():
        output = run(model, sized(model, batch=1))
    hook.remove()
    assert torch.allclose(output[:1], plain, atol=1e-5)
    moved = (output[1:] - output[0]).abs().amax(1) > 1e-5
    if grid.readout is None:  # a class token beside the mean of the patches is no single row
        assert "Dinov2" in name and moved.tolist() == [p not in range(1, grid.prefix) for p in range(grid.tokens)]
    else:
        row = grid.readout.expand(1, -1)[0]
        torch.testing.assert_close(row.sum(), torch.tensor(1.0))
        assert moved.tolist() == (row > 1e-6).tolist()
        assert row[moved].std(correction=0) < 1e-6 or attn.pool is not None


@every
def test_tokens_and_head(name):
    model = small(name)
    images, about = sized(model), family(model)
    with torch.no_grad():
        layers, output = tokens.features(model, images)
        assert torch.equal(output, run(model, images))
        torch.testing.assert_close(about.head(layers[-1]), output, atol=1e-5, rtol=1e-5)
    assert len(layers) == len(about.blocks) and layers[0].shape[:2] == (2, about.grid(images.shape[-2:]).tokens)
    assert len(about.prefix) == about.grid(images.shape[-2:]).prefix


@pytest.mark.parametrize("name", ["ViTModel", "Siglip2Model", "torchvision", "open_clip"])
def test_filters_give_the_tokens_of_patches(name):
    model = small(name)
    images, about = sized(model), family(model)
    filters, patch_size = vitlens.filters.kernels(model), about.grid(images.shape[-2:]).patch
    assert filters.shape[1:] == (*patch_size, 3)
    patch = images[:1, :, : patch_size[0], : patch_size[1]]
    first = torch.einsum("dpqc,cpq->d", filters, patch[0])
    seen = []
    hook = about.embedding.register_forward_hook(lambda m, args, out: seen.append(out))
    with torch.no_grad():
        run(model, images[:1])
    hook.remove()
    bias = 0 if about.embedding.bias is None else about.embedding.bias
    found = seen[0][0, :, 0, 0] if seen[0].dim() == 4 else seen[0][0, 0]
    torch.testing.assert_close(found, first + bias, atol=1e-5, rtol=1e-5)


@some
def test_position_tables_are_where_the_model_adds_them(name):
    """A change of one entry of the table changes the tokens of one patch at the first block."""
    model = small(name)
    about = family(model)
    table = about.positions()
    if table is None:
        assert any(kind in name for kind in ("Beit", "DINOv3"))
        return
    images, seen = sized(model, *about.built_size, batch=1), []
    hook = about.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(args[0][0]))
    row, col = 1, table.shape[1] - 1
    with torch.no_grad():
        run(model, images)
        table[row, col] += torch.randn(table.shape[-1])  # a view of the parameter
        run(model, images)
    hook.remove()
    changed = (seen[1] - seen[0]).abs().amax(1) > 1e-6
    assert changed.nonzero().tolist() == [[about.grid(about.built_size).index(row, col)]]


@pytest.mark.parametrize("name", [name for name in SOME if name in CLASSIFIERS])
def test_gradients_of_a_class_are_autograds_by_the_librarys_own_path(name):
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
        found = layer.weights_gradient()
        torch.testing.assert_close(found, expected.view_as(found), atol=1e-6, rtol=1e-6)
        assert expected.abs().max() > 1e-5


NO_ROW = ("relevance", "gradient_rollout", "attention_gradient", "rollout", "attention")


@pytest.mark.parametrize("name", [name for name in SOME if name in CLASSIFIERS])
def test_every_method_of_attribution(name):
    """All maps, but for what is refused in a sentence: DINOv2's classifier reads no row of attention."""
    model = small(name)
    images, refused = sized(model), set(NO_ROW) if "Dinov2" in name else set()
    grid = family(model).grid(images.shape[-2:])
    for method in METHODS.values():
        if method.name in refused:
            with pytest.raises(ValueError, match=type(model).__name__):
                method(model, images, [3, 5])
        else:
            maps = method(model, images, [3, 5])
            assert maps.shape == (2, grid.rows, grid.cols) and maps.isfinite().all() and maps.any(), method.name


@some
def test_the_parts_of_the_stream_add_up(name):
    """To the logit, or to the cosine with another picture, for each image of a batch; and patches to their heads."""
    model = small(name).double()
    images = sized(model, 32, 32, batch=3)
    target = [2, 5, 0] if family(model).classes else like(sized(model, 32, 32, batch=1, seed=5))
    found, written = stream.apart(model, images, target)
    torch.testing.assert_close(found.parts.sum(1), found.logits, atol=1e-9, rtol=0)
    torch.testing.assert_close(written.sum(-1), found.heads, atol=1e-9, rtol=0)
    with torch.no_grad():
        said = pooled(model, images)
        if not family(model).classes:
            expected = bound(model, target)[0].score(said)
        else:
            expected = run(model, images)[range(3), target]
    torch.testing.assert_close(found.logits, expected, atol=1e-9, rtol=0)
    assert found.heads.abs().amax((0, 2)).min() > 1e-6 and found.mlps.abs().amax(0).min() > 1e-6


@pytest.mark.parametrize("name", ["ViTForImageClassification", "torchvision"])
def test_what_a_head_adds_by_hand(name):
    """Its output for the class token times its part of the projection, normalized as the whole is, times the class."""
    model, target = small(name).double(), 3
    images, about = sized(model, 32, 32, batch=2), family(model)
    found = stream.contributions(model, images, target)
    norm = model.vit.layernorm if name != "torchvision" else model.encoder.ln
    with torch.no_grad(), capture(model, values=True) as attn:
        read = tokens.features(model, images)[0][-1][:, 0]
    scale = norm.weight * last_linear(model).weight[target] / (read.var(-1, correction=0) + norm.eps).sqrt()[:, None]
    for number, ((_, module),) in enumerate(about.attention()):
        weight = (module.o_proj if hasattr(module, "o_proj") else module.out_proj).weight
        added = torch.einsum("bhk,dhk->bhd", attn[number].output[:, :, 0], weight.unflatten(1, (2, -1)))
        expected = ((added - added.mean(-1, keepdim=True)) * scale[:, None]).sum(-1)
        torch.testing.assert_close(found.heads[:, number], expected, atol=1e-9, rtol=0)
        mlp = []
        hook = about.blocks[number].mlp.register_forward_hook(lambda m, args, out, mlp=mlp: mlp.append(out[:, 0]))
        with torch.no_grad():
            run(model, images)
        hook.remove()
        expected = ((mlp[0] - mlp[0].mean(-1, keepdim=True)) * scale).sum(-1)
        torch.testing.assert_close(found.mlps[:, number], expected, atol=1e-9, rtol=0)


def test_a_nonlinear_pooler_is_refused():
    model = small("ViTModel")
    with pytest.raises(UnsupportedModelError, match="pooler"):
        stream.contributions(model, sized(model), like(sized(model, batch=1)))


def test_the_table_says_the_same():
    """But for the size of errors, which is rounding; where the versions are those of the table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        said = file.readline()
        table = list(csv.DictReader(file))
    assert [row["model"] for row in table][-len(EVERY) :] == EVERY
    if any(f"{name} {importlib.metadata.version(name)}" not in said for name in LIBRARIES):
        pytest.skip(f"the table is of {said.strip()}; `python tests/supported_support.py` writes it anew")
    for name in (
        "ViTForImageClassification",
        "Dinov2ForImageClassification",
        "SiglipModel",
        "torchvision",
        "open_clip",
    ):
        row = survey(name)
        assert float(row.pop("error")) < 1e-9
        assert row == {k: v for k, v in next(each for each in table if each["model"] == name).items() if k != "error"}
