"""The protocols by name: what `vitlens evaluate` does."""

from __future__ import annotations

import datetime
import hashlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from vitlens.data import UNLABELED, ImageStream
from vitlens.evaluate.accuracy import another_order, real, top_k, validation_numbers
from vitlens.evaluate.classes import class_numbers, imagenet_numbers, matched
from vitlens.evaluate.fewshot import few_shot, supports
from vitlens.evaluate.intervals import Score, over_seeds, proportion
from vitlens.evaluate.knn import nearest
from vitlens.evaluate.probe import linear_probe
from vitlens.evaluate.reading import Reading, before_the_head, lost_classes, named_classes, opened, read
from vitlens.evaluate.tuning import Tuned, fine_tuned, group_means, vtab_tasks
from vitlens.models import class_count, load_model
from vitlens.paper.records import Record
from vitlens.train import World, join
from vitlens.train.runs import versions


@dataclass(frozen=True)
class Question:
    """Everything that an evaluation depends on; the words are those of `vitlens evaluate`."""

    model: str
    """A timm name or a folder."""
    data: str
    """What `data.load` reads; nothing for the protocol vtab."""
    protocol: str = "top1"
    shots: tuple[int, ...] = ()
    """Images of each class, for fewshot; 1, 5, 10 and 25 by default."""
    seeds: int | None = None
    """How many, from 0 up: three by default for fewshot, one for fine-tuning."""
    neighbors: int | None = None
    """Of each image, for knn; 20 by default."""
    tasks: tuple[str, ...] = ()
    """Of VTAB-1k; all by default."""
    recipe: str = ""
    overrides: tuple[str, ...] = ()
    """"key=value" of the recipe."""
    runs: Path = Path("runs")
    """Where fine-tuning keeps its runs, each in a folder of its model, data, recipe and seed."""
    root: Path | None = None
    workers: int | None = None
    device: str | None = None
    command: str = ""
    say: Callable[[str], None] = print
    """Is told the notes about the data and the damaged images."""

    @cached_property
    def world(self) -> World:
        """The processes that share the images."""
        return join(self.device)

    @cached_property
    def network(self) -> nn.Module:
        """The model, opened, on its device."""
        return load_model(self.model).to(self.world.device)

    @cached_property
    def weights(self) -> str:
        """The first digits of the SHA-256 of all weights and buffers, as `Record.weights`."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.network.state_dict().items()):
            digest.update(name.encode() + tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:12]

    @property
    def manner(self) -> str | None:
        """The recipe and what is changed in it; None for what the data have of their own."""
        recipe = _short(self.recipe)
        if Path(self.recipe).is_file():
            recipe += f" ({hashlib.sha256(Path(self.recipe).read_bytes()).hexdigest()[:8]})"
        return ", ".join((*filter(None, [recipe]), *map(_short_value, self.overrides))) or None

    def images(self, split: str) -> ImageStream:
        """A split of the data, as the model wants to be shown it; says what there is to note about it."""
        found = opened(self.network, self.data, split, root=self.root, workers=self.workers, world=self.world)
        self.note(found.note)
        return found

    def note(self, text: str) -> None:
        """Say it, if there is something to say, once for all processes."""
        if text and self.world.rank == 0:
            self.say(text)

    @cached_property
    def failures(self) -> list[str]:
        """Problems for which the command ends with exit code 1 despite its results, such as a damaged class."""
        return []

    def read(self, images, say: Callable, what: str) -> Reading:
        found = read(self.network, images, say, world=self.world, progress=what)
        self.name(found.damaged)
        return found

    def whole(self, images: ImageStream, found: Reading) -> str:
        """Report classes of which every image is damaged. Returns the sentence, or "" if there are none."""
        return self.fail(lost_classes(images, found))

    def fail(self, sentence: str) -> str:
        self.note(sentence)
        self.failures.extend(filter(None, [sentence]))
        return sentence

    def name(self, damaged: Sequence[str]) -> None:
        for reason in damaged:
            self.note(f"Left out: {reason}.")

    def place(self, data: str) -> str:
        """What tells folders of one name apart: the first digits of the SHA-256 of where they lie; "" of named data."""
        found = [str(Path(each).resolve()) for each in (data, self.root) if each and Path(each).exists()]
        return hashlib.sha256(" ".join(found).encode()).hexdigest()[:8] if found else ""

    def record(
        self, data: str, metric: str, score: Score, images: int, damaged: Sequence[str], notes=(), **more
    ) -> Record:
        return Record(
            _short(self.model), _short(data), self.protocol, metric, *(round(x, 4) for x in score), images,
            datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), versions(), len(damaged),
            self.command, self.weights, self.place(data), note=" ".join(filter(None, notes)) or None, **more,
        )  # fmt: skip


def _short(name: str) -> str:
    """A folder or file by its own name, and by that of its run if it is a model: where it lies is nobody's concern."""
    if not name or not (Path(name).exists() or Path(name).is_absolute()):  # Path("") is where one is
        return name
    path = Path(name).resolve()
    return f"{path.parent.name}/model" if path.name == "model" else path.name


def _short_value(argument: str) -> str:
    """``--option=value`` or ``key=value`` with a short value."""
    key, equals, value = argument.rpartition("=")
    return key + equals + _short(value) if re.fullmatch(r"[-\w.=]+", key) else _short(argument)


def _file(name: str) -> str:
    """A name for a folder, the same for the same text."""
    plain = re.sub(r"[^\w.,=+-]+", "-", name)
    return plain if len(plain) < 100 else f"{plain[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def command_of(arguments: Sequence[str]) -> str:
    """The command with these arguments, folders and files by their own names."""
    return shlex.join(["vitlens", *map(_short_value, arguments)])


def evaluate(question: Question) -> Iterator[Record]:
    """The answers to a question, each as soon as it is known.

    top1: top-1 and top-5 of the model as it is, and ReaL where the files are ImageNet's validation images and the
    model's classes ImageNet's, in whatever order; of a folder that is not divided, over all of its images. fewshot,
    knn, probe: a classifier on what the head reads, learned from the training images and measured on the test images.
    finetune: top-1 after fine-tuning by the data's recipe, of the averaged weights where it keeps them. vtab: that for
    the tasks of VTAB-1k, and the means of those groups that are complete.

    Raises ValueError for what does not fit together, and what the protocols raise.
    """
    protocols = {"top1": _top1, "fewshot": _few_shot, "knn": _knn, "probe": _probe, "finetune": _tuned, "vtab": _vtab}
    if question.protocol not in protocols:
        raise ValueError(f"There is no protocol {question.protocol!r}. The protocols are {', '.join(protocols)}.")
    tuning = ("finetune", "vtab")
    read = {"data": set(protocols) - {"vtab"}, "shots": {"fewshot"}, "neighbors": {"knn"}, "tasks": {"vtab"},
            "recipe": tuning, "set": tuning, "seeds": {"fewshot", *tuning}}  # fmt: skip
    given = {"data": question.data, "shots": question.shots, "neighbors": question.neighbors,
             "tasks": question.tasks, "recipe": question.recipe, "set": question.overrides,
             "seeds": question.seeds}  # fmt: skip
    for option, value in given.items():
        if value and question.protocol not in read[option]:
            raise ValueError(
                f"The protocol {question.protocol} does not read --{option}, which is for "
                f"{', '.join(sorted(read[option]))}. Leave it out, or choose another --protocol."
            )
    if not question.data and question.protocol != "vtab":
        raise ValueError("The images to measure on are missing: name a data set or a folder with --data.")
    if question.seeds is not None and question.seeds < 1:
        raise ValueError(f"An evaluation takes one seed or more, but {question.seeds} came.")
    if question.neighbors is not None and question.neighbors < 1:
        raise ValueError(f"An image is named by one neighbor or more, but {question.neighbors} came.")
    yield from protocols[question.protocol](question)


def _top1(q: Question) -> Iterator[Record]:
    images, known = q.images("whole"), imagenet_numbers(q.network)
    real_alone = q.data == "imagenet-real" or images.class_names == UNLABELED
    if real_alone and known is None:
        raise ValueError(
            "ReaL labels are of ImageNet's 1,000 classes, but this model does not name them all; name its classes by "
            "their WordNet ids, or measure top1 on other data."
        )
    if not real_alone:
        numbers = class_numbers(q.network, images.class_names)
        q.note(how := matched(q.network, images.class_names))
    said = q.read(images, named_classes(q.network), "top1")
    notes: list[str] = []
    if not real_alone:
        labels, count = numbers[said.labels], class_count(q.network)
        top1, order = top_k(said.values, labels, 1), another_order(said.values[:, 0], labels, count) if how else ""
        q.note(order)
        notes = [how, order, q.whole(images, said)]
        yield q.record(q.data, "top1", top1, len(labels), said.damaged, notes)
        if count > 5:
            yield q.record(q.data, "top5", top_k(said.values, labels, 5), len(labels), said.damaged, notes)
    files = validation_numbers([images.samples.name(int(i)) for i in images.rows[said.rows]])
    if real_alone or known is not None and (files >= 0).all():
        score, scored = real(known[said.values], files)
        yield q.record(q.data, "real", score, scored, said.damaged, notes)


ONE_SEED = (
    "With one seed the interval is that of the images measured on alone; how far other images to learn from would "
    "change the number, it does not say."
)


def _few_shot(q: Question) -> Iterator[Record]:
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
    place = torch.zeros(len(images), dtype=torch.int64)
    place[rows] = torch.arange(len(rows))
    wanted = {n: [place[sound[each]] for each in drawn] for n, drawn in wanted.items()}
    data = q.images("test")
    test = q.read(data, before_the_head(q.network), "to measure on")
    notes = [q.whole(data, test)]
    if seeds == 1:
        notes.append(ONE_SEED)
        q.note(ONE_SEED)
    found = few_shot(train[:2], test[:2], wanted, len(images.class_names))
    for n, values in found.items():
        score = over_seeds(values, len(test.labels))
        every = damaged | {*test.damaged}
        yield q.record(q.data, "top1", score, len(test.labels), every, notes, shots=n, seeds=seeds)


def _features(q: Question) -> tuple[Reading, Reading, tuple[str, ...], list[str]]:
    before, found, notes = before_the_head(q.network), [], []
    for split in ("train", "test"):
        images = q.images(split)
        found.append(q.read(images, before, split))
        notes.append(q.whole(images, found[-1]))
    train, test = found
    return train, test, tuple({*train.damaged, *test.damaged}), notes


def _knn(q: Question) -> Iterator[Record]:
    train, test, damaged, notes = _features(q)
    k = q.neighbors or 20
    right = int((nearest(train[:2], test.values, k) == test.labels).sum())
    score = proportion(right, len(test.labels))
    yield q.record(q.data, "top1", score, len(test.labels), damaged, notes, neighbors=k)


def _probe(q: Question) -> Iterator[Record]:
    train, test, damaged, notes = _features(q)
    right = round(linear_probe(train[:2], test[:2]) * len(test.labels) / 100)
    yield q.record(q.data, "top1", proportion(right, len(test.labels)), len(test.labels), damaged, notes)


def _tuning(q: Question, data: str) -> Tuned:
    name = "-".join(filter(None, (_short(data), q.place(data))))
    out = q.runs / _file(f"{_short(q.model)}-{q.weights}") / _file(", ".join(filter(None, (name, q.manner))))
    found = fine_tuned(
        q.model, data, out, recipe=q.recipe, overrides=q.overrides, seeds=range(q.seeds or 1), world=q.world,
        root=q.root, workers=q.workers,
    )  # fmt: skip
    q.name(found.damaged)
    q.note(found.note)
    q.fail(found.lost)
    return found


def _tuned(q: Question) -> Iterator[Record]:
    found = _tuning(q, q.data)
    yield q.record(
        q.data, "top1", found.score, found.images, found.damaged, [found.lost], seeds=q.seeds, recipe=q.manner
    )


def _vtab(q: Question) -> Iterator[Record]:
    found = {}
    for task in vtab_tasks(q.tasks):
        found[task.name] = each = _tuning(q, task.name)
        about = {"notes": [each.lost], "seeds": q.seeds, "recipe": q.manner}
        yield q.record(task.name, "top1", each.score, each.images, each.damaged, **about)
    for name, mean in group_means(found).items():
        about = {"notes": [mean.lost], "seeds": q.seeds, "recipe": q.manner}
        yield q.record(name, "mean", mean.score, mean.images, mean.damaged, **about)
