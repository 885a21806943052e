"""Why a class: the maps of several methods for each picture, and how far each is to be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from pandas import DataFrame, Series, concat
from torch import Tensor, nn

from vitlens import attention, faithfulness
from vitlens.attribution import METHODS
from vitlens.capture import capture
from vitlens.grid import TokenGrid
from vitlens.images import ImageError
from vitlens.models import label_names
from vitlens.preprocessing import built_size, preprocess, restore
from vitlens.support import architecture, evaluating, unwrap
from vitlens.target import SameClass, asked

QUICK = ("relevance", "gradient_rollout", "legrad", "attention_gradient", "grad_cam", "rollout")
"""What is drawn unless told otherwise: methods of one forward and one backward pass, and plain rollout beside them."""

SCORES = {
    ("probability", False): "the probability of the class",
    ("probability", True): "the probability of the class among the two",
    ("logit", False): "the logit of the class",
    ("logit", True): "the logit of the class less that of the other",
}
"""What the areas are under, by the name of the score and whether the class is contrasted with another."""


@dataclass(frozen=True)
class Explanation:
    """One picture. pixels: (H, W, 3) uint8, as the model saw it. target, probability: the class and what the model
    gives it. against: the class that it is contrasted with, or "". maps: (rows, cols) by method. scores: what
    `faithfulness.table` says of them, and which score, baseline and step it was told."""

    name: str
    pixels: np.ndarray
    grid: TokenGrid
    target: str
    probability: float
    maps: dict[str, Tensor]
    scores: DataFrame
    against: str = ""


def methods(names: Sequence[str]) -> dict[str, Callable[..., Tensor]]:
    """Methods by name: those of `vitlens.attribution`, and "rollout", which knows no class. Raises ValueError for other
    names."""
    known = {"rollout": rollout, **METHODS}
    for name in names:
        if name not in known:
            raise ValueError(f"There is no method {name!r}; there are {', '.join(known)}.")
    return {name: known[name] for name in names}


def rollout(model: nn.Module, images: Tensor, target=None, *, against=None, names=None) -> Tensor:
    """(B, rows, cols) attention rollout, which is the same for every class (`vitlens.attention.rollout`)."""
    with torch.no_grad(), evaluating(model), capture(model) as attn:
        model(images)
    return attention.rollout(attn)


def explain(
    model: nn.Module,
    images: Iterable[tuple[str, object]],
    target: int | str | None = None,
    *,
    against: int | str | None = None,
    names: Sequence[str] = QUICK,
    baseline: str = "mean",
    step: int | None = None,
    score: str = "probability",
    on_error: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    **options,
) -> list[Explanation]:
    """Explain why a model gives a class to pictures, by several methods, each scored by insertion and deletion.

    images: (name, source) pairs, the source being anything `load_image` takes. target: a class number or name, or None
    for what is predicted. against: another class, to ask why the target rather than that one. names: of the methods.
    on_error: called with a sentence for a picture that cannot be read, or whose predicted class is `against`, which is
    left out; without it that error is raised. on_note: called with a sentence for a picture to which `load_image` has
    done something. baseline, step, score, options: those of `faithfulness.table` (orders,
    seed). Raises what `vitlens.attribution` raises, and ImageError if no picture is left.
    """
    chosen, found, model = methods(names), [], unwrap(model)
    known = label_names(model)
    for pair in images:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"images are pairs (name, picture), but {pair!r:.80} came, as in [('cat', 'cat.jpg')].")
        name, source = pair
        try:
            x = preprocess(model, source, size=built_size(model), on_note=on_note).to(next(model.parameters()))
        except ImageError as error:
            if on_error is None:
                raise
            on_error(str(error))
            continue
        with torch.no_grad(), evaluating(model), capture(model) as attn:
            logits = model(x)
        try:
            question = asked(model, logits, target, against)
        except SameClass as error:
            if on_error is None or target is not None:
                raise
            on_error(f"{name} is left out. {error}")
            continue
        number, other = (None if part is None else part.item() for part in (question.numbers, question.against))
        maps = {label: method(model, x, number, against=other) for label, method in chosen.items()}
        asking = {"score": score, "baseline": baseline, "step": step or faithfulness.usual_step(attn.grid.patches)}
        scores = faithfulness.table(model, x, maps, number, against=other, **asking, **options)
        scores = scores.drop(columns="image").assign(**asking)
        share = logits.softmax(-1)[0, number].item()
        labels = ["" if k is None else known[k] if known else str(k) for k in (number, other)]
        maps = {method: values[0].float().cpu() for method, values in maps.items()}
        found.append(
            Explanation(name, restore(model, x)[0], attn.grid, labels[0], share, maps, scores, against=labels[1])
        )
    if not found:
        raise ImageError("None of the images given is left, so there is nothing to explain.")
    return found


def write(explanations: Sequence[Explanation], model: nn.Module, out: Path) -> list[Path]:
    """Write a figure for each picture and `scores.csv` with all of them; returns the paths."""
    from vitlens import plot

    out.mkdir(parents=True, exist_ok=True)
    written, tables = [], []
    for k, each in enumerate(explanations):
        rows = each.scores.set_index("method")
        captions = {name: _caption(rows.loc[name]) for name in each.maps}
        mean, spread = rows.loc["random mean"], rows.loc["random std"]
        note = (
            f"Areas under {SCORES[each.scores.score[0], bool(each.against)]} while patches are covered (deletion, low "
            "is good) or shown (insertion, high is good).\n"
            f"Covered {faithfulness.BASELINES[each.scores.baseline[0]]}. Random orders: deletion {mean.deletion:.3f} ± "
            f"{spread.deletion:.3f}, insertion {mean.insertion:.3f} ± {spread.insertion:.3f}.\n"
            "σ: standard deviations of the random orders by which insertion − deletion lies above their mean."
        ).replace("-", "−")
        rather = f" rather than “{each.against}”" if each.against else ""
        title = f"Why “{each.target}” ({each.probability:.1%}){rather}? {architecture(model)}"
        figure = plot.explained(each.pixels, each.maps, grid=each.grid, title=title, captions=captions, note=note)
        stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(each.name).stem)
        written.append(out / f"{k:02d}-{stem}.png")
        figure.savefig(written[-1], dpi=130)
        about = {"image": each.name, "target": each.target, "against": each.against}
        tables.append(DataFrame(about, each.scores.index).join(each.scores))
    concat(tables).to_csv(out / "scores.csv", index=False, float_format="%.6g")
    return [*written, out / "scores.csv"]


def _caption(row: Series) -> str:
    chance = f"{row.difference_sigmas:+.1f} σ from random"
    chance = chance if isfinite(row.difference_sigmas) else "as all random orders"  # as with a single class
    areas = f"deletion {row.deletion:.3f}, insertion {row.insertion:.3f}"
    return f"rank {row['rank']:.0f}, {chance}\n{areas}".replace("-", "−")
