"""Several processes, or one batch in several parts, train the same model as one process with whole batches."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import timm
import torch
from test_train import tiny
from timm.models import save_for_hf

from vitlens.data import load
from vitlens.data.augment import Augment
from vitlens.train import fit
from vitlens.train.processes import World, join
from vitlens.train.recipes import Recipe, recipe, starting_from

torch.set_num_threads(1)
STEPS = 88

SHARED = """
import json, sys, time, torch
torch.set_num_threads(1)
from vitlens.data import load
from vitlens.train.recipes import Recipe
from vitlens.train import fit, join
recipe, out, pause = Recipe.from_json(sys.argv[1]), sys.argv[2], float(sys.argv[3])
world = join("cpu")
data = load("digits", "train"), load("digits", "valid")
model = recipe.build()
for step in fit(model, data, recipe, out=out, world=world):
    print(json.dumps([world.rank, step.step, step.loss, step.metrics]), flush=True)
    for name, buffer in model.named_buffers():
        if name == "layer1.0.bn1.running_var":
            print(json.dumps(f"{name} {buffer.tolist()}"), flush=True)
    time.sleep(pause)
"""


def deterministic(**changes) -> Recipe:
    """Two epochs with augmentation, without dropout and stochastic depth, whose draws depend on the parts.

    AdamW: the bf16 iteration of Muon lifts differences in the last bit of a sum to 1e-3 of an update.
    """
    r = replace(tiny(**changes), drop_path=0.0, patch_drop=0.0, patch_drop_until=0.0, epochs=0, steps=STEPS)
    augment = Augment(flip=0.1, scale=(0.95, 1.0), erase=0.1, cutmix=0.2, mixup=0.1)
    return replace(r, optimizer="adamw", lr=2e-3, augment=augment, average=0.9)


@pytest.fixture(scope="module")
def data():
    return load("digits", "train"), load("digits", "valid")


@pytest.fixture(scope="module")
def alone(data):
    model = deterministic().build()
    steps = list(fit(model, data, deterministic(), device="cpu"))
    assert steps[-1].metrics["top1"] > 18, "it has learned something"
    return model, [s.loss for s in steps], steps[-1].metrics


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_batch_in_parts_trains_the_same_model(data, alone, accumulate):
    model = deterministic().build()
    steps = list(fit(model, data, deterministic(accumulate=accumulate), device="cpu"))
    assert [s.loss for s in steps] == pytest.approx(alone[1], abs=1e-5)
    assert steps[-1].metrics == pytest.approx(alone[2])


def launched(recipe: Recipe, out: Path, pause: float = 0.0, processes: int = 2) -> list[subprocess.Popen]:
    """One process for each rank, as torchrun starts them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", SHARED, recipe.to_json(), str(out), str(pause)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip


def test_two_processes_equal_one(alone, tmp_path):
    children = launched(deterministic(), tmp_path)
    outputs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs[0][1][-2000:]
    for out, _ in outputs:
        steps = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
        assert [s[1] for s in steps] == list(range(1, STEPS + 1))
        assert [s[2] for s in steps] == pytest.approx(alone[1], abs=1e-5)
        assert steps[-1][3] == pytest.approx(alone[2])
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, STEPS + 1)), "only the first process writes"


def test_processes_share_what_batch_normalization_knows_of_the_images(tmp_path):
    """Else each would validate another model, and the first one's would be saved."""
    save_for_hf(timm.create_model("test_resnet"), tmp_path / "start", safe_serialization=True)
    r = recipe("finetune-small").override("image_size=8", "resize=0", "num_classes=10", "batch_size=64")
    r = starting_from(replace(r, epochs=0, steps=6, precision="fp32", average=0.5), tmp_path / "start")
    children = launched(r, tmp_path / "out")
    outputs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs[0][1][-2000:]
    first, second = ([line for line in out.splitlines() if line.startswith('"')] for out, _ in outputs)
    assert first == second and len(first) == 6


def test_a_lost_process_ends_the_run_with_a_sentence_and_a_checkpoint(data, alone, tmp_path):
    r = deterministic(save_every=1e9)
    first, second = launched(r, tmp_path, pause=0.1)
    while not (line := second.stdout.readline()).startswith("[1, 5"):
        assert line
    second.send_signal(signal.SIGKILL)
    said = first.communicate(timeout=120)[1]
    second.communicate()
    assert first.returncode != 0
    assert re.search(r"One of the 2 processes of this run has ended .* start all of them again with --resume", said)
    model = r.build()
    rest = list(fit(model, data, r, device="cpu", out=tmp_path, resume=True))
    assert rest[0].step >= 6 and rest[-1].step == STEPS, "the checkpoint holds every step that was taken"
    assert [s.loss for s in rest] == pytest.approx(alone[1][-len(rest) :], abs=1e-5)


def test_parts_must_hold_whole_pairs(data):
    r = deterministic()
    with pytest.raises(ValueError, match="even number of images, for 3 processes × accumulate 1"):
        next(fit(r.build(), data, r, world=World(0, 3, torch.device("cpu"))))


def test_a_launcher_without_accelerate_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ValueError, match="pip install accelerate"):
        join("cpu")


TRAIN = [sys.executable, "-m", "vitlens", "train", "--recipe", "digits", "--data", "digits", "--tiny"]
ALONE = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_the_command_in_two_processes_equals_one(tmp_path):
    """Started as torchrun starts it, on a machine without a GPU and with no word about devices."""
    settings = ["optimizer=adamw", "drop_path=0", "patch_drop=0", "compile=off"]
    options = [word for setting in settings for word in ("--set", setting)]
    subprocess.run([*TRAIN, *options, "--out", tmp_path / "one"], env=ALONE, check=True, capture_output=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command = [*torchrun, "--nproc-per-node=2", "-m", *TRAIN[2:], *options, "--out", tmp_path / "two"]
    subprocess.run(command, env=ALONE, check=True, timeout=300)
    one, two = (
        [json.loads(line) for line in (tmp_path / f"{name}/log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [line["step"] for line in two] == [line["step"] for line in one] == list(range(1, 17))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], abs=1e-5)
    assert two[-1]["metrics"] == pytest.approx(one[-1]["metrics"], abs=1)
    account = json.loads((tmp_path / "two/training.json").read_text())
    assert account["finished"] and account["hardware"] == "2 CPU threads"
    a, b = (safetensors.torch.load_file(tmp_path / f"{name}/model/model.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(a[name].float(), b[name].float(), atol=1e-3) for name in a)


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    monkeypatch.setattr("accelerate.PartialState", lambda **_: alone)
    with pytest.raises(ValueError, match="2 processes were started, but this one sees 1 on cpu"):
        join("cpu")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_end_saves_and_goes_on(tmp_path, number):
    command = [*TRAIN, "--out", str(tmp_path), "--device", "cpu", "--set", "epochs=4000"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ALONE)
    while not (tmp_path / "log.jsonl").exists() or not (tmp_path / "log.jsonl").read_text():
        assert child.poll() is None
        time.sleep(0.1)
    child.send_signal(number)
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 128 + number and "as it was asked to, at step" in said
    stopped = int(re.search(r"at step (\d+) of", said)[1])
    assert (tmp_path / f"checkpoints/step-{stopped:08d}.json").exists()
    more = [*TRAIN, "--out", str(tmp_path), "--device", "cpu", "--resume", "--max-minutes", "0.001"]
    said = subprocess.run(more, env=ALONE, capture_output=True, text=True, check=True).stderr
    assert stopped < int(re.search(r"at step (\d+) of", said)[1])
