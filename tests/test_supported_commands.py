"""Reports, explorer, evaluation and commands with a model of each library."""

import json
from operator import attrgetter

import numpy as np
import pytest
import torch
from supported_support import last_linear, sized, small
from test_cli import vitlens as command
from test_evaluate_command import colors
from test_explorer import values
from typer.testing import CliRunner

import vitlens
from vitlens import attribution, cli, faithfulness, report, widgets
from vitlens.images import samples
from vitlens.models import built_size, preprocess, restore
from vitlens.recorder.forward import run
from vitlens.recorder.supported import family, pooled
from vitlens.widgets import explore

CLASSIFIERS = ["Dinov2ForImageClassification", "Siglip2ForImageClassification", "torchvision"]
ONE_OF_EACH = [*CLASSIFIERS, "CLIPModel", "open_clip, timm"]
PICTURES = [("chelsea", samples()["chelsea"])]
each = pytest.mark.parametrize("name", ONE_OF_EACH)


@each
def test_preprocessing_is_undone(name):
    model = small(name)
    batch = preprocess(model, samples()["chelsea"])
    assert batch.shape == (1, 3, *built_size(model))
    pixels = torch.from_numpy(restore(model, batch)).permute(0, 3, 1, 2) / 255
    told = family(model).preprocessing
    again = (pixels - torch.tensor(told["mean"])[:, None, None]) / torch.tensor(told["std"])[:, None, None]
    torch.testing.assert_close(again, batch, atol=0.02, rtol=0)


@each
def test_inspection(name, tmp_path):
    model = small(name)
    found = report.inspect(model, PICTURES)
    names = {path.name for path in report.write_inspection(found, tmp_path)}
    rows = family(model).grid(built_size(model)).readout is not None
    assert names == {"summary.json", "distance.png", "filters.png", "positions.png"} | (
        {"rollout.png"} if rows else set()
    )


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_explanation(name):
    model = small(name)
    (found,) = report.explain(model, PICTURES, 2, orders=2)
    starting = {"relevance", "gradient_rollout", "attention_gradient"} & set(found.maps)
    assert (found.grid.readout is not None) == bool(starting) and {"legrad", "grad_cam"} <= set(found.maps)
    with torch.no_grad():
        logits = run(model, preprocess(model, samples()["chelsea"]))
    assert found.target == "2" and found.value == pytest.approx(logits.softmax(-1)[0, 2].item())


@each
def test_the_explorer_shows_it(name):
    model = small(name)
    page, images = explore(model, samples()["chelsea"]), preprocess(model, samples()["chelsea"])
    with torch.no_grad(), vitlens.capture(model) as attn:
        run(model, images)
    row = attn[1].weights()[0, 1, attn.grid.index(1, 2)]
    page.set(layer=1, head=1, row=1, column=2)
    np.testing.assert_allclose(values(page), attn.grid.image_map(row), atol=1e-6)
    page.set(view="norms", layer=0)
    with torch.no_grad():
        tokens = vitlens.tokens.features(model, images)[0][0][0]
    np.testing.assert_allclose(values(page), attn.grid.image_map(tokens.norm(dim=-1)), rtol=1e-5)


@each
def test_the_rest_works_or_says_why_not(name):
    """What the other tests do not call."""
    model = small(name)
    images, about = sized(model, 32, 32), family(model)
    target = 2 if about.classes else attribution.like(sized(model, 32, 32, batch=1, seed=5))
    assert widgets.heads(model).frame["panels"] and widgets.compare(model).frame["panels"]
    assert widgets.positions(model).frame["panels"]
    maps = attribution.grad_cam(model, images, target)
    found = faithfulness.curves(model, images, maps, target)
    assert found.deletion[..., 0].isfinite().all() and not torch.equal(found.deletion, found.insertion)
    with torch.no_grad():  # as in a notebook that turned gradients off
        parts = faithfulness.randomization(model, images, attribution.legrad, target).parts
    blocks = [part for part in parts if attrgetter(part)(model) in list(about.blocks)]
    assert len(blocks) == len(about.blocks) < len(parts), "one by one, and not all at once"
    assert not any("text" in part or "token_embedding" in part for part in parts), "what the target never reads"
    if not about.classes:
        with pytest.raises(ValueError, match="has none"):
            report.heads(model, PICTURES)
        return
    ((label, found),) = report.heads(model, PICTURES).values()
    with torch.no_grad():
        logits = run(model, preprocess(model, samples()["chelsea"]))
    assert label == str(logits.argmax().item()) and found.logits.item() == pytest.approx(logits.max().item(), abs=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "small-vit"
    model = small("ViTForImageClassification", num_labels=3)
    model.config.id2label = {0: "blue", 1: "green", 2: "red"}
    model.save_pretrained(folder)
    processor = {"size": {"height": 32, "width": 32}, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def test_commands_take_a_folder_in_transformers_layout(folder, tmp_path):
    samples()["chelsea"].save(tmp_path / "cat.png")
    said = command("inspect", folder, tmp_path / "cat.png", "--out", tmp_path / "figures").stdout
    assert "small-vit" in said and (tmp_path / "figures" / "rollout.png").is_file()
    command("explain", folder, tmp_path / "cat.png", "--target", "green", "--orders", 2, "--out", tmp_path / "why")
    assert len([*(tmp_path / "why").iterdir()]) == 2


@pytest.mark.parametrize("name, small_one", [
    ("hf:a/b", "Dinov2ForImageClassification"), ("open_clip:ViT-B-32", "open_clip"),
    ("torchvision:vit_b_16", "torchvision"),
])  # fmt: skip
def test_commands_take_names_of_libraries(name, small_one, tmp_path, monkeypatch):
    """As if the library had found its weights."""
    opener = {"hf": "_transformers", "open_clip": "_open_clip", "torchvision": "_torchvision"}[name.partition(":")[0]]
    monkeypatch.setattr(f"vitlens.models.{opener}", lambda *_, **__: small(small_one))
    samples()["chelsea"].save(cat := tmp_path / "cat.png")
    samples()["coffee"].save(cup := tmp_path / "cup.png")
    data = colors(tmp_path / "data")
    evaluation = ["evaluate", name, "--protocol", "knn", "--data", data, "--workers", 0, "--out", tmp_path / "knn.json"]
    explanation = ["explain", name, cat, "--like", cup, "--orders", 2, "--out", tmp_path / "why"]
    for arguments in (["inspect", name, cat, "--out", tmp_path / "figures"], explanation, evaluation):
        done = CliRunner().invoke(cli.app, [*map(str, arguments)])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "figures" / "distance.png").is_file() and [*(tmp_path / "why").glob("*.png")]
    assert json.loads((tmp_path / "knn.json").read_text())


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_features_before_the_head(name):
    model = small(name)
    with torch.no_grad():
        found = pooled(model, sized(model))
        torch.testing.assert_close(last_linear(model)(found), run(model, sized(model)))


