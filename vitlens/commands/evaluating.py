"""`vitlens evaluate`: a model and images in, accuracy with its confidence interval out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vitlens.commands.shared import checked_device, require_file, say
from vitlens.data.sources import source_names


def evaluate(
    model: Annotated[str, typer.Argument(help="A timm name, or a folder with config.json and model.safetensors.")] = "",
    data: Annotated[str, typer.Option(help=f"A task (see --list), a folder or tar file, or {source_names()}.")] = "",
    protocol: Annotated[str, typer.Option(help="top1, fewshot, knn, probe, finetune or vtab.")] = "top1",
    out: Annotated[Path | None, typer.Option(help="A JSON file to put the records into; old ones stay.")] = None,
    shots: Annotated[str, typer.Option(help="For fewshot: images of each class; by default 1,5,10,25.")] = "",
    seeds: Annotated[int | None, typer.Option(help="How many; by default 3 for fewshot, 1 for fine-tuning.")] = None,
    neighbors: Annotated[int | None, typer.Option(help="For knn: how many; by default 20.")] = None,
    tasks: Annotated[str, typer.Option(help="Tasks of vtab, divided by commas; by default all 19.")] = "",
    recipe: Annotated[str, typer.Option(help="Fine-tune by this recipe, not by the data's own.")] = "",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe.")] = None,
    runs: Annotated[Path, typer.Option(help="Where fine-tuning keeps its runs, by model and data.")] = Path("runs"),
    root: Annotated[Path | None, typer.Option(help="Where data sets with a name lie, or are fetched to.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that read images; by default one a core.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; by default a GPU if there is one.")] = None,
    list_tasks: Annotated[bool, typer.Option("--list", help="Show the data sets that have a name and stop.")] = False,
) -> None:
    """Measure a model: accuracy, few-shot, nearest neighbors, a linear probe, fine-tuning, VTAB-1k."""
    from vitlens.data.tasks import TASKS
    from vitlens.evaluate import Question, command_of, read_results, table, write
    from vitlens.evaluate import evaluate as answers

    if list_tasks:
        for task in TASKS.values():
            forbidden = [word for word, allowed in (("flip", task.flip), ("crop", task.crop)) if not allowed]
            print(
                f"{task.name}: {task.group + ', ' if task.group else ''}{task.classes:,} classes, {task.source}"
                + (f", no {' and no '.join(forbidden)}" if forbidden else "")
            )
        return
    if not model:
        raise ValueError("An evaluation needs a model: a timm name or a folder. `vitlens evaluate --help` says more.")
    if device is not None:
        checked_device(device)
    if out is not None:
        require_file(out, "--out")
        if out.exists():
            read_results(out)  # refuses now what could not be added to when all is measured
    try:
        counts = tuple(sorted({int(n) for n in shots.split(",")})) if shots else ()
    except ValueError:
        raise ValueError(f"--shots takes numbers divided by commas, such as 1,5,10,25, but {shots!r} came.") from None
    question = Question(
        model, data, protocol, counts, seeds, neighbors, tuple(t.strip() for t in tasks.split(",") if t.strip()),
        recipe, tuple(settings or ()), runs, root, workers, device, command_of(sys.argv[1:]),
        lambda text: say(f"Note: {text}"),
    )  # fmt: skip
    found = []
    try:
        for record in answers(question):
            found.append(record)
            if out is not None and question.world.rank == 0:  # at once: a long evaluation may be stopped
                write(out, [record])
    finally:
        if found and question.world.rank == 0:
            print(table(found))
    if question.failures:
        raise SystemExit(1)
