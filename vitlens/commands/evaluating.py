"""`vitlens evaluate`: from a model and images to its accuracy with a confidence interval."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from vitlens.commands import options
from vitlens.data.sources import source_names
from vitlens.evaluate import PROTOCOLS


@dataclass(frozen=True)
class Options:
    """What `vitlens evaluate` is asked."""

    model: options.Model = ""
    data: Annotated[str, Option(help=f"A task (see --list), a folder or tar file, or {source_names()}.")] = ""
    protocol: Annotated[str, Option(help=f"One of {', '.join(PROTOCOLS)}.")] = "top1"
    out: Annotated[Path | None, Option(help="A JSON file to add the records to.")] = None
    shots: Annotated[str, Option(help="For fewshot: images per class; by default 1,5,10,25.")] = ""
    seeds: Annotated[int | None, Option(min=1, help="Number of seeds; default 3 for fewshot, else 1.")] = None
    neighbors: Annotated[int | None, Option(min=1, help="For knn: number of neighbors; by default 20.")] = None
    tasks: Annotated[str, Option(help="Tasks of vtab, separated by commas; by default all 19.")] = ""
    recipe: Annotated[str, Option(help="Fine-tune by this recipe, not by the data's own.")] = ""
    settings: options.Settings = None
    runs: Annotated[Path, Option(help="Folder for the runs of fine-tuning, by model and data.")] = Path("runs")
    root: options.Root = None
    workers: options.Workers = None
    device: options.AnyDevice = None
    list_tasks: Annotated[bool, Option("--list", help="List the data sets that have a name and stop.")] = False


def evaluate(asked: Options) -> None:
    """Measure a model: accuracy, few-shot, nearest neighbors, a linear probe, fine-tuning, VTAB-1k."""
    from vitlens import evaluate as evaluation

    if asked.list_tasks:
        list_tasks()
        return
    if not asked.model:
        raise ValueError("`vitlens evaluate` needs a model: a timm name or a folder. Add --help for all options.")
    options.checked_device(asked.device)
    if asked.out is not None:
        options.require_file(asked.out, "--out")
        if asked.out.exists():
            evaluation.read_results(asked.out)  # refuse now what could not be added to when all is measured
    question = evaluation.Evaluation(
        asked.model, asked.data, asked.protocol, counts(asked.shots), asked.seeds, asked.neighbors,
        options.comma_separated(asked.tasks), asked.recipe, tuple(asked.settings or ()), asked.runs, asked.root,
        asked.workers, asked.device, evaluation.command_of(sys.argv[1:]), lambda text: options.echo(f"Note: {text}"),
    )  # fmt: skip
    found = []
    try:
        for record in evaluation.evaluate(question):
            found.append(record)
            if asked.out is not None and question.world.rank == 0:  # at once: a long evaluation may be stopped
                evaluation.write(asked.out, [record])
    finally:
        if found and question.world.rank == 0:
            print(evaluation.table(found))
    if question.failures:
        raise SystemExit(1)


def counts(shots: str) -> tuple[int, ...]:
    """The numbers in "1,5,10", in order."""
    try:
        return tuple(sorted({int(number) for number in options.comma_separated(shots)}))
    except ValueError:
        raise ValueError(f"--shots takes numbers separated by commas, such as 1,5,10,25; got {shots!r}.") from None


def list_tasks() -> None:
    """Print every data set that has a name in a line."""
    from vitlens.data.tasks import TASKS

    for task in TASKS.values():
        forbidden = [word for word, allowed in (("flip", task.flip), ("crop", task.crop)) if not allowed]
        print(
            f"{task.name}: {task.group + ', ' if task.group else ''}{task.classes:,} classes, {task.source}"
            + (f", no {' and no '.join(forbidden)}" if forbidden else "")
        )
