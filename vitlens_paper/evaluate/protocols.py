"""Evaluation of a model by the protocols of the paper. Each protocol yields `Record`s with intervals one by one.

    for record in evaluate(model, "flowers", "fewshot", shots=(1, 5)):
        print(record.manner, record.cell)

A protocol is a row of `evaluate.PROTOCOLS` and a function here of the same name.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitlens.classes import class_numbers, imagenet_numbers, matched
from vitlens.data import ImageStream
from vitlens.models import class_count, load_model, weights_digest
from vitlens.models.opening import short
from vitlens.names import require_known
from vitlens.recorder.supported import short_name, states_preprocessing, unwrap
from vitlens.scores import Score, mean_of, over_seeds, proportion, real, top_k, validation_numbers
from vitlens.train import World, join, runs
from vitlens.train.runs import versions
from vitlens_paper.evaluate import PROTOCOLS
from vitlens_paper.evaluate.classifiers import few_shot, linear_probe, nearest, supports
from vitlens_paper.evaluate.reading import before_the_head, named_classes, opened, read
from vitlens_paper.evaluate.records import Record
from vitlens_paper.tasks import TASKS, VTAB, Task

ONE_SEED = "One seed: the interval covers other test images, not other training images."


@dataclass(frozen=True)
class Evaluation:
    """Settings of an evaluation, with its model, images and records.

    Raises ValueError for settings that the protocol does not read.

    >>> vitlens_paper.evaluate.Evaluation(model, "digits", "knn", neighbors=5).name
    'vit_tiny_patch16_224'
    """

    model: str | Path | nn.Module
    """A timm name, a directory, or a timm model, which stays on its device unless `device` is given."""
    data: str = ""
    """A data set of `data.load`, or "" for the protocol vtab."""
    protocol: str = "top1"
    """A name of `PROTOCOLS`."""
    shots: tuple[int, ...] = ()
    """Images of each class for fewshot, default 1, 5, 10 and 25."""
    seeds: int | None = None
    """Number of seeds, default three for fewshot and one for fine-tuning."""
    neighbors: int | None = None
    """Number of neighbors for knn, default 20."""
    tasks: tuple[str, ...] = ()
    """Tasks for vtab, default all 19."""
    recipe: str = ""
    """Recipe for fine-tuning, default `recipe_of` the data."""
    settings: tuple[str, ...] = ()
    """Changes to the recipe, "key=value"."""
    runs: Path = Path("runs")
    """Directory for fine-tuning runs, with a subdirectory for each model, data set, recipe and seed."""
    root: Path | None = None
    workers: int | None = None
    device: str | None = None
    command: str = ""
    say: Callable[[str], None] = print
    """Function that receives notes about the data."""
    checkpoint: str | Path | None = None
    """A file with the model's weights, as in `load_model`."""

    def __post_init__(self):
        require_known(self.protocol, PROTOCOLS, "The protocol")
        reads = PROTOCOLS[self.protocol]
        for option in ("data", "shots", "seeds", "neighbors", "tasks", "recipe", "settings"):
            if getattr(self, option) and option not in reads:
                others = ", ".join(name for name, options in PROTOCOLS.items() if option in options)
                flag = {"settings": "set"}.get(option, option)
                raise ValueError(
                    f"The protocol {self.protocol} does not read --{flag}, which is for {others}."
                )
        if "data" in reads and not self.data:
            raise ValueError(
                f"The protocol {self.protocol} needs images. Name a data set or a folder with --data."
            )
        if (isinstance(self.model, nn.Module) or self.checkpoint) and "recipe" in reads:
            raise ValueError(
                f"The protocol {self.protocol} trains from a timm name or a model folder, got "
                f"{'--checkpoint' if self.checkpoint else 'a module'}. Name one."
            )

    @cached_property
    def world(self) -> World:
        """Processes that share the images."""
        device = self.device
        if device is None and isinstance(self.model, nn.Module):
            device = next(self.model.parameters()).device
        return join(device)

    @cached_property
    def network(self) -> nn.Module:
        """The opened model on its device."""
        named = not isinstance(self.model, nn.Module)
        model = load_model(self.model, checkpoint=self.checkpoint) if named else unwrap(self.model)
        if not states_preprocessing(model):
            raise ValueError(
                f"{type(model).__name__} lacks a pretrained_cfg with the image normalization. Set one."
            )
        return model.to(self.world.device)

    @property
    def name(self) -> str:
        """The model's name in records: its timm name, its directory's name, or its architecture."""
        if isinstance(self.model, nn.Module) or self.checkpoint:
            return short_name(self.network)
        return short(str(self.model))

    @cached_property
    def weights(self) -> str:
        """First digits of the SHA-256 of all weights and buffers, for `Record.weights`."""
        return weights_digest(self.network)

    @property
    def manner(self) -> str | None:
        """The recipe and its changes, or None for the data's unchanged recipe."""
        recipe = short(self.recipe)
        if Path(self.recipe).is_file():
            recipe += f" ({_digest(Path(self.recipe).read_bytes())})"
        return ", ".join((*filter(None, [recipe]), *map(_short_value, self.settings))) or None

    def note(self, *texts: str) -> None:
        """Pass notes to `say` in the first process."""
        for text in filter(None, texts if self.world.rank == 0 else ()):
            self.say(text)

    def images(self, split: str) -> ImageStream:
        """A split of the data, preprocessed for the model. Never the training images of the run that the model is from:
        of a folder that is not divided, "test" is the tenth that the run held out."""
        if split == "whole" and not isinstance(self.model, nn.Module):
            trained_on = runs.images_before(Path(self.model).parent).get("data")
            split = "test" if trained_on == os.path.abspath(self.data) else split
        images = opened(
            self.network, self.data, split, root=self.root, workers=self.workers, world=self.world
        )
        self.note(images.note)
        return images

    def features(self, images: ImageStream, progress: str) -> tuple[Tensor, Tensor]:
        """Inputs (N, D) of the head for images, and their labels (N,)."""
        return read(
            self.network, images, before_the_head(self.network), world=self.world, progress=progress
        )

    def place(self, data: str) -> str:
        """First digits of the SHA-256 of the data's directories, for `Record.place`, or "" for named data."""
        folders = [
            str(Path(path).resolve()) for path in (data, self.root) if path and Path(path).exists()
        ]
        return _digest(" ".join(folders).encode()) if folders else ""

    def folder(self, data: str) -> Path:
        """Directory of the fine-tuning runs on `data`."""
        name = "-".join(filter(None, (short(data), self.place(data))))
        return (
            self.runs
            / _file(f"{self.name}-{self.weights}")
            / _file(", ".join(filter(None, (name, self.manner))))
        )

    def record(
        self,
        metric: str,
        score: Score,
        images: int,
        note: str | None = None,
        data: str = "",
        **more,
    ) -> Record:
        """Record of a score on `images` images of `data`."""
        data = data or self.data
        return Record(
            self.name,
            short(data),
            self.protocol,
            metric,
            *(round(x, 4) for x in score),
            images,
            datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            versions(),
            self.command,
            self.weights,
            self.place(data),
            note=note or None,
            **more,
        )


def evaluate(
    model: Evaluation | str | Path | nn.Module, data: str = "", protocol: str = "top1", **settings
):
    """Iterator over the `Record`s of a model on data by a protocol.

    model: also an `Evaluation`. settings: other fields of `Evaluation`. Raises ValueError for settings that the
    protocol does not read, and the errors of the protocol.

    >>> records = vitlens_paper.evaluate.evaluate(model, "digits", "knn", neighbors=5)
    """
    evaluation = (
        model if isinstance(model, Evaluation) else Evaluation(model, data, protocol, **settings)
    )
    return globals()[evaluation.protocol](evaluation)


def top1(e: Evaluation) -> Iterator[Record]:
    """Top-1 and top-5 of the unchanged model, over all images of a directory without splits.

    Also ReaL accuracy if the files are ImageNet's validation images and the model's classes are ImageNet's.
    """
    images, known = e.images("whole"), imagenet_numbers(e.network)
    numbers, count = class_numbers(e.network, images.class_names), class_count(e.network)
    e.note(how := matched(e.network, images.class_names))
    classes, labels = read(
        e.network, images, named_classes(e.network), world=e.world, progress="top1"
    )
    for k in (1, 5) if count > 5 else (1,):
        yield e.record(f"top{k}", top_k(classes, numbers[labels], k), len(labels), how)
    files = validation_numbers([images.samples.name(i) for i in range(len(images))])
    if known is not None and (files >= 0).all():
        yield e.record("real", *real(known[classes], files), how)


def fewshot(e: Evaluation) -> Iterator[Record]:
    """Top-1 of least squares on the features of a few training images of each class, by number of shots."""
    images, seeds = e.images("train"), e.seeds or 3
    drawn = supports(images.labels, e.shots or (1, 5, 10, 25), range(seeds), images.class_names)
    rows = torch.cat([support for several in drawn.values() for support in several]).unique()
    train = e.features(images.select_rows(rows), "train")
    test = e.features(e.images("test"), "test")
    drawn = {
        n: [torch.searchsorted(rows, support) for support in several]
        for n, several in drawn.items()
    }
    e.note(one := ONE_SEED if seeds == 1 else "")
    count = len(test[1])
    for shots, values in few_shot(train, test, drawn, len(images.class_names)).items():
        yield e.record("top1", over_seeds(values, count), count, one, shots=shots, seeds=seeds)


def knn(e: Evaluation) -> Iterator[Record]:
    """Top-1 of weighted k-nearest-neighbor classification of the test features."""
    k = e.neighbors or 20
    yield _on_features(
        e, lambda train, test: (nearest(train, test[0], k) == test[1]).sum(), neighbors=k
    )


def probe(e: Evaluation) -> Iterator[Record]:
    """Top-1 of logistic regression on the training features."""
    yield _on_features(e, lambda train, test: round(linear_probe(train, test) * len(test[1]) / 100))


def _on_features(e: Evaluation, right: Callable, **more) -> Record:
    """Record of a classifier on features. right: (train, test) → number of right images."""
    train, test = (e.features(e.images(split), split) for split in ("train", "test"))
    return e.record("top1", proportion(right(train, test), len(test[1])), len(test[1]), **more)


class Tuned(NamedTuple):
    """Top-1 of fine-tuned models on the test images of a data set."""

    score: Score
    images: int


def finetune(e: Evaluation) -> Iterator[Record]:
    """Top-1 after fine-tuning, of the averaged weights if the recipe keeps them."""
    yield _of_tuned(e, e.data, "top1", fine_tuned(e, e.data))


def vtab(e: Evaluation) -> Iterator[Record]:
    """Top-1 after fine-tuning on the tasks of VTAB-1k, and the means of complete groups."""
    tuned = {}
    for task in vtab_tasks(e.tasks):
        tuned[task.name] = fine_tuned(e, task.name)
        yield _of_tuned(e, task.name, "top1", tuned[task.name])
    for name, mean in group_means(tuned).items():
        yield _of_tuned(e, name, "mean", mean)


def _of_tuned(e: Evaluation, data: str, metric: str, tuned: Tuned) -> Record:
    return e.record(metric, tuned.score, tuned.images, seeds=e.seeds, recipe=e.manner, data=data)


def recipe_of(data: str) -> tuple[str, list[str]]:
    """Recipe name for a data set and the changes for its task. Directories get the recipe for small data.

    The changes switch off flips and crops that would change the label.

    >>> recipe_of("digits")
    ('finetune-small', [])
    """
    task = TASKS.get(data.replace("vtab800/", "vtab/"))
    if task is None:
        return "finetune-small", []
    return task.recipe, [
        key for key, may in (("augment.flip=0", task.flip), ("resize=0", task.crop)) if not may
    ]


def fine_tuned(e: Evaluation, data: str) -> Tuned:
    """Test accuracy after fine-tuning the model on the training images of `data`, once for each seed.

    The runs are those of `vitlens train`, in subdirectories of `e.folder(data)`. A stopped run is resumed. Finished
    runs keep only their model, and are repeated only if the images changed. The interval covers the test images, and
    with several seeds also the seeds (`over_seeds`).

    Raises KeyboardInterrupt if a run was stopped, and the errors of `runs.run`, `load_model` and `read`.

    >>> e = vitlens_paper.evaluate.Evaluation("vit_tiny_patch16_224", "digits", "finetune")
    >>> tuned = fine_tuned(e, "digits")  # doctest: +SKIP
    """
    recipe, required = recipe_of(data)
    values = []
    for seed in range(e.seeds or 1):
        folder = e.folder(data) / f"seed-{seed}"
        account = runs.run(
            e.recipe or recipe,
            data,
            folder,
            model=e.model,
            resume=folder.is_dir(),
            seed=seed,
            watch=0,
            overrides=[*required, *e.settings],
            device=str(e.world.device),
            root=e.root,
            workers=e.workers,
            goes_on="repeat the command to continue",
        )
        if not account["finished"]:
            raise KeyboardInterrupt
        e.world.total(0)  # wait until the first process has written the model
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        model = load_model(folder / "model").to(e.world.device)
        images = opened(model, data, "test", root=e.root, workers=e.workers, world=e.world)
        classes, labels = read(
            model, images, named_classes(model, 1), world=e.world, progress=f"{data}, tuned"
        )
        values.append(top_k(classes, class_numbers(model, images.class_names)[labels], 1).value)
    e.note(images.note)
    return Tuned(over_seeds(values, len(labels)), len(labels))


def vtab_tasks(names: Sequence[str]) -> list[Task]:
    """Tasks of VTAB-1k by name, with or without "vtab/", default all 19. Raises ValueError for unknown names."""
    known = {task.name.removeprefix("vtab/"): task for task in VTAB}
    names = [name.removeprefix("vtab/") for name in names] or list(known)
    for name in names:
        require_known(name, known, "A task of VTAB-1k")
    return [known[name] for name in names]


def group_means(tuned: dict[str, Tuned]) -> dict[str, Tuned]:
    """Means over the complete groups of VTAB-1k, and over all 19 tasks. tuned: results by task name.

    >>> group_means({})
    {}
    """
    means = {}
    for name in ("vtab natural", "vtab specialized", "vtab structured", "vtab"):
        parts = [tuned.get(task.name) for task in VTAB if f"vtab {task.group}".startswith(name)]
        if all(parts):
            scores, images = zip(*parts, strict=True)
            means[name] = Tuned(mean_of(scores), sum(images))
    return means


def command_of(arguments: Sequence[str]) -> str:
    """The vitlens command with these arguments and shortened absolute paths.

    >>> command_of(["evaluate", "model", "--data", "/photos/pets"])
    'vitlens evaluate model --data pets'
    """
    return shlex.join(["vitlens", *map(_short_value, arguments)])


def _short_value(argument: str) -> str:
    """An argument, also `--option=value` or `key=value`, with a shortened path if that is absolute."""
    key, equals, value = argument.rpartition("=")
    if not re.fullmatch(r"[-\w.=]+", key):
        key, equals, value = "", "", argument
    return key + equals + (short(value) if os.path.isabs(value) else value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def _file(name: str) -> str:
    """A directory name as a function of a text."""
    plain = re.sub(r"[^\w.,=+-]+", "-", name)
    return (
        plain
        if len(plain) < 100
        else f"{plain[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    )
