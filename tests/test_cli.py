"""The command line as a user meets it: files written, sentences on standard error, exit codes."""

import contextlib
import dataclasses
import gc
import io
import json
import re
import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

from vitlens import attention, attribution, capture, commands, filters, load_model, positions, stream
from vitlens.commands import looking, options
from vitlens.data.augment import Augment
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.train.recipes import FROM_MODEL, RECIPES, Recipe


def vitlens(*arguments, expect=0):
    """Run the command in this process: starting Python anew each time would take most of the time."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["vitlens", *map(str, arguments)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        commands.main()
    assert (stop.value.code or 0) == expect, err.getvalue()
    assert "Traceback" not in err.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())


@pytest.mark.parametrize("command", [("-m", "vitlens"), ("-c", "from vitlens.commands import main; main()")])
def test_it_is_installed_as_a_command(command):
    done = subprocess.run([sys.executable, *command, "models", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("vitlens: ") and "Traceback" not in done.stderr


def saved(folder, name="vit_tiny_patch16_224", **kwargs):
    torch.manual_seed(0)
    usual = {} if name.startswith("naflex") else {"img_size": 32, "patch_size": 8}
    arguments = usual | dict(embed_dim=48, depth=2, num_heads=3, num_classes=10) | kwargs
    model = timm.create_model(name, **arguments)
    model.pretrained_cfg = model.pretrained_cfg | {"input_size": (3, 32, 32), "crop_pct": 1.0}
    save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return folder


def test_nothing_is_reported_as_a_leak_when_python_ends(tmp_path):
    """As Triton does of its own objects if the garbage collector is kept away from them until the end."""
    command = [sys.executable, "-m", "vitlens", "inspect", saved(tmp_path / "model"), "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "leaked" not in done.stderr


def test_inspect_of_a_model_with_one_patch(tmp_path):
    vitlens("inspect", saved(tmp_path / "model", patch_size=32), "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["position_rank_correlation"] is None


def test_inspect_leaves_no_figure_of_another_model(tmp_path):
    for kind in ("learn", "none"):
        vitlens("inspect", saved(tmp_path / kind, pos_embed=kind), "--out", tmp_path / "out")
        assert (tmp_path / "out" / "rollout.png").exists()
        assert (tmp_path / "out" / "positions.png").exists() == (kind == "learn")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    for name, picture in list(samples().items())[:3]:
        picture.save(folder / f"{name}.png")
    return folder


def test_inspect_writes_figures_and_numbers(model_folder, photographs, tmp_path):
    out = tmp_path / "new" / "figures"
    paths = sorted(photographs.iterdir())
    done = vitlens("inspect", model_folder, *paths, "--out", out)
    names = {"summary.json", "distance.png", "filters.png", "positions.png", "rollout.png"}
    assert {p.name for p in out.iterdir()} == names and all(str(out / n) in done.stdout for n in names)
    for png in out.glob("*.png"):
        assert np.asarray(Image.open(png)).std() > 5
    assert Image.open(out / "distance.png").size == (1280, 840)  # twice the 640 × 420 pixels that a page has for it
    summary = json.loads((out / "summary.json").read_text())
    model = load_model(model_folder)
    with torch.no_grad(), capture(model) as attn:
        logits = model(preprocess(model, [str(p) for p in paths]))
    expected = attention.summary(attn)
    np.testing.assert_allclose(summary["mean_distance"], expected.mean_distance.mean(0), rtol=1e-4)
    assert (summary["layers"], summary["heads"]) == (2, 3)
    assert (summary["grid"]["rows"], summary["grid"]["cols"], summary["grid"]["prefix"]) == (4, 4, 1)
    assert summary["uniform_distance"] == pytest.approx(attn.grid.uniform_distance())
    np.testing.assert_allclose(summary["explained_variance"], filters.components(model)[1], rtol=1e-5)
    rank = positions.rank_correlation(positions.similarity(model))
    assert summary["position_rank_correlation"] == pytest.approx(rank)
    assert summary["filter_variance"] == pytest.approx(filters.components(model)[1].sum().item())
    distance = expected.mean_distance.mean(0)
    layer, head = summary["nearest_head_at"]
    assert distance[layer, head] == distance.min()
    assert summary["nearest_head"] == pytest.approx(distance.min().item() / attn.grid.uniform_distance(), rel=1e-4)
    top = expected.rollout.flatten(1).sort(descending=True).values  # a tenth of 16 patches: 1.6 of them
    top = (top[:, 0] + 0.6 * top[:, 1]) / top.sum(1)
    assert summary["rollout_contrast"] == pytest.approx(10 * top.mean().item(), rel=1e-4)
    for words in (f"{rank:.2f}".replace("-", "−"), f"(layer {layer}, head {head})", f"holds {top.mean():.1%}"):
        assert words in done.stdout
    for i, entry in enumerate(summary["images"]):
        np.testing.assert_allclose(entry["rollout"], expected.rollout[i], rtol=1e-4)
        assert entry["top5"][0]["class"] == str(logits[i].argmax().item()) and len(entry["top5"]) == 5


def test_the_garbage_collector_rests_while_a_command_imports(monkeypatch):
    with pytest.raises(ImportError), options.importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == 0, "PyTorch was there before"
    monkeypatch.delitem(sys.modules, "torch")
    with options.importing():
        pass
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()


def test_inspect_says_what_heads_write(model_folder, photographs, tmp_path):
    paths = [photographs / "coffee.png", photographs / "chelsea.png"]
    done = vitlens("inspect", model_folder, *paths, "--heads", "--out", tmp_path / "out")
    assert str(tmp_path / "out" / "heads.png") in done.stdout
    table = pd.read_csv(tmp_path / "out" / "heads.csv")
    model = load_model(model_folder)
    x = preprocess(model, [str(p) for p in paths])
    found = stream.contributions(model, x)
    assert table["part"].tolist() == found.names * 2
    np.testing.assert_allclose(table["added"], found.parts.flatten(), rtol=1e-3, atol=1e-5)
    sums = table.groupby("image", sort=False).agg({"added": "sum", "logit": "first"})
    np.testing.assert_allclose(sums["added"], sums["logit"], rtol=1e-3)
    np.testing.assert_allclose(sums["logit"], model(x).amax(1).detach(), rtol=1e-4)
    assert np.asarray(Image.open(tmp_path / "out" / "heads.png")).std() > 5


def test_samples_and_a_data_set(model_folder, photographs, tmp_path):
    vitlens("inspect", model_folder, "--out", tmp_path / "a")
    assert len(json.loads((tmp_path / "a" / "summary.json").read_text())["images"]) == len(samples())
    vitlens("inspect", model_folder, photographs / "coffee.png", "--dataset", photographs, "--out", tmp_path / "b")
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert len(summary["images"]) == 1 and summary["images_in_mean_distance"] == 4


def test_two_models_beside_each_other(model_folder, photographs, tmp_path):
    (tmp_path / "broken.jpg").write_text("nonsense")
    paths = [photographs / "coffee.png", tmp_path / "broken.jpg"]
    other = saved(tmp_path / "other", "vit_relpos_small_patch16_224")
    done = vitlens("inspect", model_folder, *paths, "--beside", other, "--out", tmp_path / "out", expect=1)
    assert done.stderr.count("broken.jpg") == 1
    both = json.loads((tmp_path / "out" / "beside.json").read_text())
    assert both["vit_tiny_patch16_224, patch 8, 32 px"] == json.loads((tmp_path / "out" / "summary.json").read_text())
    vitlens("inspect", other, photographs / "coffee.png", "--out", tmp_path / "alone")
    assert both[list(both)[1]] == json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert all(heading in done.stdout for heading in both) and "no table of learned position" in done.stdout
    assert np.asarray(Image.open(tmp_path / "out" / "beside.png")).std() > 5
    again = saved(tmp_path / "again")
    vitlens("inspect", model_folder, photographs / "coffee.png", "--beside", again, "--out", tmp_path / "out")
    assert list(json.loads((tmp_path / "out" / "beside.json").read_text())) == [str(model_folder), str(again)]


def test_one_bad_file_among_several(model_folder, photographs, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0 not much of a picture")
    done = vitlens("inspect", model_folder, broken, photographs / "coffee.png", "--out", tmp_path / "out", expect=1)
    assert len(done.stderr.strip().splitlines()) == 1 and "broken.jpg" in done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [entry["image"] for entry in summary["images"]] == ["coffee.png"]


def test_a_picture_that_cannot_be_prepared_is_one_bad_file_too(model_folder, photographs, tmp_path):
    Image.new("RGB", (4000, 20)).save(tmp_path / "strip.png")
    files = [tmp_path / "strip.png", photographs / "coffee.png"]
    done = vitlens("inspect", model_folder, *files, "--out", tmp_path / "out", expect=1)
    assert "strip.png" in done.stderr and (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize("name, options, note, lacks", [
    ("vit_tiny_patch16_224", {"num_classes": 0}, "no classifier", {"top5"}),
    ("vit_tiny_patch16_224", {"global_pool": ""}, "gives classes for every token", {"top5", "rollout"}),
    ("vit_tiny_patch16_224", {"global_pool": "max"}, "no rollout", {"rollout"}),
    ("vit_relpos_small_patch16_224", {}, "no table of learned position embeddings", set()),
    ("naflexvit_base_patch16_gap", {"attn_gated": True, "rope_type": "axial"}, "gate, which the rollout", set()),
])  # fmt: skip
def test_what_a_model_lacks_is_noted_and_the_rest_is_there(photographs, tmp_path, name, options, note, lacks):
    folder = saved(tmp_path / "model", name, **options)
    done = vitlens("inspect", folder, photographs / "coffee.png", "--out", tmp_path / "out")
    assert note in done.stdout
    (image,) = json.loads((tmp_path / "out" / "summary.json").read_text())["images"]
    assert {part for part in ("top5", "rollout") if not image[part]} == lacks
    assert (tmp_path / "out" / "rollout.png").exists() == ("rollout" not in lacks)


def test_a_model_whose_outputs_are_no_numbers_and_a_folder_that_is_a_file(photographs, tmp_path):
    folder = saved(tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    save_file({k: v * float("nan") for k, v in weights.items()}, folder / "model.safetensors")
    done = vitlens("inspect", folder, photographs / "coffee.png", "--out", tmp_path / "out", expect=2)
    assert "not finite" in done.stderr and not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("x")
    done = vitlens("inspect", folder, photographs / "coffee.png", "--out", tmp_path / "file", expect=2)
    assert "cannot be written to (Not a directory)" in done.stderr


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nonsense_model"], "has no model called nonsense_model"),
        (["{model}", "missing.png"], "'missing.png' does not exist"),
        (["{model}", "{model}/config.json"], "is a text file"),
        (["{model}", "https://a.b/c.jpg"], "is an address and not a file; download it first"),
        (["{model}", "--dataset", "nowhere"], "no folder nowhere"),
        (["{model}", "--dataset", "{model}"], "holds no image files"),
        (["{model}", "--device", "abacus"], "no device called 'abacus'"),
        (["{model}/.."], "has no config.json"),
        (["{model}", "--beside", "{model}/"], "Name another one after --beside"),
        (["{model}", "--beside", "nonsense_model"], "has no model called nonsense_model"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(model_folder, tmp_path, arguments, sentence):
    arguments = [a.format(model=model_folder) for a in arguments]
    done = vitlens("inspect", *arguments, "--out", tmp_path / "out", expect=2)
    assert sentence in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [("inspect", "no_model_yet"), ("explain", "no_model_yet"), ("train", "--recipe", "digits", "--data", "nowhere")],
)
def test_where_nothing_can_be_written_is_found_before_anything_is_done(tmp_path, arguments):
    (tmp_path / "file").write_text("mine")
    done = vitlens(*arguments, "--out", tmp_path / "file" / "out", expect=2)
    assert "cannot be written to (Not a directory); give another --out." in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_unknown_options_and_training_without_data():
    assert "No such option" in vitlens("inspect", "x", "--nonsense", expect=2).stderr
    assert "needs --data" in vitlens("train", "--recipe", "digits", expect=2).stderr
    assert (
        "There is no recipe 'x'" in vitlens("train", "--recipe", "x", "--data", "digits", "--out", "y", expect=2).stderr
    )
    assert "tiny-imagenet" in vitlens("train", "--list").stdout


def test_train_and_inspect_what_was_trained(tmp_path):
    vitlens("train", "--recipe", "digits", "--data", "digits", "--out", tmp_path / "run", "--tiny")
    vitlens("inspect", tmp_path / "run" / "model", "--out", tmp_path / "figures")
    summary = json.loads((tmp_path / "figures" / "summary.json").read_text())
    assert summary["grid"]["rows"] == 4 and summary["layers"] == 2


def test_the_app_refuses_before_it_serves(model_folder, tmp_path, monkeypatch):
    (text := tmp_path / "notes.png").write_text("no picture")
    save_for_hf(timm.create_model("resnet10t", num_classes=2), tmp_path / "resnet", safe_serialization=True)
    assert "is a text file" in vitlens("app", model_folder, text, expect=2).stderr
    assert "no model called nonsense" in vitlens("app", "nonsense", expect=2).stderr
    assert "vitlens cannot show the attention" in vitlens("app", tmp_path / "resnet", expect=2).stderr
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = vitlens("app", model_folder, "--port", port, expect=2).stderr
        assert message == f"vitlens: Port {port} is taken; give another --port, or none to use a free one.\n"
    assert "port from 1 to 65535" in vitlens("app", model_folder, "--port", 70000, expect=2).stderr


def test_train_hands_every_option_on(monkeypatch, tmp_path):
    told = {}
    monkeypatch.setattr(
        "vitlens.train.runs.run", lambda *args, **options: told.update(options, args=args) or {"stopped_by": 0}
    )
    vitlens(
        "train", "--recipe", "digits", "--data", "torch/mnist", "--out", tmp_path, "--root", tmp_path / "sets",
        "--stream", "--workers", 3, "--skip-damaged", "--model", "m", "--resume", "--max-minutes", 4, "--fit-minutes",
        5.5, "--set", "lr=1", "--set", "clip=2", "--device", "cpu", "--seed", 6, "--deterministic", "--watch", 7,
        "--export", "--tensorboard", "--tiny",
    )  # fmt: skip
    assert told == {
        "args": ("digits", "torch/mnist", tmp_path), "root": tmp_path / "sets", "stream": True, "workers": 3,
        "on_damaged": "skip", "model": "m", "resume": True, "max_minutes": 4.0, "fit_minutes": 5.5,
        "overrides": ["lr=1", "clip=2", "deterministic=true"], "device": "cpu", "seed": 6, "watch": 7, "export": True,
        "tensorboard": True, "tiny": True,
    }  # fmt: skip
    vitlens("train", "--recipe", "digits", "--data", "d", "--out", tmp_path, "--hold")
    assert told["stream"] is False and told["on_damaged"] == "raise" and told["overrides"] == []
    assert told["device"] is told["seed"] is told["max_minutes"] is told["fit_minutes"] is None
    monkeypatch.setattr("vitlens.train.runs.run", lambda *_, **__: {"stopped_by": 15})
    vitlens("train", "--recipe", "digits", "--data", "d", "--out", tmp_path, expect=143)


@pytest.mark.parametrize("error, code, said", [
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "Memory ran out"),
    (KeyboardInterrupt(), 130, "vitlens: stopped."), (FloatingPointError("The loss is nan."), 2, "The loss is nan."),
])  # fmt: skip
def test_what_ends_a_command_is_said_in_a_sentence(monkeypatch, tmp_path, error, code, said):
    def ends(*_, **__):
        raise error

    monkeypatch.setattr("vitlens.train.runs.run", ends)
    done = vitlens("train", "--recipe", "digits", "--data", "digits", "--out", tmp_path, expect=code)
    assert said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments, said", [
    (("train", "--max-minutes", "soon"), "--max-minutes"), (("train", "--epoch", "3"), "No such option: --epoch"),
    (("trian",), "No such command 'trian'"), (("inspect",), "argument 'model'"),
    (("ablate",), "argument 'model'"),
    (("models", "L/16", "more"), "more"),
])  # fmt: skip
def test_a_wrong_command_line_ends_with_one_sentence(arguments, said):
    done = vitlens(*arguments, expect=2)
    assert said.lower() in done.stderr.lower() and done.stderr.startswith("vitlens: ") and done.stderr.count("\n") == 1


def test_without_a_command_the_commands_are_shown():
    assert "train" in vitlens().stdout
    assert "--max-minutes" in vitlens("train", "--help").stdout


@pytest.mark.parametrize("command", ["inspect", "explain", "ablate", "evaluate", "train", "app"])
def test_help_shows_values_and_no_objects_of_python(command):
    assert not re.search(r"object at|MISSING|<class|dataclass", vitlens(command, "--help").stdout)


def test_help_names_every_method_and_which_are_the_default():
    usual, others = looking.LISTED.split(" (the default), ")
    assert usual.split(", ") == [*attribution.methods()]
    assert usual.split(", ") + others.split(", ") == [*attribution.METHODS]


@pytest.mark.parametrize("name, table", [
    ("vit-b16-jft", "epochs=7 lr=0.0008 schedule=linear weight_decay=0.1 dropout=0.0 batch_size=4096"),
    ("vit-l16-imagenet21k", "epochs=30 lr=0.001 schedule=linear weight_decay=0.03 dropout=0.1 warmup_steps=10000"),
    ("vit-h14-imagenet", "epochs=300 lr=0.003 schedule=cosine weight_decay=0.3 dropout=0.1 clip=1.0"),
    ("finetune-pets", "steps=500 lr=0.01 batch_size=512 image_size=384 optimizer=sgd momentum=0.9 weight_decay=0.0"),
])  # fmt: skip
def test_a_recipe_is_printed_as_the_papers_tables_have_it(name, table):
    lines = vitlens("train", "--list", "--recipe", name).stdout.splitlines()
    assert set(table.split()) <= {line.split()[0] for line in lines}


@pytest.mark.parametrize("name", RECIPES)
def test_every_setting_is_printed_with_its_meaning_as_it_is_set(name, tmp_path):
    lines = vitlens("train", "--list", "--recipe", name).stdout.splitlines()
    fields = {f.name for f in dataclasses.fields(Recipe)} - {"augment"}
    fields |= {f"augment.{f.name}" for f in dataclasses.fields(Augment)}
    brought = {*FROM_MODEL, "model_kwargs"} if RECIPES[name].continues else set()
    assert {line.partition("=")[0] for line in lines} == fields - brought
    assert all(len(line[36:].strip()) > 5 for line in lines)
    settings = [line.split()[0] for line in lines if not line.startswith("model_kwargs")]
    assert RECIPES[name].override(*settings) == RECIPES[name]
    changed = vitlens("train", "--list", "--recipe", name, "--set", "augment.flip=0.125").stdout
    assert "augment.flip=0.125 " in changed
    (tmp_path / "mine.json").write_text(RECIPES[name].to_json())
    assert vitlens("train", "--list", "--recipe", tmp_path / "mine.json").stdout.splitlines() == lines
