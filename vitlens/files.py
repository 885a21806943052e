"""A file that is written is written whole; a folder that cannot be written to is told of beforehand."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` so that a reader finds the old file or the new one, whatever happens."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the rename itself must reach the disk too
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def writable(folder: Path, option: str) -> None:
    """Raise ``ValueError``, which names ``option``, if ``folder`` cannot be written to, or made where it is missing."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as problem:
        raise ValueError(
            f"What is found goes to {folder}, which cannot be written to ({problem.strerror}); give another {option}."
        ) from problem
