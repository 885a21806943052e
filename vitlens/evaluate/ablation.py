"""How a classifier changes when its attention heads are switched off, one at a time or one after the other.

    effects = vitlens.ablation.effects(model, "DATA", out="heads.csv")      # a row for each head and way
    curves = vitlens.ablation.pruning(model, "DATA", out="pruning.csv")     # accuracy against heads removed

A head's output, and what takes its place, is what `vitlens.intervene` takes it for. Pictures are streamed in an order
that a seed decides. The CSV is written anew after each batch and holds all that is known by then; the same call
continues a CSV that is not finished. Only what comes after a head is computed again for it: the layers below it give
what they gave.

Shapes: B batch, H heads, T tokens, K head width.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitlens.data import ImageSet, ImageStream
from vitlens.data.files import write
from vitlens.evaluate.passage import Passage, Pictures, generator
from vitlens.evaluate.scores import half_width, paired, proportion
from vitlens.recorder.intervention import WORDS, Place
from vitlens.recorder.record import POOL
from vitlens.recorder.running import require_count

if TYPE_CHECKING:
    from pandas import DataFrame


def effects(
    model: str | Path | nn.Module,
    data: str | Path | ImageSet | ImageStream,
    *,
    ways: str | Sequence[str] = WORDS,
    images: int | None = None,
    seed: int = 0,
    batch: int = 50,
    out: str | Path | None = None,
    progress: bool = True,
    **settings,
) -> DataFrame:
    """What each head does, alone: a row for each head of each layer (and of an attention pool) and each way.

    model, data: a timm name, a folder or a model of timm, and what `data.load` reads, or loaded images. ways: some of
    "zero" and "mean", over these images and by position.
    images: how many are drawn, by default all. out: a CSV. settings: root, workers, device, command and say of
    `Evaluation`.

    Columns, each measure with its 95 % interval (_low, _high): `accuracy` without the head, in percent; `change` of
    the accuracy, in points (`scores.paired`); `flipped`, the percentage of images that are called another class; `kl`,
    of the probabilities without the head from those of the model, Σ p·log(p/q) in nats; `margin`, the change of the
    label's logit minus the largest other. The intervals of the last two are Student's, and say what other images would
    give. lost and gained count the images that are right only with, and only without the head.

    Raises UnsupportedModelError for models that `intervene` refuses, ValueError for what does not go together, such as
    a CSV of another model or of other images.
    """
    ways = [ways] if isinstance(ways, str) else list(ways)
    if not ways or [way for way in ways if way not in WORDS]:
        raise ValueError(f"The ways to switch a head off are {', '.join(WORDS)}; got {', '.join(map(str, ways))!r}.")
    pictures = Pictures(model, data, images, seed, batch, progress, settings)
    rows = [
        _named(place) | {"way": way}
        | dict.fromkeys(COUNTS, 0)
        | dict.fromkeys(("accuracy", "kl", "kl_std", "margin", "margin_std"), 0.0)
        for place in pictures.heads
        for way in ways
    ]
    about, command = f"{pictures.about}, ways {' '.join(ways)}", settings.get("command") or "ablation.effects"
    table = _Table(out, about, command, rows, ("layer", "head", "way"))
    whole, runs = len(pictures.batches), len(table.rows)
    with pictures.running((whole - table.done) * (runs + 1) + whole * ("mean" in ways), "heads"):
        left = table.done < whole
        means = pictures.means(range(whole)) if left and "mean" in ways else {}
        for number, (shown, labels) in pictures.read(range(table.done, whole)):
            passage = Passage(pictures, shown)
            values = {"zero": lambda _: torch.zeros(()), "mean": means.get}
            for row in table.rows:
                place = _place(row)
                _add(row, passage.logits, passage.again({place: values[row["way"]](place)}), labels)
            table.save(number + 1, whole)
    return table.frame()


def pruning(
    model: str | Path | nn.Module,
    data: str | Path | ImageSet | ImageStream,
    *,
    way: str = "mean",
    choose: int = 100,
    orders: int = 3,
    step: int = 1,
    images: int | None = None,
    seed: int = 0,
    batch: int = 50,
    out: str | Path | None = None,
    progress: bool = True,
    **settings,
) -> DataFrame:
    """Accuracy as heads are removed one after the other until none is left, in a greedy order and in random ones.

    Greedy: the head is removed next whose loss moves the probabilities least from those of the whole model (mean KL
    over `choose` images, with what is already removed). These images, over which "mean" is taken too, are not among
    those that accuracy is measured on. way: "mean" or "zero". orders: how many random ones. Others as in `effects`.

    Columns: order, "greedy" or "random 0" …; removed, the number of heads; layer and head, which one was the last;
    images; accuracy in percent with Wilson's 95 % interval, low and high.
    """
    if way not in ("mean", "zero"):
        raise ValueError(f"Heads are pruned to their 'mean' or to 'zero', got {way!r}.")
    require_count(choose=choose, orders=orders, step=step)
    pictures = Pictures(model, data, images, seed, batch, progress, settings, first=choose)
    heads = pictures.heads
    names = ["greedy", *(f"random {i}" for i in range(orders))]
    drawn = {
        name: [heads[i] for i in torch.randperm(len(heads), generator=generator(seed + 1 + n)).tolist()]
        for n, name in enumerate(names[1:])
    }
    rows = [_step(name, 0) for name in names]
    rows += [_step(name, n + 1, place) for name, order in drawn.items() for n, place in enumerate(order)]
    about = f"{pictures.about}, {way}, the first {choose} to choose by, {orders} orders, {step} at once"
    table = _Table(out, about, settings.get("command") or "ablation.pruning", rows, ("order", "removed"))
    greedy = [row for row in table.rows if row["order"] == "greedy" and row["removed"]]
    left = len(heads) - len(greedy)
    if [row["removed"] for row in greedy] != [*range(1, len(greedy) + 1)] or (left and table.done):
        raise table.damaged()
    greedy = [_place(row) for row in greedy]
    whole = len(pictures.batches)
    counted = {*range(0, len(heads), step), len(heads)}
    work = sum(range(left, 0, -step)) * len(pictures.first) + (whole - table.done) * (orders + 1) * (len(counted) - 1)
    with pictures.running(work, "pruning"):
        firsts = range(-len(pictures.first), 0)
        if way == "mean" and (left or table.done < whole):
            values = pictures.means(firsts)
        else:
            values = {place: torch.zeros(()) for place in heads}
        chosen = list(pictures.read(firsts)) if left else []
        wholes = [Passage(pictures, shown).logits for _, (shown, _) in chosen]
        while len(greedy) < len(heads):
            removed = {place: values[place] for place in greedy}
            moved = dict.fromkeys([place for place in heads if place not in removed], 0.0)
            for (_, (shown, _)), before in zip(chosen, wholes, strict=True):
                passage = Passage(pictures, shown, removed)
                for place in moved:
                    after = passage.again(removed | {place: values[place]}, start=place.layer)
                    moved[place] += float(divergence(before, after).sum())
            for place in sorted(moved, key=moved.get)[:step]:
                greedy.append(place)
                table.rows.append(_step("greedy", len(greedy), place))
            table.save(0, whole)
        for number, (shown, labels) in pictures.read(range(table.done, whole)):
            passage = Passage(pictures, shown)
            for row in (row for row in table.rows if row["removed"] in counted):
                order = greedy if row["order"] == "greedy" else drawn[row["order"]]
                found = passage.again({place: values[place] for place in order[: row["removed"]]})
                _count(row, int((found.argmax(1) == labels).sum()), len(labels))
            table.save(number + 1, whole)
    table.rows.sort(key=lambda row: (names.index(row["order"]), row["removed"]))
    table.save(table.done, whole)
    return table.frame()


COUNTS = ("images", "lost", "gained", "flips")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """(B,) the logit of each label (B,) minus the largest other one of (B, classes)."""
    own = labels[:, None]
    return (logits.gather(1, own) - logits.scatter(1, own, -torch.inf).amax(1, keepdim=True)).squeeze(1)


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """(B,) KL divergence in nats of the probabilities of (B, classes) logits from those before: Σ p·log(p/q)."""
    p, q = before.log_softmax(1), after.log_softmax(1)
    return (p.exp() * (p - q)).sum(1)


def _add(row: dict, before: Tensor, after: Tensor, labels: Tensor) -> None:
    """Add a batch to the totals of a row, and compute its intervals again."""
    was, now = before.argmax(1), after.argmax(1)
    right, n = now == labels, row["images"]
    correct = round(row["accuracy"] * n / 100) + int(right.sum())
    row["lost"] += int((~right & (was == labels)).sum())
    row["gained"] += int((right & (was != labels)).sum())
    row["flips"] += int((was != now).sum())
    row["images"] = total = n + len(labels)
    scores = {
        "accuracy": proportion(correct, total),
        "change": paired(row["lost"], row["gained"], total),
        "flipped": proportion(row["flips"], total),
    }
    for name, values in (("kl", divergence(before, after)), ("margin", margin(after, labels) - margin(before, labels))):
        row[name], std = _merged(n, row[name], row[f"{name}_std"], values)
        half = half_width(std, total)
        scores[name] = row[name], row[name] - half, row[name] + half
        row[f"{name}_std"] = std
    for name, score in scores.items():
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), map(float, score), strict=True))


def _merged(n: int, mean: float, std: float, values: Tensor) -> tuple[float, float]:
    """Mean and standard deviation (n − 1) of n values after adding more values (Chan, Golub and LeVeque 1979)."""
    m, theirs = len(values), float(values.mean())
    squares = std**2 * (n - 1) + float((values - theirs).square().sum()) + (theirs - mean) ** 2 * n * m / (n + m)
    return mean + (theirs - mean) * m / (n + m), math.sqrt(squares / (n + m - 1)) if n + m > 1 else 0.0


def _step(order: str, removed: int, place: Place | None = None) -> dict:
    where = {"layer": "", "head": ""} if place is None else _named(place)
    return {"order": order, "removed": removed, **where, "images": 0, "accuracy": "", "low": "", "high": ""}


def _named(place: Place) -> dict:
    """The columns of a row that name a head; `_place` reads them back."""
    return {"layer": "pool" if place.layer == POOL else place.layer, "head": place.part}


def _place(row: dict) -> Place:
    return Place("head", POOL if row["layer"] == "pool" else row["layer"], row["head"])


def _count(row: dict, right: int, images: int) -> None:
    right += round((row["accuracy"] or 0) * row["images"] / 100)
    row["images"] += images
    row["accuracy"], row["low"], row["high"] = proportion(right, row["images"])


class _Table:
    """Results in a CSV that can be continued. Its first line says what was measured, and how many batches are done.

    key: the columns that identify a row.
    """

    def __init__(self, out: str | Path | None, about: str, command: str, rows: list[dict], key: Sequence[str]):
        self.out, self.rows, self.done = None if out is None else Path(out), rows, 0
        self.head = f"# {command}; {about}; "
        if self.out is None or not self.out.exists():
            return
        line, _, rest = self.out.read_text(encoding="utf-8", errors="replace").partition("\n")
        known = re.search(r"; (\d+) of \d+ batches$", line)
        if known is None or f"; {about}; " not in line:
            raise ValueError(
                f"{self.out} is of another model, other images or other settings, so it cannot be continued. Give "
                "another file, or delete it."
            )
        kept = list(csv.DictReader(io.StringIO(rest)))
        cells = all(row.keys() >= rows[0].keys() and None not in [*row, *row.values()] for row in kept)
        if whole := cells and rest.endswith("\n"):
            kept = [{k: _parsed(v) for k, v in row.items()} for row in kept]
            found, wanted = ({tuple(row[k] for k in key) for row in each} for each in (kept, rows))
            whole = wanted <= found
        if not whole:
            raise self.damaged()
        self.done, self.rows = int(known[1]), kept

    def damaged(self) -> ValueError:
        return ValueError(f"{self.out} is damaged: some of it is missing. Delete it, or give another file.")

    def save(self, done: int, whole: int) -> None:
        self.done = done
        if self.out is None:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write(self.out, f"{self.head}{done} of {whole} batches\n{text.getvalue()}".encode())

    def frame(self) -> DataFrame:
        import pandas as pd

        return pd.DataFrame(self.rows)


def _parsed(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
