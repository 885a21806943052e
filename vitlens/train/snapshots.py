"""Inspection figures as arrays, recorded while a model trains.

A snapshot holds the data of the paper's four figures for a fixed probe batch, so that a slider over steps needs no
weights. Training with and without recording is bit-identical.

Shapes: B probe images, L layers, H heads, h × w patches of p × p pixels, C channels, S snapshots.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitlens.data import ImageSet
from vitlens.data.augment import normalize
from vitlens.files import remove_ours, update
from vitlens.formatting import with_minus
from vitlens.names import unknown_name
from vitlens.recorder.forward import eval_mode
from vitlens.train.settings import Recipe

__all__ = ["changes", "load", "probe", "record", "save", "schedule"]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

ROLLOUTS = 8  # probe images with a stored rollout, as in a film strip
PICTURES = 4  # probe images with predicted patches
COMPONENTS = 28  # filters in the paper's figure 7


def schedule(steps: int, count: int = 24) -> list[int]:
    """At most `count` logarithmically spaced steps of 0…`steps`, with both ends.

    >>> vitlens.train.snapshots.schedule(1000, count=5)
    [0, 1, 10, 100, 1000]
    """
    spaced = np.geomspace(steps, 1, count - 1).round().astype(int)
    return sorted({0, *spaced.tolist()})


def probe(data: ImageSet, recipe: Recipe, n: int | None = None) -> Tensor:
    """A fixed batch of `n` images, or of all if fewer, normalized for the model.

    The default is 64 or a smaller batch size, so that a snapshot costs at most a few steps.
    """
    n = n or min(64, recipe.batch_size)
    subset = data.subset(min(n, len(data)))
    images, _ = next(subset.batches([torch.arange(len(subset))]))
    return normalize(images, recipe.mean, recipe.std)


def record(
    model: nn.Module, images: Tensor, missing: list[str] | None = None
) -> dict[str, np.ndarray]:
    """One snapshot of `model`, evaluated on normalized `images` (B, C, H, W) in fp32:

    * `filters` (COMPONENTS, p, p, C) and `filters_variance` (COMPONENTS,): principal components of the patch
      embedding, padded with zeros;
    * `positions` (h, w, h, w): cosine similarity of position embeddings;
    * `distances` (L, H): mean attention distance in input pixels, mean over the batch;
    * `rollout` (ROLLOUTS, h, w) of the first images;
    * `prefix` (): number of class and register tokens;
    * `top1_confidence` (B,): the highest class probability;
    * for models trained without labels, of the first PICTURES images: `corrupted` (N, h, w), 1 for corrupted patches;
      `source` (N, h, w), index of the patch that replaced it or −1 for the learned embedding; and `predicted`
      (N, …, …, 3), predicted colors in 0…1 of each patch or part of it.

    Fractions are stored in float16, integers unchanged. Arrays that the model does not support (no position embedding,
    no attention to capture) are left out, and `missing` receives the reason. The training flag of each module is
    unchanged. The model must be the uncompiled one.

    >>> vitlens.train.snapshots.record(model, images)["distances"].shape
    (12, 3)
    """
    from vitlens.models import class_count, run, scores

    arrays: dict[str, Tensor] = {}

    def add(compute: Callable[..., dict[str, Tensor]], *arguments: object) -> None:
        try:
            arrays.update(compute(*arguments))
        except ValueError as reason:
            if missing is not None:
                missing.append(str(reason))

    devices = [images.device] if images.is_cuda else []
    with eval_mode(model), torch.no_grad(), torch.random.fork_rng(devices=devices):
        add(_filters, model)
        add(_positions, model)
        add(_attention, model, images)
        logits = arrays.pop("logits", None)
        if logits is None:
            logits = run(model, images)
        if class_count(model):
            arrays["top1_confidence"] = scores(model, logits).amax(-1)
        if hasattr(getattr(model, "objective", None), "predict_pictures"):
            torch.manual_seed(0)  # hide the same patches in every snapshot
            arrays |= model.objective.predict_pictures(model, images[:PICTURES])
    return {name: _stored_array(tensor) for name, tensor in arrays.items()}


def _filters(model: nn.Module) -> dict[str, Tensor]:
    from vitlens import filters

    components, variance = filters.principal(model, COMPONENTS)
    rest = COMPONENTS - len(variance)
    padding = components.new_zeros(rest, *components.shape[1:])
    return {
        "filters": torch.cat([components, padding]),
        "filters_variance": torch.cat([variance, variance.new_zeros(rest)]),
    }


def _positions(model: nn.Module) -> dict[str, Tensor]:
    from vitlens import positions

    return {"positions": positions.similarity(model)}


def _attention(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The arrays of attention, and the logits of the captured forward pass."""
    from vitlens import attention
    from vitlens.models import run
    from vitlens.recorder.record import capture

    with capture(model) as attn:
        logits = run(model, images)
    return {
        "distances": attention.mean_distance(attn).mean(dim=0),
        "rollout": attention.rollout(attn)[:ROLLOUTS],
        "prefix": torch.tensor(attn.grid.prefix),
        "logits": logits,
    }


def _stored_array(tensor: Tensor) -> np.ndarray:
    """A tensor as an array, with fractions in float16."""
    if tensor.is_floating_point():
        tensor = tensor.half()
    return tensor.detach().cpu().numpy()


def save(path: str | os.PathLike, step: int, arrays: dict[str, np.ndarray]) -> None:
    """Add the snapshot of `step` to the compressed `.npz` file `path`, and drop later steps from it.

    The file holds `steps` (S,) and each array with a leading dimension S. A snapshot takes 20 to 100 kB.
    """
    path = Path(path)
    content = {"steps": np.array([step], dtype=np.int64)}
    for name, array in arrays.items():
        content[name] = array[None]

    def add(earlier: bytes | None) -> bytes:
        if earlier is not None:
            before = load(path)
            rows = before["steps"] < step
            if rows.any():  # else the file is of another run, whose arrays may have other shapes
                for name, array in content.items():
                    content[name] = np.concatenate([before[name][rows], array])
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **content)
        return buffer.getvalue()

    path.parent.mkdir(parents=True, exist_ok=True)
    update(path, add)


def changes(arrays: dict[str, np.ndarray]) -> list[str]:
    """Sentences about the first and the last snapshot: position similarity by distance, and the nearest head.

    arrays: from `load`. Arrays that the model does not support have no sentence.

    >>> arrays = {"distances": np.array([[[16.0, 16.0]], [[15.0, 4.0]]])}
    >>> vitlens.train.snapshots.changes(arrays)
    ['Nearest head: mean attention distance 16.0 → 4.0 px (layer 0, head 1).']
    """
    return [*_change_of_positions(arrays), *_change_of_distances(arrays)]


def _change_of_positions(arrays: dict[str, np.ndarray]) -> list[str]:
    from vitlens.positions import rank_correlation

    if "positions" not in arrays:
        return []
    first, last = (torch.from_numpy(arrays["positions"][k]).float() for k in (0, -1))
    before, after = rank_correlation(first), rank_correlation(last)
    if math.isnan(after):
        return []
    change = with_minus(f"{before:.2f} → {after:.2f}")
    return [f"Position embeddings: rank correlation of similarity with distance {change}."]


def _change_of_distances(arrays: dict[str, np.ndarray]) -> list[str]:
    if "distances" not in arrays:
        return []
    first, last = arrays["distances"][0], arrays["distances"][-1]
    if np.isnan(last).all():
        return []
    layer, head = np.unravel_index(np.nanargmin(last), last.shape)
    change = f"{np.nanmin(first):.1f} → {last[layer, head]:.1f} px"
    return [f"Nearest head: mean attention distance {change} (layer {layer}, head {head})."]


def is_ours(path: Path) -> bool:
    """True for a file of snapshots, also if it is damaged."""
    if not path.is_file():
        return False
    try:
        with np.load(path, allow_pickle=False) as file:
            return "steps" in file.files
    except (OSError, ValueError, EOFError):
        return False
    except zipfile.BadZipFile:
        return True


def load(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a file that `save` wrote, or of the directory of a run."""
    path = Path(path) / "snapshots.npz" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise ValueError(
            f"Found no snapshots at {path}. Give a snapshots.npz, or the directory of a run."
        )
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


class Album:
    """Recorder of `count` snapshots of a run. Reports once which arrays the model does not support."""

    def __init__(
        self, out: Path, model: torch.nn.Module, probe: torch.Tensor, steps: int, count: int, say
    ):
        self.path = out / "snapshots.npz"
        self.model = model
        self.probe = probe
        self.say = say
        self.due = set(schedule(steps, count)) if count else set()

    def begin(self) -> None:
        """Record the initial weights, in a new file."""
        if self.due:
            remove_ours(self.path, is_ours)
            self.record_if_due(0)

    def record_if_due(self, step: int) -> None:
        """Record a snapshot if the schedule holds this step."""
        if step not in self.due:
            return
        missing: list[str] = []
        try:
            save(self.path, step, record(self.model, self.probe, missing))
        except Exception as problem:  # a failed snapshot must not end the run
            self.say(f"Snapshots stop at step {step}: {problem}")
            self.due.clear()
        if step == 0:
            for reason in missing:
                self.say(f"Not in the snapshots: {reason}")

    def end(self) -> None:
        """Print what changed since the first step, in the file of a run whose snapshots reach its end."""
        if not self.due:
            return
        arrays = load(self.path)
        if arrays["steps"][-1] == max(self.due):
            for sentence in changes(arrays):
                self.say(sentence)
