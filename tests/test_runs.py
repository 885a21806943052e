"""`vitlens train` from the top: what it leaves behind, what it goes on from, what it refuses."""

import json
import math
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from vitlens.data import load
from vitlens.train import Recipe, Step, World, accuracy, recipe, runs, timing
from vitlens.train.account import command_of, finish, seconds_before
from vitlens.train.sources import Source
from vitlens.train.watching import Board, Progress

torch.set_num_threads(1)


def test_a_run_from_the_top(tmp_path, capsys):
    account = runs.run("digits", "digits", tmp_path / "a", tiny=True, watch=4, quiet=True, device="cpu")
    assert account["finished"] and account["steps"] == 16 and account["validation"]["exported"]
    written = json.loads((tmp_path / "a/model/training.json").read_text())
    assert written["versions"]["torch"] == torch.__version__ and str(tmp_path) not in json.dumps(written)
    assert "--set epochs=2" in written["command"]
    timm.create_model(f"local-dir:{tmp_path / 'a/model'}", pretrained=True)

    cut = runs.run("digits", "digits", tmp_path / "b", tiny=True, watch=4, quiet=True, device="cpu", max_minutes=1e-9)
    assert not cut["finished"]
    rest = runs.run("digits", "digits", tmp_path / "b", resume=True, watch=4, quiet=True, device="cpu")
    assert rest["validation"] == account["validation"]
    same = [(tmp_path / f"{run}/model/model.safetensors").read_bytes() for run in "ab"]
    assert same[0] == same[1]
    with_snapshots = [(tmp_path / f"{run}/snapshots.npz").read_bytes() for run in "ab"]
    assert with_snapshots[0] == with_snapshots[1]


def test_epochs_are_fitted_to_the_time(tmp_path, monkeypatch):
    with monkeypatch.context() as slow:  # 1,280 s for 8 × 32 images: two epochs in an hour, however busy the machine is
        slow.setattr(timing, "_speed", lambda *_: 0.2)
        account = runs.run("digits", "digits", tmp_path, tiny=True, watch=0, quiet=True, device="cpu", fit_minutes=60)
    assert Recipe.from_json((tmp_path / "recipe.json").read_text()).epochs == account["epochs"] == 2
    with pytest.raises(ValueError, match="Not one epoch"):
        runs.run("digits", "digits", tmp_path / "b", tiny=True, watch=0, quiet=True, device="cpu", fit_minutes=1e-6)
    # At 50 images/s with half of the patches and 20 with all, an epoch of 8 × 32 images and its validations.
    r = replace(recipe("digits").tiny(), patch_drop=0.5, patch_drop_until=0.75, evaluate_every=2)
    now = iter(range(0, 1000, 3))  # each look at the clock takes three seconds
    monkeypatch.setattr(timing, "_speed", lambda _, __, trial, *___: 50.0 if trial.patch_drop else 20.0)
    monkeypatch.setattr(timing, "accuracy", lambda *_, **__: 10.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(now), monotonic=lambda: 130.0))
    data = load("digits", "train").subset(280), load("digits", "valid").subset(100)
    found = timing.fitted(r.build(), data, r, 1000.0, World(device=torch.device("cpu")), None, start=100.0)
    validating = 2 * 3  # of the weights, and of their average
    epoch = 256 * (0.75 / 50 + 0.25 / 20) + validating / 2
    assert found.epochs == int((970 - 30 - validating) / epoch) == 93


@pytest.mark.parametrize("options, message", [
    ({"max_minutes": 0}, "--max-minutes is a positive number"), ({"recipe_name": "nope"}, "no recipe 'nope'"),
    ({"resume": True}, "no run to resume"), ({"data": "nowhere"}, "not a folder"),
    ({"overrides": ["epochs=x"]}, "of type int"), ({"fit_minutes": math.inf}, "--fit-minutes is a positive number"),
    ({"workers": -1}, "workers is a number of processes"), ({"overrides": ["num_classes=5"]}, "has 10 classes"),
    ({"overrides": ["warmup=0", "warmup_steps=9", "epochs=0", "steps=9"]}, "end within its 9 steps of warm-up"),
    ({"overrides": ["architecture=nonsense"]}, "cannot build this nonsense"),
    ({"overrides": ["width=96"], "model": "vit_tiny_patch16_224"}, "width comes with the model"),
    ({"overrides": ["batch_size=2000"]}, "A batch of 2000 exceeds the 1437 training images"),
    ({"overrides": ["augment.pad=8"]}, "reaches 7 pixels into"), ({"watch": 1}, "watched at two steps at least"),
    ({"stream": True}, r"augment.scale reaches 1 at most; \(0.65, 1.4\) came.*--hold"),
])  # fmt: skip
def test_wrong_options_are_refused_in_a_sentence(tmp_path, options, message):
    arguments = {"recipe_name": "digits", "data": "digits", "out": tmp_path / "run", "device": "cpu", "quiet": True}
    with pytest.raises(ValueError, match=message):
        runs.run(**{**arguments, **options})
    assert not (tmp_path / "run").exists()


def test_a_stopped_run_is_exported_if_asked(tmp_path):
    options = {"tiny": True, "watch": 0, "quiet": True, "device": "cpu", "max_minutes": 1e-9}
    assert runs.run("digits", "digits", tmp_path / "a", **options)["validation"]["exported"] is None
    assert not (tmp_path / "a/model").exists()
    cut = runs.run("digits", "digits", tmp_path / "b", export=True, **options)
    assert not cut["finished"] and cut["validation"]["exported"]
    model = timm.create_model(f"local-dir:{tmp_path / 'b/model'}", pretrained=True).eval()
    top1 = accuracy(model, load("digits", "valid").subset(cut["validation"]["images"]), recipe("digits"))
    assert top1 == pytest.approx(max(cut["validation"]["top1"], cut["validation"]["top1_average"]), abs=1)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b"no archive", lambda b: b[:-50]])
def test_snapshots_that_are_damaged_do_not_end_the_run(tmp_path, capsys, damage):
    options = {"tiny": True, "watch": 3, "device": "cpu"}
    runs.run("digits", "digits", tmp_path, max_minutes=1e-9, **options)
    snapshots = tmp_path / "snapshots.npz"
    snapshots.write_bytes(damage(snapshots.read_bytes()))
    assert runs.run("digits", "digits", tmp_path, resume=True, **options)["finished"]
    assert "There are no snapshots from step" in capsys.readouterr().err


@pytest.mark.parametrize("source, splits, words", [
    (Source("vtab/pets"), [None], "--data vtab/pets --set"),
    (Source("/somewhere/pets", on_damaged="skip"), [None], "--data pets --skip-damaged --set"),
    (Source("torch/mnist", stream=False), [None], "--data torch/mnist --hold --set"),
])  # fmt: skip
def test_the_command_repeats_the_run(source, splits, words):
    plan = replace(recipe("digits"), epochs=3)
    assert command_of(plan, source, splits) == f"vitlens train --recipe digits {words} epochs=3 --out DIR"


@pytest.fixture(scope="module")
def digits_model(tmp_path_factory):
    """The folder of a model that a tiny run left."""
    out = tmp_path_factory.mktemp("run")
    runs.run("digits", "digits", out, tiny=True, watch=0, quiet=True, device="cpu")
    return out / "model"


def test_a_model_is_fine_tuned_at_a_higher_resolution(digits_model, tmp_path):
    options = {"tiny": True, "quiet": True, "device": "cpu", "watch": 2}
    settings, start = ["image_size=12", "resize=14"], str(digits_model)
    account = runs.run("finetune-pets", "digits", tmp_path / "a", model=start, overrides=settings, **options)
    tuned = timm.create_model(f"local-dir:{tmp_path / 'a/model'}", pretrained=True)
    assert tuned.patch_embed.grid_size == (6, 6) and tuned.pretrained_cfg["crop_mode"] == "squash"
    assert account["recipe"]["init"] == "model" and str(tmp_path) not in (tmp_path / "a/training.json").read_text()
    assert "--model model" in account["command"] and "model_kwargs" not in account["command"]
    again = runs.run("finetune-pets", "digits", tmp_path / "a", model=str(digits_model), resume=True, quiet=True,
                     device="cpu")  # fmt: skip
    assert again["validation"] == account["validation"]
    runs.run("finetune-pets", "digits", tmp_path / "a", model=f"{digits_model}/../model/", resume=True, quiet=True,
             device="cpu")  # fmt: skip
    with pytest.raises(ValueError, match="started from .*model, not elsewhere"):
        runs.run("finetune-pets", "digits", tmp_path / "a", model="elsewhere", resume=True, quiet=True)
    with pytest.raises(ValueError, match="name one with --model"):
        runs.run("finetune-pets", "digits", tmp_path / "b", quiet=True)
    with pytest.raises(ValueError, match="comes with the model"):
        runs.run("finetune-pets", "digits", tmp_path / "b", overrides=["model.depth=3"], model=start, quiet=True)


def test_a_recipe_from_a_file(tmp_path):
    mine = replace(recipe("digits").tiny(), name="mine", epochs=1)
    (tmp_path / "mine.json").write_text(mine.to_json())
    options = {"quiet": True, "device": "cpu", "watch": 0}
    account = runs.run(str(tmp_path / "mine.json"), "digits", tmp_path / "run", **options)
    assert account["steps"] == 8 and account["command"].startswith("vitlens train --recipe recipe.json --data digits")
    assert Recipe.from_json((tmp_path / "run/model/recipe.json").read_text()) == mine
    runs.run(str(tmp_path / "mine.json"), "digits", tmp_path / "run", resume=True, **options)
    (tmp_path / "other.json").write_text(replace(mine, name="other").to_json())
    with pytest.raises(ValueError, match="follows the recipe mine, not other"):
        runs.run(str(tmp_path / "other.json"), "digits", tmp_path / "run", resume=True, **options)
    with pytest.raises(ValueError, match="gone.json cannot be read as a recipe"):
        runs.run(str(tmp_path / "gone.json"), "digits", tmp_path / "run", resume=True, **options)
    (tmp_path / "bad.json").write_text("{")
    for name in ("bad.json", "absent.json"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as a recipe"):
            runs.run(str(tmp_path / name), "digits", tmp_path / "run2", **options)


def test_what_determinism_costs_is_measured_and_the_weights_stay(monkeypatch):
    r, world = recipe("digits").tiny(), World(device=torch.device("cpu"))
    model = r.build()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    data = load("digits", "train").subset(256), load("digits", "valid").subset(100)
    timing.cost_of_determinism(model, data, r, world)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(timing, "_speed", lambda _, __, trial, *___: 100.0 if trial.deterministic else 250.0)
    assert timing.cost_of_determinism(model, data, r, world) == 1.5


def test_the_bar_of_a_resumed_run_begins_where_the_run_does(capsys):
    with Progress(100, quiet=False) as bar:
        bar.show(Step(61, 100, 0, 0.25, 0.5))
        assert (bar.bar.initial, bar.bar.n) == (60, 61)
        bar.show(Step(70, 100, 0, 0.25, 0.5, 1.0, 100.0))
        done = bar.bar.format_dict
    assert (done["initial"], done["n"]) == (60, 70)


@pytest.mark.parametrize("better", ["top1", "top1_average"])
def test_the_weights_that_are_right_more_often_are_exported(tmp_path, better):
    r, data = recipe("digits").tiny(), (load("digits", "train").subset(64), load("digits", "valid").subset(64))
    model = r.build()
    average = {name: p.detach() + 1 for name, p in model.named_parameters()}
    last = Step(16, 16, 1, 0.0, 0.0, 1.0, 1.0, {"top1": 40.0, "top1_average": 50.0} | {better: 60.0})
    account = finish(tmp_path, r, model, average, data, last=last, steps=16)
    assert account["validation"]["exported"] == {"top1": "raw weights"}.get(better, "moving average of the weights")
    found = load_file(tmp_path / "model/model.safetensors")
    for name, p in model.named_parameters():
        assert torch.equal(found[name], (p.detach() + (better == "top1_average")).half())


def test_of_a_model_that_was_continued_the_average_is_exported(tmp_path):
    """Its validation images may be those that it is measured on: nothing is chosen by them."""
    r, data = recipe("digits").tiny(), (load("digits", "train").subset(64), load("digits", "valid").subset(64))
    model, r = r.build(), replace(r, init="somewhere")
    average = {name: p.detach() + 1 for name, p in model.named_parameters()}
    for metrics, exported in (
        ({"top1": 60.0, "top1_average": 50.0}, "moving average of the weights"), ({"top1": 60.0}, "raw weights"),
    ):  # fmt: skip
        last = Step(16, 16, 1, 0.0, 0.0, 1.0, 1.0, metrics)
        account = finish(tmp_path, r, model, average, data, last=last, steps=16)
        assert account["validation"]["exported"] == exported
        found = load_file(tmp_path / "model/model.safetensors")["head.bias"]
        assert torch.equal(found, (model.head.bias.detach() + ("top1_average" in metrics)).half())


def test_a_fine_tuning_goes_on_without_the_model_it_started_from(digits_model, tmp_path):
    options = {"tiny": True, "quiet": True, "device": "cpu", "watch": 0, "overrides": ["image_size=12", "resize=14"]}
    start = shutil.copytree(digits_model, tmp_path / "start")
    runs.run("finetune-pets", "digits", tmp_path / "a", model=str(start), **options)
    runs.run("finetune-pets", "digits", tmp_path / "b", model=str(start), max_minutes=1e-9, **options)
    shutil.rmtree(start)
    assert runs.run("finetune-pets", "digits", tmp_path / "b", resume=True, quiet=True, device="cpu")["finished"]
    a, b = ((tmp_path / f"{run}/model/model.safetensors").read_bytes() for run in "ab")
    assert a == b


def test_a_killed_run_tells_the_time_of_its_checkpoint(tmp_path):
    options = {"tiny": True, "quiet": True, "device": "cpu", "watch": 0}
    runs.run("digits", "digits", tmp_path, max_minutes=1e-9, **options)
    account = json.loads((tmp_path / "training.json").read_text())
    (tmp_path / "training.json").unlink()
    (marker,) = (tmp_path / "checkpoints").glob("*.json")
    assert 0 <= json.loads(marker.read_text())["seconds"] <= account["seconds"]
    assert seconds_before(tmp_path) == json.loads(marker.read_text())["seconds"]
    (tmp_path / "training.json").write_text(json.dumps({"seconds": 1e6}))
    seconds = runs.run("digits", "digits", tmp_path, resume=True, **options)["seconds"]
    assert 1e6 < seconds < 1e6 + 1000, "this part of the run counts once"


def test_a_finished_run_is_finished_without_its_checkpoints(tmp_path, monkeypatch, capsys):
    options = {"tiny": True, "quiet": True, "device": "cpu", "watch": 0}
    done = runs.run("digits", "digits", tmp_path, **options)
    shutil.rmtree(tmp_path / "checkpoints")
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["vitlens.train.runs"], "fit", None)
        again = runs.run("digits", "digits", tmp_path, resume=True, **options | {"quiet": False})
    assert again == json.loads(json.dumps(done)) and "is finished." in capsys.readouterr().err
    anew = runs.run("digits", "digits", tmp_path, resume=True, overrides=["epochs=1"], **options)
    assert anew["steps"] == 8 and len(list((tmp_path / "checkpoints").glob("*.json"))) == 1
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "training.json").write_text(json.dumps(anew | {"seconds": 1e6, "labels": "other"}))
    assert runs.run("digits", "digits", tmp_path, resume=True, **options)["seconds"] < 1e6, "begun, not gone on with"


def test_tensorboard_gets_what_the_log_gets_or_a_sentence(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Board(tmp_path / "board") as board:
        board.show(Step(1, 9, 0, 0.25, 0.5))
        board.show(Step(2, 9, 0, 0.25, 0.5, 1.25, 100.0, {"top1": 50.0}))
        board.show(Step(3, 9, 0, 0.25, 0.5, 1.5, 100.0))
    with Board(tmp_path / "board") as board:  # resumed from a checkpoint of step 2
        board.show(Step(3, 9, 0, 0.125, 0.5, 1.0, 100.0))
    read = EventAccumulator(str(tmp_path / "board")).Reload()
    found = {name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]}
    assert found == {
        "loss": [(2, 1.25), (3, 1.0)], "lr": [(2, 0.25), (3, 0.125)], "images_per_second": [(2, 100.0), (3, 100.0)],
        "top1": [(2, 50.0)],
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        Board(tmp_path / "board")


def test_a_streamed_run_is_resumed_as_a_stream_and_names_what_was_damaged(tmp_path, capsys):
    digits = load("digits", "train").subset(80), load("digits", "valid").subset(40)
    for split, name in zip(digits, ("train", "val"), strict=True):
        for i, (image, label) in enumerate(zip(split.images, split.labels.tolist(), strict=True)):
            path = tmp_path / "data" / name / str(label) / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    for split in ("train", "val"):
        (tmp_path / f"data/{split}/3/broken.png").write_bytes(b"no picture")
    options = {"tiny": True, "device": "cpu", "watch": 0, "workers": 1, "on_damaged": "skip",
               "overrides": ["augment.scale=0.5,1", "batch_size=16", "augment.rotate=0"]}  # fmt: skip
    whole = runs.run("digits", tmp_path / "data", tmp_path / "a", stream=True, **options)
    assert "Replaced by the next one: train/3/broken.png" in capsys.readouterr().err
    runs.run("digits", tmp_path / "data", tmp_path / "b", stream=True, max_minutes=1e-9, **options)
    rest = runs.run("digits", tmp_path / "data", tmp_path / "b", resume=True, **options)
    assert rest["validation"] == whole["validation"]
    a, b = ((tmp_path / f"{run}/model/model.safetensors").read_bytes() for run in "ab")
    assert a == b, "resumed without saying so, it is still a stream"
    held = runs.run("digits", tmp_path / "data", tmp_path / "c", **options)
    assert "Left out: train/3/broken.png" in capsys.readouterr().err and held["training_images"] == 80
    assert whole["validation"]["images"] == held["validation"]["images"] == 40
    assert json.loads((tmp_path / "b/data.json").read_text()) == {"stream": [True, True]}
    assert json.loads((tmp_path / "c/data.json").read_text()) == {"stream": [False, False]}


@pytest.mark.parametrize("content", ["", "[]", '{"stream": true}', '{"stream": [1]}', "\0\xff"])
def test_a_damaged_note_of_how_images_are_read_is_told_by_its_name(tmp_path, content):
    options = {"tiny": True, "device": "cpu", "watch": 0, "quiet": True}
    runs.run("digits", "digits", tmp_path, max_minutes=1e-9, **options)
    (tmp_path / "data.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"data\.json is damaged.*--stream or --hold"):
        runs.run("digits", "digits", tmp_path, resume=True, **options)
    assert runs.run("digits", "digits", tmp_path, resume=True, stream=False, **options)["finished"]


def test_a_refused_start_leaves_the_run_that_is_there_untouched(tmp_path):
    options = {"tiny": True, "device": "cpu", "watch": 3, "quiet": True}
    runs.run("digits", "digits", tmp_path, max_minutes=1e-9, **options)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="already holds checkpoints"):
        runs.run("digits", "digits", tmp_path, overrides=["lr=1e-3"], **options)
    with pytest.raises(ValueError, match="is to be resumed with 0.001"):
        runs.run("digits", "digits", tmp_path, resume=True, overrides=["lr=1e-3"], **options)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert runs.run("digits", "digits", tmp_path, resume=True, **options)["finished"]


def test_a_save_that_fails_when_a_run_stops_is_heard_of(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitlens.train.checkpoint.save", full)
    with pytest.raises(OSError, match="No space left"):
        runs.run("digits", "digits", tmp_path, tiny=True, device="cpu", watch=0, quiet=True, max_minutes=1e-9)


def test_a_model_without_a_table_of_positions_is_tuned_and_watched_as_far_as_it_goes(tmp_path, capsys):
    args = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}
    model = timm.create_model("vit_relpos_small_patch16_224", **args)
    timm.models.save_for_hf(model, tmp_path / "relpos", model_args=args, safe_serialization=True)
    settings = ["image_size=32", "resize=0", "batch_size=32"]
    runs.run("finetune-small", "digits", tmp_path / "run", model=str(tmp_path / "relpos"), tiny=True, device="cpu",
             watch=2, overrides=settings)  # fmt: skip
    assert "Not in the snapshots: " in capsys.readouterr().err
    with np.load(tmp_path / "run/snapshots.npz") as found:
        assert {"filters", "distances", "top1_confidence"} <= set(found) and "positions" not in found
