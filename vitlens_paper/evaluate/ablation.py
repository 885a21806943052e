"""Ablation of single heads: the change of a classifier when a head's output is replaced by zero or by its mean.

    effects = vitlens_paper.evaluate.ablation.effects(model, "DATA", out="heads.csv")      # a row for each head and way

A head's output is the one that `vitlens.intervene` replaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from vitlens.classes import class_numbers, matched
from vitlens.data import ImageSet, ImageStream, files
from vitlens.names import require_known
from vitlens.recorder import intervention
from vitlens.recorder.forward import eval_mode, require_finite, run
from vitlens.recorder.interception import POOL
from vitlens.recorder.intervention import WORDS, Place, head_places, intervene
from vitlens.recorder.precision import to_float64
from vitlens.recorder.supported import attention_modules, require_capturable
from vitlens.scores import paired, proportion, student
from vitlens_paper.evaluate.protocols import Evaluation
from vitlens_paper.evaluate.reading import normalized_for

__all__ = ["divergence", "effects", "mean_outputs"]
__dir__ = __all__.copy

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
    """Effect of each head on accuracy: one row for each head of each layer (and of an attention pool) and each way.

    >>> small = vitlens.load_model("test_vit", pretrained=False, num_classes=2)
    >>> pixels, labels = torch.zeros(2, 3, 160, 160, dtype=torch.uint8), torch.tensor([0, 1])
    >>> data = vitlens.data.ImageSet(pixels, labels, ("cat", "dog"))
    >>> table = vitlens_paper.evaluate.ablation.effects(small, data, ways="zero", progress=False, say=str)

    model: a timm name, a directory or a timm model. data: a data set of `data.load`, or loaded images. ways:
    replacements, "zero" or "mean" over these images by position. images: number of images, drawn by `seed`, default
    all. out: a CSV, rewritten after each batch, so that a stopped ablation keeps its results. settings: root, workers,
    device, checkpoint, command and `say` of `Evaluation`.

    Columns, each measure with its 95 % interval (_low, _high): `accuracy` without the head, in percent; `change` of
    the accuracy, in points (`scores.paired`); `flipped`, the percentage of images with another predicted class; `kl`,
    the divergence Σ p·log(p/q) in nats of the probabilities q without the head from the model's p; `margin`, the change
    of the label's logit minus the largest other. The intervals of the last two are Student's, for other images. lost
    and gained count the images that are right only with, and only without the head.

    Raises UnsupportedModelError as `intervene` does, and ValueError for unknown ways and for logits that are not
    finite.
    """
    import pandas as pd

    ways = [ways] if isinstance(ways, str) else list(ways)
    for way in ways or [None]:
        require_known(way, WORDS, "A way")
    if out is not None and Path(out).exists():
        raise ValueError(f"{out} already exists. Choose another file, or delete it.")
    named = isinstance(data, str | Path)
    evaluation = Evaluation(model, str(data) if named else "images", **settings)
    network = evaluation.network
    heads = head_places(network, attention_modules(network))
    require_capturable(network)
    data = (evaluation.images("whole") if named else data).to(evaluation.world.device)
    numbers = class_numbers(network, data.class_names)
    evaluation.note(matched(network, data.class_names))
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:images]
    batches = rows.tensor_split(max(1, len(rows) // batch))

    def shown() -> Iterator[tuple[Tensor, Tensor]]:
        """Normalized images and the model's class numbers."""
        for pixels, labels in data.batches(batches):
            yield normalized_for(network, pixels), numbers[labels.cpu()]

    command = evaluation.command or "ablation.effects"
    about = {"seed": seed, "batch": batch, "weights": evaluation.weights, "command": command}
    measures: dict[tuple[Place, str], list[Tensor]] = {
        (head, way): [] for head in heads for way in ways
    }
    total = len(batches) * (len(measures) + 1 + ("mean" in ways))
    with (
        eval_mode(network),
        tqdm(total=total, unit="forward", desc="heads", disable=not progress) as bar,
    ):
        means = (
            mean_outputs(network, (images for images, _ in shown()), bar) if "mean" in ways else {}
        )
        for pixels, labels in shown():
            before = _logits(network, pixels)
            for (head, way), parts in measures.items():
                value = "zero" if way == "zero" else means[head]
                key = "pool" if head.layer == POOL else head.layer
                with intervene(network, heads={(key, head.part): value}):
                    after = _logits(network, pixels)
                parts.append(_measures(before, after, labels))
                bar.update()
            bar.update()
            table = [_row(*key, torch.cat(parts)) | about for key, parts in measures.items()]
            if out is not None:
                (out := Path(out)).parent.mkdir(parents=True, exist_ok=True)
                files.write(out, pd.DataFrame(table).to_csv(index=False).encode())
    return pd.DataFrame(table)


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        logits = to_float64(run(model, images)).cpu()
    require_finite(model, logits)
    return logits


def mean_outputs(
    model: nn.Module, batches: Iterable[Tensor], bar: tqdm | None = None
) -> dict[Place, Tensor]:
    """Mean output (T, K) of each head over batches of images, before the output projection.

    >>> len(vitlens_paper.evaluate.ablation.mean_outputs(model, [images]))  # 12 layers of 3 heads
    36
    """
    modules = attention_modules(model)

    def counted() -> Iterator[Tensor]:
        for images in batches:
            yield images
            if bar is not None:
                bar.update()

    return intervention.mean_outputs(model, modules, head_places(model, modules), counted())


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Logit of each label (B,) minus the largest other logit of (B, classes), as (B,)."""
    own = labels[:, None]
    return (
        logits.gather(1, own) - logits.scatter(1, own, -torch.inf).amax(1, keepdim=True)
    ).squeeze(1)


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL divergence Σ p·log(p/q) in nats, (B,), of probabilities q after from p before, for (B, classes) logits.

    Classes that are excluded, with a logit of −∞, add nothing.

    >>> vitlens_paper.evaluate.ablation.divergence(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
    tensor([0.1201])
    """
    p, q = before.log_softmax(1), after.log_softmax(1)
    return (p.exp() * (p - q)).where(p > -torch.inf, 0).sum(1)


def _measures(before: Tensor, after: Tensor, labels: Tensor) -> Tensor:
    """(B, 5): right before, right after, changed class, KL divergence and change of the margin of each image."""
    was, now = before.argmax(1), after.argmax(1)
    change = margin(after, labels) - margin(before, labels)
    return torch.stack(
        [was == labels, now == labels, was != now, divergence(before, after), change], 1
    ).double()


def _row(head: Place, way: str, measures: Tensor) -> dict[str, object]:
    was, now, flipped, kl, change = measures.T
    images, lost, gained = len(measures), int((was > now).sum()), int((now > was).sum())
    row = {
        "layer": "pool" if head.layer == POOL else head.layer,
        "head": head.part,
        "way": way,
        "images": images,
        "lost": lost,
        "gained": gained,
        "flips": int(flipped.sum()),
    }
    scores = {
        "accuracy": proportion(int(now.sum()), images),
        "change": paired(lost, gained, images),
        "flipped": proportion(row["flips"], images),
    }
    for name, values in (("kl", kl), ("margin", change)):
        mean, half = float(values.mean()), student(values.numpy())
        scores[name], row[f"{name}_std"] = (
            (mean, mean - half, mean + half),
            float(values.std()) if images > 1 else 0.0,
        )
    for name, (value, low, high) in scores.items():
        row |= {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}
    return row
