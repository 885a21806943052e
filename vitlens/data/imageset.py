"""One split of a data set: listed as `Samples`, held in memory as an `ImageSet`, or streamed by an `ImageStream`.

A batch depends only on the index tensor, the augmentation and the key (seed, epoch), not on the number of workers or on
earlier batches. So a run over a stream resumes as exactly as a run over images in memory.

Shapes: N images, b of them in a batch, H × W pixels, S pixels a side of a square image.
"""

from __future__ import annotations

import ast
import hashlib
import io
import math
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from numbers import Real
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import resized_crop

from vitlens import files, waiting
from vitlens.data.augment import Augment, seed_of
from vitlens.data.sources import SPLITS, Columns, open_samples
from vitlens.digests import DECODED, Digests, pixel_digest, stored_digest
from vitlens.images import MAX_ELONGATION, Change, count_changes, note_file, rgb
from vitlens.launcher import process_count
from vitlens.names import listed_names, require_known
from vitlens.processes import World
from vitlens.texts import shown

CHUNK = 32  # images that a worker reads at a time, to keep shared memory small
TRIED = 16  # images of a stream that are read for its note before others are
TIMEOUT = 300  # seconds without an image after which a stream ends
WORKERS_ENDED = (
    "The processes that read images ended ({}), usually because memory or shared memory is full (a container has 64 MB "
    "of it). Use fewer workers (0 needs no shared memory), or start the container with a larger --shm-size."
)
MOST = 2**31
"""Largest number of a class, in size."""
REPEATED = (
    'Each worker process runs this script again, because it starts them outside of `if __name__ == "__main__":`. Put '
    "what the script does into a function that is called under that line, or read with workers=0."
)


# Samples


@dataclass(frozen=True)
class Samples:
    """One split before any image is read.

    contents: a sequence of images, each a path, encoded bytes, a Pillow image, uint8 (3, H, W), or a tuple that begins
    with one of these. With `root`, names of files below it. title, names: for messages. Names may be numbers.

    >>> split = vitlens.data.Samples([cat, cat.rotate(90)], [0, 1], ("upright", "turned"), ["a", "b"])
    >>> split.name(1), split.content(1).size
    ('b', (451, 300))
    """

    contents: Sequence
    labels: Sequence[int] | Tensor
    class_names: tuple[str, ...]
    names: Sequence
    note: str = ""
    title: str = ""
    root: Path | None = None
    files: Sequence[Path] | None = None
    """Files of the images, if `contents` holds decoded ones."""
    stored_classes: bool = True
    """True if the data hold class numbers. False if names of folders are sorted for them."""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        name = self.names[i]
        text = os.fsdecode(name) if isinstance(name, bytes) else str(name)
        return self.title + text

    def content(self, i: int) -> bytes | Image.Image | Tensor:
        """Stored image `i`: encoded bytes, a Pillow image or uint8 (3, H, W)."""
        source = self.source(i)
        return files.read(source, pipes=False) if isinstance(source, Path) else source

    def source(self, i: int) -> Path | bytes | Image.Image | Tensor:
        """The file of image `i`, or its `content` if it is not a file."""
        content = self.contents[i]
        if isinstance(content, tuple):
            content = content[0]
        if self.root is not None:
            content = self.root / os.fsdecode(content)
        return Path(content) if isinstance(content, str | os.PathLike) else content

    def select_rows(self, rows: Tensor) -> Samples:
        """The samples at the positions `rows`, int64 (n,)."""
        rows = rows.tolist()
        contents = Subset(self.contents, rows)
        if hasattr(self.contents, "select_rows"):
            contents = self.contents.select_rows(rows)
        labels = torch.as_tensor(self.labels)[rows]
        names = np.asarray(self.names)[rows]
        files = None if self.files is None else Subset(self.files, rows)
        return replace(self, contents=contents, labels=labels, names=names, files=files)

    def add_note(self, note: str) -> Samples:
        """The samples with one more sentence for the user."""
        return replace(self, note=f"{self.note} {note}".strip())

    @cached_property
    def digests(self) -> Digests:
        """Digests of the stored images. Those without stored bytes have a digest of their pixels."""
        stored = np.zeros(len(self), dtype=np.uint64)
        pixels = np.zeros(len(self), dtype=np.uint64)

        def read_chunk(chunk: range) -> None:
            for i in chunk:
                stored[i], pixels[i] = self._digests_of(i)

        threads = 16 if self.root is not None else 1
        chunks = [range(i, min(i + 256, len(self))) for i in range(0, len(self), 256)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read_chunk, chunks))
        return Digests(stored, pixels, self.names)

    def _digests_of(self, i: int) -> tuple[int, int]:
        """(stored, pixels) digests of image `i`, 0 for one that is unknown, such as those of an unreadable file."""
        try:
            if self.files is not None:
                return stored_digest(self.files[i]), 0
            if hasattr(self.contents, "encoded"):
                return stored_digest(self.contents.encoded(i)), 0
            source = self.source(i)
            if isinstance(source, Path | bytes):
                return stored_digest(source), 0
        except Exception:  # reported later, during decoding
            return 0, 0
        return 0, self.pixel_digest(i)

    def pixel_digest(self, i: int) -> int:
        """Digest of the pixels of image `i`, 0 if it cannot be decoded."""
        image = decode(self, i)
        return 0 if isinstance(image, str) else pixel_digest(image)

    def pixel_digests(self, rows: Sequence[int]) -> np.ndarray:
        """Digests of the pixels of the images at the positions `rows`, uint64 (n,), which are decoded for it."""
        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:  # decoders release the GIL
            return np.array(list(pool.map(self.pixel_digest, rows)), dtype=np.uint64)

    def former_checksum(self) -> str:
        """Checksum of 16 of the images, by which runs of earlier versions detect other images."""
        digest = hashlib.sha256()
        positions = np.linspace(0, len(self) - 1, 16).astype(int)
        for i in np.unique(positions).tolist():
            try:
                content = self.content(i)
            except Exception:  # reported later, during decoding
                continue
            if isinstance(content, Image.Image):
                content = f"{content.mode} {content.size}".encode()
            elif isinstance(content, Tensor):
                content = content.numpy().tobytes()
            digest.update(content)
        return digest.hexdigest()[:12]

    def fingerprint(self, digests: Digests | None = None) -> str:
        """Checksum of all images, to detect other images with the same names and labels. See `same_images`.

        Files are not decoded, because decoders differ by a level. digests: those of the samples, if known.
        """
        digests = digests or self.digests
        return f"{self.former_checksum()}-{digests.checksum}"


def same_images(before: str, now: str) -> bool:
    """True if two fingerprints are of the same images. Those of earlier versions lack the part after the "-"."""
    if "-" not in before:
        return before == now.split("-")[0]
    return before == now


def samples_of_files(
    root: Path, names: Sequence[str], labels: Sequence[int], class_names, note: str = ""
) -> Samples:
    """Samples of the files `names` below `root`.

    The names are bytes in one array, because the reference counts of a million strings would be copied to each worker.
    """
    packed = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
    return Samples(
        packed, labels, tuple(class_names), packed, note, root=root, stored_classes=False
    )


def label_numbers(labels: Sequence | Tensor) -> Tensor:
    """Labels as class numbers (N,) int64. Whole numbers in floating point count, such as 3.0.

    Raises ValueError for other labels, such as 1.5, NaN, True or a text.

    >>> label_numbers([0, 3.0])
    tensor([0, 3])
    """
    if isinstance(labels, Tensor) and labels.dtype == torch.int64:
        return labels
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    kinds = set(map(type, values))
    if kinds != {int}:
        values = [_whole(value, number) for number, value in enumerate(values, 1)]
    if values and max(map(abs, values)) > MOST:
        largest = max(values, key=abs)
        raise ValueError(f"Labels must be class numbers, such as 0, 1 and 2, got {largest}.")
    return torch.tensor(values, dtype=torch.int64)


def _whole(label: object, number: int) -> int:
    """A label as a whole number. number: of its image, for the message."""
    value = label.tolist() if hasattr(label, "tolist") else label  # of NumPy or PyTorch
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real or not math.isfinite(value) or value != int(value):
        raise ValueError(
            f"Labels must be class numbers, such as 0, 1 and 2, got {value!r:.60} for image {number:,}. Correct the "
            "labels, or leave out the image."
        )
    return int(value)


def decode(samples: Samples, i: int, changes: list[Change] | None = None) -> Image.Image | str:
    """Sample `i` as an upright, opaque RGB image, or its name and the reason why it cannot be decoded.

    changes: list to which the changes of its pixels are added.
    """
    changes = [] if changes is None else changes
    try:
        content = samples.content(i)
        if isinstance(content, Tensor):
            image = Image.fromarray(content.permute(1, 2, 0).numpy())
        elif isinstance(content, bytes):
            with Image.open(io.BytesIO(content)) as encoded:
                image = rgb(encoded, changes)
                note_file(encoded, changes)
        else:
            image = rgb(content, changes)
    except UnidentifiedImageError:
        return f"{shown(samples.name(i))} (no image of a known format)"
    except Exception as problem:  # decoders raise many types on damaged files
        return f"{shown(samples.name(i))} ({type(problem).__name__}: {shown(problem)})"
    w, h = image.size
    if max(h, w) > MAX_ELONGATION * min(h, w):
        return f"{shown(samples.name(i))} (a strip of {w} × {h} pixels)"
    return image


def uint8_tensor(image: Image.Image) -> Tensor:
    """An RGB image as uint8 (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


PIXEL_READING = 2
"""Version of decoding, resizing and cropping, recorded by runs. Increase it when a file gives other pixels."""


@dataclass(frozen=True)
class Fitting:
    """Resizing of validation images to uint8 (3, side, side), by timm, as in `vitlens.models.pixels`.

    The short side is resized (bilinear, antialiased) and the center is cropped. With `squash`, both sides are resized.
    """

    side: int
    squash: bool = False

    def __call__(self, image: Image.Image) -> Tensor:
        if image.size == (self.side, self.side):
            return uint8_tensor(image)
        return self.transform(image)

    @cached_property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """timm's transform of an image to its pixels."""
        from timm.data import create_transform

        return create_transform(
            (3, self.side, self.side),
            interpolation="bilinear",
            crop_pct=1.0,
            is_training=False,
            use_prefetcher=True,
            crop_mode="squash" if self.squash else "center",
        )


def random_crop(
    image: Image.Image, side: int, scale: Sequence[float], ratio: Sequence[float], seed: int
) -> Tensor:
    """torchvision's `RandomResizedCrop` to uint8 (3, side, side), as a function of `seed` without global state."""
    image = uint8_tensor(image)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        box = RandomResizedCrop.get_params(image, list(scale), list(ratio))
    return resized_crop(image, *box, [side, side], antialias=True)


def draw_rows(size: int, n: int, seed: int) -> Tensor:
    """(n,) different int64 numbers below `size`, which depend on `seed` alone."""
    if not 0 < n <= size:
        raise ValueError(f"A subset of {size} images must have 1 to {size} of them, got {n}.")
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(size, generator=generator)[:n]


# In memory


class _Split:
    """Methods of `ImageSet` and `ImageStream`."""

    def __len__(self) -> int:
        return len(self.labels)

    def __dir__(self) -> list[str]:
        methods = ("batches", "class_names", "labels", "note", "remaining", "select_rows", "size")
        own = ("images", "select_classes") if hasattr(self, "images") else ()
        return listed_names(self, (*methods, *own, "subset", "to"))

    def subset(self, n: int, seed: int = 0):
        """`n` of the images, drawn without replacement as a function of `seed`."""
        return self.select_rows(draw_rows(len(self), n, seed))

    def _check_labels(self) -> None:
        if len(self) == 0:
            return
        kind = self.labels.dtype
        if kind.is_floating_point or kind.is_complex or kind == torch.bool:
            raise ValueError(f"Labels must be class numbers as integers, got {kind}.")
        n = len(self.class_names)
        lowest, highest = int(self.labels.min()), int(self.labels.max())
        if lowest < 0 or highest >= n:
            raise ValueError(
                f"Labels must lie in 0…{n - 1} for {n} classes, got labels from {lowest} to {highest}."
            )


@dataclass(frozen=True)
class ImageSet(_Split):
    """Images and labels of one split.

    images: uint8 (N, 3, H, W). labels: int64 (N,). class_names: one name per label, in label order. note: sentences for
    the user about the split. fingerprint: `Samples.fingerprint` of the whole split. digests: those of the images.
    stored_classes: as in `Samples`.

    >>> digits = vitlens.data.load("digits")
    >>> digits.images.shape, digits.class_names[-1]
    (torch.Size([1437, 3, 8, 8]), '9')
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    note: str = ""
    fingerprint: str = ""
    digests: Digests | None = None
    stored_classes: bool = True

    def __post_init__(self):
        kind = self.images.dtype
        shape = tuple(self.images.shape)
        if kind != torch.uint8 or shape[1:2] != (3,) or shape[:1] != self.labels.shape:
            raise ValueError(
                f"Expected uint8 images (N, 3, H, W), one for each label, got {kind} of shape {shape}."
            )
        self._check_labels()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return tuple(self.images.shape[2:])

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set with its tensors on `device`."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def select_rows(self, rows: Tensor) -> ImageSet:
        """The images at the positions `rows`, int64 (n,)."""
        digests = self.digests and self.digests.select_rows(rows.cpu().numpy())
        rows = rows.to(self.labels.device)
        return replace(self, images=self.images[rows], labels=self.labels[rows], digests=digests)

    def select_classes(self, classes: Sequence[int]) -> ImageSet:
        """The images of the classes with these labels, which are renumbered from 0 in the given order.

        >>> vitlens.data.load("digits").select_classes([3, 8]).class_names
        ('3', '8')
        """
        known = len(self.class_names)
        if len(set(classes)) < len(classes) or not all(0 <= label < known for label in classes):
            raise ValueError(
                f"Classes must be different labels from 0 to {known - 1}, got {list(classes)}."
            )
        numbers = torch.full((known,), -1, device=self.labels.device)
        numbers[list(classes)] = torch.arange(len(classes), device=self.labels.device)
        kept = self.select_rows((numbers[self.labels] >= 0).nonzero()[:, 0])
        names = tuple(self.class_names[label] for label in classes)
        return replace(kept, labels=numbers[kept.labels], class_names=names)

    def batches(
        self, rows: Iterable[Tensor], augment: Augment | None = None, key: tuple[int, ...] = ()
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each index tensor (b,) in `rows`: images uint8 (b, 3, H, W) and labels int64 (b,), on the set's device.

        Only an index, so the host never waits. `augment` is left to the caller, see `remaining`.
        """
        for batch in rows:
            batch = batch.to(self.labels.device, non_blocking=True)
            yield self.images[batch], self.labels[batch]

    def digests_of_pixels(self) -> Digests | None:
        """Digests of the images, with those of their pixels."""
        return self.digests

    def remaining(self, augment: Augment) -> Augment:
        """Augmentation still to apply to the images of `batches`: all of it."""
        return augment


def decode_all(
    samples: Samples, title: str, fit: Callable, size: int | None, workers: int
) -> ImageSet:
    """Decode all samples into memory. title: their description in messages."""
    n = len(samples)
    labels = label_numbers(samples.labels)
    images: list | Tensor = [None] * n
    if size is not None:  # filled in place, because stacking a list takes twice the memory
        images = torch.empty(n, 3, size, size, dtype=torch.uint8)
    damaged: dict[int, str] = {}
    kinds: dict[int, list[str]] = {}
    pixels = np.zeros(n, dtype=np.uint64)

    def decode_chunk(chunk: Iterable[int]) -> None:
        for i in chunk:
            changes: list[Change] = []
            image = decode(samples, i, changes)
            if changes:
                kinds[i] = [change.kind for change in changes]
            if isinstance(image, str):
                damaged[i] = image
            else:
                images[i] = fit(image)
                pixels[i] = pixel_digest(image)

    chunks = [range(i, min(i + 256, n)) for i in range(0, n, 256)]
    with ThreadPoolExecutor(max(1, workers)) as pool:  # decoders release the GIL
        list(pool.map(decode_chunk, chunks))  # raises the errors of the threads
    if damaged:
        first = "; ".join(damaged[i] for i in sorted(damaged)[:10])
        raise ValueError(
            f"{len(damaged)} of {n} samples of {title} cannot be decoded: {first}. Repair or remove them."
        )
    if size is None:
        images = torch.stack(images)
    counts = Counter(kind for several in kinds.values() for kind in set(several))
    samples = samples.add_note(count_changes(counts, n))
    digests = replace(samples.digests, pixels=pixels)
    fingerprint = samples.fingerprint()
    return ImageSet(
        images,
        labels,
        samples.class_names,
        samples.note,
        fingerprint,
        digests,
        samples.stored_classes,
    )


# Streams


def loader(dataset: Dataset, batches: Iterable, workers: int, device: torch.device) -> DataLoader:
    """The `DataLoader` of all worker processes, with batches collated by PyTorch."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # not the global one
        timeout=TIMEOUT if workers else 0,
        persistent_workers=workers > 0,
        worker_init_fn=_leave_group,
    )


def require_workers() -> None:
    """Raise an error if worker processes cannot start: without shared memory, or from a script that each would repeat.

    In a worker that repeats the script, end it, because it would start workers of its own.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stderr.write(REPEATED + "\n")
        sys.stderr.flush()
        os._exit(1)
    method = multiprocessing.get_start_method(allow_none=True)
    if (method or multiprocessing.get_all_start_methods()[0]) != "fork" and _repeats_script():
        raise ValueError(REPEATED)
    try:
        multiprocessing.Lock()
    except OSError as problem:
        raise ValueError(
            f"Worker processes need shared memory, which this machine does not give ({problem.strerror}: /dev/shm). "
            "Read in this process, with workers 0 (--workers 0), or make /dev/shm writable."
        ) from problem


def _repeats_script() -> bool:
    """True if the main script has no line that keeps a worker from running all of it again."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    name = getattr(getattr(main, "__spec__", None), "name", "") or ""
    if not file or name.endswith("__main__") or not file.endswith(".py"):
        return False
    with suppress(OSError):
        text = files.read_text(file, errors="replace")
        return not _is_guarded(text)
    return False


def _is_guarded(script: str) -> bool:
    """True if a script compares its `__name__`, or looks for its parent process, outside of comments and texts."""
    try:
        nodes = list(ast.walk(ast.parse(script)))
    except (SyntaxError, ValueError):
        return True  # not this check's matter
    compared = [node for node in nodes if isinstance(node, ast.Compare)]
    names = {part.id for node in compared for part in ast.walk(node) if isinstance(part, ast.Name)}
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    called |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return "__name__" in names or bool(called & {"parent_process", "current_process"})


def lost_workers(problem: BaseException) -> bool:
    """True for PyTorch's errors about a worker that was killed, timed out or could not send."""
    text = str(problem)
    return "DataLoader" in text or "in pin memory thread" in text


def lost_workers_error(problem: BaseException) -> ChildProcessError:
    """Error with one sentence for PyTorch's error about its workers."""
    last_line = str(problem).strip().splitlines()[-1]
    return ChildProcessError(WORKERS_ENDED.format(last_line.rstrip(".")))


def _leave_group(_: int) -> None:
    """Leave the process group, so that Ctrl-C reaches only the process that trains. It saves and ends its workers."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()


@dataclass(frozen=True)
class Reader(Dataset):
    """Data set in the workers of a stream, which read the samples of chunks (rows, crop, key).

    A sample is an image, its label, "" (or the name and the reason of a sample that cannot be decoded), and the kinds
    of the changes of its pixels, separated by "/".
    """

    samples: Samples
    fit: Callable[[Image.Image], Tensor]
    side: int

    def __getitems__(
        self, chunk: tuple[np.ndarray, tuple | None, tuple[int, ...]]
    ) -> list[tuple[Tensor, int, str, str]]:
        rows, crop, key = chunk
        return [self.sample(int(row), crop, key) for row in rows]

    def sample(
        self, row: int, crop: tuple | None, key: tuple[int, ...]
    ) -> tuple[Tensor, int, str, str]:
        changes: list[Change] = []
        image = decode(self.samples, row, changes)
        if isinstance(image, str):
            blank = torch.zeros(3, self.side, self.side, dtype=torch.uint8)
            return blank, -1, image, ""
        if crop is None:
            pixels = self.fit(image)
        else:
            scale, ratio = crop
            pixels = random_crop(image, self.side, scale, ratio, seed_of(*key, row))
        kinds = "/".join(change.kind for change in changes)
        return pixels, int(self.samples.labels[row]), "", kinds


@dataclass(eq=False)
class ImageStream(_Split):
    """Images and labels of one split that are read for each batch. The counterpart of `ImageSet`.

    `labels` is int64 (N,) on the CPU, `class_names` one name per label, in label order. Images have `side` × `side`
    pixels, cropped at random by the augmentation, or by `fit` to the same pixels as in an `ImageSet`. `workers`
    processes read. With 0 workers this process reads. `whole` has the samples of the whole split of
    the data set `source`.

    >>> stream = vitlens.data.load("digits", "valid", size=32, stream=True, workers=0)
    >>> next(stream.batches([torch.arange(5)]))[0].shape
    torch.Size([5, 3, 32, 32])
    """

    samples: Samples
    side: int
    fit: Callable[[Image.Image], Tensor]
    workers: int = 1
    device: torch.device = torch.device("cpu")
    whole: Samples | None = None
    source: str = ""

    def __post_init__(self):
        self.whole = self.whole or self.samples
        self.labels = label_numbers(self.samples.labels)
        self.samples = replace(self.samples, labels=self.labels)
        self.class_names = self.samples.class_names
        self._check_labels()
        self._read = np.zeros(len(self), bool)
        self._changed: dict[str, np.ndarray] = {}
        # Of the last call of `batches`, which the workers outlive.
        self._current: list | None = None
        self._chunks: list = []
        self._loader: DataLoader | None = None

    @property
    def note(self) -> str:
        """Sentences for the user about the split, with the number of changed images among those read so far.

        Before `batches` has read any, 16 of the images are read for this.
        """
        if not len(self):
            return self.samples.note
        title = "images read so far"
        if not self._read.any():
            rows = np.unique(np.linspace(0, len(self) - 1, TRIED).astype(int))
            self._count(rows, [self._kinds(row) for row in rows.tolist()])
        number = int(self._read.sum())
        if number == len(self):
            title = "images"
        counts = {kind: int(changed.sum()) for kind, changed in self._changed.items()}
        return self.samples.add_note(count_changes(counts, number, title)).note

    def _kinds(self, row: int) -> str:
        """Kinds of the changes of an image, separated by "/"."""
        changes: list[Change] = []
        decode(self.samples, row, changes)
        return "/".join(change.kind for change in changes)

    def _count(self, rows: np.ndarray, kinds: Sequence[str]) -> None:
        """Count the kinds of the changes of images."""
        self._read[rows] = True
        for row, several in zip(rows, kinds, strict=True):
            for kind in filter(None, several.split("/")):
                if kind not in self._changed:
                    self._changed[kind] = np.zeros(len(self), bool)
                self._changed[kind][row] = True

    def share_counts(self, world: World) -> None:
        """Count the images that any process of `world` has read, for `note`.

        >>> vitlens.data.load("digits", size=32, stream=True, workers=0).share_counts(vitlens.train.World())
        """
        for read, changed in world.gather((self._read, self._changed)):
            self._read = self._read | read
            for kind, rows in changed.items():
                self._changed[kind] = self._changed.get(kind, False) | rows

    @property
    def fingerprint(self) -> str:
        """`Samples.fingerprint` of the whole split."""
        return self.whole.fingerprint()

    @property
    def digests(self) -> Digests:
        """Digests of the stored images."""
        return self.samples.digests

    @property
    def stored_classes(self) -> bool:
        """`Samples.stored_classes` of the split."""
        return self.samples.stored_classes

    def digests_of_pixels(self) -> Digests:
        """Digests with those of the pixels, for which at most `DECODED` images are decoded."""
        digests = self.digests
        if len(self) > DECODED or digests.pixels.any():
            return digests
        return replace(digests, pixels=self.samples.pixel_digests(range(len(self))))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of the images in `batches`."""
        return self.side, self.side

    def to(self, device: torch.device | str) -> ImageStream:
        """The same stream with its batches on `device`. Returns itself, with its workers, if they are there already."""
        device = torch.device(device)
        if device == self.device:
            return self
        return replace(self, device=device)

    def select_rows(self, rows: Tensor) -> ImageStream:
        """The images at the positions `rows`, int64 (n,)."""
        return replace(self, samples=self.samples.select_rows(rows))

    def remaining(self, augment: Augment) -> Augment:
        """Augmentation still to apply to the images of `batches`: all of it except the random crop.

        Raises `ValueError` for crops that extend beyond the image.
        """
        if augment.scale[1] > 1:
            raise ValueError(
                f"augment.scale must be at most 1 for a stream, which crops within the images, got {augment.scale}. "
                "Lower it, or hold the images in memory (--hold, in Python stream=False)."
            )
        return replace(augment, scale=(1.0, 1.0), ratio=(1.0, 1.0))

    def batches(
        self, rows: Iterable[Tensor], augment: Augment | None = None, key: tuple[int, ...] = ()
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each index tensor (b,) in `rows`: images uint8 (b, 3, S, S) and labels int64 (b,), on the device.

        A random crop by `augment.scale` and `augment.ratio` is cut from the image at full resolution. It depends only
        on `key` and the image's position. A later call of `batches` ends an earlier one.

        Raises `ValueError` for damaged samples, `ChildProcessError` if workers end and `RuntimeError` if a later call
        has begun.
        """
        crop = None
        if augment is not None and self.remaining(augment) != augment:
            crop = (augment.scale, augment.ratio)
        chunks_of_batches = [batch.split(CHUNK) for batch in rows]
        chunks = [
            (chunk.numpy(), crop, tuple(key)) for batch in chunks_of_batches for chunk in batch
        ]
        parts = self._read_chunks(chunks)
        for batch in chunks_of_batches:
            images, labels = zip(*islice(parts, len(batch)), strict=True)
            yield torch.cat(images), torch.cat(labels)

    def _read_chunks(self, chunks: list) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each chunk, on the device."""
        if self._loader is None:
            if self.workers:
                require_workers()
            reader = Reader(self.samples, self.fit, self.side)
            self._loader = loader(reader, self._chunks, self.workers, self.device)
        self._current = chunks
        self._chunks[:] = chunks  # the loader's own list
        try:
            with self._announced():
                parts = iter(self._loader)
            for rows, _, _ in chunks:
                if self._current is not chunks:
                    raise RuntimeError(
                        "A stream yields one sequence of batches at a time, and another was started. Finish one first."
                    )
                with self._announced():
                    images, labels, damaged, kinds = next(parts)
                for description in damaged:
                    if description:
                        raise ValueError(f"{description} cannot be decoded. Repair or replace it.")
                self._count(rows, kinds)
                images = images.to(self.device, non_blocking=True)
                labels = labels.to(self.device, non_blocking=True)
                yield images, labels
        except (RuntimeError, OSError, EOFError) as problem:
            if not lost_workers(problem) and not self._cut_off(problem):
                raise
            self._loader = None
            raise lost_workers_error(problem) from problem

    def _cut_off(self, problem: Exception) -> bool:
        """True for the error of a connection that a killed worker closed before PyTorch saw its end."""
        of_its_own = str(problem).startswith("Caught ")  # an error inside a worker, which lives
        return (
            self.workers > 0 and isinstance(problem, (ConnectionError, EOFError)) and not of_its_own
        )

    def _announced(self) -> AbstractContextManager:
        """Announcement of a long wait for the workers, in the process that starts them."""
        if not self.workers:
            return nullcontext()
        return waiting.announced(
            f"{self.workers} worker processes, which read images",
            f"They have {TIMEOUT / 60:g} minutes for each. Workers 0 (--workers 0) read in this process.",
        )


# Opening


def load(
    source: str | os.PathLike,
    split: str = "train",
    *,
    size: int | None = None,
    squash: bool = False,
    fit: Callable[[Image.Image], Tensor] | None = None,
    fold: int = 0,
    workers: int | None = None,
    root: str | os.PathLike | None = None,
    stream: bool | None = None,
    device: torch.device | str | None = None,
    image_key: str = "",
    label_key: str = "",
) -> ImageSet | ImageStream:
    """Open the `"train"`, `"valid"` or `"test"` split of a data set.

    A source with only validation or only test images uses them for both. Validation images replace test images without
    labels, and `note` reports it. `"whole"` is the test split, or all images of a folder that is not divided.

    >>> digits = vitlens.data.load("digits", "valid", size=32)
    >>> len(digits), digits.images.shape
    (360, torch.Size([360, 3, 32, 32]))

    source: the name of a data set in `vitlens.data.SOURCES` (`"digits"`, `"torch/cifar10"` …) or of a task
    (`"imagenet"`, `"pets"` …), or the path of a folder that holds

    * `train/` and `val/` (or `training`, `valid`, `validation`, `test`, `testing`) with one folder of images per class,
      or only the class folders. Then about a tenth of each class, by the names of its files, is for validation.
      All files that Pillow opens are read, each real file once in a class, also in linked folders. `note` counts and
      names what is left out, and the images that are in several classes or splits under different names.
    * Parquet files `train-*.parquet`, `validation-*.parquet` … as on the Hugging Face hub. `classes.json` may hold the
      class names if the files have none.
    * WebDataset shards: tar files with the split in their names or as their folder.

    root: folder of named data sets, by default the environment variable `VITLENS_DATA`, else `~/.cache/vitlens`. size:
    side in pixels to which the short side is resized (bilinear, antialiased) before a center crop. squash: resize both
    sides. fit: a function for this, from a Pillow image to uint8 (3, `size`, `size`). fold: number of the validation
    fold of `"digits"`, 0 to 4. stream: True to return an `ImageStream`, for which `workers` processes read the images
    of each batch and which needs `size`. False to decode all images into an `ImageSet` on `device`. By default images
    are held if they fit into half of the free memory. image_key, label_key: the columns of a table, or the fields of a
    WebDataset sample (`jpg`, `cls`, `json.label`), if there are several for an image or a label.

    Raises `ValueError` for data that is missing, and for images that cannot be decoded or are over 100 times as long as
    wide.
    """
    require_known(split, SPLITS, "split")
    if size is None and (squash or stream):
        raise ValueError("squash and stream need a common size of the images. Pass size=….")
    device = torch.device(device or "cpu")
    source = os.fspath(source)
    columns = Columns(image_key or "", label_key or "")
    samples = open_labeled(source, split, root, fold, columns)
    note = missing_classes(samples, f"{source} has no {split} image of")
    if note:
        samples = samples.add_note(note)
    if hasattr(samples.contents, "in_memory"):
        most = free_memory(torch.device("cpu")) // 2
        samples = replace(samples, contents=samples.contents.in_memory(most))

    if stream is None:
        stream = size is not None and len(samples) * 3 * size**2 > free_memory(device) / 2
    if workers is None:
        cores = (os.cpu_count() or 1) // _local_processes()
        workers = max(1, min(16, cores))
    if fit is None:
        fit = uint8_tensor if size is None else Fitting(size, squash)
    if stream:
        return ImageStream(samples, size, fit, workers, device, source=source)
    images = decode_all(samples, f"the {split} split of {shown(source)}", fit, size, workers)
    return images.to(device)


def open_labeled(
    source: str,
    split: str,
    root: str | os.PathLike | None,
    fold: int,
    columns: Columns | None = None,
) -> Samples:
    """Samples of a split, or of the validation split if test images have no labels."""
    samples = open_samples(source, split, root, fold, columns)
    if split in ("test", "whole") and not _has_labels(samples):
        validation = open_samples(source, "valid", root, fold, columns)
        note = f"The test images of {source} have no labels, so its validation images are used."
        samples = replace(validation, note=f"{note} {validation.note}".strip())
    if not _has_labels(samples):
        raise ValueError(f"The {split} split of {shown(source)} holds no image with a label.")
    return samples


def _has_labels(samples: Samples) -> bool:
    """True if an image has a label. Published copies without labels have −1 everywhere, or no class folders."""
    return any(label >= 0 for label in samples.labels)


def missing_classes(samples: Samples, beginning: str) -> str:
    """Note with the number of classes without images and the name of one, or "" if every class has one."""
    present = set(np.unique(samples.labels).tolist())
    missing = [name for i, name in enumerate(samples.class_names) if i not in present]
    if not missing:
        return ""
    total = len(samples.class_names)
    return f"{beginning} {len(missing)} of {total} classes, such as {missing[0]!r}."


def free_memory(device: torch.device) -> int:
    """Bytes free on `device`, or on its machine for this process, whichever is less.

    From /proc and cgroups, because psutil ignores a container's limit.
    """
    free = _machine_memory()
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's limit
    if limit.is_file():
        text = limit.read_text(encoding="utf-8").strip()
        if text.isdecimal():
            free = min(free, int(text))
    free //= _local_processes()
    if device.type == "cuda":
        on_device, _ = torch.cuda.mem_get_info(device)
        free = min(free, on_device)
    return free


def _machine_memory() -> int:
    """Bytes available on Linux, the total on macOS, and 8 GiB on Windows."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 8 * 2**30


def _local_processes() -> int:
    """Number of processes that train together on this machine, as torchrun and accelerate set it."""
    return process_count("LOCAL_WORLD_SIZE")
