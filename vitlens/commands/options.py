"""Options that several commands share, checks of them, and messages to the terminal."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, TextIO, get_type_hints

import typer

from vitlens.data.files import writable

Model = Annotated[
    str, typer.Argument(help="A name of timm, hf:REPOSITORY, open_clip:MODEL/WEIGHTS, torchvision:MODEL, or a folder.")
]
Images = Annotated[list[Path] | None, typer.Argument(help="Photographs; without any, bundled samples.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
AnyDevice = Annotated[str | None, typer.Option(help="cpu, cuda, …; by default a GPU if there is one.")]
Root = Annotated[Path | None, typer.Option(help="Folder of the named data sets, where they are also downloaded to.")]
Workers = Annotated[int | None, typer.Option(help="Processes that read images; by default one per core.")]
SkipDamaged = Annotated[bool, typer.Option("--skip-damaged", help="Report damaged images and go on without them.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe.")]


def grouped(command: Callable) -> Callable:
    """The command with one parameter per option, as typer reads it: the fields of a dataclass of options that it takes
    become parameters of their own."""
    hints = get_type_hints(command, include_extras=True)
    (group,) = [each for each in hints.values() if dataclasses.is_dataclass(each)] or [None]
    if group is None:
        return command

    @functools.wraps(command)
    def flat(**options) -> None:
        command(group(**options))

    types, required = get_type_hints(group, include_extras=True), inspect.Parameter.empty
    defaults = {each.name: each.default for each in dataclasses.fields(group)}
    flat.__signature__ = inspect.Signature([
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=types[name],
                          default=required if default is dataclasses.MISSING else default)
        for name, default in defaults.items()
    ])  # fmt: skip
    return flat


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import in this block without the garbage collector, and keep it away from what was imported until Python ends: it
    would go through all objects of PyTorch and timm again and again, which takes seconds."""
    first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            atexit.register(gc.unfreeze)  # or Triton reports its own objects as leaks
        gc.enable()


def complaints() -> tuple[list[str], Callable[[str], None]]:
    """The messages about single images so far, and a function that prints one and adds it."""
    failures: list[str] = []

    def complain(message: str) -> None:
        failures.append(message)
        echo(f"vitlens: {message}")

    return failures, complain


def echo(message: str, file: TextIO | None = None) -> None:
    """Print a line above the progress bar, to stderr by default."""
    from tqdm import tqdm

    tqdm.write(message, file=file or sys.stderr)
    (file or sys.stderr).flush()


def named_images(paths: list[Path] | None) -> list[tuple[str, object]]:
    """(name, source) of each image, or of the samples. Files that share a name are called by their whole path."""
    from vitlens.images import samples

    if not paths:
        return list(samples().items())
    files = [path.name for path in paths]
    return [(path.name if files.count(path.name) == 1 else str(path), path) for path in paths]


def comma_separated(text: str) -> tuple[str, ...]:
    """Split a text such as "a, b, c" into its names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def require(command: str, **options: object) -> None:
    """Raise ValueError for the first option that was not given. command: what needs it, such as "Training"."""
    for option, value in options.items():
        if not value:
            missing = "a name" if option == "name" else f"--{option}"
            listed = " Add --list to see what there is." if option in ("name", "recipe") else ""
            raise ValueError(f"{command} needs {missing}.{listed or ' Add --help to see all options.'}")


def only_with(flag: str, on: bool, **options: object) -> dict[str, object]:
    """Those of the options that were given. Raises ValueError if there are any without the flag that they need."""
    given = {name: value for name, value in options.items() if value is not None}
    if given and not on:
        raise ValueError(f"--{next(iter(given))} goes with --{flag}. Add --{flag}, or leave it out.")
    return given


def require_file(path: Path, option: str) -> None:
    """Make the folder of a file that is written at the end, and refuse the file now if it cannot be written."""
    if path.is_dir():
        raise ValueError(f"{option} must be a file, but {path} is a folder. Give another {option}.")
    writable(path.parent, option)
    path.parent.mkdir(parents=True, exist_ok=True)


def require_figure(path: Path, option: str) -> None:
    """The same as `require_file` for a figure, whose file type Matplotlib must know."""
    from matplotlib.figure import Figure

    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if not path.is_dir() and path.suffix[1:].lower() not in kinds:
        raise ValueError(f"{option} must end in a file type that Matplotlib writes ({', '.join(kinds)}), got {path}.")
    require_file(path, option)


def checked_device(name: str | None):
    """The `torch.device` of that name; None for None. Raises ValueError if there is none, or it does not work here."""
    if name is None:
        return None
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise ValueError(f"There is no device called {name!r}; the usual ones are cpu, cuda and mps.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"The device {name} was asked for, but PyTorch sees no CUDA GPU here; use --device cpu.")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"The device {name} does not work here ({reason}); use --device cpu.") from None
    return device
