"""What a run writes at its end: `training.json` and, if it is finished, the model in timm's hub layout."""

from __future__ import annotations

import datetime
import json
import operator
import platform
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import timm
import torch

from vitlens.data import ImageSet, ImageStream
from vitlens.data.files import write
from vitlens.train.checkpoint import newest_first
from vitlens.train.hub_layout import export
from vitlens.train.journal import BUILT_BY, checksum
from vitlens.train.processes import World
from vitlens.train.recipes import RECIPES
from vitlens.train.settings import FROM_MODEL, Recipe
from vitlens.train.sources import Source
from vitlens.train.validation import counting, validate

FOUND = ("num_classes",)  # in the data


def finish(
    out, plan, model, average, data, *, last, steps, damaged=0, seconds=0.0, command="", world=None, exports=False
) -> dict:
    """Write `training.json` of a run whose last step was `last`, and return its content.

    The model of a finished run is exported, or of any if `exports`: the raw or the averaged weights, whichever are more
    accurate, or without labels have the lower loss; after fine-tuning always the averaged ones, since its validation
    images may be the test images, too.
    """
    world = world or World(device=next(model.parameters()).device)
    metrics = {} if last is None else last.metrics
    finished = last is None or last.step == steps  # a finished run, resumed, yields nothing
    exports = exports or finished
    if exports and not metrics:
        metrics = validate(model, average, data[1], plan, world)
    name, better = ("valid_loss", operator.lt) if hasattr(model, "objective") else ("top1", operator.gt)
    both = metrics.get(name), metrics.get(f"{name}_average")
    averaged = both[1] is not None and (plan.init != "" or better(both[1], both[0]))
    account = {
        "command": command,
        "built_by": getattr(model, "built_by", BUILT_BY),
        "finished": finished,
        "validation": {
            name: both[0],
            f"{name}_average": both[1],
            "images": counting(data[1], world),
            "exported": ("moving average of the weights" if averaged else "raw weights") if exports else None,
        },
        "training_images": len(data[0]),
        "labels": checksum(data[0]),
        "pictures": data[0].pictures,
        "damaged": damaged,
        "epochs": plan.epochs,
        "steps": steps,
        "seconds": round(seconds, 1),
        "hardware": hardware(world.device, world.size),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "recipe": _portable(plan).to_dict(),
    }
    if world.rank > 0:
        return account
    if exports:
        export(model, out / "model", plan, data[0].class_names, weights=average if averaged else None, training=account)
        write(out / "model" / "recipe.json", _portable(plan).to_json().encode())
    write(out / "training.json", json.dumps(account, indent=2, ensure_ascii=False).encode())
    return account


def finished_before(out: Path, plan: Recipe, train: ImageSet | ImageStream, built_by: str = BUILT_BY) -> dict | None:
    """`training.json` of a run in `out` that is finished, by this plan and on these images, and has its model."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        account = json.loads((out / "training.json").read_text())
        same = Recipe.from_dict(account["recipe"]) == _portable(plan) and account["labels"] == checksum(train)
        same = same and account.get("built_by", BUILT_BY) == built_by
        same = same and account.get("pictures", train.pictures) == train.pictures
        if account["finished"] and same and (out / "model" / "model.safetensors").is_file():
            return account
    return None


def _portable(plan: Recipe) -> Recipe:
    """The plan without the local path of the starting model."""
    return replace(plan, init=Path(plan.init).name)


def seconds_before(out: Path) -> float:
    """Seconds that the run took before it was stopped or killed, by its account or its newest checkpoint."""
    found = [0.0]
    for path in (out / "training.json", *newest_first(out / "checkpoints")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append(float(json.loads(path.read_text())["seconds"]))
    return max(found)


def hardware(device: torch.device | str, processes: int = 1) -> str:
    """The devices of all processes together: "1 × NVIDIA H200" or "2 CPU threads, AMD EPYC"."""
    if torch.device(device).type == "cuda":
        return f"{processes} × {torch.cuda.get_device_name(device)}"
    return ", ".join(filter(None, (f"{processes * torch.get_num_threads()} CPU threads", processor())))


def processor() -> str:
    """The name of the processor as the system gives it, such as "AMD EPYC"; "" if it gives none."""
    with suppress(OSError):  # what Python's `platform` does not read on Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def versions() -> dict[str, str]:
    """Versions of Python, PyTorch and timm, by name."""
    return {"python": sys.version.split()[0], "torch": str(torch.__version__), "timm": timm.__version__}


def command_of(plan: Recipe, source: Source, splits) -> str:
    """A command that repeats the run, with every setting that differs from the named recipe."""
    named = source.data.partition("/")[0] in ("torch", "hfds", "wds", "vtab", "vtab800")
    words = ["vitlens", "train", "--recipe", plan.name, "--data", source.data if named else Path(source.data).name]
    words += ["--stream"] if isinstance(splits[0], ImageStream) else ["--hold"] if source.stream is False else []
    words += ["--skip-damaged"] if source.on_damaged == "skip" else []
    words += ["--model", Path(plan.init).name] if plan.init else []
    if plan.name not in RECIPES:  # a recipe from a file
        return shlex.join([*words[:3], "recipe.json", *words[4:], "--out", "DIR"])
    brought = ("init", "model_kwargs", *FROM_MODEL) if plan.init else ()
    usual = {name: value for name, value, _ in RECIPES[plan.name].described()}
    for name, value, _ in plan.described():
        if name in FOUND or name in brought or value == usual[name]:
            continue
        if name == "model_kwargs":
            words += [word for key, each in value.items() for word in ("--set", f"model.{key}={each}")]
        else:
            words += ["--set", f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"]
    return shlex.join([*words, "--out", "DIR"])
