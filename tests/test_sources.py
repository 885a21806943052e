"""Every kind of source lists the right images, labels and splits; other readers of the same files say the same."""

import gzip
import hashlib
import io
import json
import pickle
import shutil
import struct
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from PIL import Image
from timm.data import create_dataset

from vitlens.data import ImageSet, load
from vitlens.data.named import TORCH
from vitlens.data.samples import VALID_SHARE, place

KINDS = {"ant": "JPEG", "bee": "PNG", "cat": "JPEG"}


def encoded(seed: int, kind: str = "PNG", size=(12, 10)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def files(per_class: int) -> dict[str, bytes]:
    """Paths below the folder of a split, and what lies there."""
    return {
        f"{name}/{i:03d}.{kind.lower()}": encoded(1000 * n + i, kind)
        for n, (name, kind) in enumerate(KINDS.items())
        for i in range(per_class)
    }


def write(folder: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def tar(path: Path, content: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def in_memory(content: dict[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


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


def test_a_class_that_is_called_like_a_split_is_explained(tmp_path):
    write(tmp_path, {f"{name}/{i}.png": encoded(i) for name in ("car", "train") for i in range(4)})
    for split in ("train", "valid", "test", "whole"):
        with pytest.raises(ValueError, match="folder named train, which stands for a split, .* give it another name"):
            load(tmp_path, split)


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


def test_tar_files_that_cannot_be_used_are_refused(tmp_path):
    whole = tar(tmp_path / "whole.tar", files(9)).read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], "not a whole, uncompressed tar"),
        (gzip.compress(whole), "not a whole, uncompressed tar"),
        (in_memory({"a.txt": b""}), "holds no image"),
        (in_memory({"a.png": b""}), "in no folder that names its class"),
        (in_memory({"train/a.png": b""}), "in no folder that names its class"),
    ):
        (tmp_path / "bad.tar").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "bad.tar")
    tar(tmp_path / "one.tar", {"train/ant/1.png": b"", "test/bee/1.png": b""})
    with pytest.raises(ValueError, match="test of .* holds a class 'bee' that train lacks"):
        load(tmp_path / "one.tar", "valid")
    tar(tmp_path / "one.tar", {"train/ant/1.png": b""})
    with pytest.raises(ValueError, match="holds train, but nothing named valid or validation"):
        load(tmp_path / "one.tar", "valid")


def test_symbolic_links_in_a_tar_file_are_the_files_that_they_link_to(tmp_path):
    """Also links that come before their files, links to links, and hard links to symbolic ones."""
    source = write(tmp_path / "plain", {f"{c}/{i}.png": encoded(i) for i in range(4) for c in ("ant", "files")})
    (source / "bee").mkdir()
    for i in range(4):
        (source / "bee" / f"{i}.png").symlink_to(f"../files/{i}.png")
    (source / "ant" / "4.png").symlink_to("../bee/0.png")
    with tarfile.open(tmp_path / "plain.tar", "w") as archive:
        archive.add(source, ".")
        member = tarfile.TarInfo("./ant/5.png")
        member.type, member.linkname = tarfile.LNKTYPE, "./ant/4.png"
        archive.addfile(member)
        assert sum(member.issym() for member in archive.getmembers()) == 5
    with tarfile.open(tmp_path / "nested.tar", "w") as archive:
        archive.add(tmp_path / "plain.tar", "plain.tar")
    (source / "ant" / "5.png").symlink_to("4.png")
    for path in (tmp_path / "plain.tar", tmp_path / "nested.tar"):
        assert_same(load(path, "whole"), load(source, "whole").images, [0] * 6 + [1] * 4 + [2] * 4)
    with tarfile.open(tmp_path / "plain.tar", "a") as archive:
        for name, to in (("ant/6.png", "9.png"), ("ant/7.png", "8.png"), ("ant/8.png", "7.png"), ("ant/all", ".")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, to
            archive.addfile(member)
    with pytest.raises(ValueError, match="ant/6.png"):
        load(tmp_path / "plain.tar", "whole")
    loaded = load(tmp_path / "plain.tar", "whole", on_damaged="skip")
    assert len(loaded) == 14 and len(loaded.damaged) == 3
    assert all(f"ant/{6 + i}.png" in text for i, text in enumerate(loaded.damaged))


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


def test_hard_links_in_a_tar_file_are_the_files_that_they_link_to(tmp_path):
    source = write(tmp_path / "plain", {f"ant/{i}.png": encoded(i) for i in range(4)})
    (source / "bee").mkdir()
    for i in range(4):
        (source / "bee" / f"{i}.png").hardlink_to(source / "ant" / f"{i}.png")
    with tarfile.open(tmp_path / "inner.tar", "w") as archive:
        archive.add(source, ".")
        assert sum(member.islnk() for member in archive.getmembers()) == 4
    with tarfile.open(tmp_path / "nested.tar", "w") as archive:
        archive.add(tmp_path / "inner.tar", "inner.tar")
    for path in (tmp_path / "inner.tar", tmp_path / "nested.tar"):
        assert_same(load(path, "whole"), load(source, "whole").images, [0] * 4 + [1] * 4)
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        member = tarfile.TarInfo("ant/1.png")
        member.type, member.linkname = tarfile.LNKTYPE, "ant/0.png"
        archive.addfile(member)
    with pytest.raises(ValueError, match=r"bad.tar is not a whole, .* \(ant/1.png is a link to ant/0.png, which"):
        load(tmp_path / "bad.tar")


# WebDataset


def shard(path: Path, first: int, n: int, sidecar: bool = False) -> None:
    content = {}
    for i in range(first, first + n):
        content[f"s{i:04d}.jpg"] = encoded(i, "JPEG")
        content |= {f"s{i:04d}.json": json.dumps({"label": i % 3, "other": 2 - i % 3 - (i == 1) * 9}).encode()}
        content |= {} if sidecar else {f"s{i:04d}.cls": str(i % 3).encode()}
    tar(path, content)


def test_a_label_in_a_shard_may_be_a_symbolic_link(tmp_path):
    tar(tmp_path / "pets" / "pets-train-00.tar", {"s0.png": encoded(0), "s1.png": encoded(1), "one.cls": b"1"})
    with tarfile.open(tmp_path / "pets" / "pets-train-00.tar", "a") as archive:
        for name in ("s0.cls", "s1.cls"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "one.cls"
            archive.addfile(member)
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
    picture = np.array(Image.open(io.BytesIO(encoded(7, "JPEG"))))
    np.testing.assert_array_equal(train.images[7].permute(1, 2, 0), picture)
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
    def no_network(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
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


@pytest.mark.parametrize("name, content, message", [
    ("_info.json", b"[]", "should hold the splits"), ("_info.json", b"{", "should hold the splits"),
    ("_info.json", b'{"splits": ["train"]}', "should hold the splits"),
    ("_info.json", b'{"splits": {"train": "a.tar"}}', "should hold the splits"),
    ("_info.json", b'{"splits": {"train": {"filenames": [3]}}}', "should hold the splits"),
    ("classnames.txt", b"caf\xe9\nb\nc\n", "should hold the names of classes"),
    ("classes.json", b"caf\xe9", "should hold a list of class names"),
])  # fmt: skip
def test_what_lies_beside_shards_and_is_none_of_it_is_named(shards, name, content, message):
    (shards / "pets" / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"pets/{name} {message}.* Repair or remove it."):
        load("wds/pets", root=shards)


def test_a_number_of_shards_that_is_none_is_told(tmp_path):
    shard(tmp_path / "pets" / "train" / "0.tar", 0, 5)
    (tmp_path / "pets" / "train" / "nshards.txt").write_text("one")
    with pytest.raises(ValueError, match="nshards.txt should hold the number of the shards beside it, .*'one'"):
        load("wds/pets", root=tmp_path)


def test_what_a_mac_or_a_desktop_leaves_in_archives_and_folders_is_passed_over(tmp_path):
    hidden = {"._s0000.jpg": b"mac", "._ant.txt": b"mac", ".DS_Store": b"desktop"}
    shard(tmp_path / "pets" / "pets-train-0.tar", 0, 5)
    with tarfile.open(tmp_path / "pets" / "pets-train-0.tar", "a") as archive:
        for name, data in hidden.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
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
    def no_network(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
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


def assert_streams(source: str | Path, root: Path) -> None:
    held, stream = load(source, size=8, root=root), load(source, size=8, root=root, stream=True, workers=1)
    rows = [torch.arange(len(held)).flip(0)]
    for samples in (stream.samples, pickle.loads(pickle.dumps(stream.samples))):
        images, labels = next(replace(stream, samples=samples).batches(rows))
        assert images.equal(held.images.flip(0)) and labels.equal(held.labels.flip(0))
    assert (stream.class_names, stream.note) == (held.class_names, held.note)


def test_every_source_can_be_streamed_and_sent_to_another_process(tmp_path, shards):
    raw_digits(tmp_path, "MNIST", True, 20)
    raw_digits(tmp_path, "MNIST", False, 20)
    nested = tar(tmp_path / "nested.tar", {f"{name}.tar": in_memory({f"{i}.png": encoded(i) for i in range(9)})
                                           for name in ("ant", "bee")})  # fmt: skip
    for source in (write(tmp_path / "plain", files(9)), nested, "wds/pets", "torch/mnist", "digits"):
        assert_streams(source, tmp_path)


# Hugging Face


def test_hugging_face_sets_as_timm_reads_them(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"fine": datasets.ClassLabel(names=["ant", "bee"]), "img": datasets.Image()})
    for split, n in (("train", 6), ("test", 3)):
        rows = {"fine": [i % 2 for i in range(n)], "img": [{"bytes": encoded(i), "path": None} for i in range(n)]}
        (tmp_path / "set").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "set" / f"{split}-00000-of-00001.parquet")
    name, cache = f"hfds/{tmp_path / 'set'}", tmp_path / "cache"
    for ours, theirs in (("train", "train"), ("valid", "test")):
        keys = {"input_key": "img", "target_key": "fine"}
        expected = by_timm(create_dataset(name, root=str(cache), split=theirs, **keys))
        loaded = load(name, ours, root=cache)
        assert_same(loaded, *expected)
        assert loaded.class_names == ("ant", "bee")
    assert_streams(name, cache)
    for labels, wrong in (([None, 1, 0], "None"), (["ant", "bee", "ant"], "'ant'")):
        rows = {"label": labels, "img": [{"bytes": encoded(i), "path": None} for i in range(3)]}
        (tmp_path / wrong).mkdir()
        bare = datasets.Dataset.from_dict(rows).cast_column("img", datasets.Image())
        bare.to_parquet(tmp_path / wrong / "train-00000-of-00001.parquet")
        with pytest.raises(ValueError, match=f"has the label {wrong}, .* whole number"):
            load(f"hfds/{tmp_path / wrong}", root=cache)
    table = pq.read_table(tmp_path / "set" / "train-00000-of-00001.parquet").drop_columns("fine")
    pq.write_table(table.replace_schema_metadata(), tmp_path / "set" / "train-00000-of-00001.parquet")
    (tmp_path / "set" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(ValueError, match="has the columns img, but needs .* class labels"):
        load(name, root=cache)
    with pytest.raises(ValueError, match="hfds/.*nowhere is not in .* cannot be fetched"):
        load(f"hfds/{tmp_path / 'nowhere'}", root=cache)


def test_without_a_network_hugging_face_sets_are_refused_at_once_and_read_from_the_cache(tmp_path, monkeypatch, capsys):
    """Its library alone tries for half a minute."""
    datasets = pytest.importorskip("datasets")

    def no_network(*_, **__):
        raise OSError("no route to host")

    asked = []
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    monkeypatch.setattr("httpx.Client.send", lambda *_, **__: asked.append(1) or no_network())
    start = time.monotonic()
    with pytest.raises(ValueError, match="hfds/owner/set is not in .* cannot be fetched from here"):
        load("hfds/owner/set", root=tmp_path / "cache")
    assert not asked and time.monotonic() - start < 20, "nothing is asked of what cannot be reached"
    assert not datasets.config.HF_HUB_OFFLINE, "what others load is not touched"

    features = datasets.Features({"label": datasets.ClassLabel(names=["ant", "bee"]), "image": datasets.Image()})
    rows = {"label": [0, 1], "image": [{"bytes": encoded(i), "path": None} for i in range(2)]}
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
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
    datasets = pytest.importorskip("datasets")
    classes = {"fine_label": datasets.ClassLabel(names=["ant", "bee", "cat"]),
               "coarse_label": datasets.ClassLabel(names=["insect", "mammal"])}  # fmt: skip
    rows = {"img": [{"bytes": encoded(i), "path": None} for i in range(6)],
            "fine_label": [0, 1, 2, 0, 1, 2], "coarse_label": [0, 0, 1] * 2}  # fmt: skip
    features = datasets.Features({"img": datasets.Image(), **classes})
    for split in ("train", "test"):
        (tmp_path / "cifar100").mkdir(exist_ok=True)
        path = tmp_path / "cifar100" / f"{split}-00000-of-00001.parquet"
        datasets.Dataset.from_dict(rows, features).to_parquet(path)
    found = load(tmp_path / "cifar100", "test")
    assert found.class_names == ("ant", "bee", "cat") and found.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert "img is taken for the images and fine_label for the labels" in found.note
    np.testing.assert_array_equal(found.images[4].permute(1, 2, 0), Image.open(io.BytesIO(encoded(4))))
    assert_streams(tmp_path / "cifar100", tmp_path / "cache")
    table = pq.read_table(path).rename_columns(["img", "first", "second"])
    pq.write_table(table.select(["img", "first"]), path)
    assert load(tmp_path / "cifar100", "test").labels.tolist() == [0, 1, 2, 0, 1, 2]
    for columns, sentence in (
        (table, r"has img, first, second, and several .* \(first, second\). Give the column with a whole number"),
        (table.select(["img"]), "it has img, and none of them is one. Give the column with a whole .* the name label"),
        (table.select(["first"]), "it has first, and none of them is one. Give the column with encoded images"),
    ):
        pq.write_table(columns.replace_schema_metadata(), path)
        with pytest.raises(ValueError, match=sentence):
            load(tmp_path / "cifar100", "test")


def test_what_is_put_into_the_cache_is_said_once(tmp_path, capsys):
    table = pa.table({"image": [{"bytes": encoded(i), "path": None} for i in range(4)], "label": [0, 1, 0, 1]})
    (tmp_path / "set").mkdir()
    pq.write_table(table, tmp_path / "set" / "train-00000-of-00001.parquet")
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
        table = pa.table({"image": [{"bytes": encoded(label), "path": None}], "label": [label]})
        pq.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    assert load(tmp_path, "valid").labels.tolist() == [0]
