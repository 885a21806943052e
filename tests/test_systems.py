"""Differences of Windows, macOS and other encodings that this system can imitate."""

import ast
import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import parquet
from systems import missing

from vitlens import files
from vitlens.data import load
from vitlens.data.imageset import Reader
from vitlens.images import samples
from vitlens.models import opening
from vitlens.texts import file_name
from vitlens.walk import walk

ROOT = Path(__file__).parent.parent
FOLDERS = ("vitlens", "vitlens_explorer", "vitlens_paper", "experiments", "docs", "notebooks")


# Encodings


def without_encoding(code: str) -> list[int]:
    """Lines that read or write text in the encoding of the machine."""
    lines = []
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        has_encoding = "encoding" in {keyword.arg for keyword in call.keywords}
        if isinstance(call.func, ast.Attribute):
            owner = getattr(call.func.value, "id", "")
            is_text = call.func.attr in ("read_text", "write_text") and owner != "files"
        else:
            modes = [getattr(argument, "value", "") for argument in call.args[1:2]]
            is_text = getattr(call.func, "id", "") == "open" and "b" not in "".join(modes)
        if is_text and not has_encoding:
            lines.append(call.lineno)
    return lines


def test_text_files_have_an_encoding():
    assert without_encoding("open(p)\np.read_text()\nopen(p, 'rb')\nfiles.read_text(p)") == [1, 2]
    found = {}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        lines = without_encoding(path.read_text(encoding="utf-8"))
        if lines:
            found[str(path.relative_to(ROOT))] = lines
    assert found == {}


@pytest.mark.parametrize(
    ("encoding", "words", "expected"),
    [
        ("cp1252", ["inspect", "--→猫"], rb"--\u2192\u732b"),
        ("ascii", ["inspect", "--→×é"], rb"--\u2192\xd7\xe9"),
        ("cp1252", ["explain", "--help"], b"--target"),
    ],
)
def test_commands_print_in_other_encodings(encoding, words, expected):
    """Characters that the terminal lacks become escapes."""
    settings = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vitlens", *words]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True)
    assert expected in done.stdout + done.stderr
    assert b"Traceback" not in done.stderr


# Tests that need a system


CODE = """
import os

def pipe(path):
    os.mkfifo(path)

FULL = "/dev/full"

def test_of_a_pipe(tmp_path):
    pipe(tmp_path / "pipe")

def test_of_a_process(forked):
    forked(print)

def test_of_a_full_disk():
    open(FULL, "wb")

def test_of_numbers():
    assert 1 + 1 == 2
"""


@pytest.mark.parametrize(
    ("test", "on_macos", "on_windows"),
    [
        ("test_of_a_pipe", "", "It needs named pipes and sockets. Windows has none."),
        ("test_of_a_process", "", "It needs processes that fork. Windows has none."),
        (
            "test_of_a_full_disk",
            "It needs devices of Linux. macOS has none.",
            "It needs devices of Linux. Windows has none.",
        ),
        ("test_of_numbers", "", ""),
    ],
)
def test_missing_reads_what_a_test_needs(test, on_macos, on_windows, tmp_path):
    file = tmp_path / "test_code.py"
    file.write_text(CODE, encoding="utf-8")
    assert missing(file, test, "darwin") == on_macos
    assert missing(file, test, "win32") == on_windows
    assert missing(file, test, "linux") == ""


# Files and folders


@pytest.fixture
def windows(monkeypatch):
    """File names are checked as on Windows, and files are renamed when they are closed."""
    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files, "fcntl", None)


def test_walk_reads_all_files_where_entries_have_no_inode(tmp_path, monkeypatch):
    """On Windows, `DirEntry.stat()` has device 0 and inode 0 for every file."""

    class Entry:
        def __init__(self, entry):
            self.name, self.path, self.is_symlink = entry.name, entry.path, entry.is_symlink

        def stat(self):
            about = list(os.stat(self.path))
            about[1:4] = 0, 0, 0  # st_ino, st_dev, st_nlink
            return os.stat_result(about)

    class Listing(list):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    for name in ("cat/1.png", "cat/2.png", "dog/3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: Listing(map(Entry, scandir(path))))
    walked = walk(tmp_path, lambda path: path.endswith(".png"))
    assert walked.names == [os.path.join("cat", "1.png"), os.path.join("cat", "2.png")] + [
        os.path.join("dog", "3.png")
    ]
    assert walked.left_out == {}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aux.json", "aux.json is a device of Windows"),
        ("con", "con is a device of Windows"),
        ("results:1.json", "none of < >"),
        ("what?.json", "none of < >"),
        ("results.", "does not end with a dot"),
        ("results /a.json", "does not end with a dot"),
    ],
)
def test_names_that_windows_takes_for_others_are_refused(name, reason, tmp_path, windows):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    for write in (
        lambda: files.write(path, "text"),
        lambda: files.check_file(path, "--out"),
        lambda: files.check_writable(path, "--out"),
    ):
        with pytest.raises((OSError, ValueError), match=reason):
            write()
    assert not path.exists()


def test_usual_names_are_valid_on_windows(tmp_path, windows, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "console.json",
        "a.b.json",
        "./figures.json",
        file_name("con: what?. ", before="00-"),
    ):
        files.write(name, "text")
        assert Path(name).read_text(encoding="utf-8") == "text"


def test_write_names_the_remedy_for_a_file_that_stays_open(tmp_path, windows, monkeypatch):
    target = tmp_path / "page.html"
    target.write_text("old", encoding="utf-8")

    def refuse(source, path):
        raise PermissionError(errno.EACCES, "Access is denied")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(files, "RENAMES", 2)
    with pytest.raises(OSError, match="is unchanged. Close the programs that have it open, or"):
        files.write(target, "new")
    assert os.listdir(tmp_path) == ["page.html"]


def test_write_names_the_remedy_for_a_long_path(tmp_path, windows):
    with pytest.raises(OSError, match="Give a shorter path. Windows allows 259 characters"):
        files.write(tmp_path / ("a" * 120) / ("b" * 120) / "page.html", "new")


def test_drive_letters_are_no_libraries():
    assert str(opening._folder_in_name(r"C:\runs\vit")) == r"C:\runs\vit"
    assert str(opening._folder_in_name(r"hf:C:\runs\vit")) == r"C:\runs\vit"
    assert str(opening._folder_in_name("hf:runs/vit")) == str(Path("runs/vit"))


def test_slashes_mark_folders_on_windows(monkeypatch):
    monkeypatch.setattr(opening.os, "sep", "\\")
    assert opening._is_path("runs/mine") and opening._is_path(r"runs\mine")
    assert not opening._is_path("vit_tiny_patch16_224")


# Processes


SPAWNED = """
import multiprocessing
import torch
from vitlens.data import load

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    stream = load({folder!r}, "train", size=32, stream=True, workers=1)
    for images, labels in stream.batches([torch.arange(2)]):
        print(*images.shape, labels.tolist())
"""


@pytest.fixture
def class_folders(tmp_path):
    """A folder with two classes of one image each, for training and validation."""
    for split in ("train", "valid"):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            samples()["chelsea"].resize((40, 40)).save(folder / "1.png")
    return tmp_path / "photos"


def test_reader_of_a_stream_can_be_sent_to_a_spawned_worker(class_folders, tmp_path):
    """Workers on Windows and macOS get the data set pickled."""
    table = tmp_path / "table"
    image = next(class_folders.rglob("*.png")).read_bytes()
    for split in ("train", "validation"):
        parquet(table / f"{split}-0.parquet", [image] * 2, [0, 1], ["cat", "dog"])
    for source in (class_folders, table):
        stream = load(source, "train", size=32, stream=True, workers=1)
        reader = Reader(stream.samples, stream.fit, stream.side)
        copy = pickle.loads(pickle.dumps(reader))
        assert torch.equal(copy.sample(0, None, ())[0], reader.sample(0, None, ())[0])


@pytest.mark.slow
def test_streams_read_with_spawned_workers(class_folders, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPAWNED.format(folder=str(class_folders)), encoding="utf-8")
    settings = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=settings, capture_output=True, encoding="utf-8")
    assert done.stdout.split("\n")[0] == "2 3 32 32 [0, 1]", done.stderr
