"""`vitlens compute`: what models cost, counted, or measured on this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vitlens.commands import options


@dataclass(frozen=True)
class Options:
    """The options of `vitlens compute`."""

    models: Annotated[
        list[str] | None, Argument(help="Names of the paper (ViT-B/16) or as for inspect; by default Fig. 12's.")
    ] = None
    sizes: Annotated[str, Option(help="Sides of the image in pixels.")] = "64,128,224,384,512"
    measure: Annotated[bool, Option("--measure", help="Measure images per second and memory on this machine.")] = False
    precision: Annotated[str | None, Option(help="With --measure: auto, bf16 or fp32; by default auto.")] = None
    memory: Annotated[
        float | None, Option(help="With --measure: GiB that training may fill; by default all of the device's.")
    ] = None
    seconds: Annotated[
        float | None, Option(help="With --measure: seconds to time each batch size, at least; by default 0.5.")
    ] = None
    out: Annotated[Path | None, Option(help="CSV file to write, a line for each model and size.")] = None
    figure: Annotated[Path | None, Option(help="With --measure: picture to write, such as speed.png.")] = None
    device: options.AnyDevice = None


def _report(row: dict) -> None:
    if "images_per_second" in row:
        options.echo(f"{row['model']} at {row['image_size']} pixels: {row['images_per_second']:.3g} images/s")


def compute(asked: Options) -> None:
    """Count parameters and FLOPs of models at several image sizes; --measure adds speed and the largest batch."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler reports each start and stop on stderr
    from vitlens.evaluate import command_of, speed

    sizes = options.comma_separated(asked.sizes)
    if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--sizes takes whole numbers of pixels, such as 64,224, got {asked.sizes!r}.")
    how = options.only_with(
        "measure", asked.measure, precision=asked.precision, memory=asked.memory, seconds=asked.seconds
    )
    options.only_with("measure", asked.measure, figure=asked.figure)
    if asked.out:
        options.require_file(asked.out, "--out")
    if asked.figure:
        options.require_figure(asked.figure, "--figure")
    rows = speed.table(
        asked.models, [int(size) for size in sizes], measure=asked.measure, **how,
        device=options.checked_device(asked.device), command=command_of(sys.argv[1:]), out=asked.out, done=_report,
    )  # fmt: skip
    shown = {"parameters": ("parameters (M)", 1e6), "flops": ("GFLOPs", 1e9), "images_per_second": ("images/s", 1),
             "batch": ("at batch", 1), "bytes_per_image": ("MiB per image", 2**20),
             "largest_batch": ("largest batch", 1)}  # fmt: skip
    printed = rows[["model", "image_size"]].rename(columns={"image_size": "px"})
    for name, (title, unit) in shown.items():
        if name in rows:
            printed[title] = rows[name] if name in ("batch", "largest_batch") else (rows[name] / unit).round(1)
    print(printed.to_string(index=False))
    if asked.measure:
        first = rows.iloc[0]
        print(
            f"\nImages/s: the fastest batch of a forward pass in {first['precision']}, {first['device']}. Largest "
            f"batch: of a training step with Adam in {first['memory']:.1f} GiB, by the memory of smaller ones."
        )
    if asked.figure:
        from vitlens import plot

        plot.speed(rows).savefig(asked.figure)
