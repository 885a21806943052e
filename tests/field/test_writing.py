"""Results of several processes, on full and read-only disks, after kills, and next to files of others (kind 2)."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from forms import cannot_occur, form
from PIL import Image

import vitlens_explorer.in_page
from vitlens import files, load_model, plot, report, waiting
from vitlens.cli import run as command_line
from vitlens.train import export, fit, recipe, runs, snapshots
from vitlens_paper.evaluate import Record, ablation, read_results, write

fcntl = pytest.importorskip("fcntl", reason="Its tests need the locks of POSIX")
resource = pytest.importorskip("resource", reason="Its tests need the limits of POSIX")

cannot_occur(
    2, door="notebook: Save", reason="the browser writes the file, under a name of its own"
)
cannot_occur(
    2, door="plot functions", reason="they return figures, which the caller saves where it likes"
)


def record(model: str, data: str) -> Record:
    return Record(model, data, "top1", "top1", 50.0, 40.0, 60.0, 10, "2026", {})


def fork(function, *arguments):
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def exit_codes(processes: list) -> list[int]:
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def vitlens(monkeypatch, capsys, *words: object) -> tuple[int, str]:
    """Exit code and stderr of a command."""
    monkeypatch.setattr(sys, "argv", ["vitlens", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        command_line()
    return stop.value.code or 0, capsys.readouterr().err


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for name, color in (("cat", "red"), ("dog", "blue")):
        Image.new("RGB", (64, 64), color).save(folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def inspection(vit):
    picture = Image.new("RGB", (64, 64), "red")
    return report.inspect(vit(), [("red", picture)])


# Several processes


@form(
    2,
    door="Python: evaluate.write",
    case="eight processes add ten records each to one file",
    right="80 records, counted by hand",
)
def test_eight_processes_add_all_their_records(tmp_path):
    path = tmp_path / "r.json"

    def add(i: int) -> None:
        for k in range(10):
            write(path, [record(f"m{i}", f"d{k}")])

    assert exit_codes([fork(add, i) for i in range(8)]) == [0] * 8
    keys = {(r.model, r.data) for r in read_results(path)}
    assert keys == {(f"m{i}", f"d{k}") for i in range(8) for k in range(10)}
    assert names_in(tmp_path) == ["r.json"], "no lock and no temporary file stays"


@form(
    2,
    door="Python: evaluate.write, by a link",
    case="four processes name the file, four a link to it in another folder",
    right="40 records, counted by hand, and the link stays a link",
)
def test_processes_meet_behind_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    path = tmp_path / "real" / "r.json"
    link = tmp_path / "link.json"
    link.symlink_to(path)

    def add(i: int) -> None:
        for k in range(5):
            write(link if i % 2 else path, [record(f"m{i}", f"d{k}")])

    assert exit_codes([fork(add, i) for i in range(8)]) == [0] * 8
    assert link.is_symlink() and len(read_results(path)) == 40


@form(
    2,
    door="Python: threads",
    case="eight threads of one process count in one file",
    right="the number of additions",
)
def test_threads_update_one_file(tmp_path):
    path = tmp_path / "count"

    def count() -> None:
        for _ in range(10):
            files.update(path, lambda content: str(int(content or 0) + 1))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() == "80"


@form(
    2,
    door="Python: snapshots.save",
    case="two processes add snapshots of other steps to one file",
    right="steps in order, without a torn file",
)
def test_processes_add_snapshots(tmp_path):
    path = tmp_path / "snapshots.npz"

    def add() -> None:
        for step in range(10):
            snapshots.save(path, step, {"value": torch.tensor(step).numpy()})

    assert exit_codes([fork(add) for _ in range(2)]) == [0, 0]
    assert snapshots.load(path)["steps"][-1] == 9 and names_in(tmp_path) == ["snapshots.npz"]


@form(
    2,
    door="command: ablate --out",
    case="a second ablation into the file of one that runs",
    right="refused, as for a file that exists",
)
def test_ablation_refuses_the_file_of_another(vit, tmp_path):
    out = tmp_path / "heads.csv"
    held, done = multiprocessing.Event(), multiprocessing.Event()

    def hold() -> None:
        with files.lock(out):
            held.set()
            done.wait(30)

    other = fork(hold)
    assert held.wait(30)
    with pytest.raises(
        ValueError, match=rf"Another process is writing to .*heads.csv \(process {other.pid} "
    ):
        ablation.effects(vit(img_size=32), "digits", out=out, images=2, progress=False)
    done.set()
    assert exit_codes([other]) == [0] and not out.exists()


@form(
    2,
    door="Python: fit(out=)",
    case="two processes train into one folder by `fit`, which no command guards",
    right="the second one is refused, and the first one's log is whole",
)
def test_fit_refuses_the_folder_of_another(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    held, done = multiprocessing.Event(), multiprocessing.Event()

    def hold() -> None:
        with files.lock(out / "log.jsonl"):
            held.set()
            done.wait(30)

    other = fork(hold)
    assert held.wait(30)
    plan = recipe("digits").tiny()
    import vitlens.data as data

    splits = [data.load("digits", split, size=8).subset(64) for split in ("train", "valid")]
    plan = plan.override("image_size=8", "resize=0", "batch_size=32", "precision=fp32")
    with pytest.raises(ValueError, match="Another process is writing to"):
        list(fit(plan.build(), splits, plan, out=out, device="cpu"))
    done.set()
    assert exit_codes([other]) == [0] and names_in(out) == []


# Kills


def write_for_ever(path: Path, ready) -> None:
    ready.set()
    for k in range(10**9):
        files.update(path, lambda content, k=k: json.dumps({"k": k, "fill": "x" * 20_000}))


@form(
    2,
    door="kill -9",
    case="ten processes are killed while they write one file, each at another moment",
    right="the file is whole JSON after each kill, and the next writer neither waits nor fails",
)
def test_killed_writers_leave_a_whole_file(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    files.write(path, json.dumps({"k": -1, "fill": ""}))
    monkeypatch.setattr(waiting, "LIMIT", 5)
    for k in range(10):
        ready = multiprocessing.Event()
        other = fork(write_for_ever, path, ready)
        ready.wait(30)
        time.sleep(0.003 * k)
        os.kill(other.pid, signal.SIGKILL)
        other.join()
        assert json.loads(path.read_text())["k"] >= -1
        files.update(path, lambda content: content)
    files._searched.clear()
    files.write(path, "{}")
    assert names_in(tmp_path) == ["r.json"], "leftovers of dead processes are removed"


@form(
    2,
    door="kill -9 of a trainer with workers",
    case="the process that holds the lock is killed, and its forked worker lives on",
    right="the lock ends with the process",
)
def test_lock_ends_with_its_process_though_a_child_lives(tmp_path):
    held = multiprocessing.Event()
    child = multiprocessing.Value("i", 0)

    def hold() -> None:
        with files.lock_folder(tmp_path):
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            child.value = worker
            held.set()
            time.sleep(60)

    other = fork(hold)
    assert held.wait(30)
    with pytest.raises(ValueError, match="Another process"), files.lock_folder(tmp_path):
        pass
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    try:
        with files.lock_folder(tmp_path):
            pass
    finally:
        os.kill(child.value, signal.SIGKILL)


def test_temporary_file_of_a_running_process_stays(tmp_path):
    temporary, descriptor = files._open_temporary(tmp_path)
    files._searched.clear()
    files.write(tmp_path / "a", "a")
    assert temporary.exists()
    os.close(descriptor)
    files._searched.clear()
    files.write(tmp_path / "a", "a")
    assert names_in(tmp_path) == ["a"]


# Disks


def limited(function, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        function()
    except OSError as problem:
        print(problem, file=sys.stderr)
        os._exit(2)
    os._exit(0)


@form(
    2,
    door="page: save_page",
    case="a file may not grow beyond 20 kB (RLIMIT_FSIZE), and an older page is there",
    right="the older page, byte for byte",
)
def test_full_disk_keeps_the_older_page(vit, tmp_path, capfd):
    path = tmp_path / "page.html"
    path.write_text("older")
    model = vit(img_size=32)

    def save() -> None:
        vitlens_explorer.in_page.save_page(model, None, path)

    assert exit_codes([fork(limited, save, 20_000)]) == [2]
    assert path.read_text() == "older" and names_in(tmp_path) == ["page.html"]
    words = capfd.readouterr().err
    assert (
        "page.html cannot be written (File too large). Its earlier content is unchanged." in words
    )


@form(
    2,
    door="Python: export",
    case="the disk is full after the first of two files of a model",
    right="a sentence, and no torn file",
)
def test_full_disk_tears_no_model(tmp_path, capfd):
    plan = recipe("digits").tiny()
    network = plan.build()

    def save() -> None:
        export(network, tmp_path / "model", plan, "0123456789")

    assert exit_codes([fork(limited, save, 2_000)]) == [2]
    assert names_in(tmp_path / "model") == []
    assert "model.safetensors cannot be written (File too large)." in capfd.readouterr().err


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs another user")
@form(
    2,
    door="command: evaluate --out, read-only folder",
    case="another user, whom the folder does not let write, though the file itself would",
    right="a sentence with the folder, and the file as it was",
)
def test_read_only_folder_is_told(tmp_path, capfd):
    path = tmp_path / "r.json"
    path.write_text("[]")
    path.chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)

    def add() -> None:
        os.setuid(65534)
        try:
            write(path, [record("m", "d")])
        except OSError as problem:
            print(problem, file=sys.stderr)
            os._exit(2)
        os._exit(0)

    assert exit_codes([fork(add)]) == [2]
    words = capfd.readouterr().err
    assert (
        "r.json cannot be written (Permission denied). Its earlier content is unchanged." in words
    )
    assert path.read_text() == "[]" and names_in(tmp_path) == ["r.json"]


@form(
    2,
    door="file system without locks",
    case="flock fails as on some network mounts, and a rename takes long",
    right="the file is written, and one sentence says that nothing is locked",
)
def test_file_system_without_locks(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    replace, slow = os.replace, []

    def rename(*paths):
        slow.append(paths)
        assert not Path(paths[1]).exists() or len(slow) > 1
        replace(*paths)

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "replace", rename)
    for k in range(3):
        write(tmp_path / "r.json", [record("m", f"d{k}")])
    assert len(read_results(tmp_path / "r.json")) == 3 == len(slow)
    assert capsys.readouterr().err.count("is on a file system without locks") == 1
    assert names_in(tmp_path) == ["r.json"]


@form(
    2,
    door="a temporary file that another machine removed",
    case="the rename finds no temporary file, once",
    right="written at the second try",
)
def test_vanished_temporary_file_is_written_again(tmp_path, monkeypatch):
    replace, tries = os.replace, []

    def rename(temporary, path):
        tries.append(path)
        if len(tries) == 1:
            os.unlink(temporary)
        replace(temporary, path)

    monkeypatch.setattr(os, "replace", rename)
    files.write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new" and len(tries) == 2


@form(
    2,
    door="command: --out /dev/null and a pipe",
    case="a device, which a rename by root would replace by a file",
    right="it stays a device, and a reader of the pipe gets the bytes",
)
def test_devices_and_pipes_are_written_into(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"pipe cannot be written \(no process reads this pipe\)"):
        files.write(pipe, "text")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    files.write(null, "text")
    assert null.is_symlink() and Path("/dev/null").is_char_device()


@form(
    2,
    door="permissions",
    case="a file for the group, a file that is new, and a file behind a link",
    right="the mode before, and the one of open() with this umask",
)
def test_permissions_and_links_stay(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o664)
    link = tmp_path / "link"
    link.symlink_to("a")
    before = os.umask(0o027)
    try:
        files.write(link, "new")
        files.write(tmp_path / "b", "new")
    finally:
        os.umask(before)
    assert link.is_symlink() and path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o664
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o640


def test_long_file_names_are_written_and_locked(tmp_path):
    path = tmp_path / ("猫" * 83 + ".json")
    write(path, [record("m", "d")])
    assert len(read_results(path)) == 1 and names_in(tmp_path) == [path.name]


# Files of others


@form(
    2,
    door="command: explain --out",
    case="a scores.csv of the person's own in the folder, with and without --scores",
    right="the file, byte for byte",
)
def test_explain_keeps_scores_of_others(images, tmp_path, monkeypatch, capsys):
    mine = tmp_path / "scores.csv"
    mine.write_text("id,score\n1,0.9\n")
    explain = ("explain", images / "cat.png", "--out", tmp_path, "--methods", "rollout")
    code, words = vitlens(monkeypatch, capsys, *explain)
    assert code == 0 and "removed" not in words
    code, words = vitlens(monkeypatch, capsys, *explain, "--scores", "--orders", 0)
    assert code == 2 and "scores.csv is not known as a file of vitlens" in words
    assert mine.read_text() == "id,score\n1,0.9\n"


@form(
    2,
    door="command: inspect --out",
    case="a summary.json of the person's own in the folder",
    right="the file, byte for byte, and a refusal before the work",
)
def test_inspect_keeps_summaries_of_others(images, tmp_path, monkeypatch, capsys):
    mine = tmp_path / "summary.json"
    mine.write_text('{"model": "mine", "accuracy": 1}')
    code, words = vitlens(monkeypatch, capsys, "inspect", images / "cat.png", "--out", tmp_path)
    assert code == 2 and "summary.json is not known as a file of vitlens" in words
    assert names_in(tmp_path) == ["summary.json"] and "mine" in mine.read_text()


@pytest.mark.slow
@form(
    2,
    door="Python: write_inspection",
    case="figures of others by the names of those that this model lacks, and that it has",
    right="their pixels",
)
def test_figures_of_others_are_kept(inspection, tmp_path):
    from dataclasses import replace

    lacks = {"filters": "It has none.", "positions": "It has none."}
    lacking = replace(
        inspection, filters=None, explained_variance=None, similarity=None, lacks=lacks
    )
    for name in ("filters.png", "positions.png"):
        Image.new("RGB", (3, 3), "red").save(tmp_path / name)
    report.write_inspection(lacking, tmp_path)
    report.write_inspection(lacking, tmp_path)  # its own files are replaced
    assert Image.open(tmp_path / "filters.png").size == (3, 3)
    with pytest.raises(ValueError, match=r"filters.png is not known as a file of vitlens"):
        report.write_inspection(inspection, tmp_path)
    for name in ("filters.png", "positions.png"):
        (tmp_path / name).unlink()
    report.write_inspection(inspection, tmp_path)
    report.write_inspection(lacking, tmp_path)
    assert not (tmp_path / "filters.png").exists(), "a figure with the mark is one of vitlens"


@pytest.mark.slow
def test_reports_know_their_own_files(vit, inspection, tmp_path):
    """Else a second run into the same folder would be refused."""
    model = vit()
    picture = Image.new("RGB", (64, 64), "red")
    explanations = report.explain(model, [("red", picture)], names=["rollout"])
    scored = list(report.score(model, explanations, orders=0, steps=2))
    added = report.heads(model, [("red", picture)])
    paths = list(report.write_explanations(scored, tmp_path))
    paths += report.write_inspection(inspection, tmp_path)
    paths += report.write_beside({"a": inspection, "b": inspection}, tmp_path)
    paths += report.write_heads(added, tmp_path)
    report.check_folder(tmp_path, [path.name for path in paths])
    assert all(report.is_ours(path) for path in paths)
    assert {*pd.read_csv(tmp_path / "scores.csv")} == {*report.COLUMNS["scores.csv"]}


@form(
    2,
    door="command: train --out",
    case="a folder with a data.json, a log, or a model of another program",
    right="refused, and each file byte for byte",
)
@pytest.mark.parametrize(
    "name, text",
    [
        ("data.json", '{"rows": 3}'),
        ("log.jsonl", '{"epoch": 1}\n'),
        ("recipe.json", '{"flour": 500}'),
        ("snapshots.npz", "mine"),
        ("model/config.json", '{"architectures": ["ViTModel"]}'),
    ],
)
def test_train_keeps_files_of_others(tmp_path, name, text):
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text(text)
    with pytest.raises(ValueError, match="is not known as a file of vitlens"):
        runs.run("digits", "digits", tmp_path, tiny=True, device="cpu", quiet=True)
    assert mine.read_text() == text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


@form(
    2,
    door="command: train, checkpoints",
    case="files of the person's own beside the checkpoints that are removed",
    right="the files",
)
def test_checkpoints_of_others_are_kept(tmp_path):
    from vitlens.train import run_folder

    names = ["step-notes.txt", "step-1.json", "best.safetensors"]
    for name in names:
        (tmp_path / name).write_text("mine")
    for step in range(4):
        run_folder.save_checkpoint(tmp_path, step, {"x": torch.ones(1)}, {})
    assert len(run_folder.newest_first(tmp_path)) == run_folder.KEPT
    run_folder.remove_checkpoints(tmp_path)
    assert names_in(tmp_path) == sorted(names)


@form(
    2,
    door="Python: export into a model's folder",
    case="a folder with the weights of another program, with and without its config.json",
    right="the weights, byte for byte",
)
def test_export_keeps_models_of_others(tmp_path):
    plan = recipe("digits").tiny()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    with pytest.raises(ValueError, match=r"model.safetensors is not known as a file of vitlens"):
        export(plan.build(), tmp_path, plan, "0123456789")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match=r"config.json is not known as a file of vitlens"):
        export(plan.build(), tmp_path, plan, "0123456789")
    assert weights.read_bytes() == b"weights"
    for _ in range(2):  # into its own
        export(plan.build(), tmp_path / "own", plan, "0123456789")


def test_lock_file_of_others_is_kept(tmp_path):
    mine = tmp_path / ".r.json.lock"
    mine.write_text("mine")
    write(tmp_path / "r.json", [record("m", "d")])
    assert mine.read_text() == "mine"


def test_commands_are_killed_with_nothing_lost(tmp_path):
    """`vitlens paper compute` writes a table, and is killed as it starts to write it."""
    out = tmp_path / "table.csv"
    out.write_text("older")
    code = (
        "import os, signal, sys\n"
        "from vitlens import files\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"files.write({str(out)!r}, 'newer')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL and out.read_text() == "older"
    files._searched.clear()
    files.write(out, "newer")
    assert names_in(tmp_path) == ["table.csv"]


# Other doors


def export_again_and_again(folder: Path) -> None:
    plan = recipe("digits").tiny()
    model = plan.build()
    for _ in range(5):
        export(model, folder, plan, "0123456789")


@form(
    2,
    door="Python: export, four processes at once",
    case="a new folder, which one process sees with weights and without config.json",
    right="no process fails, and the model opens",
)
def test_processes_export_into_one_folder(tmp_path):
    folder = tmp_path / "model"
    assert exit_codes([fork(export_again_and_again, folder) for _ in range(4)]) == [0, 0, 0, 0]
    assert names_in(folder) == ["config.json", "model.safetensors"]
    assert load_model(folder).num_classes == 10


@form(
    2,
    door="command: train, killed while it exports",
    case="weights without config.json, with the mark or with the digests of an earlier version",
    right="the next export goes on",
)
def test_export_goes_on_after_a_kill(tmp_path):
    plan = recipe("digits").tiny()
    export(plan.build(), tmp_path, plan, "0123456789")
    (tmp_path / "config.json").unlink()
    export(plan.build(), tmp_path, plan, "0123456789")
    assert names_in(tmp_path) == ["config.json", "model.safetensors"]
    model = plan.build()
    contents = set()
    for _ in range(4):
        export(model, tmp_path, plan, "0123456789")
        contents.add((tmp_path / "model.safetensors").read_bytes())
    assert len(contents) == 1, "the same weights are the same file"


def explain_slowly(images: Path, out: Path, ready: Path) -> None:
    """Hold the folder as the command explain does."""
    with files.lock(out / "scores.csv", "--out", waits=False):
        ready.touch()
        time.sleep(60)


@form(
    2,
    door="command: explain twice at once into one folder",
    case="the first one has written its scores",
    right="a sentence with the first one's number, and its scores byte for byte",
)
def test_second_explain_is_refused(images, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    header = ",".join(report.COLUMNS["scores.csv"])
    (out / "scores.csv").write_text(f"{header}\n")
    first = fork(explain_slowly, images, out, tmp_path / "ready")
    waiting.until((tmp_path / "ready").exists, "the first process", "", limit=30)
    code, words = vitlens(monkeypatch, capsys, "explain", images, "--out", out)
    first.kill()
    first.join()
    assert code == 2 and f"Another process is writing to {out / 'scores.csv'}" in words
    assert f"process {first.pid}" in words
    assert (out / "scores.csv").read_text() == f"{header}\n"


@form(
    2,
    door="command: page, evaluate and inspect, an --out that no file can have",
    case="a removed working folder, a name of 300 letters, links to nothing and in a circle",
    right="a sentence before the computing, without a number of the system",
)
def test_impossible_outputs_are_refused_first(images, tmp_path, monkeypatch, capsys):
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing" / "file")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    gone = tmp_path / "gone"
    gone.mkdir()
    reasons = {
        tmp_path / "nowhere": "is missing",
        tmp_path / "circle": "Too many levels of symbolic links",
        tmp_path / ("a" * 300): "File name too long",
        Path("relative"): "the current folder has been removed",
    }
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(report, "inspect", lambda *_, **__: pytest.fail("computed first"))
    for out, reason in reasons.items():
        for command in (["inspect", images], ["page", images / "cat.png"]):
            code, words = vitlens(monkeypatch, capsys, *command, "--out", out)
            assert code == 2 and reason in words and "Errno" not in words, words


@form(
    2,
    door="Windows: write",
    case="a virus scanner holds the target, which refuses to be replaced twice",
    right="the new content, and the temporary file was closed before the rename",
)
def test_windows_renames_closed_files(tmp_path, monkeypatch):
    target = tmp_path / "page.html"
    target.write_text("older")
    refused = []
    replace = os.replace

    def rename(source: Path, path: Path) -> None:
        descriptors = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        assert os.path.realpath(source) not in descriptors, "Windows refuses to rename open files"
        if len(refused) < 2:
            refused.append(path)
            raise PermissionError(errno.EACCES, "Access is denied")
        replace(source, path)

    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(os, "replace", rename)
    files.write(target, "newer")
    assert target.read_text() == "newer" and names_in(tmp_path) == ["page.html"]


@form(
    2,
    door="figures of an earlier version, without a mark",
    case="beside the numbers of their report, and alone",
    right="replaced beside them, else kept",
)
def test_figures_of_earlier_versions_are_replaced(inspection, tmp_path):
    numbers = tmp_path / "summary.json"
    numbers.write_text(json.dumps(inspection.to_dict()))
    axes = plot.attention_distance(inspection.mean_distance)
    axes.figure.savefig(tmp_path / "distance.png", dpi=report.SHARP)
    assert not files.is_figure(tmp_path / "distance.png")
    report.check_folder(tmp_path, ["distance.png"])
    numbers.unlink()
    with pytest.raises(ValueError, match=r"distance.png is not known as a file of vitlens"):
        report.check_folder(tmp_path, ["distance.png"])


@form(
    2,
    door="command: train, whose terminal closes",
    case="SIGHUP, and SIGHUP under nohup",
    right="the run ends with a checkpoint, and goes on under nohup",
)
def test_closed_terminal_ends_a_run_with_a_checkpoint():
    with runs.Stop() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal == signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with runs.Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal == 0
    finally:
        signal.signal(signal.SIGHUP, before)
