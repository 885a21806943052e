"""The stored models are small, have the recorded accuracy, and have structure that random weights lack."""

import json

import pytest
import timm
import torch
from book import spectral_centroid
from safetensors.torch import load_file
from support import CHECKPOINTS, SPECIMEN

from vitlens import attention, capture, filters, load_model, positions
from vitlens.images import samples
from vitlens.models import label_names, preprocess, title, top_classes, weights_digest

SCRATCH = CHECKPOINTS / "vit_tiny_patch8_64"
BUNDLED = CHECKPOINTS / "deit_tiny"


@pytest.fixture(scope="module", params=(SPECIMEN, SCRATCH), ids=("specimen", "scratch"))
def folder(request):
    return request.param


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def control(folder):
    """The same architecture with random weights."""
    torch.manual_seed(0)
    return load_model(folder, pretrained=False)


def training(folder):
    return json.loads((folder / "training.json").read_text())


def test_bundled_models_are_small_and_recorded(folder):
    assert (folder / "model.safetensors").stat().st_size <= 12 * 2**20
    record = training(folder)
    for key in ("command", "epochs", "seconds", "hardware", "validation", "versions", "date"):
        assert record[key], key
    assert record["command"].startswith("vitlens train --recipe ") and record["finished"]


def test_bundled_models_open_in_timm(folder, model):
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    x = torch.randn(1, *model.pretrained_cfg["input_size"])
    assert torch.equal(model(x), theirs(x))
    names = label_names(model)
    assert len(names) == 200 and names[0] != "0"


def test_bundled_models_have_the_weights_of_their_results(folder, model):
    results = SPECIMEN.parent.parent / "results" / "evaluate.json"
    records = json.loads(results.read_text(encoding="utf-8"))
    digests = {record["weights"] for record in records if record["model"] == folder.name}
    assert digests == {weights_digest(model)}


def test_bundled_models_have_structure_that_random_weights_lack(model, control):
    """Position similarity falls with distance, filters are smooth, and heads differ in attention distance."""
    trained, random = (
        positions.rank_correlation(positions.similarity(m)) for m in (model, control)
    )
    assert trained < -0.3 and abs(random) < 0.1
    (some, variance), (noise, even) = (filters.principal(m, 8) for m in (model, control))
    assert variance.sum() > 1.15 * even.sum()
    trained, random = (spectral_centroid(each).median() for each in (some, noise))
    assert trained < 0.75 * random
    images = preprocess(model, list(samples().values()))
    spread = []
    for m in (model, control):
        with torch.no_grad(), capture(m) as attn:
            m(images)
        distance = attention.mean_distance(attn).mean(0) / attn.grid.uniform_distance()
        spread.append((distance[:2].max() - distance[:2].min()).item())
    assert spread[0] > 0.15 and spread[1] < 0.05


def test_specimen_has_the_structure_of_the_paper():
    """The paper's Fig. 7: 28 filters hold 47 % of the variance, position similarity falls with distance, and early
    layers have local and global heads."""
    model = load_model(SPECIMEN)
    assert positions.rank_correlation(positions.similarity(model)) <= -0.55
    assert 0.45 < filters.principal(model, 28)[1].sum() < 0.5
    with torch.no_grad(), capture(model) as attn:
        model(preprocess(model, list(samples().values())))
    share = attention.mean_distance(attn).mean(0) / attn.grid.uniform_distance()
    assert share[:3].min() < 0.35 and share[:3].max() > 0.7 and share[-1].min() > 0.8


def test_bundled_model_opens_by_its_name_with_its_title_and_classes():
    model = load_model("bundled")
    assert title(model) == "DeiT-Tiny, ImageNet-1k"
    assert (
        title(load_model("bundled", pretrained=False)) == "DeiT-Tiny, ImageNet-1k, random weights"
    )
    theirs = timm.create_model(f"local-dir:{BUNDLED}", pretrained=True).eval()
    photos = preprocess(model, list(samples().values()))
    with torch.no_grad():
        logits = model(photos)
        assert torch.equal(logits, theirs(photos))
    best = [classes[0][0] for classes in top_classes(model, logits)]
    assert best[1:3] == ["Egyptian cat", "espresso"]
    names = timm.data.ImageNetInfo().label_descriptions()
    assert label_names(model) == names and len(names) == 1000


def test_title_of_the_bundled_model_is_not_that_of_other_weights(tmp_path):
    other = BUNDLED / "model.safetensors"
    model = load_model("bundled", checkpoint=other)
    assert title(model) == "bundled, model.safetensors"


def test_files_named_as_the_bundled_model_are_noted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()
    assert title(load_model("bundled")) == "DeiT-Tiny, ImageNet-1k"
    assert "is ./bundled" in capsys.readouterr().err


@pytest.mark.slow
def test_bundled_model_has_the_published_weights_and_accuracy(real_data):
    from vitlens.data import load

    published = load_file(real_data / "deit-tiny" / "deit_tiny_patch16_224.safetensors")
    stored = load_file(BUNDLED / "model.safetensors")
    assert stored.keys() == published.keys()
    assert all(torch.equal(stored[name], published[name].half()) for name in stored)
    model = load_model()
    labeled = load(real_data / "imagenet-samples", "valid", size=224, stream=True, workers=0)
    photos, labels = zip(*labeled.batches(torch.arange(len(labeled)).split(50)), strict=True)
    mean, std = (
        torch.tensor(model.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std")
    )
    with torch.inference_mode():
        right = [
            model((images.float() / 255 - mean) / std).argmax(-1) == numbers
            for images, numbers in zip(photos, labels, strict=True)
        ]
    assert torch.cat(right).float().mean() > 0.7


@pytest.mark.slow
def test_bundled_models_have_the_recorded_accuracy(folder, model, real_data):
    from vitlens.data import load

    count, side = (
        (2000, 64) if folder == SCRATCH else (500, 224)
    )  # an image of 224 pixels takes 50 times as long
    valid = load(real_data / "tiny-imagenet", "valid", size=side, stream=True, workers=0).subset(
        count, seed=0
    )
    config = model.pretrained_cfg
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.inference_mode():
        right = [
            model((images.float() / 255 - mean) / std).argmax(-1) == labels
            for images, labels in valid.batches(torch.arange(count).split(100))
        ]
    top1 = 100 * torch.cat(right).float().mean().item()
    claimed = training(folder)["validation"]
    claimed = max(claimed["top1"], claimed.get("top1_average") or 0)
    assert top1 == pytest.approx(claimed, abs=300 * (0.25 / count) ** 0.5)  # three standard errors
    assert list(valid.class_names) == label_names(model)
