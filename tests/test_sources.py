"""Every kind of source lists the right images, labels and splits; other readers of the same files say the same."""

import gzip
import hashlib
import json
import shutil
import struct
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from data_support import (
    assert_streams,
    encoded,
    files,
    hard_link,
    in_memory,
    parquet,
    shown,
    tar,
    unreachable,
    write,
)
from timm.data import create_dataset

from vitlens.data import ImageSet, load
from vitlens.data.named import TORCH
from vitlens.data.samples import VALID_SHARE, place
from vitlens.reports.pictures import image_files


def by_timm(dataset) -> tuple[torch.Tensor, list[int]]:
    images, labels = zip(*list(dataset), strict=True)
    return torch.stack([torch.from_numpy(np.array(i.convert("RGB"))).permute(2, 0, 1) for i in images]), list(labels)


def assert_same(ours: ImageSet, images: torch.Tensor, labels: list[int]) -> None:
    assert torch.equal(ours.images, images) and ours.labels.tolist() == labels


# Folders and tar files


def test_folders_of_classes_are_divided_by_the_names_of_their_files(tmp_path):
    write(tmp_path, files(40))
    train, valid = load(tmp_path), load(tmp_path, "valid")
    assert train.class_names == valid.class_names == ("ant", "bee", "cat")
    assert len(train) + len(valid) == 120 and 0.04 < len(valid) / 120 < 0.2
    assert (torch.bincount(valid.labels, minlength=3) > 0).all()
    both = torch.cat([train.images, valid.images]).flatten(1)
    assert len(torch.unique(both, dim=0)) == 120  # every image on one side
    assert "about a tenth of each class" in train.note and train.note == valid.note
    assert load(write(tmp_path / "copy", files(40)), "valid").images.equal(valid.images)


def sides(folder: Path) -> dict[bytes, str]:
    return {image.numpy().tobytes(): split for split in ("train", "valid") for image in load(folder, split).images}


def test_a_file_keeps_its_side_when_others_come(tmp_path):
    before = sides(write(tmp_path, files(60)))
    write(tmp_path, {f"bee/new{i}.png": encoded(9000 + i) for i in range(30)})
    after = sides(tmp_path)
    assert len(after) == len(before) + 30 and all(after[image] == side for image, side in before.items())


@pytest.mark.parametrize("per_class", [2, 3, 5])
def test_small_classes_are_on_both_sides(tmp_path, per_class):
    write(tmp_path, files(per_class))
    for split in ("train", "valid"):
        assert set(load(tmp_path, split).labels.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("low", [True, False])
def test_a_class_whose_names_all_fall_to_one_side_is_on_both(tmp_path, low):
    names = [name for i in range(200) if (place(name := f"ant/{i}.png") < VALID_SHARE) == low][:4]
    write(tmp_path, {name: encoded(i) for i, name in enumerate(names)})
    assert (len(load(tmp_path)), len(load(tmp_path, "valid"))) == ((1, 3) if low else (3, 1))


def test_where_a_name_falls_is_for_good():
    """What is kept for validation once must be so with every version, or results would not compare."""
    digest = hashlib.blake2b(b"ant/0.png", digest_size=6).hexdigest()
    assert place("ant/0.png") == int(digest, 16) / 16**12 == 0.6468104482194263


def test_a_class_of_one_image_is_refused_by_name(tmp_path):
    write(tmp_path, files(4) | {"dog/only.png": encoded(1)})
    with pytest.raises(ValueError, match="class 'dog' of .* has a single image"):
        load(tmp_path)


def test_a_folder_with_train_only_is_not_divided(tmp_path):
    write(tmp_path / "train", files(3))
    assert len(load(tmp_path)) == 9 and not load(tmp_path).note
    with pytest.raises(ValueError, match="neither Parquet shards nor a folder named valid"):
        load(tmp_path, "valid")


def test_classes_without_images_are_told(tmp_path):
    write(tmp_path, {f"{split}/{name}": data for split in ("train", "val") for name, data in files(3).items()})
    assert not load(tmp_path, "valid").note
    for path in (tmp_path / "val" / "bee").iterdir():
        path.unlink()
    (tmp_path / "train" / "dog").mkdir()
    assert load(tmp_path).note == f"{tmp_path / 'train'} holds no image of 1 of 4 classes, such as 'dog'."
    assert load(tmp_path, "valid").note == f"{tmp_path / 'val'} holds no image of 2 of 4 classes, such as 'bee'."


def test_ids_are_no_numbers_of_classes(tmp_path):
    parquet(tmp_path / "train-00000-of-00001.parquet", [encoded(0), encoded(1)], [7, 2_000_000])
    with pytest.raises(ValueError, match=r"label of 2,000,000 among 2 images is no number of a class"):
        load(tmp_path)


@pytest.mark.parametrize("names", [("Train", "Val"), ("Training", "Testing"), ("TRAIN", "Test")])
def test_splits_in_capital_letters_or_spelled_out(tmp_path, names):
    """As many data sets of Kaggle have them. They were two classes, with validation images among those for training."""
    content = {f"{name}/{file}": data for name in names for file, data in files(3).items()}
    expected = load(write(tmp_path / "plain", files(3)), "whole")
    for source in (write(tmp_path / "folder", content), tar(tmp_path / "x.tar", content)):
        for split in ("train", "valid"):
            found = load(source, split)
            assert found.class_names == expected.class_names and found.images.equal(expected.images) and not found.note


def test_a_fingerprint_is_of_the_pictures_and_not_of_where_they_lie(tmp_path):
    content = files(30)
    sources = write(tmp_path / "a", content), write(tmp_path / "b", content), tar(tmp_path / "c.tar", content)
    found = {load(source, size=8, stream=stream).pictures for source in sources for stream in (False, True)}
    other = write(tmp_path / "d", {name: encoded(999 + i) for i, name in enumerate(content)})
    assert len(found) == 1 and load(other).pictures not in found
    assert load(other).labels.equal(load(sources[0]).labels)
    parquet(tmp_path / "e" / "train-0.parquet", [*content.values()], [0] * len(content))
    held, streamed = (load(tmp_path / "e", size=8, stream=stream, root=tmp_path).pictures for stream in (False, True))
    assert held == streamed


def test_what_lies_in_hidden_folders_is_no_data(tmp_path):
    content = files(4)
    copies = {f"{name.split('/')[0]}/.ipynb_checkpoints/{name.split('/')[1]}": data for name, data in content.items()}
    copies |= {f"__MACOSX/{name}": data for name, data in content.items()} | {".trash/ant/0.png": encoded(0)}
    one = write(tmp_path / "a", content)
    assert load(tar(tmp_path / "up.tar", {f"../{name}": data for name, data in content.items()})).class_names
    for source in (write(tmp_path / "b", content | copies), tar(tmp_path / "c.tar", content | copies)):
        for split in ("train", "valid", "whole"):
            assert load(source, split).class_names == load(one, split).class_names
            assert load(source, split).images.equal(load(one, split).images)
    assert [name for name, _ in image_files(tmp_path / "b")] == sorted(content)


def test_a_class_that_is_called_like_a_split_is_explained(tmp_path):
    write(tmp_path, {f"{name}/{i}.png": encoded(i) for name in ("car", "train") for i in range(4)})
    for split in ("train", "valid", "test", "whole"):
        with pytest.raises(ValueError, match="folder named train, which stands for a split, .* give it another name"):
            load(tmp_path, split)


def test_folders_beside_those_of_splits_are_told(tmp_path):
    content = {f"{split}/{name}": data for split in ("train", "Test") for name, data in files(3).items()}
    more = content | {f"dog/{name}": data for name, data in files(3).items()}
    for source in (write(tmp_path / "a", more), tar(tmp_path / "b.tar", more)):
        names = "Test and train" if source.is_dir() else "test and train"
        first = "dog" if source.is_dir() else "ant"
        found = load(source)
        assert found.note == f"{source} is read by its folders {names}; {first!r} and other folders do not count."
        assert len(found) == 9
    (tmp_path / "a" / "docs").mkdir()
    assert "dog" in load(tmp_path / "a").note and "docs" not in load(tmp_path / "a").note
    classes = {f"{name}/{i}.png": encoded(i) for name in ("dog", "training") for i in range(4)}
    with pytest.raises(ValueError, match="folder named training, which stands for a split, .* give it another name"):
        load(tar(tmp_path / "c.tar", classes))


def test_training_shards_number_the_classes_whatever_they_are_called(tmp_path):
    for name, labels in {"training": [0, 1, 2, 3], "testing": [0, 2]}.items():
        parquet(tmp_path / f"{name}-00000-of-00001.parquet", [encoded(i) for i in labels], labels)
    assert load(tmp_path).class_names == load(tmp_path, "valid").class_names == ("0", "1", "2", "3")


def test_a_tar_file_holds_what_its_folder_held_and_what_timm_reads(tmp_path):
    path = tar(tmp_path / "flat.tar", files(30))
    folder = write(tmp_path / "flat", files(30))
    for split in ("train", "valid"):
        one, other = load(path, split), load(folder, split)
        assert one.images.equal(other.images) and one.labels.equal(other.labels) and one.note
    images, labels = by_timm(create_dataset("", root=str(path)))
    both = [load(path, split) for split in ("train", "valid")]
    mine = {image.numpy().tobytes(): int(label) for s in both for image, label in zip(s.images, s.labels, strict=True)}
    assert mine == {image.numpy().tobytes(): label for image, label in zip(images, labels, strict=True)}


def test_splits_inside_a_tar_file_or_one_tar_file_a_split(tmp_path):
    content = {f"top/train/{name}": data for name, data in files(3).items()}
    content |= {f"top/val/{name}": data for name, data in files(2).items()}
    one = tar(tmp_path / "one.tar", content)
    tar(tmp_path / "two" / "train.tar", files(3))
    tar(tmp_path / "two" / "val.tar", {f"./{name}": data for name, data in files(2).items()})
    for split, n in (("train", 3), ("valid", 2)):
        folder = write(tmp_path / f"{n}" / "train", files(n)).parent
        for source in (one, tmp_path / "two"):
            loaded = load(source, split)
            assert_same(loaded, load(folder).images, [0] * n + [1] * n + [2] * n)
            assert loaded.class_names == ("ant", "bee", "cat") and not loaded.note


def test_one_tar_file_a_class_and_tar_files_in_a_tar_file_as_timm_reads_them(tmp_path):
    by_class: dict[str, dict[str, bytes]] = {}
    for name, data in files(4).items():
        by_class.setdefault(name.split("/")[0], {})[name.split("/")[1].replace("0", name[0])] = data
    for name, content in by_class.items():
        tar(tmp_path / "many" / "train" / f"{name}.tar", content)
    nested = tar(tmp_path / "train.tar", {f"{name}.tar": in_memory(content) for name, content in by_class.items()})
    expected = by_timm(create_dataset("", root=str(nested)))
    assert_same(load(tmp_path / "many"), *expected)
    (tmp_path / "nested").mkdir()
    nested.rename(tmp_path / "nested" / "train.tar")
    assert_same(load(tmp_path / "nested"), *expected)


@pytest.mark.parametrize("content, message", [
    (lambda whole: whole[: len(whole) // 2], "bad.tar is not a whole, uncompressed tar"),
    (gzip.compress, "bad.tar is not a whole, uncompressed tar"),
    (lambda _: in_memory({"a.txt": b""}), "holds no image"),
    (lambda _: in_memory({"a.png": b""}), "a.png, which lies in no folder that names its class"),
    (lambda _: in_memory({"train/a.png": b""}), "train/a.png, which lies in no folder that names its class"),
    (lambda _: in_memory({"train/ant/1.png": b"", "test/bee/1.png": b""}), "test of .* 'bee' that train lacks"),
    (lambda _: in_memory({"train/ant/1.png": b""}), "holds train, but nothing named valid or validation"),
])  # fmt: skip
def test_tar_files_that_cannot_be_used_are_refused(tmp_path, content, message):
    (tmp_path / "bad.tar").write_bytes(content(in_memory(files(9))))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "bad.tar", "valid")


def folder_in_tars(source: Path) -> list[Path]:
    """A tar file of a folder with its links, and one that holds this tar file."""
    plain, nested = source.with_name("plain.tar"), source.with_name("nested.tar")
    with tarfile.open(plain, "w") as archive:
        archive.add(source, ".")
    with tarfile.open(nested, "w") as archive:
        archive.add(plain, "plain.tar")
    return [plain, nested]


def test_symbolic_links_in_a_tar_file_are_the_files_that_they_link_to(tmp_path):
    """Also links that come before their files, links to links, and hard links to symbolic ones."""
    source = write(tmp_path / "plain", {f"{c}/{i}.png": encoded(i) for i in range(4) for c in ("ant", "files")})
    (source / "bee").mkdir()
    for i in range(4):
        (source / "bee" / f"{i}.png").symlink_to(f"../files/{i}.png")
    (source / "ant" / "4.png").symlink_to("../bee/0.png")
    plain, _ = folder_in_tars(source)
    hard_link(plain, "./ant/5.png", "./ant/4.png")
    nested = tar(tmp_path / "nested.tar", {"plain.tar": plain.read_bytes()})
    (source / "ant" / "5.png").symlink_to("4.png")
    for path in (plain, nested):
        assert_same(load(path, "whole"), load(source, "whole").images, [0] * 6 + [1] * 4 + [2] * 4)
    tar(plain, {"ant/6.png": "9.png", "ant/7.png": "8.png", "ant/8.png": "7.png", "ant/all": "."}, "a")
    with pytest.raises(ValueError, match="ant/6.png"):
        load(plain, "whole")
    loaded = load(plain, "whole", on_damaged="skip")
    assert len(loaded) == 14 and len(loaded.damaged) == 3
    assert all(f"ant/{6 + i}.png" in text for i, text in enumerate(loaded.damaged))


def test_hard_links_in_a_tar_file_are_the_files_that_they_link_to(tmp_path):
    source = write(tmp_path / "plain", {f"ant/{i}.png": encoded(i) for i in range(4)})
    (source / "bee").mkdir()
    for i in range(4):
        (source / "bee" / f"{i}.png").hardlink_to(source / "ant" / f"{i}.png")
    for path in folder_in_tars(source):
        assert_same(load(path, "whole"), load(source, "whole").images, [0] * 4 + [1] * 4)
    hard_link(tar(tmp_path / "bad.tar", {}), "ant/1.png", "ant/0.png")
    with pytest.raises(ValueError, match="bad.tar .*ant/1.png is a link to ant/0.png"):
        load(tmp_path / "bad.tar")


def test_test_images_without_labels_in_a_tar_file_give_way_to_the_validation_images(tmp_path):
    content = {f"top/{split}/{name}": data for split in ("train", "val") for name, data in files(2).items()}
    path = tar(tmp_path / "one.tar", content | {f"top/test/{i}.png": encoded(i) for i in range(3)})
    for split in ("train", "valid", "test"):
        loaded = load(path, split)
        assert loaded.labels.tolist() == [0, 0, 1, 1, 2, 2] and bool(loaded.note) == (split == "test")
    content = {f"top/train/{name}": data for name, data in files(2).items()}
    path = tar(tmp_path / "one.tar", content | {"val/1.png": b""})
    with pytest.raises(ValueError, match="valid split of .* holds no image with a label"):
        load(path, "valid")


def test_a_tar_file_of_loose_images_beside_one_of_classes_is_refused(tmp_path):
    """ImageNet's own archives: a tar file of class tars for training, all validation images loose in another."""
    inner = {f"{c}.tar": in_memory({f"{c}_{i}.png": encoded(i) for i in range(4)}) for c in ("n01440764", "n01443537")}
    tar(tmp_path / "ILSVRC2012_img_train.tar", inner)
    tar(tmp_path / "ILSVRC2012_img_val.tar", {f"ILSVRC2012_val_{i:08d}.png": encoded(i) for i in range(4)})
    for split in ("train", "valid", "test", "whole"):
        with pytest.raises(ValueError, match="ILSVRC2012_img_val.tar lie loose .* ILSVRC2012_img_train.tar"):
            load(tmp_path, split)
    (tmp_path / "ILSVRC2012_img_val.tar").unlink()
    assert load(tmp_path, "whole").class_names == ("n01440764", "n01443537")


# WebDataset


def shard(path: Path, first: int, n: int, sidecar: bool = False) -> None:
    content = {}
    for i in range(first, first + n):
        content[f"s{i:04d}.jpg"] = encoded(i, "JPEG")
        content |= {f"s{i:04d}.json": json.dumps({"label": i % 3, "other": 2 - i % 3 - (i == 1) * 9}).encode()}
        content |= {} if sidecar else {f"s{i:04d}.cls": str(i % 3).encode()}
    tar(path, content)


def test_a_label_in_a_shard_may_be_a_symbolic_link(tmp_path):
    content = {"s0.png": encoded(0), "s1.png": encoded(1), "one.cls": b"1", "s0.cls": "one.cls", "s1.cls": "one.cls"}
    tar(tmp_path / "pets" / "pets-train-00.tar", content)
    assert load("wds/pets", "train", root=tmp_path).labels.tolist() == [1, 1]


@pytest.fixture
def shards(tmp_path):
    shard(tmp_path / "pets" / "pets-train-00.tar", 0, 5)
    shard(tmp_path / "pets" / "pets-train-01.tar", 5, 4)
    shard(tmp_path / "pets" / "pets-validation-00.tar", 20, 3, sidecar=True)
    return tmp_path


def describe(folder: Path, **splits) -> None:
    described = {
        name: {
            "name": name, "filenames": [f for f, _ in shards], "shard_lengths": [n for _, n in shards],
            "num_samples": sum(n for _, n in shards), **more,
        }
        for name, (shards, more) in splits.items()
    }  # fmt: skip
    (folder / "_info.json").write_text(json.dumps({"splits": described}))


def test_webdataset_shards_by_their_names(shards):
    train, valid = load("wds/pets", root=shards), load("wds/pets", "valid", root=shards)
    assert train.labels.tolist() == [i % 3 for i in range(9)] and valid.labels.tolist() == [2, 0, 1]
    assert train.class_names == ("0", "1", "2") and load("wds/pets", root=shards / "pets").images.equal(train.images)
    assert train.images[7].equal(shown(encoded(7, "JPEG")))
    (shards / "pets" / "classes.json").write_text(json.dumps(["ant", "bee", "cat"]))
    assert load("wds/pets", root=shards).class_names == ("ant", "bee", "cat")


def test_webdataset_shards_as_timm_reads_them(shards):
    pytest.importorskip("webdataset")
    folder = shards / "pets"
    first, last = ("pets-train-00.tar", 5), ("pets-train-01.tar", 4)
    describe(folder, train=([last], {}), val=([first], {"alt_label": "other"}))
    for ours, theirs in (("train", "train"), ("valid", "val")):
        expected = by_timm(create_dataset("wds/pets", root=str(folder), split=theirs, is_training=False))
        assert_same(load("wds/pets", ours, root=shards), *expected)
    assert len(expected[1]) == 4  # the label below 0 is left out by both


def test_shards_in_the_root_are_not_taken_for_a_set_of_the_hub(shards, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    for source in ("wds/owner/pets", "vtab/pcam"):
        with pytest.raises(ValueError, match="is not in .* cannot be fetched from here"):
            load(source, "test", root=shards / "pets")


def test_webdataset_shards_that_are_missing_or_without_labels(shards):
    with pytest.raises(ValueError, match="lacks shards of its train split"):
        load("wds/nothing", root=shards)
    describe(shards / "pets", train=([("gone.tar", 1)], {}))
    with pytest.raises(ValueError, match=r"lacks gone.tar, which _info.json lists"):
        load("wds/pets", root=shards)
    tar(shards / "pets" / "gone.tar", {"a.jpg": encoded(0, "JPEG"), "a.json": b"{}"})
    with pytest.raises(ValueError, match="gone.tar: a has no label: .* under 'label' in a .json file"):
        load("wds/pets", root=shards)


@pytest.mark.parametrize("name, content, expected", [
    ("_info.json", b"[]", "splits"), ("_info.json", b"{", "splits"), ("_info.json", b'{"splits": ["train"]}', "splits"),
    ("_info.json", b'{"splits": {"train": "a.tar"}}', "splits"),
    ("_info.json", b'{"splits": {"train": {"filenames": [3]}}}', "splits"),
    ("classnames.txt", b"caf\xe9\nb\nc\n", "names of classes"), ("classes.json", b"caf\xe9", "list of class names"),
    ("nshards.txt", b"one", "number of the shards .*'one'"),
])  # fmt: skip
def test_what_lies_beside_shards_and_is_none_of_it_is_named(shards, name, content, expected):
    (shards / "pets" / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"pets/{name} .*{expected}.* Repair or remove"):
        load("wds/pets", root=shards)


def test_what_a_mac_or_a_desktop_leaves_in_archives_and_folders_is_passed_over(tmp_path):
    hidden = {"._s0000.jpg": b"mac", "._ant.txt": b"mac", ".DS_Store": b"desktop"}
    shard(tmp_path / "pets" / "pets-train-0.tar", 0, 5)
    tar(tmp_path / "pets" / "pets-train-0.tar", hidden, "a")
    assert len(load("wds/pets", root=tmp_path)) == 5
    content = files(4) | {f"ant/{name}": data for name, data in hidden.items()}
    assert len(load(write(tmp_path / "plain", content), "whole")) == 12
    assert len(load(tar(tmp_path / "plain.tar", content), "whole")) == 12


# torchvision


def raw_digits(root: Path, name: str, train: bool, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels in the format of MNIST's files, uncompressed as torchvision leaves them."""
    rng = np.random.default_rng(n)
    images, labels = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), rng.integers(0, 10, n, dtype=np.uint8)
    folder, prefix = root / name / "raw", "train" if train else "t10k"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, n, 28, 28) + images.tobytes())
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, n) + labels.tobytes())
    return images, labels


@pytest.mark.parametrize("name, folder", [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_torchvision_sets_in_their_own_files(tmp_path, name, folder):
    written = {split: raw_digits(tmp_path, folder, split == "train", n) for split, n in (("train", 20), ("valid", 8))}
    for split, (images, labels) in written.items():
        loaded = load(f"torch/{name}", split, root=tmp_path)
        assert loaded.labels.tolist() == labels.tolist() and len(loaded.class_names) == 10
        for channel in range(3):
            np.testing.assert_array_equal(loaded.images[:, channel], images)
    assert load(f"torch/{name}", root=tmp_path, size=14).size == (14, 14)


def test_torchvision_sets_with_files_of_images(tmp_path):
    """Imagenette lies in folders named by WordNet numbers."""
    for split in ("train", "val"):
        for n, wnid in enumerate(torchvision.datasets.Imagenette._WNID_TO_CLASS):
            write(tmp_path / "imagenette2" / split / wnid, {f"{i}.jpeg": encoded(10 * n + i, "JPEG") for i in range(2)})
    valid = load("torch/imagenette", "valid", root=tmp_path)
    theirs = torchvision.datasets.Imagenette(tmp_path, split="val")
    assert_same(valid, *by_timm(theirs))
    assert valid.class_names[0].startswith("tench")


def test_labels_of_torchvision_sets_are_those_that_it_returns(tmp_path):
    """However a set keeps them: in rows with more (QMNIST), beside the file (GTSRB), by folder (iNaturalist)."""
    raw = tmp_path / "QMNIST/raw"
    raw.mkdir(parents=True)
    rows = np.random.default_rng(0).integers(0, 10, (6, 8)).astype(">i4")
    images = np.zeros((6, 28, 28), np.uint8)
    (raw / "qmnist-train-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, 6, 28, 28) + images.tobytes())
    (raw / "qmnist-train-labels-idx2-int").write_bytes(struct.pack(">3i", 0xC02, 6, 8) + rows.tobytes())
    for n in range(3):
        write(tmp_path / "gtsrb/GTSRB/Training" / f"0000{n}", {f"{i}.ppm": encoded(i, "PPM") for i in range(n + 1)})
        kinds = "Animalia_Chordata_Aves_Order_Family_Genus"
        write(tmp_path / f"2021_train/0000{n}_{kinds}_{n}", {f"{i}.jpg": encoded(i, "JPEG") for i in range(3 - n)})
    for name, theirs in {
        "qmnist": torchvision.datasets.QMNIST(tmp_path, train=True),
        "gtsrb": torchvision.datasets.GTSRB(tmp_path, split="train"),
        "inaturalist": torchvision.datasets.INaturalist(tmp_path, version="2021_train"),
    }.items():
        loaded = load(f"torch/{name}", root=tmp_path)
        expected = [int(theirs[i][1]) for i in range(len(theirs))]
        assert len(set(expected)) > 1 and loaded.labels.tolist() == expected, name


def test_the_table_of_torchvision_sets_names_real_classes_and_options():
    import inspect

    for kind, word, *_ in TORCH.values():
        of = inspect.signature(getattr(torchvision.datasets, kind)).parameters
        assert word in of, kind


def test_a_torchvision_set_that_is_not_there_says_what_to_fetch(tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    with pytest.raises(ValueError, match=r"torch/cifar10 is not in .*CIFAR10\('.*', train=True, download=True\)"):
        load("torch/cifar10", root=tmp_path)
    with pytest.raises(ValueError, match="torch/imagenet is not in .* archives by hand"):
        load("torch/imagenet", root=tmp_path)
    with pytest.raises(ValueError, match="torch/cifar11 is not known. Known are torch/ and cifar10, "):
        load("torch/cifar11", root=tmp_path)


def test_the_default_root_is_an_environment_variable(tmp_path, monkeypatch):
    for train in (True, False):
        raw_digits(tmp_path, "MNIST", train, 5)
    monkeypatch.setenv("VITLENS_DATA", str(tmp_path))
    assert len(load("torch/mnist")) == 5


# Streams of them


def test_every_source_can_be_streamed_and_sent_to_another_process(tmp_path, shards):
    raw_digits(tmp_path, "MNIST", True, 20)
    raw_digits(tmp_path, "MNIST", False, 20)
    nested = tar(tmp_path / "nested.tar", {f"{name}.tar": in_memory({f"{i}.png": encoded(i) for i in range(9)})
                                           for name in ("ant", "bee")})  # fmt: skip
    for source in (write(tmp_path / "plain", files(9)), nested, "wds/pets", "torch/mnist", "digits"):
        assert_streams(source, tmp_path)


# Hugging Face


def saved_set(path: Path, rows: dict, **features) -> None:
    """A shard as the package datasets writes it, with the columns that `features` describes."""
    datasets = pytest.importorskip("datasets")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {name: datasets.ClassLabel(names=names) for name, names in features.items()}
    plain = {name: datasets.Value("int64") for name in rows.keys() - names.keys() - {"img"}}
    features = datasets.Features({**names, **plain, "img": datasets.Image()})
    datasets.Dataset.from_dict(rows, features).to_parquet(path)


def images(n: int) -> list[dict]:
    return [{"bytes": encoded(i), "path": None} for i in range(n)]


def test_hugging_face_sets_as_timm_reads_them(tmp_path):
    folder, cache = tmp_path / "set", tmp_path / "cache"
    train, test = folder / "train-00000-of-00001.parquet", folder / "test-00000-of-00001.parquet"
    for path, n in ((train, 6), (test, 3)):
        saved_set(path, {"fine": [i % 2 for i in range(n)], "img": images(n)}, fine=["ant", "bee"])
    for ours, theirs in (("train", "train"), ("valid", "test")):
        keys = {"input_key": "img", "target_key": "fine"}
        expected = by_timm(create_dataset(f"hfds/{folder}", root=str(cache), split=theirs, **keys))
        loaded = load(f"hfds/{folder}", ours, root=cache)
        assert_same(loaded, *expected)
        assert loaded.class_names == ("ant", "bee")
    assert_streams(f"hfds/{folder}", cache)
    table = pq.read_table(train).drop_columns("fine")
    pq.write_table(table.replace_schema_metadata(), train)
    test.unlink()
    with pytest.raises(ValueError, match="has the columns img, but needs .* class labels"):
        load(f"hfds/{folder}", root=cache)
    with pytest.raises(ValueError, match="hfds/.*nowhere is not in .* cannot be fetched"):
        load(f"hfds/{tmp_path / 'nowhere'}", root=cache)


@pytest.mark.parametrize("labels, wrong", [([None, 1, 0], "None"), (["ant", "bee", "ant"], "'ant'")])
def test_hugging_face_sets_need_whole_numbers_as_labels(tmp_path, labels, wrong):
    datasets = pytest.importorskip("datasets")
    bare = datasets.Dataset.from_dict({"label": labels, "img": images(3)}).cast_column("img", datasets.Image())
    bare.to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=f"has the label {wrong}, .* whole number"):
        load(f"hfds/{tmp_path / 'set'}", root=tmp_path / "cache")


def test_without_a_network_hugging_face_sets_are_refused_at_once_and_read_from_the_cache(tmp_path, monkeypatch, capsys):
    """Its library alone tries for half a minute."""
    datasets = pytest.importorskip("datasets")

    asked = []
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setattr("httpx.Client.send", lambda *_, **__: asked.append(1) or unreachable())
    start = time.monotonic()
    with pytest.raises(ValueError, match="hfds/owner/set is not in .* cannot be fetched from here"):
        load("hfds/owner/set", root=tmp_path / "cache")
    assert not asked and time.monotonic() - start < 20, "nothing is asked of what cannot be reached"
    assert not datasets.config.HF_HUB_OFFLINE, "what others load is not touched"

    rows = {"label": [0, 1], "img": images(2)}
    saved_set(tmp_path / "set" / "train-00000-of-00001.parquet", rows, label=["ant", "bee"])
    expected = load(f"hfds/{tmp_path / 'set'}", root=tmp_path / "cache")
    said = (
        f"Put hfds/{tmp_path / 'set'}, as the package datasets reads it, into {tmp_path / 'cache'}, to be kept there."
    )
    assert capsys.readouterr().err.count(said) == 1
    load(f"hfds/{tmp_path / 'set'}", root=tmp_path / "cache")
    assert said not in capsys.readouterr().err, "what is there is not put there again"
    (local,) = (path for path in (tmp_path / "cache").glob("*/*/*/*") if path.is_dir())
    copy = tmp_path / "cache" / "owner___set" / "default" / "0.0.0" / local.name  # as one of the hub is kept
    shutil.copytree(local, copy)
    for path in copy.glob("parquet-*.arrow"):
        path.rename(copy / path.name.replace("parquet", "set"))
    for path in copy.glob("*-train.arrow"):
        path.rename(copy / "set-train.arrow")
    found = load("hfds/owner/set", root=tmp_path / "cache")
    assert torch.equal(found.images, expected.images) and found.class_names == ("ant", "bee") and not asked


def test_parquet_columns_of_other_names_are_read_where_they_can_only_be_these(tmp_path):
    """CIFAR-100 has img, fine_label and coarse_label on the hub."""
    folder = tmp_path / "cifar100"
    rows = {"img": images(6), "fine_label": [0, 1, 2, 0, 1, 2], "coarse_label": [0, 0, 1] * 2}
    for split in ("train", "test"):
        path = folder / f"{split}-00000-of-00001.parquet"
        saved_set(path, rows, fine_label=["ant", "bee", "cat"], coarse_label=["insect", "mammal"])
    found = load(folder, "test")
    assert found.class_names == ("ant", "bee", "cat") and found.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert "img is taken for the images and fine_label for the labels" in found.note
    assert found.images[4].equal(shown(encoded(4)))
    assert_streams(folder, tmp_path / "cache")
    table = pq.read_table(path).select(["img", "fine_label", "coarse_label"]).rename_columns(["img", "first", "second"])
    pq.write_table(table.select(["img", "first"]), path)
    assert load(folder, "test").labels.tolist() == [0, 1, 2, 0, 1, 2]
    for columns, sentence in (
        (table, r"has img, first, second, and several .* \(first, second\). Give the column with a whole number"),
        (table.select(["img"]), "it has img, and none of them is one. Give the column with a whole .* the name label"),
        (table.select(["first"]), "it has first, and none of them is one. Give the column with encoded images"),
    ):
        pq.write_table(columns.replace_schema_metadata(), path)
        with pytest.raises(ValueError, match=sentence):
            load(folder, "test")


def test_what_is_put_into_the_cache_is_said_once(tmp_path, capsys):
    parquet(tmp_path / "set" / "train-00000-of-00001.parquet", [encoded(i) for i in range(4)], [0, 1, 0, 1])
    for times in (1, 0):
        load(tmp_path / "set", size=8, stream=True, workers=0, root=tmp_path / "cache")
        said = f"to be read in any order, into {tmp_path / 'cache' / 'parquet'}, to be kept there.\n"
        assert capsys.readouterr().err.count(said) == times


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        load("hfds/beans")


def test_validation_and_test_shards_are_not_mixed(tmp_path):
    for split, label in (("train", 0), ("validation", 0), ("test", 1)):
        parquet(tmp_path / f"{split}-00000-of-00001.parquet", [encoded(label)], [label])
    assert load(tmp_path, "valid").labels.tolist() == [0]
