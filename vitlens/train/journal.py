"""The folder of a run: `log.jsonl` with a line for each reading, and checkpoints to resume from."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from vitlens.data import ImageSet
from vitlens.data.files import write
from vitlens.data.imageset import workers_ended
from vitlens.train import checkpoint
from vitlens.train.processes import World
from vitlens.train.settings import Recipe

DIVERGED = (
    "Checkpoints that were saved are intact; train anew, into another folder, with a lower learning rate, a longer "
    "warm-up or in fp32."
)
# Settings that may differ between a run and its continuation: they change nothing that is computed.
FREE = ("log_every", "save_every", "accumulate")
BUILT_BY = "its recipe"
# What else must be the same, and how it is told.
FACTS = {
    "images": "on {} training images",
    "labels": "on images whose labels and class names have the checksum {}",
    "pictures": "on images whose files have the checksum {}",
    "held": "with images in an {}",
    "built_by": "with a model built by {}",
    "objective": "to learn {}",
}
# What may differ, but then the numbers are not to the bit those of a run that was never stopped.
SAID = {
    "parts": "each batch in {} instead of {} parts",
    "device": "the device {} instead of {}",
    "threads": "{} instead of {} CPU threads",
    "torch": "PyTorch {} instead of {}",
}


def checksum(images: ImageSet) -> str:
    """Checksum of labels and class names."""
    digest = hashlib.sha256("\0".join(images.class_names).encode())
    digest.update(images.labels.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def name_of(made: object) -> str:
    """Name of a callable, with the arguments of a partial: "experiments.small_data.build(tokenizer='conv-stem')"."""
    if isinstance(made, partial):
        arguments = [*map(repr, made.args), *(f"{name}={value!r}" for name, value in made.keywords.items())]
        return f"{name_of(made.func)}({', '.join(arguments)})"
    kind = made if hasattr(made, "__qualname__") else type(made)
    return f"{kind.__module__}.{kind.__qualname__}"


def facts_of(model: nn.Module, train: ImageSet, recipe: Recipe, world: World) -> dict:
    """What a run depends on besides its recipe: its images, how they are read and cut into parts, and the machine."""
    return {
        "images": len(train), "labels": checksum(train), "pictures": train.pictures, "held": type(train).__name__,
        "parts": world.size * recipe.accumulate, "device": world.device.type,
        "threads": torch.get_num_threads() if world.device.type == "cpu" else None, "torch": str(torch.__version__),
        "built_by": getattr(model, "built_by", BUILT_BY),
        "objective": name_of(model.objective) if hasattr(model, "objective") else "labels",
    }  # fmt: skip


class Journal:
    """Writes the log and the checkpoints of one run; with `out=None` nothing.

    state: the model, its averaged weights and its optimizers, whose tensors are read when a checkpoint is saved.
    """

    def __init__(self, out: Path | str | None, recipe: Recipe, state: tuple, facts: dict, world: World):
        self.folder = None if out is None else Path(out)
        self.writes = self.folder is not None and world.rank == 0
        self.recipe, self.state, self.facts = recipe, state, facts
        self.saved_step, self.saved_at = 0, time.monotonic()
        self.began, self.seconds_before = self.saved_at, 0.0

    def begin(self) -> int:
        """Start the log; returns the steps done, 0. Raises ValueError if the folder holds checkpoints."""
        if self.writes:
            if checkpoint.newest_first(self.folder / "checkpoints"):
                raise ValueError(
                    f"{self.folder} already holds checkpoints of a run. Resume it, or train into another folder."
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            write(self.folder / "log.jsonl", b"")
        return 0

    def resume(self) -> int:
        """Restore the newest good checkpoint and return its step. Says what will make later steps differ in bits.

        Raises ValueError if the checkpoint is of another run.
        """
        found = checkpoint.load_newest(self.folder / "checkpoints")
        if found is None:
            return self.begin()
        tensors, scalars = found
        before, now = scalars["recipe"], json.loads(self.recipe.to_json())
        for key in now:
            if before.get(key) != now[key] and key not in FREE:
                raise ValueError(
                    f"The run in {self.folder} was started with {key} = {before.get(key)!r} and is to be resumed with "
                    f"{now[key]!r}. Resume it with its own recipe, or train into another folder."
                )
        for key, what in FACTS.items():
            told = scalars.get(key, self.facts[key])  # older runs do not tell of their pictures
            if told != self.facts[key]:
                raise ValueError(
                    f"The run in {self.folder} was started {what.format(told)} and is to be resumed "
                    f"{what.format(self.facts[key])}. Resume it as it was, or train into another folder."
                )
        if self.writes and (said := self._differences(scalars)):
            tqdm.write(f"Resumed with {' and '.join(said)}: from here on not to the bit as if never stopped.")
        self.seconds_before = scalars.get("seconds", 0.0)
        checkpoint.restore(tensors, *self.state)
        log = self.folder / "log.jsonl"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        # Lines later than the checkpoint are about to be written again; so is one that a crash cut short.
        kept = [line for line in lines if _step(line) <= scalars["step"]]
        if self.writes:
            write(log, "".join(f"{line}\n" for line in kept).encode())
        self.saved_step = scalars["step"]
        return self.saved_step

    def _differences(self, before: dict) -> list[str]:
        """What has changed since then and makes numbers differ in their last bits, in words."""
        drops = self.recipe.dropout or self.recipe.drop_path or self.recipe.patch_drop or self.recipe.masked
        said = []
        for key, what in SAID.items():
            now, then = self.facts[key], before.get(key, self.facts[key])
            if now != then and None not in (now, then):
                drawn = ", for each of which dropout is drawn" if key == "parts" and drops else ""
                said.append(what.format(now, then) + drawn)
        return said

    def log(self, record: dict) -> None:
        if self.writes:
            with open(self.folder / "log.jsonl", "a") as file:
                file.write(json.dumps({**record, "time": round(time.time(), 2)}) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a checkpoint that survives a power cut has the readings before it

    def due(self) -> bool:
        return self.writes and time.monotonic() - self.saved_at >= self.recipe.save_every

    @contextmanager
    def kept(self, step: int, record: dict | None = None) -> Iterator[None]:
        """Save the state after `step` steps, and log `record`, if another process or a reader ends in this block."""
        try:
            yield
        except (ConnectionError, ChildProcessError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not workers_ended(error):
                raise
            if record is not None:
                self.log(record)
            self.save(step)
            raise

    def save(self, step: int) -> None:
        if not self.writes or step == self.saved_step:
            return
        if not all(t.isfinite().all() for t in self.state[0].state_dict().values()):
            raise FloatingPointError(f"After step {step} some weights are no numbers, so nothing was saved. {DIVERGED}")
        seconds = self.seconds_before + time.monotonic() - self.began
        scalars = {"recipe": json.loads(self.recipe.to_json()), **self.facts, "seconds": round(seconds, 1)}
        checkpoint.save(self.folder / "checkpoints", step, checkpoint.flat(*self.state), scalars)
        self.saved_step, self.saved_at = step, time.monotonic()


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
