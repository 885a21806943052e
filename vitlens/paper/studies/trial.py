"""One training of a study, with the training without labels before it: fitted, looked into, and recorded."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlens.data import ImageSet
from vitlens.data.files import write
from vitlens.evaluate import compute, features, few_shot, linear_probe, proportion, support
from vitlens.paper.studies.grid import Cell, Study
from vitlens.paper.studies.inside import PICTURE
from vitlens.paper.studies.networks import save
from vitlens.paper.studies.spreading import flops
from vitlens.train import World, compiled, fit, snapshots
from vitlens.train.hub_layout import aside_of
from vitlens.train.recipes import Recipe
from vitlens.train.runs import hardware, versions

BEFORE = "before"
"""Folder of the training without labels, within that of a training."""
SHOTS, DRAWS = 5, 3
PROBED = 100
"""Validation images that attention distances, and changes under flips and rotations, are means of."""


class Trial:
    """Trains the cells of a study; those of one network share the module, which is compiled once."""

    def __init__(self, study: Study, splits: Sequence[ImageSet], world: World, out: Path, command: str = ""):
        self.study, self.world, self.out, self.command = study, world, out, command
        self.train, self.valid = (split.to(world.device) for split in splits)
        self.models: dict[str, tuple[nn.Module, Callable]] = {}

    def folder(self, cell: Cell) -> Path:
        return self.out / "runs" / cell.name

    def model(self, cell: Cell) -> nn.Module:
        """The cell's network as it was trained last."""
        return self.models[cell.network.name][0]

    def training(self, cell: Cell) -> Iterator[tuple[Cell, int, str]]:
        """Train from the newest checkpoint: (cell, steps taken, "") after each step, at the end with what was reached.

        Closing the iterator writes a checkpoint.
        """
        plan = self.study.plan(cell)
        fresh = cell.network.build(plan).to(self.world.device)
        if cell.network.name not in self.models:
            self.models[cell.network.name] = fresh, compiled(fresh, plan, self.world.device)
        model, criterion = self.models[cell.network.name]
        model.load_state_dict(fresh.state_dict())
        rows = subset(self.train.labels.cpu(), cell.images, self.study.classes, cell.seed)
        data, first, begun = (self.train.chosen(rows), self.valid), 0, {}
        if before := self.study.before(cell):
            yield from self.pretraining(cell, before)
            first = before.steps
        if self.study.pretrains:
            self.look(cell, 0)
            begun = {
                "pretraining": before.name if before else "", "pretraining_steps": first,
                "unlabeled": len(self.train) if before else 0,
                "probe": round(linear_probe(*(features(model, split) for split in data)), 3),
            }  # fmt: skip
        with closing(
            fit(model, data, plan, out=self.folder(cell), resume=True, criterion=criterion, world=self.world)
        ) as training:
            for step in training:
                yield cell, first + step.step, ""
        yield cell, self.study.all_steps(cell), _line(self.keep(cell, plan, begun))

    def pretraining(self, cell: Cell, before: Recipe) -> Iterator[tuple[Cell, int, str]]:
        """Train the cell's network on all images without labels, from the newest checkpoint; yields as `training`."""
        learner, folder = cell.network.build(before).to(self.world.device), self.folder(cell) / BEFORE
        with closing(
            fit(learner, (self.train, self.valid), before, out=folder, resume=True, world=self.world)
        ) as training:
            for step in training:
                yield cell, step.step, ""
        aside = ("head.", *aside_of(learner, before))
        state = {name: each for name, each in learner.state_dict().items() if not name.startswith(aside)}
        model = self.model(cell)
        model.load_state_dict({**model.state_dict(), **state})

    def look(self, cell: Cell, step: int) -> None:
        """Keep what is seen inside the cell's network after so many steps with labels."""
        path, model = self.out / "cells" / f"{cell.name}.npz", self.model(cell)
        seen = snapshots.record(model, snapshots.probe(self.valid, self.study.plan(cell), PROBED))
        seen[PICTURE] = self.valid.subset(min(PROBED, len(self.valid))).images[0].permute(1, 2, 0).cpu().numpy()
        snapshots.save(path, step, seen)

    def keep(self, cell: Cell, plan: Recipe, begun: dict) -> dict:
        """Write weights, what is seen inside, and the record, which is returned."""
        path = self.out / "cells" / f"{cell.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path.with_suffix(".safetensors"), self.model(cell), cell.network, plan, self.valid.class_names)
        if cell.network.kind != "ResNet":
            if not begun:
                path.with_suffix(".npz").unlink(missing_ok=True)
            self.look(cell, plan.steps)
        record = self.record(cell, plan) | begun
        write(path, json.dumps(record, indent=1, ensure_ascii=False).encode())
        return record

    def record(self, cell: Cell, plan: Recipe) -> dict:
        network, model = cell.network, self.model(cell)
        trainings, before = {self.folder(cell): plan}, self.study.before(cell)
        if before:
            trainings[self.folder(cell) / BEFORE] = before
        reached = [line["metrics"]["top1"] for line in _log(self.folder(cell)) if line["metrics"]]
        shares = proportion(round(reached[-1] * len(self.valid) / 100), len(self.valid))
        return {
            "study": self.study.name, "model": network.name, "kind": network.kind,
            "settings": " ".join(network.settings), "lr": plan.lr,
            "parameters": compute.parameters(model), "flops": flops(model, plan), "images": cell.images,
            "classes": self.study.classes, "seed": cell.seed, "steps": plan.steps,
            "epochs": round(plan.steps * plan.batch_size / cell.images, 2), "precision": plan.precision,
            **{name: round(value, 3) for name, value in zip(("top1", "low", "high"), shares, strict=True)},
            "best": round(max(reached), 3), "five_shot": round(five_shot(model, self.valid, plan.num_classes), 3),
            "validation_images": len(self.valid),
            "exaflops": sum(exaflops(network.build(each), each) for each in trainings.values()),
            "seconds": round(sum(_seconds(_log(folder), each) for folder, each in trainings.items()), 1),
            "device": hardware(self.world.device),
            "date": datetime.date.today().isoformat(), **versions(), "command": self.command,
        }  # fmt: skip


def _log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def _seconds(log: list[dict], plan: Recipe) -> float:
    """Seconds of a training without validation, by its log."""
    # Steps and speed of each reading but the first, in which a model may be compiled.
    taken = [(b["step"] - a["step"], b["images_per_second"]) for a, b in pairwise([{"step": 0}, *log])]
    taken = taken[1:] or taken
    return sum(n / speed for n, speed in taken) * plan.steps * plan.batch_size / sum(n for n, _ in taken)


def exaflops(model: nn.Module, plan: Recipe) -> float:
    """ExaFLOPs of a training by `plan`; patches that it drops are embedded and go no further."""
    dropping = sum(step / plan.steps < plan.patch_drop_until for step in range(plan.steps))
    part, whole = (flops(model, plan, share) for share in (plan.patch_drop, 0.0))
    return compute.exaflops(dropping * part + (plan.steps - dropping) * whole, plan.batch_size, 1)


def subset(labels: Tensor, n: int, classes: int, seed: int) -> Tensor:
    """Places of `n` training images, equally many of each class, int64 (n,); larger subsets of a seed hold smaller."""
    return support(labels, n // classes, seed)


def five_shot(model: nn.Module, valid: ImageSet, classes: int) -> float:
    """Top-1 (%) of least squares on the features of 5 validation images of each class, on all others; mean of 3 draws.

    Unlike in the paper's Fig. 4 this is no transfer to another data set: the model was trained on these classes.
    """
    x, y = features(model, valid)
    found = []
    for seed in range(DRAWS):
        rows = support(y, SHOTS, seed)
        rest = torch.ones(len(y), dtype=torch.bool).index_fill(0, rows, False)
        found += few_shot((x, y), (x[rest], y[rest]), {SHOTS: [rows]}, classes)[SHOTS]
    return sum(found) / DRAWS


def _line(record: dict) -> str:
    return (
        f"{record['model']}, {record['images']:,} images, seed {record['seed']}: {record['top1']:.1f} % "
        f"[{record['low']:.1f}, {record['high']:.1f}], five-shot {record['five_shot']:.1f} %, "
        f"{record['seconds']:.0f} s"
    )
