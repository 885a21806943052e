"""Evaluation of a model by the protocols of the paper. Each protocol yields `Record`s with intervals one by one.

    for record in evaluate(model, "flowers", "fewshot", shots=(1, 5)):
        print(record.manner, record.cell)

A protocol is a row of `options.PROTOCOLS` and a function here. The function takes a `Session` and the protocol's
options.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitlens import files
from vitlens.classes import class_numbers, describe_match, imagenet_numbers
from vitlens.models import class_count, load_model
from vitlens.models.opening import short
from vitlens.names import require_known
from vitlens.scores import Score, mean_of, over_seeds, proportion, real, top_k, validation_numbers
from vitlens.texts import encode
from vitlens.train import runs as training_runs
from vitlens.train.run_folder import remove_checkpoints
from vitlens_paper.evaluate.classifiers import few_shot, linear_probe, nearest, supports
from vitlens_paper.evaluate.options import PROTOCOLS, Evaluation
from vitlens_paper.evaluate.reading import read, top_classes
from vitlens_paper.evaluate.records import Record
from vitlens_paper.evaluate.session import Session, open_session, short_digest, shorten_path
from vitlens_paper.tasks import TASKS, VTAB, Task

ONE_SEED = "One seed: the interval covers other test images, not other training images."


def evaluate(
    model: str | os.PathLike | nn.Module,
    data: str = "",
    protocol: str = "top1",
    *,
    checkpoint: str | os.PathLike | None = None,
    head: str | None = None,
    root: str | os.PathLike | None = None,
    workers: int | None = None,
    image_key: str = "",
    label_key: str = "",
    device: str | torch.device | None = None,
    command: str = "",
    say: Callable[[str], None] = print,
    **options,
) -> Iterator[Record]:
    """Iterator over the `Record`s of a model on data by a protocol.

    model, data, protocol, checkpoint, head, options: see `Evaluation`. shots: for fewshot, images of each class,
    default 1, 5, 10 and 25. seeds: number of seeds, default three for fewshot and one for fine-tuning. neighbors: for
    knn, default 20. tasks: for vtab, default all 19. classes: for top1, as in `vitlens.classes.class_numbers`. For
    finetune and vtab, recipe: default `recipe_of` the data; settings: changes to it, "key=value"; runs: directory for a
    subdirectory of each model, data set, recipe and seed, default "runs".
    root, workers, image_key, label_key, device, command, say: see `open_session`.

    Raises ValueError for options that the protocol does not read, and the errors of the protocol.

    >>> records = vitlens_paper.evaluate.evaluate(model, "digits", "knn", neighbors=5)
    """
    evaluation = Evaluation(
        model=model,
        data=data,
        protocol=protocol,
        options=options,
        checkpoint=checkpoint,
        head=head,
    )
    session = open_session(
        evaluation,
        root=root,
        workers=workers,
        image_key=image_key,
        label_key=label_key,
        device=device,
        command=command,
        say=say,
    )
    return measure(session)


def measure(session: Session) -> Iterator[Record]:
    """Iterator over the `Record`s of an evaluation."""
    protocol = resolve_name(PROTOCOLS[session.evaluation.protocol].function)
    return protocol(session, **session.evaluation.options)


def top1(session: Session, *, classes: str | os.PathLike = "") -> Iterator[Record]:
    """Top-1 and top-5 of the unchanged model, over all images of a directory without splits.

    Also ReaL accuracy if the files are ImageNet's validation images and the model's classes are ImageNet's.
    """
    network = session.network
    images = session.images("whole")
    numbers = session.class_numbers(images, os.fspath(classes))
    match = describe_match(network, images.class_names, os.fspath(classes))
    session.note(match)
    images = session.to_score(images)
    output = top_classes(network)
    classes, labels = read(network, images, output, world=session.world, progress="top1")
    ranks = (1, 5) if class_count(network) > 5 else (1,)
    for k in ranks:
        score = top_k(classes, numbers[labels], k)
        yield session.record(f"top{k}", score, len(labels), note=match)
    files = validation_numbers([images.samples.name(i) for i in range(len(images))])
    imagenet_classes = imagenet_numbers(network)
    if imagenet_classes is not None and (files >= 0).all():
        score, count = real(imagenet_classes[classes], files)
        yield session.record("real", score, count, note=match)


def fewshot(
    session: Session, *, shots: Sequence[int] = (1, 5, 10, 25), seeds: int = 3
) -> Iterator[Record]:
    """Top-1 of least squares on the features of a few training images of each class, by number of shots."""
    images = session.images("train")
    classes = images.class_names
    by_shots = supports(images.labels, shots, range(seeds), classes)
    every_support = [support for several in by_shots.values() for support in several]
    rows = torch.cat(every_support).unique()
    train = session.features(images.select_rows(rows), "train")
    test_images = session.to_score(session.images("test"))
    session.note_shared(images.select_rows(rows), test_images)
    test = session.features(test_images, "test")
    for number, several in by_shots.items():  # from rows of the images to rows of `train`
        by_shots[number] = [torch.searchsorted(rows, support) for support in several]
    note = ONE_SEED if seeds == 1 else ""
    session.note(note)
    count = len(test[1])
    for number, values in few_shot(train, test, by_shots, len(classes)).items():
        score = over_seeds(values, count)
        yield session.record("top1", score, count, note=note, shots=number, seeds=seeds)


def knn(session: Session, *, neighbors: int = 20) -> Iterator[Record]:
    """Top-1 of weighted k-nearest-neighbor classification of the test features."""
    train, (features, labels) = _train_and_test(session)
    right = int((nearest(train, features, neighbors) == labels).sum())
    score = proportion(right, len(labels))
    yield session.record("top1", score, len(labels), neighbors=neighbors)


def probe(session: Session) -> Iterator[Record]:
    """Top-1 of logistic regression on the training features."""
    train, test = _train_and_test(session)
    count = len(test[1])
    right = round(linear_probe(train, test) * count / 100)
    yield session.record("top1", proportion(right, count), count)


def _train_and_test(session: Session) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Features and labels of the training images and of the test images."""
    train_images, test_images = session.images("train"), session.to_score(session.images("test"))
    session.note_shared(train_images, test_images)
    train = session.features(train_images, "train")
    test = session.features(test_images, "test")
    return train, test


@dataclass(frozen=True)
class Tuning:
    """Settings of fine-tuning."""

    recipe: str = ""
    """A recipe, or "" for `recipe_of` the data."""
    settings: Sequence[str] = ()
    """Changes to the recipe, "key=value"."""
    seeds: int | None = None
    """Number of seeds, default one."""
    runs: str | os.PathLike = "runs"
    """Directory for the runs."""

    @property
    def manner(self) -> str | None:
        """The recipe and its changes, or None for the data's unchanged recipe."""
        parts = [shorten_path(change) for change in self.settings]
        if self.recipe:
            name = short(self.recipe)
            if Path(self.recipe).is_file():
                name += f" ({short_digest(files.read(self.recipe, pipes=False))})"
            parts = [name, *parts]
        return ", ".join(parts) or None

    def folder(self, session: Session, data: str) -> Path:
        """Directory of the runs on `data`, for a model and images of any place and name.

        A directory of an earlier version, which has the place of the data in its name, is taken if it is there.
        """
        models = _existing_or(Path(self.runs), session.name, f"-{session.weights}")
        former = models / _directory_name(self._name(short(data), session.former_place(data)))
        if former.is_dir():
            return former
        place = session.place(data)
        if not place:
            return former
        return _existing_or(models, short(data), self._name("", place))

    def _name(self, data: str, place: str) -> str:
        name = f"{data}-{place}" if place else data
        return f"{name}, {self.manner}" if self.manner else name


def _existing_or(parent: Path, name: str, ending: str) -> Path:
    """The directory in `parent` with a name and an ending, or one with this ending whose model or data was renamed."""
    own = parent / _directory_name(name + ending)
    if own.is_dir():
        return own
    renamed = sorted(parent.glob(f"*{glob.escape(_directory_name(ending))}"))
    return renamed[0] if renamed else own


class TunedScore(NamedTuple):
    """Top-1 of fine-tuned models on the test images of a data set."""

    score: Score
    images: int


def finetune(
    session: Session,
    *,
    recipe: str = "",
    settings: Sequence[str] = (),
    seeds: int | None = None,
    runs: str | os.PathLike = "runs",
) -> Iterator[Record]:
    """Top-1 after fine-tuning, of the averaged weights if the recipe keeps them."""
    tuning = Tuning(recipe, settings, seeds, runs)
    data = session.evaluation.data
    yield _tuning_record(session, tuning, data, "top1", fine_tune(session, tuning, data))


def vtab(
    session: Session,
    *,
    tasks: Sequence[str] = (),
    recipe: str = "",
    settings: Sequence[str] = (),
    seeds: int | None = None,
    runs: str | os.PathLike = "runs",
) -> Iterator[Record]:
    """Top-1 after fine-tuning on the tasks of VTAB-1k, and the means of complete groups."""
    tuning = Tuning(recipe, settings, seeds, runs)
    results = {}
    for task in vtab_tasks(tasks):
        results[task.name] = fine_tune(session, tuning, task.name)
        yield _tuning_record(session, tuning, task.name, "top1", results[task.name])
    for name, mean in group_means(results).items():
        yield _tuning_record(session, tuning, name, "mean", mean)


def _tuning_record(
    session: Session, tuning: Tuning, data: str, metric: str, result: TunedScore
) -> Record:
    return session.record(
        metric,
        result.score,
        result.images,
        data=data,
        seeds=tuning.seeds,
        recipe=tuning.manner,
    )


def recipe_of(data: str) -> tuple[str, list[str]]:
    """Recipe name for a data set and the changes for its task. Directories get the recipe for small data.

    The changes switch off flips and crops that would change the label.

    >>> recipe_of("digits")
    ('finetune-small', [])
    """
    task = TASKS.get(data.replace("vtab800/", "vtab/"))
    if task is None:
        return "finetune-small", []
    changes = []
    if not task.flip:
        changes.append("augment.flip=0")
    if not task.crop:
        changes.append("resize=0")
    return task.recipe, changes


def fine_tune(session: Session, tuning: Tuning, data: str) -> TunedScore:
    """Test accuracy after fine-tuning the model on the training images of `data`, once for each seed.

    The runs are those of `vitlens train`, in subdirectories of `tuning.folder`. A stopped run is resumed. Finished runs
    keep only their model, and are repeated only if the images changed. The interval covers the test images, and with
    several seeds also the seeds (`over_seeds`).

    Raises KeyboardInterrupt if a run was stopped, and the errors of `runs.run`, `load_model` and `read`.

    >>> tuned = fine_tune(session, Tuning(seeds=3), "digits")  # doctest: +SKIP
    """
    world = session.world
    recipe, required = recipe_of(data)
    values = []
    for seed in range(tuning.seeds or 1):
        folder = tuning.folder(session, data) / f"seed-{seed}"
        account = training_runs.run(
            tuning.recipe or recipe,
            data,
            folder,
            model=session.evaluation.model,
            resume=folder.is_dir(),
            seed=seed,
            watch=0,
            overrides=[*required, *tuning.settings],
            device=str(world.device),
            root=session.root,
            workers=session.workers,
            image_key=session.image_key,
            label_key=session.label_key,
            goes_on="repeat the command to continue",
        )
        if not account["finished"]:
            raise KeyboardInterrupt
        remove_checkpoints(folder / "checkpoints")
        model = load_model(folder / "model").to(world.device)
        images = session.to_score(session.open(data, "test", model))
        session.note_shared(session.open(data, "train", model), images)
        output = top_classes(model, k=1)
        classes, labels = read(model, images, output, world=world, progress=f"{data}, tuned")
        numbers = class_numbers(model, images.class_names, stored=images.stored_classes)
        values.append(top_k(classes, numbers[labels], 1).value)
    session.note(images.note)
    return TunedScore(over_seeds(values, len(labels)), len(labels))


def vtab_tasks(names: Sequence[str]) -> list[Task]:
    """Tasks of VTAB-1k by name, with or without "vtab/", default all 19. Raises ValueError for unknown names."""
    known = {task.name.removeprefix("vtab/"): task for task in VTAB}
    names = [name.removeprefix("vtab/") for name in names] or list(known)
    for name in names:
        require_known(name, known, "A task of VTAB-1k")
    return [known[name] for name in names]


def group_means(results: dict[str, TunedScore]) -> dict[str, TunedScore]:
    """Means over the complete groups of VTAB-1k, and over all 19 tasks. results: by task name.

    >>> group_means({})
    {}
    """
    means = {}
    for name in ("vtab natural", "vtab specialized", "vtab structured", "vtab"):
        tasks = [task.name for task in VTAB if f"vtab {task.group}".startswith(name)]
        if all(task in results for task in tasks):
            scores = [results[task].score for task in tasks]
            images = sum(results[task].images for task in tasks)
            means[name] = TunedScore(mean_of(scores), images)
    return means


def _directory_name(text: str) -> str:
    """A text as a name of at most 99 characters and 239 bytes that file systems take."""
    plain = re.sub(r"[^\w.,=+-]+", "-", text)
    if len(plain) < 100 and len(plain.encode()) < 240:
        return plain
    beginning = plain[:80].encode()[:200].decode(errors="ignore")
    return f"{beginning}-{hashlib.sha256(encode(text)).hexdigest()[:12]}"
