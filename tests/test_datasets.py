"""Images are read as they are, whatever they lie in, and what is wrong with them is said in a sentence."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from data_support import encoded, parquet, saved, shown, write
from PIL import ExifTags, Image
from sklearn.datasets import load_digits

from vitlens import load_image
from vitlens.data import SOURCES, DataSource, ImageSet, Listing, Numbered, load, register
from vitlens.data.sources import source_names

REAL = os.environ.get("VITLENS_REAL_DATA")
NAMES = ["ant", "bee", "cat"]
SQUARE = {"size": (16, 16)}
SEEDS = [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


@pytest.fixture
def shards(tmp_path):
    """Ten training images in two shards, and one for validation."""
    for i in range(2):
        images = [encoded(seed, **SQUARE) for seed in SEEDS[5 * i : 5 * i + 5]]
        parquet(tmp_path / f"train-{i:05d}-of-00002.parquet", images, [0, 1, 2, 0, 1], NAMES)
    parquet(tmp_path / "validation-00000-of-00001.parquet", [encoded(99, **SQUARE)], [2], NAMES)
    return tmp_path


def loaded(folder: Path, *images: bytes, **options) -> ImageSet:
    """What is loaded of a shard of these images, all of other classes."""
    parquet(folder / "train-0.parquet", images, [*range(len(images))])
    return load(folder, **options)


def test_parquet_shards_in_order_with_names_from_their_metadata(shards):
    train, valid = load(shards, "train"), load(shards, "valid")
    assert train.class_names == ("ant", "bee", "cat") and len(train) == 10 and len(valid) == 1
    assert train.labels.tolist() == [0, 1, 2, 0, 1] * 2
    assert train.images.equal(torch.stack([shown(encoded(seed, **SQUARE)) for seed in SEEDS]))


@pytest.mark.parametrize("content", [
    '"abc"', "3", "null", "{", '{"0": "ant"}', '{"names": {"n1": "a"}, "wnids": ["n1", "n2"]}',
    '{"names": {"ant": 0, "bee": 1, "cat": 2}}', '[["ant"]]', '["ant", null]', '{"names": "ant"}',
    '{"names": {"n1": "a"}, "wnids": 3}',
])  # fmt: skip
def test_class_names_that_are_none_are_refused_by_their_file(shards, content):
    (shards / "classes.json").write_text(content)
    with pytest.raises(ValueError, match="classes.json .* list of class names"):
        load(shards)


@pytest.mark.parametrize("content, names", [
    ('{"wnids": ["n1", "n2", "n3"], "names": ["Ameise", "Biene", "Katze"]}', ("Ameise", "Biene", "Katze")),
    ('["ant", "bee", 3]', ("ant", "bee", "3")), ('{"wnids": ["n1", "n2", "n3"]}', ("n1", "n2", "n3")),
    ('{"names": {"n2": "b", "n3": "c", "n1": "a"}, "wnids": ["n1", "n2", "n3"]}', ("a", "b", "c")),
    ('{"names": {"0": "Ameise", "1": "Biene", "2": "Katze"}}', ("Ameise", "Biene", "Katze")),
])  # fmt: skip
def test_class_names_beside_the_shards_come_first(shards, content, names):
    (shards / "classes.json").write_text(content)
    assert load(shards).class_names == names


@pytest.mark.parametrize(
    "mode, kind", [("L", "JPEG"), ("RGB", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGB", "WEBP")]
)
def test_any_mode_and_format_becomes_rgb_as_pillow_has_it(tmp_path, mode, kind):
    image = encoded(3, kind, mode=mode)
    difference = loaded(tmp_path, image).images[0].int() - shown(image).int()
    assert difference.abs().max() <= (2 if mode == "CMYK" else 0)


def test_a_model_learns_from_what_is_shown_of_an_image(tmp_path):
    """A photograph of a camera held upright, gray of 16 bits, and what is transparent: as `load_image` has them."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo = np.repeat(np.arange(0, 240, 10, dtype=np.uint8)[:, None, None], 16, 1).repeat(3, 2)
    found = []
    for n, file in enumerate((
        saved(photo, "JPEG", exif=exif, quality=95), saved(np.full((24, 16), 128 * 257, np.uint16)),
        saved(np.zeros((24, 16, 4), np.uint8)),
    )):  # fmt: skip
        found.append(loaded(tmp_path / str(n), file).images[0].permute(1, 2, 0).numpy())
        assert np.abs(found[n].astype(int) - np.asarray(load_image(file)).astype(int)).max() <= 1
    assert found[0].shape == (16, 24, 3) and found[0][8, 0, 0] > 200 > 40 > found[0][8, -1, 0], "turned to the right"
    assert (found[1] == 128).all() and (found[2] == 255).all()


def test_damaged_samples_are_named_and_counted(shards):
    good, broken = encoded(1), encoded(2, "JPEG", (64, 64))
    parquet(shards / "test-00000-of-00001.parquet", [good, broken[: len(broken) // 2], b"", good], [0, 1, 2, 0])
    (shards / "validation-00000-of-00001.parquet").unlink()
    with pytest.raises(ValueError, match="2 of 4 .* test-.* row 1 .*on_damaged='skip'"):
        load(shards, "valid")
    valid = load(shards, "valid", on_damaged="skip")
    assert len(valid) == 2 and len(valid.damaged) == 2 and valid.labels.tolist() == [0, 0]
    assert "row 1 (" in valid.damaged[0] and "row 2 (" in valid.damaged[1]
    resized = load(shards, "valid", on_damaged="skip", size=8)
    assert len(resized) == 2 and resized.damaged == valid.damaged and resized.images[0].equal(resized.images[1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_shard_is_named(tmp_path, stream):
    shard = tmp_path / "train-00000-of-00001.parquet"
    parquet(shard, [encoded(i, size=(32, 32)) for i in range(100)], [i % 3 for i in range(100)])
    content = bytearray(shard.read_bytes())
    content[4:2000] = bytes(1996)
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="train-00000-of-00001.parquet"):
        load(tmp_path, size=8, stream=stream, root=tmp_path / "cache")
    assert not list(tmp_path.glob("cache/**/*.*"))


@pytest.mark.parametrize("size", [(202, 2), (2, 202)])
def test_a_strip_is_damaged(tmp_path, size):
    """To be resized, it would take memory without bound; `preprocess` refuses it by the same measure."""
    images = [encoded(i, size=s) for i, s in enumerate([(16, 16), tuple(min(side, 200) for side in size), size])]
    with pytest.raises(ValueError, match=r"1 of 3 .* row 2 .*\d+ × \d+ pixels"):
        loaded(tmp_path, *images, size=8)
    assert load(tmp_path, size=8, on_damaged="skip").labels.tolist() == [0, 1]
    stream = load(tmp_path, size=8, on_damaged="skip", stream=True, workers=0, root=tmp_path / "cache")
    assert next(stream.batches([torch.arange(3)]))[1].tolist() == [0, 1, 0] and len(stream.damaged) == 1


def test_a_missing_shard_is_an_error_unless_allowed(shards):
    (shards / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(ValueError, match="1 of the 2 train shards .* allow_partial"):
        load(shards)
    assert len(load(shards, allow_partial=True)) == 5


def test_an_image_folder(tmp_path):
    for split, per_class in (("train", 2), ("val", 1)):
        for name in ("bee", "ant"):
            write(tmp_path / split / name, {f"{i}.png": encoded(i, size=(24, 16)) for i in range(per_class)})
    train, valid = load(tmp_path, size=8), load(tmp_path, "valid", size=8)
    assert train.class_names == ("ant", "bee") and train.labels.tolist() == [0, 0, 1, 1] and len(valid) == 2
    assert train.images.shape == (4, 3, 8, 8)
    (tmp_path / "val" / "cat").mkdir()
    with pytest.raises(ValueError, match="class 'cat'"):
        load(tmp_path, "valid", size=8)


def test_resizing_keeps_the_center_and_equal_sizes_are_untouched(tmp_path):
    wide = np.zeros((16, 48, 3), np.uint8)
    wide[:, 16:32] = 200  # exactly the center square
    square = encoded(1, **SQUARE)
    images = loaded(tmp_path, saved(wide), square, size=16).images
    assert (images[0] == 200).all() and images[1].equal(shown(square))
    with pytest.raises(ValueError, match="2 sizes .*Pass size="):
        load(tmp_path)


def test_digits_are_as_scikit_learn_has_them_in_five_disjoint_folds():
    digits, seen = load_digits(), 0
    for fold in range(5):
        train, valid = load("digits", "train", fold=fold), load("digits", "valid", fold=fold)
        assert len(train) + len(valid) == 1797 and train.images.shape[1:] == (3, 8, 8)
        seen += valid.images[:, 0].double().sum()
    assert seen == np.rint(digits.images * 255 / 16).sum()
    assert torch.equal(valid.images, load("digits", "valid", fold=4).images)


def test_subset_and_device():
    digits = load("digits", "valid")
    a, b, c = digits.subset(50, 1), digits.subset(50, 1), digits.subset(50, 2)
    assert torch.equal(a.images, b.images) and not torch.equal(a.labels, c.labels) and len(a) == 50
    assert a.to("cpu").images.device.type == "cpu"
    with pytest.raises(ValueError, match="between 1 and 360 .*361"):
        digits.subset(361)


@pytest.mark.parametrize("change, message", [
    ({"source": "nowhere"}, "'nowhere' is not a folder"), ({"split": "dev"}, "'train'.* got 'dev'"),
    ({"size": 0}, "size .* positive .* got 0"), ({"on_damaged": "ignore"}, "'skip', got 'ignore'"),
    ({"fold": 5}, "folds 0…4; fold 5"), ({"workers": -1}, "workers .* got -1"),
])  # fmt: skip
def test_what_cannot_be_loaded_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        load(**{"source": "digits", "split": "train", **change})


def test_folders_and_files_that_are_no_data_set(tmp_path):
    with pytest.raises(ValueError, match="neither Parquet shards nor a folder"):
        load(tmp_path)
    (tmp_path / "train-0.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="is not a Parquet shard"):
        load(tmp_path)
    with pytest.raises(ValueError, match="none of its valid split"):
        load(tmp_path, "valid")


@pytest.mark.parametrize("labels, message", [
    (pa.array(["ant", "bee"]), "labels of type string.* column label .* whole number"),
    (pa.array([0, None], pa.int64()), "1 labels missing.* column label"),
    (pa.array([0.5, 1.0]), "labels of type double"),
])  # fmt: skip
@pytest.mark.parametrize("named", [False, True])
def test_labels_that_are_no_whole_numbers_are_told(tmp_path, labels, message, named):
    parquet(tmp_path / "train-0.parquet", [encoded(i) for i in range(2)], labels)
    if named:
        (tmp_path / "classes.json").write_text(json.dumps(["ant", "bee"]))
    with pytest.raises(ValueError, match=f"train-0.parquet has {message}"):
        load(tmp_path)


def test_an_image_set_refuses_what_does_not_fit():
    images, labels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    for wrong, message in (
        ((images.float(), labels, ("a", "b")), "uint8 images .*float32"),
        ((images, labels[:1], ("a", "b")), r"int64 .* \(1,\)"),
        ((images, labels, ("a",)), "0…0.* from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            ImageSet(*wrong)


def test_a_data_set_of_ones_own_has_a_name(tmp_path, monkeypatch):
    """One row: `load` opens it, held or streamed, and help texts name it."""

    def plain(request):
        assert request.root == tmp_path
        n = {"train": 4, "valid": 2}[request.part]
        images = torch.full((n, 3, 8, 8), 7, dtype=torch.uint8)
        return Listing(Numbered(request.name, images), [0, 1] * (n // 2), ("a", "b"))

    monkeypatch.setattr("vitlens.data.sources.SOURCES", dict(SOURCES))
    register(DataSource("plain/COLOR", "images of one color", plain))
    train, valid = load("plain/gray", root=tmp_path), load("plain/gray", "valid", size=4, root=tmp_path, stream=True)
    assert train.labels.tolist() == [0, 1, 0, 1] and (train.images == 7).all()
    assert valid.samples.name(1) == "gray image 1" and valid.size == (4, 4)
    assert source_names().endswith("plain/COLOR")
    with pytest.raises(ValueError, match="plain/COLOR"):
        load("plane")


def test_every_named_data_set_is_explained():
    assert all(f'`"{row.name}"`: ' in load.__doc__ for row in SOURCES.values())
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert all(f"`{prefix}" in readme for prefix in SOURCES if prefix in ("torch/", "hfds/", "wds/"))


@pytest.mark.skipif(not REAL, reason="VITLENS_REAL_DATA is not set")
def test_tiny_imagenet():
    valid = load(Path(REAL) / "tiny-imagenet", "valid")
    assert valid.images.shape == (10_000, 3, 64, 64) and len(valid.class_names) == 200
    assert torch.bincount(valid.labels).tolist() == [50] * 200 and not valid.damaged
