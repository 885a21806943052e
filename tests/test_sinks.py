"""Outliers and received attention equal a forward by hand, and a register takes over planted outliers."""

import numpy as np
import pytest
import timm
import torch

from experiments.registers import register_neurons, roughness, with_register
from experiments.sinks import outliers, ratios, sinks
from experiments.sinks_lens import MOST, named
from vitlens import attention, capture, tokens

NEURON = (1, 40)  # layer and hidden unit that makes the planted outliers


def small(name="vit_tiny_patch16_224", **more):
    torch.manual_seed(0)
    sizes = (
        dict(img_size=64, patch_size=16, embed_dim=48, depth=4, num_heads=3, num_classes=5) | more
    )
    return timm.create_model(name, **sizes).eval()


def planted(**more):
    """A model in which one neuron of layer 1 gives the two dark patches of each image a huge norm."""
    model = small(**more).double()
    layer, neuron = NEURON
    with torch.no_grad():
        rng = torch.Generator().manual_seed(1)
        direction = torch.randn(48, generator=rng, dtype=torch.float64)
        bright, dark = model.patch_embed(pictures()).flatten(0, 1)[[1, 0]]
        model.patch_embed.proj.weight *= 5
        toward = torch.nn.functional.normalize(dark - bright, dim=0)
        mlp = model.blocks[layer].mlp
        mlp.fc1.weight[neuron] = 20 * toward
        mlp.fc1.bias[neuron] = -20.0
        mlp.fc2.weight[:, neuron] = 3 * direction
    return model


def pictures():
    """(3, 3, 64, 64) bright, noisy images whose patches 0 and 5 are dark."""
    images = 1 + 0.2 * torch.rand(
        3, 3, 64, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    images[:, :, :16, :16] *= -1
    images[:, :, 16:32, 16:32] *= -1
    return images


def test_sinks_equal_norms_and_maps_of_the_blocks():
    registers = 4
    model, x = small(reg_tokens=registers), torch.randn(2, 3, 64, 64)
    found = sinks(model, x)
    streams = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: streams.append(output))
    with torch.no_grad(), capture(model) as attn:
        model(x)
    assert torch.equal(found.norms, torch.stack([stream.norm(dim=-1) for stream in streams], 1))
    maps = torch.stack([layer.weights() for layer in attn], 1)  # (B, L, H, T, T)
    torch.testing.assert_close(found.received, maps.mean((2, 3))[..., 1 + registers :])
    torch.testing.assert_close(found.prefix, maps.mean((2, 3))[..., : 1 + registers])
    assert torch.equal(found.sinks, attention.sinks(attn))
    assert found.grid == attn.grid and attention.received(attn).shape == (2, 4, 3, 16)


@torch.no_grad()
def test_named_equals_softmax_of_patches_by_hand():
    model, x = small().double(), torch.randn(3, 3, 64, 64, dtype=torch.float64)
    means, answers = named(model, x)
    assert means.shape == (3, 4, 2, 2) and torch.equal(answers, model(x).argmax(1))
    layers, received = tokens.features(model, x)[0], sinks(model, x).received
    for image in range(3):
        probabilities = model.head(model.norm(layers[2]))[image, 1:].softmax(-1)
        order = received[image, 2].argsort(descending=True)
        for number, answer in enumerate((answers[image], answers[image - 1])):
            for side, patches in enumerate((order[:MOST], order[MOST:])):
                expected = probabilities[patches, answer].mean()
                torch.testing.assert_close(means[image, 2, number, side], expected)


def test_outliers_exceed_a_multiple_of_the_median():
    lengths = torch.tensor([[1.0, 1, 1, 2.9, 3.1], [10, 10, 10, 10, 10]])
    assert outliers(lengths).tolist() == [[False] * 4 + [True], [False] * 5]
    assert outliers(lengths, 2).sum() == 2
    even = torch.rand(4, 3, 16, generator=torch.Generator().manual_seed(0))
    expected = even.numpy() / np.median(even.numpy(), -1, keepdims=True)
    np.testing.assert_allclose(ratios(even), expected, rtol=1e-6)
    assert outliers(torch.tensor([1.0, 1, 2, 5])).tolist() == [
        False,
        False,
        False,
        True,
    ]  # the median is 1.5
    assert not outliers(torch.tensor([1.0, 1, 2, 4.4])).any()


def test_roughness_of_known_maps():
    rows, cols = torch.arange(10.0)[:, None], torch.arange(10.0)
    board = (rows + cols) % 2
    spike = torch.zeros(10, 10)
    spike[4, 4] = 1
    maps = torch.stack([board, rows.expand(10, 10), spike])
    # steps of 1 and variance n/(n − 1)/4, half of the steps 1 and (10² − 1)/12, 4 of 180 steps and (1 − 1/n)/n
    expected = torch.tensor([0.5 / (100 / 99 / 4), 0.25 / (99 / 12 * 100 / 99), 4 / 180 / 2 * 100])
    torch.testing.assert_close(roughness(maps), expected)
    torch.testing.assert_close(roughness(5 - 3 * maps), expected)
    noise = torch.randn(400, 8, 8, generator=torch.Generator().manual_seed(0))
    assert abs(roughness(noise).mean() - 1) < 0.03 and roughness(torch.ones(2, 2)).isnan()


def test_register_neurons_finds_the_planted_neuron():
    model, x = planted(), pictures()
    measured = sinks(model, x)
    expected = torch.zeros(3, 16, dtype=torch.bool)
    expected[:, [0, 5]] = True
    assert not measured.outliers()[:, 0].any()
    assert torch.equal(measured.outliers()[:, 1], expected)
    for layer in (None, 1):
        assert register_neurons(model, x, 1, layer=layer) == {NEURON[0]: [NEURON[1]]}
    before, names = model(x), list(model.state_dict())
    with_register(model, {1: [40], 2: [0, 3]})
    assert (
        torch.equal(model(x), before)
        and list(model.state_dict()) == names
        and model.num_prefix_tokens == 1
    )


@pytest.mark.parametrize(
    "more", [{}, {"no_embed_class": True, "reg_tokens": 2}, {"global_pool": "avg"}]
)
def test_with_register_equals_a_forward_by_hand(more):
    model, x = planted(**more), pictures()
    layer, neuron = NEURON
    other = with_register(model, {layer: [neuron]})
    prefix = model.num_prefix_tokens

    with torch.no_grad():  # the blocks by hand, with a token of zeros after the prefix
        stream = model._pos_embed(model.patch_embed(x))
        stream = torch.cat(
            [stream[:, :prefix], torch.zeros(3, 1, 48).double(), stream[:, prefix:]], 1
        )
        layers = []
        for number, block in enumerate(model.blocks):
            stream = stream + block.attn(block.norm1(stream))
            hidden = block.mlp.act(block.mlp.fc1(block.norm2(stream)))
            if number == layer:
                largest = hidden[:, :, neuron].max(1).values
                hidden[:, :, neuron] = 0
                hidden[:, prefix, neuron] = largest
            stream = stream + block.mlp.fc2(hidden)
            layers.append(stream)
        stream = torch.cat([stream[:, :prefix], stream[:, prefix + 1 :]], 1)
        expected = model.forward_head(model.norm(stream))
        found, logits = tokens.features(other, x)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.stack(found), torch.stack(layers), rtol=1e-9, atol=1e-9)

    before, after = sinks(model, x), sinks(other, x)
    bulk = before.norms[..., prefix:][~before.outliers()].max()
    assert before.outliers()[:, layer:].any(-1).all() and not after.outliers().any()
    assert (
        after.norms[:, layer, prefix + 1 :].max() < 1.2 * bulk < after.norms[:, layer, prefix].min()
    )
    assert after.grid.prefix == prefix + 1
