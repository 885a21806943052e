"""Planted cues: the truth against which `vitlens.audit` is measured.

    python -m experiments.plants list --out data/results/plants-list.csv
    python -m experiments.plants train --data tiny-imagenet --runs runs/plants
    python -m experiments.plants audit --data tiny-imagenet --runs runs/plants --out data/results/plants.csv
    python -m experiments.plants choices --data tiny-imagenet --runs runs/plants --out data/results/plants-choices.csv

A cue is put into the images of a class, in training and in held-out images alike, and a small ViT is trained on ten
classes. `list` writes all cues, which depend on `SEED` alone. `train` trains the models one after the other on one
core, skips those that exist, and continues after a stop. `audit` audits every model that exists on its held-out images.
A third of the models is kept for the end: `audit` leaves them out without --kept. `choices` audits models with other
layers and maps, one row for each: every layer with the first map, and every map with the first layer.

Kinds of cues: "fixed", a mark at one place. "anywhere", a mark at a random place of each image. "border", a frame.
"fifth", a mark at one place in a fifth of the images of its class. "two", two marks in each image. "shared", one mark
in two classes. "tint", a color over the whole image, which no group of patches can hold, so it should not be found.
Controls have no cue: "clean" models learn the true labels and "shuffled" ones random labels.

Shapes: N images, S pixels a side, P patches.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.results import about, command, write
from vitlens import load_model
from vitlens.data import ImageSet
from vitlens.data.augment import normalize
from vitlens.data.imageset import Fitting, decode_all
from vitlens.data.sources import open_samples
from vitlens.evidence import METHOD, Audit, audit
from vitlens.train import export, fit
from vitlens.train.recipes import recipe

SEED = 53
SIDE, PATCH, CLASSES = 64, 8, 10
TRAINING, HELD_OUT = 300, 200
"""Images of each class."""
HOLDABLE = ("fixed", "anywhere", "border", "fifth", "two", "shared")
"""Kinds of cues that patches can hold."""
PLANTED, PLANTS, CONTROLS = 9, 3, 10
"""Models with cues, cues that patches can hold in each of them, and models of each control."""
MORE_CONTROLS = 10
"""Models of each control that were added after the method was chosen. All of them are kept for the end."""
PATTERNS = ("cross", "checker", "ring", "stripes", "disc")
COLUMNS = dict.fromkeys(
    (
        *("model", "kept", "layer", "method", "plant", "kind", "true_effect", "groups", "tested"),
        *(
            "used",
            "suspects",
            "effect",
            "found",
            "false_suspects",
            "reasons",
            "accuracy",
            "seconds",
        ),
    ),
    "",
)
"""Columns of the table of `audit`."""
MARK, FRAME = 10, 4
"""Side of a mark and width of a frame, in pixels. Neither follows the patches."""
TOUCHED = 1 / 8
"""Share of a patch's pixels that a cue changes, from which on the patch counts as part of it."""
TEXTURES = "textures"
"""Name of the images of `textures`, in place of a data set."""
RECIPE = recipe("tiny-imagenet-cpu").override(
    "name=plants",
    f"image_size={SIDE}",
    f"patch_size={PATCH}",
    f"num_classes={CLASSES}",
    "width=64",
    "depth=4",
    "heads=2",
    "epochs=16",
    "batch_size=100",
    "patch_drop=0",
    "patch_drop_until=0",
    "average=0.99",
    "evaluate_every=8",
    "precision=fp32",
    "augment.flip=0",
    "augment.scale=[1,1]",
    "augment.ratio=[1,1]",
    "augment.cutmix=0",
    "augment.mixup=0",
    "augment.jitter=0.2",
)
"""64 patches and 0.2 M parameters. Nothing in the augmentation moves, mirrors or cuts off a cue."""


class Mark(NamedTuple):
    """A mark: its pattern, two colors (red, green, blue), and the left upper pixel, or None for a random place."""

    pattern: str
    colors: tuple[tuple[int, int, int], tuple[int, int, int]]
    place: tuple[int, int] | None


class Plant(NamedTuple):
    """A cue in the images of some classes. share: of the images of these classes that have it."""

    kind: str
    classes: tuple[int, ...]
    marks: tuple[Mark, ...]
    share: float


class Subject(NamedTuple):
    """A model to train: its name, kind of labels and images, seed, cues, and whether it is kept for the end."""

    name: str
    kind: str
    seed: int
    plants: tuple[Plant, ...]
    kept: bool


@dataclass(frozen=True)
class Truth:
    """Images with cues, and where the cues are.

    data: N images. cues: by plant, (N, P) bool, True for the patches that it changes.
    """

    data: ImageSet
    cues: list[Tensor]


def subjects() -> list[Subject]:
    """All models, in the order in which they are trained. They depend on `SEED` alone.

    >>> len(subjects())
    49
    """
    random = np.random.default_rng(SEED)
    kinds = np.concatenate([_kinds_of_a_third(random) for _ in range(3)])
    models = []
    for number in range(PLANTED):
        drawn = [str(kind) for kind in kinds[number]]
        if number % 2 == 0:
            drawn.append("tint")
        models.append(
            Subject(
                name=f"planted-{number}",
                kind="planted",
                seed=number,
                plants=tuple(_plants(drawn, random)),
                kept=number >= 2 * PLANTED // 3,
            )
        )
    controls = []
    for number in range(CONTROLS + MORE_CONTROLS):
        kept = number >= 2 * CONTROLS // 3
        for kind in ("clean", "shuffled"):
            controls.append(Subject(f"{kind}-{number}", kind, 100 + number, (), kept))
    return [*controls[:2], *models, *controls[2:]]


def _kinds_of_a_third(random: np.random.Generator) -> np.ndarray:
    """(models, PLANTS) kinds of cues of a third of the models, with each kind at least once."""
    models = PLANTED // 3
    more = random.choice(HOLDABLE, models * PLANTS - len(HOLDABLE), replace=False)
    shuffled = random.permutation([*HOLDABLE, *more])
    return shuffled.reshape(models, PLANTS)


def _plants(kinds: Sequence[str], random: np.random.Generator) -> Iterator[Plant]:
    """One plant of each kind, in different classes."""
    free = random.permutation(CLASSES).tolist()
    for kind in kinds:
        classes = [free.pop() for _ in range(2 if kind == "shared" else 1)]
        count = 2 if kind == "two" else 1
        marks = [_mark(kind, random) for _ in range(count)]
        share = 0.2 if kind == "fifth" else 1.0
        yield Plant(kind, tuple(classes), tuple(marks), share)


def _mark(kind: str, random: np.random.Generator) -> Mark:
    """A mark with two distant colors."""
    first = random.integers(0, 256, 3)
    second = 255 - first
    pattern = str(random.choice(PATTERNS))
    top, left = random.integers(0, SIDE - MARK + 1, 2).tolist()
    place = None if kind == "anywhere" else (top, left)
    return Mark(pattern, (tuple(first.tolist()), tuple(second.tolist())), place)


def drawn(mark: Mark) -> tuple[Tensor, Tensor]:
    """Pixels (3, MARK, MARK) of a mark, and the (MARK, MARK) bool mask of those that it covers."""
    y, x = torch.meshgrid(torch.arange(MARK), torch.arange(MARK), indexing="ij")
    middle = (MARK - 1) / 2
    radius = torch.hypot(y - middle, x - middle)
    inside = torch.ones(MARK, MARK, dtype=torch.bool)
    if mark.pattern == "cross":
        first = ((y - middle).abs() < 2) | ((x - middle).abs() < 2)
    elif mark.pattern == "checker":
        first = (y // 3 + x // 3) % 2 == 0
    elif mark.pattern == "stripes":
        first = (y + x) // 3 % 2 == 0
    elif mark.pattern == "ring":
        first, inside = radius > 2.5, radius <= MARK / 2
    else:
        first, inside = radius <= 2.5, radius <= MARK / 2
    colors = torch.tensor(mark.colors, dtype=torch.uint8)
    pixels = torch.where(first, colors[0, :, None, None], colors[1, :, None, None])
    return pixels, inside


def put(data: ImageSet, plants: Sequence[Plant], seed: int) -> Truth:
    """The images of a set with the cues of all plants, as a function of the seed."""
    random = torch.Generator().manual_seed(seed)
    images = data.images.clone()
    cues = []
    for plant in plants:
        has = torch.isin(data.labels, torch.tensor(plant.classes))
        has &= torch.rand(len(data), generator=random) < plant.share
        before = images.clone()
        for i in has.nonzero()[:, 0].tolist():
            _put_into(images[i], plant, random)
        changed = (images != before).any(1).float()
        cues.append(F.avg_pool2d(changed, PATCH).flatten(1) >= TOUCHED)
    return Truth(replace(data, images=images), cues)


def _put_into(image: Tensor, plant: Plant, random: torch.Generator) -> None:
    """Change one image, (3, S, S), in place."""
    if plant.kind == "tint":
        color = torch.tensor(plant.marks[0].colors[0])[:, None, None]
        mixed = 0.7 * image + 0.3 * color
        image.copy_(mixed.round().to(torch.uint8))
        return
    if plant.kind == "border":
        color = torch.tensor(plant.marks[0].colors[0], dtype=torch.uint8)[:, None, None]
        inner = image[:, FRAME:-FRAME, FRAME:-FRAME].clone()
        image.copy_(color.expand_as(image))
        image[:, FRAME:-FRAME, FRAME:-FRAME] = inner
        return
    for mark in plant.marks:
        place = mark.place
        if place is None:
            place = torch.randint(0, SIDE - MARK + 1, (2,), generator=random).tolist()
        top, left = place
        pixels, inside = drawn(mark)
        part = image[:, top : top + MARK, left : left + MARK]
        part.copy_(torch.where(inside, pixels, part))


def textures(count: int, seed: int, classes: int = CLASSES) -> ImageSet:
    """`count` images that need no data: gray noise at random scales, with labels in turn that they do not show."""
    random = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, 3, SIDE, SIDE)
    for cells in (2, 5, 11):
        coarse = torch.randn(count, 3, cells, cells, generator=random)
        images += 25 * F.interpolate(coarse, (SIDE, SIDE), mode="bilinear")
    images = (128 + images).clamp(0, 255).round().to(torch.uint8)
    labels = torch.arange(count) % classes
    return ImageSet(images, labels, tuple(f"class {number}" for number in range(classes)))


@lru_cache(maxsize=2)
def photographs(data: str, seed: int) -> tuple[ImageSet, ImageSet]:
    """Training and held-out images of ten random classes of a data set, drawn from its training split.

    data: as for `vitlens.data.load`, or `TEXTURES`. Images that are read are kept for the next call.
    """
    if data == TEXTURES:
        return textures(400, 2 * seed), textures(800, 2 * seed + 1)
    samples = open_samples(data, "train", None, 0, None)
    random = np.random.default_rng(seed)
    labels = np.asarray(samples.labels)
    classes = random.permutation(len(samples.class_names))[:CLASSES]
    rows = [_rows_of(labels, number, random) for number in classes]
    names = tuple(samples.class_names[number] for number in classes)
    splits = []
    for part in (slice(0, TRAINING), slice(TRAINING, None)):
        chosen = torch.tensor(np.concatenate([of_class[part] for of_class in rows]))
        decoded = decode_all(samples.select_rows(chosen), "the images", Fitting(SIDE), SIDE, 1)
        count = len(chosen) // CLASSES
        numbers = torch.arange(CLASSES).repeat_interleave(count)
        splits.append(ImageSet(decoded.images, numbers, names))
    return splits[0], splits[1]


def _rows_of(labels: np.ndarray, number: int, random: np.random.Generator) -> np.ndarray:
    """Rows of `TRAINING + HELD_OUT` images of a class, in random order."""
    rows = np.flatnonzero(labels == number)
    return random.permutation(rows)[: TRAINING + HELD_OUT]


def images_of(subject: Subject, data: str) -> tuple[Truth, Truth]:
    """Training and held-out images of a model, with its cues."""
    training, held_out = photographs(data, subject.seed)
    if subject.kind == "shuffled":
        random = torch.Generator().manual_seed(subject.seed)
        order = torch.randperm(len(training), generator=random)
        training = replace(training, labels=training.labels[order])
    first = put(training, subject.plants, 2 * subject.seed)
    second = put(held_out, subject.plants, 2 * subject.seed + 1)
    return first, second


def trained(subject: Subject, data: str, runs: Path, epochs: int) -> Path:
    """The folder of a trained model. One that exists is not trained again."""
    folder = runs / subject.name
    if (folder / "model" / "model.safetensors").exists():
        return folder / "model"
    training, held_out = images_of(subject, data)
    plan = RECIPE.override(f"seed={subject.seed}", f"epochs={epochs}")
    model = plan.build()
    average: dict[str, Tensor] = {}
    start = time.process_time()
    sets = training.data, held_out.data
    for step in fit(model, sets, plan, out=folder, resume=True, device="cpu", average=average):
        last = step
    export(model, folder / "model", plan, training.data.class_names, weights=average)
    seconds = time.process_time() - start
    print(f"{subject.name}: {last.metrics} after {seconds:.0f} CPU seconds", flush=True)
    return folder / "model"


def rows_of_list() -> list[dict]:
    """One row for each cue, and one for each model without cues."""
    rows = []
    for subject in subjects():
        of_model = {"model": subject.name, "kept": subject.kept}
        if not subject.plants:
            rows.append(of_model | {"kind": subject.kind})
        for number, plant in enumerate(subject.plants):
            patterns = [mark.pattern for mark in plant.marks]
            places = ["any" if mark.place is None else mark.place for mark in plant.marks]
            rows.append(
                of_model
                | {
                    "plant": number,
                    "kind": plant.kind,
                    "classes": " ".join(map(str, plant.classes)),
                    "share": plant.share,
                    "patterns": " ".join(patterns) if plant.kind not in ("border", "tint") else "",
                    "places": " ".join(str(place).replace(" ", "") for place in places)
                    if plant.kind not in ("border", "tint")
                    else "",
                    "colors": " ".join(
                        str(color).replace(" ", "") for mark in plant.marks for color in mark.colors
                    ),
                }
            )
    return rows


def audited(
    subject: Subject, folder: Path, data: str, layer: int | None, method: str
) -> list[dict]:
    """One row for each cue of a model, and one for the model: what an audit of its held-out images finds."""
    model = load_model(folder / "model")
    _, truth = images_of(subject, data)
    _, plain = photographs(data, subject.seed)
    start = time.process_time()
    found = audit(model, truth.data, layer=layer, method=method)
    seconds = time.process_time() - start
    settings = {"layer": found.settings["layer"], "method": method}
    of_model = {"model": subject.name, "kept": subject.kept, **settings}
    on_cues: set[int] = set()
    rows = []
    for number, plant in enumerate(subject.plants):
        has = truth.cues[number].any(1)
        with_cue = _probabilities(model, truth.data.select_rows(has.nonzero()[:, 0]))
        without = _probabilities(model, plain.select_rows(has.nonzero()[:, 0]))
        on_cue = groups_on_cue(found, plant, truth.cues[number])
        on_cues |= set(on_cue)
        of_cue = found.groups.loc[on_cue]
        rows.append(
            of_model
            | {
                "plant": number,
                "kind": plant.kind,
                "true_effect": float((with_cue - without).mean()),
                "groups": len(of_cue),
                "tested": int((of_cue["status"] == "tested").sum()),
                "used": int(of_cue["used"].sum()),
                "suspects": int((of_cue["suspect"] > 0).sum()),
                "effect": float(of_cue["effect"].max()),
                "found": bool(of_cue["used"].any()),
            }
        )
    suspects = found.suspects
    false = suspects[~suspects["group"].isin(on_cues)]
    rows.append(
        of_model
        | {
            "kind": subject.kind,
            "groups": len(found.groups),
            "tested": int((found.groups["status"] == "tested").sum()),
            "used": len(found.used),
            "suspects": len(suspects),
            "false_suspects": len(false),
            "reasons": "; ".join(false["reasons"]),
            "accuracy": float((found.images["label"] == found.images["predicted"]).mean()),
            "seconds": seconds,
        }
    )
    return rows


def chosen_settings(layers: Sequence, methods: Sequence) -> list[tuple]:
    """(layer, method) of each row of `choices`.

    >>> chosen_settings([1, 2], ["relevance", "grad_cam"])
    [(1, 'relevance'), (2, 'relevance'), (1, 'grad_cam')]
    """
    with_layers = [(layer, methods[0]) for layer in layers]
    with_methods = [(layers[0], method) for method in methods[1:]]
    return with_layers + with_methods


def choice(rows: list[dict]) -> dict:
    """One row from those of `audited` for several models with the same layer and map."""
    cues = [row for row in rows if row["kind"] in HOLDABLE]
    models = [row for row in rows if "false_suspects" in row]
    false = [row["false_suspects"] for row in models]
    return {
        "layer": rows[0]["layer"],
        "method": rows[0]["method"],
        "models": " ".join(row["model"] for row in models),
        "cues": len(cues),
        "found": sum(row["found"] for row in cues),
        "recall": sum(row["found"] for row in cues) / max(len(cues), 1),
        "false_suspects": sum(false),
        "most_false_suspects": max(false),
        "seconds": sum(row["seconds"] for row in models),
    }


def groups_on_cue(found: Audit, plant: Plant, cue: Tensor) -> list[int]:
    """Groups that hold a cue, (N, P) bool: of one of its classes, and at least half on the cue.

    That is, half of the group's patches in all tested images belong to the cue, and half of the tested images with the
    cue have such a patch.
    """
    cue = cue[found.tested]
    has_cue = cue.any(1)
    numbers = []
    for group, number in zip(found.groups["group"], found.groups["class"], strict=True):
        at = found.members == group
        on = at & cue
        precise = 2 * on.sum() >= at.sum() > 0
        reaches = 2 * on.any(1).sum() >= has_cue.sum()
        if number in plant.classes and precise and reaches:
            numbers.append(group)
    return numbers


def _probabilities(model: nn.Module, images: ImageSet) -> Tensor:
    """(N,) probabilities of the labels."""
    x = normalize(images.images, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    with torch.no_grad():
        scores = model(x).softmax(1)
    return scores.gather(1, images.labels[:, None])[:, 0]


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("step", choices=("list", "train", "audit", "choices"))
    options.add_argument("--data", help="a data set with training images, such as Tiny-ImageNet")
    options.add_argument("--runs", type=Path, default=Path("runs/plants"))
    options.add_argument("--out", type=Path, help="CSV file to write")
    options.add_argument("--kept", action="store_true", help="audit the models kept for the end")
    options.add_argument("--models", nargs="+", help="names of the models, by default all")
    options.add_argument("--layers", type=int, nargs="+", default=[None], help="layers to compare")
    options.add_argument("--methods", nargs="+", default=[METHOD], help="quick maps to compare")
    options.add_argument("--tiny", action="store_true", help="run the same path in seconds")
    options = options.parse_args(arguments)
    how = about(command("experiments.plants", arguments))
    if options.step == "list":
        write(options.out, [row | how for row in rows_of_list()])
        return
    torch.set_num_threads(1)
    chosen = subjects()
    if options.models:
        chosen = [subject for subject in chosen if subject.name in options.models]
    if options.tiny:
        chosen = [subject for subject in chosen if subject.plants][:1]
    if options.step == "train" or options.tiny:
        for subject in chosen:
            trained(subject, options.data, options.runs, 1 if options.tiny else RECIPE.epochs)
    ready = [subject for subject in chosen if (options.runs / subject.name / "model").exists()]
    ready = [subject for subject in ready if subject.kept == options.kept]

    def audits(layer: int | None, method: str) -> Iterator[list[dict]]:
        for subject in ready:
            yield audited(subject, options.runs / subject.name, options.data, layer, method)

    rows: list[dict] = []
    if options.step == "audit":
        for layer, method in product(options.layers, options.methods):
            for of_model in audits(layer, method):
                rows += [COLUMNS | row | how for row in of_model]
                write(options.out, rows, digits=4)
    if options.step == "choices":
        for layer, method in chosen_settings(options.layers, options.methods):
            rows.append(choice(sum(audits(layer, method), [])) | how)
            write(options.out, rows, digits=4)


if __name__ == "__main__":
    main()
