"""The directory of a run: its files, checkpoints and resumption.

    recipe.json            settings
    data.json              the images: their place, and whether they are streamed
    images.npy             digests of the training images (`vitlens.digests`)
    log.jsonl              one line for each reading of the loss
    checkpoints/step-N.*   the two newest states: safetensors for tensors, JSON for the rest
    training.json          at the end: how the model was trained
    model/                 the model in timm's hub layout for `vitlens.load_model`, and for timm unless another package
                           has its architecture

Every complete file is renamed into place. A checkpoint's JSON comes last, so it marks a complete checkpoint.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import timm
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm.auto import tqdm

from vitlens.data import ImageSet, ImageStream
from vitlens.data.imageset import PIXEL_READING, lost_workers, same_images
from vitlens.digests import FILE, RUN_FILE, Digests, read_trained_on
from vitlens.files import (
    MARK,
    append,
    lock,
    read,
    read_object,
    read_text,
    remove_folder,
    remove_ours,
    require_ours,
    write,
)
from vitlens.processes import World
from vitlens.texts import encode
from vitlens.train import snapshots
from vitlens.train.criteria import metric_name, validate
from vitlens.train.objectives import RENAMED
from vitlens.train.processes import hardware, versions
from vitlens.train.settings import Recipe

DIVERGED = "Checkpoints are intact. Train into another folder with a lower lr, a longer warm-up or precision=fp32."
KEPT = 2  # checkpoints
FREE = ("log_every", "save_every", "accumulate")
"""Settings that may change on resume without any effect on results."""
COMPARED = ("images", "labels", "pictures", "digests")
"""Facts about the training images, which `RunFolder.compare` compares first."""
MACHINE = ("parts", "device", "threads", "torch", "pixel_reading")
"""Facts that may change on resume, at the cost of bit-exactness."""
BUILT_BY = "its recipe"
STATISTICS = ("running_mean", "running_var")
"""Name endings of batch normalization's running statistics."""


# Checkpoints


def save_checkpoint(folder: Path, step: int, tensors: dict[str, Tensor], scalars: dict) -> None:
    """Write one checkpoint and delete all but the newest `KEPT`. If writing fails (disk full), these stay intact."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"step-{step:08d}"
    # Copies, because safetensors rejects tied weights.
    copies = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
    payload = safetensors.torch.save(copies)
    content = {"step": step, "sha256": hashlib.sha256(payload).hexdigest(), **scalars}
    write(stem.with_suffix(".safetensors"), payload)
    write(stem.with_suffix(".json"), json.dumps(content, indent=1).encode())
    # Checkpoints of later steps are damaged, else the run would have resumed from them.
    kept = [marker for marker in newest_first(folder) if marker.stem <= stem.name][:KEPT]
    for old in checkpoint_files(folder):  # an orphan without JSON goes too
        if old.with_suffix(".json") not in kept:
            remove_ours(old, is_checkpoint)


def checkpoint_files(folder: Path) -> list[Path]:
    """Files of checkpoints in a folder, in which other files may be, too.

    With temporary files, as earlier versions named them, of processes that were killed while writing.
    """
    paths = [*folder.glob("step-*"), *folder.glob(".step-*.tmp")]
    return [path for path in paths if is_checkpoint(path)]


def is_checkpoint(path: Path) -> bool:
    """True for the name of a file of a checkpoint, such as step-00000100.json, or of its temporary file."""
    return bool(re.fullmatch(r"step-\d{8,}\.(json|safetensors)|\.step-\d{8,}\.\w+\.tmp", path.name))


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a run, and their folder if nothing else is in it."""
    for path in checkpoint_files(folder):
        remove_ours(path, is_checkpoint)
    remove_folder(folder)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict]:
    """Tensors (on the CPU) and scalars of the newest intact checkpoint. Prints the names of damaged ones.

    Raises ValueError if all are damaged.
    """
    for marker in newest_first(folder):
        try:
            content = json.loads(read_text(marker))
            payload = read(marker.with_suffix(".safetensors"), pipes=False)
            if hashlib.sha256(payload).hexdigest() != content["sha256"]:
                raise ValueError("its tensors differ from what was written")
            return safetensors.torch.load(payload), content
        except (OSError, ValueError, KeyError, TypeError) as error:
            tqdm.write(f"The checkpoint {marker.stem} is damaged and skipped: {error}.")
    raise ValueError(
        f"All checkpoints in {folder} are damaged. Delete them to start again, or use another folder."
    )


def newest_first(folder: Path) -> list[Path]:
    """The JSON files of the checkpoints in a folder, newest first."""
    markers = [path for path in checkpoint_files(folder) if path.suffix == ".json"]
    return sorted(markers, reverse=True)


def flat_state(
    model: nn.Module, average: dict[str, Tensor], optimizers: list[Optimizer]
) -> dict[str, Tensor]:
    """All tensors of a run by flat names: `model.…`, `average.…`, `optimizer.0.<parameter>.<moment>`."""
    names = {p: name for name, p in model.named_parameters()}
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    tensors |= {f"average.{name}": t for name, t in average.items()}
    for i, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"optimizer.{i}.{names[parameter]}.{key}"] = value
    return tensors


def restore_state(
    tensors: dict[str, Tensor],
    model: nn.Module,
    average: dict[str, Tensor],
    optimizers: list[Optimizer],
):
    """Copy the tensors of `flat_state` back into model, average and optimizers."""
    prefix = "model."
    weights = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
    model.load_state_dict(weights)
    for name, t in average.items():
        t.copy_(tensors[f"average.{name}"])
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        if not name.startswith("optimizer."):
            continue
        _, i, rest = name.split(".", 2)
        parameter_name, key = rest.rsplit(".", 1)
        parameter = parameters[parameter_name]
        # Fused optimizers keep step counters in fp32 on the device of the parameters.
        optimizers[int(i)].state[parameter][key] = value.to(parameter.device, copy=True)


# Log and resumption


def label_checksum(images: ImageSet) -> str:
    """Checksum of labels and class names."""
    digest = hashlib.sha256(encode("\0".join(images.class_names)))
    digest.update(images.labels.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def callable_name(function: object) -> str:
    """Name of a callable, with the arguments of a partial: "experiments.small_data.build(tokenizer='conv-stem')"."""
    if isinstance(function, partial):
        arguments = [repr(value) for value in function.args]
        arguments += [f"{name}={value!r}" for name, value in function.keywords.items()]
        return f"{callable_name(function.func)}({', '.join(arguments)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def run_facts(model: nn.Module, train: ImageSet, recipe: Recipe, world: World) -> dict:
    """Facts that determine a run besides its recipe: images, model, split of batches, and machine."""
    return {
        "images": len(train),
        "labels": label_checksum(train),
        "pictures": train.fingerprint,
        "digests": train.digests,
        "held": type(train).__name__,
        "pixel_reading": PIXEL_READING,
        "built_by": getattr(model, "built_by", BUILT_BY),
        "objective": callable_name(model.objective) if hasattr(model, "objective") else "labels",
        "parts": world.size * recipe.accumulate,
        "device": world.device.type,
        "threads": torch.get_num_threads() if world.device.type == "cpu" else None,
        "torch": str(torch.__version__),
    }


class RunFolder:
    """Writer of the log and the checkpoints of one run. `out=None` writes no files.

    state: (model, averaged weights, optimizers), whose tensors are read when a checkpoint is saved.
    """

    def __init__(
        self, out: str | os.PathLike | None, recipe: Recipe, state: tuple, facts: dict, world: World
    ):
        self.path = None if out is None else Path(out)
        self.writes = self.path is not None and world.rank == 0
        self.recipe = recipe
        self.state = state
        self.facts = facts
        self.saved_step = 0
        self.seconds_before = 0.0
        self.began = self.saved_at = time.monotonic()

    def begin(self, resume: bool) -> int:
        """Start the log, or restore the newest intact checkpoint. Returns the number of steps done.

        Raises ValueError if the directory holds checkpoints without `resume`, or checkpoints of another run.
        """
        markers = newest_first(self.path / "checkpoints") if self.path else []
        if markers and not resume:
            raise ValueError(
                f"{self.path} already holds checkpoints. Resume the run, or train into another folder."
            )
        if markers:
            tensors, scalars = load_checkpoint(self.path / "checkpoints")
            self.compare(scalars)
            restore_state(tensors, *self.state)
            self.saved_step = scalars["step"]
            self.seconds_before = scalars.get("seconds", 0.0)
        if self.writes:
            self.path.mkdir(parents=True, exist_ok=True)
            log = self.path / "log.jsonl"
            if not markers:
                require_ours({log: is_log}, "folder")
            lines = log_lines(log, self.saved_step) if markers else []
            write(log, "".join(lines).encode())
        return self.saved_step

    def compare(self, before: dict) -> None:
        """Raise ValueError if a checkpoint belongs to another run. Print changes that end bit-exactness."""
        settings = Recipe.from_dict(before["recipe"]).to_dict()
        changes = self._changes(settings, self.recipe.to_dict())
        self._require_same_images(before)
        changes += self._changes(before, self.facts)
        if self.writes and changes:
            tqdm.write(
                f"Resumed with {', '.join(changes)}. Results will not be bit-identical to an unbroken run."
            )

    def _require_same_images(self, before: dict) -> None:
        """Raise ValueError if a checkpoint belongs to a run with other training images, with what has changed."""
        now = self.facts
        advice = "Put the images back as they were, or train into another folder."
        begun = f"The training images have changed since the run in {self.path} was started"
        if before.get("images", now["images"]) != now["images"]:
            raise ValueError(
                f"{begun}: it has {before['images']:,} of them, and the data now {now['images']:,}. {advice}"
            )
        if before.get("labels", now["labels"]) != now["labels"]:
            raise ValueError(
                f"{begun}: the names of the classes or the labels of the images are others. {advice}"
            )
        pictures = before.get("pictures", now["pictures"])
        if pictures == now["pictures"] or same_images(pictures, now["pictures"]):
            return
        changed = "the content of some files is another"
        digests = Digests.read(self.path / RUN_FILE)
        count = now["images"]
        if digests is not None and now["digests"] is not None and len(digests) >= count:
            names = now["digests"].names_of_changed(digests.select_rows(np.arange(count)))
            if names:
                listed = ", ".join(names[:5])
                more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
                changed = f"{len(names):,} of {count:,} have another content: {listed}{more}"
        raise ValueError(f"{begun}: {changed}. {advice}")

    def _changes(self, before: dict, now: dict) -> list[str]:
        """Changed values of `MACHINE` in words. Raises ValueError for other changes, except those of `FREE`."""
        changes = []
        for key, value in now.items():
            previous = before.get(key)
            if key == "objective":
                previous = RENAMED.get(previous, previous)
            if previous == value or key in FREE or key in COMPARED:
                continue
            if key == "compile" and "auto" in (previous, value) and not self.recipe.compile_cpu:
                continue  # "auto" remains on a CPU only, which then compiles in no mode
            if key not in MACHINE:
                raise ValueError(
                    f"The run in {self.path} was started with {key} = {previous!r}, got {value!r}. "
                    "Resume it with the same value, or train into another folder."
                )
            if previous is not None and value is not None:
                changes.append(f"{key} = {value} instead of {previous}")
        return changes

    def log(self, record: dict) -> None:
        if not self.writes:
            return
        line = json.dumps({**record, "time": round(time.time(), 2)})
        # It reaches the disk, so that a checkpoint after a power cut has the readings before it.
        append(self.path / "log.jsonl", line + "\n")

    def is_due(self) -> bool:
        """True if `save_every` seconds have passed since the last checkpoint."""
        return self.writes and time.monotonic() - self.saved_at >= self.recipe.save_every

    @contextmanager
    def rescue(self, step: int, record: dict | None = None) -> Iterator[None]:
        """Save the state after `step` steps and log `record` if another process or a worker ends in this block.

        Buffers (batch normalization's statistics) are first restored to their values before the block.
        """
        buffers = list(self.state[0].buffers()) if self.writes else []
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        except (ConnectionError, ChildProcessError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not lost_workers(error):
                raise
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            if record is not None:
                self.log(record)
            self.save(step)
            raise

    def save(self, step: int) -> None:
        if not self.writes or step == self.saved_step:
            return
        weights = self.state[0].state_dict().values()
        if not all(t.isfinite().all() for t in weights):
            raise FloatingPointError(
                f"Weights are not finite after step {step}, so they were not saved. {DIVERGED}"
            )
        seconds = self.seconds_before + time.monotonic() - self.began
        facts = {key: value for key, value in self.facts.items() if key != "digests"}
        scalars = {"recipe": self.recipe.to_dict(), **facts, "seconds": round(seconds, 1)}
        save_checkpoint(self.path / "checkpoints", step, flat_state(*self.state), scalars)
        self.saved_step = step
        self.saved_at = time.monotonic()


# Files of others


DATA_KEYS = {"stream", "data", "root"}
"""Keys of data.json."""
MORE_DATA_KEYS = {"image_key", "label_key"}
"""Keys that only some runs have in data.json."""
CONFIG_KEYS = {
    *("architecture", "num_classes", "num_features", "label_names", "model_args"),
    "pretrained_cfg",
}
MORE_CONFIG_KEYS = {"outputs", "global_pool", "built_by"}
"""Keys that only some models have in config.json."""


def is_log(path: Path) -> bool:
    """True for the log of a run, also if it is empty or ends within a line."""
    if not path.is_file():
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        first = file.readline()
    return not first or _step_of_line(first) < math.inf or not first.endswith("\n")


def is_data_file(path: Path) -> bool:
    """True for the data.json of a run."""
    return read_object(path).keys() - MORE_DATA_KEYS == DATA_KEYS


def is_config(path: Path) -> bool:
    """True for a config.json of `export`."""
    config = read_object(path)
    source = config.get("pretrained_cfg")
    return (
        config.keys() - MORE_CONFIG_KEYS == CONFIG_KEYS
        and isinstance(source, dict)
        and source.get("custom_load") is False
        and source.keys() >= {"tag", "mean", "std", "first_conv", "classifier"}
    )


def is_digests(path: Path) -> bool:
    """True for the images.npy of a run."""
    return Digests.read(path) is not None


def require_own_folder(out: Path, plan: Recipe) -> None:
    """Raise ValueError if a new run in `out` would replace files that are not of a run.

    A recipe.json is one of a run if it is the plan, except for the number of classes, or if its data.json is there.
    """

    def is_recipe(path: Path) -> bool:
        try:
            there = Recipe.from_dict(read_object(path))
        except (ValueError, TypeError):
            return False
        same = replace(there, num_classes=plan.num_classes) == plan
        return same or is_data_file(out / "data.json")

    require_ours(
        {
            out / "data.json": is_data_file,
            out / "recipe.json": is_recipe,
            out / "log.jsonl": is_log,
            out / RUN_FILE: is_digests,
            out / "snapshots.npz": snapshots.is_ours,
            out / "model" / "config.json": is_config,
        }
    )


@contextmanager
def lock_log(out: str | os.PathLike | None, world: World) -> Iterator[None]:
    """Lock the log of a run, so that no other process trains into its folder. Without effect in all but the first."""
    if out is None or world.rank > 0:
        yield
        return
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "log.jsonl", "folder", waits=False):
        yield


def log_lines(log: Path, last_step: int) -> list[str]:
    """Complete lines of a log up to a step. Later ones will be written again."""
    if not log.exists():
        return []
    lines = read_text(log, errors="replace").splitlines(keepends=True)
    return [line for line in lines if _step_of_line(line) <= last_step]


def _step_of_line(line: str) -> float:
    """Step of a line of the log, or infinity for an incomplete line."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


# The end of a run


def finish(
    out: Path,
    plan: Recipe,
    model: nn.Module,
    average: dict[str, Tensor],
    data: tuple,
    *,
    last,
    steps: int,
    seconds: float = 0.0,
    command: str = "",
    world: World | None = None,
    exports: bool = False,
) -> dict:
    """Write `training.json` of a run whose last step was `last`, and return its content.

    Finished runs export their model, and stopped runs if `exports`: the raw or the averaged weights, whichever validate
    better. Fine-tuning always exports the averaged weights, because its validation images may be the test images.
    """
    if world is None:
        world = World(device=next(model.parameters()).device)
    finished = last is None or last.step == steps  # a finished run yields no steps when resumed
    exports = exports or finished
    metrics = {} if last is None else last.metrics
    if exports and not metrics:
        metrics = validate(model, average, data[1], plan, world)
    averaged = exports_average(model, plan, metrics)
    plan = replace(plan, init=Path(plan.init).name)  # without the local path of the starting model
    account = {
        "command": command,
        "built_by": getattr(model, "built_by", BUILT_BY),
        "finished": finished,
        "validation": validation_of(model, metrics, len(data[1]), exports, averaged),
        "training_images": len(data[0]),
        "labels": label_checksum(data[0]),
        "pictures": data[0].fingerprint,
        "epochs": plan.epochs,
        "steps": steps,
        "seconds": round(seconds, 1),
        "hardware": hardware(world.device, world.size),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "recipe": plan.to_dict(),
    }
    if world.rank > 0:
        return account
    if exports:
        weights = average if averaged else None
        folder = out / "model"
        digests = trained_on(out, data[0])
        export(
            model,
            folder,
            plan,
            data[0].class_names,
            weights=weights,
            training=account,
            digests=digests,
        )
        write(folder / "recipe.json", plan.to_json().encode())
    write(out / "training.json", json.dumps(account, indent=2, ensure_ascii=False))
    return account


def write_digests(out: Path, train: ImageSet | ImageStream, init: str) -> None:
    """Write `images.npy`: digests of the training images, followed by those of the model that the run starts from."""
    digests = train.digests
    if digests is None:
        return
    earlier = read_trained_on(init) if init else None
    if earlier is not None and earlier.digests is not None:
        digests = digests.join(earlier.digests)
    write(out / RUN_FILE, digests.to_bytes())


def trained_on(out: Path, train: ImageSet | ImageStream) -> Digests | None:
    """Digests of the images that the model of a run was trained on, also before the run."""
    digests = train.digests_of_pixels()
    at_start = Digests.read(out / RUN_FILE)
    if digests is None or at_start is None:
        return digests
    return digests.join(at_start.select_rows(np.arange(len(digests), len(at_start))))


def exports_average(model: nn.Module, plan: Recipe, metrics: dict[str, float]) -> bool:
    """True if the averaged weights are exported: after fine-tuning, and if they validate better than the raw ones."""
    name = metric_name(model)
    average = metrics.get(f"{name}_average")
    if average is None:
        return False
    if plan.init:
        return True
    raw = metrics[name]
    return average < raw if name == "valid_loss" else average > raw


def validation_of(
    model: nn.Module, metrics: dict[str, float], images: int, exports: bool, averaged: bool
) -> dict:
    """The entry `validation` of `training.json`."""
    name = metric_name(model)
    exported = None
    if exports:
        exported = "moving average of the weights" if averaged else "raw weights"
    return {
        name: metrics.get(name),
        f"{name}_average": metrics.get(f"{name}_average"),
        "images": images,
        "exported": exported,
    }


def read_finished_run(
    out: Path, plan: Recipe, train: ImageSet | ImageStream, built_by: str = BUILT_BY
) -> dict | None:
    """`training.json` of a finished run in `out` with this plan, these images and an exported model, or None."""
    expected = {
        "finished": True,
        "labels": label_checksum(train),
        "built_by": built_by,
    }
    try:
        account = json.loads(read_text(out / "training.json"))
        recipe = Recipe.from_dict(account["recipe"])
        same_facts = all(account[name] == value for name, value in expected.items())
        same_facts = same_facts and same_images(account["pictures"], train.fingerprint)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if recipe != replace(plan, init=Path(plan.init).name) or not same_facts:
        return None
    return account if (out / "model" / "model.safetensors").is_file() else None


def seconds_of_training(out: Path) -> float:
    """Seconds of training before the run was stopped or killed, from `training.json` or the newest checkpoint."""
    seconds = [0.0]
    for path in (out / "training.json", *newest_first(out / "checkpoints")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            seconds.append(float(json.loads(read_text(path))["seconds"]))
    return max(seconds)


# The model


def export(
    model: nn.Module,
    folder: str | os.PathLike,
    recipe: Recipe,
    class_names: Sequence[str],
    *,
    weights: dict[str, Tensor] | None = None,
    training: dict | None = None,
    digests: Digests | None = None,
    dtype: torch.dtype = torch.float16,
) -> Path:
    """Write `config.json` and `model.safetensors` in timm's hub layout, ready for a model hub. Returns the directory.

    weights: replacements by name, such as the moving average. training: content of `training.json`. digests: of
    the training images, for `trained_on.npy` and the header of the weights. dtype: type on disk, unless a tensor would
    overflow. fp16 halves the file and changes logits by about 1e-3.

    An "mlp" head and the parts of an objective without labels go into `pretraining_head/head.safetensors`. Such a model
    is written without a classifier head (`num_classes` 0).

    Raises ValueError unless each class has a name, and if `folder` holds the model of another program. Layout:
    timm/models/_hub.py.

    >>> digits = vitlens.train.recipe("digits")
    >>> vitlens.train.export(digits.build(), "digits", digits, class_names="0123456789").name
    'digits'
    """
    if len(class_names) != recipe.num_classes:
        raise ValueError(
            f"Expected {recipe.num_classes} class names, one for each class, got {len(class_names)}."
        )
    folder = Path(folder)
    state = convert_weights({**model.state_dict(), **(weights or {})}, dtype)
    prefixes = pretraining_prefixes(model, recipe)
    head = {name: state.pop(name) for name in list(state) if name.startswith(prefixes)}
    content = _marked(safetensors.torch.save(state, metadata={"format": "pt"}))
    if digests is not None:
        content = digests.embed(content)
    config = json.dumps(hub_config(model, recipe, class_names), indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "config.json", "folder"):
        _require_model_of_vitlens(folder)
        if head:
            # Apart, because timm up to 1.0.28 rejects directories with two files of weights.
            head_folder = folder / "pretraining_head"
            head_folder.mkdir(exist_ok=True)
            write(head_folder / "head.safetensors", safetensors.torch.save(head))
        if digests is not None:
            write(folder / FILE, digests.to_bytes())
        write(folder / "model.safetensors", content)
        write(folder / "config.json", config.encode())
        if training is not None:
            write(folder / "training.json", json.dumps(training, indent=2, ensure_ascii=False))
    return folder


def _require_model_of_vitlens(folder: Path) -> None:
    """Raise ValueError for a folder with the model of another program."""
    config_file = folder / "config.json"
    require_ours({config_file: is_config}, "folder")
    if not config_file.exists():  # an export may have been killed before it wrote this file
        earlier = is_digests(folder / FILE)  # earlier versions had no mark
        require_ours({folder / "model.safetensors": is_exported} if not earlier else {}, "folder")


def _marked(weights: bytes) -> bytes:
    """A safetensors file with a mark in its metadata, by which it is known without the config.json.

    Added here, because the library writes several metadata in random order.
    """
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    header["__metadata__"]["software"] = MARK
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return len(text).to_bytes(8, "little") + text + weights[8 + length :]


def is_exported(path: Path) -> bool:
    """True for the weights of a model of `export`."""
    if not path.is_file():
        return False
    with suppress(OSError, safetensors.SafetensorError), safetensors.safe_open(path, "pt") as file:
        return (file.metadata() or {}).get("software") == MARK
    return False


def pretraining_prefixes(model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
    """Name prefixes of parameters that are saved separately, because fine-tuning discards them. Often ()."""
    if hasattr(model, "objective"):
        return ("objective.", "head.")
    return ("head.",) if recipe.head == "mlp" else ()


def convert_weights(
    state: dict[str, Tensor], dtype: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    """The tensors on the CPU, with floating-point ones in `dtype` unless they would overflow.

    Batch normalization's statistics keep their type, because a variance of 1e-8 would become 0.
    """
    tensors = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.is_floating_point() and not name.endswith(STATISTICS):
            converted = tensor.to(dtype)
            if converted.isfinite().all():
                tensor = converted
        tensors[name] = tensor
    return tensors


def architecture_module(architecture: str) -> str:
    """Module of the function that builds a timm architecture, or "timm" for another name."""
    name = architecture.split(".")[0]
    if not timm.is_model(name):
        return "timm"
    return timm.models.model_entrypoint(name).__module__


def hub_config(model: nn.Module, recipe: Recipe, class_names: Sequence[str]) -> dict:
    """The content of timm's `config.json`."""
    arguments = recipe.arguments()
    if pretraining_prefixes(model, recipe):
        arguments = {**arguments, "num_classes": 0}
        class_names = ()
    more = {}
    if recipe.outputs:
        more["outputs"] = recipe.outputs
    if isinstance(getattr(model, "global_pool", None), str):
        more["global_pool"] = model.global_pool
    architecture = recipe.architecture_name
    module = type(model).__module__
    if not module.startswith(("timm.", architecture_module(architecture))):  # built by build=…
        architecture = type(model).__name__
        more["built_by"] = getattr(model, "built_by", module)
    source = getattr(model, "pretrained_cfg", {})
    return {
        "architecture": architecture,
        "num_classes": arguments["num_classes"],
        "num_features": recipe.width,
        "label_names": list(class_names),
        "model_args": arguments,
        **more,
        "pretrained_cfg": {
            "tag": recipe.name,
            "custom_load": False,
            **recipe.pixels(),
            "num_classes": arguments["num_classes"],
            "pool_size": None,
            "first_conv": source.get("first_conv", "patch_embed.proj"),
            "classifier": source.get("classifier", "head"),
        },
    }
