"""Free photographs: licenses, sizes, and the draw for Fig. 14."""

import random
import struct
import zlib

import pandas as pd
import pytest
import torch
from book import split_photographs
from PIL import Image
from support import CHECKPOINTS

from experiments import photographs
from vitlens.data import load

DATA = CHECKPOINTS.parent
FREE = {
    "public domain",
    "CC0-1.0",
    "CC-BY-2.0",
    "CC-BY-3.0",
    "CC-BY-4.0",
    "CC-BY-SA-3.0",
    "CC-BY-SA-4.0",
}
TABLE = photographs.read_table()


def test_every_photograph_has_a_free_license_and_an_author():
    assert TABLE["name"].is_unique and set(TABLE["license"]) <= FREE
    for column in ("package", "path", "author", "source"):
        assert (TABLE[column] != "").all()
    stored = [path.stem for path in (DATA / "photographs").glob("*/*.jpg")]
    stored += [path.stem[3:] for path in (DATA / "figure14").glob("*.jpg")]
    assert set(stored) <= set(TABLE["name"])


def test_figure_14_is_drawn_from_the_list_with_seed_14():
    listed = sorted(TABLE["name"][TABLE["listed"] == "yes"])
    assert len(listed) >= 40
    expected = random.Random(14).sample(listed, 24)
    assert photographs.drawn(TABLE) == expected
    files = sorted((DATA / "figure14").glob("*.jpg"))
    numbered = [f"{k:02d}-{name}" for k, name in enumerate(expected)]
    assert [path.stem for path in files] == numbered
    assert sum(path.stat().st_size for path in files) < 500_000
    for path in files:
        with Image.open(path) as image:
            assert image.size == (224, 224) and image.mode == "RGB"


def test_each_photograph_of_figure_14_has_a_box():
    boxes = pd.read_csv(DATA / "figure14.csv")
    files = sorted((DATA / "figure14").glob("*.jpg"))
    assert list(boxes["photograph"]) == [path.stem for path in files]
    sides = boxes[["left", "top", "right", "bottom"]]
    assert ((sides >= 0) & (sides <= 1)).all(axis=None)
    assert (boxes["right"] > boxes["left"]).all() and (boxes["bottom"] > boxes["top"]).all()
    assert boxes["subject"].str.len().min() > 2


def test_labeled_photographs_open_as_a_data_set():
    kinds = TABLE["kind"][TABLE["kind"] != ""].value_counts()
    assert len(kinds) >= 5 and (kinds >= 20).all()
    files = sorted((DATA / "photographs").glob("*/*.jpg"))
    assert sum(path.stat().st_size for path in files) < 1_000_000
    in_table = {(row.kind, row.name) for row in TABLE[TABLE["kind"] != ""].itertuples()}
    assert {(path.parent.name, path.stem) for path in files} == in_table
    for path in files:
        with Image.open(path) as image:
            assert min(image.size) == 160
    train, valid = (load(DATA / "photographs", split, size=32) for split in ("train", "valid"))
    assert train.class_names == tuple(sorted(kinds.index))
    assert len(train) + len(valid) == len(files)


def resource_file(version: int, stored: bytes, flags: int) -> bytes:
    """A file of Qt resources with the one entry /folder/photo.jpg."""
    names = b""
    offsets = []
    for name in ("folder", "photo.jpg"):
        offsets.append(len(names))
        names += struct.pack(">HI", len(name), 0) + name.encode("utf-16-be")
    times = b"" if version == 1 else bytes(8)
    tree = struct.pack(">IHII", 0, photographs.DIRECTORY, 1, 1) + times
    tree += struct.pack(">IHII", offsets[0], photographs.DIRECTORY, 1, 2) + times
    tree += struct.pack(">IHHHI", offsets[1], flags, 0, 0, 0) + times
    data = struct.pack(">I", len(stored)) + stored
    tree_at = 20
    data_at = tree_at + len(tree)
    names_at = data_at + len(data)
    return b"qres" + struct.pack(">4I", version, tree_at, data_at, names_at) + tree + data + names


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("compressed", [False, True])
def test_resources_reads_entries(tmp_path, version, compressed):
    content = b"a photograph" * 20
    stored = struct.pack(">I", len(content)) + zlib.compress(content) if compressed else content
    file = tmp_path / "activity.rcc"
    file.write_bytes(resource_file(version, stored, photographs.COMPRESSED * compressed))
    assert dict(photographs.resources(file)) == {"/folder/photo.jpg": content}
    file.write_bytes(b"zip" + bytes(20))
    with pytest.raises(ValueError, match="must be a file of Qt resources"):
        photographs.resources(file)


def test_missing_package_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="lacks .* of gcompris-qt-data 3.1-2"):
        photographs.open_photographs(TABLE, tmp_path)


def test_split_photographs_puts_a_quarter_of_each_class_aside():
    learn, test = split_photographs(DATA / "photographs", size=16)
    assert (
        learn.labels.bincount().tolist() == [18] * 5 and test.labels.bincount().tolist() == [6] * 5
    )
    tested = {image.numpy().tobytes() for image in test.images}
    assert not tested & {image.numpy().tobytes() for image in learn.images}
    assert "120 images of 5 classes. This chapter uses all: 90 to learn from, 30" in learn.note
    other, _ = split_photographs(DATA / "photographs", size=16, seed=1)
    assert not torch.equal(other.images, learn.images)


def test_split_photographs_uses_a_part_of_a_large_folder_and_the_split_of_a_divided_one(tmp_path):
    colors = iter(range(256))
    for place in ("train/a", "train/b", "test/a", "test/b"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        for number in range(8):
            red = next(colors)
            image = Image.new("RGB", (8, 8), (red, 0, 0))
            image.save(folder / f"{number}.png")
    learn, test = split_photographs(tmp_path, size=8, most=4)
    assert "32 images of 2 classes. This chapter uses at most 4 of each class: 6" in learn.note
    assert learn.labels.bincount().tolist() == [3, 3] and test.labels.bincount().tolist() == [1, 1]
    assert learn.images[:, 0].max() < 16 <= test.images[:, 0].min(), "test images are from test/"


def test_split_photographs_rejects_folders_without_classes_and_broken_files(tmp_path):
    with pytest.raises(ValueError, match="no folders of images, one for each class"):
        split_photographs(DATA / "photographs" / "fish", size=8)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("RGB", (64, 64), (number, 9, 9)).save(tmp_path / name / f"{number}.jpg")
    broken = tmp_path / "a" / "0.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    with pytest.raises(ValueError, match="0.jpg .* cannot be decoded. Repair or replace it."):
        split_photographs(tmp_path, size=8)
    for file in (tmp_path / "b").iterdir():
        file.unlink()
    (tmp_path / "b").rmdir()
    with pytest.raises(ValueError, match="must hold two or more class folders, got 1"):
        split_photographs(tmp_path, size=8)
