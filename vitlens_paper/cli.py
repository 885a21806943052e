"""The commands `vitlens evaluate`, `ablate` and `paper`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from vitlens.cli import (
    FILE_OPTIONS,
    LABELED,
    AnyDevice,
    Checkpoint,
    Classes,
    Data,
    Head,
    ImageKey,
    LabelKey,
    ListingCommand,
    Model,
    Root,
    Settings,
    Workers,
    names_in,
    note,
    working_device,
)
from vitlens_paper.evaluate.options import PROTOCOLS, Evaluation, check_options, given_options


def add_commands(app: typer.Typer) -> None:
    """Add `evaluate`, `ablate` and `paper` to the command line."""
    app.command(cls=ListingCommand)(evaluate)
    app.command(cls=ListingCommand)(ablate)
    paper = typer.Typer(help="The paper's models and tables, and the cost of models.")
    for command in (models, table, compute):
        paper.command()(command)
    app.add_typer(paper, name="paper")


def numbers_in(text: str | tuple) -> tuple[int, ...]:
    """The numbers in a text such as "1,5,10", in order."""
    parts = names_in(text)
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(
            f"Expected whole numbers above 0, separated by commas, got {text!r}."
        )
    return tuple(sorted({int(part) for part in parts}))


def flag(option: str) -> str:
    """Name of an option of `Evaluation` on the command line."""
    return "--set" if option == "settings" else f"--{option}"


def list_tasks(listed: bool) -> None:
    """Print a line for every named data set, and end the command."""
    from vitlens_paper.tasks import TASKS

    if not listed:
        return
    for task in TASKS.values():
        parts = [task.group] if task.group else []
        parts += [f"{task.classes:,} classes", task.source]
        augmentations = {"flip": task.flip, "crop": task.crop}
        forbidden = [f"no {name}" for name, allowed in augmentations.items() if not allowed]
        if forbidden:
            parts.append(" and ".join(forbidden))
        print(f"{task.name}: {', '.join(parts)}")
    raise typer.Exit


def evaluate(
    model: Model,
    data: Annotated[
        str, Option(help=f"{LABELED} --list has more names. Required except for vtab.")
    ] = "",
    protocol: Annotated[str, Option(help=f"Measurement: {', '.join(PROTOCOLS)}.")] = "top1",
    out: Annotated[
        Path | None,
        Option(
            **FILE_OPTIONS,
            help="JSON file to add the results to. By default they are only printed.",
        ),
    ] = None,
    shots: Annotated[
        tuple,
        Option(
            parser=numbers_in,
            metavar="NUMBERS",
            help="For fewshot: images per class. By default 1,5,10,25.",
        ),
    ] = (),
    seeds: Annotated[
        int | None,
        Option(min=1, help="Number of runs with other seeds. By default 3 for fewshot, else 1."),
    ] = None,
    neighbors: Annotated[
        int | None, Option(min=1, help="For knn: number of neighbors. By default 20.")
    ] = None,
    tasks: Annotated[
        tuple,
        Option(
            parser=names_in, metavar="NAMES", help="For vtab: names of tasks. By default all 19."
        ),
    ] = (),
    recipe: Annotated[
        str,
        Option(help="For finetune and vtab: name of a recipe. By default the one of the data set."),
    ] = "",
    settings: Settings = None,
    runs: Annotated[
        Path, Option(file_okay=False, help="For finetune and vtab: folder for the training runs.")
    ] = Path("runs"),
    root: Root = None,
    workers: Workers = None,
    device: AnyDevice = None,
    checkpoint: Checkpoint = None,
    classes: Classes = "",
    image_key: ImageKey = "",
    label_key: LabelKey = "",
    head: Head = None,
    list_names: Annotated[
        bool,
        Option(
            "--list", is_eager=True, callback=list_tasks, help="List the named data sets and stop."
        ),
    ] = False,
) -> int:
    """Measure a model: accuracy, few-shot, nearest neighbors, a linear probe, fine-tuning, VTAB-1k."""
    from vitlens_paper.evaluate.protocols import measure
    from vitlens_paper.evaluate.records import read_results, write
    from vitlens_paper.evaluate.records import table as text_table
    from vitlens_paper.evaluate.session import command_of, open_session

    working_device(device)
    if out is not None and out.is_file():
        read_results(out)  # refuse a file of another kind before the measurement
    options = {
        "shots": shots,
        "seeds": seeds,
        "neighbors": neighbors,
        "tasks": tasks,
        "recipe": recipe,
        "settings": settings,
        "classes": classes,
    }
    options = {name: value for name, value in options.items() if value}
    check_options(protocol, given_options(data, checkpoint, options), flag)
    if "runs" in PROTOCOLS[protocol].options:
        options["runs"] = runs
    evaluation = Evaluation(
        model=model,
        data=data,
        protocol=protocol,
        options=options,
        checkpoint=checkpoint,
        head=head,
    )
    command = command_of(sys.argv[1:])
    session = open_session(
        evaluation,
        root=root,
        workers=workers,
        image_key=image_key,
        label_key=label_key,
        device=device,
        command=command,
        say=note,
    )
    writes = session.world.rank == 0  # only one of several processes
    records = []
    try:
        for record in measure(session):
            records.append(record)
            if out is not None and writes:  # immediately, because a long evaluation may be stopped
                write(out, [record])
    finally:
        if records and writes:
            print(text_table(records))


def ablate(
    model: Model,
    data: Data,
    out: Annotated[Path, Option(**FILE_OPTIONS, help="CSV file, written again after each batch.")],
    images: Annotated[
        int | None, Option(min=1, help="Number of images, drawn at random. By default all.")
    ] = None,
    ways: Annotated[
        tuple,
        Option(
            parser=names_in,
            metavar="NAMES",
            help="Replacements of a head's output: zero, mean or both.",
        ),
    ] = ("zero", "mean"),
    seed: Annotated[int, Option(help="Seed of the images drawn.")] = 0,
    batch: Annotated[int, Option(min=1, help="Images in a batch.")] = 50,
    checkpoint: Checkpoint = None,
    classes: Classes = "",
    image_key: ImageKey = "",
    label_key: LabelKey = "",
    head: Head = None,
    root: Root = None,
    workers: Workers = None,
    device: AnyDevice = None,
) -> None:
    """Replace the output of each head alone, and measure the change of accuracy, KL divergence and margin."""
    from vitlens_paper.evaluate import ablation
    from vitlens_paper.evaluate.session import command_of

    working_device(device)
    effects = ablation.effects(
        model,
        data,
        ways=ways,
        images=images,
        seed=seed,
        batch=batch,
        out=out,
        root=root,
        workers=workers,
        device=device,
        checkpoint=checkpoint,
        classes=classes,
        image_key=image_key,
        label_key=label_key,
        head=head,
        command=command_of(sys.argv[1:]),
        say=note,
    )
    columns = [
        "layer",
        "head",
        "way",
        "accuracy",
        "change",
        "change_low",
        "change_high",
        "flipped",
        "kl",
        "margin",
    ]
    print("The ten largest by KL:")
    print(effects.nlargest(10, "kl")[columns].round(3).to_string(index=False))
    print(out)


def models(
    only: Annotated[
        str, Argument(help="Part of a name, the paper's or timm's. By default all.")
    ] = "",
) -> None:
    """List the models of the paper: parameters, FLOPs, exaFLOPs of pre-training, timm's weights."""
    from vitlens_paper import COSTS, MODELS, TABLE_6

    chosen = []
    for model in MODELS.values():
        if only.lower() in f"{model.name} {model.timm} {model.kind}".lower():
            chosen.append(model)
    if not chosen:
        raise typer.BadParameter(
            f"No model of the paper has {only!r} in its name. The models are {', '.join(MODELS)}."
        )
    line = "{:<15} {:>10} {:>8}  {:<30} {}"
    print(
        line.format(
            "model", "parameters", "GFLOPs", "epochs: exaFLOPs (Table 6)", "weights in timm"
        )
    )
    for model in chosen:
        cost = COSTS[model.name]
        spent = []
        for row in TABLE_6:
            if row.model == model.name:
                counted = cost.pretraining(row.epochs)
                spent.append(f"{row.epochs}: {counted:.0f} ({row.exaflops})")
        weights = [each.timm for each in model.weights]
        print(
            line.format(
                model.name,
                f"{cost.parameters / 1e6:.1f} M",
                f"{cost.flops / 1e9:.1f}",
                ", ".join(spent) or "–",
                ", ".join(weights) or "none",
            )
        )
    print(
        "\nParameters with a head of 1,000 classes; FLOPs of one image of 224 pixels (EfficientNet-L2: 800), a "
        "multiply-add as two.\nexaFLOPs of pre-training on JFT-300M: counted as three forwards an image, in brackets "
        "those that the paper prints; – where its Table 6 has none."
    )


def table(
    results: Annotated[
        list[Path], Argument(exists=True, dir_okay=False, help="JSON files of `vitlens evaluate`.")
    ],
) -> None:
    """Print the paper's Tables 2, 5 and 9 with your own results beside the published ones."""
    import vitlens_paper as paper
    from vitlens_paper.evaluate import read_results

    measured = [record for path in results for record in read_results(path)]
    tables = [paper.table_2, paper.table_5]
    if any((paper.row_of(record) or "").startswith("VTAB") for record in measured):
        tables.append(paper.table_9)
    print("\n\n".join(text_of(measured) for text_of in tables))


def compute(
    models: Annotated[
        list[str] | None,
        Argument(help="Names of the paper, or as for inspect. By default Fig. 12's."),
    ] = None,
    sizes: Annotated[
        tuple, Option(parser=numbers_in, metavar="NUMBERS", help="Image sizes in pixels.")
    ] = "64,128,224,384,512",
    out: Annotated[
        Path | None, Option(**FILE_OPTIONS, help="CSV file. By default the table is only printed.")
    ] = None,
) -> None:
    """Count the parameters and FLOPs of models at several image sizes."""
    from vitlens import files
    from vitlens_paper.evaluate.compute import table

    rows = table(models, sizes)
    if out is not None:
        files.write(out, rows.to_csv(index=False, lineterminator="\n"))
    printed = rows.rename(columns={"image_size": "px"})
    printed["parameters (M)"] = (printed.pop("parameters") / 1e6).round(1)
    printed["GFLOPs"] = (printed.pop("flops") / 1e9).round(1)
    print(printed.to_string(index=False))
