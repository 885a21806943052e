"""The meaning of a model's outputs at every door: a sigmoid of independent labels, no softmax."""

import json

import pytest
import timm
import torch
from forms import form
from safetensors.torch import save_file
from support import vitlens as command_line

from vitlens import cli, faithfulness, files
from vitlens.images import samples
from vitlens.models import opening, output_kind, preprocess, scores
from vitlens.models.classes import OUTPUTS
from vitlens_explorer.app import App


@pytest.fixture
def weights(tmp_path):
    """A checkpoint of four independent labels, a photo, and the sigmoids of its logits in float64."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=4).eval()
    torch.nn.init.normal_(model.head.weight)
    model.head.bias.data = torch.tensor([2.0, 1.0, -3.0, 0.5])
    save_file(model.state_dict(), tmp_path / "labels.safetensors")
    samples()["chelsea"].save(tmp_path / "cat.png")
    logits = model(preprocess(model, tmp_path / "cat.png")).double()[0]
    return tmp_path, logits.sigmoid()


def arguments(folder):
    checkpoint = folder / "labels.safetensors"
    return ["test_vit", folder / "cat.png", "--checkpoint", checkpoint, "--outputs", "independent"]


def test_choices_of_options_are_those_of_their_modules():
    assert cli.OUTPUTS == OUTPUTS
    assert tuple(faithfulness.BASELINES) == cli.BASELINES
    assert cli.FORMATS == files.FORMATS


@pytest.fixture
def opened(monkeypatch):
    """The models that a command opens."""
    models = []
    original = opening.load_model

    def load(*arguments, **options):
        models.append(original(*arguments, **options))
        return models[-1]

    monkeypatch.setattr(opening, "load_model", load)
    return models


COMMANDS = (
    ("inspect", "figures", []),
    ("explain", "maps", ["--methods", "rollout", "--target", "3"]),
    ("page", "page.html", []),
    ("page", "live.html", ["--live"]),
)


@form(8, door="command: explain, page, page --live", case="--outputs", right="torch's sigmoid")
@pytest.mark.parametrize("command, out, more", COMMANDS)
def test_commands_take_the_meaning_of_outputs(weights, opened, command, out, more):
    folder, expected = weights
    command_line(command, *arguments(folder), *more, "--out", folder / out)
    model = opened[-1]
    assert output_kind(model) == "independent"
    logits = model(preprocess(model, folder / "cat.png"))
    torch.testing.assert_close(scores(model, logits)[0].double(), expected, atol=1e-5, rtol=0)


@form(8, door="command: inspect", case="--outputs independent", right="torch's sigmoid")
def test_inspect_writes_sigmoids(weights):
    folder, expected = weights
    command_line("inspect", *arguments(folder), "--out", folder / "figures")
    summary = json.loads((folder / "figures" / "summary.json").read_text())
    for row in summary["images"][0]["top5"]:
        assert row["probability"] == pytest.approx(expected[int(row["class"])].item(), abs=1e-4)


@form(8, door="Python: App", case="outputs=independent", right="the meaning of its model")
def test_app_takes_the_meaning_of_outputs(weights, opened):
    folder, _ = weights
    app = App("test_vit", None, folder / "labels.safetensors", outputs="independent")
    app.post = lambda function: None
    app._open_model(lambda: None)
    assert output_kind(opened[-1]) == "independent"


@form(8, door="command: all", case="--outputs probabilities", right="a sentence with the choices")
def test_unknown_meanings_are_refused(weights):
    folder, _ = weights
    for command in ("inspect", "explain", "page", "app"):
        refused = command_line(command, "test_vit", "--outputs", "probabilities", expect=2)
        for meaning in OUTPUTS:
            assert meaning in refused.stderr
