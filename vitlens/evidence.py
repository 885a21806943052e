"""Audit of a classifier: groups of evidence over a set of images, and a test of each group by covering it.

    audit = vitlens.audit(model, images, labels)
    audit.groups                 # a DataFrame with one row for each group
    audit.suspects               # the used groups that deserve a look, ranked

1. Explore. One half of the images passes the model forward and backward. A quick map selects the patches that raise the
   predicted class, and the tokens of a middle layer describe them. HDBSCAN finds clusters of the patches of each class.
   Those that two halves of the images agree on are the groups. Pieces of one mark are joined.
2. Test. On the other half, a patch belongs to a group by its token alone, never by a map. A group at changing places of
   the border gets the whole border of the images that have it. The patches of a group are covered in every image that
   has the group, whatever its label, in three ways. The effect is the probability of the labeled class with as many
   random patches of the same image covered, minus that with the group covered.

A group is used if the effect is above 0 in at least two ways, and at least 0.02 in their mean. Random patches come from
the same distance to the border, so a group in the middle is not compared with margins. If labels have nothing to do
with the images, the expected effect of every group is 0, whatever the model has learned: membership ignores the labels,
and probabilities sum to 1.

Covered patches make images that the model was not trained on, patches depend on each other, and a group is not a
concept. Colors over the whole image are in no group.

3. Compare. A second model gets the same images, whole and covered, if `beside` is given. The effects of each group and
   the attention of each head are compared image by image, first model less second.

Shapes: N images, n of them tested, G groups, W ways to cover, P = rows·cols patches, D width of the tokens, L layers,
H heads, M measures of a head.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from vitlens import attention, models
from vitlens.attribution import METHODS
from vitlens.classes import class_numbers
from vitlens.data import ImageSet, ImageStream, Samples
from vitlens.data.augment import normalize
from vitlens.data.imageset import label_numbers
from vitlens.faithfulness import blur
from vitlens.finished import Finished
from vitlens.images import ImageError, named_sources
from vitlens.models.classes import require_classes
from vitlens.names import require_known, unknown_name
from vitlens.recorder.forward import cast, eval_mode, require_images, run
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.layer import layer_number
from vitlens.recorder.record import capture
from vitlens.recorder.shapes import repr_with_shapes
from vitlens.recorder.supported import (
    attention_modules,
    family,
    head_count,
    token_grid,
    transformer,
    unwrap,
)
from vitlens.tokens import features
from vitlens.unseen import as_samples, unseen_rows

__all__ = [
    "HEAD_MEASURES",
    "WAYS",
    "Audit",
    "Changes",
    "audit",
    "bootstrap_interval",
    "holm",
    "paired_t",
    "sign_flip",
    "two_sided",
]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

if TYPE_CHECKING:
    from pandas import DataFrame

WAYS = {
    "border": "by the mean color of the image's border",
    "blur": "by the blurred image",
    "other": "by the same patches of another image",
}
"""Ways to cover patches, by name, as words of a figure."""

METHOD = "balanced_gradients"
"""The quick map with the best score in docs/explaining.md."""
STRONGEST = 8
"""Patches of an image that may be evidence."""
OTHERS = 4
"""Patches of an image with little evidence, as examples of everything else."""
ROW_BYTES = 200_000_000
"""Most bytes of all stored tokens."""
SIZES = (8, 12, 16, 24, 32)
"""Least numbers of patches in a cluster that are tried."""
CENTERS = 8
"""Most centers that describe a cluster."""
STABLE = 0.5
"""Jaccard similarity from which on a cluster is called stable (Hennig 2007)."""
TOGETHER = 0.6
"""Cohen's kappa from which on two clusters occur in the same images ("substantial", Landis and Koch 1977: 0.61)."""
BACKGROUND = 32
"""Clusters of the patches with little evidence."""
RADIUS, MARGIN = 0.95, 1.25
"""Share of the evidence of a ball within its radius, and the factor by which new patches may exceed it."""
ROUNDING = 1e-3
"""Distance by which tokens in half precision may exceed a radius."""
GROUPS_PER_IMAGE = 3
"""Groups that are tested in one image. With 3 ways and a control this makes 18 forwards."""
LEAST_OF_CLASS = 40
LEAST_TESTED = 15
"""Images that a class, and a group in the testing half, must have for a test."""
LEVEL = 0.05
LEAST_EFFECT = 0.02
"""Least effect of a used group: the sure answer in 1 of 50 images. With many images much smaller ones differ from 0."""
FIXED, AT_BORDER, FEW, STRONG = 0.8, 0.9, 1 / 3, 0.2
"""Limits of `at_place`, `at_border` and `class_share`, and the effect that a group in few images must have."""
DONORS = 32
"""Images whose patches cover those of others."""
FORMAT = 1
"""Version of the results in a folder of `partial`. Those of another version are not read."""
FLIPS = 20_000
RESAMPLES = 2_000
HEAD_MEASURES = {
    "mean_distance": "mean attention distance in pixels",
    "entropy": "entropy of attention in nats",
}
"""Measures of a head that are compared, by their names in `vitlens.attention.STATISTICS`."""
LEAST_CHANGE = 0.01
"""Least difference of a changed head, as a share of the larger of its two means."""


@dataclass(frozen=True, repr=False)
class Audit:
    """Result of `audit`: groups of evidence, and what covering them does.

    >>> found = vitlens.audit(model, "flowers", labels)  # doctest: +SKIP
    >>> found.suspects[["class", "effect", "reasons"]]  # doctest: +SKIP

    groups: a DataFrame with one row for each group, the columns are those of `GROUP_COLUMNS`.
    effects: a DataFrame with one row for each group and way of covering: `group`, `way`, `effect` (fall of the
    probability of the labeled class below that under the control), its 95 % interval `low` to `high`, `p`.
    images: a DataFrame with one row for each image that could be read: `image` (its number), `name`, `half`, `label`,
    `predicted`, `probability` of the label.
    places: (G, rows, cols) share of the images of a group that have it at this patch.
    members: (n, P) group of each patch of the tested images, −1 for none, in the order of `tested`, (n,) their numbers.
    notes: sentences for the reader. settings: layer, method, seed and numbers of forwards. changes: the comparison with
    a second model, None without one. covered: a DataFrame with one row for each group, tested image and way, the
    columns are those of `COVERED_COLUMNS`.
    """

    groups: DataFrame
    effects: DataFrame
    images: DataFrame
    places: Tensor
    members: Tensor
    tested: Tensor
    notes: list[str] = field(default_factory=list)
    settings: dict = field(default_factory=dict)
    changes: Changes | None = None
    covered: DataFrame | None = None

    __repr__ = repr_with_shapes

    @property
    def used(self) -> DataFrame:
        """The groups on which the model relies by the test, the largest effect first."""
        rows = self.groups[self.groups["used"]]
        return rows.sort_values("effect", ascending=False)

    @property
    def suspects(self) -> DataFrame:
        """The used groups with a reason to look at them, in the order of their rank."""
        rows = self.groups[self.groups["suspect"] > 0]
        return rows.sort_values("suspect")


GROUP_COLUMNS = {
    "group": "number of the group",
    "class": "number of the class whose prediction the group raised",
    "share": "share of the class's evidence, by the map",
    "images": "images of the testing half that have it",
    "tested": "images in which it was covered",
    "class_share": "share of the images labeled with the class that have it",
    "shared_with": "other classes whose images have it at least half as often",
    "at_border": "share of its patches on the border of the grid",
    "at_place": "share of its images that have it at its most frequent patch",
    "accuracy": "accuracy on the images in which it was covered, uncovered",
    "accuracy_covered": "the same with the group covered, the mean of the ways",
    "accuracy_control": "the same with random patches covered",
    "accuracy_lacking": "accuracy on the images labeled with the class that lack it",
    "effect": "mean of the effects of the ways",
    "low": "lower end of the 95 % interval of this mean",
    "high": "upper end of it",
    "ways": "ways whose interval is above 0",
    "p": "p-value of an effect above 0 in at least two ways, adjusted for all groups",
    "used": "True if ways is at least 2, p at most 0.05, and effect at least 0.02",
    "reasons": "reasons to look at it, separated by commas",
    "suspect": "rank among the suspects, 0 for the other groups",
    "status": 'tested, or "too few"',
}
"""Columns of `Audit.groups`."""
COVERED_COLUMNS = {
    "group": "number of the group",
    "image": "number of the image",
    "way": "name of a way to cover in WAYS",
    "probability": "probability of the label with the group covered",
    "control": "probability of the label with as many random patches covered",
    "other": "number of the image whose patches cover those of this one, in the way other",
}
"""Columns of `Audit.covered`."""


@dataclass(frozen=True, repr=False)
class Changes:
    """Differences between the audited model and a second one on the same images: first less second.

    >>> found = vitlens.audit(model, "flowers", labels, beside=pretrained)  # doctest: +SKIP
    >>> found.changes.heads[["layer", "head", "measure", "difference", "changed"]]  # doctest: +SKIP

    groups: a DataFrame with one row for each tested group, the columns are those of `CHANGE_COLUMNS`. Changed groups
    come first, then the largest differences. heads: a DataFrame with one row for each head and measure, the columns are
    those of `HEAD_COLUMNS`. Changed heads come first, then the largest differences in standard errors. It is empty if
    the models differ in their numbers of layers or heads. accuracy: of both models on the tested images, NaN without
    labels. notes: sentences for the reader.
    """

    groups: DataFrame
    heads: DataFrame
    accuracy: tuple[float, float]
    notes: list[str] = field(default_factory=list)

    __repr__ = repr_with_shapes


CHANGE_COLUMNS = {
    "group": "number of the group, found in the first model",
    "class": "number of the class whose prediction the group raised",
    "tested": "images in which it was covered",
    "effect": "effect on the first model, the mean of the ways",
    "effect_beside": "effect on the second model, with the same patches covered",
    "difference": "effect less effect_beside",
    "low": "lower end of the 95 % interval of the difference",
    "high": "upper end of it",
    "p": "two-sided p-value of the difference, adjusted for all groups",
    "changed": "True if p is at most 0.05 and the difference at least 0.02 in size",
}
"""Columns of `Changes.groups`."""
HEAD_COLUMNS = {
    "layer": "number of the layer, from 0",
    "head": "number of the head, from 0",
    "measure": "name of a measure in HEAD_MEASURES",
    "mean": "mean over the tested images, first model",
    "mean_beside": "the same of the second model",
    "difference": "mean less mean_beside",
    "low": "lower end of the 95 % interval of the difference",
    "high": "upper end of it",
    "t": "difference in units of its standard error",
    "p": "two-sided p-value of the difference, adjusted for all rows",
    "changed": "True if p is at most 0.05 and the difference at least 1 % of the larger mean",
}
"""Columns of `Changes.heads`."""


def audit(
    model: nn.Module,
    images: object,
    labels: Sequence | Tensor | None = None,
    *,
    layer: int | None = None,
    method: str = METHOD,
    batch_size: int = 32,
    seed: int = 0,
    compare: bool = True,
    beside: nn.Module | None = None,
    partial: str | os.PathLike | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Audit:
    """Groups of evidence of a classifier over a set of images, and the effect of covering each of them.

    images: an `ImageSet` of `vitlens.data`, a batch (N, C, H, W) normalized as the model expects, or sources as of
    `vitlens.preprocess`. Sources are read up to three times, so a generator is made a list. Unreadable images, and
    those in the model's record of its training images, are left out and counted in the notes.
    labels: a class number (3, 3.0 or "3") or name for each image. By default those of the set. Without labels,
    predicted classes serve, effects are shown, and no group is called used or suspect.
    layer: the layer whose tokens describe a patch, by default the middle one. method: a quick map of
    `vitlens.attribution.METHODS`. seed: of the halves, clusters, random patches and intervals. compare: False to skip
    the comparison with the training images, for images that `vitlens.unseen.unseen` returned. beside: a second model
    with the same classes and patches, to compare on the same images, as in `Changes`. partial: a folder for the
    results of finished batches, from which a second call with the same model, images and settings goes on. The caller
    removes it. Images without digests, such as a tensor, leave it empty. on_progress: called with the step ("explore",
    "find", "test" or "compare"), images done and images in total. on_note: called with a sentence if results in
    `partial` are continued, or are of another audit.

    Raises ValueError for a model without classes, for labels of one class, for fewer than 40 images, for labels that
    are not the model's classes, if the model was trained on all images, and for a second model with other classes,
    another patch grid or other channels. Raises ImageError if none can be read.

    >>> found = vitlens.audit(model, "flowers", labels)  # doctest: +SKIP
    >>> found.groups[["class", "effect", "used"]]  # doctest: +SKIP
    """
    model = unwrap(model)
    _require_classifier(model)
    if beside is not None:
        beside = unwrap(beside)
        require_same_classes(model, beside)
    quick = {name for name, row in METHODS.items() if row.quick}
    require_known(method, quick, "method")
    reader = _reader(model, images)
    numbers = _labels(model, images, labels, reader.count)
    rows, note = torch.arange(reader.count), ""
    if compare:
        others = [] if beside is None else [beside]
        kept, note = unseen_rows(model, reader.compared, *others)
        rows = torch.from_numpy(kept)
    _require_enough(rows, numbers)
    if beside is not None:
        _require_same_patches(model, beside, reader, rows)
    blocks = len(family(transformer(model)).blocks)
    layer = (blocks - 1) // 2 if layer is None else layer_number(blocks, layer)
    halves = _halves(numbers, rows, seed)
    progress = on_progress or (lambda step, done, total: None)
    finished = Finished(None)
    if partial is not None:
        settings = f"{layer} {method} {batch_size} {seed}"
        if beside is not None:
            settings += f" {models.weights_digest(beside)} {models.data_config(beside)}"
        finished = _finished(partial, model, reader, rows, numbers, settings)
    run_of = _Run(model, reader, layer, method, batch_size, seed, progress, finished, beside)
    if on_note is not None:
        _note_on_finished(run_of, halves, on_note)
    evidence = run_of.explore(halves[0])
    groups = find_groups(evidence, seed)
    found = run_of.find(halves[1], groups)
    if not len(found.rows) or not len(evidence.read):
        raise ImageError("None of the images could be read, so there is nothing to audit.")
    truth = found.predicted if numbers is None else numbers[found.rows]
    plan = plan_tests(found.members, groups.count, GROUPS_PER_IMAGE)
    tests = run_of.test(found, groups, truth, plan, evidence.donors)
    result = _summarize(run_of, evidence, groups, found, numbers, tests)
    if beside is not None:
        compared_heads = run_of.compare(found)
        changes = _changes(run_of, result, found, numbers, tests, compared_heads)
        result = replace(result, changes=changes)
    if note:
        result.notes.append(note)
    return result


# Input


def _require_classifier(model: nn.Module) -> None:
    """Raise ValueError unless the model has several exclusive classes."""
    require_classes(model)
    kind = models.output_kind(model)
    if kind != "classes":
        raise ValueError(
            f"An audit needs a model with one softmax over several classes, got outputs={kind!r}."
        )


def require_same_classes(model: nn.Module, beside: nn.Module) -> None:
    """Raise ValueError unless a second model has the classes of the first, in the same order, and its channels."""
    _require_classifier(beside)
    counts = models.class_count(model), models.class_count(beside)
    if counts[0] != counts[1]:
        raise ValueError(
            f"Both models must have the same classes, got {counts[0]} and {counts[1]} of them. Compare two trainings "
            "on the same classes."
        )
    names = models.label_names(model), models.label_names(beside)
    if None not in names and names[0] != names[1]:
        first, second = map(list, names)
        differing = [k for k in range(counts[0]) if first[k] != second[k]]
        number = differing[0]
        raise ValueError(
            f"Both models must have the same classes in the same order, got {first[number]!r} and {second[number]!r} "
            f"as class {number}. Compare two trainings on the same classes."
        )
    channels = [models.data_config(each)["input_size"][0] for each in (model, beside)]
    if channels[0] != channels[1]:
        raise ValueError(
            f"Both models must have the same input channels, got {channels[0]} and {channels[1]}."
        )


def _require_same_patches(
    model: nn.Module, beside: nn.Module, reader: _Batches | _Sources, rows: Tensor
) -> None:
    """Raise ValueError unless a second model divides the images into the same patches. Reads one image."""
    for _, images in reader.batches(rows, 1):
        size = tuple(images.shape[-2:])
        built = models.built_size(beside)
        if built not in (None, size):
            raise ValueError(
                f"Both models must take images of one size, got {size[0]} × {size[1]} pixels for the first, and the "
                f"second takes {built[0]} × {built[1]}."
            )
        first, second = token_grid(model, size), token_grid(beside, size)
        if (first.rows, first.cols) != (second.rows, second.cols):
            raise ValueError(
                f"Both models must have the same patch grid, got {first.rows} × {first.cols} and {second.rows} × "
                f"{second.cols} patches. Compare two trainings of one architecture."
            )
        return


def _head_counts(model: nn.Module) -> list[int]:
    """Number of heads of each layer."""
    layers = attention_modules(transformer(model))
    return [sum(head_count(module) for _, module in modules) for modules in layers]


def _require_enough(rows: Tensor, numbers: Tensor | None) -> None:
    """Raise ValueError for too few images or classes among the rows (n,) to audit."""
    count = len(rows)
    if count < LEAST_OF_CLASS:
        raise ValueError(
            f"An audit needs at least {LEAST_OF_CLASS} images, got {count}. Pass more images."
        )
    if numbers is not None and len(numbers[rows].unique()) < 2:
        raise ValueError(
            "An audit needs images of at least two classes, got the labels of one. Add images of other classes."
        )


def _labels(model: nn.Module, images: object, labels: object, count: int) -> Tensor | None:
    """(N,) class numbers of the model, or None without labels."""
    if labels is None:
        if not hasattr(images, "class_names"):
            return None
        stored = getattr(images, "stored_classes", False)
        own = class_numbers(model, tuple(images.class_names), stored=stored)
        return own[label_numbers(images.labels).cpu()]
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if len(values) != count:
        raise ValueError(f"Expected a label for each of {count} images, got {len(values)} labels.")
    if values and all(isinstance(value, str) for value in values):
        if models.label_names(model) is not None or not any(map(_is_number, values)):
            return _named_labels(model, values)
        values = [float(value) if _is_number(value) else value for value in values]
    numbers = label_numbers(values)
    total = models.class_count(model)
    if numbers.min() < 0 or (total and numbers.max() >= total):
        raise ValueError(
            f"Labels must be class numbers of the model, 0 to {total - 1}, got {int(numbers.min())} to "
            f"{int(numbers.max())}."
        )
    return numbers


def _named_labels(model: nn.Module, values: list[str]) -> Tensor:
    """(N,) class numbers of the model by class name."""
    names = tuple(sorted(set(values)))
    own = class_numbers(model, names)
    numbers = dict(zip(names, own.tolist(), strict=True))
    return torch.tensor([numbers[value] for value in values])


def _is_number(text: str) -> bool:
    """True for the text of a number, such as "3", "1.5" or "nan"."""
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class _Batches:
    """Images in memory or in a set of `vitlens.data`.

    compared: the images, for `unseen_rows`. read: from row numbers to model inputs.
    """

    names: list[str]
    compared: ImageSet | ImageStream | Tensor
    read: Callable[[Tensor], Tensor]
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.names)

    def batches(self, rows: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield row numbers (b,) and images (b, C, H, W)."""
        for part in rows.split(size):
            yield part, self.read(part)


@dataclass(frozen=True)
class _Sources:
    """Images that are read from their sources. errors: by row, the reason why it cannot be read."""

    model: nn.Module
    names: list[str]
    sources: list
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def compared(self) -> Samples:
        """The images, for `unseen_rows`."""
        return as_samples(self.names, self.sources)

    def batches(self, rows: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield row numbers (b,) and images (b, C, H, W), without those that cannot be read."""
        for part in rows.split(size):
            inputs = {row: self._read(row) for row in part.tolist()}
            readable = {row: image for row, image in inputs.items() if image is not None}
            if readable:
                yield torch.tensor(list(readable)), torch.cat(list(readable.values()))

    def _read(self, row: int) -> Tensor | None:
        if row in self.errors:
            return None
        source = self.sources[row]
        if callable(source):
            source = source()
        try:
            size = models.built_size(self.model)
            return models.preprocess(self.model, source, size=size, on_note=lambda note: None)
        except ImageError as error:
            self.errors[row] = str(error)
            return None


def _reader(model: nn.Module, images: object) -> _Batches | _Sources:
    """The images, to be read in any order as often as needed."""
    if isinstance(images, Tensor) and images.ndim == 4:
        require_images(images, model)
        return _Batches(_numbered(len(images)), images, lambda rows: images[rows])
    if hasattr(images, "batches") and hasattr(images, "class_names"):
        config = models.data_config(model)

        def read(rows: Tensor) -> Tensor:
            ((pixels, _),) = images.batches([rows])
            return normalize(pixels, config["mean"], config["std"])

        return _Batches(_numbered(len(images)), images, read)
    pairs = list(named_sources(images, lambda note: None))
    return _Sources(model, [name for name, _ in pairs], [source for _, source in pairs])


def inputs_of(model: nn.Module, images: object) -> Callable[[int], Tensor | None]:
    """Function from the number of an image of an audit to the model's input (C, H, W), None if it cannot be read.

    >>> vitlens.evidence.inputs_of(model, [cat])(0).shape
    torch.Size([3, 224, 224])
    """
    reader = _reader(unwrap(model), images)

    def read(number: int) -> Tensor | None:
        with suppress(ImageError, OSError):
            for _, inputs in reader.batches(torch.tensor([number]), 1):
                return inputs[0].cpu()
        return None

    return read


def predicted_map(model: nn.Module, image: Tensor, method: str = METHOD) -> Tensor:
    """Map (rows, cols) of the predicted class of an image (C, H, W), as an audit explores it.

    >>> vitlens.evidence.predicted_map(model, images[0]).shape
    torch.Size([14, 14])
    """
    maps = METHODS[method](model, image[None], lambda output: output.max(1).values)
    return maps[0].detach().cpu().float()


def _numbered(count: int) -> list[str]:
    return [f"image {number + 1}" for number in range(count)]


def _finished(
    folder: str | os.PathLike,
    model: nn.Module,
    reader: _Batches | _Sources,
    rows: Tensor,
    numbers: Tensor | None,
    settings: str,
) -> Finished:
    """Results of a stopped audit of the same model, images, labels and settings, on the same kind of device."""
    digests = getattr(reader.compared, "digests", None)
    if digests is None or not digests.either.all():
        return Finished(None)
    labels = None if numbers is None else numbers.tolist()
    parts = [
        models.weights_digest(model),
        str(models.data_config(model)),
        digests.checksum,
        str(rows.tolist()),
        str(labels),
        settings,
        next(model.parameters()).device.type,
        torch.__version__,
        f"format {FORMAT}",
    ]
    fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return Finished(folder, fingerprint)


def _note_on_finished(
    run_of: _Run, halves: tuple[Tensor, Tensor], on_note: Callable[[str], None]
) -> None:
    """Call on_note with a sentence if results of a stopped audit are continued, or are of another audit."""
    finished = run_of.finished
    read = 0
    for step, rows in zip(("explore", "find"), halves, strict=True):
        for number, part in enumerate(rows.split(run_of.batch_size)):
            if finished.read(f"{step}-{number}") is not None:
                read += len(part)
    if read:
        count = len(halves[0]) + len(halves[1])
        on_note(f"Continuing: {read:,} of {count:,} images are read already.")
    elif finished.others():
        on_note(
            f"Starting anew: the finished batches in {finished.folder} are of other weights, images, labels or "
            "settings, or of another device or version."
        )


def _halves(numbers: Tensor | None, rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of the images to explore and of those to test: random halves, also of each class."""
    generator = torch.Generator().manual_seed(seed)
    order = rows[torch.randperm(len(rows), generator=generator)]
    if numbers is not None:
        by_class = numbers[order].argsort(stable=True)
        order = order[by_class]
    return order[0::2].sort().values, order[1::2].sort().values


# Evidence


@dataclass
class Evidence:
    """Patches of the images to explore.

    tokens: (M, D) half precision, of the patches that raised the predicted class. classes, rows, patches, values: (M,)
    predicted class, row of the image, number of the patch, and its share of the positive part of the map. others:
    (K, D) of patches with little evidence. read, predicted: (n,) rows and classes of all these images.
    donors: images (at most `DONORS`) with their tokens (P, D) and rows, whose patches cover those of others.
    """

    tokens: Tensor
    classes: Tensor
    rows: Tensor
    patches: Tensor
    values: Tensor
    others: Tensor
    read: Tensor
    predicted: Tensor
    donors: list[tuple[Tensor, Tensor, int]]
    grid: TokenGrid | None


@dataclass(frozen=True)
class Groups:
    """Groups of evidence in the space of tokens.

    classes: (G,) class of each group. shares: (G,) share of the class's evidence. centers: (C + B, D), those of the C
    balls of the groups, then those of all other patches. groups: (C,) group of each ball. radii: (C,) of the balls.
    mean, scale: (D,) with which tokens are standardized. along_border: (G,) bool, True for groups at changing places
    of the border, None for none.
    """

    classes: Tensor
    shares: Tensor
    centers: Tensor
    groups: Tensor
    radii: Tensor
    mean: Tensor
    scale: Tensor
    along_border: Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.classes)

    def members(self, tokens: Tensor) -> Tensor:
        """(…,) group of each token (…, D), −1 for none. Nothing but the token decides.

        >>> groups = vitlens.evidence.Groups(*[torch.zeros(1).long(), torch.ones(1)], torch.eye(2),
        ...     torch.zeros(1).long(), torch.ones(1), torch.zeros(2), torch.ones(2))
        >>> groups.members(torch.tensor([[1.5, 0.0], [0.0, 1.5]]))
        tensor([ 0, -1])
        """
        if self.count == 0:
            return torch.full(tokens.shape[:-1], -1)
        units = standardize(tokens, self.mean, self.scale)
        nearest, number = _distances(units, self.centers).min(-1)
        is_group = number < len(self.radii)
        number = number.clamp(max=len(self.radii) - 1)
        return torch.where(is_group & (nearest <= self.radii[number]), self.groups[number], -1)

    def complete(self, members: Tensor, grid: TokenGrid) -> Tensor:
        """Members (B, P) in which a group along the border has all free border patches of the images that have it.

        A frame has more patches than the map marks in an image, and those that are left show it as well.
        """
        members = members.clone()
        if self.along_border is None:
            return members
        border = grid.border()
        for group in self.along_border.nonzero()[:, 0].tolist():
            has = (members[:, border] == group).any(1)
            free = has[:, None] & border & (members < 0)
            members[free] = group
        return members


def standardize(tokens: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Tokens (…, D) less the mean, divided by the scale and by √D, so that their usual length is 1."""
    return (tokens.float() - mean) / (scale * len(scale) ** 0.5)


@dataclass
class _Cluster:
    """A stable cluster of the evidence of a class. centers: (c, D). radii: (c,). weight: its evidence, by the map."""

    number: int
    centers: Tensor
    radii: Tensor
    weight: float


def find_groups(evidence: Evidence, seed: int) -> Groups:
    """The groups of all predicted classes: stable clusters, those that occur in the same images together."""
    together = torch.cat([evidence.tokens, evidence.others]).float()
    mean = together.mean(0)
    deviation = together.std(0)
    scale = deviation.clamp_min(0.01 * float(deviation.max()) + 1e-12)
    units = standardize(evidence.tokens, mean, scale)
    others = standardize(evidence.others, mean, scale)
    background = [_k_means(others, BACKGROUND, seed)[1]]
    clusters: list[_Cluster] = []
    totals: dict[int, float] = {}
    for number in evidence.classes.unique().tolist():
        own = evidence.classes == number
        if len(evidence.rows[own].unique()) < LEAST_TESTED:
            continue
        values = evidence.values[own]
        totals[number] = float(values.sum())
        labels = cluster(units[own], evidence.rows[own], others, seed)
        noise = units[own][labels < 0]
        if len(noise):
            background.append(_k_means(noise, CENTERS, seed)[1])
        for i in range(int(labels.max()) + 1):
            inside = labels == i
            centers, radii = _balls(units[own][inside], seed)
            clusters.append(_Cluster(number, centers, radii, float(values[inside].sum())))
    clusters = _distinct(clusters)
    empty = torch.zeros(0)
    if not clusters:
        no_centers = torch.zeros(0, len(mean))
        return Groups(empty.long(), empty, no_centers, empty.long(), empty, mean, scale)
    counts = torch.tensor([len(each.centers) for each in clusters])
    single = Groups(
        torch.tensor([each.number for each in clusters]),
        torch.tensor([each.weight / totals[each.number] for each in clusters]),
        torch.cat([*(each.centers for each in clusters), *background]),
        torch.arange(len(clusters)).repeat_interleave(counts),
        torch.cat([each.radii for each in clusters]),
        mean,
        scale,
    )
    return _merge(single, evidence)


def _balls(units: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """(centers (c, D), radii (c,)) of balls that hold a cluster."""
    count = max(1, min(CENTERS, len(units) // 25))
    labels, centers = _k_means(units, count, seed)
    radii = []
    for i, center in enumerate(centers):
        distances = _distances(units[labels == i], center[None])
        radii.append(MARGIN * distances.quantile(RADIUS) + ROUNDING)
    return centers, torch.stack(radii)


def _distinct(clusters: list[_Cluster]) -> list[_Cluster]:
    """The clusters without repeated ones, such as one cue in two classes: the centers of each lie in the other."""
    kept: list[_Cluster] = []
    for each in sorted(clusters, key=lambda each: -each.weight):
        repeated = [_lies_in(each, other) and _lies_in(other, each) for other in kept]
        if not any(repeated):
            kept.append(each)
    return kept


def _lies_in(one: _Cluster, other: _Cluster) -> bool:
    """True if all centers of a cluster lie within balls of another one."""
    inside = _distances(one.centers, other.centers) <= other.radii
    return bool(inside.any(1).all())


def _merge(single: Groups, evidence: Evidence) -> Groups:
    """Groups of the clusters that are parts of one thing, by the patches of the explored images.

    One mark can fill several patches, whose tokens differ. Covering one of them alone would leave the mark visible.
    Clusters are joined if they occur in the same images, with Cohen's kappa of at least `TOGETHER`. A cluster is also
    joined to the one beside it (`beside`), and to one that holds its centers at the same fixed patch (`same_place`).
    """
    number = single.members(evidence.tokens)
    patches = torch.full((len(evidence.read), evidence.grid.patches), -1)
    patches[_positions(evidence), evidence.patches] = number
    present = torch.stack([(patches == i).any(1) for i in range(single.count)], 1).float()
    joined = _linked(present)
    joined |= beside(patches, single.count, evidence.grid)
    joined |= same_place(patches, single)
    groups = _components(joined)
    classes, shares = [], []
    for group in range(int(groups.max()) + 1):
        own = groups == group
        heaviest = single.shares.masked_fill(~own, -1).argmax()
        classes.append(single.classes[heaviest])
        of_class = own & (single.classes == classes[-1])
        shares.append(single.shares[of_class].sum())
    of_group = torch.where(patches >= 0, groups[patches.clamp_min(0)], -1)
    return replace(
        single,
        classes=torch.stack(classes),
        shares=torch.stack(shares),
        groups=groups[single.groups],
        along_border=along_border(of_group, len(classes), evidence.grid),
    )


def _positions(evidence: Evidence) -> Tensor:
    """(M,) positions in `read` of the images of the evidence."""
    place = {row: i for i, row in enumerate(evidence.read.tolist())}
    return torch.tensor([place[row] for row in evidence.rows.tolist()])


def _linked(present: Tensor) -> Tensor:
    """(C, C) bool, True for clusters that average linkage joins by the kappa of their presence (n, C)."""
    from scipy.cluster.hierarchy import fcluster, linkage

    if present.shape[1] == 1:
        return torch.ones(1, 1, dtype=torch.bool)
    apart = (1 - kappa(present)).clamp_min(0).numpy()
    upper = apart[np.triu_indices(len(apart), 1)]
    tree = linkage(upper, "average")
    numbers = torch.from_numpy(fcluster(tree, 1 - TOGETHER, "distance"))
    return numbers[:, None] == numbers


def beside(patches: Tensor, count: int, grid: TokenGrid) -> Tensor:
    """(C, C) bool, True at (a, b) if b is the neighbor of a in at least `FIXED` of the images with a, on the same side.

    patches: (n, P) cluster of each patch, −1 for none. A neighbor is one of the 8 patches around. A cluster spread over
    the image is at times above and at times below a mark, so no side has `FIXED` of the images.

    >>> patches = torch.tensor([[0, 1, -1], [1, -1, 1], [-1, 0, 1]])
    >>> vitlens.evidence.beside(patches, 2, vitlens.TokenGrid(1, 3, (2, 2))).tolist()
    [[False, True], [False, False]]
    """
    centers = patches.unflatten(1, (grid.rows, grid.cols))
    around = torch.nn.functional.pad(centers, (1, 1, 1, 1), value=-1)
    having = torch.zeros(count)
    for i in range(count):
        images_with = (patches == i).any(1)
        having[i] = images_with.sum()
    least = FIXED * having[:, None].clamp_min(1)
    joined = torch.zeros(count, count, dtype=torch.bool)
    for row, col in product(range(3), range(3)):
        other = around[:, row : row + grid.rows, col : col + grid.cols]
        both = (centers >= 0) & (other >= 0)
        image = both.nonzero()[:, 0]
        triples = torch.stack([image, centers[both], other[both]], 1)
        triples = triples.unique(dim=0)  # an image counts once
        pairs = triples[:, 1], triples[:, 2]
        images = torch.zeros(count, count)
        images.index_put_(pairs, torch.ones(()), accumulate=True)
        joined |= images >= least
    return joined.fill_diagonal_(False)


def same_place(patches: Tensor, single: Groups) -> Tensor:
    """(C, C) bool, True at (a, b) if both have the same fixed patch and all centers of a lie in balls of b.

    One mark can look different to the model in two classes, or with what is around it. Two marks at one place stay two.

    patches: (n, P) cluster of each patch, −1 for none.
    """
    frequent = torch.full((single.count,), -1)
    for i in range(single.count):
        at = patches == i
        counts = at.sum(0)
        images = at.any(1).sum()
        if images and counts.max() >= FIXED * images:
            frequent[i] = counts.argmax()
    balls = len(single.radii)
    centers = single.centers[:balls]
    inside = _distances(centers, centers) <= single.radii
    joined = torch.zeros(single.count, single.count, dtype=torch.bool)
    for a, b in product(range(single.count), range(single.count)):
        if a == b or frequent[a] < 0 or frequent[a] != frequent[b]:
            continue
        of_pair = inside[single.groups == a][:, single.groups == b]
        joined[a, b] = of_pair.any(1).all()
    return joined


def along_border(patches: Tensor, count: int, grid: TokenGrid) -> Tensor:
    """(G,) bool, True for groups with at least `AT_BORDER` of their patches on the border, at no fixed patch.

    patches: (n, P) group of each patch, −1 for none.

    >>> patches = torch.tensor([[0, -1, 1], [-1, -1, 1], [1, -1, 0]])
    >>> vitlens.evidence.along_border(patches, 2, vitlens.TokenGrid(1, 3, (2, 2))).tolist()
    [True, True]
    """
    border = grid.border()
    along = torch.zeros(count, dtype=torch.bool)
    for group in range(count):
        at = patches == group
        counts = at.sum(0)
        total = counts.sum()
        if not total:
            continue
        on_border = counts[border].sum() >= AT_BORDER * total
        fixed = counts.max() >= FIXED * at.any(1).sum()
        along[group] = on_border & ~fixed
    return along


def _components(joined: Tensor) -> Tensor:
    """(C,) number of the connected component of each cluster."""
    from scipy.sparse.csgraph import connected_components

    _, numbers = connected_components(joined.numpy(), directed=False)
    return torch.from_numpy(numbers).long()


def kappa(present: Tensor) -> Tensor:
    """(C, C) Cohen's kappa of the presence (n, C) of clusters in images: 1 for the same images, 0 for chance.

    >>> kappa(torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]))[0].tolist()
    [1.0, 0.5]
    """
    count = len(present)
    rate = present.mean(0)
    both = present.mT @ present / count
    agreement = both + (1 - rate[:, None] - rate + both)
    by_chance = rate[:, None] * rate + (1 - rate[:, None]) * (1 - rate)
    return (agreement - by_chance) / (1 - by_chance).clamp_min(1e-12)


def cluster(units: Tensor, rows: Tensor, others: Tensor, seed: int) -> Tensor:
    """(M,) stable cluster of each patch of the evidence of a class, −1 for none.

    HDBSCAN (Campello, Moulavi and Sander 2013) finds the clusters and their number, from the least size of a cluster.
    It runs on all evidence and on each of two random halves of the images. A cluster is stable if each half has one of
    at least `STABLE` Jaccard similarity with its part there (Hennig 2007). The least size with the most stable
    clusters is taken, the largest of several.

    units: (M, D) standardized tokens. rows: (M,) their images. others: (K, D) tokens of patches with little evidence.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(others), generator=generator)
    others = others[order[: len(units)]]
    halves = _random_halves(rows, seed)
    best = torch.full((len(units),), -1)
    for size in reversed(SIZES):
        if 2 * size > len(units):
            continue
        labels = _hdbscan(units, others, size)
        parts = []
        for half in halves:
            parts.append((half, _hdbscan(units[half], others, size // 2)))
        stable = _stable(labels, parts)
        if stable.max() > best.max():
            best = stable
    return best


def _stable(labels: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """(M,) stable cluster of each patch, −1 for none, from its cluster (M,). parts: halves and their clusters."""
    stable = torch.full_like(labels, -1)
    count = 0
    for i in range(int(labels.max()) + 1):
        inside = labels == i
        if _is_stable(inside, parts):
            stable[inside] = count
            count += 1
    return stable


def _is_stable(inside: Tensor, parts: list[tuple[Tensor, Tensor]]) -> bool:
    """True if each half has a cluster like the patches `inside`, (M,) bool. parts: halves and their clusters."""
    for half, labels in parts:
        most = 0.0
        for i in range(int(labels.max()) + 1):
            most = max(most, _jaccard(labels == i, inside[half]))
        if most < STABLE:
            return False
    return True


def _jaccard(a: Tensor, b: Tensor) -> float:
    """Jaccard similarity of two sets, (M,) bool."""
    return float((a & b).sum() / (a | b).sum().clamp_min(1))


def _hdbscan(units: Tensor, others: Tensor, size: int) -> Tensor:
    """(M,) cluster of each point, −1 for none. size: least size of a cluster.

    HDBSCAN finds no cluster if all points are one. They are then compared with as many others.
    """
    from sklearn.cluster import HDBSCAN

    def labels_of(points: Tensor) -> Tensor:
        fitted = HDBSCAN(min_cluster_size=size, min_samples=3, copy=True).fit(points.numpy())
        return torch.from_numpy(fitted.labels_).long()

    labels = labels_of(units)
    if labels.max() >= 0:
        return labels
    with_others = labels_of(torch.cat([units, others[: len(units)]]))
    own = with_others[: len(units)]
    for i in range(int(with_others.max()) + 1):
        if 2 * (own == i).sum() < (with_others == i).sum():
            own[own == i] = -1
    _, numbered = own.clamp_min(-1).unique(return_inverse=True)
    return numbered - int((own < 0).any())


def _random_halves(rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """(M,) bool twice: patches of a random half of the images, and of the other images."""
    generator = torch.Generator().manual_seed(seed)
    images = rows.unique()
    order = torch.randperm(len(images), generator=generator)
    first = images[order[: len(images) // 2]]
    in_first = torch.isin(rows, first)
    return in_first, ~in_first


def _k_means(units: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """(labels (M,), centers (k, D)) of k-means, with fewer centers for fewer distinct points."""
    from sklearn.cluster import KMeans

    k = min(k, len(units.unique(dim=0)))
    fitted = KMeans(k, n_init=2, random_state=seed).fit(units.numpy())
    labels = torch.from_numpy(fitted.labels_).long()
    return labels, torch.from_numpy(fitted.cluster_centers_).float()


def _distances(units: Tensor, centers: Tensor) -> Tensor:
    """(…, M, G) distances, without the rounding of a matrix product."""
    return torch.cdist(units, centers, compute_mode="donot_use_mm_for_euclid_dist")


# Covering


def cover(images: Tensor, patches: Tensor, blanks: Tensor, grid: TokenGrid) -> Tensor:
    """Images (B, C, H, W) with patches (B, P) bool replaced by those of blanks. All other pixels stay bit for bit.

    >>> grid = vitlens.TokenGrid(1, 2, (2, 2))
    >>> patches = torch.tensor([[True, False]])
    >>> vitlens.evidence.cover(torch.ones(1, 1, 2, 4), patches, torch.zeros(1, 1, 2, 4), grid)[0, 0, 0]
    tensor([0., 0., 1., 1.])
    """
    mask = patches[:, grid.pixel_patches()][:, None].to(images.device)
    return torch.where(mask, blanks, images)


def blanks_of(image: Tensor, donor: Tensor, grid: TokenGrid) -> Tensor:
    """(W, C, H, W) the three images whose patches cover those of an image (C, H, W), in the order of `WAYS`."""
    at_border = grid.border()[grid.pixel_patches()].to(image.device)
    color = image[:, at_border].mean(1)
    filled = color[:, None, None].expand_as(image)
    smooth = blur(image[None], max(grid.patch))[0]
    return torch.stack([filled, smooth, donor])


def rings(grid: TokenGrid) -> Tensor:
    """(P,) number of patches between a patch and the border, 0 on the border."""
    rows = torch.arange(grid.rows)
    cols = torch.arange(grid.cols)
    rows = torch.minimum(rows, rows.flip(0))
    cols = torch.minimum(cols, cols.flip(0))
    return torch.minimum(rows[:, None], cols).flatten()


def matched(group: Tensor, ring: Tensor, random: np.random.Generator) -> Tensor | None:
    """(P,) bool: as many random patches outside of the group (P,), at the same distances to the border where possible.

    A patch without a free one at its distance gets one at the next distance, inwards first. None if the group has more
    than half of the patches.

    >>> ring = vitlens.evidence.rings(vitlens.TokenGrid(3, 3, (2, 2)))
    >>> group = torch.arange(9) < 2
    >>> vitlens.evidence.matched(group, ring, np.random.default_rng(0))[group].any().item()
    False
    """
    if 2 * group.sum() > len(group):
        return None
    order = torch.from_numpy(random.permutation(len(group)))
    free = order[~group[order]].tolist()
    chosen = torch.zeros_like(group)
    for patch in group.nonzero()[:, 0].tolist():
        own = ring[patch].item()
        best = free[0]
        for other in free:
            if _is_nearer(ring[other].item(), ring[best].item(), own):
                best = other
        free.remove(best)
        chosen[best] = True
    return chosen


def _is_nearer(ring: int, best: int, own: int) -> bool:
    """True if a ring is nearer to a patch's own ring than the best one so far. Of two equally near ones, the inner."""
    distance = abs(ring - own)
    least = abs(best - own)
    if distance == least:
        return ring > best
    return distance < least


def plan_tests(members: Tensor, groups: int, most: int) -> list[list[int]]:
    """By tested image, at most `most` groups to cover in it. Groups in the fewest images come first.

    members: (n, P). Neither labels nor maps decide.
    """
    has = torch.zeros(len(members), groups, dtype=torch.bool)
    for group in range(groups):
        has[:, group] = (members == group).any(1)
    plan: list[list[int]] = [[] for _ in range(len(members))]
    for group in has.sum(0).argsort(stable=True).tolist():
        for image in has[:, group].nonzero()[:, 0].tolist():
            if len(plan[image]) < most:
                plan[image].append(group)
    return plan


# Statistics


def sign_flip(differences: np.ndarray, seed: int = 0, flips: int = FLIPS) -> np.ndarray:
    """One-sided p-values (…,) that means of paired differences (n, …) are above 0, by random signs of the images.

    Exact up to the number of random signs if the two of a pair are exchangeable.

    >>> float(sign_flip(np.ones(4), flips=1000)) < 0.1
    True
    """
    differences = np.asarray(differences, dtype=np.float64)
    flat = differences.reshape(len(differences), -1)
    random = np.random.default_rng(seed)
    mean = flat.sum(0)
    tolerance = 1e-12 * np.abs(flat).sum(0)
    reached = np.ones_like(mean)
    for start in range(0, flips, 1000):
        count = min(1000, flips - start)
        signs = 2.0 * random.integers(0, 2, (count, len(flat))) - 1
        reached += (signs @ flat >= mean - tolerance).sum(0)
    return (reached / (flips + 1)).reshape(differences.shape[1:])


def two_sided(differences: np.ndarray, seed: int = 0, flips: int = FLIPS) -> np.ndarray:
    """Two-sided p-values (…,) that means of paired differences (n, …) are not 0, twice the smaller of `sign_flip`.

    >>> float(two_sided(np.array([1.0, -1.0])))
    1.0
    """
    differences = np.asarray(differences, dtype=np.float64)
    above = sign_flip(differences, seed, flips)
    below = sign_flip(-differences, seed, flips)
    return np.minimum(1.0, 2 * np.minimum(above, below))


def paired_t(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(t, p): means of paired differences (n, …) in units of their standard error, and their two-sided p-values.

    The p-values are of Student's t, because random signs would need more draws than `FLIPS` for hundreds of heads.
    Differences that are all 0 have t = 0 and p = 1, other constant ones t = ±∞ and p = 0. Raises ValueError for fewer
    than 2 images.

    >>> t, p = paired_t(np.array([0.0, 1.0, 0.0, 1.0]))
    >>> round(float(t), 3), round(float(p), 3)
    (1.732, 0.182)
    """
    from scipy.stats import t as student

    differences = np.asarray(differences, dtype=np.float64)
    count = len(differences)
    if count < 2:
        raise ValueError(f"A standard error needs at least 2 images, got {count}.")
    mean = differences.mean(0)
    error = differences.std(0, ddof=1) / count**0.5
    spread = np.ptp(differences, axis=0) > 0
    constant = np.where(mean == 0, 0.0, np.copysign(np.inf, mean))
    t = np.where(spread, mean / np.where(spread, error, 1.0), constant)
    return t, 2 * student.sf(np.abs(t), count - 1)


def bootstrap_interval(
    differences: np.ndarray, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[np.ndarray, np.ndarray]:
    """Ends (…,) of the 95 % percentile interval of means of (n, …) over images, which are drawn with replacement.

    >>> low, high = bootstrap_interval(np.array([0.0, 1.0, 0.0, 1.0]))
    >>> bool(0 <= low < 0.5 < high <= 1)
    True
    """
    differences = np.asarray(differences, dtype=np.float64)
    count = len(differences)
    random = np.random.default_rng(seed)
    weights = random.multinomial(count, np.full(count, 1 / count), size=resamples) / count
    means = np.tensordot(weights, differences, 1)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return low, high


def holm(p: Sequence[float]) -> np.ndarray:
    """p-values (m,) adjusted for all m tests (Holm 1979), so that one of them is wrongly below 0.05 in 5 % of cases.

    >>> holm([0.01, 0.04, 0.03]).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p, dtype=np.float64)
    order = p.argsort(kind="stable")
    factors = len(p) - np.arange(len(p))
    steps = np.maximum.accumulate(p[order] * factors).clip(max=1)
    adjusted = np.empty_like(p)
    adjusted[order] = steps
    return adjusted


def in_two_ways(p: np.ndarray) -> float:
    """p-value of an effect in at least two of W ways with p-values (W,) (Benjamini and Heller 2008, Bonferroni).

    >>> in_two_ways(np.array([0.5, 0.01, 0.02]))
    0.04
    """
    second = np.sort(p)[1]
    return float(min(1.0, (len(p) - 1) * second))


# Run


@dataclass(frozen=True)
class Found:
    """The tested images: rows (n,), groups of patches (n, P), predicted classes (n,), probabilities (n, classes)."""

    rows: Tensor
    members: Tensor
    predicted: Tensor
    probabilities: Tensor


@dataclass
class Tests:
    """Outcomes of covering, by group: positions among the tested images (t,), probabilities and correctness (t, W) of
    the label with the group covered and with the control covered. others: rows of the images whose patches covered
    those of these (t,). beside: outcomes of a second model."""

    positions: dict[int, list[int]]
    covered: dict[int, list]
    control: dict[int, list]
    forwards: int = 0
    beside: Tests | None = None
    others: dict[int, list[int]] = field(default_factory=dict)

    def add(self, group: int, position: int, covered: Tensor, control: Tensor) -> None:
        """Append the outcomes (W, 2) of one image."""
        self.positions.setdefault(group, []).append(position)
        self.covered.setdefault(group, []).append(covered)
        self.control.setdefault(group, []).append(control)

    def differences(self, group: int) -> np.ndarray:
        """(t, W) probability of the label with the control covered less that with the group covered."""
        covered = torch.stack(self.covered[group]).double().numpy()
        control = torch.stack(self.control[group]).double().numpy()
        return control[..., 0] - covered[..., 0]


@dataclass
class _Run:
    """The passes of an audit over the images."""

    model: nn.Module
    reader: _Batches | _Sources
    layer: int
    method: str
    batch_size: int
    seed: int
    progress: Callable[[str, int, int], None]
    finished: Finished
    beside: nn.Module | None = None

    @cached_property
    def normalizations(self) -> tuple[tuple, tuple]:
        """The `normalization` of both models. Measuring it can take a forward."""
        return normalization(self.model), normalization(self.beside)

    def explore(self, rows: Tensor) -> Evidence:
        """One forward and one backward of each image."""
        random = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(rows), generator=random)
        giving = rows[order[:DONORS]]
        count = len(rows)
        batches = []
        for batch in self._batches(
            "explore", rows, lambda part: self._explore(part, count, giving, random)
        ):
            random.set_state(batch.pop("random"))
            batches.append(batch)
        if not batches:
            raise ImageError("None of the images could be read, so there is nothing to audit.")
        grid = token_grid(self.model, tuple(batches[-1]["size"].tolist()))
        donors = []
        for batch in batches:
            rows_of_donors = batch.pop("donor_rows").tolist()
            donors += zip(
                batch.pop("donors"), batch.pop("donor_tokens"), rows_of_donors, strict=True
            )
        joined = _joined(batches)
        del joined["size"]
        return Evidence(**joined, donors=donors, grid=grid)

    def _batches(
        self, step: str, rows: Tensor, compute: Callable[[Tensor], dict[str, Tensor]]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the results of batches of rows, computed or as a stopped call has left them.

        A batch without a readable image has no results.
        """
        errors = self.reader.errors
        done = 0
        for number, part in enumerate(rows.split(self.batch_size)):
            name = f"{step}-{number}"
            batch = self.finished.read(name)
            if batch is None:
                batch = compute(part)
                batch["errors"] = _as_bytes(
                    {row: errors[row] for row in part.tolist() if row in errors}
                )
                self.finished.write(name, batch)
            errors.update(_from_bytes(batch.pop("errors")))
            done += len(part)
            self.progress(step, done, len(rows))
            if batch:
                yield batch

    def _explore(
        self, rows: Tensor, count: int, giving: Tensor, random: torch.Generator
    ) -> dict[str, Tensor]:
        """Columns of the `Evidence` of one batch. count: images to explore. giving: rows of the donors."""
        for numbers, images in self.reader.batches(rows, self.batch_size):
            maps, tokens, classes = self._explain(images)
            size = images.shape[-2:]
            grid = token_grid(self.model, tuple(size))
            kept = self._patches_to_keep(count, tokens.shape[-1])
            values = maps.flatten(1).clamp_min(0)
            shares = values / values.sum(1, keepdim=True).clamp_min(1e-30)
            strongest = shares.topk(min(kept, grid.patches), 1)
            image, rank = (strongest.values > 0).nonzero(as_tuple=True)
            patch = strongest.indices[image, rank]
            others = _draw_others(tokens, shares, strongest.indices, random)
            gives = torch.isin(numbers, giving)
            return {
                "tokens": tokens[image, patch].half(),
                "classes": classes[image],
                "rows": numbers[image],
                "patches": patch,
                "values": strongest.values[image, rank],
                "others": others,
                "read": numbers,
                "predicted": classes,
                "donors": images.cpu()[gives],
                "donor_tokens": tokens[gives].half(),
                "donor_rows": numbers[gives],
                "size": torch.tensor(size),
                "random": random.get_state(),
            }
        return {}

    def _patches_to_keep(self, images: int, width: int) -> int:
        """Strongest patches of an image whose tokens fit `ROW_BYTES`."""
        per_image = ROW_BYTES // (2 * width * images) - OTHERS
        return max(1, min(STRONGEST, per_image))

    def _explain(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps (B, rows, cols) of the predicted class, patch tokens (B, P, D), and predicted classes (B,)."""
        outputs: list[Tensor] = []
        layers: list[Tensor] = []

        def highest(output: Tensor) -> Tensor:
            outputs.append(output.detach())
            return output.max(1).values

        def append(_, args: tuple, output: Tensor) -> None:
            layers.append(output.detach())

        about = family(transformer(self.model))
        hooks = [(about.blocks[self.layer].register_forward_hook, append)]
        with about.calling_blocks(), thread_hooks(hooks):
            maps = METHODS[self.method](self.model, images, highest)
        grid = token_grid(self.model, tuple(images.shape[-2:]))
        maps = maps.detach().cpu().float()
        tokens = layers[0][:, grid.prefix :].cpu().float()
        classes = outputs[0].argmax(1).cpu()
        return maps, tokens, classes

    def find(self, rows: Tensor, groups: Groups) -> Found:
        """One forward of each image, and the groups of its patches."""
        batches = [*self._batches("find", rows, lambda part: self._find(part, groups))]
        if not batches:
            raise ImageError("None of the images could be read, so there is nothing to audit.")
        return Found(**_joined(batches))

    def _find(self, rows: Tensor, groups: Groups) -> dict[str, Tensor]:
        """Columns of the `Found` of one batch."""
        for numbers, images in self.reader.batches(rows, self.batch_size):
            with torch.no_grad():
                layers, output = features(self.model, images)
            grid = token_grid(self.model, tuple(images.shape[-2:]))
            tokens = layers[self.layer][:, grid.prefix :].cpu().float()
            scores = models.scores(self.model, output).cpu()
            own = groups.complete(groups.members(tokens), grid)
            return {
                "rows": numbers,
                "members": own.to(torch.int16),
                "predicted": scores.argmax(1),
                "probabilities": scores,
            }
        return {}

    def test(
        self, found: Found, groups: Groups, truth: Tensor, plan: list[list[int]], donors: list
    ) -> Tests:
        """Forwards with the groups of the plan covered, and with random patches covered."""
        covered = [i for i, groups_of_image in enumerate(plan) if groups_of_image]
        positions = torch.tensor(covered, dtype=torch.int64)
        tests = Tests({}, {}, {})
        if self.beside is not None:
            tests.beside = Tests({}, {}, {})
        donor_members = [groups.members(tokens.float()) for _, tokens, _ in donors]
        giving = donors, donor_members

        def compute(part: Tensor) -> dict[str, Tensor]:
            return self._test(part, found, truth, plan, giving)

        for batch in self._batches("test", positions, compute):
            for number, group in enumerate(batch["group"].tolist()):
                position = int(batch["position"][number])
                tests.add(group, position, batch["covered"][number], batch["control"][number])
                tests.others.setdefault(group, []).append(int(batch["other"][number]))
                if tests.beside is not None:
                    covered = batch["covered_beside"][number]
                    tests.beside.add(group, position, covered, batch["control_beside"][number])
            tests.forwards += 2 * len(WAYS) * len(batch["group"])
        return tests

    def _test(
        self,
        positions: Tensor,
        found: Found,
        truth: Tensor,
        plan: list[list[int]],
        donors: tuple[list, list],
    ) -> dict[str, Tensor]:
        """Positions, groups and outcomes (t, W, 2) of the tests of one batch of positions."""
        parts = []
        for position in positions.tolist():
            row = found.rows[position : position + 1]
            for _, images in self.reader.batches(row, 1):
                label, members = int(truth[position]), found.members[position]
                parts += self._test_image(
                    images[0].cpu(), position, members, label, plan[position], donors
                )
        return _joined(parts)

    def _test_image(
        self,
        image: Tensor,
        position: int,
        members: Tensor,
        label: int,
        planned: list[int],
        donors: tuple[list, list],
    ) -> list[dict[str, Tensor]]:
        """Outcomes of each planned group of one image, covered in all ways, and of a control, in one batch."""
        random = np.random.default_rng([self.seed, position])
        grid = token_grid(self.model, tuple(image.shape[-2:]))
        ring = rings(grid)
        batch, covered_groups, others = [], [], []
        for group in planned:
            patches = members == group
            control = matched(patches, ring, random)
            donor = _donor(donors, group, random)
            if control is None or donor is None:
                continue
            other, other_row = donor
            blanks = blanks_of(image, other, grid)
            same = image.expand_as(blanks)
            batch.append(cover(same, patches.expand(len(WAYS), -1), blanks, grid))
            batch.append(cover(same, control.expand(len(WAYS), -1), blanks, grid))
            covered_groups.append(group)
            others.append(other_row)
        if not batch:
            return []
        inputs = torch.cat(batch)
        columns = _outcomes(self.model, inputs, label)
        if self.beside is not None:
            converted = renormalized(inputs, *self.normalizations)
            second = _outcomes(self.beside, converted, label)
            columns |= {f"{name}_beside": outcome for name, outcome in second.items()}
        parts = []
        for number, group in enumerate(covered_groups):
            own = {name: outcome[number : number + 1] for name, outcome in columns.items()}
            numbers = {
                "position": torch.tensor([position]),
                "group": torch.tensor([group]),
                "other": torch.tensor([others[number]]),
            }
            parts.append(numbers | own)
        return parts

    def compare(self, found: Found) -> tuple[Tensor, Tensor | None]:
        """Classes (n,) that the second model predicts, and measures (n, 2, L, H, M) of the heads of both models.

        The measures are None if the models differ in their numbers of layers or heads.
        """
        heads = _head_counts(self.model) == _head_counts(self.beside)
        batches = [*self._batches("compare", found.rows, lambda part: self._compare(part, heads))]
        joined = _joined(batches)
        return joined["predicted"], joined.get("measures")

    def _compare(self, rows: Tensor, heads: bool) -> dict[str, Tensor]:
        """Columns of `compare` of one batch."""
        for _, images in self.reader.batches(rows, self.batch_size):
            converted = renormalized(images, *self.normalizations)
            if not heads:
                with eval_mode(self.beside), torch.no_grad():
                    output = run(self.beside, cast(self.beside, converted))
                return {"predicted": output.argmax(1).cpu()}
            _, own = head_measures(self.model, images)
            output, other = head_measures(self.beside, converted)
            return {"predicted": output.argmax(1).cpu(), "measures": torch.stack([own, other], 1)}
        return {}


def _outcomes(model: nn.Module, inputs: Tensor, label: int) -> dict[str, Tensor]:
    """Probability and correctness of a label (g, W, 2) for g groups, covered and with the control covered.

    inputs: (g·2·W, C, H, W), of each group first the covered images, then those of the control.
    """
    with eval_mode(model), torch.no_grad():
        output = run(model, inputs.to(next(model.parameters())))
    scores = models.scores(model, output).cpu()
    right = scores.argmax(1) == label
    outcomes = torch.stack([scores[:, label], right.float()], -1)
    outcomes = outcomes.unflatten(0, (-1, 2, len(WAYS)))
    return {"covered": outcomes[:, 0], "control": outcomes[:, 1]}


def normalization(model: nn.Module) -> tuple[list[float], list[float]]:
    """Means and standard deviations of the channels with which a model's input is normalized."""
    config = models.data_config(model)
    return list(config["mean"]), list(config["std"])


def renormalized(images: Tensor, first: tuple, second: tuple) -> Tensor:
    """Images (B, C, H, W) of one `normalization` with another one. The pixels stay the same.

    >>> renormalized(torch.ones(1, 1, 1, 1), ([0.5], [0.5]), ([0.0], [2.0])).item()
    0.5
    """
    if first == second:
        return images
    mean, std = (torch.tensor(values).to(images)[:, None, None] for values in first)
    return normalize(images * std + mean, *second)


def head_measures(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs (B, classes), measures (B, L, H, M) of `HEAD_MEASURES`) from one forward.

    >>> vitlens.evidence.head_measures(model, images)[1].shape
    torch.Size([2, 12, 3, 2])
    """
    with eval_mode(model), torch.no_grad():
        with capture(model) as attn:
            output = run(model, cast(model, images))
        summary = attention.summary(attn, *HEAD_MEASURES)
    measures = [summary.values[name] for name in HEAD_MEASURES]
    return output, torch.stack(measures, -1).cpu().float()


def _joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all batches by name."""
    if not batches:
        return {}
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _as_bytes(errors: dict[int, str]) -> Tensor:
    """Messages by row as a uint8 tensor, for a file."""
    return torch.frombuffer(bytearray(json.dumps(errors).encode()), dtype=torch.uint8)


def _from_bytes(content: Tensor) -> dict[int, str]:
    """The messages of `_as_bytes`."""
    errors = json.loads(bytes(content.tolist()))
    return {int(row): text for row, text in errors.items()}


def _draw_others(
    tokens: Tensor, shares: Tensor, strongest: Tensor, random: torch.Generator
) -> Tensor:
    """(B · k, D) tokens of random patches of low evidence, in half precision. k is at most `OTHERS`.

    They come from the half of the patches with the smallest share of the map. Patches that are strong without being
    among the strongest are often pieces of the same mark, and would keep it from being recognized elsewhere.
    """
    weakest = shares.argsort(1)[:, : shares.shape[1] // 2]
    weights = torch.zeros(tokens.shape[:2])
    weights.scatter_(1, weakest, 1)
    weights.scatter_(1, strongest, 0)
    free = int(weights.sum(1).min())
    if free == 0:
        return tokens[:, :0].flatten(0, 1).half()
    drawn = torch.multinomial(weights, min(OTHERS, free), generator=random)
    chosen = tokens.gather(1, drawn[..., None].expand(-1, -1, tokens.shape[-1]))
    return chosen.flatten(0, 1).half()


def _donor(
    donors: tuple[list, list], group: int, random: np.random.Generator
) -> tuple[Tensor, int] | None:
    """A random image among the donors that lacks the group, with its row, or None."""
    images, members = donors
    for number in random.permutation(len(images)).tolist():
        if not (members[number] == group).any():
            image, _, row = images[number]
            return image, row
    return None


# Summary


def _summarize(
    run_of: _Run,
    evidence: Evidence,
    groups: Groups,
    found: Found,
    numbers: Tensor | None,
    tests: Tests,
) -> Audit:
    """The `Audit` from the outcomes of all passes."""
    import pandas as pd

    truth = found.predicted if numbers is None else numbers[found.rows]
    sizes = _sizes(evidence, found, numbers)
    places = _places(found.members, groups.count, evidence.grid)
    effects, rows = [], []
    for group in range(groups.count):
        row = _describe(group, groups, found, truth, places, evidence.grid)
        tested = tests.positions.get(group, [])
        enough = sizes.get(row["class"], 0) >= LEAST_OF_CLASS and len(tested) >= LEAST_TESTED
        row["tested"] = len(tested)
        row["status"] = "tested" if enough else "too few"
        if enough:
            right = (found.predicted == truth)[tests.positions[group]]
            outcome = _effect(group, tests, run_of.seed)
            row |= outcome["row"]
            row["accuracy"] = _mean(right)
            effects += [{"group": group, **effect} for effect in outcome["effects"]]
        rows.append(row)
    table = pd.DataFrame(rows, columns=list(GROUP_COLUMNS))
    table = _judge(table, numbers is not None, _chance(truth))
    notes = _notes(run_of.reader, groups, numbers)
    images = _images_table(run_of.reader.names, evidence, found, numbers)
    settings = {
        "layer": run_of.layer,
        "method": run_of.method,
        "seed": run_of.seed,
        "forwards": tests.forwards,
    }
    columns = ["group", "way", "effect", "low", "high", "p"]
    return Audit(
        table,
        pd.DataFrame(effects, columns=columns),
        images,
        places,
        found.members,
        found.rows,
        notes,
        settings,
        covered=_covered_table(found, tests),
    )


def _covered_table(found: Found, tests: Tests) -> DataFrame:
    """One row for each group, tested image and way."""
    import pandas as pd

    tables = []
    for group, positions in sorted(tests.positions.items()):
        rows = found.rows[positions].numpy()
        covered = torch.stack(tests.covered[group])[..., 0].numpy()  # (t, W)
        control = torch.stack(tests.control[group])[..., 0].numpy()
        columns = {
            "group": group,
            "image": rows.repeat(len(WAYS)),
            "way": list(WAYS) * len(rows),
            "probability": covered.ravel(),
            "control": control.ravel(),
            "other": np.repeat(tests.others[group], len(WAYS)),
        }
        tables.append(pd.DataFrame(columns))
    if not tables:
        return pd.DataFrame(columns=list(COVERED_COLUMNS))
    return pd.concat(tables, ignore_index=True)


def _sizes(evidence: Evidence, found: Found, numbers: Tensor | None) -> dict[int, int]:
    """Images of each class, by label, or by prediction without labels."""
    if numbers is None:
        numbers = torch.cat([evidence.predicted, found.predicted])
    classes, counts = numbers.unique(return_counts=True)
    return dict(zip(classes.tolist(), counts.tolist(), strict=True))


def _places(members: Tensor, groups: int, grid: TokenGrid) -> Tensor:
    """(G, rows, cols) share of the images of a group that have it at each patch."""
    places = torch.zeros(groups, grid.rows, grid.cols)
    for group in range(groups):
        at = members == group
        having = at[at.any(1)].float()
        if len(having):
            places[group] = having.mean(0).unflatten(0, (grid.rows, grid.cols))
    return places


def _describe(
    group: int, groups: Groups, found: Found, truth: Tensor, places: Tensor, grid: TokenGrid
) -> dict:
    """What is known of a group without covering it."""
    at = found.members == group
    has = at.any(1)
    number = int(groups.classes[group])
    in_class = truth == number
    right = (found.predicted == truth).float()
    share = _mean(has[in_class].float())
    least = max(share / 2, 0.05)
    shared = []
    for other in truth.unique().tolist():
        share_of_other = _mean(has[truth == other])
        if other != number and share_of_other >= least:
            shared.append(str(other))
    return {
        "group": group,
        "class": number,
        "share": float(groups.shares[group]),
        "images": int(has.sum()),
        "class_share": share,
        "shared_with": " ".join(shared),
        "at_border": _mean(at[:, grid.border()].sum(1)[has] / at.sum(1)[has]),
        "at_place": float(places[group].max()),
        "accuracy_lacking": _mean(right[in_class & ~has]),
    }


def _mean(values: Tensor) -> float:
    """Mean, NaN for none."""
    return float(values.float().mean()) if len(values) else float("nan")


def _effect(group: int, tests: Tests, seed: int) -> dict:
    """Effects of a tested group by way, and what they are together."""
    covered = torch.stack(tests.covered[group]).double().numpy()  # (t, W, 2)
    control = torch.stack(tests.control[group]).double().numpy()
    differences = tests.differences(group)
    p = sign_flip(differences, seed)
    low, high = bootstrap_interval(differences, seed)
    means = differences.mean(0)
    effects = []
    for way, name in enumerate(WAYS):
        effects.append(
            {
                "way": name,
                "effect": means[way],
                "low": low[way],
                "high": high[way],
                "p": p[way],
            }
        )
    mean_low, mean_high = bootstrap_interval(differences.mean(1), seed)
    row = {
        "effect": float(means.mean()),
        "low": float(mean_low),
        "high": float(mean_high),
        "ways": int((low > 0).sum()),
        "p": in_two_ways(p),
        "accuracy_covered": float(covered[..., 1].mean()),
        "accuracy_control": float(control[..., 1].mean()),
    }
    return {"row": row, "effects": effects}


def _changes(
    run_of: _Run,
    result: Audit,
    found: Found,
    numbers: Tensor | None,
    tests: Tests,
    compared: tuple[Tensor, Tensor | None],
) -> Changes:
    """The `Changes` from the outcomes of both models. compared: as `_Run.compare` returns them."""
    predicted, measures = compared
    accuracy = (float("nan"), float("nan"))
    notes = []
    if numbers is None:
        notes.append(
            "Without labels, the class that the first model predicts serves. This favors the first model, so no group "
            "is called changed."
        )
    else:
        truth = numbers[found.rows]
        accuracy = _mean(found.predicted == truth), _mean(predicted == truth)
    if measures is None:
        notes.append(
            f"Heads are not compared: the first model has {_counted(run_of.model)}, the second "
            f"{_counted(run_of.beside)}."
        )
    elif len(measures) < LEAST_TESTED:
        measures = None
        notes.append(f"Heads are not compared: this needs {LEAST_TESTED} tested images.")
    groups = group_changes(result.groups, tests, numbers is not None, run_of.seed)
    return Changes(groups, head_changes(measures, run_of.seed), accuracy, notes)


def _counted(model: nn.Module) -> str:
    """Numbers of layers and heads of a model in words."""
    counts = _head_counts(model)
    heads = " or ".join(str(count) for count in sorted(set(counts)))
    return f"{len(counts)} layers of {heads} heads"


def group_changes(groups: DataFrame, tests: Tests, labeled: bool, seed: int) -> DataFrame:
    """Differences of the effects of each tested group, with the columns of `CHANGE_COLUMNS`."""
    import pandas as pd

    rows = []
    for row in groups[groups["status"] == "tested"].to_dict("records"):
        group = row["group"]
        effects = tests.differences(group).mean(1)  # (t,)
        effects_beside = tests.beside.differences(group).mean(1)
        differences = effects - effects_beside
        low, high = bootstrap_interval(differences, seed)
        rows.append(
            {
                "group": group,
                "class": row["class"],
                "tested": len(differences),
                "effect": effects.mean(),
                "effect_beside": effects_beside.mean(),
                "difference": differences.mean(),
                "low": float(low),
                "high": float(high),
                "p": float(two_sided(differences, seed)),
            }
        )
    table = pd.DataFrame(rows, columns=list(CHANGE_COLUMNS))
    table["p"] = holm(table["p"].astype(float))
    size = table["difference"].astype(float).abs()
    table["changed"] = (table["p"] <= LEVEL) & (size >= LEAST_EFFECT) & labeled
    return _clearest_first(table, size)


def head_changes(measures: Tensor | None, seed: int) -> DataFrame:
    """Differences of the measures (n, 2, L, H, M) of each head, with the columns of `HEAD_COLUMNS`. Empty for None."""
    import pandas as pd

    if measures is None:
        return pd.DataFrame(columns=list(HEAD_COLUMNS))
    values = measures.double().numpy()
    differences = values[:, 0] - values[:, 1]  # (n, L, H, M)
    mean, mean_beside = values.mean(0)
    low, high = bootstrap_interval(differences, seed)
    t, p = paired_t(differences)
    layer, head, measure = np.indices(mean.shape)
    table = pd.DataFrame(
        {
            "layer": layer.ravel(),
            "head": head.ravel(),
            "measure": np.array(list(HEAD_MEASURES))[measure.ravel()],
            "mean": mean.ravel(),
            "mean_beside": mean_beside.ravel(),
            "difference": differences.mean(0).ravel(),
            "low": low.ravel(),
            "high": high.ravel(),
            "t": t.ravel(),
            "p": holm(p.ravel()),
        }
    )
    larger = table[["mean", "mean_beside"]].abs().max(axis=1)
    is_large = table["difference"].abs() >= LEAST_CHANGE * larger
    table["changed"] = (table["p"] <= LEVEL) & is_large
    return _clearest_first(table, table["t"].abs())


def _clearest_first(table: DataFrame, size: object) -> DataFrame:
    """The table with changed rows first, then by falling size, a Series."""
    falling = -np.asarray(size, dtype=np.float64)
    unchanged = ~table["changed"].astype(bool)
    order = np.lexsort([falling, unchanged])
    return table.iloc[order].reset_index(drop=True)


def _chance(truth: Tensor) -> dict[int, float]:
    """Share of each class among the tested images."""
    classes, counts = truth.unique(return_counts=True)
    shares = counts / len(truth)
    return dict(zip(classes.tolist(), shares.tolist(), strict=True))


def _judge(table: DataFrame, labeled: bool, chance: dict[int, float]) -> DataFrame:
    """The table with adjusted p-values, used groups, reasons and ranks of suspects."""
    tested = table["status"] == "tested"
    table["p"] = table["p"].astype(float)
    table.loc[tested, "p"] = holm(table.loc[tested, "p"])
    large = table["effect"] >= LEAST_EFFECT
    sure = (table["ways"].fillna(0) >= 2) & (table["p"] <= LEVEL)
    table["used"] = tested & sure & large & labeled
    table["ways"] = table["ways"].astype("Int64")
    reasons = []
    for _, row in table.iterrows():
        reasons.append(", ".join(_reasons(row, chance)) if row["used"] else "")
    table["reasons"] = reasons
    table["suspect"] = 0
    suspects = table[table["reasons"] != ""].sort_values("effect", ascending=False)
    table.loc[suspects.index, "suspect"] = np.arange(1, len(suspects) + 1)
    return table


def _reasons(row: object, chance: dict[int, float]) -> list[str]:
    """Reasons to look at a used group."""
    reasons = []
    if row["at_place"] >= FIXED:
        reasons.append("fixed place")
    if row["at_border"] >= AT_BORDER:
        reasons.append("border")
    if row["class_share"] <= FEW and row["effect"] >= STRONG:
        reasons.append("few images")
    if row["accuracy_covered"] < chance.get(row["class"], 0):
        reasons.append("below chance without it")
    return reasons


def _notes(reader: _Batches | _Sources, groups: Groups, numbers: Tensor | None) -> list[str]:
    """Sentences for the reader."""
    notes = []
    if numbers is None:
        notes.append(
            "Without labels a fall of the predicted class shows that a group moves the output. It does not show "
            "that the group is used to be right, so no group is called used or suspect."
        )
    if reader.errors:
        first = next(iter(reader.errors.values()))
        notes.append(
            f"{len(reader.errors):,} of {reader.count:,} images are left out. The first: {first}"
        )
    if groups.count == 0:
        notes.append(
            f"No class was predicted for {LEAST_TESTED} images of the first half, so there are no groups."
        )
    return notes


def _images_table(
    names: list[str], evidence: Evidence, found: Found, numbers: Tensor | None
) -> DataFrame:
    """One row for each image that was read."""
    import pandas as pd

    explored = pd.DataFrame(
        {
            "image": evidence.read.numpy(),
            "half": "explored",
            "predicted": evidence.predicted.numpy(),
        }
    )
    truth = found.predicted if numbers is None else numbers[found.rows]
    of_label = found.probabilities.gather(1, truth[:, None])[:, 0]
    tested = pd.DataFrame(
        {
            "image": found.rows.numpy(),
            "half": "tested",
            "predicted": found.predicted.numpy(),
            "probability": of_label.numpy(),
        }
    )
    table = pd.concat([explored, tested]).sort_values("image", ignore_index=True)
    table.insert(1, "name", [names[row] for row in table["image"]])
    if numbers is not None:
        table.insert(3, "label", numbers[table["image"].tolist()].numpy())
    return table
