"""Models that no library defines: subclasses of timm's, and hand-written ones that `register_model` opens."""

import pytest
import torch
import torch.nn.functional as F
from support import Materialized, refuses
from torch import nn

import vitlens
from vitlens import UnsupportedModelError, attention, attribution, capture
from vitlens.recorder.supported import FAMILIES


class HandAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.to_qkv, self.out = (
            heads,
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x):
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class HandBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.attend = nn.LayerNorm(width), HandAttention(width, heads)
        self.second, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, width), nn.GELU()),
        )

    def forward(self, x):
        x = x + self.attend(self.first(x))
        return x + self.mlp(self.second(x))


class HandViT(nn.Module):
    """Two extra tokens, patches of 8 × 4 pixels by a linear layer, and a head that reads the mean of the patches."""

    def __init__(self, width=24, heads=3, depth=3, classes=5):
        super().__init__()
        self.to_tokens, self.extra = (
            nn.Linear(3 * 8 * 4, width),
            nn.Parameter(torch.randn(1, 2, width)),
        )
        self.layers = nn.ModuleList(HandBlock(width, heads) for _ in range(depth))
        self.last, self.classify, self.num_classes = (
            nn.LayerNorm(width),
            nn.Linear(width, classes),
            classes,
        )

    def forward(self, images):
        b, c, h, w = images.shape
        patches = (
            images.reshape(b, c, h // 8, 8, w // 4, 4)
            .permute(0, 2, 4, 1, 3, 5)
            .flatten(3)
            .flatten(1, 2)
        )
        x = torch.cat([self.extra.expand(b, -1, -1), self.to_tokens(patches)], 1)
        for layer in self.layers:
            x = layer(x)
        return self.classify(self.last(x)[:, 2:].mean(1))


@pytest.fixture
def hand():
    vitlens.register_model(
        HandViT,
        blocks="layers",
        attention="attend",
        embedding="to_tokens",
        patch=(8, 4),
        size=(32, 24),
        prefix=["extra 1", "extra 2"],
        readout="patches",
    )
    torch.manual_seed(0)
    yield HandViT().double().eval()
    del FAMILIES[f"{__name__}.HandViT"]


def maps_by_hand(model, images):
    """Attention maps (B, H, T, T) of each layer, in autograd's graph, and logits."""
    with Materialized() as explicit:
        return explicit.maps, model(images)


def test_register_model_opens_a_hand_written_vit(hand):
    images = torch.randn(2, 3, 32, 24, dtype=torch.float64)
    maps, logits = maps_by_hand(hand, images)
    with torch.no_grad(), capture(hand) as attn:
        torch.testing.assert_close(hand(images), logits, rtol=1e-10, atol=1e-12)
    assert (attn.grid.rows, attn.grid.cols, attn.grid.prefix) == (4, 6, 2)
    for layer, a in zip(attn, maps, strict=True):
        torch.testing.assert_close(layer.weights(), a.detach(), rtol=1e-10, atol=1e-12)
    eye, row = torch.eye(26, dtype=torch.float64), torch.zeros(26, dtype=torch.float64)
    row[2:] = 1 / 24
    joint = eye
    for a in maps:
        joint = (a.detach().mean(1) + eye) / 2 @ joint
    torch.testing.assert_close(
        attention.rollout(attn), (row @ joint)[:, 2:].unflatten(1, (4, 6)), rtol=1e-6, atol=1e-9
    )
    gradients = torch.autograd.grad(logits[:, 3].sum(), maps)
    relevance = eye.expand(2, -1, -1)
    for a, gradient in zip(maps, gradients, strict=True):
        relevance = relevance + (a * gradient).clamp(min=0).mean(1) @ relevance
    expected = (row @ (relevance.detach() - eye))[:, 2:].unflatten(1, (4, 6))
    torch.testing.assert_close(
        attribution.relevance(hand, images, 3), expected, rtol=1e-5, atol=1e-9
    )


class ListViT(HandViT):
    """A model whose blocks are lists, of which the forward calls the parts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([block.first, block.attend, block.second, block.mlp])
            for block in self.layers
        )

    def forward(self, images):
        patches = images.unfold(2, 8, 8).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5)
        x = torch.cat(
            [
                self.extra.expand(len(images), -1, -1),
                self.to_tokens(patches.flatten(3).flatten(1, 2)),
            ],
            1,
        )
        for first, attend, second, mlp in self.layers:
            x = x + attend(first(x))
            x = x + mlp(second(x))
        return self.classify(self.last(x)[:, 2:].mean(1))


@pytest.mark.parametrize("call", ["features", "legrad", "balanced_gradients"])
def test_blocks_that_are_never_called_are_named(hand, monkeypatch, call):
    """Attention is recorded without the blocks, and tokens between them are not."""
    monkeypatch.setitem(FAMILIES, f"{__name__}.ListViT", None)
    vitlens.register_model(
        ListViT,
        blocks="layers",
        attention="1",
        embedding="to_tokens",
        patch=(8, 4),
        size=(32, 24),
        prefix=["extra 1", "extra 2"],
        readout="patches",
        head=lambda model, tokens: model.classify(model.last(tokens)[:, 2:].mean(1)),
    )
    model, images = ListViT().eval(), torch.randn(1, 3, 32, 24)
    assert attribution.relevance(model, images, 3).shape == (1, 4, 6)

    calls = {
        "features": lambda: vitlens.tokens.features(model, images),
        "legrad": lambda: attribution.legrad(model, images, 3),
        "balanced_gradients": lambda: attribution.balanced_gradients(model, images, 3),
    }
    message = (
        r"blocks, 0, 1, 2 \(ModuleList\) never ran as modules. .* ListBlock in docs/recipes.md"
    )
    refuses(message, calls[call], error=UnsupportedModelError)


class PostNormBlock(nn.Module):
    """A post-norm block with the names of a pre-norm block, and its attention one module deeper."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.inside = (
            nn.LayerNorm(width),
            nn.ModuleDict({"attend": HandAttention(width, heads)}),
        )
        self.norm2, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, width), nn.GELU()),
        )

    def forward(self, x):
        x = self.norm1(x + self.inside["attend"](x))
        return 0.7 * self.norm2(x + self.mlp(x))


class PostNormViT(HandViT):
    def __init__(self, width=24, heads=3, depth=3):
        super().__init__(width, heads, depth)
        self.layers = nn.ModuleList(PostNormBlock(width, heads) for _ in range(depth))


def test_register_model_opens_a_post_norm_vit():
    shapes = {
        "patch": (8, 4),
        "size": (32, 24),
        "prefix": ["extra 1", "extra 2"],
        "readout": "patches",
    }
    parts = {"blocks": "layers", "embedding": "to_tokens"}
    torch.manual_seed(0)
    model, images = PostNormViT().double().eval(), torch.randn(1, 3, 32, 24, dtype=torch.float64)
    maps, logits = maps_by_hand(model, images)
    gradients = torch.autograd.grad(logits[0, 3], maps)
    try:
        vitlens.register_model(PostNormViT, attention="inside.attend", **parts, **shapes)
        explanation = attribution.attention_gradient(model, images, 3)
        vitlens.register_model(PostNormViT, attention="inside.nothing", **parts, **shapes)
        refuses("layers.0.inside.nothing", capture(model).__enter__, error=UnsupportedModelError)
    finally:
        del FAMILIES[f"{__name__}.PostNormViT"]
    expected = (maps[-1] * gradients[-1]).clamp(min=0).mean(1)[:, 2:, 2:].mean(1).detach()
    torch.testing.assert_close(explanation.flatten(1), expected, rtol=1e-6, atol=1e-12)


def test_capture_of_an_unregistered_vit_names_register_model():
    match = r"register it by `vitlens\.register_model\(HandViT"
    refuses(match, capture(HandViT()).__enter__, error=UnsupportedModelError)
