"""Waits for processes, locks, workers, pipes and downloads: announced, interruptible and bounded (kind 3)."""

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from forms import cannot_occur, form
from PIL import Image
from support import encoded, refuses, tar

import vitlens
from vitlens import cli as vitlens_cli
from vitlens import data, files, processes, waiting, walk
from vitlens.data import imageset, named, tables
from vitlens.images import image_files
from vitlens.train import join, read_recipe, run_folder
from vitlens_paper.evaluate import read_results

cannot_occur(3, door="a page in the browser", reason="it waits for nothing outside its own file")
cannot_occur(
    3,
    door="the app's port",
    reason="a port in use is refused at once by bind, and nothing is awaited",
)


@pytest.fixture
def hurried(monkeypatch):
    """Waits are announced at once, and end soon."""
    monkeypatch.setattr(waiting, "ANNOUNCE_AFTER", 0.05)
    monkeypatch.setattr(waiting, "LIMIT", 0.4)
    monkeypatch.setattr(processes, "JOINING", 0.5)


class Clock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(waiting, "clock", clock)
    monkeypatch.setattr(waiting, "sleep", clock.sleep)
    return clock


@contextlib.contextmanager
def interrupted_after(seconds: float):
    """Send this process a Ctrl-C."""
    timer = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def test_waits_are_announced_within_five_seconds_and_end_after_minutes(clock, capsys):
    with pytest.raises(TimeoutError, match="^Waited 5 minutes for Godot. Leave without him.$"):
        waiting.until(lambda: clock.now > 1000, "Godot", "Leave without him.")
    assert 299 < clock.now < 301
    assert capsys.readouterr().err == "Waiting for Godot. Leave without him.\n"
    assert waiting.ANNOUNCE_AFTER <= 5


def test_waits_during_which_something_moves_do_not_end(clock):
    assert waiting.until(
        lambda: clock.now > 5000, "a slow one", "Go.", state=lambda: clock.now // 250
    )


def test_short_waits_are_silent(clock, capsys):
    assert waiting.until(lambda: clock.now > 3, "a moment", "Go.")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["", "two", "0", "-1", "1.5"])
@form(
    3,
    door="command: train and evaluate, WORLD_SIZE",
    case="left empty, or not a number of processes",
    right="a sentence with the variable, before anything is opened",
)
def test_world_size_that_is_no_number(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ValueError, match=f"WORLD_SIZE must be a number of processes, got {text!r}"):
        join("cpu")


@form(
    3,
    door="Python: data.load, LOCAL_WORLD_SIZE",
    case="left empty",
    right="a sentence with the variable",
)
def test_local_world_size_that_is_no_number(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE must be a number of processes, got ''"):
        data.load("digits", "valid", size=8)


@form(
    3,
    door="SLURM and MPI variables without WORLD_SIZE",
    case="SLURM_NTASKS=4 and OMPI_COMM_WORLD_SIZE=4 left over",
    right="one process, at once",
)
def test_other_launchers_variables_start_no_wait(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name in ("SLURM_NTASKS", "SLURM_NPROCS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.setenv(name, "4")
    assert join("cpu").size == 1


def left_over(monkeypatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def join_alone(port: int, limit: float, out: Path) -> None:
    """Join a world whose other process never comes, in a process of its own."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes.JOINING = limit
    sys.stderr = open(out / f"stderr-{limit}", "w", buffering=1)  # noqa: SIM115
    result = out / f"result-{limit}"
    try:
        join("cpu")
    except TimeoutError as problem:
        result.write_text(str(problem))
    except KeyboardInterrupt:
        result.write_text("interrupted")


def test_joining_ends_if_nobody_comes(monkeypatch, hurried, capsys):
    left_over(monkeypatch, WORLD_SIZE=2, RANK=0, TORCHELASTIC_RUN_ID=1, MASTER_PORT=1)
    block = threading.Event().wait
    monkeypatch.setattr("accelerate.PartialState", lambda **_: block(60))
    with pytest.raises(TimeoutError, match=r"Waited 0.5 s for 1 of 2 processes \(WORLD_SIZE=2"):
        join("cpu")
    assert "Unset WORLD_SIZE to run alone." in capsys.readouterr().err
    with interrupted_after(0.1), pytest.raises(KeyboardInterrupt):
        join("cpu")


@pytest.mark.slow
@form(
    3,
    door="command: train, WORLD_SIZE=2 left over",
    case="the other process never comes",
    right="the sentence, then the end after JOINING seconds, or at Ctrl-C before it",
)
def test_processes_that_never_come(forked, tmp_path):
    ended, stopped = (forked(join_alone, free_port(), limit, tmp_path) for limit in (1.5, 600))
    said = tmp_path / "stderr-600"
    while not (said.exists() and "Waiting" in said.read_text()):
        assert stopped.is_alive()
        time.sleep(0.02)
    words = said.read_text()
    assert "Waiting for 1 of 2 processes (WORLD_SIZE=2, RANK=0, MASTER_ADDR=127.0.0.1" in words
    assert "Unset WORLD_SIZE to run alone." in words
    os.kill(stopped.pid, signal.SIGINT)
    for process in (stopped, ended):
        process.join(60)
    assert (tmp_path / "result-600").read_text() == "interrupted"
    assert (tmp_path / "result-1.5").read_text().startswith("Waited 1.5 s for 1 of 2 processes")


@form(
    3,
    door="Python: join, RANK",
    case="a rank beyond the number of processes, as after a smaller job",
    right="a sentence at once, because no other process could complete the world",
)
def test_rank_beyond_the_world(monkeypatch):
    left_over(monkeypatch, WORLD_SIZE=2, RANK=5, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    with pytest.raises(ValueError, match="RANK must be a number from 0 to 1 for 2 processes"):
        join("cpu")


def test_first_process_may_take_long(monkeypatch, hurried, capsys):
    """The limit of six hours stays for the first process's data."""
    world = processes.World(rank=1, size=2, device=torch.device("cpu"))

    def slow_first(self, value):
        time.sleep(0.6)
        return 7.0

    monkeypatch.setattr(processes.World, "first", slow_first)
    assert world.wait_for_first(0.0, "opens the images") == 7.0
    words = "Waiting for the first of 2 processes, which opens the images."
    assert words in capsys.readouterr().err


# Locks


@form(
    3,
    door="command: evaluate --out, locked",
    case="another process holds the results and does nothing",
    right="its number, the lock's path and the way on; a TimeoutError after the limit",
)
def test_lock_of_a_sleeping_process(tmp_path, hurried, capsys):
    path = tmp_path / "r.json"
    held = multiprocessing.Event()

    def hold() -> None:
        with files.lock(path):
            held.set()
            signal.pause()

    other = multiprocessing.get_context("fork").Process(target=hold)
    other.start()
    held.wait(30)
    try:
        with pytest.raises(TimeoutError) as stop:
            files.update(path, lambda content: "new", "--out")
    finally:
        other.kill()
        other.join()
    words = capsys.readouterr().err
    for text in (words, str(stop.value)):
        assert f"for process {other.pid} on {socket.gethostname()}" in text
        assert f"which writes to {path} (lock: {tmp_path / '.r.json.lock'})" in text
        assert "give another --out" in text
    files.update(path, lambda content: "new")
    assert path.read_text() == "new"


@form(
    3,
    door="command: evaluate --out, locked, Ctrl-C",
    case="Ctrl-C during the wait for a lock",
    right="KeyboardInterrupt, within the wait",
)
def test_lock_obeys_interrupts(tmp_path):
    descriptor = files._try_lock(tmp_path / ".r.lock")[1]
    try:
        with interrupted_after(0.2), pytest.raises(KeyboardInterrupt), files.lock(tmp_path / "r"):
            pass
    finally:
        files._release(tmp_path / ".r.lock", descriptor)


@form(
    3,
    door="cache of another library (filelock)",
    case="another process holds a lock of the cache and sleeps",
    right="the lock's path and the process, from /proc/locks; a TimeoutError after the limit",
)
def test_cache_locked_by_another_process(tmp_path, hurried, capsys):
    path = tmp_path / "cache.lock"
    held = multiprocessing.Event()

    def hold() -> None:
        with FileLock(path):
            held.set()
            signal.pause()

    other = multiprocessing.get_context("fork").Process(target=hold)
    other.start()
    held.wait(30)
    try:
        with pytest.raises(TimeoutError), waiting.fetching("a cache", "Go."), FileLock(path):
            pass
    finally:
        other.kill()
        other.join()
    words = capsys.readouterr().err
    assert f"Waiting for process {other.pid} (" in words
    assert f"which holds the lock {path}. To go on without it, end it" in words
    with waiting.fetching("a cache", "Go."), FileLock(path, timeout=1):
        pass


def test_cache_of_a_working_process_is_awaited(tmp_path, monkeypatch):
    """A download of another process that makes progress is never ended."""
    clock = Clock()
    monkeypatch.setattr(waiting, "clock", clock)
    path = tmp_path / "cache.lock"
    handler = waiting._LockWatch()
    record = waiting.logging.LogRecord("filelock", 10, "", 0, "… waiting …", (1, str(path)), None)
    download = tmp_path / "weights.incomplete"
    for part in range(20):
        download.write_bytes(b"x" * part)
        handler.emit(record)
        clock.now += 100
    with pytest.raises(TimeoutError):
        for _ in range(5):
            handler.emit(record)
            clock.now += 100


# Workers


SCRIPT = """
import multiprocessing
multiprocessing.set_start_method({method!r})
import torch, vitlens.data
stream = vitlens.data.load("digits", "valid", size=8, stream=True, workers=1)
try:
    next(stream.batches([torch.arange(4)]))
except ValueError as problem:
    print(problem)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_a_script_without_a_guard_are_refused(monkeypatch, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text("train()")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: method)
    with pytest.raises(ValueError, match="Each worker process runs this script again"):
        imageset.require_workers()


@pytest.mark.slow
@form(
    3,
    door="Python: a script under spawn and forkserver",
    case='no `if __name__ == "__main__":`',
    right="the true sentence, before a worker starts",
)
def test_script_without_a_guard(tmp_path):
    started = []
    for method in ("spawn", "forkserver"):
        script = tmp_path / f"{method}.py"
        script.write_text(SCRIPT.format(method=method))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen([sys.executable, script], text=True, **pipes))
    for process in started:
        output, errors = process.communicate(timeout=120)
        assert output.count("Each worker process runs this script again") == 1, errors
        assert process.returncode == 0 and "Traceback" not in errors


def test_guarded_scripts_are_not_refused(tmp_path, monkeypatch):
    main = sys.modules["__main__"]
    script = tmp_path / "script.py"
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    monkeypatch.setattr(main, "__spec__", None)
    for text, repeats in {
        "train()": True,
        'if __name__ == "__main__":\n    train()': False,
        "if multiprocessing.parent_process() is None: train()": False,
        "logger = logging.getLogger(__name__)\ntrain()": True,
        "# if __name__ == '__main__':\ntrain()": True,
    }.items():
        script.write_text(text)
        assert imageset._repeats_script() == repeats


@form(
    3,
    door="data.load(workers=), read-only /dev/shm",
    case="semaphores cannot be made",
    right="one sentence with the error and --workers 0, no traceback of DataLoader",
)
def test_shared_memory_that_cannot_be_written(monkeypatch, capsys):
    def refuse():
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(multiprocessing, "Lock", refuse)
    stream = data.load("digits", "valid", size=8, stream=True, workers=1)
    with pytest.raises(ValueError, match=r"shared memory, .* \(Read-only file system: /dev/shm\)"):
        next(stream.batches([torch.arange(4)]))
    assert "Traceback" not in capsys.readouterr().err


class Sleepy:
    """Contents whose images take long, as on a mount that does not answer."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(0.3)
        return torch.zeros(3, 8, 8, dtype=torch.uint8)


@form(
    3,
    door="a stream's workers, slow file system",
    case="the first image takes longer than the announcement",
    right="a sentence about the workers, and the images",
)
def test_slow_workers_are_announced(hurried, capsys):
    samples = data.Samples(Sleepy(), [0, 1] * 4, ("a", "b"), range(8))
    stream = data.ImageStream(samples, 8, imageset.uint8_tensor, workers=1)
    images, _ = next(stream.batches([torch.arange(2)]))
    assert images.shape == (2, 3, 8, 8)
    assert "Waiting for 1 worker processes, which read images." in capsys.readouterr().err


# Pipes


@form(
    3,
    door="command: inspect and explain, a named pipe as image",
    case="nobody writes into it",
    right="announced, and a sentence after the limit",
)
def test_pipe_without_a_writer(tmp_path, hurried, capsys):
    pipe = tmp_path / "photo.png"
    os.mkfifo(pipe)
    with pytest.raises(vitlens.ImageError, match=r"Waited 0.4 s for data from .*photo.png"):
        vitlens.load_image(pipe)
    assert (
        f"Waiting for data from {pipe}. Write into it, or give a file." in capsys.readouterr().err
    )


@form(
    3,
    door="/dev/stdin and process substitution as image",
    case="another process writes the file slowly",
    right="the pixels of the file",
)
def test_pipe_with_a_slow_writer(tmp_path):
    picture = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    picture.save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with open(pipe, "wb", buffering=0) as file:
            for start in range(0, len(content), 50):
                file.write(content[start : start + 50])
                time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    assert np.array_equal(vitlens.load_image(pipe), picture)
    writer.join()


@form(
    3,
    door="folder of images with a named pipe",
    case="a pipe without an ending, and one called .png, among photos",
    right="one image and a sentence, no wait",
)
def test_pipes_in_folders(tmp_path):
    folder = tmp_path / "val" / "cat"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    os.mkfifo(folder / "pipe")
    assert not vitlens.images.is_image(folder / "pipe")
    os.mkfifo(folder / "b.png")
    samples = data.Samples([folder / "a.png", folder / "b.png"], [0, 0], ("cat",), ["a", "b"])
    assert isinstance(imageset.decode(samples, 0), Image.Image)
    assert "it is a device or a pipe, not a file" in imageset.decode(samples, 1)


@form(
    3,
    door="command: paper table, a pipe as results",
    case="a pipe without a writer, and the device /dev/zero without an end",
    right="a sentence for each",
)
def test_results_from_pipes_and_devices(tmp_path, hurried):
    pipe = tmp_path / "r.json"
    os.mkfifo(pipe)
    with pytest.raises(TimeoutError, match="for data from"):
        read_results(pipe)
    with pytest.raises(OSError, match="it is a device or a pipe, not a file"):
        files.read("/dev/zero")


@form(
    3,
    door="checkpoint= a named pipe",
    case="nobody writes into it",
    right="a sentence at once, because weights are mapped from a file",
)
def test_checkpoint_pipe_is_refused(tmp_path):
    pipe = tmp_path / "weights.pth"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="weights.pth"):
        vitlens.load_model("vit_tiny_patch16_224", checkpoint=pipe)


@form(
    3,
    door="command: train, --recipe a pipe",
    case="nobody writes into it",
    right="announced, and a sentence after the limit",
)
def test_recipe_pipe_without_a_writer(tmp_path, hurried, capsys):
    pipe = tmp_path / "recipe.json"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match=r"Waited 0.4 s for data from"):
        read_recipe(pipe)
    assert f"Waiting for data from {pipe}" in capsys.readouterr().err


@form(
    3,
    door="plot.training, a pipe as log",
    case="another process writes the log",
    right="the number of its lines",
)
def test_log_from_a_pipe(tmp_path):
    pipe = tmp_path / "log.jsonl"
    os.mkfifo(pipe)
    line = '{"step": 1, "steps": 2, "loss": 2.3, "rate": 1.0}\n'
    writer = threading.Thread(target=pipe.write_text, args=[line])
    writer.start()
    figure = vitlens.plot.training(pipe)
    writer.join()
    assert figure.axes[0].lines[0].get_ydata().tolist() == [2.3]


@form(
    3,
    door="files inside a run's and a model's folder",
    case="training.json, config.json and the metadata of a checkpoint are pipes",
    right="no wait: the files count as unreadable",
)
def test_pipes_inside_of_folders(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("training.json", "config.json", "data.json", "checkpoints/step-00000001.json"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert run_folder.seconds_of_training(tmp_path) == 0.0
    with pytest.raises(ValueError, match="All checkpoints in"):
        run_folder.load_checkpoint(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="config.json"):
        vitlens.load_model(tmp_path)
    assert vitlens_cli.run_images(tmp_path / "model") == []


# Caches and downloads


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@form(
    2,
    door="evaluate --data, Parquet cache that is full or read-only",
    case="the cache of `datasets` cannot be written",
    right="the cache's path, and nothing about the data",
)
def test_full_cache_is_not_the_datas_fault(tmp_path, monkeypatch, number):
    import datasets

    (tmp_path / "train-0.parquet").write_bytes(b"PAR1")

    def fail(*_, **__):
        try:
            raise OSError(number, os.strerror(number))
        except OSError as cause:
            raise RuntimeError("An error occurred while generating the dataset") from cause

    monkeypatch.setattr(datasets, "load_dataset", fail)
    for opened in (
        lambda: tables.parquet(tmp_path, "train", tmp_path / "cache"),
        lambda: tables.hub("owner/set", "train", tmp_path / "cache", 0),
    ):
        with pytest.raises(ValueError) as refusal:
            opened()
        words = str(refusal.value)
        assert f"The cache {tmp_path / 'cache'} cannot be written ({os.strerror(number)})" in words
        assert "Fetch" not in words and "--root" in words


@form(
    3,
    door="torchvision's downloads (urllib)",
    case="a server that accepts and then sends nothing, and one that sends slowly",
    right="ends after the silence; the slow one is read to its end",
)
def test_silent_servers_end_and_slow_ones_do_not(monkeypatch):
    from urllib.request import urlopen

    monkeypatch.setattr(waiting, "SILENCE", 0.3)
    server = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server.getsockname()[1]}/"

    def serve() -> None:
        for slow in (False, True):
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n")
            for _ in range(5 * slow):
                time.sleep(0.15)
                connection.sendall(b"x")
            if not slow:
                time.sleep(0.5)
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    with waiting.fetching("a file", "Go."):
        with pytest.raises(TimeoutError):
            urlopen(address).read()
        assert urlopen(address).read() == b"xxxxx"
    assert socket.getdefaulttimeout() is None


@form(
    3,
    door="named data torch/NAME without a network",
    case="the download fails",
    right="a sentence with the folder and the call that downloads it elsewhere",
)
def test_download_without_a_network(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(ValueError, match="cannot be downloaded .*Network is unreachable"):
        named.torchvision_set("mnist", "train", tmp_path)
    assert not any(path.is_file() for path in Path(tmp_path).rglob("*"))


@form(8, door="WebDataset, read-only shared memory", case="EROFS", right="/dev/shm, not the shard")
def test_shards_without_shared_memory(tmp_path, monkeypatch):
    import datasets

    def fails(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    tar(tmp_path / "test-0.tar", {"a.png": encoded(0), "a.cls": b"0"})
    monkeypatch.setattr(datasets, "load_dataset", fails)
    refuses("shared memory.*data themselves are intact", data.load, tmp_path, "test")


@form(
    3,
    door="folder: data.load, inspect, explain, page (walk)",
    case="each file takes a fifth of a second, as on a network disk",
    right="the wait is announced, and the list is complete",
)
def test_slow_folder_is_announced(tmp_path, monkeypatch, capsys):
    for number in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    monkeypatch.setattr(waiting, "ANNOUNCE_AFTER", 0.1)
    listed = walk.entries

    def slowly(folder):
        for entry in listed(folder):
            time.sleep(0.2)
            yield entry

    monkeypatch.setattr(walk, "entries", slowly)
    assert len(image_files(tmp_path)) == 3
    assert f"Waiting for the list of files in {tmp_path}" in capsys.readouterr().err
