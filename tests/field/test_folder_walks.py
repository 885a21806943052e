"""Files under several names, and folders whose links lead back, at every door that lists files."""

import json
import os
import subprocess

import pytest
import torch
from forms import cannot_occur, form
from PIL import Image
from support import encoded, parquet, saved_model, tar, vitlens, write
from torchvision.datasets import ImageFolder

from vitlens import walk as walking
from vitlens.data import load
from vitlens.images import image_files, is_image
from vitlens.models import load_model, preprocess
from vitlens.report import heads

RED, GREEN = (Image.new("RGB", (32, 32), color) for color in ("red", "green"))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"))


def images(folder, names, start=0):
    return write(
        folder, {name: encoded(start + i, size=(32, 32)) for i, name in enumerate(names.split())}
    )


def pixels(split):
    return [image.numpy().tobytes() for image in split.images]


@form(
    4,
    door="Python: data.load, undivided folder",
    case="a class folder with a link to itself",
    right="the same folder without the link",
)
def test_link_to_its_own_class_adds_no_image(tmp_path):
    for place in ("plain", "linked"):
        names = [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(30)]
        images(tmp_path / place, " ".join(names))
    (tmp_path / "linked" / "cat" / "cat").symlink_to("../cat")
    for split in ("train", "valid"):
        plain, linked = (load(tmp_path / place, split) for place in ("plain", "linked"))
        assert pixels(plain) == pixels(linked) and plain.labels.equal(linked.labels)
    assert "1 link leads to a folder that is read already" in linked.note
    assert "cat/cat" in linked.note


@form(
    4,
    door="Python: data.load, train and val folders",
    case="two training images hard-linked into val, one linked back from train",
    right="count by hand: 3",
)
def test_images_of_both_splits_are_counted(tmp_path):
    images(tmp_path, "train/a/0.png train/a/1.png train/b/2.png train/b/3.png val/a/4.png")
    os.link(tmp_path / "train/a/0.png", tmp_path / "val/a/x.png")
    (tmp_path / "val/b").mkdir()
    os.link(tmp_path / "train/b/2.png", tmp_path / "val/b/y.png")
    (tmp_path / "train/a/z.png").symlink_to("../../val/a/4.png")
    for split in ("train", "valid"):
        note = load(tmp_path, split, size=8).note
        assert "3 images of" in note and "training and validation overlap" in note


@form(
    4,
    door="Python: data.load, val folder only, training folder without links",
    case="val is a link to train",
    right="count by hand: every image",
)
def test_a_split_that_is_a_link_to_the_other_is_reported(tmp_path):
    images(tmp_path, "train/a/0.png train/a/1.png train/b/2.png")
    (tmp_path / "val").symlink_to("train")
    found = load(tmp_path, "valid", size=8, stream=True, workers=0)
    assert len(found) == 3 and "3 images of" in found.note and "overlap" in found.note


@form(
    4,
    door="command: train --stream, class folders",
    case="a class folder linked under another name",
    right="count by hand: 4 images in 2 classes",
)
def test_images_in_two_classes_are_counted(tmp_path):
    names = " ".join(f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(4))
    images(tmp_path / "data", names)
    (tmp_path / "data" / "kitten").symlink_to("cat")
    done = vitlens(
        *("train", "--recipe", "digits", "--tiny", "--device", "cpu", "--stream", "--workers", 0),
        *(
            "--watch",
            0,
            "--set",
            "epochs=1",
            "--set",
            "batch_size=3",
            "--set",
            "augment.scale=0.5,1",
        ),
        *("--data", tmp_path / "data", "--out", tmp_path / "run"),
    )
    assert "4 images are in several classes under different names" in done.stderr
    assert "cat/0.png, kitten/0.png" in done.stderr


@form(
    4,
    door="Python: data.load, Parquet",
    case="a shard linked under a second name, a dangling link, a file of macOS",
    right="pyarrow's number of rows: 3",
)
def test_a_linked_parquet_file_is_read_once(tmp_path):
    pytest.importorskip("datasets")
    parquet(tmp_path / "train-0.parquet", [encoded(i) for i in range(3)], [0, 1, 0], ["a", "b"])
    (tmp_path / "train-1.parquet").symlink_to("train-0.parquet")
    (tmp_path / "train-2.parquet").symlink_to("missing.parquet")
    (tmp_path / "._train-0.parquet").write_bytes(b"mac")
    (tmp_path / "validation-0.parquet").symlink_to("train-0.parquet")
    train, valid = (load(tmp_path, s, root=tmp_path / "cache") for s in ("train", "valid"))
    assert len(train) == 3 and "1 file is another name" in train.note
    assert (
        "1 link leads nowhere: train-2.parquet" in train.note and "1 file is hidden" in train.note
    )
    assert len(valid) == 3 and "train split has the same images" in valid.note


@form(
    4,
    door="Python: data.load, WebDataset",
    case="a shard hard-linked under a second name and into a folder",
    right="tarfile's number of members: 4 images",
)
def test_a_linked_tar_file_is_read_once(tmp_path):
    pytest.importorskip("datasets")
    content = {}
    for i in range(4):
        content |= {f"{i}.jpg": encoded(i, "JPEG"), f"{i}.cls": str(i % 2).encode()}
    first = tar(tmp_path / "x-train-0.tar", content)
    os.link(first, tmp_path / "x-train-1.tar")
    (tmp_path / "train").mkdir()
    os.link(first, tmp_path / "train" / "0.tar")
    found = load(tmp_path, "train")
    assert len(found) == 4 and len(set(pixels(found))) == 4
    assert "2 files are other names of files that are read" in found.note


@form(
    4,
    door="command: inspect, image folder and --data",
    case="linked folder, dangling link, a picture under three names, one in both folders",
    right="os.stat: 4 different inodes shown, 5 in all",
)
def test_inspect_counts_each_file_once(model_folder, tmp_path):
    folder = images(tmp_path / "f", "0.png 1.png")
    elsewhere = images(tmp_path / "elsewhere", "a.png b.png", 50)
    (folder / "linked").symlink_to("../elsewhere")
    (folder / "gone.png").symlink_to("nowhere.png")
    (folder / "again.png").symlink_to("0.png")
    os.link(folder / "0.png", folder / "twin.png")
    more = images(tmp_path / "more", "x.png", 90)
    os.link(elsewhere / "a.png", more / "a.png")
    done = vitlens("inspect", model_folder, folder, "--data", more, "--out", tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(summary["images"]) == 4 and summary["images_in_mean_distance"] == 5
    assert "1 link leads nowhere: gone.png" in done.stderr
    assert "2 files are other names of files that are read" in done.stderr
    assert "1 images of --data are also drawn" in done.stderr


@form(
    4,
    door="command: explain, images on the command line",
    case="one picture given four times: twice, by a link, and in its folder",
    right="count by hand: 2 figures",
)
def test_explain_draws_each_file_once(model_folder, tmp_path):
    folder = images(tmp_path / "f", "0.png 1.png")
    (tmp_path / "link.png").symlink_to("f/0.png")
    given = folder / "0.png", folder / "0.png", tmp_path / "link.png", folder
    out = tmp_path / "out"
    done = vitlens("explain", model_folder, *given, "--methods", "rollout", "--out", out)
    assert len(list(out.glob("*.png"))) == 2
    assert "3 files are other names of files that are read" in done.stderr


@form(
    4,
    door="command: page, image folder",
    case="a chain of links to a picture, a link to the parent folder",
    right="count by hand: 1 photo",
)
def test_page_has_each_file_once(model_folder, tmp_path, monkeypatch):
    folder = images(tmp_path / "f", "0.png")
    for i in range(5):
        (folder / f"{i + 1}.png").symlink_to(f"{i}.png")
    (folder / "up").symlink_to("..")
    shown = {}

    def save(model, photographs, out, **_):
        shown.update(photographs)
        out.write_text("")

    monkeypatch.setattr("vitlens_explorer.in_page.save_page", save)
    done = vitlens("page", model_folder, folder, "--out", tmp_path / "page.html")
    assert list(shown) == ["0.png"]
    assert "5 files are other names" in done.stderr and "1 link leads to a folder" in done.stderr


@form(
    4,
    door="Python: preprocess, folder",
    case="a damaged image and a link in the folder",
    right="count by hand: 2 of 3 images",
)
def test_preprocess_goes_on_after_a_bad_file_of_a_folder(model_folder, tmp_path):
    folder = images(tmp_path, "0.png 1.png")
    (folder / "bad.png").write_bytes(b"no image")
    (folder / "link.png").symlink_to("0.png")
    model = load_model(str(model_folder))
    notes = []
    assert len(preprocess(model, folder, on_note=notes.append)) == 2
    assert any("1 of 3 images of the folder are left out" in note for note in notes)
    with pytest.warns(UserWarning, match="1 of 3 images of the folder are left out.*bad.png"):
        preprocess(model, str(folder))


@form(
    4,
    door="command: page, folder with a damaged file",
    case="one of three images damaged, one a strip",
    right="count by hand: 1 photo, exit code 1",
)
def test_page_goes_on_after_bad_files(model_folder, tmp_path, monkeypatch):
    folder = images(tmp_path / "f", "good.png")
    (folder / "bad.png").write_bytes(b"no image")
    Image.new("RGB", (400, 2)).save(folder / "strip.png")
    shown = {}

    def save(model, photographs, out, **_):
        shown.update(photographs)
        out.write_text("")

    monkeypatch.setattr("vitlens_explorer.in_page.save_page", save)
    out = tmp_path / "page.html"
    done = vitlens("page", model_folder, folder, "--out", out, expect=1)
    assert list(shown) == ["good.png"] and "bad.png" in done.stderr and "strip.png" in done.stderr


@form(
    4,
    door="command: app, folder with a damaged file",
    case="the first image of the folder is damaged",
    right="the second image",
)
def test_app_opens_the_first_readable_image(model_folder, tmp_path, monkeypatch):
    folder = images(tmp_path / "f", "b.png")
    (folder / "a.png").write_bytes(b"no image")
    opened = []
    monkeypatch.setattr("vitlens_explorer.app.serve", lambda _, first, **__: opened.append(first))
    done = vitlens("app", model_folder, folder, "--no-browser")
    assert opened == [folder / "b.png"] and "a.png" in done.stderr


@form(
    4,
    door="Python: image_files",
    case="pipe, socket, circle of links, removed file, closed folder, 3,000 levels, link to /",
    right="count by hand",
)
def test_walk_ends_and_names_everything_it_leaves_out(tmp_path, monkeypatch):
    import socket

    folder = images(tmp_path / "f", "0.png closed/1.png removed.png")
    os.mkfifo(folder / "pipe.png")
    listening = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    try:
        os.chdir(folder)
        listening.bind("socket.png")
        for _ in range(3_000):
            os.mkdir("deeper")
            os.chdir("deeper")
    finally:
        os.chdir(here)
        listening.close()
    (folder / "a.png").symlink_to("b.png")
    (folder / "b.png").symlink_to("a.png")
    (folder / "root").symlink_to("/")
    scandir = os.scandir

    def scan(path):
        if os.fspath(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    def name(entry):
        if entry.name == "removed.png":
            os.remove(entry.path)
        return entry.name

    monkeypatch.setattr(walking.os, "scandir", scan)
    monkeypatch.setattr(walking, "_name", name)
    notes = []
    try:
        names = [name for name, _ in image_files(folder, notes.append)]
    finally:
        subprocess.run(["rm", "-rf", folder / "deeper"], check=True)
    assert names == ["0.png"]
    (note,) = notes
    assert "2 links lead nowhere: a.png, b.png" in note
    assert "2 entries are pipes, sockets or devices: pipe.png, socket.png" in note
    assert "1 file was removed while its folder was read: removed.png" in note
    assert "1 file or folder cannot be opened: closed" in note
    assert "1 folder is more than 100 levels down" in note
    assert "1 link leads to a folder that is read already or contains this one: root" in note


@form(
    4,
    door="Python: image_files, folder without images",
    case="a large tree without an image",
    right="a sentence after a fixed number of files",
)
def test_walk_without_images_is_bounded(tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text("")
    with pytest.raises(ValueError, match="first 30 files and folders below .* hold no images"):
        walking.walk(tmp_path, is_image, most=20)


@form(
    4,
    door="mount: a folder mounted in itself",
    case="bind mount of a class folder in another folder",
    right="os.stat: the same inodes",
)
def test_bind_mounts_count_once(tmp_path):
    images(tmp_path, "a/0.png a/1.png b/2.png")
    (tmp_path / "a" / "mounted").mkdir()
    if subprocess.run(
        ["mount", "--bind", tmp_path / "a", tmp_path / "a" / "mounted"], capture_output=True
    ).returncode:
        pytest.skip("mounting needs privileges")
    try:
        found = load(tmp_path, "whole", size=8)
    finally:
        subprocess.run(["umount", tmp_path / "a" / "mounted"], check=True)
    assert torch.bincount(found.labels).tolist() == [2, 1]
    assert "a/mounted" in found.note


@form(
    4,
    door="Python: data.load, root of a mounted disk",
    case="lost+found, $RECYCLE.BIN, System Volume Information, thumbnails of a storage device",
    right="the four images, counted by hand",
)
def test_folders_of_systems_are_no_classes(tmp_path):
    images(tmp_path, "a/1.png a/2.png b/1.png b/2.png a/@eaDir/1.png $RECYCLE.BIN/3.png")
    (tmp_path / "lost+found").mkdir()
    images(tmp_path / "System Volume Information", "4.png")
    found = load(tmp_path, "whole", size=8, stream=True, workers=0)
    assert found.class_names == ("a", "b") and torch.bincount(found.labels).tolist() == [2, 2]
    assert "3 files of" in found.note
    notes = []
    assert len(image_files(tmp_path, notes.append)) == 4
    assert "3 files are hidden" in notes[0]


@form(
    4,
    door="Python: data.load, folder of usual files",
    case="names that differ in case, hidden and deep files, Thumbs.db, __MACOSX, a zip file",
    right="torchvision's ImageFolder without the hidden files",
)
def test_order_is_that_of_torchvision(tmp_path):
    names = "a/B.png a/b.png a/x/2.png a/x-y/10.png a/x/10.png a/Ä.png B/1.png a.b/1.png"
    images(tmp_path, names + " a/.hidden.png a/__MACOSX/1.png a/.git/2.png")
    write(tmp_path, {"a/Thumbs.db": b"", "a/.DS_Store": b"", "a/more.zip": b"PK"})
    found = load(tmp_path, "whole", size=8, stream=True, workers=0)
    hidden = "/.", "__MACOSX"
    reference = [
        (os.path.relpath(path, tmp_path), label)
        for path, label in ImageFolder(tmp_path).samples
        if not any(part in path for part in hidden)
    ]
    ours = [found.samples.name(i) for i in range(len(found))]
    assert list(zip(ours, found.labels.tolist(), strict=True)) == reference
    assert "6 files of" in found.note


@form(
    4,
    door="Python: report.heads",
    case="three images of one name",
    right="count by hand: 3",
)
def test_heads_keeps_images_of_one_name(model_folder):
    model = load_model(str(model_folder))
    found = heads(model, [("cat", GREEN), ("cat", RED), ("cat", GREEN)])
    logits = [contributions.logits.item() for _, contributions in found.values()]
    assert list(found) == ["cat", "cat (2)", "cat (3)"] and logits[0] == logits[2] != logits[1]


@form(
    4,
    door="command: explain, order of a folder",
    case="names whose numbers are equal",
    right="code points",
)
def test_image_files_of_equal_numbers_have_a_fixed_order(tmp_path):
    images(tmp_path, "01.png 1.png 001.png 2.png")
    names = [name for name, _ in image_files(tmp_path)]
    assert names == ["001.png", "01.png", "1.png", "2.png"]


cannot_occur(
    4,
    door="checkpoint folders of a run",
    reason="files step-*.json are read by their names in one folder, without a walk",
)
cannot_occur(4, door="notebook: explore(image)", reason="takes one image, not a folder")
