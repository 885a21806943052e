"""The bundled model: small enough, as accurate as it says, and structured where chance is not."""

import json
from pathlib import Path

import pytest
import timm
import torch

from vitlens import attention, capture, filters, load_model, positions
from vitlens.images import samples
from vitlens.models import preprocess

FOLDER = Path(__file__).parent.parent / "data" / "checkpoints" / "vit_tiny_patch8_64"
TRAINING = json.loads((FOLDER / "training.json").read_text())


@pytest.fixture(scope="module")
def model():
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def control():
    """The same architecture with random weights."""
    torch.manual_seed(0)
    return load_model(FOLDER, pretrained=False)


def test_size_and_record():
    assert (FOLDER / "model.safetensors").stat().st_size <= 12 * 2**20
    for key in ("command", "epochs", "seconds", "hardware", "validation", "versions", "date"):
        assert TRAINING[key], key
    assert TRAINING["command"].startswith("vitlens train --recipe ") and TRAINING["finished"]


def test_timm_opens_it(model):
    theirs = timm.create_model(f"local-dir:{FOLDER}", pretrained=True).eval()
    x = torch.randn(1, *model.pretrained_cfg["input_size"])
    assert torch.equal(model(x), theirs(x))
    assert len(model.label_names) == 200 and model.label_names[0] != "0"


def spatial_frequency(components):
    """Mean frequency of each component's spectrum, in cycles a pixel."""
    power = torch.fft.fft2(components.double(), dim=(1, 2)).abs().square().sum(-1)
    y, x = (torch.fft.fftfreq(n, dtype=torch.float64) for n in power.shape[1:])
    return (power * torch.hypot(y[:, None], x)).sum((1, 2)) / power.sum((1, 2))


def test_structure_that_random_weights_do_not_have(model, control):
    """Positions know their neighbors, the first filters are smooth pictures, heads differ in reach."""
    trained, random = (positions.rank_correlation(positions.similarity(m)) for m in (model, control))
    assert trained < -0.3 and abs(random) < 0.1
    (some, variance), (noise, even) = (filters.components(m, 8) for m in (model, control))
    assert variance.sum() > 1.15 * even.sum()
    assert spatial_frequency(some).mean() < 0.75 * spatial_frequency(noise).mean()
    images = preprocess(model, list(samples().values()))
    spread = []
    for m in (model, control):
        with torch.no_grad(), capture(m) as attn:
            m(images)
        distance = attention.mean_distance(attn).mean(0) / attn.grid.uniform_distance()
        spread.append((distance[:2].max() - distance[:2].min()).item())
    assert spread[0] > 0.15 and spread[1] < 0.05


def test_it_is_as_accurate_as_it_says(model, real_data):
    from vitlens.data import load

    valid = load(real_data / "tiny-imagenet", "valid", size=64, stream=True, workers=0).subset(2000, seed=0)
    config = model.pretrained_cfg
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.inference_mode():
        right = [
            model((images.float() / 255 - mean) / std).argmax(-1) == labels
            for images, labels in valid.batches(torch.arange(2000).split(250))
        ]
    top1 = 100 * torch.cat(right).float().mean().item()
    claimed = max(TRAINING["validation"]["top1"], TRAINING["validation"]["top1_average"])
    assert top1 == pytest.approx(claimed, abs=4)  # three standard errors of 2,000 images
    assert list(valid.class_names) == model.label_names
