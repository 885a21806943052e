"""The paper's inspection of one model: all numbers first, then the four figures (section 4.5, Fig. 6 and 7)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitlens import attention, filters, positions
from vitlens.images import ImageError
from vitlens.models import architecture, class_count, restore, top_classes
from vitlens.recorder.families import attention_modules, gated, unwrap
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.recording import capture
from vitlens.recorder.running import float64
from vitlens.reports.pictures import prepared

SHOWN = 12  # pictures in rollout.png


@dataclass(frozen=True)
class Picture:
    """An image as the model saw it, (H, W, 3) uint8 pixels; its likeliest classes; its (rows, cols) rollout or None."""

    name: str
    pixels: np.ndarray
    top5: list[tuple[str, float]]
    rollout: Tensor | None


@dataclass(frozen=True)
class Inspection:
    """The numbers of an inspection. What a model does not have (filters, positions, a read-out) is None, with a note.

    mean_distance: (L, H) input pixels, the mean over `images` images. filters: (k, p, q, C); similarity: (rows, cols,
    rows, cols).
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

    def to_dict(self) -> dict:
        """All numbers as plain Python objects, ready for JSON."""
        grid = self.grid
        rank = math.nan if self.similarity is None else positions.rank_correlation(self.similarity)
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
            "position_rank_correlation": None if math.isnan(rank) else rank,
            "images": [
                {
                    "image": p.name,
                    "top5": [{"class": name, "probability": value} for name, value in p.top5],
                    "rollout": None if p.rollout is None else p.rollout.tolist(),
                }
                for p in self.pictures
            ],
            "notes": self.notes,
        }  # fmt: skip


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
                logits = model(batch)
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
    if grid.readout is None:
        notes.append("The head reads no weighted sum of the tokens, so there is no rollout from it.")
    found, variance = _or_note(lambda: filters.components(model), notes)
    similarity = _or_note(lambda: (positions.similarity(model),), notes)[0]
    name = architecture(model)
    return Inspection(name, grid, total / count, count, pictures, found, variance, similarity, notes)


def write(inspection: Inspection, out: Path) -> list[Path]:
    """Write summary.json, distance.png, and filters.png, positions.png and rollout.png of what the model has.

    Returns the paths.
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
            captions=[f"{p.top5[0][0].split(',')[0]} {p.top5[0][1]:.0%}" if p.top5 else p.name for p in shown],
        )
    written[0].write_text(numbers + "\n", encoding="utf-8")
    for name, figure in figures.items():
        written.append(out / f"{name}.png")
        figure.savefig(written[-1], dpi=100)
        plt.close(figure)
    return written


def _batches(pictures: Iterator[tuple[str, Tensor]], size: int) -> Iterator[tuple[list[str], Tensor]]:
    """Yield the names and the (B, C, H, W) images of up to `size` pictures at a time."""
    while batch := list(itertools.islice(pictures, size)):
        names, images = zip(*batch, strict=True)
        yield list(names), torch.cat(images)


def _or_note(make: Callable[[], tuple], notes: list[str]) -> tuple:
    """What `make` returns, or (None, None) and a note that says why there is nothing."""
    try:
        return make()
    except ValueError as error:
        notes.append(str(error))
        return None, None
