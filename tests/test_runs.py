"""`vitlens train` from start to end: files, resumption, and rejected options."""

import json
import math
import re
import shutil
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from support import refuses
from timm.models import VisionTransformer
from torch import nn

from vitlens.data import load
from vitlens.files import lock_folder
from vitlens.models import load_model
from vitlens.train import Recipe, Step, build_criterion, fit, hardware, recipe, runs
from vitlens.train.run_folder import finish

torch.set_num_threads(1)


QUIET = {"tiny": True, "watch": 0, "device": "cpu", "quiet": True}
CUT = {"max_minutes": 1e-9}  # stopped after its first step


def train(out, recipe_name="digits", data="digits", **options) -> dict:
    """A tiny quiet run on the CPU without snapshots by default."""
    return runs.run(recipe_name, data, out, **QUIET | options)


def same_file(tmp_path, name: str) -> bool:
    """True if the runs a and b wrote the same bytes."""
    a, b = ((tmp_path / run / name).read_bytes() for run in "ab")
    return a == b


def test_run_writes_all_files(tmp_path):
    account = train(tmp_path / "a", watch=4)
    assert account["finished"] and account["steps"] == 16 and account["validation"]["exported"]
    written = json.loads((tmp_path / "a/model/training.json").read_text())
    assert written["versions"]["torch"] == torch.__version__ and str(tmp_path) not in json.dumps(
        written
    )
    assert written["command"] == "vitlens train --recipe recipe.json --data digits --out DIR"
    timm.create_model(f"local-dir:{tmp_path / 'a/model'}", pretrained=True)

    assert not train(tmp_path / "b", watch=4, **CUT)["finished"]
    rest = train(tmp_path / "b", watch=4, resume=True, tiny=False)
    assert rest["validation"] == account["validation"]
    assert same_file(tmp_path, "model/model.safetensors") and same_file(tmp_path, "snapshots.npz")


def test_a_run_is_resumed_by_its_folder_alone(tmp_path, monkeypatch, capsys):
    digits = load("digits", "valid").subset(80)
    for i, (image, label) in enumerate(zip(digits.images, digits.labels.tolist(), strict=True)):
        (tmp_path / f"data/{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"data/{label}/{i}.png")
    monkeypatch.chdir(tmp_path)
    options = dict(data="data", overrides=["batch_size=16", "log_every=1000"])
    whole = train("a", **options)
    train("b", **options, **CUT, quiet=False)
    assert "`vitlens train --resume --out b` continues it" in capsys.readouterr().err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    refuses(
        "it has 66 of them, and the data now 256",
        train,
        tmp_path / "b",
        "",
        "digits",
        resume=True,
        tiny=False,
    )
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match="the data of the run in .*b, does not exist. Give its place with --data"
    ):
        train(tmp_path / "b", "", "", resume=True, tiny=False)
    train(tmp_path / "b", "", "../moved", resume=True, tiny=False, max_minutes=1e-9, quiet=False)
    assert "--data ../moved` continues it" in capsys.readouterr().err
    (tmp_path / "moved").rename(tmp_path / "data")
    assert (
        train(tmp_path / "b", "", "", resume=True, tiny=False)["validation"] == whole["validation"]
    )
    assert same_file(tmp_path, "model/model.safetensors")
    (tmp_path / "b/data.json").write_text(
        '{"stream": [false, false]}'
    )  # as earlier versions wrote it
    refuses("does not name its data. Give --data", train, tmp_path / "b", "", "", resume=True)


def test_a_stopped_run_has_the_losses_of_its_first_steps(tmp_path):
    train(tmp_path, overrides=["log_every=1000", "evaluate_every=1000"], **CUT)
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1 and math.isfinite(json.loads(line)["loss"])


def test_run_prints_device_precision_and_time_left(tmp_path, capsys, monkeypatch):
    settings = ["epochs=4", "compile_cpu=true", "precision=fp32"]
    monkeypatch.setattr(
        "vitlens.train.runs.build_criterion",
        lambda model, plan, device: build_criterion(model, replace(plan, compile="off"), device),
    )
    train(tmp_path, overrides=settings, quiet=False, watch=4)
    lines = capsys.readouterr().err
    assert f"Training 32 steps of 32 images on {hardware('cpu')} in fp32.\n" in lines
    assert "Compiling, about half a minute …\n" in lines
    assert len(re.findall(r"[\d,]+ images a second: about \d+ seconds left, without", lines)) == 1
    assert re.search(
        r"Top-1 on 128 validation images: \d+\.\d %, of averaged weights .*Exported:", lines
    )
    assert re.search(r"Position embeddings: rank correlation .* −?0\.\d\d → −?0\.\d\d\.", lines)
    assert re.search(
        r"Nearest head: mean attention distance \d\.\d → \d\.\d px \(layer \d, head", lines
    )
    train(tmp_path, resume=True, tiny=False, quiet=False)
    lines = capsys.readouterr().err
    assert "Training 32" not in lines and "Compiling" not in lines and "a second" not in lines


def test_forecast_counts_from_the_start_of_the_process():
    def sentences(readings):
        said = []
        forecast = runs.Forecast(100, said.append)
        step = Step(1, 100_000, 0, 0.1, 1.0)
        found = {}
        for n in range(readings[0], 300):
            speed = 500.0 if n in readings else None
            forecast.update(replace(step, step=n, images_per_second=speed))
            if said:
                found[n] = said.pop()
        return found

    assert sentences([1, 2, 5, 10, 20, 50]) == {
        20: "500 images a second: about 5.6 hours left, without validation."
    }
    assert list(sentences([101, 150, 200])) == [150]
    assert list(sentences([149, 150, 200])) == [200]
    assert [runs.duration(s) for s in (80, 750)] == ["80 seconds", "12 minutes"]


def tune(out, model="", **options) -> dict:
    """A tiny run that fine-tunes a model on digits of 12 pixels."""
    return train(
        out, "finetune-pets", model=str(model), overrides=["image_size=12", "resize=14"], **options
    )


def go_on(out, **options) -> dict:
    return train(out, "finetune-pets", resume=True, tiny=False, **options)


def test_run_fine_tunes_and_resumes_without_start_model(tmp_path):
    train(tmp_path / "first")
    out, start = tmp_path / "a", (tmp_path / "first/model").rename(tmp_path / "start")
    account = tune(out, start, watch=2)
    tuned = timm.create_model(f"local-dir:{out / 'model'}", pretrained=True)
    assert tuned.patch_embed.grid_size == (6, 6) and tuned.pretrained_cfg["crop_mode"] == "squash"
    assert (
        account["recipe"]["init"] == "start"
        and str(tmp_path) not in (out / "training.json").read_text()
    )
    assert "--recipe recipe.json --data digits --model start" in account["command"]
    assert go_on(out, model=f"{start}/../start/")["validation"] == account["validation"]
    refuses("started from .*start, not elsewhere", go_on, out, model="elsewhere")
    tune(tmp_path / "b", start, **CUT)
    shutil.rmtree(start)
    assert go_on(tmp_path / "b")["finished"] and same_file(tmp_path, "model/model.safetensors")


def test_run_with_recipe_file(tmp_path):
    mine = replace(recipe("digits").tiny(), name="mine", epochs=1)
    (tmp_path / "mine.json").write_text(mine.to_json())
    account = train(tmp_path / "run", str(tmp_path / "mine.json"), tiny=False)
    assert account["steps"] == 8 and account["command"].startswith(
        "vitlens train --recipe recipe.json --data digits"
    )
    assert Recipe.from_json((tmp_path / "run/model/recipe.json").read_text()) == mine


def test_finish_exports_better_weights(tmp_path):
    r, data = (
        recipe("digits").tiny(),
        (load("digits", "train").subset(64), load("digits", "valid").subset(64)),
    )
    model = r.build()
    average = {name: p.detach() + 1 for name, p in model.named_parameters()}
    for start, metrics, averaged in (
        ("", {"top1": 60.0, "top1_average": 50.0}, False),
        ("", {"top1": 40.0, "top1_average": 60.0}, True),
        # Validation images of a fine-tuning may be the test images, too: nothing is chosen by them.
        ("somewhere", {"top1": 60.0, "top1_average": 50.0}, True),
        ("somewhere", {"top1": 60.0}, False),
    ):
        last = Step(16, 16, 1, 0.0, 0.0, 1.0, 1.0, metrics)
        account = finish(
            tmp_path, replace(r, init=start), model, average, data, last=last, steps=16
        )
        assert account["validation"]["exported"] == (
            "moving average of the weights" if averaged else "raw weights"
        )
        found = load_file(tmp_path / "model/model.safetensors")
        for name, p in model.named_parameters():
            assert torch.equal(found[name], (p.detach() + averaged).half())


def test_run_returns_finished_run(tmp_path, monkeypatch, capsys):
    done = train(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with monkeypatch.context() as patched:
        patched.setattr(runs, "fit", None)
        again = train(tmp_path, resume=True, quiet=False)
    assert again == json.loads(json.dumps(done)) and "is finished." in capsys.readouterr().err
    anew = train(tmp_path, resume=True, overrides=["epochs=1"])
    assert anew["steps"] == 8 and len(list((tmp_path / "checkpoints").glob("*.json"))) == 1
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "training.json").write_text(json.dumps(anew | {"seconds": 1e6, "labels": "other"}))
    assert train(tmp_path, resume=True)["seconds"] < 1e6, "begun, not gone on with"


def test_run_resumes_stream(tmp_path):
    digits = load("digits", "train").subset(80), load("digits", "valid").subset(40)
    for split, name in zip(digits, ("train", "val"), strict=True):
        for i, (image, label) in enumerate(zip(split.images, split.labels.tolist(), strict=True)):
            path = tmp_path / "data" / name / str(label) / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    options = {
        "data": tmp_path / "data",
        "quiet": False,
        "workers": 1,
        "overrides": ["augment.scale=0.5,1", "batch_size=16", "augment.rotate=0"],
    }
    whole = train(tmp_path / "a", stream=True, **options)
    train(tmp_path / "b", stream=True, **CUT, **options)
    assert train(tmp_path / "b", resume=True, **options)["validation"] == whole["validation"]
    assert same_file(tmp_path, "model/model.safetensors"), (
        "resumed without saying so, it is still a stream"
    )
    held = train(tmp_path / "c", **options)
    assert (
        held["training_images"] == 80
        and whole["validation"]["images"] == held["validation"]["images"] == 40
    )
    assert json.loads((tmp_path / "b/data.json").read_text())["stream"] == [True, True]
    assert json.loads((tmp_path / "c/data.json").read_text())["stream"] == [False, False]


def test_run_survives_rejected_start_and_damaged_snapshots(tmp_path, capsys):
    train(stopped := tmp_path / "stopped", watch=3, **CUT)
    before = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    refuses("already holds a run", train, stopped, overrides=["lr=1e-3"], watch=3)
    refuses("got 0.001", train, stopped, resume=True, overrides=["lr=1e-3"], watch=3)
    with (
        lock_folder(stopped),
        pytest.raises(ValueError, match=f"Another process is writing to {stopped}"),
    ):
        train(stopped, resume=True, watch=3)
    assert {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()} == before
    (stopped / "snapshots.npz").write_bytes(before[stopped / "snapshots.npz"][:-50])
    assert train(stopped, resume=True, watch=3, quiet=False)["finished"]
    assert "Snapshots stop at step" in capsys.readouterr().err


def test_run_rejects_changed_images_on_resume(tmp_path):
    def paint(color):
        for split, count in {"train": 20, "val": 4}.items():
            for i in range(count):
                (folder := tmp_path / "data" / split / str(i % 2)).mkdir(
                    parents=True, exist_ok=True
                )
                Image.new("RGB", (8, 8), color).save(folder / f"{i}.png")

    options = {"data": tmp_path / "data", "overrides": ["batch_size=4"]}
    paint("red")
    train(tmp_path / "run", **CUT, **options)
    paint("blue")
    refuses(
        "20 of 20 have another content: train/0/0.png",
        train,
        tmp_path / "run",
        resume=True,
        **options,
    )
    paint("red")
    done = train(tmp_path / "run", resume=True, **options)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert train(tmp_path / "run", resume=True, **options) == json.loads(json.dumps(done)) | {
        "stopped_by": 0
    }
    paint("blue")
    assert train(tmp_path / "run", resume=True, **options)["pictures"] != done["pictures"], (
        "begun again"
    )


def test_run_raises_failed_save_on_stop(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitlens.train.run_folder.save_checkpoint", full)
    refuses("No space left", train, tmp_path, error=OSError, **CUT)


def test_run_fine_tunes_without_position_table(tmp_path, capsys):
    args = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 10,
    }
    model = timm.create_model("vit_relpos_small_patch16_224", **args)
    timm.models.save_for_hf(model, tmp_path / "relpos", model_args=args, safe_serialization=True)
    settings = ["image_size=32", "resize=0", "batch_size=32"]
    start = str(tmp_path / "relpos")
    train(tmp_path / "run", "finetune-small", model=start, watch=2, overrides=settings, quiet=False)
    assert "Not in the snapshots: " in capsys.readouterr().err
    with np.load(tmp_path / "run/snapshots.npz") as found:
        assert {"filters", "distances", "top1_confidence"} <= set(
            found
        ) and "positions" not in found


class Colors(nn.Module):
    """An objective with learned weights: the mean color of an image from the model's features."""

    def __init__(self, width: int):
        super().__init__()
        self.head = nn.Linear(width, 3)

    def forward(self, model, x):
        features = model.forward_head(model.forward_features(x), pre_logits=True)
        return (self.head(features) - x.mean((2, 3))).square().mean()


class Rescaled(VisionTransformer):
    """A model that timm does not know."""

    def forward(self, x):
        return super().forward(2 * x)


def build_rescaled(plan, mlp_ratio=2.0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        return Rescaled(
            8,
            2,
            embed_dim=plan.width,
            depth=2,
            num_heads=plan.heads,
            num_classes=10,
            mlp_ratio=mlp_ratio,
        )


def test_run_with_own_model_resumes_exactly_and_only_by_its_builder(tmp_path):
    build = partial(build_rescaled, mlp_ratio=3.0)
    whole = train(tmp_path / "a", build=build)
    assert not train(tmp_path / "b", build=build, **CUT)["finished"]
    refuses("test_runs.build_", train, tmp_path / "b", resume=True)
    rest = train(tmp_path / "b", build=build, resume=True)
    assert rest["validation"] == whole["validation"] and same_file(
        tmp_path, "model/model.safetensors"
    )
    assert train(tmp_path / "b", build=build, resume=True)["steps"] == 16
    refuses("test_runs.build_", train, tmp_path / "b", resume=True)
    refuses(r"built by test_runs\.build_rescaled", load_model, tmp_path / "a/model")


def test_fit_learns_an_objective_and_resumes_exactly(tmp_path):
    plan = recipe("digits").tiny()
    data = load("digits", "train").subset(256), load("digits", "valid").subset(100)

    def losses(folder, last=None, **options):
        torch.manual_seed(1)
        steps = fit(
            plan.build(),
            data,
            plan,
            objective=Colors(plan.width),
            device="cpu",
            out=folder,
            **options,
        )
        with closing(steps):
            return [step.loss for step in islice(steps, last)]

    whole = losses(tmp_path / "a")
    assert (
        losses(tmp_path / "b", 5) + losses(tmp_path / "b", resume=True) == whole
        and whole[-1] < whole[0] / 2
    )
    with pytest.raises(ValueError, match=r"objective = 'test_runs.Colors', got 'labels'"):
        next(fit(plan.build(), data, plan, device="cpu", out=tmp_path / "b", resume=True))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A stopped run of the recipe digits, and a file of another recipe beside it."""
    out = tmp_path_factory.mktemp("runs") / "stopped"
    train(out, **CUT)
    other = replace(recipe("digits").tiny(), name="other")
    out.with_name("other.json").write_text(other.to_json())
    return out


STARTS = (
    # options
    ({"max_minutes": 0}, "--max-minutes .* positive"),
    ({"max_minutes": math.inf}, "--max-minutes .* positive"),
    ({"watch": 1}, "at least 2 "),
    ({"resume": True}, "no run to resume"),
    ({"data": "nowhere"}, "not a folder"),
    ({"stream": True}, r"augment.scale .*got \(0.65, 1.4\).*--hold"),
    # recipes
    ({"recipe_name": "nope"}, "got 'nope'"),
    ({"recipe_name": "absent.json"}, "absent.json cannot be read"),
    ({"recipe_name": "finetune-pets"}, "--model"),
    # settings
    ({"overrides": ["epochs=x"]}, "of type int"),
    ({"overrides": ["num_classes=5"]}, "has 10 classes"),
    ({"overrides": ["warmup=0", "warmup_steps=9", "epochs=0", "steps=9"]}, "9 steps of warm-up"),
    ({"overrides": ["architecture=nonsense"]}, "cannot build this nonsense"),
    ({"overrides": ["width=96"], "model": "vit_tiny_patch16_224"}, "width comes with the model"),
    ({"overrides": ["model.pos_embed=none"], "model": "m"}, "model.pos_embed comes with the model"),
    ({"overrides": ["batch_size=2000"]}, "2000 exceeds the 1437 training"),
    ({"overrides": ["augment.pad=8"]}, "augment.pad is 8.* 7 pixels"),
)
"""Options of a run that is not begun, and decisive words."""


@pytest.mark.parametrize("options, words", STARTS)
def test_run_refuses_to_start(tmp_path, options, words):
    refuses(words, train, tmp_path / "run", **{"tiny": False, **options})
    assert not (tmp_path / "run").exists()


RESUMPTIONS = (
    (lambda out: train(out, "mnist", "", resume=True), "recipe digits, not mnist"),
    (lambda out: train(out, "", "", resume=True, seed=3, tiny=False), "seed = 0, got 3"),
    (lambda out: train(out, f"{out.parent}/other.json", resume=True), "recipe digits, not other"),
    (lambda out: train(out, f"{out.parent}/gone.json", resume=True), "gone.json cannot be read"),
)
"""Resumptions of a stopped run, and decisive words."""


@pytest.mark.parametrize("call, words", RESUMPTIONS)
def test_run_refuses_to_resume(stopped, call, words):
    refuses(words, call, stopped)
