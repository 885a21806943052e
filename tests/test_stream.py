"""A stream yields the batches of a set in memory, with crops that depend only on the key and the position."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import refuses, saved, shown, write
from torchvision.transforms import RandomResizedCrop

from vitlens import load_model
from vitlens.data import ImageSet, ImageStream, Samples, imageset, load
from vitlens.data.augment import Augment, seed_of
from vitlens.data.imageset import uint8_tensor
from vitlens_paper.evaluate.reading import open_images

SIZE = 24
CROP = Augment(flip=0.5, scale=(0.3, 1.0), ratio=(3 / 4, 4 / 3), cutmix=0.5)
SPECIMEN = Path(__file__).parent.parent / "data" / "checkpoints" / "vit_tiny_patch8_64"


def smooth(seed: int, size: tuple[int, int], kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(
        0, 256, (size[1] // 4 + 1, size[0] // 4 + 1, 3), dtype=np.uint8
    )
    return saved(Image.fromarray(pixels).resize(size), kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(
        tmp_path_factory.mktemp("folder") / "train",
        {
            f"{'ab'[i % 2]}/{i:02d}.{('jpg', 'png')[i % 2]}": smooth(
                i, (30 + i % 41, 30 + i % 29), ("JPEG", "PNG")[i % 2]
            )
            for i in range(100)
        },
    ).parent


def streamed(source, workers: int = 0, size: int = SIZE, **more) -> ImageStream:
    return load(source, size=size, stream=True, workers=workers, **more)


def rows_of(n: int, batch: int) -> list[torch.Tensor]:
    return list(torch.randperm(n, generator=torch.Generator().manual_seed(3)).split(batch))


def joined(data, rows, *args) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*data.batches(rows, *args), strict=True)
    return torch.cat(images), torch.cat(labels)


def equal(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("squash", [False, True])
def test_batches_of_a_stream_equal_the_set_in_memory(folder, squash):
    held, stream = (
        load(folder, size=SIZE, squash=squash, stream=False),
        streamed(folder, 2, squash=squash),
    )
    assert isinstance(held, ImageSet) and isinstance(stream, ImageStream)
    assert held.size == stream.size == (SIZE, SIZE) and len(held) == len(stream) == 100
    assert held.class_names == stream.class_names and held.labels.equal(stream.labels)
    rows = [*rows_of(100, 70), torch.tensor([5, 5, 99])]
    for augment in (None, Augment(flip=0.5, rotate=10, cutmix=1)):
        batches = list(stream.batches(rows, augment, (1,)))
        assert [len(images) for images, _ in batches] == [70, 30, 3]
        for one, other in zip(held.batches(rows, augment, (1,)), batches, strict=True):
            assert equal(one, other)
    assert equal(
        joined(held.subset(40, 7), rows_of(40, 9)), joined(stream.subset(40, 7), rows_of(40, 9))
    )


def test_validation_pixels_of_training_and_evaluation_are_equal(tmp_path):
    """Both use timm's resizing and center crop, also with odd margins."""
    write(
        tmp_path,
        {
            f"a/{i}.png": smooth(i, size)
            for i, size in enumerate(((99, 64), (64, 75), (67, 91), (120, 65)))
        },
    )
    model = load_model(SPECIMEN)
    ours, theirs = (
        load(tmp_path, "whole", size=64),
        open_images(model, str(tmp_path), "whole", workers=0),
    )
    assert ours.images.equal(joined(theirs, [torch.arange(4)])[0])
    assert (
        model.pretrained_cfg["interpolation"] == "bilinear"
        and model.pretrained_cfg["crop_pct"] == 1.0
    )


def test_remaining_omits_the_random_crop_of_a_stream(folder):
    assert load("digits", "valid").remaining(CROP) == CROP
    assert streamed(folder).remaining(CROP) == Augment(flip=0.5, cutmix=0.5)
    with pytest.raises(ValueError, match=r"augment.scale .* \(0.75, 1.2\).* stream=False"):
        next(streamed(folder).batches([torch.arange(3)], Augment(scale=(0.75, 1.2))))


def test_crops_ignore_workers_batch_sizes_and_the_first_batch(folder):
    rows, before = rows_of(100, 45), torch.get_rng_state()
    expected = joined(streamed(folder), rows, CROP, (0, 4))
    assert equal(joined(streamed(folder, 1), torch.cat(rows).split(7), CROP, (0, 4)), expected)
    assert equal(
        joined(streamed(folder, 2), rows[1:], CROP, (0, 4)), tuple(t[45:] for t in expected)
    )
    stream = streamed(folder)
    (first, labels), (second, _) = (
        joined(stream, [torch.arange(100)], CROP, (0, epoch)) for epoch in (0, 1)
    )
    assert (first != second).flatten(1).any(1).all() and labels.equal(stream.labels)
    assert torch.equal(before, torch.get_rng_state())


def test_crops_equal_torchvision(folder):
    stream = streamed(folder)
    images, _ = joined(stream, [torch.arange(100)], CROP, (5, 6))
    theirs = RandomResizedCrop(SIZE, CROP.scale, CROP.ratio)
    for i in range(100):
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(5, 6, i))
            assert images[i].equal(theirs(shown((folder / stream.samples.name(i)).read_bytes())))


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_raises_for_samples_that_cannot_be_decoded(tmp_path, workers):
    content = {
        f"{'ab'[i // 3]}/{i}.png": b"no image" if i == 3 else smooth(i, (30, 30)) for i in range(6)
    }
    stream = streamed(write(tmp_path / "train", content).parent, workers)
    refuses(
        r"^train/b/3.png \(no image of a known format\) cannot be decoded",
        joined,
        stream,
        [torch.arange(6)],
    )
    assert len(joined(stream, [torch.tensor([0, 1])])[0]) == 2  # later batches still work


@dataclass(frozen=True)
class Fatal:
    """Images filled with the thread count of the reading process. One of them kills it."""

    n: int

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == 35:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((3, 8, 8), torch.get_num_threads(), dtype=torch.uint8)


def test_stream_explains_a_killed_worker():
    labels = torch.zeros(40, dtype=torch.int64)
    stream = ImageStream(Samples(Fatal(40), labels, ("a",), range(40)), 8, uint8_tensor, workers=1)
    with pytest.raises(
        ChildProcessError, match="processes that read images ended .* fewer workers"
    ):
        joined(stream, [torch.arange(40)])
    images, _ = joined(stream, [torch.arange(10, 20)])  # new workers, with one thread each
    assert len(images) == 10 and (images == 1).all()


@pytest.mark.parametrize(
    "cut", (ConnectionResetError, ConnectionRefusedError, BrokenPipeError, EOFError)
)
def test_stream_explains_the_cut_connection_of_a_killed_worker(cut):
    class Cut:
        def __iter__(self):
            raise cut("the other end is gone")

    labels = torch.zeros(40, dtype=torch.int64)
    stream = ImageStream(Samples(Fatal(40), labels, ("a",), range(40)), 8, uint8_tensor, workers=1)
    joined(stream, [torch.arange(8)])
    stream._loader = Cut()
    with pytest.raises(ChildProcessError, match="processes that read images ended .*gone"):
        joined(stream, [torch.arange(8)])


def test_loader_makes_every_dataloader():
    paths = [
        path
        for path in Path(imageset.__file__).parent.parent.rglob("*.py")
        if "DataLoader(" in path.read_text()
    ]
    assert paths == [Path(imageset.__file__)]
    made = imageset.loader([1, 2], [[0], [1]], 1, torch.device("cpu"))
    assert made.timeout == 300 and made.collate_fn is torch.utils.data.default_collate


FULL = """
import torch, sys
from vitlens.data import load
stream = load(sys.argv[1], "train", size=224, stream=True, workers=2)
try:
    for x in stream.batches([torch.arange(32), torch.arange(32, 64)]):
        pass
except ChildProcessError as error:
    print(error)
"""


def in_small_shm(*command) -> subprocess.CompletedProcess:
    """Run a command with a /dev/shm of 1 MiB, as in a container."""
    words = [
        "unshare",
        "-m",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"',
        "sh",
    ]
    return subprocess.run([*words, *map(str, command)], capture_output=True, text=True, timeout=120)


CAN_UNSHARE = bool(shutil.which("unshare")) and in_small_shm("true").returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not CAN_UNSHARE, reason="needs the right to mount a small /dev/shm (root)")
def test_stream_explains_full_shared_memory(folder):
    done = in_small_shm(sys.executable, "-c", FULL, folder)
    assert "processes that read images ended" in done.stdout and "--shm-size" in done.stdout, (
        done.stderr
    )


def test_batches_may_be_restarted(folder):
    stream, rows = streamed(folder, 2), rows_of(100, 10)
    expected = joined(streamed(folder), rows)
    first = stream.batches(rows)
    next(first), next(first)
    assert equal(joined(stream, rows), expected)
    refuses("one sequence of batches at a time", next, first, error=RuntimeError)
    assert equal(joined(stream, rows), expected)


def test_load_holds_images_that_fit_into_half_of_the_memory(folder, monkeypatch):
    alone = imageset.free_memory(torch.device("cpu"))
    assert 2**26 < alone < 2**50
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert imageset.free_memory(torch.device("cpu")) < alone / 4
    needed = 100 * 3 * SIZE**2
    for free, kind in ((2 * needed, ImageSet), (2 * needed - 2, ImageStream)):
        monkeypatch.setattr(imageset, "free_memory", lambda device, free=free: free)
        assert isinstance(load(folder, size=SIZE), kind)
        assert isinstance(load(folder, size=SIZE, stream=False), ImageSet)
    assert isinstance(load("digits"), ImageSet)
