"""What a run will do: the recipe of its folder or its name, with what the user changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vitlens.data.files import writable
from vitlens.train import checkpoint
from vitlens.train.journal import FREE
from vitlens.train.recipes import read_recipe, starting_from
from vitlens.train.settings import FROM_MODEL, Recipe
from vitlens.train.snapshots import schedule


def refuse(out: Path, device: torch.device, resume: bool, max_minutes, fit_minutes, watch: int) -> None:
    """Raise ValueError for options that make no sense, before anything is read or written."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("The device is cuda, but PyTorch finds none on this machine. Train on the cpu.")
    for name, minutes in {"max-minutes": max_minutes, "fit-minutes": fit_minutes}.items():
        if minutes is not None and not 0 < minutes < math.inf:
            raise ValueError(f"--{name} must be a positive number of minutes, got {minutes}.")
    if watch:
        schedule(1, watch)  # which refuses too few
    if not resume and (checkpoint.newest_first(out / "checkpoints") or (out / "training.json").exists()):
        raise ValueError(f"{out} already holds a run. Resume it, or train into another folder.")
    if not resume and (out / "model" / "model.safetensors").exists():
        raise ValueError(f"{out} already holds the model of a run. Train into another folder.")
    if resume and not out.is_dir():
        raise ValueError(f"There is no run to resume in {out}: the folder does not exist.")
    writable(out, "--out")


def planned(
    name: str, model: str, out: Path, resume: bool, overrides: Sequence[str], seed: int | None, tiny: bool
) -> Recipe:
    """The recipe of the run: the one in its folder when it is resumed, else the named one, with what was overridden.

    name: of a recipe, or a JSON file; when a run is resumed, only its name is compared. model: to start from; a recipe
    that is made to continue a model needs one.
    """
    kept = out / "recipe.json"
    resumed = resume and kept.exists()
    plan = read_recipe(kept if resumed else name)
    if resumed:
        named = read_recipe(name).name if name.endswith(".json") else name
        if plan.name != named:
            raise ValueError(f"The run in {out} follows the recipe {plan.name}, not {named}. Resume it by that name.")
        if tiny and not plan.train_images:
            raise ValueError(f"The run in {out} is not a tiny one. Resume it without --tiny.")
        if model and model != plan.init and not _same(model, plan.init):
            raise ValueError(f"The run in {out} started from {plan.init or 'random weights'}, not {model}.")
    source = plan.init if resumed else model or plan.init
    fixed = [key for key in (each.partition("=")[0] for each in overrides) if key in FROM_MODEL or key[:6] == "model."]
    if source and fixed:
        raise ValueError(f"{fixed[0]} comes with the model that the run starts from, and cannot be set.")
    plan = (plan.tiny() if tiny and not resumed else plan).override(*overrides)
    if source and not resumed:
        plan = starting_from(plan, source)
    elif plan.continues and not source:
        raise ValueError(f"The recipe {plan.name} continues a trained model: name one with --model.")
    return plan if seed is None else replace(plan, seed=seed)


def unlike(plan: Recipe, name: str) -> str:
    """A sentence on how the recipe of a resumed run differs from the JSON file `name`, or "".

    The run keeps its own, which `--set` may have changed when it began.
    """
    if not name.endswith(".json"):
        return ""
    file = read_recipe(name)
    file = file.tiny() if plan.train_images and not file.train_images else file
    own, said = ({**each.to_dict(), **vars(each.augment)} for each in (plan, file))
    free = {"augment", "init", "num_classes", "seed", *FREE}
    free |= {"model_kwargs", *FROM_MODEL} if plan.init else set()
    others = [f"{k} is {own[k]} (not {said[k]})" for k in said if k not in free and said[k] not in (own[k], "auto")]
    return f"The run goes on by its own recipe and not by {name}: {', '.join(others)}." if others else ""


def _same(one: str, other: str) -> bool:
    """Whether two spellings are of one folder."""
    return bool(other) and Path(one).exists() and Path(one).resolve() == Path(other).resolve()
