"""The protocols of `registry.PROTOCOLS`: each is a function from a question to its records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from vitlens.data import UNLABELED
from vitlens.evaluate.classes import class_numbers, imagenet_numbers, matched
from vitlens.evaluate.classifiers import few_shot, linear_probe, nearest, supports
from vitlens.evaluate.question import Question
from vitlens.evaluate.reading import Reading, before_the_head, named_classes
from vitlens.evaluate.registry import PROTOCOLS
from vitlens.evaluate.scores import another_order, over_seeds, proportion, real, top_k, validation_numbers
from vitlens.evaluate.tuning import Tuned, fine_tuned, group_means, vtab_tasks
from vitlens.models import class_count
from vitlens.paper.records import Record

ONE_SEED = (
    "With one seed the interval is that of the images measured on alone; how far other images to learn from would "
    "change the number, it does not say."
)


def evaluate(
    model: Question | str | Path | nn.Module, data: str = "", protocol: str = "top1", **settings
) -> Iterator[Record]:
    """The records that answer a question, each as soon as it is known.

    model: a `Question`, or the model of one, with its data, protocol and other settings (see `Question`). The
    protocols are rows of `PROTOCOLS`. Raises ValueError for what does not fit together, and what the protocols raise.
    """
    question = model if isinstance(model, Question) else Question(model, data, protocol, **settings)
    return PROTOCOLS[question.protocol](question)


def top1(q: Question) -> Iterator[Record]:
    """Top-1 and top-5 of the model as it is, of a folder without splits over all of its images.

    ReaL too where the files are ImageNet's validation images and the model's classes ImageNet's, in whatever order.
    """
    images, known = q.images("whole"), imagenet_numbers(q.network)
    real_alone = q.data == "imagenet-real" or images.class_names == UNLABELED
    if real_alone and known is None:
        raise ValueError(
            "ReaL labels are of ImageNet's 1,000 classes, but this model does not name them all. Name its classes by "
            "their WordNet ids, or measure top1 on other data."
        )
    if not real_alone:
        numbers = class_numbers(q.network, images.class_names)
        q.note(how := matched(q.network, images.class_names))
    said = q.read(images, named_classes(q.network), "top1")
    notes: list[str] = []
    if not real_alone:
        labels, count = numbers[said.labels], class_count(q.network)
        order = another_order(said.values[:, 0], labels, count) if how else ""
        q.note(order)
        notes = [how, order, q.whole(images, said)]
        for k in (1, 5) if count > 5 else (1,):
            yield q.record(q.data, f"top{k}", top_k(said.values, labels, k), len(labels), said.damaged, notes)
    files = validation_numbers([images.samples.name(int(i)) for i in images.rows[said.rows]])
    if real_alone or known is not None and (files >= 0).all():
        score, scored = real(known[said.values], files)
        yield q.record(q.data, "real", score, scored, said.damaged, notes)


def fewshot(q: Question) -> Iterator[Record]:
    """Least squares on the features of a few training images of each class, by number of shots."""
    images, seeds = q.images("train"), q.seeds or 3
    whole, damaged = torch.ones(len(images), dtype=torch.bool), set()
    while True:  # what was drawn and is damaged is taken out, and all is drawn anew from the rest
        sound = whole.nonzero()[:, 0]
        wanted = supports(images.labels[sound], q.shots or (1, 5, 10, 25), range(seeds), images.class_names)
        rows = sound[torch.cat([each for drawn in wanted.values() for each in drawn]).unique()]
        train = q.read(images.chosen(rows), before_the_head(q.network), "to learn from")
        damaged |= {*train.damaged}
        if len(train.rows) == len(rows):
            break
        whole[rows] = False
        whole[rows[train.rows]] = True
    wanted = {n: [torch.searchsorted(rows, sound[each]) for each in drawn] for n, drawn in wanted.items()}
    test, lost = _features(q, "test")
    if seeds == 1:
        q.note(ONE_SEED)
    notes = [lost, ONE_SEED if seeds == 1 else ""]
    found = few_shot(train[:2], test[:2], wanted, len(images.class_names))
    for shots, values in found.items():
        score, every = over_seeds(values, len(test.labels)), damaged | {*test.damaged}
        yield q.record(q.data, "top1", score, len(test.labels), every, notes, shots=shots, seeds=seeds)


def knn(q: Question) -> Iterator[Record]:
    """Weighted k-nearest-neighbor classification of the features of the test images."""
    neighbors = q.neighbors or 20
    (train, _), (test, _) = found = _features(q, "train"), _features(q, "test")
    right = int((nearest(train[:2], test.values, neighbors) == test.labels).sum())
    yield _of_features(q, right, found, neighbors=neighbors)


def probe(q: Question) -> Iterator[Record]:
    """Logistic regression on the features of the training images."""
    (train, _), (test, _) = found = _features(q, "train"), _features(q, "test")
    right = round(linear_probe(train[:2], test[:2]) * len(test.labels) / 100)
    yield _of_features(q, right, found)


def _features(q: Question, split: str) -> tuple[Reading, str]:
    """What the head reads of a split, and the sentence about its lost classes."""
    images = q.images(split)
    found = q.read(images, before_the_head(q.network), split)
    return found, q.whole(images, found)


def _of_features(q: Question, right: int, found: tuple[tuple[Reading, str], ...], **more) -> Record:
    readings, notes = zip(*found, strict=True)
    images = len(readings[-1].labels)
    damaged = {reason for each in readings for reason in each.damaged}
    return q.record(q.data, "top1", proportion(right, images), images, damaged, notes, **more)


def finetune(q: Question) -> Iterator[Record]:
    """Top-1 after fine-tuning by the data's recipe, of the averaged weights where it keeps them."""
    yield _tuned(q, q.data, "top1", fine_tuned(q, q.data))


def vtab(q: Question) -> Iterator[Record]:
    """Fine-tuning on the tasks of VTAB-1k, and the means of those groups that are complete."""
    found = {}
    for task in vtab_tasks(q.tasks):
        found[task.name] = fine_tuned(q, task.name)
        yield _tuned(q, task.name, "top1", found[task.name])
    for name, mean in group_means(found).items():
        yield _tuned(q, name, "mean", mean)


def _tuned(q: Question, data: str, metric: str, found: Tuned) -> Record:
    about = {"notes": [found.lost], "seeds": q.seeds, "recipe": q.manner}
    return q.record(data, metric, found.score, found.images, found.damaged, **about)
