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
    """Write a file atomically, so that readers find either the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the rename must reach the disk too
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process in a block. Raises ValueError if another process has locked it."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"Another process is writing to {folder}. Wait for it, or give another folder."
        ) from None
    try:
        yield
    finally:
        lock.release()


def check_writable(folder: Path, option: str) -> None:
    """Raise ValueError that names the option if a folder cannot be created or written to."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as problem:
        raise ValueError(
            f"{folder} cannot be written to ({problem.strerror}). Give another {option}."
        ) from problem


def announce(action: str, folder: object) -> None:
    """Print where data was stored, as in "Downloaded torch/cifar10 into …"."""
    print(f"{action} into {folder}, where it stays.", file=sys.stderr, flush=True)
