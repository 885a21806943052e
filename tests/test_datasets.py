"""Images, labels and splits of every kind of source equal other readers of the same files."""

import hashlib
import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from PIL import ExifTags, Image
from sklearn.datasets import load_digits
from support import (
    assert_streams,
    encoded,
    files,
    parquet,
    refuses,
    saved,
    shown,
    tar,
    unreachable,
    write,
)
from timm.data import create_dataset

from vitlens import load_image
from vitlens.data import SOURCES, ImageSet, Samples, load, register
from vitlens.data.folders import VALID_SHARE, number_of
from vitlens.data.named import TORCH
from vitlens.data.sources import source_names
from vitlens.images import image_files

REAL = os.environ.get("VITLENS_REAL_DATA")
NAMES = ["ant", "bee", "cat"]


def by_timm(dataset) -> tuple[torch.Tensor, list[int]]:
    images, labels = zip(*list(dataset), strict=True)
    return torch.stack(
        [torch.from_numpy(np.array(i.convert("RGB"))).permute(2, 0, 1) for i in images]
    ), list(labels)


def assert_same(ours: ImageSet, images: torch.Tensor, labels: list[int]) -> None:
    assert torch.equal(ours.images, images) and ours.labels.tolist() == labels


def assert_refused(words: str, *call, **options) -> None:
    refuses(words, load, *call, **options)


def test_load_divides_folders_by_file_names(tmp_path):
    write(tmp_path / "set", files(40))
    train, valid = load(tmp_path / "set"), load(tmp_path / "set", "valid")
    assert train.class_names == valid.class_names == ("ant", "bee", "cat")
    assert (
        len(train) + len(valid) == len(load(tmp_path / "set", "whole")) == 120
        and 0.04 < len(valid) / 120 < 0.2
    )
    both = torch.cat([train.images, valid.images]).flatten(1)
    assert (
        len(torch.unique(both, dim=0)) == 120
        and "about a tenth of each class" in train.note == valid.note
    )
    write(tmp_path / "set", {f"bee/new{i}.png": encoded(9000 + i) for i in range(30)})
    after = {image.numpy().tobytes() for image in load(tmp_path / "set", "valid").images}
    assert {image.numpy().tobytes() for image in valid.images} <= after, (
        "a file keeps its split when others are added"
    )
    digest = hashlib.blake2b(b"ant/0.png", digest_size=6).hexdigest()
    assert number_of("ant/0.png") == int(digest, 16) / 16**12 == 0.6468104482194263
    for low in (True, False):  # a class is in both splits even if its names fall into one
        names = [
            name for i in range(200) if (number_of(name := f"ant/{i}.png") < VALID_SHARE) == low
        ][:4]
        small = write(tmp_path / str(low), {name: encoded(i) for i, name in enumerate(names)})
        assert (len(load(small)), len(load(small, "valid"))) == ((1, 3) if low else (3, 1))


def test_load_reads_class_folders_of_any_name_and_depth(tmp_path):
    """`datasets` would read "bullet train" and "test pattern" as splits, and labels from metadata.csv."""
    classes = ["bullet train", "café [1]", "test pattern", "val"]
    content = {
        f"{name}/{i}.png": encoded(10 * n + i) for n, name in enumerate(classes) for i in range(4)
    }
    deeper = {
        "test pattern/close/far/4.png": encoded(99),
        "metadata.csv": b"file_name,label\nval/0.png,3\n",
    }
    folder = write(tmp_path / "set", content | deeper)
    write(tmp_path / "elsewhere", {"x/0.png": encoded(70), "x/1.jfif": encoded(71, "JPEG")})
    (folder / "linked").symlink_to(tmp_path / "elsewhere" / "x")
    (folder / "val" / "5.png").symlink_to(tmp_path / "elsewhere" / "x" / "0.png")
    whole = load(folder, "whole", size=8)
    assert whole.class_names == ("bullet train", "café [1]", "linked", "test pattern", "val")
    assert torch.bincount(whole.labels).tolist() == [4, 4, 2, 5, 5]
    assert (
        f"1 files of {folder} are not read: metadata.csv." in whole.note and "val of" in whole.note
    )
    divided = {
        f"{s}/{name}": d for s in ("Train", "TEST") for name, d in (content | deeper).items()
    }
    write(tmp_path / "divided", divided)
    for split in ("train", "valid"):
        found = load(tmp_path / "divided", split, size=8)
        assert found.class_names == tuple(classes) and torch.bincount(found.labels).tolist() == [
            4,
            4,
            5,
            4,
        ]
        assert "1 files of" in found.note and "metadata.csv" in found.note


def test_load_notes_unread_files(tmp_path):
    content = {
        f"{split}/{name}": data for split in ("train", "val") for name, data in files(3).items()
    }
    odd = {
        "train/ant/.ipynb_checkpoints/0.png": encoded(3),
        "train/ant/notes": b"no image",
        "b.txt": b"",
    }
    odd |= {"train/loose.png": encoded(2), "train/ant/x.pdf": b"%PDF"}
    found = load(write(tmp_path, content | odd))
    names = "ant/.ipynb_checkpoints/0.png, ant/notes, ant/x.pdf, loose.png"
    assert (
        len(found) == 9 and found.note == f"4 files of {tmp_path / 'train'} are not read: {names}."
    )
    assert [name for name, _ in image_files(tmp_path / "train")] == sorted(["loose.png", *files(3)])
    for path in (tmp_path / "val" / "bee").iterdir():
        path.unlink()
    assert "no valid image of 1 of 3 classes, such as 'bee'" in load(tmp_path, "valid").note


REFUSED_FOLDERS = {  # by file names: the split and the reason
    "ant/0.png bee/0.png bee/1.png": ("train", "class 'ant' .* single image"),
    "ant/0.png ant/1.png owl/1.txt": ("train", "has no image: .*owl"),
    "train/ant/0.png train/b/1.png val/ant/0.txt val/b/1.png": ("valid", "'ant' .* has no image"),
    "train/ant/0.png val/owl/0.png": ("valid", "class 'owl' that .*train lacks"),
    "train/ant/0.png": (
        "valid",
        "divided into train, but its valid split must be named valid or validation",
    ),
    "train/0.png val/0.png": ("train", "one for each class of train"),
    "a.txt": ("train", "no Parquet files, no WebDataset shards and no folders of images"),
}


@pytest.mark.parametrize("names", REFUSED_FOLDERS)
def test_load_refuses_folders(tmp_path, names):
    split, words = REFUSED_FOLDERS[names]
    content = {
        name: encoded(i) if name.endswith("png") else b"text"
        for i, name in enumerate(names.split())
    }
    assert_refused(words, write(tmp_path, content), split)


def test_fingerprint_depends_on_images_alone(tmp_path):
    content = files(30)
    sources = write(tmp_path / "a", content), write(tmp_path / "b", content)
    found = {
        load(source, size=8, stream=stream).fingerprint
        for source in sources
        for stream in (False, True)
    }
    other = write(tmp_path / "d", {name: encoded(999 + i) for i, name in enumerate(content)})
    assert len(found) == 1 and load(other).fingerprint not in found


def test_load_gives_upright_opaque_rgb(tmp_path):
    for mode, kind in (("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGB", "WEBP")):
        image = encoded(3, kind, mode=mode)
        assert load(write(tmp_path / mode, {"train/a/0": image})).images[0].equal(shown(image))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo = np.repeat(np.arange(0, 240, 10, dtype=np.uint8)[:, None, None], 16, 1).repeat(3, 2)
    for n, file in enumerate(
        (
            saved(photo, "JPEG", exif=exif, quality=95),
            saved(np.full((24, 16), 128 * 257, np.uint16)),
            saved(np.zeros((24, 16, 4), np.uint8)),
        )
    ):
        found = (
            load(write(tmp_path / str(n), {"train/a/0": file})).images[0].permute(1, 2, 0).numpy()
        )
        assert (found == np.asarray(load_image(file))).all()


def test_load_names_samples_that_cannot_be_decoded(tmp_path):
    images = [
        encoded(1),
        encoded(2, "JPEG", (64, 64))[:400],
        b"",
        encoded(3, size=(202, 2)),
        encoded(1),
    ]
    write(tmp_path, {f"train/a/{i}.png": image for i, image in enumerate(images)})
    assert_refused("3 of 5 .* train/a/1.png .*; train/a/2.png .*202 × 2 pixels", tmp_path, size=8)


def test_load_parquet_files(tmp_path, monkeypatch):
    """Ten training images in two files, and one for validation."""
    shards = tmp_path
    for i in range(2):
        images = [encoded(seed) for seed in range(5 * i, 5 * i + 5)]
        parquet(shards / f"train-{i:05d}-of-00002.parquet", images, [0, 1, 2, 0, 1], NAMES)
    parquet(shards / "validation-00000-of-00001.parquet", [encoded(99)], [2], NAMES)
    cache = {"root": shards / "cache"}
    train, valid = load(shards, **cache), load(shards, "valid", **cache)
    assert train.class_names == valid.class_names == tuple(NAMES) and valid.labels.tolist() == [2]
    assert_same(train, torch.stack([shown(encoded(i)) for i in range(10)]), [0, 1, 2, 0, 1] * 2)
    assert_streams(shards, shards / "cache")
    (shards / "classes.json").write_text(
        '{"wnids": ["n1", "n2", "n3"], "names": {"n2": "b", "n3": "c", "n1": "a"}}'
    )
    assert load(shards, **cache).class_names == ("a", "b", "c")
    for wrong in ('{"names": {"n1": "a"}, "wnids": ["n1", "n2"]}', '["ant", null]', "{"):
        (shards / "classes.json").write_text(wrong)
        assert_refused("classes.json .* list of class names", shards, **cache)
    first = shards / "train-00000-of-00002.parquet"
    first.write_bytes(first.read_bytes()[:300])
    assert_refused("Parquet files of .* cannot be read .* Fetch them again", shards, **cache)
    first.unlink()
    assert_refused("1 of the 2 train shards", shards)
    (shards / "validation-00000-of-00001.parquet").unlink()
    assert_refused("divided into train, but its test split must be named test or", shards, "test")
    (shards / "train-00001-of-00002.parquet").rename(shards / "train.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("hfds/beans", shards):
        assert_refused("pip install datasets", source)


def test_load_chooses_parquet_columns(tmp_path):
    """CIFAR-100 has img, fine_label and coarse_label on the hub."""
    path, cache = tmp_path / "train-0.parquet", {"root": tmp_path / "cache"}
    rows = parquet(path, [encoded(i) for i in range(3)], [0, 1, 2]).rename_columns(
        ["img", "fine_label"]
    )
    rows = rows.set_column(1, "fine_label", [pa.array([0, 1, 2], pa.uint8())])
    pq.write_table(rows.append_column("coarse_label", [[0, 0, 1]]), path)
    found = load(tmp_path, **cache)
    assert (
        found.labels.tolist() == [0, 1, 2]
        and "is read as the images and fine_label as" in found.note
    )
    image = [{"bytes": encoded(0), "path": None}, {"bytes": encoded(1), "path": None}]
    for words, columns in {
        "holds paths, such as 'a.png'": {
            "image": [{"bytes": None, "path": "a.png"}] * 2,
            "label": [0, 1],
        },
        "none could be it. Columns of paths are not read": {
            "image": ["a.png", "b.png"],
            "label": [0, 1],
        },
        "needs a column of whole numbers": {"image": image, "label": ["ant", "bee"]},
        "Labels must lie in 0…0.* from -1 to 0": {"image": image, "label": [0, None]},
        "a, b could be it": {"image": image, "a": [0, 1], "b": [0, 1]},
        "got a label of 2,000,000 among 2 images": {"image": image, "label": [7, 2_000_000]},
    }.items():
        pq.write_table(pa.table(columns), path)
        assert_refused(words, tmp_path, **cache)
    for row in (0, 2):
        images = [encoded(i) if i != row else None for i in range(4)]
        parquet(tmp_path / str(row) / "train.parquet", images, [0, 1, 0, 1])
        assert_refused("no image", tmp_path / str(row), size=8, **cache)


def shard(path: Path, first: int, n: int, sidecar: bool = False) -> None:
    content = {}
    for i in range(first, first + n):
        content[f"s{i:04d}.jpg"] = encoded(i, "JPEG")
        content |= {
            f"s{i:04d}.json": json.dumps({"label": i % 3 - 9 * (sidecar and i == 7)}).encode()
        }
        content |= {} if sidecar else {f"s{i:04d}.cls": str(i % 3).encode()}
    tar(path, content | {"._s0000.jpg": b"mac", ".DS_Store": b"desktop"})


def test_load_reads_webdataset_shards_in_place(tmp_path):
    folder = tmp_path / "pets [2]"
    shard(folder / "pets-train-00.tar", 0, 5)
    shard(folder / "pets-train-01.tar", 5, 4, sidecar=True)
    shard(folder / "pets-validation-00.tar", 20, 3)
    train, valid = load("wds/pets [2]", root=tmp_path), load(folder, "valid")
    assert train.labels.tolist() == [
        i % 3 for i in range(9) if i != 7
    ] and valid.labels.tolist() == [2, 0, 1]
    assert train.class_names == valid.class_names == ("0", "1", "2")
    assert train.images[6].equal(shown(encoded(6, "JPEG")))
    assert_streams(folder, tmp_path)
    assert len([*tmp_path.rglob("*")]) == 4, "nothing is copied"
    (folder / "classes.json").write_text(json.dumps(NAMES))
    assert load(folder).class_names == tuple(NAMES)
    pytest.importorskip("webdataset")
    (folder / "_info.json").write_text(
        json.dumps(
            {
                "splits": {
                    "val": {
                        "name": "val",
                        "filenames": ["pets-validation-00.tar"],
                        "shard_lengths": [3],
                        "num_samples": 3,
                    }
                }
            }
        )
    )
    assert_same(
        valid,
        *by_timm(create_dataset("wds/pets", root=str(folder), split="val", is_training=False)),
    )


def test_load_refuses_webdataset_shards(tmp_path, monkeypatch):
    assert_refused("lacks some or all shards of its train split", "wds/nothing", root=tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    for source in ("wds/owner/pets", "vtab/pcam"):
        assert_refused("is not in .* cannot be downloaded", source, "test", root=tmp_path)
    whole = tar(tmp_path / "a" / "train-0.tar", {"a.jpg": encoded(0, "JPEG"), "a.json": b"{}"})
    assert_refused("train-0.tar: a has no label. .* under 'label' in a .json file", tmp_path / "a")
    whole.write_bytes(whole.read_bytes()[:700])
    assert_refused("train-0.tar is not a complete WebDataset shard", tmp_path / "a")
    content = {}  # fields come from the first samples of a shard, so images of another format would be lost
    for i in range(10):
        content |= {
            f"{i}.{'jpg' if i < 6 else 'png'}": encoded(i, "JPEG" if i < 6 else "PNG"),
            f"{i}.cls": b"1",
        }
    tar(whole, content)
    assert_refused("has no image in the format of the first", tmp_path / "a")
    shard(whole, 0, 9)
    monkeypatch.setattr("vitlens.data.imageset.free_memory", lambda device: 200)
    assert_refused("more than half of the free memory", tmp_path / "a")
    index = {"splits": {"train": {"filenames": ["train-0.tar", "train-1.tar"]}}}
    (tmp_path / "a" / "_info.json").write_text(json.dumps(index))
    assert_refused("lacks some or all shards of its train split", tmp_path / "a")


def test_load_sets_of_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert_refused(
        "hfds/owner/set is not in .* cannot be downloaded", "hfds/owner/set", root=tmp_path
    )
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])}
    )
    rows = {"img": [{"bytes": encoded(i), "path": None} for i in range(3)], "label": [1, 0, 1]}
    table = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features)})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **_: table)
    found = load("hfds/owner/set", root=tmp_path)
    assert_same(found, torch.stack([shown(encoded(i)) for i in range(3)]), [1, 0, 1])
    assert found.class_names == ("ant", "bee")
    assert_refused(
        "hfds/owner/set is divided into train, but its valid split", "hfds/owner/set", "valid"
    )
    table["train"].info.builder_name = "imagefolder"
    assert_refused("is a folder of images, not a table", "hfds/owner/set", root=tmp_path)


def test_load_digits_in_five_disjoint_folds():
    digits, seen = load_digits(), 0
    for fold in range(5):
        train, valid = load("digits", "train", fold=fold), load("digits", "valid", fold=fold)
        assert len(train) + len(valid) == 1797 and train.images.shape[1:] == (3, 8, 8)
        seen += valid.images[:, 0].double().sum()
    assert seen == np.rint(digits.images * 255 / 16).sum()


def raw_digits(root: Path, name: str, train: bool, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels in the format of MNIST's files, uncompressed as torchvision leaves them."""
    rng = np.random.default_rng(n)
    images, labels = (
        rng.integers(0, 256, (n, 28, 28), dtype=np.uint8),
        rng.integers(0, 10, n, dtype=np.uint8),
    )
    folder, prefix = root / name / "raw", "train" if train else "t10k"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(
        struct.pack(">4i", 0x803, n, 28, 28) + images.tobytes()
    )
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
        struct.pack(">2i", 0x801, n) + labels.tobytes()
    )
    return images, labels


def test_load_torchvision_sets_from_their_files(tmp_path, monkeypatch):
    """Labels are next to the images (MNIST), in wider rows (QMNIST), next to each file (GTSRB), or folders."""
    images, labels = raw_digits(tmp_path, "MNIST", True, 20)
    images, labels = raw_digits(tmp_path, "MNIST", False, 8)
    monkeypatch.setenv("VITLENS_DATA", str(tmp_path))
    found = load("torch/mnist", "valid")
    assert_same(found, torch.from_numpy(images)[:, None].expand(-1, 3, -1, -1), labels.tolist())
    assert_streams("torch/mnist", tmp_path)
    raw = tmp_path / "QMNIST/raw"
    raw.mkdir(parents=True)
    rows = np.random.default_rng(0).integers(0, 10, (6, 8)).astype(">i4")
    (raw / "qmnist-train-images-idx3-ubyte").write_bytes(
        struct.pack(">4i", 0x803, 6, 28, 28) + bytes(6 * 28 * 28)
    )
    (raw / "qmnist-train-labels-idx2-int").write_bytes(
        struct.pack(">3i", 0xC02, 6, 8) + rows.tobytes()
    )
    for n, wnid in enumerate(torchvision.datasets.Imagenette._WNID_TO_CLASS):
        write(
            tmp_path / "imagenette2/train" / wnid,
            {f"{i}.jpeg": encoded(10 * n + i, "JPEG") for i in range(2)},
        )
        small = tmp_path / "imagenette2-160/train" / wnid
        write(small, {"0.jpeg": encoded(n, "JPEG")})
    for n in range(3):
        write(
            tmp_path / "gtsrb/GTSRB/Training" / f"0000{n}",
            {f"{i}.ppm": encoded(i, "PPM") for i in range(n + 1)},
        )
        kinds = "Animalia_Chordata_Aves_Order_Family_Genus"
        write(
            tmp_path / f"2021_train/0000{n}_{kinds}_{n}",
            {f"{i}.jpg": encoded(i, "JPEG") for i in range(3 - n)},
        )
    for name, theirs in {
        "qmnist": torchvision.datasets.QMNIST(tmp_path, train=True),
        "gtsrb": torchvision.datasets.GTSRB(tmp_path, split="train"),
        "inaturalist": torchvision.datasets.INaturalist(tmp_path, version="2021_train"),
        "imagenette": torchvision.datasets.Imagenette(tmp_path, split="train"),
        "imagenette160": torchvision.datasets.Imagenette(tmp_path, split="train", size="160px"),
    }.items():
        assert_same(load(f"torch/{name}"), *by_timm(theirs))


def test_torch_table_matches_torchvision(tmp_path, monkeypatch):
    import inspect

    for kind, word, *_ in TORCH.values():
        assert word in inspect.signature(getattr(torchvision.datasets, kind)).parameters, kind
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    for source, words in {
        "torch/cifar10": r"torch/cifar10 is not in .*CIFAR10\('.*', train=True, download=True\)",
        "torch/imagenet": "torch/imagenet is not in .* archives by hand",
        "torch/imagenette160": r"Imagenette\('.*', split='train', size='160px', download=True\)",
        "torch/cifar11": "NAME of torch/NAME is unknown, got 'cifar11'. Did you mean .*must be one of cifar10, ",
    }.items():
        assert_refused(words, source, root=tmp_path)


def test_register_adds_a_data_set(tmp_path, monkeypatch):
    def plain(name, split, root, fold):
        assert root == tmp_path
        images = torch.full(({"train": 4, "valid": 2}[split], 3, 8, 8), 7, dtype=torch.uint8)
        return Samples(
            images,
            [0, 1] * (len(images) // 2),
            ("a", "b"),
            range(len(images)),
            title=f"{name} image ",
        )

    monkeypatch.setattr("vitlens.data.sources.SOURCES", dict(SOURCES))
    register("plain/COLOR", plain)
    train, valid = (
        load("plain/gray", root=tmp_path),
        load("plain/gray", "valid", size=4, root=tmp_path, stream=True),
    )
    assert train.labels.tolist() == [0, 1, 0, 1] and (train.images == 7).all()
    assert valid.samples.name(1) == "gray image 1" and valid.size == (4, 4)
    assert_refused("plain/COLOR", "plane")
    assert source_names().endswith("plain/COLOR")


IMAGES, LABELS = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
REFUSALS = (
    (lambda: load("digits", "dev"), "got 'dev'"),
    (lambda: load("nowhere"), "'nowhere' .* digits, torch/NAME"),
    (lambda: ImageSet(IMAGES.float(), LABELS, ("a", "b")), "uint8 .*float32"),
    (lambda: ImageSet(IMAGES, LABELS[:1], ("a", "b")), "one for each label"),
    (lambda: ImageSet(IMAGES, LABELS, ("a",)), "0…0.* from 0 to 1"),
)
"""A call that raises ValueError, and decisive words."""


@pytest.mark.parametrize("call, words", REFUSALS)
def test_datasets_refuse(call, words):
    refuses(words, call)


@pytest.mark.skipif(not REAL, reason="VITLENS_REAL_DATA is not set")
def test_load_tiny_imagenet(tmp_path):
    valid = load(
        Path(REAL) / "tiny-imagenet", "valid", root=tmp_path, size=64, stream=True, workers=0
    )
    assert len(valid) == 10_000 and len(valid.class_names) == 200
    assert torch.bincount(valid.labels).tolist() == [50] * 200
    images, labels = next(valid.batches([torch.arange(0, 10_000, 100)]))
    assert images.shape == (100, 3, 64, 64) and labels.equal(valid.labels[::100])


def test_select_classes_keeps_images_and_renumbers_labels():
    digits = load("digits")
    some = digits.select_classes([8, 3])
    assert some.class_names == ("8", "3")
    rows = torch.isin(digits.labels, torch.tensor([3, 8])).nonzero()[:, 0]
    assert torch.equal(some.images, digits.images[rows])
    assert torch.equal(some.labels, (digits.labels[rows] == 3).long())
    for wrong in ([3, 3], [10], [-1]):
        with pytest.raises(ValueError, match="different labels from 0 to 9"):
            digits.select_classes(wrong)
