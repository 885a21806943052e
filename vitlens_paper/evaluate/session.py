"""An evaluation in progress: the opened model, its images and features, and its records.

Shapes: N images, D width of the model.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitlens.classes import class_numbers
from vitlens.data import ImageSet, ImageStream
from vitlens.models import load_model, weights_digest
from vitlens.models.opening import short
from vitlens.recorder.supported import short_name, states_preprocessing, unwrap
from vitlens.scores import Score
from vitlens.train import World, join
from vitlens.train.run_folder import label_checksum
from vitlens.train.runs import versions
from vitlens.unseen import unseen
from vitlens_paper.evaluate.options import Evaluation
from vitlens_paper.evaluate.reading import before_the_head, open_images, read
from vitlens_paper.evaluate.records import Record


@dataclass(frozen=True)
class Session:
    """An evaluation with its opened model. `open_session` makes one."""

    evaluation: Evaluation
    network: nn.Module
    """The opened model on its device."""
    name: str
    """The model's name in records: its timm name, its directory's name, or its architecture."""
    world: World
    """Processes that share the images."""
    root: Path | None = None
    workers: int | None = None
    image_key: str = ""
    label_key: str = ""
    command: str = ""
    say: Callable[[str], None] = print
    """Function that receives notes about the data."""
    opened: list[ImageStream] = field(default_factory=list)
    """Splits of the data so far, whose notes are in the records. They count while the images are read."""
    notes: dict[str, None] = field(default_factory=dict)
    """Notes about the scored images, for `Record.note`, in order."""

    places: dict[str, str] = field(default_factory=dict)
    """Results of `place`."""

    @cached_property
    def weights(self) -> str:
        """First digits of the SHA-256 of all weights and buffers, for `Record.weights`."""
        return weights_digest(self.network)

    def note(self, text: str) -> None:
        """Pass a note to `say` in the first process, unless it is empty."""
        if text and self.world.rank == 0:
            self.say(text)

    def images(self, split: str) -> ImageStream:
        """A split of the data, preprocessed for the model. Passes on its note."""
        images = self.open(self.evaluation.data, split)
        if self.world.size > 1:
            names = [images.samples.name(number) for number in range(len(images))]
            self.world.require_same((images.labels.tolist(), names), f"images of {split}")
        self.note(images.note)
        self.opened.append(images)
        return images

    def notes_on_data(self, data: str) -> list[str]:
        """Notes on the images of the opened splits, with shortened paths."""
        notes = dict.fromkeys(images.note for images in self.opened)
        return [note.replace(os.fspath(data), short(os.fspath(data))) for note in notes if note]

    def open(self, data: str, split: str, network: nn.Module | None = None) -> ImageStream:
        """A split of data, preprocessed for `network`, by default the model."""
        return open_images(
            network or self.network,
            data,
            split,
            root=self.root,
            workers=self.workers,
            world=self.world,
            image_key=self.image_key,
            label_key=self.label_key,
        )

    def to_score(self, images: ImageSet | ImageStream) -> ImageSet | ImageStream:
        """The images without those that the model was trained on. Notes how many, and what could not be decided."""
        kept, note = unseen(self.network, images)
        self.note(note)
        self.notes.update(dict.fromkeys(filter(None, [note])))
        self.opened[:] = [split for split in self.opened if split is not images]
        self.opened.append(kept)
        return kept

    def note_shared(self, train: ImageStream, test: ImageStream) -> None:
        """Note the number of test images that are also training images, by the digests of the stored images."""
        shared = int(np.isin(test.digests.either, train.digests.either).sum())
        if shared:
            text = f"{shared:,} of {len(test):,} test images are also among the training images of the data."
            self.note(text)
            self.notes[text] = None

    def class_numbers(self, images: ImageSet | ImageStream, classes: str = "") -> Tensor:
        """The model's number for each class of the images, as in `vitlens.classes.class_numbers`."""
        names = images.class_names
        return class_numbers(self.network, names, classes, stored=images.stored_classes)

    def features(self, images: ImageStream, progress: str) -> tuple[Tensor, Tensor]:
        """Inputs (N, D) of the head for images, and their labels (N,)."""
        output = before_the_head(self.network)
        return read(self.network, images, output, world=self.world, progress=progress)

    def place(self, data: str) -> str:
        """Digits that tell data of one name apart, for `Record.place`: of a folder's content, wherever it is.

        Of named data, the directory that holds them decides, "" for the usual one.
        """
        if not Path(data).exists():
            return self.former_place(data)
        if data not in self.places:
            self.places[data] = content_digest(self.open(data, "whole"))
        return self.places[data]

    def former_place(self, data: str) -> str:
        """First digits of the SHA-256 of the data's directories, by which earlier versions named runs, or ""."""
        paths = [Path(path) for path in (data, self.root) if path]
        folders = [str(path.resolve()) for path in paths if path.exists()]
        return short_digest(" ".join(folders).encode()) if folders else ""

    def record(
        self,
        metric: str,
        score: Score,
        images: int,
        *,
        data: str = "",
        note: str = "",
        shots: int | None = None,
        seeds: int | None = None,
        neighbors: int | None = None,
        recipe: str | None = None,
    ) -> Record:
        """Record of a score on a number of images of `data`, by default those of the evaluation."""
        data = data or self.evaluation.data
        notes = [note, *self.notes_on_data(data), *self.notes]
        now = datetime.datetime.now(datetime.timezone.utc)
        return Record(
            model=self.name,
            data=short(data),
            protocol=self.evaluation.protocol,
            metric=metric,
            value=round(score.value, 4),
            low=round(score.low, 4),
            high=round(score.high, 4),
            images=images,
            when=now.isoformat(timespec="seconds"),
            versions=versions(),
            command=self.command,
            weights=self.weights,
            place=self.place(data),
            shots=shots,
            seeds=seeds,
            neighbors=neighbors,
            recipe=recipe,
            note=" ".join(dict.fromkeys(filter(None, notes))) or None,
        )


def open_session(
    evaluation: Evaluation,
    *,
    root: str | os.PathLike | None = None,
    workers: int | None = None,
    image_key: str = "",
    label_key: str = "",
    device: str | torch.device | None = None,
    command: str = "",
    say: Callable[[str], None] = print,
) -> Session:
    """Open the model of an evaluation on a device. By default, a timm model stays on its device.

    root: directory of named data sets. image_key, label_key: as in `vitlens.data.load`. command: for the records. say:
    function that receives notes about the data.

    >>> evaluation = vitlens_paper.evaluate.Evaluation(model=model, data="digits", protocol="knn")
    >>> open_session(evaluation).name
    'bundled'
    """
    model = evaluation.model
    named = isinstance(model, str | os.PathLike)
    if device is None and not named:
        device = next(model.parameters()).device
    world = join(device)
    opened = model
    if named:
        opened = load_model(model, checkpoint=evaluation.checkpoint, head=evaluation.head)
    network = unwrap(opened)
    if not states_preprocessing(network):
        raise ValueError(
            f"{type(network).__name__} lacks a pretrained_cfg with the image normalization. Set one."
        )
    network = network.to(world.device)
    name = short_name(network)
    if named and not evaluation.checkpoint:
        name = short(os.fspath(model))
    return Session(
        evaluation,
        network,
        name,
        world,
        root=Path(root) if root else None,
        workers=workers,
        image_key=image_key,
        label_key=label_key,
        command=command,
        say=say,
    )


def command_of(arguments: Sequence[str]) -> str:
    """The vitlens command with these arguments and shortened absolute paths.

    >>> command_of(["evaluate", "model", "--data", "/photos/pets"])
    'vitlens evaluate model --data pets'
    """
    return shlex.join(["vitlens", *map(shorten_path, arguments)])


def shorten_path(argument: str) -> str:
    """An argument, also `--option=value` or `key=value`, with a shortened path if that is absolute."""
    key, equals, value = argument.rpartition("=")
    if not re.fullmatch(r"[-\w.=]+", key):
        key, equals, value = "", "", argument
    if os.path.isabs(value):
        value = short(value)
    return key + equals + value


def content_digest(images: ImageStream) -> str:
    """Digest of the labels, the classes and the images of a split."""
    parts = [label_checksum(images), images.digests.checksum]
    return short_digest(" ".join(parts).encode())


def short_digest(content: bytes) -> str:
    """First digits of the SHA-256 of a content."""
    return hashlib.sha256(content).hexdigest()[:8]
