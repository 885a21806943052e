"""Several processes, or one batch in several parts, train the same model as one process with whole batches."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import pytest
import safetensors.torch
import timm
import torch
from support import digits, refuses, tiny
from timm.layers import HybridEmbed
from timm.models import VisionTransformer, save_for_hf
from torch import nn

from vitlens.cli import run
from vitlens.data.augment import Augment
from vitlens.train import Recipe, World, build_criterion, fit, join, recipe, starting_from
from vitlens.train.run_folder import load_checkpoint
from vitlens_paper.masked import MaskedPatches

torch.set_num_threads(1)
STEPS = 64  # eight epochs


def deterministic(**changes) -> Recipe:
    """With augmentation, without dropout and stochastic depth, whose draws depend on the parts.

    AdamW: the bf16 iteration of Muon lifts differences in the last bit of a sum to 1e-3 of an update.
    """
    r = replace(
        tiny(**changes), drop_path=0.0, patch_drop=0.0, patch_drop_until=0.0, epochs=0, steps=STEPS
    )
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


@pytest.mark.slow
def test_accumulate_trains_the_same_model(data, alone):
    steps = list(fit(deterministic().build(), data, deterministic(accumulate=4), device="cpu"))
    assert [s.loss for s in steps] == pytest.approx(alone[0], abs=1e-5)
    assert steps[-1].metrics == pytest.approx(alone[1])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def connect(rank: int, port: int, out) -> World:
    """Connect one of two processes as `torchrun` does. Its messages go to a file."""
    torch.set_num_threads(1)
    shared = {
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "OMP_NUM_THREADS": 1,
    }  # else accelerate lets each process take every core
    os.environ |= {name: str(value) for name, value in shared.items()}
    sys.stderr = open(out / f"stderr-{rank}", "w", buffering=1)  # noqa: SIM115
    return join("cpu")


def train(rank: int, port: int, convolutions: str, text: str, out) -> None:
    """Work of each of two processes: a short run with batch normalization, and a slow run whose steps are stored."""
    world = connect(rank, port, out)
    r = Recipe.from_json(convolutions)
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


@pytest.mark.slow
def test_processes_share_statistics_and_save_after_loss(data, alone, forked, tmp_path):
    """Else each would validate another model, and the first one's would be saved."""
    save_for_hf(timm.create_model("test_resnet"), tmp_path / "start", safe_serialization=True)
    short = recipe("finetune-small").override(
        "image_size=8", "resize=0", "num_classes=10", "batch_size=64"
    )
    short = starting_from(
        replace(short, epochs=0, steps=3, precision="fp32", average=0.5), tmp_path / "start"
    )
    r = deterministic(save_every=1e9)
    port = free_port()
    first, second = (
        forked(train, rank, port, short.to_json(), r.to_json(), tmp_path) for rank in range(2)
    )
    while len(steps_of(tmp_path, 1)) < 5:
        assert second.is_alive(), (tmp_path / "stderr-1").read_text()
        time.sleep(0.02)
    second.kill()
    assert wait_for([first, second])[0] != 0
    a, b = (json.loads((tmp_path / f"statistics-{rank}").read_text()) for rank in range(2))
    assert a == b and a
    output = (tmp_path / "stderr-0").read_text()
    assert re.search(
        r"One of the 2 processes of this run has ended .* Start all of them again with --resume",
        output,
    )
    rest = list(fit(r.build(), data, r, device="cpu", out=tmp_path, resume=True))
    assert rest[0].step >= 6 and rest[-1].step == STEPS, (
        "the checkpoint holds every step that was taken"
    )
    assert [s.loss for s in rest] == pytest.approx(alone[0][-len(rest) :], abs=1e-5)


def sparse(model: nn.Module, r: Recipe, world: World, between: list):
    """A criterion for four parts of a batch. `early` has a gradient in the first, `late` in the last, `unused` in none.

    between: list that receives a gradient between the two parts of a process, before it is exchanged.
    """
    model.unused, model.early, model.late = (nn.Parameter(torch.ones(3)) for _ in range(3))
    usual = build_criterion(model, r, "cpu")
    numbers = cycle(range(world.rank * r.accumulate, (world.rank + 1) * r.accumulate))

    def criterion(x, y):
        number, loss = next(numbers), usual(x, y)
        if number % 2 == 1:
            between.append(model.head.bias.grad.clone())
        if number == 0:
            loss = loss + model.early.square().sum()
        if number == 3:
            loss = loss + model.late.square().sum()
        return loss

    return criterion


def batch_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: b
        for name, b in model.named_buffers()
        if name.endswith(("running_mean", "running_var"))
    }


def with_mean_statistics(model: nn.Module, r: Recipe):
    """A criterion for four parts in one process, where batch statistics become what two processes must reach.

    Parts 0 and 1 update them, then parts 2 and 3 from the same start, and the means of both remain.
    """
    usual, numbers, start, first = build_criterion(model, r, "cpu"), cycle(range(4)), {}, {}

    def criterion(x, y):
        number, statistics = next(numbers), batch_statistics(model)
        if number == 0:
            start.update({name: b.clone() for name, b in statistics.items()})
        if number == 2:
            first.update({name: b.clone() for name, b in statistics.items()})
            for name, b in statistics.items():
                b.data.copy_(start[name])
        loss = usual(x, y)
        if number == 3:
            for name, b in statistics.items():
                b.data.copy_(
                    (first[name] + b) / 2
                )  # `data`: the backward pass checks that buffers are unchanged
        return loss

    return criterion


def hybrid() -> nn.Module:
    """A vision transformer on the features of a ResNet with batch normalization."""
    torch.manual_seed(0)
    backbone = timm.create_model("test_resnet", features_only=True, out_indices=[2])
    embed = partial(HybridEmbed, backbone=backbone)
    return VisionTransformer(
        img_size=32,
        patch_size=1,
        num_classes=10,
        embed_dim=48,
        depth=1,
        num_heads=3,
        embed_layer=embed,
    )


def without_compiler(function, **_):
    def backend(graph, inputs):
        raise RuntimeError("there is no compiler here")

    return COMPILE(function, backend=backend, dynamic=False)


COMPILE = torch.compile
PARTS = {"adamw": 2, "muon": 2, "masked": 2, "fallback": 2, "compiled": 2, "sparse": 4, "hybrid": 4}
"""Cases of `trained`: the number of parts of a batch, for all processes together."""


def trained(case: str, world: World) -> dict:
    """Weights, losses and metrics of a short run, and what was seen of it. Random draws depend on the parts alone."""
    # Four parts are added in another order, whose last bits AdamW lifts where the exact gradient is zero.
    optimizer = {"muon": "muon", "sparse": "sgd", "hybrid": "sgd"}.get(case, "adamw")
    r = replace(tiny(accumulate=PARTS[case] // world.size), optimizer=optimizer)
    data, options, seen = digits(), {}, []
    model = r.build()
    if case == "hybrid":
        r = replace(r, image_size=32, patch_drop=0.0, patch_drop_until=0.0)
        data, model = digits(size=32), hybrid()
        if world.size == 1:
            options["criterion"] = with_mean_statistics(model, r)
    if case == "masked":
        torch.manual_seed(0)
        options["objective"] = MaskedPatches(model, "mean-color", 0.5, r.mean, r.std)
    if case == "sparse":
        options["criterion"] = sparse(model, r, world, seen)
    if case in ("fallback", "compiled"):
        r = replace(r, compile="default", compile_cpu=True)
    torch.compile = without_compiler if case == "fallback" else COMPILE
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = list(fit(model, data, r, world=world, **options))
    torch.compile = COMPILE
    return {
        "weights": {
            name: t
            for name, t in model.state_dict().items()
            if not name.endswith("num_batches_tracked")
        },
        "losses": [step.loss for step in steps],
        "metrics": steps[-1].metrics,
        "seen": seen,
        "warnings": [str(w.message) for w in caught],
    }


def train_cases(rank: int, port: int, cases: list[str], out) -> None:
    world = connect(rank, port, out)
    for case in cases:
        torch.save(trained(case, world), out / f"{case}-{rank}")


def trained_by_two(forked, cases: list[str], out) -> dict[str, list[dict]]:
    """The results of both processes, by case."""
    port = free_port()
    codes = wait_for([forked(train_cases, rank, port, cases, out) for rank in range(2)])
    assert codes == [0, 0], (out / "stderr-0").read_text() + (out / "stderr-1").read_text()
    return {case: [torch.load(out / f"{case}-{rank}") for rank in range(2)] for case in cases}


@pytest.fixture(scope="module")
def two(forked, tmp_path_factory):
    quick = [case for case in PARTS if case != "compiled"]
    return trained_by_two(forked, quick, tmp_path_factory.mktemp("two"))


def assert_equal(results: list[dict], one: dict) -> None:
    """Both processes have the weights, losses and metrics of one process."""
    for result in results:
        torch.testing.assert_close(result["weights"], one["weights"], atol=1e-6, rtol=0)
        assert result["losses"] == pytest.approx(one["losses"], abs=1e-6)
        assert result["metrics"] == pytest.approx(one["metrics"], abs=1e-6)


@pytest.mark.parametrize("case", ["adamw", "muon", "masked", "hybrid", "sparse"])
def test_processes_train_without_warnings(two, case):
    assert [result["warnings"] for result in two[case]] == [[], []]


@pytest.mark.parametrize("case", ["adamw", "masked", "hybrid"])
def test_processes_end_with_weights_of_one(two, case):
    """With dropout, patch dropout, an objective whose model has an unused head, and means of batch statistics."""
    one = trained(case, World(device=torch.device("cpu")))
    assert_equal(two[case], one)
    assert case != "hybrid" or batch_statistics(hybrid()).keys() <= one["weights"].keys()


def test_processes_train_with_muon(two):
    one = trained("muon", World(device=torch.device("cpu")))
    for result in two["muon"]:
        assert result["losses"] == pytest.approx(one["losses"], abs=1e-2)
        assert result["metrics"] == pytest.approx(one["metrics"], abs=1)


def test_processes_exchange_gradients_once_a_step(two):
    """… also of parameters that only one part of one process uses. A parameter without gradient stays."""
    one = trained("sparse", World(device=torch.device("cpu")))
    assert_equal(two["sparse"], one)
    assert torch.equal(one["weights"]["unused"], torch.ones(3))
    assert all((one["weights"][name] < 1).all() for name in ("early", "late"))
    first, second = (result["seen"] for result in two["sparse"])
    assert len(first) == 16 and not any(
        torch.allclose(a, b) for a, b in zip(first, second, strict=True)
    )


def test_processes_fall_back_to_uncompiled(two):
    for result in two["fallback"]:
        assert (
            len(result["warnings"]) == 1
            and "so training continues uncompiled" in result["warnings"][0]
        )
    assert_equal(two["fallback"], two["adamw"][0])


@pytest.mark.slow
def test_processes_train_compiled(forked, tmp_path):
    one = trained("compiled", World(device=torch.device("cpu")))
    results = trained_by_two(forked, ["compiled"], tmp_path)["compiled"]
    assert not any(result["warnings"] for result in (one, *results))
    assert_equal(results, one)


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


@pytest.mark.slow
def test_train_command_in_two_processes_equals_one(tmp_path, monkeypatch):
    """Started by torchrun, on a machine without a GPU and with no word about devices."""
    settings = ["optimizer=adamw", "drop_path=0", "patch_drop=0", "compile=off"]
    options = [word for setting in settings for word in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", None)
    refuses(
        "0|None",
        command,
        [*TRAIN, *options, "--device", "cpu", "--out", tmp_path / "one"],
        error=SystemExit,
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
    ]
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
    a, b = (
        safetensors.torch.load_file(tmp_path / f"{name}/model/model.safetensors")
        for name in ("one", "two")
    )
    assert all(torch.allclose(a[name].float(), b[name].float(), atol=1e-3) for name in a)


def command_of_process(rank: int, port: int, words, out) -> None:
    connect(rank, port, out)
    command(words)


def test_train_command_reports_lost_process(forked, tmp_path, monkeypatch, capsys):
    """In one sentence, after a checkpoint of every step that was taken. One process continues the run."""
    words = [*TRAIN, "--set", "accumulate=2", "--device", "cpu", "--out", tmp_path / "run"]
    port = free_port()
    first, second = (
        forked(command_of_process, rank, port, [*words, "--set", "epochs=4000"], tmp_path)
        for rank in range(2)
    )
    log = tmp_path / "run/log.jsonl"
    while not log.exists() or not log.read_text():
        assert second.is_alive(), (tmp_path / "stderr-1").read_text()
        time.sleep(0.02)
    second.kill()
    assert wait_for([first, second])[0] == 2
    output = (tmp_path / "stderr-0").read_text()
    assert "vitlens: One of the 2 processes of this run has ended or cannot be reached." in output
    assert "Traceback" not in output
    step = load_checkpoint(tmp_path / "run/checkpoints")[1]["step"]
    assert step >= json.loads(log.read_text().splitlines()[-1])["step"] >= 1
    monkeypatch.setattr(sys, "argv", None)
    resumed = [
        *TRAIN,
        "--device",
        "cpu",
        "--out",
        tmp_path / "run",
        "--resume",
        "--max-minutes",
        "0.001",
    ]
    refuses("0|None", command, resumed, error=SystemExit)
    assert int(re.search(r"at step (\d+) of", capsys.readouterr().err)[1]) > step


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
