"""`vitlens study`: the paper in miniature, a grid of trainings with one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vitlens.commands import options


def study(
    name: Annotated[str, Argument(help="Name of a study; see --list.")] = "",
    data: Annotated[str, Option(help="As for `vitlens train`: a folder, digits, torch/NAME …")] = "",
    out: Annotated[Path | None, Option(help="Folder for its results, from which it continues.")] = None,
    table: Annotated[Path | None, Option(help="CSV file to write, one line per training.")] = None,
    figure: Annotated[Path | None, Option(help="Picture of the results to write, such as study.png.")] = None,
    inside: Annotated[
        Path | None, Option(help="NPZ file to write: filters, positions, attention of each model.")
    ] = None,
    processes: Annotated[int, Option(help="Trainings at a time; one for each core serves best.")] = 1,
    root: options.Root = None,
    skip_damaged: options.SkipDamaged = False,
    device: options.AnyDevice = None,
    max_minutes: Annotated[float | None, Option(help="Stop after this time; run it again to continue.")] = None,
    tiny: Annotated[bool, Option("--tiny", help="Run the same path in seconds.")] = False,
    list_studies: Annotated[bool, Option("--list", help="List the studies and stop.")] = False,
) -> None:
    """Train the models of a study, seed by seed; if it is stopped, the same command continues.

    Before the first training it says how long all of them take here.
    """
    from vitlens.evaluate import command_of
    from vitlens.paper import studies

    if list_studies:
        for each in studies.STUDIES.values():
            networks, sizes = "; ".join(n.name for n in each.networks), ", ".join(f"{n:,}" for n in each.sizes)
            plural = "s" * (len(each.seeds) > 1)
            print(
                f"{each.name}: {each.title}\n  {networks}\n  {sizes} images of {each.classes} classes, "
                f"{len(each.seeds)} seed{plural}, {each.recipe.image_size} px, {each.length} of "
                f"{each.recipe.batch_size} images"
            )
        return
    chosen = studies.study(name) if name else None
    options.require("A study", name=name, data=data, out=out)
    if max_minutes is not None and not max_minutes > 0:
        raise ValueError(f"--max-minutes must be a positive number of minutes, got {max_minutes}.")
    if processes < 1:
        raise ValueError(f"--processes must be 1 or more, got {processes}.")
    options.checked_device(device)
    for path, option in ((table, "--table"), (inside, "--inside")):
        if path is not None:
            options.require_file(path, option)
    if figure is not None:
        options.require_figure(figure, "--figure")
    chosen = chosen.tiny() if tiny else chosen
    records = studies.run_study(
        chosen, data, out, root=root, device=device, max_minutes=max_minutes, processes=processes,
        on_damaged="skip" if skip_damaged else "raise", command=command_of(sys.argv[1:]),
        say=lambda text: options.echo(text, sys.stdout), progress=True,
    )  # fmt: skip
    if table is not None and records:
        studies.write_table(table, records)
    if figure is not None and records:
        studies.figure(chosen, records).savefig(figure)
    if len(records) < len(list(chosen.cells())):
        raise SystemExit(1)
    if inside is not None:
        studies.write_insides(inside, *studies.insides(chosen, out))
