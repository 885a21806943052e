"""Images that do not fit in memory: read, decoded and cut by worker processes as they are wanted.

What a batch holds depends on the index tensor asked for, on the augmentation and on the key, never on the number of
workers or on what was read before. So a run over a stream resumes as exactly as one over images in memory.

Shapes: N images, b of them in a batch, S pixels a side.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitlens.data.augment import Augment, generator
from vitlens.data.decode import cut, decoded, random_box
from vitlens.data.imageset import check_labels, drawn
from vitlens.data.samples import Samples

CHUNK = 32  # images that a worker makes at a time: a batch has many hands, and little waits in shared memory
AHEAD = 4  # chunks that each worker makes ahead
WORKERS_ENDED = (
    "The processes that read images ended ({}). Most often memory ran out: use fewer workers, or smaller images."
)
IN_A_ROW = 100  # damaged samples in a row at which a stream gives up: more likely a disk is gone


class Job(NamedTuple):
    """Part of a batch, for one worker."""

    rows: list[int]
    start: int
    """Place in the batch of the first row."""
    total: int
    """Rows of the whole batch."""
    crop: tuple[tuple[float, float], tuple[float, float]] | None
    """Scale and ratio of the random crop."""
    key: tuple[int, ...]


class Part(NamedTuple):
    """What a worker makes of a job."""

    job: Job
    images: Tensor
    labels: Tensor
    damaged: list[tuple[int, str]]
    """Sample and reason."""
    refusal: str = ""
    """Why the stream must end, if it must."""


@dataclass(eq=False)
class ImageStream:
    """Images and labels of one split that are read as they are wanted; the counterpart of `ImageSet`.

    `labels` is int64 (N,) on the CPU, `class_names` one name per label, in label order. Images come as `side` × `side`
    pixels: cut at random if the augmentation says so, else by `shape`, bit for bit what an `ImageSet` holds. With
    `on_damaged="skip"` the next sample that can be decoded stands in for a damaged one, with its own label; `damaged`
    lists those met. `workers` processes read, started as `context` says ("fork", "spawn" or the system's default); with
    0 workers this process does.
    """

    samples: Samples
    labels: Tensor
    class_names: tuple[str, ...]
    side: int
    shape: Callable[[Tensor], Tensor]
    on_damaged: str = "raise"
    workers: int = 1
    device: torch.device = torch.device("cpu")
    rows: Tensor | None = None
    """Numbers of the samples that belong to the stream, int64 (N,); all by default."""
    note: str = ""
    pictures: str = ""
    """`samples.fingerprint` of what was opened."""
    context: str | None = None
    found: dict[int, str] = field(default_factory=dict)

    def __post_init__(self):
        check_labels(self.labels, len(self.samples) if self.rows is None else len(self.rows), self.class_names)
        if self.rows is None:
            self.rows = torch.arange(len(self.samples))
        self._jobs = _Jobs()
        self._loader: DataLoader | None = None

    def __len__(self) -> int:
        return len(self.rows)

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

    def subset(self, n: int, seed: int = 0) -> ImageStream:
        """`n` of the images, drawn as `ImageSet.subset` draws them."""
        return self.chosen(drawn(len(self), n, seed))

    def chosen(self, rows: Tensor) -> ImageStream:
        """The images at the places `rows`, int64 (n,)."""
        return replace(self, rows=self.rows[rows], labels=self.labels[rows], found={})

    def stand_ins(self) -> Tensor:
        """Whether each image is known to be damaged, so that another stands in for it: bool (N,)."""
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

        Raises `ValueError` for damaged samples, `ChildProcessError` if workers die and `RuntimeError` if a later
        call has begun.
        """
        crop = None if augment is None or self.remaining(augment) == augment else (augment.scale, augment.ratio)
        for part in self._parts(_jobs(rows, crop, tuple(key))):
            self.found.update(part.damaged)
            if part.refusal:
                raise ValueError(part.refusal)
            start, stop, total = part.job.start, part.job.start + len(part.labels), part.job.total
            if start == 0:
                images = torch.empty(total, *part.images.shape[1:], dtype=torch.uint8, device=self.device)
                labels = torch.empty(total, dtype=torch.int64, device=self.device)
            images[start:stop].copy_(part.images, non_blocking=True)
            labels[start:stop].copy_(part.labels, non_blocking=True)
            if stop == total:
                yield images, labels

    def _parts(self, jobs: Iterator[Job]) -> Iterator[Part]:
        self._jobs.now = jobs
        if self._loader is None:
            self._loader = self._started()
        parts = iter(self._loader)
        while True:
            if self._jobs.now is not jobs:
                raise RuntimeError(
                    "A stream yields one sequence of batches at a time, but another was begun. Finish one first."
                )
            try:
                part = next(parts, None)
            except RuntimeError as problem:
                if not workers_ended(problem):
                    raise
                self._loader = None
                raise ChildProcessError(WORKERS_ENDED.format(problem)) from problem
            if part is None:
                return
            yield part

    def _started(self) -> DataLoader:
        reader = Reader(self.samples, self.labels, self.rows, self.shape, self.on_damaged == "skip", self.side)
        several = {"prefetch_factor": AHEAD, "persistent_workers": True, "multiprocessing_context": self.context}
        return DataLoader(
            reader,
            batch_size=None,
            sampler=self._jobs,
            collate_fn=_as_it_is,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_apart,
            generator=torch.Generator(),  # else each start would draw from the global one
            **(several if self.workers else {}),
        )


class _Jobs:
    """The jobs of the current call: workers outlive a call and go on with those of the next."""

    now: Iterator[Job] = iter(())

    def __iter__(self) -> Iterator[Job]:
        return self.now


def _jobs(rows: Iterable[Tensor], crop, key: tuple[int, ...]) -> Iterator[Job]:
    for row in rows:
        row = row.tolist()
        for start in range(0, max(1, len(row)), CHUNK):
            yield Job(row[start : start + CHUNK], start, len(row), crop, key)


def workers_ended(problem: RuntimeError) -> bool:
    """Whether `problem` is PyTorch's error about a process that reads images and has ended."""
    return "DataLoader worker" in str(problem)


def _apart(_: int) -> None:
    """Leave the group of processes: Ctrl-C is meant for the one that trains, which saves and then ends its workers."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()


def _as_it_is(part: Part) -> Part:
    return part


@dataclass(frozen=True)
class Reader(Dataset):
    """What a worker holds: no open file and nothing on an accelerator."""

    samples: Samples
    labels: Tensor
    rows: Tensor
    shape: Callable[[Tensor], Tensor]
    skip: bool
    side: int

    def __getitem__(self, job: Job) -> Part:
        images = torch.empty(len(job.rows), 3, self.side, self.side, dtype=torch.uint8)
        labels = torch.zeros(len(job.rows), dtype=torch.int64)
        damaged: list[tuple[int, str]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as in `load`
            for i, row in enumerate(job.rows):
                found = self._next_good(row, damaged)
                if found is None:
                    return Part(job, images, labels, damaged, self._refusal(damaged[-1][1]))
                image, labels[i] = found
                if job.crop is None:
                    images[i] = self.shape(image)
                else:
                    rng = generator("cpu", *job.key, int(self.rows[row]))
                    images[i] = cut(image, random_box(*image.shape[1:], *job.crop, rng), self.side)
        return Part(job, images, labels, damaged)

    def _next_good(self, row: int, damaged: list[tuple[int, str]]) -> tuple[Tensor, Tensor] | None:
        """The image and label of `row`, or of the first good one after it; None if the stream must end."""
        for step in range(min(IN_A_ROW, len(self.rows)) if self.skip else 1):
            place = (row + step) % len(self.rows)
            sample = int(self.rows[place])
            image = decoded(self.samples, sample)
            if isinstance(image, Tensor):
                return image, self.labels[place]
            damaged.append((sample, image))
        return None

    def _refusal(self, reason: str) -> str:
        if not self.skip:
            advice = "Repair it, or use the next one instead (--skip-damaged, in Python on_damaged='skip')"
            return f"{reason} cannot be decoded. {advice}."
        return f"Many samples in a row cannot be decoded, the last being {reason}. Check that the data is still there."
