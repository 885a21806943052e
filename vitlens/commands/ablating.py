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
    out: Annotated[Path | None, Option(help="CSV file; run the same command again to continue it.")] = None
    images: Annotated[int | None, Option(help="Number of images, drawn at random; by default all.")] = None
    ways: Annotated[
        str, Option(help="What replaces a head's output: zero, mean; by default each, with --prune mean.")
    ] = ""
    prune: Annotated[bool, Option("--prune", help="Remove heads one after the other.")] = False
    choose: Annotated[
        int | None, Option(help="With --prune: number of images used to choose the next head; by default 100.")
    ] = None
    orders: Annotated[
        int | None, Option(help="With --prune: number of random orders beside the greedy one; by default 3.")
    ] = None
    step: Annotated[int | None, Option(help="With --prune: number of heads removed at once; by default 1.")] = None
    seed: Annotated[int, Option(help="Seed of the images drawn and of the random orders.")] = 0
    batch: Annotated[int, Option(help="Images run at once.")] = 50
    root: options.Root = None
    workers: options.Workers = None
    device: options.AnyDevice = None


def ablate(asked: Options) -> None:
    """Switch off every head alone, and measure accuracy, KL and margin; or prune heads one after the other."""
    from vitlens import ablation
    from vitlens.evaluate import command_of
    from vitlens.recorder.intervention import WORDS

    options.require("An ablation", data=asked.data, out=asked.out)
    pruning = options.only_with("prune", asked.prune, choose=asked.choose, orders=asked.orders, step=asked.step)
    options.require_file(asked.out, "--out")
    options.checked_device(asked.device)
    settings = dict(
        images=asked.images, seed=asked.seed, batch=asked.batch, out=asked.out, root=asked.root, workers=asked.workers,
        device=asked.device, command=command_of(sys.argv[1:]), say=lambda text: options.echo(f"Note: {text}"),
    )  # fmt: skip
    if asked.prune:
        found = ablation.pruning(asked.model, asked.data, way=asked.ways or "mean", **pruning, **settings)
        found = found[found["images"] > 0]
        print(found.pivot(index="removed", columns="order", values="accuracy").round(2).to_string())
    else:
        ways = options.comma_separated(asked.ways) if asked.ways else WORDS
        found = ablation.effects(asked.model, asked.data, ways=ways, **settings)
        shown = ["layer", "head", "way", "accuracy", "change", "change_low", "change_high", "flipped", "kl", "margin"]
        print("The ten largest by KL:")
        print(found.nlargest(10, "kl")[shown].round(3).to_string(index=False))
    print(asked.out)
