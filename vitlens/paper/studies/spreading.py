"""Trainings of a study in several processes at a time, and what they will take before the first one starts."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing import parent_process
from statistics import mean

import torch

from vitlens.data.augment import Targets
from vitlens.evaluate import compute
from vitlens.paper.studies.grid import Cell, Study
from vitlens.train.losses import compiled
from vitlens.train.optim import optimizers
from vitlens.train.settings import Recipe
from vitlens.train.validation import ObjectiveLoss

MEASURED = 5e10
"""FLOPs of the steps that an estimate is made from, about; a step of fewer images stands for a whole one."""


def estimate(study: Study, cells: Sequence[Cell], valid: int, device: torch.device, processes: int = 1) -> str:
    """A sentence on what `cells` take: exaFLOPs, and hours on this device, measured on a step of each network.

    valid: validation images. Compilation is not counted, nor what it saves.
    """
    seconds, work = 0.0, 0.0
    by_network = {cell.network: [each for each in cells if each.network == cell.network] for cell in cells}
    for some in by_network.values():
        parts, before = [(study.plan(some[0]), sum(map(study.steps, some)))], study.before(some[0])
        if before:
            parts.append((before, len(some) * before.steps))
        for plan, steps in parts:
            plan = replace(plan, compile="off")
            model = some[0].network.build(plan).to(device)
            per_image = flops(model, plan)
            images = max(2, min(plan.batch_size, int(MEASURED / (3 * per_image))))
            step = seconds_a_step(model, plan, images, device) / images
            seen = steps * plan.batch_size + len(some) * study.validations * valid / 3  # a forward: a third of a step
            seconds += seen * step
            work += compute.exaflops(per_image, steps * plan.batch_size, 1)
    many = f", {processes} at a time" if processes > 1 else ""
    return (
        f"{len(cells)} trainings of {study.length} are left{many}: {work:.2g} exaFLOPs, about "
        f"{duration(seconds / processes)} here, as far as a few steps tell. They may be stopped at any time."
    )


def flops(model: torch.nn.Module, plan: Recipe, patch_drop: float = 0.0) -> int:
    """FLOPs of one forward pass of one image in a training by `plan`, with the parts of its objective."""
    whole = model if plan.objective == "labels" else ObjectiveLoss(model)
    return compute.flops(whole, plan.image_size, patch_drop=patch_drop)


def seconds_a_step(model: torch.nn.Module, plan, images: int, device: torch.device) -> float:
    """Seconds of a training step of `images`, the mean of two after a first one."""
    x = torch.rand(images, 3, plan.image_size, plan.image_size, device=device)
    labels = torch.zeros(images, dtype=torch.int64, device=device)
    y = Targets(labels, labels, torch.ones(images, device=device))
    criterion, steppers, taken = compiled(model, plan, device), optimizers(model, plan), []
    for _ in range(3):
        start = time.perf_counter()
        criterion(x, y).backward()
        for each in steppers:
            each.step()
            each.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return mean(taken[1:])


def duration(seconds: float) -> str:
    """A time for people: "40 seconds", "12 minutes", "3.5 hours"."""
    for size, name, below in ((1, "seconds", 90), (60, "minutes", 5400), (3600, "hours", 172800)):
        if seconds < below:
            return f"{seconds / size:.1f} {name}" if name == "hours" else f"{max(1, round(seconds / size))} {name}"
    return f"{seconds / 86400:.1f} days"


def at_a_time(processes: int, trial, cells: Sequence[Cell], threads: int) -> Iterator[tuple[Cell, int, str]]:
    """What `Trial.training` says of the cells, trained in so many processes; each takes the next one that is left.

    Closing the iterator ends them, each with a checkpoint. Raises what a training raised, and ChildProcessError if a
    process ended without a word, as when the machine has no memory left.
    """
    context = torch.multiprocessing.get_context("spawn")
    waiting, told, stopping = context.Queue(), context.Queue(), context.Event()
    for number in (*range(len(cells)), *[None] * processes):
        waiting.put(number)
    about = trial.study, (trial.train.to("cpu"), trial.valid.to("cpu")), trial.world, trial.out, trial.command
    workers = [
        context.Process(target=_work, args=(type(trial), about, cells, threads, waiting, told, stopping), daemon=True)
        for _ in range(min(processes, len(cells)))
    ]
    for each in workers:
        each.start()
    try:
        left = len(cells)
        while left:
            try:
                number, step, said = told.get(timeout=1.0)
            except queue.Empty:
                ended = [each.exitcode for each in workers if each.exitcode]
                if ended:
                    raise ChildProcessError(
                        f"A process of the study has ended (exit code {ended[0]}), perhaps for lack of memory. The "
                        "same command goes on; give fewer --processes."
                    ) from None
                continue
            if isinstance(said, Exception):
                raise said
            left -= bool(said)
            yield cells[number], step, said
    finally:
        stopping.set()
        while any(each.is_alive() for each in workers):  # one with words left to say ends when they are heard
            try:
                told.get(timeout=0.1)
            except queue.Empty:
                continue


def _work(kind: type, about: tuple, cells: Sequence[Cell], threads: int, waiting, told, stopping) -> None:
    """Train what waits, cell by cell, in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it, and says when to stop
    torch.set_num_threads(threads)
    trial = kind(*about)
    for number in iter(waiting.get, None):
        try:
            with closing(trial.training(cells[number])) as training:
                for _, step, said in training:
                    told.put((number, step, said))
                    if not said and (stopping.is_set() or not parent_process().is_alive()):
                        return
        except Exception as problem:  # for the first process, which raises it
            told.put((number, 0, problem))
            return
