"""Several processes share the images of a command, end with the numbers of one process, and fail with one sentence."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import encoded, refuses, saved_model, vitlens, write

from vitlens import launcher, report
from vitlens.cli import run
from vitlens.data import load
from vitlens.images import Change, Remark
from vitlens.processes import World, join

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
MODULE = ["-m", "torch.distributed.run", "--local-addr=127.0.0.1"]
TORCHRUN = [sys.executable, *MODULE, "--standalone", "--nproc-per-node=2", "-m", "vitlens"]
MACHINE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
DAMAGED = "b/5.png"  # in the second batch of 8 images, which the second process reads


def start(*words: object, command: list[str] = TORCHRUN, **variables: str) -> subprocess.Popen:
    """Start a command, by default `vitlens` in two processes."""
    return subprocess.Popen(
        [*command, *map(str, words)],
        env=os.environ | MACHINE | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def sentences(errors: str) -> list[str]:
    """Output of the processes, without the reports of torchrun."""
    return re.findall(r"vitlens: [^\r\n]*", errors)


def two_processes(*words: object) -> tuple[str, list[str]]:
    """Output and sentences of `vitlens` in two processes."""
    output, errors = start(*words).communicate(timeout=300)
    return output, sentences(errors)


def children(process: subprocess.Popen) -> list[int]:
    """The processes that torchrun has started, in their order."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(int(number) for number in listed)


def wait_until(ready, process: subprocess.Popen) -> None:
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """21 images in three folders, one of which is turned and one damaged."""
    images = {
        f"{name}/{i}.png": encoded(10 * ord(name) + i, size=(40 + i, 36))
        for name in "abc"
        for i in range(7)
    }
    images[DAMAGED] = b"no image"
    return write(tmp_path_factory.mktemp("images"), images)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"))


# Commands


@pytest.mark.slow
def test_inspect_command_in_two_processes_equals_one(folder, model, tmp_path):
    """Tables, numbers and figures are equal to the byte, and the damaged image is reported once."""
    words = ["inspect", model, folder / "a", "--data", folder, "--heads"]
    one = ["--csv", tmp_path / "one.csv", "--out", tmp_path / "one"]
    two = ["--csv", tmp_path / "two.csv", "--out", tmp_path / "two"]
    alone = vitlens(*words, *one, expect=1)
    output, errors = two_processes(*words, *two)
    assert output.replace(f"{tmp_path}/two", f"{tmp_path}/one") == alone.stdout
    assert errors == sentences(alone.stderr) and len(errors) == 2 and DAMAGED in errors[0]
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in (tmp_path / "two").iterdir()} >= {"summary.json"}
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    table = (tmp_path / "two.csv").read_bytes()
    assert table == (tmp_path / "one.csv").read_bytes() and table.count(b"\n") == 1 + 20 * 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["top1", "knn"])
def test_evaluate_command_in_two_processes_equals_one(protocol, model, tmp_path):
    words = ["evaluate", model, "--data", "digits", "--protocol", protocol, "--device", "cpu"]
    alone = vitlens(*words, "--out", tmp_path / "one.json")
    output, errors = two_processes(*words, "--out", tmp_path / "two.json")
    assert output == alone.stdout and errors == []
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    for record in one + two:
        record.pop("when")
        record.pop("command")
    assert one == two and one[0]["images"] == 360


REFUSED = {
    "damaged": (
        ["evaluate", "MODEL", "--data", "DAMAGED", "--protocol", "knn"],
        "c/[0-9].png .* cannot be decoded",
    ),
    "table": (
        ["inspect", "MODEL", "--data", "FOLDER", "--csv", "FILE", "--out", "OUT"],
        "FILE exists",
    ),
    "command": (["explain", "MODEL", "--out", "OUT"], "explain runs in one process, got 2"),
    "option": (["evaluate", "MODEL", "--dato", "digits"], "No such option: --dato"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ("command", "option") else pytest.mark.slow)
        for case in REFUSED
    ],
)
def test_two_processes_print_one_sentence(case, model, folder, tmp_path):
    """Also for images that only the second process reads."""
    words, expected = REFUSED[case]
    file = tmp_path / "heads.csv"
    file.write_text("mine")
    images = {f"{name}/{i}.png": encoded(i) for name in "ab" for i in range(60)}
    images |= {f"c/{i}.png": b"no image" for i in range(10)}
    places = {
        "MODEL": model,
        "FOLDER": folder,
        "DAMAGED": write(tmp_path / "damaged", images),
        "FILE": file,
        "OUT": tmp_path / "out",
    }
    process = start(*(places.get(word, word) for word in words))
    output, errors = process.communicate(timeout=300)
    (sentence,) = sentences(errors)
    assert re.match(f"vitlens: {expected.replace('FILE', str(file))}", sentence)
    assert process.returncode != 0 and output == ""
    assert file.read_text() == "mine" and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Images that take the bundled model many seconds."""
    return write(tmp_path_factory.mktemp("many"), {f"{i}.png": encoded(i) for i in range(600)})


ENDS = {
    "Ctrl-C": (signal.SIGINT, None, "stopped; .*heads.csv holds the rows of [0-9]+ of 600 images"),
    "SIGTERM": (signal.SIGTERM, None, "ended by SIGTERM|stopped; .*heads.csv holds the rows"),
    "first killed": (signal.SIGKILL, 0, "ended by SIGTERM|One of the 2 processes of this run"),
    "second killed": (signal.SIGKILL, 1, "ended by SIGTERM|One of the 2 processes of this run"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_two_processes_end_together(case, many, tmp_path):
    """With one sentence, and whole lines in the table."""
    number, rank, expected = ENDS[case]
    table = tmp_path / "heads.csv"
    process = start("inspect", "bundled", "--data", many, "--csv", table, "--out", tmp_path / "out")
    wait_until(
        lambda: has_content(table) and table.read_text().count("\n") > 8 * 12 * 3 + 1, process
    )
    os.kill(process.pid if rank is None else children(process)[rank], number)
    output, errors = process.communicate(timeout=60)
    (sentence,) = sentences(errors)
    assert re.match(f"vitlens: ({expected})", sentence)
    assert process.returncode != 0 and output == "" and not (tmp_path / "out").exists()
    text = table.read_text()
    assert text.endswith("\n") and (text.count("\n") - 1) % (12 * 3) == 0


def test_command_ignores_variables_of_an_allocation(model, folder, tmp_path, monkeypatch):
    """A SLURM allocation sets them for each task, also of a notebook that runs in it."""
    for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert (
        "summary.json" in vitlens("inspect", model, folder / "a", "--out", tmp_path / "out").stdout
    )


def test_command_reports_variables_that_connect_nothing(model, tmp_path, monkeypatch):
    from accelerate import PartialState

    monkeypatch.setattr(PartialState, "_shared_state", {})  # as in a new process
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    done = vitlens("inspect", model, "--out", tmp_path / "out", expect=2)
    assert "Unset WORLD_SIZE to run alone." in done.stderr and done.stderr.count("vitlens: ") == 1


def test_join_names_a_missing_package(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    refuses(
        "Several processes need accelerate.*pip install", join, "cpu", error=ModuleNotFoundError
    )


# Sharing


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def connect(rank: int, port: int, size: int = 2) -> World:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    own = {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in (shared | own).items()}
    torch.set_num_threads(1)
    return join("cpu")


COUNTS = (0, 1, 2, 3, 4, 5, 7)
"""Numbers of items: fewer than three processes, as many, and numbers that three does not divide."""


def share_items(rank: int, port: int, out: Path, folder: Path) -> None:
    world = connect(rank, port, size=3)
    ordered = {}
    for count in COUNTS:
        own = [*world.share(range(count))]
        squares = world.in_order(value**2 for value in own)
        ordered[count] = len(own), [*squares]
    try:
        world.require_same(rank // 2, "images")
    except ValueError as error:
        ordered["refused"] = str(error)
    images = load(folder, "whole", size=16, stream=True, workers=0)
    images._count(torch.arange(rank, 6, 3).numpy(), ["turned/frames", ""])
    images.share_counts(world)
    ordered["note"] = images.note
    torch.save(ordered, out / f"ordered-{rank}")


def test_processes_return_results_in_the_order_of_one(forked, tmp_path):
    files = {f"{label}/{k}.png": encoded(k) for label in "ab" for k in range(5)}
    folder = write(tmp_path / "set", files)
    port = free_port()
    processes = [forked(share_items, rank, port, tmp_path, folder) for rank in range(3)]
    for process in processes:
        process.join(120)
    results = [torch.load(tmp_path / f"ordered-{rank}") for rank in range(3)]
    for count in COUNTS:
        squares = [n**2 for n in range(count)]
        assert sum(result[count][0] for result in results) == count
        assert all(result[count][1] == squares for result in results)
    for result in results:
        assert result["refused"].startswith("The 3 processes have different images.")
        assert "3 of 6 images read so far were turned upright" in result["note"]


def test_inspect_measures_own_share(vit, monkeypatch):
    """A process reads none of the images of the others."""
    read = []
    sources = [
        (str(i), lambda i=i: read.append(i) or torch.full((64, 64, 3), i / 9).numpy())
        for i in range(9)
    ]
    world = World(1, 2, torch.device("cpu"))
    monkeypatch.setattr(World, "gather", lambda self, value: [value, value])
    report.inspect(vit(), sources, batch_size=2, world=world)
    assert read == [2, 3, 6, 7]


def test_remark_travels_between_processes():
    import pickle

    remark = Remark("cat.jpg", [Change("turned", "was turned"), Change("frames", "holds 2 images")])
    copy = pickle.loads(pickle.dumps(remark))
    assert copy == remark and copy.kinds == ("turned", "frames")


def test_single_process_keeps_signals(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with launcher.terminable():
        assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setenv("WORLD_SIZE", "2")
    with launcher.terminable() as signals, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signals == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before


# Signals while training

TRAIN = ["train", "--recipe", "digits", "--data", "digits", "--tiny", "--device", "cpu"]


def train_until_signal(rank: int, port: int, words: list[str]) -> None:
    connect(rank, port)
    sys.argv = ["vitlens", *words]
    run()


def test_signal_to_one_process_stops_all(forked, tmp_path):
    """After the first has written the checkpoint, the account and the model of --export."""
    words = [*TRAIN, "--set", "epochs=4000", "--out", str(tmp_path / "run"), "--export"]
    port = free_port()
    processes = [forked(train_until_signal, rank, port, words) for rank in range(2)]
    log = tmp_path / "run/log.jsonl"
    while not has_content(log):
        assert all(process.is_alive() for process in processes)
        time.sleep(0.05)
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [128 + signal.SIGTERM] * 2
    account = json.loads((tmp_path / "run/training.json").read_text())
    assert not account["finished"] and (tmp_path / "run/model/model.safetensors").is_file()


def slurm_script() -> str:
    """The batch script in docs/training.md."""
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", text, re.DOTALL)
    return script


def stand_in(path: Path, lines: str) -> None:
    """A program in place of one of SLURM."""
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)


@pytest.mark.slow
def test_slurm_script_stops_and_resumes(tmp_path):
    """SIGTERM as SLURM sends it, requeue, and the bits of a run that was never stopped."""
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_in(programs / "srun", 'exec "$@"')
    stand_in(programs / "torchrun", f'exec {sys.executable} {" ".join(MODULE)} "$@"')
    stand_in(
        programs / "scontrol",
        f'if [ "$1" = requeue ]; then echo "$2" >> {tmp_path}/requeued; else echo 127.0.0.1; fi',
    )
    script = slurm_script()
    changes = {
        "--recipe vit-b16-imagenet --data FOLDER": " ".join([*TRAIN[1:], "--set", "epochs=40"]),
        "--nproc-per-node 2": "--nproc-per-node 2",
        "29500": str(free_port()),
        "runs/b16": str(tmp_path / "run"),
    }
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "job.sh").write_text(script)
    variables = {"SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here"}
    variables["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    bash = ["bash", str(tmp_path / "job.sh")]
    job = start(command=bash, **variables)
    wait_until(lambda: has_content(tmp_path / "run/log.jsonl"), job)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=120)
    assert "Stopped by a signal, at step" in errors
    account = json.loads((tmp_path / "run/training.json").read_text())
    assert not account["finished"] and (tmp_path / "requeued").read_text() == "7\n"
    job = start(command=bash, **variables)
    _, errors = job.communicate(timeout=300)
    assert job.returncode == 0, errors
    assert (tmp_path / "requeued").read_text() == "7\n"
    whole = start(*TRAIN, "--set", "epochs=40", "--out", tmp_path / "whole")
    assert whole.wait(300) == 0
    weights = [tmp_path / name / "model/model.safetensors" for name in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
