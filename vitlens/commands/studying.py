"""`vitlens study`: the paper in miniature, a grid of trainings with one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vitlens.commands.shared import checked_device, require_file, say


def study(
    name: Annotated[str, typer.Argument(help="Of a study; see --list.")] = "",
    data: Annotated[str, typer.Option(help="What `vitlens train` takes: a folder, digits, torch/NAME …")] = "",
    out: Annotated[Path | None, typer.Option(help="Where it keeps what it has done, and goes on from.")] = None,
    table: Annotated[Path | None, typer.Option(help="CSV file to write, a line for each training.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where data sets with a name lie, or are fetched to.")] = None,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Name damaged images and go on.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; by default a GPU if there is one.")] = None,
    max_minutes: Annotated[float | None, typer.Option(help="Stop after this time; run again to go on.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="The same path in seconds.")] = False,
    list_studies: Annotated[bool, typer.Option("--list", help="Show the studies and stop.")] = False,
) -> None:
    """Train models of several kinds on more and more images; stopped at any moment, the same command goes on."""
    from vitlens.evaluate import command_of
    from vitlens.paper import studies

    if list_studies:
        for each in studies.STUDIES.values():
            models, sizes = (", ".join(map(str, x)) for x in ([n.name for n in each.networks], each.sizes))
            plural = "s" * (len(each.seeds) > 1)
            print(
                f"{each.name}: {models}; {sizes} images of {each.classes} classes, {len(each.seeds)} seed{plural}, "
                f"{each.recipe.image_size} px, {each.recipe.steps:,} steps of {each.recipe.batch_size} images"
            )
        return
    chosen = studies.study(name) if name else None
    for option, value in (("a name", chosen), ("--data", data), ("--out", out)):
        if not value:
            raise ValueError(f"A study needs {option}. `vitlens study --list` shows the studies, --help all options.")
    if max_minutes is not None and not max_minutes > 0:
        raise ValueError(f"--max-minutes is a positive number of minutes; {max_minutes} came.")
    if device is not None:
        checked_device(device)
    if table is not None:
        require_file(table, "--table")
    chosen = chosen.tiny() if tiny else chosen
    records = studies.run_study(
        chosen, data, out, root=root, device=device, max_minutes=max_minutes,
        on_damaged="skip" if skip_damaged else "raise", command=command_of(sys.argv[1:]),
        say=lambda text: say(text, sys.stdout), progress=True,
    )  # fmt: skip
    if table is not None and records:
        studies.write_table(table, records)
    if len(records) < len(list(chosen.cells())):
        raise SystemExit(1)
