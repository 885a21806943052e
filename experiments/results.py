"""Shared parts of the scripts: options, the command and machine of each row, CSV files, and memory of a process."""

import argparse
import datetime
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from vitlens import load_model
from vitlens.classes import class_numbers
from vitlens.train.runs import hardware, versions
from vitlens_paper.evaluate.reading import normalize_for, open_images

SPECIMEN = "data/checkpoints/specimen"
MODELS = SPECIMEN, "data/checkpoints/vit_tiny_patch8_64"


def parser(
    doc: str, *, data: bool = False, images: int = 0, control: int = 0
) -> argparse.ArgumentParser:
    """A parser with --out, the CSV file to write, and --tiny, the same path in seconds.

    data: with --data, a data set. images: with --models, folders of models, and --images with this default. control:
    with --control, the number of images for the first model with random weights (`opened_models`).
    """
    options = argparse.ArgumentParser(description=doc.split("\n")[0])
    if data:
        options.add_argument("--data", required=True, help="a data set with validation images")
    if images:
        options.add_argument(
            "--models", nargs="+", default=MODELS, help="folders in timm's hub layout"
        )
        options.add_argument("--images", type=int, default=images)
    if control:
        options.add_argument(
            "--control", type=int, default=control, help="images for the untrained model"
        )
    options.add_argument("--out", type=Path, required=True, help="CSV file to write")
    options.add_argument("--tiny", action="store_true", help="run the same path in seconds")
    return options


def opened_models(options: argparse.Namespace) -> Iterator[tuple[str, nn.Module, int]]:
    """Title, model and number of images of each of --models, and after the first one of the same, untrained."""
    for name in options.models:
        path = Path(name)
        title = (
            path.parent.name if path.name == "model" else path.name
        )  # `vitlens train --out NAME` writes NAME/model
        yield title, load_model(name), options.images
        if name == options.models[0]:
            torch.manual_seed(0)
            yield f"{title}, untrained", load_model(name, pretrained=False), options.control


def write_by_model(
    name: str,
    doc: str,
    rows: Callable[[str, nn.Module, Iterable], list[dict]],
    arguments: Sequence[str] | None,
    *,
    images: int,
    control: int,
) -> None:
    """Write the rows (title, model, batches) → list of all models of a script without further options.

    batches: those of `labeled`. images, control: the defaults of `parser`.
    """
    options = parser(doc, data=True, images=images, control=control).parse_args(arguments)
    if options.tiny:
        options.images = options.control = 4
    table, how = [], about(command(name, arguments))
    for title, model, count in opened_models(options):
        table += [row | how for row in rows(title, model, labeled(model, options.data, 0, count))]
    write(options.out, table, digits=4)


def command(name: str, arguments: Sequence[str] | None = None) -> str:
    """The command of a script's table; of absolute paths, which are this machine's own, the last part."""
    words = sys.argv[1:] if arguments is None else map(str, arguments)
    return " ".join(
        [
            "python -m",
            name,
            *(os.path.basename(word) if os.path.isabs(word) else word for word in words),
        ]
    )


def about(command: str, device: str | torch.device = "cpu") -> dict[str, str]:
    """Columns of a measurement: device, versions, date and command."""
    return {
        "device": hardware(device),
        **versions(),
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def rounded(row: Mapping, to) -> dict:
    """A row whose floats are written shorter."""
    return {name: to(value) if isinstance(value, float) else value for name, value in row.items()}


def labeled(
    model: nn.Module, data: str, start: int, stop: int, batch: int = 10
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of validation images, as the model takes them, with the numbers of its classes.

    The images from `start` to `stop` of an order that is shuffled by seed 0.
    """
    images = open_images(model, data, "whole")
    numbers = class_numbers(model, images.class_names)
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[
        start:stop
    ].split(batch)
    for pixels, labels in images.batches(rows):
        yield normalize_for(model, pixels), numbers[labels]


def write(path: Path | str, rows: Iterable[Mapping], digits: int | None = None) -> None:
    """Write rows as a plain CSV file; a column that a row lacks stays empty. digits: significant digits of floats."""
    if digits:
        rows = (
            {k: f"{v:.{digits}g}" if isinstance(v, float) else v for k, v in row.items()}
            for row in rows
        )
    table = pd.DataFrame(list(rows), dtype=object)  # whole numbers stay whole beside empty ones
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False, lineterminator="\n")
    print(table.to_string(index=False))


def kept(path: Path, only: Sequence[str], same: Mapping[str, object]) -> list[dict]:
    """Rows of a table that stay when the methods `only` are measured again: all others, or none without `only`.

    same: columns in which new rows equal them. Raises ValueError if they do not.
    """
    if not only or not path.exists():
        return []
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    rows = rows[~rows["method"].isin(only)]
    for name, value in same.items():
        if other := set(rows[name]) - {str(value)}:
            raise ValueError(
                f"{path} has {name} {other.pop()}, and new rows have {value}. Give another --out."
            )
    return rows.to_dict("records")


def in_own_process(function: Callable, *arguments: object) -> object:
    """The result of a function in a new process, whose memory no other measurement has touched."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def memory(call: Callable[[], object]) -> tuple[object, float]:
    """The result of a call, and the MiB by which the peak resident size of the process grew in it (Linux only)."""
    Path("/proc/self/clear_refs").write_text(
        "5", encoding="utf-8"
    )  # forget the peak until now, see proc(5)
    before = _peak()
    result = call()
    return result, _peak() - before


def _peak() -> float:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return (
        int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        / 1024
    )
