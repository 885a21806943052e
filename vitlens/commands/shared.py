"""What several commands check in the same way, each with one sentence for what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from vitlens.files import writable


def complaints() -> tuple[list[str], Callable[[str], None]]:
    """Sentences about single pictures, and the function that says one and remembers it."""
    failures: list[str] = []

    def complain(sentence: str) -> None:
        failures.append(sentence)
        say(f"vitlens: {sentence}")

    return failures, complain


def say(sentence: str, file: TextIO | None = None) -> None:
    """Print a line, to stderr unless told otherwise, above whatever progress bar is on."""
    from tqdm import tqdm

    tqdm.write(sentence, file=file or sys.stderr)


def photographs(images: list[Path] | None) -> list[tuple[str, object]]:
    """(name, source) of the photographs given, or of the samples."""
    from vitlens.images import samples

    return [(_name(path, images), path) for path in images] if images else list(samples().items())


def require_file(path: Path, option: str) -> None:
    """Refuse before the work what could not be written after it."""
    if path.is_dir():
        raise ValueError(f"The results need a file, but {path} is a folder. Give another {option}.")
    writable(path.parent, option)


def _name(path: Path, among: list[Path]) -> str:
    """The file's name, or its whole path where two files have the same name."""
    return path.name if sum(other.name == path.name for other in among) == 1 else str(path)


def counted(pairs, bar):
    """The pairs, of each of which a bar is told once it is done with."""
    for pair in pairs:
        yield pair
        bar.update()


def checked_device(name: str):
    """The `torch.device` of that name. Raises ValueError for one that is none, or does not work here."""
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
