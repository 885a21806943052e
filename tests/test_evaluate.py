"""Features are the input of the head; a probe equals its definition and learns from the training images alone."""

import os
import pickle
import socket
from functools import partial

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from support import clouds, encoded, refuses, write

from vitlens.data import ImageSet, load
from vitlens.data.augment import normalize
from vitlens.models import pixels, preprocess
from vitlens.train import join
from vitlens_paper.evaluate import features, linear_probe
from vitlens_paper.evaluate.reading import before_the_head, open_images, read, top_classes


def by_hand(train, valid, folds=5):
    (x, y), (x_valid, y_valid) = (
        [part.numpy().astype(float) for part in pair] for pair in (train, valid)
    )
    fold = np.zeros(len(y), int)
    for label, count in zip(
        *np.unique(y, return_counts=True), strict=True
    ):  # each class in blocks of one size
        fold[y == label] = np.repeat(range(folds), count // folds)

    def score(a, b, x_other, y_other, c):
        mean, deviation = a.mean(0), a.std(0)
        learned = LogisticRegression(C=c, max_iter=5000).fit((a - mean) / deviation, b)
        return (learned.predict((x_other - mean) / deviation) == y_other).mean()

    penalties = [1e-4, 1e-3, 1e-2, 1e-1, 1, 10]
    means = [
        np.mean(
            [score(x[fold != k], y[fold != k], x[fold == k], y[fold == k], c) for k in range(folds)]
        )
        for c in penalties
    ]
    return 100 * score(x, y, x_valid, y_valid, penalties[int(np.argmax(means))])


@pytest.fixture
def model(vit):
    return vit(
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_heads=3,
        num_classes=10,
        drop_path_rate=0.5,
    )


def test_features_equal_head_input(model):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(
        0, 256, (130, 3, 32, 32), dtype=torch.uint8, generator=generator
    )  # more than one batch
    data = ImageSet(images, torch.arange(130) % 2, ("a", "b"))
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 32, 32), "crop_pct": 1.0}
    model.train()
    model.norm.eval()
    found, labels = features(model, data)
    assert model.training and model.blocks[1].training and not model.norm.training
    assert found.shape == (130, 48) and not found.requires_grad and torch.equal(labels, data.labels)
    model.eval()
    pictures = [image.permute(1, 2, 0).numpy() for image in images[[0, 105]]]
    with torch.no_grad():
        torch.testing.assert_close(
            model.head(found[[0, 105]]), model(preprocess(model, pictures)), rtol=0, atol=1e-4
        )


def test_features_in_half_precision(model):
    images = torch.randint(
        0, 256, (9, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    data = ImageSet(images, torch.arange(9) % 2, ("a", "b"))
    expected, _ = features(model.double(), data)
    assert expected.dtype == torch.float64
    for precision, close in {
        torch.float32: 1e-5,
        torch.float16: 0.01,
        torch.bfloat16: 0.05,
    }.items():
        found, _ = features(model.to(precision), data)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=close)
        model.double()


def test_read_rejects_outputs_that_are_not_finite(model, tmp_path):
    """NaN ranks above all numbers, so that its class would be the likeliest."""
    write(
        tmp_path / "set",
        {f"{c}/{i}.png": encoded(i + ord(c), size=(32, 32)) for c in "ab" for i in range(3)},
    )
    stream = load(tmp_path / "set", "whole", size=32, stream=True, workers=0)
    held = load(tmp_path / "set", "whole", size=32)

    for value in (torch.nan, -torch.inf):

        def spoilt(_, __, output, value=value):
            output[[1, 4], ..., 7] = value
            return output

        for module, output in (
            (model.head, top_classes(model)),
            (model.norm, before_the_head(model)),
        ):
            with module.register_forward_hook(spoilt):
                for data, name in ((stream, "a/1.png"), (held, "number 1")):
                    refuses(
                        f"2 of 6 images are not finite, the first being {name}\\.",
                        read,
                        model,
                        data,
                        output,
                    )
            assert read(model, stream, output)[0].shape[0] == 6


def test_opened_preprocesses_for_the_model(tmp_path):
    deit = timm.create_model("deit_tiny_patch16_224", depth=1, num_classes=2).eval()
    assert (
        deit.pretrained_cfg["crop_pct"] == 0.9 and deit.pretrained_cfg["interpolation"] == "bicubic"
    )
    files = [
        write(tmp_path / "all", {f"{c}/0.jpg": encoded(i, "JPEG", (300 + 40 * i, 260))})
        / c
        / "0.jpg"
        for i, c in enumerate("ab")
    ]
    ((images, _),) = open_images(deit, str(tmp_path / "all"), "whole", workers=0).batches(
        [torch.arange(2)]
    )
    config = deit.pretrained_cfg
    torch.testing.assert_close(
        normalize(images, config["mean"], config["std"]),
        preprocess(deit, files),
        rtol=0,
        atol=1e-6,
    )
    read_by_workers = open_images(deit, str(tmp_path / "all"), "whole", workers=1)
    assert next(read_by_workers.batches([torch.arange(2)]))[0].equal(images)
    assert pickle.loads(pickle.dumps(pixels(deit)))(Image.new("RGB", (9, 7))).shape == (3, 224, 224)


def classes_named(folder, out, **environment):
    """The classes that a small model names for the images of a folder, saved for each process that shares them."""
    os.environ.update(environment)
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=1, num_heads=3
    )
    world = join("cpu")
    data = load(folder, "whole", size=16, stream=True, workers=0)
    torch.save(
        read(model.eval(), data, top_classes(model), world=world),
        f"{out}-{world.size}-{world.rank}",
    )
    if world.size > 1:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_read_shares_images_between_processes(tmp_path, forked):
    folder = write(
        tmp_path / "set", {f"{c}/{i}.png": encoded(i + ord(c)) for c in "abc" for i in range(7)}
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
    run = partial(classes_named, folder, tmp_path / "found", **shared)
    pair = [forked(partial(run, RANK=rank, LOCAL_RANK=rank)) for rank in "01"]
    classes_named(folder, tmp_path / "found")
    for process in pair:
        process.join(120)
        assert process.exitcode == 0
    alone, *both = (torch.load(tmp_path / f"found-{name}") for name in ("1-0", "2-0", "2-1"))
    assert (
        all(torch.equal(a, b) for shared in both for a, b in zip(alone, shared, strict=True))
        and len(alone[0]) == 21
    )


def test_probe_equals_definition():
    for noise in (1.0, 6.0):
        train, valid = clouds(60, 1, noise=noise), clouds(300, 2, noise=noise)
        assert linear_probe(train, valid) == pytest.approx(by_hand(train, valid))
    train, valid = clouds(12, 1, noise=1.0), clouds(300, 2, noise=1.0)
    few = tuple(
        part[[1, 2, 4, 5, 7, 8, 10, 11, 0, 3]] for part in train
    )  # two of one class, four of the others
    assert linear_probe(few, valid) == pytest.approx(by_hand(few, valid, folds=2))


def unpooled():
    small = dict(img_size=32, embed_dim=48, num_heads=3, depth=1)
    return timm.create_model("vit_tiny_patch16_224", **small, global_pool="")


def oblong():
    model = timm.create_model("deit_tiny_patch16_224", depth=1, img_size=(224, 192))
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 224, 192)}
    return model


def probe(labels):
    """A probe on features of images with these labels."""
    x, _ = clouds(len(labels), 1)
    return linear_probe((x, torch.tensor(labels)), clouds(9, 2))


REFUSALS = (
    (
        lambda: features(unpooled(), load("digits", "test", size=32)),
        r"\(B, D\), but vit_tiny.*\(100, 5, 48\)",
    ),
    (lambda: open_images(oblong(), "digits", "test"), "got 3 × 224 × 192"),
    (lambda: probe([0] * 9), "got 1, the smallest with 9"),
    (lambda: probe([2, 0, 1, 0, 1, 0, 1]), "got 3, the smallest with 1"),
)
"""A call that raises ValueError, and decisive words."""


@pytest.mark.parametrize("call, words", REFUSALS)
def test_evaluate_refuses(call, words):
    refuses(words, call)
