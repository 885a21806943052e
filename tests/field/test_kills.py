"""Commands that are killed at random moments, two at a time: nothing is lost, and the next command goes on."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from forms import form
from PIL import Image

from vitlens import files
from vitlens.cli import run as command_line
from vitlens.images import samples
from vitlens.train import export, recipe, run_folder
from vitlens_paper.evaluate import Record, read_results, write

BEFORE = [Record("m", f"d{k}", "top1", "top1", 50.0, 40.0, 60.0, 10, "2026", {}) for k in range(3)]
MINE = "id,score\n1,0.9\n"


def command(words: list[str]) -> int:
    """Exit code of a command."""
    sys.argv = ["vitlens", *words]
    try:
        command_line()
    except SystemExit as stop:
        return stop.code or 0


def repeat(words: list[str], folder: Path) -> None:
    """Run a command again and again, until killed."""
    os.chdir(folder)
    sys.stdout = sys.stderr = open(folder / f"log-{os.getpid()}", "w", buffering=1)  # noqa: SIM115
    (folder / f"ready-{os.getpid()}").touch()
    while True:
        command(words)


def finish(words: list[str], folder: Path) -> None:
    """Run a command to its end."""
    os.chdir(folder)
    sys.stdout = sys.stderr = open(folder / "log-last", "w", buffering=1)  # noqa: SIM115
    sys.exit(command(words))


COMMANDS = {
    "train": "train --recipe digits --data digits --tiny --device cpu --resume --out run "
    "--set save_every=0.05 --hold",
    "evaluate": "evaluate model --data digits --workers 0 --device cpu --out results.json",
    "explain": "explain model cat.png --methods rollout,legrad --out explanations",
    "page": "page model cat.png --out page.html",
}


@pytest.fixture
def folder(tmp_path):
    plan = recipe("digits").tiny()
    export(plan.build(), tmp_path / "model", plan, "0123456789")
    samples()["chelsea"].save(tmp_path / "cat.png")
    (tmp_path / "run").mkdir()
    (tmp_path / "explanations").mkdir()
    (tmp_path / "explanations" / "scores.csv").write_text(MINE)
    (tmp_path / "page.html").write_text("<html>older</html>")
    write(tmp_path / "results.json", BEFORE)
    return tmp_path


def check(folder: Path) -> None:
    """Everything that was there is there, and every result is whole."""
    keys = [record.key for record in read_results(folder / "results.json")]
    assert [record.key for record in BEFORE] == keys[:3]
    assert (
        (folder / "page.html")
        .read_text(encoding="utf-8")
        .rstrip()
        .endswith(("</html>", "</script>"))
    )
    assert (folder / "explanations" / "scores.csv").read_text() == MINE
    for path in folder.glob("explanations/*.png"):
        Image.open(path).load()
    for path in (*folder.glob("run/*.json"), *folder.glob("run/checkpoints/*.json")):
        json.loads(path.read_text())
    if run_folder.newest_first(folder / "run" / "checkpoints"):
        run_folder.load_checkpoint(folder / "run" / "checkpoints")


def kill_at_random(forked, folder: Path, names: list[str], draw: random.Random) -> None:
    """Start commands together, and kill all at one moment after they have begun."""
    started = [forked(repeat, COMMANDS[name].split(), folder) for name in names]
    while any(not (folder / f"ready-{process.pid}").exists() for process in started):
        assert all(process.is_alive() for process in started)
        time.sleep(0.01)
    time.sleep(draw.uniform(0.2, 3))
    for process in started:
        os.kill(process.pid, signal.SIGKILL)
    for process in started:
        process.join()
    check(folder)


@pytest.mark.slow
@form(
    2,
    door="commands train, evaluate, explain and page, killed",
    case="40 kill -9 at random moments, two processes at once, often the same command twice",
    right="the three records, the person's own table and whole files; each command then runs to its end",
)
def test_forty_kills_lose_nothing(forked, folder):
    draw = random.Random(0)
    for _ in range(20):
        kill_at_random(forked, folder, draw.choices([*COMMANDS], k=2), draw)
    for name, words in COMMANDS.items():
        last = forked(finish, words.split(), folder)
        last.join(120)
        assert last.exitcode == 0, f"{name}: {(folder / 'log-last').read_text()}"
    check(folder)
    assert len(read_results(folder / "results.json")) > 3
    assert not [*folder.rglob(".vitlens-*.tmp")], (
        "the next commands remove what the killed ones left"
    )


@form(
    2,
    door="command: evaluate --out, killed",
    case="two evaluations into one file, killed together",
    right="the three records; the next writer does not wait",
)
def test_killed_evaluations_lose_no_records(forked, folder):
    kill_at_random(forked, folder, ["evaluate", "evaluate"], random.Random(1))
    with files.lock(folder / "results.json", waits=False):
        pass
