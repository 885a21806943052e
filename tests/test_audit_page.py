"""`vitlens audit` and its page, on a model whose weights are set by hand, so that its evidence is known."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from audited import content_of, save_model, write_images
from PIL import Image
from support import vitlens
from test_evidence import PATCH, PLACE, SIDE, color_model, marked

import vitlens as library
from vitlens import TokenGrid, evidence, files, load_model
from vitlens.digests import FILE, Digests, stored_digest
from vitlens.files import is_figure
from vitlens.unseen import UNKNOWN
from vitlens_explorer import audit as command
from vitlens_explorer import audit_page, save_audit_page
from vitlens_explorer.audit_page import crop_box, null_band
from vitlens_paper.evaluate import evaluate

FORBIDDEN = re.compile(r"\b(cheat|bias(ed)?|shortcut|spurious)", re.I)
FILES = ["audit.html", "groups.csv", "effects.csv", "images.csv", "audit.json"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "colors")


@pytest.fixture(scope="module")
def audited(model, tmp_path_factory):
    """(finished command, its folder, the folder of images), with one broken file among the images."""
    root = tmp_path_factory.mktemp("audited")
    data, out = write_images(root / "my photos"), root / "audit"
    (data / "class 1" / "1.png").write_bytes(b"damaged")
    done = vitlens("audit", model, "--data", data, "--out", out, "--device", "cpu", expect=1)
    return done, out, data


def test_audit_command_writes_all_files(audited):
    done, out, _ = audited
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, "figures"])
    figures = sorted((out / "figures").iterdir())
    assert [path.name for path in figures] == [f"000{n}-class-{n}.png" for n in range(3)]
    assert all(is_figure(path) for path in figures)
    assert all(str(path) in done.stdout for path in figures)
    record = json.loads((out / "audit.json").read_text())
    assert record["command"].startswith("vitlens audit ")
    assert record["images"] == 149
    assert re.fullmatch("[0-9a-f]{12}", record["weights"])
    assert "layer" in record["settings"]


def test_audit_command_prints_forwards_and_left_out_images(audited):
    done, _, _ = audited
    assert "150 images take at most 1,500 forwards" in done.stderr
    assert "1 of 150 images are left out. The first: " in done.stderr


def test_audit_page_shows_planted_group_first(audited):
    _, out, _ = audited
    page = content_of(out / "audit.html")
    first = page["groups"][page["look"]["groups"][0]]
    assert page["look"]["title"] == "What to look at"
    assert page["classes"][0]["suspects"] == 1
    assert first["name"] == "class 0"
    assert first["verdict"] == "used"
    assert first["suspect"] == 1
    assert first["place"][PLACE] == 1
    assert "100 % of its images have it at the same patch." in first["sentences"]
    assert {tuple(member["patches"]) for member in first["members"]} == {(PLACE,)}
    assert len(page["look"]["groups"]) == 3  # the other two are used, without a reason


def test_audit_page_crops_hold_the_group(audited):
    """The middle patch of a crop of the planted group has its color."""
    _, out, _ = audited
    page = content_of(out / "audit.html")
    group = page["groups"][page["look"]["groups"][0]]
    for member in group["members"]:
        x, y, width, height = member["box"]
        assert (width, height) == (3 * PATCH, 3 * PATCH)
        assert (y // PATCH + 1) * SIDE + x // PATCH + 1 == PLACE
        image = Image.open(io.BytesIO(page["images"][str(member["image"])]["file"]))
        red, green, blue = image.getpixel((x + width // 2, y + height // 2))
        assert red > 200
        assert green < 60
        assert blue < 60


def test_audit_page_commands_open_the_images(audited, model):
    _, out, data = audited
    images = content_of(out / "audit.html")["images"].values()
    for image in images:
        *words, path = shlex.split(image["command"])
        assert words == ["vitlens", "app", str(model)]
        assert path == str(data / image["name"])
        label = image["name"].split("/")[0]
        assert image["label"] == label
        assert image["predicted"] == label


def test_audit_of_images_without_labels_uses_nothing(model, tmp_path):
    data, out = write_images(tmp_path / "flat", labeled=False), tmp_path / "audit"
    done = vitlens("audit", model, "--data", data, "--out", out, "--device", "cpu")
    page = content_of(out / "audit.html")
    assert "Without labels" in done.stderr
    assert "without labels none is called used" in page["lead"]
    assert page["look"]["title"] == "The strongest effects"
    assert len(page["look"]["groups"]) == 3
    assert {group["verdict"] for group in page["groups"]} <= {"tested", "not tested"}
    assert all(image["label"] is None for image in page["images"].values())


@pytest.mark.parametrize(
    "count, classes, more, message",
    [
        (150, 1, (), "at least two classes, got those of class 0 alone"),
        (10, 3, (), "at least 40 images, got 10. Pass more images"),
        (9, 3, ("--no-labels",), "at least 40 images, got 9. Pass more images"),
        (150, 3, ("--batch-size", 0), "batch-size"),
        (150, 3, ("--device", "abacus"), "The device 'abacus'"),
    ],
)
def test_audit_command_refuses_in_a_sentence(model, tmp_path, count, classes, more, message):
    data, out = write_images(tmp_path / "data", count, classes), tmp_path / "audit"
    done = vitlens("audit", model, "--data", data, "--out", out, *more, expect=2)
    assert message in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    "names, message",
    [
        (
            ("cat", "dog", "owl"),
            "'cat', 'dog', 'owl' are not. The model's classes are 'red', 'green'",
        ),
        (
            ("red", "GREEN", "blues"),
            "'blues' is not. The model's classes are 'red', 'green', 'blue'",
        ),
        (("1", "2", "3"), "'1', '2', '3' are not. The model's classes are 'red'"),
        (("red", "Red", "blue"), "'Red' and 'red' match the same class, number 0"),
    ],
)
def test_audit_command_refuses_unknown_classes(model, tmp_path, names, message):
    named = shutil.copytree(model, tmp_path / "named")
    config = json.loads((named / "config.json").read_text())
    config["label_names"] = ["red", "green", "blue"]
    (named / "config.json").write_text(json.dumps(config))
    data, out = write_images(tmp_path / "data", 45), tmp_path / "audit"
    for number, name in enumerate(names):
        (data / f"class {number}").rename(data / name)
    done = vitlens("audit", named, "--data", data, "--out", out, expect=2)
    assert message in done.stderr
    assert "audit without labels (--no-labels)" in done.stderr
    assert done.stderr.count("vitlens: ") == 1
    assert not out.exists()
    options = {"device": "cpu", "workers": 0}
    with pytest.raises(ValueError, match=re.escape(message)):
        list(evaluate(named, str(data), "top1", say=str, **options))
    audited = [str(data / name) for name in names]
    labels = [name for name in names for _ in range(15)]
    with pytest.raises(ValueError, match=re.escape(message)):
        library.audit(load_model(named), audited, labels)


def test_audit_command_refuses_model_without_classes(tmp_path):
    features = save_model(tmp_path / "features", outputs=0)
    data, out = write_images(tmp_path / "data", 45), tmp_path / "audit"
    done = vitlens("audit", features, "--data", data, "--out", out, expect=2)
    assert "has no classifier head" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("name", [*FILES, "figures/mine.png"])
def test_audit_command_keeps_files_of_others(model, tmp_path, name):
    out = tmp_path / "audit"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    done = vitlens("audit", model, "--data", tmp_path, "--out", out, expect=2)
    assert "give another --out" in done.stderr or "is in the folder of the images" in done.stderr
    done = vitlens("audit", model, "--data", "digits", "--out", out, expect=2)
    assert f"{name} is not known as a file of vitlens" in done.stderr
    assert (out / name).read_text() == "mine"


def test_audit_command_replaces_files_of_an_earlier_audit(audited):
    _, out, data = audited
    command.check_out(out, str(data))


def test_audit_command_refuses_out_inside_data(model, tmp_path):
    data = write_images(tmp_path / "data", 45)
    done = vitlens("audit", model, "--data", data, "--out", data / "audit", expect=2)
    assert "is in the folder of the images" in done.stderr
    assert not (data / "audit").exists()


def test_audit_command_ends_by_ctrl_c_in_a_sentence(model, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "audit", interrupted)
    data, out = write_images(tmp_path / "data", 45), tmp_path / "audit"
    done = vitlens("audit", model, "--data", data, "--out", out, expect=130)
    assert f"vitlens: stopped before the audit ended, so {out} is unchanged." in done.stderr
    assert not out.exists()


def test_audit_command_without_readable_images_ends_in_a_sentence(model, tmp_path):
    data, out = write_images(tmp_path / "data", 45), tmp_path / "audit"
    for path in data.rglob("*.png"):
        path.write_bytes(b"damaged")
    done = vitlens("audit", model, "--data", data, "--out", out, "--device", "cpu", expect=2)
    assert "None of the images could be read, so there is nothing to audit." in done.stderr
    assert not (out / "audit.html").exists()


@pytest.mark.parametrize("place", ["file", "file/audit", "x" * 300])
def test_audit_command_refuses_out_that_cannot_be_written(model, tmp_path, place):
    (tmp_path / "file").write_text("mine")
    data, out = write_images(tmp_path / "data", 45), tmp_path / place
    done = vitlens("audit", model, "--data", data, "--out", out, expect=2)
    assert "--out" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == "mine"
    assert "explore" not in done.stderr  # before any image is read


def full_disk(monkeypatch, name):
    """Let the writer of files fail as on a full disk at a file whose name ends so."""
    write = files._write

    def full(path, data):
        if path.name.endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(files, "_write", full)


@pytest.mark.parametrize("name", ["audit.html", "images.csv", "audit.json"])
def test_audit_command_on_a_full_disk_ends_in_a_sentence(model, tmp_path, monkeypatch, name):
    data, out = write_images(tmp_path / "data", 45), tmp_path / "audit"
    full_disk(monkeypatch, name)
    arguments = ("audit", model, "--data", data, "--out", out, "--device", "cpu")
    done = vitlens(*arguments, expect=2)
    assert f"{name} cannot be written (No space left on device). Make space there" in done.stderr
    assert not (out / name).exists()
    monkeypatch.undo()
    names = computed(monkeypatch)
    vitlens(*arguments)
    assert names == []
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, "figures"])


@pytest.mark.parametrize("name, left", [("explore-0", 9), ("test-1", 2)])
def test_audit_on_a_disk_that_fills_goes_on_with_the_same_numbers(
    model, audited, tmp_path, monkeypatch, name, left
):
    _, whole, data = audited
    out = tmp_path / "audit"
    full_disk(monkeypatch, f"-{name}.npz")
    arguments = ("audit", model, "--data", data, "--out", out, "--device", "cpu")
    done = vitlens(*arguments, expect=2)
    assert done.stderr.count("cannot be written (No space left on device). Make space there") == 1
    assert not list(out.glob(f"unfinished/*-{name}.npz"))
    monkeypatch.undo()
    names = computed(monkeypatch)
    vitlens(*arguments, expect=1)
    assert len(names) == left
    for table in ("groups.csv", "effects.csv", "images.csv"):
        assert (out / table).read_bytes() == (whole / table).read_bytes()


SMALL_DISK = """
set -e
mkdir "$OUT"
mount -t tmpfs -o size=300k tmpfs "$OUT"
code=0
"$@" || code=$?
ls -A "$OUT/unfinished"
mount -o remount,size=20m "$OUT"
"$@"
cp "$OUT"/*.csv "$OUT/.."
exit $code
"""


def in_namespace(*command, **variables):
    """Run a command that may mount file systems, which no other process has."""
    words = ["unshare", "-m", *map(str, command)]
    environment = {**os.environ, **variables}
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)


MOUNTS = bool(shutil.which("unshare")) and in_namespace("true").returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not MOUNTS, reason="needs the right to mount a small disk (root)")
def test_audit_goes_on_after_a_disk_of_300_kb_was_full(model, tmp_path):
    data = write_images(tmp_path / "data", 150)
    words = ["audit", model, "--data", data, "--device", "cpu", "--batch-size", 8]
    vitlens(*words, "--out", tmp_path / "whole")
    out = tmp_path / "audit"
    command = [sys.executable, "-m", "vitlens", *words, "--out", out]
    done = in_namespace("sh", "-c", SMALL_DISK, "sh", *command, OUT=str(out))
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("cannot be written (No space left on device). Make space there") == 1
    assert ".tmp" not in done.stdout
    whole = len(re.findall(r"explore-\d+\.npz", done.stdout))
    assert whole
    assert f"Continuing: {8 * whole} of 150 images are read already." in done.stderr
    for name in ("groups.csv", "effects.csv", "images.csv"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def interrupt(monkeypatch, name, calls):
    """Let Ctrl-C come in a pass over the images after some batches."""
    compute = getattr(evidence._Run, name)
    done = []

    def interrupted(self, *arguments):
        if len(done) == calls:
            raise KeyboardInterrupt
        done.append(name)
        return compute(self, *arguments)

    monkeypatch.setattr(evidence._Run, name, interrupted)


def computed(monkeypatch):
    """List of the passes that are computed from now on, one name for each batch."""
    names = []
    for name in ("_explore", "_find", "_test"):
        compute = getattr(evidence._Run, name)

        def counted(self, *arguments, name=name, compute=compute):
            names.append(name)
            return compute(self, *arguments)

        monkeypatch.setattr(evidence._Run, name, counted)
    return names


@pytest.mark.slow
@pytest.mark.parametrize(
    "stopped, left",
    [
        ("_explore", ["_explore"] * 2 + ["_find"] * 3 + ["_test"] * 3),
        ("_find", ["_find"] * 2 + ["_test"] * 3),
        ("_test", ["_test"] * 2),
    ],
)
def test_stopped_audit_goes_on_with_the_same_numbers(
    model, audited, tmp_path, monkeypatch, stopped, left
):
    _, whole, data = audited  # with a broken file
    out = tmp_path / "audit"
    arguments = ("audit", model, "--data", data, "--out", out, "--device", "cpu")
    with monkeypatch.context() as patch:
        interrupt(patch, stopped, 1)
        done = vitlens(*arguments, expect=130)
    assert f"Finished batches are in {out / 'unfinished'}" in done.stderr
    assert [path.name for path in out.iterdir()] == ["unfinished"]
    names = computed(monkeypatch)
    done = vitlens(*arguments, expect=1)
    assert names == left
    assert done.stderr.count("of 150 images are read already.") == 1
    assert "1 of 150 images are left out. The first: " in done.stderr
    assert not (out / "unfinished").exists()
    for name in ("groups.csv", "effects.csv", "images.csv"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is of POSIX")
def test_killed_audit_goes_on_with_the_same_numbers(model, tmp_path):
    """A process is killed while it reads, and the next one continues from its finished batches."""
    data = write_images(tmp_path / "data", 150)
    words = ["audit", model, "--data", data, "--device", "cpu", "--batch-size", 8]
    vitlens(*words, "--out", tmp_path / "whole")
    out = tmp_path / "audit"
    command = [sys.executable, "-m", "vitlens", *map(str, words), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    while len([*out.glob("unfinished/*-explore-*.npz")]) < 3:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    read = 8 * len([*out.glob("unfinished/*-explore-*.npz")])
    assert 24 <= read < 75
    done = vitlens(*words, "--out", out)
    assert f"Continuing: {read} of 150 images are read already." in done.stderr
    assert not (out / "unfinished").exists()
    for name in ("groups.csv", "effects.csv", "images.csv"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_evidence_of_a_stopped_audit_equals_that_of_a_whole_one(model, tmp_path, monkeypatch):
    """Also the patches with little evidence, which are drawn at random batch by batch."""
    vit = load_model(model)
    random = torch.Generator().manual_seed(0)
    for parameter in vit.parameters():  # the tokens of gray patches are equal otherwise
        parameter.data.normal_(std=0.2, generator=random)
    paths = sorted(write_images(tmp_path / "data", 150).rglob("*.png"))
    labels = [int(path.parent.name[-1]) for path in paths]
    explored = []
    find_groups = evidence.find_groups

    def recorded(found, seed):
        explored.append(found)
        return find_groups(found, seed)

    monkeypatch.setattr(evidence, "find_groups", recorded)
    options = {"batch_size": 16, "partial": tmp_path / "partial"}
    library.audit(vit, paths, labels, batch_size=16)
    with monkeypatch.context() as patch:
        interrupt(patch, "_explore", 2)
        with pytest.raises(KeyboardInterrupt):
            library.audit(vit, paths, labels, **options)
    library.audit(vit, paths, labels, **options)
    whole, resumed = explored
    for name in ("tokens", "classes", "rows", "patches", "values", "others", "read", "predicted"):
        assert torch.equal(getattr(whole, name), getattr(resumed, name)), name
    assert len(whole.donors) == len(resumed.donors) == evidence.DONORS
    for one, other in zip(whole.donors, resumed.donors, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert whole.grid == resumed.grid


@pytest.mark.parametrize("change", ["image", "seed", "damaged", "none"])
def test_changed_audit_starts_anew(model, tmp_path, monkeypatch, change):
    data, out = write_images(tmp_path / "data", 45), tmp_path / "audit"
    arguments = ["audit", model, "--data", data, "--out", out, "--device", "cpu"]
    with monkeypatch.context() as patch:
        interrupt(patch, "_find", 0)
        vitlens(*arguments, expect=130)
    (kept,) = (out / "unfinished").iterdir()
    if change == "image":
        shutil.copy(data / "class 0" / "0.png", data / "class 0" / "3.png")
    elif change == "seed":
        arguments += ["--seed", 1]
    elif change == "damaged":
        kept.write_bytes(kept.read_bytes()[:100])
    names = computed(monkeypatch)
    done = vitlens(*arguments)
    assert ("_explore" in names) == (change != "none")
    continued = "Continuing: 23 of 45 images are read already."
    anew = "Starting anew: the finished batches in"
    assert (continued in done.stderr) == (change == "none")
    assert (anew in done.stderr) == (change in ("image", "seed"))
    assert not (out / "unfinished").exists()


def test_audit_keeps_other_files_among_unfinished_ones(model, tmp_path):
    data, out = write_images(tmp_path / "data", 45), tmp_path / "audit"
    (out / "unfinished").mkdir(parents=True)
    (out / "unfinished" / "mine.npz").write_text("mine")
    vitlens("audit", model, "--data", data, "--out", out, "--device", "cpu")
    assert [path.name for path in (out / "unfinished").iterdir()] == ["mine.npz"]


def test_audit_of_a_tensor_keeps_nothing(tmp_path):
    pixels = (marked(45).images / 255 - 0.5) / 0.5
    library.audit(color_model(), pixels, partial=tmp_path / "partial")
    assert not (tmp_path / "partial").exists()


def test_audit_command_without_groups_ends_well(model, tmp_path):
    data, out = write_images(tmp_path / "data", 45), tmp_path / "audit"
    done = vitlens("audit", model, "--data", data, "--out", out, "--device", "cpu")
    page = content_of(out / "audit.html")
    assert "Used groups: 0 of 0." in done.stdout
    assert page["look"]["title"] == "Nothing tested"
    assert page["groups"] == page["classes"] == []
    assert page["without"] == ["class 0", "class 1", "class 2"]
    assert list((out / "figures").iterdir()) == []


def test_open_images_leaves_out_training_images(model, tmp_path, monkeypatch):
    def first_half(_, images):
        return images.select_rows(torch.arange(len(images) // 2)), "22 were trained on."

    monkeypatch.setattr(command, "unseen", first_half)
    notes = []
    data = write_images(tmp_path / "data", 45)
    images = command.open_images(load_model(model), str(data), on_note=notes.append)
    assert len(images.pairs) == len(images.labels) == 22
    assert "22 were trained on." in notes


@pytest.mark.parametrize("labeled", [True, False])
def test_audit_command_leaves_out_training_images(model, tmp_path, labeled):
    data, out = write_images(tmp_path / "data", 90, labeled=labeled), tmp_path / "audit"
    paths = sorted(data.rglob("*.png"))
    trained = shutil.copytree(model, tmp_path / "trained")
    stored = np.array([stored_digest(path) for path in paths[:40]], dtype=np.uint64)
    (trained / FILE).write_bytes(Digests(stored, np.zeros_like(stored)).to_bytes())
    done = vitlens("audit", trained, "--data", data, "--out", out, "--device", "cpu")
    left_out = "40 of 90 images are left out, because the model was trained on them."
    assert done.stderr.count(left_out) == 1
    assert "50 images take at most 500 forwards" in done.stderr
    record = json.loads((out / "audit.json").read_text())
    assert record["images"] == 50
    assert sum(left_out in note for note in record["notes"]) == 1


@pytest.mark.parametrize("labeled", [True, False])
def test_audit_command_notes_a_missing_record_once(model, tmp_path, labeled):
    data, out = write_images(tmp_path / "data", 45, labeled=labeled), tmp_path / "audit"
    done = vitlens("audit", model, "--data", data, "--out", out, "--device", "cpu")
    assert done.stderr.count("No record of the images") == 1
    record = json.loads((out / "audit.json").read_text())
    assert record["notes"].count(UNKNOWN) == 1


def test_stored_images_stay_below_the_limit(model, audited, tmp_path, monkeypatch):
    _, _, data = audited
    vit = load_model(model)
    images = command.open_images(vit, str(data))
    found = library.audit(vit, images.pairs, images.labels)
    inputs = evidence.inputs_of(vit, images.pairs)
    pixels = audit_page.Pictures(vit, inputs, "balanced_gradients").pixels
    _, files, _ = audit_page.stored_images(found, pixels)
    monkeypatch.setattr(audit_page, "LIMIT", 10_000)
    kept, fewer, _ = audit_page.stored_images(found, pixels)
    assert 0 < len(fewer) < len(files)
    assert sum(map(len, fewer.values())) < 10_000 + max(map(len, files.values()))
    assert all(position in fewer for positions in kept.values() for position in positions)
    assert all(kept.values())  # every group has an image
    for group, positions in kept.items():
        assert len(set(positions)) == len(positions)
        assert (found.members[positions] == group).any(1).all()


def covered_pixels(page, member, way):
    """The covered image that the page draws: the stored image with the patches of a blank."""
    image = page["images"][str(member["image"])]
    other = page["others"][str(member["covered"]["other"])]
    shown = np.asarray(Image.open(io.BytesIO(image["file"])))
    height, width = shown.shape[:2]
    if way == "border":
        blank = np.broadcast_to(list(bytes.fromhex(image["color"][1:])), shown.shape)
    else:
        file = image["blurred"] if way == "blur" else other["file"]
        blank = np.asarray(Image.open(io.BytesIO(file)).resize((width, height)))
    numbers = TokenGrid(SIDE, SIDE, (PATCH, PATCH)).pixel_patches()
    at = np.isin(numbers.numpy(), member["patches"])
    return np.where(at[..., None], blank, shown)


@pytest.fixture(scope="module")
def saved(model, audited, tmp_path_factory):
    """(audit, content of the page, model, sources) of `save_audit_page`."""
    _, _, data = audited
    vit = load_model(model)
    images = command.open_images(vit, str(data))
    found = library.audit(vit, images.pairs, images.labels)
    path = tmp_path_factory.mktemp("saved") / "page.html"
    assert save_audit_page(vit, images.pairs, found, path, title="colors", data="photos") == path
    return found, content_of(path), vit, images.pairs


@pytest.mark.parametrize("way", list(evidence.WAYS))
def test_page_covers_images_as_the_test_did(saved, way):
    """The model gets the image of the page, up to JPEG, and returns the probability that the page has."""
    found, page, vit, _ = saved
    shown = []
    for group in page["groups"]:
        for member in group["members"][:5]:
            outcomes = {each["way"]: each for each in member["covered"]["ways"]}
            number = int(found.tested[member["image"]])
            label = int(found.images.set_index("image").loc[number, "label"])
            pixels = covered_pixels(page, member, way).astype(np.float32)
            inputs = (torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255 - 0.5) / 0.5
            probability = vit(inputs).softmax(1)[0, label].item()
            assert probability == pytest.approx(outcomes[way]["probability"], abs=0.06)
            shown.append(outcomes[way])
    assert len(shown) == 15
    assert all(each["probability"] < each["control"] - 0.3 for each in shown)


def test_covered_table_equals_effects(saved):
    found = saved[0]
    covered = found.covered
    assert list(covered) == list(evidence.COVERED_COLUMNS)
    falls = (covered["control"] - covered["probability"]).groupby(
        [covered["group"], covered["way"]]
    )
    for row in found.effects.to_dict("records"):
        assert falls.mean()[row["group"], row["way"]] == pytest.approx(row["effect"], abs=1e-6)
    explored = found.images[found.images["half"] == "explored"]["image"]
    assert covered["other"].isin(explored).all()
    assert covered["image"].isin(found.tested.tolist()).all()


def test_page_has_the_map_of_the_predicted_class(saved):
    _, page, _, _ = saved
    (group,) = [group for group in page["groups"] if group["name"] == "class 0"]
    for member in group["members"]:
        levels = np.frombuffer(page["images"][str(member["image"])]["map"], np.uint8)
        assert len(levels) == SIDE**2
        assert levels.argmax() == PLACE
        assert levels.max() == page["levels"]


def test_save_audit_page_equals_the_page_of_the_command(saved, audited):
    _, page, _, _ = saved
    own = content_of(audited[1] / "audit.html")
    assert not page["opens"]
    assert own["opens"]
    for name in ("groups", "classes", "others", "look", "grid"):
        assert page[name] == own[name], name
    for position, image in own["images"].items():
        assert page["images"][position] == image | {"command": None}


def test_save_audit_page_of_a_data_set_has_its_class_names(tmp_path):
    images = marked(120)
    images = replace(images, class_names=("red", "green", "blue"))
    vit = color_model()
    found = library.audit(vit, images)
    page = content_of(save_audit_page(vit, images, found, tmp_path / "page.html"))
    names = {each["name"] for each in page["classes"]} | set(page["without"])
    assert names == {"red", "green", "blue"}
    with pytest.raises(ValueError, match="The folder of the page"):
        (tmp_path / "file").write_text("")
        save_audit_page(vit, images, found, tmp_path / "file" / "page.html")


def test_blanks_of_an_image_are_small(saved):
    _, page, _, _ = saved
    sizes = [len(image["map"]) + len(image["blurred"]) for image in page["images"].values()]
    assert max(sizes) < audit_page.BLANKS
    photo = Image.effect_noise((224, 224), 120).convert("RGB")
    inputs = evidence.inputs_of(load_model(), [photo])
    blanks = audit_page.Pictures(load_model(), inputs, "balanced_gradients").blanks(0)
    assert len(blanks["map"]) + len(blanks["blurred"]) < audit_page.BLANKS


def test_null_band_equals_sign_flips():
    random = np.random.default_rng(0)
    differences = random.normal(0.3, 0.5, 60)
    error = differences.std() / np.sqrt(60)
    low, high = differences.mean() - 1.96 * error, differences.mean() + 1.96 * error
    signs = random.choice([-1, 1], (20_000, 60))
    expected = np.quantile((signs * differences).mean(1), 0.975)
    assert null_band(differences.mean(), low, high, 60) == pytest.approx(expected, rel=0.03)


def test_crop_box_surrounds_largest_part():
    patches = np.zeros((6, 8), dtype=bool)
    patches[0, 7] = True
    patches[2:4, 3] = True
    assert crop_box(patches, (10, 10)) == [10, 10, 40, 40]
    patches[:] = False
    patches[0, 0] = True
    assert crop_box(patches, (16, 8)) == [0, 0, 24, 48]
    assert crop_box(np.ones((6, 8), dtype=bool), (10, 10)) == [0, 0, 80, 60]


def test_audit_page_words_are_plain(audited):
    """No verdict on the model: the page shows crops and asks."""
    _, out, _ = audited
    page = content_of(out / "audit.html")
    texts = json.dumps({**page, "images": []}, default=lambda pixels: f"{len(pixels)} bytes")
    for path in audit_page.AUDIT_PAGE.iterdir():
        if path.is_file():
            texts += path.read_text()
    texts += " ".join(audit_page.REASONS.values())
    assert not FORBIDDEN.search(texts)


def test_first_look_without_used_groups_explains_the_result(audited, model):
    _, _, data = audited
    vit = load_model(model)
    images = command.open_images(vit, str(data))
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    shuffled = torch.tensor(images.labels)[order]
    found = library.audit(vit, images.pairs, shuffled)
    about = audit_page.About("colors", "data", True, images.names)
    look = audit_page.first_look(found, about)
    assert look["title"] == "Nothing found"
    assert look["groups"] == []
    assert "colors over the whole image" in look["words"]
