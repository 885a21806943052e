"""Where several readings fit, one is chosen only if the others give the same, else by an option."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from forms import cannot_occur, form
from support import encoded, parquet, refuses, saved_model, tar, vitlens, write
from timm.data import ImageNetInfo
from timm.data.readers.reader_image_folder import find_images_and_targets

from vitlens import load_model
from vitlens.classes import class_numbers, describe_match, imagenet_numbers
from vitlens.data import load
from vitlens.models import label_names
from vitlens.train import run
from vitlens_paper.evaluate import ablation, evaluate

MIXED = ("Zebra", "apple", "kiwi", "mango")
OPTIONS = {"workers": 0, "device": "cpu"}


def folders(folder, names, each=4):
    """A folder of classes, each image with another content."""
    images = {}
    for n, name in enumerate(names):
        images |= {f"{name}/{i}.png": encoded(100 * n + i, size=(32, 32)) for i in range(each)}
    return write(folder, images)


@pytest.fixture(scope="module")
def nameless(tmp_path_factory):
    """A folder with a model of four classes without names."""
    return saved_model(tmp_path_factory.mktemp("model"), num_classes=4)


def by_timm(model, folder):
    """Percentage of images whose class is the one of timm's reader."""
    _, numbers = find_images_and_targets(str(folder))
    images = load(folder, "whole", size=32)
    network = load_model(model)
    from vitlens_paper.evaluate.reading import read, top_classes

    classes, labels = read(network, images, top_classes(network, k=1))
    wanted = torch.tensor([numbers[images.class_names[label]] for label in labels])
    return 100 * (classes[:, 0] == wanted).double().mean().item()


@form(5, door="command: evaluate, class folders", case="Zebra, apple, kiwi", right="timm's reader")
def test_evaluate_asks_for_an_order(nameless, tmp_path):
    data = folders(tmp_path / "data", MIXED)
    arguments = ("evaluate", nameless, "--data", data, "--device", "cpu", "--workers", 0)
    done = vitlens(*arguments, expect=2)
    assert "Zebra, apple, kiwi, mango (text)" in done.stderr
    assert "apple, kiwi, mango, Zebra (case-blind)" in done.stderr and "--classes" in done.stderr
    out = tmp_path / "r.json"
    vitlens(*arguments, "--classes", "timm", "--out", out)
    (record,) = json.loads(out.read_text())
    assert record["value"] == pytest.approx(by_timm(nameless, data), abs=1e-3)
    assert "in the order timm" in record["note"]


@form(5, door="Python: ablation.effects", case="names with numbers", right="refused, or chosen")
def test_ablation_asks_for_an_order(nameless, tmp_path):
    data = folders(tmp_path, ("x1", "x10", "x2", "x9"))
    options = {"progress": False, "say": str, "ways": "zero", **OPTIONS}
    refuses(r"x1, x2, x9, x10 \(natural\)", ablation.effects, str(nameless), str(data), **options)
    table = ablation.effects(str(nameless), str(data), classes="natural", **options)
    assert len(table) == 6


@form(5, door="Python: class_numbers, digits", case="1, 10, 11, 2 … or 0 … 11", right="by hand")
def test_digits_have_two_orders():
    model = timm.create_model("test_vit", num_classes=12)
    for first in (0, 1):
        names = tuple(sorted(str(i) for i in range(first, first + 12)))
        refuses("usual orders", class_numbers, model, names)
        natural = [int(name) - first for name in names]
        assert class_numbers(model, names, "natural").tolist() == natural
        assert class_numbers(model, names, "text").tolist() == list(range(12))
    padded = tuple(f"{i:02d}" for i in range(12))
    assert class_numbers(model, padded).tolist() == list(range(12))
    assert class_numbers(model, ("3", "11")).tolist() == [3, 11]


@form(5, door="Python: classes=, a file", case="names in the model's order", right="by hand")
@pytest.mark.parametrize("kind", ["txt", "list", "object"])
def test_names_of_a_file(nameless, tmp_path, kind):
    names = ["mango", "Zebra", "kiwi", "apple"]
    file = tmp_path / "names"
    contents = {
        "txt": "\n".join(names) + "\n",
        "list": json.dumps(names),
        "object": json.dumps({str(i): name for i, name in enumerate(names)}),
    }
    file.write_text(contents[kind])
    model = load_model(nameless)
    assert class_numbers(model, MIXED, str(file)).tolist() == [1, 3, 2, 0]
    assert class_numbers(model, ("kiwi", "mango"), str(file)).tolist() == [2, 0]
    data = folders(tmp_path / "data", MIXED)
    (record,) = evaluate(nameless, str(data), classes=file, say=str, **OPTIONS)
    assert "named by names" in record.note
    file.write_text("a\nb\n")
    refuses("names of the model's 4 classes, got 2", class_numbers, model, MIXED, str(file))
    refuses("must be one of text, natural", class_numbers, model, MIXED, "nothing")


@form(5, door="transformers: id2label and timm: label_names", case="LABEL_0 …", right="no names")
def test_placeholders_are_not_names(tmp_path):
    folder = saved_model(tmp_path, num_classes=4)
    config = json.loads((folder / "config.json").read_text())
    config["label_names"] = [f"LABEL_{i}" for i in range(4)]
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder)
    assert label_names(model) is None
    assert "by position" in describe_match(model, ("a", "b", "c", "d"))
    assert class_numbers(model, ("a", "b", "c", "d")).tolist() == [0, 1, 2, 3]


@form(5, door="torchvision: categories", case="WordNet ids, all and some", right="timm's tables")
def test_wordnet_ids_for_human_names():
    from torchvision.models import ViT_B_32_Weights

    info = ImageNetInfo()
    ids = info.label_names()
    model = timm.create_model("test_vit", num_classes=1000)
    model.label_names = ViT_B_32_Weights.DEFAULT.meta["categories"]
    assert class_numbers(model, tuple(ids)).tolist() == list(range(1000))
    assert class_numbers(model, (ids[517], ids[134], "tench")).tolist() == [517, 134, 0]
    assert class_numbers(model, (f"{ids[151]}-Chihuahua",)).tolist() == [151]
    refuses("'crane' is the name of several .numbers 134, 517", class_numbers, model, ("crane",))


@form(5, door="open_clip: names of classes", case="WordNet ids and ReaL's", right="the ids' order")
def test_wordnet_ids_for_the_names_of_open_clip():
    open_clip = pytest.importorskip("open_clip")
    model = timm.create_model("test_vit", num_classes=1000)
    model.label_names = list(open_clip.IMAGENET_CLASSNAMES)
    ids = tuple(ImageNetInfo().label_names())
    assert class_numbers(model, ids).tolist() == list(range(1000))
    assert class_numbers(model, ids[700:702]).tolist() == [700, 701]
    assert imagenet_numbers(model).tolist() == list(range(1000))
    model.label_names = model.label_names[::-1]
    words = (
        r"'n01440764', 'n01443537', 'n01484850' are not\. The model's classes are 'toilet paper'"
    )
    refuses(words, class_numbers, model, ids[:3])


@form(
    5, door="own model of ImageNet's classes", case="100 classes, permuted", right="timm's tables"
)
def test_both_vocabularies_of_some_classes():
    info = ImageNetInfo()
    chosen = np.random.default_rng(0).permutation(130)[:100]
    ids = [info.index_to_label_name(int(i)) for i in chosen]
    texts = [info.index_to_description(int(i)) for i in chosen]
    model = timm.create_model("test_vit", num_classes=100)
    for own, others in ((ids, texts), (texts, ids)):
        model.label_names = own
        assert class_numbers(model, tuple(others[::-1])).tolist() == list(range(99, -1, -1))
        first = others[3].split(",")[0].replace(" ", "_").upper()
        assert class_numbers(model, (first.lower(),)).tolist() == [3]
    model.label_names = [*texts[:99], "my own class"]
    refuses("not", class_numbers, model, (ids[0],))


def sample(i, **fields):
    names = {name.replace("_", "."): content for name, content in fields.items()}
    return {f"{i:03d}.{name}": content for name, content in names.items()}


def two_images(i):
    label = str(i % 2).encode()
    photo, depth = encoded(i, "JPEG", (16, 16)), encoded(900, "PNG", (16, 16))
    return sample(i, depth_png=depth, jpg=photo, cls=label)


@form(5, door="WebDataset: load and streams", case="jpg, depth.png", right="the jpg's pixels")
def test_shards_with_several_images(tmp_path):
    members = {}
    for i in range(6):
        members |= two_images(i)
    tar(tmp_path / "train-0.tar", members)
    refuses("several images: depth.png, jpg.*--image-key", load, tmp_path, size=16)
    photos = load(tmp_path, size=16, image_key="jpg")
    depths = load(tmp_path, size=16, image_key="depth.png")
    assert len({image.numpy().tobytes() for image in photos.images}) == 6
    assert len({image.numpy().tobytes() for image in depths.images}) == 1
    stream = load(tmp_path, size=16, image_key="jpg", stream=True, workers=0)
    images, _ = next(stream.batches([torch.arange(6)]))
    assert images.equal(photos.images)
    refuses("must be one of the sample's images depth.png, jpg", load, tmp_path, image_key="png")


@form(5, door="command: train and its resumption", case="--image-key", right="data.json keeps it")
def test_train_takes_the_key(tmp_path):
    for split, start in (("train", 0), ("val", 50)):
        members = {}
        for i in range(start, start + 40):
            members |= two_images(i)
        tar(tmp_path / "data" / f"{split}-0.tar", members)
    words = (
        "train",
        "--recipe",
        "digits",
        "--data",
        tmp_path / "data",
        "--tiny",
        "--device",
        "cpu",
    )
    words += ("--workers", 0, "--watch", 0, "--out", tmp_path / "run")
    assert "--image-key" in vitlens(*words, expect=2).stderr
    vitlens(*words, "--image-key", "jpg")
    assert json.loads((tmp_path / "run/data.json").read_text())["image_key"] == "jpg"
    (tmp_path / "run/training.json").unlink()
    options = {"resume": True, "quiet": True, "device": "cpu", "watch": 0, "workers": 0}
    assert run("", "", tmp_path / "run", **options)["finished"]
    found = [
        *evaluate(tmp_path / "run/model", tmp_path / "data", image_key="jpg", say=str, **OPTIONS)
    ]
    assert found[0].images == 40


@form(5, door="WebDataset: labels", case="cls and json contradict", right="each field by hand")
def test_shards_with_two_labels(tmp_path):
    members = {}
    for i in range(4):
        both = {"cls": b"0", "json": json.dumps({"label": i % 2, "fine": 1 - i % 2}).encode()}
        members |= sample(i, jpg=encoded(i, "JPEG"), **both)
    tar(tmp_path / "train-0.tar", members)
    refuses("two labels, cls 0 and json.label 1.*--label-key", load, tmp_path)
    found = {
        key: load(tmp_path, size=8, label_key=key).labels.tolist()
        for key in ("cls", "json", "json.fine")
    }
    assert found == {"cls": [0] * 4, "json": [0, 1, 0, 1], "json.fine": [1, 0, 1, 0]}


@form(5, door="Parquet", case="two image columns, label and fine_label", right="by hand")
def test_tables_with_several_columns(tmp_path):
    def images(first):
        return [{"bytes": encoded(first + i), "path": None} for i in range(4)]

    columns = {"left": images(0), "right": images(9), "label": [0, 0, 1, 1], "labels": [0, 1] * 2}
    pq.write_table(pa.table(columns), tmp_path / "train-0.parquet")
    options = {"root": tmp_path / "cache", "size": 8}
    refuses("left, right could be it.*--image-key", load, tmp_path, **options)
    options["image_key"] = "right"
    refuses("label, labels could be it.*--label-key", load, tmp_path, **options)
    found = load(tmp_path, label_key="labels", **options)
    assert found.labels.tolist() == [0, 1, 0, 1]
    assert "The column right of" in found.note
    refuses("image_key must name a column", load, tmp_path, **(options | {"image_key": "no"}))


@form(5, door="folders of splits", case="val and valid, dev", right="refused, read")
def test_two_validation_folders(tmp_path):
    for split in ("train", "dev"):
        folders(tmp_path / split, ("a", "b"), each=3)
    assert len(load(tmp_path, "valid")) == 6
    folders(tmp_path / "valid", ("a", "b"), each=2)
    refuses("several splits for valid: dev, valid", load, tmp_path, "valid")
    assert len(load(tmp_path, "train")) == 6
    refuses("--image-key", load, tmp_path, image_key="jpg")


@form(5, door="WebDataset: names of shards", case="train and val in one name", right="refused")
def test_a_shard_of_two_splits(tmp_path):
    members = {}
    for i in range(2):
        members |= sample(i, jpg=encoded(i, "JPEG"), cls=b"0")
    tar(tmp_path / "train-val-0.tar", members)
    refuses("several splits in its name: train, val", load, tmp_path, "valid")


cannot_occur(5, door="metadata.csv or .jsonl of a folder", reason="they are not read as labels")
cannot_occur(5, door="named data", reason="their readers have one image and one label")


@form(5, door="models of ImageNet, own order", case="two classes swapped", right="the own names")
def test_imagenet_classes_in_another_order():
    info = ImageNetInfo()
    ids = info.label_names()
    for names in (list(ids), info.label_descriptions()):
        names[5], names[900] = names[900], names[5]
        model = timm.create_model("test_vit", num_classes=1000)
        model.label_names = names
        assert class_numbers(model, (ids[5], ids[900], ids[7])).tolist() == [900, 5, 7]
        assert imagenet_numbers(model)[[5, 900]].tolist() == [900, 5]


@form(5, door="names of classes, by spelling", case="a and A; É in NFD", right="the own names")
def test_names_that_differ_in_case_only():
    model = timm.create_model("test_vit", num_classes=3)
    model.label_names = ["a", "A", "cafe\u0301"]
    assert class_numbers(model, ("A", "a", "caf\xe9")).tolist() == [1, 0, 2]
    assert class_numbers(model, ("A",)).tolist() == [1]


@form(5, door="class folders, other orders", case="É, −2 and −1, I … IX", right="by hand")
@pytest.mark.parametrize(
    ("names", "order", "numbers"),
    [
        (("eclair", "zebra", "\xe9clair"), "locale", [0, 2, 1]),
        (("-1", "-2", "0"), "value", [1, 0, 2]),
        (("I", "IX", "V"), None, None),
    ],
)
def test_orders_of_accents_and_values(names, order, numbers):
    model = timm.create_model("test_vit", num_classes=3)
    if order is None:
        assert "I, IX, V are matched by position" in describe_match(model, names)
        return
    refuses(rf"\({order}\)", class_numbers, model, names)
    assert class_numbers(model, names, order).tolist() == numbers


@form(5, door="Parquet: ClassLabel, a model without names", case="x2 before x10", right="labels")
def test_stored_class_numbers_are_not_an_order_of_folders(nameless, tmp_path):
    names, labels = ["x1", "x2", "x10", "x3"], [0, 1, 2, 3, 2]
    files = [encoded(i, size=(32, 32)) for i in range(5)]
    parquet(tmp_path / "d" / "test.parquet", files, labels, sorted(names, key=len))
    (record, *_) = evaluate(nameless, str(tmp_path / "d"), root=tmp_path / "c", say=str, **OPTIONS)
    images = load(tmp_path / "d", "test", size=32, root=tmp_path / "c")
    assert images.stored_classes and images.labels.tolist() == labels
    from vitlens_paper.evaluate.reading import read, top_classes

    network = load_model(nameless)
    classes, _ = read(network, images, top_classes(network, k=1))
    right = sum(int(c) == n for c, n in zip(classes, labels, strict=True))
    assert record.value == pytest.approx(20 * right, abs=1e-3) and "x1, x2, x3, x10" in record.note


@form(5, door="own model of 1,000 classes without names", case="note", right="the sentence")
def test_assumed_imagenet_classes_are_noted(tmp_path):
    model = load_model(saved_model(tmp_path, num_classes=1000))
    assert "are taken as ImageNet's" in describe_match(model, ("tench",))
