"""Ablation of single heads: the change of a classifier when a head's output is replaced by zero or by its mean.

    effects = vitlens_paper.evaluate.ablation.effects(model, "DATA", out="heads.csv")      # a row for each head and way

A head's output is the one that `vitlens.intervene` replaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from vitlens import files
from vitlens.classes import describe_match
from vitlens.data import ImageSet, ImageStream
from vitlens.models.opening import require_attention
from vitlens.names import require_known, unknown_name
from vitlens.recorder import intervention
from vitlens.recorder.forward import eval_mode, require_finite, run
from vitlens.recorder.interception import POOL
from vitlens.recorder.intervention import WORDS, Place, head_places, intervene
from vitlens.recorder.precision import to_float64
from vitlens.recorder.supported import attention_modules, require_capturable
from vitlens.scores import Score, paired, proportion, student
from vitlens_paper.evaluate.options import Evaluation
from vitlens_paper.evaluate.reading import normalize_for
from vitlens_paper.evaluate.session import open_session

__all__ = ["divergence", "effects", "mean_outputs"]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

if TYPE_CHECKING:
    from pandas import DataFrame


def effects(
    model: str | os.PathLike | nn.Module,
    data: str | os.PathLike | ImageSet | ImageStream,
    *,
    ways: str | Sequence[str] = WORDS,
    images: int | None = None,
    seed: int = 0,
    batch: int = 50,
    out: str | os.PathLike | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike | None = None,
    classes: str | os.PathLike = "",
    head: str | None = None,
    **settings,
) -> DataFrame:
    """Effect of each head on accuracy: one row for each head of each layer (and of an attention pool) and each way.

    >>> small = vitlens.load_model("test_vit", pretrained=False, num_classes=2)
    >>> pixels, labels = torch.zeros(2, 3, 160, 160, dtype=torch.uint8), torch.tensor([0, 1])
    >>> data = vitlens.data.ImageSet(pixels, labels, ("cat", "dog"))
    >>> table = vitlens_paper.evaluate.ablation.effects(small, data, ways="zero", progress=False, say=str)

    model: a timm name, a directory or a timm model. data: a data set of `data.load`, or loaded images. ways:
    replacements, "zero" or "mean" over these images by position. images: number of images, drawn by `seed`, default
    all. out: a CSV, rewritten after each batch, so that a stopped ablation keeps its results. checkpoint: a file with
    the model's weights. head: its classifier, as in `load_model`. classes: as in `vitlens.classes.class_numbers`.
    settings: root, workers, device, command and `say` of `open_session`.

    Columns, each measure with its 95 % interval (_low, _high): `accuracy` without the head, in percent; `change` of
    the accuracy, in points (`scores.paired`); `flipped`, the percentage of images with another predicted class; `kl`,
    the divergence Σ p·log(p/q) in nats of the probabilities q without the head from the model's p; `margin`, the change
    of the label's logit minus the largest other. The intervals of the last two are Student's, for other images. `lost`
    is the number of images classified correctly only with the head, `gained` only without it.

    Raises UnsupportedModelError as `intervene` does, and ValueError for unknown ways and for logits that are not
    finite.
    """
    import pandas as pd

    ways = [ways] if isinstance(ways, str) else list(ways)
    for way in ways or [None]:
        require_known(way, WORDS, "A way")
    lock = nullcontext()
    if out is not None:
        out = Path(out)
        _require_new(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = files.lock(out, "--out", waits=False)
    named = isinstance(data, str | os.PathLike)
    evaluation = Evaluation(
        model=model,
        data=os.fspath(data) if named else "images",
        checkpoint=checkpoint,
        head=head,
    )
    if isinstance(model, str | os.PathLike):
        require_attention(model)
    session = open_session(evaluation, **settings)
    network = session.network
    heads = head_places(network, attention_modules(network))
    require_capturable(network)
    if named:
        data = session.images("whole")
    numbers = session.class_numbers(data, os.fspath(classes))  # raises before images are compared
    data = session.to_score(data)
    data = data.to(session.world.device)
    session.note(describe_match(network, data.class_names, os.fspath(classes)))
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:images]
    batches = rows.tensor_split(max(1, len(rows) // batch))

    def labeled_batches() -> Iterator[tuple[Tensor, Tensor]]:
        """Normalized images and the model's class numbers."""
        for pixels, labels in data.batches(batches):
            yield normalize_for(network, pixels), numbers[labels.cpu()]

    about = {
        "seed": seed,
        "batch": batch,
        "weights": session.weights,
        "command": session.command or "ablation.effects",
    }
    measures: dict[tuple[Place, str], list[Tensor]] = {
        (head, way): [] for head in heads for way in ways
    }
    passes = len(measures) + 1  # over each batch
    if "mean" in ways:
        passes += 1
    bar = tqdm(total=len(batches) * passes, unit="forward", desc="heads", disable=not progress)
    with lock, eval_mode(network), bar:
        if out is not None:
            _require_new(out)  # another process may have written it meanwhile
        means = {}
        if "mean" in ways:
            means = mean_outputs(network, (images for images, _ in labeled_batches()), bar)
        for pixels, labels in labeled_batches():
            before = _logits(network, pixels)
            for (head, way), parts in measures.items():
                value = means[head] if way == "mean" else "zero"
                layer = "pool" if head.layer == POOL else head.layer
                with intervene(network, heads={(layer, head.part): value}):
                    after = _logits(network, pixels)
                parts.append(_measures(before, after, labels))
                bar.update()
            bar.update()
            table = pd.DataFrame(
                _row(head, way, torch.cat(parts)) | about for (head, way), parts in measures.items()
            )
            if out is not None:
                files.write(out, table.to_csv(index=False, lineterminator="\n"))
    return table


def _require_new(out: Path) -> None:
    """Raise ValueError for a file that exists. A device such as /dev/stdout may be written to."""
    if out.is_file() or out.is_dir():
        raise ValueError(f"{out} already exists. Choose another file, or delete it.")


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

    def count_batches() -> Iterator[Tensor]:
        for images in batches:
            yield images
            if bar is not None:
                bar.update()

    return intervention.mean_outputs(model, modules, head_places(model, modules), count_batches())


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Logit of each label (B,) minus the largest other logit of (B, classes), as (B,)."""
    labels = labels[:, None]
    own = logits.gather(1, labels).squeeze(1)
    largest_other = logits.scatter(1, labels, -torch.inf).amax(1)
    return own - largest_other


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
    class_before, class_after = before.argmax(1), after.argmax(1)
    columns = [
        class_before == labels,
        class_after == labels,
        class_before != class_after,
        divergence(before, after),
        margin(after, labels) - margin(before, labels),
    ]
    return torch.stack(columns, 1).double()


def _row(head: Place, way: str, measures: Tensor) -> dict[str, object]:
    """The row of a head and a way, from the measures (N, 5) of all images so far."""
    right_before, right_after, flipped, kl, margins = measures.T
    images = len(measures)
    lost = int((right_before > right_after).sum())
    gained = int((right_after > right_before).sum())
    flips = int(flipped.sum())
    row = {
        "layer": "pool" if head.layer == POOL else head.layer,
        "head": head.part,
        "way": way,
        "images": images,
        "lost": lost,
        "gained": gained,
        "flips": flips,
        "kl_std": _deviation(kl),
        "margin_std": _deviation(margins),
    }
    scores = {
        "accuracy": proportion(int(right_after.sum()), images),
        "change": paired(lost, gained, images),
        "flipped": proportion(flips, images),
        "kl": _mean_score(kl),
        "margin": _mean_score(margins),
    }
    for name, score in scores.items():
        row[name] = float(score.value)
        row[f"{name}_low"] = float(score.low)
        row[f"{name}_high"] = float(score.high)
    return row


def _mean_score(values: Tensor) -> Score:
    """Mean of the values with Student's interval."""
    mean = float(values.mean())
    half = student(values.numpy())
    return Score(mean, mean - half, mean + half)


def _deviation(values: Tensor) -> float:
    """Standard deviation of the values, 0 for a single one."""
    return float(values.std()) if len(values) > 1 else 0.0
