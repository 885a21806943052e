"""A stream yields what a set in memory yields; its crops depend on nothing but the key and the sample."""

import math
import os
import re
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torchvision.transforms.functional as TF
from data_support import parquet, saved, shown, write
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as TF2

from vitlens.data import ImageSet, ImageStream, load, loading
from vitlens.data.augment import Augment, generator
from vitlens.data.decode import cut, random_box, shaped
from vitlens.data.samples import Samples
from vitlens.train import accuracy
from vitlens.train.recipes import recipe

SIZE = 24
CROP = Augment(flip=0.5, scale=(0.3, 1.0), ratio=(3 / 4, 4 / 3), cutmix=0.5)


def smooth(seed: int, size: tuple[int, int], kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 4 + 1, size[0] // 4 + 1, 3), dtype=np.uint8)
    return saved(Image.fromarray(pixels).resize(size), kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("folder") / "train", {
        f"{'ab'[i % 2]}/{i:02d}.{('jpg', 'png')[i % 2]}": smooth(i, (30 + i % 41, 30 + i % 29), ("JPEG", "PNG")[i % 2])
        for i in range(100)
    }).parent  # fmt: skip


def streamed(source, workers: int = 0, size: int = SIZE, **more) -> ImageStream:
    return load(source, size=size, stream=True, workers=workers, **more)


def rows_of(n: int, batch: int) -> list[torch.Tensor]:
    return list(torch.randperm(n, generator=generator_of(3)).split(batch))


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def joined(data, rows, *args) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*data.batches(rows, *args), strict=True)
    return torch.cat(images), torch.cat(labels)


def equal(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Shapes of single images, by hand


@pytest.mark.parametrize("w, h", [(50, 30), (30, 50), (31, 90), (24, 24), (24, 40), (200, 130)])
def test_squash_and_center_crop_are_torchvisions_antialiased_resizing(w, h):
    image = shown(smooth(1, (w, h)))
    assert torch.equal(shaped(image, SIZE, squash=True), TF.resize(image, [SIZE, SIZE], antialias=True))
    tall, wide = max(SIZE, round(h * SIZE / min(h, w))), max(SIZE, round(w * SIZE / min(h, w)))
    resized = TF.resize(image, [tall, wide], antialias=True)
    top, left = (tall - SIZE) // 2, (wide - SIZE) // 2
    assert torch.equal(shaped(image, SIZE, squash=False), TF.crop(resized, top, left, SIZE, SIZE))


def test_load_squashes_what_pillow_decodes(folder):
    squashed, cropped = load(folder, size=SIZE, squash=True), load(folder, size=SIZE)
    paths = sorted((folder / "train" / "b").iterdir())
    for i, path in enumerate(paths, start=50):
        image = shown(path.read_bytes())
        assert torch.equal(squashed.images[i], TF.resize(image, [SIZE, SIZE], antialias=True))
    assert not torch.equal(squashed.images, cropped.images)
    with pytest.raises(ValueError, match="Squashing .* size="):
        load(folder, squash=True)


# The same protocol


@pytest.mark.parametrize("squash", [False, True])
def test_streamed_batches_are_those_of_the_set_in_memory(folder, squash):
    held, stream = load(folder, size=SIZE, squash=squash, stream=False), streamed(folder, 2, squash=squash)
    assert isinstance(held, ImageSet) and isinstance(stream, ImageStream)
    assert held.size == stream.size == (SIZE, SIZE) and len(held) == len(stream) == 100
    assert held.class_names == stream.class_names and held.labels.equal(stream.labels)
    rows = [*rows_of(100, 70), torch.tensor([], dtype=torch.int64), torch.tensor([5, 5, 99])]
    for augment in (None, Augment(), Augment(flip=0.5, rotate=10, cutmix=1)):
        batches = list(stream.batches(rows, augment, (1,)))
        assert [len(images) for images, _ in batches] == [70, 30, 0, 3]
        for one, other in zip(held.batches(rows, augment, (1,)), batches, strict=True):
            assert equal(one, other)


def test_subsets_are_the_same_images(folder):
    held, stream = load(folder, size=SIZE).subset(40, 7), streamed(folder).subset(40, 7)
    assert len(stream) == 40 and equal(joined(held, rows_of(40, 9)), joined(stream, rows_of(40, 9)))
    with pytest.raises(ValueError, match="between 1 and 40"):
        stream.subset(41)


def test_what_remains_for_the_device():
    held = load("digits", "valid")
    assert held.remaining(CROP) == CROP
    remains = load("digits", "valid", size=8, stream=True).remaining(CROP)
    assert remains == Augment(flip=0.5, cutmix=0.5)


def test_shards_are_unpacked_to_be_read_in_any_order(tmp_path, folder):
    for shard in range(2):
        images, labels = [smooth(shard * 50 + i, (40, 30)) for i in range(50)], [i % 3 for i in range(50)]
        table = parquet(tmp_path / f"train-{shard:05d}-of-00002.parquet", images, labels, row_group_size=20)
    rows, cache = rows_of(100, 33), tmp_path / "cache"
    expected = joined(load(tmp_path, size=SIZE), rows)
    assert not cache.exists()
    assert equal(joined(streamed(tmp_path, 1, root=cache), rows), expected)
    unpacked = {path: path.stat().st_mtime_ns for path in (cache / "parquet").iterdir()}
    assert len(unpacked) == 2
    assert equal(joined(streamed(tmp_path, root=cache), rows), expected)
    assert unpacked == {path: path.stat().st_mtime_ns for path in (cache / "parquet").iterdir()}
    pq.write_table(table.slice(20, 30), tmp_path / "train-00001-of-00002.parquet")
    changed = joined(streamed(tmp_path, root=cache), [torch.arange(80)])
    assert equal(changed, joined(load(tmp_path, size=SIZE), [torch.arange(80)]))


# Crops


def test_crops_do_not_depend_on_workers_batches_or_where_one_begins(folder):
    rows = rows_of(100, 45)
    expected = joined(streamed(folder), rows, CROP, (0, 4))
    for workers in (1, 2):
        stream = streamed(folder, workers)
        assert equal(joined(stream, rows, CROP, (0, 4)), expected)
        assert equal(joined(stream, torch.cat(rows).split(7), CROP, (0, 4)), expected)
        resumed = joined(stream, rows[1:], CROP, (0, 4))
        assert equal(resumed, tuple(t[45:] for t in expected))
    subset, chosen = streamed(folder).subset(40, 7), torch.randperm(100, generator=generator_of(7))[:40]
    assert equal(joined(subset, [torch.arange(40)], CROP, (1,)), joined(streamed(folder), [chosen], CROP, (1,)))


def test_two_epochs_differ_in_every_crop(folder):
    stream, rows = streamed(folder), [torch.arange(100)]
    (first, labels), (second, _) = joined(stream, rows, CROP, (0, 0)), joined(stream, rows, CROP, (0, 1))
    assert (first != second).flatten(1).any(1).all() and labels.equal(stream.labels)


def test_the_global_generator_is_left_alone(folder):
    before = torch.get_rng_state()
    joined(streamed(folder, 1), rows_of(100, 50), CROP, (1,))
    assert torch.equal(before, torch.get_rng_state())


IN_BYTES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # else torchvision resizes by way of floats


def test_the_crop_is_torchvisions_for_the_box_that_was_drawn(folder):
    stream = streamed(folder)
    images, _ = joined(stream, [torch.arange(100)], CROP, (5, 6))
    for i in range(100):
        image = shown((folder / stream.samples.name(i)).read_bytes())
        box = random_box(*image.shape[1:], CROP.scale, CROP.ratio, generator("cpu", 5, 6, i))
        theirs = TF2.resized_crop(image, *box, [SIZE, SIZE], antialias=True).int()
        assert (images[i].int() - theirs).abs().max() <= (0 if IN_BYTES else 1)
        in_floats = TF.resized_crop(image.float(), *box, [SIZE, SIZE], antialias=True)
        assert (images[i].float() - in_floats).abs().max() < 1.01


@pytest.mark.parametrize("w, h", [(500, 375), (300, 300), (200, 600)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.3, 0.5)])
def test_boxes_are_distributed_as_torchvisions(w, h, scale):
    ratio, rng = (3 / 4, 4 / 3), generator_of(1)
    ours = torch.tensor([random_box(h, w, scale, ratio, rng) for _ in range(4000)]).double()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        blank = torch.empty(3, h, w)
        theirs = torch.tensor([RandomResizedCrop.get_params(blank, list(scale), list(ratio)) for _ in range(4000)])
    top, left, height, width = ours.T
    assert (top >= 0).all() and (left >= 0).all() and (top + height <= h).all() and (left + width <= w).all()
    area, shape = height * width / (h * w), width / height
    slack = 1.5 / height.min().item()  # a box has whole pixels
    assert scale[0] * (1 - slack) <= area.min() and area.max() <= scale[1] * (1 + slack)
    assert ratio[0] * (1 - slack) <= shape.min() and shape.max() <= ratio[1] * (1 + slack)
    for a, b in zip(ours.T, theirs.double().T, strict=True):
        error = math.sqrt((a.var() + b.var()).item() / 4000)
        assert abs(a.mean() - b.mean()) < 5 * error and abs(a.std() - b.std()) < 5 * error


@pytest.mark.parametrize("w, h", [(500, 20), (20, 500), (30, 30), (1, 1), (3, 1)])
def test_a_box_that_never_fits_is_the_largest_in_the_center(w, h):
    box = random_box(h, w, (2.0, 2.0), (3 / 4, 4 / 3), torch.Generator())
    theirs = RandomResizedCrop.get_params(torch.empty(3, h, w), [2.0, 2.0], [3 / 4, 4 / 3])
    assert box == (theirs if min(w, h) > 1 else (box[0], box[1], 1, 1))
    assert cut(torch.zeros(3, h, w, dtype=torch.uint8), box, 8).shape == (3, 8, 8)


def test_crops_larger_than_the_image_are_refused(folder):
    with pytest.raises(ValueError, match=r"augment.scale .* \(0.75, 1.2\).* stream=False"):
        next(streamed(folder).batches([torch.arange(3)], Augment(scale=(0.75, 1.2))))


# Damage


@pytest.fixture
def damaged(tmp_path):
    content = {i: b"no image" if i in (3, 4, 11) else smooth(i, (30, 30)) for i in range(12)}
    return write(tmp_path / "train", {f"{'abc'[i // 4]}/{i:02d}.png": data for i, data in content.items()}).parent


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_good_sample_stands_in_for_a_damaged_one(damaged, workers):
    stream = streamed(damaged, workers, on_damaged="skip")
    images, labels = joined(stream, [torch.arange(0, 8), torch.arange(8, 12)])
    good = {i: load_one(damaged, i) for i in range(12) if i not in (3, 4, 11)}
    expected = [0, 1, 2, 5, 5, 5, 6, 7, 8, 9, 10, 0]
    assert labels.tolist() == [i // 4 for i in expected]
    assert all(torch.equal(image, good[i]) for image, i in zip(images, expected, strict=True))
    assert len(stream.damaged) == 3 and stream.to("cpu").damaged == stream.damaged
    found = [re.match(r"train/./(\d\d)\.png \(no image of a known format\)", reason)[1] for reason in stream.damaged]
    assert found == ["03", "04", "11"]
    assert equal(joined(stream, [torch.arange(0, 8), torch.arange(8, 12)]), (images, labels))
    assert len(stream.damaged) == 3


def test_stand_ins_do_not_count_in_the_accuracy_of_a_run(damaged):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE**2, 3))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([0.0, 1.0, 0.0]))  # of whatever image: class b, as three of nine are
    of = recipe("digits").override(f"image_size={SIZE}", "num_classes=3", "precision=fp32")
    for data in (streamed(damaged, on_damaged="skip"), load(damaged, size=SIZE, on_damaged="skip")):
        assert accuracy(model, data, of) == pytest.approx(100 * 3 / 9)


def load_one(folder: Path, i: int) -> torch.Tensor:
    path = folder / "train" / "abc"[i // 4] / f"{i:02d}.png"
    return shaped(shown(path.read_bytes()), SIZE, False)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_sample_ends_the_stream_unless_it_may_be_skipped(damaged, workers):
    stream = streamed(damaged, workers)
    with pytest.raises(ValueError, match=r"^train/a/03.png \(.* cannot be decoded.* on_damaged='skip'"):
        joined(stream, [torch.arange(12)])
    assert len(joined(stream, [torch.tensor([0, 1])])[0]) == 2  # and goes on where it can


def test_a_stream_of_nothing_but_damage_ends(tmp_path):
    write(tmp_path, {f"train/a/{i}.png": b"" for i in range(3)})
    with pytest.raises(ValueError, match="Many samples in a row .* train/a/1.png"):
        joined(streamed(tmp_path, on_damaged="skip"), [torch.tensor([2])])


# Processes


@dataclass(frozen=True)
class Threads:
    """Gray images as bright as the number of threads that the reading process has."""

    n: int

    def __len__(self):
        return self.n

    def name(self, i):
        return str(i)

    def content(self, i):
        return torch.full((3, 8, 8), torch.get_num_threads(), dtype=torch.uint8)


@dataclass(frozen=True)
class Fatal(Threads):
    """Samples of which one kills the process that reads it."""

    def content(self, i):
        if i == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3, 8, 8, dtype=torch.uint8)


def made(samples, **more) -> ImageStream:
    labels, shape = torch.zeros(len(samples), dtype=torch.int64), partial(shaped, side=8, squash=False)
    return ImageStream(samples, labels, ("a",), 8, shape, **more)


def test_workers_have_one_thread_each():
    images, _ = joined(made(Threads(6), workers=2), [torch.arange(6)])
    assert (images == 1).all()


@dataclass(frozen=True)
class OfLeaders:
    """Samples that only a process which leads a group of its own can read."""

    source: Samples

    def __len__(self):
        return len(self.source)

    def name(self, i):
        return self.source.name(i)

    def content(self, i):
        return self.source.content(i) if os.getpgrp() == os.getpid() else b""


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_may_be_forked_or_spawned(folder, context):
    """What ends a group of processes does not reach them: Ctrl-C, or a scheduler's SIGTERM, is for the process that
    trains, which saves before it ends them."""
    expected = joined(streamed(folder), rows_of(100, 64), CROP, (2,))
    stream = streamed(folder, 1)
    stream = replace(stream, samples=OfLeaders(stream.samples), context=context)
    assert equal(joined(stream, rows_of(100, 64), CROP, (2,)), expected)


def test_a_worker_that_is_killed_ends_the_stream_in_a_sentence():
    stream = made(Fatal(40), workers=1)
    with pytest.raises(ChildProcessError, match="processes that read images ended .* fewer workers"):
        joined(stream, [torch.arange(40)])
    assert len(joined(stream, [torch.arange(10, 20)])[0]) == 10  # new ones are started


def test_a_sequence_of_batches_may_be_left_and_another_begun(folder):
    stream, rows = streamed(folder, 2), rows_of(100, 10)
    expected = joined(streamed(folder), rows)
    first = stream.batches(rows)
    next(first), next(first)
    assert equal(joined(stream, rows), expected)
    with pytest.raises(RuntimeError, match="one sequence of batches at a time"):
        next(first)
    assert equal(joined(stream, rows), expected)


# Where images are held


def test_images_are_held_while_they_fit_into_half_of_the_memory(folder, monkeypatch):
    needed = 100 * 3 * SIZE**2
    for free, kind in ((2 * needed, ImageSet), (2 * needed - 2, ImageStream)):
        monkeypatch.setattr(loading, "free_memory", lambda device, free=free: free)
        assert isinstance(load(folder, size=SIZE), kind)
        assert isinstance(load(folder, size=SIZE, stream=False), ImageSet)
    assert isinstance(load("digits"), ImageSet)
    with pytest.raises(ValueError, match="Streaming .* size="):
        load(folder, stream=True)


def test_the_memory_of_this_machine_is_known_and_shared_by_its_processes(monkeypatch):
    alone = loading.free_memory(torch.device("cpu"))
    assert 2**26 < alone < 2**50
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert loading.free_memory(torch.device("cpu")) < alone / 4
