"""Images are read as they are, whatever they lie in, and what is wrong with them is said in a sentence."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import ExifTags, Image
from sklearn.datasets import load_digits

from vitlens import load_image
from vitlens.data import ImageSet, load

REAL = os.environ.get("VITLENS_REAL_DATA")
NAMES = ["ant", "bee", "cat"]


def picture(seed: int, size=(16, 16), mode="RGB", kind="PNG") -> tuple[bytes, np.ndarray]:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue(), np.asarray(Image.open(io.BytesIO(buffer.getvalue())).convert("RGB"))


def write_shard(path: Path, encoded: list[bytes], labels: list[int], names=NAMES) -> None:
    table = pa.table({
        "image": pa.array([{"bytes": b, "path": None} for b in encoded]), "label": pa.array(labels, pa.int64()),
    })  # fmt: skip
    info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), path)


@pytest.fixture
def shards(tmp_path):
    for i in range(2):
        write_shard(
            tmp_path / f"train-{i:05d}-of-00002.parquet", [picture(10 * i + j)[0] for j in range(5)], [0, 1, 2, 0, 1]
        )
    write_shard(tmp_path / "validation-00000-of-00001.parquet", [picture(99)[0]], [2])
    return tmp_path


def test_parquet_shards_in_order_with_names_from_their_metadata(shards):
    train, valid = load(shards, "train"), load(shards, "valid")
    assert train.class_names == ("ant", "bee", "cat") and len(train) == 10 and len(valid) == 1
    assert train.labels.tolist() == [0, 1, 2, 0, 1] * 2
    for n, seed in enumerate([0, 1, 2, 3, 4, 10, 11, 12, 13, 14]):
        np.testing.assert_array_equal(train.images[n].permute(1, 2, 0), picture(seed)[1])


def test_class_names_beside_the_shards_come_first(shards):
    (shards / "classes.json").write_text(
        json.dumps({"wnids": ["n1", "n2", "n3"], "names": ["Ameise", "Biene", "Katze"]})
    )
    assert load(shards).class_names == ("Ameise", "Biene", "Katze")


@pytest.mark.parametrize("content", [
    '"abc"', "3", "null", "{", '{"0": "ant"}', '{"names": {"n1": "a"}, "wnids": ["n1", "n2"]}',
    '{"names": {"ant": 0, "bee": 1, "cat": 2}}', '[["ant"]]', '["ant", null]', '{"names": "ant"}',
    '{"names": {"n1": "a"}, "wnids": 3}',
])  # fmt: skip
def test_class_names_that_are_none_are_refused_by_their_file(shards, content):
    (shards / "classes.json").write_text(content)
    with pytest.raises(ValueError, match=r"classes.json should hold a list of class names, .*\. Repair or remove it\."):
        load(shards)


@pytest.mark.parametrize("content, names", [
    ('["ant", "bee", 3]', ("ant", "bee", "3")), ('{"wnids": ["n1", "n2", "n3"]}', ("n1", "n2", "n3")),
    ('{"names": {"n2": "b", "n3": "c", "n1": "a"}, "wnids": ["n1", "n2", "n3"]}', ("a", "b", "c")),
    ('{"names": {"0": "Ameise", "1": "Biene", "2": "Katze"}}', ("Ameise", "Biene", "Katze")),
])  # fmt: skip
def test_class_names_in_a_list_or_by_their_numbers(shards, content, names):
    (shards / "classes.json").write_text(content)
    assert load(shards).class_names == names


@pytest.mark.parametrize(
    "mode, kind", [("L", "JPEG"), ("RGB", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGB", "WEBP")]
)
def test_any_mode_and_format_becomes_rgb_as_pillow_has_it(tmp_path, mode, kind):
    encoded, expected = picture(3, mode=mode, kind=kind)
    write_shard(tmp_path / "train-0.parquet", [encoded], [0])
    difference = load(tmp_path).images[0].permute(1, 2, 0).int() - torch.from_numpy(expected.copy()).int()
    assert difference.abs().max() <= (2 if mode == "CMYK" else 0)


def test_a_model_learns_from_what_is_shown_of_an_image(tmp_path):
    """A photograph of a camera held upright, gray of 16 bits, and what is transparent: as `load_image` has them."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo = io.BytesIO()
    Image.fromarray(np.repeat(np.arange(0, 240, 10, dtype=np.uint8)[:, None, None], 16, 1).repeat(3, 2)).save(
        photo, "JPEG", exif=exif, quality=95
    )
    deep = io.BytesIO()
    Image.fromarray(np.full((24, 16), 128 * 257, np.uint16)).save(deep, "PNG")
    clear = io.BytesIO()
    Image.fromarray(np.zeros((24, 16, 4), np.uint8)).save(clear, "PNG")
    found = []
    for n, file in enumerate((photo, deep, clear)):
        (tmp_path / str(n)).mkdir()
        write_shard(tmp_path / str(n) / "train-0.parquet", [file.getvalue()], [0])
        found.append(load(tmp_path / str(n)).images[0].permute(1, 2, 0).numpy())
        assert np.abs(found[n].astype(int) - np.asarray(load_image(file.getvalue())).astype(int)).max() <= 1
    assert found[0].shape == (16, 24, 3) and found[0][8, 0, 0] > 200 > 40 > found[0][8, -1, 0], "turned to the right"
    assert (found[1] == 128).all() and (found[2] == 255).all()


def test_damaged_samples_are_named_and_counted(shards):
    good, broken = picture(1)[0], picture(2, size=(64, 64), kind="JPEG")[0]
    write_shard(shards / "test-00000-of-00001.parquet", [good, broken[: len(broken) // 2], b"", good], [0, 1, 2, 0])
    (shards / "validation-00000-of-00001.parquet").unlink()
    with pytest.raises(ValueError, match="2 of 4 samples cannot be decoded, the first being test-.* row 1"):
        load(shards, "valid")
    valid = load(shards, "valid", on_damaged="skip")
    assert len(valid) == 2 and len(valid.damaged) == 2 and valid.labels.tolist() == [0, 0]
    assert "row 1 (" in valid.damaged[0] and "row 2 (" in valid.damaged[1]
    resized = load(shards, "valid", on_damaged="skip", size=8)
    assert len(resized) == 2 and resized.damaged == valid.damaged and resized.images[0].equal(resized.images[1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_shard_is_named(tmp_path, stream):
    shard = tmp_path / "train-00000-of-00001.parquet"
    write_shard(shard, [picture(i, size=(32, 32))[0] for i in range(100)], [i % 3 for i in range(100)])
    content = bytearray(shard.read_bytes())
    content[4:2000] = bytes(1996)
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="train-00000-of-00001.parquet"):
        load(tmp_path, size=8, stream=stream, root=tmp_path / "cache")
    assert not list(tmp_path.glob("cache/**/*.*"))


@pytest.mark.parametrize("size", [(202, 2), (2, 202)])
def test_a_strip_is_damaged(tmp_path, size):
    """To be resized, it would take memory without bound; `preprocess` refuses it by the same measure."""
    sizes = [(16, 16), tuple(min(side, 200) for side in size), size]
    write_shard(tmp_path / "train-0.parquet", [picture(i, size=s)[0] for i, s in enumerate(sizes)], [0, 1, 2])
    with pytest.raises(ValueError, match=r"1 of 3 samples .* row 2 \(a strip of \d+ × \d+ pixels\)\. Repair them, or"):
        load(tmp_path, size=8)
    assert load(tmp_path, size=8, on_damaged="skip").labels.tolist() == [0, 1]
    stream = load(tmp_path, size=8, on_damaged="skip", stream=True, workers=0, root=tmp_path / "cache")
    assert next(stream.batches([torch.arange(3)]))[1].tolist() == [0, 1, 0] and len(stream.damaged) == 1


def test_a_missing_shard_is_an_error_unless_allowed(shards):
    (shards / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(ValueError, match="holds 1 of the 2 train shards"):
        load(shards)
    assert len(load(shards, allow_partial=True)) == 5


def test_an_image_folder(tmp_path):
    for split, per_class in (("train", 2), ("val", 1)):
        for name in ("bee", "ant"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(per_class):
                (tmp_path / split / name / f"{i}.png").write_bytes(picture(i, size=(24, 16))[0])
    train, valid = load(tmp_path, size=8), load(tmp_path, "valid", size=8)
    assert train.class_names == ("ant", "bee") and train.labels.tolist() == [0, 0, 1, 1] and len(valid) == 2
    assert train.images.shape == (4, 3, 8, 8)
    (tmp_path / "val" / "cat").mkdir()
    with pytest.raises(ValueError, match="holds a class 'cat'"):
        load(tmp_path, "valid", size=8)


def test_resizing_keeps_the_center_and_equal_sizes_are_untouched(tmp_path):
    wide = np.zeros((16, 48, 3), np.uint8)
    wide[:, 16:32] = 200  # exactly the center square
    buffer = io.BytesIO()
    Image.fromarray(wide).save(buffer, "PNG")
    write_shard(tmp_path / "train-0.parquet", [buffer.getvalue(), picture(1)[0]], [0, 1])
    images = load(tmp_path, size=16).images
    assert (images[0] == 200).all()
    np.testing.assert_array_equal(images[1].permute(1, 2, 0), picture(1)[1])
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
    with pytest.raises(ValueError, match="between 1 and 360"):
        digits.subset(361)


@pytest.mark.parametrize("change, message", [
    ({"source": "nowhere"}, "is not a folder"), ({"split": "dev"}, "'test' or 'whole'"), ({"size": 0}, "positive"),
    ({"on_damaged": "ignore"}, "'raise' or 'skip'"), ({"source": "digits", "fold": 5}, "folds 0…4"),
])  # fmt: skip
def test_what_cannot_be_loaded_is_refused(change, message):
    arguments = {"source": "digits", "split": "train", **change}
    with pytest.raises(ValueError, match=message):
        load(**arguments)


def test_folders_and_files_that_are_no_data_set(tmp_path):
    with pytest.raises(ValueError, match="neither Parquet shards nor a folder"):
        load(tmp_path)
    (tmp_path / "train-0.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="is not a Parquet shard"):
        load(tmp_path)
    with pytest.raises(ValueError, match="none of its valid split"):
        load(tmp_path, "valid")


@pytest.mark.parametrize("labels, message", [
    (pa.array(["ant", "bee"]), "labels of type string, and the column label should hold a whole number"),
    (pa.array([0, None], pa.int64()), "1 labels missing, and the column label should"),
    (pa.array([0.5, 1.0]), "labels of type double"),
])  # fmt: skip
@pytest.mark.parametrize("named", [False, True])
def test_labels_that_are_no_whole_numbers_are_told(tmp_path, labels, message, named):
    images = pa.array([{"bytes": picture(i)[0], "path": None} for i in range(2)])
    pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "train-0.parquet")
    if named:
        (tmp_path / "classes.json").write_text('["ant", "bee"]')
    with pytest.raises(ValueError, match=f"train-0.parquet has {message}"):
        load(tmp_path)


def test_an_image_set_refuses_what_does_not_fit():
    images, labels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="uint8"):
        ImageSet(images.float(), labels, ("a", "b"))
    with pytest.raises(ValueError, match="one int64 label"):
        ImageSet(images, labels[:1], ("a", "b"))
    with pytest.raises(ValueError, match="Labels must lie in 0…0"):
        ImageSet(images, labels, ("a",))


@pytest.mark.skipif(not REAL, reason="VITLENS_REAL_DATA is not set")
def test_tiny_imagenet():
    valid = load(Path(REAL) / "tiny-imagenet", "valid")
    assert valid.images.shape == (10_000, 3, 64, 64) and len(valid.class_names) == 200
    assert torch.bincount(valid.labels).tolist() == [50] * 200 and not valid.damaged
