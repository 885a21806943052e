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
from types import SimpleNamespace

import pytest
import safetensors.torch
import timm
import torch
from maps_support import refuses
from test_train import digits, tiny
from timm.models import save_for_hf

from vitlens.cli import run
from vitlens.data.augment import Augment
from vitlens.train import Recipe, World, fit, join, recipe, starting_from

torch.set_num_threads(1)
STEPS = 64  # eight epochs


def deterministic(**changes) -> Recipe:
    """With augmentation, without dropout and stochastic depth, whose draws depend on the parts.

    AdamW: the bf16 iteration of Muon lifts differences in the last bit of a sum to 1e-3 of an update.
    """
    r = replace(tiny(**changes), drop_path=0.0, patch_drop=0.0, patch_drop_until=0.0, epochs=0, steps=STEPS)
    augment = Augment(flip=0.1, scale=(0.95, 1.0), erase=0.1, cutmix=0.2, mixup=0.1)
    return replace(r, optimizer="adamw", lr=2e-3, augment=augment, average=0.9)


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.fixture(scope="module")
def alone(data):
    model = deterministic().build()
    steps = list(fit(model, data, deterministic(), device="cpu"))
    assert steps[-1].metrics["top1"] > 18, "it has learned something"
    return [s.loss for s in steps], steps[-1].metrics


def test_accumulate_trains_the_same_model(data, alone):
    steps = list(fit(deterministic().build(), data, deterministic(accumulate=4), device="cpu"))
    assert [s.loss for s in steps] == pytest.approx(alone[0], abs=1e-5)
    assert steps[-1].metrics == pytest.approx(alone[1])


def train(rank: int, port: int, convolutions: str, text: str, out) -> None:
    """Work of each of two processes: a short run with batch normalization, and a slow run whose steps are stored."""
    torch.set_num_threads(1)
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank,
              "OMP_NUM_THREADS": 1}  # else accelerate lets each process take every core  # fmt: skip
    os.environ |= {name: str(value) for name, value in shared.items()}
    sys.stderr = open(out / f"stderr-{rank}", "w", buffering=1)  # noqa: SIM115
    r, world = Recipe.from_json(convolutions), join("cpu")
    model, data = r.build(), digits()
    list(fit(model, data, r, world=world))
    statistics = {name: b.tolist() for name, b in model.named_buffers() if "running" in name}
    (out / f"statistics-{rank}").write_text(json.dumps(statistics))
    r = Recipe.from_json(text)
    with open(out / f"steps-{rank}", "w", buffering=1) as file:
        for step in fit(r.build(), data, r, out=out, world=world):
            print(json.dumps([step.step, step.loss]), file=file)
            time.sleep(0.1)


def steps_of(folder, rank: int) -> list:
    file = folder / f"steps-{rank}"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(children) -> list[int]:
    for child in children:
        child.join(300)
    return [child.exitcode for child in children]


def test_processes_share_statistics_and_save_after_loss(data, alone, forked, tmp_path):
    """Else each would validate another model, and the first one's would be saved."""
    save_for_hf(timm.create_model("test_resnet"), tmp_path / "start", safe_serialization=True)
    short = recipe("finetune-small").override("image_size=8", "resize=0", "num_classes=10", "batch_size=64")
    short = starting_from(replace(short, epochs=0, steps=3, precision="fp32", average=0.5), tmp_path / "start")
    r = deterministic(save_every=1e9)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    first, second = (forked(train, rank, port, short.to_json(), r.to_json(), tmp_path) for rank in range(2))
    while len(steps_of(tmp_path, 1)) < 5:
        assert second.is_alive(), (tmp_path / "stderr-1").read_text()
        time.sleep(0.02)
    second.kill()
    assert wait_for([first, second])[0] != 0
    a, b = (json.loads((tmp_path / f"statistics-{rank}").read_text()) for rank in range(2))
    assert a == b and a
    output = (tmp_path / "stderr-0").read_text()
    assert re.search(r"One of the 2 processes of this run has ended .* Start all of them again with --resume", output)
    rest = list(fit(r.build(), data, r, device="cpu", out=tmp_path, resume=True))
    assert rest[0].step >= 6 and rest[-1].step == STEPS, "the checkpoint holds every step that was taken"
    assert [s.loss for s in rest] == pytest.approx(alone[0][-len(rest) :], abs=1e-5)


def test_processes_check_batch_parts_and_world_size(data, monkeypatch):
    r = deterministic()
    with pytest.raises(ValueError, match="even number of images, for 3 processes × accumulate 1"):
        fit(r.build(), data, r, world=World(0, 3, torch.device("cpu")))
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    monkeypatch.setattr("accelerate.PartialState", lambda **_: alone)
    refuses("2 processes were started, but accelerate connected 1 on cpu", join, "cpu")


TRAIN = ["vitlens", "train", "--recipe", "digits", "--data", "digits", "--tiny"]


def command(words, stderr=None) -> None:
    """Run the command in this process until its exit. stderr: file for its messages."""
    torch.set_num_threads(1)
    sys.argv = [str(word) for word in words]
    if stderr:
        sys.stderr = open(stderr, "w", buffering=1)  # noqa: SIM115
    run()


def test_train_command_in_two_processes_equals_one(tmp_path, monkeypatch):
    """Started by torchrun, on a machine without a GPU and with no word about devices."""
    settings = ["optimizer=adamw", "drop_path=0", "patch_drop=0", "compile=off"]
    options = [word for setting in settings for word in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", None)
    refuses("0|None", command, [*TRAIN, *options, "--device", "cpu", "--out", tmp_path / "one"], error=SystemExit)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    words = [*torchrun, "--nproc-per-node=2", "-m", *TRAIN, *options, "--out", tmp_path / "two"]
    machine = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(words, env=machine, check=True, timeout=300)
    one, two = (
        [json.loads(line) for line in (tmp_path / f"{name}/log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [line["step"] for line in two] == [line["step"] for line in one] == list(range(1, 17))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], abs=1e-5)
    assert two[-1]["metrics"] == pytest.approx(one[-1]["metrics"], abs=1)
    account = json.loads((tmp_path / "two/training.json").read_text())
    assert account["finished"] and account["hardware"].startswith("2 CPU threads")
    a, b = (safetensors.torch.load_file(tmp_path / f"{name}/model/model.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(a[name].float(), b[name].float(), atol=1e-3) for name in a)


def test_train_command_resumes_after_sigterm(forked, tmp_path, monkeypatch, capsys):
    words = [*TRAIN, "--out", tmp_path, "--device", "cpu"]
    child = forked(command, [*words, "--set", "epochs=4000"], tmp_path / "stderr")
    while not (tmp_path / "log.jsonl").exists() or not (tmp_path / "log.jsonl").read_text():
        assert child.is_alive()
        time.sleep(0.1)
    monkeypatch.setattr(sys, "argv", None)
    with pytest.raises(SystemExit, match="2"):  # while it runs, nobody else trains into its folder
        command([*words, "--resume"])
    assert f"Another process is writing to {tmp_path}" in capsys.readouterr().err
    os.kill(child.pid, signal.SIGTERM)
    assert wait_for([child]) == [128 + signal.SIGTERM]
    output = (tmp_path / "stderr").read_text()
    assert "by a signal, at step" in output
    stopped = int(re.search(r"at step (\d+) of", output)[1])
    assert (tmp_path / f"checkpoints/step-{stopped:08d}.json").exists()
    refuses("0|None", command, [*words, "--resume", "--max-minutes", "0.001"], error=SystemExit)
    assert stopped < int(re.search(r"at step (\d+) of", capsys.readouterr().err)[1])
