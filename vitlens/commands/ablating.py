"""`vitlens ablate`: what happens to a classifier when its heads are switched off."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from vitlens.commands import options
from vitlens.data.sources import source_names


@dataclass(frozen=True)
class Options:
    """The options of `vitlens ablate`."""

    model: options.Model
    data: Annotated[str, Option(help=f"Labeled images: a folder or tar file, or {source_names()}.")] = ""
    out: Annotated[Path | None, Option(help="CSV file, written anew after each batch.")] = None
    images: Annotated[int | None, Option(help="Number of images, drawn at random; by default all.")] = None
    ways: Annotated[str, Option(help="Replacements for a head's output, some of zero,mean.")] = "zero,mean"
    seed: Annotated[int, Option(help="Seed of the images drawn and of the random orders.")] = 0
    batch: Annotated[int, Option(help="Images run at once.")] = 50
    root: options.Root = None
    workers: options.Workers = None
    device: options.AnyDevice = None


def ablate(asked: Options) -> None:
    """Switch off every head alone, and measure accuracy, KL divergence and margin."""
    from vitlens import ablation
    from vitlens.evaluate import command_of

    options.require("An ablation", data=asked.data, out=asked.out)
    options.require_file(asked.out, "--out")
    options.checked_device(asked.device)
    table = ablation.effects(
        asked.model, asked.data, ways=options.comma_separated(asked.ways), images=asked.images, seed=asked.seed,
        batch=asked.batch, out=asked.out, root=asked.root, workers=asked.workers, device=asked.device,
        command=command_of(sys.argv[1:]), say=lambda text: options.echo(f"Note: {text}"),
    )  # fmt: skip
    shown = ["layer", "head", "way", "accuracy", "change", "change_low", "change_high", "flipped", "kl", "margin"]
    print("The ten largest by KL:")
    print(table.nlargest(10, "kl")[shown].round(3).to_string(index=False))
    print(asked.out)
