"""Checkpoints that survive being killed: safetensors for tensors, JSON for the rest, no pickle.

A checkpoint of step n is two files. `step-n.safetensors` holds every tensor under a flat name (`model.…`,
`average.…`, `optimizer.0.<parameter>.<moment>`); `step-n.json` holds scalars, the recipe and the SHA-256 of the
first, and is renamed into place last: a checkpoint exists once its JSON does. The two newest are kept.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm.auto import tqdm

from vitlens.data.files import write

KEPT = 2


class Damaged(Exception):
    """A checkpoint whose files are not as they were written."""


def save(folder: Path, step: int, tensors: dict[str, Tensor], scalars: dict) -> None:
    """Write one checkpoint and delete all but the newest `KEPT`. If writing fails (disk full), those stay intact."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"step-{step:08d}"
    payload = safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    content = {"step": step, "sha256": hashlib.sha256(payload).hexdigest(), **scalars}
    write(stem.with_suffix(".safetensors"), payload)
    write(stem.with_suffix(".json"), json.dumps({**content, "check": _digest(content)}, indent=1).encode())
    # Not those of later steps: they were damaged, or this one would not have been reached again.
    kept = [marker for marker in newest_first(folder) if marker.stem <= stem.name][:KEPT]
    for torn in folder.glob(".step-*.tmp"):  # of a process that was killed while it wrote
        torn.unlink(missing_ok=True)
    for old in folder.glob("step-*"):  # an orphan without JSON goes too
        if old.with_suffix(".json") not in kept:
            old.unlink(missing_ok=True)


def load(marker: Path) -> tuple[dict[str, Tensor], dict]:
    """Tensors (on the CPU) and scalars of the checkpoint whose JSON is `marker`. Raises Damaged."""
    try:
        content = json.loads(marker.read_bytes())
        if content.pop("check") != _digest(content):
            raise Damaged(f"{marker.name} is not what was written")
        payload = marker.with_suffix(".safetensors").read_bytes()
        if hashlib.sha256(payload).hexdigest() != content["sha256"]:
            raise Damaged(f"{marker.stem}.safetensors is not what was written")
        return safetensors.torch.load(payload), content
    except (OSError, ValueError, KeyError, AttributeError, TypeError, safetensors.SafetensorError) as problem:
        raise Damaged(f"{marker.stem} cannot be read ({problem})") from problem


def load_newest(folder: Path) -> tuple[dict[str, Tensor], dict] | None:
    """Tensors and scalars of the newest good checkpoint, or None if there is none. Prints which are damaged.

    Raises ValueError if every checkpoint is damaged.
    """
    markers = newest_first(folder)
    for marker in markers:
        try:
            return load(marker)
        except Damaged as problem:
            tqdm.write(f"The checkpoint {marker.stem} is damaged and passed over: {problem}.")
    if markers:
        raise ValueError(
            f"Every checkpoint in {folder} is damaged. Delete them to start again, or give another folder."
        )
    return None


def newest_first(folder: Path) -> list[Path]:
    """The JSON files of the checkpoints in a folder, newest first."""
    return sorted(folder.glob("step-*.json"), reverse=True)


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def flat(model: nn.Module, average: dict[str, Tensor], optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Every tensor of a run, by one flat name."""
    names = {p: name for name, p in model.named_parameters()}
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    tensors |= {f"average.{name}": t for name, t in average.items()}
    for i, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            tensors |= {f"optimizer.{i}.{names[parameter]}.{key}": value for key, value in state.items()}
    return tensors


def restore(
    tensors: dict[str, Tensor], model: nn.Module, average: dict[str, Tensor], optimizers: list[Optimizer]
) -> None:
    """Undo `flat` in place. Raises ValueError if the tensors belong to another model."""
    found = {name[6:]: t for name, t in tensors.items() if name.startswith("model.")}
    wanted = model.state_dict()
    wrong = sorted(set(found) ^ set(wanted)) or [n for n in wanted if found[n].shape != wanted[n].shape]
    if wrong:
        raise ValueError(
            f"The checkpoint belongs to another architecture: {wrong[0]} is not the same in both. Resume with the "
            "recipe that the run was started with, or train into another folder."
        )
    model.load_state_dict(found)
    for name, t in average.items():
        t.copy_(tensors[f"average.{name}"])
    parameters = dict(model.named_parameters())
    for i, optimizer in enumerate(optimizers):
        prefix = f"optimizer.{i}."
        for full, value in tensors.items():
            if full.startswith(prefix):
                name, _, key = full[len(prefix) :].rpartition(".")
                # Step counters of the fused optimizers live beside their parameters, in fp32 like the moments.
                optimizer.state[parameters[name]][key] = value.to(parameters[name].device, copy=True)
