"""One split of a data set: listed as `Samples`, held in memory as an `ImageSet`, or read as wanted by an `ImageStream`.

What a batch holds depends on the index tensor, the augmentation and the key (seed, epoch) alone, never on the number of
workers or on what was read before. So a run over a stream resumes as exactly as one over images in memory.

Shapes: N images, b of them in a batch, H × W pixels, S pixels a side of a square image.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import resized_crop

from vitlens.data.augment import Augment, seed_of
from vitlens.data.sources import opened
from vitlens.images import MAX_ELONGATION, rgb

CHUNK = 32  # images that a worker reads at a time, so that little waits in shared memory
TIMEOUT = 300  # seconds without an image after which a stream ends
IN_A_ROW = 100  # damaged samples in a row after which a stream ends
WORKERS_ENDED = (
    "The processes that read images ended ({}). Most often memory is full, or shared memory, of which a container has "
    "64 MB: use fewer workers (0 needs no shared memory), or start the container with a larger --shm-size."
)


# Samples


@dataclass(frozen=True)
class Samples:
    """One split before any image is read.

    `contents` is a sequence of images, each a path, encoded bytes, a Pillow image, uint8 (3, H, W), a row
    `{"bytes", "path"}` of `datasets`, or a tuple that begins with one of these. `title` and `names`, which may be
    numbers, are for messages.
    """

    contents: Sequence
    labels: Sequence[int] | Tensor
    class_names: tuple[str, ...]
    names: Sequence
    note: str = ""
    title: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        name = self.names[i]
        return self.title + (os.fsdecode(name) if isinstance(name, bytes) else str(name))

    def chosen(self, rows: Tensor) -> Samples:
        """The samples at the places `rows`, int64 (n,)."""
        rows = rows.tolist()
        contents = self.contents.chosen(rows) if hasattr(self.contents, "chosen") else Subset(self.contents, rows)
        labels, names = torch.as_tensor(self.labels)[rows], np.asarray(self.names)[rows]
        return replace(self, contents=contents, labels=labels, names=names)

    def fingerprint(self) -> str:
        """Checksum of 16 of the images, to detect that images were replaced under the same names and labels.

        Files are read and not decoded, because decoders differ by a level. Unreadable ones are left out.
        """
        digest = hashlib.sha256()
        for i in np.unique(np.linspace(0, len(self) - 1, 16).astype(int)).tolist():
            try:
                found = _plain(self.contents[i])
            except Exception:  # reported when it is decoded
                continue
            if isinstance(found, Image.Image):
                found = f"{found.mode} {found.size}".encode()
            digest.update(found if isinstance(found, bytes) else found.numpy().tobytes())
        return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Files(Sequence):
    """Paths of files: below `root`, by the bytes of their names in one array. A million Python strings would be copied
    into each worker by their reference counts."""

    root: Path
    names: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> Path:
        return self.root / os.fsdecode(self.names[i])

    @classmethod
    def samples(cls, root: Path, names: Sequence[str], labels, class_names, note: str = "") -> Samples:
        packed = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
        return Samples(cls(root, packed), labels, tuple(class_names), packed, note)


def _plain(content: object) -> bytes | Image.Image | Tensor:
    """An image of `Samples.contents` as encoded bytes, a Pillow image or uint8 (3, H, W)."""
    if isinstance(content, tuple):
        return _plain(content[0])
    if isinstance(content, dict):
        content = content["bytes"] or content["path"]
    if content is None:
        raise ValueError("no image")
    return Path(content).read_bytes() if isinstance(content, str | Path) else content


def decoded(samples: Samples, i: int) -> Image.Image | str:
    """Sample `i` as an RGB image, upright and opaque, or a string with its name and the reason why it is damaged."""
    try:
        content = _plain(samples.contents[i])
        if isinstance(content, Tensor):
            image = Image.fromarray(content.permute(1, 2, 0).numpy())
        elif isinstance(content, bytes):
            with Image.open(io.BytesIO(content)) as encoded:
                image = rgb(encoded)
        else:
            image = rgb(content)
    except UnidentifiedImageError:
        return f"{samples.name(i)} (no image of a known format)"
    except Exception as problem:  # a decoder may raise anything on untrusted bytes
        return f"{samples.name(i)} ({type(problem).__name__}: {problem})"
    w, h = image.size
    strip = max(h, w) > MAX_ELONGATION * min(h, w)
    return f"{samples.name(i)} (a strip of {w} × {h} pixels)" if strip else image


def pixels(image: Image.Image) -> Tensor:
    """An RGB image as uint8 (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


PIXEL_READING = 2
"""Version of decoding, resizing and cropping. Runs record it, so raise it when the same file gives other pixels."""


@dataclass(frozen=True)
class Fitting:
    """The resizing of validation images to uint8 (3, side, side): timm's own, as `vitlens.models.pixels` is.

    The short side is resized (bilinear, antialiased) and the center cropped; with `squash` both sides are resized.
    """

    side: int
    squash: bool = False

    def __call__(self, image: Image.Image) -> Tensor:
        return pixels(image) if image.size == (self.side, self.side) else self.resized(image)

    @cached_property
    def resized(self) -> Callable[[Image.Image], Tensor]:
        from timm.data import create_transform

        return create_transform(
            (3, self.side, self.side), interpolation="bilinear", crop_pct=1.0, is_training=False, use_prefetcher=True,
            crop_mode="squash" if self.squash else "center",
        )  # fmt: skip


def random_crop(image: Image.Image, side: int, scale: Sequence[float], ratio: Sequence[float], seed: int) -> Tensor:
    """torchvision's `RandomResizedCrop` to uint8 (3, side, side), a function of `seed`; global state stays."""
    image = pixels(image)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        box = RandomResizedCrop.get_params(image, list(scale), list(ratio))
    return resized_crop(image, *box, [side, side], antialias=True)


def drawn(size: int, n: int, seed: int) -> Tensor:
    """`n` different numbers below `size`, int64 (n,), that depend on `seed` alone."""
    if not 0 < n <= size:
        raise ValueError(f"A subset of {size} images has between 1 and {size} of them, got {n}.")
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:n]


# In memory


class _Split:
    """What both kinds of splits share."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, n: int, seed: int = 0):
        """`n` of the images, drawn without replacement; which ones depends on `seed` alone."""
        return self.chosen(drawn(len(self), n, seed))

    def _check(self) -> None:
        n = len(self.class_names)
        if len(self) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < n:
            raise ValueError(
                f"Labels must lie in 0…{n - 1}, one for each of {n} classes, but these run from "
                f"{int(self.labels.min())} to {int(self.labels.max())}."
            )


@dataclass(frozen=True)
class ImageSet(_Split):
    """Images and labels of one split.

    `images` is uint8 (N, 3, H, W), `labels` int64 (N,), `class_names` one name per label, in label order. `damaged`
    names the samples that could not be decoded and were left out, each with the reason. `note` is what a user should
    know about how the split came about. `pictures` is the `Samples.fingerprint` of what was loaded.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    damaged: tuple[str, ...] = ()
    note: str = ""
    pictures: str = ""

    def __post_init__(self):
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] != 3:
            raise ValueError(
                f"Expected uint8 images of shape (N, 3, H, W), got {self.images.dtype} of shape "
                f"{tuple(self.images.shape)}. Convert them to RGB and stack them first."
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != (len(self.images),):
            raise ValueError(f"Expected {len(self.images)} int64 labels, got {self.labels.dtype} {self.labels.shape}.")
        self._check()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return tuple(self.images.shape[2:])

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set with its tensors on `device`."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def chosen(self, rows: Tensor) -> ImageSet:
        """The images at the places `rows`, int64 (n,)."""
        rows = rows.to(self.labels.device)
        return replace(self, images=self.images[rows], labels=self.labels[rows])

    def stand_ins(self) -> Tensor:
        """Mask of the images that stand in for damaged ones, bool (N,): all False, since damaged ones are left out."""
        return torch.zeros(len(self), dtype=torch.bool)

    def batches(
        self, rows: Iterable[Tensor], augment: Augment | None = None, key: tuple[int, ...] = ()
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each index tensor (b,) in `rows`: images uint8 (b, 3, H, W) and labels int64 (b,), on the set's device.

        Only an index, so the host never waits; all of `augment` is left to the caller, see `remaining`.
        """
        for row in rows:
            row = row.to(self.labels.device, non_blocking=True)
            yield self.images[row], self.labels[row]

    def remaining(self, augment: Augment) -> Augment:
        """What is still to be done to the batches: all of `augment`."""
        return augment


def held(samples: Samples, what: str, fit: Callable, size: int | None, on_damaged: str, workers: int) -> ImageSet:
    """The samples decoded, all at once and in order; `what` they are goes into messages."""
    n, labels = len(samples), torch.as_tensor(samples.labels, dtype=torch.int64)
    # Filled in place where the size is known: a list of images, stacked, would take the memory twice.
    images = [None] * n if size is None else torch.empty(n, 3, size, size, dtype=torch.uint8)
    damaged: dict[int, str] = {}

    def decode(chunk: Iterable[int]) -> None:
        for i in chunk:
            image = decoded(samples, i)
            if isinstance(image, str):
                damaged[i] = image
            else:
                images[i] = fit(image)

    with ThreadPoolExecutor(max(1, workers)) as pool:  # decoders leave Python's lock
        list(pool.map(decode, [range(i, min(i + 256, n)) for i in range(0, n, 256)]))
    reasons = tuple(damaged[i] for i in sorted(damaged))
    if damaged and on_damaged == "raise":
        raise ValueError(
            f"{len(damaged)} of {n} samples cannot be decoded, the first being {reasons[0]}. Repair them, or leave "
            "them out (--skip-damaged, in Python on_damaged='skip')."
        )
    kept = [i for i in range(n) if i not in damaged]
    if not kept:
        raise ValueError(f"No image of {what} can be decoded.")
    if size is None:
        images = [images[i] for i in kept]
        if len(shapes := {image.shape for image in images}) > 1:
            raise ValueError(
                f"The images of {what} have {len(shapes)} sizes, but one tensor holds one size. Pass size=…, the side "
                "in pixels to which they are resized and cropped."
            )
        images = torch.stack(images)
    elif damaged:
        images = images[kept]
    return ImageSet(images, labels[kept], samples.class_names, reasons, samples.note, samples.fingerprint())


# Streams


def loader(dataset: Dataset, batches: Iterable[list], workers: int, device: torch.device) -> DataLoader:
    """The `DataLoader` of everything that is read by worker processes: samples in, batches collated by PyTorch."""
    several = {"timeout": TIMEOUT, "persistent_workers": True, "worker_init_fn": _apart}
    return DataLoader(
        dataset, batch_sampler=batches, num_workers=workers, pin_memory=device.type == "cuda",
        generator=torch.Generator(), **(several if workers else {}),  # else each start draws from the global generator
    )  # fmt: skip


def workers_ended(problem: BaseException) -> bool:
    """True for PyTorch's errors about a process that reads images: it was killed, timed out, or could not send."""
    return any(word in str(problem) for word in ("DataLoader", "in pin memory thread"))


def _apart(_: int) -> None:
    """Leave the group of processes: Ctrl-C is meant for the one that trains, which saves and then ends its workers."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()


@dataclass(frozen=True)
class Reader(Dataset):
    """What a worker holds. An item is (row, crop, key); it becomes an image, its label and the damaged samples met.

    The label is −1 where the stream must end.
    """

    samples: Samples
    labels: Tensor
    rows: Tensor
    fit: Callable[[Image.Image], Tensor]
    skip: bool
    side: int

    def __getitem__(self, item: tuple[int, tuple | None, tuple[int, ...]]) -> tuple[Tensor, Tensor, str]:
        row, crop, key = item
        damaged = {}
        for step in range(min(IN_A_ROW, len(self.rows)) if self.skip else 1):
            place = (row + step) % len(self.rows)
            sample = int(self.rows[place])
            image = decoded(self.samples, sample)
            if not isinstance(image, str):
                cut = random_crop(image, self.side, *crop, seed_of(*key, sample)) if crop else self.fit(image)
                return cut, self.labels[place], json.dumps(damaged)
            damaged[sample] = image
        return torch.zeros(3, self.side, self.side, dtype=torch.uint8), torch.tensor(-1), json.dumps(damaged)


class _Chunks:
    """The batch sampler of a stream: workers outlive a call of `batches` and go on with the chunks of the next."""

    now: Iterator[list] = iter(())

    def __iter__(self) -> Iterator[list]:
        return self.now


@dataclass(eq=False)
class ImageStream(_Split):
    """Images and labels of one split that are read as they are wanted; the counterpart of `ImageSet`.

    `labels` is int64 (N,) on the CPU, `class_names` one name per label, in label order. Images come as `side` × `side`
    pixels: cropped at random if the augmentation wants it, else by `fit`, bit for bit what an `ImageSet` holds. With
    `on_damaged="skip"` the next sample that can be decoded stands in for a damaged one, with its own label; `damaged`
    lists those met. `workers` processes read; with 0 workers this process does.
    """

    samples: Samples
    labels: Tensor
    class_names: tuple[str, ...]
    side: int
    fit: Callable[[Image.Image], Tensor]
    on_damaged: str = "raise"
    workers: int = 1
    device: torch.device = torch.device("cpu")
    rows: Tensor | None = None
    """Numbers of the samples that belong to the stream, int64 (N,); all by default."""
    note: str = ""
    pictures: str = ""
    """`Samples.fingerprint` of what was opened."""
    found: dict[int, str] = field(default_factory=dict)

    def __post_init__(self):
        self._check()
        if self.rows is None:
            self.rows = torch.arange(len(self.samples))
        self._chunks = _Chunks()
        self._loader: DataLoader | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of what `batches` yields."""
        return self.side, self.side

    @property
    def damaged(self) -> tuple[str, ...]:
        """The damaged samples met so far, each with the reason."""
        return tuple(self.found[i] for i in sorted(self.found))

    def to(self, device: torch.device | str) -> ImageStream:
        """The same stream with its batches on `device`; itself, workers included, if they are there already."""
        device = torch.device(device)
        return self if device == self.device else replace(self, device=device)

    def chosen(self, rows: Tensor) -> ImageStream:
        """The images at the places `rows`, int64 (n,)."""
        return replace(self, rows=self.rows[rows], labels=self.labels[rows], found={})

    def stand_ins(self) -> Tensor:
        """Mask of the images known to be damaged, for which others stand in: bool (N,)."""
        return torch.isin(self.rows, torch.tensor(list(self.found), dtype=torch.int64))

    def remaining(self, augment: Augment) -> Augment:
        """What is still to be done to the batches: all of `augment` but the random crop.

        Raises `ValueError` for crops that reach beyond the image.
        """
        if augment.scale[1] > 1:
            raise ValueError(
                f"A stream cuts its crops out of the images, so augment.scale must not exceed 1, got {augment.scale}. "
                "Lower it, or hold the images in memory (--hold, in Python stream=False)."
            )
        return replace(augment, scale=(1.0, 1.0), ratio=(1.0, 1.0))

    def batches(
        self, rows: Iterable[Tensor], augment: Augment | None = None, key: tuple[int, ...] = ()
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each index tensor (b,) in `rows`: images uint8 (b, 3, S, S) and labels int64 (b,), on the device.

        `augment.scale` and `augment.ratio` ask for a random crop, cut from the image at full resolution. It depends on
        `key` and the sample alone. A later call of `batches` ends an earlier one.

        Raises `ValueError` for damaged samples, `ChildProcessError` if workers end and `RuntimeError` if a later call
        has begun.
        """
        crop = None if augment is None or self.remaining(augment) == augment else (augment.scale, augment.ratio)
        sizes: deque[int] = deque()

        def chunks() -> Iterator[list]:
            for row in rows:
                sizes.append(len(row))
                for some in row.split(CHUNK):
                    yield [(i, crop, tuple(key)) for i in some.tolist()]

        parts: list[tuple[Tensor, Tensor]] = []
        for images, labels, damaged in self._read(chunks()):
            for label, found in zip(labels.tolist(), map(json.loads, damaged), strict=True):
                self.found.update({int(i): reason for i, reason in found.items()})
                if label < 0:
                    raise ValueError(self._refusal(list(found.values())[-1]))
            parts.append((images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)))
            if sum(len(part) for _, part in parts) == sizes[0]:
                sizes.popleft()
                images, labels = (torch.cat(each) for each in zip(*parts, strict=True))
                parts = []
                yield images, labels

    def _read(self, chunks: Iterator[list]) -> Iterator[tuple[Tensor, Tensor, Sequence[str]]]:
        self._chunks.now = chunks
        try:
            if self._loader is None:
                reader = Reader(self.samples, self.labels, self.rows, self.fit, self.on_damaged == "skip", self.side)
                self._loader = loader(reader, self._chunks, self.workers, self.device)
            parts = iter(self._loader)
            while True:
                if self._chunks.now is not chunks:
                    raise RuntimeError(
                        "A stream yields one sequence of batches at a time, but another was begun. Finish one first."
                    )
                if (part := next(parts, None)) is None:
                    return
                yield part
        except (RuntimeError, OSError) as problem:
            if not workers_ended(problem):
                raise
            self._loader = None
            raise ended(problem) from problem

    def _refusal(self, reason: str) -> str:
        if self.on_damaged != "skip":
            advice = "Repair it, or use the next one instead (--skip-damaged, in Python on_damaged='skip')"
            return f"{reason} cannot be decoded. {advice}."
        return f"Many samples in a row cannot be decoded, the last being {reason}. Check that the data is still there."


def ended(problem: BaseException) -> ChildProcessError:
    """PyTorch's error about its workers as one sentence."""
    return ChildProcessError(WORKERS_ENDED.format(str(problem).strip().splitlines()[-1].rstrip(".")))


# Opening


def load(
    source: str | os.PathLike,
    split: str = "train",
    *,
    size: int | None = None,
    squash: bool = False,
    fit: Callable[[Image.Image], Tensor] | None = None,
    on_damaged: str = "raise",
    fold: int = 0,
    workers: int | None = None,
    root: str | os.PathLike | None = None,
    stream: bool | None = None,
    device: torch.device | str | None = None,
) -> ImageSet | ImageStream:
    """Open the `"train"`, `"valid"` or `"test"` split of a data set.

    Where a source has only one of validation and test images, it is both. Test images without labels give way to the
    validation images, and `note` states it. `"whole"` is the test split too, but of a folder that is not divided all.

    source: the name of a data set in `vitlens.data.SOURCES` (`"digits"`, `"torch/cifar10"`, `"hfds/OWNER/SET"` …) or of
    a task in `vitlens.data.tasks.TASKS` (`"imagenet"`, `"pets"` …), or the path of a folder that holds

    * `train/` and `val/` (or `training`, `valid`, `validation`, `test`, `testing`) with one folder of images per class,
      or these class folders alone: then about a tenth of each class, chosen by the names of its files, is for
      validation. Everything that Pillow opens is read; `note` counts and names what is not;
    * ImageNet's validation files side by side (`ILSVRC2012_val_00000001.JPEG` …), with a file of their labels;
    * Parquet files `train-*.parquet`, `validation-*.parquet` … as on the Hugging Face hub, with `classes.json` beside
      them for class names that the files do not name themselves;
    * WebDataset shards: tar files with the split in their names or as their folder.

    root: by default the folder that the environment variable `VITLENS_DATA` names, else `~/.cache/vitlens`.
    size: side in pixels to which the short side is resized (bilinear, antialiased) before a center crop; with `squash`
    both sides are resized. fit: does it in its own way, from a Pillow image to uint8 (3, `size`, `size`).
    on_damaged: `"skip"` leaves out what cannot be decoded, or is over 100 times as long as wide, and lists it in
    `damaged`.
    stream: `workers` processes read the images as they are wanted (an `ImageStream`, which needs `size`), or all are
    decoded now and held (an `ImageSet`). By default they are held if they fit into half of the free memory of the
    machine and of `device`, which the set is put on.

    Raises `ValueError` with what was expected, what came and what to do.
    """
    if split not in ("train", "valid", "test", "whole"):
        raise ValueError(f"split must be 'train', 'valid', 'test' or 'whole', got {split!r}.")
    if on_damaged not in ("raise", "skip"):
        raise ValueError(f"on_damaged must be 'raise' or 'skip', got {on_damaged!r}.")
    if size is not None and size < 1:
        raise ValueError(f"size must be a positive number of pixels, got {size}.")
    if size is None and (squash or stream or fit):
        raise ValueError(
            f"{'Streaming' if stream else 'Squashing'} needs the side of the images in pixels. Pass size=…."
        )
    if workers is not None and workers < 0:
        raise ValueError(f"workers is a number of processes from 0 up, got {workers}.")
    device, source = torch.device(device or "cpu"), str(source)
    samples = opened(source, split, root, fold)
    if split in ("test", "whole") and not _labeled(samples):
        samples = opened(source, "valid", root, fold)
        note = f"The test images of {source} have no labels, so its validation images count instead."
        samples = replace(samples, note=" ".join(filter(None, (note, samples.note))))
    if not _labeled(samples):
        raise ValueError(f"The {split} split of {source} holds no image with a label.")
    samples = replace(samples, note=" ".join(filter(None, (samples.note, _without_images(samples, source, split)))))
    if hasattr(samples.contents, "in_memory"):
        samples = replace(samples, contents=samples.contents.in_memory(free_memory(torch.device("cpu")) // 2))
    if stream is None:
        stream = size is not None and len(samples) * 3 * size**2 > free_memory(device) / 2
    workers = workers if workers is not None else max(1, min(16, (os.cpu_count() or 1) // _processes()))
    fit = fit or (pixels if size is None else Fitting(size, squash))
    if not stream:
        return held(samples, f"the {split} split of {source}", fit, size, on_damaged, workers).to(device)
    labels = torch.as_tensor(samples.labels, dtype=torch.int64)
    return ImageStream(
        samples, labels, samples.class_names, size, fit, on_damaged, workers, device, note=samples.note,
        pictures=samples.fingerprint(),
    )  # fmt: skip


def _labeled(samples: Samples) -> bool:
    """True if there is a label: where they are kept back, folders of classes are missing or all labels are −1."""
    return any(label >= 0 for label in samples.labels)


def _without_images(samples: Samples, source: str, split: str) -> str:
    """A note that some classes have no image, or ""."""
    names = samples.class_names
    missing = sorted({*range(len(names))} - {int(label) for label in samples.labels})
    if not missing:
        return ""
    note = f"{source} has no {split} image of {len(missing)} of {len(names)} classes, such as {names[missing[0]]!r}."
    return note + (" The labels begin at 1 rather than at 0." if missing == [0] else "")


def free_memory(device: torch.device) -> int:
    """Bytes free on `device` and, for this process, on the machine that reads for it, whichever is less.

    From /proc and cgroups: psutil would be one more dependency and does not know a container's limit.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: all that there is
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * 2**30
    limit = Path("/sys/fs/cgroup/memory.max")  # a container may have less than its machine
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        machine = min(machine, int(text))
    machine //= _processes()
    return min(machine, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else machine


def _processes() -> int:
    """Processes that train together on this machine, from the environment of torchrun and accelerate."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
