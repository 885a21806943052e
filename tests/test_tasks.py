"""Named data sets are read from files in exactly their published formats."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torchvision
from support import (
    PIXELS,
    clip_benchmark,
    encoded,
    imagenet,
    parquet,
    refuses,
    shown,
    tar,
    vitlens,
    write,
)

from vitlens.data import load
from vitlens.data.imageset import draw_rows
from vitlens.scores import validation_numbers
from vitlens.train.recipes import RECIPES
from vitlens_paper import TABLE_4
from vitlens_paper.evaluate.protocols import recipe_of
from vitlens_paper.tasks import TASKS, VTAB


def test_tasks_equal_those_of_vtab_and_the_paper():
    assert len(VTAB) == 19 and [
        sum(t.group == g for t in VTAB) for g in ("natural", "specialized", "structured")
    ] == [
        7,
        4,
        8,
    ]
    assert [t.classes for t in VTAB] == [
        102,
        100,
        47,
        102,
        37,
        397,
        10,
        2,
        10,
        45,
        5,
        8,
        6,
        6,
        16,
        16,
        4,
        18,
        9,
    ]
    still = {t.name.removeprefix("vtab/") for t in VTAB if not t.flip}
    uncut = {t.name.removeprefix("vtab/") for t in VTAB if not t.crop}
    assert still == {"dsprites-orientation", "dsprites-location", "smallnorb-azimuth"}
    assert uncut == {
        "clevr-count",
        "clevr-distance",
        "dmlab",
        "kitti-distance",
        "dsprites-location",
    }
    rows = {row.data for row in TABLE_4}
    assert (
        len(rows)
        == len({TASKS[name].recipe for name in ("imagenet", "cifar10", "pets", "vtab/dtd")})
        == 4
    )
    assert all(task.recipe in RECIPES for task in TASKS.values())
    name, forbidden = recipe_of("vtab/dsprites-location")
    plan = RECIPES[name].override(*forbidden)
    assert plan.augment.flip == 0 and (plan.resize or plan.image_size) == plan.image_size == 384
    assert recipe_of("vtab800/dtd") == ("finetune-vtab", []) and recipe_of("pets") == (
        "finetune-pets",
        [],
    )
    assert recipe_of("some/folder") == ("finetune-small", [])
    lines = vitlens("evaluate", "--list").stdout.splitlines()
    assert len(lines) == len(TASKS) and any(
        "dsprites-location" in x and "no flip and no crop" in x for x in lines
    )


@pytest.mark.parametrize("name", ["vtab/dsprites-orientation", "vtab/pcam"])
def test_load_vtab_copies_in_shards(tmp_path, name, monkeypatch):
    task = TASKS[name]
    folder = clip_benchmark(tmp_path, task)
    raw = task.raw_classes or task.classes
    train, valid, test = (load(name, split, root=tmp_path) for split in ("train", "valid", "test"))
    assert (len(train), len(valid), len(test)) == (1000, 200, 30)
    rows = draw_rows(1020, 1000, seed=0)
    assert rows[:6].tolist() == [704, 591, 717, 603, 703, 504], "with every version the same images"
    expected = [
        int(np.floor(i % raw / (raw / task.classes))) for i in rows.tolist()
    ]  # as VTAB's own code bins them
    assert train.labels.tolist() == expected and valid.labels.tolist() == expected[800:]
    assert train.images[3].equal(shown(PIXELS[int(rows[3]) % 7]))
    assert len(test.class_names) == task.classes and test.class_names[0] == (
        "0" if task.raw_classes else "class 0"
    )
    if task.raw_classes:
        eight = load(name.replace("vtab/", "vtab800/"), root=tmp_path)
        assert len(eight) == 800 and eight.images.equal(train.images[:800])
        return
    (
        folder / "test" / "1.tar"
    ).unlink()  # without a network the hub returns half a download without an error
    calls = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *name, **how: calls.append((name, how))
    )
    refuses(
        f"{task.source} is not in .* cannot be downloaded .*`hf download",
        load,
        name,
        "test",
        root=tmp_path,
    )
    ((call, options),) = calls
    assert call == (task.source.removeprefix("wds/"),) and options["local_dir"] == folder
    assert "test/*" in options["allow_patterns"] and "train/*" not in options["allow_patterns"]
    clip_benchmark(tmp_path, task, train=100)
    refuses("vtab/pcam .* 1,000 training images, but .* has 100", load, name, root=tmp_path)
    tar(folder / "test" / "0.tar", {"a.png": PIXELS[0], "a.cls": b"2"})
    refuses("Labels must lie in 0…1 .* from 0 to 2", load, name, "test", root=tmp_path)
    refuses(
        "A task of VTAB-1k is unknown, got .vtab/pacm.*must be one of vtab/caltech101, ",
        load,
        "vtab/pacm",
        root=tmp_path,
    )


def test_load_sun397_from_parquet(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    names = [f"scene {i}" for i in range(397)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    folder = tmp_path / "dpdl-benchmark" / "sun397" / "data"
    folder.mkdir(parents=True)
    for split, n in (("train", 1010), ("validation", 5), ("test", 9)):
        images = [{"bytes": PIXELS[i % 7], "path": None} for i in range(n)]
        rows = datasets.Dataset.from_dict(
            {"image": images, "label": [i % 397 for i in range(n)]}, features
        )
        rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)  # a folder of that name stands in for the hub
    train, test = (
        load("vtab/sun397", split, root=tmp_path / "cache") for split in ("train", "test")
    )
    assert train.labels.tolist() == (
        draw_rows(1010, 1000, seed=0) % 397
    ).tolist() and test.labels.tolist() == [*range(9)]
    assert train.class_names == tuple(names)


def described_textures(root: Path) -> None:
    (root / "dtd" / "dtd" / "labels").mkdir(parents=True)
    for split, n in (("train", 1001), ("val", 2), ("test", 4)):
        files = [f"texture{i % 47:02d}/{split}_{i:04d}.jpg" for i in range(n)]
        write(root / "dtd" / "dtd" / "images", {name: encoded(1, "JPEG", (8, 8)) for name in files})
        (root / "dtd" / "dtd" / "labels" / f"{split}1.txt").write_text("\n".join(files))


def test_load_vtab_task_has_torchvisions_test_images(tmp_path):
    described_textures(tmp_path)
    train, valid, test = (
        load("vtab/dtd", split, root=tmp_path) for split in ("train", "valid", "test")
    )
    assert (len(train), len(valid), len(test), len(train.class_names)) == (
        1000,
        200,
        4,
        TASKS["vtab/dtd"].classes,
    )
    assert test.labels.tolist() == [
        label for _, label in torchvision.datasets.DTD(tmp_path, split="test")
    ]


def test_load_imagenet_by_name_and_folder(tmp_path, monkeypatch):
    imagenet(tmp_path)
    test = load("imagenet", "test", root=tmp_path, size=8, stream=True, workers=0)
    assert test.labels.tolist() == [0, 1] and test.class_names[0] == "tench, Tinca tinca"
    assert "ILSVRC2012_val_00000002" in test.samples.name(1)
    folder = load(tmp_path, "test")
    assert folder.class_names == ("n01440764", "n01443537") and folder.labels.tolist() == [0, 1]
    write(tmp_path / "pets", {f"{c}/{i}.png": encoded(i) for c in "ab" for i in range(2)})
    monkeypatch.chdir(tmp_path)
    assert load("pets", "whole").class_names == ("a", "b")  # an existing folder comes first


def test_load_imagenet_without_its_development_kit(tmp_path):
    imagenet(tmp_path, per_class=2, first=7)
    (tmp_path / "meta.bin").unlink()
    write(tmp_path / "test", {"ILSVRC2012_test_00000001.JPEG": encoded(1, "JPEG")})
    names = "imagenet", "torch/ImageNet"
    for name in names:
        train = load(name, root=tmp_path, size=8)
        test = load(name, "whole", root=tmp_path, size=8, stream=True, workers=0)
        assert train.class_names == test.class_names == (
            "n01440764",
            "n01443537",
        ) and train.labels.tolist() == [0, 1]
        assert test.labels.tolist() == [0, 0, 1, 1]
        assert validation_numbers([test.samples.name(i) for i in range(4)]).tolist() == [
            6,
            7,
            8,
            9,
        ], "as ReaL needs"
    (tmp_path / "val").rename(tmp_path / "elsewhere")
    for missing, words in (
        ("test", "divided into train, but its valid split must be named valid or"),
        ("train", "torch/.* is not in .* with the archive of its development kit"),
    ):
        shutil.rmtree(tmp_path / missing)
        for name in names:
            refuses(words, load, name, "valid", root=tmp_path)


def test_load_imagenet_ignores_folders_of_other_data_sets(tmp_path):
    write(tmp_path / "flowers" / "jpg", {f"{i}.png": encoded(i) for i in range(4)})
    write(tmp_path / "pets" / "images", {f"{i}.png": encoded(i) for i in range(4)})
    write(tmp_path / "test", {"ILSVRC2012_test_00000001.JPEG": encoded(1, "JPEG")})
    refuses("is not in", load, "imagenet", "train", root=tmp_path, size=8)


def written(folder: Path, kind: str, splits: dict[str, list[int]]) -> Path:
    """Write a data set of a `kind` with these labels, like published copies."""
    for split, labels in splits.items():
        images = [encoded(100 * len(split) + i) for i in range(len(labels))]
        if kind == "folder":
            write(folder / split, {f"{'ab.'[n]}/{i}.png": images[i] for i, n in enumerate(labels)})
        elif kind == "wds":
            content = {f"{i}.cls": str(n).encode() for i, n in enumerate(labels)}
            content |= {f"{i}.png": image for i, image in enumerate(images)}
            tar(folder / f"{split}-0.tar", dict(sorted(content.items())))
        else:
            parquet(folder / f"{split}-00000-of-00001.parquet", images, labels)
    return folder


@pytest.mark.parametrize("kind", ["folder", "parquet", pytest.param("wds", marks=pytest.mark.slow)])
def test_load_replaces_an_unlabeled_test_split_by_validation(tmp_path, kind):
    """Published copies of ImageNet have labels of −1, or a flat folder."""
    root = tmp_path / "cache"
    source = written(
        tmp_path / "set", kind, {"train": [0, 1], "validation": [1, 0], "test": [-1, -1]}
    )
    valid = load(source, "valid", root=root)
    for split in ("test", "whole"):
        found = load(source, split, root=root)
        assert found.images.equal(valid.images)
        assert kind == "folder" or "no labels, so its validation" in found.note
    for path in source.glob("validation*"):
        path.rename(tmp_path / "gone")
    for split in ("valid", "test", "whole"):
        refuses("holds no image with a label|split must be named", load, source, split, root=root)


@pytest.mark.parametrize("kind", [pytest.param("parquet", marks=pytest.mark.slow), "wds"])
def test_load_numbers_classes_equally_in_all_splits(tmp_path, kind):
    root = tmp_path / "cache"
    source = written(
        tmp_path / "set", kind, {"train": [0, 1, 2], "validation": [0, 1], "test": [3, 0]}
    )
    names = [load(source, split, root=root).class_names for split in ("train", "valid", "test")]
    assert names == [
        ("0", "1", "2"),
        ("0", "1", "2"),
        ("0", "1", "2", "3"),
    ]  # a class that training lacks is added
    for path in source.glob("train*"):
        path.rename(tmp_path / "gone")
    assert load(source, "valid", root=root).class_names == ("0", "1")
