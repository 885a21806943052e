"""Numbers and figures of a model and of images, written to a folder by `vitlens inspect` and `explain`.

* `inspect`: the paper's inspection (section 4.5, Fig. 6 and 7). `write_inspection`, and `write_beside` for two models.
* `heads`: contributions of every head and MLP to the logit of the predicted class. `write_heads`.
* `explain`: maps of several methods for each image. `score`: their insertion and deletion. `write_explanations`.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from vitlens import attention, files, filters, models, positions
from vitlens.formatting import number, with_minus
from vitlens.images import ImageError, InFolder, ModelInput, Readable, Remarks, named_sources
from vitlens.models import restore, run, top_classes
from vitlens.models.classes import predicted_classes, prediction_beside
from vitlens.names import require_known, unknown_name
from vitlens.processes import World
from vitlens.recorder import supported
from vitlens.recorder.forward import require_finite
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.precision import to_float64
from vitlens.recorder.record import capture
from vitlens.recorder.supported import UnsupportedModelError, unwrap
from vitlens.texts import encode, file_name, shown, valid

__all__ = [
    "Explanation",
    "HeadTable",
    "Inspection",
    "Picture",
    "explain",
    "heads",
    "inspect",
    "prepared",
    "score",
    "write_beside",
    "write_explanations",
    "write_heads",
    "write_inspection",
]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

if TYPE_CHECKING:
    from pandas import DataFrame

    from vitlens.attribution.target import Similarity, Target
    from vitlens.stream import Contributions

SHARP = 200
"""Dots per inch of a figure in a file: twice the pixels of its display."""
SHOWN = 12  # images in rollout.png and heads.png
STEPS = 14  # of insertion and deletion, as in `score`
ORDERS = 8  # random orders, as in `score`
MEASURES = "filter_variance", "position_rank_correlation", "nearest_head", "rollout_contrast"


INSPECTION_KEYS = {
    *("model", "grid", "layers", "heads", "images_in_mean_distance", "mean_distance"),
    *("uniform_distance", "explained_variance", *MEASURES, "nearest_head_at", "images", "notes"),
}
"""Keys of `Inspection.to_dict`, by which a summary.json is known as one of vitlens."""
PREDICTION_COLUMNS = "target_score", "predicted", "predicted_score"
COLUMNS = {
    "heads.csv": ["image", "class", "logit", "part", "added"],
    "scores.csv": [
        *("image", "target", *PREDICTION_COLUMNS, "against", "method"),
        *("deletion", "insertion", "difference", "rank"),
        *("random_orders", "random_deletion_mean", "random_deletion_std"),
        *("random_insertion_mean", "random_insertion_std", "random_difference_mean"),
        *("random_difference_std", "difference_z_score", "steps", "quantity", "baseline"),
    ],
}
"""Columns of the tables, by which they are known as those of vitlens."""

EARLIER_SCORES = [name for name in COLUMNS["scores.csv"] if name not in PREDICTION_COLUMNS]
"""Columns of a scores.csv that an earlier version wrote."""

PAPER_FIGURES = {
    "filters": "Fig. 7 left",
    "positions": "Fig. 7 center",
    "distance": "Fig. 7 right",
    "rollout": "Fig. 6",
}
"""Figures of the paper, by the names of `Inspection.sentences`."""
FIGURES = "inspection.png", "distance.png", "filters.png", "positions.png", "rollout.png"
NUMBERS = {"beside.png": "beside.json", "heads.png": "heads.csv"}
"""Files with the numbers of other figures."""

Images = object
"""Argument of `vitlens.images.named_sources`: sources of `load_image` by name, (name, source) pairs, paths or a
folder. A source may be a function that returns one, which is called when the image is read."""
Note = Callable[[str], None] | None


def prepared(
    model: nn.Module, images: Images, on_error: Note = None, on_note: Note = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, (1, C, H, W)) of each image, on the model's device and in its dtype.

    on_error: called with a message for an unusable image, which is skipped. By default its ImageError is raised, except
    for images of a folder, which are left out and counted in a warning.
    on_note: as in `models.preprocess`.

    >>> [(name, x.shape) for name, x in vitlens.report.prepared(model, [("chelsea", cat)])]
    [('chelsea', torch.Size([1, 3, 224, 224]))]
    """
    readable = Readable(on_error)
    count = 0
    for name, source, image in _inputs(model, _sources(images, on_note), on_note):
        if isinstance(image, ImageError):
            readable.leave_out(source, image)
        else:
            count += 1
            yield name, image
    readable.total(count)


def _sources(images: Images, on_note: Note) -> Iterator[tuple[str, object]]:
    """Yield (name, source) of each image. Raises ValueError for a batch, whose images have no names."""
    if isinstance(images, Tensor | np.ndarray) and images.ndim == 4:
        raise ValueError(
            "Expected images by their names, such as {'cat': 'cat.jpg'} or [('cat', 'cat.jpg')], or their paths, got "
            f"a batch of shape {tuple(images.shape)}."
        )
    yield from named_sources(images, on_note)


def _inputs(
    model: nn.Module, sources: Iterable[tuple[str, object]], on_note: Note
) -> Iterator[tuple[str, object, Tensor | ImageError]]:
    """Yield (name, source, input) of each image, with an ImageError in place of the input of an unusable image."""
    like = next(model.parameters())
    size = models.built_size(model)
    for name, source in sources:
        if callable(source):
            source = source()
        try:
            image = models.preprocess(model, source, size=size, on_note=on_note)
        except ImageError as error:
            message = str(error) if name in str(error) else f"{name}: {error}"
            unusable = ImageError(message)
            unusable.__cause__ = error
            yield name, source, unusable
        else:
            yield name, source, image.to(like)


@dataclass(frozen=True)
class Picture:
    """An image of an inspection.

    pixels: the model's input, (H, W, 3) uint8. top5: the highest outputs as (class, score). rollout: (rows, cols), or
    None. kind: meaning of the outputs (`models.output_kind`). caption: the highest class and its score, the value of a
    single output, or the image's name without classes.

    >>> vitlens.report.inspect(model, [("chelsea", cat)]).pictures[0].caption
    'Egyptian cat 44%'
    """

    name: str
    pixels: np.ndarray
    top5: list[tuple[str, float]]
    rollout: Tensor | None
    kind: str = "classes"
    caption: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "caption", _caption(self))


def _caption(picture: Picture) -> str:
    if not picture.top5:
        return shown(picture.name)
    label, score = picture.top5[0]
    label = shown(label)
    if picture.kind != "value":
        return f"{label.split(',')[0]} {score:.0%}"
    if len(picture.top5) == 1:
        return number(score)
    return f"{label.split(',')[0]} {number(score)}"


@dataclass(frozen=True)
class Inspection:
    """The numbers of an inspection.

    mean_distance: (L, H) in input pixels, the mean over `images` images. filters: (k, p, q, C) or None.
    explained_variance: (k,) or None. similarity: (rows, cols, rows, cols) or None. lacks: reason for each missing one
    of "filters", "positions" and "rollout". sentences: by figure, a sentence with its number, or the reason why it is
    missing.

    >>> vitlens.report.inspect(model, [("chelsea", cat)]).sentences["filters"]
    '28 components: 47.3% of variance'
    """

    model: str
    grid: TokenGrid
    mean_distance: Tensor
    images: int
    pictures: list[Picture]
    filters: Tensor | None
    explained_variance: Tensor | None
    similarity: Tensor | None
    notes: list[str]
    lacks: dict[str, str]
    sentences: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sentences", self._sentences())

    @functools.cached_property
    def measures(self) -> dict[str, float | list[int] | None]:
        """A number for each figure, or None for a missing figure or a single patch.

        filter_variance: share of the filters' variance in their components. position_rank_correlation: result of
        `positions.rank_correlation`. nearest_head: the smallest mean distance of a head, over that of uniform
        attention. nearest_head_at: its [layer, head]. rollout_contrast: mean of `attention.contrast` over the images.
        """
        variance = rank = nearest = contrast = None
        if self.filters is not None:
            variance = self.explained_variance.sum().item()
        if self.similarity is not None:
            correlation = positions.rank_correlation(self.similarity)
            rank = None if math.isnan(correlation) else correlation
        uniform = self.grid.uniform_distance()
        if uniform:
            nearest = self.mean_distance.min().item() / uniform
        rollouts = [p.rollout for p in self.pictures if p.rollout is not None]
        if rollouts:
            contrast = attention.contrast(torch.stack(rollouts)).mean().item()
        heads = self.mean_distance.shape[1]
        return {
            "filter_variance": variance,
            "position_rank_correlation": rank,
            "nearest_head": nearest,
            "nearest_head_at": list(divmod(self.mean_distance.argmin().item(), heads)),
            "rollout_contrast": contrast,
        }

    def _sentences(self) -> dict[str, str]:
        variance, rank, near, contrast = (self.measures[name] for name in MEASURES)
        layer, head = self.measures["nearest_head_at"]
        words = dict(self.lacks)
        if variance is not None:
            words["filters"] = f"{len(self.filters)} components: {variance:.1%} of variance"
        if self.similarity is not None:
            correlation = "too few positions" if rank is None else with_minus(f"{rank:.2f}")
            words["positions"] = f"rank correlation with distance: {correlation}"
        words["distance"] = "a single patch"
        if near is not None:
            place = f"layer {layer}, head {head}"
            words["distance"] = f"nearest head: {near:.2f} of uniform ({place})"
        if contrast is not None:
            share = f"the brightest tenth of an image holds {contrast / 10:.1%}"
            words["rollout"] = f"contrast {contrast:.2f}: {share}"
        order = "filters", "positions", "distance", "rollout"
        return {name: words[name] for name in order if name in words}

    def to_dict(self) -> dict:
        """All numbers as plain Python objects, ready for JSON."""
        layers, heads = self.mean_distance.shape
        images = []
        for p in self.pictures:
            unit = "value" if p.kind == "value" else "probability"
            top5 = [{"class": label, unit: score} for label, score in p.top5]
            images.append({"image": p.name, "top5": top5, "rollout": _to_list(p.rollout)})
        fields = "rows", "cols", "patch", "prefix", "image", "cut", "padded"
        return {
            "model": self.model,
            "grid": {name: getattr(self.grid, name) for name in fields},
            "layers": layers,
            "heads": heads,
            "images_in_mean_distance": self.images,
            "mean_distance": self.mean_distance.tolist(),
            "uniform_distance": self.grid.uniform_distance(),
            "explained_variance": _to_list(self.explained_variance),
            **self.measures,
            "images": images,
            "notes": [*self.notes, *self.lacks.values()],
        }


def _to_list(values: Tensor | None) -> list | None:
    return None if values is None else values.tolist()


def inspect(
    model: nn.Module,
    images: Images,
    data: Images = (),
    *,
    batch_size: int = 8,
    on_error: Note = None,
    on_rows: Callable[[DataFrame], None] | None = None,
    on_batch: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> Inspection:
    """The numbers of all inspection figures: filters, position embeddings, mean attention distance and rollout.

    images, on_error: as in `prepared`. data: more images, for the mean distance only. on_rows: called after each batch
    with `Summary.to_pandas(by="image")`, the statistics of its images by layer and head, such as `HeadTable.add`.
    on_batch: called after each batch of `data` with the number of images that were read, and of those left out. world:
    the result of `vitlens.train.join` if several processes share the images. Each returns the whole inspection, and
    calls the functions for all images.

    Raises ImageError if no image can be read, UnsupportedModelError for models whose attention cannot be shown, and
    ValueError for outputs that are not finite.

    >>> vitlens.report.inspect(model, [("chelsea", cat)]).measures["nearest_head_at"]
    [2, 0]
    """
    model = unwrap(model)
    world = world or World()
    notes = []
    if supported.has_gate(supported.attention_modules(model)):
        notes.append("Attention outputs pass a learned gate, which the rollout ignores.")
    pictures = []
    total = 0  # sum of the distances of all images
    count = 0
    batch = None  # the last one with an image
    remarks = Remarks(notes.append)
    measure = _BatchMeasure(model, by_image=on_rows is not None)
    for is_shown, source in ((True, images), (False, data)):
        readable = Readable(on_error)
        before = count
        sources = _sources(source, remarks)
        batches = world.share(_in_batches(sources, batch_size))
        measured = (measure(pairs, is_shown) for pairs in batches)
        for part in world.in_order(measured):
            for note in part.notes:
                remarks(note)
            for file, error in part.left_out:
                readable.leave_out(file, error)
            if on_batch is not None and not is_shown:
                on_batch(len(part.names), len(part.left_out))
            if not part.names:
                continue
            batch = part
            if on_rows is not None:
                on_rows(part.rows)
            total = total + part.distances
            count += len(part.names)
            pictures += part.pictures(models.output_kind(model))
        readable.total(count - before)
    if batch is None:
        raise ImageError("None of the images could be read, so there is nothing to inspect.")
    grid = batch.grid
    remarks.total(count)
    rollout_count = sum(picture.rollout is not None for picture in pictures)
    if rollout_count > SHOWN:
        notes.append(f"The rollout figure shows the first {SHOWN} images.")
    if models.class_count(model) == 0:
        notes.append("The model has no classifier, so there are no class names.")
    elif not batch.has_classes:
        notes.append("The model classifies every token, so the images have no classes.")
    lacks = {}
    if grid.readout is None:
        lacks["rollout"] = "The head reads no weighted sum of the tokens, so it has no rollout."
    components = explained_variance = similarity = None
    try:
        components, explained_variance = filters.principal(model)
    except ValueError as error:
        lacks["filters"] = str(error)
    try:
        similarity = positions.similarity(model)
    except ValueError as error:
        lacks["positions"] = str(error)
    return Inspection(
        model=models.title(model),
        grid=grid,
        mean_distance=total / count,
        images=count,
        pictures=pictures,
        filters=components,
        explained_variance=explained_variance,
        similarity=similarity,
        notes=list(dict.fromkeys(notes)),
        lacks=lacks,
    )


def _in_batches(items: Iterator, size: int) -> Iterator[list]:
    """Yield lists of `size` items, the last of which may be shorter."""
    while batch := list(itertools.islice(items, size)):
        yield batch


@dataclass
class _BatchResult:
    """Results of a batch of an inspection, which travel between processes.

    names: of the images that were read, also in what follows. distances: (L, H) sum over them. rows: their statistics.
    pixels: (B, H, W, 3), classes and rollouts: of images that are shown. left_out: (file of a folder or None, error) of
    each unusable image.
    """

    names: list[str]
    left_out: list[tuple[InFolder | None, ImageError]]
    notes: list[str]
    grid: TokenGrid | None = None
    has_classes: bool = False
    distances: Tensor | None = None
    rows: DataFrame | None = None
    pixels: np.ndarray | None = None
    classes: list[list[tuple[str, float]]] | None = None
    rollouts: Tensor | None = None

    def pictures(self, kind: str) -> Iterator[Picture]:
        """Yield the `Picture` of each image that is shown."""
        if self.pixels is None:
            return
        images = ModelInput(self.pixels)
        for k, name in enumerate(self.names):
            top5 = [] if self.classes is None else self.classes[k]
            rollout = None if self.rollouts is None else self.rollouts[k]
            yield Picture(name, images[k], top5, rollout, kind)


class _BatchMeasure:
    """Function that measures the batches of an inspection. by_image: also the statistics of each image."""

    def __init__(self, model: nn.Module, by_image: bool):
        self.model = model
        self.by_image = by_image
        # Names of the statistics with one number per head, once they are known.
        self.by_head: tuple[str, ...] = ()

    def __call__(self, pairs: list[tuple[str, object]], is_shown: bool) -> _BatchResult:
        result = _BatchResult([], [], [])
        inputs = []
        for name, source, image in _inputs(self.model, pairs, result.notes.append):
            if isinstance(image, ImageError):
                result.left_out.append((source if isinstance(source, InFolder) else None, image))
            else:
                result.names.append(name)
                inputs.append(image)
        if inputs:
            self._measure(result, torch.cat(inputs), is_shown)
        return result

    def _measure(self, result: _BatchResult, batch: Tensor, is_shown: bool) -> None:
        """Run the model on a batch (B, C, H, W), and add what the result lacks."""
        with torch.inference_mode(), capture(self.model) as attn:
            logits = run(self.model, batch)
        require_finite(self.model, logits)
        has_rollout = is_shown and attn.grid.readout is not None
        wanted = ("mean_distance",)
        if self.by_image:
            wanted = self.by_head  # all in the first batch
        if has_rollout:
            wanted = ()
        summary = attention.summary(attn, *wanted)
        self.by_head = summary.by_head
        result.grid = _on_cpu(attn.grid)
        result.has_classes = models.class_count(self.model) != 0 and logits.dim() == 2
        result.distances = to_float64(summary.mean_distance).sum(0).cpu()
        if self.by_image:
            result.rows = summary.to_pandas(by="image", images=result.names)
        if is_shown:
            result.pixels = np.asarray(restore(self.model, batch))
        if is_shown and result.has_classes:
            result.classes = top_classes(self.model, logits)
        if has_rollout:
            result.rollouts = summary.rollout.cpu()


def _on_cpu(grid: TokenGrid) -> TokenGrid:
    return grid if grid.readout is None else replace(grid, readout=grid.readout.cpu())


class HeadTable:
    """A CSV file of statistics, with a row for each image, layer and head, which is on the disk after each batch.

    >>> table = vitlens.report.HeadTable("heads.csv", {"chelsea": "cat"})
    >>> inspection = vitlens.report.inspect(model, [("chelsea", cat)], on_rows=table.add)
    >>> open("heads.csv").readline().split(",")
    ['image', 'class', 'layer', 'head', 'mean_distance', 'entropy\\n']

    path: of a new file. classes: the class of each image by its name. Others have an empty class. The columns are
    image, class, layer, head, mean_distance in input pixels, entropy in nats, and then those of statistics that were
    registered. images: number of images in the file. Raises ValueError for a file that exists.
    """

    def __init__(self, path: str | os.PathLike, classes: Mapping[str, str] | None = None):
        self.path = Path(path)
        self.classes = classes or {}
        self.images = 0
        if self.path.is_file():
            raise ValueError(
                f"{files.shortened(path)} exists{self._held()}. Give another file, or remove it."
            )

    def _held(self) -> str:
        """Words about the images of which the file has rows, or ""."""
        header = files.read_header(self.path)
        if header[:4] != ["image", "class", "layer", "head"]:
            return ""
        with self.path.open(encoding="utf-8", newline="") as file:
            names = {row[0] for row in csv.reader(file) if row}
        return f" and holds the rows of {len(names) - 1:,} images"

    def add(self, rows: DataFrame) -> None:
        """Write the rows of some images (`Summary.to_pandas(by="image")`)."""
        content = rows.assign(image=[valid(name) for name in rows["image"]])
        classes = [valid(self.classes.get(name, "")) for name in rows["image"]]
        content.insert(1, "class", classes)
        text = content.to_csv(
            index=False, header=not self.images, float_format="%.6g", lineterminator="\n"
        )
        files.append(self.path, text)
        self.images += rows["image"].nunique()


def write_inspection(
    inspection: Inspection, out: str | os.PathLike, format: str = "png"
) -> list[Path]:
    """Write summary.json, inspection.png (all figures on one page) and single figures. Returns the paths.

    The single figures are distance.png, filters.png, positions.png and rollout.png. Those of an earlier inspection that
    the model lacks, or in another format, are removed. format: one of `vitlens.files.FORMATS`. Raises ValueError if a
    file of one of these names was not written by vitlens.

    >>> inspection = vitlens.report.inspect(model, [("cat", cat)])
    >>> [path.name for path in vitlens.report.write_inspection(inspection, Path("figures"))][:2]
    ['summary.json', 'inspection.png']
    """
    from vitlens import plot

    out = Path(out)
    uniform = inspection.grid.uniform_distance()
    distance = plot.attention_distance(
        inspection.mean_distance, uniform=uniform, title=inspection.model
    )
    contents = {
        "summary.json": inspection.to_dict(),
        "inspection": plot.inspected({inspection.model: inspection}),
        "distance": distance.figure,
    }
    if inspection.filters is not None:
        contents["filters"] = plot.filters(inspection.filters, inspection.explained_variance)
    if inspection.similarity is not None:
        contents["positions"] = plot.position_similarity(inspection.similarity)
    pictures = [picture for picture in inspection.pictures if picture.rollout is not None]
    pictures = pictures[:SHOWN]
    if pictures:
        contents["rollout"] = plot.rollouts(
            [picture.pixels for picture in pictures],
            [picture.rollout for picture in pictures],
            grid=inspection.grid,
            captions=[picture.caption for picture in pictures],
        )
    with _lock(out):
        for name in {"filters", "positions", "rollout"} - contents.keys():
            _remove_figures(out, name, files.FORMATS)
        return _write(out, contents, format)


def write_beside(
    inspections: Mapping[str, Inspection], out: str | os.PathLike, format: str = "png"
) -> list[Path]:
    """Write beside.json, the numbers of both inspections, and beside.png, their figures in two columns.

    inspections: by the heading of each column. format: as in `write_inspection`.

    Returns the paths.

    >>> inspection = vitlens.report.inspect(model, [("cat", cat)])
    >>> [path.name for path in vitlens.report.write_beside({"a": inspection, "b": inspection}, Path("figures"))]
    ['beside.json', 'beside.png']
    """
    from vitlens import plot

    numbers = {heading: inspection.to_dict() for heading, inspection in inspections.items()}
    return _write(out, {"beside.json": numbers, "beside": plot.inspected(inspections)}, format)


def is_ours(path: Path) -> bool:
    """True for a file with the name of one of a report, and its mark, keys or columns."""
    if path.suffix.removeprefix(".") in files.FORMATS:
        return files.is_figure(path) or _is_earlier_figure(path)
    if path.suffix == ".csv":
        header = files.read_header(path)
        return header == COLUMNS[path.name] or (
            path.name == "scores.csv" and header == EARLIER_SCORES
        )
    content = files.read_object(path)
    inspections = list(content.values()) if path.name == "beside.json" else [content]
    keys = [set(each) if isinstance(each, dict) else set() for each in inspections]
    return bool(keys) and all(each == INSPECTION_KEYS for each in keys)


def _is_earlier_figure(path: Path) -> bool:
    """True for a figure without a mark, as earlier versions wrote it, beside the numbers or the table of its report."""
    if path.suffix != ".png":
        return False
    numbers = "summary.json" if path.name in FIGURES else "scores.csv"
    numbers = NUMBERS.get(path.name, numbers)
    return files.is_figure(path, "Matplotlib", SHARP) and is_ours(path.with_name(numbers))


@contextmanager
def _lock(out: str | os.PathLike) -> Iterator[None]:
    """Make the folder of a report, and let no other process write one into it in this block."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with files.lock(out / "report", "--out"):
        yield


def check_folder(out: str | os.PathLike, names: Iterable[str]) -> None:
    """Raise ValueError if a file of one of these names is in a folder, but not of a report.

    Reports replace the files of earlier reports only, because their names are not chosen by the caller.

    >>> vitlens.report.check_folder(Path("figures"), ["summary.json"])
    """
    files.require_ours({Path(out) / name: is_ours for name in names})


def _remove_figures(out: Path, name: str, formats: Iterable[str]) -> None:
    """Remove the figures of a name, without suffix, that vitlens wrote in these formats."""
    for format in formats:
        files.remove_ours(out / f"{name}.{format}", is_ours)


def _write(out: str | os.PathLike, contents: Mapping[str, object], format: str) -> list[Path]:
    """Write numbers (.json), tables (.csv) and figures by their names, and return the paths.

    Names of figures are without the suffix. Those of an earlier run in another format are removed.
    """
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    from vitlens.plot.style import figure_file

    require_known(format, files.FORMATS, "format")
    out = Path(out)
    others = set(files.FORMATS) - {format}
    names = {}  # of files
    for name, content in contents.items():
        names[name] = f"{name}.{format}" if isinstance(content, Figure) else name
    check_folder(out, names.values())
    with _lock(out):
        for name, content in contents.items():
            if isinstance(content, dict):
                text = json.dumps(content, indent=1, allow_nan=False) + "\n"
                data = encode(text)
            elif not isinstance(content, Figure):
                text = content.to_csv(index=False, float_format="%.6g", lineterminator="\n")
                data = encode(text)
            else:
                data = figure_file(content, format, SHARP)
                plt.close(content)
            files.write(out / names[name], data)
            if isinstance(content, Figure):
                _remove_figures(out, name, others)
    return [out / name for name in names.values()]


def heads(
    model: nn.Module, images: Images, *, on_error: Note = None
) -> dict[str, tuple[str, Contributions]]:
    """The predicted class of each image by its name, and the `stream.contributions` to its logit.

    A name that is given again gets a number.

    images, on_error: as in `prepared`. Raises what `stream.contributions` raises.

    >>> vitlens.report.heads(model, [("chelsea", cat)])["chelsea"][0]
    'Egyptian cat'
    """
    from vitlens import stream

    added = {}
    for name, image in prepared(model, images, on_error):
        contributions = stream.contributions(model, image)
        logits = run(model, image).detach()
        (classes,) = top_classes(model, logits)
        label, _ = classes[0]
        added[_new_name(name, added)] = label, contributions
    return added


def _new_name(name: str, taken: Mapping[str, object]) -> str:
    """A name, with a number if it is taken."""
    if name not in taken:
        return name
    number = 2
    while f"{name} ({number})" in taken:
        number += 1
    return f"{name} ({number})"


def write_heads(
    added: dict[str, tuple[str, Contributions]], out: str | os.PathLike, format: str = "png"
) -> list[Path]:
    """Write heads.csv, a row for each image and part, and heads.png, the first images. Returns the paths.

    format: as in `write_inspection`.

    >>> added = vitlens.report.heads(model, [("cat", cat)])
    >>> [path.name for path in vitlens.report.write_heads(added, Path("figures"))]
    ['heads.csv', 'heads.png']
    """
    from pandas import DataFrame

    from vitlens import plot

    rows = []
    for name, (label, contributions) in added.items():
        logit = contributions.logits[0].item()
        values = contributions.parts[0].tolist()
        for part, value in zip(contributions.names, values, strict=True):
            rows.append((valid(name), valid(label), logit, part, value))
    table = DataFrame(rows, columns=["image", "class", "logit", "part", "added"])
    file_names = Counter(Path(name).name for name in added)
    maps = {}
    for name, (label, contributions) in list(added.items())[:SHOWN]:
        file = Path(name).name
        is_unique = file_names[file] == 1
        first_name = label.split(",")[0]
        title = f"{shown(file if is_unique else name)}: {shown(first_name)}"
        by_head = contributions.heads[0]
        by_mlp = contributions.mlps[0, :, None]
        maps[f"{title}\n{_sums_in_words(contributions)}"] = torch.cat([by_head, by_mlp], 1)
    return _write(out, {"heads.csv": table, "heads": plot.contributions(maps)}, format)


def _sums_in_words(added: Contributions) -> str:
    """The logit of one image, and the sums that it consists of, in two lines."""
    logit = added.logits.item()
    heads = added.heads.sum().item()
    mlps = (added.mlps.sum() + added.pool.sum()).item()
    embedding = added.embedding.item()
    biases = added.biases.item()
    return with_minus(
        f"logit {logit:.1f}: heads {heads:+.1f}, MLPs {mlps:+.1f},\n"
        f"embedding {embedding:+.1f}, biases {biases:+.1f}"
    )


@dataclass(frozen=True)
class Explanation:
    """The maps of an image for its class, or for another score.

    >>> (explanation,) = vitlens.report.explain(model, [("cat", cat)], names=["relevance"])
    >>> explanation.target, explanation.maps["relevance"].shape
    ('Egyptian cat', torch.Size([14, 14]))

    pixels: (H, W, 3) uint8 and input: (1, C, H, W), the model's input. question: the target of the maps. target, value:
    the class and its score (`models.scores`), or a score of the features by name and value. maps: (rows, cols) by
    method. title: the question in words. against: the contrasted class, or "". scores: a row for each map, as from
    `score`, or None. sentence: the question, and the model's prediction unless it is the target alone. predicted:
    (class, score) of the predicted classes, the highest first. Independent labels are predicted above 0.5. Empty for
    values and for scores of the features.
    """

    name: str
    pixels: np.ndarray
    input: Tensor
    grid: TokenGrid
    question: Target
    target: str
    value: float
    maps: dict[str, Tensor]
    title: str
    against: str = ""
    scores: DataFrame | None = None
    sentence: str = ""
    predicted: tuple[tuple[str, float], ...] = ()


def explain(
    model: nn.Module,
    images: Images,
    target: int | str | Similarity | None = None,
    *,
    against: int | str | Similarity | None = None,
    names: Sequence[str] | None = None,
    on_error: Note = None,
    on_note: Note = None,
    on_part: Note = None,
) -> Iterator[Explanation]:
    """Yield an `Explanation` of each image: the maps of several methods for a class or another score.

    The quick methods share one forward and one backward. Balanced gradients take another forward and backward.

    >>> (explanation,) = vitlens.report.explain(model, [("cat", cat)], "tabby", names=["legrad"])
    >>> list(explanation.maps)
    ['legrad']

    images, on_note: as in `prepared`. target: a class number or name, None for the predicted class, or a function such
    as `vitlens.attribution.like(image)`. against: another class or function, to explain the difference. names: methods,
    by default the quick ones that the model permits. on_error: as in `prepared`, also for an image whose predicted
    class is `against`, or that is compared with itself. on_part: called with a description after each method.

    Raises the errors of `vitlens.attribution`, for unknown classes before the model runs, and ImageError if no image is
    left.
    """
    from vitlens.attribution import explained, methods
    from vitlens.attribution.registry import SHARED
    from vitlens.attribution.target import NothingToExplain, Similarity, resolve_target

    model = unwrap(model)
    chosen = methods(names)
    supported.attention_modules(model)  # raises for a module that contains a Vision Transformer
    if isinstance(target, Similarity):  # the compared image or text is the same for all images
        target = target.bind(model)
        against = against.bind(model) if against else None
    if not callable(target) and models.class_count(model):
        # raises for unknown classes, before the model runs
        zeros = torch.zeros(1, models.class_count(model))
        resolve_target(model, zeros, target, None if target is None else against)
        resolve_target(model, zeros, against, None)
    needs = {method.needs for method in chosen.values()}
    needs &= {*SHARED}
    count = 0
    for name, x in prepared(model, images, on_error, on_note):
        try:
            forward = explained(model, x, target, against=against, needs=needs)
        except NothingToExplain as error:
            if on_error is None or not (target is None or isinstance(target, Similarity)):
                raise
            on_error(f"{name} is left out. {error}")
            continue
        bound = forward.target
        grid = forward.attn.grid
        maps = {}
        for label, method in list(chosen.items()):
            if names is None and grid.readout is None and "query" in method.options:
                continue  # the map starts from the read-out
            try:
                values = method(forward) if method.needs in SHARED else method(model, x, bound)
                maps[label] = values[0].float().cpu()
            except UnsupportedModelError as error:
                if names is not None:
                    raise
                del chosen[label]
                if on_note is not None:
                    on_note(f"{label} is left out. {error}")
            if on_part is not None:
                on_part(f"{name}, {label}")
        question = _question(model, bound, forward.output)
        del forward  # free the capture before the scores are computed
        count += 1
        yield Explanation(
            name=name,
            pixels=restore(model, x)[0],
            input=x,
            grid=grid,
            question=bound,
            maps=maps,
            **question,
        )
    if not count:
        raise ImageError("No image is left to explain. Give another image or target.")


def score(
    model: nn.Module,
    explanations: Iterable[Explanation],
    *,
    orders: int = ORDERS,
    steps: int = STEPS,
    baseline: str = "mean",
    score: str | None = None,
    on_forwards: Callable[[int, int], None] | None = None,
) -> Iterator[Explanation]:
    """Yield each explanation with the insertion and deletion scores of its maps.

    orders: number of random orders. With fewer than 8 their standard deviation is left out. steps: largest number of
    steps of a curve. baseline, score: as in `faithfulness.curves`. on_forwards: called after each batch with the number
    of forwards done and their total for this image. Columns of the scores: those of `faithfulness.rank_maps`, baseline,
    and quantity, the y-axis of the curves.

    On Ctrl-C it yields the explanation with the maps that are completely scored, then raises KeyboardInterrupt.

    >>> explanations = vitlens.report.explain(model, [("cat", cat)], names=["legrad", "rollout"])
    >>> (explanation,) = vitlens.report.score(model, explanations, orders=0, steps=4)
    >>> explanation.scores["rank"].tolist()
    [2, 1]
    """
    from vitlens import faithfulness

    for explanation in explanations:
        grid = explanation.grid
        curves = None  # the latest
        interrupt = None
        maps = {name: values[None] for name, values in explanation.maps.items()}
        try:
            for done, total, known in faithfulness.partial_curves(
                model,
                explanation.input,
                faithfulness.add_random_maps(maps, grid, orders),
                explanation.question,
                step=faithfulness.usual_step(grid.patches, steps),
                baseline=baseline,
                score=score,
                grid=grid,
                internal_batch_size=8,  # small, for frequent progress
            ):
                curves = known
                if on_forwards is not None:
                    on_forwards(done, total)
        except KeyboardInterrupt as error:
            interrupt = error
        if curves is not None:
            table = faithfulness.rank_maps(curves, list(maps)).drop(columns="image")
            if table["random_orders"][0] < ORDERS:
                spreads = [name for name in table if name.endswith(("_std", "_z_score"))]
                table[spreads] = math.nan
            is_unknown = table["difference"].isna()
            if interrupt and is_unknown.any():
                table = table[~is_unknown].assign(rank=math.nan)
            measures = explanation.question.measures
            measure = score or next(iter(measures))
            quantity = measures[measure].removeprefix("the ")
            if len(table):
                table = table.assign(quantity=quantity, baseline=baseline)
                yield replace(explanation, scores=table)
        if interrupt:
            raise interrupt


def _question(model: nn.Module, target: Target, output: Tensor) -> dict:
    """The fields of an `Explanation` about its target and the prediction."""
    scores = None
    if not target.of_features:
        scores = models.scores(model, output)[0].cpu()
    about = _target_in_words(model, target, output, scores)
    predicted = []
    if scores is not None:
        kind = models.output_kind(model)
        names = _output_names(model, len(scores))
        numbers = predicted_classes(kind, scores)
        predicted = [(names[k], scores[k].item()) for k in numbers]
        number = None if target.numbers is None else target.numbers.item()

        def words(k: int) -> str:
            return f"“{shown(names[k])}” ({_percent(scores[k].item())})"

        about["sentence"] += " " + prediction_beside(kind, scores, number, words)
    sentence = about.pop("sentence").strip()
    title = f"{sentence} {models.title(model)}"
    return {**about, "sentence": sentence, "title": title, "predicted": tuple(predicted)}


def _percent(share: float) -> str:
    """A share in percent, such as "12.3%", or "< 0.1%" for smaller ones."""
    return "< 0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def _output_names(model: nn.Module, count: int) -> list[str]:
    """Names of the outputs of a model, or their numbers."""
    return models.label_names(model, count) or [str(k) for k in range(count)]


def _target_in_words(
    model: nn.Module, target: Target, output: Tensor, scores: Tensor | None
) -> dict:
    """target, against, value and sentence of an `Explanation`."""
    if target.numbers is not None:
        return _class_in_words(model, target, scores)
    name, value = target.label(0), target.score(output)[0].item()
    sentence = f"Why is {name} {number(value)}?"
    than = getattr(target.function, "than", "")
    if than:
        more = "more" if value > 0 else "less"
        difference = number(abs(value))
        sentence = f"Why is this image {more} similar to {target.function.to} than to {than}? "
        sentence += f"The cosines differ by {difference}."
    return {"target": name, "value": value, "sentence": sentence}


def _class_in_words(model: nn.Module, target: Target, scores: Tensor) -> dict:
    """target, against, value and sentence of an `Explanation` of a class."""
    names = _output_names(model, len(scores))
    k = target.numbers.item()
    name = names[k]
    other = "" if target.against is None else names[target.against.item()]
    value = scores[k].item()
    is_value = models.output_kind(model) == "value"
    words = number(value) if is_value else _percent(value)
    if not is_value or len(scores) > 1:
        words = f"“{shown(name)}” ({words})"
    rather = f" rather than “{shown(other)}”" if other else ""
    return {"target": name, "against": other, "value": value, "sentence": f"Why {words}{rather}?"}


def write_explanations(
    explanations: Iterable[Explanation], out: str | os.PathLike, format: str = "png"
) -> Iterator[Path]:
    """Write a figure for each image, and all scores to scores.csv, after each explanation. Yields the paths.

    The path of a figure follows when the figure and its scores are on the disk, and that of scores.csv comes last.
    Without scores, a scores.csv of an earlier run is removed, and so are figures of the same names in another format.
    format: as in `write_inspection`. Raises ValueError as `write_inspection` does.

    >>> explanations = vitlens.report.explain(model, [("cat", cat)], names=["legrad"])
    >>> [path.name for path in vitlens.report.write_explanations(explanations, Path("out"))]
    ['00-cat.png']
    """
    from pandas import DataFrame, concat

    from vitlens import plot

    out = Path(out)
    tables = []
    for k, explanation in enumerate(explanations):
        captions = {}
        note = ""
        contents = {}
        scores = explanation.scores
        if scores is not None:
            about = {
                "image": valid(explanation.name),
                "target": valid(explanation.target),
                "target_score": explanation.value,
                "predicted": valid("; ".join(name for name, _ in explanation.predicted)),
                "predicted_score": _highest(explanation.predicted),
                "against": valid(explanation.against),
            }
            tables.append(DataFrame(about, scores.index).join(scores))
            contents["scores.csv"] = concat(tables)
            captions, note = _scores_in_words(scores)
        elif not tables:
            files.remove_ours(out / "scores.csv", is_ours)
        path = Path(explanation.name)
        figure_name = file_name(path.stem, before=f"{k:02d}-", suffix=f".{format}")
        figure_name = figure_name.removesuffix(f".{format}")
        figure = plot.attributions(
            explanation.pixels,
            explanation.maps,
            grid=explanation.grid,
            note=note,
            title=f"{shown(path.name)}: {explanation.title}",
            captions=captions,
            compared=getattr(explanation.question.function, "images", ()),
        )
        yield _write(out, {figure_name: figure, **contents}, format)[0]
    if tables:
        yield out / "scores.csv"


def _highest(predicted: Sequence[tuple[str, float]]) -> float:
    """The score of the first predicted class, or NaN."""
    return predicted[0][1] if predicted else math.nan


def _scores_in_words(scores: DataFrame) -> tuple[dict[str, str], str]:
    """The caption of each map, by its method, and a note about the scores."""
    from vitlens.faithfulness import BASELINES

    has_sigmas = scores["random_difference_std"].notna().any()
    has_ranks = scores["rank"].notna().all()
    captions = {}
    for row in scores.to_dict("records"):
        place = []
        if has_ranks:
            place.append(f"rank {row['rank']:.0f}")
        if has_sigmas:
            z_score = row["difference_z_score"]
            # not finite if all orders have one score, as with a single class
            is_finite = math.isfinite(z_score)
            place.append(f"{z_score:+.1f} σ from random" if is_finite else "as all random orders")
        caption = f"deletion {row['deletion']:.3f}, insertion {row['insertion']:.3f}"
        if place:
            caption = f"{', '.join(place)}\n{caption}"
        captions[row["method"]] = with_minus(caption)
    first = scores.iloc[0]
    note = (
        f"Areas under the {first.quantity} in {first.steps} steps,\nwhile patches are covered (deletion, low is "
        f"good) or shown (insertion, high is good). Covered {BASELINES[first.baseline]}."
    )
    if first.random_orders:
        deletion = f"deletion {first.random_deletion_mean:.3f}"
        insertion = f"insertion {first.random_insertion_mean:.3f}"
        if has_sigmas:
            deletion += f" ± {first.random_deletion_std:.3f}"
            insertion += f" ± {first.random_insertion_std:.3f}"
        note += f"\nRandom orders ({first.random_orders}): {deletion}, {insertion}."
    if has_sigmas:
        note += " σ: standard deviations of insertion − deletion above their mean."
    return captions, with_minus(note)
