"""The tuned lens of `experiments/lens.py` learns planted features of a model."""

import pytest
import torch
import torch.nn.functional as F
from support import images

from experiments.lens import TunedLens, tune
from vitlens import tokens
from vitlens.stream import read_out

SIZE = (64, 96)


def read(model, x, layer, tuned=None):
    """The logits of `vitlens.stream.lens` from tokens that a tuned lens has mapped."""
    with torch.no_grad():
        layers = tokens.features(model, x)[0]
        moved = layers[layer] if tuned is None else tuned.moved(layers[layer], layer)
        return read_out(model, moved)


@pytest.mark.parametrize("kind", [{}, dict(global_pool="map", class_token=False)], ids=str)
def test_tuned_lens_learns_the_addition_of_the_last_layer(vit, tmp_path, kind):
    """The last layer adds one vector to every token, which the lens before it learns."""
    model, x = vit(img_size=SIZE, embed_dim=24, **kind), images(dtype=torch.float32)
    last, generator = model.blocks[-1], torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in (last.attn.proj, last.mlp.fc2):
            layer.weight.zero_()
            layer.bias.copy_(torch.randn(24, generator=generator))
        model.head.weight.normal_(generator=generator)
        if kind.get("global_pool") == "map":
            model.attn_pool.proj.weight.mul_(30)

    def distance(tuned):
        both = zip(read(model, x, 1, tuned), read(model, x, 2), strict=True)
        pairs = [[part.log_softmax(-1) for part in pair] for pair in both]
        return sum(
            F.kl_div(*pair, log_target=True, reduction="none").sum(-1).mean() for pair in pairs
        )

    losses = []
    tuned = tune(model, [x] * 50, lr=0.02, on_layer=lambda *values: losses.append(values))
    assert distance(tuned) < 0.02 * distance(None) and [number for number, _ in losses] == [0, 1]
    assert losses[1][1] < 0.05 * distance(None)
    assert tuned.save(tmp_path) == tmp_path / "lens" / "tuned.safetensors"
    again = TunedLens.load(tmp_path)
    assert torch.equal(again.weights, tuned.weights.half().float())
    assert torch.equal(read(model, x, -1, again)[0], model(x))
    with pytest.raises(ValueError, match=r"loss is nan.* lr=1e\+20"):
        tune(model, [x], lr=1e20)


def test_tuned_lens_learns_the_class_of_one_token_among_noise(vit, monkeypatch):
    """The class token holds the class in a rotated basis from the first layer on, and all patches are noise."""
    model, generator = vit(img_size=SIZE, embed_dim=24), torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.head.weight.copy_(torch.linalg.qr(torch.randn(24, 10, generator=generator)).Q.T)
    turn = torch.linalg.qr(torch.randn(24, 24, generator=generator)).Q
    classes = torch.arange(200) % 10

    def planted(_, x):
        signal = 5 * model.head.weight[x[:, 0, 0, 0].long()][:, None]
        noise = torch.randn(3, len(x), 24, 24, generator=generator)
        return [
            torch.cat([t, n], 1)
            for t, n in zip((signal @ turn, signal @ turn, signal), noise, strict=True)
        ], None

    monkeypatch.setattr(tokens, "features", planted)
    x = torch.zeros(200, 3, *SIZE) + classes[:, None, None, None]
    tuned = tune(model, [x], lr=0.01)
    plain, learned = (read(model, x, 0, each)[0].argmax(1) == classes for each in (None, tuned))
    assert plain.float().mean() < 0.5 and learned.all()
