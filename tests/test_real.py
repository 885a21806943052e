"""DeiT-Tiny shows the structures of the paper's models, and random weights do not."""

import pyarrow.parquet
import pytest
import timm
import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr

from vitlens import attention, capture
from vitlens.models import preprocess, top_classes
from vitlens.recorder.supported import token_grid


@pytest.fixture(scope="module")
def deit(real_data):
    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(real_data / "deit-tiny" / "deit_tiny_patch16_224.safetensors"))
    return model


@pytest.fixture(scope="module")
def control():
    torch.manual_seed(0)
    return timm.create_model("deit_tiny_patch16_224").eval()


@pytest.fixture(scope="module")
def labeled(real_data):
    table = pyarrow.parquet.read_table(
        next((real_data / "imagenet-samples").glob("*.parquet"))
    ).to_pydict()
    return [image["bytes"] for image in table["image"]], torch.tensor(table["label"])


def statistics(model, sources):
    batches = [preprocess(model, sources[i : i + 20]) for i in range(0, len(sources), 20)]
    return attention.mean_over(model, batches)


@pytest.mark.slow
def test_deit_top1(deit, labeled):
    sources, labels = labeled
    with torch.inference_mode():
        logits = torch.cat(
            [deit(preprocess(deit, sources[i : i + 50])) for i in range(0, len(sources), 50)]
        )
    assert (logits.argmax(-1) == labels).float().mean() >= 0.76
    assert top_classes(deit, logits[:1], 1)[0][0][1] == pytest.approx(
        logits[0].softmax(-1).max().item()
    )


def test_deit_attention_distance_rises_with_depth(deit, control, labeled):
    """The first two layers have local and global heads, and distance rises with depth, unlike in a random model."""
    sources = labeled[0][:20]
    uniform = token_grid(deit, (224, 224)).uniform_distance()
    distance = statistics(deit, sources).mean_distance
    early = distance[:2].flatten()
    assert early.min() < 0.35 * uniform and early.max() > 0.6 * uniform
    assert spearmanr(range(12), distance.mean(1)).statistic > 0.7
    assert distance[:3].max() - distance[:3].min() > 2 * (distance[-3:].max() - distance[-3:].min())
    random = statistics(control, sources[:5]).mean_distance
    assert (random - uniform).abs().max() < 0.1 * uniform


def energy_in(box, model, source):
    """Share of the rollout inside a box (top, left, bottom, right, as shares of the image) over the box's area."""
    with torch.no_grad(), capture(model) as attn:
        model(preprocess(model, source))
    y, x = (attn.grid.centers() / 224).T
    inside = (y > box[0]) & (y < box[2]) & (x > box[1]) & (x < box[3])
    rollout = attention.rollout(attn)[0].flatten()
    return (rollout[inside].sum() / rollout.sum() / inside.float().mean()).item()


@pytest.mark.parametrize(
    "name, box",  # drawn by hand around the dog, the airliner, the nearer horse
    [
        ("samoyed.jpg", (0, 0, 1, 0.55)),
        ("plane.png", (0.38, 0.1, 0.72, 0.95)),
        ("horses.jpg", (0.5, 0.65, 0.8, 1)),
    ],
)
def test_rollout_lies_on_the_object(deit, control, real_data, name, box):
    assert energy_in(box, deit, real_data / "photos" / name) > 1.1
    assert energy_in(box, control, real_data / "photos" / name) == pytest.approx(1, abs=0.03)
