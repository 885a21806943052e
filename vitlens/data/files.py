"""Atomic writes and folder locks."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader finds the old content or the new, whatever happens."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself must reach the disk too
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder for this process in this block. Raises ValueError if another process has it."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"Another process is at work in {folder}. Wait for it, or give another folder.") from None
    try:
        yield
    finally:
        lock.release()


def writable(folder: Path, option: str) -> None:
    """Raise ValueError, which names the option, if a folder cannot be written to, or cannot be made."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as problem:
        raise ValueError(
            f"Results go to {folder}, which cannot be written to ({problem.strerror}); give another {option}."
        ) from problem


def announce(what: str, where: object) -> None:
    """Print what was stored where: "Fetched torch/cifar10 into …"."""
    print(f"{what} into {where}, to be kept there.", file=sys.stderr, flush=True)
