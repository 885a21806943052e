"""The training images of a model are recognized by their content, wherever model and images are and however named."""

import hashlib
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forms import cannot_occur, form
from PIL import Image
from safetensors.torch import load_file
from support import encoded, parquet, refuses, tar, vitlens, write
from timm.models import save_for_hf

from vitlens import load_model
from vitlens.data import load
from vitlens.digests import TrainedOn, read_trained_on, stored_digest
from vitlens.train import run
from vitlens_paper.evaluate import ablation, evaluate

CLASSES = ("cat", "dog")
COUNT = 60
HAND = "count by hand: files whose BLAKE2b number is below a tenth"


def content(seed: int = 0) -> dict[str, bytes]:
    """Encoded images of 16 pixels by path, COUNT of each class."""
    return {
        f"{name}/{i:02d}.png": encoded(seed + 1000 * n + i, size=(16, 16))
        for n, name in enumerate(CLASSES)
        for i in range(COUNT)
    }


def held_out(names) -> list[str]:
    """Names of the files that a run keeps for validation, by the definition."""
    digests = {name: hashlib.blake2b(name.encode(), digest_size=6).digest() for name in names}
    return [name for name, d in digests.items() if int.from_bytes(d, "big") / 2**48 < 0.1]


OUT = held_out(content())


def train(folder: Path, data: Path, **options) -> Path:
    options = {"tiny": True, "quiet": True, "device": "cpu", "watch": 0, "workers": 0} | options
    run("digits", data, folder, overrides=["train_images=0"], **options)
    return folder / "model"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """(model, data) of a run on an undivided folder."""
    folder = tmp_path_factory.mktemp("trained")
    data = write(folder / "data", content())
    return train(folder / "run", data), data


def scored(model, data, **options) -> tuple[int, str]:
    """Number of scored images and the record's note, which is printed too."""
    printed = []
    options = {"protocol": "top1", "workers": 0, "device": "cpu"} | options
    record, *_ = evaluate(model, str(data), say=printed.append, **options)
    for sentence in ("left out", "No record", "earlier version", "not recognized"):
        assert (sentence in (record.note or "")) == (sentence in " ".join(printed))
    return record.images, record.note or ""


def assert_held_out(model, data, **options):
    images, note = scored(model, data, **options)
    assert images == len(OUT)
    assert f"{2 * COUNT - len(OUT)} of {2 * COUNT} images are left out" in note


@form(1, door="command: evaluate, a link to the data", case="--data link", right=HAND)
def test_link_to_the_data(trained, tmp_path):
    model, data = trained
    (tmp_path / "link").symlink_to(data)
    out = tmp_path / "r.json"
    done = vitlens(
        *("evaluate", model, "--data", f"{tmp_path}/./link/", "--out", out),
        *("--device", "cpu", "--workers", 0),
    )
    (record,) = json.loads(out.read_text())
    assert record["images"] == len(OUT) and "images are left out" in record["note"]
    assert "images are left out" in done.stderr


@form(1, door="folder: copied, files renamed and in other folders", case="b/x/7.PNG", right=HAND)
def test_renamed_copies_in_another_order(trained, tmp_path):
    model, _ = trained
    copies = {}
    for i, (name, data) in enumerate(reversed(content().items())):
        copies[f"{name[:3]}/deeper/{i:03d}.PNG"] = data
    assert_held_out(model, write(tmp_path, copies))


@form(1, door="folder: a part of the data among new images", case="hard links", right=HAND)
def test_hard_links_of_some_images_among_new_ones(trained, tmp_path):
    model, data = trained
    write(tmp_path, {name: other for name, other in content(seed=5000).items()})
    some = [name for name in content() if name[-5] in "123"]
    for name in some:
        os.link(data / name, tmp_path / name.replace("/", "/old"))
    images, note = scored(model, tmp_path)
    assert images == 2 * COUNT + len(held_out(some)) and "are left out" in note


@form(1, door="Parquet", case="the files' bytes in a table", right=HAND)
def test_parquet_of_the_images(trained, tmp_path):
    labels = [CLASSES.index(name[:3]) for name in content()]
    parquet(tmp_path / "d" / "test.parquet", list(content().values()), labels, list(CLASSES))
    assert_held_out(trained[0], tmp_path / "d", root=tmp_path / "cache")


@form(1, door="WebDataset", case="shards of the files, no names of classes", right=HAND)
def test_shards_of_the_images(trained, tmp_path):
    members = {}
    for i, (name, data) in enumerate(content().items()):
        members |= {f"s{i}.png": data, f"s{i}.cls": str(CLASSES.index(name[:3])).encode()}
    tar(tmp_path / "test-0.tar", members)
    (tmp_path / "classes.json").write_text(json.dumps(CLASSES))
    assert_held_out(trained[0], tmp_path)


@form(1, door="folder: saved again", case="PNG files saved as BMP and as lossless WebP", right=HAND)
def test_images_saved_again_without_loss(trained, tmp_path):
    for i, (name, data) in enumerate(content().items()):
        path = (tmp_path / name).with_suffix((".bmp", ".webp")[i % 2])
        path.parent.mkdir(exist_ok=True)
        Image.open(io.BytesIO(data)).save(path, **({"lossless": True} if i % 2 else {}))
    assert_held_out(trained[0], tmp_path)


@form(1, door="named data of a plugin", case="images held as pixels", right=HAND)
def test_registered_data(trained, monkeypatch):
    from vitlens.data import SOURCES, Samples, register

    monkeypatch.setattr("vitlens.data.sources.SOURCES", SOURCES)
    images = [Image.open(io.BytesIO(data)) for data in content().values()]
    labels = [CLASSES.index(name[:3]) for name in content()]
    register("held", lambda *_: Samples(images, labels, CLASSES, range(len(labels))))
    try:
        assert_held_out(trained[0], "held")
    finally:
        del SOURCES["held"]


@form(1, door="model: folder moved and renamed", case="without its run", right=HAND)
def test_moved_model(trained, tmp_path):
    moved = shutil.copytree(trained[0], tmp_path / "published")
    assert_held_out(moved, trained[1])


@form(1, door="model: local-dir: and a file of the folder", case="relative path", right=HAND)
def test_other_names_of_the_model(trained, monkeypatch):
    model, data = trained
    monkeypatch.chdir(model.parent)
    assert_held_out("local-dir:model", data)
    assert_held_out("./model/config.json", Path("..") / "data")
    (model.parent.parent / "link").symlink_to(model)
    assert_held_out(model.parent.parent / "link", data)


@form(1, door="Python: a module", case="opened by load_model and deep-copied", right=HAND)
def test_opened_model(trained):
    import copy

    assert_held_out(copy.deepcopy(load_model(trained[0])), trained[1])


@form(1, door="model: checkpoint=, safetensors", case="exported file copied elsewhere", right=HAND)
def test_weights_alone(trained, tmp_path):
    model, data = trained
    file = shutil.copy(model / "model.safetensors", tmp_path / "best.safetensors")
    opened = load_model(model, checkpoint=file)
    assert_held_out(opened, data)
    record = read_trained_on(file)
    assert record.complete and record.images == 2 * COUNT - len(OUT)


@form(1, door="model: a checkpoint of the run", case="checkpoints/step-N.safetensors", right=HAND)
def test_checkpoint_of_the_run(trained, tmp_path):
    model, data = trained
    (step, *_) = sorted((model.parent / "checkpoints").glob("*.safetensors"))
    record = read_trained_on(step)
    files = [stored_digest(data / name) for name in content()]
    known = record.contains(np.array(files, dtype=np.uint64), np.zeros(len(files), np.uint64))
    assert (~known).sum() == len(OUT)


@pytest.mark.slow
@form(1, door="protocols on features", case="knn on a divided copy", right=HAND)
def test_divided_copy(trained, tmp_path):
    names = sorted(content())
    for i, name in enumerate(names):
        part = "train" if i % 2 else "test"
        write(tmp_path, {f"{part}/{name}": content()[name]})
    images, _ = scored(trained[0], tmp_path, protocol="knn")
    assert images == len(held_out(names[::2]))


@form(1, door="a run that starts from the model", case="its images are the base's", right=HAND)
def test_images_of_the_model_that_a_run_started_from(trained, tmp_path):
    other = write(tmp_path / "other", content(seed=7000))
    tuned = tmp_path / "tuned"
    run(
        *("finetune-small", other, tuned),
        model=str(trained[0]),
        overrides=["epochs=1", "batch_size=32", "image_size=16"],
        **{"quiet": True, "device": "cpu", "watch": 0, "workers": 0},
    )
    assert_held_out(tuned / "model", trained[1])
    assert scored(tuned / "model", other)[0] == len(OUT)


@form(1, door="a run of an earlier version", case="data moved, record has checksums", right=HAND)
def test_record_of_an_earlier_version(trained, tmp_path):
    model, data = trained
    run_folder = shutil.copytree(model.parent, tmp_path / "run")
    old = run_folder / "model"
    (old / "trained_on.npy").unlink()
    opened = load_model(model)
    weights = torch.load(save(opened, tmp_path / "w.pth"))
    from safetensors.torch import save_file

    save_file(weights, old / "model.safetensors", {"format": "pt"})
    account = json.loads((old / "training.json").read_text())
    account["pictures"] = account["pictures"].split("-")[0]
    (old / "training.json").write_text(json.dumps(account))
    moved = shutil.copytree(data, tmp_path / "moved")
    assert_held_out(old, moved)
    (moved / "cat" / "00.png").unlink()
    images, note = scored(old, moved)
    assert images == 2 * COUNT - 1 and "earlier version" in note


def save(model, path: Path) -> Path:
    torch.save(model.state_dict(), path)
    return path


@form(1, door="model: no record", case="weights saved by hand", right="the note in record, screen")
def test_unknown_training_images_are_noted(trained, tmp_path):
    model, data = trained
    changed = load_model(model)
    changed.head.bias.data += 1
    file = save(changed, tmp_path / "w.pth")
    opened = load_model(model, checkpoint=file)
    images, note = scored(opened, data)
    assert images == 2 * COUNT and "No record of the images" in note
    bare = tmp_path / "bare"
    opened = load_model(model)
    save_for_hf(opened, bare, model_args=dict(opened.pretrained_cfg.get("model_args", {})))
    assert read_trained_on(bare) is None


@form(1, door="all images are training images", case="a folder of them", right="refused")
def test_only_training_images_are_refused(trained, tmp_path):
    trained_on = {name: data for name, data in content().items() if name not in OUT}
    words = f"trained on all {len(trained_on)} images"
    refuses(words, scored, trained[0], write(tmp_path, trained_on))


@form(1, door="train --resume", case="5 of 120 images replaced", right="the five names")
def test_resume_names_replaced_images(tmp_path):
    data = write(tmp_path / "data", content())
    options = {"overrides": ["epochs=40"], "tiny": True, "quiet": True, "device": "cpu", "watch": 0}
    run("digits", data, tmp_path / "run", max_minutes=1e-6, **options)
    train_names = [name for name in content() if name not in OUT]
    replaced = train_names[50:55]
    write(data, {name: encoded(99, size=(16, 16)) for name in replaced})
    words = f"5 of {len(train_names)} have another content: {', '.join(sorted(replaced))}"
    refuses(words, run, "", "", tmp_path / "run", resume=True, quiet=True, device="cpu", watch=0)
    write(data, {name: content()[name] for name in replaced})
    os.utime(data / replaced[0], (1, 1))  # the time of a file is not its content
    moved = data.rename(tmp_path / "moved")
    run("", moved, tmp_path / "run", resume=True, quiet=True, device="cpu", watch=0, workers=0)


@form(1, door="large files", case="an edit that keeps the size", right="another digest")
def test_edits_that_keep_the_size(tmp_path):
    """A block in the middle is changed. BMP and TIFF are read whole, PNG and JPEG in part."""
    pixels = np.random.default_rng(0).integers(0, 256, (192, 192, 3), dtype=np.uint8)
    edited = pixels.copy()
    edited[64:72, 64:72] ^= 255
    for kind in ("bmp", "png", "jpeg", "tiff"):
        found = set()
        for array in (pixels, edited):
            file = tmp_path / f"a.{kind}"
            Image.fromarray(array).save(file, **({"quality": 100} if kind == "jpeg" else {}))
            assert file.stat().st_size > 32 * 1024
            assert stored_digest(file) == stored_digest(file.read_bytes())
            found.add(stored_digest(file))
        assert len(found) == 2, kind


@form(1, door="command: inspect --beside", case="the model copied elsewhere", right="refused")
def test_beside_its_own_copy(trained, tmp_path):
    copied = shutil.copytree(trained[0], tmp_path / "other")
    arguments = ("inspect", trained[0], "--out", tmp_path / "figures", "--beside")
    done = vitlens(*arguments, copied, expect=2)
    assert "are the same model" in done.stderr and not (tmp_path / "figures").exists()


@form(
    1, door="finetune: runs by content", case="model and data moved, repeated", right="no training"
)
def test_finished_runs_are_found_after_a_move(trained, tmp_path):
    settings = ["epochs=1", "batch_size=32", "image_size=16"]
    data = write(tmp_path / "data", content(seed=3000))
    options = {"protocol": "finetune", "workers": 0, "device": "cpu", "say": str}
    options |= {"settings": settings, "runs": tmp_path / "runs"}
    (first,) = evaluate(str(trained[0]), str(data), **options)
    model = shutil.copytree(trained[0], tmp_path / "other")
    moved = data.rename(tmp_path / "moved")
    before = sorted((tmp_path / "runs").rglob("training.json"))
    (again,) = evaluate(str(model), str(moved), **options)
    assert sorted((tmp_path / "runs").rglob("training.json")) == before and len(before) == 2
    assert (first.value, first.place, first.weights) == (again.value, again.place, again.weights)
    (moved / "cat" / "00.png").write_bytes(encoded(1, size=(16, 16)))
    (other,) = evaluate(str(model), str(moved), **options)
    assert other.place != first.place


def test_records_of_some_images_are_incomplete():
    assert not TrainedOn(None, 5).complete


cannot_occur(
    1, door="page and app", reason="they show images that the user gives and score nothing"
)


@form(1, door="Python: ablation.effects, an ImageSet", case="images of load", right=HAND)
def test_ablation_of_a_loaded_set(trained):
    model, data = trained
    printed = []
    options = {"ways": "zero", "progress": False, "workers": 0, "device": "cpu"}
    images = load(data, "whole", size=8)
    table = ablation.effects(str(model), images, say=printed.append, **options)
    assert table.images.unique().tolist() == [len(OUT)]
    assert "are left out" in " ".join(printed)
    bare = replace(images, digests=None)
    table = ablation.effects(str(model), bare, say=printed.append, **options)
    assert table.images.unique().tolist() == [2 * COUNT] and "cannot be compared" in " ".join(
        printed
    )


@form(1, door="folder: copies with loss", case="JPEG quality 95, 12 of 16 pixels", right="the note")
def test_copies_with_loss_are_noted(trained, tmp_path):
    for i, (name, data) in enumerate(content().items()):
        path = (tmp_path / name).with_suffix(".jpg")
        path.parent.mkdir(exist_ok=True)
        Image.open(io.BytesIO(data)).resize((16 - 4 * (i % 2),) * 2).save(path, quality=95)
    images, note = scored(trained[0], tmp_path)
    assert images == 2 * COUNT and "compressed with loss are not recognized" in note


@form(1, door="model: checkpoint=, saved again", case=".pth beside, and elsewhere", right=HAND)
def test_weights_saved_again_without_a_record(trained, tmp_path):
    model, data = trained
    weights = load_file(model / "model.safetensors")
    copy = shutil.copytree(model, tmp_path / "copy")
    for file in (tmp_path / "w.pth", copy / "w.pth"):
        torch.save({"state_dict": weights}, file)
        assert_held_out(model, data, checkpoint=file)
    torch.save({name: value + 1 for name, value in weights.items()}, tmp_path / "w.pth")
    images, note = scored(model, data, checkpoint=tmp_path / "w.pth")
    assert images == 2 * COUNT and "No record" in note


@form(1, door="protocols on features, train and test folders", case="copies", right="count by hand")
def test_images_of_both_splits_are_noted(trained, tmp_path):
    new = content(seed=5000)
    for split, names in (("train", list(new)), ("test", [name for name in new if "0.png" in name])):
        write(tmp_path / split, {f"{name[:3]}/{split}{name[4:]}": new[name] for name in names})
    images, note = scored(trained[0], tmp_path, protocol="knn")
    assert images == 12 and "12 of 12 test images are also among the training images" in note
