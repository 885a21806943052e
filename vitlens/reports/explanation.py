"""Why a class, or a likeness: the maps of several methods for each picture, and how far each is to be trusted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from pandas import DataFrame, Series, concat
from torch import Tensor, nn

from vitlens import faithfulness
from vitlens.attribution import SHARED, explained, methods
from vitlens.attribution.target import ClassTarget, NothingToExplain, Similarity, Target
from vitlens.data import files
from vitlens.images import ImageError
from vitlens.models import architecture, label_names, output_kind, restore, scores
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import family, model_name, states_preprocessing, transformer, unwrap
from vitlens.reports.pictures import SHARP, prepared


@dataclass(frozen=True)
class Explanation:
    """Why a picture has a class, or another score.

    pixels: (H, W, 3) uint8, as the model saw it. target, value: the class and its probability, or the name of a score
    of the features, such as "the similarity to tabby.jpg", and that score. maps: (rows, cols) by method. scores: the
    rows of `faithfulness.table`, with the score, baseline and step that were used. title: the question that the maps
    answer. under: what the areas of the scores are under. against: the class that the target is contrasted with, or "".
    """

    name: str
    pixels: np.ndarray
    grid: TokenGrid
    target: str
    value: float
    maps: dict[str, Tensor]
    scores: DataFrame
    title: str
    under: str
    against: str = ""


@contextlib.contextmanager
def _as_given(model: nn.Module, images: Tensor) -> Iterator[None]:
    """In this block, raise ValueError if a wrapper changes images before the Vision Transformer inside sees them: it is
    then unknown how pictures are to be prepared for the wrapper."""

    def compare(_, args: tuple) -> None:
        if args[0].shape != images.shape or not torch.equal(args[0], images):
            raise ValueError(
                f"{model_name(model)} changes images before the Vision Transformer in it sees them, so it is unknown "
                "how to prepare pictures. Say it as timm does (`model.pretrained_cfg = {'mean': …, 'std': …, "
                "'input_size': …}`), or give prepared images to `vitlens.attribution`."
            )

    inner = transformer(model)
    told = inner is model or states_preprocessing(model)
    with contextlib.nullcontext() if told else family(inner).embedding.register_forward_pre_hook(compare):
        yield


def explanations(
    model: nn.Module,
    images: Iterable[tuple[str, object]],
    target: int | str | Similarity | None = None,
    *,
    against: int | str | Similarity | None = None,
    names: Sequence[str] | None = None,
    baseline: str = "mean",
    step: int | None = None,
    score: str | None = None,
    on_error: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    on_part: Callable[[str], None] = lambda _: None,
    **options,
) -> Iterator[Explanation]:
    """Explain picture after picture why a model gives it a class, by several methods, each scored.

    images: (name, source) pairs, the source being anything `load_image` takes. target: a class number or name, None for
    what is predicted, or a function such as `vitlens.attribution.like(picture)`. against: another class or function, to
    ask why the target rather than that one. names: the methods, by default the quick ones (without legrad for a wrapped
    model, and for a model that reads no single row of attention without those that start from it). on_error: called
    with a sentence for a picture that cannot be read, whose predicted class is `against`, or that is compared with
    itself, which is left out; without it that error is raised. on_note: called with a sentence for a picture to which
    `load_image` has done something. on_part: called with what was just done, once for each method and once for the
    scores of a picture. baseline, step, score, options: those of `faithfulness.table` (orders, seed), which scores by
    insertion and deletion.

    A model may wrap the Vision Transformer (a head behind a backbone); pictures are then prepared as that one wants
    them, unless the wrapper has a `pretrained_cfg` of its own. Raises what `vitlens.attribution` raises, and ImageError
    if no picture is left.
    """
    model, found = unwrap(model), 0
    if isinstance(target, Similarity):  # what it is compared with is the same for all images
        target, against = target.bound(model), against.bound(model) if against else None
    chosen = methods(names)
    if names is None and transformer(model) is not model:  # whose head is not that of the model inside
        chosen = {name: method for name, method in chosen.items() if method.needs != "readings"}
    needs = {method.needs for method in chosen.values()}
    for name, x in prepared(model, images, on_error, on_note):
        try:
            with _as_given(model, x):
                forward = explained(model, x, target, against=against, needs=needs)
        except NothingToExplain as error:
            if on_error is None or not (target is None or isinstance(target, Similarity)):
                raise
            on_error(f"{name} is left out. {error}")
            continue
        asked, grid, maps = forward.target, forward.attn.grid, {}
        for label, method in chosen.items():
            if names is None and grid.readout is None and "query" in method.options:
                continue  # it starts from the row of attention that is read, and there is none
            maps[label] = method(forward) if method.needs in SHARED else method(model, x, asked)
            on_part(f"{name}, {label}")
        output = forward.output
        del forward  # or its capture would lie in memory beside the batches of the scores
        score, step = score or next(iter(asked.measures)), step or faithfulness.usual_step(grid.patches)
        scored = {"score": score, "baseline": baseline, "step": step}
        scores = faithfulness.table(model, x, maps, asked, grid=grid, **scored, **options)
        scores = scores.drop(columns="image").assign(**scored)
        on_part(f"{name}, scores")
        found += 1
        maps = {label: values[0].float().cpu() for label, values in maps.items()}
        yield Explanation(
            name, restore(model, x)[0], grid, maps=maps, scores=scores, under=asked.measures[scored["score"]],
            **_question(model, asked, output),
        )  # fmt: skip
    if not found:
        raise ImageError("None of the images is left, so there is nothing to explain.")


def _question(model: nn.Module, asked: Target, said: Tensor) -> dict:
    """target, against, value and title of an `Explanation`."""
    about = architecture(model)
    if not isinstance(asked, ClassTarget):
        target, value = asked.called(0), asked.score(said)[0].item()
        return {"target": target, "value": value, "title": f"Why is {target} {_signed(value)}? {about}"}
    names = label_names(model, said.shape[-1])
    numbers = [None if part is None else part.item() for part in (asked.numbers, asked.against)]
    target, against = ("" if k is None else names[k] if names else str(k) for k in numbers)
    value = scores(model, said)[0, numbers[0]].item()
    rather = f" rather than “{against}”" if against else ""
    shown = f"{value:.3g}" if output_kind(model) == "value" else f"{value:.1%}"
    title = f"Why “{target}” ({shown}){rather}? {about}"
    return {"target": target, "against": against, "value": value, "title": title}


def _signed(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


def explain(*args, **options) -> list[Explanation]:
    """`explanations` as a list."""
    return list(explanations(*args, **options))


def write(
    explanations: Iterable[Explanation],
    model: nn.Module,
    out: Path,
    *,
    on_written: Callable[[Path], None] = lambda _: None,
) -> list[Path]:
    """Write a figure for each picture, and scores.csv with the scores of all, as soon as each picture is explained.

    on_written: called with the path of each figure, once it and its scores are on the disk. Returns the paths.
    """
    import matplotlib.pyplot as plt

    from vitlens import plot

    written, tables = [], []
    for k, each in enumerate(explanations):
        out.mkdir(parents=True, exist_ok=True)
        rows = each.scores.set_index("method")
        captions = {name: _caption(rows.loc[name]) for name in each.maps}
        mean, spread = rows.loc["random mean"], rows.loc["random std"]
        note = (
            f"Areas under {each.under} while patches are covered (deletion, low "
            "is good) or shown (insertion, high is good).\n"
            f"Covered {faithfulness.BASELINES[each.scores.baseline[0]]}. Random orders: deletion {mean.deletion:.3f} ± "
            f"{spread.deletion:.3f}, insertion {mean.insertion:.3f} ± {spread.insertion:.3f}.\n"
            "σ: standard deviations of the random orders by which insertion − deletion lies above their mean."
        ).replace("-", "−")
        said = {"title": each.title, "captions": captions, "note": note}
        figure = plot.attributions(each.pixels, each.maps, grid=each.grid, **said)
        stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(each.name).stem)
        written.append(out / f"{k:02d}-{stem}.png")
        figure.savefig(written[-1], dpi=SHARP)
        plt.close(figure)
        about = {"image": each.name, "target": each.target, "against": each.against}
        tables.append(DataFrame(about, each.scores.index).join(each.scores))
        files.write(out / "scores.csv", concat(tables).to_csv(index=False, float_format="%.6g").encode())
        on_written(written[-1])
    return [*written, out / "scores.csv"]


def _caption(row: Series) -> str:
    chance = f"{row.difference_sigmas:+.1f} σ from random"
    chance = chance if isfinite(row.difference_sigmas) else "as all random orders"  # as with a single class
    areas = f"deletion {row.deletion:.3f}, insertion {row.insertion:.3f}"
    return f"rank {row['rank']:.0f}, {chance}\n{areas}".replace("-", "−")
