"""The paper's inspection of a model: all numbers first, then the four figures (section 4.5, Fig. 6 and 7).

A report of two models puts their figures and numbers beside each other.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitlens import attention, filters, positions
from vitlens.images import ImageError
from vitlens.models import architecture, class_count, restore, top_classes
from vitlens.recorder.forward import float64, run
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.record import capture
from vitlens.recorder.supported import attention_modules, gated, unwrap
from vitlens.reports.pictures import SHARP, prepared

SHOWN = 12  # pictures in rollout.png
MEASURES = "filter_variance", "position_rank_correlation", "nearest_head", "rollout_contrast"


@dataclass(frozen=True)
class Picture:
    """An image as the model saw it, (H, W, 3) uint8 pixels; its likeliest classes; its (rows, cols) rollout or None."""

    name: str
    pixels: np.ndarray
    top5: list[tuple[str, float]]
    rollout: Tensor | None

    @property
    def caption(self) -> str:
        """The likeliest class and its probability, or the name of a picture without classes."""
        return f"{self.top5[0][0].split(',')[0]} {self.top5[0][1]:.0%}" if self.top5 else self.name


@dataclass(frozen=True)
class Inspection:
    """The numbers of an inspection. What a model does not have (filters, positions, a read-out) is None.

    mean_distance: (L, H) input pixels, the mean over `images` images. filters: (k, p, q, C); similarity: (rows, cols,
    rows, cols). lacks: why there are no "filters", "positions" or "rollout".
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

    @functools.cached_property
    def measures(self) -> dict[str, float | list[int] | None]:
        """Each figure in one number; None for what the model does not have, and where there is nothing to compare.

        filter_variance: share of the filters' variance in their components (28, or as many as there are).
        position_rank_correlation: of position similarity with distance (`positions.rank_correlation`). nearest_head:
        the least mean distance of a head, over that of uniform attention; nearest_head_at: its [layer, head].
        rollout_contrast: `contrast`, the mean over the pictures.
        """
        rank = math.nan if self.similarity is None else positions.rank_correlation(self.similarity)
        uniform, heads = self.grid.uniform_distance(), self.mean_distance.shape[1]
        rollouts = [p.rollout for p in self.pictures if p.rollout is not None]
        return {
            "filter_variance": None if self.filters is None else self.explained_variance.sum().item(),
            "position_rank_correlation": None if math.isnan(rank) else rank,
            "nearest_head": self.mean_distance.min().item() / uniform if uniform else None,
            "nearest_head_at": list(divmod(self.mean_distance.argmin().item(), heads)),
            "rollout_contrast": contrast(torch.stack(rollouts)).mean().item() if rollouts else None,
        }

    @property
    def sentences(self) -> dict[str, str]:
        """What filters, positions, distance and rollout show in numbers, or why there are none, by these names."""
        found, words = self.measures, dict(self.lacks)
        variance, rank, near, value = (found[name] for name in MEASURES)
        where = "layer {}, head {}".format(*found["nearest_head_at"])
        if variance is not None:
            words["filters"] = f"{len(self.filters)} components: {variance:.1%} of variance"
        if self.similarity is not None:
            rank = "too few positions" if rank is None else f"{rank:.2f}".replace("-", "−")
            words["positions"] = f"rank correlation with distance: {rank}"
        words["distance"] = "a single patch" if near is None else f"nearest head: {near:.2f} of uniform ({where})"
        if value is not None:
            words["rollout"] = f"contrast {value:.2f}: the brightest tenth of a picture holds {value / 10:.1%}"
        return {name: words[name] for name in ("filters", "positions", "distance", "rollout")}

    def to_dict(self) -> dict:
        """All numbers as plain Python objects, ready for JSON."""
        grid = self.grid
        return {
            "model": self.model,
            "grid": {
                "rows": grid.rows, "cols": grid.cols, "patch": list(grid.patch), "prefix": grid.prefix,
                "image": list(grid.image), "cut": list(grid.cut), "padded": list(grid.padded),
            },
            "layers": self.mean_distance.shape[0],
            "heads": self.mean_distance.shape[1],
            "images_in_mean_distance": self.images,
            "mean_distance": self.mean_distance.tolist(),
            "uniform_distance": grid.uniform_distance(),
            "explained_variance": None if self.explained_variance is None else self.explained_variance.tolist(),
            **self.measures,
            "images": [
                {
                    "image": p.name,
                    "top5": [{"class": name, "probability": value} for name, value in p.top5],
                    "rollout": None if p.rollout is None else p.rollout.tolist(),
                }
                for p in self.pictures
            ],
            "notes": [*self.notes, *self.lacks.values()],
        }  # fmt: skip


def contrast(maps: Tensor) -> Tensor:
    """(…,) contrast of maps (…, rows, cols) of values ≥ 0, such as rollouts: from 1 (even) to 10 (all in one tenth).

    The share of a map that falls on the brightest tenth of the picture, over that tenth. With the P patches in falling
    order, r₁ ≥ r₂ ≥ …, and k = ⌊P/10⌋: C = 10 · (r₁ + … + r_k + (P/10 − k)·r_{k+1}) / (r₁ + … + r_P), ten times the
    Lorenz curve at one tenth. It is a share of area: splitting every patch into equal ones leaves it as it is, and so
    does the scale of the map, so grids of any size can be compared (a grid that is truly finer can have more). 1 also
    where a map is all zeros. The picture of a rollout does not tell its contrast, as `plot.mask` stretches even the
    flattest map from black to white. Raises ValueError for negative values, and those that are no numbers.
    """
    values = float64(maps).flatten(-2).sort(dim=-1, descending=True).values
    if not (values >= 0).all():
        raise ValueError("A contrast needs values of 0 or more, but some are less or no numbers. Clamp them first.")
    patches = values.shape[-1]
    top = (patches / 10 - torch.arange(patches, device=values.device)).clamp(0, 1).to(values)
    total = values.sum(-1)
    return torch.where(total > 0, 10 * (values @ top) / total, 1.0)


def inspect(
    model: nn.Module,
    images: Iterable[tuple[str, object]],
    dataset: Iterable[tuple[str, object]] = (),
    *,
    batch_size: int = 8,
    on_error: Callable[[str], None] | None = None,
) -> Inspection:
    """The numbers of all inspection figures: filters, position embeddings, mean attention distance and rollout.

    images, on_error: as in `reports.pictures.prepared`; each image gets its classes and its rollout. dataset: more
    images, for the mean distance only. Raises ImageError if no image can be read, UnsupportedModelError for models
    whose attention cannot be shown, and ValueError for outputs that are not finite.
    """
    model = unwrap(model)
    gate = gated(attention_modules(model))
    notes = ["Attention outputs pass a learned gate, which the rollout ignores."] if gate else []
    pictures, total, count, grid = [], 0, 0, None
    for shown, source in ((True, images), (False, dataset)):
        noted = notes.append if shown else None
        for names, batch in _batches(prepared(model, source, on_error, noted), batch_size):
            with torch.inference_mode(), capture(model) as attn:
                logits = run(model, batch)
            grid = attn.grid
            if not logits.isfinite().all():
                raise ValueError(
                    f"The model's outputs for {names[0]} are not finite, so its attention means nothing. Its weights "
                    "are damaged, or its precision is too low."
                )
            if shown and grid.readout is not None:
                summary = attention.summary(attn)
                distance, rollouts = summary.mean_distance, list(summary.rollout.cpu())
            else:
                distance, rollouts = attention.mean_distance(attn), [None] * len(names)
            total, count = total + float64(distance).sum(0).cpu(), count + len(names)
            if shown:
                classed = class_count(model) != 0 and logits.dim() == 2
                classes = top_classes(model, logits) if classed else [[]] * len(names)
                pictures += map(Picture, names, restore(model, batch), classes, rollouts)
    if grid is None:
        raise ImageError("None of the images could be read, so there is nothing to inspect.")
    if sum(picture.rollout is not None for picture in pictures) > SHOWN:
        notes.append(f"rollout.png shows the first {SHOWN} pictures.")
    if class_count(model) == 0:
        notes.append("The model has no classifier, so there are no class names.")
    elif logits.dim() != 2:
        notes.append("The model pools nothing and gives classes for every token, so the pictures have none.")
    lacks = {}
    if grid.readout is None:
        lacks["rollout"] = "The head reads no weighted sum of the tokens, so there is no rollout from it."
    found, variance = _or_why("filters", lambda: filters.components(model), lacks)
    similarity = _or_why("positions", lambda: (positions.similarity(model),), lacks)[0]
    name = architecture(model)
    return Inspection(name, grid, total / count, count, pictures, found, variance, similarity, notes, lacks)


def write(inspection: Inspection, out: Path) -> list[Path]:
    """Write summary.json, distance.png, and filters.png, positions.png and rollout.png of what the model has.

    Figures of these names that another model left in the folder are removed. Returns the paths.
    """
    import matplotlib.pyplot as plt

    from vitlens import plot

    out.mkdir(parents=True, exist_ok=True)
    written = [out / "summary.json"]
    numbers = json.dumps(inspection.to_dict(), indent=1, allow_nan=False)
    uniform = inspection.grid.uniform_distance()
    distance = plot.attention_distance(inspection.mean_distance, uniform=uniform, title=inspection.model)
    figures = {"distance": distance.figure}
    if inspection.filters is not None:
        figures["filters"] = plot.filters(inspection.filters, inspection.explained_variance)
    if inspection.similarity is not None:
        figures["positions"] = plot.position_similarity(inspection.similarity)
    shown = [p for p in inspection.pictures if p.rollout is not None][:SHOWN]
    if shown:
        figures["rollout"] = plot.rollouts(
            [p.pixels for p in shown],
            [p.rollout for p in shown],
            grid=inspection.grid,
            captions=[p.caption for p in shown],
        )
    written[0].write_text(numbers + "\n", encoding="utf-8")
    for name in {"filters", "positions", "rollout"} - figures.keys():
        (out / f"{name}.png").unlink(missing_ok=True)
    for name, figure in figures.items():
        written.append(out / f"{name}.png")
        figure.savefig(written[-1], dpi=SHARP)
        plt.close(figure)
    return written


def write_beside(found: Mapping[str, Inspection], out: Path) -> list[Path]:
    """Write beside.png, the figures of two inspections in two columns, and beside.json, the numbers of both.

    found: by the heading of each column. Returns the paths.
    """
    from vitlens import plot

    out.mkdir(parents=True, exist_ok=True)
    numbers = {heading: each.to_dict() for heading, each in found.items()}
    (out / "beside.json").write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    plot.inspected(found).savefig(out / "beside.png", dpi=SHARP)
    return [out / "beside.json", out / "beside.png"]


def _batches(pictures: Iterator[tuple[str, Tensor]], size: int) -> Iterator[tuple[list[str], Tensor]]:
    """Yield the names and the (B, C, H, W) images of up to `size` pictures at a time."""
    while batch := list(itertools.islice(pictures, size)):
        names, images = zip(*batch, strict=True)
        yield list(names), torch.cat(images)


def _or_why(name: str, make: Callable[[], tuple], lacks: dict[str, str]) -> tuple:
    """What `make` returns, or (None, None), and in `lacks` why there is nothing of this name."""
    try:
        return make()
    except ValueError as error:
        lacks[name] = str(error)
        return None, None
