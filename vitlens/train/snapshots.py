"""The inspection figures as arrays, recorded while a model trains.

A snapshot is what the four figures of the paper need, on a fixed probe batch, so that a slider over steps can move all
of them without the weights of every step. Recording changes nothing: training with and without it is equal to the bit.

Shapes: B probe images, L layers, H heads, h × w patches of p × p pixels, C channels, S snapshots.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitlens.data import ImageSet
from vitlens.data.augment import normalized
from vitlens.data.files import write
from vitlens.recorder.forward import evaluating
from vitlens.train.settings import Recipe

__all__ = ["load", "probe", "record", "save", "schedule"]
__dir__ = __all__.copy

ROLLOUTS = 8  # probe images whose rollout is kept: what a film strip shows
PICTURES = 4  # probe images whose hidden patches are predicted
COMPONENTS = 28  # filters in the paper's figure 7


def schedule(steps: int, count: int = 24) -> list[int]:
    """At most `count` steps out of 0…`steps`, both included, evenly spaced on a logarithmic scale."""
    if count < 2:
        raise ValueError(f"Expected at least two snapshots, the first and the last, got {count}.")
    return sorted({0, *np.geomspace(steps, 1, count - 1).round().astype(int).tolist()})


def probe(data: ImageSet, recipe: Recipe, n: int | None = None) -> Tensor:
    """`n` images (all, if there are fewer), always the same, normalized as the model wants them.

    By default 64, or a batch if that is fewer: a snapshot should cost no more than a few steps.
    """
    some = data.subset(min(n or min(64, recipe.batch_size), len(data)))
    images, _ = next(some.batches([torch.arange(len(some))]))
    return normalized(images, recipe.mean, recipe.std)


def record(model: nn.Module, images: Tensor, missing: list[str] | None = None) -> dict[str, np.ndarray]:
    """One snapshot of `model`, evaluated on normalized `images` (B, C, H, W) in fp32:

    * `filters` (COMPONENTS, p, p, C) and `filters_variance` (COMPONENTS,): principal components of the patch
      embedding; where there are fewer, the rest is zeros;
    * `positions` (h, w, h, w): cosine similarity of position embeddings;
    * `distances` (L, H): mean attention distance in input pixels, mean over the batch;
    * `rollout` (ROLLOUTS, h, w) of the first images;
    * `prefix` (): number of tokens that are not patches;
    * `top1_confidence` (B,): the highest class probability;
    * of a model that learns without labels, for the first PICTURES images: `corrupted` (N, h, w), 1 where a patch was
      hidden or corrupted; `source` (N, h, w), the number of the patch that was put there, −1 for none; and `predicted`
      (N, …, …, 3), what the model puts there, in 0…1, one color for each patch or part of it.

    Fractions are kept in float16, whole numbers as they are. What the model does not have (a table of positions,
    attention that can be captured) is left out; `missing` receives the reason. The training flag of each module is left
    as found. The model must be the uncompiled one.
    """
    from vitlens import attention, filters, positions
    from vitlens.models import class_count, scores
    from vitlens.recorder.record import capture

    def principal() -> dict[str, Tensor]:
        components, variance = filters.components(model, COMPONENTS)
        rest = COMPONENTS - len(variance)
        return {
            "filters": torch.cat([components, components.new_zeros(rest, *components.shape[1:])]),
            "filters_variance": torch.cat([variance, variance.new_zeros(rest)]),
        }

    def attended() -> dict[str, Tensor]:
        with capture(model) as attn:
            logits.append(model(images))
        distances, rollout = attention.mean_distance(attn).mean(dim=0), attention.rollout(attn)[:ROLLOUTS]
        return {"distances": distances, "rollout": rollout, "prefix": torch.tensor(attn.grid.prefix)}

    arrays: dict[str, Tensor] = {}
    logits: list[Tensor] = []
    devices = [images.device] if images.is_cuda else []
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=devices):
        for figure in (principal, lambda: {"positions": positions.similarity(model)}, attended):
            try:
                arrays |= figure()
            except ValueError as reason:
                if missing is not None:
                    missing.append(str(reason))
        if not logits:
            logits.append(model(images))
        if class_count(model):
            arrays["top1_confidence"] = scores(model, logits[0]).amax(-1)
        if hasattr(getattr(model, "objective", None), "pictured"):
            torch.manual_seed(0)  # the same patches are hidden in every snapshot
            arrays |= model.objective.pictured(model, images[:PICTURES])
    return {name: (a.half() if a.is_floating_point() else a).detach().cpu().numpy() for name, a in arrays.items()}


def save(path: Path | str, step: int, arrays: dict[str, np.ndarray]) -> None:
    """Add the snapshot of `step` to the file `path`, a compressed `.npz`; later steps in it are dropped.

    The file holds `steps` (S,) and each array with S in front: some 20 to 100 kB a snapshot, rewritten whole.
    """
    path = Path(path)
    content = {name: array[None] for name, array in {"steps": np.int64(step), **arrays}.items()}
    if path.exists():
        before = load(path)
        kept = before["steps"] < step
        # An older version may have begun the file with fewer of them.
        content = {name: np.concatenate([before[name][kept], new]) for name, new in content.items() if name in before}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **content)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, buffer.getvalue())


def load(path: Path | str) -> dict[str, np.ndarray]:
    """The arrays of a file that `save` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


class Album:
    """Takes `count` snapshots of a run; what a model does not have is left out, and reported once."""

    def __init__(self, out: Path, model: torch.nn.Module, probe: torch.Tensor, steps: int, count: int, say):
        self.path, self.model, self.probe, self.say = out / "snapshots.npz", model, probe, say
        self.due = set(schedule(steps, count)) if count else set()

    def begin(self) -> None:
        """Take the first one, of untrained weights, in place of those of an earlier run."""
        if self.due:
            self.path.unlink(missing_ok=True)
            self.show(0)

    def show(self, step: int) -> None:
        missing: list[str] = []
        if step in self.due:
            try:
                save(self.path, step, record(self.model, self.probe, missing))
            except Exception as problem:  # a snapshot is no reason to lose a run
                self.say(f"There are no snapshots from step {step} on: {problem}")
                self.due.clear()
        for reason in missing if step == 0 else ():
            self.say(f"Not in the snapshots: {reason}")
